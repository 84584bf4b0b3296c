/*
 * Whole files: opening, the one rule about sizes (C123), data at odd addresses, a file that shrinks while its header is read, the
 * bundled files, and that no header makes opening slow.
 */
#include "st_testing.h"

#include <fcntl.h>

/* Writes the bytes as "<dir>/f.safetensors", opens them, and wants a refusal whose message begins with the path. */
static void refuse(void **state, const void *p, size_t n, int code, const char *text)
{
    const char *path = test_path(state, "f.safetensors");
    struct st_file *f = NULL;
    pf_error err = {0};
    int rc;

    write_file(path, p, n);
    rc = st_open(path, &f, &err);
    st_assert_error(rc, code, &err, text);
    assert_true(err.msg[0] == '\'' && strncmp(err.msg + 1, path, strlen(path)) == 0);
    assert_null(f);
}

static struct st_file *accept(void **state, const void *p, size_t n)
{
    const char *path = test_path(state, "f.safetensors");
    struct st_file *f = NULL;
    pf_error err = {0};

    write_file(path, p, n);
    if (st_open(path, &f, &err) != PF_OK)
        fail_msg("%s", err.msg);
    assert_string_equal(st_path(f), path);
    return f;
}

static void opens_reads_and_finds(void **state)
{
    const char *json = "{\"__metadata__\":{\"format\":\"pt\",\"ss_x\":\"1\"},"
                       "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]},"
                       "\"a\":{\"dtype\":\"I32\",\"shape\":[],\"data_offsets\":[0,4]},"
                       "\"z\":{\"dtype\":\"F64\",\"shape\":[0,3],\"data_offsets\":[12,12]}}";
    struct strbuf b;
    struct st_file *f;
    struct str value;

    strbuf_init(&b);
    st_bytes(&b, json, strlen(json), 12);
    f = accept(state, b.p, b.n);
    assert_int_equal(st_header_bytes(f), 8 + strlen(json));
    assert_int_equal(st_map(f)->n_bytes, b.n);
    assert_int_equal(st_n_tensors(f), 3);
    assert_true(str_eqz(st_tensor(f, 0)->name, "a"));
    assert_memory_equal(st_data(f, st_find(f, str_of("b"))), "\4\5\6\7\10\11\12\13", 8);
    assert_ptr_equal(st_data(f, st_find(f, str_of("z"))), st_map(f)->p + b.n);
    assert_null(st_find(f, str_of("__metadata__")));
    assert_int_equal(st_n_meta(f), 2);
    assert_true(str_eqz(st_meta(f, 1)->key, "ss_x"));
    assert_true(st_meta_find(f, "format", &value));
    assert_true(str_eqz(value, "pt"));
    assert_false(st_meta_find(f, "forma", &value));
    st_close(f);
    strbuf_release(&b);
    st_close(NULL);
}

static void says_what_is_not_there(void **state)
{
    const char *path = test_path(state, "absent.safetensors");
    struct st_file *f = NULL;
    pf_error err = {0};

    st_assert_error(st_open(path, &f, &err), PF_E_NOTFOUND, &err, path);
    refuse(state, "", 0, PF_E_FORMAT, "expected a file of at least 8 bytes, it has 0");
    refuse(state, "1234567", 7, PF_E_FORMAT, "expected a file of at least 8 bytes, it has 7");
}

