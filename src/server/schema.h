/*
 * What a JSON body may look like, as tables: each route's fields, their types and bounds. One checker reads them; the OpenAPI
 * document is tested against them. Messages name the field. Unknown fields are errors: a misspelt strength must not be a default.
 */
#ifndef PF_SERVER_SCHEMA_H
#define PF_SERVER_SCHEMA_H

#include "base/json.h"

enum {
    TAKES_STRING = 1 << 0,
    TAKES_NUMBER = 1 << 1, /* whole ones too */
    TAKES_INT = 1 << 2,
    TAKES_BOOL = 1 << 3,
    TAKES_NULL = 1 << 4,
    TAKES_LIST = 1 << 5,       /* of the scalar types above; not empty */
    TAKES_NULL_ITEMS = 1 << 6, /* and null inside the list */
    TAKES_OBJECTS = 1 << 7,    /* a list of objects as `items` says */
};

#define SCHEMA_LIST_MAX 64

struct schema;
struct field {
    const char *name;
    unsigned takes;
    bool is_required;
    double min, max;     /* of numbers, when max > min */
    bool is_min_open;    /* above min */
    size_t n_max;        /* bytes of a string */
    const char *choices; /* "auto|merge|dynamic"; NULL: any string */
    const struct schema *items;
};

struct schema {
    const char *name; /* component of the OpenAPI document */
    const struct field *fields;
    size_t n_fields;
    bool may_be_absent;
};

extern const struct schema schema_set_lora, schema_merge, schema_targets, schema_load,
    schema_unload, schema_generate, schema_lora;

/* out_param: "strength[1]", "loras[0].strength"; at least 128 bytes. PF_E_INVALID. */
int schema_check(const struct schema *schema, const struct json *body, char *out_param,
                 size_t n_param, pf_error *err);

#endif
