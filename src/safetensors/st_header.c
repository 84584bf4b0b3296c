/*
 * The header of a safetensors file: tensors, metadata, and the rule that the tensors tile the data exactly. Called by
 * st_open and by the fuzz target, on bytes only: no file is touched here. A result satisfies every invariant that
 * safetensors.h promises; a refusal says which byte, which tensor and which numbers.
 */
#include "safetensors/st_int.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

struct st_header {
    struct arena arena; /* decoded strings that held escapes */
    struct st_tensor *tensors;
    uint32_t *by_name;
    struct st_meta *metas;
    size_t n_tensors, n_metas;
};

/* While parsing: the result, and what is needed only until it is checked. */
struct parse {
    struct scan s;
    struct st_header *h;
    uint32_t *at; /* of each tensor's key, in header order */
    size_t cap_tensors, cap_at, cap_metas;
    uint64_t data0, n_file; /* file offset of the data, size of the file */
    bool has_meta;
};

/* ------------------------------------------------------------------------------------------- one tensor */

static int parse_dtype(struct scan *s, int32_t *out_dtype)
{
    char quoted[SCAN_QUOTE_MAX + 8];
    struct str name;
    size_t at;
    int rc;

    (void)scan_peek(s);
    at = s->i;
    rc = scan_string(s, &name);
    if (rc != PF_OK)
        return rc;
    if (!dtype_parse(name, out_dtype))
        return scan_fail(s, PF_E_UNSUPPORTED, at, "dtype '%s' at byte %zu is not known",
                         scan_quote(name, quoted), ST_PREFIX_BYTES + at);
    return PF_OK;
}

static int parse_shape(struct scan *s, struct shape *out_shape)
{
    struct shape shape = {0};
    size_t at;
    bool more;
    int rc = scan_take(s, '[', "'[' of shape");

    at = s->i - 1;
    if (rc == PF_OK)
        rc = scan_next_item(s, true, &more);
    while (rc == PF_OK && more) {
        uint64_t dim;

        rc = scan_u64(s, "shape", &dim);
        if (rc != PF_OK)
            return rc;
        if (dim > INT64_MAX)
            return scan_fail(s, PF_E_RANGE, at,
                             "shape has a dimension of %" PRIu64 ", more than 2^63 - 1", dim);
        if (shape.rank == PF_MAX_RANK)
            return scan_fail(s, PF_E_UNSUPPORTED, at, "shape has more than %d dimensions",
                             PF_MAX_RANK);
        shape.dim[shape.rank++] = (int64_t)dim;
        rc = scan_next_item(s, false, &more);
    }
    if (rc == PF_OK)
        *out_shape = shape;
    return rc;
}

static int parse_offsets(struct scan *s, uint64_t out_range[2])
{
    size_t n = 0, at;
    bool more;
    int rc = scan_take(s, '[', "'[' of data_offsets");

    at = s->i - 1;
    if (rc == PF_OK)
        rc = scan_next_item(s, true, &more);
    while (rc == PF_OK && more) {
        uint64_t v;

        rc = scan_u64(s, "data_offsets", &v);
        if (rc != PF_OK)
            return rc;
        if (n < 2)
            out_range[n] = v;
        n++;
        rc = scan_next_item(s, false, &more);
    }
    if (rc == PF_OK && n != 2)
        return scan_fail(s, PF_E_FORMAT, at, "data_offsets hold %zu numbers instead of 2", n);
    return rc;
}

