/*
 * The layout writer: what it lays out, the reader reads back; alignment; names that may not be; and no size that overflows gets
 * through.
 */
#include "st_testing.h"

static struct shape shape_of(int32_t rank, int64_t a, int64_t b, int64_t c)
{
    struct shape s = {.rank = rank, .dim = {a, b, c}};
    return s;
}

static struct st_layout *layout(void)
{
    struct st_layout *l = NULL;

    assert_int_equal(st_layout_new(&l, NULL), PF_OK);
    return l;
}

static int add(struct st_layout *l, const char *name, int32_t dtype, struct shape s, pf_error *err)
{
    return st_layout_tensor(l, str_of(name), dtype, &s, err);
}

/* The header of l, followed by as many zero bytes as it says, read back. */
static struct st_header *read_back(struct st_layout *l, size_t align, struct strbuf *bytes)
{
    struct st_header *h = NULL;
    pf_error err = {0};

    strbuf_init(bytes);
    if (st_layout_finish(l, align, bytes, &err) != PF_OK ||
        st_header_parse((const uint8_t *)bytes->p, bytes->n, st_layout_file_bytes(l), "f", &h,
                        &err) != PF_OK)
        fail_msg("%s", err.msg);
    return h;
}

static void what_is_laid_out_is_read_back(void **state)
{
    static const size_t aligns[] = {1, 2, 8, 64, 256, 4096, 100};
    static const char odd_name[] = "q\"b\\s\x01\x1f/\xc3\xa9\xf0\x9f\x98\x80";
    size_t i, k;
    (void)state;

    for (i = 0; i < PF_COUNTOF(aligns); i++) {
        struct st_layout *l = layout();
        struct strbuf b;
        struct st_header *h;
        uint64_t end;

        assert_int_equal(st_layout_meta(l, str_of("format"), str_of("pt"), NULL), PF_OK);
        assert_int_equal(st_layout_meta(l, str_of(odd_name), (struct str){"a\0\n", 3}, NULL),
                         PF_OK);
        assert_int_equal(st_layout_meta(l, str_of(""), (struct str){NULL, 0}, NULL), PF_OK);
        assert_int_equal(add(l, "z", PF_F32, shape_of(2, 3, 5, 0), NULL), PF_OK);
        assert_int_equal(add(l, odd_name, PF_U8, shape_of(1, 3, 0, 0), NULL), PF_OK);
        assert_int_equal(add(l, "empty", PF_BF16, shape_of(3, 2, 0, 7), NULL), PF_OK);
        assert_int_equal(add(l, "", PF_F64, shape_of(0, 0, 0, 0), NULL), PF_OK);
        assert_int_equal(add(l, "f4", PF_F4, shape_of(2, 3, 2, 0), NULL), PF_OK);
        h = read_back(l, aligns[i], &b);
        assert_int_equal(b.n % aligns[i], 0);
        assert_int_equal(st_header_n_tensors(h), 5);
        assert_int_equal(st_header_n_meta(h), 3);
        assert_true(str_eqz(st_header_meta(h, 1)->key, odd_name));
        assert_true(str_eq(st_header_meta(h, 1)->value, (struct str){"a\0\n", 3}));
        assert_true(str_eqz(st_header_tensor(h, 0)->name, "z"));
        assert_true(str_eqz(st_header_tensor(h, 1)->name, odd_name));
        assert_int_equal(st_header_find(h, str_of(""))->dtype, PF_F64);
        assert_int_equal(st_header_find(h, str_of("empty"))->shape.dim[2], 7);
        for (k = 0, end = b.n; k < 5; k++) {
            assert_int_equal(st_layout_offset(l, k), end);
            assert_int_equal(st_header_tensor(h, k)->off_bytes, end);
            end += st_header_tensor(h, k)->n_bytes;
        }
        assert_int_equal(st_layout_file_bytes(l), end);
        st_header_free(h);
        st_layout_free(l);
        strbuf_release(&b);
    }
}

static void an_empty_layout_is_a_file(void **state)
{
    struct st_layout *l = layout();
    struct strbuf b;
    struct st_header *h = read_back(l, 4096, &b);
    (void)state;

    assert_int_equal(b.n, 4096);
    assert_int_equal(st_layout_file_bytes(l), 4096);
    assert_memory_equal(b.p + 8, "{}    ", 6);
    assert_int_equal(st_header_n_tensors(h), 0);
    st_header_free(h);
    st_layout_free(l);
    strbuf_release(&b);
    st_layout_free(NULL);
}

