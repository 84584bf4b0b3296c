/*
 * Element-wise and row-wise steps of the forward: exponential, GELU, SiLU, softmax, LayerNorm with modulation. Each works on
 * its own rows in a fixed order, whatever the vector width, so that results never depend on batch or threads. Plain C that
 * compilers vectorise; no allocation, no state. Accuracy: a few ulp, asserted against double in the tests.
 */
#ifndef PF_MODEL_OPS_H
#define PF_MODEL_OPS_H

#include <stddef.h>
#include <stdint.h>

/* x (n): x / (1 + exp(-x)), in place */
void ops_silu(float *x, int64_t n);
/* x (rows, cols) with leading dimension ld: x + bias[col]; bias NULL: nothing */
void ops_add_bias(float *x, int64_t n_rows, int64_t n_cols, int64_t ld, const float *bias);
/* the same, then GELU in its tanh form */
void ops_bias_gelu(float *x, int64_t n_rows, int64_t n_cols, int64_t ld, const float *bias);
/* sum (rows, cols) += gate[col] * (y + bias[col]) */
void ops_add_gated(float *sum, const float *y, int64_t n_rows, int64_t n_cols, int64_t ld,
                   const float *bias, const float *gate);
/* each row of x (rows, cols), packed, becomes its softmax */
void ops_softmax(float *x, int64_t n_rows, int64_t n_cols);
/* out = LayerNorm(x) * (1 + scale[col]) + shift[col] per row, packed */
void ops_norm_modulate(float *out, const float *x, int64_t n_rows, int64_t n_cols, float eps,
                       const float *scale, const float *shift);

#endif
