/*
 * Detached threads, counted. The count is what crew_free waits for.
 */
#include "server/crew.h"

#include <pthread.h>

#include "base/mem.h"
#include "base/thread.h"

#define STACK_BYTES ((size_t)512 << 10)

struct crew {
    pthread_mutex_t mu;
    pthread_cond_t idle;
    uint32_t n, n_max; /* n: guarded by mu */
};

struct task {
    struct crew *crew;
    crew_fn fn;
    void *ctx;
};

int crew_new(uint32_t n_max, struct crew **out_crew, pf_error *err)
{
    struct crew *c = mem_calloc(1, sizeof(*c));

    if (!c)
        return err_nomem(err, sizeof(*c), "a crew");
    c->n_max = n_max;
    (void)pthread_mutex_init(&c->mu, NULL); /* these cannot fail with default attributes */
    (void)pthread_cond_init(&c->idle, NULL);
    *out_crew = c;
    return PF_OK;
}

void crew_free(struct crew *c)
{
    if (!c)
        return;
    (void)pthread_mutex_lock(&c->mu);
    while (c->n)
        (void)pthread_cond_wait(&c->idle, &c->mu);
    (void)pthread_mutex_unlock(&c->mu);
    (void)pthread_cond_destroy(&c->idle);
    (void)pthread_mutex_destroy(&c->mu);
    mem_free(c);
}

static void leave(struct crew *c)
{
    (void)pthread_mutex_lock(&c->mu);
    if (--c->n == 0)
        (void)pthread_cond_broadcast(&c->idle);
    (void)pthread_mutex_unlock(&c->mu);
}

static void *run(void *arg)
{
    struct task task = *(struct task *)arg;

    mem_free(arg);
    task.fn(task.ctx);
    leave(task.crew);
    return NULL;
}

static int start(struct task *task)
{
    pthread_t thread;
    int rc = thread_start(&thread, STACK_BYTES, run, task);

    if (!rc)
        (void)pthread_detach(thread);
    return rc;
}

int crew_run(struct crew *c, crew_fn fn, void *ctx, pf_error *err)
{
    struct task *task = mem_alloc(sizeof(*task));
    bool is_full;
    int rc;

    if (!task)
        return err_nomem(err, sizeof(*task), "a task");
    *task = (struct task){c, fn, ctx};
    (void)pthread_mutex_lock(&c->mu);
    is_full = c->n >= c->n_max;
    c->n += !is_full;
    (void)pthread_mutex_unlock(&c->mu);
    if (is_full) {
        mem_free(task);
        return err_set(err, PF_E_BUSY, "%u changes are under way already", c->n_max);
    }
    rc = start(task);
    if (rc) {
        mem_free(task);
        leave(c);
        return err_sys(err, rc, "cannot start a thread for a request");
    }
    return PF_OK;
}

uint32_t crew_count(struct crew *c)
{
    uint32_t n;

    (void)pthread_mutex_lock(&c->mu);
    n = c->n;
    (void)pthread_mutex_unlock(&c->mu);
    return n;
}
