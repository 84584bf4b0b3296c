/*
 * The memory plan on fixture trees: system, control groups of both versions and their ancestors, the user's cap; and what follows from
 * it for layers. The last test makes a real group where it may.
 */
#include "engine_fixture.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((uint64_t)1 << 20)

/* A file below the test's directory, with the directories above it. */
static void put(void **state, const char *path, const char *text)
{
    const char *full = test_path(state, path);
    char *dir = path_dir(full);
    pf_error err;
    assert_ok(file_mkdirs(dir, &err), &err);
    mem_free(dir);
    write_file(full, text, strlen(text));
}

static void put_mib(void **state, const char *path, uint64_t n)
{
    char text[32];
    snprintf(text, sizeof text, "%llu\n", (unsigned long long)(n * MIB));
    put(state, path, text);
}

static void put_system(void **state, uint64_t n_mib, const char *groups)
{
    char text[128];
    snprintf(text, sizeof text, "MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: %llu kB\n",
             (unsigned long long)(n_mib << 10));
    put(state, "proc/meminfo", text);
    put(state, "proc/self/cgroup", groups);
}

static uint64_t plan_mib(void **state, uint64_t n_cap_mib, struct memory_plan *p)
{
    pf_error err;
    assert_ok(plan_memory(*state, n_cap_mib * MIB, p, &err), &err);
    return p->available_bytes / MIB;
}

static void the_system_alone(void **state)
{
    struct memory_plan p;
    put_system(state, 800, "0::/\n");
    assert_int_equal(plan_mib(state, 0, &p), 800);
    assert_string_equal(p.note, "system leaves 800 MiB, so 800 MiB");
    assert_int_equal(plan_mib(state, 300, &p), 300);
    assert_non_null(strstr(p.note, "allowed are 300 MiB, so 300 MiB"));
    assert_int_equal(plan_mib(state, 900, &p), 800); /* what is allowed is not there */
}

/* The ancestor leaves less than the group itself: its other children use it up. */
static void v2_the_tightest_ancestor_decides(void **state)
{
    struct memory_plan p;
    put_system(state, 8000, "0::/a/b/c\n");
    put_mib(state, "sys/fs/cgroup/a/memory.max", 1000);
    put_mib(state, "sys/fs/cgroup/a/memory.current", 700);
    put(state, "sys/fs/cgroup/a/b/memory.max", "max\n");
    put_mib(state, "sys/fs/cgroup/a/b/memory.current", 100);
    put_mib(state, "sys/fs/cgroup/a/b/c/memory.max", 500);
    put_mib(state, "sys/fs/cgroup/a/b/c/memory.current", 100);
    assert_int_equal(plan_mib(state, 0, &p), 300);
    assert_non_null(strstr(p.note, "control group '/sys/fs/cgroup/a' leaves 300 of 1000 MiB"));
    put_mib(state, "sys/fs/cgroup/a/b/c/memory.current", 250); /* now the group itself */
    assert_int_equal(plan_mib(state, 0, &p), 250);
    assert_non_null(strstr(p.note, "'/sys/fs/cgroup/a/b/c' leaves 250 of 500 MiB"));
    put_system(state, 200, "0::/a/b/c\n");
    assert_int_equal(plan_mib(state, 0, &p), 200); /* MemAvailable is the smallest */
    put_mib(state, "sys/fs/cgroup/a/memory.current", 1200);
    assert_int_equal(plan_mib(state, 0, &p), 0); /* beyond its limit: nothing, not a huge number */
}

static void v2_max_is_no_limit_and_high_is_one(void **state)
{
    struct memory_plan p;
    put_system(state, 8000, "0::/a\n");
    put(state, "sys/fs/cgroup/a/memory.max", "max\n");
    put_mib(state, "sys/fs/cgroup/a/memory.current", 100);
    assert_int_equal(plan_mib(state, 0, &p), 8000);
    assert_null(strstr(p.note, "control group"));
    put_mib(state, "sys/fs/cgroup/a/memory.high", 600);
    assert_int_equal(plan_mib(state, 0, &p), 500);
}

static void page_cache_is_not_usage(void **state)
{
    struct memory_plan p;
    put_system(state, 8000, "0::/a\n");
    put_mib(state, "sys/fs/cgroup/a/memory.max", 1000);
    put_mib(state, "sys/fs/cgroup/a/memory.current", 990);
    assert_int_equal(plan_mib(state, 0, &p), 10);
    /* anon 190, active_file 300, inactive_file 500 */
    put(state, "sys/fs/cgroup/a/memory.stat",
        "anon 199229440\nfile 838860800\ninactive_anon 199229440\nactive_anon 0\n"
        "inactive_file 524288000\nactive_file 314572800\n");
    assert_int_equal(plan_mib(state, 0, &p), 810);
    /* more cache than usage (the numbers are not read at one moment): no wrap-around */
    put_mib(state, "sys/fs/cgroup/a/memory.current", 700);
    assert_int_equal(plan_mib(state, 0, &p), 1000);
}