/* The bytes that dtype and shape ask for. The product is checked left to right, as the reference does. */
static int tensor_bytes(const struct scan *s, size_t at, const struct st_tensor *t, uint64_t *out_n)
{
    uint64_t n = 1, n_bits;
    char text[256];
    int32_t i;

    for (i = 0; i < t->shape.rank; i++)
        if (!mul_u64(n, (uint64_t)t->shape.dim[i], &n))
            return scan_fail(s, PF_E_RANGE, at, "the number of elements of %s overflows 64 bits",
                             shape_text(&t->shape, text, sizeof(text)));
    if (!mul_u64(n, pf_dtype_bits(t->dtype), &n_bits))
        return scan_fail(s, PF_E_RANGE, at, "the size of %s %s overflows 64 bits",
                         pf_dtype_name(t->dtype), shape_text(&t->shape, text, sizeof(text)));
    if (n_bits % 8 != 0)
        return scan_fail(
            s, PF_E_FORMAT, at, "%s %s has %" PRIu64 " bits, which is no whole number of bytes",
            pf_dtype_name(t->dtype), shape_text(&t->shape, text, sizeof(text)), n_bits);
    *out_n = n_bits / 8;
    return PF_OK;
}

static int check_tensor(const struct scan *s, size_t at, struct st_tensor *t,
                        const uint64_t range[2])
{
    char text[256];
    uint64_t n_bytes = 0;
    int rc;

    if (range[1] < range[0])
        return scan_fail(s, PF_E_FORMAT, at,
                         "data_offsets [%" PRIu64 ", %" PRIu64 "] end before they begin", range[0],
                         range[1]);
    rc = tensor_bytes(s, at, t, &n_bytes);
    if (rc != PF_OK)
        return rc;
    if (range[1] - range[0] != n_bytes)
        return scan_fail(s, PF_E_FORMAT, at,
                         "data_offsets [%" PRIu64 ", %" PRIu64 "] hold %" PRIu64
                         " bytes, but %s %s takes %" PRIu64,
                         range[0], range[1], range[1] - range[0], pf_dtype_name(t->dtype),
                         shape_text(&t->shape, text, sizeof(text)), n_bytes);
    t->off_bytes = range[0]; /* made absolute when the whole layout is proved */
    t->n_bytes = n_bytes;
    return PF_OK;
}

enum { HAS_DTYPE = 1, HAS_SHAPE = 2, HAS_OFFSETS = 4, HAS_ALL = 7 };

/* The object behind a tensor's name. Fields that we do not know are checked as JSON and ignored. */
static int parse_tensor_fields(struct scan *s, struct st_tensor *t, uint64_t range[2],
                               unsigned *out_has)
{
    size_t frame = s->n_keys;
    struct scan_key key;
    bool more;
    int rc = scan_take(s, '{', "'{' of a tensor");

    if (rc == PF_OK)
        rc = scan_next_key(s, true, &more, &key);
    while (rc == PF_OK && more) {
        rc = scan_push_key(s, &key);
        if (rc != PF_OK)
            return rc;
        if (str_eqz(key.name, "dtype")) {
            rc = parse_dtype(s, &t->dtype);
            *out_has |= HAS_DTYPE;
        } else if (str_eqz(key.name, "shape")) {
            rc = parse_shape(s, &t->shape);
            *out_has |= HAS_SHAPE;
        } else if (str_eqz(key.name, "data_offsets")) {
            rc = parse_offsets(s, range);
            *out_has |= HAS_OFFSETS;
        } else {
            rc = scan_skip(s);
        }
        if (rc == PF_OK)
            rc = scan_next_key(s, false, &more, &key);
    }
    return rc == PF_OK ? scan_pop_keys(s, frame) : rc;
}

