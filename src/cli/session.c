/*
 * Opening an engine from options. Here is decided whether a run has any use for the cache: a single picture adopts what is there
 * and neither creates a directory nor starts a build that it would not live to see.
 */
#include "cli/session.h"

#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "cli/bundled.h"
#include "cli/interrupt.h"
#include "cli/setup.h"

#define SUFFIX    ".safetensors"
#define SETTLE_MS 200 /* between two looks at Ctrl-C */

/* Is there a cache directory that overlays could be adopted from? */
static bool has_cache(const char *asked)
{
    char path[4096];

    return !pf_cache_path(asked, path, sizeof(path), NULL) && file_kind(path) == FILE_DIRECTORY;
}

static const char *cache_dir_of(const struct session_opts *opts, int32_t way)
{
    const char *asked = opts->serving->cache_dir;

    if (!opts->is_one_shot || way == PF_WAY_OVERLAY)
        return asked;
    return way == PF_WAY_AUTO && opts->wants_adapters && has_cache(asked) ? asked : "off";
}

int session_open(struct session *s, const struct session_opts *opts, pf_error *err)
{
    const struct serving_args *serving = opts->serving;
    int32_t way = way_by_name(serving->way);
    struct pf_engine_opts engine_opts = {
        .size = sizeof(engine_opts),
        .way = way,
        .cache_dir = cache_dir_of(opts, way),
        .cache_budget_bytes = serving->cache_budget.v,
        .host_memory_bytes = serving->host_memory.v,
        .n_resident_layers = (uint32_t)serving->resident.v,
        .n_threads = opts->n_threads,
        .build_delay_ms = opts->is_one_shot ? -1 : build_delay_ms(&serving->build_delay),
    };
    char *path = NULL;
    int rc = bundled_model(NULL, opts->model, &path, err);

    if (!rc)
        rc = pf_checkpoint_open(path, NULL, &s->ckpt, err);
    mem_free(path);
    return rc ? rc : pf_engine_open(s->ckpt, &engine_opts, &s->engine, err);
}

static void nickname_release(struct nickname *it)
{
    mem_free(it->name);
    mem_free(it->path);
}

void session_close(struct session *s)
{
    pf_engine_close(s->engine);
    pf_checkpoint_close(s->ckpt);
    for (size_t i = 0; i < s->n_names; i++)
        nickname_release(&s->names[i]);
    mem_free(s->names);
    *s = (struct session){0};
}

/* --------------------------------------------------------------------------------------------- nicknames */

static struct nickname *find(const struct session *s, const char *name)
{
    for (size_t i = 0; i < s->n_names; i++)
        if (!strcmp(s->names[i].name, name))
            return &s->names[i];
    return NULL;
}

/* "loras/My style.safetensors" -> "My-style"; "My-style-2" when another file has that name. */
static int derive(const struct session *s, const char *path, struct strbuf *out, pf_error *err)
{
    struct str stem = path_base(path);
    size_t n_stem;

    if (str_ends(stem, SUFFIX))
        stem = str_cut_back(stem, strlen(SUFFIX));
    for (size_t i = 0; i < stem.n; i++)
        strbuf_add(out, nickname_has(stem.p[i]) ? stem.p + i : "-", 1);
    if (!out->n)
        strbuf_adds(out, "adapter");
    n_stem = out->n;
    for (unsigned i = 2; strbuf_ok(out); i++) {
        const struct nickname *other = find(s, strbuf_z(out));

        if (!other || !strcmp(other->path, path))
            return PF_OK;
        out->n = n_stem;
        strbuf_addf(out, "-%u", i);
    }
    return err_nomem(err, stem.n, "a nickname");
}

/* Notes name and path, or another path for a known name. */
static int note(struct session *s, const char *name, const char *path, const char **out_name,
                pf_error *err)
{
    struct nickname *have = find(s, name), new = {mem_strdup(name), mem_strdup(path)};

    if (!new.name || !new.path ||
        (!have && !mem_grow((void **)&s->names, &s->cap_names, s->n_names, sizeof(*s->names)))) {
        nickname_release(&new);
        return err_nomem(err, strlen(path), "a nickname");
    }
    if (have) {
        mem_free(have->path);
        have->path = new.path; /* the name stays where it is: others borrow it */
        mem_free(new.name);
    } else {
        have = &s->names[s->n_names++];
        *have = new;
    }
    *out_name = have->name;
    return PF_OK;
}

int session_load(struct session *s, const char *word, const char *nickname,
                 const char **out_nickname, pf_error *err)
{
    struct strbuf derived;
    char *path = NULL;
    int rc = bundled_adapter(NULL, word, &path, err);

    strbuf_init(&derived);
    if (!rc && !nickname) {
        rc = derive(s, path, &derived, err);
        nickname = strbuf_z(&derived);
    }
    if (!rc)
        rc = pf_engine_load(s->engine, nickname, path, err);
    if (!rc)
        rc = note(s, nickname, path, out_nickname, err);
    strbuf_release(&derived);
    mem_free(path);
    return rc;
}

