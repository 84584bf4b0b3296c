/*
 * The contract to the bit: every kernel that this CPU runs, on random shapes, kinds and dtypes, in any panels and threads, gives the
 * bytes of the naive reference in merge_ref.h.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <fenv.h>
#include <stdio.h>

#include "base/pool.h"
#include "merge_ref.h"

static struct merge_scratch *scratch[3]; /* by enum cpu_isa; NULL where the CPU cannot */

static int set_up(void **state)
{
    (void)state;
    for (int isa = CPU_SCALAR; isa <= CPU_AVX512; isa++) {
        const struct kernel *kernel = kernel_built((enum cpu_isa)isa);
        if (kernel == NULL || (isa != CPU_SCALAR && !cpu_has((enum cpu_isa)isa))) {
            print_message("no %s on this machine: not compared\n", cpu_isa_name((enum cpu_isa)isa));
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
                fail_msg("%s, %s %lldx%lld, %zu terms, kind %d rank %lld, as_f32 %d: row %lld "
                         "column %zu",
                         cpu_isa_name(s->kernel->isa), pf_dtype_name(t->dtype),
                         (long long)t->n_rows, (long long)t->n_cols, t->n_terms,
                         (int)t->terms[0].delta->kind, (long long)t->terms[0].delta->rank, as_f32,
                         (long long)(p->row0 + i), (size_t)p->col0 + j / size);
        }
    }
    free(got);
}

/* The whole tensor, then random rectangles of it. */
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
        check_panel(t, &whole, true, f32, scratch[isa]);
        for (int i = 0; i < 3; i++) {
            struct merge_panel p = {.row0 = rng_range(r, 0, t->n_rows - 1),
                                    .col0 = rng_range(r, 0, t->n_cols - 1)};
            p.n_rows = rng_range(r, 1, t->n_rows - p.row0);
            p.n_cols = rng_range(r, 1, t->n_cols - p.col0);
            check_panel(t, &p, i == 0, i == 0 ? (void *)f32 : native, scratch[isa]);
        }
    }
    free(native);
    free(f32);
}

static void kernels_equal_the_reference_on_random_tensors(void **state)
{
    (void)state;
    static const int32_t dtypes[] = {PF_BF16, PF_F16, PF_F32};
    static const int64_t sizes[] = {1, 2, 3, 7, 13, 31, 32, 33, 61, 64, 97, 127, 211, 1031};
    struct rng r = {1};
    for (int i = 0; i < 240; i++) {
        struct merge_case c;
        const int64_t n_rows = sizes[rng_range(&r, 0, 13)];
        int64_t n_cols = sizes[rng_range(&r, 0, 13)];
        n_cols = n_rows * n_cols > 8000 ? 7 : n_cols;
        int64_t rank = rng_range(&r, 1, 300);
        rank = rank * n_rows * n_cols > 60000 ? 1 + 60000 / (n_rows * n_cols) : rank;
        case_new(&c, &r, dtypes[i % 3], n_rows, n_cols, rank, 1 + i % 4);
        check_target(&c.t, &r);
        c.t.out_dtype = PF_F32;
        check_target(&c.t, &r);
        case_free(&c);
    }
}

/* Blocks, groups and passes of every kernel end inside this one. */
static void kernels_equal_the_reference_across_blocks(void **state)
{
    (void)state;
    struct rng r = {2};
    static const int64_t shapes[][3] = {{521, 37, 3}, {3, 8209, 5}, {43, 1061, 2}, {19, 41, 300}};
    for (size_t i = 0; i < PF_COUNTOF(shapes); i++) {
        for (int n_terms = 1; n_terms <= 2; n_terms++) {
            struct merge_case c;
            case_new(&c, &r, PF_BF16, shapes[i][0], shapes[i][1], shapes[i][2], n_terms);
            check_target(&c.t, &r);
            case_free(&c);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kernels_equal_the_reference_on_random_tensors),
        cmocka_unit_test(kernels_equal_the_reference_across_blocks),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
