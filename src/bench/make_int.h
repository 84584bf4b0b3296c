/*
 * What the files of `bench make` share: the plan (which tensors, which linears) and the writer that fills a planned file with
 * seeded noise. Included by make*.c alone.
 */
#ifndef PF_BENCH_MAKE_INT_H
#define PF_BENCH_MAKE_INT_H

#include "base/mem.h"
#include "base/pool.h"
#include "base/str.h"
#include "bench/make.h"
#include "tensor/shape.h"

struct plan_tensor {
    struct str name; /* NUL-terminated too */
    struct shape shape;
    /* An F32 with this value in every element, instead of noise in the plan's dtype */
    bool is_constant;
    float constant;
};

/* A linear that an adapter changes: W (n_out, n_in). */
struct plan_target {
    struct str module;
    int64_t n_out, n_in;
};

/* Tensors in file order, constants first so that every element is aligned in the file. One thread. */
struct plan {
    struct arena arena;
    struct plan_tensor *tensors;
    struct plan_target *targets;
    size_t n_tensors, cap_tensors, n_targets, cap_targets;
    bool is_failed; /* memory ran out somewhere: checked once, by plan_ok */
    int32_t dtype;  /* of the noise */
    double rms;
    /* dit and emoji */
    int64_t dim, head_dim, n_blocks;
    const char *const *target_names; /* suffixes of targets, NULL at the end */
};

void plan_init(struct plan *p, int32_t dtype, double rms);
void plan_release(struct plan *p);

/* The checkpoint of a shape. PF_E_INVALID for an unknown name or a scale that makes no sense. */
int plan_shape(struct plan *p, const struct bench_make_opts *opts, pf_error *err);
/* The adapter for the targets of `base`: names as the dialect spells them. */
int plan_adapter(struct plan *p, const struct plan *base, const char *dialect, uint32_t rank,
                 double alpha, pf_error *err);

struct fill_opts {
    uint64_t seed;
    struct pool *pool;
    pf_progress_fn progress;
    void *progress_ctx;
    const struct plan_meta *meta;
    size_t n_meta;
};

struct plan_meta {
    const char *key, *value;
};

/* Lays the plan out, checks that there is room, fills the file panel by panel, publishes it as `path`. */
int fill_file(const char *path, const struct plan *p, const struct fill_opts *opts,
              uint64_t *out_n_bytes, pf_error *err);

#endif
