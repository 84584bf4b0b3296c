/*
 * Script lines: how words are cut, what each operation makes of them, and what is refused.
 */
#include "testing.h"

#include <string.h>

#include "cli/script.h"

static int parse(const char *text, struct script_line *line, pf_error *err)
{
    *err = (pf_error){0};
    *line = (struct script_line){0};
    return script_parse(str_of(text), line, err);
}

static void assert_words(const char *text, const char *joined)
{
    struct script_line line;
    struct strbuf b;
    pf_error err;

    if (parse(text, &line, &err))
        fail_msg("'%s': %s", text, err.msg);
    strbuf_init(&b);
    for (size_t i = 0; i < line.n_words; i++)
        strbuf_addf(&b, "%s%s", i ? "|" : "", line.words[i]);
    assert_string_equal(strbuf_z(&b), joined);
    assert_null(line.n_words ? line.words[line.n_words] : NULL);
    strbuf_release(&b);
    script_line_release(&line);
}

static void cuts_words_as_a_shell_does(void **state)
{
    (void)state;
    assert_words("", "");
    assert_words("  \t ", "");
    assert_words("# set x", "");
    assert_words("wait # set x", "wait");
    assert_words("  wait\r", "wait");
    assert_words("generate --prompt 'a cat'", "generate|--prompt|a cat");
    assert_words("generate --prompt \"a \\\"cat\\\" \\\\ 'x'\"",
                 "generate|--prompt|a \"cat\" \\ 'x'");
    assert_words("generate --prompt 'a \\ \"b\"'", "generate|--prompt|a \\ \"b\"");
    assert_words("generate -o a\\ b#c.png", "generate|-o|a b#c.png");
    assert_words("generate -o a'b c'd", "generate|-o|ab cd");
    assert_words("generate -o '' \"\"", "generate|-o||");
    assert_words("generate -o \\&x '&' \"a&b\"", "generate|-o|&x|&|a&b");
    assert_words("'wait'", "wait");
}

static void knows_the_background(void **state)
{
    static const char *const texts[] = {"generate -c 1 &", "generate -c 1&", "generate -c 1 & # x",
                                        "generate -c 1 &  "};
    struct script_line line;
    pf_error err;

    (void)state;
    for (size_t i = 0; i < PF_COUNTOF(texts); i++) {
        assert_int_equal(parse(texts[i], &line, &err), PF_OK);
        assert_true(line.is_background);
        assert_int_equal(line.n_words, 3);
        assert_string_equal(line.words[2], "1");
        script_line_release(&line);
    }
    assert_int_equal(parse("generate -c 1", &line, &err), PF_OK);
    assert_false(line.is_background);
    script_line_release(&line);
}

static void reads_set_lines(void **state)
{
    struct script_line line;
    pf_error err;

    (void)state;
    assert_int_equal(parse("set a:0.5 way=overlay b,alpha=2,target=vae merge-dtype=f32 "
                           "target=transformer,vae allow-unmatched",
                           &line, &err),
                     PF_OK);
    assert_int_equal(line.op, SCRIPT_SET);
    assert_int_equal(line.n_specs, 2);
    assert_string_equal(line.specs[0].path, "a");
    assert_true(line.specs[0].strength == 0.5);
    assert_string_equal(line.specs[1].path, "b");
    assert_true(line.specs[1].has_alpha && line.specs[1].alpha == 2);
    assert_string_equal(line.specs[1].target, "vae");
    assert_string_equal(line.way, "overlay");
    assert_string_equal(line.merge_dtype, "f32");
    assert_string_equal(line.target, "transformer,vae");
    assert_true(line.allow_unmatched);
    script_line_release(&line);
    assert_int_equal(parse("set a", &line, &err), PF_OK);
    assert_null(line.way);
    assert_null(line.merge_dtype);
    assert_null(line.target);
    assert_false(line.allow_unmatched);
    script_line_release(&line);
}

