/*
 * The manifest of an overlay entry: what was merged, from which base, and the digest of every layer file's header (which in
 * turn carries the digests of its blocks). Written last and atomically: an entry is complete when, and only when, it is there.
 * It ends with its own digest, so that no byte of an entry is beyond proof. Never names what it did not see on disk.
 */
#include <string.h>

#include "overlay/overlay_int.h"

/* Places where the same base was seen: two copies in turn are not read again and again */
#define N_STAMPS_MAX 8
#define SEAL_KEY     "\"digest\": \""

static struct json *json_digest(struct digest d)
{
    char hex[DIGEST_HEX_LEN + 1];
    digest_hex(d, hex);
    return json_new_string(str_of(hex));
}

static bool digest_is(const struct json *v, struct digest want)
{
    char hex[DIGEST_HEX_LEN + 1];
    digest_hex(want, hex);
    return str_eqz(json_str(v), hex);
}

/* ----------------------------------------------------------------------------------- sealed documents */

/* The hex digits of the last "digest" in the text, or NULL. */
static char *find_seal(char *p, size_t n)
{
    const size_t n_key = strlen(SEAL_KEY), n_all = n_key + DIGEST_HEX_LEN;
    for (size_t i = n < n_all ? 0 : n - n_all + 1; i-- > 0;)
        if (memcmp(p + i, SEAL_KEY, n_key) == 0)
            return p + i + n_key;
    return NULL;
}

int json_write_sealed(const char *path, struct json *m, pf_error *err)
{
    struct strbuf text;
    char hex[DIGEST_HEX_LEN + 1];
    strbuf_init(&text);
    json_set(m, "digest", json_digest((struct digest){0}));
    int rc = json_write(m, 1, &text, err);
    char *seal = rc == PF_OK ? find_seal(text.p, text.n) : NULL;
    if (rc == PF_OK && !seal)
        rc = err_nomem(err, text.n, path); /* the setters fail quietly */
    if (rc == PF_OK) {
        digest_hex(hash_bytes(text.p, text.n), hex);
        memcpy(seal, hex, DIGEST_HEX_LEN);
        rc = file_write_atomic(path, text.p, text.n, err);
    }
    strbuf_release(&text);
    return rc;
}

int json_read_sealed(const char *path, struct json **out, pf_error *err)
{
    char *p = NULL;
    size_t n = 0;
    struct digest want;
    int rc = file_read_all(path, MANIFEST_BYTES_MAX, &p, &n, err);
    if (rc == PF_E_RANGE)
        rc = err_set(err, PF_E_FORMAT, "'%s' is too large to be ours", path);
    if (rc == PF_E_IO && file_is_foreign(path))
        rc = err_in_format(err, path);
    if (rc)
        return rc;
    char hex[DIGEST_HEX_LEN + 1] = {0}, *seal = find_seal(p, n);
    if (seal) { /* the digest was made with zeros in its place */
        memcpy(hex, seal, DIGEST_HEX_LEN);
        memset(seal, '0', DIGEST_HEX_LEN);
    }
    if (!digest_parse(hex, &want) || !digest_eq(want, hash_bytes(p, n)))
        rc = err_set(err, PF_E_FORMAT, "'%s' is damaged: its digest does not fit its %zu bytes",
                     path, n);
    else
        rc = json_parse(p, n, path, out, err);
    mem_free(p);
    return rc;
}

/* -------------------------------------------------------------------------------------------- writing */

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

struct digest base_stamp(const struct pf_checkpoint *ckpt)
{
    struct { /* no padding: hashed as it lies */
        uint64_t n_before[2], v[5];
    } link = {0};
    struct digest d = {0};
    for (uint32_t i = 0; i < ckpt->n_files; i++) {
        const struct file_stamp s = ckpt_stamp(ckpt, i);
        link.n_before[0] = d.hi;
        link.n_before[1] = d.lo;
        link.v[0] = s.dev;
        link.v[1] = s.ino;
        link.v[2] = s.n_bytes;
        link.v[3] = (uint64_t)s.mtime_ns;
        link.v[4] = (uint64_t)s.ctime_ns;
        d = hash_bytes(&link, sizeof link);
    }
    return d;
}

static struct json *stamps_json(const struct pf_composition *comp, const struct json *old)
{
    struct json *array = json_new_array();
    struct digest now = base_stamp(comp->ckpt);
    json_add(array, json_digest(now));
    const struct json *known = json_get(old, "base_stamps");
    for (size_t i = 0; i < json_len(known) && json_len(array) < N_STAMPS_MAX; i++)
        if (!digest_is(json_at(known, i), now))
            json_add(array, json_new_string(json_str(json_at(known, i))));
    return array;
}