static int parse_tensor(struct parse *ps, const struct scan_key *key)
{
    struct st_header *h = ps->h;
    struct scan *s = &ps->s;
    struct st_tensor t = {.name = key->name};
    uint64_t range[2] = {0, 0};
    unsigned has = 0;
    void *tensors = h->tensors, *at = ps->at;
    int rc;

    s->tensor = key->name;
    if (memchr(key->name.p, 0, key->name.n) != NULL)
        return scan_fail(s, PF_E_UNSUPPORTED, key->at, "its name holds a NUL character");
    rc = parse_tensor_fields(s, &t, range, &has);
    if (rc != PF_OK)
        return rc;
    if (has != HAS_ALL)
        return scan_fail(s, PF_E_FORMAT, key->at, "has no %s",
                         !(has & HAS_DTYPE)   ? "dtype"
                         : !(has & HAS_SHAPE) ? "shape"
                                              : "data_offsets");
    rc = check_tensor(s, key->at, &t, range);
    if (rc != PF_OK)
        return rc;
    s->tensor = (struct str){NULL, 0};
    if (!mem_grow(&tensors, &ps->cap_tensors, h->n_tensors, sizeof(t)))
        return scan_fail(s, PF_E_NOMEM, key->at, "out of memory for %zu tensors", h->n_tensors + 1);
    h->tensors = tensors;
    if (!mem_grow(&at, &ps->cap_at, h->n_tensors, sizeof(*ps->at)))
        return scan_fail(s, PF_E_NOMEM, key->at, "out of memory for %zu tensors", h->n_tensors + 1);
    ps->at = at;
    ps->at[h->n_tensors] = key->at;
    h->tensors[h->n_tensors++] = t;
    return PF_OK;
}

/* --------------------------------------------------------------------------------------------- metadata */

static int parse_meta_value(struct parse *ps, const struct scan_key *key)
{
    struct st_header *h = ps->h;
    struct scan *s = &ps->s;
    char quoted[SCAN_QUOTE_MAX + 8];
    void *metas = h->metas;
    struct str value;
    int rc;

    if (scan_peek(s) != '"')
        return scan_fail(s, PF_E_FORMAT, s->i,
                         "__metadata__ value of '%s' at byte %zu is no string",
                         scan_quote(key->name, quoted), ST_PREFIX_BYTES + s->i);
    rc = scan_string(s, &value);
    if (rc != PF_OK)
        return rc;
    if (!mem_grow(&metas, &ps->cap_metas, h->n_metas, sizeof(*h->metas)))
        return scan_fail(s, PF_E_NOMEM, key->at, "out of memory for %zu metadata values",
                         h->n_metas + 1);
    h->metas = metas;
    h->metas[h->n_metas++] = (struct st_meta){key->name, value};
    return scan_push_key(s, key);
}

static int parse_meta(struct parse *ps, size_t at)
{
    struct scan *s = &ps->s;
    size_t frame = s->n_keys;
    struct scan_key key;
    bool more;
    int rc;

    if (ps->has_meta)
        return scan_fail(s, PF_E_FORMAT, at, "key '__metadata__' at byte %zu was given before",
                         ST_PREFIX_BYTES + at);
    ps->has_meta = true;
    if (scan_peek(s) == 'n')
        return scan_skip(s);
    rc = scan_take(s, '{', "'{' of __metadata__");
    if (rc == PF_OK)
        rc = scan_next_key(s, true, &more, &key);
    while (rc == PF_OK && more) {
        rc = parse_meta_value(ps, &key);
        if (rc == PF_OK)
            rc = scan_next_key(s, false, &more, &key);
    }
    return rc == PF_OK ? scan_pop_keys(s, frame) : rc;
}

static int parse_object(struct parse *ps)
{
    struct scan *s = &ps->s;
    struct scan_key key;
    size_t off_bad;
    bool more;
    int rc;

    if (!str_is_utf8((struct str){(const char *)s->p, s->n}, &off_bad))
        return scan_fail(s, PF_E_FORMAT, off_bad, "header is not UTF-8 at byte %zu",
                         ST_PREFIX_BYTES + off_bad);
    rc = scan_take(s, '{', "'{'");
    if (rc == PF_OK)
        rc = scan_next_key(s, true, &more, &key);
    while (rc == PF_OK && more) {
        if (str_eqz(key.name, "__metadata__"))
            rc = parse_meta(ps, key.at);
        else
            rc = parse_tensor(ps, &key);
        if (rc == PF_OK)
            rc = scan_next_key(s, false, &more, &key);
    }
    if (rc == PF_OK && scan_peek(s) >= 0)
        return scan_fail(s, PF_E_FORMAT, s->i,
                         "byte 0x%02x at byte %zu follows the header's JSON object", s->p[s->i],
                         ST_PREFIX_BYTES + s->i);
    return rc;
}