static void reads_the_other_lines(void **state)
{
    static const char *const plain[] = {"unmerge", "deactivate", "wait", "status", "settle"};
    struct script_line line;
    pf_error err;

    (void)state;
    assert_int_equal(parse("load my-x.1=a=b c:2", &line, &err), PF_E_INVALID);
    assert_int_equal(parse("load my-x.1='a=b c:2'", &line, &err), PF_OK);
    assert_string_equal(line.name, "my-x.1");
    assert_string_equal(line.path, "a=b c:2");
    script_line_release(&line);
    assert_int_equal(parse("unload x", &line, &err), PF_OK);
    assert_string_equal(line.name, "x");
    script_line_release(&line);
    assert_int_equal(parse("merge", &line, &err), PF_OK);
    assert_true(line.factor == 1);
    script_line_release(&line);
    assert_int_equal(parse("merge target=vae -0.25", &line, &err), PF_OK);
    assert_true(line.factor == -0.25);
    assert_string_equal(line.target, "vae");
    script_line_release(&line);
    for (size_t i = 0; i < PF_COUNTOF(plain); i++) {
        assert_int_equal(parse(plain[i], &line, &err), PF_OK);
        assert_string_equal(script_op_name(line.op), plain[i]);
        script_line_release(&line);
    }
}

static void refuses_what_it_does_not_know(void **state)
{
    static const struct {
        const char *text, *said;
    } rows[] = {
        {"sett x", "unknown word 'sett'; did you mean 'set'?"},
        {"frobnicate", "unknown word 'frobnicate'"},
        {"''", "unknown word ''"},
        {"&", "'&' stands alone"},
        {"wait &", "only 'generate' runs in the background"},
        {"generate & -c 1", "'&' ends a line"},
        {"generate -o a&b", "'&' ends a line"},
        {"generate --prompt 'a", "a quote ' is not closed"},
        {"generate --prompt \"a\\\"", "a quote \" is not closed"},
        {"wait \\", "a backslash ends the line"},
        {"set", "'set' names no adapter; 'deactivate' takes them off"},
        {"set target=vae", "'set' names no adapter"},
        {"set a targets=b", "'set' has no setting 'targets'; did you mean 'target='?"},
        {"set a speed=1", "'set' has no setting 'speed'"},
        {"set a way=fast", "'way' is one of auto, overlay, stream, inplace, not 'fast'"},
        {"set a merge-dtype=f16", "'merge-dtype' is one of base, f32, not 'f16'"},
        {"set a way=auto way=auto", "'way' is given twice"},
        {"set a target=", "'target=' names no component"},
        {"set a target=b target=c", "'target' is given twice"},
        {"set a:nan", "strength is not finite"},
        {"set a,alpha=x", "alpha is no finite number"},
        {"set :1", "names no file"},
        {"load", "'load' takes NAME=PATH"},
        {"load a", "'load' takes NAME=PATH"},
        {"load =a", "'load' takes NAME=PATH"},
        {"load a=", "'load' takes NAME=PATH"},
        {"load a:b=c", "'a:b' cannot be a nickname"},
        {"unload", "'unload' takes NAME"},
        {"unload a b", "'unload' takes NAME"},
        {"merge x", "'merge' takes a finite factor, not 'x'"},
        {"merge inf", "'merge' takes a finite factor, not 'inf'"},
        {"merge 1 2", "'merge' does not take '2'"},
        {"unmerge 1", "'unmerge' does not take '1'"},
        {"wait target=a", "'wait' does not take 'target=a'"},
        {"status x", "'status' does not take 'x'"},
    };
    struct script_line line;
    pf_error err;

    (void)state;
    for (size_t i = 0; i < PF_COUNTOF(rows); i++) {
        assert_int_equal(parse(rows[i].text, &line, &err), PF_E_INVALID);
        if (!strstr(err.msg, rows[i].said))
            fail_msg("'%s': '%s' does not say '%s'", rows[i].text, err.msg, rows[i].said);
        assert_null(line.text);
    }
}

static void bounds_foreign_bytes(void **state)
{
    static char text[SCRIPT_LINE_MAX + 2];
    struct script_line line = {0};
    pf_error err = {0};

    (void)state;
    memset(text, ' ', SCRIPT_LINE_MAX);
    assert_int_equal(script_parse((struct str){text, SCRIPT_LINE_MAX}, &line, &err), PF_OK);
    script_line_release(&line);
    assert_int_equal(script_parse((struct str){text, SCRIPT_LINE_MAX + 1}, &line, &err),
                     PF_E_INVALID);
    assert_non_null(strstr(err.msg, "more than 65536 characters"));
    assert_int_equal(script_parse((struct str){"wait\0x", 6}, &line, &err), PF_E_INVALID);
    assert_non_null(strstr(err.msg, "NUL byte"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cuts_words_as_a_shell_does),
        cmocka_unit_test(knows_the_background),
        cmocka_unit_test(reads_set_lines),
        cmocka_unit_test(reads_the_other_lines),
        cmocka_unit_test(refuses_what_it_does_not_know),
        cmocka_unit_test(bounds_foreign_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
