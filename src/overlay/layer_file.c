/*
 * One layer's overlay file: which tensors it holds, in what order, and the digests by which it proves itself. The header
 * carries the digest of every 4 MiB block of merged bytes and of the base bytes that they were made from, as text of a length
 * that is known before the first byte is written: the header is written last, over a hole of its own size.
 */
#include <stdio.h>
#include <string.h>

#include "overlay/overlay_int.h"
#include "tensor/dtype.h"

#define META_COMPOSITION "pageflip.composition"
#define META_COMPONENT   "pageflip.component"
#define META_LAYER       "pageflip.layer"
#define META_MERGED      "pageflip.blocks.merged"
#define META_BASE        "pageflip.blocks.base"
#define META_STAMP       "pageflip.base.stamp"

#define SAMPLE_RATE 64 /* one block of so many, */
#define SAMPLE_MIN  8  /* but no fewer than this, */
#define SAMPLE_MAX  64 /* and no more, */
/* and all where that is no more bytes than SAMPLE_MIN whole blocks: small tensors have short ones. */
#define SAMPLE_ALL_BYTES (SAMPLE_MIN * (uint64_t)HASH_BLOCK_BYTES)

bool layer_targets_next(const struct pf_composition *comp, size_t *io_next,
                        struct layer_targets *out)
{
    size_t i = *io_next;
    if (i >= comp->n_targets)
        return false;
    uint32_t i_layer = comp->ckpt->tensors[comp->i_tensors[i]].i_layer;
    size_t end = i;
    while (end < comp->n_targets && comp->ckpt->tensors[comp->i_tensors[end]].i_layer == i_layer)
        end++;
    *out = (struct layer_targets){.i_layer = i_layer, .i_target0 = i, .n = end - i};
    *io_next = end;
    return true;
}

size_t n_blocks(uint64_t n_bytes)
{
    return (size_t)((n_bytes + HASH_BLOCK_BYTES - 1) / HASH_BLOCK_BYTES);
}

uint64_t target_bytes(const struct merge_target *t)
{
    return (uint64_t)t->n_rows * (uint64_t)t->n_cols * dtype_size(t->out_dtype);
}

static uint64_t target_base_bytes(const struct merge_target *t)
{
    return (uint64_t)t->n_rows * (uint64_t)t->n_cols * dtype_size(t->dtype);
}

struct base_block find_base_block(const struct pf_composition *comp, const struct layer_targets *lt,
                                  size_t i)
{
    size_t i_merged0 = 0;
    for (size_t k = 0;; k++) {
        const struct merge_target *t = &comp->targets[lt->i_target0 + k];
        uint64_t all = target_base_bytes(t), off = (uint64_t)i * HASH_BLOCK_BYTES;
        if (i < n_blocks(all))
            return (struct base_block){
                .target = t,
                .i_tensor = k,
                .off = off,
                .n_bytes = all - off < HASH_BLOCK_BYTES ? (size_t)(all - off) : HASH_BLOCK_BYTES,
                .i_merged0 = i_merged0,
            };
        i -= n_blocks(all);
        i_merged0 += n_blocks(target_bytes(t));
    }
}

int layer_digests_new(const struct pf_composition *comp, const struct layer_targets *lt,
                      struct layer_digests *out, pf_error *err)
{
    struct layer_digests d = {0};
    for (size_t i = 0; i < lt->n; i++) {
        d.n_merged += n_blocks(target_bytes(&comp->targets[lt->i_target0 + i]));
        d.n_base += n_blocks(target_base_bytes(&comp->targets[lt->i_target0 + i]));
    }
    d.merged = mem_calloc(d.n_merged + 1, sizeof *d.merged);
    d.base = mem_calloc(d.n_base + 1, sizeof *d.base);
    if (!d.merged || !d.base) {
        layer_digests_release(&d);
        return err_nomem(err, d.n_merged * sizeof *d.merged, "block digests");
    }
    *out = d;
    return PF_OK;
}

void layer_digests_release(struct layer_digests *d)
{
    mem_free(d->merged);
    mem_free(d->base);
    *d = (struct layer_digests){0};
}

static int add_digests(struct st_layout *l, const char *key, const struct digest *d, size_t n,
                       pf_error *err)
{
    struct strbuf text;
    strbuf_init(&text);
    for (size_t i = 0; i < n; i++) {
        char hex[DIGEST_HEX_LEN + 1];
        digest_hex(d[i], hex);
        strbuf_add(&text, hex, DIGEST_HEX_LEN);
    }
    int rc = strbuf_ok(&text)
                 ? st_layout_meta(l, str_of(key), (struct str){strbuf_z(&text), text.n}, err)
                 : err_nomem(err, n * DIGEST_HEX_LEN, "block digests");
    strbuf_release(&text);
    return rc;
}

