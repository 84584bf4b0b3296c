/*
 * `pageflip bench stream`: options of the measurement in bench/stream.c, and its printing. Nothing is measured here.
 */
#include "bench/stream.h"
#include "cli/command.h"
#include "cli/measure.h"
#include "cli/progress.h"

struct stream_args {
    struct common_args common;
    const char *model, *dir;
    struct arg_int size, limit, passes, threads;
    bool no_group;
};

static const struct opt opts[] = {
    {"model", 'm', OPT_MODEL, "M", "checkpoint; synthetic weights unless said",
     offsetof(struct stream_args, model), NULL, 0, 0, false},
    {"size", 0, OPT_SIZE, "SIZE", "synthetic weights; twice the limit unless said",
     offsetof(struct stream_args, size), NULL, 1, 0, false},
    {"limit", 0, OPT_SIZE, "SIZE",
     "memory for everything; half of the weights unless said, 1G without any",
     offsetof(struct stream_args, limit), NULL, 1, 0, false},
    {"passes", 0, OPT_INT, "N", "passes over the weights; the first is not averaged; 4 unless said",
     offsetof(struct stream_args, passes), NULL, 2, 100, false},
    {"no-group", 0, OPT_FLAG, NULL,
     "make no memory control group, tell the limit to the engine only",
     offsetof(struct stream_args, no_group), NULL, 0, 0, false},
    {"dir", 0, OPT_FILE, "DIR",
     "where synthetic weights go for the time; TMPDIR unless said, else /var/tmp",
     offsetof(struct stream_args, dir), NULL, 0, 0, false},
    {"threads", 't', OPT_INT, "N", "threads that make weights; one per usable CPU unless said",
     offsetof(struct stream_args, threads), NULL, 1, 256, false},
};

static int run(struct out *o, const void *p)
{
    const struct stream_args *args = p;
    struct progress bar;
    struct bench_stream_opts bench = {
        .model = args->model,
        .n_model_bytes = args->size.v,
        .n_limit_bytes = args->limit.v,
        .dir = args->dir,
        .n_passes = (unsigned)args->passes.v,
        .n_threads = (unsigned)args->threads.v,
        .no_group = args->no_group,
        .progress = progress_tick,
        .progress_ctx = &bar,
    };
    struct json *result = NULL;
    pf_error err = {0};
    int rc;

    if (args->model && args->size.is_set)
        return out_usage(o, "option '--size' is for synthetic weights: leave out '--model'");
    progress_begin(&bar, !o->is_quiet, true);
    rc = bench_stream_run(&bench, &result, &err);
    progress_end(&bar);
    return measure_end(o, rc, result, bench_stream_print, &err);
}

const struct command cmd_bench_stream = {
    .name = "bench stream",
    .summary = "measure passes over weights larger than memory",
    .synopsis = "[--model M | --size SIZE] [--limit SIZE]",
    .detail =
        "Reads all weights several times within a memory limit, by the plain mapping and by the "
        "streamer, in fresh processes and, where one can be made, in a memory control group of "
        "that size. Weights are dropped from the page cache first; reads are the kernel's count. "
        "Fails when the plain mapping reads less than 90 % of the bytes, since "
        "the comparison would then say nothing.",
    .opts = opts,
    .n_opts = PF_COUNTOF(opts),
    .args_bytes = sizeof(struct stream_args),
    .run = run,
};
