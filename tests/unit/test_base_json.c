/*
 * JSON: strict parsing with places in errors, borrowed access, building, writing, and running out of memory at every step.
 */
#include "testing.h"

#include "base/json.h"
#include "base/mem.h"

#include <math.h>

static struct json *parse(const char *text)
{
    pf_error err = {0};
    struct json *v = NULL;
    assert_ok(json_parse(text, strlen(text), "doc", &v, &err), &err);
    assert_non_null(v);
    return v;
}

static void assert_written(const struct json *v, unsigned indent, const char *want)
{
    pf_error err = {0};
    struct strbuf b;
    strbuf_init(&b);
    assert_ok(json_write(v, indent, &b, &err), &err);
    assert_string_equal(strbuf_z(&b), want);
    strbuf_release(&b);
}

static void values_come_back_by_type(void **state)
{
    (void)state;
    struct json *v =
        parse("{\"r\": 16, \"alpha\": 0.5, \"rs\": true, \"no\": false, \"nil\": null,"
              " \"name\": \"a\\u00e4b\", \"list\": [1, -9223372036854775808, []], \"sub\": {}}");
    assert_int_equal(json_typeof(v), JSON_T_OBJECT);
    assert_int_equal(json_len(v), 8);
    assert_int_equal(json_typeof(json_get(v, "r")), JSON_T_INT);
    assert_int_equal(json_int(json_get(v, "r")), 16);
    assert_true(json_number(json_get(v, "r")) == 16);
    assert_true(json_is_number(json_get(v, "r")));
    assert_int_equal(json_typeof(json_get(v, "alpha")), JSON_T_REAL);
    assert_true(json_number(json_get(v, "alpha")) == 0.5);
    assert_true(json_is_number(json_get(v, "alpha")));
    assert_int_equal(json_int(json_get(v, "alpha")), 0);
    assert_false(json_is_whole(json_get(v, "alpha")));
    assert_int_equal(json_typeof(json_get(v, "rs")), JSON_T_BOOL);
    assert_true(json_bool(json_get(v, "rs")));
    assert_int_equal(json_typeof(json_get(v, "no")), JSON_T_BOOL);
    assert_false(json_bool(json_get(v, "no")));
    assert_non_null(json_get(v, "nil"));
    assert_int_equal(json_typeof(json_get(v, "nil")), JSON_T_NULL);
    assert_int_equal(json_typeof(json_get(v, "name")), JSON_T_STRING);
    assert_string_equal(json_z(json_get(v, "name")), "a\xc3\xa4"
                                                     "b");
    assert_int_equal(json_str(json_get(v, "name")).n, 4);
    const struct json *list = json_get(v, "list");
    assert_int_equal(json_typeof(list), JSON_T_ARRAY);
    assert_int_equal(json_len(list), 3);
    assert_true(json_int(json_at(list, 1)) == INT64_MIN);
    assert_null(json_at(list, 3));
    assert_int_equal(json_typeof(json_get(v, "sub")), JSON_T_OBJECT);
    json_free(v);
}

static void absent_and_wrong_types_give_nothing(void **state)
{
    (void)state;
    struct json *v = parse("{\"s\": \"x\", \"n\": 1, \"b\": true}");
    const struct json *none = json_get(v, "absent"), *s = json_get(v, "s"), *n = json_get(v, "n");
    assert_null(none);
    assert_int_equal(json_typeof(none), JSON_T_NULL);
    assert_false(json_is_number(none));
    assert_true(json_number(none) == 0);
    assert_int_equal(json_int(none), 0);
    assert_false(json_bool(none));
    assert_int_equal(json_str(none).n, 0);
    assert_non_null(json_str(none).p);
    assert_null(json_z(none));
    assert_null(json_get(none, "x"));
    assert_null(json_at(none, 0));
    assert_int_equal(json_len(none), 0);
    const char *key;
    const struct json *value;
    assert_null(json_iter_next(none, NULL, &key, &value));
    assert_true(json_number(s) == 0);
    assert_int_equal(json_int(s), 0);
    assert_false(json_bool(n));
    assert_false(json_is_number(json_get(v, "b")));
    assert_int_equal(json_str(n).n, 0);
    assert_null(json_z(n));
    assert_null(json_get(s, "x"));
    assert_null(json_at(v, 0));
    assert_int_equal(json_len(s), 0);
    assert_null(json_iter_next(s, NULL, &key, &value));
    json_free(v);
    json_free(NULL);
}

