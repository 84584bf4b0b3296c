/*
 * Files: which file is meant by a path, its config, one pass over its bytes. The pass goes front to back in blocks, so that a cold
 * file is read once and in order, and no byte of it is copied: it feeds the digest (XXH3-128 over the whole file) and the scan
 * for NaN and infinity together.
 */
#include "adapter/adapter_int.h"

#include "tensor/dtype.h"

#include <float.h>
#include <math.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

/* ------------------------------------------------------------------------------------------------ the scan */

/* Magnitudes of IEEE-like formats compare as integers without the sign: the largest one tells everything, and compilers
 * turn these loops into vector code. */
static uint32_t max_magnitude16(const uint8_t *p, size_t n)
{
    uint16_t max = 0;
    for (size_t i = 0; i < n; i++) {
        uint16_t v;
        memcpy(&v, p + 2 * i, sizeof v);
        v &= 0x7fff;
        max = v > max ? v : max;
    }
    return max;
}

static uint32_t max_magnitude32(const uint8_t *p, size_t n)
{
    uint32_t max = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t v;
        memcpy(&v, p + 4 * i, sizeof v);
        v &= 0x7fffffff;
        max = v > max ? v : max;
    }
    return max;
}

static uint32_t max_magnitude8(const uint8_t *p, size_t n)
{
    uint8_t max = 0;
    for (size_t i = 0; i < n; i++)
        max = (p[i] & 0x7f) > max ? p[i] & 0x7f : max;
    return max;
}

static uint64_t max_magnitude64(const uint8_t *p, size_t n)
{
    uint64_t max = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t v;
        memcpy(&v, p + 8 * i, sizeof v);
        v &= 0x7fffffffffffffffu;
        max = v > max ? v : max;
    }
    return max;
}

/* The largest magnitude of n elements as f32; NaN or infinity when there is one. */
static float max_abs_of(int32_t dtype, const uint8_t *p, size_t n)
{
    float value;
    union {
        uint64_t u64;
        uint32_t u32;
        uint16_t u16;
        uint8_t u8;
    } max = {.u64 = 0};
    switch (dtype_size(dtype)) {
    case 8:
        max.u64 = max_magnitude64(p, n);
        break;
    case 4:
        max.u32 = max_magnitude32(p, n);
        break;
    case 2:
        max.u16 = (uint16_t)max_magnitude16(p, n);
        break;
    default:
        max.u8 = (uint8_t)max_magnitude8(p, n);
        break;
    }
    dtype_to_f32(dtype, &max, 1, &value);
    return value;
}

static int nonfinite(const struct ad_tensor *t, const char *path, const uint8_t *p, size_t n,
                     pf_error *err)
{
    size_t size = dtype_size(t->dtype);
    for (size_t i = 0; i < n; i++) {
        float v;
        double exact = 0; /* an f64 may be finite and yet beyond f32 */
        dtype_to_f32(t->dtype, p + i * size, 1, &v);
        if (isfinite(v))
            continue;
        size_t at = (size_t)(p - t->p) / size + i;
        if (dtype_scalar_to_double(t->dtype, p + i * size, &exact) && isfinite(exact))
            return err_set(err, PF_E_NONFINITE,
                           "adapter '%s': tensor '%s' holds %g at element %zu, which is beyond "
                           "f32: nothing of it is used",
                           path, t->name.p, exact, at);
        return err_set(err, PF_E_NONFINITE,
                       "adapter '%s': tensor '%s' holds %s at element %zu: nothing of it is used",
                       path, t->name.p, isnan(v) ? "NaN" : "infinity", at);
    }
    return PF_OK;
}

/* n elements of a factor from p on. */
static int scan_block(struct ad_tensor *t, const char *path, const uint8_t *p, size_t n,
                      pf_error *err)
{
    float max = max_abs_of(t->dtype, p, n);
    if (!isfinite(max))
        return nonfinite(t, path, p, n, err);
    if ((double)max > t->max_abs)
        t->max_abs = (double)max;
    return PF_OK;
}

static bool is_factor(const struct pf_adapter *a, const struct ad_tensor *t)
{
    if (t->i_module < 0 || !dtype_is_factor(t->dtype))
        return false;
    const struct ad_module *m = &a->modules[t->i_module];
    return t != module_leaf(a, m, LEAF_ALPHA) && t != module_leaf(a, m, LEAF_SCALE);
}

/* Tensors tile the data of a file: hashing header and tensors in file order is hashing the file. */
static int scan_file(struct pf_adapter *a, struct hasher *h, pf_error *err)
{
    const struct file_map *map = st_map(a->file);
    hasher_add(h, map->p, st_header_bytes(a->file));
    for (size_t i = 0; i < a->n_tensors; i++) {
        struct ad_tensor *t = &a->tensors[i];
        bool scanned = is_factor(a, t);
        for (uint64_t off = 0; off < t->n_bytes; off += HASH_BLOCK_BYTES) {
            uint64_t left = t->n_bytes - off;
            size_t n = left < HASH_BLOCK_BYTES ? (size_t)left : HASH_BLOCK_BYTES;
            hasher_add(h, t->p + off, n);
            int rc =
                scanned ? scan_block(t, a->path, t->p + off, n / dtype_size(t->dtype), err) : PF_OK;
            if (rc != PF_OK)
                return rc;
        }
    }
    return file_map_check(map, a->path, err);
}