/* ---------------------------------------------------------------------------------------- the whole layout */

static int cmp_name(const void *ctx, uint32_t a, uint32_t b)
{
    const struct st_tensor *t = ctx;

    return str_cmp(t[a].name, t[b].name);
}

static int cmp_offset(const void *ctx, uint32_t a, uint32_t b)
{
    const struct st_tensor *t = ctx;

    if (t[a].off_bytes != t[b].off_bytes)
        return t[a].off_bytes < t[b].off_bytes ? -1 : 1;
    if (t[a].n_bytes != t[b].n_bytes)
        return t[a].n_bytes < t[b].n_bytes ? -1 : 1;
    return 0;
}

static int index_names(struct parse *ps, uint32_t *tmp)
{
    struct st_header *h = ps->h;
    char quoted[SCAN_QUOTE_MAX + 8];
    size_t i;

    for (i = 0; i < h->n_tensors; i++)
        h->by_name[i] = (uint32_t)i;
    sort_u32(h->by_name, tmp, h->n_tensors, cmp_name, h->tensors);
    for (i = 1; i < h->n_tensors; i++) {
        uint32_t a = h->by_name[i - 1], b = h->by_name[i];
        if (str_eq(h->tensors[a].name, h->tensors[b].name))
            return scan_fail(&ps->s, PF_E_FORMAT, ps->at[b],
                             "tensor '%s' at byte %zu was given before, at byte %zu",
                             scan_quote(h->tensors[b].name, quoted),
                             (size_t)ps->at[b] + ST_PREFIX_BYTES,
                             (size_t)ps->at[a] + ST_PREFIX_BYTES);
    }
    return PF_OK;
}

/* Puts tensors into file order, shrinks the array to fit, and keeps at[] and by_name in step. */
static int order_by_offset(struct parse *ps, uint32_t *order, uint32_t *tmp)
{
    struct st_header *h = ps->h;
    size_t n = h->n_tensors, i;
    struct st_tensor *sorted = mem_realloc_array(NULL, n, sizeof(*sorted));

    if (sorted == NULL)
        return scan_fail(&ps->s, PF_E_NOMEM, 0, "out of memory for %zu tensors", n);
    for (i = 0; i < n; i++)
        order[i] = (uint32_t)i;
    sort_u32(order, tmp, n, cmp_offset, h->tensors);
    for (i = 0; i < n; i++) {
        sorted[i] = h->tensors[order[i]];
        tmp[order[i]] = (uint32_t)i;
    }
    for (i = 0; i < n; i++)
        h->by_name[i] = tmp[h->by_name[i]];
    for (i = 0; i < n; i++)
        tmp[i] = ps->at[order[i]];
    memcpy(ps->at, tmp, n * sizeof(*tmp));
    mem_free(h->tensors);
    h->tensors = sorted;
    return PF_OK;
}

/* The end of every message about sizes: what the header asks for and what is there. */
static const char *sizes_text(const struct parse *ps, uint64_t n_data, bool is_overflow, char *buf,
                              size_t n_buf)
{
    uint64_t expected;

    if (is_overflow || !add_u64(ps->data0, n_data, &expected))
        (void)snprintf(buf, n_buf, "expected a file of more than 2^64 bytes, it has %" PRIu64,
                       ps->n_file);
    else
        (void)snprintf(buf, n_buf, "expected a file of %" PRIu64 " bytes, it has %" PRIu64,
                       expected, ps->n_file);
    return buf;
}

