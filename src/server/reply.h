/*
 * Answers: JSON documents, and errors in OpenAI's shape, {"error": {message, type, param, code}}. One table maps the engine's errors
 * to statuses.
 */
#ifndef PF_SERVER_REPLY_H
#define PF_SERVER_REPLY_H

#include "base/json.h"
#include "server/http.h"

void reply_json(struct http_request *req, int status, struct json *doc);
/* param NULL: null. The message is a sentence as the library writes them. */
void reply_fill_error(struct http_response *r, int status, const char *code, const char *param,
                      const char *message);
void reply_error(struct http_request *req, int status, const char *code, const char *param,
                 const char *message);
/* Of an error of the library, where a client's input met it. */
void reply_pf_error(struct http_request *req, const char *param, const pf_error *err);
int reply_status_of(int32_t pf_code);
/* How a PF_MERGE_* is called in documents. */
const char *reply_merge_dtype(int32_t merge_dtype);
void reply_retry_after(struct http_response *r, uint32_t seconds);

#endif
