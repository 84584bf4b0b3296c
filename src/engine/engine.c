/*
 * The engine: opening and closing, and the memory plan. What it does while it is open stands in change.c (the operations), registry.c
 * (adapters), request.c (views), serve.c (compositions and placements), resident.c, background.c and status.c. Must never take the
 * bytes away from a view that is still out when it closes.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "engine/engine_int.h"

#define DEFAULT_BUILD_DELAY_MS 2000
/* Of the available memory, for panels, scratch and activations */
#define RESERVE_BYTES ((uint64_t)256 << 20)

/* -------------------------------------------------------------------------------------- open and close */

static void open_store(struct pf_engine *e, const struct pf_engine_opts *o)
{
    pf_error why;
    char *dir = NULL;
    if (overlay_cache_dir(o->cache_dir, &dir, &why)) {
        snprintf(e->cache_note, sizeof e->cache_note, "%.500s", why.msg);
    } else if (overlay_store_open(dir, o->cache_budget_bytes, &e->store, &why)) {
        snprintf(e->cache_note, sizeof e->cache_note, "%.500s", why.msg);
        log_at(PF_LOG_WARN, "%s; streaming without it", why.msg);
    }
    mem_free(dir);
}

/* Used once for a picture, where the other components are used at every step: their layers come last. */
static bool is_text_encoder(const struct pf_engine *e, const struct ckpt_layer *l)
{
    return str_starts(str_of(e->ckpt->components[l->i_component].name), "text_encoder");
}

/* Keeps the first layers of a component that fit, and its stem; an LRU read cyclically would hit nothing otherwise. Returns what is left. */
static uint64_t keep_layers(struct pf_engine *e, bool of_text_encoders, uint64_t room)
{
    bool is_full = false;
    for (uint32_t i = e->residents->n; i < e->ckpt->n_layers; i++) {
        const struct ckpt_layer *l = &e->ckpt->layers[i];
        if (is_text_encoder(e, l) != of_text_encoders)
            continue;
        if (l->n_bytes > room || (is_full && !l->is_stem)) {
            is_full = true;
            continue;
        }
        e->policy->is_kept[i] = true;
        e->n_kept++;
        e->n_kept_bytes += l->n_bytes;
        room -= l->n_bytes;
    }
    return room;
}

static int make_plan(struct pf_engine *e, pf_error *err)
{
    e->policy = policy_new(e->ckpt->n_layers);
    if (!e->policy)
        return err_nomem(err, e->ckpt->n_layers, "the stream policy");
    const struct resident_set *r = e->residents;
    uint64_t room = e->plan.available_bytes;
    uint64_t reserve = RESERVE_BYTES < room / 4 ? RESERVE_BYTES : room / 4;
    room -= reserve;
    room -= room < r->n_bytes ? room : r->n_bytes;
    for (uint32_t i = 0; i < r->n; i++)
        e->policy->is_kept[i] = true; /* there is nothing to drop */
    (void)keep_layers(e, true, keep_layers(e, false, room));
    size_t n = strlen(e->plan.note);
    snprintf(e->plan.note + n, sizeof e->plan.note - n,
             "; %llu MiB set apart for panels; of %u layers %u are kept (%llu MiB), %u resident "
             "(%llu MiB%s), "
             "%u mapped and dropped behind the reader",
             (unsigned long long)(reserve >> 20), e->ckpt->n_layers, e->n_kept,
             (unsigned long long)(e->n_kept_bytes >> 20), r->n,
             (unsigned long long)(r->n_bytes >> 20),
             r->n == 0             ? ""
             : r->n_locked == r->n ? ", locked"
                                   : ", not locked: see ulimit -l",
             e->ckpt->n_layers - e->n_kept - r->n);
    log_at(PF_LOG_INFO, "memory plan: %s", e->plan.note);
    return PF_OK;
}

/* An id that the cache remembers spares reading the base; without it, it is computed when it is needed. */
static void recall_base_id(struct pf_engine *e)
{
    pf_error why;
    struct digest id;
    if (e->store && overlay_base_id(e->store, e->ckpt, &id, &why))
        log_at(PF_LOG_WARN, "%s", why.msg);
}

