/*
 * The sampler's times: flow matching by Euler steps. What scheduler_config.json may say is little, and everything else is refused
 * by name. Immutable after reading.
 */
#ifndef PF_MODEL_SCHEDULE_H
#define PF_MODEL_SCHEDULE_H

#include "base/err.h"

struct json;

struct schedule {
    double n_train_steps; /* timestep = n_train_steps x t */
};

/* config NULL: defaults. PF_E_UNSUPPORTED, PF_E_RANGE. */
int schedule_read(const struct json *config, const char *path, struct schedule *out, pf_error *err);
/* t_k = 1 - k/N, k = 0..N */
double schedule_time(uint32_t i_step, uint32_t n_steps);

#endif
