/*
 * The engine: opening and closing, and the four operations. Each validates everything, builds the state that would follow, and only then
 * publishes another view: a failed change leaves no trace. Called by servers, scripts and bindings, from any thread.
 *
 *     state of a target      set             merge           unmerge          deactivate
 *     empty                  active          PF_E_STATE      empty            empty
 *     active                 active          active (factor) unmerged         empty
 *     unmerged               active          active (factor) unmerged         empty
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "engine/engine_int.h"

#define DEFAULT_BUILD_DELAY_MS 2000
#define RESERVE_BYTES                                                                              \
    ((uint64_t)256 << 20) /* of the available memory, for panels, scratch and activations */

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

/* Keeps the first layers that fit; an LRU read cyclically would hit nothing otherwise. */
static int make_plan(struct pf_engine *e, const struct pf_engine_opts *o, pf_error *err)
{
    int rc = plan_memory(o->system_root ? o->system_root : "", o->host_memory_bytes, &e->plan, err);
    if (rc)
        return rc;
    e->policy = policy_new(e->ckpt->n_layers);
    if (!e->policy)
        return err_nomem(err, e->ckpt->n_layers, "the stream policy");
    uint64_t room = e->plan.available_bytes;
    uint64_t reserve = RESERVE_BYTES < room / 4 ? RESERVE_BYTES : room / 4;
    room -= reserve;
    room = room > e->n_resident_bytes ? room - e->n_resident_bytes : 0;
    for (uint32_t i = 0; i < e->ckpt->n_layers; i++) {
        bool is_resident = i < e->n_residents;
        if (!is_resident && e->n_kept_bytes + e->ckpt->layers[i].n_bytes > room)
            break;
        e->policy->is_kept[i] = true;
        if (!is_resident) {
            e->n_kept++;
            e->n_kept_bytes += e->ckpt->layers[i].n_bytes;
        }
    }
    size_t n = strlen(e->plan.note);
    snprintf(e->plan.note + n, sizeof e->plan.note - n,
             "; %llu MiB kept free for panels; %u of %u layers are kept (%llu MiB), %u resident "
             "(%llu MiB), the others are "
             "dropped behind the reader",
             (unsigned long long)(reserve >> 20), e->n_kept, e->ckpt->n_layers,
             (unsigned long long)(e->n_kept_bytes >> 20), e->n_residents,
             (unsigned long long)(e->n_resident_bytes >> 20));
    log_at(PF_LOG_INFO, "memory plan: %s", e->plan.note);
    return PF_OK;
}

static int open_base_view(struct pf_engine *e, pf_error *err)
{
    struct pf_composition *base = NULL;
    struct served *s = NULL;
    int rc = pf_composition_new(e->ckpt, NULL, 0, NULL, &base, err);
    if (rc == PF_OK)
        rc = engine_serve(e, base, e->opts.way, &s, err);
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
    struct pf_engine_opts o = opts ? *opts : (struct pf_engine_opts){.size = sizeof o};
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
        rc = residents_init(e, o.n_resident_layers, err);
    if (rc == PF_OK)
        rc = make_plan(e, &o, err);
    if (rc == PF_OK)
        rc = open_base_view(e, err);
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
    for (size_t i = 0; i < e->n_adapters; i++) {
        mem_free(e->adapters[i].nickname);
        mem_free(e->adapters[i].path);
        pf_adapter_close(e->adapters[i].adapter);
    }
    mem_free(e->adapters);
    residents_free(e);
    policy_unref(e->policy);
    overlay_store_close(e->store);
    pthread_cond_destroy(&e->idle);
    pthread_cond_destroy(&e->wake);
    pthread_mutex_destroy(&e->mu);
    pf_checkpoint_close(e->ckpt);
    mem_free(e);
}

/* ----------------------------------------------------------------------------------------- adapters */

