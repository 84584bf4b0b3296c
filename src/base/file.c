/*
 * Bytes to and from files: mappings, exact reads and writes, copies inside the kernel, and which of them the page cache holds.
 * Publishing, directories and locks are in file_publish.c and file_tree.c, the fault points of crash tests in file_fault.c. Must
 * never leave a descriptor open across an exec, and never report a short transfer as a success.
 */
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file_int.h"
#include "base/guard.h"
#include "base/mem.h"

#define COPY_STEP_BYTES ((uint64_t)8 << 20) /* one fault point each */
/* One request is cut to read_ahead_kb, of which this is the usual size */
#define FETCH_BYTES       ((uint64_t)128 << 10)
#define COPY_BUFFER_BYTES ((size_t)256 << 10)

static int64_t time_ns(struct timespec t)
{
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static struct file_stamp stamp_of(const struct stat *st)
{
    return (struct file_stamp){
        .dev = st->st_dev,
        .ino = st->st_ino,
        .n_bytes = (uint64_t)st->st_size,
        .mtime_ns = time_ns(st->st_mtim),
        .ctime_ns = time_ns(st->st_ctim),
    };
}

bool file_stamp_eq(const struct file_stamp *a, const struct file_stamp *b)
{
    return a->dev == b->dev && a->ino == b->ino && a->n_bytes == b->n_bytes &&
           a->mtime_ns == b->mtime_ns && a->ctime_ns == b->ctime_ns;
}

/* ------------------------------------------------------------------------------------------------ mapping */

/* O_NONBLOCK: a FIFO in the place of a file must be refused, not waited for. */
static int open_regular(const char *path, struct stat *out_st, int *out_fd, pf_error *err)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return err_sys(err, errno, "cannot open '%s'", path);
    if (fstat(fd, out_st)) {
        const int saved = errno;
        (void)close(fd); /* nothing was written */
        return err_sys(err, saved, "cannot stat '%s'", path);
    }
    if (!S_ISREG(out_st->st_mode)) {
        (void)close(fd);
        return err_set(err, PF_E_IO, "'%s' is %s, not a regular file", path,
                       S_ISDIR(out_st->st_mode) ? "a directory" : "a special file");
    }
    *out_fd = fd;
    return PF_OK;
}

int file_map_open(struct file_map *m, const char *path, pf_error *err)
{
    struct stat st;
    int fd = -1;
    const int rc = open_regular(path, &st, &fd, err);
    if (rc)
        return rc;
    struct file_map map = {.fd = fd, .n_bytes = (uint64_t)st.st_size, .i_guard = -1};
    map.stamp = stamp_of(&st);
    if (map.n_bytes) {
        void *p = mmap(NULL, map.n_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED) {
            const int saved = errno;
            (void)close(fd);
            return err_sys(err, saved, "cannot map %llu bytes of '%s'",
                           (unsigned long long)map.n_bytes, path);
        }
        map.p = p;
        map.i_guard = guard_register(p, map.n_bytes);
        if (map.i_guard < 0) {
            file_map_close(&map);
            return err_set(err, PF_E_NOMEM, "map '%s': no room in the table of guarded mappings",
                           path);
        }
    }
    *m = map;
    return PF_OK;
}

void file_map_close(struct file_map *m)
{
    if (!m)
        return;
    guard_unregister(m->i_guard);
    if (m->p)
        (void)munmap((void *)(uintptr_t)m->p, m->n_bytes); /* fails only for a wrong range */
    if (m->fd >= 0)
        (void)close(m->fd); /* only read from */
    *m = (struct file_map){.fd = -1, .i_guard = -1};
}

bool file_shows_cache(int fd)
{
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    /* Who owns a file is no answer inside a user namespace, where all strangers look alike. O_NOATIME is granted by the check that
       mincore makes first; its second one is the right to write. */
    int probe = open(path, O_RDONLY | O_CLOEXEC | O_NOATIME);
    if (probe >= 0)
        close(probe);
    return probe >= 0 || faccessat(AT_FDCWD, path, W_OK, AT_EACCESS) == 0;
}

void file_map_fetch(const struct file_map *m, uint64_t off, uint64_t n_bytes)
{
    for (uint64_t end = off + n_bytes; off < end; off += FETCH_BYTES) {
        uint64_t n = end - off < FETCH_BYTES ? end - off : FETCH_BYTES;
        (void)posix_fadvise(m->fd, (off_t)off, (off_t)n, POSIX_FADV_WILLNEED); /* advice */
    }
}

