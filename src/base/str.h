/*
 * Strings: a growing buffer with sticky failure, and the few searches that names need. Foreign bytes always come
 * with a length; nothing here calls strlen on them.
 */
#ifndef PF_BASE_STR_H
#define PF_BASE_STR_H

#include "base/compiler.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A slice of somebody else's bytes. Not NUL-terminated. */
struct str {
    const char *p;
    size_t n;
};
struct str str_of(const char *z); /* of a C string */
bool str_eq(struct str a, struct str b);
bool str_eqz(struct str a, const char *z);
bool str_starts(struct str s, const char *z_prefix);
bool str_ends(struct str s, const char *z_suffix);
struct str str_cut_front(struct str s, size_t n); /* without the first n bytes (n <= s.n) */
struct str str_cut_back(struct str s, size_t n);
int str_cmp(struct str a, struct str b); /* bytes, then length: memcmp order */
/* Numbers inside names compare as numbers: "blocks.2" before "blocks.10". */
int str_cmp_natural(struct str a, struct str b);
/* Parses a whole slice as a decimal number: no sign, no space; false on overflow or anything else. */
bool str_to_u64(struct str s, uint64_t *out);
/* strtod on a bounded copy, "C" locale spelling, whole slice; accepts nan/inf (the caller decides). */
bool str_to_double(struct str s, double *out);
/* Damerau-free edit distance, capped: returns cap + 1 when larger. O(cap * n). */
size_t str_distance(struct str a, struct str b, size_t cap);
/* Strict: no overlongs, no surrogates, <= U+10FFFF */
bool str_is_utf8(struct str s, size_t *out_off_bad);

/* Replaces control bytes by '?': names from files are printed on terminals and in logs. */
void str_tame(char *p, size_t n);

/* Growing text. After a failed allocation every call is a no-op and strbuf_ok is false: check once at the end. */
struct strbuf {
    char *p; /* NUL-terminated once anything was added; NULL before */
    size_t n, cap;
    bool is_failed;
};
void strbuf_init(struct strbuf *b);
void strbuf_release(struct strbuf *b);
void strbuf_clear(struct strbuf *b); /* keeps the memory */
void strbuf_add(struct strbuf *b, const char *p, size_t n);
void strbuf_adds(struct strbuf *b, const char *z);
void strbuf_addf(struct strbuf *b, const char *fmt, ...) PF_PRINTF(2, 3);
bool strbuf_ok(const struct strbuf *b);
const char *strbuf_z(const struct strbuf *b); /* "" when empty; never NULL */
char *strbuf_take(struct strbuf *b);          /* the caller owns it (mem_free); NULL when failed */

#endif
