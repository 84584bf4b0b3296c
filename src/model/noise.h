/*
 * The starting noise: the numbers that torch.randn draws on the CPU for a seed, so that a picture can be compared with
 * PyTorch's. Called by the sampler, one picture after another from one generator. Owned by the caller; one thread.
 */
#ifndef PF_MODEL_NOISE_H
#define PF_MODEL_NOISE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NOISE_STATE 624

struct noise {
    uint32_t mt[NOISE_STATE];
    unsigned i_next;
    bool has_spare; /* the short path draws two numbers at a time */
    double spare;
};

void noise_seed(struct noise *g, uint64_t seed); /* taken mod 2^32 */

/*
 * n numbers, as one torch.randn of n elements draws them. n >= 16 and n < 16 are different paths there and here. Draws that are
 * multiples of 16 may be cut anywhere at a multiple of 16 without changing a number; others may not.
 */
void noise_fill(struct noise *g, float *out, size_t n);

#endif
