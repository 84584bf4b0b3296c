/*
 * Softmax attention of one head of one sample: the unit that the pool hands out. The shapes of its products are fixed by
 * the model, so its bytes depend on q, k and v alone. No allocation; scores live in the worker's scratch.
 */
#ifndef PF_MODEL_ATTENTION_H
#define PF_MODEL_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

/* Floats of scratch for n_tokens: scores are computed for a block of query rows at a time. */
size_t attention_scratch(int64_t n_tokens);

/* q, k, v, out: (n_tokens, head_dim) inside rows of ld floats. out = softmax(q k^T / sqrt(head_dim)) v */
void attention_head(const float *q, const float *k, const float *v, float *out, int64_t n_tokens,
                    int64_t head_dim, int64_t ld, float *scratch);

#endif
