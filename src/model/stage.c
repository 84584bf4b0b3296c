/*
 * See stage.h. Reading and multiplying alternate with a barrier between them, so one slab of scratch serves any number of workers
 * and every weight is converted (and merged, in a stream view) once per pass.
 */
#include "model/stage.h"

#include "base/mem.h"
#include "model/gemm.h"
#include "model/ops.h"

#include <string.h>

#define SLAB_BYTES  ((int64_t)8 << 20)
#define PANEL_BYTES ((int64_t)1 << 20)
#define PANEL_ROWS  64  /* at most: small matrices still give every worker something to read */
#define TILE_ROWS   256 /* of W in one product */
#define ALIGN       64

static int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Rows of n_cols floats in n_bytes: a multiple of 16 where there are so many, at least 1. */
static int64_t rows_in(int64_t n_bytes, int64_t n_cols)
{
    int64_t n = n_bytes / (n_cols * (int64_t)sizeof(float));
    if (n >= 16)
        return n - n % 16;
    return n < 1 ? 1 : n;
}

int stage_open(struct stage *s, struct pf_view *view, struct pool *pool, size_t n_bias_max,
               size_t n_scratch, pf_error *err)
{
    *s = (struct stage){.view = view, .pool = pool, .n_workers = pool_n_workers(pool)};
    size_t n_bytes = 0;
    int rc = PF_OK;
    if (!mul_size(n_bias_max > n_scratch ? n_bias_max : n_scratch, sizeof(float), &n_bytes))
        return err_set(err, PF_E_RANGE, "scratch of %zu floats is too large", n_scratch);
    s->weights = mem_aligned(ALIGN, (size_t)SLAB_BYTES);
    s->bias = mem_aligned(ALIGN, n_bias_max * sizeof(float));
    s->workers = mem_calloc(s->n_workers, sizeof *s->workers);
    if (s->weights == NULL || s->bias == NULL || s->workers == NULL)
        rc = err_nomem(err, (size_t)SLAB_BYTES, "weights");
    for (unsigned i = 0; rc == PF_OK && i < s->n_workers; i++) {
        rc = pf_reader_new(view, &s->workers[i].reader, err);
        if (rc == PF_OK) {
            s->workers[i].scratch = mem_aligned(ALIGN, n_scratch * sizeof(float));
            if (s->workers[i].scratch == NULL)
                rc = err_nomem(err, n_scratch * sizeof(float), "scratch");
        }
    }
    if (rc != PF_OK)
        stage_release(s);
    return rc;
}

int stage_verify(const struct stage *s, pf_error *err)
{
    bool has_merged = false;
    for (unsigned i = 0; i < s->n_workers; i++)
        has_merged = has_merged || reader_has_merged(s->workers[i].reader);
    return view_verify(s->view, has_merged, err);
}

void stage_release(struct stage *s)
{
    for (unsigned i = 0; s->workers != NULL && i < s->n_workers; i++) {
        pf_reader_free(s->workers[i].reader);
        mem_free(s->workers[i].scratch);
    }
    mem_free(s->workers);
    mem_free(s->weights);
    mem_free(s->bias);
    *s = (struct stage){0};
}

uint64_t stage_weight_bytes(const struct stage *s)
{
    uint64_t n = 0;
    for (unsigned i = 0; i < s->n_workers; i++)
        n += s->workers[i].n_weight_bytes;
    return n;
}

int stage_tasks(struct stage *s, size_t n_tasks, pool_fn fn, void *ctx, pf_error *err)
{
    if (n_tasks == 1)
        fn(ctx, 0, 0); /* nothing to wake anybody for */
    else
        pool_run(s->pool, n_tasks, fn, ctx);
    for (unsigned i = 0; i < s->n_workers; i++)
        if (s->workers[i].rc != PF_OK) {
            if (err != NULL)
                *err = s->workers[i].err;
            return s->workers[i].rc;
        }
    return PF_OK;
}

void stage_read(struct stage *s, unsigned i_worker, uint32_t i_tensor, int64_t row0, int64_t n_rows,
                int64_t n_cols, float *out)
{
    struct stage_worker *w = &s->workers[i_worker];
    const struct pf_panel panel = {.i_tensor = i_tensor, .row0 = row0, .n_rows = n_rows};
    size_t n = (size_t)n_rows * (size_t)n_cols;
    if (w->rc != PF_OK)
        return;
    w->rc = pf_reader_read(w->reader, &panel, PF_AS_F32, out, n * sizeof(float), &w->err);
    w->n_weight_bytes += n * pf_dtype_bits(pf_view_dtype(s->view, i_tensor)) / 8;
}

