/*
 * Pictures that were asked for by url: files in a directory, with a budget and a lifetime. Names are random and the only key to a
 * file. A directory that was given may be shared: what other servers keep there can be read, what an earlier one left is taken
 * over. Thread-safe.
 */
#ifndef PF_SERVER_PICTURE_H
#define PF_SERVER_PICTURE_H

#include "base/err.h"
#include "base/str.h"

struct pictures;

struct pictures_opts {
    const char *dir; /* NULL: a new one under TMPDIR, removed at the end */
    uint64_t n_bytes_max;
    uint32_t seconds; /* lifetime */
};

int pictures_new(const struct pictures_opts *opts, struct pictures **out_pictures, pf_error *err);
void pictures_free(struct pictures *p); /* removes the directory, unless it was given */

#define PICTURE_NAME_BYTES 48
/* Keeps a PNG; the oldest go when the budget is used up. PF_E_RANGE: larger than the budget. PF_E_NOSPACE, PF_E_IO. */
int pictures_keep(struct pictures *p, const void *png, size_t n_bytes,
                  char out_name[PICTURE_NAME_BYTES], pf_error *err);
/* PF_E_NOTFOUND: never there, expired, or driven out. */
int pictures_read(struct pictures *p, const char *name, struct strbuf *out, pf_error *err);
void pictures_expire(struct pictures *p);
void pictures_count(struct pictures *p, uint32_t *out_n, uint64_t *out_n_bytes);

#endif