/* As JSON Schema has it: 7.0 is an integer. Beyond 2^53 a double no longer says which one it was. */
static void whole_numbers_may_be_written_with_a_point(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        bool is_whole;
        int64_t value;
    } rows[] = {
        {"[7]", true, 7},
        {"[7.0]", true, 7},
        {"[-3e2]", true, -300},
        {"[-0.0]", true, 0},
        {"[9007199254740992.0]", true, 9007199254740992},
        {"[9007199254740994.0]", false, 0},
        {"[-9007199254740994.0]", false, 0},
        {"[9223372036854775807]", true, INT64_MAX},
        {"[1e300]", false, 0},
        {"[7.5]", false, 0},
        {"[\"7\"]", false, 0},
        {"[true]", false, 0},
        {"[null]", false, 0},
    };
    for (size_t i = 0; i < PF_COUNTOF(rows); i++) {
        struct json *v = parse(rows[i].text);
        assert_int_equal(json_is_whole(json_at(v, 0)), rows[i].is_whole);
        assert_true(json_int(json_at(v, 0)) == rows[i].value);
        json_free(v);
    }
    assert_false(json_is_whole(NULL));
}

static void strings_with_nul_are_slices_only(void **state)
{
    (void)state;
    struct json *v = parse("[\"a\\u0000b\", \"\"]");
    struct str s = json_str(json_at(v, 0));
    assert_int_equal(s.n, 3);
    assert_memory_equal(s.p, "a\0b", 3);
    assert_null(json_z(json_at(v, 0)));
    assert_string_equal(json_z(json_at(v, 1)), "");
    assert_written(v, 0, "[\"a\\u0000b\", \"\"]");
    json_free(v);
}

static void objects_are_walked_in_file_order(void **state)
{
    (void)state;
    struct json *v = parse("{\"z\": 0, \"a\": 1, \"m\": 2, \"b\": 3}");
    static const char *const keys[] = {"z", "a", "m", "b"};
    const char *key = NULL;
    const struct json *value = NULL;
    int64_t i = 0;
    for (void *it = json_iter_next(v, NULL, &key, &value); it != NULL;
         it = json_iter_next(v, it, &key, &value)) {
        assert_string_equal(key, keys[i]);
        assert_int_equal(json_int(value), i);
        i++;
    }
    assert_int_equal(i, 4);
    json_free(v);
}

static void any_value_may_be_the_document(void **state)
{
    (void)state;
    struct json *v = parse(" 12 ");
    assert_int_equal(json_int(v), 12);
    json_free(v);
    v = parse("\"x\"");
    assert_string_equal(json_z(v), "x");
    json_free(v);
    v = parse("null");
    assert_int_equal(json_typeof(v), JSON_T_NULL);
    json_free(v);
}

static void malformed_text_is_refused_with_its_place(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        size_t n;
        uint64_t off;
        const char *why;
    } rows[] = {
#define ROW(text, off, why) {text, sizeof(text) - 1, off, why}
        ROW("", 0, "line 1, byte 0"),
        ROW("   ", 3, "unexpected token"),
        ROW("{\"r\": 16", 8, "'}' expected"),
        ROW("{\"r\": 16}\n}", 11, "line 2, byte 11: end of file expected"),
        ROW("{\"r\": 16, \"r\": 17}", 13, "duplicate object key"),
        ROW("{\"r\": 16,}", 10, "string or '}' expected"),
        ROW("{\"r\" 16}", 7, "':' expected"),
        ROW("{r: 1}", 2, "string or '}' expected"),
        ROW("[1 2]", 4, "']' expected"),
        ROW("[NaN]", 4, "invalid token"),
        ROW("[01]", 2, "invalid token"),
        ROW("[1.]", 3, "invalid token"),
        ROW("[99999999999999999999]", 21, "too big integer"),
        ROW("[-99999999999999999999]", 22, "too big negative integer"),
        ROW("[1e999]", 6, "real number overflow"),
        ROW("\"abc", 4, "premature end of input"),
        ROW("[\"\\x\"]", 0, "invalid escape"),
        ROW("[\"\\ud800\"]", 0, "invalid Unicode '\\uD800'"),
        ROW("[\"a\x01\"]", 0, "control character 0x1"),
        ROW("[\"a\nb\"]", 0, "unexpected newline"),
        ROW("[\"\xff\"]", 0, "unable to decode byte 0xff"),
        ROW("{\"a\\u0000\": 1}", 0, "NUL byte in object key not supported"),
        ROW("[1]\0[2]", 4, "end of file expected"),
        ROW("\xef\xbb\xbf{}", 0, "invalid token"),
#undef ROW
    };
    for (size_t i = 0; i < PF_COUNTOF(rows); i++) {
        pf_error err = {0};
        struct json *v = (struct json *)&err; /* untouched on failure */
        assert_int_equal(json_parse(rows[i].text, rows[i].n, "cfg.json", &v, &err), PF_E_FORMAT);
        assert_err(&err, PF_E_FORMAT, "'cfg.json' is not valid JSON: line ", ", byte ",
                   rows[i].why);
        if (rows[i].off != 0)
            assert_int_equal(err.off, rows[i].off);
        assert_ptr_equal(v, &err);
    }
    struct json *v;
    assert_int_equal(json_parse("[", 1, "x", &v, NULL), PF_E_FORMAT);
    assert_int_equal(json_parse(NULL, 0, "x", &v, NULL), PF_E_FORMAT);
}

