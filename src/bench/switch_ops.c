/*
 * The changes themselves, each between two looks at the clock, at what was read and written, and at anonymous memory; and the watch.
 */
#include "bench/switch_int.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "base/proc.h"
#include "bench/child.h"
#include "bench/load.h"
#include "bench/walk.h"
#include "merge/merge.h"

enum { PANEL_BYTES = 4 << 20, POLL_NS = 20000, SETTLE_NS = 20000000 };
#define NEVER_MS       ((int64_t)1000 * 3600 * 24) /* builds start when they are asked for */
#define WATCH_PATIENCE ((uint64_t)10 * 1000000000)

static void nap(long ns)
{
    (void)nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
}

/* ------------------------------------------------------------------------------------------ watch */

/* A thread that reads one panel as soon as the engine's view is another than it was. */
struct watch {
    struct pf_engine *engine;
    struct pf_view *before; /* a reference: its composition is what it was */
    uint8_t *buffer;
    pthread_t thread;
    _Atomic bool is_ready, stop;
    _Atomic uint64_t t_panel_ns;
};

/* One panel of the first tensor that either composition changes: where the change shows. */
static bool read_panel(struct watch *w, struct pf_view *view)
{
    const struct pf_composition *comp = view_composition(view);
    struct pf_reader *reader = NULL;
    if (comp->n_targets == 0)
        comp = view_composition(w->before);
    struct pf_panel panel = {.i_tensor = comp->n_targets ? comp->i_tensors[0] : 0};
    panel.n_rows = view_panel_rows(view, panel.i_tensor, PANEL_BYTES);
    if (pf_reader_new(view, &reader, NULL))
        return false;
    const bool is_read =
        pf_reader_read(reader, &panel, PF_NATIVE, w->buffer, PANEL_BYTES, NULL) == PF_OK;
    pf_reader_free(reader);
    return is_read;
}

static void *watch_run(void *arg)
{
    struct watch *w = arg;
    atomic_store(&w->is_ready, true);
    while (!atomic_load(&w->stop)) {
        struct pf_view *view = pf_engine_view(w->engine);
        const bool is_new = strcmp(pf_view_digest(view), pf_view_digest(w->before)) != 0;
        if (is_new && read_panel(w, view))
            atomic_store(&w->t_panel_ns, clock_ns());
        pf_view_release(view);
        if (is_new)
            break;
        nap(POLL_NS);
    }
    return NULL;
}

static int watch_start(struct watch **out, struct pf_engine *engine, pf_error *err)
{
    struct watch *w = mem_calloc(1, sizeof *w);
    if (!w)
        return err_nomem(err, sizeof *w, "a watch");
    w->engine = engine;
    w->buffer = mem_aligned(4096, PANEL_BYTES);
    if (!w->buffer) {
        mem_free(w);
        return err_nomem(err, PANEL_BYTES, "a panel");
    }
    memset(w->buffer, 0, PANEL_BYTES); /* touched now, not while the clock runs */
    w->before = pf_engine_view(engine);
    const int sys_errno = pthread_create(&w->thread, NULL, watch_run, w);
    if (sys_errno) {
        pf_view_release(w->before);
        mem_free(w->buffer);
        mem_free(w);
        return err_sys(err, sys_errno, "cannot start a thread");
    }
    while (!atomic_load(&w->is_ready))
        nap(POLL_NS);
    *out = w;
    return PF_OK;
}

/* When the panel was there (monotonic clock); 0: nothing changed. Frees w; NULL gives 0. */
static uint64_t watch_stop(struct watch *w, bool is_change_expected)
{
    if (!w)
        return 0;
    const uint64_t t0 = clock_ns();
    while (is_change_expected && atomic_load(&w->t_panel_ns) == 0 &&
           clock_ns() - t0 < WATCH_PATIENCE)
        nap(POLL_NS);
    atomic_store(&w->stop, true);
    (void)pthread_join(w->thread, NULL);
    const uint64_t t = atomic_load(&w->t_panel_ns);
    pf_view_release(w->before);
    mem_free(w->buffer);
    mem_free(w);
    return t;
}

/* --------------------------------------------------------------------------------------- measuring */

static void grow(uint64_t *max, uint64_t v)
{
    *max = v > *max ? v : *max;
}

