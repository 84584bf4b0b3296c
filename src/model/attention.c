/*
 * See attention.h. Query rows go in blocks of 64, so that scratch grows with the number of tokens and not with its square.
 */
#include "model/attention.h"
#include "model/gemm.h"
#include "model/ops.h"

#include <math.h>

#define QUERY_ROWS 64

static int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

size_t attention_scratch(int64_t n_tokens)
{
    return (size_t)min_i64(n_tokens, QUERY_ROWS) * (size_t)n_tokens;
}

void attention_head(const float *q, const float *k, const float *v, float *out, int64_t n_tokens,
                    int64_t head_dim, int64_t ld, float *scratch)
{
    float scale = (float)(1.0 / sqrt((double)head_dim));
    for (int64_t m = 0; m < n_tokens; m += QUERY_ROWS) {
        int64_t n_rows = min_i64(QUERY_ROWS, n_tokens - m);
        gemm_nt(n_rows, n_tokens, head_dim, scale, q + m * ld, ld, k, ld, scratch, n_tokens);
        ops_softmax(scratch, n_rows, n_tokens);
        gemm_nn(n_rows, head_dim, n_tokens, scratch, n_tokens, v, ld, out + m * ld, ld);
    }
}
