/*
 * The only file that includes cblas.h. See gemm.h for the rules: one thread, fixed shapes, pthread flavour only.
 *
 * OpenBLAS keeps one work buffer per calling thread (tens of MiB of address space, of which only the packed blocks of
 * one product are ever touched) and takes a lock for a moment in every call to find a free one.
 */
#include "model/gemm.h"

#include "base/cpu.h"
#include "base/log.h"

#include <cblas.h>
#include <pthread.h>
#include <string.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int parallel_kind; /* written under `once` alone */

static void pin_to_one_thread(void)
{
    openblas_set_num_threads(1);
    parallel_kind = openblas_get_parallel();
    if (cpu_has(CPU_AVX2) && strcmp(openblas_get_corename(), "Prescott") == 0)
        log_at(
            PF_LOG_WARN,
            "OpenBLAS does not know this CPU and uses its oldest kernels; OPENBLAS_CORETYPE=%s in "
            "the environment makes drawing faster",
            cpu_has(CPU_AVX512) ? "SkylakeX" : "Haswell");
}

int gemm_init(pf_error *err)
{
    (void)pthread_once(&once, pin_to_one_thread); /* cannot fail with a valid once */
    if (parallel_kind != OPENBLAS_THREAD)
        return err_set(err, PF_E_UNSUPPORTED,
                       "OpenBLAS is of the %s flavour, which gives wrong products to concurrent "
                       "callers or brings threads of its own; install the pthread flavour "
                       "(Debian: libopenblas0-pthread)",
                       parallel_kind == OPENBLAS_SEQUENTIAL ? "serial" : "OpenMP");
    return PF_OK;
}

void gemm_nt(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
             const float *b, int64_t ldb, float *c, int64_t ldc)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (blasint)m, (blasint)n, (blasint)k, alpha,
                a, (blasint)lda, b, (blasint)ldb, 0.0f, c, (blasint)ldc);
}

void gemm_nn(int64_t m, int64_t n, int64_t k, const float *a, int64_t lda, const float *b,
             int64_t ldb, float *c, int64_t ldc)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (blasint)m, (blasint)n, (blasint)k, 1.0f,
                a, (blasint)lda, b, (blasint)ldb, 0.0f, c, (blasint)ldc);
}

void gemm_vec(int64_t n, int64_t k, const float *w, const float *x, float *y)
{
    cblas_sgemv(CblasRowMajor, CblasNoTrans, (blasint)n, (blasint)k, 1.0f, w, (blasint)k, x, 1,
                0.0f, y, 1);
}

void gemm_yardstick_threads(unsigned n)
{
    openblas_set_num_threads((int)n);
}

const char *gemm_core(void)
{
    return openblas_get_corename();
}
