/*
 * The layer loop, as data/README.md states it. Shapes: T tokens, d channels, per sample; linears are y = W x + b.
 *
 *     x = patches W^T + b + positions                                        (T,d)
 *     per block: c = time embedding + class row;  m = W silu(c) + b          (6d)
 *                x += m2 * attention(norm(x) * (1 + m1) + m0)
 *                x += m5 * ff(norm(x) * (1 + m4) + m3)
 *     s = W silu(c of block 0) + b;  patches = W (norm(x) * (1 + s1) + s0) + b
 */
#include "model/forward.h"

#include "base/mem.h"
#include "model/attention.h"
#include "model/ops.h"

#include <math.h>
#include <string.h>

#define NORM_EPS 1e-6f /* of norm1 and the output; norm3 has the config's */
#define ALIGN    64

static int64_t max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Where each array lies in the block of activations, in floats. */
struct layout {
    size_t x, h, big;                /* per sample */
    size_t cond, mod;                /* per condition */
    size_t freqs, time, position, n; /* n: all of it */
};

static bool add_array(size_t *total, size_t n_items, size_t n_floats)
{
    size_t n = 0;
    return mul_size(n_items, n_floats, &n) && add_size(n, ALIGN / sizeof(float), &n) &&
           add_size(*total, n, total);
}

static bool lay_out(const struct dit_config *c, uint32_t n_images, bool is_guided,
                    struct layout *out)
{
    size_t n_samples = (size_t)n_images * (is_guided ? 2 : 1);
    size_t n_conds = (size_t)n_images + 1;
    size_t t = (size_t)c->n_tokens, d = (size_t)c->dim;
    struct layout l = {0};
    l.x = t * d; /* < 2^32 by the bounds of the config */
    l.h = t * (size_t)max_i64(c->dim, c->patch_values);
    l.big = t * (size_t)max_i64(c->n_inner, c->patch_values);
    l.cond = d;
    l.mod = DIT_MOD * d;
    l.freqs = DIT_TIME_FREQS;
    l.time = 2 * d;
    l.position = t * d;
    bool ok = add_array(&l.n, n_samples, l.x) && add_array(&l.n, n_samples, l.h) &&
              add_array(&l.n, n_samples, l.big) && add_array(&l.n, n_conds, l.cond) &&
              add_array(&l.n, n_conds, l.cond) && add_array(&l.n, n_conds, l.mod) &&
              add_array(&l.n, 1, l.freqs) && add_array(&l.n, 1, l.time) &&
              add_array(&l.n, 1, l.position);
    *out = l;
    return ok;
}

bool forward_bytes(const struct dit_config *c, uint32_t n_images, bool is_guided, size_t *out)
{
    struct layout l;
    return lay_out(c, n_images, is_guided, &l) && mul_size(l.n, sizeof(float), out);
}

static float *take(float **next, size_t n_items, size_t n_floats)
{
    const size_t unit = ALIGN / sizeof(float);
    float *p = *next;
    *next += (n_items * n_floats + unit - 1) / unit * unit;
    return p;
}

static void carve(struct forward *f, const struct layout *l)
{
    size_t n_samples = (size_t)f->n_images_max * (f->is_guided ? 2 : 1);
    size_t n_conds = (size_t)f->n_images_max + 1;
    float *next = f->block;
    f->x = take(&next, n_samples, l->x);
    f->h = take(&next, n_samples, l->h);
    f->big = take(&next, n_samples, l->big);
    f->cond = take(&next, n_conds, l->cond);
    f->cond_0 = take(&next, n_conds, l->cond);
    f->mod = take(&next, n_conds, l->mod);
    f->freqs = take(&next, 1, l->freqs);
    f->time = take(&next, 1, l->time);
    f->position = take(&next, 1, l->position);
    f->x_stride = l->x;
    f->h_stride = l->h;
    f->big_stride = l->big;
}

/* First half of the channels from the column, second from the row; each half [sin, cos] with frequencies 10000^(-i / (d/4)). */
static void fill_positions(const struct dit_config *c, float *out)
{
    int64_t quarter = c->dim / 4, side = c->size / c->patch;
    for (int64_t i = 0; i < quarter; i++) {
        double freq = pow(10000.0, -(double)i / (double)quarter);
        for (int64_t t = 0; t < c->n_tokens; t++) {
            int64_t row = t / side, column = t % side;
            float *p = out + t * c->dim + i;
            p[0] = (float)sin((double)column * freq);
            p[quarter] = (float)cos((double)column * freq);
            p[2 * quarter] = (float)sin((double)row * freq);
            p[3 * quarter] = (float)cos((double)row * freq);
        }
    }
}

