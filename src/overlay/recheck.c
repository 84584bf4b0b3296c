/*
 * The base under suspicion: reading its bytes against the digests that overlays carry of them, and what follows when other bytes are found
 * behind a known content id. Also `cache verify`, which proves an entry from both ends. Must never change an entry but for the stamps in its
 * manifest.
 */
#include <stdatomic.h>
#include <string.h>

#include "base/log.h"
#include "base/pool.h"
#include "overlay/overlay_int.h"

#define NO_BLOCK SIZE_MAX

struct check {
    const struct pf_composition *comp;
    const struct layer_targets *lt;
    const struct layer_digests *digests;
    struct behind *behind;
    const struct overlay_build_opts *opts;
    _Atomic size_t i_bad; /* a block that differs */
    _Atomic uint64_t n_done;
    _Atomic bool is_cancelled;
};

static void run_task(void *ctx, size_t i_task, unsigned i_worker)
{
    struct check *c = ctx;
    if (atomic_load(&c->is_cancelled) || atomic_load(&c->i_bad) != NO_BLOCK)
        return;
    struct base_block b = find_base_block(c->comp, c->lt, i_task);
    behind_fetch(c->behind, c->lt->i_target0 + b.i_tensor, b.off, b.n_bytes);
    if (!digest_eq(hash_bytes(b.target->base + b.off, b.n_bytes), c->digests->base[i_task]))
        atomic_store(&c->i_bad, i_task);
    behind_drop(c->behind, c->lt->i_target0 + b.i_tensor, b.off, b.n_bytes);
    uint64_t n_done = atomic_fetch_add(&c->n_done, b.n_bytes) + b.n_bytes;
    if (i_worker == 0 && c->opts && c->opts->progress &&
        !c->opts->progress(c->opts->progress_ctx, "base", n_done, 0))
        atomic_store(&c->is_cancelled, true);
}

int layer_base_check(const struct pf_composition *comp, const struct layer_targets *lt,
                     const struct layer_digests *d, struct behind *behind,
                     const struct overlay_build_opts *opts, pf_error *err)
{
    struct check c = {
        .comp = comp, .lt = lt, .digests = d, .behind = behind, .opts = opts, .i_bad = NO_BLOCK};
    int rc = PF_OK;
    if (opts && opts->pool)
        pool_run(opts->pool, d->n_base, run_task, &c);
    else
        for (size_t i = 0; i < d->n_base; i++)
            run_task(&c, i, 0);
    behind_sweep(behind, lt->i_target0, lt->n);
    /* Zeros that stand for a part of the file that is gone are no other bytes. */
    for (size_t i = 0; rc == PF_OK && i < lt->n; i++)
        rc = ckpt_tensor_guard(comp->ckpt, comp->i_tensors[lt->i_target0 + i], err);
    if (rc == PF_OK && atomic_load(&c.i_bad) != NO_BLOCK) {
        struct base_block b = find_base_block(comp, lt, atomic_load(&c.i_bad));
        const char *name = comp->ckpt->tensors[comp->i_tensors[lt->i_target0 + b.i_tensor]].name.p;
        rc = err_set(err, PF_E_MISMATCH,
                     "tensor '%s' of base '%s' is not the one that overlay %s was made from, "
                     "although the sampled blocks of its content id are",
                     name, comp->ckpt->path, comp->digest_hex);
    } else if (rc == PF_OK && atomic_load(&c.is_cancelled)) {
        rc = err_set(err, PF_E_CANCELLED, "checking base '%s' was cancelled", comp->ckpt->path);
    }
    return rc;
}

int base_id_check(const struct pf_composition *comp, pf_error *err)
{
    if (ckpt_content_id_holds(comp->ckpt, comp->base_id))
        return PF_OK;
    return err_set(err, PF_E_CHANGED,
                   "composition %s was made before other bytes were found behind the content id of "
                   "base '%s': it is not written to the cache; set it again",
                   comp->digest_hex, comp->ckpt->path);
}

int base_distrust(struct overlay_store *s, const struct pf_composition *comp,
                  const struct overlay_build_opts *opts, pf_error *err)
{
    pf_error why;
    if (!ckpt_content_id_holds(comp->ckpt, comp->base_id))
        return PF_E_MISMATCH;
    log_at(PF_LOG_WARN,
           "other bytes behind a known content id: %s; from now on the digests of all tensors are "
           "in it",
           err ? err->msg : comp->ckpt->path);
    int rc = ckpt_content_id_refine(comp->ckpt, opts ? opts->progress : NULL,
                                    opts ? opts->progress_ctx : NULL, &why);
    if (rc)
        log_at(PF_LOG_WARN,
               "base '%s' could not be read whole, nothing made from it goes to the cache: %s",
               comp->ckpt->path, why.msg);
    else
        (void)base_id_remember(s, comp->ckpt, 0, NULL); /* not written: found again */
    return PF_E_MISMATCH;
}

static int recheck_layer(struct overlay_store *s, const struct pf_composition *comp,
                         const struct layer_targets *lt, const struct json *m,
                         struct behind *behind, const struct overlay_build_opts *opts,
                         bool *out_differs, pf_error *err)
{
    struct st_file *f = NULL;
    struct layer_digests d = {0};
    int rc = layer_open_proved(s, comp, lt, m, &f, &d, err);
    if (rc)
        return rc;
    rc = layer_base_check(comp, lt, &d, behind, opts, err);
    *out_differs = rc == PF_E_MISMATCH;
    layer_digests_release(&d);
    st_close(f);
    return rc;
}

