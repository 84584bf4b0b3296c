/*
 * Slices, searches and the growing text buffer. Used everywhere that names from files are compared, sorted, printed.
 * Slices may hold any bytes, NUL included: only functions whose parameter is named z look for a terminator.
 */
#include "base/str.h"

#include "base/mem.h"

#include <locale.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct str str_of(const char *z)
{
    return (struct str){z, strlen(z)};
}

bool str_eq(struct str a, struct str b)
{
    return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}

bool str_eqz(struct str a, const char *z)
{
    return str_eq(a, str_of(z));
}

bool str_starts(struct str s, const char *z_prefix)
{
    size_t n = strlen(z_prefix);
    return s.n >= n && (n == 0 || memcmp(s.p, z_prefix, n) == 0);
}

bool str_ends(struct str s, const char *z_suffix)
{
    size_t n = strlen(z_suffix);
    return s.n >= n && (n == 0 || memcmp(s.p + (s.n - n), z_suffix, n) == 0);
}

struct str str_cut_front(struct str s, size_t n)
{
    return n == 0 ? s : (struct str){s.p + n, s.n - n};
}

struct str str_cut_back(struct str s, size_t n)
{
    return (struct str){s.p, s.n - n};
}

int str_cmp(struct str a, struct str b)
{
    size_t n = a.n < b.n ? a.n : b.n;
    int c = n > 0 ? memcmp(a.p, b.p, n) : 0;
    if (c != 0)
        return c < 0 ? -1 : 1;
    return (a.n > b.n) - (a.n < b.n);
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* The run of digits at s.p[*i], without leading zeros; *i moves behind it. */
static struct str digit_run(struct str s, size_t *i)
{
    while (*i < s.n && s.p[*i] == '0')
        (*i)++;
    size_t start = *i;
    while (*i < s.n && is_digit(s.p[*i]))
        (*i)++;
    return (struct str){s.p + start, *i - start};
}

int str_cmp_natural(struct str a, struct str b)
{
    size_t i = 0, j = 0;
    while (i < a.n && j < b.n) {
        if (is_digit(a.p[i]) && is_digit(b.p[j])) {
            struct str x = digit_run(a, &i), y = digit_run(b, &j);
            if (x.n != y.n)
                return x.n < y.n ? -1 : 1;
            int c = str_cmp(x, y);
            if (c != 0)
                return c;
        } else {
            unsigned char x = (unsigned char)a.p[i++], y = (unsigned char)b.p[j++];
            if (x != y)
                return x < y ? -1 : 1;
        }
    }
    if (i < a.n || j < b.n)
        return i < a.n ? 1 : -1;
    return str_cmp(a, b); /* "1" and "01": still a total order */
}

bool str_to_u64(struct str s, uint64_t *out)
{
    uint64_t v = 0;
    if (s.n == 0)
        return false;
    for (size_t i = 0; i < s.n; i++) {
        if (!is_digit(s.p[i]))
            return false;
        if (!mul_u64(v, 10, &v) || !add_u64(v, (uint64_t)(s.p[i] - '0'), &v))
            return false;
    }
    *out = v;
    return true;
}

bool str_to_double(struct str s, double *out)
{
    char z[256];
    if (s.n == 0 || s.n >= sizeof(z) || s.p[0] == ' ' || (s.p[0] >= '\t' && s.p[0] <= '\r'))
        return false;
    memcpy(z, s.p, s.n);
    z[s.n] = '\0';
    /* The decimal point must not depend on the host program's locale. glibc gives a static object for "C". */
    locale_t c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (c_locale == (locale_t)0)
        return false;
    char *end;
    double v = strtod_l(z, &end, c_locale);
    freelocale(c_locale);
    if (end != z + s.n)
        return false;
    *out = v;
    return true;
}

/*
 * Levenshtein distance in a band around the diagonal. row[d] belongs to column j = i + d - band; walking d upwards, the cell
 * above is still at d + 1, the one above left at d, the one to the left already new at d - 1: one row is enough.
 */
static size_t banded_distance(struct str a, struct str b, size_t band, size_t *row)
{
    size_t width = 2 * band + 1, inf = a.n + b.n + 1;
    for (size_t d = 0; d <= width; d++)
        row[d] = d >= band && d < width && d - band <= b.n ? d - band : inf;
    for (size_t i = 1; i <= a.n; i++) {
        size_t best = inf;
        for (size_t d = 0; d < width; d++) {
            size_t v = inf;
            if (i + d >= band && i + d - band <= b.n) {
                size_t j = i + d - band;
                v = row[d + 1] + 1;
                if (d > 0 && row[d - 1] + 1 < v)
                    v = row[d - 1] + 1;
                if (j > 0 && row[d] + (a.p[i - 1] != b.p[j - 1]) < v)
                    v = row[d] + (a.p[i - 1] != b.p[j - 1]);
            }
            row[d] = v;
            best = v < best ? v : best;
        }
        if (best > band)
            return best; /* rows never get smaller again */
    }
    return row[b.n + band - a.n];
}

size_t str_distance(struct str a, struct str b, size_t cap)
{
    size_t longer = a.n > b.n ? a.n : b.n, shorter = a.n > b.n ? b.n : a.n;
    size_t too_far = cap == SIZE_MAX ? cap : cap + 1;
    if (longer - shorter > cap)
        return too_far;
    size_t band = cap < longer ? cap : longer;
    size_t small[68], n_row;
    if (!mul_size(band, 2, &n_row) || !add_size(n_row, 2, &n_row))
        return too_far;
    size_t *row = n_row <= PF_COUNTOF(small) ? small : mem_calloc(n_row, sizeof(*row));
    if (row == NULL)
        return too_far; /* a hint less */
    size_t d = banded_distance(a, b, band, row);
    if (row != small)
        mem_free(row);
    return d <= cap ? d : too_far;
}

/* Length of the valid UTF-8 character at p (n > 0 bytes left), or 0. */
static size_t utf8_len(const unsigned char *p, size_t n)
{
    if (p[0] < 0x80)
        return 1;
    size_t len = p[0] >= 0xf0 ? 4 : p[0] >= 0xe0 ? 3 : 2;
    if (p[0] < 0xc2 || p[0] > 0xf4 || n < len)
        return 0;
    for (size_t i = 1; i < len; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    if ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xf0 && p[1] < 0x90))
        return 0; /* overlong */
    if ((p[0] == 0xed && p[1] > 0x9f) || (p[0] == 0xf4 && p[1] > 0x8f))
        return 0; /* a surrogate; beyond U+10FFFF */
    return len;
}

