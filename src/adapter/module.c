/*
 * From keys to modules: the leaf of each key is taken off, keys with the same rest are one module, and what is no leaf is kept
 * aside until the base is known. A refused leaf ends the parse: an adapter is never used without a part of itself.
 */
#include "adapter/adapter_int.h"

#include "tensor/dtype.h"

#include <stdlib.h>
#include <string.h>

#define KEY_BYTES_MAX 1000u

struct split_key {
    struct str module, adapter;
    uint32_t leaf, i_tensor;
};

static int cmp_name(struct str a, struct str b)
{
    int c = str_cmp_natural(a, b);
    return c != 0 ? c : str_cmp(a, b);
}

static int cmp_split(const void *pa, const void *pb)
{
    const struct split_key *a = pa, *b = pb;
    int c = cmp_name(a->module, b->module);
    if (c != 0)
        return c;
    if (a->leaf != b->leaf)
        return a->leaf < b->leaf ? -1 : 1;
    return a->i_tensor < b->i_tensor ? -1 : a->i_tensor > b->i_tensor;
}

/* NULL: there is none. */
static const struct ad_module *module_find(const struct pf_adapter *a, struct str name)
{
    size_t lo = 0, hi = a->n_modules;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int c = cmp_name(a->modules[mid].name, name);
        if (c == 0)
            return &a->modules[mid];
        if (c < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return NULL;
}

const struct ad_tensor *module_leaf(const struct pf_adapter *a, const struct ad_module *m,
                                    enum ad_leaf leaf)
{
    return m->leaf[leaf] >= 0 ? &a->tensors[m->leaf[leaf]] : NULL;
}

/* -------------------------------------------------------------------------------------------- splitting keys */

static int split_one(struct pf_adapter *a, uint32_t i_tensor, struct split_key *out, pf_error *err)
{
    const struct ad_tensor *t = &a->tensors[i_tensor];
    if (t->name.n > KEY_BYTES_MAX)
        return err_set(err, PF_E_RANGE, "adapter '%s': a key of %zu bytes: at most %u are read",
                       a->path, t->name.n, KEY_BYTES_MAX);
    struct ad_split s = dialect_split(t->name);
    if (s.leaf == LEAF_REFUSED)
        return err_set(err, PF_E_UNSUPPORTED, "adapter '%s': tensor '%s': %s", a->path, t->name.p,
                       s.refused);
    *out = (struct split_key){
        .module = s.module, .adapter = s.adapter, .leaf = s.leaf, .i_tensor = i_tensor};
    if (s.append != NULL) {
        struct strbuf b;
        strbuf_init(&b);
        strbuf_add(&b, s.module.p, s.module.n);
        strbuf_adds(&b, s.append);
        char *name = strbuf_ok(&b) ? arena_strndup(&a->arena, b.p, b.n) : NULL;
        out->module = (struct str){name, b.n};
        strbuf_release(&b);
        if (name == NULL)
            return err_nomem(err, s.module.n, "a module's name");
    }
    return PF_OK;
}

/* A dump of a whole model may hold several adapters. Each of their modules is whole, so they are used, but hardly as was meant. */
static void remark_names(struct pf_adapter *a, const struct split_key *keys, size_t n)
{
    const struct split_key *first = NULL;
    for (size_t i = 0; i < n; i++) {
        if (keys[i].adapter.n == 0)
            continue;
        if (first == NULL)
            first = &keys[i];
        if (str_eq(first->adapter, keys[i].adapter))
            continue;
        notes_addf(&a->notes,
                   "warning: it holds the modules of several adapters, '%.*s' and '%.*s' among "
                   "them: all are used",
                   (int)first->adapter.n, first->adapter.p, (int)keys[i].adapter.n,
                   keys[i].adapter.p);
        return;
    }
}

static int split_keys(struct pf_adapter *a, struct split_key **out, size_t *out_n, pf_error *err)
{
    struct split_key *keys = mem_calloc(a->n_tensors > 0 ? a->n_tensors : 1, sizeof *keys);
    a->unknown = arena_alloc(&a->arena, a->n_tensors * sizeof *a->unknown);
    if (keys == NULL || a->unknown == NULL) {
        mem_free(keys);
        return err_nomem(err, a->n_tensors * sizeof *keys, "the keys of an adapter");
    }
    size_t n = 0;
    for (uint32_t i = 0; i < a->n_tensors; i++) {
        int rc = split_one(a, i, &keys[n], err);
        if (rc != PF_OK) {
            mem_free(keys);
            return rc;
        }
        if (keys[n].leaf == LEAF_UNKNOWN)
            a->unknown[a->n_unknown++] = i;
        else
            n++;
    }
    qsort(keys, n, sizeof *keys, cmp_split);
    *out = keys;
    *out_n = n;
    return PF_OK;
}

/* ------------------------------------------------------------------------------------------------- grouping */

static bool same_bytes(const struct ad_tensor *x, const struct ad_tensor *y)
{
    return x->dtype == y->dtype && shape_eq(&x->shape, &y->shape) &&
           memcmp(x->p, y->p, x->n_bytes) == 0;
}

static int add_leaf(struct pf_adapter *a, struct ad_module *m, const struct split_key *k,
                    pf_error *err)
{
    const struct ad_tensor *t = &a->tensors[k->i_tensor], *first = module_leaf(a, m, k->leaf);
    if (first == NULL) {
        m->leaf[k->leaf] = (int32_t)k->i_tensor;
        return PF_OK;
    }
    if (!same_bytes(first, t))
        return err_set(err, PF_E_CONFLICT,
                       "adapter '%s': '%s' and '%s' are two spellings of one tensor, and their "
                       "bytes differ",
                       a->path, first->name.p, t->name.p);
    notes_addf(&a->notes, "'%s' repeats '%s': used once", t->name.p, first->name.p);
    return PF_OK;
}

/* A of one adapter and B of another are no pair. Keys [lo, hi) are those of m. */
static int check_names(const struct pf_adapter *a, const struct ad_module *m,
                       const struct split_key *keys, size_t lo, size_t hi, pf_error *err)
{
    const struct split_key *first = NULL;
    for (size_t i = lo; i < hi; i++) {
        bool is_used = m->leaf[keys[i].leaf] == (int32_t)keys[i].i_tensor;
        if (!is_used || keys[i].adapter.n == 0)
            continue;
        if (first == NULL)
            first = &keys[i];
        if (!str_eq(first->adapter, keys[i].adapter))
            return err_set(err, PF_E_CONFLICT,
                           "adapter '%s': '%s' is of adapter '%.*s', '%s' is of '%.*s': the "
                           "factors of two adapters do not belong together",
                           a->path, a->tensors[first->i_tensor].name.p, (int)first->adapter.n,
                           first->adapter.p, a->tensors[keys[i].i_tensor].name.p,
                           (int)keys[i].adapter.n, keys[i].adapter.p);
    }
    return PF_OK;
}

/* Keys [lo, hi) share a module. An alpha or scale without factors is judged with the unknown keys. */
static int add_module(struct pf_adapter *a, const struct split_key *keys, size_t lo, size_t hi,
                      pf_error *err)
{
    bool has_factors = false;
    for (size_t i = lo; i < hi; i++)
        has_factors |= keys[i].leaf != LEAF_ALPHA && keys[i].leaf != LEAF_SCALE;
    if (!has_factors) {
        for (size_t i = lo; i < hi; i++)
            a->unknown[a->n_unknown++] = keys[i].i_tensor;
        return PF_OK;
    }
    struct ad_module *m = &a->modules[a->n_modules];
    char *name = arena_strndup(&a->arena, keys[lo].module.p, keys[lo].module.n);
    if (name == NULL)
        return err_nomem(err, keys[lo].module.n, "a module's name");
    *m = (struct ad_module){.name = {name, keys[lo].module.n}, .scale = 1};
    for (size_t i = 0; i < LEAF_N; i++)
        m->leaf[i] = -1;
    for (size_t i = lo; i < hi; i++) {
        int rc = add_leaf(a, m, &keys[i], err);
        if (rc != PF_OK)
            return rc;
        a->tensors[keys[i].i_tensor].i_module = (int32_t)a->n_modules;
    }
    a->n_modules++;
    return check_names(a, m, keys, lo, hi, err);
}

/* A leaf that is not known on a module that is: the adapter says something that would be lost (C49). */
static int check_unknown(const struct pf_adapter *a, pf_error *err)
{
    for (size_t i = 0; i < a->n_unknown; i++) {
        struct str key = a->tensors[a->unknown[i]].name;
        for (size_t n = key.n; n-- > 0;) {
            if (key.p[n] != '.' || module_find(a, (struct str){key.p, n}) == NULL)
                continue;
            return err_set(err, PF_E_UNSUPPORTED,
                           "adapter '%s': leaf '%.*s' of module '%.*s' is not known: it cannot be "
                           "left out, and is not guessed",
                           a->path, (int)(key.n - n), key.p + n, (int)n, key.p);
        }
    }
    return PF_OK;
}

static int cmp_u32(const void *pa, const void *pb)
{
    const uint32_t *a = pa, *b = pb;
    return *a < *b ? -1 : *a > *b;
}

static int group_keys(struct pf_adapter *a, const struct split_key *keys, size_t n, pf_error *err)
{
    size_t n_modules = 0;
    for (size_t i = 0; i < n; i++)
        n_modules += i == 0 || !str_eq(keys[i].module, keys[i - 1].module);
    a->modules = arena_alloc(&a->arena, n_modules * sizeof *a->modules);
    if (a->modules == NULL)
        return err_nomem(err, n_modules * sizeof *a->modules, "the modules of an adapter");
    for (size_t lo = 0, hi = 0; lo < n; lo = hi) {
        while (hi < n && str_eq(keys[lo].module, keys[hi].module))
            hi++;
        int rc = add_module(a, keys, lo, hi, err);
        if (rc != PF_OK)
            return rc;
    }
    qsort(a->unknown, a->n_unknown, sizeof *a->unknown, cmp_u32);
    return PF_OK;
}

/* ----------------------------------------------------------------------------------------------------- rows */

static const char *main_kind(const struct ad_module *m)
{
    switch (m->family) {
    case AD_LORA:
    case AD_EMBEDDING:
        return "lora";
    case AD_LOHA:
        return "loha";
    case AD_LOKR:
        return "lokr";
    case AD_DIFF:
        return "diff";
    default:
        return NULL;
    }
}

static void add_row(struct pf_adapter *a, size_t i_module, const char *kind)
{
    if (kind != NULL)
        a->rows[a->n_rows++] = (struct ad_row){(uint32_t)i_module, kind};
}

static int list_rows(struct pf_adapter *a, pf_error *err)
{
    a->rows = arena_alloc(&a->arena, a->n_modules * 3 * sizeof *a->rows);
    if (a->rows == NULL)
        return err_nomem(err, a->n_modules * 3 * sizeof *a->rows, "the modules of an adapter");
    for (size_t i = 0; i < a->n_modules; i++) {
        const struct ad_module *m = &a->modules[i];
        add_row(a, i, main_kind(m));
        add_row(a, i, m->leaf[LEAF_UP_BIAS] >= 0 ? "bias" : NULL);
        bool has_diff_b = m->leaf[LEAF_DIFF_B] >= 0 || m->leaf[LEAF_B_NORM] >= 0;
        add_row(a, i, has_diff_b ? "diff_b" : NULL);
    }
    return PF_OK;
}

int modules_build(struct pf_adapter *a, pf_error *err)
{
    struct split_key *keys = NULL;
    size_t n = 0;
    int rc = split_keys(a, &keys, &n, err);
    if (rc != PF_OK)
        return rc;
    remark_names(a, keys, n);
    rc = group_keys(a, keys, n, err);
    mem_free(keys);
    if (rc == PF_OK)
        rc = check_unknown(a, err);
    for (size_t i = 0; rc == PF_OK && i < a->n_modules; i++)
        rc = family_check(a, &a->modules[i], err);
    if (rc == PF_OK)
        rc = list_rows(a, err);
    return rc;
}
