/*
 * `pageflip bench make`: options of the synthetic checkpoints and adapters that bench/ writes, and the report.
 */
#include "bench/make.h"
#include "cli/command.h"
#include "cli/progress.h"

struct make_args {
    struct common_args common;
    const char *shape, *dialect, *dtype, *out;
    struct arg_real scale, alpha, delta_rms;
    struct arg_int rank, seed, threads;
};

static const struct opt opts[] = {
    {"shape", 0, OPT_CHOICE, "SHAPE",
     "h3: a video transformer, 61.7 GB at scale 1; dit: pixel space, 8 GB; emoji: the bundled "
     "model's",
     offsetof(struct make_args, shape), "h3|dit|emoji", 0, 0, true},
    {"scale", 'x', OPT_REAL, "X", "size as a part of the whole; 1 unless said",
     offsetof(struct make_args, scale), NULL, 0, 0, false},
    {"rank", 'r', OPT_INT, "R",
     "make an adapter of this rank for that shape instead of a checkpoint",
     offsetof(struct make_args, rank), NULL, 1, 4096, false},
    {"dialect", 0, OPT_CHOICE, "D", "spelling of the adapter; peft unless said",
     offsetof(struct make_args, dialect), "peft|diffusers|kohya|native", 0, 0, false},
    {"dtype", 0, OPT_CHOICE, "T", "dtype of the adapter's factors; F32 unless said",
     offsetof(struct make_args, dtype), "F32|F16|BF16", 0, 0, false},
    {"alpha", 0, OPT_REAL, "A", "alpha of the adapter; its rank unless said",
     offsetof(struct make_args, alpha), NULL, 0, 0, false},
    {"delta-rms", 0, OPT_REAL, "D",
     "rms of the adapter's change, relative to the weights'; 0.001 unless said",
     offsetof(struct make_args, delta_rms), NULL, 0, 0, false},
    {"seed", 's', OPT_INT, "S", "seed of the noise; 0 unless said",
     offsetof(struct make_args, seed), NULL, 0, 0, false},
    {"threads", 't', OPT_INT, "N",
     "threads; one per usable CPU unless said. The bytes do not depend on it",
     offsetof(struct make_args, threads), NULL, 1, 256, false},
};
static const struct operand operands[] = {
    {"OUT",
     "what to write; must not exist. A directory for dit, emoji and peft adapters, else a file",
     OPT_FILE, offsetof(struct make_args, out), true},
};

/* What the table cannot say about combinations of options. NULL: fine. */
static const char *check(const struct make_args *args)
{
    if (args->scale.is_set && args->scale.v <= 0)
        return "option '--scale' must be above 0";
    if (args->alpha.is_set && args->alpha.v <= 0)
        return "option '--alpha' must be above 0";
    if (args->delta_rms.is_set && args->delta_rms.v <= 0)
        return "option '--delta-rms' must be above 0";
    if (!args->rank.is_set &&
        (args->dialect || args->dtype || args->alpha.is_set || args->delta_rms.is_set))
        return "options '--dialect', '--dtype', '--alpha' and '--delta-rms' are for adapters: give "
               "--rank R";
    return NULL;
}

static int report(const struct out *o, const struct make_args *args,
                  const struct bench_make_report *r)
{
    struct json *doc;
    char size[16], rate[16];

    if (!o->is_json) {
        out_field(o, "output", "%s: %s of %s in %u tensors", args->out, r->what,
                  out_bytes((double)r->n_bytes, size), r->n_tensors);
        out_field(o, "targets", "%u linears that an adapter changes", r->n_targets);
        out_field(o, "seconds", "%.2f (%s/s)", r->seconds,
                  out_bytes(r->seconds > 0 ? (double)r->n_bytes / r->seconds : 0, rate));
        return EXIT_STATUS_OK;
    }
    doc = json_new_object();
    json_set(doc, "output", json_new_string(str_of(args->out)));
    json_set_z(doc, "what", r->what);
    json_set_z(doc, "shape", args->shape);
    json_set_int(doc, "n_tensors", r->n_tensors);
    json_set_int(doc, "n_targets", r->n_targets);
    json_set_int(doc, "n_bytes", (int64_t)r->n_bytes);
    json_set_real(doc, "seconds", r->seconds);
    return out_json(o, doc);
}

static int run(struct out *o, const void *p)
{
    const struct make_args *args = p;
    struct progress bar;
    struct bench_make_report made = {0};
    struct bench_make_opts make = {
        .size = sizeof(make),
        .shape = args->shape,
        .scale = args->scale.v,
        .out = args->out,
        .rank = (uint32_t)args->rank.v,
        .dialect = args->dialect,
        .dtype = args->dtype,
        .alpha = args->alpha.v,
        .delta_rms = args->delta_rms.v,
        .seed = args->seed.v,
        .n_threads = (uint32_t)args->threads.v,
        .progress = progress_tick,
        .progress_ctx = &bar,
        .report = &made,
    };
    const char *wrong = check(args);
    pf_error err = {0};
    int rc;

    if (wrong)
        return out_usage(o, "%s", wrong);
    progress_begin(&bar, !o->is_quiet, true);
    rc = bench_make(&make, &err);
    progress_end(&bar);
    if (rc == PF_E_CANCELLED)
        return out_interrupted(o, "interrupted: '%s' was not written", args->out);
    return rc ? out_fail(o, &err) : report(o, args, &made);
}

const struct command cmd_bench_make = {
    .name = "bench make",
    .summary = "write a synthetic checkpoint or adapter of real geometry",
    .synopsis = "--shape h3|dit|emoji [--scale X] [--rank R [--dialect D]] OUT",
    .detail = "Writes seeded noise in the shapes of real models, for measuring. With --rank what "
              "is written is an adapter for that shape. The bytes "
              "depend on the options and the seed alone.",
    .opts = opts,
    .n_opts = PF_COUNTOF(opts),
    .operands = operands,
    .n_operands = PF_COUNTOF(operands),
    .args_bytes = sizeof(struct make_args),
    .run = run,
};
