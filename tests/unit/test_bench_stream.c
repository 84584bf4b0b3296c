/*
 * Weights twice as big as their memory: the streamer reads what the plan does not keep, the plain mapping reads everything, each pass.
 * In a memory control group where one can be made, and once more with the limit told to the engine only.
 */
#include "testing.h"

#include <linux/magic.h>
#include <sys/vfs.h>

#include "bench/cgroup.h"
#include "bench/stats.h"
#include "bench/stream.h"

#define MIB ((uint64_t)1 << 20)

static void check(const struct json *result, uint64_t n_limit)
{
    const struct json *plain = json_get(result, "plain"), *stream = json_get(result, "stream");
    const double n_bytes = bench_number(result, "bytes");
    const double kept = bench_number(stream, "kept_bytes") / n_bytes;
    bench_stream_print(result, stdout);
    assert_true(n_bytes > 1.9 * (double)n_limit);
    assert_true(kept > 0.2);
    assert_true(kept < 0.55);
    for (size_t i = 0; i < json_len(json_get(plain, "passes")); i++)
        assert_true(bench_number(json_at(json_get(plain, "passes"), i), "read_fraction") > 0.9);
    /* The first pass fills what is kept: everything is read, once. */
    assert_true(bench_number(json_at(json_get(stream, "passes"), 0), "read_fraction") < 1.05);
    for (size_t i = 1; i < json_len(json_get(stream, "passes")); i++)
        assert_true(bench_number(json_at(json_get(stream, "passes"), i), "read_fraction") <=
                    1 - kept + 0.05);
    assert_true(json_bool(json_get(result, "is_within")));
    assert_true(bench_number(stream, "peak_anon_bytes") < 32 * (double)MIB);
}

/* Weights in a tmpfs are never read from storage. */
static const char *disk_dir(void **state)
{
    struct statfs fs;
    assert_int_equal(statfs(*state, &fs), 0);
    return fs.f_type == TMPFS_MAGIC ? "/var/tmp" : *state;
}

static void run(void **state, bool is_grouped)
{
    const uint64_t n_limit = 256 * MIB;
    struct json *result = NULL;
    pf_error err;
    const struct bench_stream_opts o = {
        .n_limit_bytes = n_limit, .dir = disk_dir(state), .n_passes = 3, .no_group = !is_grouped};
    assert_ok(bench_stream_run(&o, &result, &err), &err);
    assert_true((json_z(json_get(result, "group")) != NULL) == is_grouped);
    check(result, n_limit);
    json_free(result);
}

static void reads_what_is_not_kept_in_a_group(void **state)
{
    struct cgroup g;
    pf_error why;
    if (cgroup_make(&g, 256 * MIB, &why)) {
        print_message("%s\n", why.msg);
        print_message("SKIP: bench_stream group: no memory control group can be made here: "
                      "streaming ran without one\n");
        skip();
    }
    cgroup_remove(&g);
    run(state, true);
}

static void reads_what_is_not_kept_without_a_group(void **state)
{
    run(state, false);
}

static void refuses_what_would_measure_nothing(void **state)
{
    struct json *result = NULL;
    pf_error err;
    struct bench_stream_opts o = {.n_limit_bytes = MIB, .dir = *state};
    assert_int_equal(bench_stream_run(&o, &result, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "leaves no room", "at least 64");
    o = (struct bench_stream_opts){.n_limit_bytes = 200 * MIB, .n_model_bytes = 100 * MIB};
    assert_int_equal(bench_stream_run(&o, &result, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "100 MiB fit into a limit of 200 MiB");
    o = (struct bench_stream_opts){.model = PF_SOURCE_DIR "/data/emoji-dit", .n_passes = 1};
    assert_int_equal(bench_stream_run(&o, &result, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "1 passes");
    o = (struct bench_stream_opts){.model = "/nowhere"};
    assert_int_equal(bench_stream_run(&o, &result, &err), PF_E_NOTFOUND);
    assert_null(result);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(reads_what_is_not_kept_in_a_group),
        in_dir(reads_what_is_not_kept_without_a_group),
        in_dir(refuses_what_would_measure_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
