/*
 * Fidelity: reported survival and changed fraction against an f64 computation over all elements, and the merge precision that loses
 * nothing. Case ids: C35 (merged W is W + BA), C113 (a small adapter vanishes in bf16).
 */
#include "testing.h"

#include "merge_ref.h"

enum { SIZE = 256, RANK = 8 };

struct bed {
    uint16_t w[SIZE * SIZE];
    float b[SIZE * RANK], a[RANK * SIZE];
    double wanted[SIZE * SIZE]; /* in f64 */
    struct delta d;
    struct merge_term term;
    struct merge_target t;
};

/* W of rms 0.02, B A of `relative` times that. */
static void bed_make(struct bed *bed, double relative)
{
    struct rng r = {7};
    for (int i = 0; i < SIZE * SIZE; i++)
        bed->w[i] = ref_encode16(PF_BF16, (float)(0.02 * rng_normal(&r)));
    for (int i = 0; i < SIZE * RANK; i++) {
        bed->b[i] = (float)rng_normal(&r);
        bed->a[i] = (float)rng_normal(&r);
    }
    bed->d = (struct delta){.kind = DELTA_LORA,
                            .n_rows = SIZE,
                            .n_cols = SIZE,
                            .rank = RANK,
                            .f = {{(const uint8_t *)bed->b, PF_F32, SIZE, RANK, RANK, 1},
                                  {(const uint8_t *)bed->a, PF_F32, RANK, SIZE, SIZE, 1}}};
    bed->term = (struct merge_term){&bed->d, (float)(relative * 0.02 / sqrt(RANK))};
    bed->t =
        (struct merge_target){(const uint8_t *)bed->w, PF_BF16, PF_BF16, SIZE, SIZE, &bed->term, 1};
    for (int m = 0; m < SIZE; m++) {
        for (int n = 0; n < SIZE; n++) {
            double sum = 0;
            for (int k = 0; k < RANK; k++)
                sum += (double)bed->b[m * RANK + k] * (double)bed->a[k * SIZE + n];
            bed->wanted[m * SIZE + n] = sum * (double)bed->term.s;
        }
    }
}

static double f64_of(uint16_t h)
{
    return (double)ref_decode(PF_BF16, (const uint8_t *)&h);
}

/* The correctly, once rounded merge. */
static double once_rounded(const struct bed *bed, int i)
{
    return ref_round(f64_of(bed->w[i]) + bed->wanted[i], 7, -126);
}

static void survival_equals_f64(void **state)
{
    (void)state;
    static const double relative[] = {3e-4, 3e-3, 3e-2};
    static const double expected[] = {0.19, 0.93, 1.0}; /* Gaussian weights, computed elsewhere */
    struct bed *bed = malloc(sizeof(*bed));
    struct merge_scratch *s;
    pf_error err;
    assert_ok(merge_scratch_new(&s, &err), &err);
    for (int i = 0; i < 3; i++) {
        bed_make(bed, relative[i]);
        double product = 0, square = 0, n_changed = 0;
        for (int j = 0; j < SIZE * SIZE; j++) {
            const double applied = once_rounded(bed, j) - f64_of(bed->w[j]);
            product += applied * bed->wanted[j];
            square += bed->wanted[j] * bed->wanted[j];
            n_changed += applied != 0;
        }
        struct fidelity_sum sum = {0};
        assert_ok(merge_fidelity(&bed->t, 0, 1, &sum, s, &err), &err);
        const double survival = sum.applied_x_wanted / sum.wanted2;
        const double changed = (double)sum.n_changed / (double)sum.n_elements;
        assert_int_equal(sum.n_elements, SIZE * SIZE);
        assert_true(fabs(survival / (product / square) - 1) < 0.02);
        assert_true(fabs(changed / (n_changed / (SIZE * SIZE)) - 1) < 0.02);
        assert_true(fabs(survival - expected[i]) < 0.05);
        print_message("relative %g: survival %.4f (f64 %.4f), changed %.4f\n", relative[i],
                      survival, product / square, changed);
    }
    merge_scratch_free(s);
    free(bed);
}

/* C113: the bytes are the correctly rounded ones, so what is lost is bf16's doing, and the report says it. */
static void small_deltas_are_rounded_correctly(void **state)
{
    (void)state;
    struct bed *bed = malloc(sizeof(*bed));
    struct merge_scratch *s;
    pf_error err;
    assert_ok(merge_scratch_new(&s, &err), &err);
    bed_make(bed, 3e-4);
    const struct merge_panel whole = {0, SIZE, 0, SIZE};
    uint16_t *out = malloc(sizeof(bed->w));
    merge_read(&bed->t, &whole, false, out, s);
    int n_other = 0;
    for (int i = 0; i < SIZE * SIZE; i++) {
        const double exact = f64_of(bed->w[i]) + bed->wanted[i];
        const double mine = f64_of(out[i]), best = once_rounded(bed, i);
        if (mine == best)
            continue;
        n_other++; /* only at a tie within f32's own rounding */
        assert_true(fabs(exact - (mine + best) / 2) <= 12 * 0x1p-24 * 0.1);
    }
    assert_true(n_other < 20);
    free(out);
    merge_scratch_free(s);
    free(bed);
}

