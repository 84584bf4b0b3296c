/*
 * The tables of all bodies and their checker. Values are only judged here, never changed; what depends on the model (sizes, classes,
 * targets) is checked where it is known.
 */
#include "server/schema.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define NAME_MAX_BYTES 256
#define PATH_MAX_BYTES 4096
#define TEXT_MAX_BYTES 32768

#define STRENGTH_TYPES (TAKES_NUMBER | TAKES_LIST)

static const struct field lora_fields[] = {
    {.name = "nickname", .takes = TAKES_STRING, .n_max = NAME_MAX_BYTES},
    {.name = "path", .takes = TAKES_STRING, .n_max = PATH_MAX_BYTES},
    {.name = "strength", .takes = TAKES_NUMBER},
    {.name = "target", .takes = TAKES_STRING | TAKES_LIST, .n_max = NAME_MAX_BYTES},
    {.name = "merge_dtype", .takes = TAKES_STRING, .choices = "base|f32"},
};
const struct schema schema_lora = {"Lora", lora_fields, PF_COUNTOF(lora_fields), false};

/* set_lora and plan */
static const struct field set_fields[] = {
    {.name = "lora_nickname",
     .takes = TAKES_STRING | TAKES_LIST,
     .is_required = true,
     .n_max = NAME_MAX_BYTES},
    {.name = "lora_path",
     .takes = TAKES_STRING | TAKES_LIST | TAKES_NULL | TAKES_NULL_ITEMS,
     .n_max = PATH_MAX_BYTES},
    {.name = "target", .takes = TAKES_STRING | TAKES_LIST, .n_max = NAME_MAX_BYTES},
    {.name = "strength", .takes = STRENGTH_TYPES},
    {.name = "merge_mode", .takes = TAKES_STRING | TAKES_NULL, .choices = "auto|merge|dynamic"},
    {.name = "lora_alpha", .takes = TAKES_NUMBER | TAKES_LIST | TAKES_NULL | TAKES_NULL_ITEMS},
    {.name = "merge_dtype", .takes = TAKES_STRING, .choices = "base|f32"},
};
const struct schema schema_set_lora = {"SetLora", set_fields, PF_COUNTOF(set_fields), false};

static const struct field merge_fields[] = {
    {.name = "target", .takes = TAKES_STRING | TAKES_LIST, .n_max = NAME_MAX_BYTES},
    {.name = "strength", .takes = TAKES_NUMBER},
};
const struct schema schema_merge = {"Merge", merge_fields, PF_COUNTOF(merge_fields), true};

static const struct field targets_fields[] = {
    {.name = "target", .takes = TAKES_STRING | TAKES_LIST, .n_max = NAME_MAX_BYTES},
};
const struct schema schema_targets = {"Targets", targets_fields, PF_COUNTOF(targets_fields), true};

static const struct field load_fields[] = {
    {.name = "lora_nickname", .takes = TAKES_STRING, .is_required = true, .n_max = NAME_MAX_BYTES},
    {.name = "lora_path", .takes = TAKES_STRING, .is_required = true, .n_max = PATH_MAX_BYTES},
};
const struct schema schema_load = {"Load", load_fields, PF_COUNTOF(load_fields), false};

static const struct field unload_fields[] = {
    {.name = "lora_nickname", .takes = TAKES_STRING, .is_required = true, .n_max = NAME_MAX_BYTES},
};
const struct schema schema_unload = {"Unload", unload_fields, PF_COUNTOF(unload_fields), false};

static const struct field generate_fields[] = {
    {.name = "prompt", .takes = TAKES_STRING, .is_required = true, .n_max = TEXT_MAX_BYTES},
    {.name = "n", .takes = TAKES_INT | TAKES_NULL, .min = 1, .max = 64},
    {.name = "size", .takes = TAKES_STRING | TAKES_NULL, .n_max = 64},
    {.name = "response_format", .takes = TAKES_STRING | TAKES_NULL, .choices = "b64_json|url"},
    {.name = "user", .takes = TAKES_STRING | TAKES_NULL, .n_max = NAME_MAX_BYTES},
    {.name = "model", .takes = TAKES_STRING | TAKES_NULL, .n_max = NAME_MAX_BYTES},
    {.name = "num_inference_steps", .takes = TAKES_INT | TAKES_NULL, .min = 1, .max = 1000},
    {.name = "guidance_scale",
     .takes = TAKES_NUMBER | TAKES_NULL,
     .min = 0,
     .max = 1000,
     .is_min_open = true},
    {.name = "seed", .takes = TAKES_INT | TAKES_NULL, .min = 0, .max = 9007199254740991.0},
    {.name = "loras", .takes = TAKES_OBJECTS, .items = &schema_lora},
};
const struct schema schema_generate = {"Generate", generate_fields, PF_COUNTOF(generate_fields),
                                       false};

