/*
 * bench merge and bench read on something tiny: every number is there and makes sense, and bad options are refused. Speed itself is no
 * unit test.
 */
#include "testing.h"

#include "bench/bench_merge.h"
#include "bench/stats.h"

static double number(const struct json *object, const char *key)
{
    const struct json *v = json_get(object, key);
    assert_true(json_is_number(v));
    return json_number(v);
}

static void merge_reports_every_rank_and_thread_count(void **state)
{
    (void)state;
    static const int64_t ranks[] = {3, 16};
    const struct bench_merge_opts opts = {
        .n_rows = 67, .n_cols = 129, .ranks = ranks, .n_ranks = 2, .n_threads = 2, .n_reps = 1};
    /* One repetition: the median of the pairs is the quotient of the medians. */
    struct json *result = NULL;
    pf_error err;
    assert_ok(bench_merge_run(&opts, &result, &err), &err);
    assert_non_null(json_z(json_get(result, "kernel")));
    assert_non_null(json_z(json_get(result, "blas_core")));
    assert_true(number(result, "rows") == 67 && number(result, "cols") == 129);
    const struct json *runs = json_get(result, "runs");
    assert_int_equal(json_len(runs), 2);
    for (size_t i = 0; i < 2; i++) {
        const struct json *run = json_at(runs, i);
        const struct json *rows = json_get(run, "ranks");
        assert_true(number(run, "threads") == (double)(i + 1));
        assert_true(number(run, "memcpy_gb_s") > 0);
        assert_int_equal(json_len(rows), 2);
        double product = 1;
        for (size_t j = 0; j < 2; j++) {
            const struct json *row = json_at(rows, j);
            assert_true(number(row, "rank") == (double)ranks[j]);
            const double ratio = number(row, "gflop_s") / number(row, "sgemm_gflop_s");
            assert_true(ratio / number(row, "ratio") > 0.999 &&
                        ratio / number(row, "ratio") < 1.001);
            const double of_peak = number(row, "gflop_s") / number(run, "peak_gflop_s");
            assert_true(of_peak / number(row, "of_peak") > 0.999);
            assert_true(of_peak / number(row, "of_peak") < 1.001);
            product *= ratio;
        }
        const double geomean = number(run, "ratio_geomean");
        assert_true(geomean * geomean / product > 0.999 && geomean * geomean / product < 1.001);
    }
    FILE *f = tmpfile();
    char text[4096];
    assert_non_null(f);
    bench_merge_print(result, f);
    rewind(f);
    text[fread(text, 1, sizeof(text) - 1, f)] = '\0';
    assert_non_null(strstr(text, "67 x 129"));
    assert_non_null(strstr(text, "2 threads"));
    assert_non_null(strstr(text, "geometric mean"));
    fclose(f);
    json_free(result);
}

static void ratios_are_of_pairs(void **state)
{
    (void)state;
    /* The second repetition ran on a machine ten times slower: the quotient of the medians would be 1. */
    const double theirs[] = {2, 20, 4}, ours[] = {1, 10, 4};
    assert_true(bench_median_ratio(theirs, ours, 3) > 1.999);
    assert_true(bench_median_ratio(theirs, ours, 3) < 2.001);
}

static void merge_refuses_nonsense(void **state)
{
    (void)state;
    static const int64_t zero[] = {0};
    struct json *result = NULL;
    pf_error err;
    struct bench_merge_opts opts = {.n_rows = -1};
    assert_int_equal(bench_merge_run(&opts, &result, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "-1 x 7168");
    opts = (struct bench_merge_opts){.ranks = zero, .n_ranks = 1};
    assert_int_equal(bench_merge_run(&opts, &result, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "rank 0");
    opts = (struct bench_merge_opts){.n_reps = 100000};
    assert_int_equal(bench_merge_run(&opts, &result, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "100000 repetitions");
    assert_null(result);
}

static void read_reports_the_bundled_model(void **state)
{
    (void)state;
    struct pf_checkpoint *ckpt;
    struct json *result = NULL;
    pf_error err;
    const struct bench_read_opts opts = {.n_threads = 2, .n_reps = 1};
    assert_ok(pf_checkpoint_open(PF_SOURCE_DIR "/data/emoji-dit", NULL, &ckpt, &err), &err);
    assert_ok(bench_read_run(ckpt, NULL, &opts, &result, &err), &err);
    assert_true(number(result, "tensors") > 50);
    assert_true(number(result, "bytes") > 1e6);
    assert_true(number(result, "plain_gb_s") > 0 && number(result, "f32_ratio") > 0);
    const double ratio = number(result, "native_gb_s") / number(result, "plain_gb_s");
    assert_true(ratio / number(result, "native_ratio") > 0.999);
    assert_true(ratio / number(result, "native_ratio") < 1.001);
    bench_read_print(result, stderr);
    json_free(result);
    pf_checkpoint_close(ckpt);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merge_reports_every_rank_and_thread_count),
        cmocka_unit_test(ratios_are_of_pairs),
        cmocka_unit_test(merge_refuses_nonsense),
        cmocka_unit_test(read_reports_the_bundled_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
