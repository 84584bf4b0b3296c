/*
 * Entries as a whole: listing, evicting, and making room in the budget and on the disk. Called by the builder, the engine and
 * `pageflip cache`. Must never remove an entry that any process has mapped or builds, and evicts nothing in vain.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "overlay/overlay_int.h"

/* ----------------------------------------------------------------------------------------- listing */

static void read_adapters(const struct json *array, struct overlay_entry *e)
{
    size_t n = json_len(array);
    e->adapters = mem_calloc(n ? n : 1, sizeof *e->adapters);
    for (size_t i = 0; e->adapters && i < n; i++) {
        const struct json *o = json_at(array, i);
        const char *path = json_z(json_get(o, "path")), *target = json_z(json_get(o, "target"));
        e->adapters[e->n_adapters++] = (struct overlay_adapter){
            .path = mem_strdup(path ? path : "?"),
            .strength = json_number(json_get(o, "strength")),
            .has_alpha = json_get(o, "alpha") != NULL,
            .alpha = json_number(json_get(o, "alpha")),
            .target = mem_strdup(target ? target : "all"),
        };
    }
}

static void read_entry(struct overlay_store *s, const char *dir, struct overlay_entry *e)
{
    struct json *m = NULL;
    e->is_partial = manifest_read(s, e->digest, &m, NULL) != PF_OK;
    e->n_bytes = dir_bytes(dir);
    e->is_in_use = entry_is_locked(s, e->digest, "use", false);
    e->is_building = entry_is_locked(s, e->digest, "build", true);
    e->used_at_ns = used_at_ns(s, e->digest);
    if (!e->is_partial) {
        const char *base = json_z(json_get(m, "base_path")),
                   *dtype = json_z(json_get(m, "merge_dtype"));
        e->base = mem_strdup(base ? base : "?");
        e->merge_dtype = mem_strdup(dtype ? dtype : "?");
        read_adapters(json_get(m, "adapters"), e);
    }
    json_free(m);
}

/* What a build makes in an entry. */
static bool is_build_name(struct str name)
{
    return str_eqz(name, MANIFEST_NAME) ||
           (str_starts(name, "layer-") && str_ends(name, ".safetensors")) ||
           (name.p[0] == '.' && str_ends(name, ".tmp"));
}

/* Something of a build in it, or nothing: a directory of somebody else's may have such a name too, and is never touched. */
static bool is_entry(const char *dir)
{
    char **names = NULL;
    size_t n = 0;
    bool is_read = file_kind(dir) == FILE_DIRECTORY && file_list(dir, &names, &n, NULL) == PF_OK;
    bool is_ours = is_read && n == 0;
    for (size_t i = 0; i < n; i++)
        is_ours = is_ours || is_build_name(str_of(names[i]));
    file_list_free(names, n);
    return is_ours;
}

/* What a build made, and the directory, unless others (.nfs0001, .DS_Store) have left something in it. */
static int remove_entry(const char *dir, pf_error *err)
{
    char **names = NULL;
    size_t n = 0;
    int rc = file_list(dir, &names, &n, err);
    if (rc == PF_E_NOTFOUND)
        return PF_OK; /* by somebody else, just now */
    for (size_t i = 0; i < n && rc == PF_OK; i++) {
        if (!is_build_name(str_of(names[i])))
            continue;
        char *path = path_join(dir, names[i]);
        rc = path ? file_remove_tree(path, err) : err_nomem(err, 0, "a path");
        mem_free(path);
    }
    file_list_free(names, n);
    if (rc == PF_OK && rmdir(dir) && errno != ENOTEMPTY && errno != EEXIST && errno != ENOENT)
        rc = err_sys(err, errno, "cannot remove '%s'", dir);
    return rc;
}

static int cmp_used(const void *pa, const void *pb)
{
    const struct overlay_entry *a = pa, *b = pb;
    if (a->used_at_ns != b->used_at_ns)
        return a->used_at_ns < b->used_at_ns ? -1 : 1;
    return digest_cmp(a->digest, b->digest);
}

