/*
 * CPU features and the floating-point environment. Features are asked once per process; the environment is saved and
 * restored around every entry point of the arithmetic, because callers (PyTorch among them) set flush-to-zero. Must never
 * touch anything but the control word.
 */
#include "base/cpu.h"

#include <pthread.h>

#include "base/os_cpu.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool has_avx2, has_avx512;

static void ask(void)
{
    os_cpu_isa(&has_avx2, &has_avx512);
}

bool cpu_has(enum cpu_isa isa)
{
    (void)pthread_once(&once, ask); /* cannot fail with a static control */
    switch (isa) {
    case CPU_SCALAR:
        return true;
    case CPU_AVX2:
        return has_avx2;
    case CPU_AVX512:
        return has_avx512;
    }
    return false;
}

const char *cpu_isa_name(enum cpu_isa isa)
{
    static const char *const names[] = {"scalar", "avx2", "avx512"};
    return (unsigned)isa < sizeof names / sizeof *names ? names[isa] : "?";
}

struct fp_env fp_enter(void)
{
    const struct fp_env env = {.saved = os_fp_get()};
    os_fp_set(OS_FP_DEFAULT);
    return env;
}

void fp_leave(struct fp_env env)
{
    os_fp_set(env.saved);
}
