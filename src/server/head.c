/*
 * The rules of RFC 9112, read narrowly: one space, one line end, one meaning. What is refused here is refused before a body is read.
 */
#include "server/head.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#define N_SIZE_DIGITS   8   /* of a chunk */
#define N_SIZE_LINE_MAX 256 /* with its extensions */
#define N_PARTS_MAX     64 /* of a query, which no route reads, and of cookies, which nobody does */

void head_refuse(struct head_refusal *out, int status, const char *code, const char *fmt, ...)
{
    va_list args;

    out->status = status;
    out->code = code;
    va_start(args, fmt);
    (void)vsnprintf(out->text, sizeof(out->text), fmt, args);
    va_end(args);
}

static bool is_token(struct str s)
{
    for (size_t i = 0; i < s.n; i++)
        if ((unsigned char)s.p[i] <= ' ' || (unsigned char)s.p[i] >= 0x7f ||
            strchr("()<>@,;:\\\"/[]?={}", s.p[i]))
            return false;
    return s.n > 0;
}

static bool is_text(struct str s)
{
    for (size_t i = 0; i < s.n; i++)
        if ((unsigned char)s.p[i] < ' ' ? s.p[i] != '\t' : s.p[i] == 0x7f)
            return false;
    return true;
}

static size_t count(struct str s, char c)
{
    size_t n = 0;

    for (size_t i = 0; i < s.n; i++)
        n += s.p[i] == c;
    return n;
}

static bool is_named(struct str s, const char *name)
{
    return s.n == strlen(name) && !strncasecmp(s.p, name, s.n);
}

void head_add(struct head *h, struct str name, struct str value)
{
    static const struct {
        const char *name;
        size_t off;
    } single[] = {
        {"Content-Length", offsetof(struct head, n_length)},
        {"Transfer-Encoding", offsetof(struct head, n_coding)},
        {"Host", offsetof(struct head, n_host)},
        {"Origin", offsetof(struct head, n_origin)},
        {"Authorization", offsetof(struct head, n_key)},
        {"Content-Type", offsetof(struct head, n_type)},
        {"X-Request-Id", offsetof(struct head, n_id)},
    };

    if (!is_token(name))
        h->wrong = "a header name with a character that names cannot have";
    else if (!is_text(value))
        h->wrong = "a header value with a control character";
    h->n++;
    h->n_bytes += name.n + value.n + 4;
    for (size_t i = 0; i < PF_COUNTOF(single); i++)
        if (is_named(name, single[i].name))
            ++*(unsigned *)(void *)((char *)h + single[i].off);
    if (is_named(name, "Content-Length"))
        h->length = value;
    if (is_named(name, "Transfer-Encoding"))
        h->coding = value;
    /* Nobody reads cookies here, but the library takes them apart: 0.9.75 stumbles over the second. */
    if (is_named(name, "Cookie") && count(value, ';') > N_PARTS_MAX)
        h->wrong = "more cookies than are accepted";
    else if (is_named(name, "Cookie") && str_ends(value, "=\""))
        h->wrong = "a cookie that ends in an open quote";
}

static bool is_small_number(struct str s)
{
    uint64_t n;

    return str_to_u64(s, &n) && n < (uint64_t)1 << 62;
}

static const char *check_framing(const struct head *h)
{
    if (h->n_length > 1)
        return "more than one Content-Length";
    if (h->n_coding > 1)
        return "more than one Transfer-Encoding";
    if (h->n_length && h->n_coding)
        return "both Content-Length and Transfer-Encoding";
    if (h->n_coding && !is_named(h->coding, "chunked"))
        return "a Transfer-Encoding that is not 'chunked'";
    if (h->n_coding && h->is_http10)
        return "Transfer-Encoding in HTTP/1.0";
    if (h->n_length && !is_small_number(h->length))
        return "a Content-Length that is no number";
    if (h->n_host > 1 || h->n_origin > 1 || h->n_key > 1 || h->n_type > 1 || h->n_id > 1)
        return "a header twice that may come once";
    if (!h->n_host && !h->is_http10)
        return "no Host";
    return NULL;
}

