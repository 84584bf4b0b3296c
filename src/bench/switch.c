/*
 * One run of `bench switch`: makes what is missing, opens, lets switch_ops.c measure, removes. And the result as JSON and as text.
 */
#include "bench/switch.h"

#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/pool.h"
#include "bench/fit.h"
#include "bench/make.h"
#include "bench/stats.h"
#include "bench/switch_int.h"

#define DEFAULT_SCALE   0.02
#define DEFAULT_RANK    64
#define DEFAULT_REPS    5
#define DEFAULT_SECONDS 3
#define DEFAULT_TIMEOUT ((uint64_t)30 * 60 * 1000)
#define MIB             ((double)(1 << 20))

static const char *const op_names[N_SWITCH_OPS] = {
    "load adapter a", "load adapter b", "first set of a", "overlay of a", "set a again",
    "switch to b",    "back to a",      "strength of a",  "unmerge",      "merge",
};

/* --------------------------------------------------------------------------------------- preparing */

static int fill_defaults(struct switch_run *r, pf_error *err)
{
    struct bench_switch_opts *o = &r->o;
    o->scale = o->scale == 0 ? DEFAULT_SCALE : o->scale;
    o->rank = o->rank == 0 ? DEFAULT_RANK : o->rank;
    o->n_reps = o->n_reps == 0 ? DEFAULT_REPS : o->n_reps;
    o->load_seconds = o->load_seconds == 0 ? DEFAULT_SECONDS : o->load_seconds;
    o->timeout_ms = o->timeout_ms == 0 ? DEFAULT_TIMEOUT : o->timeout_ms;
    o->n_threads = o->n_threads == 0 ? pool_default_threads() : o->n_threads;
    if (o->n_reps > SWITCH_REPS_MAX)
        return err_set(err, PF_E_INVALID, "bench switch: %u repetitions; at most %d", o->n_reps,
                       SWITCH_REPS_MAX);
    if ((o->adapters[0] == NULL) != (o->adapters[1] == NULL))
        return err_set(
            err, PF_E_INVALID,
            "bench switch: one adapter cannot be switched to another: name two, or none");
    return PF_OK;
}

static int make_model(struct switch_run *r, pf_error *err)
{
    const struct bench_make_opts make = {.size = sizeof make,
                                         .shape = "h3",
                                         .scale = r->o.scale,
                                         .out = r->model,
                                         .n_threads = r->o.n_threads,
                                         .progress = r->o.progress,
                                         .progress_ctx = r->o.progress_ctx};
    return bench_make(&make, err);
}

static int fit_adapters(struct switch_run *r, pf_error *err)
{
    struct pf_checkpoint *ckpt = NULL;
    int rc = pf_checkpoint_open(r->model, NULL, &ckpt, err);
    for (unsigned i = 0; rc == PF_OK && i < 2; i++) {
        const struct bench_fit_opts fit = {
            .rank = r->o.rank, .seed = i + 1, .n_threads = r->o.n_threads};
        rc = bench_fit(ckpt, r->adapters[i], &fit, NULL, err);
    }
    pf_checkpoint_close(ckpt);
    return rc;
}

static int prepare(struct switch_run *r, pf_error *err)
{
    int rc = ground_mkdir(r->o.dir, &r->dir, err);
    if (rc)
        return rc;
    r->cache = path_join(r->dir, "cache");
    r->model = r->o.model ? mem_strdup(r->o.model) : path_join(r->dir, "weights.safetensors");
    for (unsigned i = 0; i < 2; i++)
        r->adapters[i] = r->o.adapters[i]
                             ? mem_strdup(r->o.adapters[i])
                             : path_join(r->dir, i ? "b.safetensors" : "a.safetensors");
    if (!r->cache || !r->model || !r->adapters[0] || !r->adapters[1])
        return err_nomem(err, 0, "paths");
    if (!r->o.model)
        rc = make_model(r, err);
    if (rc == PF_OK && !r->o.adapters[0])
        rc = r->o.model
                 ? fit_adapters(r, err)
                 : ground_make_adapters(r->o.scale, r->o.rank, r->o.n_threads, r->adapters, err);
    if (rc == PF_OK)
        rc = ground_files(r->model, &r->files, err);
    return rc ? rc : switch_make_cold(r, err);
}

static void close_engine(struct switch_run *r)
{
    pf_engine_close(r->engine);
    pf_checkpoint_close(r->ckpt);
    r->engine = NULL;
    r->ckpt = NULL;
}