static int layers_json(const struct pf_composition *comp, const struct digest *headers,
                       const struct json *old, struct json *array, pf_error *err)
{
    struct layer_targets lt;
    size_t i = 0;
    for (size_t next = 0; layer_targets_next(comp, &next, &lt); i++) {
        struct digest header = {0};
        char *name = layer_file_name(lt.i_layer);
        if (!name)
            return err_nomem(err, 0, "a path");
        bool is_known = headers || manifest_header(old, name, &header);
        struct json *o = json_new_object();
        json_set_z(o, "file", name);
        json_set(o, "header", json_digest(headers ? headers[i] : header));
        json_add(array, o);
        mem_free(name);
        if (!is_known)
            return err_set(err, PF_E_FORMAT, "the manifest of overlay %s lacks a layer",
                           comp->digest_hex);
    }
    return PF_OK;
}

int manifest_write(struct overlay_store *s, const struct pf_composition *comp,
                   const struct digest *headers, const struct json *old, pf_error *err)
{
    struct json *layers = json_new_array();
    int rc = layers_json(comp, headers, old, layers, err);
    if (rc) {
        json_free(layers);
        return rc;
    }
    struct json *m = json_new_object();
    json_set_int(m, "version", OVERLAY_FORMAT_VERSION);
    json_set_int(m, "arithmetic", ARITHMETIC_VERSION);
    json_set(m, "composition", json_digest(comp->digest));
    json_set_z(m, "merge_dtype", comp->merge_dtype == PF_MERGE_F32 ? "f32" : "base");
    json_set(m, "adapters", entries_json(comp));
    json_set(m, "base_id", json_digest(comp->base_id));
    json_set_bool(m, "base_id_is_refined", ckpt_content_id_is_refined(comp->ckpt));
    json_set_z(m, "base_path", comp->ckpt->path);
    json_set(m, "base_stamps", stamps_json(comp, old));
    json_set(m, "layers", layers);
    char *path = entry_file(s, comp->digest, MANIFEST_NAME);
    rc = path ? json_write_sealed(path, m, err) : err_nomem(err, 0, "a path");
    mem_free(path);
    json_free(m);
    return rc;
}

/* ------------------------------------------------------------------------------------------- reading */

int manifest_read(struct overlay_store *s, struct digest digest, struct json **out, pf_error *err)
{
    char *path = entry_file(s, digest, MANIFEST_NAME);
    if (!path)
        return err_nomem(err, 0, "a path");
    int rc = json_read_sealed(path, out, err);
    mem_free(path);
    return rc;
}

bool manifest_header(const struct json *m, const char *name, struct digest *out)
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

int manifest_check(const struct json *m, const struct pf_composition *comp, pf_error *err)
{
    if (json_int(json_get(m, "version")) != OVERLAY_FORMAT_VERSION ||
        json_int(json_get(m, "arithmetic")) != ARITHMETIC_VERSION)
        return err_set(err, PF_E_MISMATCH,
                       "overlay %s was written by another version (format %lld, arithmetic %lld)",
                       comp->digest_hex, (long long)json_int(json_get(m, "version")),
                       (long long)json_int(json_get(m, "arithmetic")));
    if (!digest_is(json_get(m, "composition"), comp->digest) ||
        !digest_is(json_get(m, "base_id"), comp->base_id))
        return err_set(err, PF_E_MISMATCH,
                       "the manifest of overlay %s names another composition or base",
                       comp->digest_hex);
    return PF_OK;
}

/* ------------------------------------------------------------------------------- stamps of the base */

static struct digest proof_of(const struct pf_composition *comp)
{
    struct digest d[2] = {comp->digest, base_stamp(comp->ckpt)};
    return hash_bytes(d, sizeof d);
}

void proof_add(struct overlay_store *s, const struct pf_composition *comp)
{
    pthread_mutex_lock(&s->mu);
    s->proofs[s->n_proofs++ % N_PROOFS] = proof_of(comp);
    pthread_mutex_unlock(&s->mu);
}

static bool is_proved(struct overlay_store *s, const struct pf_composition *comp)
{
    struct digest want = proof_of(comp);
    bool found = false;
    pthread_mutex_lock(&s->mu);
    for (size_t i = 0; i < s->n_proofs && i < N_PROOFS && !found; i++)
        found = digest_eq(s->proofs[i], want);
    pthread_mutex_unlock(&s->mu);
    return found;
}

int manifest_check_stamps(struct overlay_store *s, const struct json *m,
                          const struct pf_composition *comp, pf_error *err)
{
    struct digest now = base_stamp(comp->ckpt);
    const struct json *known = json_get(m, "base_stamps");
    for (size_t i = 0; i < json_len(known); i++)
        if (digest_is(json_at(known, i), now))
            return PF_OK;
    if (is_proved(s, comp))
        return PF_OK;
    return err_set(err, PF_E_CHANGED,
                   "the files of base '%s' were copied, touched or replaced since overlay %s was "
                   "built: their bytes must be checked before it is used",
                   comp->ckpt->path, comp->digest_hex);
}