static int digest_file(struct pf_adapter *a, pf_error *err)
{
    struct hasher *h = hasher_new();
    if (h == NULL)
        return err_nomem(err, 0, "a digest");
    int rc = scan_file(a, h, err);
    if (rc == PF_OK) {
        struct digest file = hasher_digest(h);
        hasher_reset(h);
        hasher_add_str(h, "pageflip adapter", 16);
        hasher_add_u64(h, file.hi);
        hasher_add_u64(h, file.lo);
        for (size_t i = 0; i < a->n_configs; i++) /* metadata inside the file is hashed already */
            if (strcmp(a->configs[i].what, "adapter_config.json") == 0)
                config_hash(&a->configs[i], h);
        a->digest = hasher_digest(h);
        digest_hex(a->digest, a->digest_hex);
    }
    hasher_free(h);
    return rc;
}

/* ---------------------------------------------------------------------------------------------- which file */

#define FILE_PEFT      "adapter_model.safetensors"
#define FILE_DIFFUSERS "pytorch_lora_weights.safetensors"
#define FILE_CONFIG    "adapter_config.json"

struct location {
    char *weights, *config; /* owned; config NULL: none */
};

static void location_release(struct location *p)
{
    mem_free(p->weights);
    mem_free(p->config);
}

static bool str_ends_nocase(struct str s, const char *suffix)
{
    size_t n = strlen(suffix);
    return s.n >= n && strncasecmp(s.p + s.n - n, suffix, n) == 0;
}

static bool has_suffix(struct str name, const char *const *suffixes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (str_ends_nocase(name, suffixes[i]))
            return true;
    return false;
}

static int refuse_kind(const char *path, pf_error *err)
{
    static const char *const pickles[] = {".bin", ".pt", ".pth", ".ckpt", ".pkl"};
    struct str base = path_base(path);
    if (has_suffix(base, pickles, PF_COUNTOF(pickles)))
        return err_set(err, PF_E_UNSUPPORTED,
                       "adapter '%s' is a pickle file, which can run code when it is read: convert "
                       "it to .safetensors",
                       path);
    static const char *const gguf[] = {".gguf"};
    if (has_suffix(base, gguf, 1))
        return err_set(err, PF_E_UNSUPPORTED,
                       "adapter '%s' is a GGUF file: use the .safetensors it was made from", path);
    return PF_OK;
}

static int join(const char *dir, const char *name, char **out, pf_error *err)
{
    *out = path_join(dir, name);
    return *out != NULL ? PF_OK : err_nomem(err, strlen(dir), "a path");
}

/* The name in dir, or NULL when there is no such file. A link that leads nowhere is no absence: something was meant to be there. */
static int join_if_there(const char *dir, const char *name, char **out, pf_error *err)
{
    char target[1];
    int rc = join(dir, name, out, err);
    enum file_kind kind = rc == PF_OK ? file_kind(*out) : FILE_REGULAR;
    if (kind == FILE_REGULAR || kind == FILE_DIRECTORY)
        return rc;
    if (kind == FILE_OTHER)
        rc = file_kind_refuse(*out, err);
    else if (readlink(*out, target, sizeof target) > 0)
        rc = err_set(err, PF_E_NOTFOUND,
                     "adapter '%s': '%s' is a link to a file that is not there: its download was "
                     "not finished",
                     dir, name);
    mem_free(*out);
    *out = NULL;
    return rc;
}

/* Which of the files of other names is meant, and whether a config beside them is theirs, is the user's to say. */
static int holds_none(const char *dir, pf_error *err)
{
    char **names = NULL;
    size_t n = 0, i = 0;
    (void)err_set(err, PF_E_NOTFOUND,
                  "adapter '%s' holds neither adapter_model.safetensors nor "
                  "pytorch_lora_weights.safetensors",
                  dir);
    if (file_list(dir, &names, &n, NULL) != PF_OK)
        return PF_E_NOTFOUND;
    while (i < n && !str_ends(str_of(names[i]), ".safetensors"))
        i++;
    if (i < n)
        err_append(err, ": name the file that is meant, like '%s'", names[i]);
    file_list_free(names, n);
    return PF_E_NOTFOUND;
}

