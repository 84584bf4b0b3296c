/*
 * The only file that includes cblas.h. See gemm.h for the rules: one thread, fixed shapes, pthread flavour only.
 *
 * The library is opened at the first use, by the path that the build found (the alternatives of a system may point at another
 * flavour), and after it was told which kernels to take: OpenBLAS knows CPUs by name, and one that is older than the CPU takes it for
 * the oldest of all, at a third of the speed. An OPENBLAS_CORETYPE of the user's is left alone.
 *
 * OpenBLAS keeps one work buffer per calling thread (tens of MiB of address space, of which only the packed blocks of
 * one product are ever touched) and takes a lock for a moment in every call to find a free one.
 */
#include "model/gemm.h"

#include "base/cpu.h"

#include <cblas.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

typedef void (*sgemm_fn)(CBLAS_ORDER, CBLAS_TRANSPOSE, CBLAS_TRANSPOSE, blasint, blasint, blasint,
                         float, const float *, blasint, const float *, blasint, float, float *,
                         blasint);
typedef void (*sgemv_fn)(CBLAS_ORDER, CBLAS_TRANSPOSE, blasint, blasint, float, const float *,
                         blasint, const float *, blasint, float, float *, blasint);
typedef void (*set_threads_fn)(int);
typedef int (*get_parallel_fn)(void);
typedef char *(*get_corename_fn)(void);

/* Written under `once` alone, read-only afterwards. */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct {
    sgemm_fn sgemm;
    sgemv_fn sgemv;
    set_threads_fn set_threads;
    get_parallel_fn get_parallel;
    get_corename_fn get_corename;
    char why[256]; /* it cannot be used; empty: it can */
} blas;

/* Sets what the user has not set; says whether it must be taken back, since it is not for our children. */
static bool lend_env(const char *name, const char *value)
{
    return value && !getenv(name) && setenv(name, value, 0) == 0;
}

static void *open_library(void)
{
    static const char *const names[] = {PF_OPENBLAS_PATH, "libopenblas.so.0"};
    const char *core = cpu_has(CPU_AVX512) ? "SkylakeX" : cpu_has(CPU_AVX2) ? "Haswell" : NULL;
    const bool is_core_ours = lend_env("OPENBLAS_CORETYPE", core);
    /* Its threads, which only a yardstick uses, else spin on our CPUs for 2^26 cycles before they sleep. */
    const bool is_timeout_ours = lend_env("OPENBLAS_THREAD_TIMEOUT", "4");
    void *lib = NULL;
    for (size_t i = 0; !lib && i < PF_COUNTOF(names); i++)
        lib = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (is_core_ours)
        (void)unsetenv("OPENBLAS_CORETYPE");
    if (is_timeout_ours)
        (void)unsetenv("OPENBLAS_THREAD_TIMEOUT");
    return lib;
}

/* POSIX lets a void pointer of dlsym be a function; C wants to be asked nicely. */
#define LOOK_UP(lib, field, name)                                                                  \
    (*(void **)(void *)&blas.field = dlsym(lib, name), blas.field != NULL)

static void open_once(void)
{
    void *lib = open_library();
    if (!lib) {
        const char *why = dlerror();
        snprintf(blas.why, sizeof blas.why, "%s", why ? why : "it cannot be opened");
    } else if (!LOOK_UP(lib, sgemm, "cblas_sgemm") || !LOOK_UP(lib, sgemv, "cblas_sgemv") ||
               !LOOK_UP(lib, set_threads, "openblas_set_num_threads") ||
               !LOOK_UP(lib, get_parallel, "openblas_get_parallel") ||
               !LOOK_UP(lib, get_corename, "openblas_get_corename")) {
        snprintf(blas.why, sizeof blas.why, "it lacks functions of OpenBLAS");
    } else {
        blas.set_threads(1);
        int kind = blas.get_parallel();
        if (kind != OPENBLAS_THREAD)
            snprintf(blas.why, sizeof blas.why,
                     "it is of the %s flavour, which gives wrong products to concurrent callers or "
                     "brings threads of its own",
                     kind == OPENBLAS_SEQUENTIAL ? "serial" : "OpenMP");
    }
}

int gemm_init(pf_error *err)
{
    (void)pthread_once(&once, open_once); /* cannot fail with a valid once */
    if (blas.why[0])
        return err_set(err, PF_E_UNSUPPORTED,
                       "OpenBLAS cannot be used: %s; install the pthread flavour (Debian: "
                       "libopenblas0-pthread)",
                       blas.why);
    return PF_OK;
}

void gemm_nt(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
             const float *b, int64_t ldb, float *c, int64_t ldc)
{
    blas.sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (blasint)m, (blasint)n, (blasint)k, alpha,
               a, (blasint)lda, b, (blasint)ldb, 0.0f, c, (blasint)ldc);
}

void gemm_nn(int64_t m, int64_t n, int64_t k, const float *a, int64_t lda, const float *b,
             int64_t ldb, float *c, int64_t ldc)
{
    blas.sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (blasint)m, (blasint)n, (blasint)k, 1.0f,
               a, (blasint)lda, b, (blasint)ldb, 0.0f, c, (blasint)ldc);
}

void gemm_vec(int64_t n, int64_t k, const float *w, const float *x, float *y)
{
    blas.sgemv(CblasRowMajor, CblasNoTrans, (blasint)n, (blasint)k, 1.0f, w, (blasint)k, x, 1, 0.0f,
               y, 1);
}

void gemm_yardstick_threads(unsigned n)
{
    blas.set_threads((int)n);
}

const char *gemm_core(void)
{
    return blas.get_corename();
}
