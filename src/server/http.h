/*
 * HTTP/1.1 as the rest of the server sees it: requests that have come whole, responses that are handed over once, and streams. Wraps
 * libmicrohttpd, whose header only http.c includes. Everything that comes in is hostile: sizes are bounded, framing must be plain, a
 * request that could be read in two ways is refused before its body.
 *
 * Threads: `check` and `handle` run on the one polling thread and must not wait; http_reply may be called from any thread, once.
 */
#ifndef PF_SERVER_HTTP_H
#define PF_SERVER_HTTP_H

#include "base/err.h"
#include "base/str.h"
#include <stdatomic.h>

struct http;
struct http_private;

#define HTTP_ID_MAX   128
#define HTTP_PATH_MAX 1024

/* Owned by http.c from its headers to its end. Strings are NUL-terminated and hold no NUL. */
struct http_request {
    char method[16];
    char path[HTTP_PATH_MAX]; /* as sent, not decoded, without the query */
    char id[HTTP_ID_MAX + 1]; /* the client's X-Request-Id, or one of ours */
    struct strbuf body;
    bool has_body;
    uint64_t t_start_ns;
    /* For the layer above: what it made of the request. */
    const void *route;
    _Atomic uint64_t i_job; /* 0: none */
    _Atomic bool is_gone;   /* the client hung up */
    char cors_origin[256];  /* a page's origin that may read the answer */
    struct http_private *priv;
};

/* The value of a header, or NULL. A header that decides something and comes twice was refused before. */
const char *http_header(const struct http_request *req, const char *name);

#define HTTP_N_HEADERS 8
struct http_header_out {
    const char *name;
    char value[300];
};

/*
 * An answer without known length. `read` is called on the polling thread for more bytes: > 0 bytes were written, 0 nothing now,
 * after having called http_sleep(req) under the lock that the writer holds when it calls http_wake; -1 the end.
 */
struct http_stream {
    void *ctx;
    int64_t (*read)(void *ctx, struct http_request *req, char *out, size_t n_max);
    /* The client hung up: wake and end. May be called with locks held: set a flag and wake */
    void (*gone)(void *ctx);
    void (*free)(void *ctx);
};

struct http_response {
    int status;
    const char *content_type; /* NULL: no body */
    struct strbuf body;       /* taken over */
    const void *fixed;        /* instead of body: bytes that live as long as the program */
    size_t n_fixed;
    struct http_header_out headers[HTTP_N_HEADERS];
    size_t n_headers;
    struct http_stream stream; /* read != NULL: instead of a body */
};
void http_response_header(struct http_response *r, const char *name, const char *fmt, ...)
    PF_PRINTF(3, 4);
void http_response_release(struct http_response *r);

struct http_handlers {
    void *ctx;
    /* After the headers, before the body. True: refused, *refusal is filled. */
    bool (*check)(void *ctx, struct http_request *req, struct http_response *refusal);
    /* The whole request. http_reply is called by it or later by somebody. */
    void (*handle)(void *ctx, struct http_request *req);
    /* The client of a request that is being worked on hung up: set flags only (see conns.h). */
    void (*gone)(void *ctx, struct http_request *req);
    /* Refusals of http.c itself, in the server's words. */
    void (*refuse)(void *ctx, struct http_request *req, int status, const char *code,
                   const char *text, struct http_response *out);
    /* Answered, or given up (status 0). */
    void (*end)(void *ctx, const struct http_request *req, int status, uint64_t n_bytes);
};

struct http_opts {
    int fd_listen; /* taken over */
    uint32_t n_connections_max;
    size_t n_body_max, n_header_max;
    uint32_t headers_ms, body_ms, reply_ms, idle_ms;
    struct http_handlers handlers;
};

int http_start(const struct http_opts *opts, struct http **out_http, pf_error *err);
/* From here on a request that becomes whole is answered with 503 and reaches no handler. */
void http_close(struct http *h);
/* Requests that a handler has and that http_reply was not called for yet. After http_close it only falls. */
uint32_t http_n_working(struct http *h);
/*
 * After http_close. Stops accepting, lets go of all connections and frees. Every request must have been answered and every stream
 * ended: the library ends the process when it finds one that sleeps.
 */
void http_stop(struct http *h);
uint32_t http_n_connections(struct http *h);
/* Answered ones whose answer is under way included */
uint32_t http_n_open_requests(struct http *h);

/* Takes over the insides of r */
void http_reply(struct http_request *req, struct http_response *r);
void http_sleep(struct http_request *req);
void http_wake(struct http_request *req);

#endif