static int fail_tiling(const struct parse *ps, size_t i, uint64_t end_before)
{
    const struct st_header *h = ps->h;
    const struct st_tensor *t = &h->tensors[i];
    char a[SCAN_QUOTE_MAX + 8], b[SCAN_QUOTE_MAX + 8], sizes[128], before[SCAN_QUOTE_MAX + 64];
    uint64_t n_data = 0;
    bool is_overflow = false;
    size_t k;

    for (k = 0; k < h->n_tensors; k++)
        is_overflow |= !add_u64(n_data, h->tensors[k].n_bytes, &n_data);
    (void)snprintf(before, sizeof(before), i == 0 ? "the start of the data%s" : "tensor '%s'",
                   i == 0 ? "" : scan_quote(h->tensors[i - 1].name, a));
    (void)sizes_text(ps, n_data, is_overflow, sizes, sizeof(sizes));
    if (t->off_bytes > end_before)
        return scan_fail(&ps->s, PF_E_FORMAT, ps->at[i],
                         "tensor '%s': data_offsets [%" PRIu64 ", %" PRIu64
                         "] leave a hole of %" PRIu64 " bytes after %s, which ends at %" PRIu64
                         "; %s",
                         scan_quote(t->name, b), t->off_bytes, t->off_bytes + t->n_bytes,
                         t->off_bytes - end_before, before, end_before, sizes);
    return scan_fail(&ps->s, PF_E_FORMAT, ps->at[i],
                     "tensor '%s': data_offsets [%" PRIu64 ", %" PRIu64
                     "] overlap %s, which ends at %" PRIu64 "; %s",
                     scan_quote(t->name, b), t->off_bytes, t->off_bytes + t->n_bytes, before,
                     end_before, sizes);
}

/* Tensors in file order tile the data from its first byte to the file's last. */
static int check_tiling(struct parse *ps)
{
    struct st_header *h = ps->h;
    uint64_t end = 0, n_data = ps->n_file - ps->data0;
    char quoted[SCAN_QUOTE_MAX + 8], sizes[128];
    size_t i;

    for (i = 0; i < h->n_tensors; i++) {
        if (h->tensors[i].off_bytes != end)
            return fail_tiling(ps, i, end);
        end += h->tensors[i].n_bytes; /* no overflow: data_offsets' end was a u64 */
    }
    (void)sizes_text(ps, end, false, sizes, sizeof(sizes));
    if (end > n_data) {
        for (i = h->n_tensors - 1; h->tensors[i].off_bytes > n_data; i--)
            continue; /* the first one that is not wholly there */
        return scan_fail(&ps->s, PF_E_FORMAT, ps->at[i],
                         "tensor '%s': data_offsets end %" PRIu64 " beyond the %" PRIu64
                         " bytes of data: %s",
                         scan_quote(h->tensors[i].name, quoted),
                         h->tensors[i].off_bytes + h->tensors[i].n_bytes, n_data, sizes);
    }
    if (end < n_data)
        return err_at(ps->s.err, PF_E_FORMAT, ps->data0 + end,
                      "'%s': %" PRIu64 " bytes follow the last tensor: %s", ps->s.what,
                      n_data - end, sizes);
    for (i = 0; i < h->n_tensors; i++)
        h->tensors[i].off_bytes += ps->data0;
    return PF_OK;
}

static int check_layout(struct parse *ps)
{
    struct st_header *h = ps->h;
    size_t n = h->n_tensors;
    uint32_t *scratch;
    int rc;

    if (n == 0)
        return check_tiling(ps);
    h->by_name = mem_realloc_array(NULL, n, sizeof(*h->by_name));
    scratch = mem_realloc_array(NULL, 2 * n, sizeof(*scratch));
    if (h->by_name == NULL || scratch == NULL)
        rc = scan_fail(&ps->s, PF_E_NOMEM, 0, "out of memory for %zu tensors", n);
    else
        rc = index_names(ps, scratch);
    if (rc == PF_OK)
        rc = order_by_offset(ps, scratch, scratch + n);
    if (rc == PF_OK)
        rc = check_tiling(ps);
    mem_free(scratch);
    return rc;
}

/* ----------------------------------------------------------------------------------------------- outside */

