/*
 * Fills a cache for the tests of `pageflip cache`: builds the overlay of one adapter on a model and prints its digest.
 *
 *     make_overlay CACHE MODEL ADAPTER STRENGTH whole|f32|partial|held
 *
 * partial: stops after a layer. held: keeps it mapped until standard input ends.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/pool.h"
#include "overlay/overlay.h"

static bool one_layer(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    (void)ctx;
    (void)what;
    return done * 8 <= total; /* of 8 blocks, the first */
}

int main(int argc, char **argv)
{
    struct pf_checkpoint *ckpt = NULL;
    struct pf_adapter *adapter = NULL;
    struct pf_composition *comp = NULL;
    struct overlay_store *s = NULL;
    struct overlay *o = NULL;
    struct pool *pool = NULL;
    pf_error err = {0};
    if (argc != 6)
        return 2;
    bool is_partial = !strcmp(argv[5], "partial");
    int rc = pf_checkpoint_open(argv[2], NULL, &ckpt, &err);
    if (rc == PF_OK)
        rc = pf_adapter_open(argv[3], &adapter, &err);
    struct pf_lora l = {.adapter = adapter, .strength = strtod(argv[4], NULL)};
    struct pf_composition_opts co = {
        .size = sizeof co, .merge_dtype = strcmp(argv[5], "f32") ? PF_MERGE_BASE : PF_MERGE_F32};
    if (rc == PF_OK)
        rc = pf_composition_new(ckpt, &l, 1, &co, &comp, &err);
    if (rc == PF_OK)
        rc = overlay_store_open(argv[1], 0, &s, &err);
    if (rc == PF_OK)
        rc = pool_new(1, &pool, &err);
    struct overlay_build_opts bo = {.pool = pool, .progress = is_partial ? one_layer : NULL};
    if (rc == PF_OK)
        rc = overlay_build(s, comp, &bo, NULL, &err);
    if (is_partial && rc == PF_E_CANCELLED)
        rc = PF_OK;
    if (rc == PF_OK && !is_partial)
        rc = overlay_adopt(s, comp, OVERLAY_VERIFY_SAMPLED, &o, &err);
    if (rc == PF_OK)
        (void)printf("%s\n", comp->digest_hex);
    else
        (void)fprintf(stderr, "make_overlay: %s\n", err.msg);
    (void)fflush(stdout);
    if (!strcmp(argv[5], "held"))
        while (getchar() != EOF) {
        }
    overlay_unref(o);
    overlay_store_close(s);
    pf_composition_free(comp);
    pf_adapter_close(adapter);
    pf_checkpoint_close(ckpt);
    pool_free(pool);
    return rc != PF_OK;
}