bool str_is_utf8(struct str s, size_t *out_off_bad)
{
    for (size_t i = 0; i < s.n;) {
        size_t len = utf8_len((const unsigned char *)s.p + i, s.n - i);
        if (len == 0) {
            if (out_off_bad != NULL)
                *out_off_bad = i;
            return false;
        }
        i += len;
    }
    return true;
}

void str_tame(char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)p[i] < 0x20 || p[i] == 0x7f)
            p[i] = '?';
}

/* ----------------------------------------------------------------------------------------- growing text */

void strbuf_init(struct strbuf *b)
{
    *b = (struct strbuf){0};
}

void strbuf_release(struct strbuf *b)
{
    if (b == NULL)
        return;
    mem_free(b->p);
    strbuf_init(b);
}

void strbuf_clear(struct strbuf *b)
{
    b->n = 0;
    b->is_failed = false;
    if (b->p != NULL)
        b->p[0] = '\0';
}

/* Room for n more bytes and the NUL. */
static bool reserve(struct strbuf *b, size_t n)
{
    size_t n_wanted;
    if (b->is_failed)
        return false;
    if (add_size(b->n, n, &n_wanted) && add_size(n_wanted, 1, &n_wanted)) {
        if (n_wanted <= b->cap)
            return true;
        size_t cap = b->cap < 64 ? 64 : b->cap;
        while (cap < n_wanted)
            cap = cap > SIZE_MAX / 2 ? n_wanted : cap * 2;
        char *p = mem_realloc_array(b->p, cap, 1);
        if (p != NULL) {
            b->p = p;
            b->cap = cap;
            return true;
        }
    }
    b->is_failed = true;
    return false;
}

void strbuf_add(struct strbuf *b, const char *p, size_t n)
{
    if (!reserve(b, n))
        return;
    if (n > 0)
        memcpy(b->p + b->n, p, n);
    b->n += n;
    b->p[b->n] = '\0';
}

void strbuf_adds(struct strbuf *b, const char *z)
{
    strbuf_add(b, z, strlen(z));
}

void strbuf_addf(struct strbuf *b, const char *fmt, ...)
{
    if (!reserve(b, 64))
        return;
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(b->p + b->n, b->cap - b->n, fmt, ap);
    va_end(ap);
    if (n >= 0 && (size_t)n >= b->cap - b->n) {
        b->p[b->n] = '\0'; /* undo the cut text, should memory run out */
        if (!reserve(b, (size_t)n))
            return;
        va_start(ap, fmt);
        n = vsnprintf(b->p + b->n, b->cap - b->n, fmt, ap);
        va_end(ap);
    }
    if (n < 0) {
        b->p[b->n] = '\0';
        b->is_failed = true;
        return;
    }
    b->n += (size_t)n;
}

bool strbuf_ok(const struct strbuf *b)
{
    return !b->is_failed;
}

const char *strbuf_z(const struct strbuf *b)
{
    return b->p != NULL ? b->p : "";
}

char *strbuf_take(struct strbuf *b)
{
    char *p = NULL;
    if (!b->is_failed) {
        p = b->p != NULL ? b->p : mem_strdup("");
        b->p = NULL;
    }
    strbuf_release(b);
    return p;
}
