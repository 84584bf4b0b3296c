/*
 * Laying a safetensors file out before a byte of data is written: names and shapes in, header bytes and offsets out. Called
 * by whoever writes checkpoints, overlays and synthetic files; the data itself goes through file_pwrite, and the file
 * appears by file_new_publish. Never touches a file, never reorders: data follows in the order of the calls.
 */
#include "base/hash.h"
#include "base/proc.h"
#include "safetensors/st_int.h"

#include <inttypes.h>
#include <string.h>

struct item {
    struct str name;
    int32_t dtype;
    struct shape shape;
    uint64_t begin, end; /* in the data */
};

/* A hash table over names, at most half full. */
struct slot {
    uint64_t hash;
    uint32_t i; /* plus one; 0: free */
};

struct table {
    struct slot *slots;
    size_t n_slots;
};

struct st_layout {
    struct arena arena; /* names, keys, values */
    struct item *items;
    struct st_meta *metas;
    struct table item_names, meta_keys;
    struct hasher *hasher;
    uint64_t seed; /* names may come from a hostile file: their hash must not be foreseeable */
    size_t n_items, cap_items, n_metas, cap_metas;
    uint64_t data0; /* 0: not finished */
};

int st_layout_new(struct st_layout **out, pf_error *err)
{
    struct st_layout *l = mem_calloc(1, sizeof(*l));

    if (l == NULL)
        return err_nomem(err, sizeof(*l), "a file layout");
    arena_init(&l->arena);
    l->hasher = hasher_new();
    if (l->hasher == NULL) {
        st_layout_free(l);
        return err_nomem(err, sizeof(*l), "a file layout");
    }
    l->seed = clock_ns() ^ (uint64_t)(uintptr_t)l;
    *out = l;
    return PF_OK;
}

void st_layout_free(struct st_layout *l)
{
    if (l == NULL)
        return;
    arena_release(&l->arena);
    hasher_free(l->hasher);
    mem_free(l->items);
    mem_free(l->metas);
    mem_free(l->item_names.slots);
    mem_free(l->meta_keys.slots);
    mem_free(l);
}

static int check_text(struct str s, const char *what, pf_error *err)
{
    char quoted[SCAN_QUOTE_MAX + 8];
    size_t off_bad;

    if (!str_is_utf8(s, &off_bad))
        return err_set(err, PF_E_INVALID, "%s '%s' is not UTF-8 at byte %zu", what,
                       scan_quote(s, quoted), off_bad);
    return PF_OK;
}

/* A copy that is there even when it is empty. */
static int copy_text(struct st_layout *l, struct str s, struct str *out, pf_error *err)
{
    char *p = arena_strndup(&l->arena, s.n == 0 ? "" : s.p, s.n);

    if (p == NULL)
        return err_nomem(err, s.n, "a name");
    *out = (struct str){p, s.n};
    return PF_OK;
}

/* --------------------------------------------------------------------------------------- names used once */

static struct str name_at(const struct st_layout *l, const struct table *t, uint32_t i)
{
    return t == &l->item_names ? l->items[i].name : l->metas[i].key;
}

/* The slot that holds the name, or the free one where it belongs. */
static struct slot *find_slot(const struct st_layout *l, const struct table *t, struct str name,
                              uint64_t hash)
{
    size_t i = (size_t)hash & (t->n_slots - 1);

    while (t->slots[i].i != 0 &&
           (t->slots[i].hash != hash || !str_eq(name_at(l, t, t->slots[i].i - 1), name)))
        i = (i + 1) & (t->n_slots - 1);
    return &t->slots[i];
}

static int grow_slots(struct table *t, size_t n_names, pf_error *err)
{
    struct table bigger = {NULL, t->n_slots == 0 ? 64 : 2 * t->n_slots};
    size_t i;

    if (2 * (n_names + 1) <= t->n_slots)
        return PF_OK;
    bigger.slots = mem_calloc(bigger.n_slots, sizeof(*bigger.slots));
    if (bigger.slots == NULL)
        return err_nomem(err, bigger.n_slots * sizeof(*bigger.slots), "a table of names");
    /* All names differ, so the first free slot is the right one. */
    for (i = 0; i < t->n_slots; i++) {
        size_t k = (size_t)t->slots[i].hash & (bigger.n_slots - 1);
        if (t->slots[i].i == 0)
            continue;
        while (bigger.slots[k].i != 0)
            k = (k + 1) & (bigger.n_slots - 1);
        bigger.slots[k] = t->slots[i];
    }
    mem_free(t->slots);
    *t = bigger;
    return PF_OK;
}

/* Finds room for a new name. *out_slot is the caller's to fill; PF_E_INVALID when the name is there. */
static int claim_name(struct st_layout *l, struct table *t, size_t n_names, struct str name,
                      struct slot **out_slot, pf_error *err)
{
    char quoted[SCAN_QUOTE_MAX + 8];
    uint64_t hash;
    int rc = n_names < UINT32_MAX - 1 ? grow_slots(t, n_names, err)
                                      : err_set(err, PF_E_RANGE, "more than 2^32 names");

