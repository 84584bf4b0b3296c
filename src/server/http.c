/*
 * The wrapper: one polling thread of libmicrohttpd (epoll), which parses headers and moves bytes; this file decides what is refused,
 * collects bodies within bounds, suspends a connection while its request is worked on, and hands the answer over when it is there.
 *
 * Lock order: mu, then the connection table's. The library's own locks are innermost.
 */
#include "server/http.h"

#include <errno.h>
#include <microhttpd.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/proc.h"
#include "server/conns.h"

#define STREAM_BLOCK_BYTES 16384
#define N_DISCARD_FACTOR   16 /* a refused body is read and dropped up to this many times the limit */
#define N_HEADERS_MAX      64

struct http {
    struct MHD_Daemon *daemon;
    struct http_opts opts;
    struct conns *conns;
    pthread_mutex_t mu; /* guards is_ready and is_suspended of every request */
    _Atomic uint32_t n_open;
    uint64_t id_base; /* immutable */
    _Atomic uint64_t n_ids;
};

struct http_private {
    struct http *http;
    struct MHD_Connection *mhd;
    struct conn *conn;
    struct http_response response;
    bool is_ready, is_suspended; /* guarded by mu */
    /* The polling thread's own: */
    bool is_begun, is_refused, has_nul, is_path_cut, is_complete, is_queued, is_http10;
    const char *uri, *uri_end; /* in the library's buffer: the target, and what follows its NUL */
    int status;
    uint64_t n_body_bytes, n_sent_bytes;
};

/* ------------------------------------------------------------------------------------------ responses */

void http_response_header(struct http_response *r, const char *name, const char *fmt, ...)
{
    va_list args;

    if (r->n_headers == HTTP_N_HEADERS)
        return;
    r->headers[r->n_headers].name = name;
    va_start(args, fmt);
    (void)vsnprintf(r->headers[r->n_headers].value, sizeof(r->headers[0].value), fmt, args);
    va_end(args);
    r->n_headers++;
}

void http_response_release(struct http_response *r)
{
    strbuf_release(&r->body);
    if (r->stream.free)
        r->stream.free(r->stream.ctx);
    *r = (struct http_response){0};
}

static void free_body(void *p)
{
    mem_free(p);
}

static ssize_t read_stream(void *cls, uint64_t pos, char *out, size_t n_max)
{
    struct http_request *req = cls;
    struct http_private *p = req->priv;
    const int64_t n = p->response.stream.read(p->response.stream.ctx, req, out, n_max);

    (void)pos;
    if (n < 0)
        return MHD_CONTENT_READER_END_OF_STREAM;
    p->n_sent_bytes += (uint64_t)n;
    return (ssize_t)n;
}

static struct MHD_Response *make_response(struct http_request *req)
{
    struct http_response *r = &req->priv->response;
    struct MHD_Response *made;

    if (r->stream.read) {
        return MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, STREAM_BLOCK_BYTES, read_stream,
                                                 req, NULL);
    }
    if (r->fixed) {
        req->priv->n_sent_bytes = r->n_fixed;
        return MHD_create_response_from_buffer(r->n_fixed, (void *)(uintptr_t)r->fixed,
                                               MHD_RESPMEM_PERSISTENT);
    }
    if (!r->body.n || !strbuf_ok(&r->body))
        return MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT);
    req->priv->n_sent_bytes = r->body.n;
    made = MHD_create_response_from_buffer_with_free_callback(r->body.n, r->body.p, free_body);
    if (made)
        r->body = (struct strbuf){0};
    return made;
}

static enum MHD_Result queue_response(struct http_request *req)
{
    struct http_private *p = req->priv;
    struct http_response *r = &p->response;
    struct MHD_Response *made;
    enum MHD_Result ok = MHD_YES;

