/*
 * Errors and logging: codes, offsets, system errors, prefixes and suffixes, truncation, foreign control bytes.
 */
#include "testing.h"

#include "base/err.h"
#include "base/log.h"

#include <errno.h>

static void every_code_has_a_name(void **state)
{
    (void)state;
    assert_string_equal(pf_error_name(PF_OK), "ok");
    assert_string_equal(pf_error_name(PF_E_INVALID), "invalid");
    assert_string_equal(pf_error_name(PF_E_FORMAT), "format");
    assert_string_equal(pf_error_name(PF_E_UNMATCHED), "unmatched");
    assert_string_equal(pf_error_name(PF_E_TRUNCATED), "truncated");
    assert_string_equal(pf_error_name(PF_E_STATE), "state");
    assert_string_equal(pf_error_name(PF_E_STATE - 1), "unknown");
    assert_string_equal(pf_error_name(1), "unknown");
    assert_string_equal(pf_error_name(INT32_MIN), "unknown");
    for (int a = 0; a >= PF_E_STATE; a--)
        for (int b = 0; b > a; b--)
            assert_string_not_equal(pf_error_name(a), pf_error_name(b));
}

static void version_agrees_with_its_parts(void **state)
{
    (void)state;
    char z[32];
    (void)snprintf(z, sizeof(z), "%d.%d.%d", PF_VERSION_MAJOR, PF_VERSION_MINOR, PF_VERSION_PATCH);
    assert_string_equal(pf_version(), z);
}

static void set_fills_every_field(void **state)
{
    (void)state;
    pf_error err = {.code = 7, .sys_errno = 7, .off = 7};
    assert_int_equal(err_set(&err, PF_E_RANGE, "size %d beyond %s", 5, "bound"), PF_E_RANGE);
    assert_err(&err, PF_E_RANGE, "size 5 beyond bound");
    assert_int_equal(err.sys_errno, 0);
    assert_int_equal(err.off, 0);
    assert_int_equal(err_at(&err, PF_E_FORMAT, 1234567890123u, "tensor '%s'", "a.b"), PF_E_FORMAT);
    assert_err(&err, PF_E_FORMAT, "tensor 'a.b'");
    assert_true(err.off == 1234567890123u);
    (void)err_set(&err, PF_E_RANGE, "x");
    assert_true(err.off == 0);
}

static void null_error_is_allowed(void **state)
{
    (void)state;
    assert_int_equal(err_set(NULL, PF_E_RANGE, "x"), PF_E_RANGE);
    assert_int_equal(err_at(NULL, PF_E_FORMAT, 1, "x"), PF_E_FORMAT);
    assert_int_equal(err_sys(NULL, ENOSPC, "x"), PF_E_NOSPACE);
    assert_int_equal(err_nomem(NULL, 1, "x"), PF_E_NOMEM);
    assert_int_equal(err_prefix(NULL, PF_E_BUSY, "x"), PF_E_BUSY);
    err_append(NULL, "x");
}

static void system_errors_are_translated(void **state)
{
    (void)state;
    static const struct {
        int sys_errno, code;
        const char *text;
    } rows[] = {
        {ENOSPC, PF_E_NOSPACE, "cannot write 'f': No space left on device"},
        {EDQUOT, PF_E_NOSPACE, "cannot write 'f': Disk quota exceeded"},
        {ENOMEM, PF_E_NOMEM, "cannot write 'f': Cannot allocate memory"},
        {ENOENT, PF_E_NOTFOUND, "cannot write 'f': No such file or directory"},
        {ENOTDIR, PF_E_NOTFOUND, "cannot write 'f': Not a directory"},
        {EIO, PF_E_IO, "cannot write 'f': Input/output error"},
        {EACCES, PF_E_IO, "cannot write 'f': Permission denied"},
        {99999, PF_E_IO, "cannot write 'f': system error 99999"},
    };
    for (size_t i = 0; i < PF_COUNTOF(rows); i++) {
        pf_error err;
        assert_int_equal(err_sys(&err, rows[i].sys_errno, "cannot write '%s'", "f"), rows[i].code);
        assert_int_equal(err.code, rows[i].code);
        assert_int_equal(err.sys_errno, rows[i].sys_errno);
        assert_string_equal(err.msg, rows[i].text);
    }
}

static void nomem_says_how_much_and_what_for(void **state)
{
    (void)state;
    pf_error err;
    assert_int_equal(err_nomem(&err, 123, "panel scratch"), PF_E_NOMEM);
    assert_string_equal(err.msg, "out of memory for 123 bytes of panel scratch");
}

static void prefix_keeps_code_offset_and_errno(void **state)
{
    (void)state;
    pf_error err;
    (void)err_at(&err, PF_E_FORMAT, 96, "header is short");
    assert_int_equal(err_prefix(&err, PF_E_FORMAT, "file '%s'", "m"), PF_E_FORMAT);
    assert_string_equal(err.msg, "file 'm': header is short");
    assert_int_equal(err.off, 96);
    (void)err_sys(&err, EIO, "read");
    assert_int_equal(err_prefix(&err, PF_E_IO, "shard %d: ", 2), PF_E_IO);
    assert_string_equal(err.msg, "shard 2: read: Input/output error");
    assert_int_equal(err.sys_errno, EIO);
    err = (pf_error){0}; /* a lower module that did not fill it */
    assert_int_equal(err_prefix(&err, PF_E_BUSY, "lock"), PF_E_BUSY);
    assert_int_equal(err.code, PF_E_BUSY);
}

