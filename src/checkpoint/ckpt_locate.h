/*
 * Between ckpt_locate.c (which place is meant) and weigh.c (what one directory offers). Private to src/checkpoint/.
 */
#ifndef PF_CHECKPOINT_CKPT_LOCATE_H
#define PF_CHECKPOINT_CKPT_LOCATE_H

#include "checkpoint/checkpoint_int.h"

/* Why a file of this name is refused and what to do about it ("is a pickle file: ..."), or NULL. */
const char *ckpt_foreign_hint(struct str name);

/*
 * Chooses the weights of one directory and sets path and index_path or files of `out`. Where there are no safetensors at all
 * it succeeds with out->path NULL, and out_foreign is the path of weights of another kind, or NULL. PF_E_AMBIGUOUS,
 * PF_E_NOTFOUND (an incomplete set of shards), PF_E_IO.
 */
int ckpt_weigh(struct arena *a, const char *dir, struct ckpt_place *out, const char **out_foreign,
               pf_error *err);

#endif
