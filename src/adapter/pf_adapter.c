/*
 * The adapter as an object: parsing in order (keys, modules, configs, scales), references, and the public entry points. Immutable
 * once pf_adapter_open has returned.
 */
#include "adapter/adapter_int.h"

#include "tensor/dtype.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

/* --------------------------------------------------------------------------------------------------- notes */

void notes_addf(struct ad_notes *notes, const char *fmt, ...)
{
    char text[4096];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    char *copy = n >= 0 ? mem_strdup(text) : NULL;
    if (copy == NULL ||
        !mem_grow((void **)&notes->items, &notes->cap, notes->n, sizeof *notes->items)) {
        mem_free(copy);
        notes->is_failed = true;
        return;
    }
    notes->items[notes->n++] = copy;
}

void notes_release(struct ad_notes *notes)
{
    for (size_t i = 0; i < notes->n; i++)
        mem_free(notes->items[i]);
    mem_free(notes->items);
    *notes = (struct ad_notes){0};
}

/* ------------------------------------------------------------------------------------------------- parsing */

static int copy_keys(struct pf_adapter *a, const struct ad_input *in, pf_error *err)
{
    a->tensors = arena_alloc(&a->arena, in->n_keys * sizeof *a->tensors);
    if (a->tensors == NULL || in->n_keys > UINT32_MAX / 4)
        return err_nomem(err, in->n_keys * sizeof *a->tensors, "the keys of an adapter");
    for (size_t i = 0; i < in->n_keys; i++) {
        const struct st_tensor *t = in->keys[i];
        char *name = arena_strndup(&a->arena, t->name.p, t->name.n);
        if (name == NULL)
            return err_nomem(err, t->name.n, "a key");
        if (memchr(name, '\0', t->name.n) != NULL)
            return err_set(err, PF_E_UNSUPPORTED, "adapter '%s': key '%s' holds a NUL byte",
                           a->path, name);
        a->tensors[i] = (struct ad_tensor){.name = {name, t->name.n},
                                           .dtype = t->dtype,
                                           .shape = t->shape,
                                           .p = in->base + t->off_bytes,
                                           .n_bytes = t->n_bytes,
                                           .i_module = -1};
    }
    a->n_tensors = in->n_keys;
    return PF_OK;
}

static int copy_meta(struct pf_adapter *a, const struct ad_input *in, pf_error *err)
{
    a->meta = arena_alloc(&a->arena, in->n_meta * sizeof *a->meta);
    if (a->meta == NULL)
        return err_nomem(err, in->n_meta * sizeof *a->meta, "metadata");
    for (size_t i = 0; i < in->n_meta; i++) {
        struct str key = in->meta[i]->key, value = in->meta[i]->value;
        char *k = arena_strndup(&a->arena, key.p, key.n);
        char *v = arena_strndup(&a->arena, value.p, value.n);
        if (k == NULL || v == NULL)
            return err_nomem(err, key.n + value.n, "metadata");
        a->meta[i] = (struct st_meta){.key = {k, key.n}, .value = {v, value.n}};
    }
    a->n_meta = in->n_meta;
    return PF_OK;
}

/* One document: a config for each component that it speaks of. Components' names outlive it, in the arena. */
static int parse_config(struct pf_adapter *a, const char *p, size_t n, bool is_prefixed,
                        const char *what, pf_error *err)
{
    struct json *root = NULL;
    struct str plain = {"", 0}, *components = &plain;
    size_t n_components = 1;
    int rc = json_parse(p, n, what, &root, err);
    if (rc == PF_OK && is_prefixed)
        rc = config_components(&a->arena, root, what, &components, &n_components, err);
    for (size_t i = 0; rc == PF_OK && i < n_components; i++) {
        rc = config_parse(&a->arena, root, components[i], what, &a->configs[a->n_configs], err);
        a->n_configs += rc == PF_OK;
    }
    json_free(root);
    if (rc != PF_OK)
        return err_prefix(err, rc, "adapter '%s'", a->path);
    return PF_OK;
}

static int parse_configs(struct pf_adapter *a, const struct ad_input *in, pf_error *err)
{
    a->configs = arena_alloc(&a->arena, 17 * sizeof *a->configs); /* one file, 16 components */
    if (a->configs == NULL)
        return err_nomem(err, 17 * sizeof *a->configs, "configs");
    int rc = PF_OK;
    if (in->config != NULL)
        rc = parse_config(a, in->config, in->n_config, false, "adapter_config.json", err);
    for (size_t i = 0; rc == PF_OK && i < a->n_meta; i++)
        if (str_eqz(a->meta[i].key, "lora_adapter_metadata"))
            rc = parse_config(a, a->meta[i].value.p, a->meta[i].value.n, true,
                              "lora_adapter_metadata", err);
    return rc;
}

