/*
 * Served compositions: the few that are in use or were recently, each with the view that everybody shares, the overlay that it
 * adopted, and the placement that follows from overlay and residents. Caller holds the engine's mutex throughout. Must never publish what
 * was not proved.
 */
#include <string.h>

#include "base/log.h"
#include "engine/engine_int.h"

/* The adapter that a term comes from: terms point into the resolutions of the entries. */
static struct digest adapter_of(const struct pf_composition *comp, const struct delta *d)
{
    for (size_t i = 0; i < comp->n_entries; i++) {
        const struct resolution *r = &comp->entries[i].res;
        if (d >= r->deltas && d < r->deltas + r->n_deltas)
            return adapter_digest(comp->entries[i].adapter);
    }
    return (struct digest){0}; /* not reached: every term comes from an entry */
}

static void add_target(struct hasher *h, const struct pf_composition *comp, size_t i_target)
{
    const struct merge_target *t = &comp->targets[i_target];
    hasher_add_u64(h, comp->i_tensors[i_target]);
    hasher_add_u64(h, (uint64_t)comp->merge_dtype);
    for (size_t k = 0; k < t->n_terms; k++) {
        const struct delta *d = t->terms[k].delta;
        struct digest a = adapter_of(comp, d);
        hasher_add_u64(h, a.hi);
        hasher_add_u64(h, a.lo);
        hasher_add_str(h, d->key, strlen(d->key));
        hasher_add_u64(h, (uint64_t)d->row0);
        hasher_add_double(h, (double)t->terms[k].s);
    }
}

/* Per layer, a digest of everything that its bytes depend on beside the base: equal keys mean equal bytes. */
static struct digest *layer_keys_new(const struct pf_composition *comp)
{
    struct hasher *h = hasher_new();
    struct digest *keys = mem_calloc(comp->ckpt->n_layers + 1, sizeof *keys);
    if (!h || !keys) {
        hasher_free(h);
        mem_free(keys);
        return NULL;
    }
    size_t i = 0;
    for (uint32_t layer = 0; layer < comp->ckpt->n_layers; layer++) {
        hasher_reset(h);
        while (i < comp->n_targets && comp->ckpt->tensors[comp->i_tensors[i]].i_layer == layer)
            add_target(h, comp, i++);
        keys[layer] = hasher_digest(h);
    }
    hasher_free(h);
    return keys;
}

void engine_served_free(struct served *s)
{
    if (!s)
        return;
    pf_view_release(s->view);
    overlay_unref(s->overlay);
    mem_free(s->layer_keys);
    mem_free(s);
}

static int served_new(struct pf_engine *e, struct pf_composition *comp, int32_t way,
                      struct served **out, pf_error *err)
{
    struct served *s = mem_calloc(1, sizeof *s);
    if (!s)
        return err_nomem(err, sizeof *s, "a composition");
    s->way = way;
    s->layer_keys = layer_keys_new(comp);
    int rc = s->layer_keys ? pf_view_open(e->ckpt, comp, &s->view, err)
                           : err_nomem(err, 0, "layer keys");
    if (rc) {
        mem_free(s->layer_keys);
        mem_free(s);
        return rc;
    }
    view_set_policy(s->view, e->policy);
    *out = s;
    return PF_OK;
}

/* ---------------------------------------------------------------------------------------- placements */

/* What a placement keeps alive. */
struct held {
    struct overlay *overlay;        /* may be NULL */
    struct resident_set *residents; /* may be NULL */
};

static void held_free(void *ctx)
{
    struct held *h = ctx;
    overlay_unref(h->overlay);
    residents_unref(h->residents);
    mem_free(h);
}