static bool are_too_large(const struct head *h, size_t n_bytes_max, struct head_refusal *out)
{
    if (h->n <= HEAD_HEADERS_MAX && h->n_bytes <= n_bytes_max)
        return false;
    head_refuse(out, 431, "headers_too_large",
                "the headers have more than the %zu bytes in %d lines that are accepted",
                n_bytes_max, HEAD_HEADERS_MAX);
    return true;
}

bool head_is_refused(const struct head *h, size_t n_bytes_max, struct head_refusal *out)
{
    const char *why = h->wrong;

    if (!why && are_too_large(h, n_bytes_max, out))
        return true;
    if (!why)
        why = check_framing(h);
    if (why)
        head_refuse(out, 400, "bad_request", "the request has %s", why);
    return why != NULL;
}

/* ------------------------------------------------------------------------------------------- raw bytes */

/* Cuts a line off; false: its end has not come. A lone LF ends a line too, as RFC 9112 allows. */
static bool take_line(struct str *rest, struct str *out)
{
    const char *end = memchr(rest->p, '\n', rest->n);

    if (!end)
        return false;
    *out = (struct str){rest->p, (size_t)(end - rest->p)};
    *rest = str_cut_front(*rest, out->n + 1);
    if (out->n && out->p[out->n - 1] == '\r')
        out->n--;
    return true;
}

static struct str take_word(struct str *rest)
{
    const char *space = memchr(rest->p, ' ', rest->n);
    struct str word = {rest->p, space ? (size_t)(space - rest->p) : rest->n};

    *rest = str_cut_front(*rest, space ? word.n + 1 : word.n);
    return word;
}

/* "GET /path HTTP/1.1" */
static bool is_line_refused(struct str line, struct head *h, struct head_refusal *out)
{
    struct str rest = line, method = take_word(&rest), target = take_word(&rest);
    const char *why = NULL;

    h->is_http10 = str_eqz(rest, "HTTP/1.0");
    if (!is_token(method) || !target.n || !is_text(target) || memchr(target.p, '\t', target.n) ||
        !str_starts(rest, "HTTP/"))
        why = "a first line that is not 'METHOD /path HTTP/1.1'";
    else if (rest.n != strlen("HTTP/1.1") || !str_starts(rest, "HTTP/1.") || rest.p[7] < '0' ||
             rest.p[7] > '9')
        why = "a version of HTTP other than 1.1 and 1.0";
    else if (target.p[0] != '/')
        why = "a target that is no path";
    else if (count(target, '&') > N_PARTS_MAX)
        why = "a query of more parts than are accepted";
    if (why)
        head_refuse(out, 400, "bad_request", "the request has %s", why);
    return why != NULL;
}

static void add_line(struct head *h, struct str line)
{
    const char *colon = memchr(line.p, ':', line.n);
    struct str name = {line.p, colon ? (size_t)(colon - line.p) : 0}, value;

    if (line.p[0] == ' ' || line.p[0] == '\t') {
        h->wrong = "a header that is folded over lines";
        return;
    }
    if (!colon) {
        h->wrong = "a header without a colon";
        return;
    }
    value = str_cut_front(line, name.n + 1);
    while (value.n && strchr(" \t", value.p[0]) && value.p[0])
        value = str_cut_front(value, 1);
    while (value.n && strchr(" \t", value.p[value.n - 1]) && value.p[value.n - 1])
        value.n--;
    head_add(h, name, value);
}

static bool refuse_chunk(struct head_refusal *out)
{
    head_refuse(out, 400, "bad_request", "the request has a body whose chunks are not framed well");
    return true;
}

