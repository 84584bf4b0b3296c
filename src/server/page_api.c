/*
 * The page and its files, and the OpenAPI document: bytes that the build put into the program.
 */
#include "server/assets.h"
#include "server/route.h"

#define CSP                                                                                        \
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "        \
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

static void send(struct http_request *req, const struct asset *asset, const char *type)
{
    struct http_response r = {
        .status = 200, .content_type = type, .fixed = asset->p, .n_fixed = asset->n};

    http_response_header(&r, "Content-Security-Policy", CSP);
    http_response_header(&r, "Referrer-Policy", "no-referrer");
    http_response_header(&r, "Cache-Control", "no-cache");
    http_reply(req, &r);
}

void api_page(struct service *s, struct http_request *req, const struct json *body)
{
    (void)s;
    (void)body;
    send(req, &asset_index_html, "text/html; charset=utf-8");
}

void api_style(struct service *s, struct http_request *req, const struct json *body)
{
    (void)s;
    (void)body;
    send(req, &asset_style_css, "text/css; charset=utf-8");
}

void api_app(struct service *s, struct http_request *req, const struct json *body)
{
    (void)s;
    (void)body;
    send(req, &asset_app_js, "text/javascript; charset=utf-8");
}

void api_openapi(struct service *s, struct http_request *req, const struct json *body)
{
    (void)s;
    (void)body;
    send(req, &asset_openapi_json, "application/json");
}
