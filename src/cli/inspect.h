/*
 * The two halves of `pageflip inspect`: a checkpoint, and an adapter. Each reports as text or into a JSON object.
 */
#ifndef PF_CLI_INSPECT_H
#define PF_CLI_INSPECT_H

#include "base/json.h"
#include "cli/out.h"

/* ckpt is not const because its content id is computed on demand. is_long: every tensor is listed. */
int inspect_checkpoint(const struct out *o, struct pf_checkpoint *ckpt, bool is_long,
                       struct json *doc, pf_error *err);
void inspect_adapter(const struct out *o, const struct pf_adapter *adapter, bool is_long,
                     struct json *doc);

#endif