static struct registered *find_adapter(struct pf_engine *e, const char *nickname)
{
    for (size_t i = 0; i < e->n_adapters; i++)
        if (strcmp(e->adapters[i].nickname, nickname) == 0)
            return &e->adapters[i];
    return NULL;
}

static int register_adapter(struct pf_engine *e, const char *nickname, const char *path,
                            struct pf_adapter *a, pf_error *err)
{
    struct registered *have = find_adapter(e, nickname);
    struct registered r = {mem_strdup(nickname), mem_strdup(path), a};
    if (!r.nickname || !r.path ||
        (!have && !mem_grow((void **)&e->adapters, &e->cap_adapters, e->n_adapters, sizeof r))) {
        mem_free(r.nickname);
        mem_free(r.path);
        return err_nomem(err, 0, "an adapter's name");
    }
    if (have) {
        mem_free(have->nickname);
        mem_free(have->path);
        pf_adapter_close(have->adapter);
        *have = r;
    } else {
        e->adapters[e->n_adapters++] = r;
    }
    return PF_OK;
}

int pf_engine_load(struct pf_engine *e, const char *nickname, const char *path, pf_error *err)
{
    struct pf_adapter *a = NULL;
    if (!nickname || !*nickname || !path)
        return err_set(err, PF_E_INVALID, "an adapter needs a nickname and a path");
    pthread_mutex_lock(&e->mu);
    struct registered *have = find_adapter(e, nickname);
    bool is_same = have && strcmp(have->path, path) == 0 && adapter_is_current(have->adapter);
    pthread_mutex_unlock(&e->mu);
    if (is_same)
        return PF_OK;
    int rc = pf_adapter_open(path, &a, err); /* parsing and digesting hold nobody up */
    if (rc)
        return rc;
    pthread_mutex_lock(&e->mu);
    rc = register_adapter(e, nickname, path, a, err);
    pthread_mutex_unlock(&e->mu);
    if (rc)
        pf_adapter_close(a);
    return rc;
}

/* Recent compositions that nobody holds are only a memory of work done: they do not keep an adapter loaded. */
static void forget_unused(struct pf_engine *e, const struct pf_adapter *a)
{
    for (size_t i = 0; i < N_RECENT; i++) {
        struct served *s = e->recent[i];
        if (!s || s == e->global || view_n_refs(s->view) > 1)
            continue;
        const struct pf_composition *comp = view_composition(s->view);
        for (size_t k = 0; k < comp->n_entries; k++)
            if (comp->entries[k].adapter == a) {
                e->recent[i] = NULL;
                engine_served_free(s);
                break;
            }
    }
    (void)engine_has_stale_readers(e); /* for its sweep: views that their readers have released */
}

int pf_engine_unload(struct pf_engine *e, const char *nickname, pf_error *err)
{
    pthread_mutex_lock(&e->mu);
    struct registered *have = find_adapter(e, nickname);
    int rc = PF_OK;
    if (!have) {
        rc = err_set(err, PF_E_NOTFOUND, "no adapter is loaded as '%s'", nickname);
    } else {
        forget_unused(e, have->adapter);
        if (adapter_n_refs(have->adapter) > 1)
            rc = err_set(
                err, PF_E_BUSY,
                "adapter '%s' is in use by a view or a remembered composition: deactivate it first",
                nickname);
    }
    if (rc == PF_OK) {
        mem_free(have->nickname);
        mem_free(have->path);
        pf_adapter_close(have->adapter);
        size_t i = (size_t)(have - e->adapters);
        memmove(have, have + 1, (--e->n_adapters - i) * sizeof *have);
    }
    pthread_mutex_unlock(&e->mu);
    return rc;
}

void pf_engine_each_adapter(struct pf_engine *e, pf_adapter_fn fn, void *ctx)
{
    pthread_mutex_lock(&e->mu);
    for (size_t i = 0; i < e->n_adapters; i++)
        fn(ctx, e->adapters[i].nickname, e->adapters[i].adapter);
    pthread_mutex_unlock(&e->mu);
}

