/*
 * Tiles of a panel: cuts a panel into blocks in which the same terms act, runs the terms in order, rounds once,
 * as docs/arithmetic.md says. Rows that no term touches are copied. Called by view/ for every panel that a composition changes. Must never
 * allocate or lock; everything it needs is in the scratch of its worker.
 */
#include "merge/merge.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#include "base/cpu.h"
#include "base/mem.h"
#include "merge/merge_int.h"
#include "tensor/dtype.h"

static _Atomic uint64_t n_panels, n_bytes;

uint64_t merge_n_panels(void)
{
    /* relaxed: a statistic, ordered by nothing */
    return atomic_load_explicit(&n_panels, memory_order_relaxed);
}

uint64_t merge_n_bytes(void)
{
    return atomic_load_explicit(&n_bytes, memory_order_relaxed);
}

int scratch_new(const struct kernel *kernel, struct merge_scratch **out, pf_error *err)
{
    const size_t n_b = (size_t)(BLOCK_ROWS + KERNEL_MR_MAX) * KERNEL_K;
    const size_t n_floats = n_b + SCRATCH_A + 3 * (size_t)SCRATCH_TILE + SCRATCH_ROW;
    const size_t n_head = 4096; /* tiles start on a page */
    static_assert(sizeof(struct merge_scratch) <= 4096, "scratch head");
    struct merge_scratch *s = mem_aligned(4096, n_head + n_floats * sizeof(float));
    if (s == NULL)
        return err_nomem(err, n_head + n_floats * sizeof(float), "merge scratch");
    s->kernel = kernel;
    s->b = (float *)(void *)((uint8_t *)s + n_head);
    s->a = s->b + n_b;
    s->total = s->a + SCRATCH_A;
    s->side = s->total + SCRATCH_TILE;
    s->chain = s->side + SCRATCH_TILE;
    s->row = s->chain + SCRATCH_TILE;
    *out = s;
    return PF_OK;
}

int merge_scratch_new(struct merge_scratch **out, pf_error *err)
{
    return scratch_new(kernel_selected(), out, err);
}

void merge_scratch_free(struct merge_scratch *s)
{
    mem_free(s);
}

static int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t round_up(int64_t x, int64_t unit)
{
    return (x + unit - 1) / unit * unit;
}

/* Evenly into pieces of at most `most`, each a multiple of `unit` but the last. */
static int64_t even_share(int64_t n, int64_t most, int64_t unit)
{
    const int64_t n_pieces = (n + most - 1) / most;
    return min_i64(n, min_i64(round_up((n + n_pieces - 1) / n_pieces, unit), most));
}

void block_cut(const struct merge_scratch *s, const struct merge_target *t, struct block *b)
{
    const int64_t nr = s->kernel->nr;
    const int64_t mr = s->kernel->mr;
    int64_t n_links = 1;
    size_t n_active = 0;
    bool needs_tiles = false;
    for (size_t i = 0; i < t->n_terms; i++) {
        const struct delta *d = t->terms[i].delta;
        if (!term_covers(&t->terms[i], b->row0))
            continue;
        n_active++;
        needs_tiles = needs_tiles || d->kind != DELTA_LORA || d->f[1].n_rows > KERNEL_K;
        for (int i_f = 1; i_f < 4; i_f += 2) {
            if (d->f[i_f].p != NULL && d->f[i_f].n_rows > n_links)
                n_links = d->f[i_f].n_rows;
        }
    }
    needs_tiles = needs_tiles || n_active > 1;
    n_links = min_i64(n_links, KERNEL_K);
    int64_t most_cols = SCRATCH_A / n_links / nr * nr;
    int64_t most_rows = BLOCK_ROWS / mr * mr;
    if (needs_tiles)
        most_cols = min_i64(most_cols, 512);
    b->n_cols = even_share(b->n_cols, most_cols, nr);
    b->ld = round_up(b->n_cols, nr);
    if (needs_tiles) /* tiles are padded by a few rows, which a kernel may touch */
        most_rows = min_i64(most_rows, (SCRATCH_TILE / b->ld - KERNEL_MR_MAX) / mr * mr);
    b->n_rows = even_share(b->n_rows, most_rows, mr);
}

