/*
 * JSON documents: configs, indices, manifests, replies. A thin wall before jansson, whose header only json.c includes.
 * The safetensors header is not read with this (it has its own bounded scanner). Duplicate keys are errors. Depth <= 64.
 * Values returned by the json_get and json_at families are borrowed from the document.
 */
#ifndef PF_BASE_JSON_H
#define PF_BASE_JSON_H

#include "base/err.h"
#include "base/str.h"
#include <stdio.h>

struct json; /* a value; the root is owned by whoever parsed or made it */

enum json_type {
    JSON_T_NULL,
    JSON_T_BOOL,
    JSON_T_INT,
    JSON_T_REAL,
    JSON_T_STRING,
    JSON_T_ARRAY,
    JSON_T_OBJECT
};

/* what: names the document in errors ("adapter_config.json"). PF_E_FORMAT with line and byte offset. */
int json_parse(const char *p, size_t n, const char *what, struct json **out, pf_error *err);
int json_parse_file(const char *path, size_t n_bytes_max, struct json **out, pf_error *err);
void json_free(struct json *root);

enum json_type json_typeof(const struct json *v); /* NULL is JSON_T_NULL */
bool json_is_number(const struct json *v);
bool json_is_whole(const struct json *v);  /* as JSON Schema's "integer": 7, and 7.0 up to 2^53 */
double json_number(const struct json *v);  /* 0 when it is none */
int64_t json_int(const struct json *v);    /* 0 when it is not whole */
bool json_bool(const struct json *v);      /* false when it is none */
struct str json_str(const struct json *v); /* {"" , 0} when it is none */
const char *json_z(const struct json *v);  /* NULL when it is no string, or holds a NUL */

/* NULL: absent or no object */
const struct json *json_get(const struct json *object, const char *key);
size_t json_len(const struct json *v); /* of an array or object, else 0 */
const struct json *json_at(const struct json *array, size_t i);
/* Objects in insertion order. Start with NULL; NULL at the end. */
void *json_iter_next(const struct json *object, void *iter, const char **out_key,
                     const struct json **out_value);

/* Building. Setters take ownership of `v`, and fail quietly: json_write reports out of memory. */
struct json *json_new_object(void);
struct json *json_new_array(void);
struct json *json_new_string(struct str s); /* invalid UTF-8 is replaced */
struct json *json_new_int(int64_t v);
struct json *json_new_real(double v); /* NaN and infinity become null */
struct json *json_new_bool(bool v);
struct json *json_new_null(void);
void json_set(struct json *object, const char *key, struct json *v);
void json_add(struct json *array, struct json *v);
void json_set_z(struct json *object, const char *key, const char *z); /* NULL becomes null */
void json_set_int(struct json *object, const char *key, int64_t v);
void json_set_real(struct json *object, const char *key, double v);
void json_set_bool(struct json *object, const char *key, bool v);

/* indent 0: one line. Insertion order is kept. PF_E_NOMEM. */
int json_write(const struct json *v, unsigned indent, struct strbuf *out, pf_error *err);

#endif
