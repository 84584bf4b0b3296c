/*
 * One mutex, one list of waiting jobs, one of running ones. Whoever sees that a job is to end sets its mark; who owns it at that
 * time ends it: the clerk while it waits, its worker while it runs.
 */
#include "server/job.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "base/proc.h"

#define N_SHARED_MAX 64
#define RECENT       0.2 /* weight of the newest pass in seconds_per_image */
#define RETRY_MAX_S  600

struct worker {
    struct queue *q;
    unsigned i_worker;
    pthread_t thread;
};

struct queue {
    struct queue_opts opts;
    struct worker *workers;
    unsigned n_started;
    pthread_t clerk;
    bool has_clerk;

    pthread_mutex_t mu;                    /* guards what follows */
    pthread_cond_t work, changed, settled; /* workers; the clerk; queue_wait_empty */
    struct job *waiting, *running;
    uint64_t n_ever;
    size_t n_untold; /* jobs that have ended, and whose owners are being told */
    struct queue_status status;
    bool is_ending;
};

struct job *job_new(void)
{
    return mem_calloc(1, sizeof(struct job));
}

void job_free(struct job *job)
{
    if (!job)
        return;
    pf_view_release(job->view);
    mem_free(job->rgb);
    mem_free(job);
}

static void unlink_job(struct job **list, struct job *job)
{
    while (*list && *list != job)
        list = &(*list)->next;
    if (*list)
        *list = job->next;
    job->next = NULL;
}

static void append(struct job **list, struct job *job)
{
    while (*list)
        list = &(*list)->next;
    job->next = NULL;
    *list = job;
}

static void tell(struct queue *q, const struct job *job, enum job_event what)
{
    if (q->opts.event)
        q->opts.event(q->opts.ctx, job, what);
}

/* Without locks, after count_end: the owner hears of it. */
static void tell_end(struct queue *q, struct job *job)
{
    tell(q, job, JOB_EVENT_ENDED);
    q->opts.done(q->opts.ctx, job);
    (void)pthread_mutex_lock(&q->mu);
    q->n_untold--;
    (void)pthread_cond_broadcast(&q->settled);
    (void)pthread_mutex_unlock(&q->mu);
}

/* As tell_end; the job belongs to the caller, and to nobody afterwards. */
static void finish(struct queue *q, struct job *job)
{
    pf_view_release(job->view); /* before the answer: who has it may unload the adapters */
    job->view = NULL;
    tell_end(q, job);
    job_free(job);
}

/* Caller holds mu; tell_end or finish follows when it has let go of it. */
static void count_end(struct queue *q, const struct job *job)
{
    struct queue_status *s = &q->status;

    q->n_untold++;
    if (job->end == JOB_DRAWN) {
        s->n_drawn++;
        s->n_images += job->n_images;
        s->n_steps += (uint64_t)job->n_images * job->n_steps;
    } else if (job->end == JOB_EXPIRED) {
        s->n_expired++;
    } else if (job->end == JOB_FAILED) {
        s->n_failed++;
    } else {
        s->n_cancelled++;
    }
}

/* ------------------------------------------------------------------------------------------- the clerk */

static void wait_until(pthread_cond_t *cond, pthread_mutex_t *mu, uint64_t t_ns)
{
    struct timespec t = {.tv_sec = (time_t)(t_ns / 1000000000),
                         .tv_nsec = (long)(t_ns % 1000000000)};

    if (t_ns == UINT64_MAX)
        (void)pthread_cond_wait(cond, mu);
    else
        (void)pthread_cond_timedwait(cond, mu, &t);
}

/* Marks what waited too long; the time of the next one, or UINT64_MAX. Running jobs are marked too: their workers look. */
static uint64_t mark_expired(struct queue *q)
{
    struct job *lists[] = {q->waiting, q->running};
    uint64_t now = clock_ns(), t_next = UINT64_MAX;

    for (size_t i = 0; i < PF_COUNTOF(lists); i++)
        for (struct job *job = lists[i]; job; job = job->next) {
            if (!job->t_deadline_ns || job->asked)
                continue;
            if (job->t_deadline_ns <= now)
                job->asked = JOB_EXPIRED;
            else if (job->t_deadline_ns < t_next)
                t_next = job->t_deadline_ns;
        }
    return t_next;
}

static struct job *take_asked(struct queue *q)
{
    struct job *job = q->waiting;

