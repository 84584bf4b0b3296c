/*
 * Kept pictures: a list in order of age, one file each. Files are not synced: they are copies that a crash may lose. Age outside of this
 * process is the time of a file.
 */
#include "server/picture.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/proc.h"

#define N_NAME_DIGITS 32

struct kept {
    struct kept *next;
    char name[PICTURE_NAME_BYTES];
    uint64_t n_bytes, t_expires_ns;
};

struct pictures {
    struct pictures_opts opts;
    char *dir;
    bool is_own_dir;
    pthread_mutex_t mu;         /* guards what follows */
    struct kept *first, **last; /* oldest first */
    uint32_t n;
    uint64_t n_bytes;
};

static int make_dir(struct pictures *p, pf_error *err)
{
    const char *tmp = getenv("TMPDIR");

    p->is_own_dir = !p->opts.dir;
    p->dir = p->opts.dir ? mem_strdup(p->opts.dir)
                         : path_join(tmp && *tmp ? tmp : "/tmp", "pageflip-pictures-XXXXXX");
    if (!p->dir)
        return err_nomem(err, 64, "a path");
    if (!p->is_own_dir)
        return file_mkdirs(p->dir, err);
    if (!mkdtemp(p->dir)) {
        int rc = err_sys(err, errno, "directory for pictures '%s'", p->dir);

        p->is_own_dir = false;
        return rc;
    }
    return PF_OK;
}

/* Names are checked before they become paths. */
static bool is_name(const char *name)
{
    return strspn(name, "0123456789abcdef") == N_NAME_DIGITS &&
           !strcmp(name + N_NAME_DIGITS, ".png");
}

static void append(struct pictures *p, struct kept *k)
{
    *p->last = k;
    p->last = &k->next;
    p->n++;
    p->n_bytes += k->n_bytes;
}

/* How long a file may stay, by its own time; 0: it is over, or there is no such file. */
static uint64_t n_left_ns(const struct pictures *p, const char *path, uint64_t *out_n_bytes)
{
    struct stat st;
    int64_t n_s;

    if (lstat(path, &st) || !S_ISREG(st.st_mode))
        return 0;
    *out_n_bytes = (uint64_t)st.st_size;
    n_s = (int64_t)st.st_mtim.tv_sec + (int64_t)p->opts.seconds - (int64_t)time(NULL);
    if (n_s > (int64_t)p->opts.seconds)
        n_s = (int64_t)p->opts.seconds; /* the clock was set back */
    return n_s > 0 ? (uint64_t)n_s * 1000000000 : 0;
}

static int by_expiry(const void *a, const void *b)
{
    const struct kept *x = *(const struct kept *const *)a, *y = *(const struct kept *const *)b;

    return x->t_expires_ns < y->t_expires_ns ? -1 : x->t_expires_ns > y->t_expires_ns;
}

/* What an earlier server left, or others keep, counts in the budget and expires. */
static int take_over(struct pictures *p, pf_error *err)
{
    struct kept **all;
    char **names = NULL;
    size_t n = 0, n_kept = 0;
    int rc = file_list(p->dir, &names, &n, err);

    if (rc)
        return rc;
    all = mem_calloc(n + 1, sizeof(struct kept *));
    if (!all)
        rc = err_nomem(err, n, "kept pictures");
    for (size_t i = 0; !rc && i < n; i++) {
        char *path = is_name(names[i]) ? path_join(p->dir, names[i]) : NULL;
        struct kept *k = path ? mem_calloc(1, sizeof(*k)) : NULL;

        if (k) { /* short of memory: a file that nobody will remove */
            k->t_expires_ns = clock_ns() + n_left_ns(p, path, &k->n_bytes);
            (void)snprintf(k->name, sizeof(k->name), "%s", names[i]);
            all[n_kept++] = k;
        }
        mem_free(path);
    }
    if (n_kept)
        qsort(all, n_kept, sizeof(struct kept *), by_expiry);
    for (size_t i = 0; i < n_kept; i++)
        append(p, all[i]);
    mem_free(all);
    file_list_free(names, n);
    return rc;
}

int pictures_new(const struct pictures_opts *opts, struct pictures **out_pictures, pf_error *err)
{
    struct pictures *p = mem_calloc(1, sizeof(*p));
    int rc;

    if (!p)
        return err_nomem(err, sizeof(*p), "pictures");
    p->opts = *opts;
    p->last = &p->first;
    (void)pthread_mutex_init(&p->mu, NULL); /* cannot fail with default attributes */
    rc = make_dir(p, err);
    if (!rc && !p->is_own_dir)
        rc = take_over(p, err);
    if (rc) {
        pictures_free(p);
        return rc;
    }
    *out_pictures = p;
    return PF_OK;
}

