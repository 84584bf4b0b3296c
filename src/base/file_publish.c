/*
 * Publishing: a file appears under its name whole and durable, or not at all. Temporary file beside it, fdatasync, rename, fsync of the
 * directory; every one of these is a fault point. Also the advisory locks that keep two processes from publishing the same thing.
 */
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file_int.h"
#include "base/mem.h"
#include "base/proc.h"

#define N_TRIES        100
#define N_NAME_KEPT    200 /* of the final name in the temporary one: NAME_MAX is 255 */
#define N_LOCK_RETRIES 10

int file_rename(const char *from, const char *to, pf_error *err)
{
    const enum fault fault = fault_point(FAULT_AT_STEP);
    int sys_errno = fault_errno(fault);
    if (!sys_errno && rename(from, to))
        sys_errno = errno;
    if (fault == FAULT_TEAR)
        fault_die();
    return sys_errno ? err_sys(err, sys_errno, "rename '%s' to '%s'", from, to) : PF_OK;
}

int file_sync_dir(const char *dir, pf_error *err)
{
    const enum fault fault = fault_point(FAULT_AT_STEP);
    int sys_errno = fault_errno(fault);
    const int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return err_sys(err, errno, "cannot open directory '%s'", dir);
    if (!sys_errno && fsync(fd))
        sys_errno = errno;
    (void)close(fd); /* only synced */
    if (fault == FAULT_TEAR)
        fault_die();
    if (sys_errno == EINVAL || sys_errno == EROFS)
        return PF_OK; /* a file system that cannot sync directories has no more to offer */
    return sys_errno ? err_sys(err, sys_errno, "sync directory '%s'", dir) : PF_OK;
}

/* ".<name>.<pid>-<clock>-<n>.tmp" beside path; opened with O_EXCL, so uniqueness is a matter of tries only. */
static char *temp_name(const char *path)
{
    static _Atomic unsigned n_made;
    struct str base = path_base(path);
    if (base.n > N_NAME_KEPT)
        base.n = N_NAME_KEPT;
    char *dir = path_dir(path);
    struct strbuf b;
    strbuf_init(&b);
    if (dir)
        strbuf_addf(&b, "%s/.%.*s.%ld-%llx-%u.tmp", dir, (int)base.n, base.p, (long)getpid(),
                    (unsigned long long)clock_ns(),
                    atomic_fetch_add_explicit(&n_made, 1, memory_order_relaxed));
    mem_free(dir);
    char *name = dir ? strbuf_take(&b) : NULL;
    strbuf_release(&b);
    return name;
}

int file_new_open(struct file_new *f, const char *path, pf_error *err)
{
    struct file_new n = {.fd = -1};
    int rc = PF_OK;
    if (file_kind(path) == FILE_OTHER) /* a rename would put a file in the place of /dev/null */
        return file_kind_refuse(path, err);
    n.path = mem_strdup(path);
    for (int i = 0; n.path && i < N_TRIES && n.fd < 0; i++) {
        mem_free(n.temp_path);
        n.temp_path = temp_name(path);
        if (!n.temp_path)
            break;
        n.fd = open(n.temp_path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (n.fd < 0 && errno != EEXIST) {
            /* The temporary name is nobody's concern. */
            rc = err_sys(err, errno, "cannot create '%s'", path);
            break;
        }
    }
    if (n.fd < 0) {
        if (!rc)
            rc = n.temp_path ? err_set(err, PF_E_IO, "no free temporary name beside '%s'", path)
                             : err_nomem(err, 0, "a path");
        mem_free(n.path);
        mem_free(n.temp_path);
        return rc;
    }
    *f = n;
    return PF_OK;
}

static void forget(struct file_new *f)
{
    if (f->fd >= 0)
        (void)close(f->fd); /* synced already, or thrown away */
    mem_free(f->path);
    mem_free(f->temp_path);
    *f = (struct file_new){.fd = -1};
}

int file_new_publish(struct file_new *f, pf_error *err)
{
    int rc = file_sync(f->fd, f->temp_path, err);
    if (rc)
        return rc;
    rc = file_rename(f->temp_path, f->path, err);
    if (rc)
        return rc;
    char *dir = path_dir(f->path);
    rc = dir ? file_sync_dir(dir, err) : err_nomem(err, 0, "a path");
    mem_free(dir);
    /* It has its final name: nothing to unlink any more, even if the directory did not sync */
    forget(f);
    return rc;
}

void file_new_abort(struct file_new *f)
{
    if (!f || !f->temp_path)
        return;
    (void)unlink(f->temp_path); /* best effort: a leftover is only litter */
    forget(f);
}

int file_write_atomic(const char *path, const void *p, size_t n_bytes, pf_error *err)
{
    struct file_new f = {.fd = -1};
    int rc = file_new_open(&f, path, err);
    if (rc)
        return rc;
    rc = file_pwrite(f.fd, p, n_bytes, 0, f.temp_path, err);
    if (!rc)
        rc = file_new_publish(&f, err);
    file_new_abort(&f);
    return rc;
}

/* -------------------------------------------------------------------------------------------------- locks */

/* The lock file may be unlinked between our open and our flock: then we would hold a lock that nobody sees. */
static bool is_still_there(int fd, const char *path)
{
    struct stat a, b;
    return !fstat(fd, &a) && !stat(path, &b) && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

static int lock_try(struct file_lock *l, const char *path, int operation, pf_error *err)
{
    for (int i = 0; i < N_LOCK_RETRIES; i++) {
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (fd < 0 && (errno == EISDIR || errno == EACCES || errno == EROFS))
            fd = open(path, O_RDONLY | O_CLOEXEC); /* a lock needs no write access */
        if (fd < 0)
            return err_sys(err, errno, "cannot open lock '%s'", path);
        int sys_errno = 0;
        while (flock(fd, operation | LOCK_NB)) {
            if (errno != EINTR) {
                sys_errno = errno;
                break;
            }
        }
        if (!sys_errno && is_still_there(fd, path)) {
            *l = (struct file_lock){.fd = fd, .pid = getpid()};
            return PF_OK;
        }
        (void)close(fd); /* gives a useless lock back */
        if (sys_errno == EWOULDBLOCK)
            return err_set(err, PF_E_BUSY, "'%s' is locked by another process", path);
        if (sys_errno)
            return err_sys(err, sys_errno, "cannot lock '%s'", path);
    }
    return err_set(err, PF_E_BUSY, "'%s' is replaced faster than it can be locked", path);
}

int file_lock_try(struct file_lock *l, const char *path, pf_error *err)
{
    return lock_try(l, path, LOCK_EX, err);
}

int file_lock_shared_try(struct file_lock *l, const char *path, pf_error *err)
{
    return lock_try(l, path, LOCK_SH, err);
}

void file_lock_release(struct file_lock *l)
{
    if (l && l->fd >= 0) {
        /* Closing alone would leave the lock with children that were forked meanwhile; unlocking in a child would take it from us. */
        if (l->pid == getpid())
            (void)flock(l->fd, LOCK_UN);
        (void)close(l->fd);
        l->fd = -1;
    }
}
