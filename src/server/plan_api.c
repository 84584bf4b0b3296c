/*
 * POST /v1/plan: what a set_lora would do, with nothing changed. Adapters are opened here and closed again; the engine is not asked
 * for a lock. The composition is that of the named adapters alone, as if no other target had one.
 */
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/pool.h"
#include "base/proc.h"
#include "server/lora_request.h"
#include "server/reply.h"
#include "server/route.h"
#include "server/service.h"

#define MEASURE_NS      50000000u /* how long panels are merged to learn the speed */
#define WRITE_RATE      1e9       /* bytes per second: an ordinary NVMe disk */
#define MEASURE_BYTES   ((size_t)4 << 20)
#define N_UNMATCHED_MAX 200

struct plan {
    struct service *s;
    struct lora_request lr;
    struct pf_adapter **adapters;
    struct pf_lora *loras;
    struct pf_composition *comp;
    struct pf_fidelity fidelity;
    double resolve_ms, build_s;
    int status;
    char param[64];
};

static int open_one(struct plan *p, size_t i, pf_error *err)
{
    const struct pf_engine_lora *l = &p->lr.loras[i];
    char *path = NULL;
    int rc = PF_OK;

    if (p->lr.paths[i]) {
        (void)snprintf(p->param, sizeof(p->param), "lora_path");
        rc = book_resolve(p->s->book, p->lr.paths[i], &path, &p->status, err);
    } else {
        (void)snprintf(p->param, sizeof(p->param), "lora_nickname");
        path = book_path(p->s->book, l->nickname);
        p->status = 404;
        if (!path)
            rc = err_set(err, PF_E_NOTFOUND,
                         "no adapter is loaded as '%s': load it with its path first", l->nickname);
    }
    if (!rc) {
        rc = pf_adapter_open(path, &p->adapters[i], err);
        p->status = rc == PF_E_NOTFOUND ? 404 : 422;
    }
    mem_free(path);
    p->loras[i] = (struct pf_lora){p->adapters[i], l->strength, l->has_alpha, l->alpha, l->target};
    return rc;
}

static struct pf_panel measured_panel(uint32_t i, const struct pf_tensor_info *t)
{
    uint64_t n_cols = 1, n_rows;

    for (int32_t d = 1; d < t->rank; d++)
        n_cols *= (uint64_t)t->shape[d];
    n_rows = n_cols ? MEASURE_BYTES / 8 / n_cols : 0;
    if (n_rows > (uint64_t)t->shape[0])
        n_rows = (uint64_t)t->shape[0];
    return (struct pf_panel){.i_tensor = i, .n_rows = (int64_t)n_rows, .n_cols = (int64_t)n_cols};
}

/* Seconds that a build would take: the speed of merging some panels, over all threads, and the writing. */
static int measure(struct plan *p, const struct pf_composition_info *info, pf_error *err)
{
    struct pf_view *view = NULL;
    struct pf_reader *reader = NULL;
    uint64_t n_bytes = 0, t0 = clock_ns();
    void *buffer = mem_alloc(MEASURE_BYTES);
    int rc = buffer ? pf_view_open(p->s->ckpt, p->comp, &view, err)
                    : err_nomem(err, MEASURE_BYTES, "a panel");

    if (!rc)
        rc = pf_reader_new(view, &reader, err);
    for (uint32_t i = 0; !rc && i < p->s->ckpt_info.n_tensors && clock_ns() - t0 < MEASURE_NS;
         i++) {
        struct pf_tensor_info t;
        struct pf_panel panel;

        pf_checkpoint_tensor(p->s->ckpt, i, &t);
        if (!pf_composition_changes(p->comp, i) || t.rank < 1)
            continue;
        panel = measured_panel(i, &t);
        if (!panel.n_rows)
            continue;
        rc = pf_reader_read(reader, &panel, PF_NATIVE, buffer, MEASURE_BYTES, err);
        n_bytes += (uint64_t)(panel.n_rows * panel.n_cols) * pf_dtype_bits(t.dtype) / 8;
    }
    if (!rc && n_bytes)
        p->build_s = (double)(clock_ns() - t0) * 1e-9 / (double)n_bytes *
                         (double)info->n_bytes_changed / pool_default_threads() +
                     (double)info->n_bytes_changed / WRITE_RATE;
    pf_reader_free(reader);
    pf_view_release(view);
    mem_free(buffer);
    return rc;
}

