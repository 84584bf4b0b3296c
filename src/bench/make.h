/*
 * Synthetic checkpoints and adapters of real geometry, for measuring and for tests: `pageflip bench make`. The weights are
 * seeded noise; the bytes depend on the options and the seed alone, not on threads, machine or history.
 *
 *   h3     one .safetensors file. ceil(50 X) blocks `transformer_blocks.N` and ceil(2 X) `refiner_blocks.N`, each with
 *              attn.to_qkv.weight      [21504, 5376]
 *              attn.to_out.0.weight    [5376, 7168]
 *              ff.net.0.proj.weight    [28672, 5376]
 *              ff.net.2.weight         [5376, 14336]
 *          and norm1.weight, norm2.weight [5376]; then `context_blocks.N.mlp.weight` [*, 5376] of at most 1 GiB each, which no
 *          adapter touches. 61.7 GB at X = 1.
 *   dit    a model directory with a DiTTransformer2DModel in pixel space, of about 8 GB x X: width 64 round(32 X^(1/3)), heads of
 *          64, as many blocks as that takes; 32x32 RGB, patch 4, 64 classes.
 *   emoji  the same with the geometry of the bundled model; ceil(8 X) blocks.
 */
#ifndef PF_BENCH_MAKE_H
#define PF_BENCH_MAKE_H

#include "pageflip.h"

#define BENCH_WEIGHT_RMS 0.02

struct bench_make_report {
    const char *what;   /* "checkpoint" or "adapter" */
    uint32_t n_tensors; /* in the file of weights */
    uint32_t n_targets; /* linears that an adapter for this shape changes */
    uint64_t n_bytes;   /* of the file of weights */
    double seconds;
};

/* With `rank`, what is made is an adapter for that shape: its linears in blocks (h3: the four; else attention, feed-forward and
 * norm1.linear). */
struct bench_make_opts {
    uint32_t size;
    const char *shape; /* "h3", "dit", "emoji" */
    double scale;      /* X; 0: 1 */
    const char *out; /* must not exist. A directory for dit, emoji and peft adapters, else a file */
    uint32_t rank;   /* 0: the checkpoint */
    const char *dialect; /* "peft", "diffusers", "kohya", "native"; NULL: "peft" */
    const char *dtype;   /* of the factors: "F32", "F16", "BF16"; NULL: "F32" */
    double alpha;        /* 0: the rank, which makes the scale 1 */
    double delta_rms;    /* of the delta, relative to that of the weights; 0: 1e-3 */
    uint64_t seed;
    uint32_t n_threads; /* 0: one per CPU that this process may use */
    /* For tests: every width of h3 divided by this power of two, up to 128; 0: 1 */
    uint32_t width_divisor;
    pf_progress_fn progress; /* bytes written; returning false cancels */
    void *progress_ctx;
    struct bench_make_report *report; /* filled on success; NULL: not wanted */
};

/* Writes it all under a temporary name ("OUT.partial" for a directory) and publishes it whole. At most 1 MiB of buffer per thread, and
 * 192 MiB of dirty pages. PF_E_INVALID for options, PF_E_EXISTS, PF_E_NOSPACE, PF_E_CANCELLED. */
int bench_make(const struct bench_make_opts *opts, pf_error *err);

#endif
