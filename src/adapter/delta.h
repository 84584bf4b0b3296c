/*
 * A delta: a change to one base tensor, or to a row range of it, in factored form. Made by adapter/resolve, evaluated panel
 * by panel by merge/, never materialised whole. Factors point into the adapter's mapping (unaligned, any factor dtype); the
 * delta borrows them and lives no longer than its adapter.
 *
 * A new kind goes here (what it is), in adapter/ (where it is read from) and in merge/terms.c (how a panel of it is computed).
 */
#ifndef PF_ADAPTER_DELTA_H
#define PF_ADAPTER_DELTA_H

#include "base/str.h"
#include "tensor/shape.h"

/* A matrix somewhere in a mapped file: element (i, j) is at p + (i * row_stride + j * col_stride) * dtype size. Strides are in
 * elements, so that a transpose, or the flattened kernel of a convolution, costs nothing. */
struct factor {
    const uint8_t *p;
    int32_t dtype;
    int64_t n_rows, n_cols;
    int64_t row_stride, col_stride;
};

enum delta_kind {
    DELTA_LORA, /* f[0] = B (rows, r), f[1] = A (r, cols): B A */
    DELTA_LOHA, /* f[0] = w1a (rows, r), f[1] = w1b (r, cols), f[2] = w2a, f[3] = w2b: (w1a w1b) o (w2a w2b) */
    DELTA_LOKR, /* kron(w1, w2), each whole or factored: w1 = f[0] or f[0] f[1]; w2 = f[2] or f[2] f[3] (unused: p == NULL) */
    DELTA_DIFF, /* f[0] (rows, cols): itself */
};

struct delta {
    enum delta_kind kind;
    uint32_t i_tensor;    /* of the checkpoint */
    int64_t row0, n_rows; /* rows of W that it changes; row 0 of the delta is row `row0` of W */
    int64_t n_cols;       /* as W folded */
    int64_t rank; /* the chain's length; of LoKr the larger of its factored sides, 0 when whole */
    double scale; /* alpha / rank (or / sqrt(rank)); strength is not in it. 1 for diff and bias */
    struct factor f[4];
    double max_abs[4]; /* of each factor, for the overflow proof; 0 when unused */
    /* The module as spelled in the file: last tie-break of the canonical order, and messages */
    const char *key;
};

#endif
