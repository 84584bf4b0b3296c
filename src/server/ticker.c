/*
 * One thread that wakes ten times a second while somebody listens to events, once a second otherwise. It asks the engine for its
 * state; nothing waits for it.
 */
#include "server/ticker.h"

#include <errno.h>
#include <pthread.h>
#include <time.h>

#include "base/mem.h"
#include "base/proc.h"
#include "server/service.h"

#define TICK_MS      100
#define IDLE_TICK_MS 1000
#define HEARTBEAT_NS 15000000000u

struct ticker {
    struct service *s;
    pthread_t thread;
    pthread_mutex_t mu;
    pthread_cond_t wake;
    bool is_ending; /* guarded by mu */
    /* The thread's own: */
    struct pf_engine_status now, before;
    uint64_t t_heartbeat_ns;
};

static void tell_build(struct ticker *t)
{
    struct json *data = json_new_object();

    json_set_z(data, "composition", t->now.composition);
    json_set_bool(data, "is_building", t->now.is_building);
    json_set_int(data, "built_bytes", (int64_t)t->now.n_built_bytes);
    json_set_int(data, "total_bytes", (int64_t)t->now.n_build_bytes);
    json_set(data, "note", json_new_string(str_of(t->now.cache_note)));
    events_publish(t->s->events, "build", data);
}

/* The same composition, read from another place from the next layer on. */
static void tell_placement(struct ticker *t)
{
    struct json *data = json_new_object();

    json_set_z(data, "kind", "placement");
    json_set_z(data, "composition", t->now.composition);
    json_set_int(data, "adoptions", (int64_t)t->now.n_adoptions);
    events_publish(t->s->events, "view", data);
}

static void tick(struct ticker *t)
{
    struct events_status ev;
    uint64_t now = clock_ns();

    pictures_expire(t->s->pictures);
    events_status(t->s->events, &ev);
    pf_engine_status(t->s->engine, &t->now);
    if (!ev.n_clients) { /* who comes later is not told of what was before */
        t->before = t->now;
        return;
    }
    if (t->now.is_building != t->before.is_building ||
        t->now.n_built_bytes != t->before.n_built_bytes || t->now.n_builds != t->before.n_builds)
        tell_build(t);
    if (t->now.n_adoptions != t->before.n_adoptions)
        tell_placement(t);
    t->before = t->now;
    if (now - t->t_heartbeat_ns >= HEARTBEAT_NS) {
        events_heartbeat(t->s->events);
        t->t_heartbeat_ns = now;
    }
}

static void *run(void *arg)
{
    struct ticker *t = arg;

    (void)pthread_mutex_lock(&t->mu);
    while (!t->is_ending) {
        struct events_status ev;
        struct timespec at;
        uint64_t until;

        (void)pthread_mutex_unlock(&t->mu);
        tick(t);
        events_status(t->s->events, &ev);
        until = clock_ns() + (uint64_t)(ev.n_clients ? TICK_MS : IDLE_TICK_MS) * 1000000;
        at = (struct timespec){.tv_sec = (time_t)(until / 1000000000),
                               .tv_nsec = (long)(until % 1000000000)};
        (void)pthread_mutex_lock(&t->mu);
        if (!t->is_ending)
            (void)pthread_cond_timedwait(&t->wake, &t->mu, &at);
    }
    (void)pthread_mutex_unlock(&t->mu);
    return NULL;
}

int ticker_start(struct service *s, struct ticker **out_ticker, pf_error *err)
{
    struct ticker *t = mem_calloc(1, sizeof(*t));
    pthread_condattr_t attr;
    int rc;

    if (!t)
        return err_nomem(err, sizeof(*t), "the ticker");
    t->s = s;
    (void)pthread_condattr_init(&attr); /* none of these fails on Linux */
    (void)pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    (void)pthread_mutex_init(&t->mu, NULL);
    (void)pthread_cond_init(&t->wake, &attr);
    (void)pthread_condattr_destroy(&attr);
    pf_engine_status(s->engine, &t->before);
    rc = pthread_create(&t->thread, NULL, run, t);
    if (rc) {
        (void)pthread_cond_destroy(&t->wake);
        (void)pthread_mutex_destroy(&t->mu);
        mem_free(t);
        return err_sys(err, rc, "cannot start the ticker");
    }
    *out_ticker = t;
    return PF_OK;
}

void ticker_stop(struct ticker *t)
{
    if (!t)
        return;
    (void)pthread_mutex_lock(&t->mu);
    t->is_ending = true;
    (void)pthread_cond_signal(&t->wake);
    (void)pthread_mutex_unlock(&t->mu);
    (void)pthread_join(t->thread, NULL);
    (void)pthread_cond_destroy(&t->wake);
    (void)pthread_mutex_destroy(&t->mu);
    mem_free(t);
}