static void refuses_names_that_may_not_be(void **state)
{
    struct st_layout *l = layout();
    struct shape one = shape_of(1, 1, 0, 0);
    pf_error err = {0};
    struct strbuf b;
    (void)state;

    assert_int_equal(add(l, "a", PF_U8, one, NULL), PF_OK);
    st_assert_error(add(l, "a", PF_U8, one, &err), PF_E_INVALID, &err,
                    "tensor name 'a' is used twice");
    st_assert_error(add(l, "__metadata__", PF_U8, one, &err), PF_E_INVALID, &err,
                    "tensor name '__metadata__' is reserved");
    st_assert_error(add(l, "x\xff", PF_U8, one, &err), PF_E_INVALID, &err,
                    "is not UTF-8 at byte 1");
    st_assert_error(st_layout_tensor(l, (struct str){"a\0b", 3}, PF_U8, &one, &err), PF_E_INVALID,
                    &err, "'a?b' holds a NUL character");
    assert_int_equal(st_layout_meta(l, str_of("k"), str_of("v"), NULL), PF_OK);
    st_assert_error(st_layout_meta(l, str_of("k"), str_of("w"), &err), PF_E_INVALID, &err,
                    "metadata key 'k' is used twice");
    /* A key may be called like a tensor. */
    assert_int_equal(st_layout_meta(l, str_of("a"), str_of("v"), NULL), PF_OK);
    st_assert_error(st_layout_meta(l, str_of("\xc0"), str_of("w"), &err), PF_E_INVALID, &err,
                    "metadata key");
    st_assert_error(st_layout_meta(l, str_of("m"), str_of("\xc0"), &err), PF_E_INVALID, &err,
                    "metadata value");
    strbuf_init(&b);
    st_assert_error(st_layout_finish(l, 0, &b, &err), PF_E_INVALID, &err, "alignment 0");
    assert_int_equal(st_layout_finish(l, 8, &b, NULL), PF_OK);
    st_assert_error(add(l, "late", PF_U8, one, &err), PF_E_STATE, &err,
                    "'late' comes after the layout was finished");
    st_assert_error(st_layout_meta(l, str_of("late"), str_of(""), &err), PF_E_STATE, &err,
                    "'late' comes after");
    st_layout_free(l);
    strbuf_release(&b);
}

/* Every dtype x every pair and triple of dimensions at the edges, against 128-bit arithmetic. */
static void no_size_that_overflows_gets_through(void **state)
{
    static const int64_t edge[] = {0,
                                   1,
                                   2,
                                   3,
                                   8,
                                   1000003,
                                   INT64_C(1) << 31,
                                   (INT64_C(1) << 32) + 1,
                                   INT64_C(1) << 59,
                                   INT64_C(1) << 60,
                                   (INT64_C(1) << 61) - 1,
                                   INT64_C(1) << 62,
                                   INT64_MAX - 1,
                                   INT64_MAX};
    size_t n = PF_COUNTOF(edge), i, n_good = 0, n_bad = 0;
    int32_t dtype;
    (void)state;

    for (dtype = 0; dtype < PF_N_DTYPES; dtype++) {
        for (i = 0; i < n * n * n; i++) {
            struct shape s = shape_of(3, edge[i % n], edge[i / n % n], edge[i / n / n]);
            struct st_layout *l = layout();
            unsigned __int128 v = 1;
            pf_error err = {0};
            bool is_good = true;
            int rc, k;

            for (k = 0; k < 3 && is_good; k++) {
                v *= (uint64_t)s.dim[k];
                is_good = v <= UINT64_MAX;
            }
            v *= pf_dtype_bits(dtype);
            is_good = is_good && v <= UINT64_MAX && v % 8 == 0 && v / 8 <= INT64_MAX;
            rc = add(l, "t", dtype, s, &err);
            if ((rc == PF_OK) != is_good)
                fail_msg("%s [%" PRId64 ", %" PRId64 ", %" PRId64 "]: %s", pf_dtype_name(dtype),
                         s.dim[0], s.dim[1], s.dim[2], rc == PF_OK ? "accepted" : err.msg);
            if (rc != PF_OK)
                assert_int_equal(rc, PF_E_RANGE);
            n_good += is_good;
            n_bad += !is_good;
            st_layout_free(l);
        }
    }
    assert_true(n_good > 5000 && n_bad > 5000);
}

