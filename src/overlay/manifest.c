/*
 * The manifest of an overlay entry: what was merged, from which base, and the digest of every layer file's header (which in
 * turn carries the digests of its blocks). Written last and atomically: an entry is complete when, and only when, it is there.
 */
#include <math.h>
#include <string.h>
#include <time.h>

#include "overlay/overlay_int.h"

static struct json *json_digest(struct digest d)
{
    char hex[DIGEST_HEX_LEN + 1];
    digest_hex(d, hex);
    return json_new_string(str_of(hex));
}

static struct json *entries_json(const struct pf_composition *comp)
{
    struct json *array = json_new_array();
    for (size_t i = 0; i < comp->n_entries; i++) {
        const struct comp_entry *e = &comp->entries[i];
        struct json *o = json_new_object();
        json_set_z(o, "path", adapter_path(e->adapter));
        json_set(o, "digest", json_digest(adapter_digest(e->adapter)));
        json_set_real(o, "strength", e->strength);
        if (e->has_alpha)
            json_set_real(o, "alpha", e->alpha);
        json_set_z(o, "target", e->target ? e->target : "all");
        json_add(array, o);
    }
    return array;
}

/* The stamps that say whether the base must be looked at again. 64-bit numbers as text: JSON readers lose bits. */
static struct json *stamps_json(const struct pf_checkpoint *ckpt)
{
    struct json *array = json_new_array();
    for (uint32_t i = 0; i < ckpt->n_files; i++) {
        const struct file_stamp *s = &st_map(ckpt->files[i])->stamp;
        struct strbuf b;
        strbuf_init(&b);
        strbuf_addf(&b, "%llu:%llu:%llu:%lld:%lld", (unsigned long long)s->dev,
                    (unsigned long long)s->ino, (unsigned long long)s->n_bytes,
                    (long long)s->mtime_ns, (long long)s->ctime_ns);
        json_add(array, json_new_string(str_of(strbuf_z(&b))));
        strbuf_release(&b);
    }
    return array;
}

static int layers_json(struct overlay_store *s, const struct pf_composition *comp,
                       struct json **out, uint64_t *out_n_bytes, pf_error *err)
{
    struct json *array = json_new_array();
    struct layer_targets lt;
    uint64_t n_bytes = 0;
    int rc = PF_OK;
    for (size_t next = 0; rc == PF_OK && layer_targets_next(comp, &next, &lt);) {
        char *name = layer_file_name(lt.i_layer);
        char *path = name ? entry_file(s, comp->digest, name) : NULL;
        struct st_file *f = NULL;
        rc = path ? st_open(path, &f, err) : err_nomem(err, 0, "a path");
        if (rc == PF_OK) {
            struct json *o = json_new_object();
            json_set_z(o, "file", name);
            json_set(o, "header", json_digest(layer_header_digest(f)));
            json_add(array, o);
            n_bytes += st_map(f)->n_bytes;
        }
        st_close(f);
        mem_free(path);
        mem_free(name);
    }
    if (rc) {
        json_free(array);
        return rc;
    }
    *out = array;
    *out_n_bytes = n_bytes;
    return PF_OK;
}

static int write_json(const char *path, const struct json *m, pf_error *err)
{
    struct strbuf text;
    strbuf_init(&text);
    int rc = json_write(m, 1, &text, err);
    if (rc == PF_OK)
        rc = file_write_atomic(path, strbuf_z(&text), text.n, err);
    strbuf_release(&text);
    return rc;
}

int manifest_write(struct overlay_store *s, const struct pf_composition *comp, pf_error *err)
{
    struct digest base;
    struct json *layers = NULL;
    uint64_t n_bytes = 0;
    int rc = ckpt_content_id(comp->ckpt, &base, err);
    if (rc == PF_OK)
        rc = layers_json(s, comp, &layers, &n_bytes, err);
    if (rc)
        return rc;
    struct json *m = json_new_object();
    json_set_int(m, "version", OVERLAY_FORMAT_VERSION);
    json_set_int(m, "arithmetic", ARITHMETIC_VERSION);
    json_set(m, "composition", json_digest(comp->digest));
    json_set_z(m, "merge_dtype", comp->merge_dtype == PF_MERGE_F32 ? "f32" : "base");
    json_set(m, "adapters", entries_json(comp));
    json_set(m, "base_id", json_digest(base));
    json_set_z(m, "base_path", comp->ckpt->path);
    json_set(m, "base_stamps", stamps_json(comp->ckpt));
    json_set_int(m, "bytes", (int64_t)n_bytes);
    json_set(m, "layers", layers);
    char *path = entry_file(s, comp->digest, "manifest.json");
    rc = path ? write_json(path, m, err) : err_nomem(err, 0, "a path");
    mem_free(path);
    json_free(m);
    return rc;
}

int manifest_read(struct overlay_store *s, struct digest digest, struct json **out, pf_error *err)
{
    char *path = entry_file(s, digest, "manifest.json");
    if (!path)
        return err_nomem(err, 0, "a path");
    int rc = json_parse_file(path, MANIFEST_BYTES_MAX, out, err);
    mem_free(path);
    return rc;
}

static bool digest_is(const struct json *m, const char *key, struct digest want)
{
    char hex[DIGEST_HEX_LEN + 1];
    digest_hex(want, hex);
    return str_eqz(json_str(json_get(m, key)), hex);
}

int manifest_check(const struct json *m, const struct pf_composition *comp, pf_error *err)
{
    struct digest base;
    int rc = ckpt_content_id(comp->ckpt, &base, err);
    if (rc)
        return rc;
    if (json_int(json_get(m, "version")) != OVERLAY_FORMAT_VERSION ||
        json_int(json_get(m, "arithmetic")) != ARITHMETIC_VERSION)
        return err_set(err, PF_E_MISMATCH,
                       "overlay %s was written by another version (format %lld, arithmetic %lld)",
                       comp->digest_hex, (long long)json_int(json_get(m, "version")),
                       (long long)json_int(json_get(m, "arithmetic")));
    if (!digest_is(m, "composition", comp->digest) || !digest_is(m, "base_id", base))
        return err_set(err, PF_E_MISMATCH,
                       "the manifest of overlay %s names another composition or base",
                       comp->digest_hex);
    return PF_OK;
}

int manifest_check_stamps(const struct json *m, const struct pf_composition *comp, pf_error *err)
{
    struct json *now = stamps_json(comp->ckpt);
    const struct json *then = json_get(m, "base_stamps");
    bool is_same = json_len(now) == json_len(then);
    for (size_t i = 0; is_same && i < json_len(now); i++)
        is_same = str_eq(json_str(json_at(now, i)), json_str(json_at(then, i)));
    json_free(now);
    if (is_same)
        return PF_OK;
    return err_set(err, PF_E_CHANGED,
                   "the files of base '%s' were copied, touched or replaced since overlay %s was "
                   "built: their bytes must be checked before it is used",
                   comp->ckpt->path, comp->digest_hex);
}
