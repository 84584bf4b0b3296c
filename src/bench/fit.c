/*
 * Which matrices of a checkpoint an adapter would usually change, as a plan that make_fill.c fills with noise.
 */
#include "bench/fit.h"

#include <math.h>
#include <string.h>

#include "bench/make_int.h"
#include "checkpoint/checkpoint.h"
#include "tensor/dtype.h"

enum { RANK_DEFAULT = 64, DIM_MIN = 16 };
#define DELTA_RMS 1e-3 /* relative to the weights, as bench_make */

static bool is_target(const struct pf_checkpoint *ckpt, const struct ckpt_tensor *t)
{
    return t->shape.rank == 2 && dtype_is_mergeable(t->dtype) && t->shape.dim[0] >= DIM_MIN &&
           t->shape.dim[1] >= DIM_MIN && !ckpt->layers[t->i_layer].is_stem &&
           str_ends(t->name, ".weight") && strstr(t->name.p, "embed") == NULL;
}

static int plan_targets(struct plan *base, const struct pf_checkpoint *ckpt, pf_error *err)
{
    const int64_t i_named = ckpt_component_find(ckpt, str_of("transformer"));
    const uint32_t i_component = i_named < 0 ? 0 : (uint32_t)i_named;
    for (uint32_t i = 0; i < ckpt->n_tensors; i++) {
        const struct ckpt_tensor *t = &ckpt->tensors[i];
        if (t->i_component != i_component || !is_target(ckpt, t))
            continue;
        void *targets = base->targets;
        if (!mem_grow(&targets, &base->cap_targets, base->n_targets, sizeof *base->targets))
            return err_nomem(err, sizeof *base->targets, "a list of targets");
        base->targets = targets;
        base->targets[base->n_targets++] = (struct plan_target){
            str_cut_back(t->name, strlen(".weight")), t->shape.dim[0], t->shape.dim[1]};
    }
    if (base->n_targets == 0)
        return err_set(err, PF_E_INVALID,
                       "'%s' has no matrices in repeated blocks that an adapter would change: name "
                       "two adapters",
                       ckpt->path);
    return PF_OK;
}

int bench_fit(struct pf_checkpoint *ckpt, const char *out, const struct bench_fit_opts *opts,
              uint32_t *out_n_targets, pf_error *err)
{
    const double rank = opts->rank == 0 ? RANK_DEFAULT : opts->rank;
    const struct plan_meta meta[] = {{"format", "pt"}};
    struct fill_opts fill = {.seed = opts->seed,
                             .progress = opts->progress,
                             .progress_ctx = opts->progress_ctx,
                             .meta = meta,
                             .n_meta = PF_COUNTOF(meta)};
    struct plan base, p;
    uint64_t n_bytes;
    plan_init(&base, PF_BF16, BENCH_WEIGHT_RMS);
    /* The entries of B A have variance rank a^2 b^2, as in make.c. */
    plan_init(&p, PF_BF16, sqrt(DELTA_RMS * BENCH_WEIGHT_RMS / sqrt(rank)));
    int rc = plan_targets(&base, ckpt, err);
    if (rc == PF_OK)
        rc = plan_adapter(&p, &base, "native", (uint32_t)rank, rank, err);
    if (rc == PF_OK)
        rc = pool_new(opts->n_threads, &fill.pool, err);
    if (rc == PF_OK)
        rc = fill_file(out, &p, &fill, &n_bytes, err);
    if (rc == PF_OK && out_n_targets)
        *out_n_targets = (uint32_t)base.n_targets;
    pool_free(fill.pool);
    plan_release(&p);
    plan_release(&base);
    return rc;
}
