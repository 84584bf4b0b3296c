/*
 * Where the bytes of each layer are: how they are read (base, overlay, stream, resident), and whether the page cache has them. The
 * kernel tells the truth about the page cache only to those who own a file or may write it; for others the answer is "unknown".
 */
#ifndef PF_SERVER_LAYER_MAP_H
#define PF_SERVER_LAYER_MAP_H

#include "base/json.h"

struct layer_map;

int layer_map_new(struct pf_checkpoint *ckpt, struct layer_map **out_map, pf_error *err);
void layer_map_free(struct layer_map *m);

/* All layers, as a list for the status. */
struct json *layer_map_json(struct layer_map *m, struct pf_engine *engine);

#endif
