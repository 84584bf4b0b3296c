/*
 * Reading weights through a view, panel by panel, beside a plain copy out of the mapping: what the abstraction costs. Both copy into one
 * buffer per worker, of a panel's size. The first round of each warms the page cache and is not counted.
 */
#include <string.h>

#include "base/mem.h"
#include "base/pool.h"
#include "base/proc.h"
#include "bench/bench_merge.h"
#include "bench/stats.h"
#include "tensor/dtype.h"
#include "view/view.h"

enum { PANEL_BYTES = 1 << 20, THREADS_MAX = 256 }; /* what the model reads at a time */

enum way { WAY_PLAIN, WAY_NATIVE, WAY_F32, N_WAYS };

struct piece {
    struct pf_panel panel;
    const uint8_t *p; /* the base's bytes of it */
    size_t n_bytes;
};

struct worker {
    struct pf_reader *reader;
    uint8_t *buffer;
    pf_error err;
    int rc;
};

struct reading {
    struct pf_view *view;
    struct piece *pieces;
    size_t n_pieces, cap_pieces;
    uint64_t n_bytes;
    uint32_t n_tensors;
    struct worker *workers;
    unsigned n_threads;
    enum way way;
};

static void read_task(void *ctx, size_t i_task, unsigned i_worker)
{
    struct reading *rd = ctx;
    struct worker *w = &rd->workers[i_worker];
    const struct piece *piece = &rd->pieces[i_task];
    if (rd->way == WAY_PLAIN) {
        memcpy(w->buffer, piece->p, piece->n_bytes);
        return;
    }
    pf_error err;
    const int rc =
        pf_reader_read(w->reader, &piece->panel, rd->way == WAY_F32 ? PF_AS_F32 : PF_NATIVE,
                       w->buffer, PANEL_BYTES, &err);
    if (rc != PF_OK && w->rc == PF_OK) {
        w->rc = rc;
        w->err = err;
    }
}

/* Tensors that can be read as f32, cut so that a panel of f32 fits the buffer. */
static int cut_pieces(struct reading *rd, const struct pf_checkpoint *ckpt, uint64_t n_bytes_max,
                      pf_error *err)
{
    for (uint32_t i = 0; i < ckpt->n_tensors && rd->n_bytes < n_bytes_max; i++) {
        const struct ckpt_tensor *t = &ckpt->tensors[i];
        const int64_t n_rows = shape_rows(&t->shape);
        const int64_t n_cols = shape_cols(&t->shape);
        if (!dtype_is_mergeable(t->dtype) || t->n_bytes == 0 || n_cols > PANEL_BYTES / 4)
            continue;
        const int64_t n_most = PANEL_BYTES / 4 / n_cols;
        for (int64_t row = 0; row < n_rows; row += n_most) {
            const int64_t n = n_rows - row < n_most ? n_rows - row : n_most;
            const size_t n_row_bytes = (size_t)n_cols * dtype_size(t->dtype);
            if (!mem_grow((void **)&rd->pieces, &rd->cap_pieces, rd->n_pieces, sizeof(*rd->pieces)))
                return err_nomem(err, sizeof(*rd->pieces), "benchmark panels");
            rd->pieces[rd->n_pieces++] =
                (struct piece){.panel = {.i_tensor = i, .row0 = row, .n_rows = n, .n_cols = n_cols},
                               .p = t->p + (size_t)row * n_row_bytes,
                               .n_bytes = (size_t)n * n_row_bytes};
        }
        rd->n_bytes += t->n_bytes;
        rd->n_tensors++;
    }
    if (rd->n_pieces == 0)
        return err_set(err, PF_E_INVALID, "bench read: '%s' has no tensor of f32, f16 or bf16",
                       ckpt->path);
    return PF_OK;
}

static int workers_init(struct reading *rd, pf_error *err)
{
    rd->workers = mem_calloc(rd->n_threads, sizeof(*rd->workers));
    if (rd->workers == NULL)
        return err_nomem(err, rd->n_threads * sizeof(*rd->workers), "benchmark workers");
    for (unsigned i = 0; i < rd->n_threads; i++) {
        struct worker *w = &rd->workers[i];
        w->buffer = mem_aligned(4096, PANEL_BYTES);
        if (w->buffer == NULL)
            return err_nomem(err, PANEL_BYTES, "benchmark panel");
        const int rc = pf_reader_new(rd->view, &w->reader, err);
        if (rc != PF_OK)
            return rc;
    }
    return PF_OK;
}

