/*
 * What `pageflip generate` can be told, as one table for the command and for the `generate` lines of its scripts: options that
 * speak of a picture come first, and a line knows only those.
 */
#ifndef PF_CLI_GENERATE_OPTS_H
#define PF_CLI_GENERATE_OPTS_H

#include "cli/option.h"

/* A picture, or a sheet of them. */
struct picture_args {
    const char *merge_dtype, *prompt, *output;
    struct arg_list loras;
    struct arg_int class, n, seed, steps, threads, zoom, batch;
    struct arg_real guidance;
    bool grid, allow_unmatched;
};

/* How the weights are served. */
struct serving_args {
    const char *way, *cache_dir;
    struct arg_int cache_budget, host_memory, resident;
    struct arg_real build_delay;
};

struct generate_args {
    struct common_args common;
    struct picture_args picture;
    const char *model, *script;
    bool keep_going;
    struct serving_args serving;
};

enum { N_PICTURE_OPTS = 14, N_GENERATE_OPTS = 23 };
extern const struct opt generate_opts[N_GENERATE_OPTS];
/* A `generate` line of a script: the options of a picture. Not in the table of commands. */
extern const struct command script_generate;

/* What the tables cannot say about combinations of options, as a sentence; NULL: fine. */
const char *picture_check(const struct picture_args *picture);
const char *generate_check(const struct generate_args *args);

/* PF_WAY_* and PF_MERGE_* by their names; NULL is auto, and base. */
int32_t way_by_name(const char *name);
/* Of --build-delay, in seconds. NULL: fine */
const char *build_delay_check(const struct arg_real *delay);
int64_t build_delay_ms(const struct arg_real *delay); /* 0: not said */
int32_t merge_dtype_by_name(const char *name);

#endif
