/*
 * Opening what a command works on, and reporting the composition: the same fields in plan, merge and inspect --model.
 */
#include "cli/setup.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "cli/bundled.h"
#include "cli/generate_opts.h"

#define N_UNMATCHED_SHOWN 20

/* Texts are parsed first, all of them: a typo should not wait for an adapter of gigabytes. */
static int parse_loras(struct setup *s, const struct setup_opts *opts, pf_error *err)
{
    const struct arg_list *list = opts->loras;
    size_t n = opts->adapter_path ? 1 : list ? list->n : 0;
    int rc;

    if (!n)
        return PF_OK;
    s->specs = mem_calloc(n, sizeof(*s->specs));
    s->adapters = mem_calloc(n, sizeof(struct pf_adapter *));
    s->loras = mem_calloc(n, sizeof(*s->loras));
    if (!s->specs || !s->adapters || !s->loras)
        return err_nomem(err, n * sizeof(*s->specs), "adapters");
    for (size_t i = 0; i < n; i++) {
        if (opts->adapter_path)
            s->specs[i] = (struct lora_spec){mem_strdup(opts->adapter_path), 1, false, 0, NULL};
        else if ((rc = lora_spec_parse(list->v[i], &s->specs[i], err)))
            return rc;
        if (!s->specs[i].path)
            return err_nomem(err, 1, "a path");
        s->n_loras = i + 1;
    }
    return PF_OK;
}

static int open_adapter(struct setup *s, size_t i, pf_error *err)
{
    const struct lora_spec *spec = &s->specs[i];
    char *path = NULL;
    int rc = bundled_adapter(NULL, spec->path, &path, err);

    if (!rc)
        rc = pf_adapter_open(path, &s->adapters[i], err);
    mem_free(path);
    s->loras[i] = (struct pf_lora){s->adapters[i], spec->strength, spec->has_alpha, spec->alpha,
                                   spec->target};
    return rc;
}

int setup_open(struct setup *s, const struct setup_opts *opts, bool *out_is_usage, pf_error *err)
{
    struct pf_composition_opts comp_opts = {.size = sizeof(comp_opts),
                                            .allow_unmatched = opts->allow_unmatched,
                                            .merge_dtype = merge_dtype_by_name(opts->merge_dtype)};
    char *path = NULL;
    int rc = parse_loras(s, opts, err);

    *out_is_usage = rc == PF_E_INVALID;
    if (rc)
        return rc;
    s->is_bundled = !opts->model;
    rc = bundled_model(NULL, opts->model, &path, err);
    if (!rc)
        rc = pf_checkpoint_open(path, NULL, &s->ckpt, err);
    mem_free(path);
    for (size_t i = 0; !rc && i < s->n_loras; i++)
        rc = open_adapter(s, i, err);
    if (!rc)
        rc = pf_composition_new(s->ckpt, s->loras, s->n_loras, &comp_opts, &s->comp, err);
    return rc;
}

void setup_hint(pf_error *err)
{
    /* An adapter of which nothing matches is refused whatever is allowed. */
    if (err->code == PF_E_UNMATCHED && !strstr(err->msg, "nothing matches"))
        err_append(err, "; 'pageflip plan' lists them, --allow-unmatched leaves them out");
}

int setup_fidelity(struct setup *s, pf_error *err)
{
    return pf_composition_fidelity(s->comp, &s->fidelity, err);
}

void setup_release(struct setup *s)
{
    pf_composition_free(s->comp);
    for (size_t i = 0; i < s->n_loras; i++) {
        pf_adapter_close(s->adapters[i]);
        lora_spec_release(&s->specs[i]);
    }
    mem_free(s->adapters);
    mem_free(s->specs);
    mem_free(s->loras);
    pf_checkpoint_close(s->ckpt);
    *s = (struct setup){0};
}

/* "96 lora, 4 diff_b": modules of an adapter by kind. */
static void count_kinds(const struct pf_adapter *adapter, struct json *kinds)
{
    struct pf_adapter_info info;
    struct pf_adapter_module module;

    pf_adapter_info(adapter, &info);
    for (uint32_t i = 0; i < info.n_modules; i++) {
        pf_adapter_module(adapter, i, &module);
        json_set_int(kinds, module.kind, json_int(json_get(kinds, module.kind)) + 1);
    }
}

static void print_adapter(const struct out *o, const struct setup *s, size_t i)
{
    struct pf_adapter_info info;
    const struct lora_spec *spec = &s->specs[i];
    struct json *kinds = json_new_object();
    struct strbuf text;
    const char *kind;
    const struct json *n;

    strbuf_init(&text);
    pf_adapter_info(s->adapters[i], &info);
    strbuf_addf(&text, "%s at strength %g", info.path, spec->strength);
    if (spec->has_alpha)
        strbuf_addf(&text, ", alpha %g", spec->alpha);
    if (spec->target)
        strbuf_addf(&text, ", only on %s", spec->target);
    strbuf_addf(&text, ": %s", info.dialect);
    count_kinds(s->adapters[i], kinds);
    for (void *it = json_iter_next(kinds, NULL, &kind, &n); it;
         it = json_iter_next(kinds, it, &kind, &n))
        strbuf_addf(&text, ", %lld %s", (long long)json_int(n), kind);
    if (info.rank_max)
        strbuf_addf(&text, info.rank_min == info.rank_max ? ", rank %u" : ", ranks %u to %u",
                    info.rank_min, info.rank_max);
    out_field(o, i ? "" : "adapters", "%s", strbuf_z(&text));
    strbuf_release(&text);
    json_free(kinds);
}