    if (rc != PF_OK)
        return rc;
    hasher_reset(l->hasher);
    hasher_add_u64(l->hasher, l->seed);
    hasher_add_str(l->hasher, name.n == 0 ? "" : name.p, name.n);
    hash = hasher_digest(l->hasher).lo;
    *out_slot = find_slot(l, t, name, hash);
    if ((*out_slot)->i != 0)
        return err_set(err, PF_E_INVALID, "%s '%s' is used twice",
                       t == &l->item_names ? "tensor name" : "metadata key",
                       scan_quote(name, quoted));
    (*out_slot)->hash = hash;
    return PF_OK;
}

int st_layout_meta(struct st_layout *l, struct str key, struct str value, pf_error *err)
{
    char quoted[SCAN_QUOTE_MAX + 8];
    void *metas = l->metas;
    struct slot *slot = NULL;
    struct st_meta m;
    int rc = check_text(key, "metadata key", err);

    if (rc == PF_OK)
        rc = check_text(value, "metadata value", err);
    if (rc == PF_OK && l->data0 != 0)
        rc = err_set(err, PF_E_STATE, "metadata key '%s' comes after the layout was finished",
                     scan_quote(key, quoted));
    if (rc == PF_OK)
        rc = claim_name(l, &l->meta_keys, l->n_metas, key, &slot, err);
    if (rc == PF_OK)
        rc = copy_text(l, key, &m.key, err);
    if (rc == PF_OK)
        rc = copy_text(l, value, &m.value, err);
    if (rc != PF_OK)
        return rc;
    if (!mem_grow(&metas, &l->cap_metas, l->n_metas, sizeof(m)))
        return err_nomem(err, sizeof(m), "metadata");
    l->metas = metas;
    l->metas[l->n_metas++] = m;
    slot->i = (uint32_t)l->n_metas;
    return PF_OK;
}

static int item_bytes(const struct item *it, pf_error *err, uint64_t *out_n)
{
    char quoted[SCAN_QUOTE_MAX + 8], text[256];
    int32_t i;

    if (it->dtype < 0 || it->dtype >= PF_N_DTYPES)
        return err_set(err, PF_E_INVALID, "tensor '%s': dtype %d is not known",
                       scan_quote(it->name, quoted), (int)it->dtype);
    if (it->shape.rank < 0 || it->shape.rank > PF_MAX_RANK)
        return err_set(err, PF_E_INVALID, "tensor '%s': rank %d is not in 0..%d",
                       scan_quote(it->name, quoted), (int)it->shape.rank, PF_MAX_RANK);
    for (i = 0; i < it->shape.rank; i++)
        if (it->shape.dim[i] < 0)
            return err_set(err, PF_E_INVALID, "tensor '%s': shape %s has a negative dimension",
                           scan_quote(it->name, quoted),
                           shape_text(&it->shape, text, sizeof(text)));
    if (!shape_n_bytes(&it->shape, it->dtype, out_n))
        return err_set(err, PF_E_RANGE,
                       "tensor '%s': the size of %s %s overflows, or is no whole number of bytes",
                       scan_quote(it->name, quoted), pf_dtype_name(it->dtype),
                       shape_text(&it->shape, text, sizeof(text)));
    return PF_OK;
}

static int check_name(const struct st_layout *l, struct str name, pf_error *err)
{
    char quoted[SCAN_QUOTE_MAX + 8];
    int rc = check_text(name, "tensor name", err);

    if (rc != PF_OK)
        return rc;
    if (l->data0 != 0)
        return err_set(err, PF_E_STATE, "tensor '%s' comes after the layout was finished",
                       scan_quote(name, quoted));
    if (str_eqz(name, "__metadata__"))
        return err_set(err, PF_E_INVALID, "tensor name '__metadata__' is reserved");
    if (name.n > 0 && memchr(name.p, 0, name.n) != NULL)
        return err_set(err, PF_E_INVALID, "tensor name '%s' holds a NUL character",
                       scan_quote(name, quoted));
    return PF_OK;
}

int st_layout_tensor(struct st_layout *l, struct str name, int32_t dtype, const struct shape *shape,
                     pf_error *err)
{
    struct item it = {.name = name, .dtype = dtype, .shape = *shape};
    char quoted[SCAN_QUOTE_MAX + 8];
    void *items = l->items;
    struct slot *slot = NULL;
    uint64_t n_bytes = 0;
    int rc = check_name(l, name, err);

    if (rc == PF_OK)
        rc = item_bytes(&it, err, &n_bytes);
    if (rc == PF_OK)
        rc = claim_name(l, &l->item_names, l->n_items, name, &slot, err);
    if (rc != PF_OK)
        return rc;
    it.begin = l->n_items == 0 ? 0 : l->items[l->n_items - 1].end;
    /* A file offset is a signed number to the system. */
    if (!add_u64(it.begin, n_bytes, &it.end) || it.end > INT64_MAX)
        return err_set(err, PF_E_RANGE, "tensor '%s': the file would end beyond 2^63 bytes",
                       scan_quote(name, quoted));
    rc = copy_text(l, name, &it.name, err);
    if (rc != PF_OK)
        return rc;
    if (!mem_grow(&items, &l->cap_items, l->n_items, sizeof(it)))
        return err_nomem(err, sizeof(it), "a tensor");
    l->items = items;
    l->items[l->n_items++] = it;
    slot->i = (uint32_t)l->n_items;
    return PF_OK;
}

