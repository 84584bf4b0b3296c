/*
 * Routes that tell how things are. Those on the polling thread (health, ready, models) read atomics and constants only.
 */
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/proc.h"
#include "server/layer_map.h"
#include "server/reply.h"
#include "server/route.h"
#include "server/service.h"

void api_health(struct service *s, struct http_request *req, const struct json *body)
{
    struct json *doc = json_new_object();

    (void)body;
    json_set_z(doc, "status", "ok");
    json_set_int(doc, "changes_in_progress", atomic_load(&s->n_changing));
    json_set_bool(doc, "draining", s->is_draining);
    reply_json(req, 200, doc);
}

void api_ready(struct service *s, struct http_request *req, const struct json *body)
{
    struct json *doc;

    (void)body;
    if (s->is_draining || !s->is_ready) {
        reply_error(req, 503, s->is_draining ? "draining" : "starting", NULL,
                    s->is_draining ? "the server is shutting down" : "the model is being opened");
        return;
    }
    doc = json_new_object();
    json_set_z(doc, "status", "ready");
    reply_json(req, 200, doc);
}

void api_model_info(struct service *s, struct http_request *req, const struct json *body)
{
    struct json *doc = json_new_object(), *classes = json_new_array();
    const char *name;

    (void)body;
    json_set(doc, "model_path", json_new_string(str_of(s->ckpt_info.path)));
    json_set(doc, "model_id", json_new_string(str_of(s->model_id)));
    json_set_z(doc, "layout", s->ckpt_info.layout);
    json_set_int(doc, "bytes", (int64_t)s->ckpt_info.n_bytes);
    json_set_int(doc, "layers", s->ckpt_info.n_layers);
    json_set_int(doc, "tensors", s->ckpt_info.n_tensors);
    json_set_int(doc, "width", s->model.width);
    json_set_int(doc, "height", s->model.height);
    json_set_int(doc, "default_steps", s->model.default_steps);
    json_set_real(doc, "default_guidance", s->model.default_guidance);
    for (uint32_t i = 0; (name = pf_model_class_name(s->models[0], i)); i++)
        json_add(classes, json_new_string(str_of(name)));
    json_set(doc, "classes", classes);
    reply_json(req, 200, doc);
}

static struct json *targets_json(const struct service *s)
{
    struct json *list = json_new_array();

    for (uint32_t i = 0; i < s->ckpt_info.n_components; i++) {
        struct pf_component_info info;

        pf_checkpoint_component(s->ckpt, i, &info);
        json_add(list, json_new_string(str_of(info.name)));
    }
    return list;
}

void api_server_info(struct service *s, struct http_request *req, const struct json *body)
{
    struct json *doc = json_new_object(), *bundled = json_new_array();

    (void)body;
    json_set_z(doc, "server", "pageflip");
    json_set_z(doc, "version", pf_version());
    json_set(doc, "model_id", json_new_string(str_of(s->model_id)));
    json_set_real(doc, "uptime_s", (double)(clock_ns() - s->t_start_ns) * 1e-9);
    json_set_int(doc, "pid", getpid());
    json_set_int(doc, "workers", s->n_workers);
    json_set_int(doc, "queue_max", s->opts->n_queue_max);
    json_set_int(doc, "body_max_bytes", s->opts->n_body_max);
    json_set_bool(doc, "needs_key", auth_has_key(s->auth));
    json_set(doc, "targets", targets_json(s));
    for (size_t i = 0; i < s->opts->n_bundled; i++)
        json_add(bundled, json_new_string(str_of(s->opts->bundled[i].name)));
    json_set(doc, "bundled_adapters", bundled);
    reply_json(req, 200, doc);
}

static struct json *card(const struct service *s)
{
    struct json *it = json_new_object();

    json_set(it, "id", json_new_string(str_of(s->model_id)));
    json_set_z(it, "object", "model");
    json_set_int(it, "created", s->t_created_s);
    json_set_z(it, "owned_by", "pageflip");
    return it;
}

void api_models(struct service *s, struct http_request *req, const struct json *body)
{
    struct json *doc = json_new_object(), *data = json_new_array();

    (void)body;
    json_set_z(doc, "object", "list");
    json_add(data, card(s));
    json_set(doc, "data", data);
    reply_json(req, 200, doc);
}

void api_model(struct service *s, struct http_request *req, const struct json *body)
{
    char id[512], text[640];

    (void)body;
    if (route_param(req, id, sizeof(id)) && !strcmp(id, s->model_id)) {
        reply_json(req, 200, card(s));
        return;
    }
    (void)snprintf(text, sizeof(text), "there is no such model; this server has '%s'", s->model_id);
    reply_error(req, 404, "model_not_found", "model", text);
}

/* --------------------------------------------------------------------------------------------- status */

static void add_job(void *ctx, const struct job *job)
{
    struct json *it = json_new_object();

    json_set_z(it, "id", job->id);
    json_set_z(it, "state", job->is_running ? "running" : "queued");
    json_set_z(it, "composition", job->composition);
    json_set_int(it, "n", job->n_images);
    json_set_int(it, "step", job->i_step);
    json_set_int(it, "steps", job->n_steps);
    json_set_real(it, "age_s", (double)(clock_ns() - job->t_accepted_ns) * 1e-9);
    json_add(ctx, it);
}

struct active_list {
    struct service *s;
    struct json *list;
};

