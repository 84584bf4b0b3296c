/*
 * How a measurement of `pageflip bench` ends: with an error, interrupted, or with a result that is one JSON document, printed as such
 * or as text. Nothing is measured here.
 */
#ifndef PF_CLI_MEASURE_H
#define PF_CLI_MEASURE_H

#include "cli/out.h"
#include <stdio.h>

typedef void (*measure_print_fn)(const struct json *result, FILE *f);

/* rc and err are the measurement's; result, where rc is PF_OK, is freed. The exit status. */
int measure_end(const struct out *o, int rc, struct json *result, measure_print_fn print,
                const pf_error *err);

#endif
