/*
 * `pageflip bench merge` and `bench read`: measurements that stand beside their bounds. Repetitions of everything that is compared
 * are interleaved in one run, and medians are reported as ratios, so that a noisy machine is noisy for all of them alike. Called by cli/.
 * Results are JSON; the print functions turn them into text. One call at a time: the yardstick sets OpenBLAS's threads.
 */
#ifndef PF_BENCH_BENCH_MERGE_H
#define PF_BENCH_BENCH_MERGE_H

#include "base/json.h"

/* Zero is the default of every field. */
struct bench_merge_opts {
    int64_t n_rows, n_cols; /* of W: 5376 x 7168 */
    const int64_t *ranks;   /* 16, 32, 64, 128 */
    size_t n_ranks;
    unsigned n_threads;  /* measured with 1 and with this many: pool_default_threads() */
    unsigned n_reps;     /* 7 */
    bool is_f32_factors; /* factors of f32 instead of bf16 */
};

/*
 * The merge kernel on a synthetic bf16 W, beside memcpy (bytes read plus written), the peak of fused multiply-adds and OpenBLAS sgemm of
 * the same (M, N, K = rank): {"kernel", "blas_core", "rows", "cols", "runs": [{"threads", "memcpy_gb_s", "peak_gflop_s", "ranks": [{"rank",
 * "gflop_s", "gb_s", "sgemm_gflop_s", "ratio", "of_peak"}], "ratio_geomean"}]}. Owned by the caller. PF_E_INVALID, PF_E_NOMEM,
 * PF_E_UNSUPPORTED (PF_ISA, OpenBLAS).
 */
int bench_merge_run(const struct bench_merge_opts *opts, struct json **out, pf_error *err);
void bench_merge_print(const struct json *result, FILE *f);

struct bench_read_opts {
    unsigned n_threads;   /* pool_default_threads() */
    unsigned n_reps;      /* 5 */
    uint64_t n_bytes_max; /* tensors in file order until so many bytes: 4 GiB */
};

/*
 * Every tensor of a view, panel by panel, in its own dtype and as f32, beside a plain copy of the mapped base: {"threads", "bytes", "tensors",
 * "plain_gb_s", "native_gb_s", "f32_gb_s", "native_ratio", "f32_ratio"}; GB/s counts weight bytes, once, as they are in the file. `comp` NULL is the base.
 * Owned by the caller. PF_E_INVALID, PF_E_NOMEM, and what reading gives.
 */
struct pf_checkpoint;
struct pf_composition;
int bench_read_run(struct pf_checkpoint *ckpt, struct pf_composition *comp,
                   const struct bench_read_opts *opts, struct json **out, pf_error *err);
void bench_read_print(const struct json *result, FILE *f);

#endif
