/*
 * Medians and result fields, shared by the measurements of bench/.
 */
#include "bench/stats.h"

#include <assert.h>

double bench_median(double *values, size_t n)
{
    assert(n >= 1);
    for (size_t i = 1; i < n; i++) { /* a few dozen at most */
        const double x = values[i];
        size_t j = i;
        for (; j > 0 && values[j - 1] > x; j--)
            values[j] = values[j - 1];
        values[j] = x;
    }
    return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

double bench_median_ratio(const double *a, const double *b, size_t n)
{
    double ratios[BENCH_REPS_MAX];
    for (size_t i = 0; i < n; i++)
        ratios[i] = a[i] / b[i];
    return bench_median(ratios, n);
}

double bench_number(const struct json *object, const char *key)
{
    return json_number(json_get(object, key));
}
