/*
 * The families: which leaves belong together, and what their shapes must say to each other. No base is needed for that, so a
 * file that is broken in itself is refused when it is opened, with both shapes in the message.
 */
#include "adapter/adapter_int.h"

#include "tensor/dtype.h"

#include <string.h>

struct ctx {
    const struct pf_adapter *a;
    struct ad_module *m;
    pf_error *err;
};

static const struct ad_tensor *leaf(const struct ctx *c, enum ad_leaf l)
{
    return module_leaf(c->a, c->m, l);
}

static bool has(const struct ctx *c, enum ad_leaf l)
{
    return c->m->leaf[l] >= 0;
}

/* ------------------------------------------------------------------------------------------ complete or not */

static int incomplete(const struct ctx *c, enum ad_leaf present, const char *missing)
{
    return err_set(c->err, PF_E_MISMATCH,
                   "adapter '%s': '%s' comes without %s: the factors of '%s' are incomplete",
                   c->a->path, leaf(c, present)->name.p, missing, c->m->name.p);
}

static int need_both(const struct ctx *c, enum ad_leaf x, enum ad_leaf y, const char *x_name,
                     const char *y_name)
{
    if (has(c, x) && !has(c, y))
        return incomplete(c, x, y_name);
    if (has(c, y) && !has(c, x))
        return incomplete(c, y, x_name);
    return PF_OK;
}

static int set_family(const struct ctx *c, enum ad_family family)
{
    if (c->m->family != AD_BIAS_ONLY)
        return err_set(c->err, PF_E_CONFLICT,
                       "adapter '%s': module '%s' has the factors of two families: which of them "
                       "is meant is not said",
                       c->a->path, c->m->name.p);
    c->m->family = family;
    return PF_OK;
}

static int find_family(const struct ctx *c)
{
    static const struct {
        enum ad_leaf first, last;
        enum ad_family family;
    } families[] = {
        {LEAF_UP, LEAF_DOWN, AD_LORA},           {LEAF_EMB_UP, LEAF_EMB_DOWN, AD_EMBEDDING},
        {LEAF_HADA_W1A, LEAF_HADA_W2B, AD_LOHA}, {LEAF_LOKR_W1, LEAF_LOKR_W2B, AD_LOKR},
        {LEAF_DIFF, LEAF_DIFF, AD_DIFF},         {LEAF_W_NORM, LEAF_W_NORM, AD_DIFF},
    };
    for (size_t i = 0; i < PF_COUNTOF(families); i++) {
        bool any = false;
        for (int l = (int)families[i].first; l <= (int)families[i].last; l++)
            any |= has(c, (enum ad_leaf)l);
        int rc = any ? set_family(c, families[i].family) : PF_OK;
        if (rc != PF_OK)
            return rc;
    }
    if (!module_has_scale(c->m)) {
        enum ad_leaf l = has(c, LEAF_ALPHA) ? LEAF_ALPHA : LEAF_SCALE;
        if (has(c, l))
            return err_set(c->err, PF_E_UNSUPPORTED,
                           "adapter '%s': '%s' beside a plain difference has no meaning",
                           c->a->path, leaf(c, l)->name.p);
    }
    if (has(c, LEAF_UP_BIAS) && c->m->family != AD_LORA)
        return incomplete(c, LEAF_UP_BIAS, "lora_A and lora_B");
    return PF_OK;
}

/* -------------------------------------------------------------------------------------------------- tensors */

/* A factor: floats, at least one element, and a matrix or more unless it is a plain difference. */
static int check_factor(const struct ctx *c, const struct ad_tensor *t, int32_t min_rank)
{
    if (!dtype_is_factor(t->dtype))
        return err_set(c->err, PF_E_UNSUPPORTED,
                       "adapter '%s': tensor '%s' is %s: factors are read as F32, F16, BF16, F64, "
                       "F8_E4M3 or F8_E5M2",
                       c->a->path, t->name.p, pf_dtype_name(t->dtype));
    char shape[128];
    if (t->n_bytes == 0 || t->shape.rank < min_rank)
        return err_set(c->err, PF_E_MISMATCH,
                       "adapter '%s': tensor '%s' has shape %s: a factor has %s", c->a->path,
                       t->name.p, shape_text(&t->shape, shape, sizeof shape),
                       t->n_bytes == 0 ? "at least one element" : "rows and columns");
    return PF_OK;
}

static int check_scalar(const struct ctx *c, enum ad_leaf l)
{
    const struct ad_tensor *t = leaf(c, l);
    if (t == NULL)
        return PF_OK;
    char shape[128];
    bool is_scalar = t->shape.rank == 0 || (t->shape.rank == 1 && t->shape.dim[0] == 1);
    if (!is_scalar)
        return err_set(c->err, PF_E_MISMATCH,
                       "adapter '%s': '%s' has shape %s: it is one number, [] or [1]", c->a->path,
                       t->name.p, shape_text(&t->shape, shape, sizeof shape));
    return PF_OK;
}

