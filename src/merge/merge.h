/*
 * The arithmetic contract (docs/arithmetic.md): merged panels from a base panel and deltas. Bytes do not depend on
 * instruction set, panel shape or thread count. Called by view/ (reads), export/ and overlay/ (writes), in place as well. Must never
 * allocate, lock, or look at anything but its arguments.
 *
 *     kernel.h / kernel_<isa>.c   loops per instruction set, one source; kernel_scalar is the oracle
 *     select.c                    chosen once, after a self-check against the oracle; PF_ISA forces one
 *     terms.c                     one delta kind -> its f32 chain for a tile
 *     merge.c                     tiles of a panel: terms in order, one rounding
 *     bound.c                     the overflow proof
 *     fidelity.c                  survival and changed fraction
 */
#ifndef PF_MERGE_MERGE_H
#define PF_MERGE_MERGE_H

#include "adapter/delta.h"
#include "base/pool.h"

/* One delta as applied: s = (float)(strength * scale), computed in double and rounded once. */
struct merge_term {
    const struct delta *delta;
    float s;
};

/* Everything about one base tensor under one composition. Terms in canonical order; none with s == 0. */
struct merge_target {
    const uint8_t *base; /* rows x cols, packed, row major, unaligned */
    int32_t dtype;       /* of the base: F32, F16, BF16 */
    int32_t out_dtype;   /* == dtype, or F32 for merge precision f32 */
    int64_t n_rows, n_cols;
    const struct merge_term *terms;
    size_t n_terms;
};

struct merge_scratch; /* one worker's; bounded whatever the rank and shape (<= 4 MiB) */
int merge_scratch_new(struct merge_scratch **out, pf_error *err);
void merge_scratch_free(struct merge_scratch *s);

struct merge_panel {
    int64_t row0, n_rows, col0, n_cols;
};

/*
 * out: n_rows x n_cols packed, in out_dtype (as_f32 false) or as f32: the f32 value of the out_dtype bytes (true). Rows that no
 * term touches are copied bit for bit. No error is possible: overflow was excluded by merge_bound_check.
 */
void merge_read(const struct merge_target *t, const struct merge_panel *panel, bool as_f32,
                void *out, struct merge_scratch *s);

/* Counts the panels that merge_read computed with at least one term: tests assert 0 where an overlay serves. */
uint64_t merge_n_panels(void);
uint64_t merge_n_bytes(void); /* what those panels delivered */

/* The largest magnitude of W + total that the terms allow is finite in out_dtype, by the bound of docs/arithmetic.md where that decides, else by
 * computing. PF_E_OVERFLOW names `name`. pool may be NULL. */
int merge_bound_check(const struct merge_target *t, const char *name, struct pool *pool,
                      pf_error *err);

struct fidelity_sum {
    double applied_x_wanted, wanted2;
    uint64_t n_elements, n_changed;
};
/* Adds rows row0, row0 + stride, ... of the target (all rows with stride 1). Deterministic for a given stride. */
int merge_fidelity(const struct merge_target *t, int64_t row0, int64_t stride,
                   struct fidelity_sum *sum, struct merge_scratch *s, pf_error *err);

/* Fast exact conversion with the selected kernel; dtype F32, F16 or BF16 (others fall back to dtype_to_f32). */
void merge_to_f32(int32_t dtype, const void *src, size_t n, float *dst);

/* "avx512". PF_E_UNSUPPORTED when PF_ISA names one that this CPU lacks, or none. The first call decides for the process. */
int merge_kernel_init(const char **out_name, pf_error *err);

#endif
