/*
 * The header scanner on bytes: what it takes, what it refuses, and that every refusal has the right code, the byte offset and
 * the numbers. Mirrors the reference implementation's own tests, and adds the cases in which we are stricter.
 */
#include "st_testing.h"

#define TENSOR(name, dtype, shape, begin, end)                                                     \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end \
    "]}"

static int parse(const char *json, size_t n_json, size_t n_data, struct strbuf *bytes,
                 struct st_header **out, pf_error *err)
{
    strbuf_init(bytes);
    st_bytes(bytes, json, n_json, n_data);
    return st_header_parse((const uint8_t *)bytes->p, bytes->n, bytes->n, "d/f", out, err);
}

static struct st_header *accept(const char *json, size_t n_data, struct strbuf *bytes)
{
    struct st_header *h = NULL;
    pf_error err = {0};

    if (parse(json, strlen(json), n_data, bytes, &h, &err) != PF_OK)
        fail_msg("%s was refused: %s", json, err.msg);
    return h;
}

static void done(struct st_header *h, struct strbuf *bytes)
{
    st_header_free(h);
    strbuf_release(bytes);
}

/* ---------------------------------------------------------------------------------------------- accepted */

static void accepts_an_empty_object_in_any_white_space(void **state)
{
    static const char *const texts[] = {"{}",
                                        "{}      ",
                                        "{}\r \t\n",
                                        " \n\t\r{ }",
                                        "{\n}",
                                        "{\"__metadata__\":null}",
                                        "{\"__metadata__\":{}}",
                                        "{\"__metadata__\" : { } }"};
    size_t i;
    (void)state;

    for (i = 0; i < PF_COUNTOF(texts); i++) {
        struct strbuf bytes;
        struct st_header *h = accept(texts[i], 0, &bytes);
        assert_int_equal(st_header_n_tensors(h), 0);
        assert_int_equal(st_header_n_meta(h), 0);
        assert_null(st_header_find(h, str_of("x")));
        done(h, &bytes);
    }
}

static void reads_every_dtype_by_name_and_size(void **state)
{
    static const struct {
        const char *name;
        int32_t dtype;
        unsigned bits;
    } all[] = {{"BOOL", PF_BOOL, 8},
               {"F4", PF_F4, 4},
               {"F6_E2M3", PF_F6_E2M3, 6},
               {"F6_E3M2", PF_F6_E3M2, 6},
               {"U8", PF_U8, 8},
               {"I8", PF_I8, 8},
               {"F8_E5M2", PF_F8_E5M2, 8},
               {"F8_E4M3", PF_F8_E4M3, 8},
               {"F8_E8M0", PF_F8_E8M0, 8},
               {"F8_E4M3FNUZ", PF_F8_E4M3FNUZ, 8},
               {"F8_E5M2FNUZ", PF_F8_E5M2FNUZ, 8},
               {"I16", PF_I16, 16},
               {"U16", PF_U16, 16},
               {"F16", PF_F16, 16},
               {"BF16", PF_BF16, 16},
               {"I32", PF_I32, 32},
               {"U32", PF_U32, 32},
               {"F32", PF_F32, 32},
               {"C64", PF_C64, 64},
               {"F64", PF_F64, 64},
               {"I64", PF_I64, 64},
               {"U64", PF_U64, 64}};
    size_t i;
    (void)state;

    assert_int_equal(PF_COUNTOF(all), PF_N_DTYPES);
    for (i = 0; i < PF_COUNTOF(all); i++) {
        char json[256];
        unsigned n = all[i].bits * 12 / 8;
        struct strbuf bytes;
        struct st_header *h;

        (void)snprintf(json, sizeof(json),
                       "{\"t\":{\"shape\":[3,4],\"data_offsets\":[0,%u],\"dtype\":\"%s\"}}", n,
                       all[i].name);
        h = accept(json, n, &bytes);
        assert_int_equal(st_header_n_tensors(h), 1);
        assert_int_equal(st_header_tensor(h, 0)->dtype, all[i].dtype);
        assert_int_equal(st_header_tensor(h, 0)->n_bytes, n);
        assert_int_equal(st_header_tensor(h, 0)->shape.rank, 2);
        assert_int_equal(st_header_tensor(h, 0)->shape.dim[1], 4);
        done(h, &bytes);
    }
}

