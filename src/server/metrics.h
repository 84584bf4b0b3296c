/*
 * Counters and histograms in Prometheus' text format. Fixed tables, lock-free, any thread. What other parts count themselves (queue,
 * engine, events) is read from them when the text is written, by metrics_api.c.
 */
#ifndef PF_SERVER_METRICS_H
#define PF_SERVER_METRICS_H

#include "base/str.h"
#include <stdatomic.h>

#define METRICS_ROUTES_MAX 40
#define METRICS_BUCKETS    12

/* Upper bounds in seconds; one more for everything above. */
extern const double metrics_bounds[METRICS_BUCKETS];

struct histogram {
    _Atomic uint64_t buckets[METRICS_BUCKETS + 1];
    _Atomic uint64_t sum_us;
};

enum change_kind { CHANGE_SET, CHANGE_MERGE, CHANGE_UNMERGE, CHANGE_DEACTIVATE, N_CHANGE_KINDS };
#define N_CHANGE_WAYS 4
extern const char *const change_kind_names[N_CHANGE_KINDS];
extern const char *const change_way_names[N_CHANGE_WAYS];

#define N_METRIC_CODES 24
struct metrics {
    _Atomic uint64_t requests[METRICS_ROUTES_MAX][N_METRIC_CODES];
    struct histogram latency[METRICS_ROUTES_MAX];
    struct histogram waiting, drawing, change_effect;
    _Atomic uint64_t changes[N_CHANGE_KINDS][N_CHANGE_WAYS];
    _Atomic uint64_t changes_failed[N_CHANGE_KINDS];
    _Atomic uint64_t weight_bytes, shared_jobs, passes;
};

void metrics_request(struct metrics *m, size_t i_route, int status, double seconds);
void metrics_observe(struct histogram *h, double seconds);
/* Way NULL: it failed */
void metrics_change(struct metrics *m, enum change_kind kind, const char *way);
void metrics_add(_Atomic uint64_t *counter, uint64_t n);

/* Code of column i, 0 past the end. */
int metrics_code(size_t i);

/* "# HELP ..." and "# TYPE ..." */
void metrics_head(struct strbuf *out, const char *name, const char *type, const char *help);
void metrics_value(struct strbuf *out, const char *name, const char *labels, double v);
/* labels: "route=\"x\"" or "". */
void metrics_histogram(struct strbuf *out, const char *name, const char *labels,
                       const struct histogram *h);

#endif
