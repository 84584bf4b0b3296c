/*
 * Views for readers: the current one, taken without waiting, and one for a composition of the caller's own, beside the global one. Called
 * for every generation, from any thread. Must never change what is global.
 */
#include "engine/engine_int.h"

struct pf_view *pf_engine_view(struct pf_engine *e)
{
    return current_take(&e->current);
}

/* The global composition is read as its own change said, whatever a request says of the same one: the bytes are equal. */
static int serve(struct pf_engine *e, struct pf_composition *comp, int32_t way, struct served **out,
                 pf_error *err)
{
    if (way < PF_WAY_AUTO || way > PF_WAY_INPLACE)
        return err_set(err, PF_E_INVALID, "way %d is none of auto, overlay, stream, inplace", way);
    bool is_asked =
        way != PF_WAY_AUTO && !digest_eq(comp->digest, view_composition(e->global->view)->digest);
    return engine_serve(e, comp, is_asked ? way : e->opts.way, is_asked, out, err);
}

int pf_engine_view_of(struct pf_engine *e, const struct pf_engine_lora *loras, size_t n_loras,
                      const struct pf_change_opts *opts, struct pf_view **out_view, pf_error *err)
{
    uint32_t n = e->ckpt->n_components;
    struct pf_change_opts o;
    struct pf_composition *comp = NULL;
    struct served *s = NULL;
    if (n_loras > 0 && !loras)
        return err_set(err, PF_E_INVALID, "%zu adapters are announced and none is given", n_loras);
    opts_read(&o, sizeof o, opts);
    const struct pf_composition_opts co = {
        .size = sizeof co, .allow_unmatched = o.allow_unmatched, .merge_dtype = o.merge_dtype};
    pthread_mutex_lock(&e->mu);
    struct target_state *targets = mem_calloc(n, sizeof *targets);
    int rc = targets ? PF_OK : err_nomem(err, n * sizeof *targets, "targets");
    for (uint32_t c = 0; rc == PF_OK && c < n; c++)
        targets[c].factor = 1;
    for (size_t i = 0; rc == PF_OK && i < n_loras; i++)
        rc = targets_add(e, targets, NULL, &loras[i], err);
    if (rc == PF_OK)
        rc = targets_compose(e->ckpt, targets, &co, &comp, err);
    if (rc == PF_OK)
        rc = serve(e, comp, o.way, &s, err);
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
    const char *way;
    if (s)
        way = served_way(e, s);
    else /* a view that was never ours has no placement but the plain one */
        way = view_composition(view)->n_targets == 0 ? "base" : "stream";
    pthread_mutex_unlock(&e->mu);
    return way;
}
