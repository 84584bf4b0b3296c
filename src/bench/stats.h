/*
 * What the measurements share: medians, and numbers of a result for printing. Not for use outside bench/.
 */
#ifndef PF_BENCH_STATS_H
#define PF_BENCH_STATS_H

#include "base/json.h"

enum { BENCH_REPS_MAX = 101 };

/* Of n values, which it sorts; n >= 1. */
double bench_median(double *values, size_t n);

/* object[key] as a number, 0 when absent. */
double bench_number(const struct json *object, const char *key);

#endif
