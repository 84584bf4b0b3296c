/*
 * The generation queue with a made-up drawer: order, sharing, bounds, cancelling, deadlines, ends. The drawer waits at gates that
 * the test opens, so nothing depends on time.
 */
#include "testing.h"

#include "base/mem.h"
#include "base/proc.h"
#include "server/job.h"

#include <pthread.h>

#define N_PASSES_MAX 128 /* a pass for each job of the crowd */

/* What the drawer saw, and the gate that it waits at. */
struct scene {
    pthread_mutex_t mu;
    pthread_cond_t moved;
    uint32_t n_begun, n_allowed;    /* passes */
    char passes[N_PASSES_MAX][160]; /* "a+b" */
    char ends[8192];                /* "a=drawn b=cancelled " in order */
    uint32_t n_ended;
    uint32_t n_steps_told;
    int rc;                  /* of the drawer */
    struct queue *cancel_in; /* the drawer's last act is to have its first job cancelled */
};

static void scene_init(struct scene *s)
{
    memset(s, 0, sizeof(*s));
    pthread_mutex_init(&s->mu, NULL);
    pthread_cond_init(&s->moved, NULL);
}

static void allow(struct scene *s, uint32_t n)
{
    pthread_mutex_lock(&s->mu);
    s->n_allowed += n;
    pthread_cond_broadcast(&s->moved);
    pthread_mutex_unlock(&s->mu);
}

static void await_begun(struct scene *s, uint32_t n)
{
    pthread_mutex_lock(&s->mu);
    while (s->n_begun < n)
        pthread_cond_wait(&s->moved, &s->mu);
    pthread_mutex_unlock(&s->mu);
}

static void await_ended(struct scene *s, uint32_t n)
{
    pthread_mutex_lock(&s->mu);
    while (s->n_ended < n)
        pthread_cond_wait(&s->moved, &s->mu);
    pthread_mutex_unlock(&s->mu);
}

/* Waits for its gate, ticking all the while as a real drawer does, then draws: the first pixel is the seed. */
static int draw(void *ctx, unsigned i_worker, struct job *const *jobs, size_t n, queue_tick_fn tick,
                void *tick_ctx, pf_error *err)
{
    struct scene *s = ctx;
    bool goes_on = true;
    uint32_t i_pass;
    (void)i_worker;

    pthread_mutex_lock(&s->mu);
    i_pass = s->n_begun++;
    for (size_t i = 0; i < n; i++)
        snprintf(s->passes[i_pass] + strlen(s->passes[i_pass]), 32, "%s%.16s", i ? "+" : "",
                 jobs[i]->id);
    pthread_cond_broadcast(&s->moved);
    while (goes_on && s->n_allowed <= i_pass) {
        struct timespec t;
        clock_gettime(CLOCK_REALTIME, &t);
        t.tv_nsec += 1000000;
        t.tv_sec += t.tv_nsec / 1000000000;
        t.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&s->moved, &s->mu, &t);
        pthread_mutex_unlock(&s->mu);
        goes_on = tick(tick_ctx, 1);
        pthread_mutex_lock(&s->mu);
    }
    pthread_mutex_unlock(&s->mu);
    if (!goes_on)
        return err_set(err, PF_E_CANCELLED, "told to stop");
    if (s->rc)
        return err_set(err, s->rc, "the brush broke");
    if (s->cancel_in)
        assert_int_equal(queue_cancel_id(s->cancel_in, jobs[0]->id), 1);
    for (size_t i = 0; i < n; i++) {
        jobs[i]->rgb = mem_calloc(1, 1);
        jobs[i]->rgb[0] = (uint8_t)jobs[i]->seed;
    }
    return PF_OK;
}