typedef int (*op_fn)(struct switch_run *r, struct pf_change_report *out_report, pf_error *err);

/* Measured as op `id`: `fn` between the counters. is_change: the composition becomes another. */
static int op_measure(struct switch_run *r, enum switch_op id, bool is_change, op_fn fn,
                      pf_error *err)
{
    struct op_stats *s = &r->ops[id];
    struct pf_change_report report = {.way = NULL};
    struct watch *w = NULL;
    struct peak *peak = NULL;
    if (r->o.progress && !r->o.progress(r->o.progress_ctx, "changing adapters", 0, 0))
        return err_set(err, PF_E_CANCELLED, "the measurement was cancelled");
    int rc = is_change ? watch_start(&w, r->engine, err) : PF_OK;
    const uint64_t n_anon = proc_anon_bytes();
    if (rc == PF_OK)
        rc = peak_start(&peak, err);
    const uint64_t n_read = proc_read_bytes(), n_written = proc_write_bytes();
    const uint64_t n_panels = merge_n_panels(), t0 = clock_ns();
    if (rc == PF_OK)
        rc = fn(r, &report, err);
    const uint64_t t1 = clock_ns();
    const uint64_t t_panel = watch_stop(w, rc == PF_OK && is_change);
    const uint64_t n_merged =
        merge_n_panels() - n_panels; /* the watch's panel too, however late it was read */
    const uint64_t n_peak = peak_stop(peak);
    if (rc)
        return rc;
    if (is_change && t_panel == 0)
        return err_set(err, PF_E_STATE, "a change that was reported reached no reader");
    s->ms[s->n] = (double)(t1 - t0) * 1e-6;
    s->effect_ms[s->n] = report.effect_ms;
    s->panel_ms[s->n] = is_change ? (double)(t_panel - t0) * 1e-6 : -1;
    s->n++;
    s->way = report.way;
    grow(&s->n_read, proc_read_bytes() - n_read);
    grow(&s->n_written, proc_write_bytes() - n_written);
    grow(&s->n_peak, n_peak);
    grow(&s->n_added, n_peak > n_anon ? n_peak - n_anon : 0);
    grow(&s->n_panels, n_merged);
    return PF_OK;
}

int switch_engine_open(struct switch_run *r, pf_error *err)
{
    const struct pf_engine_opts o = {.size = sizeof o,
                                     .cache_dir = r->cache,
                                     .cache_budget_bytes = UINT64_MAX / 2,
                                     .host_memory_bytes = r->o.host_memory_bytes,
                                     .n_threads = r->o.n_threads,
                                     .build_delay_ms = NEVER_MS};
    int rc = pf_checkpoint_open(r->model, NULL, &r->ckpt, err);
    return rc ? rc : pf_engine_open(r->ckpt, &o, &r->engine, err);
}

static int switch_set(struct switch_run *r, const char *nickname, double strength,
                      struct pf_change_report *out_report, pf_error *err)
{
    const struct pf_engine_lora l = {.nickname = nickname, .strength = strength};
    return pf_engine_set(r->engine, &l, 1, NULL, NULL, out_report, err);
}

static int load_a(struct switch_run *r, struct pf_change_report *out, pf_error *err)
{
    (void)out;
    return pf_engine_load(r->engine, "a", r->adapters[0], err);
}

static int load_b(struct switch_run *r, struct pf_change_report *out, pf_error *err)
{
    (void)out;
    return pf_engine_load(r->engine, "b", r->adapters[1], err);
}

static int set_a(struct switch_run *r, struct pf_change_report *out, pf_error *err)
{
    return switch_set(r, "a", 1, out, err);
}

static int set_b(struct switch_run *r, struct pf_change_report *out, pf_error *err)
{
    return switch_set(r, "b", 1, out, err);
}

static int set_strength(struct switch_run *r, struct pf_change_report *out, pf_error *err)
{
    return switch_set(r, "a", 0.5 + 0.01 * r->i_rep, out, err);
}

static int settle(struct switch_run *r, struct pf_change_report *out, pf_error *err)
{
    (void)out;
    return pf_engine_settle(r->engine, r->o.timeout_ms, err);
}

static int unmerge(struct switch_run *r, struct pf_change_report *out, pf_error *err)
{
    return pf_engine_unmerge(r->engine, NULL, out, err);
}

