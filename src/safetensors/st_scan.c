/*
 * The bounded JSON scanner: knows strings, unsigned integers, and how to step over any other value, and nothing of tensors.
 * Called by st_header.c alone. It never reads outside [p, p + n), never recurses, and never trusts a byte that it read before.
 */
#include "safetensors/st_int.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void scan_release(struct scan *s)
{
    mem_free(s->keys);
    mem_free(s->order);
    s->keys = NULL;
    s->order = NULL;
    s->n_keys = s->cap_keys = s->cap_order = 0;
}

const char *scan_quote(struct str name, char buf[SCAN_QUOTE_MAX + 8])
{
    size_t n = name.n < SCAN_QUOTE_MAX ? name.n : SCAN_QUOTE_MAX;
    size_t i;

    /* Not in the middle of a character. */
    while (n < name.n && n > 0 && ((uint8_t)name.p[n] & 0xc0) == 0x80)
        n--;
    for (i = 0; i < n; i++) {
        uint8_t c = (uint8_t)name.p[i];
        buf[i] = c < 0x20 || c == 0x7f ? '?' : (char)c;
    }
    memcpy(buf + n, n < name.n ? ".." : "", n < name.n ? 3 : 1);
    return buf;
}

int scan_fail(const struct scan *s, int code, size_t at, const char *fmt, ...)
{
    char text[1024], quoted[SCAN_QUOTE_MAX + 8];
    va_list args;

    va_start(args, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, args); /* a cut message is still a message */
    va_end(args);
    if (s->tensor.p != NULL)
        return err_at(s->err, code, ST_PREFIX_BYTES + (uint64_t)at, "'%s': tensor '%s': %s",
                      s->what, scan_quote(s->tensor, quoted), text);
    return err_at(s->err, code, ST_PREFIX_BYTES + (uint64_t)at, "'%s': %s", s->what, text);
}

/* "expected X at byte N, found Y" */
static int fail_expected(const struct scan *s, const char *name)
{
    size_t at = ST_PREFIX_BYTES + s->i;

    if (s->i >= s->n)
        return scan_fail(s, PF_E_FORMAT, s->i,
                         "expected %s at byte %zu of the header's JSON, found its end", name, at);
    if (s->p[s->i] > 0x20 && s->p[s->i] < 0x7f)
        return scan_fail(s, PF_E_FORMAT, s->i,
                         "expected %s at byte %zu of the header's JSON, found '%c'", name, at,
                         s->p[s->i]);
    return scan_fail(s, PF_E_FORMAT, s->i,
                     "expected %s at byte %zu of the header's JSON, found byte 0x%02x", name, at,
                     s->p[s->i]);
}

static void scan_space(struct scan *s)
{
    while (s->i < s->n) {
        uint8_t c = s->p[s->i];
        if (c != ' ' && c != '\n' && c != '\t' && c != '\r')
            break;
        s->i++;
    }
}

int scan_peek(struct scan *s)
{
    scan_space(s);
    return s->i < s->n ? s->p[s->i] : -1;
}

int scan_take(struct scan *s, char c, const char *name)
{
    if (scan_peek(s) != c)
        return fail_expected(s, name);
    s->i++;
    return PF_OK;
}

/* ------------------------------------------------------------------------------------------------ strings */