    while (job && !job->asked)
        job = job->next;
    if (!job)
        return NULL;
    unlink_job(&q->waiting, job);
    q->status.n_waiting--;
    job->end = job->asked;
    count_end(q, job);
    return job;
}

static void *clerk_main(void *arg)
{
    struct queue *q = arg;

    (void)pthread_mutex_lock(&q->mu);
    for (;;) {
        uint64_t t_next = mark_expired(q);
        struct job *job = take_asked(q);

        if (job) {
            (void)pthread_mutex_unlock(&q->mu);
            finish(q, job);
            (void)pthread_mutex_lock(&q->mu);
        } else if (q->is_ending && !q->status.n_waiting) {
            break;
        } else {
            wait_until(&q->changed, &q->mu, t_next);
        }
    }
    (void)pthread_mutex_unlock(&q->mu);
    return NULL;
}

/* ------------------------------------------------------------------------------------------ the workers */

/* The jobs that one worker draws together. Those that are asked to end leave at once, the others go on. */
struct pass {
    struct queue *q;
    /* As handed to draw; a job that left stays readable until the pass ends */
    struct job *all[N_SHARED_MAX];
    bool is_left[N_SHARED_MAX];
    size_t n;
    uint32_t i_step;
};

static bool can_share(const struct job *a, const struct job *b)
{
    return !strcmp(a->composition, b->composition) && a->n_steps == b->n_steps &&
           a->guidance == b->guidance;
}

/* The oldest job and its like. Caller holds mu, something waits that nobody asked to end. */
static bool take_pass(struct queue *q, struct pass *pass)
{
    struct job *first = q->waiting, *job;
    uint32_t n_images = 0;

    *pass = (struct pass){.q = q};
    while (first && first->asked)
        first = first->next;
    for (job = first; job && pass->n < N_SHARED_MAX;) {
        struct job *next = job->next;

        if (job == first || (!job->asked && can_share(first, job) &&
                             n_images + job->n_images <= q->opts.n_batch_max)) {
            n_images += job->n_images;
            pass->all[pass->n++] = job;
            unlink_job(&q->waiting, job);
            append(&q->running, job);
            q->status.n_waiting--;
            q->status.n_running++;
            job->is_running = true;
            job->t_started_ns = clock_ns();
        }
        job = next;
    }
    for (size_t i = 0; i < pass->n; i++)
        pass->all[i]->n_shared = (uint32_t)pass->n;
    return pass->n > 0;
}

static bool tick(void *ctx, uint32_t i_step)
{
    struct pass *pass = ctx;
    struct queue *q = pass->q;
    bool is_new = i_step != pass->i_step, is_any = false;
    bool ends[N_SHARED_MAX] = {false};

    pass->i_step = i_step;
    (void)pthread_mutex_lock(&q->mu);
    for (size_t i = 0; i < pass->n; i++) {
        struct job *job = pass->all[i];

        if (pass->is_left[i])
            continue;
        job->i_step = i_step;
        if (job->asked) {
            ends[i] = pass->is_left[i] = true;
            job->end = job->asked;
            unlink_job(&q->running, job);
            q->status.n_running--;
            count_end(q, job);
        } else {
            is_any = true;
        }
    }
    (void)pthread_mutex_unlock(&q->mu);
    for (size_t i = 0; i < pass->n; i++) {
        if (ends[i]) {
            tell_end(q, pass->all[i]); /* freed when the pass ends: draw may read it */
        } else if (is_new && !pass->is_left[i]) {
            tell(q, pass->all[i], JOB_EVENT_STEP);
        }
    }
    return is_any;
}

static void note_speed(struct queue *q, const struct pass *pass, uint64_t t_start_ns)
{
    double seconds = (double)(clock_ns() - t_start_ns) * 1e-9;
    uint32_t n_images = 0;

    for (size_t i = 0; i < pass->n; i++)
        n_images += pass->all[i]->n_images;
    seconds /= n_images ? n_images : 1;
    q->status.seconds_per_image =
        q->status.seconds_per_image > 0
            ? (1 - RECENT) * q->status.seconds_per_image + RECENT * seconds
            : seconds;
}

