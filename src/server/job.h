/*
 * The generation queue: jobs in order of arrival, a fixed number of workers, and one clerk thread that ends what was cancelled or
 * waited too long. A worker takes the oldest job and with it those behind it that share composition, steps and guidance: they are
 * drawn in one pass over the weights, and no picture depends on that.
 *
 * Ownership: a submitted job belongs to the queue; `done` is called for it exactly once, on a worker or the clerk, without locks
 * held, and the job is freed after it. Everybody else names jobs by number, which is never used twice.
 */
#ifndef PF_SERVER_JOB_H
#define PF_SERVER_JOB_H

#include "base/err.h"
#include <stdatomic.h>

#define JOB_ID_MAX 128

enum job_end { JOB_NOT_ENDED, JOB_DRAWN, JOB_CANCELLED, JOB_GONE, JOB_EXPIRED, JOB_FAILED };

struct job {
    /* Set by the submitter, fixed then. */
    char id[JOB_ID_MAX + 1];
    char composition[33];
    struct pf_view *view; /* owned: released by job_free */
    uint32_t n_images, i_class, n_steps;
    double guidance;
    uint64_t seed;
    uint64_t t_deadline_ns; /* 0: none */
    void *owner;            /* for `done` */
    /* NULL, or where the number is stored before the job can be done, and a flag that ends it when it is set by then. */
    _Atomic uint64_t *out_i_job;
    const _Atomic bool *is_gone;

    /* The queue's, guarded by its mutex. */
    uint64_t i_job;
    struct job *next;
    uint64_t t_accepted_ns, t_started_ns;
    bool is_running;
    enum job_end asked; /* JOB_CANCELLED, JOB_GONE, JOB_EXPIRED: end it so */
    uint32_t i_step;    /* done */

    /* The worker's, readable in `done`. */
    enum job_end end;
    uint8_t *rgb; /* (n_images, height, width, 3) when JOB_DRAWN; owned */
    struct pf_generate_report report;
    uint32_t n_shared; /* jobs of the pass it was drawn in */
    pf_error err;      /* when JOB_FAILED */
};

struct job *job_new(void);
void job_free(struct job *job);

struct queue;

/*
 * Draws the jobs of one pass (n >= 1): fills rgb and report of each. tick(tick_ctx, i_step) after each step, and more often with the
 * same step: false ends the pass with PF_E_CANCELLED.
 */
typedef bool (*queue_tick_fn)(void *ctx, uint32_t i_step);
typedef int (*queue_draw_fn)(void *ctx, unsigned i_worker, struct job *const *jobs, size_t n,
                             queue_tick_fn tick, void *tick_ctx, pf_error *err);

enum job_event { JOB_EVENT_QUEUED, JOB_EVENT_STARTED, JOB_EVENT_STEP, JOB_EVENT_ENDED };

struct queue_opts {
    unsigned n_workers;
    uint32_t n_max;       /* waiting jobs; running ones do not count */
    uint32_t n_batch_max; /* pictures of one pass, when it is shared */
    queue_draw_fn draw;
    void (*done)(void *ctx, struct job *job);
    /* May be NULL; no locks held */
    void (*event)(void *ctx, const struct job *job, enum job_event what);
    void *ctx;
};

int queue_new(const struct queue_opts *opts, struct queue **out_queue, pf_error *err);
/* Ends everything that is left as JOB_CANCELLED and joins the threads. */
void queue_free(struct queue *q);

/* Takes the job over on success: it may be done before this returns. PF_E_BUSY: full. */
int queue_submit(struct queue *q, struct job *job, pf_error *err);
/* Sets a mark and wakes threads; safe anywhere. how: JOB_CANCELLED or JOB_GONE. False: no such job any more. */
bool queue_end_job(struct queue *q, uint64_t i_job, enum job_end how);
/* Every job with this id. The number of them. */
size_t queue_cancel_id(struct queue *q, const char *id);
void queue_cancel_all(struct queue *q);
/* True when nothing waits, nothing runs and every owner has been told, at the latest at t_until_ns. */
bool queue_wait_empty(struct queue *q, uint64_t t_until_ns);

struct queue_status {
    uint32_t n_waiting, n_running, n_max;
    unsigned n_workers;
    uint64_t n_submitted, n_drawn, n_cancelled, n_expired, n_failed, n_refused;
    uint64_t n_images, n_steps; /* drawn; steps of every picture */
    double seconds_per_image;   /* of late, per worker; 0: unknown */
    uint32_t n_images_waiting;  /* of waiting and running jobs */
};
void queue_status(struct queue *q, struct queue_status *out);
/* What a client that was refused should wait. */
uint32_t queue_retry_after_s(struct queue *q);
typedef void (*queue_each_fn)(void *ctx, const struct job *job);
/* Under the mutex: copy, call nothing */
void queue_each(struct queue *q, queue_each_fn fn, void *ctx);

#endif
