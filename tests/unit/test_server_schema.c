/*
 * Bodies against their tables: what is accepted, what is refused, and that each refusal names the field.
 */
#include "testing.h"

#include "server/schema.h"

static int check(const struct schema *schema, const char *text, char param[160], pf_error *err)
{
    struct json *body = NULL;
    int rc = json_parse(text, strlen(text), "body", &body, err);

    assert_ok(rc, err);
    rc = schema_check(schema, body, param, 160, err);
    json_free(body);
    return rc;
}

static void accepts_what_clients_send(void **state)
{
    static const struct {
        const struct schema *schema;
        const char *text;
    } rows[] = {
        {&schema_set_lora, "{\"lora_nickname\": \"a\"}"},
        {&schema_set_lora, "{\"lora_nickname\": [\"a\", \"b\"], \"lora_path\": [\"x\", null], "
                           "\"strength\": [1, -0.5], \"target\": \"all\", \"merge_mode\": null, "
                           "\"lora_alpha\": [null, 8]}"},
        {&schema_set_lora, "{\"lora_nickname\": \"a\", \"lora_path\": null, \"lora_alpha\": null, "
                           "\"merge_mode\": \"dynamic\", \"merge_dtype\": \"f32\"}"},
        {&schema_merge, "{}"},
        {&schema_merge, "{\"target\": [\"transformer\"], \"strength\": 0}"},
        {&schema_targets, "{\"target\": \"transformer\"}"},
        {&schema_generate, "{\"prompt\": \"\"}"},
        {&schema_generate,
         "{\"prompt\": \"a\", \"n\": 64, \"size\": \"32x32\", \"model\": \"m\", "
         "\"response_format\": \"url\", \"user\": \"u\", \"seed\": 9007199254740991, "
         "\"num_inference_steps\": 1, \"guidance_scale\": 0.5, \"loras\": []}"},
        {&schema_generate, "{\"prompt\": \"a\", \"n\": null, \"loras\": [{\"path\": \"x\"}, "
                           "{\"nickname\": \"n\", \"strength\": 2, \"target\": [\"all\"]}]}"},
    };
    char param[160];
    pf_error err;
    (void)state;

    for (size_t i = 0; i < PF_COUNTOF(rows); i++) {
        assert_ok(check(rows[i].schema, rows[i].text, param, &err), &err);
        assert_string_equal(param, "");
    }
}

static void refuses_and_names_the_field(void **state)
{
    static const struct {
        const struct schema *schema;
        const char *text, *param, *message;
    } rows[] = {
        {&schema_set_lora, "[]", "", "must be an object"},
        {&schema_set_lora, "{}", "lora_nickname", "required"},
        {&schema_set_lora, "{\"lora_nickname\": 3}", "lora_nickname", "is a number"},
        {&schema_set_lora, "{\"lora_nickname\": []}", "lora_nickname", "empty list"},
        {&schema_set_lora, "{\"lora_nickname\": [null]}", "lora_nickname[0]", "is null"},
        {&schema_set_lora, "{\"lora_nickname\": null}", "lora_nickname", "is null"},
        {&schema_set_lora, "{\"lora_nickname\": [\"a\", [\"b\"]]}", "lora_nickname[1]",
         "is a list"},
        {&schema_set_lora, "{\"lora_nickname\": \"a\\u0000b\"}", "lora_nickname", "NUL"},
        {&schema_set_lora, "{\"lora_nickname\": \"a\", \"strenght\": 1}", "strenght", "no field"},
        {&schema_set_lora, "{\"lora_nickname\": \"a\", \"strength\": \"1\"}", "strength",
         "is a string; it must be a number or a list"},
        {&schema_set_lora, "{\"lora_nickname\": \"a\", \"strength\": true}", "strength",
         "a boolean"},
        {&schema_set_lora, "{\"lora_nickname\": \"a\", \"strength\": [1, null]}", "strength[1]",
         "null"},
        {&schema_set_lora, "{\"lora_nickname\": \"a\", \"merge_mode\": \"fast\"}", "merge_mode",
         "auto|merge|dynamic"},
        {&schema_set_lora, "{\"lora_nickname\": \"a\", \"merge_dtype\": \"f16\"}", "merge_dtype",
         "base|f32"},
        {&schema_unload, "{\"lora_nickname\": [\"a\"]}", "lora_nickname", "is a list"},
        {&schema_generate, "{\"prompt\": \"a\", \"n\": 0}", "n", "at least 1 and at most 64"},
        {&schema_generate, "{\"prompt\": \"a\", \"n\": 1.5}", "n", "a whole number"},
        {&schema_generate, "{\"prompt\": \"a\", \"n\": 65}", "n", "65"},
        {&schema_generate, "{\"prompt\": \"a\", \"seed\": -1}", "seed", "-1"},
        {&schema_generate, "{\"prompt\": \"a\", \"guidance_scale\": 0}", "guidance_scale",
         "above 0"},
        {&schema_generate, "{\"prompt\": \"a\", \"response_format\": \"png\"}", "response_format",
         "b64_json|url"},
        {&schema_generate, "{\"prompt\": \"a\", \"loras\": [1]}", "loras[0]", "must be an object"},
        {&schema_generate, "{\"prompt\": \"a\", \"loras\": {}}", "loras", "a list of objects"},
        {&schema_generate, "{\"prompt\": \"a\", \"loras\": [{}, {\"strength\": \"x\"}]}",
         "loras[1].strength", "a string"},
        {&schema_generate, "{\"prompt\": \"a\", \"loras\": [{\"alpha\": 1}]}", "loras[0].alpha",
         "no field"},
    };
    char param[160];
    pf_error err;
    (void)state;

    for (size_t i = 0; i < PF_COUNTOF(rows); i++) {
        assert_int_equal(check(rows[i].schema, rows[i].text, param, &err), PF_E_INVALID);
        assert_err(&err, PF_E_INVALID, rows[i].message);
        assert_string_equal(param, rows[i].param);
    }
}

static void bounds_lists_and_strings(void **state)
{
    struct strbuf text;
    char param[160];
    pf_error err;
    (void)state;

    strbuf_init(&text);
    strbuf_adds(&text, "{\"lora_nickname\": [\"a\"");
    for (int i = 0; i < SCHEMA_LIST_MAX; i++)
        strbuf_adds(&text, ", \"a\"");
    strbuf_adds(&text, "]}");
    assert_int_equal(check(&schema_set_lora, strbuf_z(&text), param, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "65 items", "64");
    strbuf_clear(&text);
    strbuf_addf(&text, "{\"lora_nickname\": \"%0300d\"}", 0);
    assert_int_equal(check(&schema_set_lora, strbuf_z(&text), param, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "'lora_nickname'", "300", "256");
    strbuf_clear(&text);
    strbuf_addf(&text, "{\"%0300d\": 1}", 0);
    assert_int_equal(check(&schema_set_lora, strbuf_z(&text), param, &err), PF_E_INVALID);
    assert_true(strlen(param) < 100);
    strbuf_release(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(accepts_what_clients_send),
        cmocka_unit_test(refuses_and_names_the_field),
        cmocka_unit_test(bounds_lists_and_strings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
