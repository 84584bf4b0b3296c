/*
 * The merge kernel beside its bounds: memory (memcpy), arithmetic (fused multiply-adds that touch no memory), and the yardstick that
 * everyone knows, OpenBLAS sgemm of the same shape. The kernel reads and writes bf16 weights, whole, panel by panel, through merge_read;
 * sgemm only writes f32. All of it is measured in turn in each repetition.
 */
#include "bench/bench_merge.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "base/pool.h"
#include "base/proc.h"
#include "bench/stats.h"
#include "merge/kernel.h"
#include "merge/merge.h"
#include "model/gemm.h"
#include "tensor/dtype.h"

enum { PANEL_BYTES = 4 << 20, THREADS_MAX = 256, RANK_MAX = 4096, RANKS_MAX = 64 };

static const int64_t default_ranks[] = {16, 32, 64, 128};

struct lab {
    struct bench_merge_opts o; /* defaults filled in */
    int64_t rank_max;
    uint8_t *base, *out; /* (rows, cols) bf16 */
    float *product;      /* (rows, cols) f32: where sgemm writes */
    float *b, *a; /* (rows, rank_max), (rank_max, cols): sgemm's, and with f32 factors ours */
    uint16_t *b_bf16, *a_bf16;
    struct merge_scratch **scratch;
    struct pool *pool; /* of the run in progress */
    unsigned n_threads;
    int64_t n_peak_rounds;
    struct merge_target target;
    struct delta delta;
    struct merge_term term;
    float sink; /* keeps the peak loop alive */
};

static void lab_release(struct lab *lab)
{
    for (unsigned i = 0; lab->scratch != NULL && i < lab->o.n_threads; i++)
        merge_scratch_free(lab->scratch[i]);
    mem_free(lab->scratch);
    mem_free(lab->base);
    mem_free(lab->out);
    mem_free(lab->product);
    mem_free(lab->b);
    mem_free(lab->a);
    mem_free(lab->b_bf16);
    mem_free(lab->a_bf16);
}

static int take(void **out, int64_t rows, int64_t cols, size_t size, pf_error *err)
{
    size_t n;
    if (!mul_size((size_t)rows, (size_t)cols, &n) || !mul_size(n, size, &n))
        return err_set(err, PF_E_RANGE, "bench: %lld x %lld is too large", (long long)rows,
                       (long long)cols);
    *out = mem_aligned(4096, n);
    if (*out == NULL)
        return err_nomem(err, n, "benchmark operands");
    memset(*out, 0, n); /* touched now, not while the clock runs */
    return PF_OK;
}

static float next_value(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return ((float)(*state >> 8) - 8388608.0F) * 0x1p-28F; /* within +-1/32 */
}

static void lab_fill(struct lab *lab)
{
    uint32_t state = 1;
    const int64_t n_b = lab->o.n_rows * lab->rank_max;
    const int64_t n_a = lab->rank_max * lab->o.n_cols;
    for (int64_t i = 0; i < lab->o.n_rows * lab->o.n_cols; i++) {
        const uint16_t h = bf16_from_f32(next_value(&state));
        memcpy(lab->base + i * 2, &h, 2);
    }
    for (int64_t i = 0; i < n_b; i++) {
        lab->b_bf16[i] = bf16_from_f32(next_value(&state));
        lab->b[i] = f32_from_bf16(lab->b_bf16[i]);
    }
    for (int64_t i = 0; i < n_a; i++) {
        lab->a_bf16[i] = bf16_from_f32(next_value(&state));
        lab->a[i] = f32_from_bf16(lab->a_bf16[i]);
    }
}

static int lab_init(struct lab *lab, pf_error *err)
{
    const int64_t m = lab->o.n_rows, n = lab->o.n_cols, r = lab->rank_max;
    int rc = take((void **)&lab->base, m, n, 2, err);
    rc = rc == PF_OK ? take((void **)&lab->out, m, n, 2, err) : rc;
    rc = rc == PF_OK ? take((void **)&lab->product, m, n, 4, err) : rc;
    rc = rc == PF_OK ? take((void **)&lab->b, m, r, 4, err) : rc;
    rc = rc == PF_OK ? take((void **)&lab->a, r, n, 4, err) : rc;
    rc = rc == PF_OK ? take((void **)&lab->b_bf16, m, r, 2, err) : rc;
    rc = rc == PF_OK ? take((void **)&lab->a_bf16, r, n, 2, err) : rc;
    if (rc != PF_OK)
        return rc;
    lab->scratch = mem_calloc(lab->o.n_threads, sizeof(*lab->scratch));
    if (lab->scratch == NULL)
        return err_nomem(err, lab->o.n_threads * sizeof(*lab->scratch), "benchmark scratch");
    for (unsigned i = 0; i < lab->o.n_threads; i++) {
        rc = merge_scratch_new(&lab->scratch[i], err);
        if (rc != PF_OK)
            return rc;
    }
    lab_fill(lab);
    return PF_OK;
}