static struct placement *best_placement(struct pf_engine *e, struct served *s)
{
    struct placement *p = placement_new(e->ckpt->n_layers);
    struct held *h = p ? mem_calloc(1, sizeof *h) : NULL;
    bool uses_overlay = s->overlay && way_takes_overlay(s->way);
    if (!h) {
        placement_free(p);
        return NULL;
    }
    p->free_fn = held_free;
    p->free_ctx = h;
    for (uint32_t i = 0; i < e->ckpt->n_layers; i++) {
        p->layers[i] = residents_find(e, s, i);
        if (p->layers[i] && !h->residents) {
            h->residents = e->residents;
            residents_ref(h->residents);
        }
        if (!p->layers[i] && uses_overlay)
            p->layers[i] = overlay_layer(s->overlay, i);
    }
    if (uses_overlay) {
        h->overlay = s->overlay;
        overlay_ref(h->overlay);
    }
    return p;
}

/* Publishes the best placement that s can have now. */
static void engine_place(struct pf_engine *e, struct served *s)
{
    struct placement *p = best_placement(e, s);
    if (!p) /* never the one before it: that may name a resident layer that is about to be rewritten */
        log_at(PF_LOG_WARN, "out of memory for a placement: streaming instead");
    view_publish(s->view, p);
}

void engine_place_all(struct pf_engine *e)
{
    for (size_t i = 0; i < N_RECENT; i++)
        if (e->recent[i])
            engine_place(e, e->recent[i]);
}

/* ------------------------------------------------------------------------------------------ adopting */

bool engine_try_adopt(struct pf_engine *e, struct served *s)
{
    const struct pf_composition *comp = view_composition(s->view);
    pf_error why;
    if (!e->store || s->overlay || comp->n_targets == 0 || !way_takes_overlay(s->way))
        return false;
    int rc = overlay_adopt(e->store, comp, OVERLAY_VERIFY_SAMPLED, &s->overlay, &why);
    if (rc == PF_OK) {
        e->n_adoptions++;
        s->is_build_wanted = false;
        engine_place(e, s);
        return true;
    }
    s->overlay = NULL;
    if (rc == PF_E_CHANGED)
        s->is_recheck_needed = true;
    else if (rc != PF_E_NOTFOUND)
        log_at(PF_LOG_WARN, "overlay is not adopted: %s", why.msg);
    return false;
}

/* ------------------------------------------------------------------------------------------ serving */

/* Is this what digest names? Not when a file that it maps was written to: a change that loaded a good one again must not get that view. */
static bool is_of(const struct served *s, struct digest digest)
{
    const struct pf_composition *comp = view_composition(s->view);
    return digest_eq(comp->digest, digest) && comp_check_adapters(comp, NULL) == PF_OK;
}

static struct served *find_recent(struct pf_engine *e, struct digest digest)
{
    for (size_t i = 0; i < N_RECENT; i++)
        if (e->recent[i] && is_of(e->recent[i], digest))
            return e->recent[i];
    return NULL;
}

/* Frees what left the recent list once nobody else holds it. Nobody can take it any more, so one reference stays one; and readers never
 * find themselves taking a view apart, with all the locks that this needs. */
static void sweep_lingering(struct pf_engine *e)
{
    for (struct served **at = &e->lingering; *at;) {
        struct served *s = *at;
        if (view_has_stale_readers(s->view) || view_n_refs(s->view) > 1) {
            at = &s->next_lingering;
        } else {
            *at = s->next_lingering;
            engine_served_free(s);
        }
    }
}

bool engine_has_stale_readers(struct pf_engine *e)
{
    bool is_stale = false;
    sweep_lingering(e);
    for (size_t i = 0; i < N_RECENT; i++)
        if (e->recent[i] && view_has_stale_readers(e->recent[i]->view))
            is_stale = true;
    for (struct served *s = e->lingering; s; s = s->next_lingering)
        if (view_has_stale_readers(s->view))
            is_stale = true;
    return is_stale;
}

/* What leaves the list may live on with its readers, but names no residents any more: nobody would take them from it later. */
static void forget(struct pf_engine *e, size_t i)
{
    struct served *s = e->recent[i];
    e->recent[i] = NULL;
    if (e->residents->n) {
        s->way = s->overlay ? PF_WAY_OVERLAY : PF_WAY_STREAM;
        engine_place(e, s);
    }
    s->next_lingering = e->lingering;
    e->lingering = s;
}

