/*
 * Resident layers: private copies that the kernel may not take, only on request. A copy serves the compositions whose bytes it
 * holds; to rewrite it for another one, placements without it are published first, then the last reader leaves, then the panels are
 * computed from base and deltas, never from what the buffer held. There is never a second copy of a layer. Called by the engine with its
 * mutex held, but for making the set and letting go of it. Must never write to a buffer that any placement names.
 */
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

#include "base/log.h"
#include "engine/engine_int.h"
#include "tensor/dtype.h"

static const struct ckpt_layer *layer_of(const struct pf_engine *e, const struct resident *r)
{
    return &e->ckpt->layers[r->i_layer];
}

static void resident_release(struct resident *r)
{
    if (r->buf)
        munmap(r->buf, r->n_buf_bytes);
    mem_free((void *)(uintptr_t)r->bytes.p); /* ours; const so that nobody else changes it */
    *r = (struct resident){0};
}

static int resident_init(const struct pf_checkpoint *ckpt, struct resident *r, uint32_t i_layer,
                         pf_error *err)
{
    const struct ckpt_layer *layer = &ckpt->layers[i_layer];
    size_t n = 0, at = 0;
    for (uint32_t i = 0; i < layer->n_tensors; i++)
        n += (ckpt->tensors[layer->i_tensor0 + i].n_bytes + 63) & ~(uint64_t)63;
    r->i_layer = i_layer;
    const uint8_t **p = mem_calloc(layer->n_tensors + 1, sizeof *p);
    uint8_t *buf =
        mmap(NULL, n ? n : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!p || buf == MAP_FAILED) {
        mem_free(p);
        if (buf != MAP_FAILED)
            munmap(buf, n ? n : 1);
        return err_nomem(err, n, "a resident layer");
    }
    (void)madvise(buf, n, MADV_HUGEPAGE); /* fewer faults where the system has them */
    /* RLIMIT_MEMLOCK may forbid it: then it is only unlikely to be taken */
    r->is_locked = mlock(buf, n) == 0;
    r->buf = buf;
    r->n_buf_bytes = n ? n : 1;
    for (uint32_t i = 0; i < layer->n_tensors; i++) {
        p[i] = buf + at;
        at += (ckpt->tensors[layer->i_tensor0 + i].n_bytes + 63) & ~(uint64_t)63;
    }
    r->bytes = (struct layer_bytes){.kind = PLACE_RESIDENT, .p = p};
    return PF_OK;
}

/* Locking memory that is not there would end the process, or another one. */
static int check_room(const struct pf_checkpoint *ckpt, uint32_t n, const struct memory_plan *plan,
                      pf_error *err)
{
    uint64_t n_bytes = 0;
    for (uint32_t i = 0; i < n; i++)
        n_bytes += ckpt->layers[i].n_bytes;
    if (n_bytes <= plan->available_bytes)
        return PF_OK;
    return err_set(
        err, PF_E_NOMEM,
        "%u resident layers take %llu MiB of host memory, and there is less (%s): ask for "
        "fewer",
        n, (unsigned long long)(n_bytes >> 20), plan->note);
}

int residents_new(struct pf_checkpoint *ckpt, uint32_t n, const struct memory_plan *plan,
                  struct resident_set **out, pf_error *err)
{
    if (n > ckpt->n_layers)
        n = ckpt->n_layers;
    int rc = check_room(ckpt, n, plan, err);
    if (rc)
        return rc;
    struct resident_set *set = mem_calloc(1, sizeof *set + n * sizeof set->items[0]);
    if (!set)
        return err_nomem(err, n * sizeof set->items[0], "resident layers");
    atomic_init(&set->n_refs, 1);
    for (uint32_t i = 0; i < n; i++) {
        rc = resident_init(ckpt, &set->items[i], i, err);
        if (rc) {
            residents_unref(set);
            return rc;
        }
        set->n++;
        set->n_locked += set->items[i].is_locked;
        set->n_bytes += set->items[i].n_buf_bytes;
    }
    *out = set;
    return PF_OK;
}

