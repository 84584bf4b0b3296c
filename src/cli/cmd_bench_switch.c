/*
 * `pageflip bench switch`: options of the measurement in bench/switch.c, and its printing. Nothing is measured here.
 */
#include "base/mem.h"
#include "bench/switch.h"
#include "cli/bundled.h"
#include "cli/command.h"
#include "cli/measure.h"
#include "cli/progress.h"

struct switch_args {
    struct common_args common;
    const char *model, *adapter_a, *adapter_b, *dir;
    struct arg_real scale, seconds;
    struct arg_int rank, reps, threads, host_memory;
};

static const struct opt opts[] = {
    {"model", 'm', OPT_MODEL, "M", "checkpoint; synthetic weights of h3's shape unless said",
     offsetof(struct switch_args, model), NULL, 0, 0, false},
    {"scale", 'x', OPT_REAL, "X",
     "size of synthetic weights as a part of 61.7 GB; 0.02 unless said",
     offsetof(struct switch_args, scale), NULL, 0, 0, false},
    {"adapter-a", 'a', OPT_FILE, "A", "adapter that is set first; noise that fits unless said",
     offsetof(struct switch_args, adapter_a), NULL, 0, 0, false},
    {"adapter-b", 'b', OPT_FILE, "B", "adapter that is switched to; given together with A",
     offsetof(struct switch_args, adapter_b), NULL, 0, 0, false},
    {"rank", 'r', OPT_INT, "R", "rank of noise; 64 unless said", offsetof(struct switch_args, rank),
     NULL, 1, 4096, false},
    {"dir", 0, OPT_FILE, "DIR",
     "where the cache and synthetic files go for the time; TMPDIR unless said, else /var/tmp",
     offsetof(struct switch_args, dir), NULL, 0, 0, false},
    {"host-memory", 0, OPT_SIZE, "SIZE",
     "memory that weights may use; what the system leaves unless said",
     offsetof(struct switch_args, host_memory), NULL, 1, 0, false},
    {"reps", 0, OPT_INT, "N",
     "repetitions of what can be repeated, of which the median counts; 5 unless said",
     offsetof(struct switch_args, reps), NULL, 1, 50, false},
    {"seconds", 0, OPT_REAL, "S",
     "how long work is watched before and after a change; 3 unless said",
     offsetof(struct switch_args, seconds), NULL, 0, 0, false},
    {"threads", 't', OPT_INT, "N", "threads; one per usable CPU unless said",
     offsetof(struct switch_args, threads), NULL, 1, 256, false},
};

/* What the table cannot say. NULL: fine. */
static const char *check(const struct switch_args *args)
{
    if (args->scale.is_set && args->scale.v <= 0)
        return "option '--scale' must be above 0";
    if (args->scale.is_set && args->model)
        return "option '--scale' is for synthetic weights: leave out '--model'";
    if (args->seconds.is_set && (args->seconds.v <= 0 || args->seconds.v > 3600))
        return "option '--seconds' must be above 0 and at most 3600";
    if (!args->adapter_a != !args->adapter_b)
        return "options '--adapter-a' and '--adapter-b' belong together";
    if (args->rank.is_set && args->adapter_a)
        return "option '--rank' is for adapters of noise: leave out '--adapter-a' and "
               "'--adapter-b'";
    return NULL;
}

static int run(struct out *o, const void *p)
{
    const struct switch_args *args = p;
    struct progress bar;
    struct bench_switch_opts bench = {
        .model = args->model,
        .scale = args->scale.v,
        .rank = (uint32_t)args->rank.v,
        .dir = args->dir,
        .host_memory_bytes = args->host_memory.v,
        .n_reps = (unsigned)args->reps.v,
        .load_seconds = args->seconds.v,
        .n_threads = (unsigned)args->threads.v,
        .progress = progress_tick,
        .progress_ctx = &bar,
    };
    char *adapters[2] = {NULL, NULL};
    const char *wrong = check(args);
    struct json *result = NULL;
    pf_error err = {0};
    int rc = PF_OK;

    if (wrong)
        return out_usage(o, "%s", wrong);
    if (args->adapter_a)
        rc = bundled_adapter(NULL, args->adapter_a, &adapters[0], &err);
    if (!rc && args->adapter_b)
        rc = bundled_adapter(NULL, args->adapter_b, &adapters[1], &err);
    bench.adapters[0] = adapters[0];
    bench.adapters[1] = adapters[1];
    if (!rc) {
        progress_begin(&bar, !o->is_quiet, true);
        rc = bench_switch_run(&bench, &result, &err);
        progress_end(&bar);
    }
    mem_free(adapters[0]);
    mem_free(adapters[1]);
    return measure_end(o, rc, result, bench_switch_print, &err);
}

const struct command cmd_bench_switch = {
    .name = "bench switch",
    .summary = "measure what changing adapters costs, beside the machine's bounds",
    .synopsis = "[--model M [--adapter-a A --adapter-b B] | --scale X] [--rank R]",
    .detail =
        "Loads two adapters, sets, switches, changes strength, unmerges and starts again, and "
        "prints for each the time until a reader has the first "
        "panel, bytes read and written, and peak memory; and what reading or drawing loses "
        "meanwhile. Storage, memory and arithmetic bounds are measured in the same run. "
        "Needs room for two overlays.",
    .opts = opts,
    .n_opts = PF_COUNTOF(opts),
    .args_bytes = sizeof(struct switch_args),
    .run = run,
};
