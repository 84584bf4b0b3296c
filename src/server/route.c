/*
 * The table, and what happens to every request before its handler: Host, Origin, key, method, content type, body schema, draining.
 */
#include "server/route.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/mem.h"
#include "base/proc.h"
#include "server/reply.h"
#include "server/service.h"

#define CHANGE (ROUTE_WAITS | ROUTE_NEW)

const struct route routes[] = {
    {"GET", "/", api_page, ROUTE_OPEN, NULL, "/"},
    {"GET", "/style.css", api_style, ROUTE_OPEN, NULL, "/style.css"},
    {"GET", "/app.js", api_app, ROUTE_OPEN, NULL, "/app.js"},
    {"GET", "/health", api_health, ROUTE_OPEN, NULL, "/health"},
    {"GET", "/liveness", api_health, ROUTE_OPEN, NULL, "/liveness"},
    {"GET", "/ready", api_ready, ROUTE_OPEN, NULL, "/ready"},
    {"GET", "/model_info", api_model_info, 0, NULL, "/model_info"},
    {"GET", "/server_info", api_server_info, 0, NULL, "/server_info"},
    {"GET", "/openapi.json", api_openapi, 0, NULL, "/openapi.json"},
    {"GET", "/metrics", api_metrics, ROUTE_WAITS, NULL, "/metrics"},
    {"GET", "/v1/models", api_models, 0, NULL, "/v1/models"},
    {"GET", "/v1/models/", api_model, ROUTE_PARAM, NULL, "/v1/models/{id}"},
    {"GET", "/v1/status", api_status, ROUTE_WAITS, NULL, "/v1/status"},
    {"GET", "/v1/events", api_events, ROUTE_WAITS, NULL, "/v1/events"},
    {"GET", "/v1/list_loras", api_list_loras, ROUTE_WAITS, NULL, "/v1/list_loras"},
    {"POST", "/v1/set_lora", api_set_lora, CHANGE, &schema_set_lora, "/v1/set_lora"},
    {"POST", "/v1/merge_lora_weights", api_merge, CHANGE, &schema_merge, "/v1/merge_lora_weights"},
    {"POST", "/v1/unmerge_lora_weights", api_unmerge, CHANGE, &schema_targets,
     "/v1/unmerge_lora_weights"},
    {"POST", "/v1/deactivate_lora_weights", api_deactivate, CHANGE, &schema_targets,
     "/v1/deactivate_lora_weights"},
    {"POST", "/v1/load_lora", api_load, CHANGE, &schema_load, "/v1/load_lora"},
    {"POST", "/v1/unload_lora", api_unload, CHANGE, &schema_unload, "/v1/unload_lora"},
    {"POST", "/v1/plan", api_plan, ROUTE_WAITS, &schema_set_lora, "/v1/plan"},
    {"POST", "/v1/images/generations", api_generate, ROUTE_NEW, &schema_generate,
     "/v1/images/generations"},
    {"GET", "/v1/images/files/", api_picture, ROUTE_PARAM | ROUTE_WAITS, NULL,
     "/v1/images/files/{name}"},
    {"DELETE", "/v1/jobs/", api_delete_job, ROUTE_PARAM, NULL, "/v1/jobs/{id}"},
};
const size_t n_routes = PF_COUNTOF(routes);

/* Index for metrics: of the table, or n_routes for what matched nothing. */
static size_t route_index(const void *route)
{
    return route ? (size_t)((const struct route *)route - routes) : n_routes;
}

static bool fits(const struct route *r, const char *path)
{
    if (r->flags & ROUTE_PARAM)
        return !strncmp(path, r->path, strlen(r->path)) && path[strlen(r->path)];
    return !strcmp(path, r->path);
}

const struct route *route_find(const char *method, const char *path, char out_allow[64])
{
    const char *wanted = strcmp(method, "HEAD") != 0 ? method : "GET";
    size_t n = 0;

    out_allow[0] = '\0';
    for (size_t i = 0; i < n_routes; i++) {
        if (!fits(&routes[i], path))
            continue;
        if (!strcmp(routes[i].method, wanted))
            return &routes[i];
        if (n < 48)
            n += (size_t)snprintf(out_allow + n, 64 - n, "%s%s", n ? ", " : "", routes[i].method);
    }
    return NULL;
}

