/*
 * The tensor table of a DiT: every tensor that the forward reads is found by its name in the component, its shape compared
 * with what config.json promises, its dtype with what a panel can be converted from. A tensor that the forward does not know is an error as
 * well: the config would be that of another model.
 */
#include "model/dit.h"

#include "base/json.h"
#include "base/mem.h"
#include "tensor/dtype.h"

#include <stdio.h>

#define CONFIG_BYTES_MAX ((size_t)1 << 20)

/* The search for one model's tensors. */
struct table {
    const struct pf_checkpoint *ckpt;
    const struct ckpt_component *component;
    uint32_t i_component;
    bool *is_used; /* per tensor of the component */
    pf_error *err;
};

static int find_tensor(struct table *t, const char *name, const struct shape *want, uint32_t *out_i)
{
    char have_text[160], want_text[160];
    int64_t i = ckpt_find(t->ckpt, t->i_component, str_of(name));
    if (i < 0)
        return err_set(t->err, PF_E_NOTFOUND,
                       "component '%s' has no tensor '%s', which its config.json calls for",
                       t->component->name, name);
    const struct ckpt_tensor *tensor = &t->ckpt->tensors[i];
    if (!shape_eq(&tensor->shape, want))
        return err_set(t->err, PF_E_MISMATCH,
                       "tensor '%s' has shape %s, but config.json calls for %s", name,
                       shape_text(&tensor->shape, have_text, sizeof have_text),
                       shape_text(want, want_text, sizeof want_text));
    if (!dtype_is_mergeable(tensor->dtype))
        return err_set(t->err, PF_E_UNSUPPORTED,
                       "tensor '%s' has dtype %s: pictures are drawn with F32, F16 and BF16", name,
                       pf_dtype_name(tensor->dtype));
    t->is_used[(uint32_t)i - t->component->i_tensor0] = true;
    *out_i = (uint32_t)i;
    return PF_OK;
}

static int find_matrix(struct table *t, const char *prefix, const char *leaf, int64_t n_rows,
                       int64_t n_cols, uint32_t *out_i)
{
    char name[160];
    (void)snprintf(name, sizeof name, "%s%s", prefix, leaf); /* our own bounded names */
    const struct shape shape = {.rank = 2, .dim = {n_rows, n_cols}};
    return find_tensor(t, name, &shape, out_i);
}

static int find_bias(struct table *t, const char *prefix, const char *leaf, int64_t n,
                     int64_t *out_i)
{
    char name[160];
    uint32_t i = 0;
    (void)snprintf(name, sizeof name, "%s%s.bias", prefix, leaf);
    const struct shape shape = {.rank = 1, .dim = {n}};
    int rc = find_tensor(t, name, &shape, &i);
    if (rc == PF_OK)
        *out_i = i;
    return rc;
}

static int find_linear(struct table *t, const char *prefix, const char *leaf, int64_t n_out,
                       int64_t n_in, bool has_bias, struct dit_linear *out)
{
    char weight[160];
    *out = (struct dit_linear){.n_out = n_out, .n_in = n_in, .i_bias = -1};
    (void)snprintf(weight, sizeof weight, "%s.weight", leaf);
    int rc = find_matrix(t, prefix, weight, n_out, n_in, &out->i_weight);
    if (rc == PF_OK && has_bias)
        rc = find_bias(t, prefix, leaf, n_out, &out->i_bias);
    return rc;
}

struct linear_row {
    const char *leaf;
    int64_t n_out, n_in;
    bool has_bias;
    struct dit_linear *out;
};

static int find_block(struct table *t, const struct dit_config *c, uint32_t i, struct dit_block *b)
{
    int64_t d = c->dim;
    bool qkv_bias = c->has_attn_bias;
    const struct linear_row rows[] = {
        {"norm1.emb.timestep_embedder.linear_1", d, DIT_TIME_FREQS, true, &b->time_1},
        {"norm1.emb.timestep_embedder.linear_2", d, d, true, &b->time_2},
        {"norm1.linear", DIT_MOD * d, d, true, &b->modulation},
        {"attn1.to_q", d, d, qkv_bias, &b->q},
        {"attn1.to_k", d, d, qkv_bias, &b->k},
        {"attn1.to_v", d, d, qkv_bias, &b->v},
        {"attn1.to_out.0", d, d, true, &b->attn_out},
        {"ff.net.0.proj", c->n_inner, d, true, &b->ff_in},
        {"ff.net.2", d, c->n_inner, true, &b->ff_out},
    };
    char prefix[64];
    (void)snprintf(prefix, sizeof prefix, "transformer_blocks.%u.", i);
    for (size_t j = 0; j < PF_COUNTOF(rows); j++) {
        int rc = find_linear(t, prefix, rows[j].leaf, rows[j].n_out, rows[j].n_in, rows[j].has_bias,
                             rows[j].out);
        if (rc != PF_OK)
            return rc;
    }
    b->i_layer = t->ckpt->tensors[b->q.i_weight].i_layer;
    return find_matrix(t, prefix, "norm1.emb.class_embedder.embedding_table.weight",
                       c->n_classes + 1, d, &b->i_table);
}