/* target_modules that no module of the file ends with: something may be missing. */
static void remark_targets(struct pf_adapter *a, const struct ad_config *cfg)
{
    for (size_t i = 0; i < cfg->n_targets && i < 1024; i++) {
        struct str target = cfg->targets[i];
        bool is_found = false;
        for (size_t k = 0; k < a->n_modules && !is_found; k++) {
            struct str name = a->modules[k].name;
            if (name.n < target.n)
                continue;
            size_t at = name.n - target.n;
            is_found =
                memcmp(name.p + at, target.p, target.n) == 0 && (at == 0 || name.p[at - 1] == '.');
        }
        if (!is_found)
            notes_addf(&a->notes, "warning: %s targets '%.*s', and the file has no such module",
                       cfg->what, (int)(target.n > 200 ? 200 : target.n), target.p);
    }
}

static void remark_file(struct pf_adapter *a)
{
    for (size_t i = 0; i < a->n_configs; i++) {
        const struct ad_config *cfg = &a->configs[i];
        if (!cfg->is_used && cfg->component.n > 0) /* a scale that was meant for something */
            notes_addf(&a->notes, "warning: %s speaks of '%s', and the file has no module of it",
                       cfg->what, cfg->component.p);
        else
            remark_targets(a, cfg);
    }
    for (size_t i = 0; i < a->n_modules; i++) {
        const struct ad_module *m = &a->modules[i];
        if (family_is_block_diagonal(a, m))
            notes_addf(
                &a->notes,
                "warning: B of '%s' is block diagonal, so rank %lld may be several ranks put "
                "together: scale %.6g is what the file says; an explicit alpha repairs it if "
                "alpha was not raised with the rank",
                m->name.p, (long long)m->rank[0], m->scale);
    }
}

/* ---------------------------------------------------------------------------------------------------- info */

static const char *join_kind(const char *sum, const char *kind)
{
    if (sum == NULL || strcmp(sum, kind) == 0)
        return kind;
    return "mixed";
}

static int list_dtypes(struct pf_adapter *a, pf_error *err)
{
    bool seen[PF_N_DTYPES] = {false};
    for (size_t i = 0; i < a->n_tensors; i++) {
        const struct ad_tensor *t = &a->tensors[i];
        const struct ad_module *m = t->i_module >= 0 ? &a->modules[t->i_module] : NULL;
        if (m != NULL && t != module_leaf(a, m, LEAF_ALPHA) && t != module_leaf(a, m, LEAF_SCALE))
            seen[t->dtype] = true;
    }
    struct strbuf b;
    strbuf_init(&b);
    for (int32_t i = 0; i < PF_N_DTYPES; i++)
        if (seen[i])
            strbuf_addf(&b, "%s%s", b.n > 0 ? "," : "", pf_dtype_name(i));
    a->info.dtypes = strbuf_ok(&b) ? arena_strndup(&a->arena, strbuf_z(&b), b.n) : NULL;
    strbuf_release(&b);
    return a->info.dtypes != NULL ? PF_OK : err_nomem(err, 64, "dtype names");
}

static void count_rank(struct pf_adapter_info *info, int64_t rank)
{
    if (rank <= 0)
        return;
    uint32_t r = rank < UINT32_MAX ? (uint32_t)rank : UINT32_MAX;
    info->rank_min = info->rank_min == 0 || r < info->rank_min ? r : info->rank_min;
    info->rank_max = r > info->rank_max ? r : info->rank_max;
}

static int fill_info(struct pf_adapter *a, pf_error *err)
{
    struct pf_adapter_info *info = &a->info;
    bool has_scale = false;
    for (size_t i = 0; i < a->n_modules; i++) {
        const struct ad_module *m = &a->modules[i];
        info->dialect = join_kind(info->dialect, dialect_name(m->name));
        count_rank(info, m->rank[0]);
        count_rank(info, m->rank[1]);
        if (!module_has_scale(m))
            continue;
        info->scale_min = !has_scale || m->scale < info->scale_min ? m->scale : info->scale_min;
        info->scale_max = !has_scale || m->scale > info->scale_max ? m->scale : info->scale_max;
        has_scale = true;
    }
    for (size_t i = 0; i < a->n_rows; i++) {
        const char *kind = a->rows[i].kind;
        if (strcmp(kind, "bias") != 0)
            info->family = join_kind(info->family, strcmp(kind, "diff_b") == 0 ? "diff" : kind);
    }
    if (a->n_configs > 0 && strcmp(a->configs[0].what, "adapter_config.json") == 0)
        info->dialect = "peft";
    if (!has_scale)
        info->scale_min = info->scale_max = 1;
    info->path = a->path;
    info->digest = a->digest_hex;
    info->n_modules = (uint32_t)a->n_rows;
    info->n_keys = (uint32_t)a->n_tensors;
    for (size_t i = 0; i < a->n_tensors; i++)
        info->n_bytes += a->tensors[i].n_bytes;
    return list_dtypes(a, err);
}

