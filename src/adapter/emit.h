/*
 * One placed module -> its deltas, shapes checked against the base. Between resolve.c, which decides the rows, and emit.c.
 * Private to src/adapter/.
 */
#ifndef PF_ADAPTER_EMIT_H
#define PF_ADAPTER_EMIT_H

#include "adapter/place.h"

struct delta_list {
    struct delta *items;
    size_t n, cap;
};

/* Rows [src0, src0 + n_rows) of the module's change go to rows [row0, row0 + n_rows) of the base tensor. */
struct rows {
    int64_t src0, row0, n_rows;
    bool is_part; /* of the module, or of the base tensor */
};

struct emit {
    const struct pf_adapter *a;
    const struct pf_checkpoint *ckpt;
    bool has_alpha;
    double alpha;
    struct delta_list *out;
    pf_error *err;
};

/* PF_E_MISMATCH with both shapes, PF_E_UNSUPPORTED for a base dtype that cannot be merged. */
int emit_weight(const struct emit *e, const struct ad_module *m, int64_t i_tensor,
                const struct rows *rows);
/* leaf: LEAF_UP_BIAS, LEAF_DIFF_B or LEAF_B_NORM. */
int emit_bias(const struct emit *e, const struct ad_module *m, enum ad_leaf leaf, int64_t i_tensor,
              const struct rows *rows);

#endif
