/*
 * What an engine says of itself: status, where each layer's bytes are, which adapters act. Called by servers, scripts and bindings, from
 * any thread. Must never wait for anything but the change lock.
 */
#include <stdio.h>

#include "engine/engine_int.h"
#include "tensor/dtype.h"

uint64_t pf_engine_cache_bytes(struct pf_engine *e)
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
    s->n_layers_resident = e->residents->n;
    s->n_layers_mapped = e->ckpt->n_layers - e->n_kept - e->residents->n;
    s->n_bytes_kept = e->n_kept_bytes;
    s->n_bytes_resident = e->residents->n_bytes;
    s->available_bytes = e->plan.available_bytes;
    snprintf(s->plan_note, sizeof s->plan_note, "%s", e->plan.note);
    s->n_changes = e->n_changes;
    s->n_builds = e->n_builds;
    s->n_adoptions = e->n_adoptions;
    s->n_build_failures = e->n_build_failures;
    s->n_evictions = e->store ? overlay_store_n_evicted(e->store) : 0;
    s->n_merged_bytes = merge_n_bytes();
    s->merge_dtype = e->merge_dtype;
    pthread_mutex_unlock(&e->mu);
}

/* Merged bytes of the layers before i_layer, and of that layer. */
static void merged_bytes(const struct pf_composition *comp, uint32_t i_layer, uint64_t *out_before,
                         uint64_t *out_own)
{
    *out_before = *out_own = 0;
    for (size_t i = 0; i < comp->n_targets; i++) {
        const struct merge_target *t = &comp->targets[i];
        uint32_t at = comp->ckpt->tensors[comp->i_tensors[i]].i_layer;
        if (at <= i_layer)
            *(at < i_layer ? out_before : out_own) +=
                (uint64_t)(t->n_rows * t->n_cols) * dtype_size(t->out_dtype);
    }
}

/* A build writes layers in order, so what it has written says how far into each it is. Caller holds mu. */
static void tell_built(struct pf_engine *e, const struct served *s, uint32_t i_layer,
                       bool is_overlay, struct pf_layer_status *out)
{
    uint64_t n_before, n_built = atomic_load(&e->n_built_bytes);
    bool is_building = e->busy == s && !s->is_recheck_needed && atomic_load(&e->n_build_bytes) > 0;
    merged_bytes(view_composition(s->view), i_layer, &n_before, &out->n_merged_bytes);
    out->n_built_bytes = is_overlay ? out->n_merged_bytes : 0;
    if (!is_overlay && is_building && n_built > n_before)
        out->n_built_bytes =
            n_built - n_before < out->n_merged_bytes ? n_built - n_before : out->n_merged_bytes;
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
    bool is_resident = residents_find(e, s, i_layer);
    bool is_overlay = s->overlay && way_takes_overlay(s->way) && overlay_layer(s->overlay, i_layer);
    out->place = is_resident ? "resident" : is_overlay ? "overlay" : is_changed ? "stream" : "base";
    out->residency = i_layer < e->residents->n     ? "resident"
                     : e->policy->is_kept[i_layer] ? "kept"
                                                   : "mapped";
    tell_built(e, s, i_layer, is_overlay, out);
    pthread_mutex_unlock(&e->mu);
    return PF_OK;
}

void pf_engine_each_active(struct pf_engine *e, pf_active_fn fn, void *ctx)
{
    if (!fn)
        return;
    pthread_mutex_lock(&e->mu);
    for (uint32_t c = 0; c < e->ckpt->n_components; c++) {
        const struct target_state *t = &e->targets[c];
        bool is_merged = t->phase == TARGET_ACTIVE;
        for (size_t i = 0; i < t->n_entries; i++) {
            const struct target_entry *it = &t->entries[i];
            fn(ctx, &(struct pf_active_info){.component = e->ckpt->components[c].name,
                                             .nickname = it->nickname,
                                             .path = adapter_path(it->adapter),
                                             .strength = it->strength * (is_merged ? t->factor : 1),
                                             .is_merged = is_merged,
                                             .has_alpha = it->has_alpha,
                                             .alpha = it->alpha});
        }
    }
    pthread_mutex_unlock(&e->mu);
}