void pf_engine_each_active(struct pf_engine *e, pf_active_fn fn, void *ctx)
{
    pthread_mutex_lock(&e->mu);
    for (uint32_t c = 0; c < e->ckpt->n_components; c++) {
        const struct target_state *t = &e->targets[c];
        bool is_merged = t->phase == TARGET_ACTIVE;
        for (size_t i = 0; i < t->n_entries; i++)
            fn(ctx, e->ckpt->components[c].name, t->entries[i].nickname,
               adapter_path(t->entries[i].adapter),
               t->entries[i].strength * (is_merged ? t->factor : 1), is_merged);
    }
    pthread_mutex_unlock(&e->mu);
}

/* ------------------------------------------------------------------------------------------ changes */

/* One change on its way: a copy of all targets that becomes the state when everything else has worked. */
struct change {
    struct pf_engine *e;
    struct target_state *targets;
    bool *is_named;
    int32_t merge_dtype, way;
    bool allow_unmatched;
    uint64_t t_start_ns;
    struct peak *peak;
    struct pf_change_report report;
};

static void change_release(struct change *c)
{
    for (uint32_t i = 0; c->targets && i < c->e->ckpt->n_components; i++)
        target_release(&c->targets[i]);
    mem_free(c->targets);
    mem_free(c->is_named);
    (void)peak_stop(c->peak);
}

/* Caller holds mu from here on. */
static int change_begin(struct change *c, struct pf_engine *e, const char *targets, pf_error *err)
{
    uint32_t n = e->ckpt->n_components;
    *c = (struct change){
        .e = e, .merge_dtype = e->merge_dtype, .way = e->opts.way, .t_start_ns = clock_ns()};
    c->targets = mem_calloc(n, sizeof *c->targets);
    c->is_named = mem_calloc(n, sizeof *c->is_named);
    int rc = c->targets && c->is_named ? PF_OK : err_nomem(err, 0, "a change");
    if (rc == PF_OK)
        rc = peak_start(&c->peak, err);
    if (rc == PF_OK)
        rc = targets_parse(e->ckpt, targets, c->is_named, err);
    for (uint32_t i = 0; rc == PF_OK && i < n; i++)
        rc = target_entries_copy(&e->targets[i], &c->targets[i], err);
    return rc;
}

static const char *way_of(struct pf_engine *e, const struct served *s)
{
    const struct pf_composition *comp = view_composition(s->view);
    uint32_t n_overlay = 0, n_resident = 0, n_layers = 0, i_last = UINT32_MAX;
    for (size_t i = 0; i < comp->n_targets; i++) {
        uint32_t i_layer = e->ckpt->tensors[comp->i_tensors[i]].i_layer;
        if (i_layer == i_last)
            continue;
        i_last = i_layer;
        n_layers++;
        bool uses_residents = s->way == PF_WAY_AUTO || s->way == PF_WAY_INPLACE;
        if (uses_residents && residents_find(e, s, i_layer))
            n_resident++;
        else if (s->overlay)
            n_overlay++;
    }
    if (n_layers == 0)
        return "base";
    if (2 * n_resident > n_layers)
        return "inplace";
    return 2 * n_overlay > n_layers ? "overlay" : "stream";
}

/* Publishes: from here on every view that is taken is the new one. */
static void make_global(struct pf_engine *e, struct served *s)
{
    if (e->global != s) {
        if (e->global) {
            e->global->t_global_ns = 0;
            e->global->n_generations = 0;
            e->global->is_build_wanted = false;
        }
        s->t_global_ns = clock_ns();
        s->is_build_failed = false;
        atomic_store(&e->cancel_build, true); /* of a composition that is no longer wanted */
    }
    e->global = s;
    current_set(&e->current, s->view);
    e->n_changes++;
    background_wake(e);
}