static int locate_directory(const char *dir, struct location *out, pf_error *err)
{
    static const char *const others[] = {"adapter_model.bin", "pytorch_lora_weights.bin"};
    char *second = NULL;
    int rc = join_if_there(dir, FILE_PEFT, &out->weights, err);
    if (rc == PF_OK)
        rc = join_if_there(dir, FILE_DIFFUSERS, &second, err);
    if (rc == PF_OK)
        rc = join_if_there(dir, FILE_CONFIG, &out->config, err);
    if (rc != PF_OK)
        goto out;
    if (out->weights != NULL && second != NULL) {
        rc = err_set(err, PF_E_AMBIGUOUS,
                     "adapter '%s' holds adapter_model.safetensors and "
                     "pytorch_lora_weights.safetensors: name one of them",
                     dir);
        goto out;
    }
    if (out->weights == NULL) {
        out->weights = second;
        second = NULL;
    }
    for (size_t i = 0; out->weights == NULL && rc == PF_OK && i < PF_COUNTOF(others); i++) {
        char *other = NULL;
        rc = join_if_there(dir, others[i], &other, err);
        if (other != NULL)
            rc = refuse_kind(other, err);
        mem_free(other);
    }
    if (rc == PF_OK && out->weights == NULL)
        rc = holds_none(dir, err);
out:
    mem_free(second);
    return rc;
}

/*
 * A file named by itself keeps the config that its directory would give it: without it its scale would be another. Beside a file
 * of any other name the config is someone else's, and *out_is_passed_by says that there is one.
 */
static int locate_file(const char *path, struct location *out, bool *out_is_passed_by,
                       pf_error *err)
{
    int rc = refuse_kind(path, err);
    if (rc != PF_OK)
        return rc;
    out->weights = mem_strdup(path);
    if (out->weights == NULL)
        return err_nomem(err, strlen(path), "a path");
    struct str base = path_base(path);
    bool is_own = str_eqz(base, FILE_PEFT) || str_eqz(base, FILE_DIFFUSERS);
    char *dir = path_dir(path);
    if (dir == NULL)
        return err_nomem(err, strlen(path), "a path");
    char *other = NULL;
    if (is_own)
        rc = join_if_there(dir, FILE_CONFIG, &out->config, err);
    else
        rc = join(dir, FILE_CONFIG, &other, err);
    *out_is_passed_by = other != NULL && file_kind(other) == FILE_REGULAR;
    mem_free(other);
    mem_free(dir);
    return rc;
}

static int locate(const char *path, struct location *out, bool *out_is_passed_by, pf_error *err)
{
    switch (file_kind(path)) {
    case FILE_DIRECTORY:
        return locate_directory(path, out, err);
    case FILE_REGULAR:
        return locate_file(path, out, out_is_passed_by, err);
    case FILE_ABSENT:
        return err_set(err, PF_E_NOTFOUND, "adapter '%s' does not exist", path);
    default:
        return file_kind_refuse(path, err);
    }
}

/* ------------------------------------------------------------------------------------------------- opening */

static int parse_file(struct pf_adapter *a, const char *config, size_t n_config, pf_error *err)
{
    size_t n_keys = st_n_tensors(a->file), n_meta = st_n_meta(a->file);
    const struct st_tensor **keys = mem_calloc(n_keys > 0 ? n_keys : 1, sizeof *keys);
    const struct st_meta **meta = mem_calloc(n_meta > 0 ? n_meta : 1, sizeof *meta);
    int rc;
    if (keys == NULL || meta == NULL) {
        rc = err_nomem(err, n_keys * sizeof *keys, "the keys of an adapter");
        goto out;
    }
    for (size_t i = 0; i < n_keys; i++)
        keys[i] = st_tensor(a->file, i);
    for (size_t i = 0; i < n_meta; i++)
        meta[i] = st_meta(a->file, i);
    struct ad_input in = {.path = a->path,
                          .keys = keys,
                          .n_keys = n_keys,
                          .base = st_map(a->file)->p,
                          .meta = meta,
                          .n_meta = n_meta,
                          .config = config,
                          .n_config = n_config};
    rc = adapter_parse(a, &in, err);
out:
    mem_free(keys);
    mem_free(meta);
    return rc;
}

int source_open(struct pf_adapter *a, const char *path, pf_error *err)
{
    struct location place = {NULL, NULL};
    char *config = NULL;
    size_t n_config = 0;
    bool is_passed_by = false;
    int rc = locate(path, &place, &is_passed_by, err);
    if (is_passed_by)
        notes_addf(&a->notes,
                   "warning: the %s beside it is not read: it is that of a file named " FILE_PEFT
                   " or " FILE_DIFFUSERS,
                   FILE_CONFIG);
    if (rc == PF_OK && place.config != NULL)
        rc = file_read_all(place.config, AD_CONFIG_BYTES_MAX, &config, &n_config, err);
    if (rc == PF_OK) {
        a->path = arena_strndup(&a->arena, path, strlen(path));
        rc = a->path != NULL ? st_open(place.weights, &a->file, err)
                             : err_nomem(err, strlen(path), "a path");
    }
    if (rc == PF_OK)
        rc = parse_file(a, config, n_config, err);
    if (rc == PF_OK)
        rc = digest_file(a, err);
    mem_free(config);
    location_release(&place);
    return rc;
}
