/*
 * AVX-512 (F, BW, DQ, VL) with FMA: 12 x 32 tiles, 24 of the 32 registers are chains. Rounding to bf16 is integer arithmetic: vcvtneps2bf16
 * would flush subnormals. Compiled with its own flags; called only after cpu_has and the self-check.
 */
#include "tensor/dtype.h"
#include <assert.h>
#include <immintrin.h>

typedef __m512 vf;
typedef __mmask16 vm;

enum { VL = 16, NV = 2, MR = 12, MR_SMALL = 4 };
#define HAS_SPLIT   1
#define HAS_HOT_F32 1 /* registers enough for it */
#define UNROLL      _Pragma("GCC unroll 16")
#define KERNEL      kernel_avx512
#define KERNEL_ISA  CPU_AVX512

extern const struct kernel kernel_avx512;

static inline vf v_zero(void)
{
    return _mm512_setzero_ps();
}

static inline vf v_set1(float x)
{
    return _mm512_set1_ps(x);
}

static inline vf v_load(const void *p)
{
    return _mm512_loadu_ps(p);
}

static inline void v_store(void *p, vf x)
{
    _mm512_storeu_ps(p, x);
}

static inline vf v_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}

static inline vf v_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}

static inline vf v_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}

static inline vm v_is_nan(vf x)
{
    return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
}

static inline bool v_any(vm m)
{
    return m != 0;
}

static inline vf v_select(vm m, vf yes, vf no)
{
    return _mm512_mask_mov_ps(no, m, yes);
}

static inline vf v_load_bf16(const uint8_t *p)
{
    const __m256i h = _mm256_loadu_si256((const __m256i *)(const void *)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

static inline vf v_load_f16(const uint8_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}

/* To nearest, ties to even, in the upper half; x is no NaN with bits in its low half. */
static inline __m512i round_upper(vf x)
{
    const __m512i u = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
}

static inline void v_store_bf16(uint8_t *p, vf x)
{
    const __m256i h = _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_upper(x), 16));
    _mm256_storeu_si256((__m256i *)(void *)p, h);
}

static inline vf v_round_bf16(vf x)
{
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    return _mm512_castsi512_ps(_mm512_and_si512(round_upper(x), upper));
}

static inline void v_store_f16(uint8_t *p, vf x)
{
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

static inline void v_split(vf x0, vf x1, vf *even, vf *odd)
{
    const __m512i evens =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
    *even = _mm512_permutex2var_ps(x0, evens, x1);
    *odd = _mm512_permutex2var_ps(x0, odds, x1);
}

static inline void v_load_split_bf16(const uint8_t *p, vf *even, vf *odd)
{
    const __m512i h = _mm512_loadu_si512(p);
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(h, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(h, _mm512_set1_epi32((int)0xffff0000)));
}

/* 32 columns: W + total rounded to bf16, without moving anything across lanes. The sums' upper halves are the truncated result; one is
 * added where the lower half, plus one if the result is odd, exceeds a half. */
static inline void v_finish_split(vf even, vf odd, const uint8_t *base, uint8_t *out)
{
    const __mmask32 is_odd = 0xaaaaaaaa;
    const __m512i w = _mm512_loadu_si512(base);
    vf w_even, w_odd;
    v_load_split_bf16(base, &w_even, &w_odd);
    const __m512i e = _mm512_castps_si512(_mm512_add_ps(w_even, even));
    const __m512i o = _mm512_castps_si512(_mm512_add_ps(w_odd, odd));
    const __m512i high = _mm512_mask_mov_epi16(_mm512_srli_epi32(e, 16), is_odd, o);
    const __m512i low = _mm512_mask_mov_epi16(e, is_odd, _mm512_slli_epi32(o, 16));
    const __m512i lsb = _mm512_and_si512(high, _mm512_set1_epi16(1));
    const __mmask32 is_up =
        _mm512_cmpgt_epu16_mask(_mm512_adds_epu16(low, lsb), _mm512_set1_epi16((short)0x8000));
    const __m512i rounded = _mm512_mask_add_epi16(high, is_up, high, _mm512_set1_epi16(1));
    const __mmask32 is_nan = _mm512_cmpgt_epu16_mask(_mm512_and_si512(w, _mm512_set1_epi16(0x7fff)),
                                                     _mm512_set1_epi16(0x7f80));
    _mm512_storeu_si512(out, _mm512_mask_mov_epi16(rounded, is_nan, w));
}

#include "merge/kernel_body.inc"
