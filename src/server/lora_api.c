/*
 * Routes that change the composition, and the list of adapters. Each runs on a thread of its own; the engine does changes one after
 * another and publishes all or nothing. Adapters that a failed request loaded are taken back.
 */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/proc.h"
#include "server/lora_request.h"
#include "server/reply.h"
#include "server/route.h"
#include "server/service.h"

#define MIB 1048576.0

/* -------------------------------------------------------------------------------------------- replies */

static struct json *report_json(const char *message, const struct pf_change_report *r)
{
    struct json *doc = json_new_object();
    char warning[160];

    json_set_z(doc, "status", "ok");
    json_set(doc, "message", json_new_string(str_of(message)));
    json_set_z(doc, "composition", r->composition);
    json_set_int(doc, "layers_changed", r->n_layers_changed);
    json_set_int(doc, "tensors_changed", r->n_tensors_changed);
    json_set_int(doc, "keys_matched", r->n_keys_matched);
    json_set_int(doc, "keys_unmatched", r->n_keys_unmatched);
    json_set_real(doc, "took_ms", r->took_ms);
    json_set_real(doc, "effect_ms", r->effect_ms);
    json_set_real(doc, "peak_anon_mib", (double)r->peak_anon_bytes / MIB);
    json_set_z(doc, "way", r->way);
    json_set_real(doc, "survival", r->fidelity.survival);
    json_set_real(doc, "fraction_changed", r->fidelity.fraction_changed);
    if (r->n_tensors_changed && r->fidelity.survival < PF_SURVIVAL_WARN) {
        (void)snprintf(warning, sizeof(warning),
                       "only %.0f %% of the change survives rounding to the dtype of the base; "
                       "merge_dtype \"f32\" keeps all of it",
                       100 * r->fidelity.survival);
        json_set_z(doc, "warning", warning);
    }
    if (r->note[0])
        json_set(doc, "note", json_new_string(str_of(r->note)));
    return doc;
}

static void publish_view(struct service *s, enum change_kind kind, const struct pf_change_report *r)
{
    struct json *data = json_new_object();

    json_set_z(data, "kind", change_kind_names[kind]);
    json_set_z(data, "composition", r->composition);
    json_set_z(data, "way", r->way);
    json_set_int(data, "layers_changed", r->n_layers_changed);
    json_set_real(data, "effect_ms", r->effect_ms);
    events_publish(s->events, "view", data);
}

/* How a change ends: counted, told to listeners, answered. */
static void finish(struct service *s, struct http_request *req, enum change_kind kind, int rc,
                   const char *message, const struct pf_change_report *report, const pf_error *err)
{
    (void)atomic_fetch_sub(&s->n_changing, 1);
    metrics_change(&s->metrics, kind, rc ? NULL : report->way);
    if (rc) {
        reply_pf_error(req, rc == PF_E_NOTFOUND ? "target" : NULL, err);
        return;
    }
    metrics_observe(&s->metrics.change_effect, report->effect_ms * 1e-3);
    publish_view(s, kind, report);
    reply_json(req, 200, report_json(message, report));
}

/* ------------------------------------------------------------------------------------------- set_lora */

static void set_message(const struct lora_request *lr, struct strbuf *out)
{
    bool is_same = true;

    strbuf_adds(out, "Successfully set LoRA adapter(s): ");
    for (size_t i = 0; i < lr->n; i++) {
        strbuf_addf(out, "%s%s", i ? ", " : "", lr->loras[i].nickname);
        is_same = is_same && lr->loras[i].strength == lr->loras[0].strength;
    }
    strbuf_addf(out, " (target: %s, strength: ", lr->targets ? lr->targets : "all");
    for (size_t i = 0; i < (is_same ? 1 : lr->n); i++)
        strbuf_addf(out, "%s%g", i ? ", " : "", lr->loras[i].strength);
    strbuf_adds(out, ")");
}

static bool names_paths(const struct lora_request *lr)
{
    for (size_t i = 0; i < lr->n; i++)
        if (lr->paths[i])
            return true;
    return false;
}

/* Loads what the request names. On failure nothing of it stays. */
static int load_all(struct service *s, const struct lora_request *lr, struct book_undo *undo,
                    char *param, size_t n_param, int *out_status, pf_error *err)
{
    for (size_t i = 0; i < lr->n; i++) {
        int rc = book_load(s->book, lr->loras[i].nickname, lr->paths[i], undo, out_status, err);

        if (rc) {
            (void)snprintf(param, n_param, "%s", lr->paths[i] ? "lora_path" : "lora_nickname");
            book_undo(s->book, undo);
            return rc;
        }
    }
    return PF_OK;
}

struct path_lock {
    struct lora_book *book;
    bool is_held;
};

