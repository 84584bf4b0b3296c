/*
 * The list of commands, in the order in which help shows them, and what main.c and the scripts generated from the tables
 * need to know about it.
 */
#ifndef PF_CLI_COMMAND_H
#define PF_CLI_COMMAND_H

#include "cli/option.h"
#include "cli/out.h"

extern const struct command cmd_inspect, cmd_plan, cmd_merge, cmd_generate, cmd_serve;
extern const struct command cmd_cache_list, cmd_cache_verify, cmd_cache_evict, cmd_cache_clear,
    cmd_cache_path;
extern const struct command cmd_help, cmd_completion;
extern const struct command cmd_bench_make, cmd_bench_merge, cmd_bench_read, cmd_bench_memory,
    cmd_bench_stream, cmd_bench_switch;

/* The i-th command, or NULL past the end. */
const struct command *command_at(size_t i);
/* The command that argv[0..] names, of one word or two; *out_n_words of them. PF_E_NOTFOUND with the sentence for the user. */
int command_find(int argc, char **argv, const struct command **out_cmd, int *out_n_words,
                 pf_error *err);

/* Help of everything, or of one command, on standard output. */
void help_overview(void);
void help_command(const struct command *cmd);

#endif
