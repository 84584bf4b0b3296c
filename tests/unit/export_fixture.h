/*
 * What the tests of export/ share: small checkpoints in the three layouts, one adapter, and the slow, obvious merge of it: the
 * contract of docs/arithmetic.md spelled with fmaf, one element at a time.
 */
#ifndef PF_TESTS_EXPORT_FIXTURE_H
#define PF_TESTS_EXPORT_FIXTURE_H

#include "testing.h"

#include <math.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "safetensors/safetensors.h"
#include "tensor/dtype.h"

enum { FX_RANK = 3, FX_MAX = 16 };

struct fx_tensor {
    char name[64];
    int32_t dtype;
    int64_t d0, d1; /* d1 0: rank 1 */
    uint8_t *p;
    size_t n_bytes;
};

struct fx_set {
    struct fx_tensor t[FX_MAX];
    size_t n;
};

static PF_UNUSED void fx_free(struct fx_set *s)
{
    for (size_t i = 0; i < s->n; i++)
        mem_free(s->t[i].p);
    s->n = 0;
}

static PF_UNUSED void fx_put(uint8_t *p, int32_t dtype, size_t i, float v)
{
    const uint16_t h = dtype == PF_BF16 ? bf16_from_f32(v) : f16_from_f32(v);
    if (dtype == PF_F32)
        memcpy(p + 4 * i, &v, 4);
    else
        memcpy(p + 2 * i, &h, 2);
}

static PF_UNUSED float fx_get(const struct fx_tensor *t, size_t i)
{
    float v;
    dtype_to_f32(t->dtype, t->p + i * dtype_size(t->dtype), 1, &v);
    return v;
}

/* Noise; every 97th value -0, which an adapter that adds 0 must not turn into +0. */
static PF_UNUSED void fx_add(struct fx_set *s, struct rng *r, const char *name, int32_t dtype,
                             int64_t d0, int64_t d1, float scale)
{
    struct fx_tensor *t = &s->t[s->n++];
    const size_t n = (size_t)d0 * (size_t)(d1 ? d1 : 1);
    (void)snprintf(t->name, sizeof t->name, "%s", name);
    t->dtype = dtype;
    t->d0 = d0;
    t->d1 = d1;
    t->n_bytes = n * dtype_size(dtype);
    t->p = mem_alloc(t->n_bytes);
    assert_non_null(t->p);
    for (size_t i = 0; i < n; i++)
        fx_put(t->p, dtype, i, i % 97 == 5 ? -0.0f : (float)(rng_unit(r) - 0.5) * scale);
}

static PF_UNUSED struct fx_tensor *fx_find(struct fx_set *s, const char *name)
{
    for (size_t i = 0; i < s->n; i++) {
        if (!strcmp(s->t[i].name, name))
            return &s->t[i];
    }
    return NULL;
}

/* Tensors i0..i1 of the set as one file. */
static PF_UNUSED void fx_save(const struct fx_set *s, size_t i0, size_t i1, const char *path)
{
    struct st_layout *l = NULL;
    struct strbuf head;
    pf_error err = {0};
    strbuf_init(&head);
    assert_ok(st_layout_new(&l, &err), &err);
    assert_ok(st_layout_meta(l, str_of("format"), str_of("pt"), &err), &err);
    for (size_t i = i0; i < i1; i++) {
        const struct fx_tensor *t = &s->t[i];
        const struct shape shape = {.rank = t->d1 ? 2 : 1, .dim = {t->d0, t->d1}};
        assert_ok(st_layout_tensor(l, str_of(t->name), t->dtype, &shape, &err), &err);
    }
    assert_ok(st_layout_finish(l, 8, &head, &err), &err); /* data at an odd place for a page */
    uint8_t *p = mem_alloc(st_layout_file_bytes(l));
    memcpy(p, head.p, head.n);
    for (size_t i = i0; i < i1; i++)
        memcpy(p + st_layout_offset(l, i - i0), s->t[i].p, s->t[i].n_bytes);
    assert_ok(file_write_atomic(path, p, st_layout_file_bytes(l), &err), &err);
    mem_free(p);
    strbuf_release(&head);
    st_layout_free(l);
}

