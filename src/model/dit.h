/*
 * What a DiTTransformer2DModel is made of: its numbers, read from config.json, and where each of its tensors is in the
 * checkpoint, checked for shape and dtype. Nothing here touches a weight. Immutable after dit_load; shared by generations.
 */
#ifndef PF_MODEL_DIT_H
#define PF_MODEL_DIT_H

#include "checkpoint/checkpoint.h"

struct json;

#define DIT_TIME_FREQS 256 /* length of the sinusoidal time embedding, fixed by the class */
#define DIT_MOD        6 /* shift, scale, gate of attention; shift, scale, gate of the feed-forward */

struct dit_config {
    int64_t n_blocks, n_heads, head_dim;
    int64_t dim;      /* n_heads x head_dim */
    int64_t n_inner;  /* of the feed-forward: 4 dim */
    int64_t channels; /* in and out */
    int64_t size, patch;
    int64_t n_tokens;     /* (size / patch)^2 */
    int64_t patch_values; /* channels x patch^2 */
    int64_t n_classes;    /* the table has one row more: the empty class */
    float norm_eps;       /* of norm3 alone; norm1 and the output use 1e-6 */
    bool has_attn_bias;   /* of q, k, v; the output projection always has one */
};

/* y = W x + b */
struct dit_linear {
    int64_t n_out, n_in;
    uint32_t i_weight; /* (n_out, n_in), of the checkpoint */
    int64_t i_bias;    /* (n_out), or -1 */
};

struct dit_block {
    uint32_t i_layer; /* of the checkpoint, for reading ahead */
    struct dit_linear time_1, time_2;
    uint32_t i_table; /* (n_classes + 1, dim) */
    struct dit_linear modulation;
    struct dit_linear q, k, v, attn_out;
    struct dit_linear ff_in, ff_out;
};

struct dit {
    struct dit_config config;
    struct dit_block *blocks;
    struct dit_linear patch_embed; /* n_in = (channel, row, column) of a patch */
    struct dit_linear out_modulation, out_patches;
    uint32_t i_stem_layer;
};

/* PF_E_UNSUPPORTED by name for what this forward does not do, PF_E_RANGE for sizes beyond the bounds, PF_E_FORMAT. */
int dit_config_read(const struct json *config, const char *path, struct dit_config *out,
                    pf_error *err);
/* Reads the component's config and finds every tensor. PF_E_NOTFOUND, PF_E_MISMATCH, PF_E_UNSUPPORTED. */
int dit_load(struct dit *dit, const struct pf_checkpoint *ckpt, uint32_t i_component,
             pf_error *err);
void dit_release(struct dit *dit);

#endif
