/*
 * The background thread: one per engine, at low priority. It rewrites resident layers, rechecks a base whose files were touched,
 * builds overlays for compositions that lasted, and waits. Everything it decides, it decides under the engine's mutex from the state as
 * it is then; a superseded build is cancelled. Must never hold the mutex while it merges, reads or writes.
 */
#include <errno.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "engine/engine_int.h"

#define LOW_PRIORITY      10
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
           view_composition(s->view)->n_targets > 0 &&
           (s->way == PF_WAY_AUTO || s->way == PF_WAY_OVERLAY);
}

/* Nanoseconds until the global composition is worth an overlay; UINT64_MAX: never. */
static uint64_t build_due(const struct pf_engine *e)
{
    const struct served *s = e->global;
    if (!s || !can_build(e, s))
        return UINT64_MAX;
    if (s->is_build_wanted || s->n_generations >= GENERATIONS_WORTH)
        return 0;
    if (e->opts.build_delay_ms < 0)
        return UINT64_MAX;
    uint64_t delay = (uint64_t)e->opts.build_delay_ms * 1000000, age = clock_ns() - s->t_global_ns;
    return age >= delay ? 0 : delay - age;
}

static void note_failure(struct pf_engine *e, const pf_error *why)
{
    size_t n = strnlen(why->msg, sizeof e->cache_note - 1);
    memcpy(e->cache_note, why->msg, n);
    e->cache_note[n] = '\0';
    log_at(PF_LOG_WARN, "overlay: %s; streaming goes on", why->msg);
}

static void recheck(struct pf_engine *e, struct served *s)
{
    pf_error why;
    struct pf_view *view = s->view;
    view_ref(view);
    pthread_mutex_unlock(&e->mu);
    int rc = overlay_recheck_base(e->store, view_composition(view), &why);
    pthread_mutex_lock(&e->mu);
    pf_view_release(view);
    s->is_recheck_needed = false;
    if (rc == PF_OK) {
        (void)engine_try_adopt(e, s); /* failing again is a build's business */
    } else if (rc == PF_E_MISMATCH) {
        /* Other bytes behind a known id: nothing that was computed before is used, and nothing is written over it. */
        s->is_build_failed = true;
        note_failure(e, &why);
    }
}

static void build(struct pf_engine *e, struct served *s, struct pool *pool)
{
    pf_error why;
    int rc = engine_build(e, s, pool, &why);
    if (rc == PF_E_BUSY) { /* another process builds it: adopt its work when it is done */
        timed_wait(e, POLL_NS);
        (void)engine_try_adopt(e, s);
    } else if (rc && rc != PF_E_CANCELLED) {
        s->is_build_failed = true;
        note_failure(e, &why);
    }
}

/* One piece of work; false: there was none. Caller holds mu. */
static bool step(struct pf_engine *e, struct pool *pool)
{
    struct served *s = e->global;
    if (!s)
        return false;
    if (residents_wanted(e, s)) {
        if (residents_step(e, s) && e->global == s && residents_wanted(e, s))
            timed_wait(e, POLL_NS / 10); /* readers have to leave first */
        return true;
    }
    if (s->is_recheck_needed && !s->overlay && e->store) {
        recheck(e, s);
        return true;
    }
    if (build_due(e) == 0) {
        build(e, s, pool);
        return true;
    }
    return false;
}

static void *run(void *arg)
{
    struct pf_engine *e = arg;
    struct pool *pool = NULL;
    /* Before the pool starts: its threads inherit both. Refusal is no error, the work is merely less polite. */
    (void)setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), LOW_PRIORITY);
    (void)syscall(SYS_ioprio_set, 1 /* IOPRIO_WHO_PROCESS */, 0, IOPRIO_IDLE);
    if (pool_new(e->opts.n_threads, &pool, NULL))
        log_at(PF_LOG_WARN, "the builder's threads cannot be started: no overlays will be built");
    pthread_mutex_lock(&e->mu);
    while (!e->is_ending) {
        if (pool && step(e, pool)) {
            pthread_cond_broadcast(&e->idle); /* whoever waits looks at the state itself */
            continue;
        }
        uint64_t due = pool ? build_due(e) : UINT64_MAX;
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
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, (size_t)256 << 10);
    int sys_errno = pthread_create(&e->thread, &attr, run, e);
    pthread_attr_destroy(&attr);
    if (sys_errno)
        return err_sys(err, sys_errno, "cannot start the engine's background thread");
    e->has_thread = true;
    return PF_OK;
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
    while (!engine->is_idle && e == 0)
        e = pthread_cond_timedwait(&engine->idle, &engine->mu, &t);
    bool is_idle = engine->is_idle;
    pthread_mutex_unlock(&engine->mu);
    return is_idle ? PF_OK
                   : err_set(err, PF_E_BUSY, "background work is not done after %llu ms",
                             (unsigned long long)timeout_ms);
}

void pf_engine_cancel_build(struct pf_engine *engine)
{
    pthread_mutex_lock(&engine->mu);
    atomic_store(&engine->cancel_build, true);
    if (engine->global && !engine->global->overlay) {
        engine->global->is_build_wanted = false;
        engine->global->is_build_failed = true; /* until it is set again */
    }
    pthread_mutex_unlock(&engine->mu);
}

void pf_engine_served(struct pf_engine *engine, const struct pf_view *view)
{
    pthread_mutex_lock(&engine->mu);
    if (engine->global && engine->global->view == view &&
        ++engine->global->n_generations == GENERATIONS_WORTH)
        background_wake(engine);
    pthread_mutex_unlock(&engine->mu);
}
