/*
 * Adapters under nicknames: load, unload, list. Called by servers, scripts and bindings, from any thread. Must never take an adapter
 * away from a view or a remembered composition, and never hold the engine's mutex while a file is read.
 */
#include <string.h>

#include "engine/engine_int.h"

struct registered *registry_find(struct pf_engine *e, const char *nickname)
{
    for (size_t i = 0; i < e->n_adapters; i++)
        if (strcmp(e->adapters[i].nickname, nickname) == 0)
            return &e->adapters[i];
    return NULL;
}

static void registered_release(struct registered *r)
{
    mem_free(r->nickname);
    mem_free(r->path);
    pf_adapter_close(r->adapter);
}

void registry_release(struct pf_engine *e)
{
    for (size_t i = 0; i < e->n_adapters; i++)
        registered_release(&e->adapters[i]);
    mem_free(e->adapters);
    e->adapters = NULL;
    e->n_adapters = 0;
}

/* Takes over a, on success only. */
static int enter(struct pf_engine *e, const char *nickname, const char *path, struct pf_adapter *a,
                 pf_error *err)
{
    struct registered *have = registry_find(e, nickname);
    struct registered r = {mem_strdup(nickname), mem_strdup(path), a};
    if (!r.nickname || !r.path ||
        (!have && !mem_grow((void **)&e->adapters, &e->cap_adapters, e->n_adapters, sizeof r))) {
        mem_free(r.nickname);
        mem_free(r.path);
        return err_nomem(err, 0, "an adapter's name");
    }
    if (have) {
        registered_release(have);
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
    struct registered *have = registry_find(e, nickname);
    bool is_same = have && strcmp(have->path, path) == 0 && adapter_is_current(have->adapter);
    pthread_mutex_unlock(&e->mu);
    if (is_same)
        return PF_OK;
    int rc = pf_adapter_open(path, &a, err); /* parsing and digesting hold nobody up */
    if (rc)
        return rc;
    pthread_mutex_lock(&e->mu);
    rc = enter(e, nickname, path, a, err);
    pthread_mutex_unlock(&e->mu);
    if (rc)
        pf_adapter_close(a);
    return rc;
}

/* A build of a composition that is no longer global ends first: nobody asked for it any more. */
static void end_build_with(struct pf_engine *e, const char *nickname)
{
    for (;;) {
        const struct registered *have = registry_find(e, nickname);
        struct served *busy = e->busy;
        if (!have || !busy || busy == e->global || !served_uses(busy, have->adapter) ||
            !background_may_be_awaited(e))
            return;
        atomic_store(&e->cancel_build, true);
        busy->n_uses0 = view_n_uses(busy->view); /* else it would begin again at once */
        while (e->busy == busy)
            pthread_cond_wait(&e->idle, &e->mu);
    }
}

int pf_engine_unload(struct pf_engine *e, const char *nickname, pf_error *err)
{
    int rc = PF_OK;
    if (!nickname)
        return err_set(err, PF_E_INVALID, "an adapter needs a nickname");
    pthread_mutex_lock(&e->mu);
    end_build_with(e, nickname);
    struct registered *have = registry_find(e, nickname);
    if (!have) {
        rc = err_set(err, PF_E_NOTFOUND, "no adapter is loaded as '%s'", nickname);
    } else {
        engine_forget_unused(e, have->adapter);
        if (adapter_n_refs(have->adapter) > 1)
            rc = err_set(
                err, PF_E_BUSY,
                "adapter '%s' is in use by a view or a remembered composition: deactivate it first",
                nickname);
    }
    if (rc == PF_OK) {
        registered_release(have);
        size_t i = (size_t)(have - e->adapters);
        memmove(have, have + 1, (--e->n_adapters - i) * sizeof *have);
    }
    pthread_mutex_unlock(&e->mu);
    return rc;
}

void pf_engine_each_adapter(struct pf_engine *e, pf_adapter_fn fn, void *ctx)
{
    if (!fn)
        return;
    pthread_mutex_lock(&e->mu);
    for (size_t i = 0; i < e->n_adapters; i++)
        fn(ctx, e->adapters[i].nickname, e->adapters[i].adapter);
    pthread_mutex_unlock(&e->mu);
}
