/*
 * Keys, Host and Origin: who may ask.
 */
#include "testing.h"

#include "server/auth.h"

static struct auth *open_auth(const struct auth_opts *opts)
{
    struct auth *a = NULL;
    pf_error err = {0};

    assert_ok(auth_new(opts, &a, &err), &err);
    return a;
}

static void accepts_the_keys_of_the_file_and_no_other(void **state)
{
    static const char text[] =
        "# keys\n\n  first-key-0123456789  \r\nsecond-key-0123456789\n#third-key-0123456789\n";
    static const char *const bad[] = {"Bearer first-key-012345678",
                                      "Bearer first-key-01234567890",
                                      "Bearer first-key-0123456780",
                                      "Bearer first-key-0123456789first-key-0123456789",
                                      "Bearer third-key-0123456789",
                                      "Bearer # keys",
                                      "Bearer ",
                                      "Bearer",
                                      "Basic first-key-0123456789",
                                      "first-key-0123456789",
                                      ""};
    const char *path = test_path(state, "keys");
    struct auth *a;

    write_file(path, text, sizeof(text) - 1);
    a = open_auth(&(struct auth_opts){.key_path = path});
    assert_true(auth_has_key(a));
    assert_true(auth_key_fits(a, "Bearer first-key-0123456789"));
    assert_true(auth_key_fits(a, "bearer  second-key-0123456789 "));
    assert_false(auth_key_fits(a, NULL));
    for (size_t i = 0; i < PF_COUNTOF(bad); i++)
        assert_false(auth_key_fits(a, bad[i]));
    auth_free(a);
}

static void refuses_key_files_that_protect_nothing(void **state)
{
    const char *path = test_path(state, "keys");
    struct auth_opts opts = {.key_path = path};
    struct auth *a = NULL;
    pf_error err;

    assert_int_not_equal(auth_new(&opts, &a, &err), PF_OK);
    assert_err(&err, PF_E_NOTFOUND, "keys");
    write_file(path, "\n# nothing\n", 11);
    assert_int_not_equal(auth_new(&opts, &a, &err), PF_OK);
    assert_err(&err, PF_E_INVALID, "has no key");
    write_file(path, "short\n", 6);
    assert_int_not_equal(auth_new(&opts, &a, &err), PF_OK);
    assert_err(&err, PF_E_INVALID, "a key of 5 bytes", "16");
}

static void knows_its_own_hosts(void **state)
{
    static const char *const hosts[] = {"draw.example"};
    static const char *const good[] = {
        "localhost", "localhost:8000", "LOCALHOST:1",      "127.0.0.1:8000", "[::1]:8000",
        "[::1]",     "10.0.0.7",       "draw.example:443", "Draw.Example",   "localhost."};
    static const char *const bad[] = {"evil.example",
                                      "localhost.evil.example",
                                      "evil.example:8000",
                                      "",
                                      ":80",
                                      "[::1",
                                      "[::1]x",
                                      "localhost:8000:1",
                                      "localhost:x",
                                      "user@localhost",
                                      "127.0.0.1.evil.example",
                                      "localhost/x"};
    struct auth *a = open_auth(&(struct auth_opts){.allowed_hosts = hosts, .n_allowed_hosts = 1});
    (void)state;

    for (size_t i = 0; i < PF_COUNTOF(good); i++)
        if (!auth_host_fits(a, good[i]))
            fail_msg("host '%s' was refused", good[i]);
    for (size_t i = 0; i < PF_COUNTOF(bad); i++)
        if (auth_host_fits(a, bad[i]))
            fail_msg("host '%s' was accepted", bad[i]);
    auth_free(a);
    a = open_auth(&(struct auth_opts){.is_unix = true});
    assert_true(auth_host_fits(a, "anything.example"));
    auth_free(a);
}

static void refuses_foreign_origins(void **state)
{
    static const char *const origins[] = {"https://app.example"};
    static const char *const bad[] = {"null",
                                      "http://evil.example",
                                      "http://localhost",
                                      "http://localhost:8001",
                                      "ftp://localhost:8000",
                                      "localhost:8000",
                                      "http://app.example",
                                      "https://app.example.evil",
                                      "http://localhost:8000.evil",
                                      ""};
    struct auth *a = open_auth(&(struct auth_opts){.cors_origins = origins, .n_cors_origins = 1});
    bool is_cors = true;
    (void)state;

    assert_true(auth_origin_fits(a, "http://localhost:8000", "localhost:8000", &is_cors));
    assert_false(is_cors);
    assert_true(auth_origin_fits(a, "https://localhost:8000", "localhost:8000", &is_cors));
    assert_true(auth_origin_fits(a, "https://app.example", "localhost:8000", &is_cors));
    assert_true(is_cors);
    for (size_t i = 0; i < PF_COUNTOF(bad); i++)
        if (auth_origin_fits(a, bad[i], "localhost:8000", &is_cors) || is_cors)
            fail_msg("origin '%s' was accepted", bad[i]);
    assert_false(auth_origin_fits(a, "http://", NULL, &is_cors));
    auth_free(a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(accepts_the_keys_of_the_file_and_no_other),
        in_dir(refuses_key_files_that_protect_nothing),
        cmocka_unit_test(knows_its_own_hosts),
        cmocka_unit_test(refuses_foreign_origins),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
