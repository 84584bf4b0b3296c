/*
 * What reaches a terminal: cleaned text, sizes in words, tables.
 */
#include "testing.h"

#include <string.h>

#include "cli/out.h"

static void text_is_cleaned_of_controls_and_broken_utf8(void **state)
{
    static const struct {
        const char *text, *want;
    } rows[] = {
        {"plain", "plain"},
        {"", ""},
        {"a\033[31mb", "a?[31mb"},
        {"a\nb\tc\177", "a?b?c?"},
        {"gr\303\274n \360\237\230\200", "gr\303\274n \360\237\230\200"},
        {"a\377b\300\257c", "a?b??c"},
        {"\302\233x", "?x"}, /* U+009B: a one-character CSI */
        {"\303", "?"},
    };

    (void)state;
    for (size_t i = 0; i < PF_COUNTOF(rows); i++) {
        struct strbuf b;

        strbuf_init(&b);
        out_clean(&b, str_of(rows[i].text));
        assert_string_equal(strbuf_z(&b), rows[i].want);
        strbuf_release(&b);
    }
}

static void sizes_are_said_in_powers_of_1000_and_memory_in_1024(void **state)
{
    static const struct {
        double n_bytes;
        const char *want;
    } rows[] = {
        {0, "0 B"},
        {999, "999 B"},
        {1000, "1.0 kB"},
        {999949, "999.9 kB"},
        {999951, "1.0 MB"},
        {5.8e6, "5.8 MB"},
        {61.7e9, "61.7 GB"},
        {2e12, "2.0 TB"},
        {3.4e15, "3400.0 TB"},
        {1.8e19, "18000000.0 TB"},
    };
    char text[16];

    (void)state;
    for (size_t i = 0; i < PF_COUNTOF(rows); i++)
        assert_string_equal(out_bytes(rows[i].n_bytes, text), rows[i].want);
    assert_string_equal(out_mib(64u << 20, text), "64.0 MiB");
}

static void a_failed_call_has_its_status(void **state)
{
    struct out o = {.is_quiet = true};
    pf_error err = {.code = PF_E_NOTFOUND, .msg = "no file 'x'"};

    (void)state;
    assert_int_equal(out_fail(&o, &err), 1);
    assert_int_equal(out_usage(&o, "option '%s' is wrong", "--x"), 2);
    assert_int_equal(out_interrupted(&o, "interrupted"), 130);
    err.code = PF_E_CANCELLED; /* without a signal: a failure like others */
    assert_int_equal(out_fail(&o, &err), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_is_cleaned_of_controls_and_broken_utf8),
        cmocka_unit_test(sizes_are_said_in_powers_of_1000_and_memory_in_1024),
        cmocka_unit_test(a_failed_call_has_its_status),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
