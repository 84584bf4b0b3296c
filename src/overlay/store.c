/*
 * The cache directory: opening, listing, budget, eviction. Everything it knows is on disk; processes agree by locks. Called
 * by the engine and by `pageflip cache`. Must never remove what any process has mapped or is building.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "overlay/overlay_int.h"

#define N_LOCK_TRIES    20
#define LOCK_PAUSE_NS   2000000
#define BUDGET_FRACTION 4 /* of the free space */

char *entry_dir(const struct overlay_store *s, struct digest digest)
{
    char hex[DIGEST_HEX_LEN + 1];
    digest_hex(digest, hex);
    return path_join(s->dir, hex);
}

char *entry_file(const struct overlay_store *s, struct digest digest, const char *name)
{
    char *dir = entry_dir(s, digest);
    char *path = dir ? path_join(dir, name) : NULL;
    mem_free(dir);
    return path;
}

char *entry_lock_path(const struct overlay_store *s, struct digest digest, const char *suffix)
{
    char hex[DIGEST_HEX_LEN + 1];
    digest_hex(digest, hex);
    struct strbuf b;
    strbuf_init(&b);
    strbuf_addf(&b, "%s/%s.%s", s->dir, hex, suffix);
    return strbuf_take(&b);
}

int entry_lock(const struct overlay_store *s, struct digest digest, const char *suffix,
               bool is_shared, struct file_lock *out, pf_error *err)
{
    char *path = entry_lock_path(s, digest, suffix);
    int rc = path ? PF_E_BUSY : err_nomem(err, 0, "a path");
    for (int i = 0; rc == PF_E_BUSY && i < N_LOCK_TRIES; i++) {
        if (i >
            0) /* a housekeeper holds a lock for microseconds: not synchronisation, only patience */
            nanosleep(&(struct timespec){.tv_nsec = LOCK_PAUSE_NS}, NULL);
        rc = is_shared ? file_lock_shared_try(out, path, err) : file_lock_try(out, path, err);
    }
    mem_free(path);
    return rc;
}

/* Temporary files of builds that died: nobody holds the entry's build lock. */
static void clean_entry(struct overlay_store *s, struct digest digest)
{
    struct file_lock lock = {.fd = -1};
    char **names = NULL;
    size_t n = 0;
    char *dir = entry_dir(s, digest);
    if (!dir || entry_lock(s, digest, "build", false, &lock, NULL) ||
        file_list(dir, &names, &n, NULL))
        goto out;
    for (size_t i = 0; i < n; i++) {
        char *path = names[i][0] == '.' ? path_join(dir, names[i]) : NULL;
        if (path && str_ends(str_of(path), ".tmp"))
            (void)unlink(path); /* litter only */
        mem_free(path);
    }
out:
    file_list_free(names, n);
    file_lock_release(&lock);
    mem_free(dir);
}

static void clean(struct overlay_store *s)
{
    char **names = NULL;
    size_t n = 0;
    if (file_list(s->dir, &names, &n, NULL))
        return;
    for (size_t i = 0; i < n; i++) {
        struct digest digest;
        if (digest_parse(names[i], &digest))
            clean_entry(s, digest);
    }
    file_list_free(names, n);
}

int overlay_store_open(const char *dir, uint64_t n_budget_bytes, struct overlay_store **out,
                       pf_error *err)
{
    int rc = file_mkdirs(dir, err);
    if (rc)
        return err_prefix(err, rc, "overlay cache: ");
    if (access(dir, R_OK | X_OK))
        return err_set(err, PF_E_IO, "overlay cache '%s' cannot be read", dir);
    struct overlay_store *s = mem_calloc(1, sizeof *s);
    if (!s)
        return err_nomem(err, sizeof *s, "an overlay store");
    s->dir = mem_strdup(dir);
    if (!s->dir) {
        mem_free(s);
        return err_nomem(err, strlen(dir), "an overlay store");
    }
    s->n_budget_bytes = n_budget_bytes ? n_budget_bytes : file_free_bytes(dir) / BUDGET_FRACTION;
    clean(s);
    *out = s;
    return PF_OK;
}

void overlay_store_close(struct overlay_store *s)
{
    if (!s)
        return;
    mem_free(s->dir);
    mem_free(s);
}