/* One slab of a job: rows [row0, row0 + n_rows) of W. */
struct slab {
    struct stage *stage;
    const struct stage_job *job;
    int64_t row0, n_rows;
    int64_t panel_rows;
    size_t n_panels;
};

static void read_task(void *ctx, size_t i_task, unsigned i_worker)
{
    struct slab *slab = ctx;
    const struct dit_linear *lin = slab->job->linear;
    if (i_task == slab->n_panels) {
        stage_read(slab->stage, i_worker, (uint32_t)lin->i_bias, slab->row0, slab->n_rows, 1,
                   slab->stage->bias);
        return;
    }
    int64_t row = (int64_t)i_task * slab->panel_rows;
    int64_t n = min_i64(slab->panel_rows, slab->n_rows - row);
    stage_read(slab->stage, i_worker, lin->i_weight, slab->row0 + row, n, lin->n_in,
               slab->stage->weights + row * lin->n_in);
}

static void finish(const struct stage_job *job, float *y, int64_t row0, int64_t n, size_t i_sample,
                   const float *bias)
{
    int64_t ld = job->linear->n_out;
    switch (job->epilogue) {
    case EPI_BIAS:
        ops_add_bias(y, job->n_rows, n, ld, bias);
        break;
    case EPI_SILU:
        for (int64_t m = 0; m < job->n_rows; m++) {
            ops_add_bias(y + m * ld, 1, n, ld, bias);
            ops_silu(y + m * ld, n);
        }
        break;
    case EPI_GELU:
        ops_bias_gelu(y, job->n_rows, n, ld, bias);
        break;
    case EPI_TABLE:
        ops_add_bias(y, job->n_rows, n, ld, bias);
        for (int64_t m = 0; m < job->n_rows; m++)
            ops_add_bias(y + m * ld, 1, n, ld, job->table + m * ld + row0);
        break;
    case EPI_GATED: {
        const float *gate = job->gate + job->i_gate[i_sample] * job->gate_stride + row0;
        float *sum = job->sum + i_sample * job->sum_stride + row0;
        ops_add_gated(sum, y, job->n_rows, n, ld, bias, gate);
        break;
    }
    }
}

static void multiply_task(void *ctx, size_t i_task, unsigned i_worker)
{
    const struct slab *slab = ctx;
    const struct stage_job *job = slab->job;
    const struct dit_linear *lin = job->linear;
    size_t i_sample = i_task % job->n_samples;
    int64_t tile0 = (int64_t)(i_task / job->n_samples) * TILE_ROWS;
    int64_t n = min_i64(TILE_ROWS, slab->n_rows - tile0);
    int64_t row0 = slab->row0 + tile0;
    const float *w = slab->stage->weights + tile0 * lin->n_in;
    const float *x = job->x + i_sample * job->x_stride;
    float *y = job->y + i_sample * job->y_stride + row0;
    (void)i_worker; /* products need nothing of their worker's */
    if (job->n_rows == 1)
        gemm_vec(n, lin->n_in, w, x, y);
    else
        gemm_nt(job->n_rows, n, lin->n_in, 1.0f, x, lin->n_in, w, lin->n_in, y, lin->n_out);
    finish(job, y, row0, n, i_sample, lin->i_bias < 0 ? NULL : slab->stage->bias + tile0);
}

int stage_run(struct stage *s, const struct stage_job *job, pf_error *err)
{
    const struct dit_linear *lin = job->linear;
    struct slab slab = {.stage = s, .job = job};
    int64_t slab_rows = rows_in(SLAB_BYTES, lin->n_in);
    slab.panel_rows = min_i64(PANEL_ROWS, rows_in(PANEL_BYTES, lin->n_in));
    for (slab.row0 = 0; slab.row0 < lin->n_out; slab.row0 += slab_rows) {
        slab.n_rows = min_i64(slab_rows, lin->n_out - slab.row0);
        slab.n_panels = (size_t)((slab.n_rows + slab.panel_rows - 1) / slab.panel_rows);
        int rc = stage_tasks(s, slab.n_panels + (lin->i_bias < 0 ? 0 : 1), read_task, &slab, err);
        if (rc != PF_OK)
            return rc;
        size_t n_tiles = (size_t)((slab.n_rows + TILE_ROWS - 1) / TILE_ROWS);
        rc = stage_tasks(s, n_tiles * job->n_samples, multiply_task, &slab, err);
        if (rc != PF_OK)
            return rc;
    }
    return PF_OK;
}