/* Five tensors of 0.7 to 1.3 MB; three of them are targets. */
static PF_UNUSED void fx_model(struct fx_set *s, uint64_t seed)
{
    struct rng r = {seed};
    *s = (struct fx_set){0};
    fx_add(s, &r, "blocks.0.attn.weight", PF_BF16, 512, 700, 0.1f);
    fx_add(s, &r, "blocks.0.norm.weight", PF_F32, 701, 0, 1.0f);
    fx_add(s, &r, "blocks.1.attn.weight", PF_BF16, 511, 700, 0.1f);
    fx_add(s, &r, "blocks.1.mlp.weight", PF_F16, 700, 901, 0.1f);
    fx_add(s, &r, "embed.weight", PF_F32, 300, 1000, 1.0f);
}

/* Factors for every 2-d tensor of a block. */
static PF_UNUSED void fx_adapter(const struct fx_set *model, struct fx_set *s, uint64_t seed)
{
    struct rng r = {seed};
    *s = (struct fx_set){0};
    for (size_t i = 0; i < model->n; i++) {
        const struct fx_tensor *t = &model->t[i];
        char name[96];
        if (!t->d1 || strncmp(t->name, "blocks.", 7))
            continue;
        const int n = (int)(strlen(t->name) - strlen(".weight"));
        (void)snprintf(name, sizeof name, "%.*s.lora_A.weight", n, t->name);
        fx_add(s, &r, name, PF_F32, FX_RANK, t->d1, 0.2f);
        (void)snprintf(name, sizeof name, "%.*s.lora_B.weight", n, t->name);
        fx_add(s, &r, name, PF_F32, t->d0, FX_RANK, 0.2f);
    }
}

static PF_UNUSED void fx_merge_slowly(const struct fx_set *model, struct fx_set *adapter,
                                      float strength, bool is_f32, struct fx_set *out)
{
    *out = (struct fx_set){.n = model->n};
    for (size_t i = 0; i < model->n; i++) {
        const struct fx_tensor *t = &model->t[i];
        struct fx_tensor *o = &out->t[i];
        char name[96];
        const int n = (int)(strlen(t->name) - strlen(".weight"));
        (void)snprintf(name, sizeof name, "%.*s.lora_A.weight", n, t->name);
        const struct fx_tensor *a = fx_find(adapter, name);
        (void)snprintf(name, sizeof name, "%.*s.lora_B.weight", n, t->name);
        const struct fx_tensor *b = fx_find(adapter, name);
        const bool is_changed = a && b && strength != 0.0f;
        *o = *t;
        o->dtype = is_changed && is_f32 ? PF_F32 : t->dtype;
        const size_t n_elem = t->n_bytes / dtype_size(t->dtype);
        o->n_bytes = n_elem * dtype_size(o->dtype);
        o->p = mem_alloc(o->n_bytes);
        if (!is_changed) {
            memcpy(o->p, t->p, t->n_bytes);
            continue;
        }
        const float *fa = (const float *)(const void *)a->p; /* factors are F32 */
        const float *fb = (const float *)(const void *)b->p;
        for (size_t e = 0; e < n_elem; e++) {
            const size_t m = e / (size_t)t->d1, k = e % (size_t)t->d1;
            float acc = 0.0f;
            for (size_t j = 0; j < FX_RANK; j++)
                acc = fmaf(fb[m * FX_RANK + j], fa[j * (size_t)t->d1 + k], acc);
            fx_put(o->p, o->dtype, e, fx_get(t, e) + fmaf(strength, acc, 0.0f));
        }
    }
}

/* The merged set, in the base's dtypes or, for changed tensors, in f32. Remembered: the same noise is asked for in most tests. */
static PF_UNUSED void fx_merge(const struct fx_set *model, struct fx_set *adapter, float strength,
                               bool is_f32, struct fx_set *out)
{
    static struct known {
        float strength;
        bool is_f32;
        size_t n, n_bytes;
        struct fx_set set;
    } known[8]; /* lives as long as the program */
    static size_t n_known;
    const struct known *k = known;
    while (k < known + n_known && (k->strength != strength || k->is_f32 != is_f32 ||
                                   k->n != model->n || k->n_bytes != model->t[0].n_bytes))
        k++;
    if (k == known + n_known) {
        assert_true(n_known < PF_COUNTOF(known));
        struct known *made = &known[n_known++];
        *made = (struct known){strength, is_f32, model->n, model->t[0].n_bytes, {.n = 0}};
        fx_merge_slowly(model, adapter, strength, is_f32, &made->set);
    }
    *out = k->set;
    for (size_t i = 0; i < out->n; i++) {
        out->t[i].p = mem_alloc(out->t[i].n_bytes);
        assert_non_null(out->t[i].p);
        memcpy(out->t[i].p, k->set.t[i].p, out->t[i].n_bytes);
    }
}