    if (!strbuf_ok(&r->body)) {
        r->status = 500; /* memory ran out while the answer was written */
        r->content_type = NULL;
    }
    made = make_response(req);
    if (!made)
        return MHD_NO;
    if (r->content_type)
        ok = MHD_add_response_header(made, "Content-Type", r->content_type);
    for (size_t i = 0; ok == MHD_YES && i < r->n_headers; i++)
        ok = MHD_add_response_header(made, r->headers[i].name, r->headers[i].value);
    if (ok == MHD_YES && req->cors_origin[0]) {
        ok = MHD_add_response_header(made, "Access-Control-Allow-Origin", req->cors_origin);
        if (ok == MHD_YES)
            ok = MHD_add_response_header(made, "Vary", "Origin");
    }
    if (ok == MHD_YES && req->id[0])
        ok = MHD_add_response_header(made, "X-Request-Id", req->id);
    if (ok == MHD_YES)
        ok = MHD_add_response_header(made, "X-Content-Type-Options", "nosniff");
    conns_phase(p->http->conns, p->conn, r->stream.read ? CONN_STREAM : CONN_REPLY);
    if (r->stream.read && r->stream.gone)
        conns_watch(p->http->conns, p->conn, r->stream.gone, r->stream.ctx);
    p->status = r->status;
    p->is_queued = true;
    if (ok == MHD_YES)
        ok = MHD_queue_response(p->mhd, (unsigned)r->status, made);
    MHD_destroy_response(made);
    return ok;
}

void http_reply(struct http_request *req, struct http_response *r)
{
    struct http_private *p = req->priv;
    struct http *h = p->http;

    (void)pthread_mutex_lock(&h->mu);
    p->response = *r;
    *r = (struct http_response){0};
    p->is_ready = true;
    conns_watch(h->conns, p->conn, NULL, NULL);
    if (p->is_suspended) {
        p->is_suspended = false;
        MHD_resume_connection(p->mhd); /* from here on req belongs to the polling thread */
    }
    (void)pthread_mutex_unlock(&h->mu);
}

void http_sleep(struct http_request *req)
{
    MHD_suspend_connection(req->priv->mhd);
}

void http_wake(struct http_request *req)
{
    MHD_resume_connection(req->priv->mhd);
}

/* -------------------------------------------------------------------------------------------- headers */

const char *http_header(const struct http_request *req, const char *name)
{
    return MHD_lookup_connection_value(req->priv->mhd, MHD_HEADER_KIND, name);
}

/* What the headers of one request add up to. */
struct header_scan {
    const char *wrong; /* NULL: fine */
    const char *end;   /* one past the last value, in the library's buffer */
    size_t n, n_bytes;
    unsigned n_length, n_coding, n_host, n_origin, n_key, n_type, n_id;
};

static bool is_token(const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] <= ' ' || p[i] == 0x7f || strchr("()<>@,;:\\\"/[]?={}", p[i]))
            return false;
    return n > 0;
}

static bool is_text(const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)p[i] < ' ' ? p[i] != '\t' : p[i] == 0x7f)
            return false;
    return true;
}

/*
 * The library ends each value at its first NUL. A NUL that the client sent is found by what follows it: values lie in the order of
 * arrival in one buffer, where only the line end (one or two bytes, zeroed) separates a value from the next name. Anything
 * else, a folded line included, is refused.
 */
static enum MHD_Result scan_header(void *cls, enum MHD_ValueKind kind, const char *name,
                                   size_t n_name, const char *value, size_t n_value)
{
    static const struct {
        const char *name;
        size_t off;
    } single[] = {
        {"Content-Length", offsetof(struct header_scan, n_length)},
        {"Transfer-Encoding", offsetof(struct header_scan, n_coding)},
        {"Host", offsetof(struct header_scan, n_host)},
        {"Origin", offsetof(struct header_scan, n_origin)},
        {"Authorization", offsetof(struct header_scan, n_key)},
        {"Content-Type", offsetof(struct header_scan, n_type)},
        {"X-Request-Id", offsetof(struct header_scan, n_id)},
    };
    struct header_scan *s = cls;

    (void)kind;
    if (!is_token(name, n_name))
        s->wrong = "a header name with a character that names cannot have";
    else if (!value || !is_text(value, n_value))
        s->wrong = "a header value with a control character";
    else if (s->end && name != s->end + 1 && name != s->end + 2)
        s->wrong = "a header with a NUL in it, or folded over lines";
    s->end = value ? value + n_value : NULL;
    s->n++;
    s->n_bytes += n_name + n_value + 4;
    for (size_t i = 0; i < PF_COUNTOF(single); i++)
        if (!strcasecmp(name, single[i].name))
            ++*(unsigned *)(void *)((char *)s + single[i].off);
    return s->wrong ? MHD_NO : MHD_YES;
}

