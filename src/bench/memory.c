/*
 * Two engines in one process, in a group, with the memory sampler running. Files are made by the parent, outside the group, and
 * dropped from the page cache, so that the child's group is charged for what the child reads.
 */
#include "bench/memory.h"

#include "base/file.h"
#include "base/mem.h"
#include "base/proc.h"
#include "bench/cgroup.h"
#include "bench/child.h"
#include "bench/ground.h"
#include "bench/load.h"
#include "bench/make.h"
#include "bench/stats.h"
#include "view/view.h"

enum { REPS_MAX = 1000 };
#define MIB         ((uint64_t)1 << 20)
#define BOUND_BYTES (256 * MIB)
#define LIMIT_MIN   (256 * MIB)
#define TIMEOUT_MS  ((uint64_t)30 * 60 * 1000)
#define BUILD_ASKED ((int64_t)1000 * 3600 * 24) /* builds start when they are asked for */

struct memory_run {
    struct bench_memory_opts o; /* defaults filled in */
    char *dir, *cache, *h3, *dit, *adapters[2];
    bool is_grouped;
    struct pf_checkpoint *ckpts[2]; /* h3, dit */
    struct pf_engine *engines[2];
    struct json *ops;
    uint64_t n_peak, n_changes;
};

static int open_side(struct memory_run *r, int i, const char *model, pf_error *err)
{
    const struct pf_engine_opts o = {.size = sizeof o,
                                     .cache_dir = i == 0 ? r->cache : "off",
                                     .cache_budget_bytes = UINT64_MAX / 2,
                                     .host_memory_bytes = r->o.n_limit_bytes,
                                     .n_threads = r->o.n_threads,
                                     .build_delay_ms = BUILD_ASKED};
    const int rc = pf_checkpoint_open(model, NULL, &r->ckpts[i], err);
    return rc ? rc : pf_engine_open(r->ckpts[i], &o, &r->engines[i], err);
}

static int set_one(struct memory_run *r, const char *nickname, double strength, pf_error *err)
{
    const struct pf_engine_lora l = {.nickname = nickname, .strength = strength};
    struct pf_change_report report;
    r->n_changes++;
    return pf_engine_set(r->engines[0], &l, 1, NULL, NULL, &report, err);
}

static int do_load(struct memory_run *r, unsigned i, pf_error *err)
{
    (void)i;
    const int rc = pf_engine_load(r->engines[0], "a", r->adapters[0], err);
    return rc ? rc : pf_engine_load(r->engines[0], "b", r->adapters[1], err);
}

static int do_set(struct memory_run *r, unsigned i, pf_error *err)
{
    (void)i;
    return set_one(r, "a", 1, err);
}

static int do_build(struct memory_run *r, unsigned i, pf_error *err)
{
    struct pf_engine_status status;
    (void)i;
    const int rc = pf_engine_settle(r->engines[0], TIMEOUT_MS, err);
    pf_engine_status(r->engines[0], &status);
    if (rc == PF_OK && status.n_builds == 0)
        return err_set(err, PF_E_STATE, "no overlay was built: %s", status.cache_note);
    return rc;
}

static int do_switch(struct memory_run *r, unsigned i, pf_error *err)
{
    struct pf_change_report report;
    int rc = set_one(r, "b", 1, err);
    if (rc == PF_OK)
        rc = set_one(r, "a", 1, err);
    if (rc == PF_OK)
        rc = set_one(r, "b", 0.5 + 0.001 * i, err);
    if (rc == PF_OK)
        rc = pf_engine_unmerge(r->engines[0], NULL, &report, err);
    if (rc == PF_OK)
        rc = pf_engine_merge(r->engines[0], NULL, 1, &report, err);
    r->n_changes += 2;
    return rc;
}

typedef int (*step_fn)(struct memory_run *r, unsigned i, pf_error *err);

static int step(struct memory_run *r, const char *name, unsigned n, step_fn fn, pf_error *err)
{
    struct peak *peak = NULL;
    const uint64_t t0 = clock_ns();
    int rc = peak_start(&peak, err);
    for (unsigned i = 0; rc == PF_OK && i < n; i++)
        rc = fn(r, i, err);
    const uint64_t n_peak = peak_stop(peak);
    struct json *o = json_new_object();
    json_set_z(o, "op", name);
    json_set_int(o, "peak_anon_bytes", (int64_t)n_peak);
    json_set_real(o, "ms", (double)(clock_ns() - t0) * 1e-6);
    json_add(r->ops, o);
    r->n_peak = n_peak > r->n_peak ? n_peak : r->n_peak;
    return rc;
}

