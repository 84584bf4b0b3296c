/*
 * The memory plan: how much host memory weights may use, as the minimum of what the system has, what the control groups of
 * this process and their ancestors leave, and what the user allows. Our own page cache is not usage: it can be dropped. Called once,
 * when an engine opens. Must never guess silently: the note names every number that decided.
 */
#include <stdio.h>
#include <string.h>

#include "engine/engine_int.h"

#define SMALL_FILE_BYTES ((size_t)1 << 20)
#define NO_LIMIT         UINT64_MAX
/* v1 writes "no limit" as a huge number, rounded to pages */
#define UNLIMITED ((uint64_t)1 << 60)

/* A small file below root, NUL-terminated; NULL when it cannot be read. Owned by caller. */
static char *read_small(const char *root, const char *path)
{
    char *full = path_join(root[0] ? root : "/", path[0] == '/' ? path + 1 : path), *text = NULL;
    size_t n;
    if (!full || file_read_all(full, SMALL_FILE_BYTES, &text, &n, NULL))
        text = NULL;
    mem_free(full);
    return text;
}

/* The number after `key` at the beginning of a line; false when there is none. */
static bool field(const char *text, const char *key, uint64_t *out)
{
    size_t n_key = strlen(key);
    for (const char *line = text; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, key, n_key) != 0)
            continue;
        const char *p = line + n_key + strspn(line + n_key, " \t:");
        return str_to_u64((struct str){p, strspn(p, "0123456789")}, out);
    }
    return false;
}

static uint64_t number_in(const char *root, const char *dir, const char *name)
{
    char *path = path_join(dir, name), *text = path ? read_small(root, path) : NULL;
    uint64_t v = NO_LIMIT;
    if (text && !str_to_u64((struct str){text, strspn(text, "0123456789")}, &v))
        v = NO_LIMIT; /* "max" */
    mem_free(text);
    mem_free(path);
    return v;
}

struct cgroup_kind {
    const char *limit, *throttle, *usage, *hierarchy; /* file names; NULL: this kind has none */
    const char *active, *inactive;                    /* lines of memory.stat */
};
/* v1's total_* lines include the groups below, as its usage does. */
static const struct cgroup_kind V1 = {
    .limit = "memory.limit_in_bytes",
    .usage = "memory.usage_in_bytes",
    .hierarchy = "memory.use_hierarchy",
    .active = "total_active_file ",
    .inactive = "total_inactive_file ",
};
/* Above memory.high a v2 group is not killed but slowed down until it is useless: a limit like the other. */
static const struct cgroup_kind V2 = {
    .limit = "memory.max",
    .throttle = "memory.high",
    .usage = "memory.current",
    .active = "active_file ",
    .inactive = "inactive_file ",
};

/* The group that leaves least, so far. */
struct tightest {
    uint64_t left, limit;
    char dir[200];
};

/* What one group leaves: its limit less its usage, page cache not counted. */
static void look_at(const char *root, const char *dir, const struct cgroup_kind *kind,
                    struct tightest *t)
{
    uint64_t limit = number_in(root, dir, kind->limit), usage = number_in(root, dir, kind->usage);
    uint64_t throttle = kind->throttle ? number_in(root, dir, kind->throttle) : NO_LIMIT;
    limit = throttle < limit ? throttle : limit;
    if (limit >= UNLIMITED || usage == NO_LIMIT)
        return;
    char *path = path_join(dir, "memory.stat"), *text = path ? read_small(root, path) : NULL;
    uint64_t active = 0, inactive = 0;
    if (text) {
        (void)field(text, kind->active, &active);
        (void)field(text, kind->inactive, &inactive);
    }
    mem_free(text);
    mem_free(path);
    uint64_t cache = active < usage ? active : usage;
    cache += inactive < usage - cache ? inactive : usage - cache;
    uint64_t left = limit > usage - cache ? limit - (usage - cache) : 0;
    if (left < t->left) {
        *t = (struct tightest){.left = left, .limit = limit};
        snprintf(t->dir, sizeof t->dir, "/%.190s", dir);
    }
}