int overlay_list(struct overlay_store *s, struct overlay_entry **out, size_t *out_n, pf_error *err)
{
    char **names = NULL;
    size_t n = 0, n_entries = 0;
    int rc = file_kind(s->dir) == FILE_ABSENT ? PF_OK : file_list(s->dir, &names, &n, err);
    if (rc)
        return rc;
    struct overlay_entry *entries = mem_calloc(n ? n : 1, sizeof *entries);
    if (!entries) {
        file_list_free(names, n);
        return err_nomem(err, n * sizeof *entries, "the cache list");
    }
    for (size_t i = 0; i < n; i++) {
        struct overlay_entry *e = &entries[n_entries];
        char *dir = path_join(s->dir, names[i]);
        if (dir && digest_parse(names[i], &e->digest) && is_entry(dir)) {
            memcpy(e->digest_hex, names[i], sizeof e->digest_hex);
            read_entry(s, dir, e);
            n_entries++;
        }
        mem_free(dir);
    }
    file_list_free(names, n);
    if (n_entries)
        qsort(entries, n_entries, sizeof *entries, cmp_used);
    *out = entries;
    *out_n = n_entries;
    return PF_OK;
}

void overlay_list_free(struct overlay_entry *entries, size_t n)
{
    for (size_t i = 0; entries && i < n; i++) {
        for (size_t k = 0; k < entries[i].n_adapters; k++) {
            mem_free(entries[i].adapters[k].path);
            mem_free(entries[i].adapters[k].target);
        }
        mem_free(entries[i].adapters);
        mem_free(entries[i].base);
        mem_free(entries[i].merge_dtype);
    }
    mem_free(entries);
}

/* ---------------------------------------------------------------------------------------- evicting */

static void remove_lock_file(struct overlay_store *s, struct digest digest, const char *suffix)
{
    char *path = entry_lock_path(s, digest, suffix);
    if (path)
        (void)unlink(path); /* we hold it exclusively; a newcomer makes its own */
    mem_free(path);
}

int overlay_evict(struct overlay_store *s, struct digest digest, pf_error *err)
{
    struct file_lock use = {.fd = -1}, build = {.fd = -1};
    char *dir = entry_dir(s, digest), *manifest = entry_file(s, digest, MANIFEST_NAME);
    char hex[DIGEST_HEX_LEN + 1];
    digest_hex(digest, hex);
    int rc = dir && manifest ? PF_OK : err_nomem(err, 0, "a path");
    if (rc == PF_OK && file_kind(dir) == FILE_ABSENT)
        rc = err_set(err, PF_E_NOTFOUND, "no overlay '%s' in cache '%s'", hex, s->dir);
    if (rc == PF_OK && !store_is_writable(s))
        rc = err_set(err, PF_E_IO, "overlay '%s' cannot be evicted: cache '%s' is read-only", hex,
                     s->dir);
    if (rc == PF_OK)
        rc = entry_lock(s, digest, "build", false, &build, err);
    if (rc == PF_E_BUSY)
        rc = err_set(err, rc, "overlay '%s' is being built", hex);
    if (rc == PF_OK) {
        rc = entry_lock(s, digest, "use", false, &use, err);
        if (rc == PF_E_BUSY)
            rc = err_set(err, rc, "overlay '%s' is in use", hex);
    }
    /* The manifest goes first: killed in between, the entry is partial, never complete with a layer missing. */
    if (rc == PF_OK)
        rc = file_remove_tree(manifest, err);
    if (rc == PF_OK)
        rc = remove_entry(dir, err);
    if (rc == PF_OK) {
        remove_lock_file(s, digest, "use");
        remove_lock_file(s, digest, "build");
        atomic_fetch_add_explicit(&s->n_evicted, 1, memory_order_relaxed); /* a statistic */
    }
    file_lock_release(&use);
    file_lock_release(&build);
    mem_free(manifest);
    mem_free(dir);
    return rc;
}

/* -------------------------------------------------------------------------------------------- room */