static void fill_report(struct change *c, struct served *s, struct pf_view **out_view)
{
    struct pf_composition_info info;
    pf_composition_info(view_composition(s->view), &info);
    struct pf_change_report *r = &c->report;
    snprintf(r->composition, sizeof r->composition, "%s", info.digest);
    r->way = way_of(c->e, s);
    r->n_tensors_changed = info.n_tensors_changed;
    r->n_layers_changed = info.n_layers_changed;
    r->n_keys_matched = info.n_keys_matched;
    r->n_keys_unmatched = info.n_keys_unmatched;
    r->effect_ms = (double)(clock_ns() - c->t_start_ns) / 1e6;
    view_ref(s->view);
    *out_view = s->view;
}

static struct served *served_of(struct pf_engine *e, const struct pf_view *view)
{
    for (size_t i = 0; i < N_RECENT; i++)
        if (e->recent[i] && e->recent[i]->view == view)
            return e->recent[i];
    return NULL;
}

/* With way `overlay` the change returns when the files are there; it took effect before, streaming. Another change supersedes it. */
static void await_overlay(struct change *c, const struct pf_view *view)
{
    struct pf_engine *e = c->e;
    struct served *s = served_of(e, view);
    if (view_composition(view)->n_targets == 0)
        return;
    if (e->store) {
        s->is_build_wanted = true;
        s->is_build_failed = false;
        background_wake(e);
        while (e->global && e->global->view == view && !e->global->overlay &&
               !e->global->is_build_failed && !e->is_ending)
            pthread_cond_wait(&e->idle, &e->mu);
    }
    s = served_of(e, view);
    if (s && s->overlay)
        c->report.way = way_of(e, s);
    else
        snprintf(c->report.note, sizeof c->report.note, "streaming instead of an overlay: %.200s",
                 s && *e->cache_note ? e->cache_note : "another change came first");
}

/* Resolves the changed targets, publishes, and takes the new state over. */
static int change_publish(struct change *c, struct pf_view **out_view, pf_error *err)
{
    struct pf_engine *e = c->e;
    struct pf_composition *comp = NULL;
    struct served *s = NULL;
    struct pf_composition_opts co = {
        .size = sizeof co, .allow_unmatched = c->allow_unmatched, .merge_dtype = c->merge_dtype};
    int rc = targets_compose(e->ckpt, c->targets, &co, &comp, err);
    if (rc == PF_OK)
        rc = pf_checkpoint_verify(e->ckpt, err);
    if (rc == PF_OK)
        rc = engine_serve(e, comp, c->way, &s, err);
    if (rc == PF_OK)
        targets_prune(comp, c->targets);
    pf_composition_free(comp);
    if (rc)
        return rc;
    make_global(e, s);
    e->merge_dtype = c->merge_dtype;
    struct target_state *old = e->targets;
    e->targets = c->targets;
    c->targets = old;
    fill_report(c, s, out_view);
    if (c->way == PF_WAY_OVERLAY)
        await_overlay(c, *out_view);
    return PF_OK;
}

/* After publishing, without the mutex: survival costs a pass over a sample and holds nobody up. */
static int change_end(struct change *c, int rc, struct pf_view *view,
                      struct pf_change_report *out_report, pf_error *err)
{
    if (rc == PF_OK && view && out_report) {
        /* The view is published: a failure here is only a missing number. */
        struct pf_composition *comp = (struct pf_composition *)(uintptr_t)view_composition(view);
        if (pf_composition_fidelity(comp, &c->report.fidelity, err))
            snprintf(c->report.note, sizeof c->report.note, "survival could not be computed");
    }
    pf_view_release(view);
    c->report.peak_anon_bytes = peak_stop(c->peak);
    c->peak = NULL;
    c->report.took_ms = (double)(clock_ns() - c->t_start_ns) / 1e6;
    if (rc == PF_OK && out_report)
        *out_report = c->report;
    change_release(c);
    return rc;
}

