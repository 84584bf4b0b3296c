/*
 * Adapters as a request names them: the lists of set_lora and plan, matched by position, and the `loras` of a generation. Turned into
 * one array for the engine. Nothing is loaded here.
 */
#ifndef PF_SERVER_LORA_REQUEST_H
#define PF_SERVER_LORA_REQUEST_H

#include "base/json.h"
#include "base/mem.h"

struct lora_request {
    struct arena arena; /* owns the strings */
    struct pf_engine_lora *loras;
    const char **paths; /* as the client sent them; NULL: none */
    size_t n;
    const char *targets; /* all that are named, for pf_engine_set; NULL: all */
    int32_t merge_dtype, way;
    char param[64]; /* the field that an error is about */
};

/* Bodies have passed schema_check. PF_E_INVALID. Release always. */
int lora_request_parse(const struct json *body, int32_t merge_dtype, struct lora_request *out,
                       pf_error *err);
int lora_request_parse_own(const struct json *loras, int32_t merge_dtype, struct lora_request *out,
                           pf_error *err);
void lora_request_release(struct lora_request *r);

/* "target" of a change: a string or a list -> "a,b"; NULL for all. From the arena. */
int lora_request_targets(struct arena *arena, const struct json *target, const char **out,
                         pf_error *err);

#endif
