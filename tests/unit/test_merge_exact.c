/*
 * The contract to the bit: every kernel that this CPU runs, on random shapes, kinds and dtypes, in any panels and threads, under any
 * floating-point environment of the caller, gives the bytes of the naive reference in merge_ref.h.
 */
#include <fenv.h>
#include <xmmintrin.h>

#include "base/pool.h"
#include "merge_ref.h"

static struct merge_scratch *scratch[3]; /* by enum cpu_isa; NULL where the CPU cannot */

static int set_up(void **state)
{
    (void)state;
    for (int isa = CPU_SCALAR; isa <= CPU_AVX512; isa++) {
        const struct kernel *kernel = kernel_built((enum cpu_isa)isa);
        if (kernel == NULL || (isa != CPU_SCALAR && !cpu_has((enum cpu_isa)isa))) {
            print_message("SKIP: merge %s: this CPU lacks it, its bytes were not compared\n",
                          cpu_isa_name((enum cpu_isa)isa));
            continue;
        }
        if (scratch_new(kernel, &scratch[isa], NULL) != PF_OK)
            return -1;
    }
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    for (int isa = 0; isa < 3; isa++)
        merge_scratch_free(scratch[isa]);
    return 0;
}

/* The whole tensor, as native bytes and as f32, from the reference. Owned by the caller. */
static void reference(const struct merge_target *t, uint8_t **out_native, float **out_f32)
{
    const size_t size = dtype_size(t->out_dtype);
    const size_t n = (size_t)(t->n_rows * t->n_cols);
    *out_native = malloc(n * size);
    *out_f32 = malloc(n * 4);
    for (size_t i = 0; i < n; i++)
        ref_element(t, (int64_t)i / t->n_cols, (int64_t)i % t->n_cols, *out_native + i * size,
                    *out_f32 + i);
}

static void check_panel(const struct merge_target *t, const struct merge_panel *p, bool as_f32,
                        const void *expected, struct merge_scratch *s)
{
    const size_t size = as_f32 ? 4 : dtype_size(t->out_dtype);
    const size_t n_row = (size_t)p->n_cols * size;
    uint8_t *got = malloc((size_t)p->n_rows * n_row);
    merge_read(t, p, as_f32, got, s);
    for (int64_t i = 0; i < p->n_rows; i++) {
        const uint8_t *want =
            (const uint8_t *)expected + (size_t)((p->row0 + i) * t->n_cols + p->col0) * size;
        for (size_t j = 0; j < n_row; j += size) {
            if (memcmp(got + (size_t)i * n_row + j, want + j, size) != 0)
                fail_msg("%s, %s %lldx%lld, %zu terms, kind %d rank %lld, as_f32 %d: "
                         "row %lld column %zu",
                         cpu_isa_name(s->kernel->isa), pf_dtype_name(t->dtype),
                         (long long)t->n_rows, (long long)t->n_cols, t->n_terms,
                         (int)t->terms[0].delta->kind, (long long)t->terms[0].delta->rank, as_f32,
                         (long long)(p->row0 + i), (size_t)p->col0 + j / size);
        }
    }
    free(got);
}

static struct merge_panel random_panel(const struct merge_target *t, struct rng *r)
{
    struct merge_panel p = {.row0 = rng_range(r, 0, t->n_rows - 1),
                            .col0 = rng_range(r, 0, t->n_cols - 1)};
    p.n_rows = rng_range(r, 1, t->n_rows - p.row0);
    p.n_cols = rng_range(r, 1, t->n_cols - p.col0);
    return p;
}

/* The whole tensor in both formats, then random rectangles of it. */
static void check_target(const struct merge_target *t, struct rng *r)
{
    uint8_t *native;
    float *f32;
    reference(t, &native, &f32);
    for (int isa = 0; isa < 3; isa++) {
        if (scratch[isa] == NULL)
            continue;
        const struct merge_panel whole = {0, t->n_rows, 0, t->n_cols};
        check_panel(t, &whole, false, native, scratch[isa]);
        for (int i = 0; i < 4; i++) {
            const struct merge_panel p = random_panel(t, r);
            check_panel(t, &p, i % 2 == 0, i % 2 == 0 ? (void *)f32 : native, scratch[isa]);
        }
    }
    free(native);
    free(f32);
}