static int hex_digit(uint8_t c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

/* Four hex digits at p + i, or -1. */
static int32_t hex4(const uint8_t *p, size_t n, size_t i)
{
    int32_t v = 0;
    size_t k;

    if (n - i < 4)
        return -1;
    for (k = 0; k < 4; k++) {
        int d = hex_digit(p[i + k]);
        if (d < 0)
            return -1;
        v = v * 16 + d;
    }
    return v;
}

static size_t put_utf8(uint32_t v, char out[4])
{
    if (v < 0x80) {
        out[0] = (char)v;
        return 1;
    }
    if (v < 0x800) {
        out[0] = (char)(0xc0 | (v >> 6));
        out[1] = (char)(0x80 | (v & 0x3f));
        return 2;
    }
    if (v < 0x10000) {
        out[0] = (char)(0xe0 | (v >> 12));
        out[1] = (char)(0x80 | ((v >> 6) & 0x3f));
        out[2] = (char)(0x80 | (v & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | (v >> 18));
    out[1] = (char)(0x80 | ((v >> 12) & 0x3f));
    out[2] = (char)(0x80 | ((v >> 6) & 0x3f));
    out[3] = (char)(0x80 | (v & 0x3f));
    return 4;
}

/* The escape whose backslash is p[*i]: decodes it and moves *i behind it. 0: not an escape, else bytes in out. The decoded
 * form is never longer than the escape. */
static size_t take_escape(const uint8_t *p, size_t n, size_t *i, char out[4])
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    size_t at = *i + 1;
    int32_t hi, lo;
    const char *hit;

    if (at >= n || p[at] == 0)
        return 0;
    if (p[at] != 'u') {
        hit = strchr(from, p[at]);
        if (hit == NULL)
            return 0;
        out[0] = to[hit - from];
        *i = at + 1;
        return 1;
    }
    hi = hex4(p, n, at + 1);
    if (hi < 0 || (hi >= 0xdc00 && hi <= 0xdfff))
        return 0;
    at += 5;
    if (hi < 0xd800 || hi > 0xdbff) {
        *i = at;
        return put_utf8((uint32_t)hi, out);
    }
    if (n - at < 6 || p[at] != '\\' || p[at + 1] != 'u')
        return 0;
    lo = hex4(p, n, at + 2);
    if (lo < 0xdc00 || lo > 0xdfff)
        return 0;
    *i = at + 6;
    return put_utf8(0x10000 + (((uint32_t)hi - 0xd800) << 10) + ((uint32_t)lo - 0xdc00), out);
}

/* The second walk over a string that held escapes: [start, end) was checked by the first. */
static int unescape(struct scan *s, size_t start, size_t end, struct str *out)
{
    char *p = arena_alloc(s->arena, end - start);
    size_t n = 0, i = start;

    if (p == NULL)
        return scan_fail(s, PF_E_NOMEM, start, "out of memory for a string of %zu bytes",
                         end - start);
    while (i < end) {
        char c[4];
        size_t n_c = 1;

        if (s->p[i] == '\\') {
            n_c = take_escape(s->p, end, &i, c);
            if (n_c == 0)
                return scan_fail(s, PF_E_FORMAT, i, "the header changed while it was read");
        } else {
            c[0] = (char)s->p[i++];
        }
        memcpy(p + n, c, n_c);
        n += n_c;
    }
    *out = (struct str){p, n};
    return PF_OK;
}

int scan_string(struct scan *s, struct str *out)
{
    size_t start;
    bool has_escape = false;
    int rc = scan_take(s, '"', "a string");

    if (rc != PF_OK)
        return rc;
    start = s->i;
    while (s->i < s->n) {
        uint8_t c = s->p[s->i];
        char decoded[4];

        if (c == '"') {
            s->i++;
            if (has_escape)
                return unescape(s, start, s->i - 1, out);
            /* The mapping is const and outlives the result. */
            *out = (struct str){(const char *)s->p + start, s->i - 1 - start};
            return PF_OK;
        }
        if (c < 0x20)
            return scan_fail(s, PF_E_FORMAT, s->i,
                             "control character 0x%02x in a string at byte %zu", c,
                             ST_PREFIX_BYTES + s->i);
        if (c != '\\') {
            s->i++;
            continue;
        }
        has_escape = true;
        if (take_escape(s->p, s->n, &s->i, decoded) == 0)
            return scan_fail(s, PF_E_FORMAT, s->i, "invalid escape in a string at byte %zu",
                             ST_PREFIX_BYTES + s->i);
    }
    return scan_fail(s, PF_E_FORMAT, s->n, "the string that begins at byte %zu has no end",
                     ST_PREFIX_BYTES + start - 1);
}

/* ------------------------------------------------------------------------------------------------ numbers */

static bool is_digit_at(const struct scan *s)
{
    return s->i < s->n && s->p[s->i] >= '0' && s->p[s->i] <= '9';
}

int scan_u64(struct scan *s, const char *what, uint64_t *out)
{
    uint64_t v = 0;
    size_t start;

    scan_space(s);
    start = s->i;
    if (!is_digit_at(s)) {
        if (s->i < s->n && s->p[s->i] == '-')
            return scan_fail(s, PF_E_FORMAT, start, "%s holds a negative number at byte %zu", what,
                             ST_PREFIX_BYTES + start);
        return fail_expected(s, "an unsigned integer");
    }
    while (is_digit_at(s)) {
        uint64_t digit = (uint64_t)(s->p[s->i] - '0');
        if (v > (UINT64_MAX - digit) / 10)
            return scan_fail(s, PF_E_FORMAT, start, "%s holds a number beyond 2^64 - 1 at byte %zu",
                             what, ST_PREFIX_BYTES + start);
        v = v * 10 + digit;
        s->i++;
        if (v == 0 && is_digit_at(s))
            return scan_fail(s, PF_E_FORMAT, start,
                             "%s holds a number with a leading zero at byte %zu", what,
                             ST_PREFIX_BYTES + start);
    }
    if (s->i < s->n && (s->p[s->i] == '.' || s->p[s->i] == 'e' || s->p[s->i] == 'E'))
        return scan_fail(s, PF_E_FORMAT, start, "%s holds a number that is no integer at byte %zu",
                         what, ST_PREFIX_BYTES + start);
    *out = v;
    return PF_OK;
}

static bool skip_digits(struct scan *s)
{
    if (!is_digit_at(s))
        return false;
    while (is_digit_at(s))
        s->i++;
    return true;
}

static bool skip_byte(struct scan *s, unsigned char a, unsigned char b)
{
    if (s->i >= s->n || (s->p[s->i] != a && s->p[s->i] != b))
        return false;
    s->i++;
    return true;
}

static int skip_number(struct scan *s)
{
    bool is_zero;

    (void)skip_byte(s, '-', '-'); /* optional */
    is_zero = s->i < s->n && s->p[s->i] == '0';
    if (is_zero)
        s->i++;
    else if (!skip_digits(s))
        return fail_expected(s, "a value");
    if (skip_byte(s, '.', '.') && !skip_digits(s))
        return fail_expected(s, "a digit");
    if (skip_byte(s, 'e', 'E')) {
        (void)skip_byte(s, '+', '-'); /* optional */
        if (!skip_digits(s))
            return fail_expected(s, "a digit");
    }
    return PF_OK;
}

static int skip_word(struct scan *s, const char *word)
{
    size_t n = strlen(word);

    if (s->n - s->i < n || memcmp(s->p + s->i, word, n) != 0)
        return fail_expected(s, "a value");
    s->i += n;
    return PF_OK;
}

/* ------------------------------------------------------------------------------------- objects and arrays */

int scan_push_key(struct scan *s, const struct scan_key *key)
{
    void *keys = s->keys;

    if (!mem_grow(&keys, &s->cap_keys, s->n_keys, sizeof(*s->keys)))
        return scan_fail(s, PF_E_NOMEM, key->at, "out of memory for %zu keys", s->n_keys + 1);
    s->keys = keys;
    s->keys[s->n_keys++] = *key;
    return PF_OK;
}

static int fail_duplicate(const struct scan *s, const struct scan_key *first,
                          const struct scan_key *second)
{
    char quoted[SCAN_QUOTE_MAX + 8];

    return scan_fail(s, PF_E_FORMAT, second->at,
                     "key '%s' at byte %zu was given before, at byte %zu",
                     scan_quote(second->name, quoted), (size_t)second->at + ST_PREFIX_BYTES,
                     (size_t)first->at + ST_PREFIX_BYTES);
}

static int cmp_keys(const void *ctx, uint32_t a, uint32_t b)
{
    const struct scan_key *keys = ctx;

    return str_cmp(keys[a].name, keys[b].name);
}

/* Many keys in one object: sorted, so that no file can make this quadratic. */
static int find_duplicate_sorted(struct scan *s, const struct scan_key *keys, size_t n)
{
    size_t i;

    if (2 * n > s->cap_order) {
        uint32_t *order = mem_realloc_array(s->order, 2 * n, sizeof(*order));
        if (order == NULL)
            return scan_fail(s, PF_E_NOMEM, keys[0].at, "out of memory for %zu keys", n);
        s->order = order;
        s->cap_order = 2 * n;
    }
    for (i = 0; i < n; i++)
        s->order[i] = (uint32_t)i;
    sort_u32(s->order, s->order + n, n, cmp_keys, keys);
    for (i = 1; i < n; i++)
        if (str_eq(keys[s->order[i - 1]].name, keys[s->order[i]].name))
            return fail_duplicate(s, &keys[s->order[i - 1]], &keys[s->order[i]]);
    return PF_OK;
}

int scan_pop_keys(struct scan *s, size_t frame)
{
    size_t n = s->n_keys - frame, i, k;
    const struct scan_key *keys;

    s->n_keys = frame;
    if (n < 2)
        return PF_OK;
    keys = s->keys + frame;
    if (n > 8)
        return find_duplicate_sorted(s, keys, n);
    for (i = 1; i < n; i++)
        for (k = 0; k < i; k++)
            if (str_eq(keys[k].name, keys[i].name))
                return fail_duplicate(s, &keys[k], &keys[i]);
    return PF_OK;
}

int scan_next_key(struct scan *s, bool is_first, bool *out_more, struct scan_key *out_key)
{
    int c = scan_peek(s), rc;

    *out_more = false;
    if (c == '}') {
        s->i++;
        return PF_OK;
    }
    if (!is_first) {
        rc = scan_take(s, ',', "',' or '}'");
        if (rc != PF_OK)
            return rc;
    }
    if (scan_peek(s) != '"')
        return fail_expected(s, is_first ? "a key or '}'" : "a key");
    out_key->at = (uint32_t)s->i;
    rc = scan_string(s, &out_key->name);
    if (rc == PF_OK)
        rc = scan_take(s, ':', "':'");
    *out_more = rc == PF_OK;
    return rc;
}

int scan_next_item(struct scan *s, bool is_first, bool *out_more)
{
    *out_more = false;
    if (scan_peek(s) == ']') {
        s->i++;
        return PF_OK;
    }
    if (!is_first) {
        int rc = scan_take(s, ',', "',' or ']'");
        if (rc != PF_OK)
            return rc;
    }
    *out_more = true;
    return PF_OK;
}

static int skip_scalar(struct scan *s)
{
    struct str ignored;

    switch (scan_peek(s)) {
    case '"':
        return scan_string(s, &ignored);
    case 't':
        return skip_word(s, "true");
    case 'f':
        return skip_word(s, "false");
    case 'n':
        return skip_word(s, "null");
    default:
        return skip_number(s);
    }
}

struct skip_level {
    size_t frame; /* into keys */
    bool is_object;
};

/* After a value or an opening bracket inside `level`: is there another value? Objects give up their key first. */
static int skip_more(struct scan *s, const struct skip_level *level, bool is_first, bool *out_more)
{
    struct scan_key key;
    int rc;

    if (!level->is_object)
        return scan_next_item(s, is_first, out_more);
    rc = scan_next_key(s, is_first, out_more, &key);
    if (rc != PF_OK)
        return rc;
    return *out_more ? scan_push_key(s, &key) : scan_pop_keys(s, level->frame);
}

int scan_skip(struct scan *s)
{
    struct skip_level levels[SCAN_DEPTH_MAX];
    size_t depth = 0;

    for (;;) {
        int c = scan_peek(s), rc;
        bool is_first = c == '{' || c == '[', more = false;

        if (is_first) {
            if (depth == SCAN_DEPTH_MAX)
                return scan_fail(s, PF_E_RANGE, s->i, "values nested deeper than %u at byte %zu",
                                 SCAN_DEPTH_MAX, ST_PREFIX_BYTES + s->i);
            levels[depth++] = (struct skip_level){s->n_keys, c == '{'};
            s->i++;
        } else {
            rc = skip_scalar(s);
            if (rc != PF_OK)
                return rc;
        }
        while (depth > 0 && !more) {
            rc = skip_more(s, &levels[depth - 1], is_first, &more);
            if (rc != PF_OK)
                return rc;
            is_first = false;
            if (!more)
                depth--;
        }
        if (depth == 0)
            return PF_OK;
    }
}

/* ----------------------------------------------------------------------------------------------- sorting */

void sort_u32(uint32_t *idx, uint32_t *tmp, size_t n, sort_cmp cmp, const void *ctx)
{
    size_t half = n / 2, a = 0, b = half, k = 0;

    if (n < 2)
        return;
    sort_u32(idx, tmp, half, cmp, ctx);
    sort_u32(idx + half, tmp, n - half, cmp, ctx);
    if (cmp(ctx, idx[half - 1], idx[half]) <= 0)
        return;
    memcpy(tmp, idx, half * sizeof(*idx));
    while (a < half && b < n)
        idx[k++] = cmp(ctx, idx[b], tmp[a]) < 0 ? idx[b++] : tmp[a++];
    while (a < half)
        idx[k++] = tmp[a++];
}
