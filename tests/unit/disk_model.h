/*
 * A disk that may lose what was not synced: the calls that write, sync and rename are interposed, and what a power cut would do is
 * known at every moment. Included once by a test program. One writer at a time.
 *
 *     nothing gets its final name before its bytes are durable         disk.n_undurable stays 0
 *     names are durable in the end                                     disk_n_unsynced_dirs() == 0
 *     a failed write-back is told once to each descriptor              disk.i_failing: at the n-th start of one; as the kernel does
 */
#ifndef PF_TESTS_DISK_MODEL_H
#define PF_TESTS_DISK_MODEL_H

#include "testing.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

#define DISK_NODES 4096
#define DISK_FDS   1024

struct disk_node {
    dev_t dev;
    ino_t ino;
    bool is_dirty; /* a file: bytes that are not on the disk; a directory: names */
};

static struct disk {
    struct disk_node nodes[DISK_NODES];
    size_t n_nodes;
    unsigned n_undurable; /* names that were given to bytes that a power cut would lose */
    unsigned n_syncs, n_write_backs; /* calls */
    unsigned n_behind, n_behind_max; /* ranges whose write-back was started and not waited for */
    unsigned i_failing;              /* this start of a write-back fails, from 1; 0: none */
    dev_t dev_failed;
    ino_t ino_failed;       /* 0: none yet */
    bool is_told[DISK_FDS]; /* the error was reported through this descriptor */
    /* Called for every write to a file, before it: path by /proc. */
    void (*on_write)(const char *path);
} disk;

static PF_UNUSED void disk_reset(void)
{
    memset(&disk, 0, sizeof disk);
}

static void *disk_real(void **cache, const char *name)
{
    if (!*cache)
        *cache = dlsym(RTLD_NEXT, name);
    return *cache;
}

static struct disk_node *disk_node_of(const struct stat *st)
{
    for (size_t i = 0; i < disk.n_nodes; i++)
        if (disk.nodes[i].dev == st->st_dev && disk.nodes[i].ino == st->st_ino)
            return &disk.nodes[i];
    assert_true(disk.n_nodes < DISK_NODES);
    disk.nodes[disk.n_nodes] = (struct disk_node){.dev = st->st_dev, .ino = st->st_ino};
    return &disk.nodes[disk.n_nodes++];
}

static struct disk_node *disk_node_of_fd(int fd)
{
    struct stat st;
    return fstat(fd, &st) ? NULL : disk_node_of(&st);
}

static struct disk_node *disk_node_of_path(const char *path)
{
    struct stat st;
    return stat(path, &st) ? NULL : disk_node_of(&st);
}

static void disk_wrote(int fd)
{
    struct disk_node *n = disk_node_of_fd(fd);
    char link[40], path[1024];
    if (n)
        n->is_dirty = true;
    if (!disk.on_write)
        return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n_path = readlink(link, path, sizeof path - 1);
    path[n_path < 0 ? 0 : n_path] = '\0';
    disk.on_write(path);
}

/* Files with bytes that are not durable, leaving out those whose path ends so (NULL: none). */
static PF_UNUSED size_t disk_n_dirty_files(const char *but)
{
    struct disk_node *node = but ? disk_node_of_path(but) : NULL;
    size_t n = 0;
    for (size_t i = 0; i < disk.n_nodes; i++)
        n += disk.nodes[i].is_dirty && &disk.nodes[i] != node;
    return n;
}

/* A failed write-back, told once through each descriptor of the file; as errseq_t(9) has it. */
static bool disk_tells_error(int fd)
{
    struct stat st;
    if (!disk.ino_failed || fd < 0 || fd >= DISK_FDS || disk.is_told[fd] || fstat(fd, &st) ||
        st.st_ino != disk.ino_failed || st.st_dev != disk.dev_failed)
        return false;
    disk.is_told[fd] = true;
    return true;
}

/* ------------------------------------------------------------------------------------------ the calls */

ssize_t pwrite(int fd, const void *p, size_t n, off_t off)
{
    static void *cache;
    ssize_t (*fn)(int, const void *, size_t, off_t);
    *(void **)(void *)&fn = disk_real(&cache, "pwrite");
    disk_wrote(fd);
    return fn(fd, p, n, off);
}

ssize_t copy_file_range(int in, off64_t *off_in, int out, off64_t *off_out, size_t n,
                        unsigned flags)
{
    static void *cache;
    ssize_t (*fn)(int, off64_t *, int, off64_t *, size_t, unsigned);
    *(void **)(void *)&fn = disk_real(&cache, "copy_file_range");
    disk_wrote(out);
    return fn(in, off_in, out, off_out, n, flags);
}

int sync_file_range(int fd, off64_t off, off64_t n, unsigned flags)
{
    static void *cache;
    int (*fn)(int, off64_t, off64_t, unsigned);
    struct stat st;
    *(void **)(void *)&fn = disk_real(&cache, "sync_file_range");
    if (flags == SYNC_FILE_RANGE_WRITE && ++disk.n_write_backs == disk.i_failing &&
        !fstat(fd, &st)) {
        disk.dev_failed = st.st_dev;
        disk.ino_failed = st.st_ino;
    }
    disk.n_behind += flags == SYNC_FILE_RANGE_WRITE ? 1 : disk.n_behind ? -1u : 0;
    disk.n_behind_max = disk.n_behind > disk.n_behind_max ? disk.n_behind : disk.n_behind_max;
    if (flags != SYNC_FILE_RANGE_WRITE && disk_tells_error(fd)) {
        errno = EIO;
        return -1;
    }
    return fn(fd, off, n, flags);
}

static int disk_sync(int fd)
{
    struct disk_node *n = disk_node_of_fd(fd);
    disk.n_syncs++;
    disk.n_behind = 0;
    if (disk_tells_error(fd)) {
        errno = EIO;
        return -1;
    }
    if (n)
        n->is_dirty = false;
    return 0; /* the real one would only cost time */
}

int fdatasync(int fd)
{
    return disk_sync(fd);
}

int fsync(int fd)
{
    return disk_sync(fd);
}

static void disk_name_changes_in(const char *path)
{
    char dir[1024];
    snprintf(dir, sizeof dir, "%s", path);
    char *slash = strrchr(dir, '/');
    if (!slash)
        return;
    *slash = '\0';
    struct disk_node *n = disk_node_of_path(dir);
    if (n)
        n->is_dirty = true;
}

int rename(const char *from, const char *to)
{
    static void *cache;
    int (*fn)(const char *, const char *);
    *(void **)(void *)&fn = disk_real(&cache, "rename");
    struct disk_node *n = disk_node_of_path(from);
    disk.n_undurable += n && n->is_dirty;
    disk_name_changes_in(from);
    disk_name_changes_in(to);
    return fn(from, to);
}

#endif
