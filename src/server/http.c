/*
 * The wrapper: one polling thread of libmicrohttpd (epoll), which parses headers and moves bytes; this file takes connections over from
 * the door, decides what is refused, collects bodies within bounds, suspends a connection while its request is worked on, and hands the
 * answer over when it is there.
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
#include <sys/socket.h>
#include <time.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/proc.h"
#include "server/conns.h"
#include "server/door.h"

#define STREAM_BLOCK_BYTES 16384
#define N_DISCARD_FACTOR   16 /* a refused body is read and dropped up to this many times the limit */
/* Of the header limit: a head, what the library makes of it, and its answer's. */
#define N_POOL_FACTOR 4

/* The door counts; the library still has some that we were told are gone. */
#define N_LEAVING 64

struct http {
    struct MHD_Daemon *daemon;
    struct door *door;
    struct http_opts opts;
    struct conns *conns;
    pthread_mutex_t mu; /* guards is_ready and is_suspended of every request */
    _Atomic uint32_t n_open;
    _Atomic uint32_t n_working; /* given to the handler, not answered yet */
    _Atomic bool is_closing;
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
    (void)atomic_fetch_sub(&h->n_working, 1);
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

/* The headers of a request, and where the last one ends in the library's buffer. */
struct header_scan {
    struct head head;
    const char *end;
};

/*
 * The library ends each value at its first NUL. A NUL that the client sent is found by what follows it: values lie in the order of
 * arrival in one buffer, where only the line end (one or two bytes, zeroed) separates a value from the next name. Anything
 * else, a folded line included, is refused.
 */
static enum MHD_Result scan_header(void *cls, enum MHD_ValueKind kind, const char *name,
                                   size_t n_name, const char *value, size_t n_value)
{
    struct header_scan *s = cls;

    (void)kind;
    head_add(&s->head, (struct str){name, n_name}, (struct str){value ? value : "", n_value});
    if (!value || (s->end && name != s->end + 1 && name != s->end + 2))
        s->head.wrong = "a header with a NUL in it, or folded over lines";
    s->end = value ? value + n_value : NULL;
    return s->head.wrong ? MHD_NO : MHD_YES;
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
    struct header_scan s = {.head.is_http10 = req->priv->is_http10};
    struct head_refusal why = {0};
    const char *id;

    (void)MHD_get_connection_values_n(req->priv->mhd, MHD_HEADER_KIND, scan_header, &s);
    if (!s.head.wrong && !is_end_plain(req->priv, &s, method))
        s.head.wrong = "a header with a NUL in it, or folded over lines";
    if (!head_is_refused(&s.head, req->priv->http->opts.n_header_max, &why)) {
        if (req->priv->has_nul)
            head_refuse(&why, 400, "bad_request",
                        "the request has a NUL or more than one space in its first line");
        else if (req->priv->is_path_cut)
            head_refuse(&why, 414, "path_too_long", "the path has more than %d bytes",
                        HTTP_PATH_MAX - 1);
        else if (req->path[0] != '/')
            head_refuse(&why, 400, "bad_request", "the request has a target that is no path");
    }
    if (why.status)
        return refuse(req, why.status, why.code, why.text);
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
    p->is_http10 = !strcmp(version, "HTTP/1.0");
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

/* False: no more requests reach the handler. */
static bool begin_work(struct http *h)
{
    (void)atomic_fetch_add(&h->n_working, 1); /* first: whoever closes looks at it afterwards */
    if (!atomic_load(&h->is_closing))
        return true;
    (void)atomic_fetch_sub(&h->n_working, 1);
    return false;
}

static enum MHD_Result complete(struct http *h, struct http_request *req)
{
    struct http_private *p = req->priv;
    bool is_ready;

    if (!strbuf_ok(&req->body) && !p->is_refused)
        (void)refuse(req, 503, "out_of_memory", "out of memory for the body");
    if (!p->is_refused && !begin_work(h))
        (void)refuse(req, 503, "draining", "the server is shutting down");
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

/* How a connection's entry in the table gets through the library: as the address of the client, which it keeps and does not read
   further than the family. */
struct pass {
    sa_family_t family;
    struct conn *conn;
};

static void let_in(void *ctx, int fd, struct conn *conn)
{
    struct http *h = ctx;
    struct sockaddr_storage local = {0};
    socklen_t n = sizeof(local);
    struct pass pass = {.conn = conn};

    if (!getsockname(fd, (struct sockaddr *)&local, &n))
        pass.family = local.ss_family;
    conns_phase(h->conns, conn, CONN_WORKING); /* the descriptor may be closed from here on */
    if (MHD_add_connection(h->daemon, fd, (const struct sockaddr *)(const void *)&pass,
                           sizeof(pass)) != MHD_YES)
        conns_remove(h->conns, conn);
}

/* The answer to a head that the library never saw. */
static void refuse_at_door(void *ctx, const struct head_refusal *why, struct strbuf *out)
{
    struct http *h = ctx;
    const struct http_handlers *on = &h->opts.handlers;
    struct http_request *req = mem_calloc(1, sizeof(*req));
    struct http_response r = {0};
    const time_t now = time(NULL);
    char date[40] = "";
    struct tm tm;

    if (!req)
        return;
    if (gmtime_r(&now, &tm))
        (void)strftime(date, sizeof(date), "%a, %d %b %Y %H:%M:%S GMT", &tm);
    make_id(h, req);
    (void)snprintf(req->method, sizeof(req->method), "-");
    (void)snprintf(req->path, sizeof(req->path), "-");
    req->t_start_ns = clock_ns();
    on->refuse(on->ctx, req, why->status, why->code, why->text, &r);
    strbuf_addf(out, "HTTP/1.1 %d %s\r\nDate: %s\r\nConnection: close\r\nContent-Length: %zu\r\n",
                r.status, MHD_get_reason_phrase_for((unsigned)r.status), date, r.body.n);
    if (r.content_type)
        strbuf_addf(out, "Content-Type: %s\r\n", r.content_type);
    for (size_t i = 0; i < r.n_headers; i++)
        strbuf_addf(out, "%s: %s\r\n", r.headers[i].name, r.headers[i].value);
    strbuf_addf(out, "X-Request-Id: %s\r\nX-Content-Type-Options: nosniff\r\n\r\n", req->id);
    strbuf_add(out, r.body.p, r.body.n);
    on->end(on->ctx, req, r.status, r.body.n);
    http_response_release(&r);
    mem_free(req);
}

static void on_connection(void *cls, struct MHD_Connection *mhd, void **socket_ctx,
                          enum MHD_ConnectionNotificationCode what)
{
    struct http *h = cls;

    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *info =
            MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
        struct pass pass;

        memcpy(&pass, info->client_addr, sizeof(pass));
        *socket_ctx = pass.conn;
        conns_phase(h->conns, pass.conn, CONN_HEADERS);
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
        {MHD_OPTION_CONNECTION_LIMIT, h->opts.n_connections_max + N_LEAVING, NULL},
        {MHD_OPTION_CONNECTION_MEMORY_LIMIT, (intptr_t)(N_POOL_FACTOR * h->opts.n_header_max),
         NULL},
        {MHD_OPTION_CONNECTION_TIMEOUT, h->opts.reply_ms / 1000 + 1, NULL},
        {MHD_OPTION_NOTIFY_COMPLETED, (intptr_t)on_completed, h},
        {MHD_OPTION_NOTIFY_CONNECTION, (intptr_t)on_connection, h},
        {MHD_OPTION_URI_LOG_CALLBACK, (intptr_t)on_uri, h},
        {MHD_OPTION_UNESCAPE_CALLBACK, (intptr_t)keep_escapes, h},
        {MHD_OPTION_STRICT_FOR_CLIENT, 1, NULL},
        {MHD_OPTION_END, 0, NULL},
    };
    unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_USE_NO_LISTEN_SOCKET |
                     MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ITC | MHD_USE_ERROR_LOG;

    errno = 0;
    h->daemon = MHD_start_daemon(flags, 0, NULL, NULL, on_access, h, MHD_OPTION_ARRAY, items,
                                 MHD_OPTION_END);
    if (!h->daemon)
        return err_sys(err, errno ? errno : EINVAL, "HTTP server cannot start");
    return PF_OK;
}

static int open_door(struct http *h, pf_error *err)
{
    struct door_opts door_opts = {.fd_listen = h->opts.fd_listen,
                                  .n_connections_max = h->opts.n_connections_max,
                                  .n_header_max = h->opts.n_header_max,
                                  .conns = h->conns,
                                  .let_in = let_in,
                                  .refuse = refuse_at_door,
                                  .ctx = h};

    return door_new(&door_opts, &h->door, err);
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
    if (!rc)
        rc = open_door(h, err);
    if (rc) {
        *out_http = NULL;
        if (h->daemon)
            MHD_stop_daemon(h->daemon);
        conns_free(h->conns);
        (void)pthread_mutex_destroy(&h->mu);
        mem_free(h);
        return rc;
    }
    return PF_OK;
}

void http_close(struct http *h)
{
    atomic_store(&h->is_closing, true);
}

uint32_t http_n_working(struct http *h)
{
    return atomic_load(&h->n_working);
}

void http_stop(struct http *h)
{
    if (!h)
        return;
    door_free(h->door);
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
