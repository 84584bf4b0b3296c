/*
 * One delta kind -> its f32 chain for a block. Every kind is a product of one or two sides, and a side is either a chain (B A) or the
 * elements of one matrix, seen through a map of rows and columns (Kronecker products repeat their sides). That is all that a
 * kernel needs to know; docs/arithmetic.md has the parenthesisation. Called by merge.c and fidelity.c. Never allocates.
 */
#include "merge/merge_int.h"
#include "tensor/dtype.h"
#include <assert.h>
#include <string.h>

enum map_kind { MAP_SAME, MAP_DIV, MAP_MOD };

/* Row m and column n of the delta are row m / rows (or m % rows) and column n / cols (or n % cols) of the side. */
struct side {
    const struct factor *left, *right; /* right NULL: elements of left */
    enum map_kind map;
    int64_t rows, cols;
};

static int64_t map_index(enum map_kind map, int64_t i, int64_t n)
{
    return map == MAP_SAME ? i : map == MAP_DIV ? i / n : i % n;
}

static bool is_vector_dtype(int32_t dtype)
{
    return dtype == PF_F32 || dtype == PF_F16 || dtype == PF_BF16;
}

static const uint8_t *factor_at(const struct factor *f, int64_t i, int64_t j)
{
    return f->p + (i * f->row_stride + j * f->col_stride) * (int64_t)dtype_size(f->dtype);
}

/* Elements (i, j) .. (i, j + n) of a factor as f32. */
static void factor_run(const struct kernel *kernel, const struct factor *f, int64_t i, int64_t j,
                       int64_t n, float *dst)
{
    if (f->col_stride != 1) {
        for (int64_t x = 0; x < n; x++)
            dtype_to_f32(f->dtype, factor_at(f, i, j + x), 1, dst + x);
    } else if (is_vector_dtype(f->dtype)) {
        kernel->to_f32(f->dtype, factor_at(f, i, j), (size_t)n, dst);
    } else {
        dtype_to_f32(f->dtype, factor_at(f, i, j), (size_t)n, dst);
    }
}

/* Row i of a factor at the delta's columns [n0, n0 + n), through the side's column map. */
static void factor_mapped_run(const struct kernel *kernel, const struct side *side,
                              const struct factor *f, int64_t i, int64_t n0, int64_t n, float *dst)
{
    if (side->map == MAP_SAME) {
        factor_run(kernel, f, i, n0, n, dst);
        return;
    }
    const int64_t d = side->cols;
    while (n > 0) {
        const int64_t left = d - n0 % d;
        const int64_t run = left < n ? left : n;
        if (side->map == MAP_MOD) {
            factor_run(kernel, f, i, n0 % d, run, dst);
        } else {
            float x;
            factor_run(kernel, f, i, n0 / d, 1, &x);
            for (int64_t c = 0; c < run; c++)
                dst[c] = x;
        }
        n0 += run;
        n -= run;
        dst += run;
    }
}

/* Links [k0, k0 + n_k) of a side's B, a row of the block each. */
static void pack_b(struct merge_scratch *s, const struct merge_term *term, const struct side *side,
                   const struct block *b, int64_t k0, int64_t n_k)
{
    for (int64_t i = 0; i < b->n_rows; i++) {
        const int64_t m = b->row0 + i * b->row_step - term->delta->row0;
        factor_run(s->kernel, side->left, map_index(side->map, m, side->rows), k0, n_k,
                   s->b + i * KERNEL_K);
    }
}

/* Links [k0, k0 + n_k) of a side's A, in groups of nr columns. */
static void pack_a(struct merge_scratch *s, const struct side *side, const struct block *b,
                   int64_t k0, int64_t n_k, bool is_split)
{
    const struct factor *f = side->right;
    const int64_t nr = s->kernel->nr;
    const bool is_direct = side->map == MAP_SAME && f->col_stride == 1 && is_vector_dtype(f->dtype);
    for (int64_t k = 0; k < n_k; k++) {
        if (is_direct) {
            s->kernel->pack(f->dtype, factor_at(f, k0 + k, b->col0), b->n_cols, s->a + k * nr,
                            n_k * nr, is_split);
            continue;
        }
        for (int64_t j = 0; j < b->n_cols; j += SCRATCH_ROW) {
            const int64_t n = b->n_cols - j < SCRATCH_ROW ? b->n_cols - j : SCRATCH_ROW;
            factor_mapped_run(s->kernel, side, f, k0 + k, b->col0 + j, n, s->row);
            s->kernel->pack(PF_F32, (const uint8_t *)s->row, n, s->a + j * n_k + k * nr, n_k * nr,
                            is_split);
        }
    }
}

/* A side made of one matrix: its elements into a tile. */
static void fill_elements(struct merge_scratch *s, const struct merge_term *term,
                          const struct side *side, const struct block *b, float *tile)
{
    for (int64_t i = 0; i < b->n_rows; i++) {
        const int64_t m = b->row0 + i * b->row_step - term->delta->row0;
        factor_mapped_run(s->kernel, side, side->left, map_index(side->map, m, side->rows), b->col0,
                          b->n_cols, tile + i * b->ld);
        for (int64_t j = b->n_cols; j < b->ld; j++)
            tile[i * b->ld + j] = 0;
    }
}