/* --------------------------------------------------------------------------------------------- checking */

/* "a string, a list or null" for messages. */
static const char *takes_text(unsigned takes, char text[96])
{
    static const struct {
        unsigned bit;
        const char *text;
    } names[] = {{TAKES_STRING, "a string"},
                 {TAKES_NUMBER, "a number"},
                 {TAKES_INT, "a whole number"},
                 {TAKES_BOOL, "true or false"},
                 {TAKES_LIST, "a list of them"},
                 {TAKES_OBJECTS, "a list of objects"},
                 {TAKES_NULL, "null"}};
    size_t n = 0;

    text[0] = '\0';
    for (size_t i = 0; i < PF_COUNTOF(names); i++)
        if (takes & names[i].bit && n < 96)
            n += (size_t)snprintf(text + n, 96 - n, "%s%s", n ? " or " : "", names[i].text);
    return text;
}

static const char *type_text(const struct json *v)
{
    static const char *const texts[] = {
        [JSON_T_NULL] = "null",       [JSON_T_BOOL] = "a boolean",  [JSON_T_INT] = "a number",
        [JSON_T_REAL] = "a number",   [JSON_T_STRING] = "a string", [JSON_T_ARRAY] = "a list",
        [JSON_T_OBJECT] = "an object"};

    return texts[json_typeof(v)];
}

static bool is_choice(const char *choices, struct str s)
{
    struct str rest = str_of(choices);

    while (rest.n) {
        const char *bar = memchr(rest.p, '|', rest.n);
        struct str one = {rest.p, bar ? (size_t)(bar - rest.p) : rest.n};

        if (str_eq(one, s))
            return true;
        rest = str_cut_front(rest, bar ? one.n + 1 : one.n);
    }
    return false;
}

static int check_string(const struct field *f, const char *param, struct str s, pf_error *err)
{
    if (memchr(s.p, '\0', s.n))
        return err_set(err, PF_E_INVALID, "'%s' has a NUL in it", param);
    if (f->n_max && s.n > f->n_max)
        return err_set(err, PF_E_INVALID, "'%s' has %zu bytes; at most %zu are accepted", param,
                       s.n, f->n_max);
    if (f->choices && !is_choice(f->choices, s))
        return err_set(err, PF_E_INVALID, "'%s' is '%.*s'; it must be one of %s", param,
                       (int)(s.n < 64 ? s.n : 64), s.p, f->choices);
    return PF_OK;
}

static int check_number(const struct field *f, const char *param, double v, pf_error *err)
{
    if (!isfinite(v))
        return err_set(err, PF_E_INVALID, "'%s' is not a finite number", param);
    if (f->max > f->min && (v < f->min || v > f->max || (f->is_min_open && v == f->min)))
        return err_set(err, PF_E_INVALID, "'%s' is %g; it must be %s %g and at most %g", param, v,
                       f->is_min_open ? "above" : "at least", f->min, f->max);
    return PF_OK;
}

static int check_scalar(const struct field *f, const char *param, const struct json *v,
                        bool may_be_null, pf_error *err)
{
    enum json_type type = json_typeof(v);
    char text[96];

    if (type == JSON_T_NULL && may_be_null)
        return PF_OK;
    if (type == JSON_T_STRING && f->takes & TAKES_STRING)
        return check_string(f, param, json_str(v), err);
    if ((json_is_whole(v) && f->takes & TAKES_INT) ||
        (json_is_number(v) && f->takes & TAKES_NUMBER))
        return check_number(f, param, json_number(v), err);
    if (type == JSON_T_BOOL && f->takes & TAKES_BOOL)
        return PF_OK;
    return err_set(err, PF_E_INVALID, "'%s' is %s; it must be %s", param, type_text(v),
                   takes_text(f->takes, text));
}