static void done(void *ctx, struct job *job)
{
    static const char *const names[] = {[JOB_DRAWN] = "drawn",
                                        [JOB_CANCELLED] = "cancelled",
                                        [JOB_GONE] = "gone",
                                        [JOB_EXPIRED] = "expired",
                                        [JOB_FAILED] = "failed"};
    struct scene *s = ctx;

    pthread_mutex_lock(&s->mu);
    if (job->end == JOB_DRAWN)
        assert_int_equal(job->rgb[0], (uint8_t)job->seed);
    snprintf(s->ends + strlen(s->ends), sizeof(s->ends) - strlen(s->ends), "%s=%s ", job->id,
             names[job->end]);
    s->n_ended++;
    pthread_cond_broadcast(&s->moved);
    pthread_mutex_unlock(&s->mu);
}

static void event(void *ctx, const struct job *job, enum job_event what)
{
    struct scene *s = ctx;
    (void)job;

    pthread_mutex_lock(&s->mu);
    s->n_steps_told += what == JOB_EVENT_STEP;
    pthread_mutex_unlock(&s->mu);
}

static struct queue *open_queue(struct scene *s, unsigned n_workers, uint32_t n_max,
                                uint32_t n_batch)
{
    const struct queue_opts opts = {.n_workers = n_workers,
                                    .n_max = n_max,
                                    .n_batch_max = n_batch,
                                    .draw = draw,
                                    .done = done,
                                    .event = event,
                                    .ctx = s};
    struct queue *q = NULL;
    pf_error err;

    scene_init(s);
    assert_ok(queue_new(&opts, &q, &err), &err);
    return q;
}

/* name "a2": id a2, composition "a". */
static struct job *make(const char *id, uint32_t n_images)
{
    struct job *job = job_new();

    assert_non_null(job);
    snprintf(job->id, sizeof(job->id), "%s", id);
    snprintf(job->composition, sizeof(job->composition), "%c", id[0]);
    job->n_images = n_images;
    job->n_steps = 4;
    job->guidance = 2;
    job->seed = (uint64_t)id[1];
    return job;
}

static void put(struct queue *q, struct job *job)
{
    pf_error err;

    assert_ok(queue_submit(q, job, &err), &err);
}

static void draws_in_order_of_arrival_and_shares_passes(void **state)
{
    struct scene s;
    struct queue *q = open_queue(&s, 1, 16, 4);
    struct job *other;
    (void)state;

    put(q, make("x0", 1));
    await_begun(&s, 1);
    put(q, make("a1", 1));
    put(q, make("b1", 1));
    put(q, make("a2", 2));
    other = make("a3", 1);
    other->n_steps = 5; /* other steps: not together */
    put(q, other);
    other = make("a4", 1);
    other->guidance = 3;
    put(q, other);
    put(q, make("a5", 2)); /* would make five pictures: not together */
    put(q, make("a6", 1));
    allow(&s, 100);
    await_ended(&s, 8);
    assert_string_equal(s.passes[0], "x0");
    assert_string_equal(s.passes[1], "a1+a2+a6");
    assert_string_equal(s.passes[2], "b1");
    assert_string_equal(s.passes[3], "a3");
    assert_string_equal(s.passes[4], "a4");
    assert_string_equal(s.passes[5], "a5");
    assert_int_equal(s.n_begun, 6);
    queue_free(q);
}

static void is_bounded(void **state)
{
    struct scene s;
    struct queue *q = open_queue(&s, 1, 2, 1);
    struct queue_status st;
    struct job *job = make("d1", 1);
    pf_error err;
    (void)state;

    put(q, make("a1", 1));
    await_begun(&s, 1);
    put(q, make("b1", 1));
    put(q, make("c1", 3));
    assert_int_equal(queue_submit(q, job, &err), PF_E_BUSY);
    assert_err(&err, PF_E_BUSY, "full", "2");
    job_free(job);
    queue_status(q, &st);
    assert_int_equal(st.n_waiting, 2);
    assert_int_equal(st.n_running, 1);
    assert_int_equal(st.n_refused, 1);
    assert_int_equal(st.n_images_waiting, 5);
    assert_in_range(queue_retry_after_s(q), 1, 600);
    assert_false(queue_wait_empty(q, clock_ns()));
    allow(&s, 3);
    assert_true(queue_wait_empty(q, clock_ns() + 60000000000u));
    assert_string_equal(s.ends, "a1=drawn b1=drawn c1=drawn ");
    queue_free(q);
}

