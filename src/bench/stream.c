/*
 * Weights larger than memory, read over and over. What is compared: the page cache alone, which evicts the page that is needed next, and
 * the engine's plan, which keeps the first layers and drops the others behind the reader.
 */
#include "bench/stream.h"

#include <stdatomic.h>
#include <string.h>

#include "base/mem.h"
#include "base/proc.h"
#include "bench/cgroup.h"
#include "bench/child.h"
#include "bench/ground.h"
#include "bench/make.h"
#include "bench/stats.h"
#include "bench/walk.h"

enum { PASSES_MAX = 100 };
#define MIB           ((uint64_t)1 << 20)
#define LIMIT_MIN     (64 * MIB)
#define H3_BYTES      61.7e9
#define H3_BLOCK      771e6 /* bytes of one block at full width */
#define LAYERS_WANTED 20    /* a layer is at most so small a part of the limit */
#define READ_SLACK    0.05
#define PLAIN_MIN     0.9

struct stream_run {
    struct bench_stream_opts o; /* defaults filled in */
    const char *model;
    bool is_grouped;
    struct ground_files files;
};

/* --------------------------------------------------------------------------------- in the child */

static void add_pass(struct json *passes, uint64_t t0, uint64_t n_read0, uint64_t n_bytes)
{
    struct json *pass = json_new_object();
    const uint64_t n_read = proc_read_bytes() - n_read0;
    json_set_real(pass, "seconds", (double)(clock_ns() - t0) * 1e-9);
    json_set_int(pass, "read_bytes", (int64_t)n_read);
    json_set_real(pass, "read_fraction", (double)n_read / (double)n_bytes);
    json_add(passes, pass);
}

static int plain_passes(struct stream_run *run, struct json *result, struct json *passes,
                        pf_error *err)
{
    int rc = PF_OK;
    (void)result;
    for (unsigned i = 0; rc == PF_OK && i < run->o.n_passes; i++) {
        struct pf_checkpoint *ckpt = NULL;
        _Atomic uint64_t n = 0;
        /* Without a group nothing evicts these pages between passes: what memory of the limit's size would have lost is dropped here. */
        if (!run->is_grouped)
            rc = ground_drop_files(&run->files, err);
        /* Opening counts: reading a header makes the kernel read the megabytes behind it, too. */
        const uint64_t n_read0 = proc_read_bytes(), t0 = clock_ns();
        if (rc == PF_OK)
            rc = pf_checkpoint_open(run->model, NULL, &ckpt, err);
        if (rc == PF_OK)
            rc = walk_plain(ckpt, &n, err);
        add_pass(passes, t0, n_read0, run->files.n_bytes);
        pf_checkpoint_close(ckpt);
    }
    return rc;
}

static int stream_passes(struct stream_run *run, struct json *result, struct json *passes,
                         pf_error *err)
{
    struct pf_checkpoint *ckpt = NULL;
    struct pf_engine *engine = NULL;
    struct pf_view *view = NULL;
    struct walk w = {.ckpt = NULL};
    struct pf_engine_status status;
    const struct pf_engine_opts o = {.size = sizeof o,
                                     .cache_dir = "off",
                                     .way = PF_WAY_STREAM,
                                     .host_memory_bytes = run->o.n_limit_bytes};
    _Atomic uint64_t n = 0;
    uint64_t n_read0 = proc_read_bytes(), t0 = clock_ns();
    int rc = pf_checkpoint_open(run->model, NULL, &ckpt, err);
    if (rc == PF_OK)
        rc = pf_engine_open(ckpt, &o, &engine, err);
    if (rc == PF_OK) {
        view = pf_engine_view(engine);
        rc = walk_open(&w, view, err);
    }
    for (unsigned i = 0; rc == PF_OK && i < run->o.n_passes; i++) {
        rc = walk_pass(&w, NULL, &n, err);
        add_pass(passes, t0, n_read0, run->files.n_bytes);
        n_read0 = proc_read_bytes();
        t0 = clock_ns();
    }
    if (rc == PF_OK) {
        pf_engine_status(engine, &status);
        json_set_int(result, "layers_kept", status.n_layers_kept);
        json_set_int(result, "kept_bytes", (int64_t)status.n_bytes_kept);
        json_set_real(result, "kept_fraction",
                      (double)status.n_bytes_kept / (double)run->files.n_bytes);
        json_set_z(result, "plan", status.plan_note);
    }
    walk_close(&w);
    pf_view_release(view);
    pf_engine_close(engine);
    pf_checkpoint_close(ckpt);
    return rc;
}

typedef int (*passes_fn)(struct stream_run *run, struct json *result, struct json *passes,
                         pf_error *err);