static void no_sum_that_overflows_gets_through(void **state)
{
    static const char *const names[] = {"a", "b", "c", "d", "e"};
    const int64_t quarter = INT64_C(1) << 60;
    struct st_layout *l = layout();
    pf_error err = {0};
    struct strbuf b;
    size_t i;
    (void)state;

    for (i = 0; i < 5; i++)
        assert_int_equal(add(l, names[i], PF_U8, shape_of(1, quarter, 0, 0), NULL), PF_OK);
    assert_int_equal(add(l, "f", PF_U8, shape_of(1, 2 * quarter - 1, 0, 0), NULL), PF_OK);
    /* 2^63 - 2^60 - 1 so far. */
    st_assert_error(add(l, "g", PF_U8, shape_of(1, quarter + 2, 0, 0), &err), PF_E_RANGE, &err,
                    "tensor 'g': the file would end beyond 2^63 bytes");
    st_assert_error(add(l, "g", PF_U8, shape_of(1, quarter + 1, 0, 0), &err), PF_E_RANGE, &err,
                    "tensor 'g': the file would end beyond 2^63 bytes");
    assert_int_equal(add(l, "g", PF_U8, shape_of(1, quarter, 0, 0), NULL), PF_OK);
    strbuf_init(&b);
    /* The data alone would fit: with the header before it, it does not. */
    st_assert_error(st_layout_finish(l, 8, &b, &err), PF_E_RANGE, &err,
                    "the file would end beyond 2^63 bytes");
    assert_int_equal(b.n, 0);
    st_layout_free(l);
    strbuf_release(&b);
}

static void refuses_dtypes_and_shapes_that_are_none(void **state)
{
    struct st_layout *l = layout();
    struct shape bad_rank = {.rank = PF_MAX_RANK + 1}, bad_sign = shape_of(2, 1, -1, 0),
                 minus = {.rank = -1};
    pf_error err = {0};
    (void)state;

    st_assert_error(add(l, "t", PF_N_DTYPES, shape_of(0, 0, 0, 0), &err), PF_E_INVALID, &err,
                    "dtype 22 is not known");
    st_assert_error(add(l, "t", -1, shape_of(0, 0, 0, 0), &err), PF_E_INVALID, &err,
                    "dtype -1 is not known");
    st_assert_error(add(l, "t", PF_U8, bad_rank, &err), PF_E_INVALID, &err,
                    "rank 9 is not in 0..8");
    st_assert_error(add(l, "t", PF_U8, minus, &err), PF_E_INVALID, &err, "rank -1 is not in 0..8");
    st_assert_error(add(l, "t", PF_U8, bad_sign, &err), PF_E_INVALID, &err, "negative dimension");
    st_assert_error(add(l, "t", PF_F4, shape_of(1, 3, 0, 0), &err), PF_E_RANGE, &err, "F4 [3]");
    st_layout_free(l);
}

static void a_header_larger_than_the_format_allows_is_refused(void **state)
{
    struct st_layout *l = layout();
    struct strbuf b;
    pf_error err = {0};
    (void)state;

    assert_int_equal(add(l, "a", PF_U8, shape_of(1, 1, 0, 0), NULL), PF_OK);
    strbuf_init(&b);
    st_assert_error(st_layout_finish(l, ST_HEADER_MAX + 1, &b, &err), PF_E_INVALID, &err,
                    "alignment");
    /* 8 + N = 100,000,000 is the largest that this alignment gives. */
    assert_int_equal(st_layout_finish(l, ST_HEADER_MAX, &b, &err), PF_OK);
    assert_int_equal(b.n, ST_HEADER_MAX);
    st_layout_free(l);
    strbuf_release(&b);
    l = layout();
    {
        char *value = mem_alloc(ST_HEADER_MAX);
        assert_non_null(value);
        memset(value, 'x', ST_HEADER_MAX);
        assert_int_equal(st_layout_meta(l, str_of("k"), (struct str){value, ST_HEADER_MAX}, &err),
                         PF_OK);
        mem_free(value);
    }
    strbuf_init(&b);
    st_assert_error(st_layout_finish(l, 8, &b, &err), PF_E_RANGE, &err, "is larger than 100000000");
    st_layout_free(l);
    strbuf_release(&b);
}