static int check_leaves(const struct ctx *c)
{
    for (int l = 0; l < (int)LEAF_N; l++) {
        const struct ad_tensor *t = leaf(c, (enum ad_leaf)l);
        int rc = PF_OK;
        if (t == NULL)
            continue;
        if (l == LEAF_ALPHA || l == LEAF_SCALE)
            rc = check_scalar(c, (enum ad_leaf)l);
        else
            rc = check_factor(c, t, l == LEAF_UP_BIAS || l >= LEAF_DIFF ? 0 : 2);
        if (rc != PF_OK)
            return rc;
    }
    return PF_OK;
}

/* ---------------------------------------------------------------------------------------------- shape rules */

static int disagree(const struct ctx *c, const struct ad_tensor *x, const struct ad_tensor *y,
                    const char *rule)
{
    char sx[128], sy[128];
    return err_set(c->err, PF_E_MISMATCH, "adapter '%s': '%s' is %s and '%s' is %s: %s", c->a->path,
                   x->name.p, shape_text(&x->shape, sx, sizeof sx), y->name.p,
                   shape_text(&y->shape, sy, sizeof sy), rule);
}

/* x (rows, r) times y (r, cols): the columns of x are the rows of y. Sets r. */
static int check_chain(const struct ctx *c, enum ad_leaf lx, enum ad_leaf ly, int64_t *out_rank)
{
    const struct ad_tensor *x = leaf(c, lx), *y = leaf(c, ly);
    for (int32_t i = 2; i < x->shape.rank; i++)
        if (x->shape.dim[i] != 1)
            return disagree(c, x, y, "the first is a matrix: it has no kernel of its own");
    if (shape_cols(&x->shape) != y->shape.dim[0])
        return disagree(c, x, y, "the columns of the first must be the rows of the second");
    *out_rank = y->shape.dim[0];
    return PF_OK;
}

static int check_lora(const struct ctx *c, enum ad_leaf up, enum ad_leaf down)
{
    int rc = need_both(c, up, down, "its B (up)", "its A (down)");
    if (rc == PF_OK)
        rc = check_chain(c, up, down, &c->m->rank[0]);
    if (rc != PF_OK)
        return rc;
    c->m->rows = leaf(c, up)->shape.dim[0];
    if (up == LEAF_EMB_UP) {
        if (leaf(c, down)->shape.rank != 2)
            return disagree(c, leaf(c, down), leaf(c, up),
                            "the factors of an embedding are matrices");
        c->m->rows = leaf(c, down)->shape.dim[1]; /* stored (n, dim): (B A)^T */
    }
    const struct ad_tensor *bias = leaf(c, LEAF_UP_BIAS);
    if (bias != NULL && (bias->shape.rank != 1 || bias->shape.dim[0] != c->m->rows))
        return disagree(c, bias, leaf(c, up), "a bias has one number for each row of B");
    return PF_OK;
}