static int add_stamp(struct st_layout *l, const struct pf_composition *comp, pf_error *err)
{
    char hex[DIGEST_HEX_LEN + 1];
    digest_hex(base_stamp(comp->ckpt), hex);
    return st_layout_meta(l, str_of(META_STAMP), str_of(hex), err);
}

int layer_header(const struct pf_composition *comp, const struct layer_targets *lt,
                 const struct layer_digests *d, struct strbuf *out_header,
                 struct st_layout **out_layout, pf_error *err)
{
    const struct ckpt_layer *layer = &comp->ckpt->layers[lt->i_layer];
    struct st_layout *l = NULL;
    int rc = st_layout_new(&l, err);
    if (rc)
        return rc;
    rc = st_layout_meta(l, str_of(META_COMPOSITION), str_of(comp->digest_hex), err);
    if (rc == PF_OK)
        rc = st_layout_meta(l, str_of(META_COMPONENT),
                            str_of(comp->ckpt->components[layer->i_component].name), err);
    if (rc == PF_OK)
        rc = st_layout_meta(l, str_of(META_LAYER), str_of(layer->name), err);
    if (rc == PF_OK)
        rc = add_stamp(l, comp, err);
    if (rc == PF_OK)
        rc = add_digests(l, META_MERGED, d->merged, d->n_merged, err);
    if (rc == PF_OK)
        rc = add_digests(l, META_BASE, d->base, d->n_base, err);
    for (size_t i = 0; rc == PF_OK && i < lt->n; i++) {
        const struct ckpt_tensor *t = &comp->ckpt->tensors[comp->i_tensors[lt->i_target0 + i]];
        rc = st_layout_tensor(l, t->name, comp->targets[lt->i_target0 + i].out_dtype, &t->shape,
                              err);
    }
    if (rc == PF_OK)
        rc = st_layout_finish(l, OVERLAY_ALIGN, out_header, err);
    if (rc || !out_layout)
        st_layout_free(l);
    else
        *out_layout = l;
    return rc;
}

bool file_is_foreign(const char *path)
{
    enum file_kind kind = file_kind(path);
    return kind == FILE_DIRECTORY || kind == FILE_OTHER;
}

/* Whatever the code was (cut short, changed, gone): for an overlay it means that the file cannot be proved. */
int err_in_format(pf_error *err, const char *path)
{
    if (err)
        err->code = PF_E_FORMAT;
    return err_prefix(err, PF_E_FORMAT, "overlay '%s' cannot be used: ", path);
}

static int parse_digests(const struct st_file *f, const char *key, struct digest *out, size_t n,
                         pf_error *err)
{
    struct str text;
    if (!st_meta_find(f, key, &text) || text.n != n * DIGEST_HEX_LEN)
        return err_set(err, PF_E_FORMAT, "overlay '%s' carries %zu bytes of '%s', expected %zu",
                       st_path(f), st_meta_find(f, key, &text) ? text.n : (size_t)0, key,
                       n * DIGEST_HEX_LEN);
    for (size_t i = 0; i < n; i++) {
        char hex[DIGEST_HEX_LEN + 1] = {0};
        memcpy(hex, text.p + i * DIGEST_HEX_LEN, DIGEST_HEX_LEN);
        if (!digest_parse(hex, &out[i]))
            return err_set(err, PF_E_FORMAT, "overlay '%s': digest %zu of '%s' is not hexadecimal",
                           st_path(f), i, key);
    }
    return PF_OK;
}

