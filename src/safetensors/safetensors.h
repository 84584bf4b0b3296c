/*
 * One .safetensors file, read strictly: the header is scanned where it is mapped, nothing is copied but escaped names, no
 * allocation per value. What the reference accepts and we do not: duplicate keys of any kind. What it rejects, we reject,
 * with the byte offset. Called by checkpoint (bases) and adapter (factors): one parser, one set of messages, for both.
 */
#ifndef PF_SAFETENSORS_SAFETENSORS_H
#define PF_SAFETENSORS_SAFETENSORS_H

#include "base/file.h"
#include "base/str.h"
#include "tensor/shape.h"

#define ST_HEADER_MAX 100000000u

struct st_tensor {
    struct str name; /* decoded UTF-8; borrowed from the file */
    int32_t dtype;   /* PF_* */
    struct shape shape;
    uint64_t off_bytes; /* absolute, in the file */
    uint64_t n_bytes;
};

struct st_meta {
    struct str key, value; /* decoded */
};

/* Immutable after open; shared by threads. */
struct st_file;

/* PF_E_FORMAT (off set), PF_E_NOTFOUND, PF_E_IO, PF_E_TRUNCATED, PF_E_NOMEM. Messages begin with the quoted path. */
int st_open(const char *path, struct st_file **out_file, pf_error *err);
void st_close(struct st_file *f);

const char *st_path(const struct st_file *f);
const struct file_map *st_map(const struct st_file *f);
uint64_t st_header_bytes(const struct st_file *f); /* 8 + N: where data begins */
size_t st_n_tensors(const struct st_file *f);
const struct st_tensor *st_tensor(const struct st_file *f, size_t i); /* sorted by file offset */
/* O(log n) or better; NULL: absent */
const struct st_tensor *st_find(const struct st_file *f, struct str name);
/* Mapped, unaligned; valid pointer even for 0 bytes */
const void *st_data(const struct st_file *f, const struct st_tensor *t);
size_t st_n_meta(const struct st_file *f);
const struct st_meta *st_meta(const struct st_file *f, size_t i); /* file order */
bool st_meta_find(const struct st_file *f, const char *key, struct str *out_value);

/* The scanner alone, on bytes: what st_open and the fuzz target call. n_file is the size of the whole file that p begins;
 * p holds at least the first min(n_file, 8 + N) bytes and stays valid as long as the result. */
struct st_header;
int st_header_parse(const uint8_t *p, size_t n_p, uint64_t n_file, const char *what,
                    struct st_header **out, pf_error *err);
void st_header_free(struct st_header *h);
size_t st_header_n_tensors(const struct st_header *h);
const struct st_tensor *st_header_tensor(const struct st_header *h, size_t i);
const struct st_tensor *st_header_find(const struct st_header *h, struct str name);
size_t st_header_n_meta(const struct st_header *h);
const struct st_meta *st_header_meta(const struct st_header *h, size_t i);

/* ------------------------------------------------------------------------------------------------ writing */

/* Lays a file out: names and shapes first, then the data in any order by file_pwrite at the offsets given. */
struct st_layout;
int st_layout_new(struct st_layout **out, pf_error *err);
void st_layout_free(struct st_layout *l);
int st_layout_meta(struct st_layout *l, struct str key, struct str value, pf_error *err);
/* Data follows in the order of these calls. PF_E_INVALID for a name used twice or "__metadata__". */
int st_layout_tensor(struct st_layout *l, struct str name, int32_t dtype, const struct shape *shape,
                     pf_error *err);
/* Header bytes (8 + N, space-padded so that data starts at a multiple of `align`; 4096 for overlays and merges) and, in file
 * order of the calls, absolute offsets. */
int st_layout_finish(struct st_layout *l, size_t align, struct strbuf *out_header, pf_error *err);
uint64_t st_layout_offset(const struct st_layout *l, size_t i);
uint64_t st_layout_file_bytes(const struct st_layout *l);

#endif
