/*
 * Lines of the access log. What the client wrote (path, method, id) is escaped or tamed: a log line is one line.
 */
#include "server/access_log.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/json.h"

static void stamp(char text[40])
{
    struct timespec t;
    struct tm tm;
    size_t n;

    (void)clock_gettime(CLOCK_REALTIME, &t);
    (void)gmtime_r(&t.tv_sec, &tm);
    n = strftime(text, 40, "%Y-%m-%dT%H:%M:%S", &tm);
    (void)snprintf(text + n, 40 - n, ".%03ldZ", t.tv_nsec / 1000000);
}

static void write_text(const struct http_request *req, const char *when, int status,
                       uint64_t n_bytes, double ms, struct strbuf *out)
{
    char path[HTTP_PATH_MAX];

    (void)snprintf(path, sizeof(path), "%s", req->path);
    str_tame(path, strlen(path));
    strbuf_addf(out, "%s %s %s %d %.1fms %lluB %s\n", when, req->method, path, status, ms,
                (unsigned long long)n_bytes, req->id);
}

static void write_json(const struct http_request *req, const char *when, int status,
                       uint64_t n_bytes, double ms, struct strbuf *out)
{
    struct json *doc = json_new_object();

    json_set_z(doc, "time", when);
    json_set(doc, "method", json_new_string(str_of(req->method)));
    json_set(doc, "path", json_new_string(str_of(req->path)));
    json_set_int(doc, "status", status);
    json_set_real(doc, "ms", ms);
    json_set_int(doc, "bytes", (int64_t)n_bytes);
    json_set_z(doc, "request_id", req->id);
    (void)json_write(doc, 0, out, NULL); /* a line less when memory is short */
    strbuf_adds(out, "\n");
    json_free(doc);
}

void access_log_request(const struct access_log *log, const struct http_request *req, int status,
                        uint64_t n_bytes, double ms)
{
    struct strbuf line;
    char when[40];

    if (log->format == ACCESS_NONE)
        return;
    strbuf_init(&line);
    stamp(when);
    if (log->format == ACCESS_JSON)
        write_json(req, when, status, n_bytes, ms, &line);
    else
        write_text(req, when, status, n_bytes, ms, &line);
    if (strbuf_ok(&line) && write(log->fd, line.p, line.n) < 0)
        (void)0; /* nobody reads the log: serving goes on */
    strbuf_release(&line);
}
