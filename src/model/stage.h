/*
 * The stage: where the weights of one linear stand as f32 while they are used. A slab of rows, at most 8 MiB, is read through the
 * view by all workers, panel by panel, then multiplied with every sample, tile by tile; then comes the next slab. Slabs,
 * panels and tiles depend on the tensor's shape alone, and each (tile, sample) is a product of its own: neither threads nor batch can
 * show in the bytes. One thread at a time; all memory is taken when it opens.
 */
#ifndef PF_MODEL_STAGE_H
#define PF_MODEL_STAGE_H

#include "base/pool.h"
#include "model/dit.h"
#include "view/view.h"

/* One pool worker's own things. Owned by the worker while the pool runs, by the caller between runs. */
struct stage_worker {
    struct pf_reader *reader;
    float *scratch; /* of attention */
    uint64_t n_weight_bytes;
    int rc; /* of the first read that failed */
    pf_error err;
};

struct stage {
    struct pf_view *view; /* borrowed */
    struct pool *pool;    /* borrowed */
    struct stage_worker *workers;
    unsigned n_workers;
    float *weights; /* one slab */
    float *bias;    /* of its rows */
};

enum epilogue {
    EPI_BIAS,  /* y + bias */
    EPI_SILU,  /* silu(y + bias) */
    EPI_GELU,  /* gelu(y + bias) */
    EPI_TABLE, /* y + bias + table, the same table (n_rows, n_out) for every sample */
    EPI_GATED, /* sum += gate * (y + bias); y is scratch */
};

/* y = epilogue(W x + b) for n_samples matrices x (n_rows, n_in), each y (n_rows, n_out). Strides are in floats. */
struct stage_job {
    const struct dit_linear *linear;
    int64_t n_rows;
    uint32_t n_samples;
    const float *x;
    float *y;
    size_t x_stride, y_stride;
    enum epilogue epilogue;
    const float *table; /* EPI_TABLE */
    float *sum;         /* EPI_GATED: strides as y */
    size_t sum_stride;
    const float *gate; /* EPI_GATED: the gate of sample s is at gate + i_gate[s] * gate_stride */
    const uint32_t *i_gate;
    size_t gate_stride;
};

/* n_bias_max: largest n_out of any linear; n_scratch: floats of scratch per worker. */
int stage_open(struct stage *s, struct pf_view *view, struct pool *pool, size_t n_bias_max,
               size_t n_scratch, pf_error *err);
/* Are the files that its weights came from still what they were? PF_E_CHANGED or PF_E_TRUNCATED: what was computed is of neither. */
int stage_verify(const struct stage *s, pf_error *err);
void stage_release(struct stage *s);

int stage_run(struct stage *s, const struct stage_job *job, pf_error *err);
/* A loop over tasks of the caller's own; fn gets ctx. PF_OK, or what a worker left in its rc and err. */
int stage_tasks(struct stage *s, size_t n_tasks, pool_fn fn, void *ctx, pf_error *err);
/* Inside a task: rows of tensor i as f32. A failure is kept in the worker. */
void stage_read(struct stage *s, unsigned i_worker, uint32_t i_tensor, int64_t row0, int64_t n_rows,
                int64_t n_cols, float *out);
uint64_t stage_weight_bytes(const struct stage *s);

#endif
