/*
 * Prompts: which class their words pick, and what the error says when they pick none.
 */
#include "testing.h"

#include "base/json.h"
#include "model/words.h"

static const char documents[] =
    "{\"id2label\":{\"0\":\"red_apple\",\"1\":\"green_apple\",\"2\":\"cherries\",\"3\":\"dog\","
    "\"4\":\"cat\",\"5\":\"panda_face\",\"6\":\"lion_face\",\"7\":\"bus\",\"8\":\"crescent_moon\","
    "\"9\":\"tench, Tinca tinca\",\"10\":\"cat food\",\"99\":\"beyond\"}}";

static void load(struct labels *l, const char *text)
{
    struct json *doc = NULL;
    pf_error err = {0};
    assert_ok(json_parse(text, strlen(text), "model_index.json", &doc, &err), &err);
    assert_ok(labels_read(l, 12, doc, NULL, &err), &err);
    json_free(doc);
}

static void words_pick_the_class(void **state)
{
    static const struct {
        const char *prompt;
        uint32_t i_class;
    } rows[] = {
        {"cat", 4},
        {"a cat, please", 4},
        {"A CAT!", 4},
        {"red apple", 0},
        {"red_apple", 0},
        {"a shiny green-apple", 1},
        {"two dogs", 3},
        {"a dog and a cat", 3},
        {"a cat and a dog", 4},
        {"a can of cat food", 10},
        {"the moon", 8},
        {"a panda", 5},
        {"buses", 7},
        {"a fine tinca tinca", 9},
        {"TENCH", 9},
    };
    struct labels l;
    (void)state;
    load(&l, documents);
    for (size_t i = 0; i < PF_COUNTOF(rows); i++) {
        uint32_t have = 1000;
        pf_error err = {0};
        assert_ok(labels_find(&l, rows[i].prompt, &have, &err), &err);
        if (have != rows[i].i_class)
            fail_msg("'%s' picks %u", rows[i].prompt, have);
    }
    labels_release(&l);
}

static void errors_list_near_names(void **state)
{
    struct labels l;
    pf_error err = {0};
    uint32_t i_class = 77;
    (void)state;
    load(&l, documents);
    assert_int_equal(labels_find(&l, "an apple", &i_class, &err), PF_E_NOTFOUND);
    assert_err(&err, PF_E_NOTFOUND, "'an apple'", "'red_apple'", "'green_apple'");
    assert_null(strstr(err.msg, "'dog'"));
    assert_int_equal(labels_find(&l, "a red truck", &i_class, &err), PF_E_NOTFOUND);
    assert_err(&err, PF_E_NOTFOUND, "'red_apple'");
    assert_int_equal(labels_find(&l, "cheries", &i_class, &err), PF_E_NOTFOUND);
    assert_err(&err, PF_E_NOTFOUND, "'cherries'");
    assert_int_equal(labels_find(&l, "zeppelin", &i_class, &err), PF_E_NOTFOUND);
    assert_err(&err, PF_E_NOTFOUND, "'zeppelin'", "12 classes", "they are red_apple, ");
    assert_int_equal(labels_find(&l, "", &i_class, &err), PF_E_NOTFOUND);
    assert_int_equal(labels_find(&l, "the", &i_class, &err), PF_E_NOTFOUND);
    assert_int_equal(i_class, 77);
    labels_release(&l);
}

static void names_outside_the_model_are_left_out(void **state)
{
    struct labels l;
    (void)state;
    load(&l, documents);
    assert_int_equal(l.n_names, 11);
    assert_string_equal(l.names[10], "cat food");
    assert_null(l.names[11]);
    labels_release(&l);
}

static void a_model_without_names_asks_for_a_number(void **state)
{
    struct labels l;
    pf_error err = {0};
    uint32_t i_class = 0;
    (void)state;
    load(&l, "{}");
    assert_int_equal(labels_find(&l, "cat", &i_class, &err), PF_E_NOTFOUND);
    assert_err(&err, PF_E_NOTFOUND, "id2label", "class number");
    labels_release(&l);
}

static void bad_label_tables_are_errors(void **state)
{
    static const char *const texts[] = {"{\"id2label\":{\"cat\":\"4\"}}",
                                        "{\"id2label\":{\"1\":4}}"};
    (void)state;
    for (size_t i = 0; i < PF_COUNTOF(texts); i++) {
        struct json *doc = NULL;
        struct labels l;
        pf_error err = {0};
        assert_ok(json_parse(texts[i], strlen(texts[i]), "config.json", &doc, &err), &err);
        assert_int_equal(labels_read(&l, 12, NULL, doc, &err), PF_E_FORMAT);
        assert_err(&err, PF_E_FORMAT, "id2label");
        json_free(doc);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(words_pick_the_class),
        cmocka_unit_test(errors_list_near_names),
        cmocka_unit_test(names_outside_the_model_are_left_out),
        cmocka_unit_test(a_model_without_names_asks_for_a_number),
        cmocka_unit_test(bad_label_tables_are_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
