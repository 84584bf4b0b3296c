/*
 * The forward of a DiT for a batch of pictures: every layer's weights are read once per pass, whatever the batch. A picture is one
 * sample, or two when guided: with its class, and with the empty class. What comes out for a sample depends on its own input, its
 * class and the time alone. Called by the sampler; one thread; no allocation after forward_open.
 */
#ifndef PF_MODEL_FORWARD_H
#define PF_MODEL_FORWARD_H

#include "model/stage.h"

/* Called between layers; false cancels. */
typedef bool (*forward_layer_fn)(void *ctx);
/* For tests: hidden states x (n_tokens, dim) of each sample, `stride` floats apart, after the embedding (i_block -1) and each block. */
typedef void (*forward_hook_fn)(void *ctx, int64_t i_block, const float *x, size_t stride);

struct forward {
    const struct dit *dit; /* borrowed */
    struct stage stage;
    struct readahead *readahead;
    uint32_t n_images_max;
    bool is_guided;
    /* of the batch */
    /* Samples: pictures with their class, then the same ones with the empty class */
    uint32_t n_images, n_samples;
    uint32_t n_conds;
    uint32_t *classes; /* per condition: the distinct classes of the batch */
    uint32_t *i_cond;  /* per sample */
    /* activations: all in one block */
    float *block;
    size_t n_block_bytes;
    float *x;   /* hidden state (n_tokens, dim) per sample */
    float *h;   /* normed, attention output, patches in: (n_tokens, max(dim, patch_values)) */
    float *big; /* q k v, feed-forward, patches out: (n_tokens, max(4 dim, patch_values)) */
    size_t x_stride, h_stride, big_stride;
    float *cond;     /* (n_conds, dim): silu of the condition of this block */
    float *cond_0;   /* of block 0: the output needs it */
    float *mod;      /* (n_conds, 6 dim) */
    float *freqs;    /* (256): sinusoids of the time */
    float *time;     /* (2, dim): hidden and embedded time */
    float *position; /* (n_tokens, dim) */
    forward_layer_fn on_layer;
    void *layer_ctx;
    forward_hook_fn hook;
    void *hook_ctx;
};

/* Bytes of activations for n pictures; false when that does not fit a size_t. */
bool forward_bytes(const struct dit_config *c, uint32_t n_images, bool is_guided, size_t *out);
int forward_open(struct forward *f, const struct dit *dit, struct pf_view *view, struct pool *pool,
                 uint32_t n_images_max, bool is_guided, pf_error *err);
void forward_release(struct forward *f);

/* A batch of n <= n_images_max pictures with these classes. */
void forward_batch(struct forward *f, uint32_t n_images, const uint32_t *classes);
/* One pass. latents: n_images x (channels, size, size). PF_E_CANCELLED, PF_E_TRUNCATED. */
int forward_run(struct forward *f, const float *latents, float timestep, pf_error *err);
/* The velocity of sample i after a pass: (n_tokens, (row, column, channel) of a patch). */
const float *forward_patches(const struct forward *f, uint32_t i_sample);

#endif