static void v1_limits_are_hierarchical(void **state)
{
    struct memory_plan p;
    put_system(state, 8000, "9:cpu,cpuacct:/x\n4:memory:/a/b\n0::/\n");
    put_mib(state, "sys/fs/cgroup/memory/a/memory.limit_in_bytes", 400);
    put_mib(state, "sys/fs/cgroup/memory/a/memory.usage_in_bytes", 300);
    put(state, "sys/fs/cgroup/memory/a/memory.use_hierarchy", "1\n");
    put(state, "sys/fs/cgroup/memory/a/memory.stat",
        "active_file 0\ninactive_file 0\ntotal_inactive_file 52428800\ntotal_active_file "
        "52428800\n");
    put(state, "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n");
    put_mib(state, "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", 20);
    put(state, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    put_mib(state, "sys/fs/cgroup/memory/memory.usage_in_bytes", 5000);
    assert_int_equal(plan_mib(state, 0, &p), 200);
    put(state, "sys/fs/cgroup/memory/a/memory.use_hierarchy", "0\n"); /* counts itself alone */
    assert_int_equal(plan_mib(state, 0, &p), 8000);
    put_system(state, 8000, "4:cpu,memory:/a\n");
    assert_int_equal(plan_mib(state, 0, &p), 200);
    put_system(state, 8000, "4:memory_like:/a\n");
    assert_int_equal(plan_mib(state, 0, &p), 8000);
}

/* v1 controllers beside a v2 tree at /sys/fs/cgroup/unified. */
static void hybrid_trees_are_both_looked_at(void **state)
{
    struct memory_plan p;
    put_system(state, 8000, "4:memory:/a\n0::/u\n");
    put_mib(state, "sys/fs/cgroup/memory/a/memory.limit_in_bytes", 400);
    put_mib(state, "sys/fs/cgroup/memory/a/memory.usage_in_bytes", 100);
    put_mib(state, "sys/fs/cgroup/unified/u/memory.max", 350);
    put_mib(state, "sys/fs/cgroup/unified/u/memory.current", 100);
    assert_int_equal(plan_mib(state, 0, &p), 250);
    put_mib(state, "sys/fs/cgroup/unified/u/memory.current", 0);
    assert_int_equal(plan_mib(state, 0, &p), 300);
}

static void what_is_missing_is_no_limit(void **state)
{
    struct memory_plan p;
    pf_error err;
    assert_int_equal(plan_memory(*state, 0, &p, &err), PF_E_IO);
    assert_err(&err, PF_E_IO, "--host-memory");
    assert_int_equal(plan_mib(state, 77, &p), 77);
    put_system(state, 500, "4:memory:/docker/0123\n"); /* a path of the host: not there in here */
    assert_int_equal(plan_mib(state, 0, &p), 500);
    put_mib(state, "sys/fs/cgroup/memory/memory.limit_in_bytes", 300); /* the mount is our group */
    assert_int_equal(plan_mib(state, 0, &p), 500);                     /* usage unknown */
    put_mib(state, "sys/fs/cgroup/memory/memory.usage_in_bytes", 100);
    assert_int_equal(plan_mib(state, 0, &p), 200);
    put(state, "proc/self/cgroup", "nonsense\n:\n::\n5:memory\n");
    assert_int_equal(plan_mib(state, 0, &p), 500);
    put(state, "proc/meminfo", "MemTotal: 5 kB\n");
    assert_int_equal(plan_memory(*state, 0, &p, &err), PF_E_IO);
}

/* ------------------------------------------------------------------------------------------- layers */

/* In the bundled model the stem is layer 0 and is kept first; the blocks are equal. */
static void layers_are_kept_mapped_and_resident_by_the_plan(void **state)
{
    struct fixture f;
    struct pf_engine_status s;
    struct pf_layer_status l;
    pf_error err;
    struct pf_checkpoint *ckpt;
    uint64_t n_all = 0, n_first = 0;
    assert_ok(pf_checkpoint_open(MODEL, NULL, &ckpt, &err), &err);
    uint32_t n = ckpt->n_layers, n_kept = 4;
    assert_true(n > n_kept + 2);
    for (uint32_t i = 0; i < n; i++) {
        n_all += ckpt->layers[i].n_bytes;
        n_first += i < n_kept ? ckpt->layers[i].n_bytes : 0;
    }
    pf_checkpoint_close(ckpt);
    /* A quarter is set apart for panels: room for the first layers and for half of the next. */
    char meminfo[64];
    snprintf(meminfo, sizeof meminfo, "MemAvailable: %llu kB\n",
             (unsigned long long)((n_first + 4096) * 4 / 3 >> 10) + 1);
    put(state, "proc/meminfo", meminfo);
    struct pf_engine_opts o = {.build_delay_ms = -1, .system_root = *state};
    open_engine(state, &f, o);
    pf_engine_status(f.engine, &s);
    assert_int_equal(s.n_layers_kept, n_kept);
    assert_int_equal(s.n_layers_mapped, n - n_kept);
    assert_int_equal(s.n_layers_resident, 0);
    assert_int_equal(s.n_bytes_kept, n_first);
    char want[128];
    snprintf(want, sizeof want, "of %u layers %u are kept", n, n_kept);
    assert_non_null(strstr(s.plan_note, want));
    for (uint32_t i = 0; i < n; i++) {
        assert_ok(pf_engine_layer_status(f.engine, i, &l, &err), &err);
        assert_string_equal(l.residency, i < n_kept ? "kept" : "mapped");
        assert_string_equal(l.place, "base");
    }
    assert_int_equal(pf_engine_layer_status(f.engine, n, &l, &err), PF_E_RANGE);
    close_engine(&f);
    /* Residents come first and out of the same room. */
    o.n_resident_layers = 2;
    open_engine(state, &f, o);
    pf_engine_status(f.engine, &s);
    assert_int_equal(s.n_layers_resident, 2);
    assert_true(s.n_bytes_resident > 0);
    assert_true(s.n_layers_kept <= n_kept - 2);
    assert_int_equal(s.n_layers_kept + s.n_layers_mapped + s.n_layers_resident, n);
    assert_ok(pf_engine_layer_status(f.engine, 1, &l, &err), &err);
    assert_string_equal(l.residency, "resident");
    assert_non_null(strstr(s.plan_note, "2 resident"));
    close_engine(&f);
    /* Everything fits. */
    o = (struct pf_engine_opts){.build_delay_ms = -1, .host_memory_bytes = n_all * 2};
    open_engine(state, &f, o);
    pf_engine_status(f.engine, &s);
    assert_int_equal(s.n_layers_kept, n);
    assert_int_equal(s.n_layers_mapped, 0);
    close_engine(&f);
}

/* What every step of a picture uses is kept before what it needs once; stems before blocks. */
static void the_transformer_is_kept_before_the_text_encoder(void **state)
{
    struct fixture f;
    struct pf_layer_status l;
    pf_error err;
    uint32_t n_kept = 0;
    /* A stem has 240 bytes, a block 1,200: room for two blocks, two stems and a bit. */
    open_small(state, &f,
               (struct pf_engine_opts){.build_delay_ms = -1,
                                       .host_memory_bytes = (2 * 1200 + 2 * 240 + 100) * 4 / 3});
    for (uint32_t i = 0; i < f.ckpt->n_layers; i++) {
        const struct ckpt_layer *layer = &f.ckpt->layers[i];
        bool is_transformer = layer->i_component == 1;
        assert_ok(pf_engine_layer_status(f.engine, i, &l, &err), &err);
        bool is_kept = strcmp(l.residency, "kept") == 0;
        assert_int_equal(is_kept, layer->is_stem || (is_transformer && n_kept < 4 &&
                                                     strchr("01", layer->name[7])));
        n_kept += is_kept;
    }
    assert_int_equal(n_kept, 4);
    close_engine(&f);
}

/* What does not fit is an error that names the sizes, before any of it is taken. */
static void residents_beyond_the_memory_are_refused(void **state)
{
    struct fixture f;
    struct pf_engine *e;
    struct pf_engine_status s;
    pf_error err;
    open_engine(state, &f, (struct pf_engine_opts){.build_delay_ms = -1, .n_resident_layers = 3});
    pf_engine_status(f.engine, &s);
    struct pf_engine_opts o = {.size = sizeof o,
                               .cache_dir = "off",
                               .n_resident_layers = 3,
                               .host_memory_bytes = s.n_bytes_resident};
    pf_engine_close(f.engine);
    /* To the byte: small tensors fill up to 64 */
    assert_ok(pf_engine_open(f.ckpt, &o, &e, &err), &err);
    pf_engine_close(e);
    o.host_memory_bytes = s.n_bytes_resident * 9 / 10;
    uint64_t before = proc_anon_bytes();
    assert_int_equal(pf_engine_open(f.ckpt, &o, &e, &err), PF_E_NOMEM);
    assert_err(&err, PF_E_NOMEM, "3 resident layers take 1 MiB", "allowed are", "ask for fewer");
    assert_true(proc_anon_bytes() < before + s.n_bytes_resident / 2);
    pf_checkpoint_close(f.ckpt);
}

/* Locked where the system allows it; where it does not, the status says so and everything works. */
static void residents_say_whether_they_are_locked(void **state)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    print_message("SKIP: engine_plan mlock: sanitizers make mlock do nothing and succeed\n");
    skip();
#endif
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct fixture f;
        struct pf_engine_status s;
        struct rlimit none = {0, 0};
        if (chmod(*state, 0777) || setrlimit(RLIMIT_MEMLOCK, &none) || !test_drop_root())
            _exit(2);
        open_engine(state, &f,
                    (struct pf_engine_opts){.build_delay_ms = -1, .n_resident_layers = 2});
        pf_engine_status(f.engine, &s);
        bool is_said = strstr(s.plan_note, "not locked: see ulimit -l") != NULL;
        pf_error err;
        bool works = pf_engine_settle(f.engine, SETTLE_MS, &err) == PF_OK;
        close_engine(&f);
        _exit(is_said && works ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
}

/* ------------------------------------------------------------------------------------------ for real */

#define GROUP_MIB 192

static bool write_at(const char *dir, const char *name, const char *text)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    bool ok = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    if (fd >= 0)
        close(fd);
    return ok;
}

