/*
 * Memory: overflow checks at their borders, zero-sized requests, growth, arenas.
 */
#include "testing.h"

#include "base/mem.h"

static void products_and_sums_are_checked(void **state)
{
    (void)state;
    size_t s = 77;
    uint64_t u = 77;
    assert_true(mul_size(SIZE_MAX / 2, 2, &s) && s == SIZE_MAX - 1);
    assert_true(mul_size(SIZE_MAX, 0, &s) && s == 0);
    assert_true(mul_size(0, SIZE_MAX, &s) && s == 0);
    s = 77;
    assert_false(mul_size(SIZE_MAX / 2 + 1, 2, &s));
    assert_false(mul_size(SIZE_MAX, SIZE_MAX, &s));
    assert_int_equal(s, 77);
    assert_true(add_size(SIZE_MAX - 1, 1, &s) && s == SIZE_MAX);
    assert_false(add_size(SIZE_MAX, 1, &s));
    assert_true(mul_u64(1ull << 63, 1, &u) && u == 1ull << 63);
    assert_true(mul_u64(UINT32_MAX, UINT32_MAX, &u) && u == 0xfffffffe00000001u);
    u = 77;
    assert_false(mul_u64(1ull << 63, 2, &u));
    assert_false(mul_u64(1ull << 32, 1ull << 32, &u));
    assert_false(add_u64(UINT64_MAX, 1, &u));
    assert_int_equal(u, 77);
    assert_true(add_u64(UINT64_MAX, 0, &u) && u == UINT64_MAX);
}

static void zero_bytes_are_a_valid_request(void **state)
{
    (void)state;
    void *a = mem_alloc(0), *b = mem_calloc(0, 8), *c = mem_realloc_array(NULL, 0, 4),
         *d = mem_aligned(64, 0);
    assert_non_null(a);
    assert_non_null(b);
    assert_non_null(c);
    assert_non_null(d);
    c = mem_realloc_array(c, 0, 4);
    assert_non_null(c); /* not freed behind our back */
    mem_free(a);
    mem_free(b);
    mem_free(c);
    mem_free(d);
    mem_free(NULL);
}

static void absurd_sizes_are_refused(void **state)
{
    (void)state;
    volatile size_t huge = SIZE_MAX; /* volatile: compilers warn about what is tested here */
    char *p = mem_alloc(4);
    assert_non_null(p);
    assert_null(mem_alloc(huge));
    assert_null(mem_alloc((size_t)PTRDIFF_MAX + 1 + (huge & 1) - 1));
    assert_null(mem_calloc(huge, 2));
    assert_null(mem_calloc(huge / 2 + 1, 2));
    assert_null(mem_realloc_array(p, huge, 3));
    assert_null(mem_aligned(64, huge));
    assert_null(mem_strndup("abc", huge));
    memcpy(p, "abc", 4); /* a refused realloc keeps it */
    mem_free(p);
}

static void memory_is_cleared_or_aligned_as_promised(void **state)
{
    (void)state;
    unsigned char *p = mem_calloc(1000, 3);
    assert_non_null(p);
    for (size_t i = 0; i < 3000; i++)
        assert_int_equal(p[i], 0);
    mem_free(p);
    for (size_t align = 1; align <= 4096; align *= 2) {
        p = mem_aligned(align, 100);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % align, 0);
        memset(p, 1, 100);
        mem_free(p);
    }
}

static void strings_are_copied_with_a_terminator(void **state)
{
    (void)state;
    char *a = mem_strdup("tensor"), *b = mem_strndup("tensor", 3), *c = mem_strndup("a\0b", 3),
         *d = mem_strndup(NULL, 0);
    assert_string_equal(a, "tensor");
    assert_string_equal(b, "ten");
    assert_memory_equal(c, "a\0b", 4);
    assert_string_equal(d, "");
    mem_free(a);
    mem_free(b);
    mem_free(c);
    mem_free(d);
}

static void grow_doubles_and_keeps_items(void **state)
{
    (void)state;
    uint32_t *items = NULL;
    size_t capacity = 0, n_grown = 0;
    for (uint32_t n = 0; n < 10000; n++) {
        size_t before = capacity;
        assert_true(mem_grow((void **)&items, &capacity, n, sizeof(*items)));
        assert_true(capacity > n);
        n_grown += before != capacity;
        items[n] = n;
    }
    assert_true(n_grown < 16);
    for (uint32_t n = 0; n < 10000; n++)
        assert_int_equal(items[n], n);
    void *before = items;
    size_t capacity_before = capacity;
    assert_false(mem_grow((void **)&items, &capacity, capacity, SIZE_MAX / 4));
    assert_ptr_equal(items, before);
    assert_int_equal(capacity, capacity_before);
    size_t full = SIZE_MAX;
    assert_false(mem_grow((void **)&items, &full, SIZE_MAX, 1));
    mem_free(items);
}

static void arena_pieces_are_aligned_cleared_and_apart(void **state)
{
    (void)state;
    static const size_t sizes[] = {0, 1, 15, 16, 17, 1000, 5000, 70000, 1, 300000, 3, 4096};
    struct arena a;
    struct rng r = {1};
    arena_init(&a);
    unsigned char *pieces[600];
    size_t n_pieces[600], n_total = 0;
    for (size_t i = 0; i < 600; i++) {
        n_pieces[i] = i < PF_COUNTOF(sizes) ? sizes[i] : rng_below(&r, 400);
        pieces[i] = arena_alloc(&a, n_pieces[i]);
        assert_non_null(pieces[i]);
        assert_int_equal((uintptr_t)pieces[i] % 16, 0);
        for (size_t k = 0; k < n_pieces[i]; k++)
            assert_int_equal(pieces[i][k], 0);
        memset(pieces[i], (int)(i % 255) + 1, n_pieces[i]);
        n_total += n_pieces[i];
    }
    for (size_t i = 0; i < 600; i++)
        for (size_t k = 0; k < n_pieces[i]; k++)
            assert_int_equal(pieces[i][k], i % 255 + 1);
    assert_true(a.n_bytes >= n_total && a.n_bytes <= n_total + 600 * 16);
    arena_release(&a);
    assert_null(a.head);
    assert_int_equal(a.n_bytes, 0);
    arena_release(&a); /* twice is fine */
}

static void arena_refuses_absurd_sizes_and_lives_on(void **state)
{
    (void)state;
    struct arena a;
    arena_init(&a);
    assert_null(arena_alloc(&a, SIZE_MAX));
    assert_null(arena_alloc(&a, SIZE_MAX - 15));
    assert_null(arena_alloc(&a, SIZE_MAX - 40));
    assert_null(arena_strndup(&a, "x", SIZE_MAX));
    char *s = arena_strndup(&a, "a\0bc", 3);
    assert_memory_equal(s, "a\0b", 4);
    assert_string_equal(arena_strndup(&a, NULL, 0), "");
    arena_release(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_and_sums_are_checked),
        cmocka_unit_test(zero_bytes_are_a_valid_request),
        cmocka_unit_test(absurd_sizes_are_refused),
        cmocka_unit_test(memory_is_cleared_or_aligned_as_promised),
        cmocka_unit_test(strings_are_copied_with_a_terminator),
        cmocka_unit_test(grow_doubles_and_keeps_items),
        cmocka_unit_test(arena_pieces_are_aligned_cleared_and_apart),
        cmocka_unit_test(arena_refuses_absurd_sizes_and_lives_on),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
