/*
 * Reading ahead: one background thread that makes the kernel read the bytes of a layer before the compute asks for them. Base
 * and overlay mappings alike, by exact requests: faults of two threads in one file would spoil each other's windows. Called by whoever
 * walks layers. Never blocks the walker: a request for the next layer waits for the one at hand, any other replaces it.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "base/mem.h"
#include "base/thread.h"
#include "tensor/dtype.h"
#include "view/view.h"

#define STEP_BYTES ((uint64_t)2 << 20)
#define NO_LAYER   UINT32_MAX

struct readahead {
    struct pf_view *view;
    struct pf_reader *reader; /* of the thread: asks for places, reads nothing */
    struct pf_reader *behind; /* of the walker: for dropping */
    pthread_t thread;
    pthread_mutex_t mu; /* guards asked, at_hand and is_ending */
    pthread_cond_t wake;
    uint32_t asked, at_hand; /* NO_LAYER: none */
    bool is_ending;
    _Atomic uint32_t generation; /* raised with every request: the thread looks between steps */
};

/* Asks for a range step by step; false: somebody wants another layer now. */
static bool fetch(struct readahead *ra, uint32_t generation, const struct file_map *map,
                  const uint8_t *p, uint64_t n_bytes)
{
    for (uint64_t off = (uint64_t)(p - map->p), end = off + n_bytes; off < end; off += STEP_BYTES) {
        file_map_fetch(map, off, end - off < STEP_BYTES ? end - off : STEP_BYTES);
        /* relaxed: only a hint to stop early */
        if (atomic_load_explicit(&ra->generation, memory_order_relaxed) != generation)
            return false;
    }
    return true;
}

/* The mapped bytes that a layer is read from now; NULL for resident ones. */
static const uint8_t *mapped_bytes(struct pf_reader *r, const struct pf_checkpoint *ckpt,
                                   uint32_t i_tensor, uint64_t *out_n_bytes,
                                   const struct file_map **out_map)
{
    const struct ckpt_tensor *t = &ckpt->tensors[i_tensor];
    struct place at;
    reader_place(r, i_tensor, &at);
    *out_map = at.map;
    *out_n_bytes = t->n_bytes;
    if (at.kind == PLACE_OVERLAY && dtype_size(t->dtype))
        *out_n_bytes = t->n_bytes / dtype_size(t->dtype) * dtype_size(at.dtype);
    if (at.kind == PLACE_STREAM)
        return t->p;
    return at.kind == PLACE_RESIDENT ? NULL : at.p;
}

static void read_layer(struct readahead *ra, uint32_t generation, uint32_t i_layer)
{
    const struct pf_checkpoint *ckpt = view_checkpoint(ra->view);
    const struct ckpt_layer *layer = &ckpt->layers[i_layer];
    if (pf_reader_enter(ra->reader, i_layer, NULL))
        return;
    for (uint32_t i = 0; i < layer->n_tensors; i++) {
        const struct file_map *map;
        uint64_t n_bytes;
        const uint8_t *p = mapped_bytes(ra->reader, ckpt, layer->i_tensor0 + i, &n_bytes, &map);
        if (p && n_bytes && !fetch(ra, generation, map, p, n_bytes))
            break;
    }
    pf_reader_leave(ra->reader);
}

void readahead_done(struct readahead *ra, uint32_t i_layer)
{
    struct stream_policy *policy = view_policy(ra->view);
    const struct pf_checkpoint *ckpt = view_checkpoint(ra->view);
    if (!policy || i_layer >= ckpt->n_layers || policy->is_kept[i_layer] ||
        pf_reader_enter(ra->behind, i_layer, NULL))
        return;
    const struct ckpt_layer *layer = &ckpt->layers[i_layer];
    for (uint32_t i = 0; i < layer->n_tensors; i++) {
        const struct file_map *map;
        uint64_t n_bytes;
        const uint8_t *p = mapped_bytes(ra->behind, ckpt, layer->i_tensor0 + i, &n_bytes, &map);
        if (p && map)
            policy_drop(policy, map, p, n_bytes);
    }
    pf_reader_leave(ra->behind);
}

static void *run(void *arg)
{
    struct readahead *ra = arg;
    pthread_mutex_lock(&ra->mu);
    for (;;) {
        while (!ra->is_ending && ra->asked == NO_LAYER)
            pthread_cond_wait(&ra->wake, &ra->mu);
        if (ra->is_ending)
            break;
        uint32_t i_layer = ra->asked;
        uint32_t generation = atomic_load_explicit(&ra->generation, memory_order_relaxed);
        ra->at_hand = i_layer;
        ra->asked = NO_LAYER;
        pthread_mutex_unlock(&ra->mu);
        read_layer(ra, generation, i_layer);
        pthread_mutex_lock(&ra->mu);
        ra->at_hand = NO_LAYER;
    }
    pthread_mutex_unlock(&ra->mu);
    return NULL;
}

static void release(struct readahead *ra)
{
    pf_reader_free(ra->reader);
    pf_reader_free(ra->behind);
    pthread_cond_destroy(&ra->wake);
    pthread_mutex_destroy(&ra->mu);
    mem_free(ra);
}

int readahead_new(struct pf_view *v, struct readahead **out, pf_error *err)
{
    struct readahead *ra = mem_calloc(1, sizeof *ra);
    if (!ra)
        return err_nomem(err, sizeof *ra, "read-ahead");
    ra->view = v; /* the readers hold a reference */
    ra->asked = ra->at_hand = NO_LAYER;
    pthread_mutex_init(&ra->mu, NULL);
    pthread_cond_init(&ra->wake, NULL);
    int rc = reader_new_placing(v, &ra->reader, err);
    if (rc == PF_OK)
        rc = reader_new_placing(v, &ra->behind, err);
    if (rc) {
        release(ra);
        return rc;
    }
    int e = thread_start(&ra->thread, (size_t)64 << 10, run, ra);
    if (e) {
        release(ra);
        return err_sys(err, e, "cannot start the read-ahead thread");
    }
    *out = ra;
    return PF_OK;
}

static void ask(struct readahead *ra, uint32_t i_layer, bool is_ending)
{
    pthread_mutex_lock(&ra->mu);
    ra->asked = i_layer;
    ra->is_ending = is_ending;
    /* The walker goes from layer to layer: what is at hand is where it is now, and still wanted. */
    if (is_ending || ra->at_hand == NO_LAYER || i_layer != ra->at_hand + 1)
        atomic_fetch_add_explicit(&ra->generation, 1, memory_order_relaxed);
    pthread_cond_signal(&ra->wake);
    pthread_mutex_unlock(&ra->mu);
}

void readahead_layer(struct readahead *ra, uint32_t i_layer)
{
    if (i_layer < view_checkpoint(ra->view)->n_layers)
        ask(ra, i_layer, false);
}

void readahead_free(struct readahead *ra)
{
    if (!ra)
        return;
    ask(ra, NO_LAYER, true);
    pthread_join(ra->thread, NULL);
    release(ra);
}