static int find_stem(struct table *t, struct dit *dit)
{
    const struct dit_config *c = &dit->config;
    const struct shape patch = {.rank = 4, .dim = {c->dim, c->channels, c->patch, c->patch}};
    dit->patch_embed = (struct dit_linear){.n_out = c->dim, .n_in = c->patch_values, .i_bias = -1};
    int rc = find_tensor(t, "pos_embed.proj.weight", &patch, &dit->patch_embed.i_weight);
    if (rc == PF_OK)
        rc = find_bias(t, "", "pos_embed.proj", c->dim, &dit->patch_embed.i_bias);
    if (rc == PF_OK)
        rc = find_linear(t, "", "proj_out_1", 2 * c->dim, c->dim, true, &dit->out_modulation);
    if (rc == PF_OK)
        rc = find_linear(t, "", "proj_out_2", c->patch_values, c->dim, true, &dit->out_patches);
    if (rc == PF_OK)
        dit->i_stem_layer = t->ckpt->tensors[dit->patch_embed.i_weight].i_layer;
    return rc;
}

/* Some exporters store the positions, which are computed here. */
static int check_no_other_tensor(const struct table *t)
{
    for (uint32_t i = 0; i < t->component->n_tensors; i++) {
        const struct ckpt_tensor *tensor = &t->ckpt->tensors[t->component->i_tensor0 + i];
        if (!t->is_used[i] && !str_eqz(tensor->name, "pos_embed.pos_embed"))
            return err_set(t->err, PF_E_MISMATCH,
                           "tensor '%.*s' belongs to no part of the model that '%s' describes",
                           (int)tensor->name.n, tensor->name.p, t->component->config_path);
    }
    return PF_OK;
}

static int find_tensors(struct dit *dit, struct table *t)
{
    const struct dit_config *c = &dit->config;
    t->is_used = mem_calloc(t->component->n_tensors, sizeof *t->is_used);
    dit->blocks = mem_calloc((size_t)c->n_blocks, sizeof *dit->blocks);
    int rc = PF_OK;
    if (t->is_used == NULL || dit->blocks == NULL)
        rc = err_nomem(t->err, (size_t)c->n_blocks * sizeof *dit->blocks, "tensor table");
    if (rc == PF_OK)
        rc = find_stem(t, dit);
    for (uint32_t i = 0; rc == PF_OK && i < (uint32_t)c->n_blocks; i++)
        rc = find_block(t, c, i, &dit->blocks[i]);
    if (rc == PF_OK)
        rc = check_no_other_tensor(t);
    mem_free(t->is_used);
    return rc;
}

int dit_load(struct dit *dit, const struct pf_checkpoint *ckpt, uint32_t i_component, pf_error *err)
{
    struct table t = {.ckpt = ckpt, .i_component = i_component, .err = err};
    struct json *config = NULL;
    struct dit d = {0};
    t.component = &ckpt->components[i_component];
    if (t.component->config_path == NULL)
        return err_set(err, PF_E_NOTFOUND,
                       "component '%s' of '%s' has no config.json, which says what model it is",
                       t.component->name, ckpt->path);
    int rc = json_parse_file(t.component->config_path, CONFIG_BYTES_MAX, &config, err);
    if (rc == PF_OK)
        rc = dit_config_read(config, t.component->config_path, &d.config, err);
    if (rc == PF_OK)
        rc = find_tensors(&d, &t);
    json_free(config);
    if (rc != PF_OK)
        dit_release(&d);
    else
        *dit = d;
    return rc;
}

void dit_release(struct dit *dit)
{
    mem_free(dit->blocks);
    dit->blocks = NULL;
}