/* ------------------------------------------------------------------------------ what is measured */

static void merge_task(void *ctx, size_t i_task, unsigned i_worker)
{
    struct lab *lab = ctx;
    const struct merge_target *t = &lab->target;
    const int64_t n_most = PANEL_BYTES / (t->n_cols * 2) > 0 ? PANEL_BYTES / (t->n_cols * 2) : 1;
    const int64_t row0 = (int64_t)i_task * n_most;
    const struct merge_panel panel = {row0, t->n_rows - row0 < n_most ? t->n_rows - row0 : n_most,
                                      0, t->n_cols};
    merge_read(t, &panel, false, lab->out + row0 * t->n_cols * 2, lab->scratch[i_worker]);
}

static double merge_seconds(struct lab *lab)
{
    const int64_t n_most =
        PANEL_BYTES / (lab->o.n_cols * 2) > 0 ? PANEL_BYTES / (lab->o.n_cols * 2) : 1;
    const uint64_t t0 = clock_ns();
    pool_run(lab->pool, (size_t)((lab->o.n_rows + n_most - 1) / n_most), merge_task, lab);
    return (double)(clock_ns() - t0) * 1e-9;
}

static double sgemm_seconds(struct lab *lab, int64_t rank)
{
    const int64_t m = lab->o.n_rows, n = lab->o.n_cols;
    gemm_yardstick_threads(lab->n_threads);
    const uint64_t t0 = clock_ns();
    gemm_nn(m, n, rank, lab->b, rank, lab->a, n, lab->product, n);
    const double seconds = (double)(clock_ns() - t0) * 1e-9;
    gemm_yardstick_threads(1);
    return seconds;
}

static void copy_task(void *ctx, size_t i_task, unsigned i_worker)
{
    struct lab *lab = ctx;
    const size_t n = (size_t)(lab->o.n_rows * lab->o.n_cols) * 2;
    const size_t at = i_task * PANEL_BYTES;
    (void)i_worker;
    memcpy(lab->out + at, lab->base + at, n - at < PANEL_BYTES ? n - at : PANEL_BYTES);
}

static double copy_seconds(struct lab *lab)
{
    const size_t n = (size_t)(lab->o.n_rows * lab->o.n_cols) * 2;
    const uint64_t t0 = clock_ns();
    pool_run(lab->pool, (n + PANEL_BYTES - 1) / PANEL_BYTES, copy_task, lab);
    return (double)(clock_ns() - t0) * 1e-9;
}

static void peak_task(void *ctx, size_t i_task, unsigned i_worker)
{
    struct lab *lab = ctx;
    const float sum = kernel_selected()->peak(lab->n_peak_rounds);
    if (i_task == 0)
        lab->sink += sum;
    (void)i_worker;
}

static double peak_seconds(struct lab *lab)
{
    const uint64_t t0 = clock_ns();
    pool_run(lab->pool, lab->n_threads, peak_task, lab);
    return (double)(clock_ns() - t0) * 1e-9;
}

/* -------------------------------------------------------------------------------------- running */

static void lab_set_rank(struct lab *lab, int64_t rank)
{
    const int64_t m = lab->o.n_rows, n = lab->o.n_cols;
    const int32_t dtype = lab->o.is_f32_factors ? PF_F32 : PF_BF16;
    const void *b = lab->o.is_f32_factors ? (const void *)lab->b : lab->b_bf16;
    const void *a = lab->o.is_f32_factors ? (const void *)lab->a : lab->a_bf16;
    lab->delta = (struct delta){.kind = DELTA_LORA,
                                .n_rows = m,
                                .n_cols = n,
                                .rank = rank,
                                .scale = 1,
                                .f = {{b, dtype, m, rank, rank, 1}, {a, dtype, rank, n, n, 1}}};
    lab->term = (struct merge_term){&lab->delta, 0.5F};
    lab->target = (struct merge_target){lab->base, PF_BF16, PF_BF16, m, n, &lab->term, 1};
}

