/*
 * Fuzz target: a request body, as bytes; the first one picks the schema. What the checker lets through is turned into adapters, and
 * keeps what the schema promises: bounded lists, finite numbers, a nickname. What it refuses gets one bounded sentence.
 */
#include "server/lora_request.h"
#include "server/schema.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

static void require(bool is_true)
{
    if (!is_true)
        abort();
}

static void use(const struct schema *schema, const struct json *body)
{
    struct lora_request r = {0};
    pf_error err = {0};
    const struct json *loras = json_get(body, "loras");
    int rc = PF_E_STATE;

    if (schema == &schema_set_lora)
        rc = lora_request_parse(body, PF_MERGE_BASE, &r, &err);
    else if (schema == &schema_generate && loras)
        rc = lora_request_parse_own(loras, PF_MERGE_BASE, &r, &err);
    else
        return;
    require(rc == PF_OK || (rc == PF_E_INVALID && err.msg[0] != '\0'));
    for (size_t i = 0; rc == PF_OK && i < r.n; i++) {
        require(r.n <= SCHEMA_LIST_MAX && r.loras[i].nickname && r.loras[i].nickname[0]);
        require(isfinite(r.loras[i].strength) && isfinite(r.loras[i].alpha));
    }
    lora_request_release(&r);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    static const struct schema *const all[] = {&schema_set_lora, &schema_merge,  &schema_targets,
                                               &schema_load,     &schema_unload, &schema_generate,
                                               &schema_lora};
    const struct schema *schema = all[n ? p[0] % PF_COUNTOF(all) : 0];
    struct json *body = NULL;
    char param[160];
    pf_error err = {0};
    int rc;

    if (!n || json_parse((const char *)p + 1, n - 1, "body", &body, &err))
        return 0;
    rc = schema_check(schema, body, param, sizeof(param), &err);
    require(rc == PF_OK || rc == PF_E_INVALID);
    require(strlen(param) < sizeof(param) && (rc || !param[0]));
    require(!rc || (err.msg[0] && strlen(err.msg) < 1000));
    if (!rc)
        use(schema, body);
    json_free(body);
    return 0;
}