static uint64_t minus(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

static bool can_evict(const struct overlay_entry *e, struct digest own)
{
    return !e->is_in_use && !e->is_building && !digest_eq(e->digest, own);
}

/* Evicts until n_wanted bytes are gone: partial entries first, then the least recently used. */
static uint64_t evict_bytes(struct overlay_store *s, const struct overlay_entry *entries, size_t n,
                            struct digest own, uint64_t n_wanted)
{
    uint64_t n_gone = 0;
    for (int pass = 0; pass < 2; pass++)
        for (size_t i = 0; i < n && n_gone < n_wanted; i++)
            if (entries[i].is_partial == (pass == 0) && can_evict(&entries[i], own) &&
                overlay_evict(s, entries[i].digest, NULL) == PF_OK)
                n_gone += entries[i].n_bytes;
    return n_gone;
}

static int no_budget(const struct overlay_store *s, uint64_t n_total, uint64_t n_busy,
                     pf_error *err)
{
    if (n_total > s->n_budget_bytes)
        return err_set(err, PF_E_NOSPACE,
                       "overlay of %llu bytes is larger than the budget of cache '%s', %llu: raise "
                       "--cache-budget",
                       (unsigned long long)n_total, s->dir, (unsigned long long)s->n_budget_bytes);
    return err_set(
        err, PF_E_NOSPACE,
        "overlay needs %llu bytes; cache '%s' has a budget of %llu, of which %llu are in "
        "use and cannot be evicted now: raise --cache-budget",
        (unsigned long long)n_total, s->dir, (unsigned long long)s->n_budget_bytes,
        (unsigned long long)n_busy);
}

static int make_room(struct overlay_store *s, struct digest own, uint64_t n_total,
                     uint64_t n_missing, pf_error *err)
{
    struct overlay_entry *entries = NULL;
    size_t n = 0;
    uint64_t n_used = 0, n_evictable = 0, n_free = file_free_bytes(s->dir);
    int rc = overlay_list(s, &entries, &n, err);
    if (rc)
        return rc;
    for (size_t i = 0; i < n; i++) {
        if (!digest_eq(entries[i].digest, own))
            n_used += entries[i].n_bytes;
        if (can_evict(&entries[i], own))
            n_evictable += entries[i].n_bytes;
    }
    uint64_t n_over = minus(n_used + n_total, s->n_budget_bytes),
             n_short = minus(n_missing, n_free);
    uint64_t n_wanted = n_over > n_short ? n_over : n_short, n_gone = 0;
    if (n_wanted <= n_evictable) /* else nothing is evicted in vain */
        n_gone = evict_bytes(s, entries, n, own, n_wanted);
    overlay_list_free(entries, n);
    if (n_gone >= n_wanted)
        return PF_OK;
    if (n_over > n_gone && n_over >= n_short)
        return no_budget(s, n_total, n_used - n_gone, err);
    return err_set(err, PF_E_NOSPACE,
                   "overlay needs %llu more bytes; the disk of cache '%s' has %llu",
                   (unsigned long long)n_missing, s->dir, (unsigned long long)n_free);
}

int room_reserve(struct overlay_store *s, struct digest own, uint64_t n_total, uint64_t n_missing,
                 struct file_new *out_reserve, pf_error *err)
{
    struct file_lock lock = {.fd = -1};
    char *lock_path = path_join(s->dir, "room.lock"), *dir = entry_dir(s, own);
    char *path = entry_file(s, own, "reserve");
    /* Between looking and reserving nobody else may look, or two would find the same room. */
    int rc = lock_path && dir && path ? lock_patiently(lock_path, false, &lock, err)
                                      : err_nomem(err, 0, "a path");
    if (rc == PF_OK)
        rc = make_room(s, own, n_total, n_missing, err);
    if (rc == PF_OK)
        rc = file_mkdirs(dir, err);
    if (rc == PF_OK)
        rc = file_new_open(out_reserve, path, err);
    if (rc == PF_OK) {
        rc = file_reserve(out_reserve->fd, n_missing, out_reserve->temp_path, err);
        if (rc)
            file_new_abort(out_reserve);
    }
    file_lock_release(&lock);
    mem_free(path);
    mem_free(dir);
    mem_free(lock_path);
    return rc;
}