static int measure(struct stream_run *run, passes_fn fn, struct json **out, pf_error *err)
{
    struct json *result = json_new_object(), *passes = json_new_array();
    struct peak *peak = NULL;
    const uint64_t n_before = proc_anon_bytes();
    int rc = peak_start(&peak, err);
    if (rc == PF_OK)
        rc = fn(run, result, passes, err);
    const uint64_t n_peak = peak_stop(peak);
    double read = 0, seconds = 0;
    for (size_t i = 1; i < json_len(passes); i++) {
        read += bench_number(json_at(passes, i), "read_bytes");
        seconds += bench_number(json_at(passes, i), "seconds");
    }
    const double n_all = (double)run->files.n_bytes * (double)(run->o.n_passes - 1);
    json_set(result, "passes", passes);
    json_set_real(result, "read_fraction", read / n_all);
    json_set_real(result, "gb_s", seconds > 0 ? 1e-9 * n_all / seconds : 0);
    json_set_int(result, "peak_anon_bytes", (int64_t)(n_peak > n_before ? n_peak - n_before : 0));
    if (rc)
        json_free(result);
    else
        *out = result;
    return rc;
}

static int measure_plain(void *ctx, struct json **out, pf_error *err)
{
    return measure(ctx, plain_passes, out, err);
}

static int measure_stream(void *ctx, struct json **out, pf_error *err)
{
    return measure(ctx, stream_passes, out, err);
}

/* --------------------------------------------------------------------------------- in the parent */

static bool go_on(const struct stream_run *run, const char *what)
{
    return !run->o.progress || run->o.progress(run->o.progress_ctx, what, 0, 0);
}

/* One side, in a fresh process and a fresh group: the page cache that the other side was charged for is gone with its group. */
static int run_side(struct stream_run *run, const char *what, child_fn fn, struct json *result,
                    pf_error *err)
{
    struct cgroup g = {.is_v2 = false};
    struct json *side = NULL;
    if (!go_on(run, what))
        return err_set(err, PF_E_CANCELLED, "the measurement was cancelled");
    int rc = ground_drop_files(&run->files, err);
    if (rc == PF_OK && run->is_grouped)
        rc = cgroup_make(&g, run->o.n_limit_bytes, err);
    if (rc == PF_OK)
        rc = child_run(fn, run, run->is_grouped ? &g : NULL, &side, err);
    if (rc != PF_OK && !go_on(run, what)) /* Ctrl-C reaches the child first */
        rc = err_set(err, PF_E_CANCELLED, "the measurement was cancelled");
    if (rc == PF_OK)
        json_set(result, what, side);
    cgroup_remove(&g);
    return rc;
}

/* Does a group work here? Says which kind, or why not. */
static void probe_group(struct stream_run *run, struct json *result)
{
    struct cgroup g;
    pf_error why;
    const char *kind = NULL, *note = NULL;
    if (run->o.no_group) {
        note = "not wanted: the plain passes start with a cold page cache instead";
    } else if (cgroup_make(&g, run->o.n_limit_bytes, &why)) {
        note = why.msg;
    } else {
        kind = g.is_v2 ? "v2" : "v1";
        run->is_grouped = true;
        cgroup_remove(&g);
    }
    json_set_z(result, "group", kind);
    json_set_z(result, "group_note", note);
}

/* A synthetic model whose layers are small beside the limit: h3's blocks with every width divided. */
static int make_model(const struct stream_run *run, const char *path, pf_error *err)
{
    unsigned div = 4;
    while (div < 128 && H3_BLOCK / (div * div) > (double)run->o.n_limit_bytes / LAYERS_WANTED)
        div *= 2;
    const struct bench_make_opts make = {.size = sizeof make,
                                         .shape = "h3",
                                         .scale =
                                             (double)run->o.n_model_bytes * div * div / H3_BYTES,
                                         .width_divisor = div,
                                         .out = path,
                                         .n_threads = run->o.n_threads,
                                         .progress = run->o.progress,
                                         .progress_ctx = run->o.progress_ctx};
    return bench_make(&make, err);
}

static int check_opts(struct stream_run *run, pf_error *err)
{
    struct bench_stream_opts *o = &run->o;
    o->n_passes = o->n_passes == 0 ? 4 : o->n_passes;
    if (o->n_limit_bytes == 0)
        o->n_limit_bytes = o->model           ? run->files.n_bytes / 2
                           : o->n_model_bytes ? o->n_model_bytes / 2
                                              : 1024 * MIB;
    if (o->n_model_bytes == 0)
        o->n_model_bytes = 2 * o->n_limit_bytes;
    if (o->n_passes < 2 || o->n_passes > PASSES_MAX)
        return err_set(err, PF_E_INVALID, "bench stream: %u passes; from 2 to %d", o->n_passes,
                       PASSES_MAX);
    if (o->n_limit_bytes < LIMIT_MIN)
        return err_set(err, PF_E_INVALID,
                       "bench stream: a limit of %llu MiB leaves no room for a process; at least "
                       "%llu, so weights of at least %llu",
                       (unsigned long long)(o->n_limit_bytes / MIB),
                       (unsigned long long)(LIMIT_MIN / MIB),
                       (unsigned long long)(2 * LIMIT_MIN / MIB));
    if (o->model ? run->files.n_bytes <= o->n_limit_bytes : o->n_model_bytes <= o->n_limit_bytes)
        return err_set(
            err, PF_E_INVALID,
            "bench stream: weights of %llu MiB fit into a limit of %llu MiB: nothing "
            "would be streamed",
            (unsigned long long)((o->model ? run->files.n_bytes : o->n_model_bytes) / MIB),
            (unsigned long long)(o->n_limit_bytes / MIB));
    return PF_OK;
}

