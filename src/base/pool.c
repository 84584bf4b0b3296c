/*
 * A thread pool for loops. One job at a time: the caller fills it in under the lock, wakes everybody, works too, then closes
 * the job and waits for those that had joined. A worker that wakes late finds the job closed and goes back to sleep, so nobody
 * waits for it. Tasks are handed out by an atomic counter. Must never allocate or start a thread inside pool_run.
 */
#include "base/pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/cpu.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/str.h"
#include "base/thread.h"

#define N_WORKERS_MAX 256
#define STACK_BYTES   ((size_t)256 << 10) /* untouched pages cost nothing, but keep them few */

struct worker {
    struct pool *pool;
    pthread_t thread;
    unsigned i_worker;
};

struct pool {
    pthread_mutex_t mu; /* guards what follows up to i_next */
    pthread_cond_t work, idle;
    uint64_t generation; /* of the job */
    bool is_open;        /* the job may be joined */
    bool is_ending;
    unsigned n_joined;
    pool_fn fn;
    void *ctx;
    size_t n_tasks;
    _Atomic size_t i_next;
    unsigned n_workers, n_started; /* immutable after pool_new */
    struct worker workers[];
};

static void work(struct pool *pool, pool_fn fn, void *ctx, size_t n_tasks, unsigned i_worker)
{
    for (;;) {
        /* Relaxed: the mutex orders the job's fields and the results; the counter only has to be exact. */
        const size_t i = atomic_fetch_add_explicit(&pool->i_next, 1, memory_order_relaxed);
        if (i >= n_tasks)
            return;
        fn(ctx, i, i_worker);
    }
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    struct pool *pool = w->pool;
    uint64_t seen = 0;
    (void)fp_enter(); /* for the life of the thread */
    (void)pthread_mutex_lock(&pool->mu);
    for (;;) {
        while (!pool->is_ending && (!pool->is_open || pool->generation == seen))
            (void)pthread_cond_wait(&pool->work, &pool->mu);
        if (pool->is_ending)
            break;
        seen = pool->generation;
        pool->n_joined++;
        const pool_fn fn = pool->fn;
        void *ctx = pool->ctx;
        const size_t n_tasks = pool->n_tasks;
        (void)pthread_mutex_unlock(&pool->mu);
        work(pool, fn, ctx, n_tasks, w->i_worker);
        (void)pthread_mutex_lock(&pool->mu);
        if (--pool->n_joined == 0)
            (void)pthread_cond_signal(&pool->idle);
    }
    (void)pthread_mutex_unlock(&pool->mu);
    return NULL;
}

int pool_new(unsigned n_threads, struct pool **out_pool, pf_error *err)
{
    if (!n_threads)
        n_threads = pool_default_threads();
    if (n_threads > N_WORKERS_MAX)
        return err_set(err, PF_E_RANGE, "%u threads asked for, %d is the most", n_threads,
                       N_WORKERS_MAX);
    const size_t n_bytes = sizeof(struct pool) + n_threads * sizeof(struct worker);
    struct pool *pool = mem_calloc(1, n_bytes);
    if (!pool)
        return err_nomem(err, n_bytes, "a thread pool");
    /* These cannot fail on Linux with default attributes */
    (void)pthread_mutex_init(&pool->mu, NULL);
    (void)pthread_cond_init(&pool->work, NULL);
    (void)pthread_cond_init(&pool->idle, NULL);
    pool->n_workers = n_threads;
    for (pool->n_started = 1; pool->n_started < n_threads; pool->n_started++) {
        struct worker *w = &pool->workers[pool->n_started];
        w->pool = pool;
        w->i_worker = pool->n_started;
        const int rc = thread_start(&w->thread, STACK_BYTES, worker_main, w);
        if (rc) {
            pool_free(pool);
            return err_sys(err, rc, "cannot start thread %u of %u", w->i_worker + 1, n_threads);
        }
    }
    *out_pool = pool;
    return PF_OK;
}

void pool_free(struct pool *pool)
{
    if (!pool)
        return;
    (void)pthread_mutex_lock(&pool->mu);
    pool->is_ending = true;
    (void)pthread_cond_broadcast(&pool->work);
    (void)pthread_mutex_unlock(&pool->mu);
    for (unsigned i = 1; i < pool->n_started; i++)
        (void)pthread_join(pool->workers[i].thread, NULL);
    (void)pthread_cond_destroy(&pool->work);
    (void)pthread_cond_destroy(&pool->idle);
    (void)pthread_mutex_destroy(&pool->mu);
    mem_free(pool);
}

unsigned pool_n_workers(const struct pool *pool)
{
    return pool->n_workers;
}