/* After the last value: its line end, then the empty line, all zeroed by the library. */
static bool is_end_plain(const struct http_private *p, const struct header_scan *s,
                         const char *method)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(p->mhd, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);
    const char *end;

    if (!info || !s->end)
        return true;
    end = method + info->header_size;
    return end > s->end && end - s->end >= 2 && end - s->end <= 4;
}

static bool is_small_number(const char *z)
{
    uint64_t n;

    return str_to_u64(str_of(z), &n) && n < (uint64_t)1 << 62;
}

static const char *check_framing(const struct http_request *req, const struct header_scan *s)
{
    const char *length = http_header(req, "Content-Length"),
               *coding = http_header(req, "Transfer-Encoding");

    if (s->n_length > 1)
        return "more than one Content-Length";
    if (s->n_coding > 1)
        return "more than one Transfer-Encoding";
    if (s->n_length && s->n_coding)
        return "both Content-Length and Transfer-Encoding";
    if (coding && strcasecmp(coding, "chunked") != 0)
        return "a Transfer-Encoding that is not 'chunked'";
    if (coding && req->priv->is_http10)
        return "Transfer-Encoding in HTTP/1.0";
    if (length && !is_small_number(length))
        return "a Content-Length that is no number";
    if (s->n_host > 1 || s->n_origin > 1 || s->n_key > 1 || s->n_type > 1 || s->n_id > 1)
        return "a header twice that may come once";
    if (!s->n_host && !req->priv->is_http10)
        return "no Host";
    return NULL;
}