/* Where the header ends, from its first eight bytes. */
static int read_prefix(const uint8_t *p, size_t n_p, uint64_t n_file, const char *what,
                       uint64_t *out_n_header, pf_error *err)
{
    uint64_t n = 0;
    int i;

    if (n_file < ST_PREFIX_BYTES)
        return err_at(
            err, PF_E_FORMAT, n_file,
            "'%s': too short for a safetensors header: expected a file of at least 8 bytes, it "
            "has %" PRIu64,
            what, n_file);
    if (n_p < ST_PREFIX_BYTES)
        return err_set(err, PF_E_INVALID, "'%s': only %zu bytes of the header were given", what,
                       n_p);
    for (i = 7; i >= 0; i--)
        n = n << 8 | p[i];
    if (memcmp(p, "version ", ST_PREFIX_BYTES) == 0) /* a clone without its large files */
        return err_at(err, PF_E_FORMAT, 0,
                      "'%s': a Git LFS pointer, not the file that it stands for: fetch that with "
                      "'git lfs pull'",
                      what);
    if (n > ST_HEADER_MAX)
        return err_at(err, PF_E_FORMAT, 0,
                      "'%s': header length %" PRIu64 " is larger than %u: no safetensors file",
                      what, n, ST_HEADER_MAX);
    if (n > n_file - ST_PREFIX_BYTES)
        return err_at(err, PF_E_FORMAT, 0,
                      "'%s': header of %" PRIu64
                      " bytes ends beyond the file: expected a file of at least "
                      "%" PRIu64 " bytes, it has %" PRIu64,
                      what, n, ST_PREFIX_BYTES + n, n_file);
    if (n > n_p - ST_PREFIX_BYTES)
        return err_set(err, PF_E_INVALID, "'%s': only %zu bytes of the header were given", what,
                       n_p);
    *out_n_header = n;
    return PF_OK;
}

int st_header_parse(const uint8_t *p, size_t n_p, uint64_t n_file, const char *what,
                    struct st_header **out, pf_error *err)
{
    struct parse ps = {0};
    uint64_t n_header = 0;
    int rc = read_prefix(p, n_p, n_file, what, &n_header, err);

    if (rc != PF_OK)
        return rc;
    ps.h = mem_calloc(1, sizeof(*ps.h));
    if (ps.h == NULL)
        return err_nomem(err, sizeof(*ps.h), "a safetensors header");
    arena_init(&ps.h->arena);
    ps.s = (struct scan){.p = p + ST_PREFIX_BYTES,
                         .n = (size_t)n_header,
                         .what = what,
                         .err = err,
                         .arena = &ps.h->arena};
    ps.data0 = ST_PREFIX_BYTES + n_header;
    ps.n_file = n_file;
    rc = parse_object(&ps);
    if (rc == PF_OK)
        rc = check_layout(&ps);
    scan_release(&ps.s);
    mem_free(ps.at);
    if (rc == PF_OK)
        *out = ps.h;
    else
        st_header_free(ps.h);
    return rc;
}

void st_header_free(struct st_header *h)
{
    if (h == NULL)
        return;
    mem_free(h->tensors);
    mem_free(h->by_name);
    mem_free(h->metas);
    arena_release(&h->arena);
    mem_free(h);
}

size_t st_header_n_tensors(const struct st_header *h)
{
    return h->n_tensors;
}

const struct st_tensor *st_header_tensor(const struct st_header *h, size_t i)
{
    return &h->tensors[i];
}

const struct st_tensor *st_header_find(const struct st_header *h, struct str name)
{
    size_t lo = 0, hi = h->n_tensors;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        const struct st_tensor *t = &h->tensors[h->by_name[mid]];
        int order = str_cmp(t->name, name);

        if (order == 0)
            return t;
        if (order < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return NULL;
}

size_t st_header_n_meta(const struct st_header *h)
{
    return h->n_metas;
}

const struct st_meta *st_header_meta(const struct st_header *h, size_t i)
{
    return &h->metas[i];
}