static int check_list(const struct field *f, const struct json *v, const char *prefix,
                      char *out_param, size_t n_param, pf_error *err)
{
    size_t n = json_len(v);

    if (n > SCHEMA_LIST_MAX)
        return err_set(err, PF_E_INVALID, "'%s' has %zu items; at most %d are accepted", out_param,
                       n, SCHEMA_LIST_MAX);
    if (n == 0 && !(f->takes & TAKES_OBJECTS))
        return err_set(err, PF_E_INVALID, "'%s' is an empty list", out_param);
    for (size_t i = 0; i < n; i++) {
        int rc;

        (void)snprintf(out_param, n_param, "%s%s[%zu]", prefix, f->name, i);
        rc = check_scalar(f, out_param, json_at(v, i), f->takes & TAKES_NULL_ITEMS, err);
        if (rc)
            return rc;
    }
    return PF_OK;
}

static const struct field *find_field(const struct schema *schema, const char *name)
{
    for (size_t i = 0; i < schema->n_fields; i++)
        if (!strcmp(schema->fields[i].name, name))
            return &schema->fields[i];
    return NULL;
}

/* The fields of one object; lists of objects are left to the caller, so that nothing recurses. */
static int check_object(const struct schema *schema, const struct json *v, const char *prefix,
                        char *out_param, size_t n_param, pf_error *err)
{
    const char *key;
    const struct json *value;

    for (void *it = json_iter_next(v, NULL, &key, &value); it;
         it = json_iter_next(v, it, &key, &value)) {
        const struct field *f = find_field(schema, key);
        int rc = PF_OK;

        (void)snprintf(out_param, n_param, "%s%.64s", prefix, key);
        if (!f)
            return err_set(err, PF_E_INVALID, "'%s' is no field of this request", out_param);
        if (json_typeof(value) == JSON_T_ARRAY && f->takes & TAKES_LIST)
            rc = check_list(f, value, prefix, out_param, n_param, err);
        else if (!(json_typeof(value) == JSON_T_ARRAY && f->takes & TAKES_OBJECTS))
            rc = check_scalar(f, out_param, value, f->takes & TAKES_NULL, err);
        if (rc)
            return rc;
    }
    for (size_t i = 0; i < schema->n_fields; i++)
        if (schema->fields[i].is_required && !json_get(v, schema->fields[i].name)) {
            (void)snprintf(out_param, n_param, "%s%s", prefix, schema->fields[i].name);
            return err_set(err, PF_E_INVALID, "'%s' is required", out_param);
        }
    return PF_OK;
}

static int check_objects(const struct field *f, const struct json *list, char *out_param,
                         size_t n_param, pf_error *err)
{
    char prefix[64];

    (void)snprintf(out_param, n_param, "%s", f->name);
    if (json_len(list) > SCHEMA_LIST_MAX)
        return err_set(err, PF_E_INVALID, "'%s' has %zu items; at most %d are accepted", f->name,
                       json_len(list), SCHEMA_LIST_MAX);
    for (size_t i = 0; i < json_len(list); i++) {
        int rc;

        (void)snprintf(out_param, n_param, "%s[%zu]", f->name, i);
        if (json_typeof(json_at(list, i)) != JSON_T_OBJECT)
            return err_set(err, PF_E_INVALID, "'%s' is %s; it must be an object", out_param,
                           type_text(json_at(list, i)));
        (void)snprintf(prefix, sizeof(prefix), "%s[%zu].", f->name, i);
        rc = check_object(f->items, json_at(list, i), prefix, out_param, n_param, err);
        if (rc)
            return rc;
    }
    return PF_OK;
}

int schema_check(const struct schema *schema, const struct json *body, char *out_param,
                 size_t n_param, pf_error *err)
{
    int rc;

    out_param[0] = '\0';
    if (json_typeof(body) != JSON_T_OBJECT)
        return err_set(err, PF_E_INVALID, "the body is %s; it must be an object", type_text(body));
    rc = check_object(schema, body, "", out_param, n_param, err);
    for (size_t i = 0; !rc && i < schema->n_fields; i++) {
        const struct json *v = json_get(body, schema->fields[i].name);

        if (schema->fields[i].takes & TAKES_OBJECTS && v)
            rc = check_objects(&schema->fields[i], v, out_param, n_param, err);
    }
    if (!rc)
        out_param[0] = '\0';
    return rc;
}
