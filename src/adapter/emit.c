/*
 * Deltas of one module on one base tensor. Factors are described where they lie in the file, by strides; a row range of the
 * change is a row range of its left factors, so fused tensors cost no copy. Every shape is checked here, against the base, once.
 */
#include "adapter/emit.h"

#include "tensor/dtype.h"

#include <string.h>

static int add(const struct emit *e, const struct delta *d)
{
    struct delta_list *l = e->out;
    if (!mem_grow((void **)&l->items, &l->cap, l->n, sizeof *l->items))
        return err_nomem(e->err, sizeof *d, "a delta");
    l->items[l->n++] = *d;
    return PF_OK;
}

/* ------------------------------------------------------------------------------------------------- factors */

/* A tensor as rows x cols, from row0 on. */
static struct factor matrix(const struct ad_tensor *t, int64_t row0, int64_t n_rows)
{
    int64_t cols = shape_cols(&t->shape);
    return (struct factor){.p = t->p + (size_t)(row0 * cols) * dtype_size(t->dtype),
                           .dtype = t->dtype,
                           .n_rows = n_rows,
                           .n_cols = cols,
                           .row_stride = cols,
                           .col_stride = 1};
}

static struct factor whole(const struct ad_tensor *t)
{
    return matrix(t, 0, shape_rows(&t->shape));
}

static struct factor transposed(struct factor f)
{
    return (struct factor){.p = f.p,
                           .dtype = f.dtype,
                           .n_rows = f.n_cols,
                           .n_cols = f.n_rows,
                           .row_stride = f.col_stride,
                           .col_stride = f.row_stride};
}

static void set(struct delta *d, int i, struct factor f, const struct ad_tensor *t)
{
    d->f[i] = f;
    d->max_abs[i] = t->max_abs;
}

/* Rows of a left factor. When they are zeros, though others are not, the base's bytes are to stay: max_abs 0 says so. */
static void set_rows(struct delta *d, int i, const struct ad_tensor *t, int64_t row0,
                     int64_t n_rows)
{
    set(d, i, matrix(t, row0, n_rows), t);
    if (n_rows < shape_rows(&t->shape) && tensor_is_zero(t, row0, n_rows, 0, shape_cols(&t->shape)))
        d->max_abs[i] = 0;
}

/* ---------------------------------------------------------------------------------------------- shape checks */

static int mismatch(const struct emit *e, const struct ad_module *m, const struct ad_tensor *x,
                    const struct ad_tensor *y, const struct ckpt_tensor *w, const char *rule)
{
    char sx[128], sy[128], sw[128];
    const char *tail = y != NULL ? shape_text(&y->shape, sy, sizeof sy) : "";
    return err_set(
        e->err, PF_E_MISMATCH,
        "adapter '%s': module '%s': '%s' is %s%s%s%s%s, but '%.*s' of the base is %s: %s",
        e->a->path, m->name.p, x->name.p, shape_text(&x->shape, sx, sizeof sx),
        y != NULL ? ", '" : "", y != NULL ? y->name.p : "", y != NULL ? "' is " : "", tail,
        (int)w->name.n, w->name.p, shape_text(&w->shape, sw, sizeof sw), rule);
}

/* A kernel that the factor spells out must be the base's (a linear's is of ones); one that it folds into columns is fine. */
static bool kernel_agrees(const struct shape *f, const struct shape *w, int32_t from)
{
    if (f->rank <= 2)
        return true;
    for (int32_t i = from; i < f->rank || i < w->rank; i++)
        if ((i < f->rank ? f->dim[i] : 1) != (i < w->rank ? w->dim[i] : 1))
            return false;
    return true;
}

static int check_cols(const struct emit *e, const struct ad_module *m, const struct ad_tensor *left,
                      const struct ad_tensor *right, const struct ckpt_tensor *w, int32_t from)
{
    if (shape_cols(&right->shape) != shape_cols(&w->shape))
        return mismatch(e, m, left, right, w, "the columns differ");
    if (!kernel_agrees(&right->shape, &w->shape, from))
        return mismatch(e, m, left, right, w, "the kernels differ");
    return PF_OK;
}

/* The base tensor has the rows that the module changes. */
static int check_rows(const struct emit *e, const struct ad_module *m, const struct ad_tensor *left,
                      const struct ad_tensor *right, const struct ckpt_tensor *w,
                      const struct rows *rows)
{
    if (w->shape.rank < 2)
        return mismatch(e, m, left, right, w, "a product of factors changes a matrix");
    if (!rows->is_part && m->rows != shape_rows(&w->shape))
        return mismatch(e, m, left, right, w, "the rows differ");
    return PF_OK;
}

/* ------------------------------------------------------------------------------------------------- families */

