/*
 * `pageflip bench stream`: passes over weights that do not fit, by the plain mapping and by the streamer, each in a fresh process and,
 * where one can be made, in a memory control group of the limit's size. The weights are dropped from the page cache first;
 * reads are what the kernel counted (/proc/self/io). Called by cli/ and by tests.
 */
#ifndef PF_BENCH_STREAM_H
#define PF_BENCH_STREAM_H

#include <stdio.h>

#include "base/json.h"

/* Zero is the default of every field. */
struct bench_stream_opts {
    /* NULL: synthetic weights of h3's shape in small layers, removed afterwards */
    const char *model;
    uint64_t n_model_bytes; /* of synthetic weights: twice the limit */
    uint64_t n_limit_bytes; /* half of a given model, 1 GiB for a synthetic one */
    const char *dir;        /* for synthetic weights: TMPDIR, else /var/tmp */
    unsigned n_passes;      /* 4; the first is not part of the averages */
    unsigned n_threads;     /* for making weights */
    bool no_group;          /* never make a control group: the limit is only told to the engine */
    pf_progress_fn progress;
    void *progress_ctx;
};

/*
 * {"bytes", "limit_bytes", "layers", "group", "group_note", "disk_read_gb_s", "plain": P, "stream": P, "read_bound", "is_within"} with
 * P = {"passes": [{"seconds", "read_bytes", "read_fraction"}], "read_fraction", "gb_s", "peak_anon_bytes"}; stream adds "kept_bytes",
 * "kept_fraction", "plan". "read_bound" is 1 - kept fraction + 0.05. Fractions are averages without the first pass. Owned by the caller.
 *
 * PF_E_STATE when a plain pass read less than 90 % of the bytes: the run then says nothing. PF_E_INVALID, PF_E_BUSY (the weights stay in
 * the page cache), PF_E_NOMEM (killed in its group), PF_E_CANCELLED, and what making and reading give.
 */
int bench_stream_run(const struct bench_stream_opts *opts, struct json **out, pf_error *err);
void bench_stream_print(const struct json *result, FILE *f);

#endif