static int hex_of(char c)
{
    const char *digits = "0123456789abcdef";
    const char *at = c ? strchr(digits, c >= 'A' && c <= 'F' ? c - 'A' + 'a' : c) : NULL;

    return at ? (int)(at - digits) : -1;
}

bool route_param(const struct http_request *req, char *out, size_t n_out)
{
    const char *p = req->path + strlen(((const struct route *)req->route)->path);
    size_t n = 0;

    for (; *p; p++) {
        int c = (unsigned char)*p;

        if (*p == '%') {
            int hi = hex_of(p[1]), lo = hi >= 0 ? hex_of(p[2]) : -1;

            if (lo < 0)
                return false;
            c = hi * 16 + lo;
            p += 2;
        }
        if (!c || n + 1 >= n_out)
            return false;
        out[n++] = (char)c;
    }
    out[n] = '\0';
    return str_is_utf8((struct str){out, n}, NULL);
}

/* ------------------------------------------------------------------------------- before the body is read */

static void refuse(void *ctx, struct http_request *req, int status, const char *code,
                   const char *text, struct http_response *out)
{
    (void)ctx;
    (void)req;
    reply_fill_error(out, status, code, NULL, text);
}

static bool check_origin(struct service *s, struct http_request *req, struct http_response *out)
{
    const char *host = http_header(req, "Host"), *origin = http_header(req, "Origin");
    bool is_cors = false;

    if (!auth_host_fits(s->auth, host)) {
        refuse(s, req, 403, "host_not_allowed",
               "the Host header names none of this server's names; see --allowed-host", out);
        return true;
    }
    if (origin && !auth_origin_fits(s->auth, origin, host, &is_cors)) {
        refuse(s, req, 403, "origin_not_allowed",
               "requests of pages from another origin are refused; see --cors-origin", out);
        return true;
    }
    if (is_cors && strlen(origin) < sizeof(req->cors_origin))
        (void)snprintf(req->cors_origin, sizeof(req->cors_origin), "%s", origin);
    return false;
}

/* The question that a browser asks before a request from an allowed origin. */
static bool answer_preflight(struct http_request *req, const char *allow, struct http_response *out)
{
    if (strcmp(req->method, "OPTIONS") != 0 || !req->cors_origin[0] || !*allow)
        return false;
    out->status = 204;
    http_response_header(out, "Access-Control-Allow-Methods", "%s", allow);
    http_response_header(out, "Access-Control-Allow-Headers",
                         "Authorization, Content-Type, X-Request-Id");
    http_response_header(out, "Access-Control-Max-Age", "600");
    return true;
}

static bool check_route(struct http_request *req, struct http_response *out)
{
    char allow[64];
    const struct route *r = route_find(req->method, req->path, allow);

    req->route = r;
    if (r)
        return false;
    if (answer_preflight(req, allow, out))
        return true;
    if (*allow) {
        refuse(NULL, req, 405, "method_not_allowed", "this path has no such method", out);
        http_response_header(out, "Allow", "%s", allow);
    } else {
        refuse(NULL, req, 404, "not_found", "there is no such path", out);
    }
    return true;
}

static bool is_json_type(const char *type)
{
    static const char json[] = "application/json";
    size_t n = sizeof(json) - 1;

    return type && !strncasecmp(type, json, n) && (type[n] == '\0' || strchr("; \t", type[n]));
}

