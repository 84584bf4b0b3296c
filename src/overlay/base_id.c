/*
 * Content ids remembered by stat stamp: <cache>/bases/<hash of path and stamp>.json. A checkpoint whose files have the stamps that they had
 * is not read again. Whatever is wrong with a memory makes it worth nothing, never an error. Must never be asked behind the back of
 * the caller: the engine calls overlay_base_id once, after opening.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "overlay/overlay_int.h"

#define BASE_ID_VERSION 1
#define N_BASES_MAX     64
/* Clocks of file systems tick once in 10 ms, some once in 2 s: what changed so lately may change again under the same stamp. */
#define SETTLED_NS 2000000000

static char *memory_path(const struct overlay_store *s, const struct pf_checkpoint *ckpt)
{
    struct hasher *h = hasher_new();
    struct digest stamp = base_stamp(ckpt);
    char hex[DIGEST_HEX_LEN + 1];
    if (!h)
        return NULL;
    hasher_add_str(h, ckpt->path, strlen(ckpt->path));
    hasher_add_u64(h, stamp.hi);
    hasher_add_u64(h, stamp.lo);
    digest_hex(hasher_digest(h), hex);
    hasher_free(h);
    struct strbuf b;
    strbuf_init(&b);
    strbuf_addf(&b, "%s/" BASES_NAME "/%s.json", s->dir, hex);
    return strbuf_take(&b);
}

bool base_id_recall(struct overlay_store *s, struct pf_checkpoint *ckpt)
{
    struct json *m = NULL;
    struct digest id, stamp, now = base_stamp(ckpt);
    char *path = memory_path(s, ckpt);
    bool is_known = path && json_read_sealed(path, &m, NULL) == PF_OK;
    const char *hex = json_z(json_get(m, "id")), *at = json_z(json_get(m, "stamp"));
    is_known = is_known && json_int(json_get(m, "version")) == BASE_ID_VERSION && hex && at &&
               digest_parse(hex, &id) && digest_parse(at, &stamp) && digest_eq(stamp, now) &&
               str_eqz(json_str(json_get(m, "path")), ckpt->path);
    if (is_known)
        ckpt_content_id_recall(ckpt, id, json_bool(json_get(m, "is_refined")));
    json_free(m);
    mem_free(path);
    return is_known;
}

static int64_t newest_ns(const struct pf_checkpoint *ckpt)
{
    int64_t newest = 0;
    for (uint32_t i = 0; i < ckpt->n_files; i++) {
        const struct file_stamp st = ckpt_stamp(ckpt, i);
        newest = st.mtime_ns > newest ? st.mtime_ns : newest;
        newest = st.ctime_ns > newest ? st.ctime_ns : newest;
    }
    return newest;
}

/* Names of memories in `dir`, "<32 hex digits>.json"; whatever else is there is somebody else's. Owned by caller, as of file_list. */
static bool list_memories(const char *dir, char ***out_names, size_t *out_n)
{
    char **names = NULL, hex[DIGEST_HEX_LEN + 1];
    size_t n = 0, n_ours = 0;
    struct digest d;
    if (file_list(dir, &names, &n, NULL))
        return false;
    for (size_t i = 0; i < n; i++) {
        snprintf(hex, sizeof hex, "%.*s", DIGEST_HEX_LEN, names[i]);
        if (digest_parse(hex, &d) && strcmp(names[i] + DIGEST_HEX_LEN, ".json") == 0)
            names[n_ours++] = names[i];
        else
            mem_free(names[i]);
    }
    *out_names = names;
    *out_n = n_ours;
    return true;
}

void base_ids_forget(struct overlay_store *s)
{
    char *dir = path_join(s->dir, BASES_NAME), **names = NULL;
    size_t n = 0;
    if (dir && list_memories(dir, &names, &n)) {
        for (size_t i = 0; i < n; i++) {
            char *path = path_join(dir, names[i]);
            if (path)
                (void)unlink(path); /* one that stays only saves reading */
            mem_free(path);
        }
        file_list_free(names, n);
        (void)rmdir(dir); /* stays while there is anything else in it */
    }
    mem_free(dir);
}

/* Forgets the memories that were written first when there are too many. */
static void trim(const char *dir)
{
    char **names = NULL;
    size_t n = 0;
    if (!list_memories(dir, &names, &n))
        return;
    for (size_t n_left = n; n_left > N_BASES_MAX; n_left--) {
        char *oldest = NULL;
        struct timespec t_oldest = {0};
        for (size_t i = 0; i < n; i++) {
            struct stat st;
            char *path = path_join(dir, names[i]);
            bool is_older =
                path && stat(path, &st) == 0 &&
                (!oldest || st.st_mtim.tv_sec < t_oldest.tv_sec ||
                 (st.st_mtim.tv_sec == t_oldest.tv_sec && st.st_mtim.tv_nsec < t_oldest.tv_nsec));
            if (is_older) {
                mem_free(oldest);
                oldest = path;
                t_oldest = st.st_mtim;
            } else {
                mem_free(path);
            }
        }
        if (oldest)
            (void)unlink(oldest);
        mem_free(oldest);
    }
    file_list_free(names, n);
}

static int write_memory(struct overlay_store *s, struct pf_checkpoint *ckpt, struct digest id,
                        const char *path, pf_error *err)
{
    char hex[DIGEST_HEX_LEN + 1];
    struct json *m = json_new_object();
    json_set_int(m, "version", BASE_ID_VERSION);
    json_set_z(m, "path", ckpt->path);
    digest_hex(base_stamp(ckpt), hex);
    json_set_z(m, "stamp", hex);
    digest_hex(id, hex);
    json_set_z(m, "id", hex);
    json_set_bool(m, "is_refined", ckpt_content_id_is_refined(ckpt));
    char *dir = path_join(s->dir, BASES_NAME);
    int rc = dir ? file_mkdirs(dir, err) : err_nomem(err, 0, "a path");
    if (rc == PF_OK)
        rc = json_write_sealed(path, m, err);
    if (rc == PF_OK)
        trim(dir);
    mem_free(dir);
    json_free(m);
    return rc;
}

int base_id_remember(struct overlay_store *s, struct pf_checkpoint *ckpt, int64_t now_ns,
                     pf_error *err)
{
    struct file_lock lock = {.fd = -1};
    struct digest id;
    int rc = ckpt_content_id(ckpt, &id, err);
    if (rc)
        return rc;
    if (now_ns == 0) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        now_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }
    if (!store_is_writable(s) || now_ns - newest_ns(ckpt) < SETTLED_NS)
        return PF_OK;
    char *path = memory_path(s, ckpt), *lock_path = path_join(s->dir, "bases.lock");
    rc = path && lock_path ? lock_patiently(lock_path, false, &lock, err)
                           : err_nomem(err, 0, "a path");
    if (rc == PF_OK)
        rc = write_memory(s, ckpt, id, path, err);
    file_lock_release(&lock);
    mem_free(lock_path);
    mem_free(path);
    return rc;
}

int overlay_base_id(struct overlay_store *s, struct pf_checkpoint *ckpt, struct digest *out,
                    pf_error *err)
{
    /* A cache that cannot be written costs the next start a second, nothing else. */
    if (!base_id_recall(s, ckpt))
        (void)base_id_remember(s, ckpt, 0, NULL);
    return ckpt_content_id(ckpt, out, err);
}
