/*
 * The background thread: one per engine, at low priority. It rewrites resident layers, rechecks a base whose files were touched,
 * builds overlays for compositions that lasted, and waits. Everything it decides, it decides under the engine's mutex from the state as
 * it is then; a superseded build is cancelled. Must never hold the mutex while it merges, builds or rechecks; adopting, which
 * proves a sample of an entry, is done under it.
 */
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "base/thread.h"
#include "engine/engine_int.h"

#define LOW_PRIORITY      10 /* more than whoever opened the engine; the system cuts it at 19 */
#define IOPRIO_IDLE       (3 << 13) /* IOPRIO_CLASS_IDLE, see ioprio_set(2) */
#define POLL_NS           20000000  /* readers to leave, another process to finish */
#define GENERATIONS_WORTH 3

static void timed_wait(struct pf_engine *e, uint64_t ns)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    ns += (uint64_t)t.tv_nsec;
    t.tv_sec += (time_t)(ns / 1000000000);
    t.tv_nsec = (long)(ns % 1000000000);
    pthread_cond_timedwait(&e->wake, &e->mu, &t);
}

static bool can_build(const struct pf_engine *e, const struct served *s)
{
    return e->store && !s->overlay && !s->is_build_failed &&
           view_composition(s->view)->n_targets > 0 && way_takes_overlay(s->way);
}

/* Nanoseconds until a composition is worth an overlay; UINT64_MAX: never. */
static uint64_t due_in(const struct pf_engine *e, const struct served *s)
{
    if (!s || !can_build(e, s))
        return UINT64_MAX;
    if (s->is_build_wanted)
        return 0;
    if (e->opts.build_delay_ms < 0)
        return UINT64_MAX;
    if (view_n_uses(s->view) - s->n_uses0 >= GENERATIONS_WORTH)
        return 0;
    if (s != e->global)
        return UINT64_MAX;
    uint64_t delay = (uint64_t)e->opts.build_delay_ms * 1000000, age = clock_ns() - s->t_global_ns;
    return age >= delay ? 0 : delay - age;
}

/* The global composition first, then those of requests that keep coming. */
static uint64_t next_build(const struct pf_engine *e, struct served **out)
{
    uint64_t due = due_in(e, e->global);
    *out = e->global;
    for (size_t i = 0; due > 0 && i < N_RECENT; i++)
        if (due_in(e, e->recent[i]) == 0) {
            *out = e->recent[i];
            due = 0;
        }
    return due;
}

static void note_failure(struct pf_engine *e, const pf_error *why)
{
    size_t n = strnlen(why->msg, sizeof e->cache_note - 1);
    memcpy(e->cache_note, why->msg, n);
    e->cache_note[n] = '\0';
    log_at(PF_LOG_WARN, "overlay: %s; streaming goes on", why->msg);
}

/* Sleeps until the build is no faster than it may be, or cancelled. */
static void hold_back(struct pf_engine *e, uint64_t n_done)
{
    double rate = (double)e->opts.build_bytes_per_s;
    uint64_t t = clock_ns(),
             due = rate > 0 ? e->t_build_ns + (uint64_t)((double)n_done / rate * 1e9) : 0;
    while (t < due && !atomic_load_explicit(&e->cancel_build, memory_order_relaxed) &&
           !atomic_load_explicit(&e->is_build_refused, memory_order_relaxed)) {
        struct timespec nap = {.tv_nsec = (long)(due - t < POLL_NS ? due - t : POLL_NS)};
        (void)nanosleep(&nap, NULL); /* woken early: the loop looks at the clock */
        t = clock_ns();
    }
}

/* Progress of a build, on whichever thread reports it. */
static bool watch(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    struct pf_engine *e = ctx;
    /* relaxed: numbers that inform, and flags that are looked at again */
    atomic_store_explicit(&e->n_built_bytes, done, memory_order_relaxed);
    atomic_store_explicit(&e->n_build_bytes, total, memory_order_relaxed);
    if (e->opts.progress && !e->opts.progress(e->opts.progress_ctx, what, done, total))
        atomic_store_explicit(&e->is_build_refused, true, memory_order_relaxed);
    if (!strcmp(what, "overlay"))
        hold_back(e, done);
    return !atomic_load_explicit(&e->cancel_build, memory_order_relaxed) &&
           !atomic_load_explicit(&e->is_build_refused, memory_order_relaxed);
}

