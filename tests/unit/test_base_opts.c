/*
 * Options of callers that were built with another header, and of those who give none.
 */
#include "testing.h"

#include "base/opts.h"

struct now {
    uint32_t size;
    uint32_t a;
    uint64_t b;
};

static void what_a_shorter_struct_lacks_is_the_default(void **state)
{
    const struct now given = {.size = offsetof(struct now, b), .a = 7, .b = 9};
    struct now got;
    (void)state;
    opts_read(&got, sizeof got, &given);
    assert_int_equal(got.size, sizeof got);
    assert_int_equal(got.a, 7);
    assert_int_equal(got.b, 0);
}

static void a_longer_struct_is_cut(void **state)
{
    const struct {
        struct now now;
        uint64_t more;
    } given = {{.size = sizeof given, .a = 7, .b = 9}, 11};
    struct now got[2] = {{0}, {.a = 5}};
    (void)state;
    opts_read(&got[0], sizeof got[0], &given);
    assert_int_equal(got[0].size, sizeof got[0]);
    assert_int_equal(got[0].b, 9);
    assert_int_equal(got[1].size, 0);
    assert_int_equal(got[1].a, 5);
}

static void no_options_and_no_size_are_fine(void **state)
{
    const struct now given = {.a = 7, .b = 9};
    struct now got = {.a = 1};
    (void)state;
    opts_read(&got, sizeof got, NULL);
    assert_int_equal(got.size, sizeof got);
    assert_int_equal(got.a, 0);
    opts_read(&got, sizeof got, &given);
    assert_int_equal(got.size, sizeof got);
    assert_int_equal(got.b, 9);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_a_shorter_struct_lacks_is_the_default),
        cmocka_unit_test(a_longer_struct_is_cut),
        cmocka_unit_test(no_options_and_no_size_are_fine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
