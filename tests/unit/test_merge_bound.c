/*
 * The overflow proof: what it lets pass without looking, what it decides by looking, and what it refuses, for every dtype and kind.
 */
#include "testing.h"

#include <float.h>

#include "merge_ref.h"

/* One weight, one delta of 1x1 factors. */
struct tiny {
    float f[4];
    struct delta d;
    struct merge_term term;
    uint8_t base[4];
    struct merge_target t;
};

static void tiny_set(struct tiny *y, int32_t dtype, float w, enum delta_kind kind, float f0,
                     float f1, float s)
{
    memset(y, 0, sizeof(*y));
    const float f[4] = {f0, f1, f0, f1};
    const int n_factors = kind == DELTA_DIFF ? 1 : kind == DELTA_LORA ? 2 : 4;
    memcpy(y->f, f, sizeof(f));
    y->d = (struct delta){.kind = kind, .n_rows = 1, .n_cols = 1, .rank = 1};
    for (int i = 0; i < n_factors; i++) {
        y->d.f[i] = (struct factor){(const uint8_t *)&y->f[i], PF_F32, 1, 1, 1, 1};
        y->d.max_abs[i] = fabs((double)f[i]);
    }
    y->term = (struct merge_term){&y->d, s};
    encode(dtype, (double)w, y->base);
    y->t = (struct merge_target){y->base, dtype, dtype, 1, 1, &y->term, 1};
}

static void ordinary_deltas_pass(void **state)
{
    (void)state;
    static const int32_t dtypes[] = {PF_BF16, PF_F16, PF_F32};
    static const float largest[] = {0x1.fep127F, 65504.0F, FLT_MAX};
    for (int i = 0; i < 3; i++) {
        struct tiny y;
        tiny_set(&y, dtypes[i], largest[i], DELTA_LORA, 0.5F, 0.5F, 1);
        assert_int_equal(merge_bound_check(&y.t, "w", NULL, NULL), PF_OK);
    }
}

/* Too large for the bound, not for this weight: decided by computing. */
static void large_deltas_on_small_weights_pass(void **state)
{
    (void)state;
    static const int32_t dtypes[] = {PF_BF16, PF_F16, PF_F32};
    static const float large[] = {0x1p126F, 60000.0F, 0x1p126F};
    for (int i = 0; i < 3; i++) {
        struct tiny y;
        tiny_set(&y, dtypes[i], 1, DELTA_DIFF, large[i], 0, 1);
        assert_int_equal(merge_bound_check(&y.t, "w", NULL, NULL), PF_OK);
        tiny_set(&y, dtypes[i], 1, DELTA_LORA, large[i], 1, -1);
        assert_int_equal(merge_bound_check(&y.t, "w", NULL, NULL), PF_OK);
    }
}

static void overflow_is_refused_by_name_and_place(void **state)
{
    (void)state;
    static const int32_t dtypes[] = {PF_BF16, PF_F16, PF_F32};
    static const char *const names[] = {"BF16", "F16", "F32"};
    static const float w[] = {0x1.fep127F, 65504.0F, FLT_MAX};
    static const float half_ulp[] = {0x1p119F, 16.0F, 0x1p103F}; /* a tie goes to infinity */
    for (int i = 0; i < 3; i++) {
        struct tiny y;
        pf_error err = {0};
        tiny_set(&y, dtypes[i], w[i], DELTA_DIFF, half_ulp[i], 0, 1);
        assert_int_equal(merge_bound_check(&y.t, "blocks.0.w", NULL, &err), PF_E_OVERFLOW);
        assert_err(&err, PF_E_OVERFLOW, "tensor 'blocks.0.w'", "row 0, column 0", names[i]);
        tiny_set(&y, dtypes[i], w[i], DELTA_DIFF, half_ulp[i] * 0.99F, 0, 1);
        assert_int_equal(merge_bound_check(&y.t, "w", NULL, NULL), PF_OK);
        tiny_set(&y, dtypes[i], w[i], DELTA_DIFF, half_ulp[i], 0, -1);
        assert_int_equal(merge_bound_check(&y.t, "w", NULL, NULL), PF_OK);
    }
}