static int open_base_view(struct pf_engine *e, pf_error *err)
{
    struct pf_composition *base = NULL;
    struct served *s = NULL;
    int rc = pf_composition_new(e->ckpt, NULL, 0, NULL, &base, err);
    if (rc == PF_OK)
        rc = engine_serve(e, base, e->opts.way, true, &s, err);
    pf_composition_free(base);
    if (rc)
        return rc;
    e->global = s;
    s->t_global_ns = clock_ns();
    current_set(&e->current, s->view);
    return PF_OK;
}

static int init_sync(struct pf_engine *e)
{
    pthread_condattr_t attr;
    if (pthread_condattr_init(&attr))
        return PF_E_NOMEM;
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    int bad = pthread_mutex_init(&e->mu, NULL) || pthread_cond_init(&e->wake, &attr) ||
              pthread_cond_init(&e->idle, &attr);
    pthread_condattr_destroy(&attr);
    return bad ? PF_E_NOMEM : PF_OK;
}

int pf_engine_open(struct pf_checkpoint *ckpt, const struct pf_engine_opts *opts,
                   struct pf_engine **out_engine, pf_error *err)
{
    struct pf_engine_opts o;
    opts_read(&o, sizeof o, opts);
    if (o.way < PF_WAY_AUTO || o.way > PF_WAY_INPLACE)
        return err_set(err, PF_E_INVALID, "way %d is none of auto, overlay, stream, inplace",
                       o.way);
    struct pf_engine *e = mem_calloc(1, sizeof *e);
    if (!e || init_sync(e)) {
        mem_free(e);
        return err_nomem(err, sizeof *e, "an engine");
    }
    if (o.build_delay_ms == 0)
        o.build_delay_ms = DEFAULT_BUILD_DELAY_MS;
    e->pid = getpid();
    e->opts = o;
    e->opts.cache_dir = e->opts.system_root = NULL;
    e->ckpt = ckpt;
    ckpt_ref(ckpt);
    open_store(e, &o);
    e->targets = mem_calloc(ckpt->n_components, sizeof *e->targets);
    int rc = e->targets ? PF_OK : err_nomem(err, 0, "targets");
    for (uint32_t c = 0; e->targets && c < ckpt->n_components; c++)
        e->targets[c].factor = 1;
    if (rc == PF_OK)
        rc = plan_memory(o.system_root ? o.system_root : "", o.host_memory_bytes, &e->plan, err);
    if (rc == PF_OK)
        rc = residents_new(ckpt, o.n_resident_layers, &e->plan, &e->residents, err);
    if (rc == PF_OK)
        rc = make_plan(e, err);
    if (rc == PF_OK) {
        recall_base_id(e);
        rc = open_base_view(e, err);
    }
    if (rc == PF_OK)
        rc = background_start(e, err);
    if (rc) {
        pf_engine_close(e);
        return rc;
    }
    *out_engine = e;
    return PF_OK;
}

void pf_engine_close(struct pf_engine *e)
{
    if (!e)
        return;
    /* A child of fork has neither the thread nor a right to its locks: the parent's thread may have held them or waited. */
    bool is_child = e->pid != getpid();
    if (!is_child)
        background_stop(e);
    current_set(&e->current, NULL);
    for (size_t i = 0; i < N_RECENT; i++)
        engine_served_free(e->recent[i]);
    while (e->lingering) {
        struct served *next = e->lingering->next_lingering;
        engine_served_free(e->lingering);
        e->lingering = next;
    }
    for (uint32_t c = 0; e->targets && c < e->ckpt->n_components; c++)
        target_release(&e->targets[c]);
    mem_free(e->targets);
    registry_release(e);
    residents_unref(e->residents);
    policy_unref(e->policy);
    overlay_store_close(e->store);
    if (!is_child) {
        pthread_cond_destroy(&e->idle);
        pthread_cond_destroy(&e->wake);
        pthread_mutex_destroy(&e->mu);
    }
    pf_checkpoint_close(e->ckpt);
    mem_free(e);
}