static int recheck(struct overlay_store *s, const struct pf_composition *comp, const struct json *m,
                   const struct overlay_build_opts *opts, pf_error *err)
{
    struct layer_targets lt;
    struct behind *behind = NULL;
    bool differs = false;
    const struct digest stamp = base_stamp(comp->ckpt);
    int rc = behind_new(comp, &behind, err);
    for (size_t next = 0; rc == PF_OK && layer_targets_next(comp, &next, &lt);)
        rc = recheck_layer(s, comp, &lt, m, behind, opts, &differs, err);
    behind_free(behind);
    /* A file that changes right now is neither the old base nor a new one. */
    pf_error e;
    if ((rc == PF_OK || differs) && pf_checkpoint_verify(comp->ckpt, &e)) {
        if (err)
            *err = e;
        return e.code;
    }
    if (differs)
        return base_distrust(s, comp, opts, err);
    if (rc == PF_OK && !digest_eq(stamp, base_stamp(comp->ckpt)))
        return err_set(err, PF_E_CHANGED, "base '%s' was touched while it was read",
                       comp->ckpt->path);
    if (rc == PF_E_MISMATCH) { /* not the base: the layer file is not what the manifest says */
        rc = PF_E_FORMAT;
        if (err)
            err->code = rc;
    }
    if (rc)
        return rc;
    if (!store_is_writable(s) || manifest_write(s, comp, NULL, m, err) != PF_OK)
        proof_add(s, comp); /* known to this process at least */
    return PF_OK;
}

int overlay_recheck(struct overlay_store *s, const struct pf_composition *comp,
                    const struct overlay_build_opts *opts, pf_error *err)
{
    struct json *m = NULL;
    struct file_lock lock = {.fd = -1};
    if (!ckpt_content_id_holds(comp->ckpt, comp->base_id))
        return err_set(err, PF_E_MISMATCH,
                       "base '%s' is not the one that overlay %s was made from: its content id has "
                       "the digests of all tensors since; set the composition again",
                       comp->ckpt->path, comp->digest_hex);
    int rc = store_is_writable(s) ? entry_lock(s, comp->digest, "build", false, &lock, err) : PF_OK;
    if (rc == PF_OK)
        rc = manifest_read(s, comp->digest, &m, err);
    if (rc == PF_OK)
        rc = manifest_check(m, comp, err);
    if (rc == PF_OK)
        rc = recheck(s, comp, m, opts, err);
    json_free(m);
    file_lock_release(&lock);
    if (rc == PF_E_FORMAT) /* of no use to anybody: as when adopting */
        (void)overlay_evict(s, comp->digest, NULL);
    return rc;
}

/* ------------------------------------------------------------------------------------------ verifying */

/* The checkpoint that the manifest names, if it still is what it was. */
static enum overlay_base_state open_base(const struct json *m, struct pf_checkpoint **out)
{
    const char *path = json_z(json_get(m, "base_path"));
    struct digest id, want;
    const char *hex = json_z(json_get(m, "base_id"));
    if (!path || pf_checkpoint_open(path, NULL, out, NULL))
        return OVERLAY_BASE_ABSENT;
    int rc = PF_OK;
    if (json_bool(json_get(m, "base_id_is_refined")))
        rc = ckpt_content_id_refine(*out, NULL, NULL, NULL);
    if (rc == PF_OK)
        rc = ckpt_content_id(*out, &id, NULL);
    if (rc == PF_OK && hex && digest_parse(hex, &want) && digest_eq(id, want))
        return OVERLAY_BASE_PROVED;
    pf_checkpoint_close(*out);
    *out = NULL;
    return OVERLAY_BASE_REPLACED;
}

int overlay_verify_entry(struct overlay_store *s, struct digest digest,
                         enum overlay_base_state *out_base, pf_error *err)
{
    struct json *m = NULL;
    struct pf_checkpoint *base = NULL;
    struct file_lock lock = {.fd = -1};
    char hex[DIGEST_HEX_LEN + 1];
    digest_hex(digest, hex);
    (void)entry_lock(s, digest, "use", true, &lock, NULL); /* so that it is not evicted meanwhile */
    int rc = manifest_read(s, digest, &m, err);
    if (rc == PF_E_NOTFOUND)
        (void)err_set(err, rc, "no complete overlay '%s' in cache '%s'", hex, s->dir);
    if (rc) {
        file_lock_release(&lock);
        return rc;
    }
    enum overlay_base_state state = open_base(m, &base);
    const struct json *layers = json_get(m, "layers");
    if (!str_eqz(json_str(json_get(m, "composition")), hex) || json_len(layers) == 0)
        rc = err_set(err, PF_E_FORMAT, "the manifest of overlay '%s' is not its own", hex);
    for (size_t i = 0; rc == PF_OK && i < json_len(layers); i++) {
        const char *name = json_z(json_get(json_at(layers, i), "file"));
        const char *header = json_z(json_get(json_at(layers, i), "header"));
        rc = name && header && !strchr(name, '/')
                 ? layer_file_verify_alone(s, digest, name, header, base, err)
                 : err_set(err, PF_E_FORMAT, "the manifest of overlay '%s' is damaged", hex);
    }
    if (rc == PF_OK)
        *out_base = state;
    pf_checkpoint_close(base);
    file_lock_release(&lock);
    json_free(m);
    return rc;
}
