/*
 * Shapes: counts at the borders of 64 bits, folding to rows x cols, text.
 */
#include "testing.h"

#include "tensor/shape.h"

static void elements_are_counted_with_overflow_checks(void **state)
{
    (void)state;
    uint64_t n = 77;
    assert_true(shape_n_elements(&(struct shape){.rank = 0}, &n) && n == 1);
    assert_true(shape_n_elements(&(struct shape){2, {128, 3}}, &n) && n == 384);
    assert_true(shape_n_elements(&(struct shape){3, {5, 0, 7}}, &n) && n == 0);
    assert_true(shape_n_elements(&(struct shape){2, {INT64_MAX, 2}}, &n) &&
                n == (uint64_t)INT64_MAX * 2);
    n = 77;
    assert_false(shape_n_elements(&(struct shape){2, {INT64_MAX, 3}}, &n));
    assert_false(
        shape_n_elements(&(struct shape){8, {256, 256, 256, 256, 256, 256, 256, 256}}, &n));
    assert_false(shape_n_elements(&(struct shape){2, {4, -1}}, &n));
    assert_int_equal(n, 77);
    assert_true(shape_n_elements(&(struct shape){8, {255, 255, 255, 255, 255, 255, 255, 255}}, &n));
    assert_true(n == 17878103347812890625u);
}

static void bytes_are_whole(void **state)
{
    (void)state;
    uint64_t n = 77;
    assert_true(shape_n_bytes(&(struct shape){2, {3, 5}}, PF_BF16, &n) && n == 30);
    assert_true(shape_n_bytes(&(struct shape){2, {3, 5}}, PF_F64, &n) && n == 120);
    assert_true(shape_n_bytes(&(struct shape){.rank = 0}, PF_F32, &n) && n == 4);
    assert_true(shape_n_bytes(&(struct shape){1, {4}}, PF_F6_E2M3, &n) && n == 3);
    assert_true(shape_n_bytes(&(struct shape){1, {6}}, PF_F4, &n) && n == 3);
    assert_true(shape_n_bytes(&(struct shape){1, {0}}, PF_F4, &n) && n == 0);
    n = 77;
    assert_false(shape_n_bytes(&(struct shape){1, {3}}, PF_F4, &n));
    assert_false(shape_n_bytes(&(struct shape){1, {5}}, PF_F6_E3M2, &n));
    assert_false(shape_n_bytes(&(struct shape){1, {1ll << 60}}, PF_F64, &n));
    assert_false(shape_n_bytes(&(struct shape){1, {-1}}, PF_F32, &n));
    assert_false(shape_n_bytes(&(struct shape){1, {1}}, PF_N_DTYPES, &n));
    assert_int_equal(n, 77);
}

static void equality_looks_at_rank_and_dims(void **state)
{
    (void)state;
    struct shape a = {2, {3, 4, 9}}, b = {2, {3, 4, 8}}, c = {2, {3, 5}}, d = {3, {3, 4, 9}},
                 e = {0}, f = {1, {1}};
    assert_true(shape_eq(&a, &b)); /* what lies beyond the rank does not count */
    assert_false(shape_eq(&a, &c));
    assert_false(shape_eq(&a, &d));
    assert_false(shape_eq(&e, &f));
    assert_true(shape_eq(&e, &e));
}

static void folding_to_rows_and_cols(void **state)
{
    (void)state;
    static const struct {
        struct shape s;
        int64_t rows, cols;
    } rows[] = {
        {{0, {0}}, 1, 1},
        {{1, {7}}, 7, 1},
        {{2, {3, 5}}, 3, 5},
        {{4, {128, 3, 4, 4}}, 128, 48},
        {{2, {0, 5}}, 0, 5},
        {{2, {5, 0}}, 5, 0},
        {{3, {0, INT64_MAX, 2}}, 0, INT64_MAX},
        {{3, {0, INT64_MAX, 4}}, 0, INT64_MAX},
    };
    for (size_t i = 0; i < PF_COUNTOF(rows); i++) {
        assert_true(shape_rows(&rows[i].s) == rows[i].rows);
        assert_true(shape_cols(&rows[i].s) == rows[i].cols);
    }
}

static void text_is_cut_visibly(void **state)
{
    (void)state;
    char buf[256], tight[16];
    struct shape s = {4, {128, 3, 4, 4}};
    assert_ptr_equal(shape_text(&s, buf, sizeof(buf)), buf);
    assert_string_equal(buf, "[128, 3, 4, 4]");
    assert_string_equal(shape_text(&(struct shape){0}, buf, sizeof(buf)), "[]");
    assert_string_equal(shape_text(&(struct shape){1, {-5}}, buf, sizeof(buf)), "[-5]");
    assert_string_equal(shape_text(&s, tight, 15), "[128, 3, 4, 4]");
    assert_string_equal(shape_text(&s, tight, 14), "[128, 3, 4,..");
    assert_string_equal(shape_text(&s, tight, 6), "[12..");
    assert_string_equal(shape_text(&s, tight, 3), "..");
    assert_string_equal(shape_text(&s, tight, 2), "[");
    assert_string_equal(shape_text(&s, tight, 1), "");
    assert_string_equal(shape_text(&s, tight, 0), "");
    struct shape widest = {
        8,
        {INT64_MIN, INT64_MIN, INT64_MIN, INT64_MIN, INT64_MIN, INT64_MIN, INT64_MIN, INT64_MIN}};
    assert_int_equal(strlen(shape_text(&widest, buf, sizeof(buf))), 2 + 8 * 20 + 7 * 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(elements_are_counted_with_overflow_checks),
        cmocka_unit_test(bytes_are_whole),
        cmocka_unit_test(equality_looks_at_rank_and_dims),
        cmocka_unit_test(folding_to_rows_and_cols),
        cmocka_unit_test(text_is_cut_visibly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