int bench_switch_run(const struct bench_switch_opts *opts, struct json **out, pf_error *err)
{
    struct switch_run *r = mem_calloc(1, sizeof *r);
    struct ground_bounds bounds;
    if (!r)
        return err_nomem(err, sizeof *r, "a measurement");
    r->o = opts ? *opts : (struct bench_switch_opts){.model = NULL};
    int rc = fill_defaults(r, err);
    if (rc == PF_OK)
        rc = prepare(r, err);
    if (rc == PF_OK)
        rc = switch_engine_open(r, err);
    if (rc == PF_OK)
        rc = switch_ops_run(r, err);
    if (rc == PF_OK)
        rc = switch_load_run(r, err);
    close_engine(r); /* the next process and the bounds need files that nobody has mapped */
    if (rc == PF_OK)
        rc = switch_second_start(r, err);
    if (rc == PF_OK)
        rc = ground_measure(r->files.paths[0], r->dir, r->o.n_threads, &bounds, err);
    if (rc == PF_OK)
        *out = switch_result(r, &bounds);
    json_free(r->second_start);
    json_free(r->warm_start);
    ground_files_free(&r->files);
    ground_rmdir(r->dir);
    mem_free(r->cache);
    mem_free(r->model);
    mem_free(r->adapters[0]);
    mem_free(r->adapters[1]);
    mem_free(r);
    return rc;
}

/* ----------------------------------------------------------------------------------------- results */

static const char *const phase_names[N_SWITCH_PHASES] = {"before", "streamed", "during", "after"};

static struct json *op_json(const char *name, struct op_stats *s)
{
    struct json *o = json_new_object();
    json_set_z(o, "op", name);
    json_set_int(o, "reps", s->n);
    json_set_real(o, "ms", bench_median(s->ms, s->n));
    json_set_z(o, "way", s->way);
    const double panel = bench_median(s->panel_ms, s->n);
    if (panel >= 0) {
        json_set_real(o, "effect_ms", bench_median(s->effect_ms, s->n));
        json_set_real(o, "panel_ms", panel);
    }
    json_set_int(o, "read_bytes", (int64_t)s->n_read);
    json_set_int(o, "written_bytes", (int64_t)s->n_written);
    json_set_int(o, "peak_anon_bytes", (int64_t)s->n_peak);
    json_set_int(o, "added_anon_bytes", (int64_t)s->n_added);
    json_set_int(o, "merged_panels", (int64_t)s->n_panels);
    return o;
}

static struct json *bounds_json(const struct ground_bounds *b)
{
    struct json *o = json_new_object();
    json_set_real(o, "memcpy_gb_s", b->memcpy_gb_s);
    json_set_real(o, "peak_gflop_s", b->peak_gflop_s);
    json_set_real(o, "disk_read_gb_s", b->disk_read_gb_s);
    json_set_real(o, "disk_write_gb_s", b->disk_write_gb_s);
    return o;
}

static struct json *load_json(const struct switch_run *r)
{
    struct json *o = json_new_object();
    json_set_bool(o, "is_drawing", r->is_drawing);
    json_set_int(o, "pass_bytes", (int64_t)r->n_pass_bytes);
    json_set_real(o, "during_seconds", r->during_seconds);
    for (int i = 0; i < N_SWITCH_PHASES; i++) {
        struct json *rate = json_new_object();
        json_set_real(rate, "passes_s", r->passes_s[i]);
        json_set_real(rate, "gb_s", r->passes_s[i] * (double)r->n_pass_bytes * 1e-9);
        json_set(o, phase_names[i], rate);
    }
    return o;
}

struct json *switch_result(struct switch_run *r, const struct ground_bounds *bounds)
{
    struct json *o = json_new_object(), *ops = json_new_array();
    struct op_stats *overlay = &r->ops[OP_OVERLAY];
    json_set_z(o, "model", r->o.model ? r->o.model : "synthetic h3");
    json_set_int(o, "bytes", (int64_t)r->files.n_bytes);
    json_set_int(o, "rank", r->o.adapters[0] ? 0 : r->o.rank);
    json_set_int(o, "tensors_changed", r->first.n_tensors_changed);
    json_set_int(o, "layers_changed", r->first.n_layers_changed);
    json_set_int(o, "threads", r->o.n_threads);
    json_set_bool(o, "is_cold", !r->is_warm);
    json_set(o, "bounds", bounds_json(bounds));
    for (int i = 0; i < N_SWITCH_OPS; i++)
        json_add(ops, op_json(op_names[i], &r->ops[i]));
    json_set(o, "ops", ops);
    json_set_real(o, "overlay_write_gb_s",
                  (double)overlay->n_written * 1e-6 / bench_median(overlay->ms, overlay->n));
    json_set_int(o, "elements_changed_after_unmerge", (int64_t)r->n_left);
    json_set(o, "second_start", r->second_start);
    json_set(o, "warm_start", r->warm_start);
    r->second_start = r->warm_start = NULL;
    json_set(o, "load", load_json(r));
    return o;
}

