/*
 * The overflow proof: a change that could make a weight infinite fails before anything is published. Decided from the
 * factors' largest magnitudes where those suffice, which is nearly always; else by computing every changed element. Called
 * once per changed tensor when a composition is made.
 */
#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/cpu.h"
#include "base/mem.h"
#include "merge/merge_int.h"
#include "tensor/dtype.h"

enum { PANEL_FLOATS = 256 * 1024 };

/* A quarter ulp at the largest finite value: no finite W can overflow by less. */
static double quarter_ulp(int32_t dtype)
{
    return dtype == PF_BF16 ? 0x1p118 : dtype == PF_F16 ? 8.0 : 0x1p102;
}

/* The smallest magnitude that rounds to infinity, as f32. */
static float first_infinite(int32_t dtype)
{
    return dtype == PF_BF16 ? 0x1.ffp127F : dtype == PF_F16 ? 65520.0F : INFINITY;
}

/* Largest magnitude of any partial or whole result of f[i] (f[i + 1]); infinite when f32 might not hold it. */
static double side_max(const struct delta *d, int i)
{
    if (d->f[i + 1].p == NULL)
        return d->max_abs[i];
    const double most = (double)d->f[i + 1].n_rows * d->max_abs[i] * d->max_abs[i + 1];
    return most < (double)FLT_MAX / 2 ? most : (double)INFINITY;
}

static double term_max(const struct merge_term *term)
{
    const struct delta *d = term->delta;
    double most = side_max(d, 0);
    if (d->kind == DELTA_LOHA || d->kind == DELTA_LOKR)
        most *= side_max(d, 2);
    return most < (double)FLT_MAX / 2 ? fabs((double)term->s) * most : (double)INFINITY;
}

struct worker {
    struct merge_scratch *scratch;
    float *sum, *base;
};

struct scan {
    struct merge_target target; /* with out_dtype F32: what is there before the last rounding */
    float limit;
    int64_t cols_per_panel, rows_per_panel, n_col_panels;
    struct worker *workers;
    _Atomic uint64_t first_bad; /* element index; UINT64_MAX: none */
};

static void scan_panel(void *ctx, size_t i_task, unsigned i_worker)
{
    struct scan *scan = ctx;
    const struct merge_target *t = &scan->target;
    struct worker *w = &scan->workers[i_worker];
    struct merge_panel panel = {.row0 = (int64_t)i_task / scan->n_col_panels * scan->rows_per_panel,
                                .col0 =
                                    (int64_t)i_task % scan->n_col_panels * scan->cols_per_panel};
    panel.n_rows = t->n_rows - panel.row0 < scan->rows_per_panel ? t->n_rows - panel.row0
                                                                 : scan->rows_per_panel;
    panel.n_cols = t->n_cols - panel.col0 < scan->cols_per_panel ? t->n_cols - panel.col0
                                                                 : scan->cols_per_panel;
    merge_read(t, &panel, false, w->sum, w->scratch);
    const size_t size = dtype_size(t->dtype);
    for (int64_t i = 0; i < panel.n_rows; i++) {
        const int64_t at = (panel.row0 + i) * t->n_cols + panel.col0;
        merge_to_f32(t->dtype, t->base + (size_t)at * size, (size_t)panel.n_cols, w->base);
        for (int64_t j = 0; j < panel.n_cols; j++) {
            const float x = w->sum[i * panel.n_cols + j];
            const bool was_nan = isnan(w->base[j]);
            const bool was_inf = isinf(w->base[j]);
            if (was_nan || (was_inf && isinf(x)) || fabsf(x) < scan->limit)
                continue;
            /* relaxed: the pool orders it before the reader; a minimum needs no other order */
            uint64_t seen = atomic_load_explicit(&scan->first_bad, memory_order_relaxed);
            while ((uint64_t)(at + j) < seen && !atomic_compare_exchange_weak_explicit(
                                                    &scan->first_bad, &seen, (uint64_t)(at + j),
                                                    memory_order_relaxed, memory_order_relaxed)) {
            }
            return;
        }
    }
}

static int workers_new(unsigned n, struct worker **out, pf_error *err)
{
    struct worker *w = mem_calloc(n, sizeof(*w));
    if (w == NULL)
        return err_nomem(err, n * sizeof(*w), "overflow check");
    *out = w; /* the caller frees what there is, complete or not */
    for (unsigned i = 0; i < n; i++) {
        const int rc = merge_scratch_new(&w[i].scratch, err);
        if (rc != PF_OK)
            return rc;
        w[i].sum = mem_alloc(2 * PANEL_FLOATS * sizeof(float));
        if (w[i].sum == NULL)
            return err_nomem(err, 2 * PANEL_FLOATS * sizeof(float), "overflow check");
        w[i].base = w[i].sum + PANEL_FLOATS;
    }
    return PF_OK;
}

static void workers_free(struct worker *w, unsigned n)
{
    for (unsigned i = 0; w != NULL && i < n; i++) {
        merge_scratch_free(w[i].scratch);
        mem_free(w[i].sum);
    }
    mem_free(w);
}

static int scan_all(const struct merge_target *t, const char *name, struct pool *pool,
                    pf_error *err)
{
    const unsigned n_workers = pool == NULL ? 1 : pool_n_workers(pool);
    struct scan scan = {.target = *t, .limit = first_infinite(t->out_dtype)};
    scan.target.out_dtype = PF_F32;
    atomic_init(&scan.first_bad, UINT64_MAX);
    scan.cols_per_panel = t->n_cols < PANEL_FLOATS ? t->n_cols : PANEL_FLOATS;
    scan.rows_per_panel = PANEL_FLOATS / scan.cols_per_panel;
    scan.n_col_panels = (t->n_cols + scan.cols_per_panel - 1) / scan.cols_per_panel;
    const int64_t n_row_panels = (t->n_rows + scan.rows_per_panel - 1) / scan.rows_per_panel;
    const size_t n_tasks = (size_t)(n_row_panels * scan.n_col_panels);
    int rc = workers_new(n_workers, &scan.workers, err);
    if (rc != PF_OK)
        goto out;
    if (pool != NULL) {
        pool_run(pool, n_tasks, scan_panel, &scan);
    } else {
        for (size_t i = 0; i < n_tasks; i++)
            scan_panel(&scan, i, 0);
    }
    const uint64_t bad = atomic_load(&scan.first_bad);
    if (bad != UINT64_MAX)
        rc = err_set(err, PF_E_OVERFLOW,
                     "tensor '%s': the merged weight at row %llu, column %llu overflows %s", name,
                     (unsigned long long)(bad / (uint64_t)t->n_cols),
                     (unsigned long long)(bad % (uint64_t)t->n_cols), pf_dtype_name(t->out_dtype));
out:
    workers_free(scan.workers, n_workers);
    return rc;
}

int merge_bound_check(const struct merge_target *t, const char *name, struct pool *pool,
                      pf_error *err)
{
    const struct fp_env env = fp_enter();
    double most = 0;
    for (size_t i = 0; i < t->n_terms; i++)
        most += term_max(&t->terms[i]);
    int rc = PF_OK;
    if (!(most < quarter_ulp(t->out_dtype)) && t->n_rows > 0 && t->n_cols > 0)
        rc = scan_all(t, name, pool, err);
    fp_leave(env);
    return rc;
}