/* Straight from the system: an allocator, or a sanitizer's, would keep what is given back. */
static char *pages(size_t n)
{
    char *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(p != MAP_FAILED);
    memset(p, 1, n);
    return p;
}

/* In the group: 64 MiB of page cache count as free, 48 MiB of memory do not. */
static int plan_inside(void **state, const char *dir)
{
    struct memory_plan p;
    pf_error err;
    char pid[32];
    snprintf(pid, sizeof pid, "%d", (int)getpid());
    if (!write_at(dir, "cgroup.procs", pid) || plan_memory("", 0, &p, &err))
        return 2;
    uint64_t before = p.available_bytes / MIB;
    size_t n = 64 * MIB;
    char *buf = pages(n);
    int fd = open(test_path(state, "cache-filler"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, buf, n) != (ssize_t)n || fsync(fd))
        return 3;
    munmap(buf, n);
    for (off_t at = 0; at < (off_t)n; at += 4096)
        if (pread(fd, &at, 1, at & ~4095) < 0)
            return 3;
    close(fd);
    char *used = pages(48 * MIB);
    if (plan_memory("", 0, &p, &err))
        return 4;
    uint64_t after = p.available_bytes / MIB;
    munmap(used, 48 * MIB);
    print_message("in a group of %d MiB: %llu MiB left before, %llu after; %s\n", GROUP_MIB,
                  (unsigned long long)before, (unsigned long long)after, p.note);
    bool ok = before > GROUP_MIB - 24 && before <= GROUP_MIB && after <= before - 40 &&
              after + 72 >= before;
    return ok ? 0 : 5;
}