void pool_run(struct pool *pool, size_t n_tasks, pool_fn fn, void *ctx)
{
    const struct fp_env env = fp_enter();
    if (pool->n_workers == 1 || n_tasks <= 1) {
        for (size_t i = 0; i < n_tasks; i++)
            fn(ctx, i, 0);
        fp_leave(env);
        return;
    }
    (void)pthread_mutex_lock(&pool->mu);
    pool->fn = fn;
    pool->ctx = ctx;
    pool->n_tasks = n_tasks;
    pool->generation++;
    pool->is_open = true;
    atomic_store_explicit(&pool->i_next, 0, memory_order_relaxed); /* published by the mutex */
    (void)pthread_cond_broadcast(&pool->work);
    (void)pthread_mutex_unlock(&pool->mu);
    work(pool, fn, ctx, n_tasks, 0);
    (void)pthread_mutex_lock(&pool->mu);
    pool->is_open = false;
    while (pool->n_joined)
        (void)pthread_cond_wait(&pool->idle, &pool->mu);
    (void)pthread_mutex_unlock(&pool->mu);
    fp_leave(env);
}

/* ------------------------------------------------------------------------------------ how many threads */

static unsigned affinity_cpus(void)
{
    for (size_t n_cpus = 1024; n_cpus <= 1u << 20; n_cpus *= 4) {
        cpu_set_t *set = CPU_ALLOC(n_cpus);
        if (!set)
            break;
        const size_t n_bytes = CPU_ALLOC_SIZE(n_cpus);
        const int rc = sched_getaffinity(0, n_bytes, set);
        const int n = rc ? 0 : CPU_COUNT_S(n_bytes, set);
        CPU_FREE(set);
        if (n > 0)
            return (unsigned)n;
    }
    const long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (unsigned)n : 1;
}

/* One slice up to `end`, which is stepped over; an empty slice at the end of the text. */
static struct str take_until(struct str *s, char end)
{
    size_t n = 0;
    while (n < s->n && s->p[n] != end)
        n++;
    const struct str token = {s->p, n};
    *s = str_cut_front(*s, n < s->n ? n + 1 : n);
    return token;
}

/* CPUs that "<quota> <period>" stands for, rounded up; 0 for "max" and anything else. */
static unsigned quota_cpus(struct str quota, struct str period)
{
    uint64_t q = 0, p = 0;
    if (!str_to_u64(quota, &q) || !str_to_u64(period, &p) || !p || !q)
        return 0;
    const uint64_t n = q / p + (q % p != 0);
    return n > N_WORKERS_MAX ? N_WORKERS_MAX : (unsigned)n;
}

static unsigned quota_file(const char *dir, const char *name)
{
    char *path = path_join(dir, name), *text = NULL;
    size_t n = 0;
    unsigned n_cpus = 0;
    if (path && !file_read_all(path, 4096, &text, &n, NULL)) {
        struct str s = {text, n};
        const struct str line = take_until(&s, '\n');
        struct str rest = line;
        const struct str quota = take_until(&rest, ' ');
        n_cpus = quota_cpus(quota, rest);
    }
    mem_free(text);
    mem_free(path);
    return n_cpus;
}

unsigned pool_quota_cpus(const char *cgroup_root, const char *proc_cgroup)
{
    char *text = NULL;
    size_t n = 0;
    unsigned n_least = 0;
    if (file_read_all(proc_cgroup, 1u << 16, &text, &n, NULL))
        return 0;
    /* "0::/a/b" is the unified hierarchy; the tightest of b, a and the root counts. */
    struct str s = {text, n}, rel = {"", 0};
    while (s.n) {
        struct str line = take_until(&s, '\n');
        if (str_starts(line, "0::"))
            rel = str_cut_front(line, 3);
    }
    for (;;) {
        struct strbuf b;
        strbuf_init(&b);
        strbuf_adds(&b, cgroup_root);
        strbuf_add(&b, rel.p, rel.n);
        const unsigned n_cpus = strbuf_ok(&b) ? quota_file(strbuf_z(&b), "cpu.max") : 0;
        strbuf_release(&b);
        if (n_cpus && (!n_least || n_cpus < n_least))
            n_least = n_cpus;
        if (!rel.n)
            break;
        while (rel.n && rel.p[rel.n - 1] != '/')
            rel.n--;
        while (rel.n && rel.p[rel.n - 1] == '/')
            rel.n--;
    }
    mem_free(text);
    return n_least;
}

unsigned pool_default_threads(void)
{
    unsigned n = affinity_cpus();
    const unsigned n_quota = pool_quota_cpus("/sys/fs/cgroup", "/proc/self/cgroup");
    if (n_quota && n_quota < n)
        n = n_quota;
    return n < 1 ? 1 : n > N_WORKERS_MAX ? N_WORKERS_MAX : n;
}