int session_unload(struct session *s, const char *nickname, pf_error *err)
{
    struct nickname *it = find(s, nickname);
    int rc = pf_engine_unload(s->engine, nickname, err);

    if (rc || !it)
        return rc;
    nickname_release(it);
    *it = s->names[--s->n_names];
    return PF_OK;
}

/* -------------------------------------------------------------------------------------------------- loras */

void specs_free(struct lora_spec *specs, size_t n)
{
    for (size_t i = 0; specs && i < n; i++)
        lora_spec_release(&specs[i]);
    mem_free(specs);
}

int specs_parse(const struct arg_list *texts, struct lora_spec **out_specs, pf_error *err)
{
    struct lora_spec *specs = mem_calloc(texts->n + 1, sizeof(*specs));
    int rc = specs ? PF_OK : err_nomem(err, texts->n * sizeof(*specs), "adapters");

    for (size_t i = 0; !rc && i < texts->n; i++)
        rc = lora_spec_parse(texts->v[i], &specs[i], err);
    if (rc)
        specs_free(specs, texts->n);
    else
        *out_specs = specs;
    return rc;
}

int session_loras(struct session *s, const struct lora_spec *specs, size_t n, bool by_nickname,
                  struct pf_engine_lora **out_loras, pf_error *err)
{
    struct pf_engine_lora *loras = mem_calloc(n + 1, sizeof(*loras));
    int rc = loras ? PF_OK : err_nomem(err, n * sizeof(*loras), "adapters");

    for (size_t i = 0; !rc && i < n; i++) {
        const struct nickname *known = by_nickname ? find(s, specs[i].path) : NULL;
        const char *name = known ? known->name : NULL;

        if (!known)
            rc = session_load(s, specs[i].path, NULL, &name, err);
        loras[i] = (struct pf_engine_lora){name, specs[i].strength, specs[i].has_alpha,
                                           specs[i].alpha, specs[i].target};
    }
    if (rc)
        mem_free(loras);
    else
        *out_loras = loras;
    return rc;
}

int session_settle(struct session *s, pf_error *err)
{
    int rc;

    while ((rc = pf_engine_settle(s->engine, SETTLE_MS, err)) == PF_E_BUSY)
        if (interrupt_seen())
            return err_set(err, PF_E_CANCELLED, "interrupted");
    return rc;
}

/* ------------------------------------------------------------------------------------------------ reports */

struct json *session_plan_json(const struct session *s)
{
    struct json *plan = json_new_object();
    struct pf_engine_status status;

    pf_engine_status(s->engine, &status);
    json_set_int(plan, "available_bytes", (int64_t)status.available_bytes);
    json_set_int(plan, "layers_kept", status.n_layers_kept);
    json_set_int(plan, "layers_mapped", status.n_layers_mapped);
    json_set_int(plan, "layers_resident", status.n_layers_resident);
    json_set_int(plan, "bytes_kept", (int64_t)status.n_bytes_kept);
    json_set_int(plan, "bytes_resident", (int64_t)status.n_bytes_resident);
    json_set_z(plan, "note", status.plan_note);
    json_set(plan, "cache_dir",
             *status.cache_dir ? json_new_string(str_of(status.cache_dir)) : json_new_null());
    json_set(plan, "cache_note",
             *status.cache_note ? json_new_string(str_of(status.cache_note)) : json_new_null());
    return plan;
}

void change_json(struct json *doc, const struct pf_change_report *r)
{
    json_set_int(doc, "tensors_changed", r->n_tensors_changed);
    json_set_int(doc, "layers_changed", r->n_layers_changed);
    json_set_int(doc, "keys_matched", r->n_keys_matched);
    json_set_int(doc, "keys_unmatched", r->n_keys_unmatched);
    json_set_real(doc, "effect_ms", r->effect_ms);
    json_set_real(doc, "change_ms", r->took_ms);
    json_set_real(doc, "survival", r->fidelity.survival);
    json_set_real(doc, "fraction_changed", r->fidelity.fraction_changed);
    json_set(doc, "note", *r->note ? json_new_string(str_of(r->note)) : json_new_null());
}

void change_warn(const struct out *o, const struct pf_change_report *r)
{
    if (r->n_tensors_changed && r->fidelity.survival < PF_SURVIVAL_WARN)
        out_warn(o,
                 "only %.0f %% of the change survives rounding to the dtype of the base; merge "
                 "dtype f32 keeps all of it",
                 100 * r->fidelity.survival);
    if (*r->note)
        out_warn(o, "%s", r->note);
}