static void ends_waiting_jobs_at_once(void **state)
{
    struct scene s;
    struct queue *q = open_queue(&s, 1, 8, 1);
    (void)state;

    put(q, make("a1", 1));
    await_begun(&s, 1);
    put(q, make("b1", 1));
    put(q, make("b2", 1));
    assert_int_equal(queue_cancel_id(q, "nobody"), 0);
    assert_int_equal(queue_cancel_id(q, "b1"), 1);
    await_ended(&s, 1);
    assert_string_equal(s.ends, "b1=cancelled ");
    assert_int_equal(queue_cancel_id(q, "b1"), 0);
    allow(&s, 2);
    await_ended(&s, 3);
    assert_string_equal(s.ends, "b1=cancelled a1=drawn b2=drawn ");
    queue_free(q);
}

static void ends_running_jobs_and_lets_their_pass_go_on(void **state)
{
    struct scene s;
    struct queue *q = open_queue(&s, 1, 8, 8);
    (void)state;

    put(q, make("x1", 1));
    await_begun(&s, 1);
    put(q, make("a1", 1));
    put(q, make("a2", 1));
    put(q, make("a2", 1)); /* the same id twice: both */
    allow(&s, 1);
    await_begun(&s, 2);
    assert_int_equal(queue_cancel_id(q, "a2"), 2);
    await_ended(&s, 3);
    assert_string_equal(s.ends, "x1=drawn a2=cancelled a2=cancelled ");
    allow(&s, 1);
    await_ended(&s, 4);
    assert_string_equal(s.ends, "x1=drawn a2=cancelled a2=cancelled a1=drawn ");
    assert_true(s.n_steps_told > 0);
    queue_free(q);
}

static void stops_a_pass_that_nobody_wants(void **state)
{
    struct scene s;
    struct queue *q = open_queue(&s, 1, 8, 8);
    _Atomic uint64_t i_job = 0;
    struct job *job = make("a1", 1);
    (void)state;

    job->out_i_job = &i_job;
    put(q, job);
    await_begun(&s, 1);
    assert_true(queue_end_job(q, atomic_load(&i_job), JOB_GONE));
    await_ended(&s, 1); /* the gate was never opened */
    assert_string_equal(s.ends, "a1=gone ");
    assert_false(queue_end_job(q, atomic_load(&i_job), JOB_GONE));
    assert_false(queue_end_job(q, 0, JOB_GONE));
    queue_free(q);
}

static void a_client_that_left_before_is_noticed(void **state)
{
    struct scene s;
    struct queue *q = open_queue(&s, 1, 8, 8);
    _Atomic bool is_gone = true;
    struct job *job = make("b1", 1);
    (void)state;

    put(q, make("a1", 1));
    await_begun(&s, 1);
    job->is_gone = &is_gone;
    put(q, job);
    await_ended(&s, 1);
    assert_string_equal(s.ends, "b1=gone ");
    queue_free(q);
    assert_string_equal(s.ends, "b1=gone a1=cancelled ");
}

/* Who was told that it is cancelled gets no picture, however late it was. */
static void cancelled_when_it_was_drawn_is_cancelled(void **state)
{
    struct scene s;
    struct queue *q = open_queue(&s, 1, 8, 8);
    (void)state;

    s.cancel_in = q;
    put(q, make("a1", 1));
    await_begun(&s, 1);
    allow(&s, 1);
    await_ended(&s, 1);
    assert_string_equal(s.ends, "a1=cancelled ");
    queue_free(q);
}

/* Waits until a pass has begun, or n jobs have ended without one. */
static bool has_begun(struct scene *s, uint32_t n)
{
    bool has;

    pthread_mutex_lock(&s->mu);
    while (!s->n_begun && s->n_ended < n)
        pthread_cond_wait(&s->moved, &s->mu);
    has = s->n_begun > 0;
    pthread_mutex_unlock(&s->mu);
    return has;
}

