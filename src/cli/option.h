/*
 * Option tables. One table per command drives everything that speaks of its options: parsing, --help, shell completion, and
 * the test that compares the man page with them. A value lands in the command's own args struct at the offset that the table
 * gives, so a command reads plain fields. Every args struct begins with struct common_args.
 */
#ifndef PF_CLI_OPTION_H
#define PF_CLI_OPTION_H

#include "base/err.h"
#include <stddef.h>

/* Beside each: its field in the args struct. */
enum opt_type {
    OPT_FLAG,   /* bool */
    OPT_STRING, /* const char *, borrowed from argv; OPT_FILE, OPT_MODEL and OPT_CHOICE too */
    OPT_FILE,   /* completed as a path */
    OPT_MODEL,  /* completed as a path */
    OPT_CHOICE, /* one of `choices` */
    OPT_LORA,   /* struct arg_list: a path or a bundled adapter's name, with its suffixes */
    OPT_TEXTS,  /* struct arg_list: anything */
    OPT_FILES,  /* the same, completed as a path */
    OPT_INT,    /* struct arg_int, between min and max */
    OPT_SIZE, /* struct arg_int: bytes, "512M" or "4GiB" in powers of 1024, "4GB" in powers of 1000 */
    OPT_REAL, /* struct arg_real, finite */
    OPT_PART  /* struct arg_part, "i/n", 1 <= i <= n, or "auto" */
};

struct arg_list {
    const char **v; /* borrowed strings in an array of ours */
    size_t n;
};
struct arg_int {
    bool is_set;
    uint64_t v;
};
struct arg_real {
    bool is_set;
    double v;
};
struct arg_part {
    uint32_t i, n; /* i counts from 1; n 0: not given */
    bool is_auto;  /* the launcher says, see launcher.h */
};

struct common_args {
    bool json, quiet, verbose, help;
};

struct opt {
    const char *name; /* without dashes */
    char short_name;  /* 0: none */
    enum opt_type type;
    const char *arg; /* shown in help; NULL for a flag */
    const char *help;
    size_t off;
    const char *choices; /* OPT_CHOICE: "base|f32" */
    uint64_t min, max;   /* OPT_INT; max 0: 2^64 - 1 */
    bool is_required;
};

struct operand {
    const char *name;
    const char *help;
    enum opt_type type; /* for completion; the field is const char * */
    size_t off;
    bool is_required;
};

struct out;
struct command {
    const char *name;     /* "merge", "bench make" */
    const char *summary;  /* one line, lower case */
    const char *synopsis; /* what follows the name in the usage line */
    const char *detail;   /* paragraphs for --help */
    const struct opt *opts;
    size_t n_opts;
    const struct operand *operands;
    size_t n_operands;
    size_t args_bytes;
    int (*run)(struct out *o, const void *args); /* the exit status */
};

extern const struct opt common_opts[];
extern const size_t n_common_opts;

/* Fills args (args_bytes of zeros) from argv[1..]; argv[0] is skipped. PF_E_INVALID with the sentence for the user. Required
 * options and operands are checked unless --help is there. */
int args_parse(const struct command *cmd, int argc, char **argv, void *args, pf_error *err);
void args_release(const struct command *cmd, void *args);

/* The nearest of n names to `word`, or NULL when none is near enough to be meant. */
const char *near_name(const char *word, const char *const *names, size_t n);
/* May it be given more than once? Its field is a list then. */
bool opt_is_list(const struct opt *opt);
/* The i-th option of a command, its own first, then the common ones; NULL past the end. */
const struct opt *command_opt(const struct command *cmd, size_t i);

#endif