static bool check(void *ctx, struct http_request *req, struct http_response *out)
{
    struct service *s = ctx;
    const struct route *r;
    const char *encoding;

    if (check_origin(s, req, out) || check_route(req, out))
        return true;
    r = req->route;
    if (auth_has_key(s->auth) && !(r->flags & ROUTE_OPEN) &&
        !auth_key_fits(s->auth, http_header(req, "Authorization"))) {
        refuse(s, req, 401, "invalid_api_key", "an API key is needed: 'Authorization: Bearer KEY'",
               out);
        http_response_header(out, "WWW-Authenticate", "Bearer");
        return true;
    }
    encoding = http_header(req, "Content-Encoding");
    if (req->has_body && encoding && strcasecmp(encoding, "identity") != 0) {
        refuse(s, req, 415, "unsupported_media_type",
               "a body with a Content-Encoding is not read: send it as it is", out);
        return true;
    }
    if (req->has_body && r->body && !is_json_type(http_header(req, "Content-Type"))) {
        refuse(s, req, 415, "unsupported_media_type", "the body must be application/json", out);
        return true;
    }
    if (r->flags & ROUTE_NEW && s->is_draining) {
        refuse(s, req, 503, "draining", "the server is shutting down", out);
        reply_retry_after(out, 5);
        return true;
    }
    return false;
}

/* --------------------------------------------------------------------------------- the request is whole */

/* One request on its way to a thread of its own. */
struct call {
    struct service *s;
    struct http_request *req;
    struct json *body;
};

static void run_call(void *ctx)
{
    struct call *call = ctx;

    ((const struct route *)call->req->route)->handle(call->s, call->req, call->body);
    json_free(call->body);
    mem_free(call);
}

static bool parse_body(struct http_request *req, const struct route *r, struct json **out)
{
    char param[160];
    pf_error err = {0};

    *out = NULL;
    if (!r->body)
        return true; /* what comes with a request that has no body is not looked at */
    if (!req->body.n) {
        if (!r->body->may_be_absent)
            reply_error(req, 400, "body_missing", NULL, "this request needs a JSON body");
        return r->body->may_be_absent;
    }
    if (json_parse(req->body.p, req->body.n, "request body", out, &err)) {
        if (err.code == PF_E_NOMEM)
            reply_pf_error(req, NULL, &err);
        else
            reply_error(req, 400, "invalid_json", NULL, err.msg);
        return false;
    }
    if (schema_check(r->body, *out, param, sizeof(param), &err)) {
        reply_error(req, 422, "invalid_field", param, err.msg);
        json_free(*out);
        return false;
    }
    return true;
}

static void send_to_crew(struct service *s, struct http_request *req, struct json *body)
{
    struct call *call = mem_alloc(sizeof(*call));
    struct http_response r = {0};
    pf_error err = {0};
    int rc;

    if (call)
        *call = (struct call){s, req, body};
    rc = call ? crew_run(s->crew, run_call, call, &err) : err_nomem(&err, sizeof(*call), "a call");
    if (!rc)
        return;
    reply_fill_error(&r, rc == PF_E_BUSY ? 429 : 503, "too_busy", NULL, err.msg);
    reply_retry_after(&r, 1);
    mem_free(call);
    json_free(body);
    http_reply(req, &r);
}

static void handle(void *ctx, struct http_request *req)
{
    struct service *s = ctx;
    const struct route *r = req->route;
    struct json *body;

    if (!parse_body(req, r, &body))
        return;
    if (r->flags & ROUTE_WAITS) {
        send_to_crew(s, req, body);
        return;
    }
    if (r->handle == api_generate && json_get(body, "loras")) {
        send_to_crew(s, req, body); /* a composition of its own is resolved first */
        return;
    }
    r->handle(s, req, body);
    json_free(body);
}

static void gone(void *ctx, struct http_request *req)
{
    struct service *s = ctx;

    /* In this order: a submitter stores the number first and looks at the flag then, so one of us sees the other. */
    atomic_store(&req->is_gone, true);
    (void)queue_end_job(s->queue, atomic_load(&req->i_job), JOB_GONE);
}

static void end(void *ctx, const struct http_request *req, int status, uint64_t n_bytes)
{
    struct service *s = ctx;
    double seconds = (double)(clock_ns() - req->t_start_ns) * 1e-9;

    if (!status || atomic_load(&req->is_gone))
        status = 499; /* what was made for a client that left counts as no answer */
    metrics_request(&s->metrics, route_index(req->route), status, seconds);
    access_log_request(&s->log, req, status, n_bytes, seconds * 1e3);
}

void route_handlers(struct service *s, struct http_handlers *out)
{
    *out = (struct http_handlers){
        .ctx = s, .check = check, .handle = handle, .gone = gone, .refuse = refuse, .end = end};
}