static void deadlines_end_waiting_and_running_jobs(void **state)
{
    struct scene s;
    struct queue *q = open_queue(&s, 1, 8, 8);
    struct job *job;
    uint64_t patience_ns = 20000000;
    uint32_t n_late = 0;
    (void)state;

    for (;; n_late++, patience_ns *= 2) { /* on a busy machine it may expire before it begins */
        job = make("a1", 1);
        job->t_deadline_ns = clock_ns() + patience_ns;
        put(q, job);
        if (has_begun(&s, n_late + 1))
            break;
    }
    job = make("b1", 1);
    job->t_deadline_ns = clock_ns() + 10000000;
    put(q, job);
    await_ended(&s, n_late + 2); /* no gate was opened */
    assert_non_null(strstr(s.ends, "a1=expired"));
    assert_non_null(strstr(s.ends, "b1=expired"));
    queue_free(q);
}

static void failures_reach_their_jobs(void **state)
{
    struct scene s;
    struct queue *q = open_queue(&s, 1, 8, 8);
    struct queue_status st;
    (void)state;

    s.rc = PF_E_IO;
    allow(&s, 9);
    put(q, make("a1", 1));
    await_ended(&s, 1);
    assert_string_equal(s.ends, "a1=failed ");
    assert_true(queue_wait_empty(q, clock_ns() + 60000000000u));
    queue_status(q, &st);
    assert_int_equal(st.n_failed, 1);
    assert_int_equal(st.n_drawn, 0);
    queue_free(q);
}

static void an_end_cancels_everything(void **state)
{
    struct scene s;
    struct queue *q = open_queue(&s, 2, 8, 1);
    (void)state;

    put(q, make("a1", 1));
    put(q, make("b1", 1));
    await_begun(&s, 2);
    put(q, make("c1", 1));
    put(q, make("d1", 1));
    queue_free(q);
    assert_int_equal(s.n_ended, 4);
    assert_null(strstr(s.ends, "drawn"));
}

/* Many submitters, cancellers and workers at once: every job ends exactly once. For the thread sanitizer. */
struct crowd {
    struct queue *q;
    struct scene *s;
    unsigned i;
};

static void *submit_many(void *arg)
{
    struct crowd *c = arg;
    char id[16];

    for (int i = 0; i < 40; i++) {
        struct job *job;
        pf_error err;

        snprintf(id, sizeof(id), "%c%u-%d", 'a' + i % 3, c->i, i);
        job = make(id, 1);
        if (queue_submit(c->q, job, &err)) {
            job_free(job);
            continue;
        }
        if (i % 4 == 0)
            (void)queue_cancel_id(c->q, id);
    }
    return NULL;
}

static void every_job_ends_once(void **state)
{
    struct scene s;
    struct queue *q = open_queue(&s, 3, 200, 4);
    struct crowd crowd[3];
    pthread_t threads[3];
    struct queue_status st;
    (void)state;

    allow(&s, 1000000);
    for (unsigned i = 0; i < 3; i++) {
        crowd[i] = (struct crowd){q, &s, i};
        assert_int_equal(pthread_create(&threads[i], NULL, submit_many, &crowd[i]), 0);
    }
    for (unsigned i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    assert_true(queue_wait_empty(q, clock_ns() + 60000000000u));
    queue_status(q, &st);
    assert_int_equal(st.n_drawn + st.n_cancelled, st.n_submitted);
    assert_int_equal(st.n_submitted + st.n_refused, 120);
    queue_free(q);
    assert_int_equal(s.n_ended, st.n_submitted);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(draws_in_order_of_arrival_and_shares_passes),
        cmocka_unit_test(is_bounded),
        cmocka_unit_test(ends_waiting_jobs_at_once),
        cmocka_unit_test(ends_running_jobs_and_lets_their_pass_go_on),
        cmocka_unit_test(stops_a_pass_that_nobody_wants),
        cmocka_unit_test(a_client_that_left_before_is_noticed),
        cmocka_unit_test(cancelled_when_it_was_drawn_is_cancelled),
        cmocka_unit_test(deadlines_end_waiting_and_running_jobs),
        cmocka_unit_test(failures_reach_their_jobs),
        cmocka_unit_test(an_end_cancels_everything),
        cmocka_unit_test(every_job_ends_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
