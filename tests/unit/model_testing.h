/*
 * What the model tests share: the bundled model, opened; one picture's worth of drawing; and made-up models of other sizes,
 * written as a checkpoint directory of F32 tensors with seeded values.
 */
#ifndef PF_TESTS_MODEL_TESTING_H
#define PF_TESTS_MODEL_TESTING_H

#include "testing.h"

#include "base/file.h"
#include "base/mem.h"
#include "model/forward.h"
#include "model/model.h"
#include "safetensors/safetensors.h"

#include <math.h>

#define BUNDLED PF_SOURCE_DIR "/data/emoji-dit"
#define GOLDEN  PF_SOURCE_DIR "/tests/golden/"

struct drawn {
    struct pf_checkpoint *ckpt;
    struct pf_model *model;
    struct pf_view *view;
};

static PF_UNUSED void drawn_open(struct drawn *d, const char *path, unsigned n_threads)
{
    pf_error err = {0};
    const struct pf_model_opts opts = {.size = sizeof opts, .n_threads = n_threads};
    memset(d, 0, sizeof *d);
    assert_ok(pf_checkpoint_open(path, NULL, &d->ckpt, &err), &err);
    assert_ok(pf_model_open(d->ckpt, &opts, &d->model, &err), &err);
    assert_ok(pf_view_open(d->ckpt, NULL, &d->view, &err), &err);
}

static PF_UNUSED void drawn_close(struct drawn *d)
{
    pf_view_release(d->view);
    pf_model_close(d->model);
    pf_checkpoint_close(d->ckpt);
}

/* A golden tensor's values; free() them. */
static PF_UNUSED float *golden_floats(const struct st_file *file, const char *name, size_t n)
{
    const struct st_tensor *t = st_find(file, str_of(name));
    if (t == NULL)
        fail_msg("no golden tensor '%s'", name);
    assert_int_equal(t->n_bytes, n * sizeof(float));
    float *p = malloc(n * sizeof(float));
    assert_non_null(p);
    memcpy(p, st_data(file, t), n * sizeof(float));
    return p;
}

struct difference {
    double max_abs, mean_abs, largest; /* largest magnitude of what was expected */
};

static PF_UNUSED struct difference compare(const float *have, const float *want, size_t n)
{
    struct difference d = {0};
    for (size_t i = 0; i < n; i++) {
        double e = fabs((double)have[i] - (double)want[i]);
        d.max_abs = e > d.max_abs || e != e ? e : d.max_abs;
        d.mean_abs += e / (double)n;
        d.largest = fmax(d.largest, fabs((double)want[i]));
    }
    return d;
}

/* ------------------------------------------------------------------------------------------ made-up models */

/* The numbers of config.json, and what the writer needs to know about the tensors. */
struct made_up {
    int n_blocks, n_heads, head_dim, channels, size, patch, n_classes;
    bool has_attn_bias;
    double norm_eps;
};

#define MADE_TENSORS_MAX 128

struct made_tensor {
    char name[96];
    int64_t dim[4];
    int rank;
    size_t n;
    float *p;
};

struct made {
    struct made_up shape;
    struct made_tensor tensors[MADE_TENSORS_MAX];
    size_t n_tensors;
};

static PF_UNUSED void made_add(struct made *m, struct rng *r, const char *prefix, const char *leaf,
                               int64_t d0, int64_t d1, int64_t d2, int64_t d3)
{
    struct made_tensor *t = &m->tensors[m->n_tensors++];
    const int64_t dims[4] = {d0, d1, d2, d3};
    assert_in_range(m->n_tensors, 1, MADE_TENSORS_MAX);
    (void)snprintf(t->name, sizeof t->name, "%s%s", prefix, leaf);
    t->n = 1;
    for (t->rank = 0; t->rank < 4 && dims[t->rank] > 0; t->rank++) {
        t->dim[t->rank] = dims[t->rank];
        t->n *= (size_t)dims[t->rank];
    }
    t->p = malloc(t->n * sizeof(float));
    assert_non_null(t->p);
    double fan_in = t->rank > 1 ? (double)(t->n / (size_t)d0) : 4.0;
    for (size_t i = 0; i < t->n; i++)
        t->p[i] = (float)((rng_unit(r) * 2.0 - 1.0) * 1.7 / sqrt(fan_in));
}

static PF_UNUSED void made_linear(struct made *m, struct rng *r, const char *prefix,
                                  const char *leaf, int64_t n_out, int64_t n_in, bool has_bias)
{
    char name[64];
    (void)snprintf(name, sizeof name, "%s.weight", leaf);
    made_add(m, r, prefix, name, n_out, n_in, 0, 0);
    (void)snprintf(name, sizeof name, "%s.bias", leaf);
    if (has_bias)
        made_add(m, r, prefix, name, n_out, 0, 0, 0);
}

