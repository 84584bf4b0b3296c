/*
 * What the files of this module share: the bounded JSON scanner that walks a mapped header, and the sort that finds
 * duplicates and file order. Nothing outside src/safetensors (and its tests) includes this.
 *
 * The bytes under a scanner may change while it runs (the file is mapped, somebody may write to it): every access is
 * checked against n at the moment it is made, and no decision about memory rests on a count made earlier.
 */
#ifndef PF_SAFETENSORS_ST_INT_H
#define PF_SAFETENSORS_ST_INT_H

#include "base/mem.h"
#include "safetensors/safetensors.h"
#include "tensor/dtype.h"

#define ST_PREFIX_BYTES 8u   /* the little-endian length before the header */
#define SCAN_DEPTH_MAX  128u /* of values that are skipped */
#define SCAN_QUOTE_MAX  200u /* bytes of a foreign name that an error repeats */

/* An object key, decoded, and where its opening quote stands (in the header, without the 8 bytes before it). */
struct scan_key {
    struct str name;
    uint32_t at;
};

/* One thread, one header. `keys` is a stack: the keys of the objects that are open now, checked for duplicates and dropped
 * when their object ends. `order` is scratch for sorting them. */
struct scan {
    const uint8_t *p;
    size_t n, i;
    const char *what;  /* the path, for messages */
    struct str tensor; /* whose value is being read; p NULL: none */
    pf_error *err;
    struct arena *arena; /* decoded strings that held escapes */
    struct scan_key *keys;
    size_t n_keys, cap_keys;
    uint32_t *order;
    size_t cap_order;
};

void scan_release(struct scan *s);

/* "'path': tensor 'name': <text>", off = 8 + at. Returns code. */
int scan_fail(const struct scan *s, int code, size_t at, const char *fmt, ...) PF_PRINTF(4, 5);

/* Skips white space and takes c, or fails with PF_E_FORMAT "expected <name>, found ...". */
int scan_take(struct scan *s, char c, const char *name);
/* The next byte after white space; -1 at the end of the header. */
int scan_peek(struct scan *s);
/* A string: points into the header, or into the arena when it held escapes. */
int scan_string(struct scan *s, struct str *out);
/* An unsigned integer, exact: no sign, fraction, exponent or leading zero. what: "shape". */
int scan_u64(struct scan *s, const char *what, uint64_t *out);
/* Any value, checked and dropped. */
int scan_skip(struct scan *s);
/* After '{', and after each value: the next key and its colon (true), or the end of the object (false). */
int scan_next_key(struct scan *s, bool is_first, bool *out_more, struct scan_key *out_key);
/* After '[', and after each item: is there another? */
int scan_next_item(struct scan *s, bool is_first, bool *out_more);
int scan_push_key(struct scan *s, const struct scan_key *key);
/* Fails when two keys above `frame` are equal, else drops them. */
int scan_pop_keys(struct scan *s, size_t frame);

/* A name from a file, made fit for a message: cut, control characters replaced. Returns buf. */
const char *scan_quote(struct str name, char buf[SCAN_QUOTE_MAX + 8]);

/* Stable merge sort of idx by cmp; tmp holds n. O(n) comparisons when idx is in order already, O(n log n) at worst. */
typedef int (*sort_cmp)(const void *ctx, uint32_t a, uint32_t b);
void sort_u32(uint32_t *idx, uint32_t *tmp, size_t n, sort_cmp cmp, const void *ctx);

/* The second half of st_open, for tests that shrink a file between the two. Takes the map over, also when it fails. */
int st_open_mapped(const struct file_map *map, const char *path, struct st_file **out_file,
                   pf_error *err);

#endif
