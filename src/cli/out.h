/*
 * Everything that the command says. Results go to standard output, either as aligned text or as one JSON document; chat goes
 * to standard error. Text that comes from files (keys, metadata) is cleaned of control characters before it
 * reaches a terminal. Passed down to every command; one thread.
 */
#ifndef PF_CLI_OUT_H
#define PF_CLI_OUT_H

#include "base/err.h"
#include "base/json.h"
#include "base/str.h"
#include <stdarg.h>

enum { EXIT_STATUS_OK = 0, EXIT_STATUS_FAILED = 1, EXIT_STATUS_USAGE = 2 };

struct out {
    const char *command; /* for "see 'pageflip merge --help'"; NULL before it is known */
    bool is_json, is_quiet;
};

/* Columns of the terminal behind fd; 100 when it is none, so that files and pipes are not cut to a window. */
unsigned out_width(int fd);

/* "label        text", the text wrapped with a hanging indent when standard output is a terminal. Not with --json. */
void out_field(const struct out *o, const char *label, const char *fmt, ...) PF_PRINTF(3, 4);
/* A sentence on standard error: "pageflip: warning: ...". Nothing with --quiet. */
void out_warn(const struct out *o, const char *fmt, ...) PF_PRINTF(2, 3);
/* Worth knowing, nothing wrong */
void out_note(const struct out *o, const char *fmt, ...) PF_PRINTF(2, 3);
/* Writes and frees the document. The exit status: ok, or failed when it could not be built. */
int out_json(const struct out *o, struct json *doc);
/* The same as one line, flushed: for results of which there are many. */
int out_json_line(const struct out *o, struct json *doc);

/* The error in one sentence on standard error and, with --json, as an object on standard output. The exit status. */
int out_fail(const struct out *o, const pf_error *err);
int out_usage(const struct out *o, const char *fmt, ...) PF_PRINTF(2, 3);
int out_interrupted(const struct out *o, const char *fmt, ...) PF_PRINTF(2, 3);
/* Flushes standard output; a failed write turns a good status into a failed one. */
int out_finish(const struct out *o, int status);

/* "1.2 GB" (powers of 1000) into the caller's 16 bytes; returns text. */
const char *out_bytes(double n_bytes, char text[16]);
/* "12.3 MiB": memory is counted in powers of 1024. */
const char *out_mib(uint64_t n_bytes, char text[16]);
/* Adds text without control characters and broken UTF-8: '?' stands for each such byte. */
void out_clean(struct strbuf *b, struct str text);

/* A table: rows of cells, printed with aligned columns. The first column is shortened in the middle when a terminal is too narrow. */
#define TABLE_COLS_MAX 8
struct table {
    char **cells; /* n_cols per row; the first row is the head */
    size_t n_cols, n_cells, cap;
    unsigned right; /* bit i: column i is aligned to the right */
    bool is_failed;
};
void table_init(struct table *t, size_t n_cols, unsigned right);
void table_cell(struct table *t, const char *fmt, ...) PF_PRINTF(2, 3);
void table_print(const struct table *t, const char *indent);
void table_release(struct table *t);

#endif
