/*
 * Atomic counters, relaxed: they carry no data with them, and a reader may see one that is a moment older than another.
 */
#include "server/metrics.h"

#include <math.h>
#include <string.h>

const double metrics_bounds[METRICS_BUCKETS] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
                                                0.1,   0.25,   0.5,   1,    5,     30};
const char *const change_kind_names[N_CHANGE_KINDS] = {"set", "merge", "unmerge", "deactivate"};
const char *const change_way_names[N_CHANGE_WAYS] = {"base", "stream", "overlay", "inplace"};

/* Every status that this server answers with; the last column is for any other. */
static const int codes[N_METRIC_CODES] = {200, 204, 304, 400, 401, 403, 404, 405, 409, 413, 414,
                                          415, 422, 429, 431, 500, 501, 503, 504, 507, 499, 0};

int metrics_code(size_t i)
{
    return i < N_METRIC_CODES ? codes[i] : 0;
}

void metrics_add(_Atomic uint64_t *counter, uint64_t n)
{
    (void)atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

void metrics_observe(struct histogram *h, double seconds)
{
    size_t i = 0;

    while (i < METRICS_BUCKETS && seconds > metrics_bounds[i])
        i++;
    metrics_add(&h->buckets[i], 1);
    metrics_add(&h->sum_us, seconds > 0 ? (uint64_t)(seconds * 1e6) : 0);
}

void metrics_request(struct metrics *m, size_t i_route, int status, double seconds)
{
    size_t i = 0;

    while (codes[i] && codes[i] != status)
        i++;
    if (i_route >= METRICS_ROUTES_MAX)
        return;
    metrics_add(&m->requests[i_route][i], 1);
    metrics_observe(&m->latency[i_route], seconds);
}

void metrics_change(struct metrics *m, enum change_kind kind, const char *way)
{
    if (!way) {
        metrics_add(&m->changes_failed[kind], 1);
        return;
    }
    for (size_t i = 0; i < N_CHANGE_WAYS; i++)
        if (!strcmp(way, change_way_names[i]))
            metrics_add(&m->changes[kind][i], 1);
}

void metrics_head(struct strbuf *out, const char *name, const char *type, const char *help)
{
    strbuf_addf(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

void metrics_value(struct strbuf *out, const char *name, const char *labels, double v)
{
    strbuf_addf(out, *labels ? "%s{%s} " : "%s%s ", name, labels);
    if (fabs(v) < 9e15 && v == floor(v))
        strbuf_addf(out, "%lld\n", (long long)v);
    else
        strbuf_addf(out, "%.9g\n", v);
}

void metrics_histogram(struct strbuf *out, const char *name, const char *labels,
                       const struct histogram *h)
{
    const char *comma = *labels ? "," : "";
    uint64_t n = 0;

    for (size_t i = 0; i <= METRICS_BUCKETS; i++) {
        n += atomic_load_explicit(&h->buckets[i], memory_order_relaxed);
        if (i < METRICS_BUCKETS)
            strbuf_addf(out, "%s_bucket{%s%sle=\"%g\"} %llu\n", name, labels, comma,
                        metrics_bounds[i], (unsigned long long)n);
        else
            strbuf_addf(out, "%s_bucket{%s%sle=\"+Inf\"} %llu\n", name, labels, comma,
                        (unsigned long long)n);
    }
    strbuf_addf(out, *labels ? "%s_sum{%s} " : "%s_sum%s ", name, labels);
    strbuf_addf(out, "%.6f\n",
                (double)atomic_load_explicit(&h->sum_us, memory_order_relaxed) * 1e-6);
    strbuf_addf(out, *labels ? "%s_count{%s} " : "%s_count%s ", name, labels);
    strbuf_addf(out, "%llu\n", (unsigned long long)n);
}