static void append_adds_behind(void **state)
{
    (void)state;
    pf_error err;
    (void)err_set(&err, PF_E_NOTFOUND, "no class 'kat'");
    err_append(&err, "; did you mean '%s'?", "cat");
    assert_string_equal(err.msg, "no class 'kat'; did you mean 'cat'?");
    assert_int_equal(err.code, PF_E_NOTFOUND);
}

static void arguments_may_lie_in_the_error_itself(void **state)
{
    (void)state;
    pf_error err;
    (void)err_set(&err, PF_E_IO, "inner");
    (void)err_set(&err, PF_E_FORMAT, "outer (%s)", err.msg);
    assert_err(&err, PF_E_FORMAT, "outer (inner)");
    err_append(&err, " and %s", err.msg);
    assert_string_equal(err.msg, "outer (inner) and outer (inner)");
    (void)err_prefix(&err, PF_E_FORMAT, "<%s>", err.msg);
    assert_string_equal(err.msg,
                        "<outer (inner) and outer (inner)>: outer (inner) and outer (inner)");
}

/* A message one byte too long ends with a character of n_char bytes that must go as a whole. */
static void long_messages_are_cut_between_characters(void **state)
{
    (void)state;
    static const char *const chars[] = {"x", "\xc3\xa4", "\xe2\x82\xac", "\xf0\x9f\x98\x80"};
    pf_error err;
    char text[sizeof(err.msg) + 16];
    const size_t n_max = sizeof(err.msg) - 1;
    for (size_t i = 0; i < PF_COUNTOF(chars); i++) {
        size_t n_char = strlen(chars[i]);
        for (size_t n_fit = 0; n_fit <= n_char; n_fit++) { /* bytes of the character that fit */
            size_t n_front = n_max - n_fit;
            memset(text, 'a', n_front);
            memcpy(text + n_front, chars[i], n_char);
            memcpy(text + n_front + n_char, "zz", 3);
            size_t n_set = n_fit == n_char ? n_max : n_front;
            (void)err_set(&err, PF_E_IO, "%s", text);
            assert_memory_equal(err.msg, text, n_set);
            assert_int_equal(strlen(err.msg), n_set);
            /* The same border reached by appending. */
            (void)err_set(&err, PF_E_IO, "a");
            err_append(&err, "%s", text + 1);
            assert_int_equal(strlen(err.msg), n_set);
            assert_memory_equal(err.msg, text, n_set);
            err_append(&err, "more");
            assert_true(strlen(err.msg) <= n_max);
        }
    }
}

static void prefix_of_a_full_message_is_cut(void **state)
{
    (void)state;
    pf_error err;
    char text[sizeof(err.msg)];
    memset(text, 'b', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    (void)err_set(&err, PF_E_IO, "%s", text);
    (void)err_prefix(&err, PF_E_IO, "front");
    assert_int_equal(strlen(err.msg), sizeof(err.msg) - 1);
    assert_memory_equal(err.msg, "front: bbb", 10);
}

static void control_bytes_of_names_are_replaced(void **state)
{
    (void)state;
    pf_error err;
    (void)err_set(&err, PF_E_FORMAT, "tensor '%s'", "a\x1b[2J\nb\x7f\xc3\xa4");
    assert_string_equal(err.msg, "tensor 'a?[2J?b?\xc3\xa4'");
    err_append(&err, "%s", "\r\t");
    assert_string_equal(err.msg, "tensor 'a?[2J?b?\xc3\xa4'??");
    (void)err_prefix(&err, PF_E_FORMAT, "%s", "\x01");
    assert_memory_equal(err.msg, "?: tensor", 9);
}

struct seen {
    int n, level;
    char line[8192];
};

static void see(void *ctx, int level, const char *line)
{
    struct seen *s = ctx;
    s->n++;
    s->level = level;
    (void)snprintf(s->line, sizeof(s->line), "%s", line);
}

static void log_goes_to_the_sink_up_to_its_level(void **state)
{
    (void)state;
    struct seen s = {0};
    log_at(PF_LOG_ERROR, "nobody listens");
    pf_log_set(see, &s, PF_LOG_INFO);
    log_at(PF_LOG_DEBUG, "too fine");
    assert_int_equal(s.n, 0);
    log_at(PF_LOG_INFO, "opened '%s' in %d ms\n", "m\x1b", 3);
    assert_int_equal(s.n, 1);
    assert_int_equal(s.level, PF_LOG_INFO);
    assert_string_equal(s.line, "opened 'm?' in 3 ms");
    char text[6000];
    memset(text, 'c', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    log_at(PF_LOG_ERROR, "%s", text);
    assert_int_equal(s.level, PF_LOG_ERROR);
    assert_int_equal(strlen(s.line), 4095);
    pf_log_set(NULL, NULL, 0);
    log_at(PF_LOG_ERROR, "silence again");
    assert_int_equal(s.n, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_code_has_a_name),
        cmocka_unit_test(version_agrees_with_its_parts),
        cmocka_unit_test(set_fills_every_field),
        cmocka_unit_test(null_error_is_allowed),
        cmocka_unit_test(system_errors_are_translated),
        cmocka_unit_test(nomem_says_how_much_and_what_for),
        cmocka_unit_test(prefix_keeps_code_offset_and_errno),
        cmocka_unit_test(append_adds_behind),
        cmocka_unit_test(arguments_may_lie_in_the_error_itself),
        cmocka_unit_test(long_messages_are_cut_between_characters),
        cmocka_unit_test(prefix_of_a_full_message_is_cut),
        cmocka_unit_test(control_bytes_of_names_are_replaced),
        cmocka_unit_test(log_goes_to_the_sink_up_to_its_level),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