/* Copies only: the engine's lock is held. */
static void add_adapter(void *ctx, const struct pf_active_info *a)
{
    struct active_list *l = ctx;
    struct json *it = json_new_object();

    json_set(it, "nickname", json_new_string(str_of(a->nickname)));
    json_set(it, "path", book_given_path_json(l->s->book, a->nickname, a->path));
    json_set_z(it, "target", a->component);
    json_set_real(it, "strength", a->strength);
    json_set(it, "alpha", a->has_alpha ? json_new_real(a->alpha) : json_new_null());
    json_set_bool(it, "merged", a->is_merged);
    json_add(l->list, it);
}

static struct json *adapters_json(struct service *s)
{
    struct active_list l = {s, json_new_array()};

    pf_engine_each_active(s->engine, add_adapter, &l);
    return l.list;
}

static struct json *queue_json(struct service *s)
{
    struct json *it = json_new_object();
    struct queue_status q;

    queue_status(s->queue, &q);
    json_set_int(it, "waiting", q.n_waiting);
    json_set_int(it, "running", q.n_running);
    json_set_int(it, "max", q.n_max);
    json_set_int(it, "workers", q.n_workers);
    json_set_int(it, "drawn", (int64_t)q.n_drawn);
    json_set_int(it, "cancelled", (int64_t)q.n_cancelled);
    json_set_int(it, "refused", (int64_t)q.n_refused);
    json_set_real(it, "seconds_per_image", q.seconds_per_image);
    return it;
}

static struct json *memory_json(const struct pf_engine_status *e)
{
    struct json *it = json_new_object();

    json_set_int(it, "anon_bytes", (int64_t)e->anon_bytes);
    json_set_int(it, "available_bytes", (int64_t)e->available_bytes);
    json_set_int(it, "kept_bytes", (int64_t)e->n_bytes_kept);
    json_set_int(it, "resident_bytes", (int64_t)e->n_bytes_resident);
    json_set_int(it, "layers_kept", e->n_layers_kept);
    json_set_int(it, "layers_mapped", e->n_layers_mapped);
    json_set_int(it, "layers_resident", e->n_layers_resident);
    json_set(it, "plan", json_new_string(str_of(e->plan_note)));
    return it;
}

static struct json *cache_json(const struct pf_engine_status *e, uint64_t n_bytes)
{
    struct json *it = json_new_object();

    json_set(it, "dir", e->cache_dir[0] ? json_new_string(str_of(e->cache_dir)) : json_new_null());
    json_set(it, "note", json_new_string(str_of(e->cache_note)));
    json_set_int(it, "bytes", (int64_t)n_bytes);
    json_set_int(it, "budget_bytes", (int64_t)e->cache_budget_bytes);
    json_set_int(it, "builds", (int64_t)e->n_builds);
    json_set_int(it, "adoptions", (int64_t)e->n_adoptions);
    return it;
}

static struct json *build_json(const struct pf_engine_status *e)
{
    struct json *it = json_new_object();

    json_set_bool(it, "is_building", e->is_building);
    json_set_int(it, "built_bytes", (int64_t)e->n_built_bytes);
    json_set_int(it, "total_bytes", (int64_t)e->n_build_bytes);
    return it;
}

void api_status(struct service *s, struct http_request *req, const struct json *body)
{
    struct json *doc = json_new_object(), *jobs = json_new_array();
    struct pf_engine_status *e = mem_alloc(sizeof(*e));

    (void)body;
    if (!e) {
        json_free(doc);
        json_free(jobs);
        reply_error(req, 503, "nomem", NULL, "out of memory for the status");
        return;
    }
    pf_engine_status(s->engine, e);
    json_set_z(doc, "composition", e->composition);
    json_set(doc, "adapters", adapters_json(s));
    json_set_z(doc, "merge_dtype", reply_merge_dtype(e->merge_dtype));
    json_set_int(doc, "changes", (int64_t)e->n_changes);
    json_set_int(doc, "changes_in_progress", atomic_load(&s->n_changing));
    json_set_bool(doc, "draining", s->is_draining);
    json_set(doc, "build", build_json(e));
    json_set(doc, "memory", memory_json(e));
    json_set(doc, "cache", cache_json(e, pf_engine_cache_bytes(s->engine)));
    json_set(doc, "queue", queue_json(s));
    queue_each(s->queue, add_job, jobs);
    json_set(doc, "jobs", jobs);
    json_set(doc, "layers", layer_map_json(s->layers, s->engine));
    mem_free(e);
    reply_json(req, 200, doc);
}

void api_events(struct service *s, struct http_request *req, const struct json *body)
{
    struct http_response r = {.status = 200, .content_type = "text/event-stream"};
    struct json *hello = json_new_object();
    struct pf_view *view = pf_engine_view(s->engine);
    pf_error err = {0};

    (void)body;
    json_set_z(hello, "composition", pf_view_digest(view));
    pf_view_release(view);
    if (events_listen(s->events, req, hello, &r.stream, &err)) {
        reply_fill_error(&r, err.code == PF_E_BUSY ? 429 : 503, "too_many_listeners", NULL,
                         err.msg);
        reply_retry_after(&r, 5);
        http_reply(req, &r);
        return;
    }
    http_response_header(&r, "Cache-Control", "no-store");
    http_reply(req, &r);
}
