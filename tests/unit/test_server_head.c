/*
 * Heads of requests as bytes: what is whole, what may become so, what is refused; whatever the pieces that it comes in.
 */
#include "testing.h"

#include "server/head.h"

#define N_BYTES_MAX 1000
#define HOST        "Host: a\r\n"

static enum head_state scan(const char *text, size_t n, struct head_refusal *why)
{
    char *exact = malloc(n ? n : 1); /* so that a sanitizer sees what is read beyond */
    enum head_state state;

    assert_non_null(exact);
    memcpy(exact, text, n);
    *why = (struct head_refusal){0};
    state = head_scan(exact, n, N_BYTES_MAX, why);
    free(exact);
    return state;
}

static void takes_plain_heads_whole_and_waits_for_their_rest(void **state)
{
    static const char *const plain[] = {
        "GET / HTTP/1.1\r\n" HOST "\r\n",
        "\r\n\nGET /a?b&c#d HTTP/1.1\r\n" HOST "X: \t y \r\nEmpty:\r\n\r\n",
        "GET / HTTP/1.0\n\n",
        "DELETE /v1/jobs/x HTTP/1.1\n" HOST "\n",
        "POST / HTTP/1.1\r\n" HOST "Content-Length: 0\r\nCookie: a=\"b\"; c\r\n\r\n",
        "POST / HTTP/1.9\r\n" HOST "transfer-encoding: CHUNKED\r\n\r\n",
        "GET /\xc3\xa4 HTTP/1.1\r\n" HOST "X: \xff\r\n\r\n",
    };
    struct head_refusal why;

    (void)state;
    for (size_t i = 0; i < PF_COUNTOF(plain); i++) {
        size_t n = strlen(plain[i]);

        for (size_t k = 0; k < n; k++)
            assert_int_equal(scan(plain[i], k, &why), HEAD_PARTIAL);
        if (scan(plain[i], n, &why) != HEAD_WHOLE)
            fail_msg("'%s': %s", plain[i], why.text);
    }
}

static void refuses_what_could_be_read_in_two_ways(void **state)
{
    static const struct {
        const char *text, *why;
    } rows[] = {
        {"GET /\r\n\r\n", "first line"},
        {"GET  / HTTP/1.1\r\n", "first line"},
        {"GET / HTTP/1.1 \r\n", "version"},
        {"GET / HTTP/2.0\r\n", "version"},
        {"GET / HTTP/1.11\r\n", "version"},
        {"GET / HTTP/1.x\r\n", "version"},
        {"GET / http/1.1\r\n", "first line"},
        {"G(T / HTTP/1.1\r\n", "first line"},
        {"\x16\x03", "first line"},
        {" ", "first line"},
        {"GET a HTTP/1.1\r\n", "no path"},
        {"GET / HTTP/1.1\r\n\r\n", "no Host"},
        {"GET / HTTP/1.1\r\n" HOST HOST "\r\n", "twice"},
        {"GET / HTTP/1.1\r\n" HOST " X: y\r\n\r\n", "folded"},
        {"GET / HTTP/1.1\r\n" HOST "X\r\n\r\n", "colon"},
        {"GET / HTTP/1.1\r\n" HOST "X : y\r\n\r\n", "name"},
        {"GET / HTTP/1.1\r\n" HOST ": y\r\n\r\n", "name"},
        {"GET / HTTP/1.1\r\n" HOST "X: a\rb\r\n\r\n", "control"},
        {"GET / HTTP/1.1\r\n" HOST "Content-Length: 1,1\r\n\r\n", "no number"},
        {"GET / HTTP/1.1\r\n" HOST "Content-Length:\r\n\r\n", "no number"},
        {"GET / HTTP/1.1\r\n" HOST "Transfer-Encoding: gzip\r\n\r\n", "'chunked'"},
        {"GET / HTTP/1.0\r\n" HOST "Transfer-Encoding: chunked\r\n\r\n", "HTTP/1.0"},
    };
    struct head_refusal why;

    (void)state;
    for (size_t i = 0; i < PF_COUNTOF(rows); i++) {
        if (scan(rows[i].text, strlen(rows[i].text), &why) != HEAD_REFUSED)
            fail_msg("'%s' was not refused", rows[i].text);
        assert_int_equal(why.status, 400);
        assert_string_equal(why.code, "bad_request");
        if (!strstr(why.text, rows[i].why))
            fail_msg("'%s': %s", rows[i].text, why.text);
    }
    assert_int_equal(scan("GET / HTTP/1.1\r\nHost: a\0b\r\n\r\n", 29, &why), HEAD_REFUSED);
    assert_non_null(strstr(why.text, "control"));
    assert_int_equal(scan("GET /\0 HTTP/1.1\r\n", 18, &why), HEAD_REFUSED);
}

