/*
 * Which kernels this build has, on x86-64. CMake picks this file or built_generic.c; cpu_has says what the CPU can run.
 */
#include "merge/kernel.h"

extern const struct kernel kernel_avx2;
extern const struct kernel kernel_avx512;

const struct kernel *kernel_built(enum cpu_isa isa)
{
    return isa == CPU_AVX512 ? &kernel_avx512 : isa == CPU_AVX2 ? &kernel_avx2 : &kernel_scalar;
}