static void depth_is_limited_to_64(void **state)
{
    (void)state;
    char text[400];
    for (size_t depth = 60; depth <= 70; depth++) {
        size_t n = 0;
        n += (size_t)snprintf(text, sizeof(text), "[\"[[{{\\\"[[\", ");
        for (size_t i = 1; i < depth; i++)
            n += (size_t)snprintf(text + n, sizeof(text) - n,
                                  i == depth - 1 || i % 2 == 0 ? "[" : "{\"a\":");
        text[n++] = '1';
        for (size_t i = depth - 1; i >= 1; i--)
            text[n++] = i == depth - 1 || i % 2 == 0 ? ']' : '}';
        text[n++] = ']';
        text[n] = '\0';
        pf_error err = {0};
        struct json *v = NULL;
        int rc = json_parse(text, n, "doc", &v, &err);
        if (depth <= 64) {
            assert_ok(rc, &err);
            json_free(v);
        } else {
            assert_err(&err, PF_E_FORMAT,
                       "'doc' is not acceptable JSON: nested deeper than 64 at byte ");
            assert_true(text[err.off] == '[' || text[err.off] == '{');
        }
    }
    static char deep[100000]; /* would overflow a recursive parser's stack */
    memset(deep, '[', sizeof(deep));
    pf_error err = {0};
    struct json *v = NULL;
    assert_int_equal(json_parse(deep, sizeof(deep), "doc", &v, &err), PF_E_FORMAT);
    assert_int_equal(err.off, 64);
    v = parse("[[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[]"
              ",[],[],[],[],[],"
              "[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],"
              "[],[],[],[],[]]");
    assert_int_equal(json_len(v), 66); /* beside each other is not deep */
    json_free(v);
    /* Closing brackets too many must not make the counter wrap. */
    assert_int_equal(json_parse("]]]][", 5, "doc", &v, NULL), PF_E_FORMAT);
}

static void files_are_read_up_to_a_bound(void **state)
{
    const char *path = test_path(state, "config.json");
    write_file(path, "{\"r\": 4}", 8);
    pf_error err = {0};
    struct json *v = NULL;
    assert_ok(json_parse_file(path, 8, &v, &err), &err);
    assert_int_equal(json_int(json_get(v, "r")), 4);
    json_free(v);
    v = NULL;
    assert_int_not_equal(json_parse_file(path, 7, &v, &err), PF_OK);
    assert_non_null(strstr(err.msg, path));
    write_file(path, "{\"r\": }", 7);
    assert_int_equal(json_parse_file(path, 100, &v, &err), PF_E_FORMAT);
    assert_err(&err, PF_E_FORMAT, path, "is not valid JSON");
    assert_int_equal(json_parse_file(test_path(state, "absent"), 100, &v, &err), PF_E_NOTFOUND);
    assert_err(&err, PF_E_NOTFOUND, "absent");
    assert_null(v);
}

