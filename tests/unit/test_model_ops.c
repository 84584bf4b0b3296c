/*
 * Element-wise steps against double over their whole range, and their fixed order: a row alone gives the bytes that it
 * gives among others.
 */
#include "testing.h"

#include "model/attention.h"
#include "model/gemm.h"
#include "model/ops.h"

#include <math.h>

static void near(double have, double want, double tolerance)
{
    if (!(fabs(have - want) <= tolerance * (1.0 + fabs(want))))
        fail_msg("%.9g, not %.9g", have, want);
}

static void silu_and_gelu_equal_double(void **state)
{
    const float zero[1] = {0.0f};
    (void)state;
    for (int i = -12000; i <= 12000; i++) {
        float x = (float)i * 0.01f, s = x, g = x;
        double d = (double)x;
        double tanh_form =
            0.5 * d * (1.0 + tanh(sqrt(2.0 / acos(-1.0)) * (d + 0.044715 * d * d * d)));
        ops_silu(&s, 1);
        ops_bias_gelu(&g, 1, 1, 1, zero);
        near((double)s, d / (1.0 + exp(-d)), 3e-7);
        near((double)g, tanh_form, 3e-7);
    }
}

static void gelu_is_the_tanh_form(void **state)
{
    float x[2] = {1.0f, -2.0f};
    const float bias[2] = {0.5f, 0.5f};
    (void)state;
    ops_bias_gelu(x, 1, 2, 2, bias);
    near((double)x[0], 1.39957, 1e-5); /* the erf form gives 1.39979 */
    near((double)x[1], -0.100429, 1e-5);
}

static void softmax_equals_double(void **state)
{
    enum { n = 37 };
    float x[2 * n], alone[n];
    struct rng r = {3};
    (void)state;
    for (int i = 0; i < 2 * n; i++)
        x[i] = (float)(rng_unit(&r) * 60.0 - 30.0);
    memcpy(alone, x + n, sizeof alone);
    double max = -1e9, sum = 0.0, want[n];
    for (int i = 0; i < n; i++)
        max = fmax(max, (double)x[n + i]);
    for (int i = 0; i < n; i++)
        sum += want[i] = exp((double)x[n + i] - max);
    ops_softmax(x, 2, n);
    ops_softmax(alone, 1, n);
    for (int i = 0; i < n; i++)
        near((double)x[n + i], want[i] / sum, 1e-6);
    assert_memory_equal(alone, x + n, sizeof alone);
}

static void norm_equals_double(void **state)
{
    enum { n = 53 };
    float x[n], out[n], scale[n], shift[n];
    struct rng r = {4};
    double mean = 0.0, variance = 0.0;
    (void)state;
    for (int i = 0; i < n; i++) {
        x[i] = (float)(100.0 + rng_unit(&r) * 0.02);
        scale[i] = (float)rng_unit(&r);
        shift[i] = (float)rng_unit(&r);
        mean += (double)x[i] / n;
    }
    for (int i = 0; i < n; i++)
        variance += ((double)x[i] - mean) * ((double)x[i] - mean) / n;
    ops_norm_modulate(out, x, 1, n, 1e-5f, scale, shift);
    for (int i = 0; i < n; i++) /* the mean is rounded to an ulp of 100 */
        near((double)out[i],
             ((double)x[i] - mean) / sqrt(variance + 1e-5) * (1.0 + (double)scale[i]) +
                 (double)shift[i],
             2e-3);
}

static void gate_adds_to_the_sum(void **state)
{
    float sum[6] = {1, 2, 3, 4, 5, 6};
    const float y[6] = {10, 20, 30, 40, 50, 60}, bias[2] = {1, 2}, gate[2] = {0.5f, -1.0f};
    (void)state;
    ops_add_gated(sum, y, 2, 2, 3, bias, gate);
    const float want[6] = {6.5f, -20, 3, 24.5f, -47, 6};
    assert_memory_equal(sum, want, sizeof want);
}

/* 70 tokens: more than one block of queries. */
static void attention_equals_double(void **state)
{
    enum { t = 70, d = 5, ld = 9 };
    static float q[t * ld], k[t * ld], v[t * ld], out[t * ld], scratch[64 * t];
    struct rng r = {5};
    pf_error err = {0};
    (void)state;
    assert_ok(gemm_init(&err), &err);
    assert_int_equal(attention_scratch(t), 64 * t);
    for (int i = 0; i < t * ld; i++) {
        q[i] = (float)(rng_unit(&r) * 4.0 - 2.0);
        k[i] = (float)(rng_unit(&r) * 4.0 - 2.0);
        v[i] = (float)(rng_unit(&r) * 4.0 - 2.0);
    }
    attention_head(q, k, v, out, t, d, ld, scratch);
    for (int m = 0; m < t; m++) {
        double e[t], sum = 0.0;
        for (int n = 0; n < t; n++) {
            double dot = 0.0;
            for (int i = 0; i < d; i++)
                dot += (double)q[m * ld + i] * (double)k[n * ld + i];
            sum += e[n] = exp(dot / sqrt((double)d));
        }
        for (int i = 0; i < d; i++) {
            double want = 0.0;
            for (int n = 0; n < t; n++)
                want += e[n] / sum * (double)v[n * ld + i];
            near((double)out[m * ld + i], want, 1e-5);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(silu_and_gelu_equal_double), cmocka_unit_test(gelu_is_the_tanh_form),
        cmocka_unit_test(softmax_equals_double),      cmocka_unit_test(norm_equals_double),
        cmocka_unit_test(gate_adds_to_the_sum),       cmocka_unit_test(attention_equals_double),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