static size_t largest_output(const struct dit_config *c)
{
    return (size_t)max_i64(DIT_MOD * c->dim, c->patch_values);
}

int forward_open(struct forward *f, const struct dit *dit, struct pf_view *view, struct pool *pool,
                 uint32_t n_images_max, bool is_guided, pf_error *err)
{
    struct layout l;
    *f = (struct forward){.dit = dit, .n_images_max = n_images_max, .is_guided = is_guided};
    if (!lay_out(&dit->config, n_images_max, is_guided, &l) ||
        !mul_size(l.n, sizeof(float), &f->n_block_bytes))
        return err_set(err, PF_E_RANGE, "activations of %u pictures are too large", n_images_max);
    int rc = stage_open(&f->stage, view, pool, largest_output(&dit->config),
                        attention_scratch(dit->config.n_tokens), err);
    if (rc == PF_OK)
        rc = readahead_new(view, &f->readahead, err);
    if (rc == PF_OK) {
        f->block = mem_aligned(ALIGN, f->n_block_bytes);
        f->classes = mem_calloc((size_t)n_images_max + 1, sizeof *f->classes);
        f->i_cond = mem_calloc((size_t)n_images_max * 2, sizeof *f->i_cond);
        if (f->block == NULL || f->classes == NULL || f->i_cond == NULL)
            rc = err_nomem(err, f->n_block_bytes, "activations");
    }
    if (rc != PF_OK) {
        forward_release(f);
        return rc;
    }
    carve(f, &l);
    fill_positions(&dit->config, f->position);
    return PF_OK;
}

void forward_release(struct forward *f)
{
    readahead_free(f->readahead);
    stage_release(&f->stage);
    mem_free(f->block);
    mem_free(f->classes);
    mem_free(f->i_cond);
    *f = (struct forward){0};
}

static uint32_t cond_of(struct forward *f, uint32_t i_class)
{
    for (uint32_t i = 0; i < f->n_conds; i++)
        if (f->classes[i] == i_class)
            return i;
    f->classes[f->n_conds] = i_class;
    return f->n_conds++;
}

void forward_batch(struct forward *f, uint32_t n_images, const uint32_t *classes)
{
    f->n_images = n_images;
    f->n_samples = n_images * (f->is_guided ? 2 : 1);
    f->n_conds = 0;
    for (uint32_t i = 0; i < n_images; i++)
        f->i_cond[i] = cond_of(f, classes[i]);
    if (f->is_guided) {
        uint32_t empty = cond_of(f, (uint32_t)f->dit->config.n_classes);
        for (uint32_t i = n_images; i < f->n_samples; i++)
            f->i_cond[i] = empty;
    }
}

/* ------------------------------------------------------------------------------------------------ the parts of a pass */

struct patch_ctx {
    struct forward *f;
    const float *latents;
};

/* (channel, row, column) of the picture -> (token, (channel, row, column) of the patch) */
static void patch_task(void *ctx, size_t i_sample, unsigned i_worker)
{
    const struct patch_ctx *p = ctx;
    const struct dit_config *c = &p->f->dit->config;
    int64_t side = c->size / c->patch, area = c->size * c->size;
    const float *from = p->latents + i_sample % p->f->n_images * (size_t)(c->channels * area);
    float *to = p->f->h + i_sample * p->f->h_stride;
    (void)i_worker;
    for (int64_t t = 0; t < c->n_tokens; t++)
        for (int64_t ch = 0; ch < c->channels; ch++)
            for (int64_t y = 0; y < c->patch; y++) {
                int64_t row = t / side * c->patch + y, col = t % side * c->patch;
                memcpy(to, from + ch * area + row * c->size + col,
                       (size_t)c->patch * sizeof(float));
                to += c->patch;
            }
}

static int embed_patches(struct forward *f, const float *latents, pf_error *err)
{
    struct patch_ctx ctx = {f, latents};
    int rc = stage_tasks(&f->stage, f->n_samples, patch_task, &ctx, err);
    if (rc != PF_OK)
        return rc;
    return stage_run(&f->stage,
                     &(struct stage_job){.linear = &f->dit->patch_embed,
                                         .n_rows = f->dit->config.n_tokens,
                                         .n_samples = f->n_samples,
                                         .x = f->h,
                                         .x_stride = f->h_stride,
                                         .y = f->x,
                                         .y_stride = f->x_stride,
                                         .epilogue = EPI_TABLE,
                                         .table = f->position},
                     err);
}