static PF_UNUSED bool fx_same_file(const char *a, const char *b)
{
    char *x = NULL, *y = NULL;
    size_t n_x = 0, n_y = 0;
    const bool is = !file_read_all(a, (size_t)1 << 30, &x, &n_x, NULL) &&
                    !file_read_all(b, (size_t)1 << 30, &y, &n_y, NULL) && n_x == n_y &&
                    !memcmp(x, y, n_x);
    mem_free(x);
    mem_free(y);
    return is;
}

static PF_UNUSED bool fx_same_tree(const char *a, const char *b)
{
    char **x = NULL, **y = NULL;
    size_t n_x = 0, n_y = 0;
    if (file_kind(a) != FILE_DIRECTORY)
        return fx_same_file(a, b);
    bool is = !file_list(a, &x, &n_x, NULL) && !file_list(b, &y, &n_y, NULL) && n_x == n_y;
    for (size_t i = 0; is && i < n_x; i++) {
        char *p = path_join(a, x[i]), *q = path_join(b, y[i]);
        is = !strcmp(x[i], y[i]) && fx_same_tree(p, q);
        mem_free(p);
        mem_free(q);
    }
    file_list_free(x, n_x);
    file_list_free(y, n_y);
    return is;
}

/* Base, adapter and what was made of them, opened. */
struct fx {
    struct fx_set model, factors;
    struct pf_checkpoint *ckpt;
    struct pf_adapter *adapter;
    struct pf_composition *comp;
};

static PF_UNUSED void fx_compose(struct fx *f, const char *base, double strength, int32_t dtype)
{
    const struct pf_lora lora = {
        .adapter = f->adapter, .strength = strength, .target = "transformer"};
    const struct pf_composition_opts opts = {.size = sizeof opts, .merge_dtype = dtype};
    pf_error err = {0};
    if (!f->ckpt)
        assert_ok(pf_checkpoint_open(base, NULL, &f->ckpt, &err), &err);
    pf_composition_free(f->comp);
    f->comp = NULL;
    assert_ok(pf_composition_new(f->ckpt, &lora, 1, &opts, &f->comp, &err), &err);
}

/* The adapter and, as one file, the base. */
static PF_UNUSED void fx_open(struct fx *f, void **state, double strength)
{
    const char *base = test_path(state, "base.safetensors");
    const char *lora = test_path(state, "lora.safetensors");
    pf_error err = {0};
    *f = (struct fx){0};
    fx_model(&f->model, 1);
    fx_adapter(&f->model, &f->factors, 2);
    fx_save(&f->model, 0, f->model.n, base);
    fx_save(&f->factors, 0, f->factors.n, lora);
    assert_ok(pf_adapter_open(lora, &f->adapter, &err), &err);
    fx_compose(f, base, strength, PF_MERGE_BASE);
}

static PF_UNUSED void fx_close(struct fx *f)
{
    pf_composition_free(f->comp);
    pf_adapter_close(f->adapter);
    pf_checkpoint_close(f->ckpt);
    fx_free(&f->model);
    fx_free(&f->factors);
}

/* The expected file for fx_open's base. */
static PF_UNUSED void fx_expect(struct fx *f, float strength, bool is_f32, const char *path)
{
    struct fx_set want;
    fx_merge(&f->model, &f->factors, strength, is_f32, &want);
    fx_save(&want, 0, want.n, path);
    fx_free(&want);
}

/* Nothing but these names stands in the directory; NULL ends them. Sorted. */
static PF_UNUSED void assert_names(const char *dir, const char *const *names)
{
    char **got = NULL;
    size_t n = 0;
    pf_error err = {0};
    assert_ok(file_list(dir, &got, &n, &err), &err);
    for (size_t i = 0; i < n; i++) {
        assert_non_null(names[i]);
        assert_string_equal(got[i], names[i]);
    }
    assert_null(names[n]);
    file_list_free(got, n);
}

#endif
