/*
 * GET /metrics: the counters of metrics.h and what the queue, the engine, the events and the kernel count, in Prometheus' text format.
 */
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/proc.h"
#include "server/layer_map.h"
#include "server/reply.h"
#include "server/route.h"
#include "server/service.h"

static void one(struct strbuf *out, const char *name, const char *type, const char *help, double v)
{
    metrics_head(out, name, type, help);
    metrics_value(out, name, "", v);
}

static double load(const _Atomic uint64_t *counter)
{
    return (double)atomic_load_explicit(counter, memory_order_relaxed);
}

static const char *label_of(size_t i_route)
{
    return i_route < n_routes ? routes[i_route].openapi : "other";
}

static const char *method_of(size_t i_route)
{
    return i_route < n_routes ? routes[i_route].method : "other";
}

static void write_requests(const struct metrics *m, struct strbuf *out)
{
    char labels[200];

    metrics_head(out, "pageflip_http_requests_total", "counter",
                 "Requests by route and status; 499: the client left.");
    for (size_t i = 0; i <= n_routes; i++)
        for (size_t k = 0; k < N_METRIC_CODES; k++) {
            double n = load(&m->requests[i][k]);

            if (n == 0)
                continue;
            (void)snprintf(labels, sizeof(labels), "method=\"%s\",route=\"%s\",code=\"%d\"",
                           method_of(i), label_of(i), metrics_code(k));
            metrics_value(out, "pageflip_http_requests_total", labels, n);
        }
    metrics_head(out, "pageflip_http_request_seconds", "histogram",
                 "Time from the headers of a request to the end of its answer.");
    for (size_t i = 0; i <= n_routes; i++) {
        (void)snprintf(labels, sizeof(labels), "method=\"%s\",route=\"%s\"", method_of(i),
                       label_of(i));
        metrics_histogram(out, "pageflip_http_request_seconds", labels, &m->latency[i]);
    }
}

static void write_changes(const struct metrics *m, struct strbuf *out)
{
    char labels[80];

    metrics_head(out, "pageflip_view_changes_total", "counter",
                 "Changes of the composition by kind and by how they are read.");
    for (size_t i = 0; i < N_CHANGE_KINDS; i++)
        for (size_t k = 0; k < N_CHANGE_WAYS; k++) {
            (void)snprintf(labels, sizeof(labels), "kind=\"%s\",way=\"%s\"", change_kind_names[i],
                           change_way_names[k]);
            metrics_value(out, "pageflip_view_changes_total", labels, load(&m->changes[i][k]));
        }
    metrics_head(out, "pageflip_view_changes_failed_total", "counter",
                 "Changes that were refused or failed; nothing was published.");
    for (size_t i = 0; i < N_CHANGE_KINDS; i++) {
        (void)snprintf(labels, sizeof(labels), "kind=\"%s\"", change_kind_names[i]);
        metrics_value(out, "pageflip_view_changes_failed_total", labels,
                      load(&m->changes_failed[i]));
    }
    metrics_head(out, "pageflip_change_effect_seconds", "histogram",
                 "Time until a changed view was published.");
    metrics_histogram(out, "pageflip_change_effect_seconds", "", &m->change_effect);
}

static void write_queue(struct service *s, struct strbuf *out)
{
    static const char *const name = "pageflip_generations_total";
    struct queue_status q;

    queue_status(s->queue, &q);
    one(out, "pageflip_queue_waiting", "gauge", "Generations that wait.", q.n_waiting);
    one(out, "pageflip_queue_running", "gauge", "Generations that are drawn.", q.n_running);
    one(out, "pageflip_queue_max", "gauge", "Generations that may wait.", q.n_max);
    metrics_head(out, name, "counter", "Generations by their end.");
    metrics_value(out, name, "end=\"drawn\"", (double)q.n_drawn);
    metrics_value(out, name, "end=\"cancelled\"", (double)q.n_cancelled);
    metrics_value(out, name, "end=\"expired\"", (double)q.n_expired);
    metrics_value(out, name, "end=\"failed\"", (double)q.n_failed);
    metrics_value(out, name, "end=\"refused\"", (double)q.n_refused);
    one(out, "pageflip_pictures_total", "counter", "Pictures drawn.", (double)q.n_images);
    one(out, "pageflip_generation_steps_total", "counter", "Sampling steps of all pictures.",
        (double)q.n_steps);
    one(out, "pageflip_passes_total", "counter",
        "Passes over the weights, each for one or more generations.", load(&s->metrics.passes));
    one(out, "pageflip_generations_shared_total", "counter",
        "Generations that shared their pass with others.", load(&s->metrics.shared_jobs));
    metrics_head(out, "pageflip_generation_wait_seconds", "histogram", "Time in the queue.");
    metrics_histogram(out, "pageflip_generation_wait_seconds", "", &s->metrics.waiting);
    metrics_head(out, "pageflip_generation_seconds", "histogram", "Time of drawing a pass.");
    metrics_histogram(out, "pageflip_generation_seconds", "", &s->metrics.drawing);
    one(out, "pageflip_weight_bytes_total", "counter", "Weight bytes that passed through views.",
        load(&s->metrics.weight_bytes));
}

static void write_engine(const struct pf_engine_status *e, uint64_t n_cache_bytes,
                         struct strbuf *out)
{
    static const char *const name = "pageflip_layers";

