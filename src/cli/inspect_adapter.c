/*
 * What an adapter is: family, dialect, ranks, scales, targets, and what its training left in the metadata. Names in files are
 * foreign bytes: they reach the terminal only through the cleaning printers.
 */
#include "cli/inspect.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

#define N_PATTERNS_MAX 200
#define N_TAGS_SHOWN   10
#define N_VALUE_SHOWN  200

/* Modules that differ only in numbers are one row: "transformer_blocks.*.attn1.to_q". */
struct pattern {
    char *name;
    const char *kind; /* borrowed from the adapter */
    uint32_t n, rank_min, rank_max;
    double scale_min, scale_max;
};

static void pattern_of(const char *name, struct strbuf *out)
{
    strbuf_clear(out);
    for (const char *p = name; *p;) {
        size_t n = strspn(p, "0123456789");
        bool is_part = n && (p == name || strchr("._", p[-1])) && strchr("._", p[n]);

        if (is_part)
            strbuf_adds(out, "*");
        else
            strbuf_add(out, p, n ? n : 1);
        p += n ? n : 1;
    }
}

static void pattern_add(struct pattern *p, const struct pf_adapter_module *m)
{
    if (!p->n++) {
        p->rank_min = p->rank_max = m->rank;
        p->scale_min = p->scale_max = m->scale;
        return;
    }
    p->rank_min = m->rank < p->rank_min ? m->rank : p->rank_min;
    p->rank_max = m->rank > p->rank_max ? m->rank : p->rank_max;
    p->scale_min = fmin(p->scale_min, m->scale);
    p->scale_max = fmax(p->scale_max, m->scale);
}

/* Groups all modules; returns how many found no place in the table. */
static uint32_t group(const struct pf_adapter *adapter, uint32_t n_modules,
                      struct pattern *patterns, size_t *out_n)
{
    struct pf_adapter_module m;
    struct strbuf name;
    uint32_t n_left = 0;
    size_t n = 0;

    strbuf_init(&name);
    for (uint32_t i = 0; i < n_modules; i++) {
        size_t j = 0;

        pf_adapter_module(adapter, i, &m);
        pattern_of(m.name, &name);
        while (j < n &&
               (strcmp(patterns[j].name, strbuf_z(&name)) || strcmp(patterns[j].kind, m.kind)))
            j++;
        if (j == n && n < N_PATTERNS_MAX && (patterns[n].name = mem_strdup(strbuf_z(&name))))
            patterns[n++].kind = m.kind;
        if (j < n)
            pattern_add(&patterns[j], &m);
        else
            n_left++;
    }
    strbuf_release(&name);
    *out_n = n;
    return n_left;
}

static void cell_range(struct table *t, double min, double max)
{
    if (min == max)
        table_cell(t, "%.4g", min);
    else
        table_cell(t, "%.4g to %.4g", min, max);
}

static void print_targets(const struct out *o, const struct pf_adapter *adapter, uint32_t n_modules)
{
    struct pattern *patterns = mem_calloc(N_PATTERNS_MAX, sizeof(*patterns));
    struct table table;
    uint32_t n_left;
    size_t n;

    if (!patterns)
        return; /* the rest of the report is still right */
    n_left = group(adapter, n_modules, patterns, &n);
    table_init(&table, 5, 0x1c);
    table_cell(&table, "targets");
    table_cell(&table, "kind");
    table_cell(&table, "count");
    table_cell(&table, "rank");
    table_cell(&table, "scale");
    for (size_t i = 0; i < n; i++) {
        table_cell(&table, "%s", patterns[i].name);
        table_cell(&table, "%s", patterns[i].kind);
        table_cell(&table, "%u", patterns[i].n);
        cell_range(&table, patterns[i].rank_min, patterns[i].rank_max);
        cell_range(&table, patterns[i].scale_min, patterns[i].scale_max);
        mem_free(patterns[i].name);
    }
    table_print(&table, "  ");
    table_release(&table);
    mem_free(patterns);
    if (n_left)
        out_field(o, "", "and %u more", n_left);
}