/* One of everything. */
static struct json *build(void)
{
    struct json *o = json_new_object(), *list = json_new_array(), *sub = json_new_object();
    json_set_z(o, "name", "night \"1\"");
    json_set_z(o, "nil", NULL);
    json_set_int(o, "r", INT64_MIN);
    json_set_real(o, "alpha", 0.1);
    json_set_real(o, "nan", (double)NAN);
    json_set_real(o, "inf", -(double)INFINITY);
    json_set_bool(o, "yes", true);
    json_set_bool(o, "no", false);
    json_add(list, json_new_int(1));
    json_add(list, json_new_string((struct str){"x\xffy\xc3", 4}));
    json_add(list, json_new_null());
    json_add(list, json_new_bool(true));
    json_add(list, json_new_array());
    json_add(list, json_new_real(-0.0));
    json_set_int(sub, "k\xff\n", 1);
    json_add(list, sub);
    json_set(o, "list", list);
    json_set(o, "empty", json_new_object());
    return o;
}

static const char one_line[] =
    "{\"name\": \"night \\\"1\\\"\", \"nil\": null, \"r\": -9223372036854775808, \"alpha\": 0.1, "
    "\"nan\": null, \"inf\": null, \"yes\": true, \"no\": false, \"list\": [1, "
    "\"x\xef\xbf\xbdy\xef\xbf\xbd\", null, true, [], -0.0, {\"k\xef\xbf\xbd\\n\": 1}], "
    "\"empty\": {}}";

static void built_documents_are_written_in_order(void **state)
{
    (void)state;
    struct json *v = build();
    assert_written(v, 0, one_line);
    assert_written(json_get(v, "list"), 2,
                   "[\n  1,\n  \"x\xef\xbf\xbdy\xef\xbf\xbd\",\n  null,\n  true,\n  [],\n  -0.0,\n"
                   "  {\n    \"k\xef\xbf\xbd\\n\": 1\n  }\n]");
    json_set_int(v, "r", 5); /* a second set replaces */
    assert_int_equal(json_int(json_get(v, "r")), 5);
    json_free(v);
    v = parse(one_line); /* what we write we can read */
    assert_written(v, 0, one_line);
    json_free(v);
}

static void strings_are_escaped(void **state)
{
    (void)state;
    struct json *v = json_new_string((struct str){"\"\\/\b\f\n\r\t\x01\x1b\x7f\xc3\xa4", 13});
    assert_written(v, 0, "\"\\\"\\\\/\\u0008\\u000c\\n\\r\\t\\u0001\\u001b\\u007f\xc3\xa4\"");
    json_free(v);
    v = json_new_string((struct str){NULL, 0});
    assert_written(v, 0, "\"\"");
    json_free(v);
}

static void reals_are_short_and_read_back(void **state)
{
    (void)state;
    static const struct {
        double v;
        const char *text;
    } rows[] = {{0.1, "0.1"},
                {1, "1.0"},
                {-2.5e-4, "-0.00025"},
                {1e300, "1e+300"},
                {1.0 / 3, "0.3333333333333333"},
                {0.1 + 0.2, "0.30000000000000004"},
                {4e15, "4e+15"},
                {123456789, "123456789.0"}};
    for (size_t i = 0; i < PF_COUNTOF(rows); i++) {
        struct json *v = json_new_real(rows[i].v);
        assert_written(v, 0, rows[i].text);
        json_free(v);
    }
    struct rng r = {5};
    for (int i = 0; i < 20000; i++) {
        uint64_t bits = rng_next(&r);
        double d;
        memcpy(&d, &bits, sizeof(d));
        struct strbuf b;
        strbuf_init(&b);
        struct json *v = json_new_real(d), *back = NULL;
        assert_int_equal(json_write(v, 0, &b, NULL), PF_OK);
        assert_int_equal(json_parse(b.p, b.n, "real", &back, NULL), PF_OK);
        if (isfinite(d)) {
            double again = json_number(back);
            assert_int_equal(json_typeof(back), JSON_T_REAL);
            assert_memory_equal(&d, &again, sizeof(d));
        } else {
            assert_int_equal(json_typeof(back), JSON_T_NULL);
        }
        json_free(v);
        json_free(back);
        strbuf_release(&b);
    }
}

/* ------------------------------------------------------------------------------------------ out of memory */

/* jansson's own hook, by hand: its header is for json.c alone. */
void json_set_alloc_funcs(void *(*malloc_fn)(size_t), void (*free_fn)(void *));

static size_t n_until_failure; /* allocations that still succeed */

