/*
 * base/pool.c: every task once, by workers in range, with a clean floating-point environment; how many threads a container allows.
 */
#include "testing.h"

#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/cpu.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/os_cpu.h"
#include "base/pool.h"

enum { N_TASKS = 1000 };

struct job {
    _Atomic unsigned n_done[N_TASKS];
    uint64_t plain[N_TASKS]; /* not atomic: pool_run must order it */
    unsigned n_workers;
    _Atomic bool is_bad_worker, is_bad_fp;
    uint32_t fp_word;
};

static void task(void *ctx, size_t i_task, unsigned i_worker)
{
    struct job *j = ctx;
    j->n_done[i_task]++;
    j->plain[i_task] = i_task * i_task;
    if (i_worker >= j->n_workers)
        j->is_bad_worker = true;
    if (os_fp_get() != j->fp_word &&
        (os_fp_get() & ~0x3fu) != j->fp_word) /* status bits may be set */
        j->is_bad_fp = true;
}

static void runs_every_task_once(void **state)
{
    (void)state;
    static struct job j;
    for (unsigned n_threads = 1; n_threads <= 7; n_threads += 2) {
        struct pool *pool = NULL;
        pf_error err = {0};
        assert_int_equal(pool_new(n_threads, &pool, &err), PF_OK);
        assert_int_equal(pool_n_workers(pool), n_threads);
        static const size_t sizes[] = {0, 1, 2, 7, N_TASKS};
        for (size_t s = 0; s < PF_COUNTOF(sizes); s++) {
            memset(&j, 0, sizeof j);
            j.n_workers = n_threads;
            j.fp_word = OS_FP_DEFAULT;
            pool_run(pool, sizes[s], task, &j);
            for (size_t i = 0; i < N_TASKS; i++) {
                assert_int_equal(j.n_done[i], i < sizes[s]);
                assert_int_equal(j.plain[i], i < sizes[s] ? i * i : 0);
            }
            assert_false(j.is_bad_worker);
            assert_false(j.is_bad_fp);
        }
        pool_free(pool);
    }
    pool_free(NULL);
}

/* Thousands of tiny jobs: a worker that wakes late must not touch the next job's tasks twice. */
static void survives_many_small_jobs(void **state)
{
    (void)state;
    static struct job j;
    struct pool *pool = NULL;
    assert_int_equal(pool_new(4, &pool, NULL), PF_OK);
    j.n_workers = 4;
    j.fp_word = OS_FP_DEFAULT;
    for (unsigned round = 1; round <= 3000; round++) {
        pool_run(pool, 5, task, &j);
        for (size_t i = 0; i < 5; i++)
            assert_int_equal(j.n_done[i], round);
    }
    pool_free(pool);
}

static void shields_tasks_from_the_callers_float_modes(void **state)
{
    (void)state;
    static struct job j;
    struct pool *pool = NULL;
    assert_int_equal(pool_new(1, &pool, NULL), PF_OK);
    j.n_workers = 1;
    j.fp_word = OS_FP_DEFAULT;
    const uint32_t saved = os_fp_get();
#if defined(__x86_64__)
    const uint32_t odd = saved | 0x8040u | 0x6000u; /* FTZ, DAZ, toward zero */
#else
    const uint32_t odd = saved | 1u << 24;
#endif
    os_fp_set(odd);
    pool_run(pool, 10, task, &j);
    const uint32_t after = os_fp_get();
    os_fp_set(saved);
    assert_int_equal(after, odd); /* and the caller gets its own back */
    assert_false(j.is_bad_fp);
    pool_free(pool);
}

static void refuses_absurd_thread_counts(void **state)
{
    (void)state;
    struct pool *pool = NULL;
    pf_error err = {0};
    assert_int_equal(pool_new(100000, &pool, &err), PF_E_RANGE);
    assert_non_null(strstr(err.msg, "100000 threads"));
    assert_null(pool);
}

static void default_follows_the_affinity_mask(void **state)
{
    (void)state;
    const unsigned n = pool_default_threads();
    assert_in_range(n, 1, 256);
    const pid_t pid = fork();
    if (!pid) {
        cpu_set_t all, one;
        if (sched_getaffinity(0, sizeof all, &all))
            _exit(9);
        CPU_ZERO(&one);
        for (int i = 0; i < CPU_SETSIZE; i++) {
            if (CPU_ISSET(i, &all)) {
                CPU_SET(i, &one);
                break;
            }
        }
        if (sched_setaffinity(0, sizeof one, &one))
            _exit(9);
        _exit((int)pool_default_threads());
    }
    int status = -1;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(WEXITSTATUS(status), 1);
}

static void put(const char *dir, const char *name, const char *text)
{
    char *path = path_join(dir, name);
    assert_int_equal(file_write_atomic(path, text, strlen(text), NULL), PF_OK);
    mem_free(path);
}

static void quota_is_the_tightest_on_the_way_up_rounded_up(void **state)
{
    const char *inner = test_path(state, "a/b"), *outer = test_path(state, "a"),
               *self = test_path(state, "cgroup");
    assert_int_equal(file_mkdirs(inner, NULL), PF_OK);
    put(*state, "cgroup", "1:cpu:/elsewhere\n0::/a/b\n");
    assert_int_equal(pool_quota_cpus(*state, self), 0); /* no cpu.max anywhere */
    put(inner, "cpu.max", "max 100000\n");
    assert_int_equal(pool_quota_cpus(*state, self), 0);
    put(outer, "cpu.max", "250000 100000\n");
    assert_int_equal(pool_quota_cpus(*state, self), 3);
    put(inner, "cpu.max", "50000 100000\n");
    assert_int_equal(pool_quota_cpus(*state, self), 1);
    put(inner, "cpu.max", "nonsense\n");
    put(*state, "cpu.max", "200000 100000\n");
    assert_int_equal(pool_quota_cpus(*state, self), 2);
    put(*state, "cgroup", "0::/\n");
    assert_int_equal(pool_quota_cpus(*state, self), 2);
    assert_int_equal(pool_quota_cpus(*state, "/nonexistent"), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(runs_every_task_once),
        cmocka_unit_test(survives_many_small_jobs),
        cmocka_unit_test(shields_tasks_from_the_callers_float_modes),
        cmocka_unit_test(refuses_absurd_thread_counts),
        cmocka_unit_test(default_follows_the_affinity_mask),
        in_dir(quota_is_the_tightest_on_the_way_up_rounded_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
