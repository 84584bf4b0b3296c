/*
 * Which paths may be opened: inside the adapter directories, links followed as long as they stay inside; bundled names; nothing else,
 * and nothing is said about what lies outside.
 */
#include "testing.h"

#include "base/mem.h"
#include "server/lora_book.h"

#include <sys/stat.h>
#include <unistd.h>

struct world {
    struct lora_book *book;
    const char *root;
};

static void make_world(void **state, struct world *w)
{
    static const struct server_bundled bundled[] = {{"night", "/data/night"}, {"a", "/data/a"}};
    const char *dirs[1];
    struct book_opts opts = {.dirs = dirs, .n_dirs = 1, .bundled = bundled, .n_bundled = 2};
    pf_error err;

    w->root = test_path(state, "root");
    dirs[0] = w->root;
    assert_int_equal(mkdir(w->root, 0700), 0);
    assert_int_equal(mkdir(test_path(state, "root/blobs"), 0700), 0);
    assert_int_equal(mkdir(test_path(state, "root/peft"), 0700), 0);
    assert_int_equal(mkdir(test_path(state, "root/trap"), 0700), 0);
    assert_int_equal(mkdir(test_path(state, "rootless"), 0700), 0);
    write_file(test_path(state, "root/a"), "x", 1);
    write_file(test_path(state, "root/blobs/1234"), "x", 1);
    write_file(test_path(state, "root/peft/adapter_config.json"), "x", 1);
    write_file(test_path(state, "secret"), "x", 1);
    write_file(test_path(state, "rootless/x"), "x", 1);
    assert_int_equal(symlink("blobs/1234", test_path(state, "root/inside")), 0);
    assert_int_equal(symlink("../secret", test_path(state, "root/outside")), 0);
    assert_int_equal(symlink("..", test_path(state, "root/up")), 0);
    assert_int_equal(
        symlink("../blobs/1234", test_path(state, "root/peft/adapter_model.safetensors")), 0);
    assert_int_equal(
        symlink("../../secret", test_path(state, "root/trap/adapter_model.safetensors")), 0);
    assert_ok(book_new(&opts, &w->book, &err), &err);
}

static void follows_links_that_stay_inside(void **state)
{
    static const char *const good[] = {"a", "inside", "peft", "./a", "blobs/1234", "blobs/../a"};
    struct world w;
    char text[1400];

    make_world(state, &w);
    for (size_t i = 0; i < 2 * PF_COUNTOF(good); i++) {
        const char *name = good[i / 2];
        char *path = NULL;
        int status;
        pf_error err;

        (void)snprintf(text, sizeof(text), "%s%s%s", i % 2 ? w.root : "", i % 2 ? "/" : "", name);
        assert_ok(book_resolve(w.book, text, &path, &status, &err), &err);
        assert_int_equal(strncmp(path, w.root, strlen(w.root)), 0);
        assert_int_equal(access(path, R_OK), 0);
        mem_free(path);
    }
    book_free(w.book);
}

static void refuses_what_leads_out(void **state)
{
    static const char *const bad[] = {
        "outside", "up/secret",   "trap",      "../secret",     "../nowhere",   "peft/../../secret",
        "..",      "/etc/passwd", "/no/where", "up/rootless/x", "../rootless/x"};
    struct world w;
    char text[1400];
    pf_error err;
    int status;
    char *path = NULL;

    make_world(state, &w);
    for (size_t i = 0; i < PF_COUNTOF(bad); i++) {
        if (!book_resolve(w.book, bad[i], &path, &status, &err))
            fail_msg("'%s' was accepted as '%s'", bad[i], path);
        assert_err(&err, PF_E_INVALID, "outside");
        assert_int_equal(status, 403);
    }
    /* A directory whose name begins alike */
    (void)snprintf(text, sizeof(text), "%sless/x", w.root);
    assert_int_not_equal(book_resolve(w.book, text, &path, &status, &err), PF_OK);
    assert_int_equal(status, 403);
    book_free(w.book);
}

static void says_what_is_missing_inside_and_knows_bundled_names(void **state)
{
    struct world w;
    char text[1400], *path = NULL;
    pf_error err;
    int status;

    make_world(state, &w);
    assert_int_not_equal(book_resolve(w.book, "nowhere", &path, &status, &err), PF_OK);
    assert_err(&err, PF_E_NOTFOUND, "'nowhere'", "no such file");
    assert_int_equal(status, 404);
    (void)snprintf(text, sizeof(text), "%s/nowhere", w.root);
    assert_int_not_equal(book_resolve(w.book, text, &path, &status, &err), PF_OK);
    assert_int_equal(status, 404);
    assert_int_not_equal(book_resolve(w.book, "", &path, &status, &err), PF_OK);
    assert_int_equal(status, 422);
    assert_ok(book_resolve(w.book, "night", &path, &status, &err), &err);
    assert_string_equal(path, "/data/night");
    mem_free(path);
    assert_ok(book_resolve(w.book, "a", &path, &status, &err), &err); /* a file wins */
    assert_int_equal(strncmp(path, w.root, strlen(w.root)), 0);
    mem_free(path);
    book_free(w.book);
}

static void without_directories_only_bundled_names_are_left(void **state)
{
    static const struct server_bundled bundled[] = {{"night", "/data/night"}};
    struct book_opts opts = {.bundled = bundled, .n_bundled = 1};
    struct lora_book *b = NULL;
    char *path = NULL;
    pf_error err;
    int status;

    write_file(test_path(state, "x"), "x", 1);
    assert_ok(book_new(&opts, &b, &err), &err);
    assert_int_not_equal(book_resolve(b, test_path(state, "x"), &path, &status, &err), PF_OK);
    assert_int_equal(status, 403);
    assert_int_not_equal(book_resolve(b, "x", &path, &status, &err), PF_OK);
    assert_err(&err, PF_E_NOTFOUND, "no adapter directory");
    assert_ok(book_resolve(b, "night", &path, &status, &err), &err);
    mem_free(path);
    book_free(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(follows_links_that_stay_inside),
        in_dir(refuses_what_leads_out),
        in_dir(says_what_is_missing_inside_and_knows_bundled_names),
        in_dir(without_directories_only_bundled_names_are_left),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