/* Rows without a term: bytes as they are, or their exact f32. */
static void copy_rows(const struct merge_target *t, const struct merge_panel *panel, int64_t i0,
                      int64_t i1, size_t n_out, uint8_t *out, const struct merge_scratch *s)
{
    const size_t n_base = dtype_size(t->dtype);
    for (int64_t i = i0; i < i1; i++) {
        const int64_t at = (panel->row0 + i) * t->n_cols + panel->col0;
        const uint8_t *src = t->base + (size_t)at * n_base;
        uint8_t *dst = out + (size_t)(i * panel->n_cols) * n_out;
        if (n_out == n_base)
            memcpy(dst, src, (size_t)panel->n_cols * n_base);
        else
            s->kernel->to_f32(t->dtype, src, (size_t)panel->n_cols, (float *)(void *)dst);
    }
}

/* Rows [i0, i1) of a panel, in all of which the same terms act. */
static void merge_rows(const struct merge_target *t, const struct merge_panel *panel, int64_t i0,
                       int64_t i1, enum kernel_finish finish, uint8_t *out, struct merge_scratch *s)
{
    const size_t n_base = dtype_size(t->dtype);
    const size_t n_out = finish == FINISH_ROUND ? n_base : 4;
    struct block b = {.row0 = panel->row0 + i0, .row_step = 1};
    while (i0 < i1) {
        int64_t n_rows = 0;
        for (int64_t j = 0; j < panel->n_cols; j += b.n_cols) {
            b.row0 = panel->row0 + i0;
            b.n_rows = i1 - i0;
            b.col0 = panel->col0 + j;
            b.n_cols = panel->n_cols - j;
            block_cut(s, t, &b);
            b.n_rows = n_rows == 0 ? b.n_rows : n_rows;
            n_rows = b.n_rows;
            struct strip last = {
                .dtype = t->dtype,
                .finish = finish,
                .base = t->base + (size_t)(b.row0 * t->n_cols + b.col0) * n_base,
                .base_stride = (size_t)t->n_cols * n_base,
                .out = out + (size_t)(i0 * panel->n_cols + j) * n_out,
                .out_stride = (size_t)panel->n_cols * n_out,
            };
            (void)terms_block(s, t, &b, &last); /* the caller saw a term that covers these rows */
        }
        i0 += n_rows;
    }
}

void merge_read(const struct merge_target *t, const struct merge_panel *panel, bool as_f32,
                void *out, struct merge_scratch *s)
{
    const struct fp_env env = fp_enter();
    const enum kernel_finish finish = t->out_dtype != t->dtype ? FINISH_F32
                                      : as_f32                 ? FINISH_ROUND_F32
                                                               : FINISH_ROUND;
    const size_t n_out = finish == FINISH_ROUND ? dtype_size(t->dtype) : 4;
    bool is_touched = false;
    for (int64_t i = 0; i < panel->n_rows;) {
        const int64_t end = terms_same_until(t, panel->row0, 1, i, panel->n_rows);
        bool is_covered = false;
        for (size_t k = 0; k < t->n_terms && !is_covered; k++)
            is_covered = term_covers(&t->terms[k], panel->row0 + i);
        if (is_covered && panel->n_cols > 0)
            merge_rows(t, panel, i, end, finish, out, s);
        else
            copy_rows(t, panel, i, end, n_out, out, s);
        is_touched = is_touched || is_covered;
        i = end;
    }
    if (is_touched) {
        atomic_fetch_add_explicit(&n_panels, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&n_bytes, (uint64_t)(panel->n_rows * panel->n_cols) * n_out,
                                  memory_order_relaxed);
    }
    fp_leave(env);
}

void merge_to_f32(int32_t dtype, const void *src, size_t n, float *dst)
{
    if (dtype == PF_F32 || dtype == PF_F16 || dtype == PF_BF16)
        kernel_selected()->to_f32(dtype, src, n, dst);
    else
        dtype_to_f32(dtype, src, n, dst);
}