static bool is_id(const char *z)
{
    size_t n = strlen(z);

    return n > 0 && n <= HTTP_ID_MAX &&
           strspn(z, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:~+=") == n;
}

static void make_id(struct http *h, struct http_request *req)
{
    uint64_t n = atomic_fetch_add_explicit(&h->n_ids, 1, memory_order_relaxed);

    (void)snprintf(req->id, sizeof(req->id), "%016llx-%llu", (unsigned long long)h->id_base,
                   (unsigned long long)n);
}

static bool refuse(struct http_request *req, int status, const char *code, const char *text)
{
    const struct http_handlers *on = &req->priv->http->opts.handlers;

    on->refuse(on->ctx, req, status, code, text, &req->priv->response);
    req->priv->is_refused = true;
    return true;
}

/* Refusals after which the rest of the connection cannot be trusted: answered at once, and closed. */
static bool refuse_framing(struct http_request *req, const char *method)
{
    struct http *h = req->priv->http;
    struct header_scan s = {0};
    const char *id, *why;
    char text[160];

    (void)MHD_get_connection_values_n(req->priv->mhd, MHD_HEADER_KIND, scan_header, &s);
    why = s.wrong;
    if (!why && !is_end_plain(req->priv, &s, method))
        why = "a header with a NUL in it, or folded over lines";
    if (!why && (s.n > N_HEADERS_MAX || s.n_bytes > h->opts.n_header_max)) {
        (void)snprintf(text, sizeof(text),
                       "the headers are %zu bytes in %zu lines; %zu in %d are accepted", s.n_bytes,
                       s.n, h->opts.n_header_max, N_HEADERS_MAX);
        return refuse(req, 431, "headers_too_large", text);
    }
    if (!why)
        why = check_framing(req, &s);
    if (!why && req->priv->has_nul)
        why = "a NUL or more than one space in its first line";
    if (!why && req->priv->is_path_cut)
        return refuse(req, 414, "path_too_long", "the path is too long");
    if (!why && req->path[0] != '/')
        why = "a target that is no path";
    if (why) {
        (void)snprintf(text, sizeof(text), "the request has %s", why);
        return refuse(req, 400, "bad_request", text);
    }
    id = http_header(req, "X-Request-Id");
    if (id && !is_id(id))
        return refuse(req, 400, "bad_request_id",
                      "X-Request-Id may have 1 to 128 letters, digits and -_.:~+=");
    if (id)
        (void)snprintf(req->id, sizeof(req->id), "%s", id);
    return false;
}

/* ------------------------------------------------------------------------------------------- requests */

/*
 * The request line has come: the one moment at which the whole target is seen before it is split. What is returned becomes the
 * request of the later calls.
 */
static void *on_uri(void *cls, const char *uri, struct MHD_Connection *mhd)
{
    struct http *h = cls;
    struct http_request *req = mem_calloc(1, sizeof(*req));
    struct http_private *p = mem_calloc(1, sizeof(*p));

    if (!req || !p) {
        mem_free(req);
        mem_free(p);
        return NULL;
    }
    req->priv = p;
    strbuf_init(&req->body);
    p->http = h;
    p->mhd = mhd;
    p->uri = uri;
    p->uri_end = uri + strlen(uri) + 1;
    (void)atomic_fetch_add_explicit(&h->n_open, 1, memory_order_relaxed);
    return req;
}

/* The headers have come. */
static void fill(struct http *h, struct http_request *req, const char *url, const char *method,
                 const char *version)
{
    struct http_private *p = req->priv;
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(p->mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);

    p->is_begun = true;
    p->conn = info ? info->socket_context : NULL;
    p->is_http10 = strcmp(version, "HTTP/1.1") != 0;
    p->has_nul = version != p->uri_end || p->uri != method + strlen(method) + 1;
    req->t_start_ns = clock_ns();
    (void)snprintf(req->method, sizeof(req->method), "%s", method);
    p->is_path_cut = (size_t)snprintf(req->path, sizeof(req->path), "%s", url) >= sizeof(req->path);
    make_id(h, req);
}

static void on_completed(void *cls, struct MHD_Connection *mhd, void **req_cls,
                         enum MHD_RequestTerminationCode why)
{
    struct http *h = cls;
    struct http_request *req = *req_cls;

    (void)mhd;
    if (!req)
        return;
    if (req->priv->is_begun) {
        conns_watch(h->conns, req->priv->conn, NULL, NULL);
        conns_phase(h->conns, req->priv->conn, CONN_IDLE);
        h->opts.handlers.end(
            h->opts.handlers.ctx, req, req->priv->is_queued ? req->priv->status : 0,
            why == MHD_REQUEST_TERMINATED_COMPLETED_OK ? req->priv->n_sent_bytes : 0);
    }
    http_response_release(&req->priv->response);
    strbuf_release(&req->body);
    mem_free(req->priv);
    mem_free(req);
    *req_cls = NULL;
    (void)atomic_fetch_sub_explicit(&h->n_open, 1, memory_order_relaxed);
}

static void on_gone(void *ctx)
{
    struct http_request *req = ctx;
    const struct http_handlers *on = &req->priv->http->opts.handlers;

    if (on->gone)
        on->gone(on->ctx, req);
}

/* The first call: headers are there. Answers at once what must not be read further. */
static enum MHD_Result begin(struct http *h, struct http_request *req, const char *method)
{
    struct http_private *p = req->priv;
    const char *length, *expect;
    uint64_t n_length = 0;
    char text[120];

    conns_phase(h->conns, p->conn, CONN_BODY);
    if (refuse_framing(req, method)) {
        http_response_header(&p->response, "Connection", "close");
        return queue_response(req);
    }
    length = http_header(req, "Content-Length");
    if (length)
        (void)str_to_u64(str_of(length), &n_length); /* checked before */
    req->has_body = n_length > 0 || http_header(req, "Transfer-Encoding");
    if (n_length > h->opts.n_body_max) {
        (void)snprintf(text, sizeof(text), "the body has %llu bytes; %zu are accepted",
                       (unsigned long long)n_length, h->opts.n_body_max);
        (void)refuse(req, 413, "body_too_large", text);
    } else if (h->opts.handlers.check(h->opts.handlers.ctx, req, &p->response)) {
        p->is_refused = true;
    }
    expect = http_header(req, "Expect");
    if (p->is_refused && req->has_body &&
        (expect || n_length > h->opts.n_body_max * N_DISCARD_FACTOR)) {
        http_response_header(&p->response, "Connection", "close");
        return queue_response(req);
    }
    return MHD_YES; /* a small body of a refused request is read and dropped: closing on it could lose the answer */
}

static enum MHD_Result take_body(struct http *h, struct http_request *req, const char *data,
                                 size_t n)
{
    struct http_private *p = req->priv;

    p->n_body_bytes += n;
    if (p->n_body_bytes > h->opts.n_body_max * N_DISCARD_FACTOR)
        return MHD_NO;
    if (p->n_body_bytes > h->opts.n_body_max && !p->is_refused) {
        char text[120];

        (void)snprintf(text, sizeof(text), "the body has more than the %zu bytes that are accepted",
                       h->opts.n_body_max);
        (void)refuse(req, 413, "body_too_large", text);
        strbuf_release(&req->body);
        strbuf_init(&req->body);
    }
    if (!p->is_refused)
        strbuf_add(&req->body, data, n);
    return MHD_YES;
}

static enum MHD_Result complete(struct http *h, struct http_request *req)
{
    struct http_private *p = req->priv;
    bool is_ready;

    if (!strbuf_ok(&req->body) && !p->is_refused)
        (void)refuse(req, 503, "out_of_memory", "out of memory for the body");
    if (p->is_refused)
        return queue_response(req);
    p->is_complete = true;
    conns_phase(h->conns, p->conn, CONN_WORKING);
    h->opts.handlers.handle(h->opts.handlers.ctx, req);
    (void)pthread_mutex_lock(&h->mu);
    is_ready = p->is_ready;
    if (!is_ready) {
        p->is_suspended = true;
        MHD_suspend_connection(p->mhd);
        conns_watch(h->conns, p->conn, on_gone, req);
    }
    (void)pthread_mutex_unlock(&h->mu);
    return is_ready ? queue_response(req) : MHD_YES;
}

static enum MHD_Result on_access(void *cls, struct MHD_Connection *mhd, const char *url,
                                 const char *method, const char *version, const char *data,
                                 size_t *n_data, void **req_cls)
{
    struct http *h = cls;
    struct http_request *req = *req_cls;
    bool is_ready;

    (void)mhd;
    if (!req)
        return MHD_NO; /* memory was short */
    if (!req->priv->is_begun) {
        fill(h, req, url, method, version);
        return begin(h, req, method);
    }
    if (req->priv->is_queued)
        return MHD_YES;
    if (*n_data) {
        size_t n = *n_data;

        *n_data = 0;
        return take_body(h, req, data, n);
    }
    if (!req->priv->is_complete)
        return complete(h, req);
    (void)pthread_mutex_lock(&h->mu);
    is_ready = req->priv->is_ready;
    (void)pthread_mutex_unlock(&h->mu);
    return is_ready ? queue_response(req) : MHD_YES;
}

/* ------------------------------------------------------------------------------------- start and stop */

static void on_connection(void *cls, struct MHD_Connection *mhd, void **socket_ctx,
                          enum MHD_ConnectionNotificationCode what)
{
    struct http *h = cls;

    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *info =
            MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_CONNECTION_FD);

        *socket_ctx = info ? conns_add(h->conns, info->connect_fd) : NULL;
    } else {
        conns_remove(h->conns, *socket_ctx);
        *socket_ctx = NULL;
    }
}

