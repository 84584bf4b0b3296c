/*
 * `pageflip bench switch`: what each change of an adapter costs on a checkpoint, from the call to the first panel that a reader gets, and
 * what work that is going on meanwhile loses. Beside the bounds of this machine, measured in the same run. Called by cli/
 * and by tests. One call at a time.
 */
#ifndef PF_BENCH_SWITCH_H
#define PF_BENCH_SWITCH_H

#include <stdio.h>

#include "base/json.h"

/* Zero is the default of every field. */
struct bench_switch_opts {
    const char *model;       /* NULL: synthetic weights of h3's shape, removed afterwards */
    double scale;            /* of synthetic weights: 1/50 */
    const char *adapters[2]; /* NULL: noise that fits */
    uint32_t rank;           /* of noise: 64 */
    const char *dir;         /* for the cache and for synthetic files: TMPDIR, else /var/tmp */
    uint64_t host_memory_bytes;
    unsigned n_threads;
    unsigned n_reps;     /* of the changes that can be repeated: 5 */
    double load_seconds; /* how long the work before and after a change is watched: 3 */
    uint64_t timeout_ms; /* for one overlay: 30 minutes */
    pf_progress_fn progress;
    void *progress_ctx;
};

/*
 * {"model", "bytes", "rank", "tensors_changed", "layers_changed", "threads", "is_cold", "bounds": {...}, "ops": [{"op", "ms", "effect_ms",
 * "panel_ms", "way", "read_bytes", "written_bytes", "peak_anon_bytes", "added_anon_bytes", "merged_panels", "reps"}], "overlay_write_gb_s", "elements_changed_after_unmerge",
 * "second_start": {"open_ms", "load_ms", "adopt_ms", "set_to_panel_ms", "panel_ms", ...}, "warm_start": the same, "load": {"is_drawing", "before", "streamed", "during", "after"}}. ms: the whole call;
 * panel_ms: from the call to the first panel of the new composition in a reader's buffer (null where nothing changes); medians
 * over reps; bytes are those of the largest rep. Owned by the caller.
 */
int bench_switch_run(const struct bench_switch_opts *opts, struct json **out, pf_error *err);
void bench_switch_print(const struct json *result, FILE *f);

#endif