/* The line before a chunk: hexadecimal digits, and perhaps extensions, which mean nothing here. */
static bool is_size_refused(struct str line, uint64_t *out_n, struct head_refusal *out)
{
    static const char digits[] = "0123456789abcdefABCDEF";
    size_t n = 0;

    *out_n = 0;
    for (; n < line.n && line.p[n] && strchr(digits, line.p[n]); n++) {
        const size_t i = (size_t)(strchr(digits, line.p[n]) - digits);

        *out_n = n < N_SIZE_DIGITS ? *out_n * 16 + (i < 16 ? i : i - 6) : UINT64_MAX;
    }
    if (n > N_SIZE_DIGITS) {
        head_refuse(out, 413, "body_too_large", "a chunk of the body is larger than is accepted");
        return true;
    }
    if (n && line.n <= N_SIZE_LINE_MAX && (n == line.n || (line.p[n] && strchr("; \t", line.p[n]))))
        return false;
    return refuse_chunk(out);
}

/* What follows the last chunk is read as headers are, and means nothing. */
static bool are_trailers_refused(struct str rest, size_t n_bytes_max, struct head_refusal *out)
{
    struct head h = {.is_http10 = true}; /* which needs no Host */
    struct str line;

    while (take_line(&rest, &line)) {
        if (!line.n)
            return head_is_refused(&h, n_bytes_max, out);
        add_line(&h, line);
        if (are_too_large(&h, n_bytes_max, out))
            return true;
    }
    h.n_bytes += rest.n;
    return head_is_refused(&h, n_bytes_max, out);
}

/* Of a chunked body as far as it has come: the library refuses such things too, in HTML, and one of them as a 500. */
static bool are_chunks_refused(struct str rest, size_t n_bytes_max, struct head_refusal *out)
{
    struct str line;
    uint64_t n;

    while (take_line(&rest, &line)) {
        if (is_size_refused(line, &n, out))
            return true;
        if (n == 0)
            return are_trailers_refused(rest, n_bytes_max, out);
        if (rest.n <= n)
            return false;
        rest = str_cut_front(rest, (size_t)n);
        if (rest.n == 1 && rest.p[0] == '\r')
            return false;
        if (!take_line(&rest, &line) || line.n)
            return refuse_chunk(out);
    }
    return rest.n > 1 && is_size_refused((struct str){rest.p, rest.n - 1}, &n, out);
}

size_t head_scan_max(size_t n_bytes_max)
{
    return n_bytes_max + HEAD_LINE_MAX;
}

enum head_state head_scan(const char *p, size_t n, size_t n_bytes_max, struct head_refusal *out)
{
    struct str rest = {p, n}, line;
    struct head h = {0};

    while (rest.n && (rest.p[0] == '\r' || rest.p[0] == '\n'))
        rest = str_cut_front(rest, 1); /* lines that are empty before a request are passed over */
    if (!take_line(&rest, &line)) {
        line = rest;
        if (line.n && !is_token((struct str){line.p, 1})) {
            (void)is_line_refused(line, &h, out); /* what speaks another protocol need not go on */
            return HEAD_REFUSED;
        }
        if (n <= HEAD_LINE_MAX)
            return HEAD_PARTIAL;
    }
    if (line.n > HEAD_LINE_MAX || n - rest.n > 2 * HEAD_LINE_MAX) {
        head_refuse(out, 414, "path_too_long", "the first line has more than %d bytes",
                    HEAD_LINE_MAX);
        return HEAD_REFUSED;
    }
    if (is_line_refused(line, &h, out))
        return HEAD_REFUSED;
    while (take_line(&rest, &line)) {
        if (!line.n)
            return head_is_refused(&h, n_bytes_max, out) ||
                           (h.n_coding && are_chunks_refused(rest, n_bytes_max, out))
                       ? HEAD_REFUSED
                       : HEAD_WHOLE;
        add_line(&h, line);
        if (are_too_large(&h, n_bytes_max, out))
            return HEAD_REFUSED;
    }
    if (n < head_scan_max(n_bytes_max))
        return HEAD_PARTIAL;
    h.n_bytes = n_bytes_max + 1;
    return are_too_large(&h, n_bytes_max, out) ? HEAD_REFUSED : HEAD_PARTIAL;
}