/* A group and its ancestors up to the mount point. v1 groups need not count what is below them. */
static void climb(const char *root, const char *mount, const char *group,
                  const struct cgroup_kind *kind, struct tightest *t)
{
    struct strbuf dir;
    strbuf_init(&dir);
    strbuf_addf(&dir, "%s%s", mount, group);
    size_t n_mount = strlen(mount);
    for (bool is_own = true; strbuf_ok(&dir); is_own = false) {
        bool counts =
            is_own || !kind->hierarchy || number_in(root, strbuf_z(&dir), kind->hierarchy) != 0;
        if (counts)
            look_at(root, strbuf_z(&dir), kind, t);
        char *slash = strrchr(dir.p, '/');
        if (!slash || (size_t)(slash - dir.p) < n_mount)
            break;
        *slash = '\0';
        dir.n = (size_t)(slash - dir.p);
    }
    strbuf_release(&dir);
}

static bool names_memory(const char *controllers)
{
    for (const char *p = controllers; *p; p += strcspn(p, ","), p += *p == ',')
        if (strcspn(p, ",") == 6 && strncmp(p, "memory", 6) == 0)
            return true;
    return false;
}

/* One line of /proc/self/cgroup: "0::/path" for v2, "4:memory:/path" for v1. The line is cut up. */
static void look_at_line(const char *root, char *line, struct tightest *t)
{
    char *controllers = strchr(line, ':');
    char *group = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!group)
        return;
    *group++ = '\0';
    if (names_memory(controllers + 1)) {
        climb(root, "sys/fs/cgroup/memory", group, &V1, t);
    } else if (controllers[1] == '\0') {
        climb(root, "sys/fs/cgroup", group, &V2, t);
        climb(root, "sys/fs/cgroup/unified", group, &V2, t);
    }
}

static void look_at_cgroups(const char *root, struct tightest *t)
{
    char *text = read_small(root, "proc/self/cgroup");
    for (char *line = text, *end; line && *line; line = end) {
        end = line + strcspn(line, "\n");
        if (*end)
            *end++ = '\0';
        look_at_line(root, line, t);
    }
    mem_free(text);
}

static uint64_t mem_available(const char *root)
{
    char *text = read_small(root, "proc/meminfo");
    uint64_t kib;
    uint64_t n = text && field(text, "MemAvailable:", &kib) ? kib << 10 : NO_LIMIT;
    mem_free(text);
    return n;
}

static unsigned long long mib(uint64_t n)
{
    return (unsigned long long)(n >> 20);
}

int plan_memory(const char *root, uint64_t n_cap_bytes, struct memory_plan *out, pf_error *err)
{
    uint64_t system = mem_available(root ? root : ""), cap = n_cap_bytes ? n_cap_bytes : NO_LIMIT;
    struct tightest group = {.left = NO_LIMIT};
    look_at_cgroups(root ? root : "", &group);
    uint64_t least = system < group.left ? system : group.left;
    least = cap < least ? cap : least;
    if (least == NO_LIMIT)
        return err_set(err, PF_E_IO,
                       "neither /proc/meminfo nor a control group tells how much memory there is: "
                       "say --host-memory");
    struct strbuf b;
    strbuf_init(&b);
    if (system != NO_LIMIT)
        strbuf_addf(&b, "system leaves %llu MiB, ", mib(system));
    if (group.left != NO_LIMIT)
        strbuf_addf(&b, "control group '%s' leaves %llu of %llu MiB, ", group.dir, mib(group.left),
                    mib(group.limit));
    if (cap != NO_LIMIT)
        strbuf_addf(&b, "allowed are %llu MiB, ", mib(cap));
    strbuf_addf(&b, "so %llu MiB", mib(least));
    *out = (struct memory_plan){.available_bytes = least};
    snprintf(out->note, sizeof out->note, "%s", strbuf_z(&b));
    strbuf_release(&b);
    return PF_OK;
}
