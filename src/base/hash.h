/*
 * Content digests: XXH3-128 behind our own types; xxhash.h is included by hash.c alone. Fast, not cryptographic:
 * SECURITY.md says what that means.
 */
#ifndef PF_BASE_HASH_H
#define PF_BASE_HASH_H

#include "base/err.h"

struct digest {
    uint64_t hi, lo;
};
#define DIGEST_HEX_LEN   32
#define HASH_BLOCK_BYTES ((size_t)4 << 20)

struct digest hash_bytes(const void *p, size_t n_bytes);
bool digest_eq(struct digest a, struct digest b);
int digest_cmp(struct digest a, struct digest b); /* hi first */
void digest_hex(struct digest d, char out[DIGEST_HEX_LEN + 1]);
/* Exactly 32 lower-case hex digits and NUL */
bool digest_parse(const char *hex, struct digest *out);

/* Streaming. Integers are fed little endian with a fixed width, strings with their length first: no two inputs collide by layout. */
struct hasher;
struct hasher *hasher_new(void); /* NULL: out of memory */
void hasher_free(struct hasher *h);
void hasher_reset(struct hasher *h);
void hasher_add(struct hasher *h, const void *p, size_t n_bytes);
void hasher_add_u64(struct hasher *h, uint64_t v);
void hasher_add_double(struct hasher *h, double v); /* its bits; -0 as +0 */
void hasher_add_str(struct hasher *h, const char *p, size_t n);
struct digest hasher_digest(const struct hasher *h);

#endif