    one(out, "pageflip_changes_total", "counter", "Views published.", (double)e->n_changes);
    one(out, "pageflip_overlay_builds_total", "counter", "Overlays built.", (double)e->n_builds);
    one(out, "pageflip_overlay_adoptions_total", "counter", "Overlays taken from the cache.",
        (double)e->n_adoptions);
    one(out, "pageflip_overlay_build_failures_total", "counter", "Overlay builds that failed.",
        (double)e->n_build_failures);
    one(out, "pageflip_cache_evictions_total", "counter", "Overlays evicted to keep the budget.",
        (double)e->n_evictions);
    one(out, "pageflip_merged_bytes_total", "counter", "Weight bytes merged, streamed or built.",
        (double)e->n_merged_bytes);
    one(out, "pageflip_overlay_building", "gauge", "1 while an overlay is built.", e->is_building);
    one(out, "pageflip_overlay_built_bytes", "gauge", "Of the present build.",
        (double)e->n_built_bytes);
    one(out, "pageflip_overlay_build_bytes", "gauge", "Size of the present build.",
        (double)e->n_build_bytes);
    one(out, "pageflip_cache_bytes", "gauge", "Size of the overlay cache.", (double)n_cache_bytes);
    one(out, "pageflip_cache_budget_bytes", "gauge", "What the overlay cache may grow to.",
        (double)e->cache_budget_bytes);
    one(out, "pageflip_memory_anonymous_bytes", "gauge",
        "Anonymous, shared and huge memory of this process.", (double)e->anon_bytes);
    one(out, "pageflip_memory_available_bytes", "gauge", "What the memory plan has for weights.",
        (double)e->available_bytes);
    one(out, "pageflip_memory_kept_bytes", "gauge", "Weights that are mapped and not dropped.",
        (double)e->n_bytes_kept);
    one(out, "pageflip_memory_resident_bytes", "gauge", "Private copies of weights.",
        (double)e->n_bytes_resident);
    metrics_head(out, name, "gauge", "Layers by residency.");
    metrics_value(out, name, "residency=\"kept\"", e->n_layers_kept);
    metrics_value(out, name, "residency=\"mapped\"", e->n_layers_mapped);
    metrics_value(out, name, "residency=\"resident\"", e->n_layers_resident);
}

static void write_places(struct service *s, struct strbuf *out)
{
    static const char *const places[] = {"base", "stream", "overlay", "resident"};
    unsigned n[PF_COUNTOF(places)] = {0};
    struct pf_layer_status layer;
    char labels[40];

    for (uint32_t i = 0; i < s->ckpt_info.n_layers; i++)
        for (size_t k = 0;
             !pf_engine_layer_status(s->engine, i, &layer, NULL) && k < PF_COUNTOF(places); k++)
            n[k] += !strcmp(layer.place, places[k]);
    metrics_head(out, "pageflip_layer_places", "gauge", "Layers by where their bytes come from.");
    for (size_t k = 0; k < PF_COUNTOF(places); k++) {
        (void)snprintf(labels, sizeof(labels), "place=\"%s\"", places[k]);
        metrics_value(out, "pageflip_layer_places", labels, n[k]);
    }
}

static void write_process(struct service *s, struct strbuf *out)
{
    struct events_status ev;
    uint32_t n_pictures;
    uint64_t n_picture_bytes;

    events_status(s->events, &ev);
    pictures_count(s->pictures, &n_pictures, &n_picture_bytes);
    one(out, "pageflip_storage_read_bytes_total", "counter", "Bytes read from storage.",
        (double)proc_read_bytes());
    one(out, "pageflip_storage_written_bytes_total", "counter", "Bytes written to storage.",
        (double)proc_write_bytes());
    one(out, "pageflip_written_bytes_total", "counter",
        "Bytes written to files, overlays above all.", (double)file_bytes_written());
    one(out, "pageflip_connections", "gauge", "Open connections.", http_n_connections(s->http));
    one(out, "pageflip_event_listeners", "gauge", "Clients of /v1/events.", ev.n_clients);
    one(out, "pageflip_events_total", "counter", "Events published.", (double)ev.n_published);
    one(out, "pageflip_events_lost_total", "counter", "Events that slow clients lost.",
        (double)ev.n_lost);
    one(out, "pageflip_pictures_kept", "gauge", "Pictures kept for url answers.", n_pictures);
    one(out, "pageflip_pictures_kept_bytes", "gauge", "Their size.", (double)n_picture_bytes);
    one(out, "pageflip_uptime_seconds", "gauge", "Since the start of the server.",
        (double)(clock_ns() - s->t_start_ns) * 1e-9);
    one(out, "pageflip_draining", "gauge", "1 while the server is shutting down.", s->is_draining);
}

void api_metrics(struct service *s, struct http_request *req, const struct json *body)
{
    struct http_response r = {.status = 200,
                              .content_type = "text/plain; version=0.0.4; charset=utf-8"};
    struct pf_engine_status *e = mem_alloc(sizeof(*e));

    (void)body;
    strbuf_init(&r.body);
    if (!e) {
        reply_error(req, 503, "nomem", NULL, "out of memory for metrics");
        return;
    }
    pf_engine_status(s->engine, e);
    write_requests(&s->metrics, &r.body);
    write_changes(&s->metrics, &r.body);
    write_queue(s, &r.body);
    write_engine(e, pf_engine_cache_bytes(s->engine), &r.body);
    write_places(s, &r.body);
    write_process(s, &r.body);
    mem_free(e);
    http_reply(req, &r);
}
