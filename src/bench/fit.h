/*
 * An adapter of noise that fits a given checkpoint, for measuring changes where no adapter is at hand. Used by bench/.
 */
#ifndef PF_BENCH_FIT_H
#define PF_BENCH_FIT_H

#include "pageflip.h"

struct bench_fit_opts {
    uint32_t rank; /* 0: 64 */
    uint64_t seed;
    unsigned n_threads; /* 0: one per CPU that this process may use */
    pf_progress_fn progress;
    void *progress_ctx;
};

/*
 * Writes `out`, a file that must not exist: bf16 factors for every matrix of the repeated blocks (embeddings aside) of component
 * "transformer", or of the only one. alpha = rank, delta as `bench make` makes it. *out_n_targets: linears that it changes. PF_E_INVALID
 * when there is none, and what writing gives.
 */
int bench_fit(struct pf_checkpoint *ckpt, const char *out, const struct bench_fit_opts *opts,
              uint32_t *out_n_targets, pf_error *err);

#endif