void residents_ref(struct resident_set *set)
{
    atomic_fetch_add_explicit(&set->n_refs, 1, memory_order_relaxed);
}

void residents_unref(struct resident_set *set)
{
    /* acq_rel: the last owner must see that everybody else has read what he wanted. */
    if (!set || atomic_fetch_sub_explicit(&set->n_refs, 1, memory_order_acq_rel) != 1)
        return;
    for (uint32_t i = 0; i < set->n; i++)
        resident_release(&set->items[i]);
    mem_free(set);
}

const struct layer_bytes *residents_find(const struct pf_engine *e, const struct served *s,
                                         uint32_t i_layer)
{
    if (!way_takes_residents(s->way) || i_layer >= e->residents->n) /* item i is layer i */
        return NULL;
    const struct resident *r = &e->residents->items[i_layer];
    return r->is_ready && digest_eq(r->key, s->layer_keys[i_layer]) ? &r->bytes : NULL;
}

/* A layer that the composition keeps in another dtype does not fit into its buffer, and one whose dtype cannot be read by rows has no
 * place there: they stream. */
static bool fits(const struct pf_engine *e, const struct served *s, const struct resident *r)
{
    const struct ckpt_layer *layer = layer_of(e, r);
    for (uint32_t i = 0; i < layer->n_tensors; i++) {
        int32_t dtype = e->ckpt->tensors[layer->i_tensor0 + i].dtype;
        if (pf_view_dtype(s->view, layer->i_tensor0 + i) != dtype || dtype_size(dtype) == 0)
            return false;
    }
    return true;
}

static bool is_behind(const struct pf_engine *e, const struct served *s, const struct resident *r)
{
    struct digest key = s->layer_keys[r->i_layer];
    return way_takes_residents(s->way) && fits(e, s, r) &&
           !(r->is_ready && digest_eq(r->key, key)) &&
           !(r->has_failed && digest_eq(r->failed_key, key));
}

static int rewrite(struct pf_engine *e, struct pf_view *view, struct resident *r, pf_error *err)
{
    const struct ckpt_layer *layer = layer_of(e, r);
    int rc = PF_OK;
    for (uint32_t i = 0; rc == PF_OK && i < layer->n_tensors; i++)
        rc = pf_apply_into(view, layer->i_tensor0 + i, (uint8_t *)(uintptr_t)r->bytes.p[i],
                           (size_t)e->ckpt->tensors[layer->i_tensor0 + i].n_bytes, err);
    return rc;
}

enum resident_step residents_step(struct pf_engine *e, struct served *s)
{
    struct resident *r = NULL;
    for (uint32_t i = 0; !r && i < e->residents->n; i++)
        if (is_behind(e, s, &e->residents->items[i]))
            r = &e->residents->items[i];
    if (!r)
        return RESIDENT_NOTHING;
    if (r->is_ready) { /* nobody gets it from now on */
        r->is_ready = false;
        engine_place_all(e);
    }
    if (engine_has_stale_readers(e))
        return RESIDENT_BLOCKED; /* the readers stream or use the overlay meanwhile */
    struct digest key = s->layer_keys[r->i_layer];
    struct pf_view *view = s->view;
    pf_error why;
    view_ref(view);
    e->busy = s;
    pthread_mutex_unlock(&e->mu);
    int rc = rewrite(e, view, r, &why);
    pthread_mutex_lock(&e->mu);
    e->busy = NULL;
    pf_view_release(view);
    r->has_failed = rc != PF_OK;
    if (rc) {
        r->failed_key = key; /* not tried again for the same bytes */
        log_at(PF_LOG_ERROR, "resident layer '%s': %s", layer_of(e, r)->name, why.msg);
        return RESIDENT_DONE;
    }
    r->key = key;
    r->is_ready = true;
    engine_place_all(e);
    return RESIDENT_DONE;
}
