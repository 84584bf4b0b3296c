/*
 * The oracle: the kernel in plain C, fmaf by the C library, for a baseline x86-64 or any other CPU. Slow is fine; wrong is not.
 * The vector twins are selected only after they agreed with this one.
 */
#include "tensor/dtype.h"
#include <assert.h>
#include <math.h>
#include <string.h>

typedef float vf;
typedef bool vm;

enum { VL = 1, NV = 8, MR = 4, MR_SMALL = 4 };
#define UNROLL
#define HAS_SPLIT   0
#define HAS_HOT_F32 0
#define KERNEL      kernel_scalar
#define KERNEL_ISA  CPU_SCALAR

static inline vf v_zero(void)
{
    return 0.0F;
}

static inline vf v_set1(float x)
{
    return x;
}

static inline vf v_load(const void *p)
{
    vf x;
    memcpy(&x, p, sizeof(x));
    return x;
}

static inline void v_store(void *p, vf x)
{
    memcpy(p, &x, sizeof(x));
}

static inline vf v_fma(vf a, vf b, vf c)
{
    return fmaf(a, b, c);
}

static inline vf v_mul(vf a, vf b)
{
    return a * b;
}

static inline vf v_add(vf a, vf b)
{
    return a + b;
}

static inline vm v_is_nan(vf x)
{
    return x != x;
}

static inline bool v_any(vm m)
{
    return m;
}

static inline vf v_select(vm m, vf yes, vf no)
{
    return m ? yes : no;
}

static inline vf v_load_bf16(const uint8_t *p)
{
    uint16_t h;
    memcpy(&h, p, 2);
    return f32_from_bf16(h);
}

static inline vf v_load_f16(const uint8_t *p)
{
    uint16_t h;
    memcpy(&h, p, 2);
    return f32_from_f16(h);
}

/* To nearest, ties to even; x is no NaN with bits in its low half. */
static inline uint16_t round_bf16(vf x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

static inline void v_store_bf16(uint8_t *p, vf x)
{
    const uint16_t h = round_bf16(x);
    memcpy(p, &h, 2);
}

static inline vf v_round_bf16(vf x)
{
    return f32_from_bf16(round_bf16(x));
}

static inline void v_store_f16(uint8_t *p, vf x)
{
    const uint16_t h = f16_from_f32(x);
    memcpy(p, &h, 2);
}

/* has_split is false: never called */
static inline void v_load_split_bf16(const uint8_t *p, vf *even, vf *odd)
{
    (void)p;
    *even = *odd = 0;
}

static inline void v_split(vf x0, vf x1, vf *even, vf *odd)
{
    *even = x0;
    *odd = x1;
}

static inline void v_finish_split(vf even, vf odd, const uint8_t *base, uint8_t *out)
{
    (void)even;
    (void)odd;
    (void)base;
    (void)out;
}

#include "merge/kernel_body.inc"
