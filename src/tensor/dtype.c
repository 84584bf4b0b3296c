/*
 * Element types and their exact conversions: the oracle for the vector kernels of merge/, and what loads adapter factors.
 * All but f64 work on bit patterns, so neither the rounding mode nor FTZ/DAZ of the caller can change a result.
 */
#include "tensor/dtype.h"

#include <assert.h>
#include <math.h>
#include <string.h>

static const struct {
    const char *name;
    uint32_t n_bits;
} dtypes[PF_N_DTYPES] = {
    [PF_BOOL] = {"BOOL", 8},
    [PF_F4] = {"F4", 4},
    [PF_F6_E2M3] = {"F6_E2M3", 6},
    [PF_F6_E3M2] = {"F6_E3M2", 6},
    [PF_U8] = {"U8", 8},
    [PF_I8] = {"I8", 8},
    [PF_F8_E5M2] = {"F8_E5M2", 8},
    [PF_F8_E4M3] = {"F8_E4M3", 8},
    [PF_F8_E8M0] = {"F8_E8M0", 8},
    [PF_F8_E4M3FNUZ] = {"F8_E4M3FNUZ", 8},
    [PF_F8_E5M2FNUZ] = {"F8_E5M2FNUZ", 8},
    [PF_I16] = {"I16", 16},
    [PF_U16] = {"U16", 16},
    [PF_F16] = {"F16", 16},
    [PF_BF16] = {"BF16", 16},
    [PF_I32] = {"I32", 32},
    [PF_U32] = {"U32", 32},
    [PF_F32] = {"F32", 32},
    [PF_C64] = {"C64", 64},
    [PF_F64] = {"F64", 64},
    [PF_I64] = {"I64", 64},
    [PF_U64] = {"U64", 64},
};

static bool is_known(int32_t dtype)
{
    return dtype >= 0 && dtype < PF_N_DTYPES;
}

const char *pf_dtype_name(int32_t dtype)
{
    return is_known(dtype) ? dtypes[dtype].name : "?";
}

uint32_t pf_dtype_bits(int32_t dtype)
{
    return is_known(dtype) ? dtypes[dtype].n_bits : 0;
}

bool dtype_parse(struct str name, int32_t *out_dtype)
{
    for (int32_t i = 0; i < PF_N_DTYPES; i++) {
        if (str_eqz(name, dtypes[i].name)) {
            *out_dtype = i;
            return true;
        }
    }
    return false;
}

uint32_t dtype_size(int32_t dtype)
{
    uint32_t n_bits = pf_dtype_bits(dtype);
    return n_bits % 8 == 0 ? n_bits / 8 : 0;
}

bool dtype_is_mergeable(int32_t dtype)
{
    return dtype == PF_F32 || dtype == PF_F16 || dtype == PF_BF16;
}

bool dtype_is_factor(int32_t dtype)
{
    return dtype_is_mergeable(dtype) || dtype == PF_F64 || dtype == PF_F8_E4M3 ||
           dtype == PF_F8_E5M2;
}

/* ------------------------------------------------------------------------------------------- conversions */

static float f32_of_bits(uint32_t bits)
{
    float v;
    memcpy(&v, &bits, sizeof(v));
    return v;
}

static uint32_t bits_of_f32(float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof(bits));
    return bits;
}

/* A small float with 1 sign bit, n_exp exponent bits and n_man mantissa bits, IEEE-like subnormals, finite, as f32. */
static uint32_t widen_finite(uint32_t v, unsigned n_exp, unsigned n_man)
{
    uint32_t sign = v >> (n_exp + n_man) << 31;
    uint32_t exp = v >> n_man & ((1u << n_exp) - 1);
    uint32_t man = v & ((1u << n_man) - 1);
    uint32_t bias = (1u << (n_exp - 1)) - 1;
    if (exp ==
        0) { /* zero and subnormals; the product is exact and normal, so no mode can change it */
        float unit = f32_of_bits((128 - bias - n_man) << 23);
        return sign | bits_of_f32((float)(int32_t)man * unit);
    }
    return sign | (exp + 127 - bias) << 23 | man << (23 - n_man);
}

float f32_from_bf16(uint16_t v)
{
    return f32_of_bits((uint32_t)v << 16);
}

float f32_from_f16(uint16_t v)
{
    if ((v & 0x7c00) != 0x7c00)
        return f32_of_bits(widen_finite(v, 5, 10));
    uint32_t man = v & 0x3ff;
    /* A signalling NaN becomes quiet, as in hardware (F16C) */
    uint32_t quiet = man != 0 ? 0x400000 : 0;
    return f32_of_bits((uint32_t)(v & 0x8000) << 16 | 0x7f800000 | man << 13 | quiet);
}

float f32_from_f8_e4m3(uint8_t v)
{
    if ((v & 0x7f) == 0x7f)
        return f32_of_bits((uint32_t)(v & 0x80) << 24 | 0x7ff00000);
    return f32_of_bits(widen_finite(v, 4, 3));
}

float f32_from_f8_e5m2(uint8_t v)
{
    return f32_from_f16((uint16_t)(v << 8)); /* the upper half of an f16 */
}

