/*
 * AVX2 with FMA and F16C: 6 x 16 tiles, 12 of the 16 registers are chains. Compiled with its own flags; called only after cpu_has and
 * the self-check.
 */
#include "tensor/dtype.h"
#include <assert.h>
#include <immintrin.h>

typedef __m256 vf;
typedef __m256 vm;

enum { VL = 8, NV = 2, MR = 6, MR_SMALL = 2 };
#define HAS_SPLIT   1
#define HAS_HOT_F32 0 /* its constants would take the registers of chains */
#define UNROLL      _Pragma("GCC unroll 16")
#define KERNEL      kernel_avx2
#define KERNEL_ISA  CPU_AVX2

extern const struct kernel kernel_avx2;

static inline vf v_zero(void)
{
    return _mm256_setzero_ps();
}

static inline vf v_set1(float x)
{
    return _mm256_set1_ps(x);
}

static inline vf v_load(const void *p)
{
    return _mm256_loadu_ps(p);
}

static inline void v_store(void *p, vf x)
{
    _mm256_storeu_ps(p, x);
}

static inline vf v_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}

static inline vf v_mul(vf a, vf b)
{
    return _mm256_mul_ps(a, b);
}

static inline vf v_add(vf a, vf b)
{
    return _mm256_add_ps(a, b);
}

static inline vm v_is_nan(vf x)
{
    return _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
}

static inline bool v_any(vm m)
{
    return _mm256_movemask_ps(m) != 0;
}

static inline vf v_select(vm m, vf yes, vf no)
{
    return _mm256_blendv_ps(no, yes, m);
}

static inline vf v_load_bf16(const uint8_t *p)
{
    const __m128i h = _mm_loadu_si128((const __m128i *)(const void *)p);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

static inline vf v_load_f16(const uint8_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}

/* A constant made where it is used: hoisted out of the loops it would take the register of a chain. */
static inline __m256i here(int x)
{
    __m256i v = _mm256_set1_epi32(x);
    __asm__ volatile("" : "+x"(v));
    return v;
}

/* To nearest, ties to even, in the upper half; x is no NaN with bits in its low half. */
static inline __m256i round_upper(vf x)
{
    const __m256i u = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), here(1));
    return _mm256_add_epi32(_mm256_add_epi32(u, here(0x7fff)), odd);
}

static inline void v_store_bf16(uint8_t *p, vf x)
{
    const __m256i h = _mm256_srli_epi32(round_upper(x), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(h, h), 0x08);
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_castsi256_si128(packed));
}

static inline vf v_round_bf16(vf x)
{
    return _mm256_castsi256_ps(_mm256_and_si256(round_upper(x), here((int)0xffff0000)));
}

static inline void v_store_f16(uint8_t *p, vf x)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

static inline vf in_order(vf x) /* undoes what a shuffle within 128-bit lanes did to 64-bit pairs */
{
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8));
}

static inline void v_split(vf x0, vf x1, vf *even, vf *odd)
{
    *even = in_order(_mm256_shuffle_ps(x0, x1, 0x88));
    *odd = in_order(_mm256_shuffle_ps(x0, x1, 0xdd));
}

static inline void v_load_split_bf16(const uint8_t *p, vf *even, vf *odd)
{
    const __m256i h = _mm256_loadu_si256((const __m256i *)(const void *)p);
    *even = _mm256_castsi256_ps(_mm256_slli_epi32(h, 16));
    *odd = _mm256_castsi256_ps(_mm256_and_si256(h, _mm256_set1_epi32((int)0xffff0000)));
}

/* 16 columns: W + total rounded to bf16, without moving anything across lanes. The sums' upper halves are the truncated result; one is
 * added where the lower half, plus one if the result is odd, exceeds a half. */
static inline void v_finish_split(vf even, vf odd, const uint8_t *base, uint8_t *out)
{
    const __m256i w = _mm256_loadu_si256((const __m256i *)(const void *)base);
    const __m256i w_odd = _mm256_and_si256(w, here((int)0xffff0000));
    const __m256i w_even = _mm256_slli_epi32(w, 16);
    const __m256i e = _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(w_even), even));
    const __m256i o = _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(w_odd), odd));
    const __m256i high = _mm256_blend_epi16(_mm256_srli_epi32(e, 16), o, 0xaa);
    const __m256i low = _mm256_blend_epi16(e, _mm256_slli_epi32(o, 16), 0xaa);
    const __m256i lsb = _mm256_and_si256(high, here(0x00010001));
    /* unsigned > 0x8000 as signed > 0, the sign flipped; true is -1 */
    const __m256i flipped = _mm256_xor_si256(_mm256_adds_epu16(low, lsb), here((int)0x80008000));
    const __m256i is_up = _mm256_cmpgt_epi16(flipped, here(0));
    const __m256i is_nan =
        _mm256_cmpgt_epi16(_mm256_and_si256(w, here(0x7fff7fff)), here(0x7f807f80));
    const __m256i rounded = _mm256_blendv_epi8(_mm256_sub_epi16(high, is_up), w, is_nan);
    _mm256_storeu_si256((__m256i *)(void *)out, rounded);
}

#include "merge/kernel_body.inc"
