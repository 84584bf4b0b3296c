/*
 * The loops of ops.h. Sums run in 16 lanes that are folded in a fixed tree: the order is written down here and not left to the
 * compiler, which may use any vector width without changing a bit (products are never contracted into fma).
 */
#include "model/ops.h"

#include "base/compiler.h"

#include <math.h>
#include <string.h>

#define LANES 16

/*
 * exp(x): x = k ln 2 + r with |r| <= ln 2 / 2, the Taylor series of degree 7 in r (the first term left out is 5e-9 of the
 * result), times 2^k put together from bits. Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low
 * bits. Arguments are clamped to where the result is normal; NaN stays NaN.
 */
static PF_ALWAYS_INLINE float exp_f32(float x)
{
    const float magic = 0x1.8p23f;
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float shifted = x * 0x1.715476p0f + magic;
    float k = shifted - magic;
    /* ln 2 in two parts; the first has few bits, so k times it is exact */
    float r = x - k * 0x1.62ep-1f;
    r = r - k * 0x1.0bfbe8p-15f;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127u) << 23;
    float two_to_k;
    memcpy(&two_to_k, &bits, sizeof two_to_k);
    return p * two_to_k;
}

static PF_ALWAYS_INLINE float fold_lanes(const float *lane)
{
    float a[LANES];
    memcpy(a, lane, sizeof a);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int j = 0; j < half; j++)
            a[j] += a[j + half];
    return a[0];
}

static PF_ALWAYS_INLINE float sum(const float *x, int64_t n)
{
    float lane[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            lane[j] += x[i + j];
    for (int j = 0; i + j < n; j++)
        lane[j] += x[i + j];
    return fold_lanes(lane);
}

static PF_ALWAYS_INLINE float sum_squares_about(const float *x, int64_t n, float mean)
{
    float lane[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            lane[j] += (x[i + j] - mean) * (x[i + j] - mean);
    for (int j = 0; i + j < n; j++)
        lane[j] += (x[i + j] - mean) * (x[i + j] - mean);
    return fold_lanes(lane);
}

static PF_ALWAYS_INLINE float largest(const float *x, int64_t n)
{
    float lane[LANES];
    int64_t i = 0;
    for (int j = 0; j < LANES; j++)
        lane[j] = x[0];
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
    for (int j = 0; i + j < n; j++)
        lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
    float max = lane[0];
    for (int j = 1; j < LANES; j++)
        max = lane[j] > max ? lane[j] : max;
    return max;
}

PF_WIDER_CLONES void ops_silu(float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = x[i] / (1.0f + exp_f32(-x[i]));
}

PF_WIDER_CLONES void ops_add_bias(float *x, int64_t n_rows, int64_t n_cols, int64_t ld,
                                  const float *restrict bias)
{
    if (bias == NULL)
        return;
    for (int64_t m = 0; m < n_rows; m++) {
        float *restrict row = x + m * ld;
        for (int64_t n = 0; n < n_cols; n++)
            row[n] += bias[n];
    }
}

/* (y/2)(1 + tanh u) = y / (1 + exp(-2u)), u = sqrt(2/pi) (y + 0.044715 y^3): one exponential, no cancellation */
PF_WIDER_CLONES void ops_bias_gelu(float *x, int64_t n_rows, int64_t n_cols, int64_t ld,
                                   const float *restrict bias)
{
    const float minus_two_root = -1.5957691216057307f;
    for (int64_t m = 0; m < n_rows; m++) {
        float *restrict row = x + m * ld;
        for (int64_t n = 0; n < n_cols; n++) {
            float y = row[n] + bias[n];
            float u = y + 0.044715f * (y * y * y);
            row[n] = y / (1.0f + exp_f32(minus_two_root * u));
        }
    }
}

PF_WIDER_CLONES void ops_add_gated(float *sum_out, const float *y, int64_t n_rows, int64_t n_cols,
                                   int64_t ld, const float *restrict bias,
                                   const float *restrict gate)
{
    for (int64_t m = 0; m < n_rows; m++) {
        float *restrict to = sum_out + m * ld;
        const float *restrict from = y + m * ld;
        for (int64_t n = 0; n < n_cols; n++)
            to[n] += gate[n] * (from[n] + bias[n]);
    }
}

PF_WIDER_CLONES void ops_softmax(float *x, int64_t n_rows, int64_t n_cols)
{
    for (int64_t m = 0; m < n_rows; m++) {
        float *restrict row = x + m * n_cols;
        float max = largest(row, n_cols);
        for (int64_t n = 0; n < n_cols; n++)
            row[n] = exp_f32(row[n] - max);
        float factor = 1.0f / sum(row, n_cols);
        for (int64_t n = 0; n < n_cols; n++)
            row[n] *= factor;
    }
}

PF_WIDER_CLONES void ops_norm_modulate(float *out, const float *x, int64_t n_rows, int64_t n_cols,
                                       float eps, const float *restrict scale,
                                       const float *restrict shift)
{
    for (int64_t m = 0; m < n_rows; m++) {
        const float *restrict from = x + m * n_cols;
        float *restrict to = out + m * n_cols;
        float mean = sum(from, n_cols) / (float)n_cols;
        float variance = sum_squares_about(from, n_cols, mean) / (float)n_cols;
        float factor = 1.0f / sqrtf(variance + eps);
        for (int64_t n = 0; n < n_cols; n++)
            to[n] = ((from[n] - mean) * factor) * (1.0f + scale[n]) + shift[n];
    }
}