const char *overlay_store_dir(const struct overlay_store *s)
{
    return s->dir;
}

uint64_t overlay_store_budget(const struct overlay_store *s)
{
    return s->n_budget_bytes;
}

/* ----------------------------------------------------------------------------------------- listing */

static uint64_t dir_bytes(const char *dir)
{
    char **names = NULL;
    size_t n = 0;
    uint64_t n_bytes = 0;
    if (file_list(dir, &names, &n, NULL))
        return 0;
    for (size_t i = 0; i < n; i++) {
        char *path = path_join(dir, names[i]);
        struct stat st;
        if (path && stat(path, &st) == 0)
            n_bytes += (uint64_t)st.st_size;
        mem_free(path);
    }
    file_list_free(names, n);
    return n_bytes;
}

static bool is_locked(struct overlay_store *s, struct digest digest, const char *suffix)
{
    char *path = entry_lock_path(s, digest, suffix);
    struct file_lock lock = {.fd = -1};
    bool locked =
        path && file_kind(path) == FILE_REGULAR && file_lock_try(&lock, path, NULL) == PF_E_BUSY;
    file_lock_release(&lock);
    mem_free(path);
    return locked;
}

static int64_t used_at(struct overlay_store *s, struct digest digest, const char *dir)
{
    char *path = entry_lock_path(s, digest, "use");
    struct stat st;
    int64_t at = 0;
    if ((path && stat(path, &st) == 0) || stat(dir, &st) == 0)
        at = (int64_t)st.st_mtim.tv_sec;
    mem_free(path);
    return at;
}

static char *describe(const struct json *m)
{
    struct strbuf b;
    strbuf_init(&b);
    const struct json *adapters = json_get(m, "adapters");
    for (size_t i = 0; i < json_len(adapters); i++) {
        const struct json *a = json_at(adapters, i);
        const char *path = json_z(json_get(a, "path"));
        struct str name = path_base(path ? path : "?");
        strbuf_addf(&b, "%s%.*s %g", i ? " + " : "", (int)name.n, name.p,
                    json_number(json_get(a, "strength")));
    }
    if (str_eqz(json_str(json_get(m, "merge_dtype")), "f32"))
        strbuf_adds(&b, " (f32)");
    return strbuf_take(&b);
}

static void read_entry(struct overlay_store *s, const char *dir, struct overlay_entry *e)
{
    struct json *m = NULL;
    e->is_partial = manifest_read(s, e->digest, &m, NULL) != PF_OK;
    e->n_bytes = dir_bytes(dir);
    e->is_in_use = is_locked(s, e->digest, "use");
    e->is_building = is_locked(s, e->digest, "build");
    e->used_at_s = used_at(s, e->digest, dir);
    if (!e->is_partial) {
        const char *base = json_z(json_get(m, "base_path"));
        e->description = describe(m);
        e->base = mem_strdup(base ? base : "?");
    }
    json_free(m);
}

static int cmp_used(const void *pa, const void *pb)
{
    const struct overlay_entry *a = pa, *b = pb;
    if (a->used_at_s != b->used_at_s)
        return a->used_at_s < b->used_at_s ? -1 : 1;
    return digest_cmp(a->digest, b->digest);
}

int overlay_list(struct overlay_store *s, struct overlay_entry **out, size_t *out_n, pf_error *err)
{
    char **names = NULL;
    size_t n = 0, n_entries = 0;
    int rc = file_list(s->dir, &names, &n, err);
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
        if (dir && digest_parse(names[i], &e->digest) && file_kind(dir) == FILE_DIRECTORY) {
            memcpy(e->digest_hex, names[i], sizeof e->digest_hex);
            read_entry(s, dir, e);
            n_entries++;
        }
        mem_free(dir);
    }
    file_list_free(names, n);
    qsort(entries, n_entries, sizeof *entries, cmp_used);
    *out = entries;
    *out_n = n_entries;
    return PF_OK;
}

void overlay_list_free(struct overlay_entry *entries, size_t n)
{
    for (size_t i = 0; entries && i < n; i++) {
        mem_free(entries[i].description);
        mem_free(entries[i].base);
    }
    mem_free(entries);
}

/* ---------------------------------------------------------------------------------------- eviction */

