/*
 * base/cpu.c: features as the compiler's own runtime reports them, and the floating-point environment put aside and back.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <float.h>

#include "base/cpu.h"
#include "base/os_cpu.h"

static void names_instruction_sets(void **state)
{
    (void)state;
    assert_string_equal(cpu_isa_name(CPU_SCALAR), "scalar");
    assert_string_equal(cpu_isa_name(CPU_AVX2), "avx2");
    assert_string_equal(cpu_isa_name(CPU_AVX512), "avx512");
    assert_string_equal(cpu_isa_name((enum cpu_isa)99), "?");
    assert_true(cpu_has(CPU_SCALAR));
    assert_true(!cpu_has(CPU_AVX512) || cpu_has(CPU_AVX2));
}

#if defined(__x86_64__)
static void agrees_with_the_compilers_runtime(void **state)
{
    (void)state;
    __builtin_cpu_init();
    if (cpu_has(CPU_AVX2))
        assert_true(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
    if (cpu_has(CPU_AVX512))
        assert_true(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"));
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        assert_true(cpu_has(CPU_AVX512));
}

static void keeps_subnormals_and_rounds_to_nearest_inside(void **state)
{
    (void)state;
    const uint32_t saved = os_fp_get();
    os_fp_set(saved | 0x8040u | 0x4000u); /* FTZ, DAZ, upward */
    volatile float tiny = FLT_MIN, half = 0.5f, one = 1.0f, eps = FLT_EPSILON / 4;
    volatile float flushed = tiny * half, up = one + eps;
    const struct fp_env env = fp_enter();
    volatile float kept = tiny * half, nearest = one + eps;
    fp_leave(env);
    volatile float flushed_again = tiny * half, up_again = one + eps;
    os_fp_set(saved);
    assert_true(flushed == 0 && flushed_again == 0);
    assert_true(kept > 0);
    assert_true(up > 1 && up_again > 1);
    assert_true(nearest == 1);
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_instruction_sets),
#if defined(__x86_64__)
        cmocka_unit_test(agrees_with_the_compilers_runtime),
        cmocka_unit_test(keeps_subnormals_and_rounds_to_nearest_inside),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