/* [2, 0] before and behind a tensor, a scalar, and several empty tensors at one place. */
static void accepts_scalars_and_zero_sized_tensors(void **state)
{
    const char *json =
        "{" TENSOR("b", "F32", "[]", 0, 4) "," TENSOR("e0", "F32", "[2,0]", 0, 0) "," TENSOR(
            "e1", "U8", "[0]", 4, 4) "," TENSOR("e2", "BF16", "[0,4611686018427387904,4]", 4,
                                                4) "}";
    struct strbuf bytes;
    struct st_header *h = accept(json, 4, &bytes);
    size_t i;
    (void)state;

    assert_int_equal(st_header_n_tensors(h), 4);
    assert_true(str_eqz(st_header_tensor(h, 0)->name, "e0")); /* (0,0) sorts before (0,4) */
    assert_true(str_eqz(st_header_tensor(h, 1)->name, "b"));
    assert_int_equal(st_header_tensor(h, 1)->shape.rank, 0);
    for (i = 0; i < 4; i++)
        assert_ptr_equal(st_header_find(h, st_header_tensor(h, i)->name), st_header_tensor(h, i));
    assert_int_equal(st_header_tensor(h, 3)->off_bytes, bytes.n);
    done(h, &bytes);
}

static void sorts_by_file_offset_whatever_the_header_order(void **state)
{
    const char *json = "{" TENSOR("c", "U8", "[3]", 5, 8) "," TENSOR(
        "a", "U8", "[4]", 1, 5) "," TENSOR("b", "U8", "[1]", 0, 1) "}";
    struct strbuf bytes;
    struct st_header *h = accept(json, 8, &bytes);
    (void)state;

    assert_true(str_eqz(st_header_tensor(h, 0)->name, "b"));
    assert_true(str_eqz(st_header_tensor(h, 1)->name, "a"));
    assert_true(str_eqz(st_header_tensor(h, 2)->name, "c"));
    assert_int_equal(st_header_find(h, str_of("a"))->off_bytes, 8 + strlen(json) + 1);
    assert_int_equal(st_header_find(h, str_of("c"))->off_bytes, 8 + strlen(json) + 5);
    assert_null(st_header_find(h, str_of("d")));
    assert_null(st_header_find(h, str_of("")));
    done(h, &bytes);
}

static void decodes_escaped_names_and_keeps_plain_ones_in_place(void **state)
{
    const char *json =
        "{" TENSOR("\\u0061\\/\\\"\\\\\\b\\f\\n\\r\\t", "U8", "[1]", 0,
                   1) "," TENSOR("\\u00e9\\u20AC\\ud83d\\ude00", "U8", "[1]", 1,
                                 2) "," TENSOR("plain.\xc3\xa9", "U8", "[1]", 2, 3) "}";
    struct strbuf bytes;
    struct st_header *h = accept(json, 3, &bytes);
    const struct st_tensor *plain = st_header_tensor(h, 2);
    (void)state;

    assert_true(str_eqz(st_header_tensor(h, 0)->name, "a/\"\\\b\f\n\r\t"));
    assert_true(str_eqz(st_header_tensor(h, 1)->name, "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"));
    assert_true(str_eqz(plain->name, "plain.\xc3\xa9"));
    assert_true(plain->name.p > bytes.p && plain->name.p < bytes.p + bytes.n);
    done(h, &bytes);
}

static void keeps_metadata_in_file_order(void **state)
{
    const char *json =
        "{\"__metadat\\u0061__\":{\"z\":\"1\",\"a\\n\":\"\",\"m\":\"{\\\"x\\\":\\u0000}\"}}";
    struct strbuf bytes;
    struct st_header *h = accept(json, 0, &bytes);
    (void)state;

    assert_int_equal(st_header_n_meta(h), 3);
    assert_true(str_eqz(st_header_meta(h, 0)->key, "z"));
    assert_true(str_eqz(st_header_meta(h, 1)->key, "a\n"));
    assert_int_equal(st_header_meta(h, 1)->value.n, 0);
    assert_true(str_eq(st_header_meta(h, 2)->value, (struct str){"{\"x\":\0}", 7}));
    done(h, &bytes);
}

static void ignores_unknown_fields_of_any_shape(void **state)
{
    const char *json = "{\"t\":{\"a\":[],\"b\":{},\"c\":[1,-2.5e+3,0,0.0,1E-1,{\"k\":[true,false,"
                       "null,\"\\u12aF\"]},[[]]],"
                       "\"dtype\":\"U8\",\"data_offsets\":[ 0 , 1 ],\"shape\" : [ 1 ] "
                       ",\"d\":\"}\",\"e\":{\"x\":1,\"y\":{\"x\":1}},"
                       "\"k0\":0,\"k1\":0,\"k2\":0,\"k3\":0}}";
    struct strbuf bytes;
    struct st_header *h = accept(json, 1, &bytes);
    (void)state;

    assert_int_equal(st_header_tensor(h, 0)->n_bytes, 1);
    done(h, &bytes);
}

