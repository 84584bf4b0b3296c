/*
 * Bundled names: a path that exists wins, a bare word is looked up in the data directory, and a near miss is suggested.
 */
#include "testing.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "cli/bundled.h"

#define DATA PF_SOURCE_DIR "/data"

static void finds(const char *word, const char *want)
{
    char *path = NULL;
    pf_error err = {0};

    if (bundled_adapter(DATA, word, &path, &err))
        fail_msg("'%s': %s", word, err.msg);
    assert_string_equal(path, want);
    mem_free(path);
}

static void a_bare_word_names_a_bundled_adapter(void **state)
{
    (void)state;
    finds("turbo", DATA "/adapters/turbo.safetensors");
    finds("noto", DATA "/adapters/noto.safetensors");
    finds("night", DATA "/adapters/night");
}

static void a_path_that_exists_wins(void **state)
{
    char here[4096];

    assert_non_null(getcwd(here, sizeof(here)));
    assert_int_equal(chdir(*state), 0);
    assert_int_equal(file_write_atomic("turbo", "x", 1, NULL), PF_OK);
    finds("turbo", "turbo");
    finds("noto", DATA "/adapters/noto.safetensors");
    assert_int_equal(chdir(here), 0);
}

static void a_miss_says_what_there_is(void **state)
{
    static const struct {
        const char *word, *msg;
    } bad[] = {
        {"trubo", "no file 'trubo', and no bundled adapter of that name; did you mean 'turbo'?"},
        {"zzzzzzzz", "there are 'night', 'noto', 'turbo'"},
        {"no/such", "no file or directory 'no/such'"},
        {"../adapters/noto", "no file or directory"},
        {"..", NULL}, /* a directory that exists: a path, for the library to judge */
    };

    (void)state;
    for (size_t i = 0; i < PF_COUNTOF(bad); i++) {
        char *path = NULL;
        pf_error err = {0};
        int rc = bundled_adapter(DATA, bad[i].word, &path, &err);

        assert_int_equal(rc, bad[i].msg ? PF_E_NOTFOUND : PF_OK);
        if (bad[i].msg && !strstr(err.msg, bad[i].msg))
            fail_msg("'%s': %s", bad[i].word, err.msg);
        mem_free(path);
    }
}

static void the_model_is_bundled_unless_named(void **state)
{
    char *path = NULL;

    (void)state;
    assert_int_equal(bundled_model(DATA, NULL, &path, NULL), PF_OK);
    assert_string_equal(path, DATA "/emoji-dit");
    assert_int_equal(file_kind(path), FILE_DIRECTORY);
    mem_free(path);
    assert_int_equal(bundled_model(DATA, "org/name", &path, NULL), PF_OK);
    assert_string_equal(path, "org/name");
    mem_free(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_bare_word_names_a_bundled_adapter),
        in_dir(a_path_that_exists_wins),
        cmocka_unit_test(a_miss_says_what_there_is),
        cmocka_unit_test(the_model_is_bundled_unless_named),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
