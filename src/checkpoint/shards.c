/*
 * The index of a sharded checkpoint (`x.safetensors.index.json`): which tensor is in which file. Called by checkpoint.c, and
 * by its fuzz target with bytes. A shard's name is relative to the index and never leads out of its directory; whether the
 * files exist and hold what the index says is checked by checkpoint.c, which has them open.
 */
#include "checkpoint/checkpoint_int.h"

#include <stdlib.h>
#include <string.h>

static int cmp_entry(const void *x, const void *y)
{
    const struct ckpt_index_entry *a = x, *b = y;
    return str_cmp(a->name, b->name);
}

static int cmp_z(const void *x, const void *y)
{
    const char *const *a = x, *const *b = y;
    return strcmp(*a, *b);
}

/* Why a shard's name is not acceptable, or NULL. A link inside the directory is fine: hub snapshots are made of them. */
static const char *name_fault(const char *z)
{
    if (*z == '\0')
        return "is empty";
    if (*z == '/')
        return "is an absolute path";
    if (strchr(z, '\\') != NULL)
        return "holds a backslash";
    for (const char *p = z; p != NULL;) {
        const char *end = strchr(p, '/');
        size_t n = end != NULL ? (size_t)(end - p) : strlen(p);
        if (n == 2 && p[0] == '.' && p[1] == '.')
            return "climbs out of the directory";
        /* "a//b" and "./a" are second names of one file: refusing them keeps one name per shard. */
        if (n == 0 || (n == 1 && p[0] == '.'))
            return "is no plain relative path";
        p = end != NULL ? end + 1 : NULL;
    }
    for (const char *p = z; *p != '\0'; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f)
            return "holds a control character";
    return NULL;
}

static int check_shard(const char *shard, struct str tensor, const char *what, pf_error *err)
{
    const char *fault = name_fault(shard);
    if (fault != NULL)
        return err_set(err, PF_E_FORMAT, "index '%s': shard name '%.300s' of tensor '%.300s' %s",
                       what, shard, tensor.p, fault);
    if (!str_ends(str_of(shard), ".safetensors"))
        return err_set(err, PF_E_UNSUPPORTED,
                       "index '%s': shard '%.300s' is no .safetensors file: convert it to "
                       "safetensors first",
                       what, shard);
    return PF_OK;
}

/* Fills entries (name only) and, in the same order, shards. */
static int collect(const struct json *map, const char *what, struct ckpt_index *out, pf_error *err)
{
    const char *key = NULL;
    const struct json *value = NULL;
    const char *checked = NULL;
    void *iter = NULL;
    while ((iter = json_iter_next(map, iter, &key, &value)) != NULL) {
        const char *shard = json_z(value);
        if (shard == NULL)
            return err_set(err, PF_E_FORMAT,
                           "index '%s': the shard of tensor '%.300s' is no string", what, key);
        /* Neighbours mostly share a shard: its name need not be looked at again. */
        if (checked == NULL || strcmp(checked, shard) != 0) {
            int rc = check_shard(shard, str_of(key), what, err);
            if (rc != PF_OK)
                return rc;
            checked = shard;
        }
        out->entries[out->n_entries].name = str_of(key);
        out->shards[out->n_entries++] = shard;
    }
    return PF_OK;
}

/* Sorted and distinct shards, and each entry's place among them. */
static int number_shards(struct ckpt_index *index, pf_error *err)
{
    const char **distinct = mem_calloc(index->n_entries, sizeof *distinct);
    if (distinct == NULL)
        return err_nomem(err, index->n_entries * sizeof *distinct, "shard names");
    memcpy(distinct, index->shards, index->n_entries * sizeof *distinct);
    qsort(distinct, index->n_entries, sizeof *distinct, cmp_z);
    size_t n = 0;
    for (size_t i = 0; i < index->n_entries; i++)
        if (n == 0 || strcmp(distinct[n - 1], distinct[i]) != 0)
            distinct[n++] = distinct[i];
    for (size_t i = 0; i < index->n_entries; i++) {
        const char **at = bsearch(&index->shards[i], distinct, n, sizeof *distinct, cmp_z);
        index->entries[i].i_shard = (uint32_t)(at - distinct);
    }
    mem_free(index->shards);
    index->shards = distinct;
    index->n_shards = n;
    return PF_OK;
}

static int build(struct ckpt_index *index, const char *what, pf_error *err)
{
    const struct json *map = json_get(index->root, "weight_map");
    if (map == NULL || json_typeof(map) != JSON_T_OBJECT)
        return err_set(err, PF_E_FORMAT, "index '%s' has no weight_map object", what);
    size_t n = json_len(map);
    if (n == 0)
        return err_set(err, PF_E_FORMAT, "index '%s': its weight_map names no shard", what);
    if (n > UINT32_MAX)
        return err_set(err, PF_E_RANGE, "index '%s' names %zu tensors, more than %u", what, n,
                       UINT32_MAX);
    index->entries = mem_calloc(n, sizeof *index->entries);
    index->shards = mem_calloc(n, sizeof *index->shards);
    if (index->entries == NULL || index->shards == NULL)
        return err_nomem(err, n * sizeof *index->entries, "index entries");
    int rc = collect(map, what, index, err);
    if (rc == PF_OK)
        rc = number_shards(index, err);
    if (rc == PF_OK)
        qsort(index->entries, index->n_entries, sizeof *index->entries, cmp_entry);
    return rc;
}

static int adopt(struct json *root, const char *what, struct ckpt_index *out, pf_error *err)
{
    struct ckpt_index index = {.root = root};
    int rc = build(&index, what, err);
    if (rc != PF_OK)
        ckpt_index_release(&index);
    else
        *out = index;
    return rc;
}

int ckpt_index_parse(const char *p, size_t n, const char *what, struct ckpt_index *out,
                     pf_error *err)
{
    struct json *root = NULL;
    int rc = json_parse(p, n, what, &root, err);
    return rc == PF_OK ? adopt(root, what, out, err) : rc;
}

int ckpt_index_load(const char *path, struct ckpt_index *out, pf_error *err)
{
    struct json *root = NULL;
    int rc = json_parse_file(path, CKPT_INDEX_BYTES_MAX, &root, err);
    return rc == PF_OK ? adopt(root, path, out, err) : rc;
}

void ckpt_index_release(struct ckpt_index *index)
{
    mem_free(index->entries);
    mem_free(index->shards);
    json_free(index->root);
    *index = (struct ckpt_index){0};
}

int64_t ckpt_index_find(const struct ckpt_index *index, struct str name)
{
    const struct ckpt_index_entry key = {.name = name};
    const struct ckpt_index_entry *at =
        bsearch(&key, index->entries, index->n_entries, sizeof *index->entries, cmp_entry);
    return at != NULL ? (int64_t)at->i_shard : -1;
}