static int check_engine_lora(struct pf_engine *e, const struct pf_engine_lora *l, pf_error *err)
{
    if (!l->nickname || !find_adapter(e, l->nickname))
        return err_set(err, PF_E_NOTFOUND,
                       "no adapter is loaded as '%s': load it with its path first",
                       l->nickname ? l->nickname : "");
    if (!isfinite(l->strength))
        return err_set(err, PF_E_INVALID, "strength %g of '%s' is not a finite number", l->strength,
                       l->nickname);
    if (l->has_alpha && !isfinite(l->alpha))
        return err_set(err, PF_E_INVALID, "alpha %g of '%s' is not a finite number", l->alpha,
                       l->nickname);
    return PF_OK;
}

/* Appends one adapter to the targets that it names; `limit` (may be NULL) says which the change is about. */
static int add_lora(struct pf_engine *e, struct target_state *targets, const bool *limit,
                    const struct pf_engine_lora *l, pf_error *err)
{
    uint32_t n = e->ckpt->n_components;
    bool *named = mem_calloc(n, sizeof *named);
    int rc = named ? check_engine_lora(e, l, err) : err_nomem(err, n, "targets");
    if (rc == PF_OK)
        rc = targets_parse(e->ckpt, l->target, named, err);
    for (uint32_t c = 0; rc == PF_OK && c < n; c++) {
        struct target_state *t = &targets[c];
        struct target_entry *grown;
        if (!named[c] || (limit && !limit[c]))
            continue;
        struct target_entry entry = {.nickname = mem_strdup(l->nickname),
                                     .adapter = find_adapter(e, l->nickname)->adapter,
                                     .strength = l->strength,
                                     .alpha = l->alpha,
                                     .has_alpha = l->has_alpha};
        grown =
            entry.nickname ? mem_realloc_array(t->entries, t->n_entries + 1, sizeof entry) : NULL;
        if (!grown) {
            mem_free(entry.nickname);
            rc = err_nomem(err, sizeof entry, "a target");
            break;
        }
        adapter_ref(entry.adapter);
        t->entries = grown;
        t->entries[t->n_entries++] = entry;
        t->phase = TARGET_ACTIVE;
    }
    mem_free(named);
    return rc;
}

int pf_engine_set(struct pf_engine *e, const struct pf_engine_lora *loras, size_t n_loras,
                  const char *targets, const struct pf_change_opts *opts,
                  struct pf_change_report *out_report, pf_error *err)
{
    struct change c;
    struct pf_view *view = NULL;
    pthread_mutex_lock(&e->mu);
    int rc = change_begin(&c, e, targets, err);
    if (rc == PF_OK && opts) {
        c.merge_dtype = opts->merge_dtype;
        c.allow_unmatched = opts->allow_unmatched;
        if (opts->way != PF_WAY_AUTO)
            c.way = opts->way;
    }
    if (rc == PF_OK && (c.way < PF_WAY_AUTO || c.way > PF_WAY_INPLACE))
        rc = err_set(err, PF_E_INVALID, "way %d is none of auto, overlay, stream, inplace", c.way);
    for (uint32_t i = 0; rc == PF_OK && i < e->ckpt->n_components; i++)
        if (c.is_named[i])
            target_release(&c.targets[i]);
    for (size_t i = 0; rc == PF_OK && i < n_loras; i++)
        rc = add_lora(e, c.targets, c.is_named, &loras[i], err);
    if (rc == PF_OK)
        rc = change_publish(&c, &view, err);
    pthread_mutex_unlock(&e->mu);
    return change_end(&c, rc, view, out_report, err);
}