static void reading_release(struct reading *rd)
{
    for (unsigned i = 0; rd->workers != NULL && i < rd->n_threads; i++) {
        pf_reader_free(rd->workers[i].reader);
        mem_free(rd->workers[i].buffer);
    }
    mem_free(rd->workers);
    mem_free(rd->pieces);
    pf_view_release(rd->view);
}

/* Medians over interleaved repetitions: seconds of each way, and the plain copy's over them. */
static int measure(struct reading *rd, struct pool *pool, unsigned n_reps, double out[N_WAYS],
                   double out_ratio[N_WAYS], pf_error *err)
{
    double seconds[N_WAYS][BENCH_REPS_MAX + 1];
    for (unsigned i = 0; i <= n_reps; i++) {
        for (int way = 0; way < N_WAYS; way++) {
            rd->way = (enum way)way;
            const uint64_t t0 = clock_ns();
            pool_run(pool, rd->n_pieces, read_task, rd);
            seconds[way][i] = (double)(clock_ns() - t0) * 1e-9;
        }
    }
    for (unsigned i = 0; i < rd->n_threads; i++) {
        if (rd->workers[i].rc != PF_OK) {
            if (err != NULL)
                *err = rd->workers[i].err;
            return rd->workers[i].rc;
        }
    }
    for (int way = 0; way < N_WAYS; way++)
        out_ratio[way] = bench_median_ratio(seconds[WAY_PLAIN] + 1, seconds[way] + 1, n_reps);
    for (int way = 0; way < N_WAYS; way++)
        out[way] = bench_median(seconds[way] + 1, n_reps);
    return PF_OK;
}

int bench_read_run(struct pf_checkpoint *ckpt, struct pf_composition *comp,
                   const struct bench_read_opts *opts, struct json **out, pf_error *err)
{
    const struct bench_read_opts o = opts == NULL ? (struct bench_read_opts){0} : *opts;
    const unsigned n_reps = o.n_reps == 0 ? 5 : o.n_reps;
    struct reading rd = {.n_threads = o.n_threads == 0 ? pool_default_threads() : o.n_threads};
    struct pool *pool = NULL;
    double seconds[N_WAYS], ratio[N_WAYS];
    if (n_reps > BENCH_REPS_MAX || rd.n_threads > THREADS_MAX)
        return err_set(err, PF_E_INVALID,
                       "bench read: %u repetitions by %u threads; at most %d and %d", n_reps,
                       rd.n_threads, BENCH_REPS_MAX, THREADS_MAX);
    int rc = pf_view_open(ckpt, comp, &rd.view, err);
    if (rc == PF_OK)
        rc = cut_pieces(&rd, ckpt, o.n_bytes_max == 0 ? (uint64_t)4 << 30 : o.n_bytes_max, err);
    if (rc == PF_OK)
        rc = workers_init(&rd, err);
    if (rc == PF_OK)
        rc = pool_new(rd.n_threads, &pool, err);
    if (rc == PF_OK)
        rc = measure(&rd, pool, n_reps, seconds, ratio, err);
    if (rc == PF_OK) {
        struct json *result = json_new_object();
        const double gb = (double)rd.n_bytes * 1e-9;
        json_set_int(result, "threads", rd.n_threads);
        json_set_int(result, "bytes", (int64_t)rd.n_bytes);
        json_set_int(result, "tensors", rd.n_tensors);
        json_set_real(result, "plain_gb_s", gb / seconds[WAY_PLAIN]);
        json_set_real(result, "native_gb_s", gb / seconds[WAY_NATIVE]);
        json_set_real(result, "f32_gb_s", gb / seconds[WAY_F32]);
        json_set_real(result, "native_ratio", ratio[WAY_NATIVE]);
        json_set_real(result, "f32_ratio", ratio[WAY_F32]);
        *out = result;
    }
    pool_free(pool);
    reading_release(&rd);
    return rc;
}

void bench_read_print(const struct json *result, FILE *f)
{
    fprintf(f, "%lld tensors, %.3f GB, %lld thread%s\n", (long long)bench_number(result, "tensors"),
            bench_number(result, "bytes") * 1e-9, (long long)bench_number(result, "threads"),
            bench_number(result, "threads") > 1 ? "s" : "");
    fprintf(f, "  plain copy of the mapping  %7.2f GB/s\n", bench_number(result, "plain_gb_s"));
    fprintf(f, "  panels, native             %7.2f GB/s   %.2f of plain\n",
            bench_number(result, "native_gb_s"), bench_number(result, "native_ratio"));
    fprintf(f, "  panels, as f32             %7.2f GB/s   %.2f of plain\n",
            bench_number(result, "f32_gb_s"), bench_number(result, "f32_ratio"));
}
