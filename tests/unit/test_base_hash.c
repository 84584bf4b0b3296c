/*
 * Digests: known XXH3-128 values (caches on disk are named by them), streaming, the block digest, hex.
 */
#include "testing.h"

#include "base/hash.h"
#include "base/mem.h"

static void assert_digest(struct digest d, const char *hex)
{
    char z[DIGEST_HEX_LEN + 1];
    digest_hex(d, z);
    assert_string_equal(z, hex);
}

/* Values of the reference implementation's shared library, 0.8.1. */
static void known_values_never_change(void **state)
{
    (void)state;
    assert_digest(hash_bytes("", 0), "99aa06d3014798d86001c324468d497f");
    assert_digest(hash_bytes(NULL, 0), "99aa06d3014798d86001c324468d497f");
    assert_digest(hash_bytes("a", 1), "a96faf705af16834e6c632b61e964e1f");
    assert_digest(hash_bytes("abc", 3), "06b05ab6733a618578af5f94892f3950");
    assert_digest(hash_bytes("pageflip serves weights that are bigger than memory", 51),
                  "61f5097d258e83130f8b198e2111cfee");
}

#define N_BIG (((size_t)9 << 20) + 5)

static unsigned char *big_new(void)
{
    unsigned char *p = mem_alloc(N_BIG);
    assert_non_null(p);
    for (size_t i = 0; i < N_BIG; i++)
        p[i] = (unsigned char)(i * 7 + (i >> 8));
    return p;
}

static void streaming_equals_one_shot(void **state)
{
    (void)state;
    unsigned char *p = big_new();
    assert_digest(hash_bytes(p, N_BIG), "1272da7ae1e1df2a0b7c96366f8ddf08");
    struct hasher *h = hasher_new();
    assert_non_null(h);
    struct rng r = {7};
    for (size_t off = 0; off < N_BIG;) {
        size_t n = rng_below(&r, 3000) * rng_below(&r, 60);
        n = n < N_BIG - off ? n : N_BIG - off;
        hasher_add(h, p + off, n);
        off += n;
    }
    assert_digest(hasher_digest(h), "1272da7ae1e1df2a0b7c96366f8ddf08");
    /* Asking does not change it */
    assert_digest(hasher_digest(h), "1272da7ae1e1df2a0b7c96366f8ddf08");
    hasher_add(h, "x", 1);
    assert_false(digest_eq(hasher_digest(h), hash_bytes(p, N_BIG)));
    hasher_reset(h);
    hasher_add(h, NULL, 0);
    assert_digest(hasher_digest(h), "99aa06d3014798d86001c324468d497f");
    hasher_free(h);
    hasher_free(NULL);
    mem_free(p);
}

static struct digest of_two(const char *a, size_t n_a, const char *b, size_t n_b)
{
    struct hasher *h = hasher_new();
    assert_non_null(h);
    hasher_add_str(h, a, n_a);
    hasher_add_str(h, b, n_b);
    struct digest d = hasher_digest(h);
    hasher_free(h);
    return d;
}

static struct digest of_double(double v)
{
    struct hasher *h = hasher_new();
    assert_non_null(h);
    hasher_add_double(h, v);
    struct digest d = hasher_digest(h);
    hasher_free(h);
    return d;
}

static void fields_have_a_fixed_layout(void **state)
{
    (void)state;
    assert_false(digest_eq(of_two("ab", 2, "c", 1), of_two("a", 1, "bc", 2)));
    assert_true(
        digest_eq(of_two("", 0, "a", 1), hash_bytes("\0\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0a", 17)));
    assert_true(digest_eq(of_double(0.0), of_double(-0.0)));
    assert_false(digest_eq(of_double(1.0), of_double(-1.0)));
    assert_true(digest_eq(of_double(1.0), hash_bytes("\0\0\0\0\0\0\xf0\x3f", 8)));
}

static void hex_goes_there_and_back(void **state)
{
    (void)state;
    struct digest d = {.hi = 0x0123456789abcdef, .lo = 0xfedcba9876543210}, back = {0};
    assert_digest(d, "0123456789abcdeffedcba9876543210");
    assert_true(digest_parse("0123456789abcdeffedcba9876543210", &back));
    assert_true(digest_eq(d, back));
    static const char *const bad[] = {"",
                                      "0123",
                                      "0123456789abcdeffedcba987654321",
                                      "0123456789abcdeffedcba98765432100",
                                      "0123456789ABCDEFFEDCBA9876543210",
                                      "0123456789abcdefgedcba9876543210",
                                      " 123456789abcdeffedcba9876543210"};
    for (size_t i = 0; i < PF_COUNTOF(bad); i++)
        assert_false(digest_parse(bad[i], &back));
    assert_true(digest_eq(d, back));
}

static void order_is_that_of_the_hex(void **state)
{
    (void)state;
    const struct digest d[] = {{0, 0}, {0, 1}, {0, UINT64_MAX}, {1, 0}, {UINT64_MAX, 0}};
    for (int i = 0; i < 5; i++)
        for (int k = 0; k < 5; k++)
            assert_int_equal(digest_cmp(d[i], d[k]), (i > k) - (i < k));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_values_never_change),  cmocka_unit_test(streaming_equals_one_shot),
        cmocka_unit_test(fields_have_a_fixed_layout), cmocka_unit_test(hex_goes_there_and_back),
        cmocka_unit_test(order_is_that_of_the_hex),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