static PF_UNUSED void made_fill(struct made *m, const struct made_up *s, uint64_t seed)
{
    struct rng r = {seed};
    int64_t d = s->n_heads * s->head_dim, values = s->channels * s->patch * s->patch;
    memset(m, 0, sizeof *m);
    m->shape = *s;
    made_add(m, &r, "", "pos_embed.proj.weight", d, s->channels, s->patch, s->patch);
    made_add(m, &r, "", "pos_embed.proj.bias", d, 0, 0, 0);
    for (int b = 0; b < s->n_blocks; b++) {
        char prefix[40];
        (void)snprintf(prefix, sizeof prefix, "transformer_blocks.%d.", b);
        made_linear(m, &r, prefix, "norm1.emb.timestep_embedder.linear_1", d, 256, true);
        made_linear(m, &r, prefix, "norm1.emb.timestep_embedder.linear_2", d, d, true);
        made_add(m, &r, prefix, "norm1.emb.class_embedder.embedding_table.weight", s->n_classes + 1,
                 d, 0, 0);
        made_linear(m, &r, prefix, "norm1.linear", 6 * d, d, true);
        made_linear(m, &r, prefix, "attn1.to_q", d, d, s->has_attn_bias);
        made_linear(m, &r, prefix, "attn1.to_k", d, d, s->has_attn_bias);
        made_linear(m, &r, prefix, "attn1.to_v", d, d, s->has_attn_bias);
        made_linear(m, &r, prefix, "attn1.to_out.0", d, d, true);
        made_linear(m, &r, prefix, "ff.net.0.proj", 4 * d, d, true);
        made_linear(m, &r, prefix, "ff.net.2", d, 4 * d, true);
    }
    made_linear(m, &r, "", "proj_out_1", 2 * d, d, true);
    made_linear(m, &r, "", "proj_out_2", values, d, true);
}

static PF_UNUSED const float *made_find(const struct made *m, const char *prefix, const char *leaf)
{
    char name[96];
    (void)snprintf(name, sizeof name, "%s%s", prefix, leaf);
    for (size_t i = 0; i < m->n_tensors; i++)
        if (strcmp(m->tensors[i].name, name) == 0)
            return m->tensors[i].p;
    return NULL;
}

static PF_UNUSED void made_release(struct made *m)
{
    for (size_t i = 0; i < m->n_tensors; i++)
        free(m->tensors[i].p);
}

static PF_UNUSED void made_write_text(void **state, const char *name, const char *text)
{
    const char *path = test_path(state, name);
    char *dir = path_dir(path);
    assert_non_null(dir);
    assert_int_equal(file_mkdirs(dir, NULL), PF_OK);
    mem_free(dir);
    write_file(path, text, strlen(text));
}

static PF_UNUSED void made_write_config(void **state, const struct made_up *s)
{
    char text[1024];
    (void)snprintf(text, sizeof text,
                   "{\"_class_name\":\"DiTTransformer2DModel\",\"num_layers\":%d,"
                   "\"num_attention_heads\":%d,\"attention_head_dim\":%d,\"in_channels\":%d,"
                   "\"out_channels\":%d,\"sample_size\":%d,\"patch_size\":%d,"
                   "\"num_embeds_ada_norm\":%d,\"attention_bias\":%s,\"norm_eps\":%g}",
                   s->n_blocks, s->n_heads, s->head_dim, s->channels, s->channels, s->size,
                   s->patch, s->n_classes, s->has_attn_bias ? "true" : "false", s->norm_eps);
    made_write_text(state, "transformer/config.json", text);
}

/* The tensors, but for `without`; a model directory in the test's own directory. */
static PF_UNUSED void made_write(void **state, const struct made *m, const char *without)
{
    struct st_layout *layout = NULL;
    struct strbuf header;
    pf_error err = {0};
    made_write_text(state, "model_index.json",
                    "{\"_class_name\":\"P\",\"transformer\":[\"diffusers\","
                    "\"DiTTransformer2DModel\"],\"id2label\":{\"0\":\"dot\"}}");
    made_write_config(state, &m->shape);
    strbuf_init(&header);
    assert_ok(st_layout_new(&layout, &err), &err);
    for (size_t i = 0; i < m->n_tensors; i++) {
        const struct made_tensor *t = &m->tensors[i];
        struct shape shape = {.rank = t->rank};
        memcpy(shape.dim, t->dim, sizeof t->dim);
        if (without == NULL || strcmp(without, t->name) != 0)
            assert_ok(st_layout_tensor(layout, str_of(t->name), PF_F32, &shape, &err), &err);
    }
    assert_ok(st_layout_finish(layout, 8, &header, &err), &err);
    FILE *f = fopen(test_path(state, "transformer/diffusion_pytorch_model.safetensors"), "wbe");
    assert_non_null(f);
    assert_int_equal(fwrite(header.p, 1, header.n, f), header.n);
    for (size_t i = 0; i < m->n_tensors; i++)
        if (without == NULL || strcmp(without, m->tensors[i].name) != 0)
            assert_int_equal(fwrite(m->tensors[i].p, sizeof(float), m->tensors[i].n, f),
                             m->tensors[i].n);
    assert_int_equal(fclose(f), 0);
    strbuf_release(&header);
    st_layout_free(layout);
}

#endif