/* [cos, sin] of timestep x 10000^(-i/127): angles are rounded to f32 as the reference rounds them. */
static void fill_freqs(float *out, float timestep)
{
    const int n = DIT_TIME_FREQS / 2;
    for (int i = 0; i < n; i++) {
        float freq = (float)exp(-log(10000.0) * (double)i / (double)(n - 1));
        float angle = timestep * freq;
        out[i] = (float)cos((double)angle);
        out[n + i] = (float)sin((double)angle);
    }
}

/* Vectors, one per condition, through a linear: (n, n_in) -> (n, n_out). */
static int run_vectors(struct forward *f, const struct dit_linear *linear, uint32_t n,
                       const float *x, float *y, enum epilogue epilogue, pf_error *err)
{
    return stage_run(&f->stage,
                     &(struct stage_job){.linear = linear,
                                         .n_rows = 1,
                                         .n_samples = n,
                                         .x = x,
                                         .x_stride = (size_t)linear->n_in,
                                         .y = y,
                                         .y_stride = (size_t)linear->n_out,
                                         .epilogue = epilogue},
                     err);
}

struct cond_ctx {
    struct forward *f;
    uint32_t i_table;
};

/* silu(time + row of the class table) */
static void cond_task(void *ctx, size_t i_cond, unsigned i_worker)
{
    const struct cond_ctx *c = ctx;
    struct forward *f = c->f;
    int64_t d = f->dit->config.dim;
    float *cond = f->cond + i_cond * (size_t)d;
    stage_read(&f->stage, i_worker, c->i_table, f->classes[i_cond], 1, d, cond);
    ops_add_bias(cond, 1, d, d, f->time + d);
    ops_silu(cond, d);
}

static int condition(struct forward *f, const struct dit_block *b, bool is_first, pf_error *err)
{
    float *hidden = f->time, *embedded = f->time + f->dit->config.dim;
    struct cond_ctx ctx = {f, b->i_table};
    int rc = run_vectors(f, &b->time_1, 1, f->freqs, hidden, EPI_SILU, err);
    if (rc == PF_OK)
        rc = run_vectors(f, &b->time_2, 1, hidden, embedded, EPI_BIAS, err);
    if (rc == PF_OK)
        rc = stage_tasks(&f->stage, f->n_conds, cond_task, &ctx, err);
    if (rc == PF_OK && is_first)
        memcpy(f->cond_0, f->cond, (size_t)f->n_conds * (size_t)f->dit->config.dim * sizeof(float));
    if (rc == PF_OK)
        rc = run_vectors(f, &b->modulation, f->n_conds, f->cond, f->mod, EPI_BIAS, err);
    return rc;
}

struct norm_ctx {
    struct forward *f;
    float eps;
    size_t mod_stride, shift, scale; /* in floats, inside a condition's modulation */
};

static void norm_task(void *ctx, size_t i_sample, unsigned i_worker)
{
    const struct norm_ctx *n = ctx;
    struct forward *f = n->f;
    const float *mod = f->mod + f->i_cond[i_sample] * n->mod_stride;
    (void)i_worker;
    ops_norm_modulate(f->h + i_sample * f->h_stride, f->x + i_sample * f->x_stride,
                      f->dit->config.n_tokens, f->dit->config.dim, n->eps, mod + n->scale,
                      mod + n->shift);
}

/* h = norm(x) * (1 + scale) + shift; vectors of dim floats inside a modulation of n_vectors of them */
static int norm(struct forward *f, float eps, size_t n_vectors, size_t i_shift, size_t i_scale,
                pf_error *err)
{
    size_t d = (size_t)f->dit->config.dim;
    struct norm_ctx ctx = {f, eps, n_vectors * d, i_shift * d, i_scale * d};
    return stage_tasks(&f->stage, f->n_samples, norm_task, &ctx, err);
}

static void attention_task(void *ctx, size_t i_task, unsigned i_worker)
{
    struct forward *f = ctx;
    const struct dit_config *c = &f->dit->config;
    size_t i_sample = i_task / (size_t)c->n_heads;
    int64_t off = (int64_t)(i_task % (size_t)c->n_heads) * c->head_dim;
    int64_t size = c->n_tokens * c->dim;
    const float *q = f->big + i_sample * f->big_stride + off;
    float *out = f->h + i_sample * f->h_stride + off;
    attention_head(q, q + size, q + 2 * size, out, c->n_tokens, c->head_dim, c->dim,
                   f->stage.workers[i_worker].scratch);
}