static void *failing_malloc(size_t n)
{
    if (n_until_failure == 0)
        return NULL;
    n_until_failure--;
    return malloc(n);
}

static int restore_alloc(void **state)
{
    (void)state;
    json_set_alloc_funcs(malloc, free);
    return 0;
}

/* Wherever memory runs out while building, json_write says so; it never writes half a document as if it were whole. */
static void building_without_memory_is_noticed(void **state)
{
    (void)state;
    bool is_ok = false;
    json_set_alloc_funcs(failing_malloc, free);
    for (size_t n = 0; n < 1000 && !is_ok; n++) {
        pf_error err = {0};
        struct strbuf b;
        strbuf_init(&b);
        n_until_failure = n;
        struct json *v = build();
        int rc = json_write(v, 0, &b, &err);
        if (n_until_failure > 0) {
            assert_ok(rc, &err);
            assert_string_equal(strbuf_z(&b), one_line);
            is_ok = true;
        } else if (rc == PF_OK) { /* exactly as much as was needed */
            assert_string_equal(strbuf_z(&b), one_line);
        } else {
            assert_err(&err, PF_E_NOMEM, "out of memory for a JSON document");
        }
        strbuf_release(&b);
        json_free(v);
    }
    assert_true(is_ok);
}

/*
 * Only the first allocations: further on jansson 2.14 itself asserts when its token buffer cannot grow by a byte, which we
 * cannot catch and which a system with overcommit does not show.
 */
static void parsing_without_memory_is_an_error(void **state)
{
    (void)state;
    json_set_alloc_funcs(failing_malloc, free);
    pf_error err = {0};
    struct json *v = NULL;
    n_until_failure = 0;
    assert_int_equal(json_parse("[1]", 3, "doc", &v, &err), PF_E_NOMEM);
    assert_err(&err, PF_E_NOMEM, "out of memory for 3 bytes of doc");
    assert_null(v);
    n_until_failure = 1;
    assert_int_equal(json_parse("[1]", 3, "doc", &v, &err), PF_E_NOMEM);
    assert_null(v);
    err = (pf_error){0};
    n_until_failure = 100;
    assert_ok(json_parse("[1]", 3, "doc", &v, &err), &err);
    json_free(v);
}

static void poisoned_documents_can_still_be_read_and_freed(void **state)
{
    (void)state;
    struct json *o = json_new_object(), *list = json_new_array();
    json_set_int(o, "before", 1);
    json_add(list, json_new_int(1));
    json_add(list, NULL); /* a constructor that failed */
    json_set(o, "list", list);
    json_set(o, "x", NULL);
    json_set_int(o, "after", 2);
    json_add(o, json_new_int(3)); /* no array: dropped */
    json_set(list, "k", json_new_int(3));
    assert_int_equal(json_typeof(o), JSON_T_OBJECT);
    assert_int_equal(json_typeof(list), JSON_T_ARRAY);
    pf_error err = {0};
    struct strbuf b;
    strbuf_init(&b);
    assert_int_equal(json_write(o, 0, &b, &err), PF_E_NOMEM);
    strbuf_release(&b);
    assert_int_equal(json_write(NULL, 0, &b, &err), PF_E_NOMEM);
    strbuf_release(&b);
    json_set(NULL, "k", json_new_string(str_of("dropped")));
    json_add(NULL, json_new_string(str_of("dropped")));
    json_free(o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_come_back_by_type),
        cmocka_unit_test(absent_and_wrong_types_give_nothing),
        cmocka_unit_test(whole_numbers_may_be_written_with_a_point),
        cmocka_unit_test(strings_with_nul_are_slices_only),
        cmocka_unit_test(objects_are_walked_in_file_order),
        cmocka_unit_test(any_value_may_be_the_document),
        cmocka_unit_test(malformed_text_is_refused_with_its_place),
        cmocka_unit_test(depth_is_limited_to_64),
        in_dir(files_are_read_up_to_a_bound),
        cmocka_unit_test(built_documents_are_written_in_order),
        cmocka_unit_test(strings_are_escaped),
        cmocka_unit_test(reals_are_short_and_read_back),
        cmocka_unit_test_teardown(building_without_memory_is_noticed, restore_alloc),
        cmocka_unit_test_teardown(parsing_without_memory_is_an_error, restore_alloc),
        cmocka_unit_test(poisoned_documents_can_still_be_read_and_freed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