/* C123: trailing bytes, a cut file, a hole, an end beyond the file: one rule, one kind of message. */
static void one_rule_about_sizes_c123(void **state)
{
    static const char json[] =
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[4096],\"data_offsets\":[0,4096]},"
        "\"b\":{\"dtype\":\"F32\",\"shape\":[1024],\"data_offsets\":[4096,8192]}}";
    static const char hole[] =
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[4096],\"data_offsets\":[0,4096]},"
        "\"b\":{\"dtype\":\"F32\",\"shape\":[1023],\"data_offsets\":[4100,8192]}}";
    static const char beyond[] =
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[4096],\"data_offsets\":[0,4096]},"
        "\"b\":{\"dtype\":\"F32\",\"shape\":[2048],\"data_offsets\":[4096,12288]}}";
    uint64_t n = 8 + sizeof(json) - 1 + 8192;
    char text[256];
    struct strbuf b;

    strbuf_init(&b);
    st_bytes(&b, json, sizeof(json) - 1, 8192 + 8);
    assert_int_equal(b.n, n + 8);
    st_close(accept(state, b.p, n));
    (void)snprintf(text, sizeof(text),
                   "8 bytes follow the last tensor: expected a file of %" PRIu64
                   " bytes, it has %" PRIu64,
                   n, n + 8);
    refuse(state, b.p, n + 8, PF_E_FORMAT, text);
    (void)snprintf(text, sizeof(text),
                   "tensor 'b': data_offsets end 8192 beyond the 8191 bytes of data: expected a "
                   "file of %" PRIu64 " bytes, it has %" PRIu64,
                   n, n - 1);
    refuse(state, b.p, n - 1, PF_E_FORMAT, text);
    (void)snprintf(text, sizeof(text),
                   "tensor 'b': data_offsets end 8192 beyond the 4096 bytes of data: expected a "
                   "file of %" PRIu64 " bytes, it has %" PRIu64,
                   n, n - 4096);
    refuse(state, b.p, n - 4096, PF_E_FORMAT, text);
    (void)snprintf(text, sizeof(text),
                   "tensor 'a': data_offsets end 4096 beyond the 4095 bytes of data");
    refuse(state, b.p, n - 4097, PF_E_FORMAT, text);
    (void)snprintf(text, sizeof(text), "expected a file of at least %zu bytes, it has 50",
                   8 + sizeof(json) - 1);
    refuse(state, b.p, 50, PF_E_FORMAT, text);

    strbuf_clear(&b);
    st_bytes(&b, hole, sizeof(hole) - 1, 8192);
    (void)snprintf(text, sizeof(text),
                   "tensor 'b': data_offsets [4100, 8192] leave a hole of 4 bytes after tensor "
                   "'a', which ends at 4096; "
                   "expected a file of %" PRIu64 " bytes, it has %" PRIu64,
                   n - 4, n);
    refuse(state, b.p, b.n, PF_E_FORMAT, text);

    strbuf_clear(&b);
    st_bytes(&b, beyond, sizeof(beyond) - 1, 8192);
    (void)snprintf(text, sizeof(text),
                   "tensor 'b': data_offsets end 12288 beyond the 8192 bytes of data: expected a "
                   "file of %" PRIu64 " bytes, it has %" PRIu64,
                   n + 1 + 4096, n + 1); /* "12288" is one digit longer than "8192" */
    refuse(state, b.p, b.n, PF_E_FORMAT, text);
    strbuf_release(&b);
}

/* Trailing bytes are where the file should have ended; a cut is charged to the tensor that it cuts. */
static void reports_the_offset_of_the_first_wrong_byte(void **state)
{
    static const char json[] = "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}";
    const char *path = test_path(state, "f.safetensors");
    struct st_file *f = NULL;
    pf_error err = {0};
    struct strbuf b;

    strbuf_init(&b);
    st_bytes(&b, json, sizeof(json) - 1, 10);
    write_file(path, b.p, b.n);
    assert_int_equal(st_open(path, &f, &err), PF_E_FORMAT);
    assert_int_equal(err.off, 8 + sizeof(json) - 1 + 4);
    write_file(path, b.p, 8 + sizeof(json) - 1 + 3);
    assert_int_equal(st_open(path, &f, &err), PF_E_FORMAT);
    assert_int_equal(err.off, 8 + 1);
    strbuf_release(&b);
}

/* One odd byte before an F32: the format has no alignment rule, and real files break every other. */
static void reads_data_at_odd_addresses(void **state)
{
    static const char json[] = "{\"a\":{\"dtype\":\"BOOL\",\"shape\":[1],\"data_offsets\":[0,1]},"
                               "\"b\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[1,13]}}";
    static const float want[3] = {1.5f, -0.0f, 3e38f};
    const struct st_tensor *t;
    struct strbuf b;
    struct st_file *f;
    float got[3];
    size_t pad;

    for (pad = 0; pad < 4; pad++) {
        char padded[256];

        (void)snprintf(padded, sizeof(padded), "%s%.*s", json, (int)pad, "   ");
        strbuf_init(&b);
        st_bytes(&b, padded, strlen(padded), 1);
        strbuf_add(&b, (const char *)want, sizeof(want));
        f = accept(state, b.p, b.n);
        t = st_find(f, str_of("b"));
        assert_int_equal(t->off_bytes, 8 + strlen(padded) + 1);
        dtype_to_f32(t->dtype, st_data(f, t), 3, got);
        assert_memory_equal(got, want, sizeof(want));
        st_close(f);
        strbuf_release(&b);
    }
}

