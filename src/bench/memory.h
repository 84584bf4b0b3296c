/*
 * `pageflip bench memory`: does a process that serves two models keep its promise about memory? Inside a control group smaller than either
 * model, one engine changes adapters of h3-shaped weights and builds an overlay while another draws with a diffusion
 * transformer, and anonymous memory is sampled during each change. Called by cli/ and by tests.
 */
#ifndef PF_BENCH_MEMORY_H
#define PF_BENCH_MEMORY_H

#include <stdio.h>

#include "base/json.h"

/* Zero is the default of every field. */
struct bench_memory_opts {
    double h3_scale;        /* of 61.7 GB: 1/12 */
    double dit_scale;       /* of 8 GB: 0.31, which is 2.5 GB */
    uint32_t rank;          /* 64 */
    uint64_t n_limit_bytes; /* of the group: 1 GiB */
    unsigned n_reps;        /* switches there and back: 5 */
    unsigned n_threads;
    const char *dir; /* for synthetic files and the cache: TMPDIR, else /var/tmp */
    pf_progress_fn progress;
    void *progress_ctx;
};

/*
 * {"group", "group_note", "limit_bytes", "h3_bytes", "dit_bytes", "peak_anon_bytes", "bound_bytes", "is_within", "passes", "changes",
 * "overlay_bytes", "seconds", "ops": [{"op", "peak_anon_bytes", "ms"}]}; peaks are of the process, drawing included. bound_bytes is 256 MiB.
 * Without a group the limit is told to the engines only, and group_note says why. Owned by the caller. PF_E_NOMEM: killed in its group.
 */
int bench_memory_run(const struct bench_memory_opts *opts, struct json **out, pf_error *err);
void bench_memory_print(const struct json *result, FILE *f);

#endif
