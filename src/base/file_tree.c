/*
 * Names and directories: making and removing trees, listing, comparing and joining paths. Must never follow a link while
 * removing, and never look at what a file contains.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"

#define DEPTH_MAX 64

/* ------------------------------------------------------------------------------------------------ names */

char *path_join(const char *a, const char *b)
{
    const size_t n_a = strlen(a), n_b = strlen(b);
    const bool needs_slash = n_a && a[n_a - 1] != '/';
    char *p = mem_alloc(n_a + needs_slash + n_b + 1);
    if (!p)
        return NULL;
    memcpy(p, a, n_a);
    if (needs_slash)
        p[n_a] = '/';
    memcpy(p + n_a + needs_slash, b, n_b + 1);
    return p;
}

/* "a/b//" is "a/b"; "/" stays. */
static size_t trimmed_length(const char *path)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    return n;
}

bool path_is_below(const char *path, const char *dir)
{
    const size_t n = strlen(dir);
    return !strncmp(path, dir, n) && (!path[n] || path[n] == '/' || (n && dir[n - 1] == '/'));
}

struct str path_base(const char *path)
{
    const size_t n = trimmed_length(path);
    size_t i = n;
    while (i && path[i - 1] != '/')
        i--;
    if (i == n && n) /* "/" */
        i = n - 1;
    return (struct str){path + i, n - i};
}

char *path_dir(const char *path)
{
    size_t n = trimmed_length(path);
    while (n && path[n - 1] != '/')
        n--;
    while (n > 1 && path[n - 1] == '/')
        n--;
    return n ? mem_strndup(path, n) : mem_strdup(".");
}

enum file_kind file_kind(const char *path)
{
    struct stat st;
    if (stat(path, &st))
        return errno == ENOENT || errno == ENOTDIR ? FILE_ABSENT : FILE_OTHER;
    return S_ISREG(st.st_mode) ? FILE_REGULAR : S_ISDIR(st.st_mode) ? FILE_DIRECTORY : FILE_OTHER;
}

int file_kind_refuse(const char *path, pf_error *err)
{
    struct stat st;
    if (stat(path, &st) != 0)
        return err_sys(err, errno, "cannot open '%s'", path);
    return err_set(err, PF_E_INVALID, "'%s' is neither a file nor a directory", path);
}

bool file_same(const char *a, const char *b)
{
    struct stat sa, sb;
    return !stat(a, &sa) && !stat(b, &sb) && sa.st_dev == sb.st_dev && sa.st_ino == sb.st_ino;
}

int file_realpath(const char *path, char **out, pf_error *err)
{
    char *p = realpath(path, NULL);
    if (!p)
        return err_sys(err, errno, "cannot resolve '%s'", path);
    char *ours = mem_strdup(p); /* of our allocator, so that mem_free takes it */
    free(p);
    if (!ours)
        return err_nomem(err, 0, "a path");
    *out = ours;
    return PF_OK;
}

uint64_t file_free_bytes(const char *path)
{
    struct statvfs s;
    return statvfs(path, &s) ? 0 : (uint64_t)s.f_bavail * s.f_frsize;
}

/* ---------------------------------------------------------------------------------------------- directories */

int file_mkdirs(const char *dir, pf_error *err)
{
    const size_t n = trimmed_length(dir);
    char *path = mem_strndup(dir, n);
    if (!path)
        return err_nomem(err, n + 1, "a path");
    int rc = PF_OK;
    for (size_t i = 1; i <= n && !rc; i++) {
        if (i < n && path[i] != '/')
            continue;
        const char saved = path[i];
        path[i] = '\0';
        if (mkdir(path, 0777) && errno != EEXIST)
            rc = err_sys(err, errno, "cannot create directory '%s'", path);
        else if (i == n && file_kind(path) != FILE_DIRECTORY)
            rc = err_set(err, PF_E_EXISTS, "'%s' exists and is not a directory", path);
        path[i] = saved;
    }
    mem_free(path);
    return rc;
}

static int remove_in(int fd_dir, const char *name, unsigned depth);

/* Empties the directory behind fd, which is closed. Returns an errno. */
static int empty_dir(int fd, unsigned depth)
{
    DIR *d = fdopendir(fd);
    if (!d) {
        const int saved = errno;
        (void)close(fd);
        return saved;
    }
    int rc = 0;
    for (;;) {
        errno = 0;
        const struct dirent *e = readdir(d);
        if (!e) {
            if (!rc)
                rc = errno;
            break;
        }
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, ".."))
            continue;
        const int sub = remove_in(dirfd(d), e->d_name, depth);
        if (sub && !rc)
            rc = sub; /* the others go all the same */
    }
    (void)closedir(d);
    return rc;
}

static int remove_in(int fd_dir, const char *name, unsigned depth)
{
    if (!unlinkat(fd_dir, name, 0) || errno == ENOENT)
        return 0;
    if (errno != EISDIR && errno != EPERM)
        return errno;
    if (depth >= DEPTH_MAX)
        return ELOOP;
    const int fd = openat(fd_dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) /* no directory after all: the unlink was refused for another reason */
        return errno == ENOTDIR || errno == ELOOP ? EPERM : errno;
    const int rc = empty_dir(fd, depth + 1);
    if (rc)
        return rc;
    return unlinkat(fd_dir, name, AT_REMOVEDIR) && errno != ENOENT ? errno : 0;
}

int file_remove_tree(const char *path, pf_error *err)
{
    const int sys_errno = remove_in(AT_FDCWD, path, 0);
    return sys_errno && sys_errno != ENOTDIR ? err_sys(err, sys_errno, "cannot remove '%s'", path)
                                             : PF_OK;
}

/* ------------------------------------------------------------------------------------------------- listing */

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

int file_list(const char *dir, char ***out_names, size_t *out_n, pf_error *err)
{
    DIR *d = opendir(dir);
    if (!d)
        return err_sys(err, errno, "cannot open directory '%s'", dir);
    char **names = NULL;
    size_t n = 0, cap = 0;
    int rc = PF_OK;
    while (!rc) {
        errno = 0;
        const struct dirent *e = readdir(d);
        if (!e) {
            if (errno)
                rc = err_sys(err, errno, "cannot read directory '%s'", dir);
            break;
        }
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, ".."))
            continue;
        if (!mem_grow((void **)&names, &cap, n, sizeof *names) ||
            !(names[n] = mem_strdup(e->d_name)))
            rc = err_nomem(err, 0, "a list of file names");
        else
            n++;
    }
    (void)closedir(d);
    if (rc) {
        file_list_free(names, n);
        return rc;
    }
    if (n)
        qsort(names, n, sizeof *names, compare_names);
    *out_names = names;
    *out_n = n;
    return PF_OK;
}

void file_list_free(char **names, size_t n)
{
    for (size_t i = 0; i < n; i++)
        mem_free(names[i]);
    mem_free(names);
}