/* Stored [in, out]: the transpose of the product, by strides. */
static int emit_lora_transposed(const struct emit *e, const struct ad_module *m,
                                const struct ckpt_tensor *w, const struct rows *rows,
                                const struct ad_tensor *up, const struct ad_tensor *down,
                                struct delta *d)
{
    if (rows->is_part)
        return err_set(e->err, PF_E_UNSUPPORTED,
                       "adapter '%s': module '%s' is part of the fused '%.*s', which is stored "
                       "transposed: its part is a range of columns, which is not supported",
                       e->a->path, m->name.p, (int)w->name.n, w->name.p);
    if (w->shape.rank != 2 || shape_cols(&down->shape) != w->shape.dim[0] ||
        shape_rows(&up->shape) != w->shape.dim[1])
        return mismatch(e, m, up, down, w, "it is stored transposed (in, out)");
    d->n_rows = w->shape.dim[0];
    set(d, 0, transposed(whole(down)), down);
    set(d, 1, transposed(whole(up)), up);
    return PF_OK;
}

static int emit_lora(const struct emit *e, const struct ad_module *m, const struct ckpt_tensor *w,
                     const struct rows *rows, struct delta *d)
{
    bool is_embedding = m->family == AD_EMBEDDING;
    const struct ad_tensor *up = module_leaf(e->a, m, is_embedding ? LEAF_EMB_UP : LEAF_UP);
    const struct ad_tensor *down = module_leaf(e->a, m, is_embedding ? LEAF_EMB_DOWN : LEAF_DOWN);
    d->kind = DELTA_LORA;
    d->rank = m->rank[0];
    /* PEFT writes fan_in_fan_out for the adapter; a linear that fits only as it is was never transposed (as in PEFT). */
    bool fits_plain = w->shape.rank == 2 && shape_rows(&up->shape) == w->shape.dim[0] &&
                      shape_cols(&down->shape) == w->shape.dim[1] &&
                      w->shape.dim[0] != w->shape.dim[1];
    if (is_embedding || (m->is_transposed && w->shape.rank == 2 && !fits_plain))
        return emit_lora_transposed(e, m, w, rows, up, down, d);
    int rc = check_rows(e, m, up, down, w, rows);
    if (rc == PF_OK)
        rc = check_cols(e, m, up, down, w, 1);
    if (rc != PF_OK)
        return rc;
    set_rows(d, 0, up, rows->src0, rows->n_rows);
    set(d, 1, whole(down), down);
    return PF_OK;
}

static int emit_loha(const struct emit *e, const struct ad_module *m, const struct ckpt_tensor *w,
                     const struct rows *rows, struct delta *d)
{
    const struct ad_tensor *t[4];
    for (int i = 0; i < 4; i++)
        t[i] = module_leaf(e->a, m, (enum ad_leaf)(LEAF_HADA_W1A + i));
    d->kind = DELTA_LOHA;
    d->rank = m->rank[0];
    int rc = check_rows(e, m, t[0], t[1], w, rows);
    if (rc == PF_OK)
        rc = check_cols(e, m, t[0], t[1], w, 1);
    if (rc == PF_OK)
        rc = check_cols(e, m, t[2], t[3], w, 1);
    if (rc != PF_OK)
        return rc;
    for (int i = 0; i < 4; i += 2) {
        set_rows(d, i, t[i], rows->src0, rows->n_rows);
        set(d, i + 1, whole(t[i + 1]), t[i + 1]);
    }
    return PF_OK;
}

/* A range of a Kronecker product's rows: whole groups of w2's rows, so a range of w1's. */
static int lokr_range(const struct emit *e, const struct ad_module *m, const struct ckpt_tensor *w,
                      const struct rows *rows, int64_t group, int64_t *out_row0, int64_t *out_n)
{
    if (rows->src0 % group != 0 || rows->n_rows % group != 0)
        return err_set(
            e->err, PF_E_UNSUPPORTED,
            "adapter '%s': module '%s' is fused and '%.*s' of the base is not: rows %lld "
            "to %lld cut through a group of %lld rows of its w2",
            e->a->path, m->name.p, (int)w->name.n, w->name.p, (long long)rows->src0,
            (long long)(rows->src0 + rows->n_rows), (long long)group);
    *out_row0 = rows->src0 / group;
    *out_n = rows->n_rows / group;
    return PF_OK;
}