/* The samples' h -> big + off */
static int project(struct forward *f, const struct dit_linear *linear, int64_t off,
                   enum epilogue epilogue, pf_error *err)
{
    return stage_run(&f->stage,
                     &(struct stage_job){.linear = linear,
                                         .n_rows = f->dit->config.n_tokens,
                                         .n_samples = f->n_samples,
                                         .x = f->h,
                                         .x_stride = f->h_stride,
                                         .y = f->big + off,
                                         .y_stride = f->big_stride,
                                         .epilogue = epilogue},
                     err);
}

/* x += gate * (W from + b), with `to` for scratch */
static int add_back(struct forward *f, const struct dit_linear *linear, size_t i_gate,
                    const float *from, size_t from_stride, float *to, size_t to_stride,
                    pf_error *err)
{
    size_t d = (size_t)f->dit->config.dim;
    return stage_run(&f->stage,
                     &(struct stage_job){.linear = linear,
                                         .n_rows = f->dit->config.n_tokens,
                                         .n_samples = f->n_samples,
                                         .x = from,
                                         .x_stride = from_stride,
                                         .y = to,
                                         .y_stride = to_stride,
                                         .epilogue = EPI_GATED,
                                         .sum = f->x,
                                         .sum_stride = f->x_stride,
                                         .gate = f->mod + i_gate * d,
                                         .i_gate = f->i_cond,
                                         .gate_stride = DIT_MOD * d},
                     err);
}

static int run_block(struct forward *f, const struct dit_block *b, bool is_first, pf_error *err)
{
    const struct dit_config *c = &f->dit->config;
    int64_t size = c->n_tokens * c->dim;
    int rc = condition(f, b, is_first, err);
    if (rc == PF_OK)
        rc = norm(f, NORM_EPS, DIT_MOD, 0, 1, err);
    if (rc == PF_OK)
        rc = project(f, &b->q, 0, EPI_BIAS, err);
    if (rc == PF_OK)
        rc = project(f, &b->k, size, EPI_BIAS, err);
    if (rc == PF_OK)
        rc = project(f, &b->v, 2 * size, EPI_BIAS, err);
    if (rc == PF_OK)
        rc = stage_tasks(&f->stage, (size_t)f->n_samples * (size_t)c->n_heads, attention_task, f,
                         err);
    if (rc == PF_OK) /* q, k, v are done with */
        rc = add_back(f, &b->attn_out, 2, f->h, f->h_stride, f->big, f->big_stride, err);
    if (rc == PF_OK)
        rc = norm(f, c->norm_eps, DIT_MOD, 3, 4, err);
    if (rc == PF_OK)
        rc = project(f, &b->ff_in, 0, EPI_GELU, err);
    if (rc == PF_OK)
        rc = add_back(f, &b->ff_out, 5, f->big, f->big_stride, f->h, f->h_stride, err);
    return rc;
}

static int run_output(struct forward *f, pf_error *err)
{
    const struct dit *dit = f->dit;
    int rc = run_vectors(f, &dit->out_modulation, f->n_conds, f->cond_0, f->mod, EPI_BIAS, err);
    if (rc == PF_OK)
        rc = norm(f, NORM_EPS, 2, 0, 1, err);
    if (rc == PF_OK)
        rc = project(f, &dit->out_patches, 0, EPI_BIAS, err);
    return rc;
}

static int after_layer(struct forward *f, int64_t i_block, pf_error *err)
{
    if (f->hook != NULL)
        f->hook(f->hook_ctx, i_block, f->x, f->x_stride);
    if (f->on_layer != NULL && i_block >= 0 && !f->on_layer(f->layer_ctx))
        return err_set(err, PF_E_CANCELLED, "drawing was cancelled");
    return PF_OK;
}

int forward_run(struct forward *f, const float *latents, float timestep, pf_error *err)
{
    const struct dit *dit = f->dit;
    fill_freqs(f->freqs, timestep);
    readahead_layer(f->readahead, dit->blocks[0].i_layer);
    int rc = embed_patches(f, latents, err);
    if (rc == PF_OK)
        rc = after_layer(f, -1, err);
    for (int64_t i = 0; rc == PF_OK && i < dit->config.n_blocks; i++) {
        bool is_last = i + 1 == dit->config.n_blocks;
        readahead_layer(f->readahead, is_last ? dit->i_stem_layer : dit->blocks[i + 1].i_layer);
        rc = run_block(f, &dit->blocks[i], i == 0, err);
        readahead_done(f->readahead, dit->blocks[i].i_layer);
        if (rc == PF_OK)
            rc = after_layer(f, i, err);
    }
    if (rc == PF_OK)
        rc = run_output(f, err);
    return rc;
}

const float *forward_patches(const struct forward *f, uint32_t i_sample)
{
    return f->big + i_sample * f->big_stride;
}