/* Releases mu around a piece of work on s, which stays valid. begin_work clears what earlier work was told. */
static struct pf_view *begin_work(struct pf_engine *e, struct served *s)
{
    struct pf_view *view = s->view;
    view_ref(view); /* nobody frees a served composition whose view is held */
    e->busy = s;
    e->t_build_ns = clock_ns();
    atomic_store(&e->cancel_build, false);
    atomic_store(&e->is_build_refused, false);
    pthread_mutex_unlock(&e->mu);
    return view;
}

static void end_work(struct pf_engine *e, struct pf_view *view)
{
    pthread_mutex_lock(&e->mu);
    atomic_store(&e->n_build_bytes, 0);
    e->busy = NULL;
    pf_view_release(view); /* the list still holds it: nothing is freed before mu is released */
}

static void settle_failure(struct pf_engine *e, struct served *s, int rc, const pf_error *why)
{
    if (rc == PF_OK)
        return;
    if (rc != PF_E_CANCELLED) {
        s->is_build_failed = true;
        e->n_build_failures++;
        note_failure(e, why);
    } else if (atomic_load(&e->is_build_refused)) {
        s->is_build_failed = s->is_build_cancelled = true;
    }
}

static void recheck(struct pf_engine *e, struct served *s, struct pool *pool)
{
    struct overlay_build_opts opts = {.pool = pool, .progress = watch, .progress_ctx = e};
    pf_error why;
    struct pf_view *view = begin_work(e, s);
    int rc = overlay_recheck(e->store, view_composition(view), &opts, &why);
    end_work(e, view);
    if (rc == PF_E_CANCELLED && !atomic_load(&e->is_build_refused))
        return; /* superseded: when it comes back, so does this */
    if (rc == PF_E_BUSY) {
        timed_wait(e, POLL_NS); /* another process is at it; s may be gone afterwards */
        return;
    }
    s->is_recheck_needed = false;
    if (rc == PF_OK && !engine_try_adopt(e, s) && s->is_recheck_needed)
        rc = err_set(&why, PF_E_CHANGED, "the base files keep changing");
    /* MISMATCH: other bytes behind a known id: nothing that was computed before is used, and nothing is written over it. */
    settle_failure(e, s, rc, &why);
}

static void build(struct pf_engine *e, struct served *s, struct pool *pool)
{
    struct overlay_build_opts opts = {.pool = pool, .progress = watch, .progress_ctx = e};
    pf_error why;
    struct pf_view *view = begin_work(e, s);
    struct overlay_build_report report;
    int rc = overlay_build(e->store, view_composition(view), &opts, &report, &why);
    end_work(e, view);
    if (rc == PF_E_BUSY) { /* another process builds it: adopt its work when it is done */
        if (!engine_try_adopt(e, s))
            timed_wait(e, POLL_NS); /* s may be gone afterwards */
        return;
    }
    if (rc == PF_OK) {
        e->n_builds += report.n_layers_written > 0; /* else somebody was faster */
        e->cache_note[0] = '\0';                    /* whatever went wrong before */
        if (can_build(e, s) && !engine_try_adopt(e, s) && !s->is_recheck_needed)
            rc = err_set(&why, PF_E_IO, "overlay %s was built and cannot be adopted",
                         pf_view_digest(s->view));
    }
    settle_failure(e, s, rc, &why);
}

/* One piece of work; false: there was none. Caller holds mu. */
static bool step(struct pf_engine *e, struct pool *pool)
{
    struct served *s = e->global;
    if (!s)
        return false;
    enum resident_step residents = residents_step(e, s);
    if (residents == RESIDENT_DONE)
        return true;
    if (s->is_recheck_needed && !s->overlay && !s->is_build_failed && e->store) {
        recheck(e, s, pool);
        return true;
    }
    if (next_build(e, &s) == 0) {
        build(e, s, pool);
        return true;
    }
    if (residents == RESIDENT_BLOCKED) {
        timed_wait(e, POLL_NS / 10); /* readers have to leave first */
        return true;
    }
    return false;
}