/* The chain or a product leaves f32 before s brings it back. */
static void infinite_intermediates_are_refused(void **state)
{
    (void)state;
    struct tiny y;
    tiny_set(&y, PF_BF16, 1, DELTA_LORA, 0x1p100F, 0x1p100F, 0x1p-120F);
    assert_int_equal(merge_bound_check(&y.t, "w", NULL, NULL), PF_E_OVERFLOW);
    tiny_set(&y, PF_BF16, 1, DELTA_LOHA, 0x1p40F, 0x1p40F, 0x1p-120F);
    assert_int_equal(merge_bound_check(&y.t, "w", NULL, NULL), PF_E_OVERFLOW);
    tiny_set(&y, PF_BF16, 1, DELTA_LOKR, 0x1p40F, 0x1p40F, 0x1p-120F);
    assert_int_equal(merge_bound_check(&y.t, "w", NULL, NULL), PF_E_OVERFLOW);
    tiny_set(&y, PF_BF16, 1, DELTA_LOHA, 0x1p20F, 0x1p20F, 0x1p-60F);
    assert_int_equal(merge_bound_check(&y.t, "w", NULL, NULL), PF_OK);
    tiny_set(&y, PF_BF16, 1, DELTA_DIFF, 1, 0, INFINITY);
    assert_int_equal(merge_bound_check(&y.t, "w", NULL, NULL), PF_E_OVERFLOW);
}

/* An f16 weight that would overflow as f16 is fine when the merge keeps f32. */
static void merge_precision_f32_has_the_range_of_f32(void **state)
{
    (void)state;
    struct tiny y;
    tiny_set(&y, PF_F16, 65504, DELTA_DIFF, 1000, 0, 1);
    assert_int_equal(merge_bound_check(&y.t, "w", NULL, NULL), PF_E_OVERFLOW);
    y.t.out_dtype = PF_F32;
    assert_int_equal(merge_bound_check(&y.t, "w", NULL, NULL), PF_OK);
}

static void weights_that_are_not_finite_already_do_not_count(void **state)
{
    (void)state;
    static const uint16_t base[] = {0x7f80, 0xff80, 0x7fc1};
    for (int i = 0; i < 3; i++) {
        struct tiny y;
        tiny_set(&y, PF_BF16, 0, DELTA_DIFF, 0x1p120F, 0, 1);
        memcpy(y.base, &base[i], 2);
        assert_int_equal(merge_bound_check(&y.t, "w", NULL, NULL), PF_OK);
    }
}

/* One bad element among many panels: the first one is named, whatever the threads. */
static void the_first_of_many_is_named(void **state)
{
    (void)state;
    enum { ROWS = 700, COLS = 1000 };
    uint16_t *base = calloc((size_t)ROWS * COLS, 2);
    uint16_t *diff = calloc((size_t)ROWS * COLS, 2);
    base[653 * COLS + 17] = 0x7f7f;
    base[699 * COLS + 999] = 0x7f7f;
    diff[653 * COLS + 17] = 0x7f00;
    diff[699 * COLS + 999] = 0x7f00;
    const struct delta d = {.kind = DELTA_DIFF,
                            .n_rows = ROWS,
                            .n_cols = COLS,
                            .f = {{(const uint8_t *)diff, PF_BF16, ROWS, COLS, COLS, 1}},
                            .max_abs = {0x1p127}};
    const struct merge_term term = {&d, 1};
    const struct merge_target t = {(const uint8_t *)base, PF_BF16, PF_BF16, ROWS, COLS, &term, 1};
    struct pool *pool;
    pf_error err;
    assert_ok(pool_new(2, &pool, &err), &err);
    assert_int_equal(merge_bound_check(&t, "w", pool, &err), PF_E_OVERFLOW);
    assert_err(&err, PF_E_OVERFLOW, "row 653, column 17");
    assert_int_equal(merge_bound_check(&t, "w", NULL, &err), PF_E_OVERFLOW);
    assert_err(&err, PF_E_OVERFLOW, "row 653, column 17");
    pool_free(pool);
    free(base);
    free(diff);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ordinary_deltas_pass),
        cmocka_unit_test(large_deltas_on_small_weights_pass),
        cmocka_unit_test(overflow_is_refused_by_name_and_place),
        cmocka_unit_test(infinite_intermediates_are_refused),
        cmocka_unit_test(merge_precision_f32_has_the_range_of_f32),
        cmocka_unit_test(weights_that_are_not_finite_already_do_not_count),
        cmocka_unit_test(the_first_of_many_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