static void v1_for_real(void **state)
{
    char dir[64], limit[32];
    snprintf(dir, sizeof dir, "/sys/fs/cgroup/memory/pf-test-%d", (int)getpid());
    snprintf(limit, sizeof limit, "%llu", (unsigned long long)(GROUP_MIB * MIB));
    if (mkdir(dir, 0755) != 0) {
        print_message("SKIP: engine_plan cgroup v1: no v1 memory group can be made here (%s)\n",
                      strerror(errno));
        skip();
    }
    if (!write_at(dir, "memory.limit_in_bytes", limit)) {
        rmdir(dir);
        print_message("SKIP: engine_plan cgroup v1: a v1 memory group takes no limit here\n");
        skip();
    }
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0)
        _exit(plan_inside(state, dir));
    int status = -1;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    for (int i = 0; rmdir(dir) != 0 && i < 1000; i++)
        sched_yield(); /* the last process leaves the group a moment after it ended */
    assert_int_equal(status, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(the_system_alone),
        in_dir(v2_the_tightest_ancestor_decides),
        in_dir(v2_max_is_no_limit_and_high_is_one),
        in_dir(page_cache_is_not_usage),
        in_dir(v1_limits_are_hierarchical),
        in_dir(hybrid_trees_are_both_looked_at),
        in_dir(what_is_missing_is_no_limit),
        in_dir(layers_are_kept_mapped_and_resident_by_the_plan),
        in_dir(the_transformer_is_kept_before_the_text_encoder),
        in_dir(residents_beyond_the_memory_are_refused),
        in_dir(residents_say_whether_they_are_locked),
        in_dir(v1_for_real),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
