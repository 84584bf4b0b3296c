/*
 * Views: what every reader of weights goes through. A view is one composition, fixed, and a placement: for every layer, where its
 * bytes are. At a layer border a reader picks up the newest placement of the same composition (stream -> overlay, resident): the
 * bytes that it reads never change, only where they come from.
 *
 * Thread rule: a placement is immutable once published. Readers take one by a slot of their own (two atomic operations, no lock);
 * publishers never wait for a reader. What no reader holds any more is freed by the next publish or view_has_stale_readers, on the
 * thread that calls it: never by a reader.
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

/* Where the bytes of one layer are, when they are not simply base and stream. Owned by whoever published it; outlives every
 * placement that names it. */
struct layer_bytes {
    enum place_kind kind;       /* PLACE_OVERLAY or PLACE_RESIDENT */
    const uint8_t *const *p;    /* per tensor of the layer; NULL: not here, read it from the base */
    const struct file_map *map; /* OVERLAY: what p points into */
};

/* One entry per layer of the checkpoint; NULL: base bytes, with deltas added while reading where the composition changes them. */
struct placement {
    const struct layer_bytes **layers;
    uint32_t n_layers;
    void (*free_fn)(void *ctx); /* called once no reader can hold this placement; may be NULL */
    void *free_ctx;
    /* The view's: replaced ones that a reader may still be inside of */
    struct placement *next_retired;
};

/* A tensor's place under one placement, resolved. */
struct place {
    enum place_kind kind;
    const uint8_t *p;                  /* BASE, OVERLAY, RESIDENT */
    const struct merge_target *target; /* STREAM */
    int32_t dtype;                     /* of what a native read delivers */
    const struct file_map *map;        /* that is read (STREAM: the base's); NULL for RESIDENT */
};

void view_ref(struct pf_view *v);
void view_ref_n(struct pf_view *v, uint32_t n);
void view_unref_n(struct pf_view *v, uint32_t n); /* n may be 0 */
uint32_t view_n_refs(const struct pf_view *v);    /* a hint: others may change it meanwhile */
/* How many generations used it, for whoever decides what is worth an overlay. The count is returned. */
uint32_t view_count_use(struct pf_view *v);
uint32_t view_n_uses(const struct pf_view *v);
/* Never NULL: the base is the empty one */
const struct pf_composition *view_composition(const struct pf_view *v);
struct pf_checkpoint *view_checkpoint(const struct pf_view *v);

/* Makes `next` the newest placement. The view owns it (allocated with placement_new). NULL: plain base and stream again. */
void view_publish(struct pf_view *v, struct placement *next);
struct placement *placement_new(uint32_t n_layers); /* all entries NULL; NULL: out of memory */
void placement_free(struct placement *p);           /* one that was never published */
/* True when some reader still holds a placement older than the newest one. */
bool view_has_stale_readers(struct pf_view *v);

/* A reader without scratch: it can ask for places and hold them, not read. */
int reader_new_placing(struct pf_view *view, struct pf_reader **out_reader, pf_error *err);
/* Has it computed panels from adapters? */
bool reader_has_merged(const struct pf_reader *r);
/* Are the files that panels of this view came from, those of adapters if any were merged, still what they were? PF_E_CHANGED or
 * PF_E_TRUNCATED: what was read is not to be trusted. */
int view_verify(const struct pf_view *v, bool has_merged, pf_error *err);
/* The place of tensor i now. Valid while the reader stays in its layer. */
void reader_place(struct pf_reader *r, uint32_t i_tensor, struct place *out);

/*
 * Which layers stay in the page cache behind a reader and which are dropped. Filled in by the engine before there are
 * readers, shared by its views; only the atomic members change afterwards. Reference counted: views may outlive their engine.
 */
struct stream_policy {
    _Atomic uint32_t n_refs;
    uint32_t n_layers;
    bool *is_kept;           /* per layer */
    _Atomic int how_to_drop; /* enum drop_how: settled by looking at what the first drop did */
    _Atomic uint64_t n_bytes_dropped;
};
enum drop_how { DROP_UNTRIED, DROP_PAGEOUT, DROP_DONTNEED, DROP_NOTHING };
struct stream_policy *policy_new(uint32_t n_layers); /* nothing kept; NULL: out of memory */
void policy_ref(struct stream_policy *p);
void policy_unref(struct stream_policy *p);
/* Before readers; takes a reference */
void view_set_policy(struct pf_view *v, struct stream_policy *policy);
struct stream_policy *view_policy(const struct pf_view *v); /* NULL: everything is kept */
/* Drops n bytes at p, which the mapping m holds, from the page cache, and finds out once which way works. */
void policy_drop(struct stream_policy *policy, const struct file_map *m, const uint8_t *p,
                 uint64_t n_bytes);

/* Walks the layers ahead of a reader on one background thread: asks the kernel for the bytes that a layer will need, in steps. A
 * request for the next layer waits for the one at hand, any other replaces it. Never blocks the caller. */
struct readahead;
int readahead_new(struct pf_view *v, struct readahead **out, pf_error *err);
void readahead_layer(struct readahead *ra, uint32_t i_layer);
/* The reader is done with a layer: drops its pages where the view's policy says so. */
void readahead_done(struct readahead *ra, uint32_t i_layer);
void readahead_free(struct readahead *ra);

/* Rows per panel of tensor i so that a panel of f32 is at most n_bytes_max (0: 4 MiB); at least 1. */
int64_t view_panel_rows(const struct pf_view *v, uint32_t i_tensor, size_t n_bytes_max);

#endif