/* ----------------------------------------------------------------------------------------------- the text */

static void add_string(struct strbuf *b, struct str s)
{
    size_t i, start = 0;

    strbuf_add(b, "\"", 1);
    for (i = 0; i < s.n; i++) {
        uint8_t c = (uint8_t)s.p[i];
        if (c >= 0x20 && c != '"' && c != '\\')
            continue;
        strbuf_add(b, s.p + start, i - start);
        if (c < 0x20)
            strbuf_addf(b, "\\u%04x", c);
        else
            strbuf_addf(b, "\\%c", c);
        start = i + 1;
    }
    strbuf_add(b, s.p + start, s.n - start);
    strbuf_add(b, "\"", 1);
}

static void add_item(struct strbuf *b, const struct item *it)
{
    int32_t i;

    add_string(b, it->name);
    strbuf_addf(b, ":{\"dtype\":\"%s\",\"shape\":[", pf_dtype_name(it->dtype));
    for (i = 0; i < it->shape.rank; i++)
        strbuf_addf(b, "%s%" PRId64, i == 0 ? "" : ",", it->shape.dim[i]);
    strbuf_addf(b, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", it->begin, it->end);
}

static void add_json(const struct st_layout *l, struct strbuf *b)
{
    size_t i;

    strbuf_adds(b, "{");
    if (l->n_metas > 0) {
        strbuf_adds(b, "\"__metadata__\":{");
        for (i = 0; i < l->n_metas; i++) {
            strbuf_adds(b, i == 0 ? "" : ",");
            add_string(b, l->metas[i].key);
            strbuf_adds(b, ":");
            add_string(b, l->metas[i].value);
        }
        strbuf_adds(b, "}");
    }
    for (i = 0; i < l->n_items; i++) {
        strbuf_adds(b, i == 0 && l->n_metas == 0 ? "" : ",");
        add_item(b, &l->items[i]);
    }
    strbuf_adds(b, "}");
}

int st_layout_finish(struct st_layout *l, size_t align, struct strbuf *out_header, pf_error *err)
{
    static const char spaces[64] =
        "                                                               ";
    uint64_t end = l->n_items == 0 ? 0 : l->items[l->n_items - 1].end;
    size_t n, n_header, i;
    struct strbuf b;
    int rc = PF_OK;

    if (align == 0 || align > ST_HEADER_MAX)
        return err_set(err, PF_E_INVALID, "alignment %zu is not in 1..%u", align, ST_HEADER_MAX);
    strbuf_init(&b);
    strbuf_add(&b, "\0\0\0\0\0\0\0\0", ST_PREFIX_BYTES);
    add_json(l, &b);
    n = (b.n + align - 1) / align * align - b.n;
    while (n > 0 && strbuf_ok(&b)) {
        size_t k = n < sizeof(spaces) - 1 ? n : sizeof(spaces) - 1;
        strbuf_add(&b, spaces, k);
        n -= k;
    }
    n_header = b.n - ST_PREFIX_BYTES;
    if (!strbuf_ok(&b))
        rc = err_nomem(err, b.n, "a safetensors header");
    else if (n_header > ST_HEADER_MAX)
        rc = err_set(err, PF_E_RANGE, "a header of %zu bytes is larger than %u", n_header,
                     ST_HEADER_MAX);
    else if (end > INT64_MAX - (uint64_t)b.n)
        rc = err_set(err, PF_E_RANGE, "the file would end beyond 2^63 bytes");
    if (rc == PF_OK) {
        for (i = 0; i < ST_PREFIX_BYTES; i++)
            b.p[i] = (char)((uint64_t)n_header >> (8 * i) & 0xff);
        strbuf_add(out_header, b.p, b.n);
        if (!strbuf_ok(out_header))
            rc = err_nomem(err, b.n, "a safetensors header");
        else
            l->data0 = b.n;
    }
    strbuf_release(&b);
    return rc;
}

uint64_t st_layout_offset(const struct st_layout *l, size_t i)
{
    return l->data0 + l->items[i].begin;
}

uint64_t st_layout_file_bytes(const struct st_layout *l)
{
    return l->data0 + (l->n_items == 0 ? 0 : l->items[l->n_items - 1].end);
}
