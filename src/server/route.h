/*
 * The one table of routes: what exists, who may call it, what its body is, where it runs. Dispatch, authorisation, metrics and
 * the OpenAPI test all read it.
 */
#ifndef PF_SERVER_ROUTE_H
#define PF_SERVER_ROUTE_H

#include "base/json.h"
#include "server/http.h"
#include "server/schema.h"

struct service;

enum {
    ROUTE_OPEN = 1 << 0,  /* answered without a key */
    ROUTE_WAITS = 1 << 1, /* may wait for locks, files or a build: on a thread of its own */
    ROUTE_NEW = 1 << 2,   /* new work: refused while draining */
    ROUTE_PARAM = 1 << 3, /* the path is a prefix; the rest, not empty, is a parameter */
};

/* Answers by http_reply, now or later. body NULL: there was none. It is the caller's and gone when this returns. */
typedef void (*route_fn)(struct service *s, struct http_request *req, const struct json *body);

struct route {
    const char *method, *path;
    route_fn handle;
    unsigned flags;
    const struct schema *body; /* NULL: none is accepted */
    const char *openapi;       /* the path in the OpenAPI document */
};

extern const struct route routes[];
extern const size_t n_routes;

/* NULL with *out_allow filled ("GET, POST", empty: no such path). HEAD finds GET. */
const struct route *route_find(const char *method, const char *path, char out_allow[64]);
/* The rest of the path behind a ROUTE_PARAM prefix, percent-decoded. False: not decodable, or holds a NUL. */
bool route_param(const struct http_request *req, char *out, size_t n_out);

void route_handlers(struct service *s, struct http_handlers *out);

/* Handlers, by file. lora_api.c */
void api_set_lora(struct service *s, struct http_request *req, const struct json *body);
void api_merge(struct service *s, struct http_request *req, const struct json *body);
void api_unmerge(struct service *s, struct http_request *req, const struct json *body);
void api_deactivate(struct service *s, struct http_request *req, const struct json *body);
void api_load(struct service *s, struct http_request *req, const struct json *body);
void api_unload(struct service *s, struct http_request *req, const struct json *body);
void api_list_loras(struct service *s, struct http_request *req, const struct json *body);
/* plan_api.c */
void api_plan(struct service *s, struct http_request *req, const struct json *body);
/* generate_api.c */
void api_generate(struct service *s, struct http_request *req, const struct json *body);
void api_delete_job(struct service *s, struct http_request *req, const struct json *body);
void api_picture(struct service *s, struct http_request *req, const struct json *body);
/* status_api.c */
void api_health(struct service *s, struct http_request *req, const struct json *body);
void api_ready(struct service *s, struct http_request *req, const struct json *body);
void api_model_info(struct service *s, struct http_request *req, const struct json *body);
void api_server_info(struct service *s, struct http_request *req, const struct json *body);
void api_models(struct service *s, struct http_request *req, const struct json *body);
void api_model(struct service *s, struct http_request *req, const struct json *body);
void api_status(struct service *s, struct http_request *req, const struct json *body);
void api_events(struct service *s, struct http_request *req, const struct json *body);
/* metrics_api.c */
void api_metrics(struct service *s, struct http_request *req, const struct json *body);
/* page_api.c */
void api_page(struct service *s, struct http_request *req, const struct json *body);
void api_style(struct service *s, struct http_request *req, const struct json *body);
void api_app(struct service *s, struct http_request *req, const struct json *body);
void api_openapi(struct service *s, struct http_request *req, const struct json *body);

#endif