int layer_file_check(const struct pf_composition *comp, const struct layer_targets *lt,
                     const struct st_file *f, struct layer_digests *d, pf_error *err)
{
    struct str composition;
    if (!st_meta_find(f, META_COMPOSITION, &composition) || !str_eqz(composition, comp->digest_hex))
        return err_set(err, PF_E_MISMATCH, "overlay '%s' does not belong to composition %s",
                       st_path(f), comp->digest_hex);
    if (st_n_tensors(f) != lt->n)
        return err_set(err, PF_E_MISMATCH, "overlay '%s' holds %zu tensors, expected %zu",
                       st_path(f), st_n_tensors(f), lt->n);
    for (size_t i = 0; i < lt->n; i++) {
        const struct ckpt_tensor *t = &comp->ckpt->tensors[comp->i_tensors[lt->i_target0 + i]];
        const struct st_tensor *o = st_tensor(f, i);
        int32_t dtype = comp->targets[lt->i_target0 + i].out_dtype;
        char have[128], want[128];
        if (!str_eq(o->name, t->name) || o->dtype != dtype || !shape_eq(&o->shape, &t->shape))
            return err_set(err, PF_E_MISMATCH,
                           "overlay '%s' holds tensor '%.*s' %s %s where '%s' %s %s is expected",
                           st_path(f), (int)o->name.n, o->name.p, pf_dtype_name(o->dtype),
                           shape_text(&o->shape, have, sizeof have), t->name.p,
                           pf_dtype_name(dtype), shape_text(&t->shape, want, sizeof want));
    }
    struct str stamp;
    char now[DIGEST_HEX_LEN + 1];
    digest_hex(base_stamp(comp->ckpt), now);
    d->is_stamp_known = st_meta_find(f, META_STAMP, &stamp) && str_eqz(stamp, now);
    int rc = parse_digests(f, META_MERGED, d->merged, d->n_merged, err);
    return rc ? rc : parse_digests(f, META_BASE, d->base, d->n_base, err);
}

struct sampling sampling_of(uint64_t n, uint64_t n_bytes, uint64_t phase)
{
    uint64_t k = (n + SAMPLE_RATE - 1) / SAMPLE_RATE;
    k = k < SAMPLE_MIN ? SAMPLE_MIN : k > SAMPLE_MAX ? SAMPLE_MAX : k;
    k = n_bytes <= SAMPLE_ALL_BYTES ? n : k;
    return (struct sampling){.n = n, .k = k < n ? k : n, .phase = n ? phase % n : 0};
}

/*
 * i k + phase walks k times round a ring of n in steps of k, and each round meets the window [0, k) once: k blocks are taken, evenly
 * spread; and i k + phase falls into the window for k of the n phases.
 */
bool sampling_takes(const struct sampling *s, uint64_t i_block)
{
    return (i_block * s->k + s->phase) % s->n < s->k;
}

int layer_file_verify(const struct st_file *f, const struct layer_digests *d,
                      const struct sampling *s, uint64_t i_block0, pf_error *err)
{
    size_t i_block = 0;
    for (size_t i = 0; i < st_n_tensors(f); i++) {
        const struct st_tensor *t = st_tensor(f, i);
        const uint8_t *p = st_data(f, t);
        for (uint64_t off = 0; off < t->n_bytes; off += HASH_BLOCK_BYTES, i_block++) {
            if (s && !sampling_takes(s, i_block0 + i_block))
                continue;
            uint64_t n = t->n_bytes - off < HASH_BLOCK_BYTES ? t->n_bytes - off : HASH_BLOCK_BYTES;
            file_map_fetch(st_map(f), t->off_bytes + off, n);
            if (!digest_eq(hash_bytes(p + off, n), d->merged[i_block]))
                return err_at(err, PF_E_FORMAT, t->off_bytes + off,
                              "overlay '%s': the bytes of tensor '%.*s' at %llu are not those that "
                              "were written; evict the entry",
                              st_path(f), (int)t->name.n, t->name.p,
                              (unsigned long long)(t->off_bytes + off));
        }
    }
    /* Nobody writes to a layer file that has its name: whoever cut or touched it did not do us a favour. */
    return file_map_check(st_map(f), st_path(f), err) ? err_in_format(err, st_path(f)) : PF_OK;
}

struct digest layer_header_digest(const struct st_file *f)
{
    return hash_bytes(st_map(f)->p, (size_t)st_header_bytes(f));
}

/* Opens a file of an entry; its header must be the one that the manifest speaks of. */
static int open_known(struct overlay_store *s, struct digest digest, const char *name,
                      struct digest header, struct st_file **out, pf_error *err)
{
    struct st_file *f = NULL;
    char *path = entry_file(s, digest, name);
    int rc = path ? st_open(path, &f, err) : err_nomem(err, 0, "a path");
    if (rc == PF_E_NOTFOUND || rc == PF_E_TRUNCATED || (rc == PF_E_IO && file_is_foreign(path)))
        rc = err_in_format(err, path);
    if (rc == PF_OK && !digest_eq(header, layer_header_digest(f)))
        rc = err_set(err, PF_E_FORMAT, "the header of overlay '%s' is not the one in its manifest",
                     path);
    mem_free(path);
    if (rc)
        st_close(f);
    else
        *out = f;
    return rc;
}