static void remove_file(const struct pictures *p, const char *name)
{
    char *path = path_join(p->dir, name);

    if (path)
        (void)unlink(path); /* gone already: fine */
    mem_free(path);
}

/* Caller holds mu. */
static void drop_oldest(struct pictures *p, bool is_removed)
{
    struct kept *k = p->first;

    p->first = k->next;
    if (!p->first)
        p->last = &p->first;
    p->n--;
    p->n_bytes -= k->n_bytes;
    if (is_removed)
        remove_file(p, k->name);
    mem_free(k);
}

void pictures_free(struct pictures *p)
{
    if (!p)
        return;
    while (p->first)
        drop_oldest(p, p->is_own_dir);
    if (p->is_own_dir)
        (void)rmdir(p->dir); /* left behind when somebody put a file into it */
    mem_free(p->dir);
    (void)pthread_mutex_destroy(&p->mu);
    mem_free(p);
}

static int write_file(const char *path, const void *png, size_t n_bytes, pf_error *err)
{
    int rc, fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);

    if (fd < 0)
        return err_sys(err, errno, "picture '%s'", path);
    rc = file_pwrite(fd, png, n_bytes, 0, path, err);
    (void)close(fd); /* written by then; not synced on purpose */
    if (rc)
        (void)unlink(path);
    return rc;
}

int pictures_keep(struct pictures *p, const void *png, size_t n_bytes,
                  char out_name[PICTURE_NAME_BYTES], pf_error *err)
{
    struct kept *k = mem_calloc(1, sizeof(*k));
    uint64_t random[2];
    char *path = NULL;
    int rc = PF_OK;

    if (!k)
        return err_nomem(err, sizeof(*k), "a picture");
    if (n_bytes > p->opts.n_bytes_max)
        rc =
            err_set(err, PF_E_RANGE, "a picture of %zu bytes is larger than the %llu that are kept",
                    n_bytes, (unsigned long long)p->opts.n_bytes_max);
    else if (getrandom(random, sizeof(random), 0) != sizeof(random))
        rc = err_sys(err, errno, "random name of a picture");
    if (!rc) {
        (void)snprintf(k->name, sizeof(k->name), "%016llx%016llx.png",
                       (unsigned long long)random[0], (unsigned long long)random[1]);
        path = path_join(p->dir, k->name);
        rc = path ? write_file(path, png, n_bytes, err) : err_nomem(err, 64, "a path");
    }
    mem_free(path);
    if (rc) {
        mem_free(k);
        return rc;
    }
    k->n_bytes = n_bytes;
    k->t_expires_ns = clock_ns() + (uint64_t)p->opts.seconds * 1000000000;
    memcpy(out_name, k->name, PICTURE_NAME_BYTES);
    (void)pthread_mutex_lock(&p->mu);
    while (p->first && p->n_bytes + n_bytes > p->opts.n_bytes_max)
        drop_oldest(p, true);
    append(p, k);
    (void)pthread_mutex_unlock(&p->mu);
    return PF_OK;
}

int pictures_read(struct pictures *p, const char *name, struct strbuf *out, pf_error *err)
{
    char *path, *bytes = NULL;
    uint64_t n_bytes;
    size_t n = 0;
    int rc;

    pictures_expire(p);
    if (!is_name(name))
        return err_set(err, PF_E_NOTFOUND, "there is no such picture, or no longer");
    path = path_join(p->dir, name);
    if (!path)
        return err_nomem(err, 64, "a path");
    if (n_left_ns(p, path, &n_bytes))
        rc = file_read_all(path, (size_t)p->opts.n_bytes_max, &bytes, &n, err);
    else
        rc = PF_E_NOTFOUND;
    if (rc == PF_E_NOTFOUND) /* perhaps removed by another server between the two looks */
        (void)err_set(err, rc, "there is no such picture, or no longer");
    if (!rc)
        strbuf_add(out, bytes, n);
    mem_free(bytes);
    mem_free(path);
    return rc;
}

void pictures_expire(struct pictures *p)
{
    uint64_t now = clock_ns();

    (void)pthread_mutex_lock(&p->mu);
    while (p->first && p->first->t_expires_ns <= now)
        drop_oldest(p, true);
    (void)pthread_mutex_unlock(&p->mu);
}

void pictures_count(struct pictures *p, uint32_t *out_n, uint64_t *out_n_bytes)
{
    (void)pthread_mutex_lock(&p->mu);
    *out_n = p->n;
    *out_n_bytes = p->n_bytes;
    (void)pthread_mutex_unlock(&p->mu);
}