/* The file loses all but its first page between mapping and parsing: an error, and no signal. */
static void a_file_that_shrinks_while_it_is_read_is_an_error(void **state)
{
    const char *path = test_path(state, "shrink.safetensors");
    struct file_map map;
    struct st_file *f = NULL;
    pf_error err = {0};
    struct strbuf json, b;
    int i;

    strbuf_init(&json);
    for (i = 0; i < 5000; i++)
        strbuf_addf(&json, "%c\"t%d\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}",
                    i == 0 ? '{' : ',', i);
    strbuf_adds(&json, "}");
    strbuf_init(&b);
    st_bytes(&b, json.p, json.n, 0);
    write_file(path, b.p, b.n);
    assert_int_equal(file_map_open(&map, path, &err), PF_OK);
    assert_int_equal(truncate(path, 4096), 0);
    st_assert_error(st_open_mapped(&map, path, &f, &err), PF_E_TRUNCATED, &err,
                    "shrank while its header was read");
    assert_true(err.msg[0] == '\'' && strncmp(err.msg + 1, path, strlen(path)) == 0);
    assert_null(f);
    strbuf_release(&b);
    strbuf_release(&json);
}

/* The file loses data that the parser does not look at, and the header is bad too: the better reason wins. */
static void a_changed_file_is_named_as_such_before_its_syntax(void **state)
{
    const char *path = test_path(state, "change.safetensors");
    struct file_map map;
    struct st_file *f = NULL;
    pf_error err = {0};
    struct strbuf b;

    strbuf_init(&b);
    st_bytes(&b, "[]", 2, 8192);
    write_file(path, b.p, b.n);
    assert_int_equal(file_map_open(&map, path, &err), PF_OK);
    assert_int_equal(truncate(path, 4096), 0);
    st_assert_error(st_open_mapped(&map, path, &f, &err), PF_E_TRUNCATED, &err, path);
    strbuf_release(&b);
}

static void opens_the_bundled_files(void **state)
{
    static const struct {
        const char *path;
        size_t n_tensors;
    } files[] = {{"data/emoji-dit/transformer/diffusion_pytorch_model.safetensors", 0},
                 {"data/adapters/noto.safetensors", 0},
                 {"data/adapters/turbo.safetensors", 0},
                 {"data/adapters/night/adapter_model.safetensors", 0},
                 {"tests/golden/forward.safetensors", 0}};
    size_t i, k;
    (void)state;

    for (i = 0; i < PF_COUNTOF(files); i++) {
        char *path = path_join(PF_SOURCE_DIR, files[i].path);
        struct st_file *f = NULL;
        pf_error err = {0};
        uint64_t end;

        if (st_open(path, &f, &err) != PF_OK)
            fail_msg("%s", err.msg);
        assert_true(st_n_tensors(f) > 0);
        end = st_header_bytes(f);
        for (k = 0; k < st_n_tensors(f); k++) {
            assert_int_equal(st_tensor(f, k)->off_bytes, end);
            end += st_tensor(f, k)->n_bytes;
        }
        assert_int_equal(end, st_map(f)->n_bytes);
        st_close(f);
        mem_free(path);
    }
}

/* ------------------------------------------------------------------------------------------------- speed */

#define MANY 100000

/* CPU seconds to parse json with n_data bytes behind it. Anything quadratic takes minutes at these sizes. */
static double parse_seconds(const struct strbuf *json, uint64_t n_data, int code, const char *text)
{
    struct st_header *h = NULL;
    pf_error err = {0};
    struct strbuf b;
    double t;
    int rc;

    strbuf_init(&b);
    st_bytes(&b, json->p, json->n, 0);
    t = test_cpu_seconds();
    rc = st_header_parse((const uint8_t *)b.p, b.n, b.n + n_data, "f", &h, &err);
    t = test_cpu_seconds() - t;
    if (code == PF_OK && rc != PF_OK)
        fail_msg("%s", err.msg);
    if (code != PF_OK)
        st_assert_error(rc, code, &err, text);
    st_header_free(h);
    strbuf_release(&b);
    return t;
}