static int serve_both(struct memory_run *r, struct load *load, pf_error *err)
{
    int rc = step(r, "load two adapters", 1, do_load, err);
    if (rc == PF_OK)
        rc = step(r, "first set", 1, do_set, err);
    if (rc == PF_OK)
        rc = step(r, "build the overlay", 1, do_build, err);
    if (rc == PF_OK)
        rc = step(r, "switch there and back", r->o.n_reps, do_switch, err);
    if (rc == PF_OK && load_passes(load) == 0)
        rc = err_set(err, PF_E_STATE, "nothing was drawn meanwhile");
    return rc;
}

static int in_child(void *ctx, struct json **out, pf_error *err)
{
    struct memory_run *r = ctx;
    struct load *load = NULL;
    const uint64_t t0 = clock_ns();
    r->ops = json_new_array();
    int rc = open_side(r, 0, r->h3, err);
    if (rc == PF_OK)
        rc = open_side(r, 1, r->dit, err);
    if (rc == PF_OK)
        rc = load_start(&load, r->ckpts[1], r->engines[1], r->o.n_threads, err);
    if (rc == PF_OK)
        rc = serve_both(r, load, err);
    struct json *o = json_new_object();
    json_set_real(o, "passes", load ? load_passes(load) : 0);
    const int rc_load = load_stop(load, rc ? NULL : err);
    rc = rc ? rc : rc_load;
    if (rc == PF_OK) {
        json_set_int(o, "overlay_bytes", (int64_t)pf_engine_cache_bytes(r->engines[0]));
        json_set_int(o, "h3_bytes", (int64_t)r->ckpts[0]->n_bytes);
        json_set_int(o, "dit_bytes", (int64_t)r->ckpts[1]->n_bytes);
        json_set_int(o, "changes", (int64_t)r->n_changes);
        json_set_real(o, "seconds", (double)(clock_ns() - t0) * 1e-9);
        json_set_int(o, "peak_anon_bytes", (int64_t)r->n_peak);
        json_set(o, "ops", r->ops);
        *out = o;
    } else {
        json_free(o);
        json_free(r->ops);
    }
    for (int i = 0; i < 2; i++) {
        pf_engine_close(r->engines[i]);
        pf_checkpoint_close(r->ckpts[i]);
    }
    return rc;
}

/* --------------------------------------------------------------------------------------- outside */

static int make(struct memory_run *r, const char *shape, double scale, const char *out,
                pf_error *err)
{
    const struct bench_make_opts o = {.size = sizeof o,
                                      .shape = shape,
                                      .scale = scale,
                                      .out = out,
                                      .n_threads = r->o.n_threads,
                                      .progress = r->o.progress,
                                      .progress_ctx = r->o.progress_ctx};
    return bench_make(&o, err);
}

static int prepare(struct memory_run *r, pf_error *err)
{
    int rc = ground_mkdir(r->o.dir, &r->dir, err);
    if (rc)
        return rc;
    r->cache = path_join(r->dir, "cache");
    r->h3 = path_join(r->dir, "h3.safetensors");
    r->dit = path_join(r->dir, "dit");
    r->adapters[0] = path_join(r->dir, "a.safetensors");
    r->adapters[1] = path_join(r->dir, "b.safetensors");
    if (!r->cache || !r->h3 || !r->dit || !r->adapters[0] || !r->adapters[1])
        return err_nomem(err, 0, "paths");
    rc = make(r, "h3", r->o.h3_scale, r->h3, err);
    if (rc == PF_OK)
        rc = make(r, "dit", r->o.dit_scale, r->dit, err);
    if (rc == PF_OK)
        rc = ground_make_adapters(r->o.h3_scale, r->o.rank, r->o.n_threads, r->adapters, err);
    return rc ? rc : ground_drop_tree(r->dir, err);
}

