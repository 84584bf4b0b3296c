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

struct layer_state {
    struct pf_layer_info info;
    const char *component;
    const char *place, *residency;
    const char *cached;                     /* "yes", "partly", "no", "unknown" */
    double fraction;                        /* of sampled pages; only when known */
    uint64_t n_merged_bytes, n_built_bytes; /* as pf_layer_status has them */
};

/* One layer as the current view of the engine has it. Samples at most LAYER_PAGES pages. */
#define LAYER_PAGES 128
int layer_map_state(struct layer_map *m, struct pf_engine *engine, struct pf_view *view,
                    uint32_t i_layer, struct layer_state *out, pf_error *err);
/* All layers, as a list for the status. */
struct json *layer_map_json(struct layer_map *m, struct pf_engine *engine);

#endif