struct rank_times {
    double ours[BENCH_REPS_MAX], theirs[BENCH_REPS_MAX];
};

/* One rank's row. Returns sgemm's time over ours: the median of pairs. */
static double report_rank(const struct lab *lab, int64_t rank, struct rank_times *times,
                          double peak, struct json *rows)
{
    const double ratio = bench_median_ratio(times->theirs, times->ours, lab->o.n_reps);
    const double t = bench_median(times->ours, lab->o.n_reps);
    const double t_sgemm = bench_median(times->theirs, lab->o.n_reps);
    const double n = (double)lab->o.n_rows * (double)lab->o.n_cols;
    const double gflop = 2e-9 * n * (double)rank;
    struct json *row = json_new_object();
    json_set_int(row, "rank", rank);
    json_set_real(row, "gflop_s", gflop / t);
    json_set_real(row, "gb_s", 4e-9 * n / t); /* read and written */
    json_set_real(row, "sgemm_gflop_s", gflop / t_sgemm);
    json_set_real(row, "ratio", ratio);
    json_set_real(row, "of_peak", gflop / t / peak);
    json_add(rows, row);
    return ratio;
}

/* Everything once per repetition, in turn. The round before the first warms pages and clocks. */
static void measure(struct lab *lab, double *copy, double *spin, struct rank_times *times)
{
    lab->n_peak_rounds = 1000;
    while (peak_seconds(lab) < 4e-3)
        lab->n_peak_rounds *= 2;
    (void)copy_seconds(lab);
    for (unsigned i = 0; i < lab->o.n_reps; i++) {
        copy[i] = copy_seconds(lab);
        spin[i] = peak_seconds(lab);
        for (size_t j = 0; j < lab->o.n_ranks; j++) {
            lab_set_rank(lab, lab->o.ranks[j]);
            times[j].ours[i] = merge_seconds(lab);
            times[j].theirs[i] = sgemm_seconds(lab, lab->o.ranks[j]);
        }
    }
}

static int run_threads(struct lab *lab, unsigned n_threads, struct json *runs, pf_error *err)
{
    const struct kernel *kernel = kernel_selected();
    double copy[BENCH_REPS_MAX], spin[BENCH_REPS_MAX];
    struct rank_times *times = mem_calloc(lab->o.n_ranks, sizeof(*times));
    if (times == NULL)
        return err_nomem(err, lab->o.n_ranks * sizeof(*times), "benchmark times");
    const int rc = pool_new(n_threads, &lab->pool, err);
    if (rc != PF_OK)
        goto out;
    lab->n_threads = n_threads;
    measure(lab, copy, spin, times);
    const double n_bytes = 4 * (double)lab->o.n_rows * (double)lab->o.n_cols;
    const double flop =
        2 * (double)lab->n_peak_rounds * (double)(kernel->mr * kernel->nr) * n_threads;
    const double peak = flop * 1e-9 / bench_median(spin, lab->o.n_reps);
    struct json *run = json_new_object();
    struct json *rows = json_new_array();
    double log_sum = 0;
    for (size_t i = 0; i < lab->o.n_ranks; i++)
        log_sum += log(report_rank(lab, lab->o.ranks[i], &times[i], peak, rows));
    json_set_int(run, "threads", n_threads);
    json_set_real(run, "memcpy_gb_s", n_bytes * 1e-9 / bench_median(copy, lab->o.n_reps));
    json_set_real(run, "peak_gflop_s", peak);
    json_set(run, "ranks", rows);
    json_set_real(run, "ratio_geomean", exp(log_sum / (double)lab->o.n_ranks));
    json_add(runs, run);
    pool_free(lab->pool);
    lab->pool = NULL;
out:
    mem_free(times);
    return rc;
}