static int make(struct plan *p, const struct json *body, pf_error *err)
{
    struct pf_composition_opts opts = {.size = sizeof(opts), .allow_unmatched = true};
    struct pf_composition_info info;
    uint64_t t0;
    int rc = lora_request_parse(body, p->s->opts->merge_dtype, &p->lr, err);

    (void)snprintf(p->param, sizeof(p->param), "%s", p->lr.param);
    p->status = 422;
    if (rc)
        return rc;
    p->adapters = arena_alloc(&p->lr.arena, p->lr.n * sizeof(struct pf_adapter *));
    p->loras = arena_alloc(&p->lr.arena, p->lr.n * sizeof(*p->loras));
    if (!p->adapters || !p->loras)
        return err_nomem(err, p->lr.n * sizeof(*p->loras), "adapters");
    for (size_t i = 0; !rc && i < p->lr.n; i++)
        rc = open_one(p, i, err);
    if (rc)
        return rc;
    p->param[0] = '\0';
    opts.merge_dtype = p->lr.merge_dtype;
    t0 = clock_ns();
    rc = pf_composition_new(p->s->ckpt, p->loras, p->lr.n, &opts, &p->comp, err);
    p->resolve_ms = (double)(clock_ns() - t0) * 1e-6;
    if (!rc) {
        pf_composition_info(p->comp, &info);
        rc = pf_composition_fidelity(p->comp, &p->fidelity, err);
    }
    if (!rc)
        rc = measure(p, &info, err);
    p->status = rc ? reply_status_of(rc) : 200;
    return rc;
}

static struct json *unmatched_json(const struct pf_composition *comp)
{
    struct json *list = json_new_array();
    const char *key, *near;

    for (uint32_t i = 0; i < N_UNMATCHED_MAX && pf_composition_unmatched(comp, i, &key, &near);
         i++) {
        struct json *it = json_new_object();

        json_set(it, "key", json_new_string(str_of(key)));
        json_set(it, "nearest", near ? json_new_string(str_of(near)) : json_new_null());
        json_add(list, it);
    }
    return list;
}

static const char *way_of(const struct plan *p, const struct pf_composition_info *info)
{
    int32_t way = p->lr.way != PF_WAY_AUTO ? p->lr.way : p->s->opts->engine.way;

    if (!info->n_tensors_changed)
        return "base";
    return way == PF_WAY_OVERLAY ? "overlay" : way == PF_WAY_INPLACE ? "inplace" : "stream";
}

static struct json *plan_json(struct plan *p)
{
    struct json *doc = json_new_object(), *notes = json_new_array();
    struct pf_composition_info info;
    const char *note;
    bool is_refused;

    pf_composition_info(p->comp, &info);
    is_refused = info.n_keys_unmatched && !p->s->opts->allow_unmatched;
    json_set_z(doc, "status", "ok");
    json_set_bool(doc, "would_be_refused", is_refused);
    json_set_z(doc, "composition", info.digest);
    json_set_int(doc, "keys_matched", info.n_keys_matched);
    json_set_int(doc, "keys_unmatched", info.n_keys_unmatched);
    json_set(doc, "unmatched", unmatched_json(p->comp));
    json_set_int(doc, "tensors_changed", info.n_tensors_changed);
    json_set_int(doc, "layers_changed", info.n_layers_changed);
    json_set_int(doc, "bytes_changed", (int64_t)info.n_bytes_changed);
    json_set_int(doc, "disk_bytes", (int64_t)info.n_bytes_changed);
    json_set_z(doc, "way", way_of(p, &info));
    json_set_real(doc, "effect_ms", p->resolve_ms);
    json_set_real(doc, "build_ms", p->build_s * 1e3);
    json_set_z(doc, "merge_dtype", reply_merge_dtype(info.merge_dtype));
    json_set_real(doc, "survival", p->fidelity.survival);
    json_set_real(doc, "fraction_changed", p->fidelity.fraction_changed);
    for (uint32_t i = 0; (note = pf_composition_note(p->comp, i)); i++)
        json_add(notes, json_new_string(str_of(note)));
    if (info.n_tensors_changed && p->fidelity.survival < PF_SURVIVAL_WARN)
        json_add(notes, json_new_string(str_of("much of the change is rounded away; merge_dtype "
                                               "\"f32\" keeps all of it")));
    json_set(doc, "notes", notes);
    return doc;
}

void api_plan(struct service *s, struct http_request *req, const struct json *body)
{
    struct plan p = {.s = s};
    pf_error err = {0};
    int rc = make(&p, body, &err);

    if (rc)
        reply_error(req, p.status >= 400 ? p.status : 500,
                    p.status == 403 ? "path_not_allowed" : pf_error_name(rc), p.param, err.msg);
    else
        reply_json(req, 200, plan_json(&p));
    pf_composition_free(p.comp);
    for (size_t i = 0; p.adapters && i < p.lr.n; i++)
        pf_adapter_close(p.adapters[i]);
    lora_request_release(&p.lr);
}
