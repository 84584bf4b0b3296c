/*
 * Element types: names, sizes, and the exact conversions to and from f32 that the arithmetic contract allows. All
 * conversions are the plain scalar ones, correct to the bit and usable as the oracle; merge/kernel_* has the fast twins.
 * Sources and destinations may be unaligned. No global state.
 */
#ifndef PF_TENSOR_DTYPE_H
#define PF_TENSOR_DTYPE_H

#include "base/err.h"
#include "base/str.h"

bool dtype_parse(struct str name, int32_t *out_dtype); /* exact spelling */
uint32_t dtype_size(int32_t dtype);     /* bytes per element; 0 for sub-byte and unknown */
bool dtype_is_mergeable(int32_t dtype); /* a base that we merge into: F32, F16, BF16 */
bool dtype_is_factor(int32_t dtype);    /* F32, F16, BF16, F64, F8_E4M3, F8_E5M2 */

/* f64 is rounded once to nearest, ties to even; all others are exact. NaN payloads survive where f32 can hold them. */
float f32_from_bf16(uint16_t v);
float f32_from_f16(uint16_t v);
float f32_from_f8_e4m3(uint8_t v); /* OCP "FN": no infinity, 0x7f and 0xff are NaN */
float f32_from_f8_e5m2(uint8_t v);
/* Round to nearest, ties to even, subnormals kept; a NaN becomes a quiet NaN with its upper payload. */
uint16_t bf16_from_f32(float v);
uint16_t f16_from_f32(float v);

/* n elements of a factor or base dtype to f32. dtype must satisfy dtype_is_factor. */
void dtype_to_f32(int32_t dtype, const void *src, size_t n, float *dst);
/* One scalar of any numeric dtype (alpha tensors: floats, ints, BOOL excluded); false when the dtype has no number. */
bool dtype_scalar_to_double(int32_t dtype, const void *src, double *out);

#endif