static void print_unmatched(const struct out *o, const struct setup *s, uint32_t n)
{
    const char *key, *near;

    for (uint32_t i = 0; i < n && i < N_UNMATCHED_SHOWN; i++)
        if (pf_composition_unmatched(s->comp, i, &key, &near))
            out_field(o, i ? "" : "unmatched", near ? "%s (nearest: %s)" : "%s", key, near);
    if (n > N_UNMATCHED_SHOWN)
        out_field(o, "", "and %u more; --json lists them all", n - N_UNMATCHED_SHOWN);
}

void setup_print(const struct out *o, const struct setup *s)
{
    struct pf_checkpoint_info base;
    struct pf_composition_info info;
    char size[16];

    pf_checkpoint_info(s->ckpt, &base);
    pf_composition_info(s->comp, &info);
    out_field(o, "model", "%s%s: %s in %u tensors, %u layers", base.path,
              s->is_bundled ? " (bundled)" : "", out_bytes((double)base.n_bytes, size),
              base.n_tensors, base.n_layers);
    for (size_t i = 0; i < s->n_loras; i++)
        print_adapter(o, s, i);
    out_field(o, "keys", "%u matched, %u unmatched", info.n_keys_matched, info.n_keys_unmatched);
    print_unmatched(o, s, info.n_keys_unmatched);
    out_field(o, "changes", "%u of %u tensors in %u of %u layers: %s", info.n_tensors_changed,
              base.n_tensors, info.n_layers_changed, base.n_layers,
              out_bytes((double)info.n_bytes_changed, size));
    if (info.n_tensors_changed)
        out_field(o, "survival", "%.4f of the change survives; %.1f %% of the elements change%s",
                  s->fidelity.survival, 100 * s->fidelity.fraction_changed,
                  info.merge_dtype == PF_MERGE_F32 ? " (kept in f32)" : "");
    out_field(o, "composition", "%s", info.digest);
}

static struct json *adapters_json(const struct setup *s)
{
    struct json *list = json_new_array();

    for (size_t i = 0; i < s->n_loras; i++) {
        struct json *it = json_new_object(), *kinds = json_new_object();
        const struct lora_spec *spec = &s->specs[i];
        struct pf_adapter_info info;

        pf_adapter_info(s->adapters[i], &info);
        json_set(it, "path", json_new_string(str_of(info.path)));
        json_set_z(it, "family", info.family);
        json_set_z(it, "dialect", info.dialect);
        json_set_z(it, "digest", info.digest);
        json_set_real(it, "strength", spec->strength);
        if (spec->has_alpha)
            json_set_real(it, "alpha", spec->alpha);
        if (spec->target)
            json_set(it, "target", json_new_string(str_of(spec->target)));
        count_kinds(s->adapters[i], kinds);
        json_set(it, "kinds", kinds);
        json_add(list, it);
    }
    return list;
}

static struct json *notes_json(const struct pf_composition *comp)
{
    struct json *notes = json_new_array();
    const char *note;

    for (uint32_t i = 0; (note = pf_composition_note(comp, i)); i++)
        json_add(notes, json_new_string(str_of(note)));
    return notes;
}

void setup_json(struct json *doc, const struct setup *s)
{
    struct json *unmatched = json_new_array(), *nearest = json_new_object();
    struct pf_checkpoint_info base;
    struct pf_composition_info info;
    const char *key, *near;

    pf_checkpoint_info(s->ckpt, &base);
    pf_composition_info(s->comp, &info);
    for (uint32_t i = 0; pf_composition_unmatched(s->comp, i, &key, &near); i++) {
        json_add(unmatched, json_new_string(str_of(key)));
        json_set_z(nearest, key, near);
    }
    json_set(doc, "model", json_new_string(str_of(base.path)));
    json_set(doc, "adapters", adapters_json(s));
    json_set_int(doc, "keys_matched", info.n_keys_matched);
    json_set(doc, "keys_unmatched", unmatched);
    json_set(doc, "nearest", nearest);
    json_set_int(doc, "tensors_changed", info.n_tensors_changed);
    json_set_int(doc, "layers_changed", info.n_layers_changed);
    json_set_int(doc, "bytes_changed", (int64_t)info.n_bytes_changed);
    json_set_real(doc, "survival", s->fidelity.survival);
    json_set_real(doc, "fraction_changed", s->fidelity.fraction_changed);
    json_set_z(doc, "merge_dtype", info.merge_dtype == PF_MERGE_F32 ? "f32" : "base");
    json_set_z(doc, "composition", info.digest);
    json_set(doc, "notes", notes_json(s->comp));
}

/* Notes come as "FILE: text" or "FILE: warning: text": the word moves to the front, where a reader looks for it. */
static void say_note(const struct out *o, const char *note)
{
    static const char mark[] = ": warning: ";
    const char *at = strstr(note, mark);

    if (at)
        out_warn(o, "%.*s: %s", (int)(at - note), note, at + sizeof(mark) - 1);
    else
        out_note(o, "%s", note);
}

void setup_warn(const struct out *o, const struct setup *s)
{
    struct pf_composition_info info;
    const char *note;

    pf_composition_info(s->comp, &info);
    for (uint32_t i = 0; (note = pf_composition_note(s->comp, i)); i++)
        say_note(o, note);
    if (info.n_tensors_changed && s->fidelity.survival < PF_SURVIVAL_WARN)
        out_warn(o,
                 "only %.0f %% of the change survives rounding to the dtype of the base; "
                 "--merge-dtype f32 keeps all of it",
                 100 * s->fidelity.survival);
}