static void draw_pass(struct queue *q, struct pass *pass, unsigned i_worker)
{
    uint64_t t_start_ns = clock_ns();
    pf_error err = {0};
    int rc;

    for (size_t i = 0; i < pass->n; i++)
        tell(q, pass->all[i], JOB_EVENT_STARTED);
    rc = q->opts.draw(q->opts.ctx, i_worker, pass->all, pass->n, tick, pass, &err);
    (void)pthread_mutex_lock(&q->mu);
    if (!rc)
        note_speed(q, pass, t_start_ns);
    for (size_t i = 0; i < pass->n; i++) {
        struct job *job = pass->all[i];

        if (pass->is_left[i])
            continue;
        unlink_job(&q->running, job);
        q->status.n_running--;
        /* Whoever cancelled it was told so; other reasons to end came too late. */
        job->end = !rc && job->asked != JOB_CANCELLED ? JOB_DRAWN
                   : job->asked                       ? job->asked
                                                      : JOB_FAILED;
        job->err = err;
        count_end(q, job);
    }
    (void)pthread_mutex_unlock(&q->mu);
    for (size_t i = 0; i < pass->n; i++) {
        if (pass->is_left[i])
            job_free(pass->all[i]);
        else
            finish(q, pass->all[i]);
    }
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    struct queue *q = w->q;
    struct pass pass;

    (void)pthread_mutex_lock(&q->mu);
    for (;;) {
        while (!q->is_ending && !take_pass(q, &pass))
            (void)pthread_cond_wait(&q->work, &q->mu);
        if (q->is_ending)
            break;
        (void)pthread_mutex_unlock(&q->mu);
        draw_pass(q, &pass, w->i_worker);
        (void)pthread_mutex_lock(&q->mu);
    }
    (void)pthread_mutex_unlock(&q->mu);
    return NULL;
}

/* --------------------------------------------------------------------------------------- start and end */

static int start_threads(struct queue *q, pf_error *err)
{
    int rc;

    for (unsigned i = 0; i < q->opts.n_workers; i++) {
        struct worker *w = &q->workers[i];

        *w = (struct worker){.q = q, .i_worker = i};
        rc = pthread_create(&w->thread, NULL, worker_main, w);
        if (rc)
            return err_sys(err, rc, "cannot start worker %u of the generation queue", i);
        q->n_started++;
    }
    rc = pthread_create(&q->clerk, NULL, clerk_main, q);
    if (rc)
        return err_sys(err, rc, "cannot start the clerk of the generation queue");
    q->has_clerk = true;
    return PF_OK;
}

int queue_new(const struct queue_opts *opts, struct queue **out_queue, pf_error *err)
{
    struct queue *q = mem_calloc(1, sizeof(*q));
    pthread_condattr_t attr;
    int rc;

    if (!q)
        return err_nomem(err, sizeof(*q), "the generation queue");
    q->opts = *opts;
    q->status.n_max = opts->n_max;
    q->status.n_workers = opts->n_workers;
    (void)pthread_condattr_init(&attr); /* none of these fails on Linux */
    (void)pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    (void)pthread_mutex_init(&q->mu, NULL);
    (void)pthread_cond_init(&q->work, NULL);
    (void)pthread_cond_init(&q->changed, &attr);
    (void)pthread_cond_init(&q->settled, &attr);
    (void)pthread_condattr_destroy(&attr);
    q->workers = mem_calloc(opts->n_workers, sizeof(*q->workers));
    rc = q->workers ? start_threads(q, err) : err_nomem(err, opts->n_workers, "workers");
    if (rc) {
        queue_free(q);
        return rc;
    }
    *out_queue = q;
    return PF_OK;
}

void queue_free(struct queue *q)
{
    if (!q)
        return;
    queue_cancel_all(q);
    (void)pthread_mutex_lock(&q->mu);
    q->is_ending = true;
    (void)pthread_cond_broadcast(&q->work);
    (void)pthread_cond_broadcast(&q->changed);
    (void)pthread_mutex_unlock(&q->mu);
    for (unsigned i = 0; i < q->n_started; i++)
        (void)pthread_join(q->workers[i].thread, NULL);
    if (q->has_clerk)
        (void)pthread_join(q->clerk, NULL);
    (void)pthread_cond_destroy(&q->work);
    (void)pthread_cond_destroy(&q->changed);
    (void)pthread_cond_destroy(&q->settled);
    (void)pthread_mutex_destroy(&q->mu);
    mem_free(q->workers);
    mem_free(q);
}

/* --------------------------------------------------------------------------------------------- requests */

