/*
 * What the measurements share: medians, and numbers of a result for printing. Not for use outside bench/.
 */
#ifndef PF_BENCH_STATS_H
#define PF_BENCH_STATS_H

#include "base/json.h"

enum { BENCH_REPS_MAX = 101 };

/* Of n values, which it sorts; n >= 1. */
double bench_median(double *values, size_t n);

/* Of a[i] / b[i], each of one repetition: a machine that slows down slows both. Sorts nothing of the caller's; n >= 1. */
double bench_median_ratio(const double *a, const double *b, size_t n);

/* object[key] as a number, 0 when absent. */
double bench_number(const struct json *object, const char *key);

#endif
