/*
 * Files: mapping, exact reads and writes, atomic publishing, locks. Every descriptor is O_CLOEXEC. Every write of the
 * project goes through file_pwrite, which counts, and can be told by the environment to fail or to kill the process at a
 * given point (PF_FAULT=kill@N | tear@N | enospc@N | eio@N | short@N): that is how the crash tests reach every write point.
 * Points are counted from 1 over the process: every write and piece of a copy, reservation, data sync, rename and directory sync.
 * kill: SIGKILL before it; tear: after half of it; enospc: this write and all later ones; eio: this one; short: half, then on.
 */
#ifndef PF_BASE_FILE_H
#define PF_BASE_FILE_H

#include "base/err.h"
#include "base/str.h"

/* What decides whether a file is still the one that was opened. */
struct file_stamp {
    uint64_t dev, ino, n_bytes;
    int64_t mtime_ns, ctime_ns;
};
bool file_stamp_eq(const struct file_stamp *a, const struct file_stamp *b);

/* A whole file, mapped MAP_PRIVATE + PROT_READ and registered with the SIGBUS guard. Immutable after open. */
struct file_map {
    int fd;           /* kept open: fstat tells about truncation; -1 when closed */
    const uint8_t *p; /* NULL for an empty file */
    uint64_t n_bytes;
    struct file_stamp stamp;
    int i_guard; /* handle of base/guard.h, -1 when none */
};
/* Regular files only. PF_E_NOTFOUND, PF_E_IO. */
int file_map_open(struct file_map *m, const char *path, pf_error *err);
void file_map_close(struct file_map *m);
/* Asks the kernel to read exactly these bytes: no window around them, no wait. Faults would bring up to read_ahead_kb each. */
void file_map_fetch(const struct file_map *m, uint64_t off, uint64_t n_bytes);
/* PF_E_TRUNCATED or PF_E_CHANGED, naming path, when the inode behind the mapping differs from its stamp. */
int file_map_check(const struct file_map *m, const char *path, pf_error *err);
/* The same against another stamp of it. */
int file_map_check_stamp(const struct file_map *m, const struct file_stamp *want, const char *path,
                         pf_error *err);
/* The stamp of whatever path names now; false: nothing that can be looked at. */
bool file_stamp_now(const char *path, struct file_stamp *out);

/* NUL added; owned by caller */
int file_read_all(const char *path, size_t n_bytes_max, char **out_p, size_t *out_n, pf_error *err);
/* Exact, or PF_E_TRUNCATED */
int file_pread(int fd, void *p, size_t n_bytes, uint64_t off, const char *path, pf_error *err);
int file_pwrite(int fd, const void *p, size_t n_bytes, uint64_t off, const char *path,
                pf_error *err); /* exact */
/* Copies a range in the kernel where it can (copy_file_range), else through a bounded buffer. Counts as writes. */
int file_copy_range(int fd_in, uint64_t off_in, int fd_out, uint64_t off_out, uint64_t n_bytes,
                    const char *path_out, pf_error *err);
/* Bytes written by this process through this layer. */
uint64_t file_bytes_written(void);
/* Replaces what PF_FAULT said ("kill@3"; NULL: no fault) and starts counting again: for tests that fork. false: not understood. */
bool file_fault_set(const char *spec);
uint64_t file_n_points(void); /* passed since the start, or since file_fault_set */

int file_sync(int fd, const char *path, pf_error *err);           /* fdatasync */
int file_rename(const char *from, const char *to, pf_error *err); /* durable after file_sync_dir */

/* A new file that appears under `path` only when published: temp file in the same directory, fdatasync, rename, fsync of the
 * directory. Abandoned (and unlinked) by file_new_abort, which is a no-op after a publish. A device or a pipe of that name is
 * PF_E_INVALID: it is never replaced. */
struct file_new {
    int fd;
    char *path, *temp_path;
};
int file_new_open(struct file_new *f, const char *path, pf_error *err);
int file_new_publish(struct file_new *f, pf_error *err);
void file_new_abort(struct file_new *f);

int file_write_atomic(const char *path, const void *p, size_t n_bytes, pf_error *err);
/* fallocate; PF_E_NOSPACE; no support is no error */
int file_reserve(int fd, uint64_t n_bytes, const char *path, pf_error *err);
int file_sync_dir(const char *dir, pf_error *err);
int file_mkdirs(const char *dir, pf_error *err);       /* like mkdir -p, 0777 & ~umask */
int file_remove_tree(const char *path, pf_error *err); /* absent is fine; follows no link */
uint64_t file_free_bytes(const char *path); /* for an unprivileged writer; 0 when unknown */

/* flock-based, advisory, released with the process. A child of fork shares it: only the process that took it gives it back; a child
 * that releases, exits or execs changes nothing for its parent, and a parent that releases does not wait for its children. */
struct file_lock {
    int fd;
    int64_t pid; /* who took it */
};
/* PF_E_BUSY when somebody has it */
int file_lock_try(struct file_lock *l, const char *path, pf_error *err);
int file_lock_shared_try(struct file_lock *l, const char *path, pf_error *err);
void file_lock_release(struct file_lock *l);

enum file_kind { FILE_ABSENT, FILE_REGULAR, FILE_DIRECTORY, FILE_OTHER };
enum file_kind file_kind(const char *path); /* follows links */
/* What a path of kind FILE_OTHER is, or why nobody can tell: PF_E_INVALID, PF_E_IO. */
int file_kind_refuse(const char *path, pf_error *err);
/* Does mincore tell which pages of this file are cached? For files of others the kernel calls every page cached. */
bool file_shows_cache(int fd);
bool file_same(const char *a, const char *b);                   /* same device and inode */
int file_realpath(const char *path, char **out, pf_error *err); /* owned by caller */
/* Names in a directory, sorted bytewise, "." and ".." left out. Owned by the caller: file_list_free. */
int file_list(const char *dir, char ***out_names, size_t *out_n, pf_error *err);
void file_list_free(char **names, size_t n);
char *path_join(const char *a, const char *b); /* NULL: out of memory */
struct str path_base(const char *path);
/* Both resolved (file_realpath): is `path` the directory `dir`, or below it? */
bool path_is_below(const char *path, const char *dir);
char *path_dir(const char *path); /* "." when there is none; owned by caller */

#endif
