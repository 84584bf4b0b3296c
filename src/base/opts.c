/*
 * The one place that looks at `size`. A longer struct, of a newer header, is cut: the library can do nothing with the rest.
 */
#include "base/opts.h"

#include <stdint.h>
#include <string.h>

void opts_read(void *out, size_t n_bytes, const void *opts)
{
    const uint32_t n_all = (uint32_t)n_bytes;
    uint32_t n = 0;
    memset(out, 0, n_bytes);
    if (opts) {
        memcpy(&n, opts, sizeof n);
        memcpy(out, opts, n > 0 && n < n_all ? n : n_all);
    }
    memcpy(out, &n_all, sizeof n_all);
}