static void reads_the_largest_numbers_exactly(void **state)
{
    /* 2^63 - 1 as a dimension, 2^64 - 1 in a field that is only skipped. */
    const char *json = "{\"t\":{\"dtype\":\"U8\",\"shape\":[0,9223372036854775807],\"data_"
                       "offsets\":[0,0],\"x\":18446744073709551616}}";
    struct strbuf bytes;
    struct st_header *h = accept(json, 0, &bytes);
    (void)state;

    assert_true(st_header_tensor(h, 0)->shape.dim[1] == INT64_MAX);
    done(h, &bytes);
}

static void accepts_nesting_up_to_the_bound(void **state)
{
    char json[1024];
    struct strbuf bytes;
    struct st_header *h = NULL;
    pf_error err = {0};
    size_t n;
    (void)state;

    for (n = SCAN_DEPTH_MAX; n <= SCAN_DEPTH_MAX + 1; n++) {
        char open[256], close[256];
        memset(open, '[', n);
        memset(close, ']', n);
        open[n] = close[n] = 0;
        (void)snprintf(json, sizeof(json),
                       "{\"t\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0],\"x\":%s%s}}",
                       open, close);
        if (n == SCAN_DEPTH_MAX) {
            done(accept(json, 0, &bytes), &bytes);
        } else {
            st_assert_error(parse(json, strlen(json), 0, &bytes, &h, &err), PF_E_RANGE, &err,
                            "'d/f': tensor 't': values nested deeper than 128 at byte");
            strbuf_release(&bytes);
        }
    }
}

/* ----------------------------------------------------------------------------------------------- refused */

struct bad {
    const char *json;
    const char *at; /* the offset reported is where this text occurs last; NULL: not compared */
    const char *text;
    size_t n_data;
    int code;
};

static const char *last(const char *text, const char *what)
{
    const char *hit = NULL, *p;

    for (p = strstr(text, what); p != NULL && *what != 0; p = strstr(p + 1, what))
        hit = p;
    return *what == 0 ? text + strlen(text) : hit;
}

static void check_bad(const struct bad *bad, size_t n)
{
    size_t i;

    for (i = 0; i < n; i++) {
        struct st_header *h = NULL;
        struct strbuf bytes;
        pf_error err = {0};
        int rc = parse(bad[i].json, strlen(bad[i].json), bad[i].n_data, &bytes, &h, &err);

        if (rc == PF_OK)
            fail_msg("%s was accepted", bad[i].json);
        st_assert_error(rc, bad[i].code, &err, bad[i].text);
        if (strncmp(err.msg, "'d/f': ", 7) != 0)
            fail_msg("message does not begin with the path: %s", err.msg);
        if (bad[i].at != NULL &&
            err.off != 8 + (uint64_t)(last(bad[i].json, bad[i].at) - bad[i].json))
            fail_msg("%s: offset %" PRIu64 ", not that of \"%s\"", bad[i].json, err.off, bad[i].at);
        assert_null(h);
        strbuf_release(&bytes);
    }
}

#define FMT PF_E_FORMAT
#define OK1 TENSOR("a", "U8", "[1]", 0, 1)

