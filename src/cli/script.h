/*
 * The language of `pageflip generate --script`: one line, one step. Words are separated by blanks; '...' and "..." hold blanks,
 * a backslash makes the next character plain, # begins a comment. Parsing only: nothing is opened, and nothing is looked up.
 *
 *     load NAME=PATH | unload NAME
 *     set NAME[:STRENGTH][,alpha=A][,target=C] ... [target=T] [merge-dtype=D] [way=W] [allow-unmatched]
 *     merge [FACTOR] [target=T] | unmerge [target=T] | deactivate [target=T]
 *     generate OPTIONS... [&] | wait | status | settle
 */
#ifndef PF_CLI_SCRIPT_H
#define PF_CLI_SCRIPT_H

#include "base/str.h"
#include "cli/lora_spec.h"

#define SCRIPT_LINE_MAX 65536

enum script_op {
    SCRIPT_NOTHING, /* blank, or a comment */
    SCRIPT_LOAD,
    SCRIPT_UNLOAD,
    SCRIPT_SET,
    SCRIPT_MERGE,
    SCRIPT_UNMERGE,
    SCRIPT_DEACTIVATE,
    SCRIPT_GENERATE,
    SCRIPT_WAIT,
    SCRIPT_STATUS,
    SCRIPT_SETTLE,
};

/* One line. What is not of the operation is zero. Strings live as long as it. */
struct script_line {
    enum script_op op;
    char *text;   /* all words, each NUL-terminated */
    char **words; /* n_words of them and NULL; the first names the operation */
    size_t n_words;
    bool is_background;                     /* generate */
    const char *name, *path;                /* load, unload */
    const char *target, *way, *merge_dtype; /* NULL: not said */
    bool allow_unmatched;
    double factor; /* merge; 1 unless said */
    /* Set: n_specs; path is a nickname, a path, or a bundled adapter's name */
    struct lora_spec *specs;
    size_t n_specs;
};

/* text: one line without its end. PF_E_INVALID, PF_E_NOMEM. Owned by caller: script_line_release. */
int script_parse(struct str text, struct script_line *out, pf_error *err);
void script_line_release(struct script_line *line);
const char *script_op_name(enum script_op op);

#endif
