/*
 * Kept pictures: read back, driven out by the budget, expired, removed at the end.
 */
#include "testing.h"

#include "base/file.h"
#include "server/picture.h"

static struct pictures *open_pictures(void **state, uint64_t n_bytes_max, uint32_t seconds)
{
    const struct pictures_opts opts = {test_path(state, "kept"), n_bytes_max, seconds};
    struct pictures *p = NULL;
    pf_error err;

    assert_ok(pictures_new(&opts, &p, &err), &err);
    return p;
}

static int read_back(struct pictures *p, const char *name, const char *expected)
{
    struct strbuf text;
    pf_error err;
    int rc;

    strbuf_init(&text);
    rc = pictures_read(p, name, &text, &err);
    if (!rc)
        assert_string_equal(strbuf_z(&text), expected);
    strbuf_release(&text);
    return rc;
}

static void keeps_within_the_budget_and_drops_the_oldest(void **state)
{
    struct pictures *p = open_pictures(state, 10, 1000);
    char a[PICTURE_NAME_BYTES], b[PICTURE_NAME_BYTES], c[PICTURE_NAME_BYTES];
    pf_error err;
    uint32_t n;
    uint64_t n_bytes;

    assert_ok(pictures_keep(p, "aaaa", 4, a, &err), &err);
    assert_ok(pictures_keep(p, "bbbb", 4, b, &err), &err);
    assert_string_not_equal(a, b);
    assert_int_equal(read_back(p, a, "aaaa"), PF_OK);
    assert_ok(pictures_keep(p, "cccc", 4, c, &err), &err);
    assert_int_equal(read_back(p, a, ""), PF_E_NOTFOUND);
    assert_int_equal(read_back(p, b, "bbbb"), PF_OK);
    assert_int_equal(read_back(p, c, "cccc"), PF_OK);
    pictures_count(p, &n, &n_bytes);
    assert_int_equal(n, 2);
    assert_int_equal(n_bytes, 8);
    assert_int_equal(pictures_keep(p, "ddddddddddd", 11, a, &err), PF_E_RANGE);
    assert_int_equal(read_back(p, b, "bbbb"), PF_OK);
    pictures_free(p);
}

static void names_lead_nowhere_else(void **state)
{
    struct pictures *p = open_pictures(state, 1000, 1000);

    write_file(test_path(state, "kept/known.png"), "x", 1);
    assert_int_equal(read_back(p, "known.png", ""), PF_E_NOTFOUND);
    assert_int_equal(read_back(p, "../kept/known.png", ""), PF_E_NOTFOUND);
    assert_int_equal(read_back(p, "", ""), PF_E_NOTFOUND);
    pictures_free(p);
}

static void expires_and_cleans_up(void **state)
{
    struct pictures *p = open_pictures(state, 1000, 0);
    char a[PICTURE_NAME_BYTES], **names = NULL;
    size_t n_names = 1;
    pf_error err;
    uint32_t n;
    uint64_t n_bytes;

    assert_ok(pictures_keep(p, "aaaa", 4, a, &err), &err);
    assert_int_equal(read_back(p, a, ""), PF_E_NOTFOUND);
    pictures_free(p);
    p = open_pictures(state, 1000, 1000);
    assert_ok(pictures_keep(p, "aaaa", 4, a, &err), &err);
    pictures_expire(p);
    pictures_count(p, &n, &n_bytes);
    assert_int_equal(n, 1);
    pictures_free(p);
    p = open_pictures(state, 1000, 0); /* it takes over what is there */
    pictures_expire(p);
    pictures_free(p);
    assert_ok(file_list(test_path(state, "kept"), &names, &n_names, &err), &err);
    assert_int_equal(n_names, 0);
    file_list_free(names, n_names);
}

static void shares_a_directory_that_was_given(void **state)
{
    struct pictures *one = open_pictures(state, 10, 1000), *two = open_pictures(state, 10, 1000);
    char a[PICTURE_NAME_BYTES], b[PICTURE_NAME_BYTES];
    pf_error err;
    uint32_t n;
    uint64_t n_bytes;

    assert_ok(pictures_keep(one, "aaaa", 4, a, &err), &err);
    assert_int_equal(read_back(two, a, "aaaa"), PF_OK);
    pictures_free(one);
    assert_int_equal(read_back(two, a, "aaaa"), PF_OK);
    one = open_pictures(state, 10, 1000);
    pictures_count(one, &n, &n_bytes);
    assert_int_equal(n, 1);
    assert_int_equal(n_bytes, 4);
    assert_ok(pictures_keep(one, "bbbbbbbb", 8, b, &err), &err); /* over the budget of both */
    assert_int_equal(read_back(two, a, ""), PF_E_NOTFOUND);
    assert_int_equal(read_back(two, b, "bbbbbbbb"), PF_OK);
    pictures_free(one);
    pictures_free(two);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(keeps_within_the_budget_and_drops_the_oldest),
        in_dir(names_lead_nowhere_else),
        in_dir(expires_and_cleans_up),
        in_dir(shares_a_directory_that_was_given),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