static void refuses_what_is_no_json_object(void **state)
{
    static const struct bad bad[] = {
        {"", "", "expected '{' at byte 8 of the header's JSON, found its end", 0, FMT},
        {"[]", "[", "expected '{' at byte 8 of the header's JSON, found '['", 0, FMT},
        {"x", "x", "found 'x'", 0, FMT},
        {"\xef\xbb\xbf{}", "\xef", "expected '{' at byte 8 of the header's JSON, found byte 0xef",
         0, FMT},
        {"{", "", "expected a key or '}' at byte 9", 0, FMT},
        {"{} x", "x", "byte 0x78 at byte 11 follows the header's JSON object", 0, FMT},
        {"{}{}", NULL, "byte 0x7b at byte 10 follows the header's JSON object", 0, FMT},
        {"{" OK1 ",}", "}", "expected a key at byte", 1, FMT},
        {"{," OK1 "}", ",\"a\"", "expected a key or '}'", 1, FMT},
        {"{" OK1 " " TENSOR("b", "U8", "[1]", 1, 2) "}", "\"b\"", "expected ',' or '}'", 2, FMT},
        {"{\"a\" 1}", "1", "expected ':'", 0, FMT},
        {"{\"a", "", "the string that begins at byte 9 has no end", 0, FMT},
        {"{\"a\\", "\\", "invalid escape in a string at byte 11", 0, FMT},
        {"{\"a\\x\":1}", "\\x", "invalid escape in a string at byte 11", 0, FMT},
        {"{\"\\u12g4\":1}", "\\u", "invalid escape", 0, FMT},
        {"{\"\\ud800\":1}", "\\u", "invalid escape", 0, FMT},
        {"{\"\\ud800\\u0061\":1}", "\\ud800", "invalid escape", 0, FMT},
        {"{\"\\ud800x12345\":1}", "\\u", "invalid escape", 0, FMT},
        {"{\"\\udc00\":1}", "\\u", "invalid escape", 0, FMT},
        {"{\"\\u12\"", "\\u", "invalid escape", 0, FMT},
        {"{\"a\nb\":1}", "\n", "control character 0x0a in a string at byte 11", 0, FMT},
        {"{\"a\":1}", "1", "tensor 'a': expected '{' of a tensor", 0, FMT},
        {"{\"a\":null}", "null", "tensor 'a': expected '{' of a tensor", 0, FMT},
        {"{\"a\":[\"U8\",[1],[0,1]]}", "[\"U8", "tensor 'a': expected '{' of a tensor", 1, FMT},
        {"/**/{}", "/**", "expected '{' at byte 8", 0, FMT},
    };
    (void)state;

    check_bad(bad, PF_COUNTOF(bad));
}

static void refuses_bytes_that_are_no_utf8(void **state)
{
    static const char *const texts[] = {"{\"\xff\":1}", "{\"\xc0\x80\":1}", "{\"\xed\xa0\x80\":1}",
                                        "{\"\xf4\x90\x80\x80\":1}", "{\"\xe2\x82"};
    size_t i;
    (void)state;

    for (i = 0; i < PF_COUNTOF(texts); i++) {
        struct bad bad = {texts[i], NULL, "header is not UTF-8 at byte 10", 0, FMT};
        check_bad(&bad, 1);
    }
}

static void refuses_duplicates_in_every_spelling(void **state)
{
    static const struct bad bad[] = {
        {"{" OK1 "," OK1 "}", "\"a\"", "tensor 'a' at byte 61 was given before, at byte 9", 1, FMT},
        {"{" TENSOR("a", "U8", "[0]", 0, 0) "," TENSOR("\\u0061", "U8", "[0]", 0, 0) "}",
         "\"\\u0061\"", "tensor 'a' at byte 61 was given before, at byte 9", 0, FMT},
        {"{" OK1 "," TENSOR("b", "U8", "[1]", 1, 2) "," TENSOR("a", "U8", "[1]", 2, 3) "}", "\"a\"",
         "tensor 'a' at byte 113 was given before", 3, FMT},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", "\"__metadata__\"",
         "key '__metadata__' at byte 27 was given before", 0, FMT},
        {"{\"__metadata__\":null,\"__metadat\\u0061__\":null}", "\"__metadat\\u0061__\"",
         "key '__metadata__' at byte 29 was given before", 0, FMT},
        {"{\"__metadata__\":{\"k\":\"1\",\"\\u006b\":\"1\"}}", "\"\\u006b\"",
         "key 'k' at byte 33 was given before, at byte 25", 0, FMT},
        {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
         "\"dtype\"", "tensor 'a': key 'dtype' at byte 27 was given before, at byte 14", 1, FMT},
        {"{\"a\":{\"dtype\":\"U8\",\"sh\\u0061pe\":[1],\"shape\":[1],\"data_offsets\":[0,1]}}",
         "\"shape\"", "tensor 'a': key 'shape' at byte", 1, FMT},
        {"{\"a\":{\"x\":{\"y\":1,\"y\":2},\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
         "\"y\":2", "tensor 'a': key 'y' at byte", 1, FMT},
        {"{\"a\":{\"1\":1,\"2\":1,\"3\":1,\"4\":1,\"5\":1,\"6\":1,\"7\":1,\"8\":1,\"9\":1,\"3\":1}"
         "}",
         "\"3\"", "tensor 'a': key '3' at byte 68 was given before, at byte 26", 1, FMT},
    };
    (void)state;

    check_bad(bad, PF_COUNTOF(bad));
}