int layer_open_proved(struct overlay_store *s, const struct pf_composition *comp,
                      const struct layer_targets *lt, const struct json *m, struct st_file **out_f,
                      struct layer_digests *out_d, pf_error *err)
{
    struct st_file *f = NULL;
    struct layer_digests d = {0};
    struct digest header;
    char *name = layer_file_name(lt->i_layer);
    int rc = name ? PF_OK : err_nomem(err, 0, "a path");
    if (rc == PF_OK && !manifest_header(m, name, &header))
        rc = err_set(err, PF_E_FORMAT, "the manifest of overlay %s does not name '%s'",
                     comp->digest_hex, name);
    if (rc == PF_OK)
        rc = open_known(s, comp->digest, name, header, &f, err);
    if (rc == PF_OK)
        rc = layer_digests_new(comp, lt, &d, err);
    if (rc == PF_OK)
        rc = layer_file_check(comp, lt, f, &d, err);
    mem_free(name);
    if (rc) {
        layer_digests_release(&d);
        st_close(f);
        return rc;
    }
    *out_f = f;
    *out_d = d;
    return PF_OK;
}

/* The base tensors behind a layer file, found by name, against the digests that the file carries of them. */
static int verify_base(const struct st_file *f, const struct pf_checkpoint *base, pf_error *err)
{
    struct str text, component;
    size_t at = 0;
    int rc = PF_OK;
    if (!st_meta_find(f, META_BASE, &text) || !st_meta_find(f, META_COMPONENT, &component))
        return err_set(err, PF_E_FORMAT, "overlay '%s' carries no digests of its base", st_path(f));
    int64_t i_component = ckpt_component_find(base, component);
    for (size_t i = 0; rc == PF_OK && i < st_n_tensors(f); i++) {
        const struct st_tensor *o = st_tensor(f, i);
        int64_t i_tensor = i_component < 0 ? -1 : ckpt_find(base, (uint32_t)i_component, o->name);
        if (i_tensor < 0)
            return err_set(err, PF_E_MISMATCH, "base '%s' has no tensor '%.*s' of overlay '%s'",
                           base->path, (int)o->name.n, o->name.p, st_path(f));
        const struct ckpt_tensor *t = &base->tensors[i_tensor];
        for (uint64_t off = 0; rc == PF_OK && off < t->n_bytes; off += HASH_BLOCK_BYTES) {
            uint64_t n = t->n_bytes - off < HASH_BLOCK_BYTES ? t->n_bytes - off : HASH_BLOCK_BYTES;
            char hex[DIGEST_HEX_LEN + 1];
            digest_hex(hash_bytes(t->p + off, n), hex);
            if (text.n - at < DIGEST_HEX_LEN || memcmp(text.p + at, hex, DIGEST_HEX_LEN) != 0)
                rc = err_set(err, PF_E_MISMATCH,
                             "tensor '%s' of base '%s' is not the one that overlay '%s' was made "
                             "from",
                             t->name.p, base->path, st_path(f));
            else
                at += DIGEST_HEX_LEN;
        }
        if (rc == PF_OK)
            rc = ckpt_tensor_guard(base, (uint32_t)i_tensor, err);
    }
    return rc;
}

int layer_file_verify_alone(struct overlay_store *s, struct digest digest, const char *name,
                            const char *header_hex, const struct pf_checkpoint *base, pf_error *err)
{
    struct st_file *f = NULL;
    struct layer_digests d = {0};
    struct digest header;
    if (!digest_parse(header_hex, &header))
        return err_set(err, PF_E_FORMAT, "the manifest's digest of '%s' is not hexadecimal", name);
    int rc = open_known(s, digest, name, header, &f, err);
    if (rc)
        return rc;
    for (size_t i = 0; i < st_n_tensors(f); i++)
        d.n_merged += n_blocks(st_tensor(f, i)->n_bytes);
    if (!(d.merged = mem_calloc(d.n_merged + 1, sizeof *d.merged)))
        rc = err_nomem(err, d.n_merged * sizeof *d.merged, "block digests");
    if (rc == PF_OK)
        rc = parse_digests(f, META_MERGED, d.merged, d.n_merged, err);
    if (rc == PF_OK)
        rc = layer_file_verify(f, &d, NULL, 0, err);
    if (rc == PF_OK && base)
        rc = verify_base(f, base, err);
    layer_digests_release(&d);
    st_close(f);
    return rc;
}

char *layer_file_name(uint32_t i_layer)
{
    struct strbuf b;
    strbuf_init(&b);
    strbuf_addf(&b, "layer-%05u.safetensors", i_layer);
    return strbuf_take(&b);
}
