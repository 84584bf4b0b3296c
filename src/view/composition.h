/*
 * A composition: entries (adapter, effective alpha, strength, targets) in canonical order, resolved against one checkpoint, with the
 * merge targets of every changed tensor ready to be read. Immutable after creation and shared by views; reference counted. The
 * public half is pf_composition_* in pageflip.h.
 */
#ifndef PF_VIEW_COMPOSITION_H
#define PF_VIEW_COMPOSITION_H

#include "adapter/adapter.h"
#include "merge/merge.h"

#define ARITHMETIC_VERSION 1u /* raised when docs/arithmetic.md changes what any element becomes */

struct comp_entry {
    struct pf_adapter *adapter;
    double strength;
    bool has_alpha;
    double alpha;
    char *target; /* NULL: all */
    struct resolution res;
};

struct pf_composition {
    _Atomic uint32_t n_refs;
    struct pf_checkpoint *ckpt;
    struct digest base_id;      /* the content id of ckpt that entered the digest */
    struct comp_entry *entries; /* canonical order */
    size_t n_entries;
    int32_t merge_dtype; /* PF_MERGE_* */
    struct digest digest;
    char digest_hex[DIGEST_HEX_LEN + 1];
    struct merge_target *targets; /* of changed tensors, sorted by tensor index */
    uint32_t *i_tensors;          /* targets[j] is tensor i_tensors[j] */
    size_t n_targets;
    struct merge_term *terms; /* backing store of targets[].terms */
    struct pf_composition_info info;
    struct comp_priv *priv;
};

void comp_ref(struct pf_composition *comp);
/* True once a mapped adapter shrank under us: what was computed from it is not to be used. No system call. */
bool comp_is_truncated(const struct pf_composition *comp);
/* Are the adapters that act still what was opened and digested? PF_E_CHANGED or PF_E_TRUNCATED. A few system calls. */
int comp_check_adapters(const struct pf_composition *comp, pf_error *err);
/* NULL: the composition leaves tensor i alone. O(log n). */
const struct merge_target *comp_target(const struct pf_composition *comp, uint32_t i_tensor);

#endif