static int merge_again(struct switch_run *r, struct pf_change_report *out, pf_error *err)
{
    return pf_engine_merge(r->engine, NULL, 1, out, err);
}

static int first_set(struct switch_run *r, struct pf_change_report *out, pf_error *err)
{
    const int rc = set_a(r, out, err);
    r->first = *out;
    return rc;
}

/* The overlay is what settling leaves behind: without one, `ms` would be the time of doing nothing. */
static int check_built(struct switch_run *r, uint64_t n_builds, pf_error *err)
{
    struct pf_engine_status status;
    pf_engine_status(r->engine, &status);
    if (status.n_builds >= n_builds)
        return PF_OK;
    return err_set(err, PF_E_STATE, "no overlay was built: %s", status.cache_note);
}

/* What readers see of the tensors that `a` had changed, once it is off again. */
static int count_left(struct switch_run *r, pf_error *err)
{
    struct pf_view *merged = pf_engine_view(r->engine), *base = NULL;
    const struct pf_composition *comp = view_composition(merged);
    struct pf_change_report report;
    struct walk w = {.ckpt = NULL};
    int rc = unmerge(r, &report, err);
    if (rc == PF_OK) {
        base = pf_engine_view(r->engine);
        rc = walk_open(&w, base, err);
    }
    for (size_t i = 0; rc == PF_OK && i < comp->n_targets; i++)
        rc = walk_compare(&w, comp->i_tensors[i], &r->n_left, err);
    walk_close(&w);
    pf_view_release(base);
    pf_view_release(merged);
    return rc;
}

int switch_ops_run(struct switch_run *r, pf_error *err)
{
    int rc = op_measure(r, OP_LOAD_A, false, load_a, err);
    if (rc == PF_OK)
        rc = op_measure(r, OP_LOAD_B, false, load_b, err);
    if (rc == PF_OK)
        rc = op_measure(r, OP_FIRST_SET, true, first_set, err);
    if (rc == PF_OK)
        rc = op_measure(r, OP_OVERLAY, false, settle, err);
    if (rc == PF_OK)
        rc = check_built(r, 1, err);
    for (r->i_rep = 0; rc == PF_OK && r->i_rep < r->o.n_reps; r->i_rep++) {
        rc = op_measure(r, OP_SET_AGAIN, false, set_a, err);
        if (rc == PF_OK)
            rc = op_measure(r, OP_SWITCH, true, set_b, err);
        if (rc == PF_OK)
            rc = op_measure(r, OP_BACK, true, set_a, err);
        if (rc == PF_OK)
            rc = op_measure(r, OP_STRENGTH, true, set_strength, err);
        if (rc == PF_OK)
            rc = op_measure(r, OP_UNMERGE, true, unmerge, err);
        if (rc == PF_OK)
            rc = op_measure(r, OP_MERGE, true, merge_again, err);
        if (rc == PF_OK)
            rc = set_a(r, &(struct pf_change_report){.way = NULL}, err);
    }
    return rc ? rc : count_left(r, err);
}

/* ------------------------------------------------------------------------------------ second start */

/* In a fresh process: from nothing to the first panel, with the overlay there and every file out of the page cache. */
static int start_again(void *ctx, struct json **out, pf_error *err)
{
    struct switch_run *r = ctx;
    struct peak *peak = NULL;
    struct watch *w = NULL;
    struct pf_change_report report;
    struct pf_engine_status status;
    const uint64_t n_read = proc_read_bytes(), n_anon = proc_anon_bytes();
    int rc = peak_start(&peak, err);
    const uint64_t t0 = clock_ns();
    if (rc == PF_OK)
        rc = switch_engine_open(r, err);
    const uint64_t t_open = clock_ns();
    if (rc == PF_OK)
        rc = pf_engine_load(r->engine, "a", r->adapters[0], err);
    const uint64_t t_load = clock_ns();
    if (rc == PF_OK)
        rc = watch_start(&w, r->engine, err);
    const uint64_t t_set = clock_ns(), n_panels = merge_n_panels();
    if (rc == PF_OK)
        rc = set_a(r, &report, err);
    const uint64_t t_panel = watch_stop(w, rc == PF_OK);
    if (rc == PF_OK) {
        struct json *o = json_new_object();
        pf_engine_status(r->engine, &status);
        json_set_real(o, "open_ms", (double)(t_open - t0) * 1e-6);
        json_set_real(o, "load_ms", (double)(t_load - t_open) * 1e-6);
        json_set_real(o, "adopt_ms", report.effect_ms);
        json_set_real(o, "set_to_panel_ms", (double)(t_panel - t_set) * 1e-6);
        json_set_real(o, "panel_ms", (double)(t_panel - t0) * 1e-6);
        json_set_z(o, "way", report.way);
        json_set_int(o, "adoptions", (int64_t)status.n_adoptions);
        json_set_int(o, "read_bytes", (int64_t)(proc_read_bytes() - n_read));
        json_set_int(o, "merged_panels", (int64_t)(merge_n_panels() - n_panels));
        const uint64_t n_peak = peak_stop(peak);
        peak = NULL;
        json_set_int(o, "peak_anon_bytes", (int64_t)(n_peak > n_anon ? n_peak - n_anon : 0));
        *out = o;
    }
    (void)peak_stop(peak);
    pf_engine_close(r->engine);
    pf_checkpoint_close(r->ckpt);
    return rc;
}

