/*
 * The DiT model as one object: what it is made of, its class names, its times, and the threads that draw with it. The public half
 * is pf_model_* and pf_generate in pageflip.h. Immutable after open, but for `is_busy`: one generation at a time.
 *
 *     dit_config.c  config.json -> sizes, or a refusal by name
 *     dit.c         names -> tensors of the checkpoint
 *     words.c       prompt -> class
 *     schedule.c    times
 *     noise.c       torch.randn
 *     sampler.c     pf_generate: noise, Euler steps, guidance, pixels
 *     forward.c     the layer loop
 *     stage.c       a linear: weights through the view, panel by panel, times every sample
 *     attention.c, ops.c, gemm.c    the arithmetic
 *     image.c       PNG
 *     pf_model.c    open, close, info
 */
#ifndef PF_MODEL_MODEL_H
#define PF_MODEL_MODEL_H

#include "base/pool.h"
#include "model/dit.h"
#include "model/schedule.h"
#include "model/words.h"

#include <stdatomic.h>

#define MODEL_STEPS    16u
#define MODEL_GUIDANCE 2.0

struct pf_model {
    struct pf_checkpoint *ckpt; /* a reference */
    uint32_t i_component;
    struct dit dit;
    struct labels labels;
    struct schedule schedule;
    struct pool *pool;
    atomic_flag is_busy;
};

#endif