bool file_stamp_now(const char *path, struct file_stamp *out)
{
    struct stat st;
    if (stat(path, &st))
        return false;
    *out = stamp_of(&st);
    return true;
}

int file_map_check(const struct file_map *m, const char *path, pf_error *err)
{
    return file_map_check_stamp(m, &m->stamp, path, err);
}

int file_map_check_stamp(const struct file_map *m, const struct file_stamp *want, const char *path,
                         pf_error *err)
{
    struct stat st;
    if (fstat(m->fd, &st))
        return err_sys(err, errno, "cannot stat '%s'", path);
    const struct file_stamp now = stamp_of(&st);
    if (now.n_bytes < m->n_bytes || guard_tripped(m->i_guard))
        return err_set(err, PF_E_TRUNCATED, "'%s' shrank from %llu to %llu bytes while in use",
                       path, (unsigned long long)m->n_bytes, (unsigned long long)now.n_bytes);
    if (!file_stamp_eq(&now, want))
        return err_set(err, PF_E_CHANGED, "'%s' changed while in use", path);
    return PF_OK;
}

/* ------------------------------------------------------------------------------------------------ reading */

int file_pread(int fd, void *p, size_t n_bytes, uint64_t off, const char *path, pf_error *err)
{
    for (size_t n = 0; n < n_bytes;) {
        const ssize_t got = pread(fd, (char *)p + n, n_bytes - n, (off_t)(off + n));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return err_sys(err, errno, "cannot read %zu bytes of '%s' at %llu", n_bytes, path,
                           (unsigned long long)off);
        if (!got)
            return err_set(err, PF_E_TRUNCATED, "'%s' ends at %llu, %zu bytes wanted from %llu",
                           path, (unsigned long long)(off + n), n_bytes, (unsigned long long)off);
        n += (size_t)got;
    }
    return PF_OK;
}

int file_read_all(const char *path, size_t n_bytes_max, char **out_p, size_t *out_n, pf_error *err)
{
    struct stat st;
    int fd = -1;
    int rc = open_regular(path, &st, &fd, err);
    if (rc)
        return rc;
    char *p = NULL;
    /* Files of /proc say 0: read until the end, whatever stat says, in a buffer that doubles. */
    size_t n = 0, cap = st.st_size > 0 ? (size_t)st.st_size : 4095;
    for (;;) {
        if (cap > n_bytes_max)
            cap = n_bytes_max;
        if ((uint64_t)st.st_size > n_bytes_max) {
            rc = err_set(err, PF_E_RANGE, "'%s' has %llu bytes, %zu is the most", path,
                         (unsigned long long)st.st_size, n_bytes_max);
            goto out;
        }
        char *grown = mem_realloc_array(p, cap + 1, 1);
        if (!grown) {
            rc = err_nomem(err, cap + 1, path);
            goto out;
        }
        p = grown;
        while (n < cap + 1) { /* one byte more than fits: tells "full" from "end" */
            const ssize_t got = read(fd, p + n, cap + 1 - n);
            if (got < 0 && errno == EINTR)
                continue;
            if (got < 0) {
                rc = err_sys(err, errno, "cannot read '%s'", path);
                goto out;
            }
            if (!got)
                break;
            n += (size_t)got;
        }
        if (n <= cap)
            break;
        if (cap == n_bytes_max) {
            rc = err_set(err, PF_E_RANGE, "'%s' has more than %zu bytes", path, n_bytes_max);
            goto out;
        }
        cap = cap * 2 + 1;
    }
    p[n] = '\0';
    *out_p = p;
    *out_n = n;
    p = NULL;
out:
    mem_free(p);
    (void)close(fd);
    return rc;
}

/* ------------------------------------------------------------------------------------------------ writing */

int file_pwrite(int fd, const void *p, size_t n_bytes, uint64_t off, const char *path,
                pf_error *err)
{
    const enum fault fault = fault_point(FAULT_AT_WRITE);
    size_t n_half = fault == FAULT_TEAR || fault == FAULT_SHORT ? n_bytes / 2 : 0;
    int sys_errno = fault_errno(fault);
    for (size_t n = 0; n < n_bytes && !sys_errno;) {
        const size_t n_now = n_half ? n_half : n_bytes - n;
        n_half = 0;
        const ssize_t put = pwrite(fd, (const char *)p + n, n_now, (off_t)(off + n));
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0) {
            sys_errno = put ? errno : EIO; /* 0 for a wish of more: no progress is no success */
            break;
        }
        n += (size_t)put;
        fault_count_written((uint64_t)put);
        if (fault == FAULT_TEAR)
            fault_die();
    }
    if (fault == FAULT_TEAR)
        fault_die();
    if (sys_errno)
        return err_sys(err, sys_errno, "cannot write %zu bytes to '%s' at %llu", n_bytes, path,
                       (unsigned long long)off);
    return PF_OK;
}

