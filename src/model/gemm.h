/*
 * Matrix products: the wall before OpenBLAS, whose header only gemm.c includes. OpenBLAS runs on one thread for ever (the pool
 * splits the work) and is called on shapes that the model and one sample fix, so that a product's bytes depend on its
 * operands alone, not on who else computes meanwhile. Row major everywhere. Callable from any number of threads after gemm_init.
 */
#ifndef PF_MODEL_GEMM_H
#define PF_MODEL_GEMM_H

#include "base/err.h"

/* Once per process, before a pool starts (it may set an environment variable for a moment). PF_E_UNSUPPORTED when the OpenBLAS that was loaded is not the pthread flavour: the
 * serial one is not reentrant and gives wrong products when two threads call it. */
int gemm_init(pf_error *err);

/* C (m,n) = alpha A (m,k) B^T, B (n,k) */
void gemm_nt(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
             const float *b, int64_t ldb, float *c, int64_t ldc);
/* C (m,n) = A (m,k) B (k,n) */
void gemm_nn(int64_t m, int64_t n, int64_t k, const float *a, int64_t lda, const float *b,
             int64_t ldb, float *c, int64_t ldc);
/* y (n) = W (n,k) x (k) */
void gemm_vec(int64_t n, int64_t k, const float *w, const float *x, float *y);

/* For benchmarks alone: how many threads OpenBLAS itself may use in the yardstick. The model must not run meanwhile. */
void gemm_yardstick_threads(unsigned n);
/* The CPU that OpenBLAS takes this one for ("SkylakeX"): a benchmark says it, since an old OpenBLAS takes a new CPU for the oldest. */
const char *gemm_core(void);

#endif
