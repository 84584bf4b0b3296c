/*
 * MT19937 (Matsumoto and Nishimura 1998) and the two ways in which torch.randn turns it into normal numbers on the CPU:
 * from 16 elements on, uniforms of 24 bits for the whole draw and then Box-Muller over blocks of 16, eight pairs each, in f32,
 * the last 16 elements drawn anew when the size is not a multiple of 16; below 16, Box-Muller in f64, two numbers per pair of uniforms.
 */
#include "model/noise.h"

#include <math.h>

#define MT_SHIFT   397
#define BLOCK      16
#define TWO_PI     6.283185307179586476925
#define TWO_PI_F32 6.28318530717958647692f

void noise_seed(struct noise *g, uint64_t seed)
{
    g->mt[0] = (uint32_t)seed;
    for (uint32_t i = 1; i < NOISE_STATE; i++)
        g->mt[i] = 1812433253u * (g->mt[i - 1] ^ (g->mt[i - 1] >> 30)) + i;
    g->i_next = NOISE_STATE;
    g->has_spare = false;
    g->spare = 0.0;
}

static void next_state(uint32_t *mt)
{
    for (unsigned i = 0; i < NOISE_STATE; i++) {
        uint32_t y = (mt[i] & 0x80000000u) | (mt[(i + 1) % NOISE_STATE] & 0x7fffffffu);
        uint32_t twist = (y & 1u) != 0 ? 0x9908b0dfu : 0u;
        mt[i] = mt[(i + MT_SHIFT) % NOISE_STATE] ^ (y >> 1) ^ twist;
    }
}

static uint32_t draw_u32(struct noise *g)
{
    if (g->i_next == NOISE_STATE) {
        next_state(g->mt);
        g->i_next = 0;
    }
    uint32_t y = g->mt[g->i_next++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

static float draw_f32(struct noise *g) /* [0,1), 24 bits */
{
    return (float)(draw_u32(g) & 0xffffffu) * 0x1p-24f;
}

static double draw_f64(struct noise *g) /* [0,1), 53 bits, the first word is the high one */
{
    uint64_t hi = draw_u32(g);
    uint64_t lo = draw_u32(g);
    return (double)(((hi << 32) | lo) & ((UINT64_C(1) << 53) - 1)) * 0x1p-53;
}

/* Pairs (j, j + 8) of a block of uniforms become pairs of normals. 1 - u keeps 0 away from the logarithm. */
static void normal_block(float *p)
{
    for (int j = 0; j < BLOCK / 2; j++) {
        float radius = sqrtf(-2.0f * logf(1.0f - p[j]));
        float theta = TWO_PI_F32 * p[j + BLOCK / 2];
        p[j] = radius * cosf(theta);
        p[j + BLOCK / 2] = radius * sinf(theta);
    }
}

static void fill_long(struct noise *g, float *out, size_t n)
{
    for (size_t i = 0; i < n; i++)
        out[i] = draw_f32(g);
    for (size_t i = 0; i + BLOCK <= n; i += BLOCK)
        normal_block(out + i);
    if (n % BLOCK == 0)
        return;
    float *tail = out + n - BLOCK;
    for (int i = 0; i < BLOCK; i++)
        tail[i] = draw_f32(g);
    normal_block(tail);
}

static float draw_normal(struct noise *g)
{
    if (g->has_spare) {
        g->has_spare = false;
        return (float)g->spare;
    }
    double u1 = draw_f64(g);
    double u2 = draw_f64(g);
    double radius = sqrt(-2.0 * log1p(-u2));
    g->spare = radius * sin(TWO_PI * u1);
    g->has_spare = true;
    return (float)(radius * cos(TWO_PI * u1));
}

void noise_fill(struct noise *g, float *out, size_t n)
{
    if (n >= BLOCK) {
        fill_long(g, out, n);
        return;
    }
    for (size_t i = 0; i < n; i++)
        out[i] = draw_normal(g);
}