static void check_seconds(const char *what, double t)
{
    print_message("%-40s %.3f s\n", what, t);
    assert_true(t < 60); /* a bound that only a wrong growth breaks, also under sanitizers */
}

static void add_many(struct strbuf *json, const char *prefix, bool is_reversed)
{
    uint32_t i;

    strbuf_init(json);
    for (i = 0; i < MANY; i++) {
        uint32_t k = is_reversed ? MANY - 1 - i : i;
        strbuf_addf(
            json, "%c\n\"%s%u.weight\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[%u,%u]}",
            i == 0 ? '{' : ',', prefix, (k * 7919u) % 1000003u, k * 4, k * 4 + 4);
    }
}

static void opens_100000_tensors_in_well_under_a_second(void **state)
{
    struct strbuf json;
    (void)state;

    add_many(&json, "model.layers.", false);
    strbuf_adds(&json, "}");
    check_seconds("100,000 tensors", parse_seconds(&json, 4 * MANY, PF_OK, NULL));
    strbuf_release(&json);

    add_many(&json, "model.layers.", true);
    strbuf_adds(&json, "}");
    check_seconds("the same, last offset first", parse_seconds(&json, 4 * MANY, PF_OK, NULL));
    strbuf_release(&json);

    add_many(&json, "\\u0061model.layers.", false);
    strbuf_adds(&json, "}");
    check_seconds("the same, names escaped", parse_seconds(&json, 4 * MANY, PF_OK, NULL));
    strbuf_release(&json);
}

static void no_header_makes_opening_quadratic(void **state)
{
    char prefix[512];
    struct strbuf json;
    uint32_t i;
    (void)state;

    memset(prefix, 'a', sizeof(prefix) - 1);
    prefix[sizeof(prefix) - 1] = 0;
    add_many(&json, prefix, false);
    strbuf_addf(&json, ",\"%s%u.weight\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}",
                prefix, 0u);
    check_seconds("a duplicate at the end, long prefixes",
                  parse_seconds(&json, 4 * MANY, PF_E_FORMAT, "was given before"));
    strbuf_release(&json);

    strbuf_init(&json);
    strbuf_adds(&json, "{\"t\":{\"x\":{");
    for (i = 0; i < 2 * MANY; i++)
        strbuf_addf(&json, "%s\"%u\":0", i == 0 ? "" : ",", i);
    strbuf_adds(&json, ",\"7\":0}}}");
    check_seconds("200,000 keys in an unknown field",
                  parse_seconds(&json, 0, PF_E_FORMAT, "key '7' at byte"));
    strbuf_release(&json);

    strbuf_init(&json);
    strbuf_adds(&json, "{\"__metadata__\":{");
    for (i = 0; i < 2 * MANY; i++)
        strbuf_addf(&json, "%s\"%u\":\"\"", i == 0 ? "" : ",", i);
    strbuf_adds(&json, ",\"7\":\"\"}}");
    check_seconds("200,000 metadata keys", parse_seconds(&json, 0, PF_E_FORMAT, "key '7' at byte"));
    strbuf_release(&json);

    strbuf_init(&json);
    strbuf_adds(&json, "{");
    for (i = 0; i < MANY; i++)
        strbuf_addf(&json, "%s\"%u\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]}",
                    i == 0 ? "" : ",", i);
    strbuf_adds(&json, "}");
    check_seconds("100,000 tensors on one range",
                  parse_seconds(&json, 16, PF_E_FORMAT, "overlap tensor '0'"));
    strbuf_release(&json);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(opens_reads_and_finds),
        in_dir(says_what_is_not_there),
        in_dir(one_rule_about_sizes_c123),
        in_dir(reports_the_offset_of_the_first_wrong_byte),
        in_dir(reads_data_at_odd_addresses),
        in_dir(a_file_that_shrinks_while_it_is_read_is_an_error),
        in_dir(a_changed_file_is_named_as_such_before_its_syntax),
        cmocka_unit_test(opens_the_bundled_files),
        cmocka_unit_test(opens_100000_tensors_in_well_under_a_second),
        cmocka_unit_test(no_header_makes_opening_quadratic),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
