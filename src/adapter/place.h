/*
 * Module path -> base tensors: exact, flattened, or through the fused/split tables. Between place.c (names) and resolve.c (what
 * becomes of them). Private to src/adapter/.
 */
#ifndef PF_ADAPTER_PLACE_H
#define PF_ADAPTER_PLACE_H

#include "adapter/adapter_int.h"

/* A module of the base: its tensors' indices, -1 for the one that it lacks. */
struct base_module {
    int64_t i_weight, i_bias;
};

struct flat_name {
    struct str flat; /* the path with underscores for dots */
    struct str path; /* slice of a tensor's name */
    uint32_t i_component;
};

/* The names of one checkpoint, for one resolution. */
struct base_names {
    const struct pf_checkpoint *ckpt;
    const bool *is_target; /* per component: was it asked for? NULL: all are. Borrowed */
    struct arena arena;
    struct flat_name *flat; /* sorted by (flat, component, path), no two equal */
    size_t n_flat;
};
int base_names_init(struct base_names *b, const struct pf_checkpoint *ckpt, const bool *is_target,
                    pf_error *err);
void base_names_release(struct base_names *b);

#define PLACE_PARTS_MAX 3u

enum place_kind {
    PLACE_NONE,      /* the base has no such module */
    PLACE_ELSEWHERE, /* it addresses a component that was not asked for */
    PLACE_WHOLE,     /* parts[0] */
    PLACE_SLOT,      /* rows of parts[0], which is fused: the slot-th of n_slots */
    PLACE_SPREAD,    /* fused here, split there: parts[0..n_slots) in order of rows */
};

struct place {
    enum place_kind kind;
    struct base_module parts[PLACE_PARTS_MAX];
    uint32_t slot, n_slots;
    const char *slot_name; /* "k", for messages */
};

/* PF_E_AMBIGUOUS when two base modules answer to one name. Not found is a kind of place, not an error. */
int place_find(const struct base_names *b, const char *path, const struct ad_module *m,
               struct place *out, pf_error *err);
/* An unknown key: is it the name of a base tensor, or of a leaf on a base module (slice in *out_module)? -1: neither. */
enum key_meaning { KEY_UNMATCHED, KEY_IS_BASE_TENSOR, KEY_IS_UNKNOWN_LEAF, KEY_ELSEWHERE };
enum key_meaning key_meaning(const struct base_names *b, struct str key, struct str *out_module);
/* The base name that looks most like a module's, or NULL. Borrowed from the checkpoint. */
const char *nearest_name(const struct base_names *b, struct str module);

#endif
