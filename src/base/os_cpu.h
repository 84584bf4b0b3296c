/*
 * The processor-specific half of base/cpu.c: instruction sets that CPU and operating system both offer, and the
 * floating-point control word. One of the few places where #if on the architecture is allowed; a port adds a branch here.
 */
#ifndef PF_BASE_OS_CPU_H
#define PF_BASE_OS_CPU_H

#include <stdbool.h>
#include <stdint.h>

#if defined(__x86_64__)

#include <cpuid.h>
#include <xmmintrin.h>

/* Rounding to nearest, all exceptions masked, FTZ and DAZ off: the value a process starts with. */
#define OS_FP_DEFAULT 0x1f80u

static inline uint32_t os_fp_get(void)
{
    return _mm_getcsr();
}

static inline void os_fp_set(uint32_t word)
{
    _mm_setcsr(word);
}

/* Which register states the system saves (XCR0); 0 when it saves none beyond SSE. Needs CPUID.1:ECX.OSXSAVE. */
static inline uint64_t os_xcr0(void)
{
    uint32_t lo = 0, hi = 0;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

static inline void os_cpu_isa(bool *out_avx2, bool *out_avx512)
{
    const uint32_t fma = 1u << 12, osxsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29;
    /* F DQ BW VL */
    const uint32_t avx2 = 1u << 5, avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    uint32_t a = 0, b = 0, c = 0, d = 0, b7 = 0, c7 = 0;
    *out_avx2 = *out_avx512 = false;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & osxsave) ||
        !__get_cpuid_count(7, 0, &a, &b7, &c7, &d))
        return;
    const uint64_t saved = os_xcr0(), ymm = 0x6, zmm = 0xe6;
    const uint32_t need = fma | avx | f16c;
    *out_avx2 = (saved & ymm) == ymm && (c & need) == need && (b7 & avx2);
    *out_avx512 = *out_avx2 && (saved & zmm) == zmm && (b7 & avx512) == avx512;
}

#elif defined(__aarch64__)

#define OS_FP_DEFAULT 0u

static inline uint32_t os_fp_get(void)
{
    uint64_t word;
    __asm__ volatile("mrs %0, fpcr" : "=r"(word));
    return (uint32_t)word;
}

static inline void os_fp_set(uint32_t word)
{
    const uint64_t w = word;
    __asm__ volatile("msr fpcr, %0" : : "r"(w));
}

static inline void os_cpu_isa(bool *out_avx2, bool *out_avx512)
{
    *out_avx2 = *out_avx512 = false;
}

#else
#error "add this architecture to base/os_cpu.h"
#endif

#endif
