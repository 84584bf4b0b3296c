/*
 * Between the queue and the model: a pass of jobs becomes one pf_generate, the end of a job becomes an answer, its stations become
 * events.
 */
#ifndef PF_SERVER_DRAW_H
#define PF_SERVER_DRAW_H

#include "server/job.h"

struct service;
struct http_request;

/* The answer that a job owes. Owned by the job's `owner` pointer, freed by draw_done. */
struct answer {
    struct service *s;
    struct http_request *req;
    bool is_url;
    char url_base[320]; /* "http://127.0.0.1:8000" */
};

int draw_pass(void *ctx, unsigned i_worker, struct job *const *jobs, size_t n, queue_tick_fn tick,
              void *tick_ctx, pf_error *err);
void draw_done(void *ctx, struct job *job);
void draw_event(void *ctx, const struct job *job, enum job_event what);

#endif
