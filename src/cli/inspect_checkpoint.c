/*
 * What a checkpoint is: layout, components, layers, dtypes, and what is odd about it. Headers only, but for the content id,
 * which reads a block per tensor.
 */
#include "cli/inspect.h"

#include <stdio.h>
#include <string.h>

#define N_ODD_MAX 20

static bool is_float(int32_t dtype)
{
    return dtype == PF_F32 || dtype == PF_BF16 || dtype == PF_F16 || dtype == PF_F64;
}

/* Findings, as sentences in a JSON array: both kinds of output show the same ones. */
static void add_odd(struct json *odd, const char *fmt, ...) PF_PRINTF(2, 3);
static void add_odd(struct json *odd, const char *fmt, ...)
{
    char text[512];
    va_list args;

    if (json_len(odd) >= N_ODD_MAX)
        return;
    va_start(args, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    json_add(odd, json_new_string(str_of(text)));
}

/* " and 7 more", or nothing, for a finding of which the first example was named. */
static const char *and_more(uint32_t n, char text[32])
{
    text[0] = 0;
    if (n > 1)
        (void)snprintf(text, 32, " and %u more", n - 1);
    return text;
}

static void find_odd_tensors(const struct pf_checkpoint *ckpt, uint32_t n, struct json *odd)
{
    struct pf_tensor_info t, first_other = {0}, first_empty = {0}, first_unaligned = {0};
    uint32_t n_other = 0, n_empty = 0, n_unaligned = 0;
    char more[32];

    for (uint32_t i = 0; i < n; i++) {
        uint32_t n_item;

        pf_checkpoint_tensor(ckpt, i, &t);
        n_item = pf_dtype_bits(t.dtype) / 8;
        if (!is_float(t.dtype) && !n_other++)
            first_other = t;
        if (!t.n_bytes && !n_empty++)
            first_empty = t;
        if (t.n_bytes && n_item > 1 && t.off_bytes % n_item && !n_unaligned++)
            first_unaligned = t;
    }
    if (n_other)
        add_odd(odd, "not an ordinary float, so no adapter can change it: '%s' (%s)%s",
                first_other.name, pf_dtype_name(first_other.dtype), and_more(n_other, more));
    if (n_empty)
        add_odd(odd, "empty: '%s'%s", first_empty.name, and_more(n_empty, more));
    if (n_unaligned)
        add_odd(odd, "not at a multiple of its item size: '%s' at byte %llu%s",
                first_unaligned.name, (unsigned long long)first_unaligned.off_bytes,
                and_more(n_unaligned, more));
}

/* The part of a layer's name before its number: "blocks." of "blocks.7". */
static size_t stem_length(const char *name)
{
    size_t n = strlen(name);

    while (n && name[n - 1] >= '0' && name[n - 1] <= '9')
        n--;
    return n;
}

/* Are layers a and b (neighbours) blocks of one series? */
static bool is_series(const struct pf_layer_info *a, const struct pf_layer_info *b)
{
    size_t n = stem_length(a->name);

    return a->i_component == b->i_component && !a->is_stem && !b->is_stem &&
           n == stem_length(b->name) && !strncmp(a->name, b->name, n);
}

static void find_odd_layers(const struct pf_checkpoint *ckpt, uint32_t n, struct json *odd)
{
    struct pf_layer_info prev = {0}, layer;

    for (uint32_t i = 0; i < n; i++, prev = layer) {
        uint64_t a, b;

        pf_checkpoint_layer(ckpt, i, &layer);
        if (!i || !is_series(&prev, &layer))
            continue;
        if (str_to_u64(str_of(prev.name + stem_length(prev.name)), &a) &&
            str_to_u64(str_of(layer.name + stem_length(layer.name)), &b) && b != a + 1)
            add_odd(odd, "layer '%s' is followed by '%s': numbers are missing", prev.name,
                    layer.name);
        if (prev.n_tensors != layer.n_tensors)
            add_odd(odd, "layer '%s' has %u tensors and layer '%s' has %u", prev.name,
                    prev.n_tensors, layer.name, layer.n_tensors);
        else if (prev.n_bytes != layer.n_bytes)
            add_odd(odd, "layer '%s' has %llu bytes and layer '%s' has %llu", prev.name,
                    (unsigned long long)prev.n_bytes, layer.name,
                    (unsigned long long)layer.n_bytes);
    }
}

struct histogram {
    uint64_t n_tensors[PF_N_DTYPES], n_bytes[PF_N_DTYPES];
};

static void count_dtypes(const struct pf_checkpoint *ckpt, uint32_t n, struct histogram *h)
{
    struct pf_tensor_info t;

    for (uint32_t i = 0; i < n; i++) {
        pf_checkpoint_tensor(ckpt, i, &t);
        if (t.dtype >= 0 && t.dtype < PF_N_DTYPES) {
            h->n_tensors[t.dtype]++;
            h->n_bytes[t.dtype] += t.n_bytes;
        }
    }
}

static void shape_text(const struct pf_tensor_info *t, struct strbuf *b)
{
    strbuf_clear(b);
    for (int32_t d = 0; d < t->rank; d++)
        strbuf_addf(b, d ? " x %lld" : "%lld", (long long)t->shape[d]);
    if (!t->rank)
        strbuf_adds(b, "scalar");
}

static void components_json(const struct pf_checkpoint *ckpt, uint32_t n, struct json *doc)
{
    struct json *list = json_new_array();
    struct pf_component_info c;

    for (uint32_t i = 0; i < n; i++) {
        struct json *it = json_new_object();

        pf_checkpoint_component(ckpt, i, &c);
        json_set(it, "name", json_new_string(str_of(c.name)));
        json_set(it, "path", json_new_string(str_of(c.path)));
        json_set(it, "class_name",
                 c.class_name ? json_new_string(str_of(c.class_name)) : json_new_null());
        json_set_int(it, "n_tensors", c.n_tensors);
        json_set_int(it, "n_layers", c.n_layers);
        json_set_int(it, "n_files", c.n_files);
        json_set_int(it, "n_bytes", (int64_t)c.n_bytes);
        json_add(list, it);
    }
    json_set(doc, "components", list);
}

static void layers_json(const struct pf_checkpoint *ckpt, uint32_t n, struct json *doc)
{
    struct json *list = json_new_array();
    struct pf_component_info c;
    struct pf_layer_info layer;

    for (uint32_t i = 0; i < n; i++) {
        struct json *it = json_new_object();

        pf_checkpoint_layer(ckpt, i, &layer);
        pf_checkpoint_component(ckpt, layer.i_component, &c);
        json_set(it, "name", json_new_string(str_of(layer.name)));
        json_set(it, "component", json_new_string(str_of(c.name)));
        json_set_bool(it, "is_stem", layer.is_stem);
        json_set_int(it, "n_tensors", layer.n_tensors);
        json_set_int(it, "n_bytes", (int64_t)layer.n_bytes);
        json_add(list, it);
    }
    json_set(doc, "layers", list);
}

static void tensors_json(const struct pf_checkpoint *ckpt, uint32_t n, struct json *doc)
{
    struct json *list = json_new_array();
    struct pf_tensor_info t;

    for (uint32_t i = 0; i < n; i++) {
        struct json *it = json_new_object(), *shape = json_new_array();

        pf_checkpoint_tensor(ckpt, i, &t);
        json_set(it, "name", json_new_string(str_of(t.name)));
        json_set(it, "component", json_new_string(str_of(t.component)));
        json_set_z(it, "dtype", pf_dtype_name(t.dtype));
        for (int32_t d = 0; d < t.rank; d++)
            json_add(shape, json_new_int(t.shape[d]));
        json_set(it, "shape", shape);
        json_set_int(it, "n_bytes", (int64_t)t.n_bytes);
        json_set(it, "file", json_new_string(str_of(t.file)));
        json_set_int(it, "offset", (int64_t)t.off_bytes);
        json_add(list, it);
    }
    json_set(doc, "tensors", list);
}

static void dtypes_json(const struct histogram *h, struct json *doc)
{
    struct json *dtypes = json_new_object();

    for (int32_t i = 0; i < PF_N_DTYPES; i++)
        if (h->n_tensors[i]) {
            struct json *it = json_new_object();

            json_set_int(it, "n_tensors", (int64_t)h->n_tensors[i]);
            json_set_int(it, "n_bytes", (int64_t)h->n_bytes[i]);
            json_set(dtypes, pf_dtype_name(i), it);
        }
    json_set(doc, "dtypes", dtypes);
}

static void print_components(const struct out *o, const struct pf_checkpoint *ckpt, uint32_t n)
{
    struct pf_component_info c;
    char size[16];

    for (uint32_t i = 0; i < n; i++) {
        pf_checkpoint_component(ckpt, i, &c);
        out_field(o, i ? "" : "components", "%s%s%s%s: %s in %u tensors, %u layers, %u file%s",
                  c.name, c.class_name ? " (" : "", c.class_name ? c.class_name : "",
                  c.class_name ? ")" : "", out_bytes((double)c.n_bytes, size), c.n_tensors,
                  c.n_layers, c.n_files, c.n_files == 1 ? "" : "s");
    }
}

/* One row per run of equal blocks: "transformer_blocks.0 to 7". */
static void print_layers(const struct pf_checkpoint *ckpt, uint32_t n)
{
    struct pf_layer_info first, last, layer;
    struct pf_component_info c;
    struct table table;
    char size[16];

    table_init(&table, 4, 0xe);
    table_cell(&table, "layer");
    table_cell(&table, "count");
    table_cell(&table, "tensors");
    table_cell(&table, "bytes each");
    for (uint32_t i = 0, n_run; i < n; i += n_run) {
        pf_checkpoint_layer(ckpt, i, &first);
        pf_checkpoint_component(ckpt, first.i_component, &c);
        last = first;
        for (n_run = 1; i + n_run < n; n_run++) {
            pf_checkpoint_layer(ckpt, i + n_run, &layer);
            if (!is_series(&last, &layer) || layer.n_bytes != first.n_bytes ||
                layer.n_tensors != first.n_tensors)
                break;
            last = layer;
        }
        if (n_run > 1)
            table_cell(&table, "%s: %s to %s", c.name, first.name,
                       last.name + stem_length(last.name));
        else
            table_cell(&table, "%s: %s", c.name, first.name);
        table_cell(&table, "%u", n_run);
        table_cell(&table, "%u", first.n_tensors);
        table_cell(&table, "%s", out_bytes((double)first.n_bytes, size));
    }
    table_print(&table, "  ");
    table_release(&table);
}

static void print_tensors(const struct pf_checkpoint *ckpt, uint32_t n)
{
    struct pf_tensor_info t;
    struct strbuf shape;
    struct table table;
    char size[16];

    strbuf_init(&shape);
    table_init(&table, 4, 0x8);
    table_cell(&table, "tensor");
    table_cell(&table, "dtype");
    table_cell(&table, "shape");
    table_cell(&table, "size");
    for (uint32_t i = 0; i < n; i++) {
        pf_checkpoint_tensor(ckpt, i, &t);
        shape_text(&t, &shape);
        table_cell(&table, "%s", t.name);
        table_cell(&table, "%s", pf_dtype_name(t.dtype));
        table_cell(&table, "%s", strbuf_z(&shape));
        table_cell(&table, "%s", out_bytes((double)t.n_bytes, size));
    }
    table_print(&table, "  ");
    table_release(&table);
    strbuf_release(&shape);
}

static void print_all(const struct out *o, const struct pf_checkpoint *ckpt,
                      const struct pf_checkpoint_info *info, const struct histogram *h,
                      const char *id, const struct json *odd)
{
    char size[16];
    bool is_first = true;

    out_field(o, "checkpoint", "%s", info->path);
    out_field(o, "format", "safetensors, %s: %s in %u tensors, %u layers, %u file%s", info->layout,
              out_bytes((double)info->n_bytes, size), info->n_tensors, info->n_layers,
              info->n_files, info->n_files == 1 ? "" : "s");
    print_components(o, ckpt, info->n_components);
    for (int32_t i = 0; i < PF_N_DTYPES; i++)
        if (h->n_tensors[i]) {
            out_field(o, is_first ? "dtypes" : "", "%s: %s in %llu tensors", pf_dtype_name(i),
                      out_bytes((double)h->n_bytes[i], size), (unsigned long long)h->n_tensors[i]);
            is_first = false;
        }
    out_field(o, "content id", "%s", id);
    if (!json_len(odd))
        out_field(o, "odd", "nothing");
    for (size_t i = 0; i < json_len(odd); i++)
        out_field(o, i ? "" : "odd", "%s", json_z(json_at(odd, i)));
}

int inspect_checkpoint(const struct out *o, struct pf_checkpoint *ckpt, bool is_long,
                       struct json *doc, pf_error *err)
{
    struct pf_checkpoint_info info;
    struct histogram h = {0};
    struct json *odd;
    char id[33];
    int rc = pf_checkpoint_content_id(ckpt, id, err);

    if (rc)
        return rc;
    pf_checkpoint_info(ckpt, &info);
    count_dtypes(ckpt, info.n_tensors, &h);
    odd = json_new_array();
    find_odd_tensors(ckpt, info.n_tensors, odd);
    find_odd_layers(ckpt, info.n_layers, odd);
    if (!o->is_json) {
        print_all(o, ckpt, &info, &h, id, odd);
        print_layers(ckpt, info.n_layers);
        if (is_long)
            print_tensors(ckpt, info.n_tensors);
        json_free(odd);
        return PF_OK;
    }
    json_set_z(doc, "kind", "checkpoint");
    json_set(doc, "path", json_new_string(str_of(info.path)));
    json_set_z(doc, "format", "safetensors");
    json_set_z(doc, "layout", info.layout);
    json_set_int(doc, "n_tensors", info.n_tensors);
    json_set_int(doc, "n_layers", info.n_layers);
    json_set_int(doc, "n_files", info.n_files);
    json_set_int(doc, "n_bytes", (int64_t)info.n_bytes);
    json_set_z(doc, "content_id", id);
    dtypes_json(&h, doc);
    components_json(ckpt, info.n_components, doc);
    layers_json(ckpt, info.n_layers, doc);
    if (is_long)
        tensors_json(ckpt, info.n_tensors, doc);
    json_set(doc, "odd", odd);
    return PF_OK;
}
