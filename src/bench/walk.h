/*
 * Reading all weights of a view in layer order by one reader, as a model does: a layer is asked for ahead, read panel by panel into one
 * buffer, and left to the view's policy behind the reader. And the same bytes out of the plain mapping, without any advice, to
 * compare with. Used by bench/ and its tests. One thread.
 */
#ifndef PF_BENCH_WALK_H
#define PF_BENCH_WALK_H

#include "view/view.h"

struct walk {
    struct pf_checkpoint *ckpt; /* borrowed from view */
    struct pf_view *view;       /* a reference */
    struct pf_reader *reader;
    struct readahead *ahead;
    uint8_t *buffer; /* one panel */
};

int walk_open(struct walk *w, struct pf_view *view, pf_error *err);
void walk_close(struct walk *w); /* a zeroed or half-opened one as well */

/* Every tensor of every layer, until *stop (NULL: never). *out_n_bytes: delivered; adds to it. */
int walk_pass(struct walk *w, const _Atomic bool *stop, _Atomic uint64_t *out_n_bytes,
              pf_error *err);
/* Elements of tensor i that differ, by their bits, from the mapped base; adds to *n. Same dtype only. */
int walk_compare(struct walk *w, uint32_t i_tensor, uint64_t *n, pf_error *err);
/* The bytes of every tensor in the same order, copied out of the mapping. */
int walk_plain(const struct pf_checkpoint *ckpt, _Atomic uint64_t *out_n_bytes, pf_error *err);

#endif
