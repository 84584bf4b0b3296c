/*
 * Content digests. The only file that sees xxhash.h, and it sees all of it: the algorithm is compiled in, so that the
 * streaming state may live in our own structs whatever version of the shared library a system has. XXH3's results are fixed
 * by its specification; a test pins known ones, for caches on disk are named by them.
 */
#include "base/hash.h"

#include "base/mem.h"

#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

struct hasher {
    XXH3_state_t state; /* wants 64-byte alignment */
};

static struct digest of_xxh(XXH128_hash_t h)
{
    return (struct digest){.hi = h.high64, .lo = h.low64};
}

static void store_le64(unsigned char out[8], uint64_t v)
{
    for (unsigned i = 0; i < 8; i++)
        out[i] = (unsigned char)(v >> (8 * i));
}

struct digest hash_bytes(const void *p, size_t n_bytes)
{
    return of_xxh(XXH3_128bits(p, n_bytes));
}

bool digest_eq(struct digest a, struct digest b)
{
    return a.hi == b.hi && a.lo == b.lo;
}

int digest_cmp(struct digest a, struct digest b)
{
    if (a.hi != b.hi)
        return a.hi < b.hi ? -1 : 1;
    return (a.lo > b.lo) - (a.lo < b.lo);
}

void digest_hex(struct digest d, char out[DIGEST_HEX_LEN + 1])
{
    static const char digits[] = "0123456789abcdef";
    for (unsigned i = 0; i < 16; i++) {
        out[i] = digits[d.hi >> (60 - 4 * i) & 15];
        out[16 + i] = digits[d.lo >> (60 - 4 * i) & 15];
    }
    out[DIGEST_HEX_LEN] = '\0';
}

bool digest_parse(const char *hex, struct digest *out)
{
    uint64_t half[2] = {0, 0};
    for (unsigned i = 0; i < DIGEST_HEX_LEN; i++) {
        char c = hex[i];
        unsigned v;
        if (c >= '0' && c <= '9')
            v = (unsigned)(c - '0');
        else if (c >= 'a' && c <= 'f')
            v = (unsigned)(c - 'a') + 10;
        else
            return false; /* the end of the string, too */
        half[i / 16] = half[i / 16] << 4 | v;
    }
    if (hex[DIGEST_HEX_LEN] != '\0')
        return false;
    *out = (struct digest){.hi = half[0], .lo = half[1]};
    return true;
}

/* --------------------------------------------------------------------------------------------- streaming */

struct hasher *hasher_new(void)
{
    struct hasher *h = mem_aligned(64, sizeof(*h));
    if (h != NULL)
        hasher_reset(h);
    return h;
}

void hasher_free(struct hasher *h)
{
    mem_free(h);
}

void hasher_reset(struct hasher *h)
{
    memset(h, 0, sizeof(*h));            /* XXH3_128bits_reset reads fields of a fresh state */
    (void)XXH3_128bits_reset(&h->state); /* fails for NULL only */
}

void hasher_add(struct hasher *h, const void *p, size_t n_bytes)
{
    if (n_bytes > 0)
        (void)XXH3_128bits_update(&h->state, p, n_bytes); /* fails for NULL only */
}

void hasher_add_u64(struct hasher *h, uint64_t v)
{
    unsigned char le[8];
    store_le64(le, v);
    hasher_add(h, le, sizeof(le));
}

void hasher_add_double(struct hasher *h, double v)
{
    uint64_t bits;
    if (v == 0)
        v = 0; /* -0 compares equal */
    memcpy(&bits, &v, sizeof(bits));
    hasher_add_u64(h, bits);
}

void hasher_add_str(struct hasher *h, const char *p, size_t n)
{
    hasher_add_u64(h, n);
    hasher_add(h, p, n);
}

struct digest hasher_digest(const struct hasher *h)
{
    return of_xxh(XXH3_128bits_digest(&h->state));
}
