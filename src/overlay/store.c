/*
 * The cache directory: where it is, opening, names and locks in it, the time of last use. Everything it knows is on disk; processes
 * agree by locks. Called by the engine and by `pageflip cache`. Must never remove what any process has mapped or is building.
 */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "overlay/overlay_int.h"

#define N_LOCK_TRIES    25
#define LOCK_PAUSE_NS   2000000
#define BUDGET_FRACTION 4

/* ------------------------------------------------------------------------------------------ names */

int overlay_cache_dir(const char *asked, char **out_dir, pf_error *err)
{
    const char *env = getenv("PAGEFLIP_CACHE"), *xdg = getenv("XDG_CACHE_HOME"),
               *home = getenv("HOME");
    const char *dir = asked && *asked ? asked : env && *env ? env : NULL;
    if (dir && strcmp(dir, "off") == 0)
        return err_set(err, PF_E_STATE, "the cache is off");
    char *path = NULL;
    if (dir)
        path = mem_strdup(dir);
    else if (xdg && *xdg == '/') /* a relative one is to be ignored, says its specification */
        path = path_join(xdg, "pageflip");
    else if (home && *home)
        path = path_join(home, ".cache/pageflip");
    else
        return err_set(
            err, PF_E_STATE,
            "no cache: neither --cache-dir, PAGEFLIP_CACHE, XDG_CACHE_HOME nor HOME is set");
    if (!path)
        return err_nomem(err, 0, "a path");
    *out_dir = path;
    return PF_OK;
}

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

/* ------------------------------------------------------------------------------------------ locks */

int lock_patiently(const char *path, bool is_shared, struct file_lock *out, pf_error *err)
{
    int rc = PF_E_BUSY;
    for (int i = 0; rc == PF_E_BUSY && i < N_LOCK_TRIES; i++) {
        if (i >
            0) /* housekeepers hold locks for microseconds: not synchronisation, only patience */
            nanosleep(&(struct timespec){.tv_nsec = LOCK_PAUSE_NS}, NULL);
        rc = is_shared ? file_lock_shared_try(out, path, err) : file_lock_try(out, path, err);
    }
    return rc;
}

int entry_lock(const struct overlay_store *s, struct digest digest, const char *suffix,
               bool is_shared, struct file_lock *out, pf_error *err)
{
    char *path = entry_lock_path(s, digest, suffix);
    int rc = path ? lock_patiently(path, is_shared, out, err) : err_nomem(err, 0, "a path");
    mem_free(path);
    return rc;
}

bool entry_is_locked(const struct overlay_store *s, struct digest digest, const char *suffix,
                     bool is_shared)
{
    char *path = entry_lock_path(s, digest, suffix);
    struct file_lock lock = {.fd = -1};
    bool is_locked = false;
    if (path && file_kind(path) == FILE_REGULAR)
        is_locked = (is_shared ? file_lock_shared_try(&lock, path, NULL)
                               : file_lock_try(&lock, path, NULL)) == PF_E_BUSY;
    file_lock_release(&lock);
    mem_free(path);
    return is_locked;
}

bool store_is_writable(const struct overlay_store *s)
{
    return access(s->dir, W_OK | X_OK) == 0;
}

/* ------------------------------------------------------------------------------------ open and close */

void remove_temporaries(const char *dir)
{
    char **names = NULL;
    size_t n = 0;
    if (file_list(dir, &names, &n, NULL))
        return;
    for (size_t i = 0; i < n; i++) {
        char *path = names[i][0] == '.' ? path_join(dir, names[i]) : NULL;
        if (path && str_ends(str_of(path), ".tmp"))
            (void)unlink(path); /* litter only */
        mem_free(path);
    }
    file_list_free(names, n);
}

/* Leftovers of builds that died: nobody holds the entry's build lock. */
static void clean_entry(struct overlay_store *s, struct digest digest)
{
    struct file_lock lock = {.fd = -1};
    char *dir = entry_dir(s, digest);
    if (dir && !entry_is_locked(s, digest, "build", true) &&
        entry_lock(s, digest, "build", false, &lock, NULL) == PF_OK) {
        remove_temporaries(dir);
        (void)rmdir(dir); /* where nothing is left, there is no entry */
    }
    file_lock_release(&lock);
    mem_free(dir);
}

