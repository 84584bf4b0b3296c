/*
 * Resident layers: private copies that the kernel may not take, only on request. A copy serves the compositions whose bytes it
 * holds; to rewrite it for another one, placements without it are published first, then the last reader leaves, then the panels are
 * computed from base and deltas, never from what the buffer held. There is never a second copy of a layer.
 */
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

static int resident_init(struct pf_engine *e, struct resident *r, uint32_t i_layer, pf_error *err)
{
    const struct ckpt_layer *layer = &e->ckpt->layers[i_layer];
    size_t n = 0, at = 0;
    for (uint32_t i = 0; i < layer->n_tensors; i++)
        n += (e->ckpt->tensors[layer->i_tensor0 + i].n_bytes + 63) & ~(uint64_t)63;
    r->i_layer = i_layer;
    const uint8_t **p = mem_calloc(layer->n_tensors, sizeof *p);
    uint8_t *buf =
        mmap(NULL, n ? n : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!p || buf == MAP_FAILED) {
        mem_free(p);
        if (buf != MAP_FAILED)
            munmap(buf, n ? n : 1);
        return err_nomem(err, n, "a resident layer");
    }
    (void)madvise(buf, n, MADV_HUGEPAGE); /* fewer faults where the system has them */
    r->is_locked =
        mlock(buf, n) == 0; /* RLIMIT_MEMLOCK may forbid it: then it is only unlikely to be taken */
    r->buf = buf;
    r->n_buf_bytes = n ? n : 1;
    for (uint32_t i = 0; i < layer->n_tensors; i++) {
        p[i] = buf + at;
        at += (e->ckpt->tensors[layer->i_tensor0 + i].n_bytes + 63) & ~(uint64_t)63;
    }
    r->bytes = (struct layer_bytes){.kind = PLACE_RESIDENT, .p = p};
    return PF_OK;
}

int residents_init(struct pf_engine *e, uint32_t n, pf_error *err)
{
    if (n > e->ckpt->n_layers)
        n = e->ckpt->n_layers;
    e->residents = mem_calloc(n + 1, sizeof *e->residents);
    if (!e->residents)
        return err_nomem(err, n * sizeof *e->residents, "resident layers");
    for (uint32_t i = 0; i < n; i++) {
        int rc = resident_init(e, &e->residents[i], i, err);
        if (rc)
            return rc;
        e->n_residents++;
        e->n_resident_bytes += e->residents[i].n_buf_bytes;
    }
    return PF_OK;
}

void residents_free(struct pf_engine *e)
{
    for (uint32_t i = 0; i < e->n_residents; i++)
        resident_release(&e->residents[i]);
    mem_free(e->residents);
    e->residents = NULL;
    e->n_residents = 0;
}

static struct resident *find(const struct pf_engine *e, uint32_t i_layer)
{
    for (uint32_t i = 0; i < e->n_residents; i++)
        if (e->residents[i].i_layer == i_layer)
            return &e->residents[i];
    return NULL;
}

const struct layer_bytes *residents_find(const struct pf_engine *e, const struct served *s,
                                         uint32_t i_layer)
{
    const struct resident *r = find(e, i_layer);
    return r && r->is_ready && digest_eq(r->key, s->layer_keys[i_layer]) ? &r->bytes : NULL;
}

/* A layer that the composition keeps in another dtype does not fit into its buffer: it streams. */
static bool fits(const struct pf_engine *e, const struct served *s, const struct resident *r)
{
    const struct ckpt_layer *layer = layer_of(e, r);
    for (uint32_t i = 0; i < layer->n_tensors; i++)
        if (pf_view_dtype(s->view, layer->i_tensor0 + i) !=
            e->ckpt->tensors[layer->i_tensor0 + i].dtype)
            return false;
    return true;
}

static bool is_behind(const struct pf_engine *e, const struct served *s, const struct resident *r)
{
    bool is_asked = s->way == PF_WAY_AUTO || s->way == PF_WAY_INPLACE;
    return is_asked && fits(e, s, r) &&
           !(r->is_ready && digest_eq(r->key, s->layer_keys[r->i_layer]));
}

bool residents_wanted(const struct pf_engine *e, const struct served *s)
{
    for (uint32_t i = 0; i < e->n_residents; i++)
        if (is_behind(e, s, &e->residents[i]))
            return true;
    return false;
}

static int rewrite(struct pf_engine *e, struct pf_view *view, struct resident *r, pf_error *err)
{
    const struct ckpt_layer *layer = layer_of(e, r);
    int rc = PF_OK;
    for (uint32_t i = 0; rc == PF_OK && i < layer->n_tensors; i++) {
        const struct ckpt_tensor *t = &e->ckpt->tensors[layer->i_tensor0 + i];
        if (dtype_size(t->dtype) == 0)
            rc = err_set(err, PF_E_UNSUPPORTED, "tensor '%s' of dtype %s cannot be resident",
                         t->name.p, pf_dtype_name(t->dtype));
        else
            rc = pf_apply_into(view, layer->i_tensor0 + i, (uint8_t *)(uintptr_t)r->bytes.p[i],
                               (size_t)t->n_bytes, err);
    }
    return rc;
}

bool residents_step(struct pf_engine *e, struct served *s)
{
    struct resident *r = NULL;
    for (uint32_t i = 0; !r && i < e->n_residents; i++)
        if (is_behind(e, s, &e->residents[i]))
            r = &e->residents[i];
    if (!r)
        return false;
    if (r->is_ready) { /* nobody gets it from now on */
        r->is_ready = false;
        for (size_t i = 0; i < N_RECENT; i++)
            if (e->recent[i])
                engine_place(e, e->recent[i]);
    }
    if (engine_has_stale_readers(e))
        return true; /* looked at again soon; the readers stream or use the overlay meanwhile */
    struct digest key = s->layer_keys[r->i_layer];
    struct pf_view *view = s->view;
    pf_error why;
    view_ref(view);
    pthread_mutex_unlock(&e->mu);
    int rc = rewrite(e, view, r, &why);
    pf_view_release(view);
    pthread_mutex_lock(&e->mu);
    if (rc) {
        log_at(PF_LOG_ERROR, "resident layer '%s': %s", layer_of(e, r)->name, why.msg);
        return false;
    }
    r->key = key;
    r->is_ready = true;
    for (size_t i = 0; i < N_RECENT; i++)
        if (e->recent[i])
            engine_place(e, e->recent[i]);
    return true;
}