static void refuses_tensor_fields_of_the_wrong_kind(void **state)
{
    static const struct bad bad[] = {
        {"{\"a\":{}}", "\"a\"", "tensor 'a': has no dtype", 0, FMT},
        {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,0]}}", "\"a\"", "tensor 'a': has no shape",
         0, FMT},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[0]}}", "\"a\"", "tensor 'a': has no data_offsets", 0,
         FMT},
        {"{\"a\":{\"dtype\":7}}", "7", "tensor 'a': expected a string", 0, FMT},
        {"{" TENSOR("a", "I4", "[2]", 0, 1) "}", "\"I4\"",
         "tensor 'a': dtype 'I4' at byte 22 is not known", 1, PF_E_UNSUPPORTED},
        {"{" TENSOR("a", "f32", "[1]", 0, 4) "}", "\"f32\"", "tensor 'a': dtype 'f32' at byte", 4,
         PF_E_UNSUPPORTED},
        {"{" TENSOR("a", "U8", "1", 0, 1) "}", "1,\"data", "tensor 'a': expected '[' of shape", 1,
         FMT},
        {"{" TENSOR("a", "U8", "[-1]", 0, 1) "}", "-1", "tensor 'a': shape holds a negative number",
         1, FMT},
        {"{" TENSOR("a", "U8", "[1.0]", 0, 1) "}", "1.0",
         "tensor 'a': shape holds a number that is no integer", 1, FMT},
        {"{" TENSOR("a", "U8", "[1e0]", 0, 1) "}", "1e0",
         "tensor 'a': shape holds a number that is no integer", 1, FMT},
        {"{" TENSOR("a", "U8", "[01]", 0, 1) "}", "01",
         "tensor 'a': shape holds a number with a leading zero", 1, FMT},
        {"{" TENSOR("a", "U8", "[\"1\"]", 0, 1) "}", "\"1\"",
         "tensor 'a': expected an unsigned integer", 1, FMT},
        {"{" TENSOR("a", "U8", "[1,]", 0, 1) "}", "],\"data",
         "tensor 'a': expected an unsigned integer", 1, FMT},
        {"{" TENSOR("a", "U8", "[1 1]", 0, 1) "}", "1],\"data", "tensor 'a': expected ',' or ']'",
         1, FMT},
        {"{" TENSOR("a", "U8", "[18446744073709551616]", 0, 1) "}", "184",
         "tensor 'a': shape holds a number beyond 2^64 - 1", 1, FMT},
        {"{" TENSOR("a", "U8", "[9223372036854775808]", 0, 1) "}", "[922",
         "tensor 'a': shape has a dimension of 9223372036854775808, more than 2^63 - 1", 1,
         PF_E_RANGE},
        {"{" TENSOR("a", "U8", "[1,1,1,1,1,1,1,1,1]", 0, 1) "}", "[1,1,",
         "tensor 'a': shape has more than 8 dimensions", 1, PF_E_UNSUPPORTED},
        {"{\"a\":{\"data_offsets\":[0]}}", "[0",
         "tensor 'a': data_offsets hold 1 numbers instead of 2", 0, FMT},
        {"{\"a\":{\"data_offsets\":[]}}", "[",
         "tensor 'a': data_offsets hold 0 numbers instead of 2", 0, FMT},
        {"{\"a\":{\"data_offsets\":[0,1,2]}}", "[0",
         "tensor 'a': data_offsets hold 3 numbers instead of 2", 0, FMT},
        {"{\"a\":{\"data_offsets\":{}}}", "{}", "tensor 'a': expected '[' of data_offsets", 0, FMT},
        {"{\"a\":{\"data_offsets\":[0,18446744073709551616]}}", "184",
         "tensor 'a': data_offsets holds a number beyond 2^64 - 1", 0, FMT},
        {"{\"a\":{\"x\":+1}}", "+", "tensor 'a': expected a value", 0, FMT},
        {"{\"a\":{\"x\":NaN}}", "NaN", "tensor 'a': expected a value", 0, FMT},
        {"{\"a\":{\"x\":nul}}", "nul", "tensor 'a': expected a value", 0, FMT},
        {"{\"a\":{\"x\":t}}", "t}", "tensor 'a': expected a value", 0, FMT},
        {"{\"a\":{\"x\":fals}}", "fals", "tensor 'a': expected a value", 0, FMT},
        {"{\"a\":{\"x\":-}}", "}}", "tensor 'a': expected a value", 0, FMT},
        {"{\"a\":{\"x\":1.}}", "}}", "tensor 'a': expected a digit", 0, FMT},
        {"{\"a\":{\"x\":1e}}", "}}", "tensor 'a': expected a digit", 0, FMT},
        {"{\"a\":{\"x\":1e+}}", "}}", "tensor 'a': expected a digit", 0, FMT},
        {"{\"a\":{\"x\":00}}", "0}}", "tensor 'a': expected ',' or '}'", 0, FMT},
        {"{\"a\":{\"x\":[1,]}}", "]}}", "tensor 'a': expected a value", 0, FMT},
        {"{\"a\":{\"x\":{\"y\":1]}}", "]}}", "tensor 'a': expected ',' or '}'", 0, FMT},
        {"{\"a\":{\"x\":[", "", "tensor 'a': expected a value", 0, FMT},
        {"{" TENSOR("a\\u0000b", "U8", "[1]", 0, 1) "}", "\"a\\u0000b\"",
         "tensor 'a?b': its name holds a NUL", 1, PF_E_UNSUPPORTED},
    };
    (void)state;

    check_bad(bad, PF_COUNTOF(bad));
}