/* Paths are compared as they were sent; the library would decode %00 into the end of the string. */
static size_t keep_escapes(void *cls, struct MHD_Connection *mhd, char *text)
{
    (void)cls;
    (void)mhd;
    return strlen(text);
}

static void on_log(void *cls, const char *fmt, va_list args) PF_PRINTF(2, 0);
static void on_log(void *cls, const char *fmt, va_list args)
{
    char line[512];

    (void)cls;
    (void)vsnprintf(line, sizeof(line), fmt, args);
    log_at(PF_LOG_DEBUG, "http: %s", line);
}

static int start_daemon(struct http *h, pf_error *err)
{
    struct MHD_OptionItem items[] = {
        {MHD_OPTION_EXTERNAL_LOGGER, (intptr_t)on_log, NULL},
        {MHD_OPTION_LISTEN_SOCKET, h->opts.fd_listen, NULL},
        {MHD_OPTION_CONNECTION_LIMIT, h->opts.n_connections_max, NULL},
        {MHD_OPTION_CONNECTION_MEMORY_LIMIT, (intptr_t)(2 * h->opts.n_header_max), NULL},
        {MHD_OPTION_CONNECTION_TIMEOUT, h->opts.reply_ms / 1000 + 1, NULL},
        {MHD_OPTION_NOTIFY_COMPLETED, (intptr_t)on_completed, h},
        {MHD_OPTION_NOTIFY_CONNECTION, (intptr_t)on_connection, h},
        {MHD_OPTION_URI_LOG_CALLBACK, (intptr_t)on_uri, h},
        {MHD_OPTION_UNESCAPE_CALLBACK, (intptr_t)keep_escapes, h},
        {MHD_OPTION_STRICT_FOR_CLIENT, 1, NULL},
        {MHD_OPTION_END, 0, NULL},
    };
    unsigned flags =
        MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ITC | MHD_USE_ERROR_LOG;

    errno = 0;
    h->daemon = MHD_start_daemon(flags, 0, NULL, NULL, on_access, h, MHD_OPTION_ARRAY, items,
                                 MHD_OPTION_END);
    if (!h->daemon)
        return err_sys(err, errno ? errno : EINVAL, "HTTP server cannot start");
    return PF_OK;
}

