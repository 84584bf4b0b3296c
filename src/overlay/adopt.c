/*
 * Adopting an overlay: opening a complete entry, proving that it is what the composition asks for, and handing its mappings out.
 * A shared lock is held as long as the mappings live, so that no process evicts what another one reads. What cannot be proved is
 * not used; the caller rebuilds.
 */
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "base/proc.h"
#include "overlay/overlay_int.h"

struct overlay {
    _Atomic uint32_t n_refs;
    struct file_lock lock;
    uint32_t n_layers;
    struct st_file **files;     /* per layer of the checkpoint; NULL: nothing changed there */
    struct layer_bytes *layers; /* per layer */
};

void overlay_ref(struct overlay *o)
{
    atomic_fetch_add_explicit(&o->n_refs, 1, memory_order_relaxed);
}

void overlay_unref(struct overlay *o)
{
    /* acq_rel: the last owner must see everything that the others did with the object. */
    if (!o || atomic_fetch_sub_explicit(&o->n_refs, 1, memory_order_acq_rel) != 1)
        return;
    for (uint32_t i = 0; i < o->n_layers; i++) {
        if (o->files)
            st_close(o->files[i]);
        /* The array is ours; the struct names it const because nobody may change it meanwhile. */
        if (o->layers)
            mem_free((void *)(uintptr_t)o->layers[i].p);
    }
    mem_free(o->files);
    mem_free(o->layers);
    file_lock_release(&o->lock);
    mem_free(o);
}

bool overlay_is_whole(const struct overlay *o)
{
    for (uint32_t i = 0; i < o->n_layers; i++)
        if (o->files[i] &&
            file_map_check(st_map(o->files[i]), st_path(o->files[i]), NULL) == PF_E_TRUNCATED)
            return false;
    return true;
}

const struct layer_bytes *overlay_layer(const struct overlay *o, uint32_t i_layer)
{
    return i_layer < o->n_layers && o->files[i_layer] ? &o->layers[i_layer] : NULL;
}

static int place_layer(struct overlay *o, const struct pf_composition *comp,
                       const struct layer_targets *lt, struct st_file *f, pf_error *err)
{
    const struct ckpt_layer *layer = &comp->ckpt->layers[lt->i_layer];
    const uint8_t **p = mem_calloc(layer->n_tensors, sizeof *p);
    if (!p)
        return err_nomem(err, layer->n_tensors * sizeof *p, "an overlay");
    for (size_t i = 0; i < lt->n; i++)
        p[comp->i_tensors[lt->i_target0 + i] - layer->i_tensor0] = st_data(f, st_tensor(f, i));
    o->files[lt->i_layer] = f;
    o->layers[lt->i_layer] = (struct layer_bytes){.kind = PLACE_OVERLAY, .p = p, .map = st_map(f)};
    return PF_OK;
}

/* *io_block: number of the layer's first block within the entry. */
static int adopt_layer(struct overlay_store *s, struct overlay *o,
                       const struct pf_composition *comp, const struct layer_targets *lt,
                       const struct json *m, const struct sampling *some, uint64_t *io_block,
                       pf_error *err)
{
    struct st_file *f = NULL;
    struct layer_digests d = {0};
    int rc = layer_open_proved(s, comp, lt, m, &f, &d, err);
    if (rc)
        return rc;
    rc = layer_file_verify(f, &d, some, *io_block, err);
    *io_block += d.n_merged;
    if (rc == PF_OK)
        rc = place_layer(o, comp, lt, f, err);
    if (rc)
        st_close(f);
    layer_digests_release(&d);
    return rc;
}

/* *out_bad: the layer that could not be proved. */
static int adopt_layers(struct overlay_store *s, struct overlay *o,
                        const struct pf_composition *comp, const struct json *m,
                        const struct sampling *some, uint32_t *out_bad, pf_error *err)
{
    struct layer_targets lt;
    uint64_t i_block = 0;
    int rc = PF_OK;
    o->n_layers = comp->ckpt->n_layers;
    o->files = mem_calloc(o->n_layers + 1, sizeof(struct st_file *));
    o->layers = mem_calloc(o->n_layers + 1, sizeof *o->layers);
    if (!o->files || !o->layers)
        return err_nomem(err, o->n_layers * sizeof *o->layers, "an overlay");
    for (size_t next = 0; rc == PF_OK && layer_targets_next(comp, &next, &lt);) {
        *out_bad = lt.i_layer;
        rc = adopt_layer(s, o, comp, &lt, m, some, &i_block, err);
    }
    return rc;
}

