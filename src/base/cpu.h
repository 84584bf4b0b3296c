/*
 * What this CPU can do, and the floating-point environment. Asked once; immutable afterwards.
 */
#ifndef PF_BASE_CPU_H
#define PF_BASE_CPU_H

#include <stdbool.h>
#include <stdint.h>

/* AVX2 means AVX2 + FMA + F16C; AVX512 means F, BW, DQ, VL too. */
enum cpu_isa { CPU_SCALAR, CPU_AVX2, CPU_AVX512 };

bool cpu_has(enum cpu_isa isa);             /* CPU and operating system */
const char *cpu_isa_name(enum cpu_isa isa); /* "scalar", "avx2", "avx512" */

/* The caller's rounding mode and FTZ/DAZ bits, put aside: entry points of the arithmetic bracket themselves with these. */
struct fp_env {
    uint32_t saved;
};
struct fp_env fp_enter(void); /* round to nearest, subnormals kept, exceptions masked */
void fp_leave(struct fp_env env);

#endif