#ifdef __SANITIZE_THREAD__ /* one thread: it has nothing to see here, and is slow */
#define N_RANDOM 24
#else
#define N_RANDOM 240
#endif

static void kernels_equal_the_reference_on_random_tensors(void **state)
{
    (void)state;
    static const int32_t dtypes[] = {PF_BF16, PF_F16, PF_F32};
    static const int64_t sizes[] = {1, 2, 3, 7, 13, 31, 32, 33, 61, 64, 97, 127, 211, 1031};
    struct rng r = {1};
    for (int i = 0; i < N_RANDOM; i++) {
        struct merge_case c;
        const int64_t n_rows = sizes[rng_range(&r, 0, 13)];
        int64_t n_cols = sizes[rng_range(&r, 0, 13)];
        n_cols = n_rows * n_cols > 4000 ? 7 : n_cols;
        int64_t rank = rng_range(&r, 1, 300);
        rank = rank * n_rows * n_cols > 30000 ? 1 + 30000 / (n_rows * n_cols) : rank;
        case_new(&c, &r, dtypes[i % 3], n_rows, n_cols, rank, 1 + i / 3 % 4,
                 i % 5 == 0 ? DELTA_LORA : ANY_KIND);
        if (i % 7 == 0) /* merge precision f32 */
            c.t.out_dtype = PF_F32;
        check_target(&c.t, &r);
        case_free(&c);
    }
}

/* Blocks, groups and passes of every kernel end inside these. */
static void kernels_equal_the_reference_across_blocks(void **state)
{
    (void)state;
    struct rng r = {2};
    static const int64_t shapes[][3] = {{521, 37, 3}, {3, 8209, 5}, {43, 1061, 2}, {19, 41, 300}};
    for (size_t i = 0; i < PF_COUNTOF(shapes); i++) {
        for (int n_terms = 1; n_terms <= 2; n_terms++) {
            struct merge_case c;
            case_new(&c, &r, PF_BF16, shapes[i][0], shapes[i][1], shapes[i][2], n_terms,
                     i % 2 == 0 ? ANY_KIND : DELTA_LORA);
            check_target(&c.t, &r);
            case_free(&c);
        }
    }
}

/* One rank-1 delta of bf16 at the left edge of what f32 holds: flushing anything to zero would show. */
static void subnormals_are_kept(void **state)
{
    (void)state;
    const uint16_t base[4] = {0x0001, 0x8001, 0x0040, 0x0000}; /* all subnormal, or zero */
    const float b[4] = {0x1p-70F, 0x1p-70F, -0x1p-70F, 0x1p-70F};
    const float a = 0x1p-61F; /* chain 2^-131: subnormal in f32; 2^-133 is bf16's least */
    const struct delta d = {
        .kind = DELTA_LORA,
        .n_rows = 4,
        .n_cols = 1,
        .rank = 1,
        .f = {{(const uint8_t *)b, PF_F32, 4, 1, 1, 1}, {(const uint8_t *)&a, PF_F32, 1, 1, 1, 1}}};
    const struct merge_term term = {&d, 1};
    const struct merge_target t = {(const uint8_t *)base, PF_BF16, PF_BF16, 4, 1, &term, 1};
    const struct merge_panel panel = {0, 4, 0, 1};
    static const uint16_t want[4] = {0x0005, 0x0003, 0x003c, 0x0004};
    for (int isa = 0; isa < 3; isa++) {
        uint16_t got[4];
        if (scratch[isa] == NULL)
            continue;
        merge_read(&t, &panel, false, got, scratch[isa]);
        assert_memory_equal(got, want, sizeof(want));
    }
}

