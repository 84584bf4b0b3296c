/*
 * Work that goes on while something else is measured: one thread that draws pictures with the engine's current view where the
 * checkpoint is a model that can draw, else one that reads all weights in layer order, over and over. Used by bench/ and its tests.
 */
#ifndef PF_BENCH_LOAD_H
#define PF_BENCH_LOAD_H

#include "pageflip.h"

struct load;

/* Each round takes the engine's current view anew. n_threads: of the model. */
int load_start(struct load **out, struct pf_checkpoint *ckpt, struct pf_engine *engine,
               unsigned n_threads, pf_error *err);
/* Passes over the weights since the start, with the fraction of the one in progress. */
double load_passes(const struct load *load);
uint64_t load_pass_bytes(const struct load *load); /* of weights, in one pass */
bool load_is_drawing(const struct load *load);
/* Until so many more rounds have ended, or the load has, by an error: load_stop tells. */
void load_wait(const struct load *load, uint64_t n_rounds);
/* Ends it at the next layer border and frees it; its error, if it had one. NULL: PF_OK. */
int load_stop(struct load *load, pf_error *err);

#endif
