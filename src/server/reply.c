/*
 * Building answers. A document that cannot be written because memory is short becomes an answer without one.
 */
#include "server/reply.h"

/* doc is freed. */
static void reply_fill_json(struct http_response *r, int status, struct json *doc)
{
    r->status = status;
    strbuf_init(&r->body);
    if (!doc || json_write(doc, 0, &r->body, NULL)) {
        strbuf_release(&r->body);
        strbuf_init(&r->body);
        r->status = 500;
    } else {
        strbuf_adds(&r->body, "\n");
        r->content_type = "application/json";
    }
    json_free(doc);
    http_response_header(r, "Cache-Control", "no-store");
}

void reply_json(struct http_request *req, int status, struct json *doc)
{
    struct http_response r = {0};

    reply_fill_json(&r, status, doc);
    http_reply(req, &r);
}

static const char *type_of(int status)
{
    switch (status) {
    case 401:
        return "authentication_error";
    case 403:
        return "permission_error";
    case 404:
        return "not_found_error";
    case 409:
        return "conflict_error";
    case 429:
        return "rate_limit_error";
    default:
        return status >= 500 ? "server_error" : "invalid_request_error";
    }
}

void reply_fill_error(struct http_response *r, int status, const char *code, const char *param,
                      const char *message)
{
    struct json *doc = json_new_object(), *e = json_new_object();

    json_set(e, "message", json_new_string(str_of(message)));
    json_set_z(e, "type", type_of(status));
    json_set_z(e, "param", param && *param ? param : NULL);
    json_set_z(e, "code", code);
    json_set(doc, "error", e);
    reply_fill_json(r, status, doc);
}

void reply_error(struct http_request *req, int status, const char *code, const char *param,
                 const char *message)
{
    struct http_response r = {0};

    reply_fill_error(&r, status, code, param, message);
    http_reply(req, &r);
}

int reply_status_of(int32_t pf_code)
{
    switch (pf_code) {
    case PF_E_NOTFOUND:
        return 404;
    case PF_E_STATE:
    case PF_E_BUSY:
    case PF_E_EXISTS:
    case PF_E_CHANGED:
    case PF_E_TRUNCATED:
    case PF_E_CANCELLED:
        return 409;
    case PF_E_NOSPACE:
        return 507;
    case PF_E_NOMEM:
        return 503;
    case PF_E_IO:
        return 500;
    default:
        return 422;
    }
}

void reply_pf_error(struct http_request *req, const char *param, const pf_error *err)
{
    reply_error(req, reply_status_of(err->code), pf_error_name(err->code), param, err->msg);
}

const char *reply_merge_dtype(int32_t merge_dtype)
{
    return merge_dtype == PF_MERGE_F32 ? "f32" : "base";
}

void reply_retry_after(struct http_response *r, uint32_t seconds)
{
    http_response_header(r, "Retry-After", "%u", seconds);
}
