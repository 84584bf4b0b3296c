/*
 * The table of routes: finding, parameters, who is let in without a key; and the OpenAPI document against table and schemas.
 */
#include "testing.h"

#include "server/route.h"

#include <ctype.h>

static void finds_by_method_and_path(void **state)
{
    char allow[64];
    (void)state;

    assert_string_equal(route_find("GET", "/health", allow)->path, "/health");
    assert_string_equal(route_find("HEAD", "/v1/models", allow)->path, "/v1/models");
    assert_string_equal(route_find("GET", "/v1/models/x", allow)->path, "/v1/models/");
    assert_string_equal(route_find("DELETE", "/v1/jobs/x", allow)->path, "/v1/jobs/");
    assert_null(route_find("POST", "/health", allow));
    assert_string_equal(allow, "GET");
    assert_null(route_find("GET", "/v1/set_lora", allow));
    assert_string_equal(allow, "POST");
    assert_null(route_find("GET", "/healthz", allow));
    assert_string_equal(allow, "");
    assert_null(route_find("GET", "/v1/models/", allow));
    assert_null(route_find("GET", "health", allow));
}

static void decodes_parameters(void **state)
{
    static const struct {
        const char *path, *param; /* NULL: refused */
    } rows[] = {{"/v1/models/a", "a"},
                {"/v1/models/org%2Fname", "org/name"},
                {"/v1/models/a/b", "a/b"},
                {"/v1/models/%41", "A"},
                {"/v1/models/%C3%A9", "\xc3\xa9"},
                {"/v1/models/%c3", NULL},
                {"/v1/models/a%00b", NULL},
                {"/v1/models/a%", NULL},
                {"/v1/models/a%4", NULL},
                {"/v1/models/a%zz", NULL},
                {"/v1/models/aaaaaaaaaaaaaaaaaaaa", NULL}};
    struct http_request req = {0};
    char allow[64], param[16];
    (void)state;

    for (size_t i = 0; i < PF_COUNTOF(rows); i++) {
        (void)snprintf(req.path, sizeof(req.path), "%s", rows[i].path);
        req.route = route_find("GET", req.path, allow);
        assert_non_null(req.route);
        assert_int_equal(route_param(&req, param, sizeof(param)), rows[i].param != NULL);
        if (rows[i].param)
            assert_string_equal(param, rows[i].param);
    }
}

static void only_health_and_the_page_are_open(void **state)
{
    static const char *const open[] = {"/",       "/style.css", "/app.js",
                                       "/health", "/liveness",  "/ready"};
    size_t n = 0;
    (void)state;

    for (size_t i = 0; i < n_routes; i++) {
        bool is_named = false;
        for (size_t k = 0; k < PF_COUNTOF(open); k++)
            is_named = is_named || !strcmp(routes[i].path, open[k]);
        assert_int_equal((routes[i].flags & ROUTE_OPEN) != 0, is_named);
        n += is_named;
    }
    assert_int_equal(n, PF_COUNTOF(open));
}

/* ------------------------------------------------------------------------------------------- OpenAPI */

static struct json *document(void)
{
    struct json *doc = NULL;
    pf_error err;

    assert_ok(json_parse_file(PF_SOURCE_DIR "/src/server/openapi.json", 1 << 20, &doc, &err), &err);
    return doc;
}

static const struct json *operation(const struct json *doc, const struct route *r)
{
    char method[16];
    size_t n = strlen(r->method);

    for (size_t i = 0; i <= n; i++)
        method[i] = (char)tolower((unsigned char)r->method[i]);
    return json_get(json_get(json_get(doc, "paths"), r->openapi), method);
}

static const char *body_ref(const struct json *op)
{
    const struct json *body = json_get(json_get(op, "requestBody"), "content");

    return json_z(json_get(json_get(json_get(body, "application/json"), "schema"), "$ref"));
}