static void negative_zero_turns_positive_only_where_a_term_acts(void **state)
{
    (void)state;
    const uint16_t base[3] = {0x8000, 0x8000, 0x8000};
    const float zero = 0;
    const struct delta d = {.kind = DELTA_DIFF,
                            .row0 = 1,
                            .n_rows = 1,
                            .n_cols = 1,
                            .f = {{(const uint8_t *)&zero, PF_F32, 1, 1, 1, 1}}};
    const struct merge_term term = {&d, 1};
    const struct merge_target t = {(const uint8_t *)base, PF_BF16, PF_BF16, 3, 1, &term, 1};
    const struct merge_panel panel = {0, 3, 0, 1};
    static const uint16_t want[3] = {0x8000, 0x0000, 0x8000};
    for (int isa = 0; isa < 3; isa++) {
        uint16_t got[3];
        if (scratch[isa] == NULL)
            continue;
        merge_read(&t, &panel, false, got, scratch[isa]);
        assert_memory_equal(got, want, sizeof(want));
    }
}

/* What PyTorch and others leave behind: other rounding, FTZ and DAZ. The bytes stay, and so does the caller's environment. */
static void the_callers_fp_environment_does_not_matter(void **state)
{
    (void)state;
    static const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    static const int32_t dtypes[] = {PF_BF16, PF_F16, PF_F32};
    struct rng r = {3};
    for (int i = 0; i < 3; i++) {
        struct merge_case c;
        uint8_t *native;
        float *f32;
        case_new(&c, &r, dtypes[i], 61, 97, 5, 2, i == 0 ? DELTA_LORA : ANY_KIND);
        reference(&c.t, &native, &f32);
        for (int isa = 0; isa < 3; isa++) {
            if (scratch[isa] == NULL)
                continue;
            const struct merge_panel whole = {0, 61, 0, 97};
            const unsigned before = _mm_getcsr();
            assert_int_equal(fesetround(modes[i]), 0);
            _mm_setcsr(_mm_getcsr() | 0x8040); /* FTZ, DAZ */
            const unsigned set = _mm_getcsr() & ~0x3fu;
            uint8_t *got = malloc(61 * 97 * dtype_size(dtypes[i]));
            merge_read(&c.t, &whole, false, got, scratch[isa]);
            const unsigned after = _mm_getcsr() & ~0x3fu;
            assert_int_equal(fesetround(FE_TONEAREST), 0);
            _mm_setcsr(before);
            assert_int_equal(set, after);
            assert_memory_equal(got, native, 61 * 97 * dtype_size(dtypes[i]));
            free(got);
        }
        free(native);
        free(f32);
        case_free(&c);
    }
}

struct job {
    const struct merge_target *t;
    struct merge_scratch *scratch[8];
    uint8_t *out;
    int64_t rows_per_panel;
};

static void job_panel(void *ctx, size_t i_task, unsigned i_worker)
{
    struct job *job = ctx;
    const int64_t row0 = (int64_t)i_task * job->rows_per_panel;
    const int64_t left = job->t->n_rows - row0;
    const struct merge_panel p = {row0, left < job->rows_per_panel ? left : job->rows_per_panel, 0,
                                  job->t->n_cols};
    merge_read(job->t, &p, false,
               job->out + (size_t)(row0 * job->t->n_cols) * dtype_size(job->t->out_dtype),
               job->scratch[i_worker]);
}

static void threads_and_panel_heights_do_not_change_bytes(void **state)
{
    (void)state;
    static const unsigned n_threads[] = {1, 2, 7};
    static const int64_t heights[] = {1, 14, 37, 211};
    struct rng r = {4};
    struct merge_case c;
    uint8_t *native;
    float *f32;
    pf_error err;
    case_new(&c, &r, PF_BF16, 211, 61, 7, 3, ANY_KIND);
    reference(&c.t, &native, &f32);
    const size_t n_bytes = 211 * 61 * 2;
    struct job job = {.t = &c.t, .out = malloc(n_bytes)};
    for (int i = 0; i < 8; i++)
        assert_ok(merge_scratch_new(&job.scratch[i], &err), &err);
    for (size_t i = 0; i < PF_COUNTOF(n_threads); i++) {
        struct pool *pool;
        assert_ok(pool_new(n_threads[i], &pool, &err), &err);
        for (size_t j = 0; j < PF_COUNTOF(heights); j++) {
            memset(job.out, 0xee, n_bytes);
            job.rows_per_panel = heights[j];
            pool_run(pool, (size_t)((211 + heights[j] - 1) / heights[j]), job_panel, &job);
            assert_memory_equal(job.out, native, n_bytes);
        }
        pool_free(pool);
    }
    for (int i = 0; i < 8; i++)
        merge_scratch_free(job.scratch[i]);
    free(job.out);
    free(native);
    free(f32);
    case_free(&c);
}