int pf_engine_merge(struct pf_engine *e, const char *targets, double factor,
                    struct pf_change_report *out_report, pf_error *err)
{
    struct change c;
    struct pf_view *view = NULL;
    bool is_any = false;
    pthread_mutex_lock(&e->mu);
    int rc = change_begin(&c, e, targets, err);
    if (rc == PF_OK && !isfinite(factor))
        rc = err_set(err, PF_E_INVALID, "strength %g is not a finite number", factor);
    for (uint32_t i = 0; rc == PF_OK && i < e->ckpt->n_components; i++)
        if (c.is_named[i] && c.targets[i].phase != TARGET_EMPTY) {
            c.targets[i].phase = TARGET_ACTIVE;
            c.targets[i].factor = factor;
            is_any = true;
        }
    if (rc == PF_OK && !is_any)
        rc = err_set(err, PF_E_STATE, "nothing is remembered for target '%s': set adapters first",
                     targets ? targets : "all");
    c.allow_unmatched = true; /* it was validated when it was set */
    if (rc == PF_OK)
        rc = change_publish(&c, &view, err);
    pthread_mutex_unlock(&e->mu);
    return change_end(&c, rc, view, out_report, err);
}

static int take_off(struct pf_engine *e, const char *targets, bool is_forgotten,
                    struct pf_change_report *out_report, pf_error *err)
{
    struct change c;
    struct pf_view *view = NULL;
    pthread_mutex_lock(&e->mu);
    int rc = change_begin(&c, e, targets, err);
    for (uint32_t i = 0; rc == PF_OK && i < e->ckpt->n_components; i++) {
        if (!c.is_named[i])
            continue;
        if (is_forgotten)
            target_release(&c.targets[i]);
        else if (c.targets[i].phase == TARGET_ACTIVE)
            c.targets[i].phase = TARGET_UNMERGED;
    }
    c.allow_unmatched = true; /* what stays was validated when it was set */
    if (rc == PF_OK)
        rc = change_publish(&c, &view, err);
    pthread_mutex_unlock(&e->mu);
    return change_end(&c, rc, view, out_report, err);
}

int pf_engine_unmerge(struct pf_engine *e, const char *targets, struct pf_change_report *out_report,
                      pf_error *err)
{
    return take_off(e, targets, false, out_report, err);
}

int pf_engine_deactivate(struct pf_engine *e, const char *targets,
                         struct pf_change_report *out_report, pf_error *err)
{
    return take_off(e, targets, true, out_report, err);
}

/* -------------------------------------------------------------------------------------------- views */

struct pf_view *pf_engine_view(struct pf_engine *e)
{
    return current_take(&e->current);
}

int pf_engine_view_of(struct pf_engine *e, const struct pf_engine_lora *loras, size_t n_loras,
                      const struct pf_change_opts *opts, struct pf_view **out_view, pf_error *err)
{
    uint32_t n = e->ckpt->n_components;
    struct pf_composition_opts co = {.size = sizeof co,
                                     .allow_unmatched = opts && opts->allow_unmatched,
                                     .merge_dtype = opts ? opts->merge_dtype : PF_MERGE_BASE};
    struct pf_composition *comp = NULL;
    struct served *s = NULL;
    pthread_mutex_lock(&e->mu);
    struct target_state *targets = mem_calloc(n, sizeof *targets);
    int rc = targets ? PF_OK : err_nomem(err, n * sizeof *targets, "targets");
    for (uint32_t c = 0; rc == PF_OK && c < n; c++)
        targets[c].factor = 1;
    for (size_t i = 0; rc == PF_OK && i < n_loras; i++)
        rc = add_lora(e, targets, NULL, &loras[i], err);
    if (rc == PF_OK)
        rc = targets_compose(e->ckpt, targets, &co, &comp, err);
    if (rc == PF_OK)
        rc = engine_serve(e, comp, opts && opts->way != PF_WAY_AUTO ? opts->way : e->opts.way, &s,
                          err);
    if (rc == PF_OK) {
        view_ref(s->view);
        *out_view = s->view;
    }
    pf_composition_free(comp);
    for (uint32_t c = 0; targets && c < n; c++)
        target_release(&targets[c]);
    mem_free(targets);
    pthread_mutex_unlock(&e->mu);
    return rc;
}