/* Nicknames have become adapters: from here on it may wait for minutes, until another change ends it. */
static void let_paths_go(void *ctx)
{
    struct path_lock *lock = ctx;

    if (lock->is_held)
        book_unlock_paths(lock->book);
    lock->is_held = false;
}

static void set_loaded(struct service *s, struct http_request *req, const struct lora_request *lr,
                       struct book_undo *undo, bool is_locked)
{
    struct path_lock lock = {s->book, is_locked};
    struct pf_change_opts opts = {.size = sizeof(opts),
                                  .allow_unmatched = s->opts->allow_unmatched,
                                  .merge_dtype = lr->merge_dtype,
                                  .way = lr->way,
                                  .published = let_paths_go,
                                  .published_ctx = &lock};
    struct pf_change_report report = {0};
    pf_error err = {0};
    struct strbuf message;
    int rc;

    rc = pf_engine_set(s->engine, lr->loras, lr->n, lr->targets, &opts, &report, &err);
    if (rc)
        book_undo(s->book, undo);
    let_paths_go(&lock);
    strbuf_init(&message);
    set_message(lr, &message);
    finish(s, req, CHANGE_SET, rc, strbuf_z(&message), &report, &err);
    strbuf_release(&message);
}

void api_set_lora(struct service *s, struct http_request *req, const struct json *body)
{
    struct lora_request lr;
    struct book_undo undo = {0};
    pf_error err = {0};
    char param[32] = "";
    int status = 422, rc = lora_request_parse(body, s->opts->merge_dtype, &lr, &err);
    bool is_locked = !rc && names_paths(&lr);

    if (rc) {
        reply_error(req, reply_status_of(rc), "invalid_field", lr.param, err.msg);
        lora_request_release(&lr);
        return;
    }
    (void)atomic_fetch_add(&s->n_changing, 1);
    if (is_locked)
        book_lock_paths(s->book);
    rc = load_all(s, &lr, &undo, param, sizeof(param), &status, &err);
    if (!rc) {
        set_loaded(s, req, &lr, &undo, is_locked);
    } else {
        if (is_locked)
            book_unlock_paths(s->book);
        (void)atomic_fetch_sub(&s->n_changing, 1);
        metrics_change(&s->metrics, CHANGE_SET, NULL);
        reply_error(req, status, status == 403 ? "path_not_allowed" : pf_error_name(rc), param,
                    err.msg);
    }
    book_undo_release(&undo);
    lora_request_release(&lr);
}

/* ------------------------------------------------------------------- merge, unmerge, deactivate */

static void change_targets(struct service *s, struct http_request *req, const struct json *body,
                           enum change_kind kind)
{
    static const char *const said[] = {[CHANGE_MERGE] = "merged LoRA weights",
                                       [CHANGE_UNMERGE] = "unmerged LoRA weights",
                                       [CHANGE_DEACTIVATE] = "deactivated LoRA weights"};
    const struct json *strength = json_get(body, "strength");
    double factor = strength ? json_number(strength) : 1;
    struct pf_change_report report = {0};
    const char *targets = NULL;
    struct arena arena;
    pf_error err = {0};
    char message[512];
    int rc;

    arena_init(&arena);
    rc = lora_request_targets(&arena, json_get(body, "target"), &targets, &err);
    (void)snprintf(message, sizeof(message), "Successfully %s (target: %.300s", said[kind],
                   targets ? targets : "all");
    if (kind == CHANGE_MERGE)
        (void)snprintf(message + strlen(message), sizeof(message) - strlen(message),
                       ", strength: %g", factor);
    (void)snprintf(message + strlen(message), sizeof(message) - strlen(message), ")");
    (void)atomic_fetch_add(&s->n_changing, 1);
    if (!rc && kind == CHANGE_MERGE)
        rc = pf_engine_merge(s->engine, targets, factor, &report, &err);
    else if (!rc && kind == CHANGE_UNMERGE)
        rc = pf_engine_unmerge(s->engine, targets, &report, &err);
    else if (!rc)
        rc = pf_engine_deactivate(s->engine, targets, &report, &err);
    finish(s, req, kind, rc, message, &report, &err);
    arena_release(&arena);
}

void api_merge(struct service *s, struct http_request *req, const struct json *body)
{
    change_targets(s, req, body, CHANGE_MERGE);
}

void api_unmerge(struct service *s, struct http_request *req, const struct json *body)
{
    change_targets(s, req, body, CHANGE_UNMERGE);
}

void api_deactivate(struct service *s, struct http_request *req, const struct json *body)
{
    change_targets(s, req, body, CHANGE_DEACTIVATE);
}

/* --------------------------------------------------------------------------------------- load, unload */

struct described {
    const char *nickname;
    struct json *doc;
};

