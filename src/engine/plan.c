/*
 * The memory plan: how much host memory weights may use, as the minimum of what the system has, what the control groups of
 * this process and their ancestors leave, and what the user allows. Our own page cache is not usage: it can be dropped. Called once,
 * when an engine opens. Must never guess silently: the note names every number that decided.
 */
#include <string.h>

#include "engine/engine_int.h"

#define SMALL_FILE_BYTES ((size_t)1 << 20)
#define NO_LIMIT         UINT64_MAX
#define V1_UNLIMITED                                                                               \
    ((uint64_t)1 << 60) /* v1 writes "no limit" as a huge number, rounded to pages */

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
    const char *limit, *usage; /* file names */
    bool is_v2;
};
static const struct cgroup_kind V1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", false};
static const struct cgroup_kind V2 = {"memory.max", "memory.current", true};

/* What one group leaves: its limit less its usage, page cache not counted. */
static uint64_t group_left(const char *root, const char *dir, const struct cgroup_kind *kind)
{
    uint64_t limit = number_in(root, dir, kind->limit), usage = number_in(root, dir, kind->usage);
    if (limit == NO_LIMIT || usage == NO_LIMIT || (!kind->is_v2 && limit >= V1_UNLIMITED))
        return NO_LIMIT;
    char *path = path_join(dir, "memory.stat"), *text = path ? read_small(root, path) : NULL;
    uint64_t active = 0, inactive = 0, cache;
    if (text) {
        /* v1's total_* lines include the groups below, as its usage does. */
        (void)field(text, kind->is_v2 ? "active_file " : "total_active_file ", &active);
        (void)field(text, kind->is_v2 ? "inactive_file " : "total_inactive_file ", &inactive);
    }
    mem_free(text);
    mem_free(path);
    cache = active + inactive < usage ? active + inactive : usage;
    return limit > usage - cache ? limit - (usage - cache) : 0;
}

/* The tightest of a group and its ancestors up to the mount point. */
static uint64_t tightest(const char *root, const char *mount, const char *group,
                         const struct cgroup_kind *kind)
{
    uint64_t left = NO_LIMIT;
    struct strbuf dir;
    strbuf_init(&dir);
    strbuf_addf(&dir, "%s%s", mount, group);
    size_t n_mount = strlen(mount);
    while (strbuf_ok(&dir)) {
        uint64_t here = group_left(root, strbuf_z(&dir), kind);
        if (here < left)
            left = here;
        char *slash = strrchr(dir.p, '/');
        if (!slash || (size_t)(slash - dir.p) < n_mount)
            break;
        *slash = '\0';
        dir.n = (size_t)(slash - dir.p);
    }
    strbuf_release(&dir);
    return left;
}

/* One line of /proc/self/cgroup: "0::/path" for v2, "4:memory:/path" for v1. The line is cut up. */
static uint64_t line_left(const char *root, char *line)
{
    char *controllers = strchr(line, ':');
    char *group = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!group)
        return NO_LIMIT;
    *group++ = '\0';
    if (strcmp(controllers + 1, "memory") == 0)
        return tightest(root, "sys/fs/cgroup/memory", group, &V1);
    if (controllers[1] != '\0')
        return NO_LIMIT;
    uint64_t pure = tightest(root, "sys/fs/cgroup", group, &V2);
    uint64_t hybrid = tightest(root, "sys/fs/cgroup/unified", group, &V2);
    return pure < hybrid ? pure : hybrid;
}

static uint64_t cgroups_left(const char *root)
{
    char *text = read_small(root, "proc/self/cgroup");
    uint64_t left = NO_LIMIT;
    for (char *line = text, *end; line && *line; line = end) {
        end = line + strcspn(line, "\n");
        if (*end)
            *end++ = '\0';
        uint64_t here = line_left(root, line);
        if (here < left)
            left = here;
    }
    mem_free(text);
    return left;
}

static uint64_t mem_available(const char *root)
{
    char *text = read_small(root, "proc/meminfo");
    uint64_t kib;
    uint64_t n = text && field(text, "MemAvailable:", &kib) ? kib << 10 : NO_LIMIT;
    mem_free(text);
    return n;
}

static void note_number(struct strbuf *b, const char *what, uint64_t v)
{
    if (v != NO_LIMIT)
        strbuf_addf(b, "%s%s %llu MiB", b->n ? ", " : "", what, (unsigned long long)(v >> 20));
}

int plan_memory(const char *root, uint64_t n_cap_bytes, struct memory_plan *out, pf_error *err)
{
    uint64_t system = mem_available(root ? root : ""), groups = cgroups_left(root ? root : "");
    uint64_t cap = n_cap_bytes ? n_cap_bytes : NO_LIMIT;
    uint64_t least = system < groups ? system : groups;
    if (cap < least)
        least = cap;
    if (least == NO_LIMIT)
        return err_set(err, PF_E_IO,
                       "neither /proc/meminfo nor a control group tells how much memory there is: "
                       "say --host-memory");
    struct strbuf b;
    strbuf_init(&b);
    note_number(&b, "system leaves", system);
    note_number(&b, "control groups leave", groups);
    note_number(&b, "allowed", cap);
    *out = (struct memory_plan){.available_bytes = least};
    size_t n = b.n < sizeof out->note ? b.n : sizeof out->note - 1;
    memcpy(out->note, strbuf_z(&b), n);
    strbuf_release(&b);
    return PF_OK;
}