static int check_plain(const struct json *plain, bool is_grouped, pf_error *err)
{
    const struct json *passes = json_get(plain, "passes");
    for (size_t i = 0; i < json_len(passes); i++) {
        const double fraction = bench_number(json_at(passes, i), "read_fraction");
        if (fraction < PLAIN_MIN)
            return err_set(err, PF_E_STATE,
                           "plain pass %zu read %.0f %% of the bytes from storage, less than 90: "
                           "the page cache had them%s, and the comparison would say nothing",
                           i + 1, fraction * 100,
                           is_grouped ? " although the control group is smaller" : "");
    }
    return PF_OK;
}

static int measure_sides(struct stream_run *run, struct json *result, pf_error *err)
{
    struct ground_bounds bounds;
    int rc = run_side(run, "plain", measure_plain, result, err);
    if (rc == PF_OK)
        rc = check_plain(json_get(result, "plain"), run->is_grouped, err);
    if (rc == PF_OK)
        rc = run_side(run, "stream", measure_stream, result, err);
    if (rc == PF_OK)
        rc = ground_measure(run->files.paths[0], NULL, 1, &bounds, err);
    if (rc)
        return rc;
    const struct json *stream = json_get(result, "stream");
    const double bound = 1 - bench_number(stream, "kept_fraction") + READ_SLACK;
    json_set_real(result, "disk_read_gb_s", bounds.disk_read_gb_s);
    json_set_real(result, "read_bound", bound);
    json_set_bool(result, "is_within", bench_number(stream, "read_fraction") <= bound);
    return PF_OK;
}

int bench_stream_run(const struct bench_stream_opts *opts, struct json **out, pf_error *err)
{
    struct stream_run run = {.o = opts ? *opts : (struct bench_stream_opts){.model = NULL}};
    struct json *result = json_new_object();
    char *dir = NULL, *made = NULL;
    run.model = run.o.model;
    int rc = run.model ? ground_files(run.model, &run.files, err) : PF_OK;
    if (rc == PF_OK)
        rc = check_opts(&run, err);
    if (rc == PF_OK && !run.model) {
        rc = ground_mkdir(run.o.dir, &dir, err);
        made = rc == PF_OK ? path_join(dir, "weights.safetensors") : NULL;
        if (rc == PF_OK)
            rc = made ? make_model(&run, made, err) : err_nomem(err, 0, "a path");
        if (rc == PF_OK)
            rc = ground_files(made, &run.files, err);
        run.model = made;
    }
    if (rc == PF_OK) {
        probe_group(&run, result);
        json_set_int(result, "bytes", (int64_t)run.files.n_bytes);
        json_set_int(result, "limit_bytes", (int64_t)run.o.n_limit_bytes);
        rc = measure_sides(&run, result, err);
    }
    if (rc)
        json_free(result);
    else
        *out = result;
    ground_files_free(&run.files);
    ground_rmdir(dir);
    mem_free(made);
    return rc;
}

/* ---------------------------------------------------------------------------------------- text */

static void print_side(const struct json *result, const char *key, const char *name, FILE *f)
{
    const struct json *side = json_get(result, key), *passes = json_get(side, "passes");
    fprintf(f, "  %-22s", name);
    for (size_t i = 0; i < json_len(passes) && i < 8; i++)
        fprintf(f, " %5.1f%%", bench_number(json_at(passes, i), "read_fraction") * 100);
    fprintf(f, "   %5.1f%%  %5.2f GB/s  %5.1f MiB\n", bench_number(side, "read_fraction") * 100,
            bench_number(side, "gb_s"), bench_number(side, "peak_anon_bytes") / (double)MIB);
}

void bench_stream_print(const struct json *result, FILE *f)
{
    const struct json *stream = json_get(result, "stream");
    const char *group = json_z(json_get(result, "group"));
    const char *note = json_z(json_get(result, "group_note"));
    fprintf(f, "%.0f MiB of weights, a limit of %.0f MiB: ",
            bench_number(result, "bytes") / (double)MIB,
            bench_number(result, "limit_bytes") / (double)MIB);
    if (group)
        fprintf(f, "a memory control group (%s)\n", group);
    else
        fprintf(f, "told to the engine only (%s)\n", note ? note : "");
    fprintf(f, "plan: %s\n\n", json_z(json_get(stream, "plan")));
    fprintf(f, "  %-22s %s\n", "",
            "read from storage, per pass; average after the first; speed; anonymous memory");
    print_side(result, "plain", "plain mapping", f);
    print_side(result, "stream", "streamer", f);
    fprintf(f, "  bound for the streamer: 1 - kept fraction + 0.05 = %.1f%%: %s\n",
            bench_number(result, "read_bound") * 100,
            json_bool(json_get(result, "is_within")) ? "kept" : "NOT KEPT");
    fprintf(f, "  storage, cold, four threads: %.2f GB/s\n",
            bench_number(result, "disk_read_gb_s"));
}