static bool is_trigger_key(const char *key)
{
    static const char *const keys[] = {"modelspec.trigger_phrase",
                                       "ss_trigger_words",
                                       "trigger_words",
                                       "trigger_word",
                                       "trained_words",
                                       "activation text",
                                       "instance_prompt"};

    for (size_t i = 0; i < PF_COUNTOF(keys); i++)
        if (!strcmp(key, keys[i]))
            return true;
    return false;
}

struct tag {
    const char *name;
    int64_t n;
};

static int by_count(const void *a, const void *b)
{
    const struct tag *x = a, *y = b;

    return x->n == y->n ? strcmp(x->name, y->name) : x->n < y->n ? 1 : -1;
}

/* The most frequent captions of ss_tag_frequency, {"dataset": {"tag": count}}: what a trigger word usually is. */
static void frequent_tags(const char *text, struct json *tags)
{
    struct json *doc = NULL;
    const struct json *set, *count;
    const char *name;
    struct tag *all = NULL;
    size_t n = 0, cap = 0;

    if (json_parse(text, strlen(text), "ss_tag_frequency", &doc, NULL))
        return; /* the metadata is foreign: what is no JSON has no tags */
    for (void *i = json_iter_next(doc, NULL, &name, &set); i;
         i = json_iter_next(doc, i, &name, &set))
        for (void *j = json_iter_next(set, NULL, &name, &count); j;
             j = json_iter_next(set, j, &name, &count))
            if (mem_grow((void **)&all, &cap, n, sizeof(*all)))
                all[n++] = (struct tag){name, json_int(count)};
    if (n)
        qsort(all, n, sizeof(*all), by_count);
    for (size_t i = 0; i < n && i < N_TAGS_SHOWN; i++)
        json_add(tags, json_new_string(str_of(all[i].name)));
    mem_free(all);
    json_free(doc);
}

struct training {
    struct json *metadata, *triggers, *tags;
};

static struct training read_training(const struct pf_adapter *adapter)
{
    struct training t = {json_new_object(), json_new_array(), json_new_array()};
    const char *key, *value;

    for (uint32_t i = 0; pf_adapter_metadata(adapter, i, &key, &value); i++) {
        json_set(t.metadata, key, json_new_string(str_of(value)));
        if (is_trigger_key(key) && *value)
            json_add(t.triggers, json_new_string(str_of(value)));
        if (!strcmp(key, "ss_tag_frequency"))
            frequent_tags(value, t.tags);
    }
    return t;
}

static void print_strings(const struct out *o, const char *label, const struct json *list)
{
    struct strbuf text;

    strbuf_init(&text);
    for (size_t i = 0; i < json_len(list); i++)
        strbuf_addf(&text, i ? ", %s" : "%s", json_z(json_at(list, i)));
    if (text.n)
        out_field(o, label, "%s", strbuf_z(&text));
    strbuf_release(&text);
}

static void print_training(const struct out *o, const struct training *t, bool is_long)
{
    const char *key;
    const struct json *value;
    bool is_first = true;

    print_strings(o, "trigger", t->triggers);
    print_strings(o, "tags", t->tags);
    for (void *it = json_iter_next(t->metadata, NULL, &key, &value); it;
         it = json_iter_next(t->metadata, it, &key, &value)) {
        struct str text = json_str(value);
        bool is_cut = !is_long && text.n > N_VALUE_SHOWN;

        out_field(o, is_first ? "metadata" : "", "%s = %.*s%s", key,
                  (int)(is_cut ? N_VALUE_SHOWN : text.n), text.p, is_cut ? " ..." : "");
        is_first = false;
    }
}