static int copy_by_buffer(int fd_in, uint64_t off_in, int fd_out, uint64_t off_out,
                          uint64_t n_bytes, const char *path_out, pf_error *err)
{
    char *buffer = mem_alloc(COPY_BUFFER_BYTES);
    if (!buffer)
        return err_nomem(err, COPY_BUFFER_BYTES, "a copy buffer");
    int rc = PF_OK;
    for (uint64_t n = 0; n < n_bytes && !rc;) {
        const size_t n_now =
            n_bytes - n < COPY_BUFFER_BYTES ? (size_t)(n_bytes - n) : COPY_BUFFER_BYTES;
        rc = file_pread(fd_in, buffer, n_now, off_in + n, "the source of a copy", err);
        if (rc)
            err_append(err, " (copying to '%s')", path_out);
        else
            rc = file_pwrite(fd_out, buffer, n_now, off_out + n, path_out, err);
        n += n_now;
    }
    mem_free(buffer);
    return rc;
}

/* Refusals that mean "not between these two files", not "the copy failed". */
static bool is_copy_unsupported(int sys_errno)
{
    return sys_errno == EXDEV || sys_errno == EINVAL || sys_errno == ENOSYS ||
           sys_errno == EOPNOTSUPP || sys_errno == EPERM || sys_errno == ETXTBSY;
}

int file_copy_range(int fd_in, uint64_t off_in, int fd_out, uint64_t off_out, uint64_t n_bytes,
                    const char *path_out, pf_error *err)
{
    for (uint64_t n = 0; n < n_bytes;) {
        uint64_t n_now = n_bytes - n < COPY_STEP_BYTES ? n_bytes - n : COPY_STEP_BYTES;
        const enum fault fault = fault_point(FAULT_AT_WRITE);
        if ((fault == FAULT_TEAR || fault == FAULT_SHORT) && n_now > 1)
            n_now /= 2;
        off64_t in = (off64_t)(off_in + n), out = (off64_t)(off_out + n);
        int sys_errno;
        ssize_t put = -1;
        do {
            sys_errno = fault_errno(fault);
            if (!sys_errno && (put = copy_file_range(fd_in, &in, fd_out, &out, n_now, 0)) < 0)
                sys_errno = errno;
        } while (sys_errno == EINTR);
        if (fault == FAULT_TEAR)
            fault_die();
        if (put < 0 && is_copy_unsupported(sys_errno))
            return copy_by_buffer(fd_in, off_in + n, fd_out, off_out + n, n_bytes - n, path_out,
                                  err);
        if (put < 0)
            return err_sys(err, sys_errno, "cannot copy %llu bytes to '%s' at %llu",
                           (unsigned long long)n_bytes, path_out, (unsigned long long)off_out);
        if (!put)
            return err_set(err, PF_E_TRUNCATED,
                           "the source of '%s' ends at %llu, %llu bytes wanted from %llu", path_out,
                           (unsigned long long)(off_in + n), (unsigned long long)n_bytes,
                           (unsigned long long)off_in);
        n += (uint64_t)put;
        fault_count_written((uint64_t)put);
    }
    return PF_OK;
}

int file_reserve(int fd, uint64_t n_bytes, const char *path, pf_error *err)
{
    if (!n_bytes)
        return PF_OK;
    const enum fault fault = fault_point(FAULT_AT_WRITE);
    int sys_errno = fault_errno(fault);
    while (!sys_errno && fallocate(fd, 0, 0, (off_t)n_bytes)) {
        if (errno != EINTR)
            sys_errno = errno;
    }
    if (fault == FAULT_TEAR)
        fault_die();
    if (sys_errno == EOPNOTSUPP || sys_errno == ENOSYS)
        return PF_OK; /* the writes themselves will find out */
    if (sys_errno)
        return err_sys(err, sys_errno, "cannot reserve %llu bytes for '%s'",
                       (unsigned long long)n_bytes, path);
    return PF_OK;
}

int file_sync(int fd, const char *path, pf_error *err)
{
    const enum fault fault = fault_point(FAULT_AT_STEP);
    int sys_errno = fault_errno(fault);
    if (!sys_errno && fdatasync(fd))
        sys_errno = errno;
    if (fault == FAULT_TEAR)
        fault_die();
    return sys_errno ? err_sys(err, sys_errno, "sync '%s'", path) : PF_OK;
}