static void describe(void *ctx, const char *nickname, const struct pf_adapter *adapter)
{
    struct described *d = ctx;
    struct pf_adapter_info info;

    if (strcmp(nickname, d->nickname) != 0)
        return;
    pf_adapter_info(adapter, &info);
    json_set_z(d->doc, "family", info.family);
    json_set_z(d->doc, "dialect", info.dialect);
    json_set_z(d->doc, "digest", info.digest);
    json_set_int(d->doc, "modules", info.n_modules);
    json_set_int(d->doc, "rank_min", info.rank_min);
    json_set_int(d->doc, "rank_max", info.rank_max);
    json_set_int(d->doc, "bytes", (int64_t)info.n_bytes);
}

void api_load(struct service *s, struct http_request *req, const struct json *body)
{
    struct described d = {.nickname = json_z(json_get(body, "lora_nickname"))};
    const char *path = json_z(json_get(body, "lora_path"));
    struct book_undo undo = {0};
    uint64_t t0 = clock_ns();
    pf_error err = {0};
    char message[600];
    int status = 422, rc;

    book_lock_paths(s->book);
    rc = book_load(s->book, d.nickname, path, &undo, &status, &err);
    book_unlock_paths(s->book);
    book_undo_release(&undo);
    if (rc) {
        reply_error(req, status, status == 403 ? "path_not_allowed" : pf_error_name(rc),
                    "lora_path", err.msg);
        return;
    }
    (void)snprintf(message, sizeof(message), "Successfully loaded LoRA adapter: %s", d.nickname);
    d.doc = json_new_object();
    json_set_z(d.doc, "status", "ok");
    json_set(d.doc, "message", json_new_string(str_of(message)));
    json_set_real(d.doc, "took_ms", (double)(clock_ns() - t0) * 1e-6);
    pf_engine_each_adapter(s->engine, describe, &d);
    reply_json(req, 200, d.doc);
}

void api_unload(struct service *s, struct http_request *req, const struct json *body)
{
    const char *nickname = json_z(json_get(body, "lora_nickname"));
    struct json *doc;
    pf_error err = {0};
    char message[600];
    int rc;

    book_lock_paths(s->book); /* a request that loads it for itself has its view first */
    rc = book_unload(s->book, nickname, &err);
    book_unlock_paths(s->book);
    if (rc) {
        reply_pf_error(req, "lora_nickname", &err);
        return;
    }
    (void)snprintf(message, sizeof(message), "Successfully unloaded LoRA adapter: %s", nickname);
    doc = json_new_object();
    json_set_z(doc, "status", "ok");
    json_set(doc, "message", json_new_string(str_of(message)));
    reply_json(req, 200, doc);
}

/* ----------------------------------------------------------------------------------------------- list */

struct active_list {
    struct service *s;
    struct json **lists;
    const char **names;
    size_t n, n_max;
    const char *mode;
};

/* Copies only: the engine's lock is held. */
static void add_active(void *ctx, const struct pf_active_info *a)
{
    struct active_list *l = ctx;
    struct json *it = json_new_object();
    size_t i = 0;

    json_set(it, "nickname", json_new_string(str_of(a->nickname)));
    json_set(it, "path", book_given_path_json(l->s->book, a->nickname, a->path));
    json_set_bool(it, "merged", a->is_merged);
    json_set_z(it, "mode", l->mode);
    json_set_real(it, "strength", a->strength);
    while (i < l->n && strcmp(l->names[i], a->component) != 0)
        i++;
    if (i == l->n && l->n < l->n_max) {
        l->names[l->n] = a->component; /* the checkpoint's own string */
        l->lists[l->n++] = json_new_array();
    }
    if (i < l->n)
        json_add(l->lists[i], it);
    else
        json_free(it);
}

/* "merge" when no changed layer is computed on the way, else "dynamic". */
static const char *mode_now(struct service *s)
{
    struct pf_layer_status layer;

    for (uint32_t i = 0; i < s->ckpt_info.n_layers; i++)
        if (!pf_engine_layer_status(s->engine, i, &layer, NULL) && !strcmp(layer.place, "stream"))
            return "dynamic";
    return "merge";
}

void api_list_loras(struct service *s, struct http_request *req, const struct json *body)
{
    struct active_list l = {.s = s, .n_max = s->ckpt_info.n_components, .mode = mode_now(s)};
    struct json *doc = json_new_object(), *active = json_new_object();

    (void)body;
    l.lists = mem_calloc(l.n_max, sizeof(*l.lists));
    l.names = mem_calloc(l.n_max, sizeof(*l.names));
    if (l.lists && l.names)
        pf_engine_each_active(s->engine, add_active, &l);
    for (size_t i = 0; i < l.n; i++)
        json_set(active, l.names[i], l.lists[i]);
    mem_free(l.lists);
    mem_free(l.names);
    json_set(doc, "loaded_adapters", book_json(s->book));
    json_set(doc, "active", active);
    reply_json(req, 200, doc);
}