static void print_all(const struct out *o, const struct pf_adapter *adapter,
                      const struct pf_adapter_info *info, const struct training *training,
                      bool is_long)
{
    char size[16];
    const char *note;

    out_field(o, "adapter", "%s", info->path);
    out_field(o, "format", "safetensors: %s in %u tensors, %s",
              out_bytes((double)info->n_bytes, size), info->n_keys, info->dtypes);
    out_field(o, "family", "%s", info->family);
    out_field(o, "dialect", "%s", info->dialect);
    if (info->rank_min == info->rank_max)
        out_field(o, "rank", "%u", info->rank_min);
    else
        out_field(o, "rank", "%u to %u", info->rank_min, info->rank_max);
    if (info->scale_min == info->scale_max)
        out_field(o, "scale", "%.6g", info->scale_min);
    else
        out_field(o, "scale", "%.6g to %.6g", info->scale_min, info->scale_max);
    out_field(o, "digest", "%s", info->digest);
    print_training(o, training, is_long);
    for (uint32_t i = 0; (note = pf_adapter_note(adapter, i)); i++)
        out_field(o, i ? "" : "odd", "%s", note);
    if (!pf_adapter_note(adapter, 0))
        out_field(o, "odd", "nothing");
    print_targets(o, adapter, info->n_modules);
}

static struct json *range_json(double min, double max, bool is_int)
{
    struct json *it = json_new_object();

    json_set(it, "min", is_int ? json_new_int((int64_t)min) : json_new_real(min));
    json_set(it, "max", is_int ? json_new_int((int64_t)max) : json_new_real(max));
    return it;
}

static void modules_json(const struct pf_adapter *adapter, uint32_t n, struct json *doc)
{
    struct json *targets = json_new_array(), *modules = json_new_array();
    const char *last = NULL;
    struct pf_adapter_module m;

    for (uint32_t i = 0; i < n; i++, last = m.name) {
        struct json *it = json_new_object();

        pf_adapter_module(adapter, i, &m);
        if (!last || strcmp(last, m.name))
            json_add(targets, json_new_string(str_of(m.name)));
        json_set(it, "name", json_new_string(str_of(m.name)));
        json_set_z(it, "kind", m.kind);
        json_set_int(it, "rank", m.rank);
        json_set(it, "alpha", m.has_alpha ? json_new_real(m.alpha) : json_new_null());
        json_set_real(it, "scale", m.scale);
        json_add(modules, it);
    }
    json_set(doc, "targets", targets);
    json_set(doc, "modules", modules);
}

void inspect_adapter(const struct out *o, const struct pf_adapter *adapter, bool is_long,
                     struct json *doc)
{
    struct training training = read_training(adapter);
    struct json *notes;
    struct pf_adapter_info info;
    const char *note;

    pf_adapter_info(adapter, &info);
    if (!o->is_json) {
        print_all(o, adapter, &info, &training, is_long);
        json_free(training.metadata);
        json_free(training.triggers);
        json_free(training.tags);
        return;
    }
    notes = json_new_array();
    for (uint32_t i = 0; (note = pf_adapter_note(adapter, i)); i++)
        json_add(notes, json_new_string(str_of(note)));
    json_set_z(doc, "kind", "adapter");
    json_set(doc, "path", json_new_string(str_of(info.path)));
    json_set_z(doc, "format", "safetensors");
    json_set_z(doc, "family", info.family);
    json_set_z(doc, "dialect", info.dialect);
    json_set(doc, "rank", range_json(info.rank_min, info.rank_max, true));
    json_set(doc, "scale", range_json(info.scale_min, info.scale_max, false));
    json_set_z(doc, "dtypes", info.dtypes);
    json_set_z(doc, "digest", info.digest);
    json_set_int(doc, "n_modules", info.n_modules);
    json_set_int(doc, "n_keys", info.n_keys);
    json_set_int(doc, "n_bytes", (int64_t)info.n_bytes);
    modules_json(adapter, info.n_modules, doc);
    json_set(doc, "metadata", training.metadata);
    json_set(doc, "trigger_words", training.triggers);
    json_set(doc, "tags", training.tags);
    json_set(doc, "odd", notes);
}