static struct sampling draw_blocks(const struct pf_composition *comp, uint64_t phase)
{
    uint64_t n = 0, n_bytes = 0;
    for (size_t i = 0; i < comp->n_targets; i++) {
        n += n_blocks(target_bytes(&comp->targets[i]));
        n_bytes += target_bytes(&comp->targets[i]);
    }
    return sampling_of(n, n_bytes, phase);
}

/* Evicts what cannot be proved. When some process still has it mapped, only manifest and bad file lose their names: its mapping lives on. */
static void set_aside(struct overlay_store *s, const struct pf_composition *comp, uint32_t i_bad)
{
    if (!store_is_writable(s) || overlay_evict(s, comp->digest, NULL) == PF_OK)
        return;
    struct file_lock build = {.fd = -1};
    char *name = layer_file_name(i_bad);
    char *manifest = entry_file(s, comp->digest, MANIFEST_NAME),
         *bad = name ? entry_file(s, comp->digest, name) : NULL;
    if (manifest && bad && entry_lock(s, comp->digest, "build", false, &build, NULL) == PF_OK) {
        (void)unlink(manifest); /* what stays is found again by the next adoption */
        (void)unlink(bad);
    }
    file_lock_release(&build);
    mem_free(bad);
    mem_free(manifest);
    mem_free(name);
}

static int adopt(struct overlay_store *s, struct overlay *o, const struct pf_composition *comp,
                 const struct sampling *some, uint32_t *out_bad, pf_error *err)
{
    struct json *m = NULL;
    int rc = entry_lock(s, comp->digest, "use", true, &o->lock, err);
    if (rc == PF_E_BUSY) /* only an eviction holds it against us */
        return err_set(err, PF_E_NOTFOUND, "overlay %s is being evicted", comp->digest_hex);
    if (rc && store_is_writable(s))
        return rc;
    /* Read-only and no lock file: evicting it elsewhere takes the names away, not what we have mapped. */
    rc = manifest_read(s, comp->digest, &m, err);
    if (rc == PF_OK)
        rc = manifest_check(m, comp, err);
    if (rc == PF_OK)
        rc = manifest_check_stamps(s, m, comp, err);
    if (rc == PF_OK)
        rc = adopt_layers(s, o, comp, m, some, out_bad, err);
    json_free(m);
    return rc;
}

int overlay_adopt_phase(struct overlay_store *s, const struct pf_composition *comp,
                        enum overlay_verify verify, uint64_t phase, struct overlay **out,
                        pf_error *err)
{
    char *path = entry_file(s, comp->digest, MANIFEST_NAME);
    bool is_there = path && file_kind(path) != FILE_ABSENT;
    mem_free(path);
    if (!is_there || comp->n_targets == 0) /* no lock file for what never was */
        return err_set(err, PF_E_NOTFOUND, "no complete overlay %s in cache '%s'", comp->digest_hex,
                       s->dir);
    struct overlay *o = mem_calloc(1, sizeof *o);
    if (!o)
        return err_nomem(err, sizeof *o, "an overlay");
    struct sampling some = draw_blocks(comp, phase);
    uint32_t i_bad = 0;
    atomic_init(&o->n_refs, 1);
    o->lock.fd = -1;
    int rc = adopt(s, o, comp, verify == OVERLAY_VERIFY_FULL ? NULL : &some, &i_bad, err);
    if (rc) {
        overlay_unref(o);
        if (rc == PF_E_FORMAT || rc == PF_E_MISMATCH)
            set_aside(s, comp, i_bad);
        return rc;
    }
    touch_used(s, comp->digest);
    *out = o;
    return PF_OK;
}

int overlay_adopt(struct overlay_store *s, const struct pf_composition *comp,
                  enum overlay_verify verify, struct overlay **out, pf_error *err)
{
    /* The clock is a draw, spread over all phases. */
    uint64_t now[2] = {clock_ns(), (uint64_t)getpid()};
    return overlay_adopt_phase(s, comp, verify, hash_bytes(now, sizeof now).lo, out, err);
}