/* -------------------------------------------------------------------------------------------- text */

static void print_ms(FILE *f, const struct json *v)
{
    if (json_is_number(v))
        fprintf(f, " %10.2f", json_number(v));
    else
        fprintf(f, " %10s", "-");
}

static void print_op(const struct json *op, FILE *f)
{
    const char *way = json_z(json_get(op, "way"));
    fprintf(f, "  %-16s", json_z(json_get(op, "op")));
    print_ms(f, json_get(op, "panel_ms"));
    print_ms(f, json_get(op, "effect_ms"));
    print_ms(f, json_get(op, "ms"));
    fprintf(f, "  %-8s %9.1f %9.1f %9.1f %9.1f %8.0f\n", way ? way : "-",
            bench_number(op, "read_bytes") / MIB, bench_number(op, "written_bytes") / MIB,
            bench_number(op, "added_anon_bytes") / MIB, bench_number(op, "peak_anon_bytes") / MIB,
            bench_number(op, "merged_panels"));
}

static void print_second_start(const struct json *s, bool is_cold, FILE *f)
{
    fprintf(f,
            "\n  second start, new process%s: first merged panel after %.0f ms\n"
            "    open %.0f ms, load the adapter %.0f ms, set to effect %.1f ms (%s, %.0f adopted), "
            "set to panel %.1f ms; %.1f MiB read, %.1f MiB anonymous, %.0f panels merged\n",
            is_cold ? ", every file out of the page cache"
                    : " (another process has files mapped: they stay in the page cache)",
            bench_number(s, "panel_ms"), bench_number(s, "open_ms"), bench_number(s, "load_ms"),
            bench_number(s, "adopt_ms"), json_z(json_get(s, "way")), bench_number(s, "adoptions"),
            bench_number(s, "set_to_panel_ms"), bench_number(s, "read_bytes") / MIB,
            bench_number(s, "peak_anon_bytes") / MIB, bench_number(s, "merged_panels"));
}

static void print_load(const struct json *load, FILE *f)
{
    fprintf(
        f,
        "\n  %s, before b is set, while it is merged on the way, while its overlay is built too "
        "(%.1f s), and after:\n",
        json_bool(json_get(load, "is_drawing")) ? "drawing pictures" : "reading all weights",
        bench_number(load, "during_seconds"));
    for (int i = 0; i < N_SWITCH_PHASES; i++) {
        const struct json *rate = json_get(load, phase_names[i]);
        fprintf(f, "    %-8s %8.2f passes/s  %7.2f GB/s of weights\n", phase_names[i],
                bench_number(rate, "passes_s"), bench_number(rate, "gb_s"));
    }
}

void bench_switch_print(const struct json *result, FILE *f)
{
    const struct json *ops = json_get(result, "ops"), *b = json_get(result, "bounds");
    fprintf(f, "%s: %.2f GB, %.0f tensors in %.0f layers change, %.0f threads\n\n",
            json_z(json_get(result, "model")), bench_number(result, "bytes") * 1e-9,
            bench_number(result, "tensors_changed"), bench_number(result, "layers_changed"),
            bench_number(result, "threads"));
    fprintf(f, "  %-16s %10s %10s %10s  %-8s %9s %9s %9s %9s %8s\n", "", "panel ms", "effect ms",
            "call ms", "way", "read MiB", "wrote MiB", "anon +MiB", "anon MiB", "merged");
    for (size_t i = 0; i < json_len(ops); i++)
        print_op(json_at(ops, i), f);
    fprintf(f, "  elements that differ from the base after unmerge: %.0f\n",
            bench_number(result, "elements_changed_after_unmerge"));
    print_second_start(json_get(result, "second_start"), json_bool(json_get(result, "is_cold")), f);
    fprintf(f, "    once more, with the files in the page cache: %.0f ms, set to effect %.1f ms\n",
            bench_number(json_get(result, "warm_start"), "panel_ms"),
            bench_number(json_get(result, "warm_start"), "adopt_ms"));
    print_load(json_get(result, "load"), f);
    fprintf(f,
            "\n  overlay written at %.2f GB/s. Bounds: storage reads %.2f GB/s and writes %.2f "
            "GB/s, memcpy %.1f GB/s, multiply-add peak %.0f GFLOP/s\n",
            bench_number(result, "overlay_write_gb_s"), bench_number(b, "disk_read_gb_s"),
            bench_number(b, "disk_write_gb_s"), bench_number(b, "memcpy_gb_s"),
            bench_number(b, "peak_gflop_s"));
    fprintf(f, "  panel: from the call until a reader has the first panel of the new composition; "
               "effect: until the view is published;\n"
               "  call: the whole call, which also reports how much of the change survives\n");
}