const char *pf_engine_way(struct pf_engine *e, const struct pf_view *view)
{
    pthread_mutex_lock(&e->mu);
    const struct served *s = served_of(e, view);
    for (const struct served *l = e->lingering; !s && l; l = l->next_lingering)
        if (l->view == view)
            s = l;
    /* A view that was never ours has no placement but the plain one. */
    const char *way = s ? way_of(e, s) : view_composition(view)->n_targets == 0 ? "base" : "stream";
    pthread_mutex_unlock(&e->mu);
    return way;
}

/* ------------------------------------------------------------------------------------------- status */

static uint64_t cache_bytes(struct pf_engine *e)
{
    struct overlay_entry *entries = NULL;
    size_t n = 0;
    uint64_t n_bytes = 0;
    if (!e->store || overlay_list(e->store, &entries, &n, NULL))
        return 0;
    for (size_t i = 0; i < n; i++)
        n_bytes += entries[i].n_bytes;
    overlay_list_free(entries, n);
    return n_bytes;
}

void pf_engine_status(struct pf_engine *e, struct pf_engine_status *s)
{
    *s = (struct pf_engine_status){0};
    s->cache_bytes = cache_bytes(e);
    s->anon_bytes = proc_anon_bytes();
    pthread_mutex_lock(&e->mu);
    snprintf(s->composition, sizeof s->composition, "%s", pf_view_digest(e->global->view));
    snprintf(s->cache_note, sizeof s->cache_note, "%s", e->cache_note);
    if (e->store)
        snprintf(s->cache_dir, sizeof s->cache_dir, "%s", overlay_store_dir(e->store));
    s->cache_budget_bytes = e->store ? overlay_store_budget(e->store) : 0;
    s->n_build_bytes = atomic_load(&e->n_build_bytes);
    s->n_built_bytes = s->n_build_bytes ? atomic_load(&e->n_built_bytes) : 0;
    s->is_building = s->n_build_bytes > 0;
    s->n_layers_kept = e->n_kept;
    s->n_layers_resident = e->n_residents;
    s->n_layers_mapped = e->ckpt->n_layers - e->n_kept - e->n_residents;
    s->n_bytes_kept = e->n_kept_bytes;
    s->n_bytes_resident = e->n_resident_bytes;
    s->available_bytes = e->plan.available_bytes;
    snprintf(s->plan_note, sizeof s->plan_note, "%s", e->plan.note);
    s->n_changes = e->n_changes;
    s->n_builds = e->n_builds;
    s->n_adoptions = e->n_adoptions;
    pthread_mutex_unlock(&e->mu);
}

int pf_engine_layer_status(struct pf_engine *e, uint32_t i_layer, struct pf_layer_status *out,
                           pf_error *err)
{
    if (i_layer >= e->ckpt->n_layers)
        return err_set(err, PF_E_RANGE, "layer %u of a checkpoint of %u layers", i_layer,
                       e->ckpt->n_layers);
    pthread_mutex_lock(&e->mu);
    struct served *s = e->global;
    const struct ckpt_layer *layer = &e->ckpt->layers[i_layer];
    bool is_changed = false;
    for (uint32_t i = 0; !is_changed && i < layer->n_tensors; i++)
        is_changed = comp_target(view_composition(s->view), layer->i_tensor0 + i) != NULL;
    bool uses_residents = s->way == PF_WAY_AUTO || s->way == PF_WAY_INPLACE;
    bool is_resident = uses_residents && residents_find(e, s, i_layer);
    bool is_overlay = s->overlay && overlay_layer(s->overlay, i_layer);
    out->place = is_resident ? "resident" : is_overlay ? "overlay" : is_changed ? "stream" : "base";
    out->residency = i_layer < e->n_residents      ? "resident"
                     : e->policy->is_kept[i_layer] ? "kept"
                                                   : "mapped";
    pthread_mutex_unlock(&e->mu);
    return PF_OK;
}
