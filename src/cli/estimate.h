/*
 * What a merge will need: disk from the sizes, memory and time from a short measurement of merged panels being read.
 * Nothing is written.
 */
#ifndef PF_CLI_ESTIMATE_H
#define PF_CLI_ESTIMATE_H

#include "base/json.h"

struct estimate {
    uint64_t n_disk_bytes, n_free_bytes; /* free in the working directory; 0: unknown */
    uint64_t n_memory_bytes;
    uint32_t n_threads;
    double seconds;
};

/* n_threads 0: as many as a merge takes by itself. Takes up to a quarter of a second. */
int estimate_merge(struct pf_checkpoint *ckpt, struct pf_composition *comp, uint32_t n_threads,
                   struct estimate *out, pf_error *err);
void estimate_json(struct json *doc, const struct estimate *est);

#endif
