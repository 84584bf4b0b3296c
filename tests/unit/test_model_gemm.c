/*
 * Products: right against double, and the same bytes whoever multiplies meanwhile. The serial flavour of OpenBLAS fails the
 * concurrency test within a few hundred products.
 */
#include "testing.h"

#include "base/pool.h"
#include "model/gemm.h"

#include <math.h>
#include <stdatomic.h>

enum { M = 64, N = 128, K = 128, N_PRODUCTS = 100000, N_OPERANDS = 8 };

static void fill(struct rng *r, float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] = (float)(rng_unit(r) * 2.0 - 1.0);
}

static void init_accepts_the_pthread_flavour(void **state)
{
    pf_error err = {0};
    (void)state;
    assert_ok(gemm_init(&err), &err);
    assert_ok(gemm_init(&err), &err);
}

static void check(const float *c, const double *want, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!(fabs((double)c[i] - want[i]) <= 1e-5))
            fail_msg("element %zu: %.9g, not %.9g", i, (double)c[i], want[i]);
}

static void products_equal_double(void **state)
{
    enum { m = 13, n = 29, k = 37, ld = 41 };
    static float a[m * ld], b[n * ld], bt[k * ld], c[m * ld], y[n];
    static double want[m * ld], want_y[n];
    struct rng r = {1};
    (void)state;
    fill(&r, a, PF_COUNTOF(a));
    fill(&r, b, PF_COUNTOF(b));
    for (int i = 0; i < k; i++)
        for (int j = 0; j < n; j++)
            bt[i * ld + j] = b[j * ld + i];
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++)
            for (int l = 0; l < k; l++)
                want[i * ld + j] += 0.25 * (double)a[i * ld + l] * (double)b[j * ld + l];
    gemm_nt(m, n, k, 0.25f, a, ld, b, ld, c, ld);
    check(c, want, PF_COUNTOF(c)); /* what lies past column n stays 0 */
    gemm_nn(m, n, k, a, ld, bt, ld, c, ld);
    for (size_t i = 0; i < PF_COUNTOF(want); i++)
        want[i] *= 4.0;
    check(c, want, PF_COUNTOF(c));
    for (int j = 0; j < n; j++)
        for (int l = 0; l < k; l++)
            want_y[j] += (double)b[j * k + l] * (double)a[l];
    gemm_vec(n, k, b, a, y);
    check(y, want_y, n);
}

struct shared {
    float a[N_OPERANDS][M * K], b[N_OPERANDS][N * K], want[N_OPERANDS][M * N];
    float *c; /* per worker */
    atomic_uint n_wrong;
};

static void product_task(void *ctx, size_t i_task, unsigned i_worker)
{
    struct shared *s = ctx;
    size_t i = i_task % N_OPERANDS;
    float *c = s->c + (size_t)i_worker * M * N;
    gemm_nt(M, N, K, 1.0f, s->a[i], K, s->b[i], K, c, N);
    if (memcmp(c, s->want[i], sizeof s->want[i]) != 0)
        atomic_fetch_add(&s->n_wrong, 1);
}

static void concurrent_products_have_the_same_bytes(void **state)
{
    static const unsigned n_threads[] = {2, 7};
    struct shared *s = calloc(1, sizeof *s);
    struct rng r = {2};
    pf_error err = {0};
    (void)state;
    assert_non_null(s);
    for (size_t i = 0; i < N_OPERANDS; i++) {
        fill(&r, s->a[i], M * K);
        fill(&r, s->b[i], N * K);
        gemm_nt(M, N, K, 1.0f, s->a[i], K, s->b[i], K, s->want[i], N);
    }
    for (size_t i = 0; i < PF_COUNTOF(n_threads); i++) {
        struct pool *pool = NULL;
        assert_ok(pool_new(n_threads[i], &pool, &err), &err);
        s->c = calloc((size_t)n_threads[i] * M * N, sizeof(float));
        assert_non_null(s->c);
        pool_run(pool, N_PRODUCTS, product_task, s);
        assert_int_equal(atomic_load(&s->n_wrong), 0);
        free(s->c);
        pool_free(pool);
    }
    free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(init_accepts_the_pthread_flavour),
        cmocka_unit_test(products_equal_double),
        cmocka_unit_test(concurrent_products_have_the_same_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
