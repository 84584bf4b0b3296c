/*
 * Survival and changed fraction: how much of a small delta is left after it was rounded into the base's dtype. Wanted is the
 * f32 `total` of the contract, applied is W' - W, both summed in f64, row by row in ascending order, so that the sums do not depend on
 * how blocks were cut. Called by plan and merge reports. Never allocates.
 */
#include <math.h>
#include <string.h>

#include "base/cpu.h"
#include "merge/merge_int.h"
#include "tensor/dtype.h"

struct row_sum {
    double applied_x_wanted, wanted2;
};

static float round_to(int32_t dtype, float x)
{
    return dtype == PF_BF16  ? f32_from_bf16(bf16_from_f32(x))
           : dtype == PF_F16 ? f32_from_f16(f16_from_f32(x))
                             : x;
}

/* n elements of one row. Weights that are not finite take no part: nothing can be applied to them. */
static void add_run(const struct merge_target *t, const uint8_t *base, const float *total,
                    int64_t n, struct row_sum *row, uint64_t *n_changed)
{
    enum { CHUNK = 256 };
    float w[CHUNK];
    const size_t size = dtype_size(t->dtype);
    for (int64_t j0 = 0; j0 < n; j0 += CHUNK) {
        const int64_t n_chunk = n - j0 < CHUNK ? n - j0 : CHUNK;
        dtype_to_f32(t->dtype, base + (size_t)j0 * size, (size_t)n_chunk, w);
        for (int64_t j = 0; j < n_chunk; j++) {
            if (!isfinite(w[j]))
                continue;
            const float merged = round_to(t->out_dtype, w[j] + total[j0 + j]);
            const double wanted = (double)total[j0 + j];
            row->applied_x_wanted += ((double)merged - (double)w[j]) * wanted;
            row->wanted2 += wanted * wanted;
            *n_changed += memcmp(&merged, &w[j], sizeof(merged)) != 0;
        }
    }
}

/* Rows b->row0, b->row0 + b->row_step, ...: as many as one block takes. Returns how many. */
static int64_t add_rows(const struct merge_target *t, struct block b, struct fidelity_sum *sum,
                        struct merge_scratch *s)
{
    struct row_sum rows[BLOCK_ROWS];
    memset(rows, 0, sizeof(rows));
    const int64_t n_rows_most = b.n_rows;
    int64_t n_rows = 0;
    for (int64_t j = 0; j < t->n_cols; j += b.n_cols) {
        b.n_rows = n_rows == 0 ? n_rows_most : n_rows;
        b.col0 = j;
        b.n_cols = t->n_cols - j < 512 ? t->n_cols - j : 512; /* the totals need their tile */
        b.n_rows = b.n_rows < 256 ? b.n_rows : 256;
        block_cut(s, t, &b);
        b.n_rows = n_rows == 0 ? b.n_rows : n_rows;
        n_rows = b.n_rows;
        struct strip last = {.total_out = s->total};
        (void)terms_block(s, t, &b, &last); /* the caller saw a term that covers these rows */
        for (int64_t i = 0; i < n_rows; i++) {
            const int64_t at = (b.row0 + i * b.row_step) * t->n_cols + j;
            add_run(t, t->base + (size_t)at * dtype_size(t->dtype), s->total + i * b.ld, b.n_cols,
                    &rows[i], &sum->n_changed);
        }
    }
    for (int64_t i = 0; i < n_rows; i++) {
        sum->applied_x_wanted += rows[i].applied_x_wanted;
        sum->wanted2 += rows[i].wanted2;
    }
    return n_rows;
}

int merge_fidelity(const struct merge_target *t, int64_t row0, int64_t stride,
                   struct fidelity_sum *sum, struct merge_scratch *s, pf_error *err)
{
    if (row0 < 0 || stride < 1)
        return err_set(err, PF_E_INVALID, "fidelity: rows from %lld by %lld are no sample",
                       (long long)row0, (long long)stride);
    const struct fp_env env = fp_enter();
    const int64_t n_rows = row0 >= t->n_rows ? 0 : (t->n_rows - row0 + stride - 1) / stride;
    for (int64_t i = 0; i < n_rows && t->n_cols > 0;) {
        const int64_t end = terms_same_until(t, row0, stride, i, n_rows);
        const int64_t row = row0 + i * stride;
        bool is_covered = false;
        for (size_t k = 0; k < t->n_terms && !is_covered; k++)
            is_covered = term_covers(&t->terms[k], row);
        int64_t n_done = end - i;
        if (is_covered)
            n_done = add_rows(t, (struct block){.row0 = row, .row_step = stride, .n_rows = end - i},
                              sum, s);
        sum->n_elements += (uint64_t)(n_done * t->n_cols);
        i += n_done;
    }
    fp_leave(env);
    return PF_OK;
}