static void refuses_metadata_that_is_no_map_of_strings(void **state)
{
    static const struct bad bad[] = {
        {"{\"__metadata__\":[]}", "[]", "expected '{' of __metadata__", 0, FMT},
        {"{\"__metadata__\":\"x\"}", "\"x\"", "expected '{' of __metadata__", 0, FMT},
        {"{\"__metadata__\":nil}", "nil", "expected a value", 0, FMT},
        {"{\"__metadata__\":{\"step\":7}}", "7",
         "__metadata__ value of 'step' at byte 32 is no string", 0, FMT},
        {"{\"__metadata__\":{\"k\":null}}", "null",
         "__metadata__ value of 'k' at byte 29 is no string", 0, FMT},
        {"{\"__metadata__\":{\"k\":{}}}", "{}", "__metadata__ value of 'k' at byte 29 is no string",
         0, FMT},
        {"{\"__metadata__\":{\"k\":\"v\",}}", "}}", "expected a key", 0, FMT},
    };
    (void)state;

    check_bad(bad, PF_COUNTOF(bad));
}

static void refuses_sizes_that_disagree_or_overflow(void **state)
{
    static const struct bad bad[] = {
        {"{" TENSOR("a", "I32", "[2,2]", 0, 4) "}", "\"a\"",
         "tensor 'a': data_offsets [0, 4] hold 4 bytes, but I32 [2, 2] takes 16", 4, FMT},
        {"{" TENSOR("a", "F32", "[]", 0, 8) "}", "\"a\"",
         "tensor 'a': data_offsets [0, 8] hold 8 bytes, but F32 [] takes 4", 8, FMT},
        {"{" TENSOR("a", "U8", "[2]", 2, 0) "}", "\"a\"",
         "tensor 'a': data_offsets [2, 0] end before they begin", 2, FMT},
        {"{" TENSOR("a", "U8", "[4611686018427387904,4,0]", 0, 0) "}", "\"a\"",
         "tensor 'a': the number of elements of [4611686018427387904, 4, 0] overflows 64 bits", 0,
         PF_E_RANGE},
        {"{" TENSOR("a", "U8", "[4611686018427387904]", 0, 0) "}", "\"a\"",
         "tensor 'a': the size of U8 [4611686018427387904] overflows 64 bits", 0, PF_E_RANGE},
        {"{" TENSOR("a", "F4", "[3]", 0, 1) "}", "\"a\"",
         "tensor 'a': F4 [3] has 12 bits, which is no whole number of bytes", 1, FMT},
        {"{" TENSOR("a", "F6_E2M3", "[2]", 0, 2) "}", "\"a\"",
         "tensor 'a': F6_E2M3 [2] has 12 bits", 2, FMT},
        {"{" TENSOR("a", "F4", "[]", 0, 0) "}", "\"a\"", "tensor 'a': F4 [] has 4 bits", 0, FMT},
    };
    (void)state;

    check_bad(bad, PF_COUNTOF(bad));
}

