/*
 * Fuzz target: what a client sends, as bytes, to a real listening socket. Whatever it is, the server says HTTP or nothing, closes or
 * waits, and answers a plain request afterwards. Requests that reach the handler are whole, and hold no NUL.
 */
#include "server/http.h"
#include "server/listen.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

#define SHORT_US 3000L
#define LONG_US  10000000L

/* In TMPDIR where that leaves room for a socket's name, which has 107 bytes at most. */
static char socket_path[108];

static void require(bool is_true)
{
    if (!is_true)
        abort();
}

static bool check(void *ctx, struct http_request *req, struct http_response *refusal)
{
    (void)ctx;
    require(req->path[0] == '/' && req->method[0]);
    if (strcmp(req->path, "/refuse") != 0)
        return false;
    refusal->status = 403;
    return true;
}

static void handle(void *ctx, struct http_request *req)
{
    struct http_response r = {.status = 200, .content_type = "text/plain"};

    (void)ctx;
    require(req->body.n <= 1000);
    strbuf_init(&r.body);
    strbuf_adds(&r.body, "fine");
    http_reply(req, &r);
}

static void refuse(void *ctx, struct http_request *req, int status, const char *code,
                   const char *text, struct http_response *out)
{
    (void)ctx;
    (void)req;
    require(code[0] && text[0] && status >= 400);
    out->status = status;
}

static void end(void *ctx, const struct http_request *req, int status, uint64_t n_bytes)
{
    (void)ctx;
    (void)req;
    (void)n_bytes;
    require(status == 0 || (status >= 200 && status < 600));
}

static void remove_socket(void)
{
    (void)unlink(socket_path);
}

static void start(void)
{
    struct http_opts opts = {.n_connections_max = 64,
                             .n_body_max = 1000,
                             .n_header_max = 4096,
                             .headers_ms = 1000,
                             .body_ms = 1000,
                             .reply_ms = 1000,
                             .idle_ms = 1000};
    static struct listener l; /* both last as long as the process: a leak check finds them here */
    static struct http *h;
    const char *tmp = getenv("TMPDIR");
    pf_error err;

    if (!tmp || !*tmp || strlen(tmp) > sizeof(socket_path) - 32)
        tmp = "/tmp";
    (void)snprintf(socket_path, sizeof(socket_path), "%s/pf-fuzz-http-%d", tmp, (int)getpid());
    require(listen_unix(socket_path, 0600, &l, &err) == PF_OK);
    (void)atexit(remove_socket);
    opts.fd_listen = l.fd;
    opts.handlers =
        (struct http_handlers){.check = check, .handle = handle, .refuse = refuse, .end = end};
    require(http_start(&opts, &h, &err) == PF_OK);
}

/* Sends, ends the sending side, and reads what comes until the end or until nothing came for a while: an unfinished request is left
 * to its deadline. */
static size_t talk(const void *p, size_t n, long patience_us, char *out, size_t n_out)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    const struct timeval patience = {.tv_sec = patience_us / 1000000,
                                     .tv_usec = patience_us % 1000000};
    size_t n_in = 0;
    ssize_t got = 1;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    (void)snprintf(a.sun_path, sizeof(a.sun_path), "%s", socket_path);
    require(fd >= 0 && !connect(fd, (const struct sockaddr *)&a, sizeof(a)));
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    if (n)
        (void)send(fd, p, n, MSG_NOSIGNAL);
    (void)shutdown(fd, SHUT_WR);
    while (got > 0 && n_in < n_out) {
        got = recv(fd, out + n_in, n_out - n_in, 0);
        n_in += got > 0 ? (size_t)got : 0;
    }
    (void)close(fd);
    return n_in;
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    static const char plain[] = "GET /plain HTTP/1.1\r\nHost: a\r\n\r\n";
    static char out[65536];
    static unsigned n_runs;
    size_t n_out;

    if (!socket_path[0])
        start();
    n_out = talk(p, n, SHORT_US, out, sizeof(out));
    require(n_out == 0 || (n_out > 12 && !memcmp(out, "HTTP/1.", 7)));
    if (n_runs++ % 16)
        return 0;
    n_out = talk(plain, sizeof(plain) - 1, LONG_US, out, sizeof(out));
    require(n_out > 12 && !memcmp(out, "HTTP/1.1 200", 12));
    require(n_out > 4 && !memcmp(out + n_out - 4, "fine", 4));
    return 0;
}