int overlay_evict(struct overlay_store *s, struct digest digest, pf_error *err)
{
    struct file_lock use = {.fd = -1}, build = {.fd = -1};
    char *dir = entry_dir(s, digest), *manifest = entry_file(s, digest, "manifest.json");
    int rc = dir && manifest ? PF_OK : err_nomem(err, 0, "a path");
    if (rc == PF_OK && file_kind(dir) == FILE_ABSENT) {
        char hex[DIGEST_HEX_LEN + 1];
        digest_hex(digest, hex);
        rc = err_set(err, PF_E_NOTFOUND, "no overlay '%s' in cache '%s'", hex, s->dir);
    }
    if (rc == PF_OK)
        rc = entry_lock(s, digest, "build", false, &build, err);
    if (rc == PF_OK)
        rc = entry_lock(s, digest, "use", false, &use, err);
    /* The manifest goes first: killed in between, the entry is partial, never complete with a layer missing. */
    if (rc == PF_OK)
        rc = file_remove_tree(manifest, err);
    if (rc == PF_OK)
        rc = file_remove_tree(dir, err);
    if (rc == PF_OK) {
        char *path = entry_lock_path(s, digest, "use");
        if (path)
            (void)unlink(path); /* we hold it exclusively; a newcomer makes its own */
        mem_free(path);
        path = entry_lock_path(s, digest, "build");
        if (path)
            (void)unlink(path);
        mem_free(path);
    }
    file_lock_release(&use);
    file_lock_release(&build);
    mem_free(manifest);
    mem_free(dir);
    return rc;
}

static int no_room(const struct overlay_store *s, uint64_t n_needed, uint64_t n_used, pf_error *err)
{
    return err_set(
        err, PF_E_NOSPACE,
        "overlay needs %llu bytes; cache '%s' has a budget of %llu, of which %llu are in "
        "use and cannot be evicted now: raise --cache-budget or clear the cache",
        (unsigned long long)n_needed, s->dir, (unsigned long long)s->n_budget_bytes,
        (unsigned long long)n_used);
}

/* `own`: an entry whose bytes are part of what is needed, and which is not evicted. */
static int make_room(struct overlay_store *s, const struct digest *own, uint64_t n_needed,
                     pf_error *err)
{
    struct overlay_entry *entries = NULL;
    size_t n = 0;
    uint64_t n_used = 0;
    int rc = overlay_list(s, &entries, &n, err);
    if (rc)
        return rc;
    for (size_t i = 0; i < n; i++)
        if (!own || !digest_eq(entries[i].digest, *own))
            n_used += entries[i].n_bytes;
    for (int pass = 0; pass < 2; pass++) /* partial ones first, then the least recently used */
        for (size_t i = 0; i < n; i++) {
            bool is_own = own && digest_eq(entries[i].digest, *own);
            if (n_used + n_needed <= s->n_budget_bytes || is_own ||
                entries[i].is_partial != (pass == 0))
                continue;
            if (overlay_evict(s, entries[i].digest, NULL) == PF_OK)
                n_used -= entries[i].n_bytes;
        }
    overlay_list_free(entries, n);
    if (n_used + n_needed > s->n_budget_bytes)
        return no_room(s, n_needed, n_used, err);
    return PF_OK;
}

int overlay_make_room(struct overlay_store *s, uint64_t n_needed_bytes, pf_error *err)
{
    return make_room(s, NULL, n_needed_bytes, err);
}

int overlay_make_room_for(struct overlay_store *s, struct digest own, uint64_t n_needed_bytes,
                          pf_error *err)
{
    return make_room(s, &own, n_needed_bytes, err);
}

int overlay_verify_entry(struct overlay_store *s, struct digest digest, pf_error *err)
{
    struct json *m = NULL;
    int rc = manifest_read(s, digest, &m, err);
    const struct json *layers = rc ? NULL : json_get(m, "layers");
    for (size_t i = 0; rc == PF_OK && i < json_len(layers); i++) {
        const char *name = json_z(json_get(json_at(layers, i), "file"));
        const char *hex = json_z(json_get(json_at(layers, i), "header"));
        rc = name && hex && !strchr(name, '/')
                 ? layer_file_verify_alone(s, digest, name, hex, err)
                 : err_set(err, PF_E_FORMAT, "the manifest of an overlay in '%s' is damaged",
                           s->dir);
    }
    json_free(m);
    return rc;
}
