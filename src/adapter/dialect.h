/*
 * Spellings: a key is PREFIX + MODULE PATH + LEAF. dialect_split takes the leaf off and says what it is; dialect_candidates says
 * which base names a module may mean, without looking at any base. Pure functions over one table each; what is known and not
 * supported is in the table too, with the reason that the user reads.
 */
#ifndef PF_ADAPTER_DIALECT_H
#define PF_ADAPTER_DIALECT_H

#include "base/err.h"
#include "base/str.h"

enum ad_leaf {
    LEAF_UP,       /* B: (out, r) */
    LEAF_DOWN,     /* A: (r, in) */
    LEAF_EMB_UP,   /* lora_embedding_B: (dim, r) */
    LEAF_EMB_DOWN, /* lora_embedding_A: (r, n) */
    LEAF_UP_BIAS,  /* of B: added to the base's bias */
    LEAF_ALPHA,
    LEAF_SCALE, /* absolute: what alpha / rank would be */
    LEAF_HADA_W1A,
    LEAF_HADA_W1B,
    LEAF_HADA_W2A,
    LEAF_HADA_W2B,
    LEAF_LOKR_W1,
    LEAF_LOKR_W1A,
    LEAF_LOKR_W1B,
    LEAF_LOKR_W2,
    LEAF_LOKR_W2A,
    LEAF_LOKR_W2B,
    LEAF_DIFF,
    LEAF_DIFF_B,
    LEAF_W_NORM,
    LEAF_B_NORM,
    LEAF_N,
    LEAF_UNKNOWN = LEAF_N, /* perhaps a tensor of the base itself */
    LEAF_REFUSED,
};

struct ad_split {
    struct str module;  /* slice of the key */
    struct str adapter; /* slice: the adapter's name that was left in it; empty: none was */
    enum ad_leaf leaf;
    /* Belongs to the module's path ("diff_m" changes `<module>.modulation`), or NULL */
    const char *append;
    const char *refused; /* LEAF_REFUSED: what it is and why not */
};
struct ad_split dialect_split(struct str key);

/* Whom a prefix addresses. */
enum ad_role {
    AD_ANY,      /* no prefix, or PEFT's: one model, and the file does not say which */
    AD_DENOISER, /* diffusion_model., lora_unet_, lycoris_: whatever draws */
    AD_COMPONENT, /* transformer., unet.: that component, or the denoiser where there is none of that name */
    AD_TE,     /* text_encoder, lora_te_, lora_te1_, clip_l */
    AD_TE_2,   /* clip_g too */
    AD_TE_3,   /* the third, or the second where there are two (T5 of Flux) */
    AD_TE_ANY, /* text_encoders.qwen. and the like */
};

struct ad_candidate {
    struct str path; /* slice of the module name */
    enum ad_role role;
    struct str component; /* of AD_COMPONENT */
    bool is_flat;         /* dots were written as underscores */
    bool is_whole; /* nothing was taken off: may be a base's own name whatever the prefix says */
};
#define AD_CANDIDATES_MAX 6u
/* In fixed order; at least one. */
size_t dialect_candidates(struct str module, struct ad_candidate out[AD_CANDIDATES_MAX]);

/* "peft", "diffusers", "kohya", "native", "raw" */
const char *dialect_name(struct str module);

#endif
