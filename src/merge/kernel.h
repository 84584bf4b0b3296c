/*
 * Loops per instruction set: what merge.c and terms.c ask of a kernel. One source (kernel_body.inc) is compiled once per
 * instruction set; kernel_scalar is the oracle. Every output element is one chain of its own, so the bytes cannot depend on how wide
 * a vector is or how a block is cut. Kernels never allocate, never look at a tensor's file, never read or write out of bounds
 * of `base` and `out` (the f32 tiles are padded to nr columns and mr rows, and may be touched there).
 */
#ifndef PF_MERGE_KERNEL_H
#define PF_MERGE_KERNEL_H

#include "base/cpu.h"
#include <stddef.h>

enum {
    KERNEL_K = 256,     /* links of a chain per pass: the row stride of packed B */
    KERNEL_MR_MAX = 16, /* padding of every f32 tile */
    KERNEL_NR_MAX = 32,
};

/* What happens to W + total. */
enum kernel_finish {
    FINISH_ROUND,     /* rounded to the base's dtype and stored as such */
    FINISH_ROUND_F32, /* rounded to the base's dtype, stored as the f32 of that value */
    FINISH_F32,       /* not rounded further */
};

/*
 * n_rows x n_cols elements. For each: the chain (k ascending, from chain_in or +0), then the first that is set of
 *     chain_out: store the chain
 *     total_out: store fma(s, chain x mul, total_in)
 *     otherwise: base + fma(s, chain x mul, total_in), finished, to out
 * where mul NULL is no product and total_in NULL is +0. n_k may be 0: then chain_in is the value.
 */
struct strip {
    const float *b; /* (n_rows, n_k), row stride KERNEL_K */
    const float *a; /* groups of nr columns, each (n_k, nr) */
    int64_t n_k, n_rows, n_cols;
    int64_t ld; /* row stride of the f32 tiles that follow: a multiple of nr */
    const float *chain_in;
    float *chain_out;
    const float *mul;
    const float *total_in;
    float *total_out;
    float s;
    int32_t dtype; /* of base: F32, F16, BF16 */
    enum kernel_finish finish;
    /* a was packed so, and the f32 tiles hold columns in that order; bf16, FINISH_ROUND, no mul */
    bool is_split;
    const uint8_t *base; /* unaligned */
    size_t base_stride;  /* bytes */
    uint8_t *out;        /* unaligned */
    size_t out_stride;
};

struct kernel {
    enum cpu_isa isa;
    int64_t mr, nr;
    void (*strip)(const struct strip *p);
    bool has_split;
    /* n elements of F32, F16 or BF16 as f32 into groups of nr, group_stride floats apart; the last is padded with zeros. Split: the even
     * columns of a group come first, then the odd ones: the order in which bf16 pairs fall apart without a shuffle. */
    void (*pack)(int32_t dtype, const uint8_t *src, int64_t n, float *dst, int64_t group_stride,
                 bool is_split);
    void (*to_f32)(int32_t dtype, const void *src, size_t n, float *dst); /* F32, F16, BF16 */
    /* n rounds of mr x nr fused multiply-adds that touch no memory: the bound that benchmarks compare with. Returns their sum. */
    float (*peak)(int64_t n);
};

/* What this build has: NULL where it has none. Whether the CPU can run it is cpu_has()'s to say. */
const struct kernel *kernel_built(enum cpu_isa isa);

/* The selected kernel (select.c). The scalar one when selection failed. */
const struct kernel *kernel_selected(void);

extern const struct kernel kernel_scalar;

#endif
