/*
 * The --lora grammar: what is a suffix, what belongs to the path, and what is refused.
 */
#include "testing.h"

#include <string.h>

#include "cli/lora_spec.h"

struct row {
    const char *text, *path;
    double strength;
    bool has_alpha;
    double alpha;
    const char *target;
};

static const struct row rows[] = {
    {"x.safetensors", "x.safetensors", 1, false, 0, NULL},
    {"x.safetensors:0.5", "x.safetensors", 0.5, false, 0, NULL},
    {"x.safetensors:-0.5", "x.safetensors", -0.5, false, 0, NULL},
    {"x:0", "x", 0, false, 0, NULL},
    {"x:+2", "x", 2, false, 0, NULL},
    {"x:1e-3,alpha=8,target=text_encoder", "x", 1e-3, true, 8, "text_encoder"},
    {"x,target=transformer,alpha=0.5", "x", 1, true, 0.5, "transformer"},
    /* a colon that no number follows belongs to the path */
    {"C:\\loras\\x.safetensors", "C:\\loras\\x.safetensors", 1, false, 0, NULL},
    {"C:\\loras\\x.safetensors:0.7", "C:\\loras\\x.safetensors", 0.7, false, 0, NULL},
    {"C:/x.safetensors,alpha=4", "C:/x.safetensors", 1, true, 4, NULL},
    {"a:b", "a:b", 1, false, 0, NULL},
    {"a:b:c:1.5", "a:b:c", 1.5, false, 0, NULL},
    {"a:1:2", "a:1", 2, false, 0, NULL},
    {"a:1:", "a:1:", 1, false, 0, NULL},
    {"a:0.5x", "a:0.5x", 1, false, 0, NULL},
    {"a: 1", "a: 1", 1, false, 0, NULL},
    {"dir:2/x", "dir:2/x", 1, false, 0, NULL},
    {"http://host:80/x:3", "http://host:80/x", 3, false, 0, NULL},
    {":", ":", 1, false, 0, NULL},
    /* a comma that no known key follows belongs to the path */
    {"a,b", "a,b", 1, false, 0, NULL},
    {"a,b,alpha=2", "a,b", 1, true, 2, NULL},
    {"a,alpha=2,b", "a,alpha=2,b", 1, false, 0, NULL},
    {"a:0.5,b=1", "a:0.5,b=1", 1, false, 0, NULL},
    {"a,Alpha=2", "a,Alpha=2", 1, false, 0, NULL},
    {"a,", "a,", 1, false, 0, NULL},
    {"a,alpha", "a,alpha", 1, false, 0, NULL},
    {"a, alpha=2", "a, alpha=2", 1, false, 0, NULL},
};

static void reads_suffixes_and_leaves_the_path_alone(void **state)
{
    (void)state;
    for (size_t i = 0; i < PF_COUNTOF(rows); i++) {
        const struct row *row = &rows[i];
        struct lora_spec spec;
        pf_error err = {0};

        if (lora_spec_parse(row->text, &spec, &err))
            fail_msg("'%s': %s", row->text, err.msg);
        if (strcmp(spec.path, row->path))
            fail_msg("'%s' gave path '%s'", row->text, spec.path);
        assert_true(spec.strength == row->strength);
        assert_int_equal(spec.has_alpha, row->has_alpha);
        if (row->has_alpha)
            assert_true(spec.alpha == row->alpha);
        if (row->target)
            assert_string_equal(spec.target, row->target);
        else
            assert_null(spec.target);
        lora_spec_release(&spec);
    }
}

static void refuses_what_is_no_number_or_no_path(void **state)
{
    static const struct {
        const char *text, *msg;
    } bad[] = {
        {"", "lora '' names no file"},
        {":0.5", "lora ':0.5' names no file"},
        {",alpha=1", "names no file"},
        {"x:nan", "lora 'x:nan': strength is not finite: 'nan'"},
        {"x:inf", "strength is not finite: 'inf'"},
        {"x:-inf,alpha=1", "strength is not finite: '-inf'"},
        {"x:1e999", "strength is not finite: '1e999'"},
        {"x,alpha=", "alpha is no finite number: ''"},
        {"x,alpha=eight", "alpha is no finite number: 'eight'"},
        {"x,alpha=nan", "alpha is no finite number: 'nan'"},
        {"x,alpha=8:2", "alpha is no finite number: '8:2'"},
        {"x,alpha=1,alpha=2", "gives alpha twice"},
        {"x,target=", "names no target"},
        {"x,target=a,target=b", "gives target twice"},
    };

    (void)state;
    for (size_t i = 0; i < PF_COUNTOF(bad); i++) {
        struct lora_spec spec = {.strength = 77};
        pf_error err = {0};

        if (lora_spec_parse(bad[i].text, &spec, &err) != PF_E_INVALID)
            fail_msg("'%s' was taken", bad[i].text);
        if (!strstr(err.msg, bad[i].msg))
            fail_msg("'%s': %s", bad[i].text, err.msg);
        assert_true(spec.strength == 77); /* outputs only on success */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_suffixes_and_leaves_the_path_alone),
        cmocka_unit_test(refuses_what_is_no_number_or_no_path),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