/* A place first, then the event, then the job: nobody hears of its start before it was said to be waiting. */
int queue_submit(struct queue *q, struct job *job, pf_error *err)
{
    int rc = PF_OK;

    (void)pthread_mutex_lock(&q->mu);
    if (q->is_ending || q->status.n_waiting >= q->opts.n_max) {
        q->status.n_refused++;
        rc = err_set(err, PF_E_BUSY, "the queue is full: %u generations wait", q->status.n_waiting);
    } else {
        q->status.n_waiting++;
        q->status.n_submitted++;
    }
    (void)pthread_mutex_unlock(&q->mu);
    if (rc)
        return rc;
    job->t_accepted_ns = clock_ns();
    tell(q, job, JOB_EVENT_QUEUED);
    (void)pthread_mutex_lock(&q->mu);
    job->i_job = ++q->n_ever;
    if (job->out_i_job)
        atomic_store(job->out_i_job, job->i_job);
    if (q->is_ending)
        job->asked = JOB_CANCELLED;
    else if (job->is_gone && atomic_load(job->is_gone))
        job->asked = JOB_GONE;
    append(&q->waiting, job);
    (void)pthread_cond_signal(&q->work);
    (void)pthread_cond_signal(&q->changed);
    (void)pthread_mutex_unlock(&q->mu);
    return PF_OK;
}

/* Marks the jobs of both lists that `i_job` (not 0), `id` (not NULL) or neither, all of them, names. */
static size_t mark(struct queue *q, uint64_t i_job, const char *id, enum job_end how)
{
    struct job *lists[2];
    size_t n = 0;

    (void)pthread_mutex_lock(&q->mu);
    lists[0] = q->waiting;
    lists[1] = q->running;
    for (size_t i = 0; i < PF_COUNTOF(lists); i++)
        for (struct job *job = lists[i]; job; job = job->next) {
            if ((i_job && job->i_job != i_job) || (id && strcmp(job->id, id) != 0))
                continue;
            if (!job->asked)
                job->asked = how;
            n += job->asked == how;
        }
    if (n)
        (void)pthread_cond_signal(&q->changed);
    (void)pthread_mutex_unlock(&q->mu);
    return n;
}

bool queue_end_job(struct queue *q, uint64_t i_job, enum job_end how)
{
    return i_job && mark(q, i_job, NULL, how) > 0;
}

size_t queue_cancel_id(struct queue *q, const char *id)
{
    return mark(q, 0, id, JOB_CANCELLED);
}

void queue_cancel_all(struct queue *q)
{
    (void)mark(q, 0, NULL, JOB_CANCELLED);
}

static bool has_any(const struct queue *q)
{
    return q->status.n_waiting + q->status.n_running + q->n_untold > 0;
}

bool queue_wait_empty(struct queue *q, uint64_t t_until_ns)
{
    bool is_empty;

    (void)pthread_mutex_lock(&q->mu);
    while (has_any(q) && clock_ns() < t_until_ns)
        wait_until(&q->settled, &q->mu, t_until_ns);
    is_empty = !has_any(q);
    (void)pthread_mutex_unlock(&q->mu);
    return is_empty;
}

void queue_status(struct queue *q, struct queue_status *out)
{
    (void)pthread_mutex_lock(&q->mu);
    *out = q->status;
    out->n_images_waiting = 0;
    for (const struct job *job = q->waiting; job; job = job->next)
        out->n_images_waiting += job->n_images;
    for (const struct job *job = q->running; job; job = job->next)
        out->n_images_waiting += job->n_images;
    (void)pthread_mutex_unlock(&q->mu);
}

uint32_t queue_retry_after_s(struct queue *q)
{
    struct queue_status s;
    double seconds;

    queue_status(q, &s);
    seconds = ceil(s.seconds_per_image * s.n_images_waiting / (s.n_workers ? s.n_workers : 1) / 2);
    return seconds < 1 ? 1 : seconds > RETRY_MAX_S ? RETRY_MAX_S : (uint32_t)seconds;
}

void queue_each(struct queue *q, queue_each_fn fn, void *ctx)
{
    (void)pthread_mutex_lock(&q->mu);
    for (const struct job *job = q->running; job; job = job->next)
        fn(ctx, job);
    for (const struct job *job = q->waiting; job; job = job->next)
        fn(ctx, job);
    (void)pthread_mutex_unlock(&q->mu);
}
