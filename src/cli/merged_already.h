/*
 * Is what stands under an output's name already what a merge would write there? For processes that share a merge and start late:
 * the last of the others may have published everything by then. Nothing is believed: this process's share is compared, byte by byte.
 */
#ifndef PF_CLI_MERGED_ALREADY_H
#define PF_CLI_MERGED_ALREADY_H

#include "base/err.h"

/* Names, dtypes and shapes of all tensors, and the bytes of every n_parts-th from i_part (from 0) on. Two panels of memory. */
bool merged_already(struct pf_checkpoint *ckpt, struct pf_composition *comp, const char *path,
                    uint32_t i_part, uint32_t n_parts);

#endif