uint16_t bf16_from_f32(float v)
{
    uint32_t bits = bits_of_f32(v);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40);
    /* A carry into infinity is right */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* v / 2^n, to nearest, ties to even; 1 <= n <= 31 */
static uint32_t shift_rne(uint32_t v, unsigned n)
{
    uint32_t half = 1u << (n - 1), rest = v & ((half << 1) - 1), q = v >> n;
    return q + (rest > half || (rest == half && (q & 1) != 0));
}

uint16_t f16_from_f32(float v)
{
    uint32_t bits = bits_of_f32(v);
    uint32_t sign = bits >> 16 & 0x8000, mag = bits & 0x7fffffff;
    if (mag > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (mag >> 13 & 0x3ff));
    if (mag >=
        0x477ff000) /* 65520: halfway between the largest finite value and 2^16, whose mantissa is even */
        return (uint16_t)(sign | 0x7c00);
    if (mag >=
        0x38800000) /* 2^-14: normal in f16; rebias 127 to 15 and let a carry run into the exponent */
        return (uint16_t)(sign | shift_rne(mag - (112u << 23), 13));
    if (mag < 0x33000000) /* below 2^-25, half the smallest subnormal */
        return (uint16_t)sign;
    uint32_t man = (mag & 0x7fffff) | 0x800000; /* mag = man x 2^(exp - 150), in units of 2^-24 */
    return (uint16_t)(sign | shift_rne(man, 126 - (mag >> 23)));
}

/* One element of a factor dtype. */
static float load_f32(int32_t dtype, const unsigned char *p)
{
    uint16_t half;
    double wide;
    float v;
    switch (dtype) {
    case PF_F16:
        memcpy(&half, p, sizeof(half));
        return f32_from_f16(half);
    case PF_BF16:
        memcpy(&half, p, sizeof(half));
        return f32_from_bf16(half);
    case PF_F8_E4M3:
        return f32_from_f8_e4m3(*p);
    case PF_F8_E5M2:
        return f32_from_f8_e5m2(*p);
    case PF_F64:
        memcpy(&wide, p, sizeof(wide));
        return (float)wide;
    default:
        memcpy(&v, p, sizeof(v));
        return v;
    }
}

/* Called with a constant dtype, so that the loop is compiled for it. */
static inline void load_all(int32_t dtype, const unsigned char *in, size_t n, unsigned char *out)
{
    for (size_t i = 0; i < n; i++) {
        float v = load_f32(dtype, in + i * dtype_size(dtype));
        memcpy(out + i * sizeof(v), &v, sizeof(v));
    }
}

void dtype_to_f32(int32_t dtype, const void *src, size_t n, float *dst)
{
    unsigned char *out = (unsigned char *)dst; /* may be unaligned */
    switch (dtype) {
    case PF_F16:
        load_all(PF_F16, src, n, out);
        return;
    case PF_BF16:
        load_all(PF_BF16, src, n, out);
        return;
    case PF_F64:
        load_all(PF_F64, src, n, out);
        return;
    case PF_F8_E4M3:
        load_all(PF_F8_E4M3, src, n, out);
        return;
    case PF_F8_E5M2:
        load_all(PF_F8_E5M2, src, n, out);
        return;
    default:
        assert(dtype == PF_F32);
        if (n > 0)
            memcpy(out, src, n * sizeof(*dst));
    }
}

/* ------------------------------------------------------------------------------------------- one scalar */

static uint64_t load_u64(const unsigned char *p, size_t size)
{
    uint64_t v = 0;
    for (size_t i = size; i-- > 0;)
        v = v << 8 | p[i];
    return v;
}

/* "fnuz": no infinity, one zero, 0x80 is NaN, the bias is one more than IEEE's */
static double f8_fnuz(uint8_t v, unsigned n_exp, unsigned n_man)
{
    if (v == 0x80)
        return (double)NAN;
    return (double)f32_of_bits(widen_finite(v, n_exp, n_man)) / 2;
}

bool dtype_scalar_to_double(int32_t dtype, const void *src, double *out)
{
    const unsigned char *p = src;
    uint64_t v = load_u64(p, dtype_size(dtype));
    switch (dtype) {
    case PF_U8:
    case PF_U16:
    case PF_U32:
    case PF_U64:
        *out = (double)v;
        return true;
    case PF_I8:
        *out = (double)(int8_t)v;
        return true;
    case PF_I16:
        *out = (double)(int16_t)v;
        return true;
    case PF_I32:
        *out = (double)(int32_t)v;
        return true;
    case PF_I64:
        *out = (double)(int64_t)v;
        return true;
    case PF_F64:
        memcpy(out, p, sizeof(*out));
        return true;
    case PF_F8_E8M0: /* a power of two */
        *out = v == 0xff ? (double)NAN : ldexp(1, (int)v - 127);
        return true;
    case PF_F8_E4M3FNUZ:
        *out = f8_fnuz((uint8_t)v, 4, 3);
        return true;
    case PF_F8_E5M2FNUZ:
        *out = f8_fnuz((uint8_t)v, 5, 2);
        return true;
    default:
        if (!dtype_is_factor(dtype))
            return false;
        *out = (double)load_f32(dtype, p);
        return true;
    }
}