static int emit_lokr(const struct emit *e, const struct ad_module *m, const struct ckpt_tensor *w,
                     const struct rows *rows, struct delta *d)
{
    const struct ad_tensor *w1 = module_leaf(e->a, m, LEAF_LOKR_W1);
    const struct ad_tensor *w2 = module_leaf(e->a, m, LEAF_LOKR_W2);
    const struct ad_tensor *w1b = module_leaf(e->a, m, LEAF_LOKR_W1B);
    const struct ad_tensor *w2b = module_leaf(e->a, m, LEAF_LOKR_W2B);
    if (w1 == NULL)
        w1 = module_leaf(e->a, m, LEAF_LOKR_W1A);
    if (w2 == NULL)
        w2 = module_leaf(e->a, m, LEAF_LOKR_W2A);
    const struct ad_tensor *right1 = w1b != NULL ? w1b : w1, *right2 = w2b != NULL ? w2b : w2;
    uint64_t cols;
    int64_t row0 = 0, n_rows = 0;
    int rc = check_rows(e, m, w1, w2, w, rows);
    if (rc != PF_OK)
        return rc;
    if (!mul_u64((uint64_t)shape_cols(&right1->shape), (uint64_t)shape_cols(&right2->shape),
                 &cols) ||
        cols != (uint64_t)shape_cols(&w->shape))
        return mismatch(e, m, right1, right2, w, "their columns multiply to another number");
    if (!kernel_agrees(&right1->shape, &(struct shape){.rank = 2}, 2) ||
        !kernel_agrees(&right2->shape, &w->shape, 2))
        return mismatch(e, m, right1, right2, w, "the kernels differ");
    rc = lokr_range(e, m, w, rows, w2->shape.dim[0], &row0, &n_rows);
    if (rc != PF_OK)
        return rc;
    d->kind = DELTA_LOKR;
    d->rank = m->rank[0] > m->rank[1] ? m->rank[0] : m->rank[1];
    set_rows(d, 0, w1, row0, n_rows);
    set(d, 2, whole(w2), w2);
    if (w1b != NULL)
        set(d, 1, whole(w1b), w1b);
    if (w2b != NULL)
        set(d, 3, whole(w2b), w2b);
    return PF_OK;
}

static int emit_diff(const struct emit *e, const struct ad_module *m, const struct ad_tensor *t,
                     const struct ckpt_tensor *w, const struct rows *rows, struct delta *d)
{
    bool fits = shape_eq(&t->shape, &w->shape);
    if (rows->is_part) { /* the rows were counted by the caller; what is behind them must be the base's */
        struct shape x = t->shape;
        fits = x.rank == w->shape.rank && x.rank > 0;
        x.dim[0] = w->shape.dim[0];
        fits = fits && shape_eq(&x, &w->shape);
    }
    if (!fits)
        return mismatch(e, m, t, NULL, w, "a difference has the shape of what it is added to");
    d->kind = DELTA_DIFF;
    set_rows(d, 0, t, rows->src0, rows->n_rows);
    return PF_OK;
}

/* -------------------------------------------------------------------------------------------------- public */

static int start(const struct emit *e, const struct ad_module *m, int64_t i_tensor,
                 const struct rows *rows, struct delta *d)
{
    const struct ckpt_tensor *w = &e->ckpt->tensors[i_tensor];
    if (!dtype_is_mergeable(w->dtype))
        return err_set(
            e->err, PF_E_UNSUPPORTED,
            "adapter '%s': module '%s' changes '%.*s' of dtype %s: only F32, F16 and BF16 "
            "weights can be merged exactly; quantised storage is not the matrix",
            e->a->path, m->name.p, (int)w->name.n, w->name.p, pf_dtype_name(w->dtype));
    *d = (struct delta){.i_tensor = (uint32_t)i_tensor,
                        .row0 = rows->row0,
                        .n_rows = rows->n_rows,
                        .n_cols = shape_cols(&w->shape),
                        .scale = 1,
                        .key = m->name.p};
    return PF_OK;
}

int emit_weight(const struct emit *e, const struct ad_module *m, int64_t i_tensor,
                const struct rows *rows)
{
    const struct ckpt_tensor *w = &e->ckpt->tensors[i_tensor];
    struct delta d;
    int rc = start(e, m, i_tensor, rows, &d);
    if (rc != PF_OK)
        return rc;
    const struct ad_tensor *diff = module_leaf(e->a, m, LEAF_DIFF);
    if (module_has_scale(m))
        d.scale = module_scale(m, e->has_alpha, e->alpha);
    switch (m->family) {
    case AD_LORA:
    case AD_EMBEDDING:
        rc = emit_lora(e, m, w, rows, &d);
        break;
    case AD_LOHA:
        rc = emit_loha(e, m, w, rows, &d);
        break;
    case AD_LOKR:
        rc = emit_lokr(e, m, w, rows, &d);
        break;
    case AD_DIFF:
        diff = diff != NULL ? diff : module_leaf(e->a, m, LEAF_W_NORM);
        rc = emit_diff(e, m, diff, w, rows, &d);
        break;
    case AD_BIAS_ONLY:
        return PF_OK;
    }
    return rc == PF_OK ? add(e, &d) : rc;
}

int emit_bias(const struct emit *e, const struct ad_module *m, enum ad_leaf leaf, int64_t i_tensor,
              const struct rows *rows)
{
    struct delta d;
    int rc = start(e, m, i_tensor, rows, &d);
    if (rc == PF_OK)
        rc = emit_diff(e, m, module_leaf(e->a, m, leaf), &e->ckpt->tensors[i_tensor], rows, &d);
    if (rc != PF_OK)
        return rc;
    if (leaf == LEAF_UP_BIAS)
        d.scale = module_scale(m, e->has_alpha, e->alpha);
    return add(e, &d);
}