int http_start(const struct http_opts *opts, struct http **out_http, pf_error *err)
{
    struct http *h = mem_calloc(1, sizeof(*h));
    struct conns_opts conns_opts = {.n_max = opts->n_connections_max,
                                    .headers_ms = opts->headers_ms,
                                    .body_ms = opts->body_ms,
                                    .reply_ms = opts->reply_ms,
                                    .idle_ms = opts->idle_ms};
    int rc;

    if (!h)
        return err_nomem(err, sizeof(*h), "the HTTP server");
    h->opts = *opts;
    (void)pthread_mutex_init(&h->mu, NULL); /* cannot fail with default attributes */
    if (getrandom(&h->id_base, sizeof(h->id_base), 0) != sizeof(h->id_base))
        h->id_base = clock_ns();
    rc = conns_new(&conns_opts, &h->conns, err);
    *out_http = h; /* before the first request, which may ask for it */
    if (!rc)
        rc = start_daemon(h, err);
    if (rc) {
        *out_http = NULL;
        conns_free(h->conns);
        (void)pthread_mutex_destroy(&h->mu);
        mem_free(h);
        return rc;
    }
    return PF_OK;
}

void http_stop(struct http *h)
{
    if (!h)
        return;
    MHD_stop_daemon(h->daemon);
    conns_free(h->conns);
    (void)pthread_mutex_destroy(&h->mu);
    mem_free(h);
}

uint32_t http_n_connections(struct http *h)
{
    return conns_count(h->conns);
}

uint32_t http_n_open_requests(struct http *h)
{
    return atomic_load_explicit(&h->n_open, memory_order_relaxed);
}