static int fill_defaults(struct bench_memory_opts *o, pf_error *err)
{
    o->h3_scale = o->h3_scale == 0 ? 1.0 / 12 : o->h3_scale;
    o->dit_scale = o->dit_scale == 0 ? 0.31 : o->dit_scale;
    o->rank = o->rank == 0 ? 64 : o->rank;
    o->n_limit_bytes = o->n_limit_bytes == 0 ? 1024 * MIB : o->n_limit_bytes;
    o->n_reps = o->n_reps == 0 ? 5 : o->n_reps;
    if (o->n_reps > REPS_MAX)
        return err_set(err, PF_E_INVALID, "bench memory: %u repetitions; at most %d", o->n_reps,
                       REPS_MAX);
    if (o->n_limit_bytes < LIMIT_MIN)
        return err_set(err, PF_E_INVALID, "bench memory: a limit of %llu MiB; at least %llu",
                       (unsigned long long)(o->n_limit_bytes / MIB),
                       (unsigned long long)(LIMIT_MIN / MIB));
    return PF_OK;
}

static int run_child(struct memory_run *r, struct json **out, pf_error *err)
{
    struct cgroup g;
    pf_error why = {0};
    const char *kind = NULL;
    uint64_t n_group_peak = 0;
    r->is_grouped = cgroup_make(&g, r->o.n_limit_bytes, &why) == PF_OK;
    if (r->is_grouped)
        kind = g.is_v2 ? "v2" : "v1";
    const int rc = child_run(in_child, r, r->is_grouped ? &g : NULL, out, err);
    if (r->is_grouped)
        n_group_peak = cgroup_peak_bytes(&g);
    cgroup_remove(&g);
    if (rc)
        return rc;
    json_set_z(*out, "group", kind);
    json_set_z(*out, "group_note", r->is_grouped ? NULL : why.msg);
    json_set_int(*out, "group_peak_bytes", (int64_t)n_group_peak);
    json_set_int(*out, "limit_bytes", (int64_t)r->o.n_limit_bytes);
    json_set_int(*out, "bound_bytes", (int64_t)BOUND_BYTES);
    json_set_bool(*out, "is_within", bench_number(*out, "peak_anon_bytes") <= (double)BOUND_BYTES);
    return PF_OK;
}

int bench_memory_run(const struct bench_memory_opts *opts, struct json **out, pf_error *err)
{
    struct memory_run r = {.o = opts ? *opts : (struct bench_memory_opts){.rank = 0}};
    int rc = fill_defaults(&r.o, err);
    if (rc == PF_OK)
        rc = prepare(&r, err);
    if (rc == PF_OK)
        rc = run_child(&r, out, err);
    ground_rmdir(r.dir);
    mem_free(r.cache);
    mem_free(r.h3);
    mem_free(r.dit);
    mem_free(r.adapters[0]);
    mem_free(r.adapters[1]);
    return rc;
}

void bench_memory_print(const struct json *result, FILE *f)
{
    const struct json *ops = json_get(result, "ops");
    const char *group = json_z(json_get(result, "group"));
    const char *note = json_z(json_get(result, "group_note"));
    fprintf(
        f,
        "h3 of %.2f GB changes adapters, a transformer of %.2f GB draws, limit %.0f MiB (%s)\n\n",
        bench_number(result, "h3_bytes") * 1e-9, bench_number(result, "dit_bytes") * 1e-9,
        bench_number(result, "limit_bytes") / (double)MIB,
        group  ? group
        : note ? note
               : "");
    fprintf(f, "  %-24s %12s %12s\n", "", "anon peak MiB", "ms");
    for (size_t i = 0; i < json_len(ops); i++)
        fprintf(f, "  %-24s %12.1f %12.0f\n", json_z(json_get(json_at(ops, i), "op")),
                bench_number(json_at(ops, i), "peak_anon_bytes") / (double)MIB,
                bench_number(json_at(ops, i), "ms"));
    fprintf(
        f,
        "\n  peak anonymous memory %.1f MiB, bound %.0f MiB: %s; %.0f changes, %.1f passes drawn, "
        "%.2f GB of overlay, %.1f s\n",
        bench_number(result, "peak_anon_bytes") / (double)MIB,
        bench_number(result, "bound_bytes") / (double)MIB,
        json_bool(json_get(result, "is_within")) ? "kept" : "NOT KEPT",
        bench_number(result, "changes"), bench_number(result, "passes"),
        bench_number(result, "overlay_bytes") * 1e-9, bench_number(result, "seconds"));
}