/* Random layouts, written with their data, are files that give every tensor's bytes back. */
static void random_files_make_the_round_trip(void **state)
{
    const char *path = test_path(state, "r.safetensors");
    struct rng rng = {7};
    int round;

    for (round = 0; round < 60; round++) {
        struct st_layout *l = layout();
        struct st_file *f = NULL;
        struct strbuf b;
        pf_error err = {0};
        size_t n = rng_next(&rng) % 20, i, k;

        for (i = 0; i < n; i++) {
            char name[32];
            struct shape s;

            s = shape_of((int32_t)(rng_next(&rng) % 4), (int64_t)(rng_next(&rng) % 5),
                         (int64_t)(rng_next(&rng) % 4) * 4, (int64_t)(rng_next(&rng) % 3) + 1);
            if (s.rank < 2) /* sub-byte types need whole bytes */
                s = shape_of(1, 8 * (int64_t)(rng_next(&rng) % 9), 0, 0);
            (void)snprintf(name, sizeof(name), "t%zu", (i * 7) % n);
            if (n % 7 == 0)
                (void)snprintf(name, sizeof(name), "u%zu", i);
            assert_int_equal(add(l, name, (int32_t)(rng_next(&rng) % PF_N_DTYPES), s, &err), PF_OK);
        }
        strbuf_init(&b);
        assert_int_equal(st_layout_finish(l, 4096, &b, &err), PF_OK);
        assert_int_equal(b.n % 4096, 0);
        while (b.n < st_layout_file_bytes(l))
            strbuf_addf(&b, "%c", (int)(b.n % 251 + 1));
        write_file(path, b.p, b.n);
        if (st_open(path, &f, &err) != PF_OK)
            fail_msg("%s", err.msg);
        assert_int_equal(st_n_tensors(f), n);
        for (i = 0; i < n; i++) {
            const uint8_t *p = st_data(f, st_tensor(f, i));
            assert_int_equal(st_tensor(f, i)->off_bytes, st_layout_offset(l, i));
            for (k = 0; k < st_tensor(f, i)->n_bytes; k++)
                assert_int_equal(p[k], (st_layout_offset(l, i) + k) % 251 + 1);
        }
        st_close(f);
        st_layout_free(l);
        strbuf_release(&b);
    }
}

static void a_hundred_thousand_names_are_laid_out_quickly(void **state)
{
    struct st_layout *l = layout();
    struct strbuf b;
    struct st_header *h;
    double t = test_cpu_seconds();
    char name[64];
    uint32_t i;
    (void)state;

    for (i = 0; i < 100000; i++) {
        (void)snprintf(name, sizeof(name), "blocks.%u.weight", i);
        assert_int_equal(add(l, name, PF_BF16, shape_of(1, 8, 0, 0), NULL), PF_OK);
        assert_int_equal(st_layout_meta(l, str_of(name), str_of("x"), NULL), PF_OK);
    }
    h = read_back(l, 4096, &b);
    t = test_cpu_seconds() - t;
    print_message("100,000 tensors and metadata keys, there and back: %.3f s\n", t);
    assert_true(t < 60);
    assert_int_equal(st_header_n_tensors(h), 100000);
    st_header_free(h);
    st_layout_free(l);
    strbuf_release(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_laid_out_is_read_back),
        cmocka_unit_test(an_empty_layout_is_a_file),
        cmocka_unit_test(refuses_names_that_may_not_be),
        cmocka_unit_test(no_size_that_overflows_gets_through),
        cmocka_unit_test(no_sum_that_overflows_gets_through),
        cmocka_unit_test(refuses_dtypes_and_shapes_that_are_none),
        cmocka_unit_test(a_header_larger_than_the_format_allows_is_refused),
        in_dir(random_files_make_the_round_trip),
        cmocka_unit_test(a_hundred_thousand_names_are_laid_out_quickly),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