static int check_loha(const struct ctx *c)
{
    static const char *const names[] = {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"};
    int present = LEAF_HADA_W1A;
    while (!has(c, (enum ad_leaf)present))
        present++;
    for (int i = 0; i < 4; i++)
        if (!has(c, (enum ad_leaf)(LEAF_HADA_W1A + i)))
            return incomplete(c, (enum ad_leaf)present, names[i]);
    int rc = check_chain(c, LEAF_HADA_W1A, LEAF_HADA_W1B, &c->m->rank[0]);
    if (rc == PF_OK)
        rc = check_chain(c, LEAF_HADA_W2A, LEAF_HADA_W2B, &c->m->rank[1]);
    if (rc != PF_OK)
        return rc;
    const struct ad_tensor *w1a = leaf(c, LEAF_HADA_W1A), *w2a = leaf(c, LEAF_HADA_W2A);
    const struct ad_tensor *w1b = leaf(c, LEAF_HADA_W1B), *w2b = leaf(c, LEAF_HADA_W2B);
    if (w1a->shape.dim[0] != w2a->shape.dim[0])
        return disagree(c, w1a, w2a, "both products must have the same rows");
    if (c->m->rank[0] != c->m->rank[1])
        return disagree(c, w1b, w2b, "both products must have the same rank");
    if (shape_cols(&w1b->shape) != shape_cols(&w2b->shape))
        return disagree(c, w1b, w2b, "both products must have the same columns");
    c->m->rows = w1a->shape.dim[0];
    return PF_OK;
}

/* One side of a Kronecker product, whole or factored; its first factor, and its rank (0: whole). */
static int check_lokr_side(const struct ctx *c, enum ad_leaf whole, const char *const names[3],
                           const struct ad_tensor **out_first, int64_t *out_rank)
{
    enum ad_leaf la = (enum ad_leaf)((int)whole + 1), lb = (enum ad_leaf)((int)whole + 2);
    int rc = need_both(c, la, lb, names[1], names[2]);
    if (rc != PF_OK)
        return rc;
    if (has(c, whole) && has(c, la))
        return err_set(c->err, PF_E_CONFLICT,
                       "adapter '%s': '%s' and '%s' are one side, whole and factored", c->a->path,
                       leaf(c, whole)->name.p, leaf(c, la)->name.p);
    if (has(c, whole)) {
        *out_first = leaf(c, whole);
        *out_rank = 0;
        return PF_OK;
    }
    *out_first = leaf(c, la);
    if (*out_first == NULL)
        return PF_OK;
    return check_chain(c, la, lb, out_rank);
}

static int check_lokr(const struct ctx *c)
{
    static const char *const names1[] = {"lokr_w1", "lokr_w1_a", "lokr_w1_b"};
    static const char *const names2[] = {"lokr_w2", "lokr_w2_a", "lokr_w2_b"};
    const struct ad_tensor *w1 = NULL, *w2 = NULL;
    int rc = check_lokr_side(c, LEAF_LOKR_W1, names1, &w1, &c->m->rank[0]);
    if (rc == PF_OK)
        rc = check_lokr_side(c, LEAF_LOKR_W2, names2, &w2, &c->m->rank[1]);
    if (rc != PF_OK)
        return rc;
    if (w1 == NULL || w2 == NULL)
        return err_set(
            c->err, PF_E_MISMATCH,
            "adapter '%s': '%s' comes without its %s: the factors of '%s' are incomplete",
            c->a->path, (w1 != NULL ? w1 : w2)->name.p, w1 == NULL ? "w1" : "w2", c->m->name.p);
    uint64_t rows;
    if (!mul_u64((uint64_t)w1->shape.dim[0], (uint64_t)w2->shape.dim[0], &rows) || rows > INT64_MAX)
        return disagree(c, w1, w2, "their rows multiply beyond any tensor");
    c->m->rows = (int64_t)rows;
    return PF_OK;
}

static int check_shapes(const struct ctx *c)
{
    const struct ad_tensor *t = NULL;
    switch (c->m->family) {
    case AD_LORA:
        return check_lora(c, LEAF_UP, LEAF_DOWN);
    case AD_EMBEDDING:
        return check_lora(c, LEAF_EMB_UP, LEAF_EMB_DOWN);
    case AD_LOHA:
        return check_loha(c);
    case AD_LOKR:
        return check_lokr(c);
    case AD_DIFF:
        t = has(c, LEAF_DIFF) ? leaf(c, LEAF_DIFF) : leaf(c, LEAF_W_NORM);
        break;
    case AD_BIAS_ONLY:
        t = has(c, LEAF_DIFF_B) ? leaf(c, LEAF_DIFF_B) : leaf(c, LEAF_B_NORM);
        break;
    }
    c->m->rows = shape_rows(&t->shape);
    return PF_OK;
}

int family_check(const struct pf_adapter *a, struct ad_module *m, pf_error *err)
{
    struct ctx c = {.a = a, .m = m, .err = err};
    int rc = find_family(&c);
    if (rc == PF_OK)
        rc = check_leaves(&c);
    if (rc == PF_OK)
        rc = check_shapes(&c);
    return rc;
}

/* ------------------------------------------------------------------------------------------- block diagonals */

bool tensor_is_zero(const struct ad_tensor *t, int64_t row0, int64_t n_rows, int64_t col0,
                    int64_t n_cols)
{
    int64_t r = shape_cols(&t->shape);
    float v[64];
    for (int64_t i = row0; i < row0 + n_rows; i++)
        for (int64_t j = 0; j < n_cols; j += 64) {
            size_t n = n_cols - j < 64 ? (size_t)(n_cols - j) : 64;
            dtype_to_f32(t->dtype, t->p + (size_t)(i * r + col0 + j) * dtype_size(t->dtype), n, v);
            for (size_t k = 0; k < n; k++)
                if (v[k] != 0)
                    return false;
        }
    return true;
}

bool family_is_block_diagonal(const struct pf_adapter *a, const struct ad_module *m)
{
    static const struct {
        const char *suffix;
        int64_t n;
    } fused[] = {{"qkv", 3}, {"qkv_proj", 3}, {"in_proj", 3}, {"W_pack", 3}, {"gate_up_proj", 2}};
    int64_t n = 0;
    for (size_t i = 0; i < PF_COUNTOF(fused); i++)
        if (str_ends(m->name, fused[i].suffix))
            n = fused[i].n;
    if (n == 0 || m->family != AD_LORA || m->rank[0] % n != 0 || m->rows % n != 0)
        return false;
    const struct ad_tensor *b = module_leaf(a, m, LEAF_UP);
    int64_t rows = m->rows / n, cols = m->rank[0] / n;
    for (int64_t i = 0; i < n; i++) {
        if (tensor_is_zero(b, i * rows, rows, i * cols, cols))
            return false; /* an empty block: zeros prove nothing */
        if (!tensor_is_zero(b, i * rows, rows, 0, i * cols) ||
            !tensor_is_zero(b, i * rows, rows, (i + 1) * cols, m->rank[0] - (i + 1) * cols))
            return false;
    }
    return true;
}