static void judges_chunks_as_far_as_they_have_come(void **state)
{
    static const char head[] = "POST / HTTP/1.1\r\n" HOST "Transfer-Encoding: chunked\r\n\r\n";
    static const char *const plain[] = {"2\r\n{}\r\n0\r\n\r\n",
                                        "2;a=b\r\n{}\r\n00\r\nX: y\r\nHost: b\r\n\r\nGET /",
                                        "1\n{\n1 \n}\n0\n\n",
                                        "0000000A\r\n0123456789\r\n",
                                        "ffffffff\r\nand so on, not whole",
                                        "0;\r\n\r\n\x01 the next one"};
    static const struct {
        const char *text;
        int status;
    } bad[] = {{"zz\r\n", 400},
               {"z", 0},
               {"zz", 400},
               {"\r\n", 400},
               {"2\r\n{}X", 400},
               {"2\r\n{}\rX", 400},
               {"-1\r\n", 400},
               {"2x\r\n", 400},
               {"123456789\r\n", 413},
               {"ffffffffffffffffff\r\n", 413},
               {"0\r\nX y\r\n\r\n", 400},
               {"0\r\nX: y\r\n z\r\n\r\n", 400}};
    struct head_refusal why;
    char text[400];

    (void)state;
    for (size_t i = 0; i < PF_COUNTOF(plain); i++) {
        (void)snprintf(text, sizeof(text), "%s%s", head, plain[i]);
        for (size_t n = strlen(head); n <= strlen(text); n++)
            if (scan(text, n, &why) != HEAD_WHOLE)
                fail_msg("'%.*s': %s", (int)n, text, why.text);
    }
    for (size_t i = 0; i < PF_COUNTOF(bad); i++) {
        (void)snprintf(text, sizeof(text), "%s%s", head, bad[i].text);
        if (scan(text, strlen(text), &why) != (bad[i].status ? HEAD_REFUSED : HEAD_WHOLE))
            fail_msg("'%s': %s", bad[i].text, why.text);
        assert_int_equal(why.status, bad[i].status);
    }
    (void)snprintf(text, sizeof(text), "%s2;%0300d", head, 1);
    assert_int_equal(scan(text, strlen(text), &why), HEAD_REFUSED);
}

/* Of `n` bytes c behind `start` and before `end`. */
static enum head_state scan_long(const char *start, char c, size_t n, const char *end,
                                 struct head_refusal *why)
{
    struct strbuf text;
    enum head_state state;

    strbuf_init(&text);
    strbuf_adds(&text, start);
    for (size_t i = 0; i < n; i++)
        strbuf_add(&text, &c, 1);
    strbuf_adds(&text, end);
    state = scan(text.p, text.n, why);
    strbuf_release(&text);
    return state;
}

static void bounds_what_it_waits_for(void **state)
{
    static const char *const start = "GET / HTTP/1.1\r\n" HOST "X: ";
    struct head_refusal why;

    (void)state;
    assert_int_equal(scan_long("G", 'E', HEAD_LINE_MAX - 1, "", &why), HEAD_PARTIAL);
    assert_int_equal(scan_long("G", 'E', HEAD_LINE_MAX, "", &why), HEAD_REFUSED);
    assert_int_equal(why.status, 414);
    assert_int_equal(scan_long("GET /", 'a', HEAD_LINE_MAX, " HTTP/1.1\r\n", &why), HEAD_REFUSED);
    assert_int_equal(why.status, 414);
    assert_int_equal(scan_long(start, 'a', 980, "\r\n\r\n", &why), HEAD_WHOLE);
    assert_int_equal(scan_long(start, 'a', 1001, "\r\n\r\n", &why), HEAD_REFUSED);
    assert_int_equal(why.status, 431);
    assert_int_equal(scan_long(start, 'a', head_scan_max(N_BYTES_MAX), "", &why), HEAD_REFUSED);
    assert_int_equal(why.status, 431);
    assert_int_equal(scan_long(start, ' ', head_scan_max(N_BYTES_MAX), "", &why), HEAD_REFUSED);
    assert_int_equal(why.status, 431);
    assert_int_equal(scan_long("", '\n', 3 * HEAD_LINE_MAX, "", &why), HEAD_REFUSED);
    assert_int_equal(scan_long("GET /?", '&', 65, " HTTP/1.1\r\n", &why), HEAD_REFUSED);
    assert_int_equal(scan_long("GET / HTTP/1.1\r\n" HOST "Cookie: ", ';', 65, "\r\n\r\n", &why),
                     HEAD_REFUSED);
    assert_int_equal(scan_long("GET / HTTP/1.1\r\n" HOST "Cookie: a", '=', 1, "\"\r\n\r\n", &why),
                     HEAD_REFUSED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(takes_plain_heads_whole_and_waits_for_their_rest),
        cmocka_unit_test(refuses_what_could_be_read_in_two_ways),
        cmocka_unit_test(judges_chunks_as_far_as_they_have_come),
        cmocka_unit_test(bounds_what_it_waits_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
