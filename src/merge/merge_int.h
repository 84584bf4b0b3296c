/*
 * Inside merge/: blocks, the scratch that they are computed in, and what merge.c, bound.c and fidelity.c share. A block is a
 * piece of a tensor small enough that its f32 tiles fit the scratch; its rows may be a fixed step apart (fidelity samples).
 */
#ifndef PF_MERGE_MERGE_INT_H
#define PF_MERGE_MERGE_INT_H

#include "merge/kernel.h"
#include "merge/merge.h"

enum {
    BLOCK_ROWS = 512, /* most rows of a block */
    /* Floats of packed A: KERNEL_K x 1024 columns, or fewer links and more */
    SCRATCH_A = 256 * 1024,
    SCRATCH_TILE = 192 * 1024, /* floats of each f32 tile */
    SCRATCH_ROW = 4096,        /* floats of a row on its way into packed A */
};

struct merge_scratch {
    const struct kernel *kernel;
    float *b;     /* (BLOCK_ROWS + KERNEL_MR_MAX, KERNEL_K) */
    float *a;     /* SCRATCH_A */
    float *total; /* SCRATCH_TILE each */
    float *side;  /* the left side of a product */
    float *chain; /* a chain longer than KERNEL_K, on its way */
    float *row;   /* SCRATCH_ROW */
};

/* Rows row0, row0 + row_step, ... of the tensor, columns [col0, col0 + n_cols). */
struct block {
    int64_t row0, row_step, n_rows;
    int64_t col0, n_cols;
    int64_t ld; /* row stride of the f32 tiles: n_cols rounded up to the kernel's nr */
};

int scratch_new(const struct kernel *kernel, struct merge_scratch **out, pf_error *err);

/* Does every row of the block lie in the term's range? Blocks are cut so that all or none do. */
bool term_covers(const struct merge_term *term, int64_t row);

/* The first row index i in [i0, n_rows) at which the set of covering terms differs from that at i0, else n_rows. */
int64_t terms_same_until(const struct merge_target *t, int64_t row0, int64_t row_step, int64_t i0,
                         int64_t n_rows);

/* Cuts a block of at most n_rows x n_cols whose tiles fit; rows are evened out over the blocks. */
void block_cut(const struct merge_scratch *s, const struct merge_target *t, struct block *b);

/* All covering terms of a block in order: the last one's sink is `last`. False: none covers it. */
bool terms_block(struct merge_scratch *s, const struct merge_target *t, const struct block *b,
                 struct strip *last);

#endif