static void refuses_holes_and_overlaps(void **state)
{
    static const struct bad bad[] = {
        {"{" OK1 "," TENSOR("b", "U8", "[2]", 3, 5) "}", "\"b\"",
         "tensor 'b': data_offsets [3, 5] leave a hole of 2 bytes after tensor 'a', which ends at "
         "1; expected a file of "
         "116 bytes, it has 118",
         5, FMT},
        {"{" TENSOR("a", "U8", "[1]", 4, 5) "}", "\"a\"",
         "tensor 'a': data_offsets [4, 5] leave a hole of 4 bytes after the start of the data, "
         "which ends at 0; expected a "
         "file of 62 bytes, it has 66",
         5, FMT},
        {"{" TENSOR("a", "U8", "[4]", 0, 4) "," TENSOR("b", "U8", "[2]", 2, 4) "}", "\"b\"",
         "tensor 'b': data_offsets [2, 4] overlap tensor 'a', which ends at 4", 4, FMT},
        /* An empty tensor inside another one. */
        {"{" TENSOR("a", "U8", "[4]", 0, 4) "," TENSOR("b", "U8", "[0]", 2, 2) "}", "\"b\"",
         "tensor 'b': data_offsets [2, 2] overlap tensor 'a'", 4, FMT},
        /* Sorted by (begin, end), not by the header's order. */
        {"{" TENSOR("b", "U8", "[2]", 2, 4) "," TENSOR("a", "U8", "[3]", 0, 3) "}", "\"b\"",
         "tensor 'b': data_offsets [2, 4] overlap tensor 'a', which ends at 3", 4, FMT},
    };
    (void)state;

    check_bad(bad, PF_COUNTOF(bad));
}

/* The reference's json attack: many tensors on one range. */
static void refuses_many_tensors_on_one_range(void **state)
{
    struct strbuf json, bytes;
    struct st_header *h = NULL;
    pf_error err = {0};
    int i;
    (void)state;

    strbuf_init(&json);
    for (i = 0; i < 10; i++)
        strbuf_addf(&json, "%c\"t%d\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]}",
                    i == 0 ? '{' : ',', i);
    strbuf_adds(&json, "}");
    st_assert_error(parse(json.p, json.n, 16, &bytes, &h, &err), PF_E_FORMAT, &err,
                    "tensor 't1': data_offsets [0, 16] overlap tensor 't0', which ends at 16");
    strbuf_release(&bytes);
    strbuf_release(&json);
}

/* Rank 4,611,686,018,427,387,904-byte tensors one behind another reach 2^64 without any one of them overflowing. */
static void refuses_tensors_that_tile_beyond_every_file(void **state)
{
    static const struct bad bad[] = {
        {"{" TENSOR("a", "U8", "[2305843009213693951]", 0, 2305843009213693951) "}", "\"a\"",
         "tensor 'a': data_offsets end 2305843009213693951 beyond the 0 bytes of data: expected a "
         "file of "
         "2305843009213694048 bytes, it has 97",
         0, FMT},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[18446744073709551614,"
         "18446744073709551615]}}",
         "\"a\"",
         "tensor 'a': data_offsets [18446744073709551614, 18446744073709551615] leave a hole of "
         "18446744073709551614 bytes",
         0, FMT},
    };
    struct strbuf json, bytes;
    struct st_header *h = NULL;
    pf_error err = {0};
    uint64_t begin, step = (uint64_t)2305843009213693951;
    int i;
    (void)state;

    check_bad(bad, PF_COUNTOF(bad));
    strbuf_init(&json);
    for (i = 0, begin = 0; i < 8; i++, begin += step)
        strbuf_addf(&json,
                    "%c\"t%d\":{\"dtype\":\"U8\",\"shape\":[%" PRIu64 "],\"data_offsets\":[%" PRIu64
                    ",%" PRIu64 "]}",
                    i == 0 ? '{' : ',', i, step, begin, begin + step);
    strbuf_adds(&json, "}");
    st_assert_error(parse(json.p, json.n, 4, &bytes, &h, &err), PF_E_FORMAT, &err,
                    "expected a file of more than 2^64 bytes, it has");
    strbuf_release(&bytes);
    strbuf_release(&json);
}