static void clean_bases(struct overlay_store *s)
{
    struct file_lock lock = {.fd = -1};
    char *dir = path_join(s->dir, BASES_NAME), *path = path_join(s->dir, "bases.lock");
    if (dir && path && file_kind(dir) == FILE_DIRECTORY &&
        file_lock_try(&lock, path, NULL) == PF_OK)
        remove_temporaries(dir);
    file_lock_release(&lock);
    mem_free(path);
    mem_free(dir);
}

/* Returns the bytes of all entries. */
static uint64_t clean(struct overlay_store *s)
{
    char **names = NULL;
    size_t n = 0;
    uint64_t n_bytes = 0;
    if (file_list(s->dir, &names, &n, NULL))
        return 0;
    bool is_writable = store_is_writable(s);
    for (size_t i = 0; i < n; i++) {
        struct digest digest;
        if (!digest_parse(names[i], &digest))
            continue;
        if (is_writable)
            clean_entry(s, digest);
        char *dir = entry_dir(s, digest);
        if (dir)
            n_bytes += dir_bytes(dir);
        mem_free(dir);
    }
    file_list_free(names, n);
    if (is_writable)
        clean_bases(s);
    return n_bytes;
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
    char *own_dir = mem_strdup(dir);
    if (!s || !own_dir || pthread_mutex_init(&s->mu, NULL)) {
        mem_free(own_dir);
        mem_free(s);
        return err_nomem(err, sizeof *s, "an overlay store");
    }
    s->dir = own_dir;
    uint64_t n_bytes = clean(s);
    s->n_budget_bytes =
        n_budget_bytes ? n_budget_bytes : (file_free_bytes(dir) + n_bytes) / BUDGET_FRACTION;
    *out = s;
    return PF_OK;
}

void overlay_store_close(struct overlay_store *s)
{
    if (!s)
        return;
    pthread_mutex_destroy(&s->mu);
    mem_free(s->dir);
    mem_free(s);
}

const char *overlay_store_dir(const struct overlay_store *s)
{
    return s->dir;
}

uint64_t overlay_store_n_evicted(const struct overlay_store *s)
{
    return atomic_load_explicit(&s->n_evicted, memory_order_relaxed);
}

uint64_t overlay_store_budget(const struct overlay_store *s)
{
    return s->n_budget_bytes;
}

uint64_t dir_bytes(const char *dir)
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

/* ---------------------------------------------------------------------------------------- last use */

static int64_t mtime_ns(const char *path)
{
    struct stat st;
    if (!path || stat(path, &st))
        return 0;
    return (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
}

int64_t used_at_ns(const struct overlay_store *s, struct digest digest)
{
    char *path = entry_lock_path(s, digest, "use");
    int64_t at = mtime_ns(path);
    mem_free(path);
    if (at == 0) { /* built and never used, by a version that made no such file */
        path = entry_dir(s, digest);
        at = mtime_ns(path);
        mem_free(path);
    }
    return at;
}

static int64_t newest_use(const struct overlay_store *s)
{
    char **names = NULL;
    size_t n = 0;
    int64_t newest = 0;
    if (file_list(s->dir, &names, &n, NULL))
        return 0;
    for (size_t i = 0; i < n; i++) {
        if (!str_ends(str_of(names[i]), ".use"))
            continue;
        char *path = path_join(s->dir, names[i]);
        int64_t at = mtime_ns(path);
        newest = at > newest ? at : newest;
        mem_free(path);
    }
    file_list_free(names, n);
    return newest;
}

/* The manifest stays as it was written: the time is that of the lock file. A read-only cache has no last use. */
void touch_used(struct overlay_store *s, struct digest digest)
{
    char *path = entry_lock_path(s, digest, "use");
    int fd = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666) : -1;
    mem_free(path);
    if (fd < 0)
        return;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    int64_t at = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec, newest = newest_use(s);
    if (at <= newest)
        at = newest + 1;
    struct timespec t[2] = {
        {.tv_nsec = UTIME_OMIT},
        {.tv_sec = (time_t)(at / 1000000000), .tv_nsec = (long)(at % 1000000000)}};
    if (futimens(fd, t))
        (void)futimens(fd, NULL); /* somebody else's file: only "now" is allowed */
    (void)close(fd);
}
