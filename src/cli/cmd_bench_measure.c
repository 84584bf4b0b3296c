/*
 * `pageflip bench merge` and `bench read`: options of the measurements in bench/, and their printing. Numbers are made there;
 * nothing is measured here.
 */
#include "bench/bench_merge.h"
#include "cli/command.h"
#include "cli/measure.h"
#include "cli/setup.h"

#define N_RANKS_MAX 16

struct bench_merge_args {
    struct common_args common;
    struct arg_int rows, cols, threads, reps;
    const char *ranks;
    bool f32_factors;
};

static const struct opt merge_opts[] = {
    {"rows", 0, OPT_INT, "N", "rows of the weight; 5376 unless said",
     offsetof(struct bench_merge_args, rows), NULL, 1, 1 << 20, false},
    {"cols", 0, OPT_INT, "N", "columns of the weight; 7168 unless said",
     offsetof(struct bench_merge_args, cols), NULL, 1, 1 << 20, false},
    {"ranks", 'r', OPT_STRING, "R,...", "ranks to measure; 16,32,64,128 unless said",
     offsetof(struct bench_merge_args, ranks), NULL, 0, 0, false},
    {"f32-factors", 0, OPT_FLAG, NULL, "factors in f32 instead of bf16",
     offsetof(struct bench_merge_args, f32_factors), NULL, 0, 0, false},
    {"reps", 0, OPT_INT, "N", "repetitions, of which the median counts; 7 unless said",
     offsetof(struct bench_merge_args, reps), NULL, 1, 1000, false},
    {"threads", 't', OPT_INT, "N",
     "measure with 1 and with N threads; one per usable CPU unless said",
     offsetof(struct bench_merge_args, threads), NULL, 1, 256, false},
};

/* "16,32" into ranks; false when it is something else. */
static bool parse_ranks(const char *text, int64_t ranks[N_RANKS_MAX], size_t *out_n)
{
    struct str s = str_of(text);
    size_t n = 0;

    for (;;) {
        struct str word = {s.p, 0};
        uint64_t rank;

        while (word.n < s.n && s.p[word.n] != ',')
            word.n++;
        if (n == N_RANKS_MAX || !str_to_u64(word, &rank) || rank < 1 || rank > 4096)
            return false;
        ranks[n++] = (int64_t)rank;
        if (word.n == s.n)
            break;
        s = str_cut_front(s, word.n + 1);
    }
    *out_n = n;
    return true;
}

static int run_merge(struct out *o, const void *p)
{
    const struct bench_merge_args *args = p;
    int64_t ranks[N_RANKS_MAX];
    struct bench_merge_opts opts = {
        .n_rows = (int64_t)args->rows.v,
        .n_cols = (int64_t)args->cols.v,
        .n_threads = (unsigned)args->threads.v,
        .n_reps = (unsigned)args->reps.v,
        .is_f32_factors = args->f32_factors,
    };
    struct json *result = NULL;
    pf_error err = {0};
    int rc;

    if (args->ranks) {
        if (!parse_ranks(args->ranks, ranks, &opts.n_ranks))
            return out_usage(
                o, "option '--ranks' takes up to %d numbers from 1 to 4096, as in 16,64, not '%s'",
                N_RANKS_MAX, args->ranks);
        opts.ranks = ranks;
    }
    rc = bench_merge_run(&opts, &result, &err);
    return measure_end(o, rc, result, bench_merge_print, &err);
}

const struct command cmd_bench_merge = {
    .name = "bench merge",
    .summary = "measure the merge kernel beside memcpy, the FMA peak and sgemm",
    .synopsis = "[--ranks R,...] [--threads N]",
    .detail = "Measures the merge of one weight per rank and thread count, interleaved with its "
              "yardsticks in the same run: memcpy, the "
              "peak of fused multiply-adds, and OpenBLAS sgemm of the same shape. Medians.",
    .opts = merge_opts,
    .n_opts = PF_COUNTOF(merge_opts),
    .args_bytes = sizeof(struct bench_merge_args),
    .run = run_merge,
};

struct bench_read_args {
    struct common_args common;
    const char *model, *merge_dtype;
    struct arg_list loras;
    struct arg_int threads, reps, limit;
};

static const struct opt read_opts[] = {
    {"model", 'm', OPT_MODEL, "M", "checkpoint; the bundled model unless said",
     offsetof(struct bench_read_args, model), NULL, 0, 0, false},
    {"lora", 'l', OPT_LORA, "L",
     "adapter: PATH[:STRENGTH][,alpha=A][,target=COMPONENT], or the name of a bundled one; may be "
     "repeated",
     offsetof(struct bench_read_args, loras), NULL, 0, 0, false},
    {"merge-dtype", 0, OPT_CHOICE, "D", "precision of the merge: base (the default) or f32",
     offsetof(struct bench_read_args, merge_dtype), "base|f32", 0, 0, false},
    {"limit", 0, OPT_SIZE, "SIZE", "read at most so much of the weights; 4G unless said",
     offsetof(struct bench_read_args, limit), NULL, 1, 0, false},
    {"reps", 0, OPT_INT, "N", "repetitions, of which the median counts; 5 unless said",
     offsetof(struct bench_read_args, reps), NULL, 1, 1000, false},
    {"threads", 't', OPT_INT, "N", "threads; one per usable CPU unless said",
     offsetof(struct bench_read_args, threads), NULL, 1, 256, false},
};

static int run_read(struct out *o, const void *p)
{
    const struct bench_read_args *args = p;
    struct bench_read_opts opts = {
        .n_threads = (unsigned)args->threads.v,
        .n_reps = (unsigned)args->reps.v,
        .n_bytes_max = (uint64_t)args->limit.v,
    };
    struct setup s = {0};
    struct json *result = NULL;
    pf_error err = {0};
    bool is_usage = false;
    int status, rc;

    rc = setup_open(&s,
                    &(struct setup_opts){.model = args->model,
                                         .loras = &args->loras,
                                         .merge_dtype = args->merge_dtype},
                    &is_usage, &err);
    if (rc && is_usage) {
        status = out_usage(o, "%s", err.msg);
    } else {
        if (!rc)
            rc = bench_read_run(s.ckpt, s.comp, &opts, &result, &err);
        status = measure_end(o, rc, result, bench_read_print, &err);
    }
    setup_release(&s);
    return status;
}

const struct command cmd_bench_read = {
    .name = "bench read",
    .summary = "measure reading weights panel by panel beside a plain read of the mapping",
    .synopsis = "[--model M] [--lora L ...]",
    .detail = "Reads every tensor of a checkpoint through a view, panel by panel, beside a plain "
              "copy out of the mapping in the same run. With "
              "adapters the panels are merged on the way. Medians.",
    .opts = read_opts,
    .n_opts = PF_COUNTOF(read_opts),
    .args_bytes = sizeof(struct bench_read_args),
    .run = run_read,
};
