/*
 * Shapes: counts with overflow checks and the folding to rows x cols. Ranks and dimensions may come from a file; whoever
 * parses them has bounded the rank, and the counts here refuse negative dimensions.
 */
#include "tensor/shape.h"

#include "base/mem.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

bool shape_n_elements(const struct shape *s, uint64_t *out_n)
{
    uint64_t n = 1;
    for (int32_t i = 0; i < s->rank; i++)
        if (s->dim[i] < 0 || !mul_u64(n, (uint64_t)s->dim[i], &n))
            return false;
    *out_n = n;
    return true;
}

bool shape_n_bytes(const struct shape *s, int32_t dtype, uint64_t *out_n_bytes)
{
    uint64_t n, n_bits;
    if (pf_dtype_bits(dtype) == 0 || !shape_n_elements(s, &n) ||
        !mul_u64(n, pf_dtype_bits(dtype), &n_bits) || n_bits % 8 != 0)
        return false;
    *out_n_bytes = n_bits / 8;
    return true;
}

bool shape_eq(const struct shape *a, const struct shape *b)
{
    if (a->rank != b->rank)
        return false;
    for (int32_t i = 0; i < a->rank; i++)
        if (a->dim[i] != b->dim[i])
            return false;
    return true;
}

int64_t shape_rows(const struct shape *s)
{
    return s->rank > 0 ? s->dim[0] : 1;
}

int64_t shape_cols(const struct shape *s)
{
    uint64_t n = 1;
    for (int32_t i = 1; i < s->rank; i++)
        if (!mul_u64(n, (uint64_t)s->dim[i], &n) || n > INT64_MAX)
            return INT64_MAX; /* only beside a 0 in front, where shape_n_elements succeeds */
    return (int64_t)n;
}

const char *shape_text(const struct shape *s, char *buf, size_t n_buf)
{
    char text[2 + PF_MAX_RANK * 22];
    size_t n = 0;
    if (n_buf == 0)
        return "";
    text[n++] = '[';
    for (int32_t i = 0; i < s->rank && i < PF_MAX_RANK; i++)
        n += (size_t)snprintf(text + n, sizeof(text) - n, "%s%" PRId64, i > 0 ? ", " : "",
                              s->dim[i]);
    text[n++] = ']';
    size_t n_kept = n < n_buf ? n : n_buf - 1;
    memcpy(buf, text, n_kept);
    buf[n_kept] = '\0';
    if (n_kept < n && n_kept >= 2)
        memcpy(buf + n_kept - 2, "..", 2);
    return buf;
}
