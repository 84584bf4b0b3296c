/*
 * Control groups by their files. What a kernel offers is found by trying: a group counts as made when its limit file took the number.
 */
#include "bench/cgroup.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"

#define V1_MOUNT     "/sys/fs/cgroup/memory"
#define V2_MOUNT     "/sys/fs/cgroup"
#define REMOVE_TRIES 100
#define RETRY_NS     10000000

static int write_text(const char *dir, const char *name, const char *text)
{
    char *path = path_join(dir, name);
    const int fd = path ? open(path, O_WRONLY | O_CLOEXEC) : -1;
    int sys_errno = fd < 0 ? (path ? errno : ENOMEM) : 0;
    if (fd >= 0 && write(fd, text, strlen(text)) < 0)
        sys_errno = errno;
    if (fd >= 0)
        (void)close(fd); /* nothing is buffered */
    mem_free(path);
    return sys_errno;
}

/* This process's group below the mount: the line of /proc/self/cgroup that starts, after its number, with `tag`. false: no such line. */
static bool own_group(const char *tag, char *out, size_t n_out)
{
    char *text = NULL;
    size_t n;
    bool is_found = false;
    if (file_read_all("/proc/self/cgroup", (size_t)1 << 16, &text, &n, NULL))
        return false;
    for (char *line = text, *end; !is_found && *line; line = end) {
        end = line + strcspn(line, "\n");
        if (*end)
            *end++ = '\0';
        const char *rest = strchr(line, ':');
        if (rest && strncmp(rest, tag, strlen(tag)) == 0) {
            const int n_text = snprintf(out, n_out, "%s", rest + strlen(tag));
            is_found = n_text >= 0 && (size_t)n_text < n_out;
        }
    }
    mem_free(text);
    return is_found;
}

/* Makes dir/pageflip-<pid>-<n> and sets its limit; 0, or the errno of what failed. */
static int make_in(struct cgroup *g, const char *dir, const char *limit_name, uint64_t n_bytes)
{
    char name[64], number[32];
    (void)snprintf(number, sizeof number, "%llu", (unsigned long long)n_bytes);
    for (int i = 0; i < 64; i++) {
        (void)snprintf(name, sizeof name, "pageflip-%ld-%d", (long)getpid(), i);
        const int n = snprintf(g->path, sizeof g->path, "%s/%s", dir, name);
        int sys_errno = n < 0 || (size_t)n >= sizeof g->path ? ENAMETOOLONG : 0;
        if (sys_errno == 0 && mkdir(g->path, 0755) != 0)
            sys_errno = errno;
        if (sys_errno == EEXIST)
            continue;
        if (sys_errno == 0) {
            sys_errno = write_text(g->path, limit_name, number);
            if (sys_errno == 0)
                return 0;
            (void)rmdir(g->path);
        }
        g->path[0] = '\0';
        return sys_errno;
    }
    g->path[0] = '\0';
    return EEXIST;
}

static int make_v1(struct cgroup *g, uint64_t n_bytes)
{
    char own[256], dir[512];
    if (!own_group(":memory:", own, sizeof own))
        return ENOENT;
    (void)snprintf(dir, sizeof dir, V1_MOUNT "%s", own);
    int sys_errno = make_in(g, dir, "memory.limit_in_bytes", n_bytes);
    if (sys_errno ==
        ENOENT) /* in a container the path may be the host's: then the mount is our group */
        sys_errno = make_in(g, V1_MOUNT, "memory.limit_in_bytes", n_bytes);
    return sys_errno;
}

/* v2 gives controllers only to children of a group that has no processes itself: a sibling of ours first, then a child. */
static int make_v2(struct cgroup *g, uint64_t n_bytes)
{
    char own[256], dir[512];
    if (!own_group("::", own, sizeof own) ||
        file_kind(V2_MOUNT "/cgroup.controllers") != FILE_REGULAR)
        return ENOENT;
    g->is_v2 = true;
    (void)snprintf(dir, sizeof dir, V2_MOUNT "%s", own);
    if (strcmp(own, "/") != 0) {
        char parent[512];
        (void)snprintf(parent, sizeof parent, "%.*s", (int)(strrchr(dir, '/') - dir), dir);
        (void)write_text(parent, "cgroup.subtree_control", "+memory"); /* it may be there already */
        if (make_in(g, parent, "memory.max", n_bytes) == 0)
            return 0;
    }
    (void)write_text(dir, "cgroup.subtree_control", "+memory");
    return make_in(g, dir, "memory.max", n_bytes);
}

int cgroup_make(struct cgroup *g, uint64_t n_limit_bytes, pf_error *err)
{
    *g = (struct cgroup){.is_v2 = false};
    const int v1 = make_v1(g, n_limit_bytes);
    if (v1 == 0)
        return PF_OK;
    const int v2 = make_v2(g, n_limit_bytes);
    if (v2 == 0)
        return PF_OK;
    return err_set(err, PF_E_UNSUPPORTED,
                   "no memory control group can be made here (v1: %s, v2: %s)", strerror(v1),
                   strerror(v2));
}

int cgroup_enter(const struct cgroup *g, pf_error *err)
{
    char number[32];
    (void)snprintf(number, sizeof number, "%ld", (long)getpid());
    const int sys_errno = write_text(g->path, "cgroup.procs", number);
    return sys_errno ? err_sys(err, sys_errno, "cannot enter control group '%s'", g->path) : PF_OK;
}

uint64_t cgroup_peak_bytes(const struct cgroup *g)
{
    char *path = path_join(g->path, g->is_v2 ? "memory.peak" : "memory.max_usage_in_bytes");
    char *text = NULL;
    size_t n;
    uint64_t v = 0;
    if (path && file_read_all(path, 64, &text, &n, NULL) == PF_OK &&
        !str_to_u64((struct str){text, strspn(text, "0123456789")}, &v))
        v = 0;
    mem_free(text);
    mem_free(path);
    return v;
}

void cgroup_remove(struct cgroup *g)
{
    /* A process that has just ended may still be on its way out of the group. */
    for (int i = 0; g->path[0] != '\0' && i < REMOVE_TRIES; i++) {
        if (rmdir(g->path) == 0 || errno == ENOENT)
            break;
        (void)nanosleep(&(struct timespec){.tv_nsec = RETRY_NS}, NULL);
    }
    g->path[0] = '\0';
}