static void the_document_has_the_routes_and_no_other(void **state)
{
    struct json *doc = document();
    size_t n = 0;
    const char *path;
    const struct json *item;
    (void)state;

    for (size_t i = 0; i < n_routes; i++) {
        const struct json *op = operation(doc, &routes[i]);
        char ref[80] = "";

        if (!op)
            fail_msg("%s %s is not in the document", routes[i].method, routes[i].openapi);
        if (routes[i].body)
            (void)snprintf(ref, sizeof(ref), "#/components/schemas/%s", routes[i].body->name);
        if (routes[i].body)
            assert_string_equal(body_ref(op), ref);
        else
            assert_null(json_get(op, "requestBody"));
        if (routes[i].body)
            assert_int_equal(json_bool(json_get(json_get(op, "requestBody"), "required")),
                             !routes[i].body->may_be_absent);
        assert_int_equal(json_get(json_get(op, "responses"), "401") == NULL,
                         (routes[i].flags & ROUTE_OPEN) != 0);
        assert_non_null(json_get(json_get(op, "responses"), "200"));
    }
    for (void *it = json_iter_next(json_get(doc, "paths"), NULL, &path, &item); it;
         it = json_iter_next(json_get(doc, "paths"), it, &path, &item))
        n += json_len(item);
    assert_int_equal(n, n_routes);
    json_free(doc);
}

/* Does the OpenAPI type say the same as `takes`? */
static unsigned types_of(const struct json *schema);

static unsigned type_bit(const char *name)
{
    return !strcmp(name, "string")    ? TAKES_STRING
           : !strcmp(name, "number")  ? TAKES_NUMBER
           : !strcmp(name, "integer") ? TAKES_INT
           : !strcmp(name, "boolean") ? TAKES_BOOL
           : !strcmp(name, "null")    ? TAKES_NULL
                                      : 0;
}

static unsigned list_bits(const struct json *items)
{
    if (json_get(items, "$ref"))
        return TAKES_OBJECTS;
    return TAKES_LIST | (types_of(items) & TAKES_NULL ? TAKES_NULL_ITEMS : 0);
}

static unsigned types_of(const struct json *schema)
{
    const struct json *type = json_get(schema, "type"), *any = json_get(schema, "anyOf");
    unsigned bits = 0;

    for (size_t i = 0; i < json_len(any); i++)
        bits |= types_of(json_at(any, i));
    for (size_t i = 0; json_typeof(type) == JSON_T_ARRAY && i < json_len(type); i++)
        bits |= type_bit(json_z(json_at(type, i)));
    if (json_z(type))
        bits |= !strcmp(json_z(type), "array") ? list_bits(json_get(schema, "items"))
                                               : type_bit(json_z(type));
    return bits;
}

static void compare_bounds(const struct field *f, const struct json *schema)
{
    if (f->max <= f->min)
        return;
    assert_true(json_number(json_get(schema, "maximum")) == f->max);
    assert_true(json_number(json_get(schema, f->is_min_open ? "exclusiveMinimum" : "minimum")) ==
                f->min);
}

static void compare_schema(const struct json *doc, const struct schema *schema)
{
    const struct json *it =
                          json_get(json_get(json_get(doc, "components"), "schemas"), schema->name),
                      *required = json_get(it, "required");
    size_t n_required = 0;

    assert_non_null(it);
    assert_false(json_bool(json_get(it, "additionalProperties")));
    assert_int_equal(json_len(json_get(it, "properties")), schema->n_fields);
    for (size_t i = 0; i < schema->n_fields; i++) {
        const struct field *f = &schema->fields[i];
        const struct json *p = json_get(json_get(it, "properties"), f->name);
        bool is_required = false;

        if (!p)
            fail_msg("%s.%s is not in the document", schema->name, f->name);
        if (types_of(p) != f->takes)
            fail_msg("%s.%s: the document takes %x, the table %x", schema->name, f->name,
                     types_of(p), f->takes);
        compare_bounds(f, p);
        for (size_t k = 0; k < json_len(required); k++)
            is_required = is_required || !strcmp(json_z(json_at(required, k)), f->name);
        assert_int_equal(is_required, f->is_required);
        n_required += f->is_required;
    }
    assert_int_equal(json_len(required), n_required);
}

static void the_document_has_the_fields_of_the_tables(void **state)
{
    const struct schema *const all[] = {&schema_set_lora, &schema_merge,  &schema_targets,
                                        &schema_load,     &schema_unload, &schema_generate,
                                        &schema_lora};
    struct json *doc = document();
    (void)state;

    for (size_t i = 0; i < PF_COUNTOF(all); i++)
        compare_schema(doc, all[i]);
    json_free(doc);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(finds_by_method_and_path),
        cmocka_unit_test(decodes_parameters),
        cmocka_unit_test(only_health_and_the_page_are_open),
        cmocka_unit_test(the_document_has_the_routes_and_no_other),
        cmocka_unit_test(the_document_has_the_fields_of_the_tables),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