/* Cold where that is possible: what another process has mapped stays, and the result says so. */
int switch_make_cold(struct switch_run *r, pf_error *err)
{
    int rc = ground_drop_files(&r->files, err);
    if (rc == PF_OK && file_kind(r->cache) == FILE_DIRECTORY)
        rc = ground_drop_tree(r->cache, err);
    for (int i = 0; rc == PF_OK && i < 2; i++)
        if (file_kind(r->adapters[i]) == FILE_REGULAR)
            rc = ground_drop(r->adapters[i], err);
    if (rc == PF_E_BUSY) {
        r->is_warm = true;
        rc = PF_OK;
    }
    return rc;
}

int switch_second_start(struct switch_run *r, pf_error *err)
{
    int rc = switch_make_cold(r, err);
    if (rc == PF_OK)
        rc = child_run(start_again, r, NULL, &r->second_start, err);
    return rc ? rc : child_run(start_again, r, NULL, &r->warm_start, err);
}

/* -------------------------------------------------------------------------------------------- load */

static double passes_per_s(const struct load *load, double from, uint64_t t0)
{
    const double seconds = (double)(clock_ns() - t0) * 1e-9;
    return (load_passes(load) - from) / seconds;
}

static double watch_load(const struct load *load, double seconds)
{
    const double from = load_passes(load);
    const uint64_t t0 = clock_ns();
    while ((double)(clock_ns() - t0) * 1e-9 < seconds)
        nap(SETTLE_NS);
    return passes_per_s(load, from, t0);
}

int switch_load_run(struct switch_run *r, pf_error *err)
{
    struct load *load = NULL;
    struct pf_change_report report;
    int rc = pf_engine_deactivate(r->engine, NULL, &report, err);
    if (rc == PF_OK)
        rc = load_start(&load, r->ckpt, r->engine, r->o.n_threads, err);
    if (rc)
        return rc;
    r->n_pass_bytes = load_pass_bytes(load);
    r->is_drawing = load_is_drawing(load);
    /* The first round warms up: page cache, threads. */
    load_wait(load, 1);
    r->passes_s[PHASE_BEFORE] = watch_load(load, r->o.load_seconds);
    rc = set_b(r, &report, err);
    if (rc == PF_OK) {
        load_wait(load, 1); /* a round keeps the view that it began with: the next one streams */
        r->passes_s[PHASE_STREAMED] = watch_load(load, r->o.load_seconds);
    }
    const double from = load_passes(load);
    const uint64_t t0 = clock_ns();
    if (rc == PF_OK)
        rc = pf_engine_settle(r->engine, r->o.timeout_ms, err);
    r->during_seconds = (double)(clock_ns() - t0) * 1e-9;
    r->passes_s[PHASE_DURING] = passes_per_s(load, from, t0);
    if (rc == PF_OK) {
        /* "After" begins when a whole round has used the overlay: that round reads it in, as the first of "before" did the base. */
        load_wait(load, 2);
        r->passes_s[PHASE_AFTER] = watch_load(load, r->o.load_seconds);
    }
    const int rc_load = load_stop(load, rc ? NULL : err);
    return rc ? rc : rc_load;
}