static void *run(void *arg)
{
    struct pf_engine *e = arg;
    struct pool *pool = NULL;
    const id_t self = (id_t)syscall(SYS_gettid);
    /* Before the pool starts: its threads inherit both. Refusal is no error, the work is merely less polite. */
    (void)setpriority(PRIO_PROCESS, self, getpriority(PRIO_PROCESS, self) + LOW_PRIORITY);
    (void)syscall(SYS_ioprio_set, 1 /* IOPRIO_WHO_PROCESS */, 0, IOPRIO_IDLE);
    /* Half of the CPUs unless told: low priority shares a CPU fairly, but not the memory bandwidth that readers live on. */
    unsigned n = e->opts.n_threads ? e->opts.n_threads : (pool_default_threads() + 1) / 2;
    if (pool_new(n, &pool, NULL))
        log_at(PF_LOG_WARN, "the builder's threads cannot be started: no overlays will be built");
    pthread_mutex_lock(&e->mu);
    e->has_no_builder = !pool;
    while (!e->is_ending) {
        if (pool && step(e, pool)) {
            pthread_cond_broadcast(&e->idle); /* whoever waits looks at the state itself */
            continue;
        }
        struct served *next;
        uint64_t due = pool ? next_build(e, &next) : UINT64_MAX;
        e->is_idle = due == UINT64_MAX;
        if (e->is_idle)
            pthread_cond_broadcast(&e->idle);
        if (due == UINT64_MAX)
            pthread_cond_wait(&e->wake, &e->mu);
        else
            timed_wait(e, due);
    }
    e->is_idle = true;
    pthread_cond_broadcast(&e->idle);
    pthread_mutex_unlock(&e->mu);
    pool_free(pool);
    return NULL;
}

void background_wake(struct pf_engine *e)
{
    e->is_idle = false;
    pthread_cond_broadcast(&e->wake);
}

int background_start(struct pf_engine *e, pf_error *err)
{
    int sys_errno = thread_start(&e->thread, (size_t)256 << 10, run, e);
    if (sys_errno)
        return err_sys(err, sys_errno, "cannot start the engine's background thread");
    e->has_thread = true;
    return PF_OK;
}

bool background_may_be_awaited(const struct pf_engine *e)
{
    return !e->has_no_builder && e->pid == getpid() && !pthread_equal(e->thread, pthread_self());
}

void background_stop(struct pf_engine *e)
{
    if (!e->has_thread)
        return;
    pthread_mutex_lock(&e->mu);
    e->is_ending = true;
    atomic_store(&e->cancel_build, true);
    pthread_cond_broadcast(&e->wake);
    pthread_mutex_unlock(&e->mu);
    pthread_join(e->thread, NULL);
    e->has_thread = false;
}

int pf_engine_settle(struct pf_engine *engine, uint64_t timeout_ms, pf_error *err)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += (time_t)(timeout_ms / 1000);
    t.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    if (t.tv_nsec >= 1000000000) {
        t.tv_sec++;
        t.tv_nsec -= 1000000000;
    }
    int e = 0;
    pthread_mutex_lock(&engine->mu);
    if (engine->global && engine->opts.build_delay_ms >= 0)
        engine->global->is_build_wanted = true;
    background_wake(engine);
    while (!engine->is_idle && e == 0 && background_may_be_awaited(engine))
        e = pthread_cond_timedwait(&engine->idle, &engine->mu, &t);
    bool is_idle = engine->is_idle || engine->has_no_builder; /* nobody will come to work */
    pthread_mutex_unlock(&engine->mu);
    return is_idle ? PF_OK
                   : err_set(err, PF_E_BUSY, "background work is not done after %llu ms",
                             (unsigned long long)timeout_ms);
}

static void cancel(struct served *s)
{
    if (!s || s->overlay)
        return;
    s->is_build_wanted = false;
    s->is_build_failed = s->is_build_cancelled = true; /* until it is set again */
    s->n_uses0 = view_n_uses(s->view);
}

void pf_engine_cancel_build(struct pf_engine *engine)
{
    pthread_mutex_lock(&engine->mu);
    atomic_store(&engine->cancel_build, true);
    cancel(engine->global);
    cancel(engine->busy);
    pthread_cond_broadcast(&engine->idle);
    pthread_mutex_unlock(&engine->mu);
}

/* For reader threads: never waits. Whoever holds the mutex is a change, which wakes the builder itself, or the builder; and the next generation
 * tries again. */
void pf_engine_served(struct pf_engine *engine, const struct pf_view *view)
{
    /* The view is the caller's; only its counter is touched through this pointer. */
    if (view_count_use((struct pf_view *)(uintptr_t)view) < GENERATIONS_WORTH ||
        pthread_mutex_trylock(&engine->mu))
        return;
    struct served *s = served_of(engine, view);
    if (s && due_in(engine, s) == 0)
        background_wake(engine);
    pthread_mutex_unlock(&engine->mu);
}
