/*
 * The four operations. Each validates everything, builds the state that would follow, and only then publishes another view: a failed
 * change leaves no trace. Called by servers, scripts and bindings, from any thread. Must never leave half a change behind.
 *
 *     state of a target      set             merge           unmerge          deactivate
 *     empty                  active          PF_E_STATE      empty            empty
 *     active                 active          active (factor) unmerged         empty
 *     unmerged               active          active (factor) unmerged         empty
 */
#include <math.h>
#include <stdio.h>

#include "engine/engine_int.h"

/* One change on its way: a copy of all targets that becomes the state when everything else has worked. */
struct change {
    struct pf_engine *e;
    struct target_state *targets;
    bool *is_named;
    int32_t merge_dtype, way;
    bool allow_unmatched, is_set;
    void (*published)(void *ctx);
    void *published_ctx;
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
static int change_begin(struct change *c, struct pf_engine *e, const char *targets, bool is_watched,
                        pf_error *err)
{
    uint32_t n = e->ckpt->n_components;
    *c = (struct change){
        .e = e, .merge_dtype = e->merge_dtype, .way = e->opts.way, .t_start_ns = clock_ns()};
    c->targets = mem_calloc(n, sizeof *c->targets);
    c->is_named = mem_calloc(n, sizeof *c->is_named);
    int rc = c->targets && c->is_named ? PF_OK : err_nomem(err, 0, "a change");
    if (is_watched) /* a thread that samples: only for who asked, and no reason to fail */
        (void)peak_start(&c->peak, NULL);
    if (rc == PF_OK)
        rc = target_list_parse(e->ckpt, targets, c->is_named, err);
    for (uint32_t i = 0; rc == PF_OK && i < n; i++)
        rc = target_entries_copy(&e->targets[i], &c->targets[i], err);
    return rc;
}

/* Publishes: from here on every view that is taken is the new one. */
static void make_global(struct pf_engine *e, struct served *s)
{
    if (e->global != s) {
        if (e->global) {
            e->global->t_global_ns = 0;
            e->global->n_uses0 = view_n_uses(e->global->view);
            e->global->is_build_wanted = false;
        }
        s->t_global_ns = clock_ns();
        if (e->busy != s) /* of a composition that is no longer wanted */
            atomic_store(&e->cancel_build, true);
    }
    s->is_build_failed = s->is_build_cancelled = false; /* said again: tried again */
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
    r->way = served_way(c->e, s);
    r->n_tensors_changed = info.n_tensors_changed;
    r->n_layers_changed = info.n_layers_changed;
    r->n_keys_matched = info.n_keys_matched;
    r->n_keys_unmatched = info.n_keys_unmatched;
    r->effect_ms = (double)(clock_ns() - c->t_start_ns) / 1e6;
    view_ref(s->view);
    *out_view = s->view;
}

static const char *why_no_overlay(const struct pf_engine *e, const struct pf_view *view)
{
    if (!e->store)
        return e->cache_note;
    if (e->has_no_builder)
        return "the builder's threads cannot be started";
    if (!background_may_be_awaited(e))
        return "neither a progress function nor a child of fork can wait for the builder";
    if (e->global->view != view)
        return "another change came first";
    return e->global->is_build_cancelled ? "the build was cancelled" : e->cache_note;
}

/* With way `overlay` the change returns when the files are there; it took effect before, streaming. Another change supersedes it. */
static void await_overlay(struct change *c, const struct pf_view *view)
{
    struct pf_engine *e = c->e;
    if (view_composition(view)->n_targets == 0)
        return;
    if (e->store && !e->global->overlay) {
        e->global->is_build_wanted = true;
        background_wake(e);
        while (e->global->view == view && !e->global->overlay && !e->global->is_build_failed &&
               background_may_be_awaited(e) && !e->is_ending)
            pthread_cond_wait(&e->idle, &e->mu);
    }
    const struct served *s = served_of(e, view);
    if (s && s->overlay)
        c->report.way = served_way(e, s);
    else
        snprintf(c->report.note, sizeof c->report.note, "streaming instead of an overlay: %.200s",
                 why_no_overlay(e, view));
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
    if (rc == PF_OK && c->is_set)
        rc = targets_check(comp, c->targets, c->is_named, err);
    if (rc == PF_OK)
        rc = engine_serve(e, comp, c->way, true, &s, err);
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
    if (c->published)
        c->published(c->published_ctx);
    if (c->way == PF_WAY_OVERLAY)
        await_overlay(c, *out_view);
    return PF_OK;
}

/* After publishing, without the mutex: survival costs a pass over a sample and holds nobody up. */
static int change_end(struct change *c, int rc, struct pf_view *view,
                      struct pf_change_report *out_report)
{
    if (rc == PF_OK && view && out_report) {
        /* The view is published: a failure here is only a missing number. */
        struct pf_composition *comp = (struct pf_composition *)(uintptr_t)view_composition(view);
        pf_error why;
        if (pf_composition_fidelity(comp, &c->report.fidelity, &why))
            snprintf(c->report.note, sizeof c->report.note, "survival is not known: %.200s",
                     why.msg);
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

int pf_engine_set(struct pf_engine *e, const struct pf_engine_lora *loras, size_t n_loras,
                  const char *targets, const struct pf_change_opts *opts,
                  struct pf_change_report *out_report, pf_error *err)
{
    struct pf_change_opts o;
    struct change c;
    struct pf_view *view = NULL;
    if (n_loras > 0 && !loras)
        return err_set(err, PF_E_INVALID, "%zu adapters are announced and none is given", n_loras);
    opts_read(&o, sizeof o, opts);
    pthread_mutex_lock(&e->mu);
    int rc = change_begin(&c, e, targets, out_report != NULL, err);
    c.merge_dtype = o.merge_dtype;
    c.allow_unmatched = o.allow_unmatched;
    c.published = o.published;
    c.published_ctx = o.published_ctx;
    if (o.way != PF_WAY_AUTO)
        c.way = o.way;
    if (rc == PF_OK && (c.way < PF_WAY_AUTO || c.way > PF_WAY_INPLACE))
        rc = err_set(err, PF_E_INVALID, "way %d is none of auto, overlay, stream, inplace", c.way);
    for (uint32_t i = 0; rc == PF_OK && i < e->ckpt->n_components; i++)
        if (c.is_named[i])
            target_release(&c.targets[i]);
    for (size_t i = 0; rc == PF_OK && i < n_loras; i++)
        rc = targets_add(e, c.targets, c.is_named, &loras[i], err);
    c.is_set = true;
    if (rc == PF_OK)
        rc = change_publish(&c, &view, err);
    pthread_mutex_unlock(&e->mu);
    return change_end(&c, rc, view, out_report);
}

int pf_engine_merge(struct pf_engine *e, const char *targets, double factor,
                    struct pf_change_report *out_report, pf_error *err)
{
    struct change c;
    struct pf_view *view = NULL;
    bool is_any = false;
    pthread_mutex_lock(&e->mu);
    int rc = change_begin(&c, e, targets, out_report != NULL, err);
    if (rc == PF_OK && !isfinite(factor))
        rc = err_set(err, PF_E_INVALID, "factor %g is not a finite number", factor);
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
    return change_end(&c, rc, view, out_report);
}

static int take_off(struct pf_engine *e, const char *targets, bool is_forgotten,
                    struct pf_change_report *out_report, pf_error *err)
{
    struct change c;
    struct pf_view *view = NULL;
    pthread_mutex_lock(&e->mu);
    int rc = change_begin(&c, e, targets, out_report != NULL, err);
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
    return change_end(&c, rc, view, out_report);
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