/* One side, all its links; what becomes of the result is the sink's. */
static void run_side(struct merge_scratch *s, const struct merge_term *term,
                     const struct side *side, const struct block *b, const struct strip *sink)
{
    struct strip p = *sink;
    p.n_rows = b->n_rows;
    p.n_cols = b->n_cols;
    p.ld = b->ld;
    p.s = term->s;
    if (side->right == NULL) {
        fill_elements(s, term, side, b, s->chain);
        p.chain_in = s->chain;
        s->kernel->strip(&p);
        return;
    }
    p.a = s->a;
    p.b = s->b;
    const int64_t n_links = side->right->n_rows;
    int64_t k = 0;
    do {
        p.n_k = n_links - k < KERNEL_K ? n_links - k : KERNEL_K;
        const bool is_last = k + p.n_k >= n_links;
        pack_b(s, term, side, b, k, p.n_k);
        pack_a(s, side, b, k, p.n_k, sink->is_split);
        p.chain_in = k == 0 ? NULL : s->chain;
        p.chain_out = is_last ? sink->chain_out : s->chain;
        s->kernel->strip(&p);
        k += p.n_k;
    } while (k < n_links);
}

static int delta_sides(const struct delta *d, struct side side[2])
{
    const struct factor *f = d->f;
    memset(side, 0, 2 * sizeof(side[0]));
    switch (d->kind) {
    case DELTA_LORA:
        side[0] = (struct side){.left = &f[0], .right = &f[1]};
        return 1;
    case DELTA_DIFF:
        side[0] = (struct side){.left = &f[0]};
        return 1;
    case DELTA_LOHA:
        side[0] = (struct side){.left = &f[0], .right = &f[1]};
        side[1] = (struct side){.left = &f[2], .right = &f[3]};
        return 2;
    case DELTA_LOKR: {
        const int64_t rows = f[2].n_rows;
        const int64_t cols = f[3].p != NULL ? f[3].n_cols : f[2].n_cols;
        side[0] = (struct side){&f[0], f[1].p != NULL ? &f[1] : NULL, MAP_DIV, rows, cols};
        side[1] = (struct side){&f[2], f[3].p != NULL ? &f[3] : NULL, MAP_MOD, rows, cols};
        return 2;
    }
    }
    assert(!"a delta kind without arithmetic");
    return 0;
}

/* One term of a block: `sink` says what becomes of its chain (total_in, total_out, base, out, finish). */
static void term_block(struct merge_scratch *s, const struct merge_term *term,
                       const struct block *b, struct strip *sink)
{
    struct side side[2];
    const int n_sides = delta_sides(term->delta, side);
    if (n_sides == 2) {
        const struct strip left = {.chain_out = s->side};
        run_side(s, term, &side[0], b, &left);
        sink->mul = s->side;
    } else {
        sink->mul = NULL;
    }
    run_side(s, term, &side[n_sides - 1], b, sink);
}

bool term_covers(const struct merge_term *term, int64_t row)
{
    return row >= term->delta->row0 && row < term->delta->row0 + term->delta->n_rows;
}

int64_t terms_same_until(const struct merge_target *t, int64_t row0, int64_t row_step, int64_t i0,
                         int64_t n_rows)
{
    const int64_t row = row0 + i0 * row_step;
    int64_t end = row0 + n_rows * row_step; /* beyond the last row */
    for (size_t i = 0; i < t->n_terms; i++) {
        const int64_t first = t->terms[i].delta->row0;
        const int64_t past = first + t->terms[i].delta->n_rows;
        if (first > row && first < end)
            end = first;
        if (past > row && past < end)
            end = past;
    }
    const int64_t i = (end - row0 + row_step - 1) / row_step;
    return i < n_rows ? i : n_rows;
}

/* Split order for the case that matters: LoRA on bf16, any number of terms. */
static bool can_split(const struct merge_scratch *s, const struct merge_target *t,
                      const struct block *b, const struct strip *last)
{
    if (!s->kernel->has_split || last->out == NULL || last->dtype != PF_BF16 ||
        last->finish != FINISH_ROUND)
        return false;
    for (size_t i = 0; i < t->n_terms; i++) {
        if (term_covers(&t->terms[i], b->row0) && t->terms[i].delta->kind != DELTA_LORA)
            return false;
    }
    return true;
}

bool terms_block(struct merge_scratch *s, const struct merge_target *t, const struct block *b,
                 struct strip *last)
{
    const struct merge_term *pending = NULL;
    const float *total = NULL;
    const bool is_split = can_split(s, t, b, last);
    last->is_split = is_split;
    for (size_t i = 0; i < t->n_terms; i++) {
        if (!term_covers(&t->terms[i], b->row0))
            continue;
        if (pending != NULL) {
            struct strip more = {.total_in = total, .total_out = s->total, .is_split = is_split};
            term_block(s, pending, b, &more);
            total = s->total;
        }
        pending = &t->terms[i];
    }
    if (pending == NULL)
        return false;
    last->total_in = total;
    term_block(s, pending, b, last);
    return true;
}
