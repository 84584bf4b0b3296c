/*
 * Views: what every reader of weights goes through. A view is one composition and, per tensor, a placement: where its bytes are. The
 * composition never changes; at a layer border a reader may pick up a newer placement of it (stream -> overlay), so a reader
 * names the layer that it is in. Placement tables are immutable and reference counted by epoch; see view_publish.
 */
#ifndef PF_VIEW_VIEW_H
#define PF_VIEW_VIEW_H

#include "view/composition.h"

enum place_kind {
    PLACE_BASE,     /* the base mapping: zero copy */
    PLACE_STREAM,   /* base plus deltas, computed while read */
    PLACE_OVERLAY,  /* merged bytes in an overlay mapping: zero copy */
    PLACE_RESIDENT, /* a private copy: zero copy */
};

struct place {
    enum place_kind kind;
    const uint8_t *p;                  /* BASE, OVERLAY, RESIDENT: the tensor's bytes */
    const struct merge_target *target; /* STREAM */
    int32_t dtype;                     /* of what is read natively */
    int i_guard;                       /* of the mapping behind p (or behind target->base) */
};

const struct pf_composition *view_composition(const struct pf_view *v); /* NULL: base */
struct pf_checkpoint *view_checkpoint(const struct pf_view *v);
const struct place *view_place(const struct pf_view *v, uint32_t i_tensor);

/* Reads ahead on one background thread: asks the kernel for the bytes that the layers of this view will need, in steps, newest
 * request first. Never blocks the caller. Bounded: two layers in flight. */
struct readahead;
int readahead_new(struct pf_view *v, struct readahead **out, pf_error *err);
void readahead_layer(struct readahead *ra, uint32_t i_layer);
void readahead_free(struct readahead *ra);

/* Rows per panel of tensor i so that a panel of f32 is at most n_bytes_max (0: 4 MiB); at least 1. */
int64_t view_panel_rows(const struct pf_view *v, uint32_t i_tensor, size_t n_bytes_max);

#endif