/* The first eight bytes: too short, too large, longer than the file. */
static void refuses_lengths_that_cannot_be(void **state)
{
    static const uint8_t large[8] = {0x01, 0xe1, 0xf5, 0x05}; /* 100,000,001 */
    static const uint8_t huge[8] = {255, 255, 255, 255, 255, 255, 255, 255};
    static const uint8_t max[8] = {0x00, 0xe1, 0xf5, 0x05};
    struct st_header *h = NULL;
    pf_error err = {0};
    (void)state;

    st_assert_error(
        st_header_parse(large, 0, 0, "d/f", &h, &err), PF_E_FORMAT, &err,
        "'d/f': too short for a safetensors header: expected a file of at least 8 bytes, it has 0");
    st_assert_error(st_header_parse(large, 7, 7, "d/f", &h, &err), PF_E_FORMAT, &err, "it has 7");
    assert_int_equal(err.off, 7);
    st_assert_error(st_header_parse(large, 8, 200000000, "d/f", &h, &err), PF_E_FORMAT, &err,
                    "'d/f': header length 100000001 is larger than 100000000");
    st_assert_error(st_header_parse(huge, 8, UINT64_MAX, "d/f", &h, &err), PF_E_FORMAT, &err,
                    "'d/f': header length 18446744073709551615 is larger than 100000000");
    st_assert_error(st_header_parse(max, 8, 100000007, "d/f", &h, &err), PF_E_FORMAT, &err,
                    "'d/f': header of 100000000 bytes ends beyond the file: expected a file of at "
                    "least 100000008 bytes, it "
                    "has 100000007");
    /* Our own mistakes, not the file's. */
    st_assert_error(st_header_parse(max, 8, 100000008, "d/f", &h, &err), PF_E_INVALID, &err,
                    "only 8 bytes of the header were given");
    st_assert_error(st_header_parse(max, 4, 100, "d/f", &h, &err), PF_E_INVALID, &err,
                    "only 4 bytes of the header were given");
    assert_null(h);
}

/* A repository that was cloned without its large files has such texts in their place. */
static void a_git_lfs_pointer_is_named(void **state)
{
    static const char text[] = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\n";
    struct st_header *h = NULL;
    pf_error err = {0};
    (void)state;

    st_assert_error(
        st_header_parse((const uint8_t *)text, sizeof(text) - 1, sizeof(text) - 1, "d/f", &h, &err),
        PF_E_FORMAT, &err, "'d/f': a Git LFS pointer");
    st_assert_error(
        st_header_parse((const uint8_t *)text, sizeof(text) - 1, sizeof(text) - 1, "d/f", &h, &err),
        PF_E_FORMAT, &err, "git lfs pull");
    assert_null(h);
}

/* A hostile name fills neither the message nor the terminal. */
static void quotes_foreign_names_safely(void **state)
{
    struct strbuf json, bytes;
    struct st_header *h = NULL;
    pf_error err = {0};
    int i;
    (void)state;

    strbuf_init(&json);
    strbuf_adds(&json, "{\"\\u001b[31m\\u0000");
    for (i = 0; i < 5000; i++)
        strbuf_adds(&json, "\xc3\xa9");
    strbuf_adds(&json, "\":1}");
    st_assert_error(parse(json.p, json.n, 0, &bytes, &h, &err), PF_E_UNSUPPORTED, &err,
                    "tensor '?[31m?\xc3\xa9");
    assert_true(strlen(err.msg) < 400);
    assert_non_null(strstr(err.msg, "..': its name holds a NUL character"));
    assert_true(str_is_utf8(str_of(err.msg), &(size_t){0}));
    strbuf_release(&bytes);
    strbuf_release(&json);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(accepts_an_empty_object_in_any_white_space),
        cmocka_unit_test(reads_every_dtype_by_name_and_size),
        cmocka_unit_test(accepts_scalars_and_zero_sized_tensors),
        cmocka_unit_test(sorts_by_file_offset_whatever_the_header_order),
        cmocka_unit_test(decodes_escaped_names_and_keeps_plain_ones_in_place),
        cmocka_unit_test(keeps_metadata_in_file_order),
        cmocka_unit_test(ignores_unknown_fields_of_any_shape),
        cmocka_unit_test(reads_the_largest_numbers_exactly),
        cmocka_unit_test(accepts_nesting_up_to_the_bound),
        cmocka_unit_test(refuses_what_is_no_json_object),
        cmocka_unit_test(refuses_bytes_that_are_no_utf8),
        cmocka_unit_test(refuses_duplicates_in_every_spelling),
        cmocka_unit_test(refuses_tensor_fields_of_the_wrong_kind),
        cmocka_unit_test(refuses_metadata_that_is_no_map_of_strings),
        cmocka_unit_test(refuses_sizes_that_disagree_or_overflow),
        cmocka_unit_test(refuses_holes_and_overlaps),
        cmocka_unit_test(refuses_many_tensors_on_one_range),
        cmocka_unit_test(refuses_tensors_that_tile_beyond_every_file),
        cmocka_unit_test(refuses_lengths_that_cannot_be),
        cmocka_unit_test(a_git_lfs_pointer_is_named),
        cmocka_unit_test(quotes_foreign_names_safely),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