static void keep(struct pf_engine *e, struct served *s)
{
    size_t oldest = N_RECENT;
    for (size_t i = 0; i < N_RECENT; i++) {
        if (!e->recent[i]) {
            e->recent[i] = s;
            return;
        }
        if (e->recent[i] != e->global &&
            (oldest == N_RECENT || e->recent[i]->i_used < e->recent[oldest]->i_used))
            oldest = i;
    }
    forget(e, oldest);
    e->recent[oldest] = s;
}

/* One that left the list and still has readers comes back: they and the new ones share its overlay. */
static struct served *revive(struct pf_engine *e, struct digest digest)
{
    for (struct served **at = &e->lingering; *at; at = &(*at)->next_lingering) {
        struct served *s = *at;
        if (!is_of(s, digest))
            continue;
        *at = s->next_lingering;
        s->next_lingering = NULL;
        keep(e, s);
        return s;
    }
    return NULL;
}

int engine_serve(struct pf_engine *e, struct pf_composition *comp, int32_t way, bool is_way_asked,
                 struct served **out, pf_error *err)
{
    struct served *s = find_recent(e, comp->digest);
    if (!s && (s = revive(e, comp->digest)))
        is_way_asked = true;
    if (!s) {
        int rc = served_new(e, comp, way, &s, err);
        if (rc)
            return rc;
        keep(e, s);
    }
    if (is_way_asked)
        s->way = way;
    s->i_used = ++e->i_clock;
    if (s->overlay && !overlay_is_whole(s->overlay)) { /* it is set aside by adopting it again */
        overlay_unref(s->overlay);
        s->overlay = NULL;
    }
    if (!s->overlay)
        (void)engine_try_adopt(e, s);
    engine_place(e, s);
    /* For its sweep: placements and views that readers have left */
    (void)engine_has_stale_readers(e);
    *out = s;
    return PF_OK;
}

bool served_uses(const struct served *s, const struct pf_adapter *a)
{
    const struct pf_composition *comp = view_composition(s->view);
    for (size_t k = 0; k < comp->n_entries; k++)
        if (comp->entries[k].adapter == a)
            return true;
    return false;
}

/* Recent compositions that nobody holds are only a memory of work done: they do not keep an adapter loaded. */
void engine_forget_unused(struct pf_engine *e, const struct pf_adapter *a)
{
    for (size_t i = 0; i < N_RECENT; i++) {
        struct served *s = e->recent[i];
        if (!s || s == e->global || view_n_refs(s->view) > 1 || !served_uses(s, a))
            continue;
        e->recent[i] = NULL;
        engine_served_free(s);
    }
    (void)engine_has_stale_readers(e); /* for its sweep: views that their readers have released */
}

/* ----------------------------------------------------------------------------------------- questions */

struct served *served_of(struct pf_engine *e, const struct pf_view *view)
{
    for (size_t i = 0; i < N_RECENT; i++)
        if (e->recent[i] && e->recent[i]->view == view)
            return e->recent[i];
    for (struct served *s = e->lingering; s; s = s->next_lingering)
        if (s->view == view)
            return s;
    return NULL;
}

const char *served_way(struct pf_engine *e, const struct served *s)
{
    const struct pf_composition *comp = view_composition(s->view);
    bool uses_overlay = s->overlay && way_takes_overlay(s->way);
    uint32_t n_overlay = 0, n_resident = 0, n_layers = 0, i_last = UINT32_MAX;
    for (size_t i = 0; i < comp->n_targets; i++) {
        uint32_t i_layer = e->ckpt->tensors[comp->i_tensors[i]].i_layer;
        if (i_layer == i_last)
            continue;
        i_last = i_layer;
        n_layers++;
        if (residents_find(e, s, i_layer))
            n_resident++;
        else if (uses_overlay)
            n_overlay++;
    }
    if (n_layers == 0)
        return "base";
    if (2 * n_resident > n_layers)
        return "inplace";
    return 2 * n_overlay > n_layers ? "overlay" : "stream";
}