/* C1, C5: as often as you like, on and off: the base's bytes, and each time the same merged ones. */
static void a_thousand_cycles_change_nothing(void **state)
{
    (void)state;
    static const int32_t dtypes[] = {PF_BF16, PF_F16};
    struct rng r = {5};
    for (int i = 0; i < 2; i++) {
        struct merge_case c;
        case_new(&c, &r, dtypes[i], 64, 64, 8, 1, DELTA_LORA);
        const struct merge_panel whole = {0, 64, 0, 64};
        struct merge_scratch *s;
        pf_error err;
        assert_ok(merge_scratch_new(&s, &err), &err);
        uint16_t base[64 * 64], first[64 * 64], out[64 * 64];
        memcpy(base, c.t.base, sizeof(base));
        merge_read(&c.t, &whole, false, first, s);
        assert_memory_not_equal(first, base, sizeof(base));
        struct merge_target bare = c.t;
        bare.n_terms = 0;
        for (int cycle = 0; cycle < 1000; cycle++) {
            merge_read(&c.t, &whole, false, out, s);
            assert_memory_equal(out, first, sizeof(out));
            merge_read(&bare, &whole, false, out, s);
            assert_memory_equal(out, base, sizeof(out));
        }
        merge_scratch_free(s);
        case_free(&c);
    }
}

static void panels_are_counted_only_where_a_term_acts(void **state)
{
    (void)state;
    const float w[2] = {1, 2}, x = 1;
    const struct delta d = {.kind = DELTA_DIFF,
                            .n_rows = 1,
                            .n_cols = 1,
                            .f = {{(const uint8_t *)&x, PF_F32, 1, 1, 1, 1}}};
    const struct merge_term term = {&d, 1};
    const struct merge_target t = {(const uint8_t *)w, PF_F32, PF_F32, 2, 1, &term, 1};
    const struct merge_panel first = {0, 1, 0, 1}, second = {1, 1, 0, 1};
    float out;
    const uint64_t before = merge_n_panels();
    merge_read(&t, &second, false, &out, scratch[0]);
    assert_int_equal(merge_n_panels() - before, 0);
    assert_true(out == 2);
    merge_read(&t, &first, false, &out, scratch[0]);
    assert_int_equal(merge_n_panels() - before, 1);
    assert_true(out == 2);
}

static void conversion_equals_the_reference(void **state)
{
    (void)state;
    static const int32_t dtypes[] = {PF_BF16, PF_F16};
    uint16_t *all = malloc(65537 * 2);
    uint8_t *src = (uint8_t *)all + 1; /* unaligned */
    float *got = malloc(65536 * 4);
    for (uint32_t i = 0; i < 65536; i++)
        memcpy(src + i * 2, &(uint16_t){(uint16_t)i}, 2);
    for (int k = 0; k < 2; k++) {
        for (int isa = 0; isa < 3; isa++) {
            if (scratch[isa] == NULL)
                continue;
            scratch[isa]->kernel->to_f32(dtypes[k], src, 65536, got);
            for (uint32_t i = 0; i < 65536; i++)
                assert_int_equal(bits_of(got[i]), bits_of(ref_decode(dtypes[k], src + i * 2)));
        }
    }
    merge_to_f32(PF_F8_E5M2, src, 9, got); /* falls back */
    assert_int_equal(bits_of(got[2]), bits_of(ref_decode(PF_F8_E5M2, src + 2)));
    free(got);
    free(all);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kernels_equal_the_reference_on_random_tensors),
        cmocka_unit_test(kernels_equal_the_reference_across_blocks),
        cmocka_unit_test(subnormals_are_kept),
        cmocka_unit_test(negative_zero_turns_positive_only_where_a_term_acts),
        cmocka_unit_test(the_callers_fp_environment_does_not_matter),
        cmocka_unit_test(threads_and_panel_heights_do_not_change_bytes),
        cmocka_unit_test(a_thousand_cycles_change_nothing),
        cmocka_unit_test(panels_are_counted_only_where_a_term_acts),
        cmocka_unit_test(conversion_equals_the_reference),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