/* --merge-dtype f32: W + total by fma in f32, nothing lost. C35: it is W + B A. */
static void merge_precision_f32_keeps_everything(void **state)
{
    (void)state;
    struct bed *bed = malloc(sizeof(*bed));
    struct merge_scratch *s;
    pf_error err;
    assert_ok(merge_scratch_new(&s, &err), &err);
    bed_make(bed, 3e-4);
    bed->t.out_dtype = PF_F32;
    const struct merge_panel whole = {0, SIZE, 0, SIZE};
    float *out = malloc(SIZE * SIZE * sizeof(float));
    merge_read(&bed->t, &whole, false, out, s);
    for (int m = 0; m < SIZE; m++) {
        for (int n = 0; n < SIZE; n++) {
            float acc = 0;
            for (int k = 0; k < RANK; k++)
                acc = fmaf(bed->b[m * RANK + k], bed->a[k * SIZE + n], acc);
            const int i = m * SIZE + n;
            const float want = (float)f64_of(bed->w[i]) + fmaf(bed->term.s, acc, 0.0F);
            assert_int_equal(bits_of(out[i]), bits_of(want));
            assert_true(fabs((double)out[i] - f64_of(bed->w[i]) - bed->wanted[i]) < 1e-8);
        }
    }
    struct fidelity_sum sum = {0};
    assert_ok(merge_fidelity(&bed->t, 0, 1, &sum, s, &err), &err);
    assert_true(fabs(sum.applied_x_wanted / sum.wanted2 - 1) < 1e-4);
    free(out);
    merge_scratch_free(s);
    free(bed);
}

static void samples_agree_with_the_whole_and_add_up(void **state)
{
    (void)state;
    struct bed *bed = malloc(sizeof(*bed));
    struct merge_scratch *s;
    pf_error err;
    assert_ok(merge_scratch_new(&s, &err), &err);
    bed_make(bed, 1e-3);
    bed->d.row0 = 0;
    bed->d.n_rows = 101; /* the others count, unchanged */
    bed->d.f[0].n_rows = 101;
    struct fidelity_sum whole = {0}, parts = {0};
    assert_ok(merge_fidelity(&bed->t, 0, 1, &whole, s, &err), &err);
    for (int64_t row0 = 0; row0 < 7; row0++)
        assert_ok(merge_fidelity(&bed->t, row0, 7, &parts, s, &err), &err);
    assert_int_equal(parts.n_elements, whole.n_elements);
    assert_int_equal(whole.n_elements, SIZE * SIZE);
    assert_int_equal(parts.n_changed, whole.n_changed);
    assert_true(whole.n_changed > 0 && whole.n_changed <= 101 * SIZE);
    assert_true(fabs(parts.wanted2 / whole.wanted2 - 1) < 1e-9);
    assert_true(fabs(parts.applied_x_wanted / whole.applied_x_wanted - 1) < 1e-9);
    assert_int_equal(merge_fidelity(&bed->t, 0, 0, &parts, s, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "rows from 0 by 0");
    merge_scratch_free(s);
    free(bed);
}

/* The same sums on every kernel, to the last bit: a report may not depend on the machine. */
static void sums_do_not_depend_on_the_kernel(void **state)
{
    (void)state;
    struct rng r = {9};
    for (int i = 0; i < 12; i++) {
        struct merge_case c;
        case_new(&c, &r, i % 2 == 0 ? PF_BF16 : PF_F16, 97, 61, 6, 1 + i % 3, ANY_KIND);
        struct fidelity_sum first = {0};
        for (int isa = CPU_SCALAR; isa <= CPU_AVX512; isa++) {
            const struct kernel *kernel = kernel_built((enum cpu_isa)isa);
            if (kernel == NULL || (isa != CPU_SCALAR && !cpu_has((enum cpu_isa)isa)))
                continue;
            struct merge_scratch *s;
            struct fidelity_sum sum = {0};
            pf_error err;
            assert_ok(scratch_new(kernel, &s, &err), &err);
            assert_ok(merge_fidelity(&c.t, 0, 1 + i % 5, &sum, s, &err), &err);
            first = isa == CPU_SCALAR ? sum : first;
            assert_memory_equal(&sum, &first, sizeof(sum));
            assert_true(isfinite(sum.applied_x_wanted) && sum.wanted2 > 0);
            merge_scratch_free(s);
        }
        case_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(survival_equals_f64),
        cmocka_unit_test(small_deltas_are_rounded_correctly),
        cmocka_unit_test(merge_precision_f32_keeps_everything),
        cmocka_unit_test(samples_agree_with_the_whole_and_add_up),
        cmocka_unit_test(sums_do_not_depend_on_the_kernel),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
