/*
 * `pageflip bench memory`: options of the measurement in bench/memory.c, and its printing. Nothing is measured here.
 */
#include "bench/memory.h"
#include "cli/command.h"
#include "cli/measure.h"
#include "cli/progress.h"

struct memory_args {
    struct common_args common;
    const char *dir;
    struct arg_real h3_scale, dit_scale;
    struct arg_int limit, rank, reps, threads;
};

static const struct opt opts[] = {
    {"h3-scale", 0, OPT_REAL, "X",
     "size of the weights whose adapters change, as a part of 61.7 GB; 0.0833 unless said",
     offsetof(struct memory_args, h3_scale), NULL, 0, 0, false},
    {"dit-scale", 0, OPT_REAL, "X",
     "size of the weights that draw, as a part of 8 GB; 0.31 unless said",
     offsetof(struct memory_args, dit_scale), NULL, 0, 0, false},
    {"limit", 0, OPT_SIZE, "SIZE", "memory for everything; 1G unless said",
     offsetof(struct memory_args, limit), NULL, 1, 0, false},
    {"rank", 'r', OPT_INT, "R", "rank of the adapters; 64 unless said",
     offsetof(struct memory_args, rank), NULL, 1, 4096, false},
    {"reps", 0, OPT_INT, "N", "switches there and back; 5 unless said",
     offsetof(struct memory_args, reps), NULL, 1, 1000, false},
    {"dir", 0, OPT_FILE, "DIR",
     "where synthetic weights and the cache go for the time; TMPDIR unless said, else /var/tmp",
     offsetof(struct memory_args, dir), NULL, 0, 0, false},
    {"threads", 't', OPT_INT, "N", "threads; one per usable CPU unless said",
     offsetof(struct memory_args, threads), NULL, 1, 256, false},
};

static int run(struct out *o, const void *p)
{
    const struct memory_args *args = p;
    struct progress bar;
    const struct bench_memory_opts bench = {
        .h3_scale = args->h3_scale.v,
        .dit_scale = args->dit_scale.v,
        .rank = (uint32_t)args->rank.v,
        .n_limit_bytes = args->limit.v,
        .n_reps = (unsigned)args->reps.v,
        .n_threads = (unsigned)args->threads.v,
        .dir = args->dir,
        .progress = progress_tick,
        .progress_ctx = &bar,
    };
    struct json *result = NULL;
    pf_error err = {0};
    bool is_within;
    int rc, status;

    if ((args->h3_scale.is_set && args->h3_scale.v <= 0) ||
        (args->dit_scale.is_set && args->dit_scale.v <= 0))
        return out_usage(o, "options '--h3-scale' and '--dit-scale' must be above 0");
    progress_begin(&bar, !o->is_quiet, true);
    rc = bench_memory_run(&bench, &result, &err);
    progress_end(&bar);
    is_within = !rc && json_bool(json_get(result, "is_within"));
    status = measure_end(o, rc, result, bench_memory_print, &err);
    return status == EXIT_STATUS_OK && !is_within ? EXIT_STATUS_FAILED : status;
}

const struct command cmd_bench_memory = {
    .name = "bench memory",
    .summary = "measure the memory of a process that serves two models",
    .synopsis = "[--limit SIZE] [--h3-scale X] [--dit-scale X]",
    .detail =
        "Changes adapters of synthetic weights in the shape of a video transformer, builds an "
        "overlay and switches while another model "
        "draws in the same process, in a memory control group where one can be made, and prints "
        "the peak of anonymous memory of each change. Fails when it "
        "goes above 256 MiB.",
    .opts = opts,
    .n_opts = PF_COUNTOF(opts),
    .args_bytes = sizeof(struct memory_args),
    .run = run,
};
