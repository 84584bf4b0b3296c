/*
 * Which kernels this build has, where no vector kernel was written for the architecture: the scalar one. CMake picks this
 * file or built_x86.c.
 */
#include "merge/kernel.h"

#include <stddef.h>

const struct kernel *kernel_built(enum cpu_isa isa)
{
    return isa == CPU_SCALAR ? &kernel_scalar : NULL;
}