int adapter_parse(struct pf_adapter *a, const struct ad_input *in, pf_error *err)
{
    a->path = in->path;
    int rc = copy_keys(a, in, err);
    if (rc == PF_OK)
        rc = copy_meta(a, in, err);
    if (rc == PF_OK)
        rc = parse_configs(a, in, err);
    if (rc == PF_OK)
        rc = modules_build(a, err);
    if (rc == PF_OK)
        rc = scales_build(a, err);
    if (rc == PF_OK && a->n_modules == 0)
        rc = err_set(err, PF_E_UNSUPPORTED,
                     "adapter '%s': none of its %zu tensors is a factor of a known family%s%s%s",
                     a->path, a->n_tensors, a->n_tensors > 0 ? ": the first is '" : "",
                     a->n_tensors > 0 ? a->tensors[0].name.p : "", a->n_tensors > 0 ? "'" : "");
    if (rc != PF_OK)
        return rc;
    remark_file(a);
    for (size_t i = 0; i < a->n_modules; i++)
        if (a->modules[i].conflict != NULL)
            notes_addf(&a->scale_notes, "warning: module '%s': %s: choose with an explicit alpha",
                       a->modules[i].name.p, a->modules[i].conflict);
    scales_remark(a, false, 0, &a->scale_notes);
    if (a->notes.is_failed || a->scale_notes.is_failed)
        return err_nomem(err, 0, "notes");
    return fill_info(a, err);
}

void adapter_release(struct pf_adapter *a)
{
    for (size_t i = 0; i < a->n_configs; i++)
        config_release(&a->configs[i]);
    notes_release(&a->notes);
    notes_release(&a->scale_notes);
    if (a->file != NULL)
        st_close(a->file);
    arena_release(&a->arena);
}

/* -------------------------------------------------------------------------------------------------- public */

int pf_adapter_open(const char *path, struct pf_adapter **out_adapter, pf_error *err)
{
    if (path == NULL || *path == '\0' || out_adapter == NULL)
        return err_set(err, PF_E_INVALID, "adapter: no path given");
    struct pf_adapter *a = mem_calloc(1, sizeof *a);
    if (a == NULL)
        return err_nomem(err, sizeof *a, "an adapter");
    arena_init(&a->arena);
    atomic_init(&a->n_refs, 1);
    int rc = source_open(a, path, err);
    if (rc != PF_OK) {
        pf_adapter_close(a);
        return rc;
    }
    *out_adapter = a;
    return PF_OK;
}

void adapter_ref(struct pf_adapter *a)
{
    atomic_fetch_add_explicit(&a->n_refs, 1, memory_order_relaxed); /* the caller holds one */
}

void pf_adapter_close(struct pf_adapter *a)
{
    /* acq_rel: whoever frees has seen every other holder's last use. */
    if (a == NULL || atomic_fetch_sub_explicit(&a->n_refs, 1, memory_order_acq_rel) != 1)
        return;
    adapter_release(a);
    mem_free(a);
}

struct digest adapter_digest(const struct pf_adapter *a)
{
    return a->digest;
}

const char *adapter_path(const struct pf_adapter *a)
{
    return a->path;
}

void pf_adapter_info(const struct pf_adapter *a, struct pf_adapter_info *out_info)
{
    *out_info = a->info;
}

void pf_adapter_module(const struct pf_adapter *a, uint32_t i, struct pf_adapter_module *out_module)
{
    *out_module = (struct pf_adapter_module){.name = "", .kind = ""};
    if (i >= a->n_rows)
        return;
    const struct ad_module *m = &a->modules[a->rows[i].i_module];
    int64_t rank = m->rank[0] > m->rank[1] ? m->rank[0] : m->rank[1];
    bool is_plain = strncmp(a->rows[i].kind, "diff", 4) == 0;
    *out_module = (struct pf_adapter_module){.name = m->name.p,
                                             .kind = a->rows[i].kind,
                                             .rank = is_plain ? 0 : (uint32_t)rank,
                                             .has_alpha = !is_plain && m->has_alpha,
                                             .alpha = is_plain ? 0 : m->alpha,
                                             .scale = is_plain ? 1 : m->scale};
}

bool pf_adapter_metadata(const struct pf_adapter *a, uint32_t i, const char **out_key,
                         const char **out_value)
{
    if (i >= a->n_meta)
        return false;
    *out_key = a->meta[i].key.p;
    *out_value = a->meta[i].value.p;
    return true;
}

const char *pf_adapter_note(const struct pf_adapter *a, uint32_t i)
{
    if (i < a->notes.n)
        return a->notes.items[i];
    size_t k = i - a->notes.n;
    return k < a->scale_notes.n ? a->scale_notes.items[k] : NULL;
}
