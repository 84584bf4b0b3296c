/*
 * A process that changes adapters and builds an overlay for one model while it draws with another stays below 256 MiB of anonymous
 * memory, in a control group of 1 GiB that neither model fits in with its overlay. The full size is `pageflip bench memory`.
 */
#include "testing.h"

#include "bench/memory.h"
#include "bench/stats.h"

#define MIB ((double)(1 << 20))

static void two_engines_stay_within_256_mib(void **state)
{
    struct json *result = NULL;
    pf_error err;
    /* 2 GB of h3, which makes 1.5 GB of overlay, and half a GB of transformer */
    const struct bench_memory_opts o = {
        .h3_scale = 0.02, .dit_scale = 0.06, .dir = *state, .n_reps = 2};
    assert_ok(bench_memory_run(&o, &result, &err), &err);
    bench_memory_print(result, stdout);
    if (!json_z(json_get(result, "group")))
        print_message("SKIP: bench_memory group: no memory control group can be made here: the "
                      "memory test ran without one\n");
    assert_true(bench_number(result, "h3_bytes") > 1.9e9);
    assert_true(bench_number(result, "dit_bytes") > 0.4e9);
    assert_true(bench_number(result, "overlay_bytes") > 1.4e9);
    assert_true(bench_number(result, "passes") > 0);
    assert_int_equal(json_len(json_get(result, "ops")), 4);
    for (size_t i = 0; i < 4; i++) {
        const double peak =
            bench_number(json_at(json_get(result, "ops"), i), "peak_anon_bytes") / MIB;
        assert_true(peak > 0.5); /* the sampler looked */
        assert_true(peak < 256);
    }
    assert_true(json_bool(json_get(result, "is_within")));
    json_free(result);
}

static void refuses_limits_that_mean_nothing(void **state)
{
    struct json *result = NULL;
    pf_error err;
    const struct bench_memory_opts o = {.n_limit_bytes = 1 << 20, .dir = *state};
    assert_int_equal(bench_memory_run(&o, &result, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "a limit of 1 MiB", "at least 256");
    assert_null(result);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(two_engines_stay_within_256_mib),
        in_dir(refuses_limits_that_mean_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
