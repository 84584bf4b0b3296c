/*
 * Adopting an overlay: opening a complete entry, proving that it is what the composition asks for, and handing its mappings out.
 * A shared lock is held as long as the mappings live, so that no process evicts what another one reads. What cannot be proved is
 * not used; the caller rebuilds.
 */
#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>

#include "base/proc.h"
#include "overlay/overlay_int.h"

#define SAMPLE_STRIDE ((size_t)64)
#define SAMPLE_MIN    ((size_t)8)

struct overlay {
    _Atomic uint32_t n_refs;
    struct file_lock lock;
    uint32_t n_layers;
    struct st_file **files;     /* per layer of the checkpoint; NULL: nothing changed there */
    struct layer_bytes *layers; /* per layer */
    uint64_t n_bytes;
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

const struct layer_bytes *overlay_layer(const struct overlay *o, uint32_t i_layer)
{
    return i_layer < o->n_layers && o->files[i_layer] ? &o->layers[i_layer] : NULL;
}

uint64_t overlay_n_bytes(const struct overlay *o)
{
    return o->n_bytes;
}

const struct file_map *overlay_layer_map(const struct overlay *o, uint32_t i_layer)
{
    return i_layer < o->n_layers && o->files[i_layer] ? st_map(o->files[i_layer]) : NULL;
}

/* The manifest's word for a layer file's header; false when it does not name the file. */
static bool manifest_header(const struct json *m, const char *name, struct digest *out)
{
    const struct json *layers = json_get(m, "layers");
    for (size_t i = 0; i < json_len(layers); i++) {
        const struct json *o = json_at(layers, i);
        const char *hex = json_z(json_get(o, "header"));
        if (str_eqz(json_str(json_get(o, "file")), name))
            return hex && digest_parse(hex, out);
    }
    return false;
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
    o->n_bytes += st_map(f)->n_bytes;
    return PF_OK;
}

static int adopt_layer(struct overlay_store *s, struct overlay *o,
                       const struct pf_composition *comp, const struct layer_targets *lt,
                       const struct json *m, enum overlay_verify verify, size_t stride,
                       pf_error *err)
{
    struct st_file *f = NULL;
    struct layer_digests d = {0};
    struct digest want;
    char *name = layer_file_name(lt->i_layer);
    char *path = name ? entry_file(s, comp->digest, name) : NULL;
    int rc = path ? st_open(path, &f, err) : err_nomem(err, 0, "a path");
    if (rc == PF_E_NOTFOUND)
        rc = err_set(err, PF_E_FORMAT, "overlay file '%s' is missing", path);
    if (rc == PF_OK &&
        (!manifest_header(m, name, &want) || !digest_eq(want, layer_header_digest(f))))
        rc = err_set(err, PF_E_FORMAT, "the header of overlay '%s' is not the one in its manifest",
                     path);
    if (rc == PF_OK)
        rc = layer_digests_new(comp, lt, &d, err);
    if (rc == PF_OK)
        rc = layer_file_check(comp, lt, f, &d, err);
    if (rc == PF_OK)
        rc = layer_file_verify(f, &d, verify == OVERLAY_VERIFY_FULL ? 1 : stride,
                               (size_t)clock_ns() / 1000, err);
    if (rc == PF_OK)
        rc = place_layer(o, comp, lt, f, err);
    if (rc)
        st_close(f);
    layer_digests_release(&d);
    mem_free(path);
    mem_free(name);
    return rc;
}

/* Small entries are read whole; big ones one block in 64. */
static size_t sample_stride(const struct pf_composition *comp)
{
    size_t n = 0;
    for (size_t i = 0; i < comp->n_targets; i++)
        n += n_blocks(target_bytes(&comp->targets[i]));
    size_t stride = n / SAMPLE_MIN;
    if (stride < 1)
        stride = 1;
    return stride < SAMPLE_STRIDE ? stride : SAMPLE_STRIDE;
}

static int adopt_layers(struct overlay_store *s, struct overlay *o,
                        const struct pf_composition *comp, const struct json *m,
                        enum overlay_verify verify, pf_error *err)
{
    struct layer_targets lt;
    size_t stride = sample_stride(comp);
    int rc = PF_OK;
    o->n_layers = comp->ckpt->n_layers;
    o->files = mem_calloc(o->n_layers + 1, sizeof(struct st_file *));
    o->layers = mem_calloc(o->n_layers + 1, sizeof *o->layers);
    if (!o->files || !o->layers)
        return err_nomem(err, o->n_layers * sizeof *o->layers, "an overlay");
    for (size_t next = 0; rc == PF_OK && layer_targets_next(comp, &next, &lt);)
        rc = adopt_layer(s, o, comp, &lt, m, verify, stride, err);
    return rc;
}

/* The lock file's mtime is when the entry was last used: the manifest stays as it was written. */
static void touch_used(struct overlay_store *s, struct digest digest)
{
    char *path = entry_lock_path(s, digest, "use");
    if (path)
        (void)utimensat(AT_FDCWD, path, NULL, 0); /* a read-only cache has no last use */
    mem_free(path);
}

int overlay_adopt(struct overlay_store *s, const struct pf_composition *comp,
                  enum overlay_verify verify, struct overlay **out, pf_error *err)
{
    struct json *m = NULL;
    int rc = manifest_read(s, comp->digest, &m, err);
    if (rc)
        return rc;
    struct overlay *o = mem_calloc(1, sizeof *o);
    if (!o) {
        json_free(m);
        return err_nomem(err, sizeof *o, "an overlay");
    }
    atomic_init(&o->n_refs, 1);
    o->lock.fd = -1;
    rc = entry_lock(s, comp->digest, "use", true, &o->lock, err);
    if (rc == PF_OK)
        rc = manifest_check(m, comp, err);
    if (rc == PF_OK)
        rc = manifest_check_stamps(m, comp, err);
    if (rc == PF_OK)
        rc = adopt_layers(s, o, comp, m, verify, err);
    json_free(m);
    if (rc) {
        overlay_unref(o);
        return rc;
    }
    touch_used(s, comp->digest);
    *out = o;
    return PF_OK;
}

/* ------------------------------------------------------------------------------- base under suspicion */

/* The recorded digests of one layer's base tensors against what the base holds now. */
static int recheck_layer(struct overlay_store *s, const struct pf_composition *comp,
                         const struct layer_targets *lt, pf_error *err)
{
    struct st_file *f = NULL;
    struct layer_digests d = {0};
    char *name = layer_file_name(lt->i_layer);
    char *path = name ? entry_file(s, comp->digest, name) : NULL;
    int rc = path ? st_open(path, &f, err) : err_nomem(err, 0, "a path");
    if (rc == PF_OK)
        rc = layer_digests_new(comp, lt, &d, err);
    if (rc == PF_OK)
        rc = layer_file_check(comp, lt, f, &d, err);
    for (size_t i = 0, i_block = 0; rc == PF_OK && i < lt->n; i++) {
        const struct ckpt_tensor *t = &comp->ckpt->tensors[comp->i_tensors[lt->i_target0 + i]];
        for (uint64_t off = 0; rc == PF_OK && off < t->n_bytes; off += HASH_BLOCK_BYTES) {
            uint64_t n = t->n_bytes - off < HASH_BLOCK_BYTES ? t->n_bytes - off : HASH_BLOCK_BYTES;
            if (!digest_eq(hash_bytes(t->p + off, n), d.base[i_block++]))
                rc = err_set(err, PF_E_MISMATCH,
                             "tensor '%s' of base '%s' is not the one that overlay %s was made "
                             "from, although its sampled blocks are",
                             t->name.p, comp->ckpt->path, comp->digest_hex);
        }
        if (rc == PF_OK)
            rc = ckpt_tensor_guard(comp->ckpt, comp->i_tensors[lt->i_target0 + i], err);
    }
    layer_digests_release(&d);
    st_close(f);
    mem_free(path);
    mem_free(name);
    return rc;
}

int overlay_recheck_base(struct overlay_store *s, const struct pf_composition *comp, pf_error *err)
{
    struct json *m = NULL;
    struct layer_targets lt;
    struct file_lock lock = {.fd = -1};
    int rc = manifest_read(s, comp->digest, &m, err);
    if (rc == PF_OK)
        rc = manifest_check(m, comp, err);
    json_free(m);
    if (rc == PF_OK)
        rc = entry_lock(s, comp->digest, "build", false, &lock, err);
    for (size_t next = 0; rc == PF_OK && layer_targets_next(comp, &next, &lt);)
        rc = recheck_layer(s, comp, &lt, err);
    if (rc == PF_OK)
        rc = pf_checkpoint_verify(comp->ckpt, err);
    if (rc == PF_OK)
        rc = manifest_write(s, comp, err);
    file_lock_release(&lock);
    return rc;
}