static int fill_defaults(struct bench_merge_opts *o, int64_t *out_rank_max, pf_error *err)
{
    o->n_rows = o->n_rows == 0 ? 5376 : o->n_rows;
    o->n_cols = o->n_cols == 0 ? 7168 : o->n_cols;
    if (o->n_ranks == 0) {
        o->ranks = default_ranks;
        o->n_ranks = PF_COUNTOF(default_ranks);
    }
    o->n_threads = o->n_threads == 0 ? pool_default_threads() : o->n_threads;
    o->n_reps = o->n_reps == 0 ? 7 : o->n_reps;
    if (o->n_rows < 1 || o->n_cols < 1 || o->n_rows > INT32_MAX || o->n_cols > INT32_MAX)
        return err_set(err, PF_E_INVALID, "bench merge: %lld x %lld is no shape",
                       (long long)o->n_rows, (long long)o->n_cols);
    if (o->n_reps > BENCH_REPS_MAX || o->n_threads > THREADS_MAX)
        return err_set(err, PF_E_INVALID,
                       "bench merge: %u repetitions by %u threads; at most %d and %d", o->n_reps,
                       o->n_threads, BENCH_REPS_MAX, THREADS_MAX);
    if (o->n_ranks > RANKS_MAX)
        return err_set(err, PF_E_INVALID, "bench merge: %zu ranks; at most %d", o->n_ranks,
                       RANKS_MAX);
    *out_rank_max = 1;
    for (size_t i = 0; i < o->n_ranks; i++) {
        if (o->ranks[i] < 1 || o->ranks[i] > RANK_MAX)
            return err_set(err, PF_E_INVALID, "bench merge: rank %lld is not within 1..%d",
                           (long long)o->ranks[i], RANK_MAX);
        *out_rank_max = o->ranks[i] > *out_rank_max ? o->ranks[i] : *out_rank_max;
    }
    return PF_OK;
}

int bench_merge_run(const struct bench_merge_opts *opts, struct json **out, pf_error *err)
{
    struct lab lab = {.o = opts == NULL ? (struct bench_merge_opts){0} : *opts};
    struct json *result = NULL;
    const char *kernel = NULL;
    int rc = fill_defaults(&lab.o, &lab.rank_max, err);
    if (rc != PF_OK)
        return rc;
    rc = merge_kernel_init(&kernel, err);
    if (rc == PF_OK)
        rc = gemm_init(err);
    if (rc == PF_OK)
        rc = lab_init(&lab, err);
    if (rc != PF_OK)
        goto out;
    result = json_new_object();
    struct json *runs = json_new_array();
    json_set_z(result, "kernel", kernel);
    json_set_z(result, "blas_core", gemm_core());
    json_set_int(result, "rows", lab.o.n_rows);
    json_set_int(result, "cols", lab.o.n_cols);
    json_set(result, "runs", runs);
    rc = run_threads(&lab, 1, runs, err);
    if (rc == PF_OK && lab.o.n_threads > 1)
        rc = run_threads(&lab, lab.o.n_threads, runs, err);
    if (rc == PF_OK)
        *out = result;
    else
        json_free(result);
out:
    lab_release(&lab);
    return rc;
}

void bench_merge_print(const struct json *result, FILE *f)
{
    const struct json *runs = json_get(result, "runs");
    fprintf(f, "kernel %s, W %lld x %lld bf16, sgemm by OpenBLAS (%s)\n",
            json_z(json_get(result, "kernel")), (long long)bench_number(result, "rows"),
            (long long)bench_number(result, "cols"), json_z(json_get(result, "blas_core")));
    for (size_t i = 0; i < json_len(runs); i++) {
        const struct json *run = json_at(runs, i);
        const struct json *ranks = json_get(run, "ranks");
        fprintf(f, "\n%lld thread%s: memcpy %.1f GB/s, peak %.1f GFLOP/s\n",
                (long long)bench_number(run, "threads"),
                bench_number(run, "threads") > 1 ? "s" : "", bench_number(run, "memcpy_gb_s"),
                bench_number(run, "peak_gflop_s"));
        fprintf(f, "  rank   merge GFLOP/s   of peak      GB/s   sgemm GFLOP/s   merge/sgemm\n");
        for (size_t j = 0; j < json_len(ranks); j++) {
            const struct json *row = json_at(ranks, j);
            fprintf(f, "  %4lld %15.1f %8.0f%% %9.1f %15.1f %13.2f\n",
                    (long long)bench_number(row, "rank"), bench_number(row, "gflop_s"),
                    bench_number(row, "of_peak") * 100, bench_number(row, "gb_s"),
                    bench_number(row, "sgemm_gflop_s"), bench_number(row, "ratio"));
        }
        fprintf(f, "  geometric mean of merge/sgemm: %.2f\n", bench_number(run, "ratio_geomean"));
    }
}
