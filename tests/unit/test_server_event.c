/*
 * Server-sent events: their text, bounded buffers, sleep and wake, ends. The two calls into the HTTP wrapper are replaced here.
 */
#include "testing.h"

#include "server/event.h"

static int n_asleep, n_woken;

void http_sleep(struct http_request *req)
{
    (void)req;
    n_asleep++;
}

void http_wake(struct http_request *req)
{
    (void)req;
    n_woken++;
}

static struct json *data(const char *key, int64_t v)
{
    struct json *doc = json_new_object();

    json_set_int(doc, key, v);
    return doc;
}

static struct events *open_events(size_t n_buffer)
{
    const struct events_opts opts = {.n_clients_max = 2, .n_buffer_max = n_buffer};
    struct events *e = NULL;
    pf_error err;

    assert_ok(events_new(&opts, &e, &err), &err);
    n_asleep = n_woken = 0;
    return e;
}

static struct http_stream listen_to(struct events *e)
{
    struct http_stream stream;
    pf_error err;

    assert_ok(events_listen(e, NULL, data("v", 0), &stream, &err), &err);
    return stream;
}

/* Everything that is there now. */
static const char *read_all(struct http_stream *s)
{
    static char text[65536];
    size_t n = 0;
    int64_t got;

    while ((got = s->read(s->ctx, NULL, text + n, 7)) > 0)
        n += (size_t)got;
    text[n] = '\0';
    return text;
}

static void events_come_in_their_format_and_order(void **state)
{
    struct events *e = open_events(4096);
    struct http_stream s = listen_to(e);
    (void)state;

    events_publish(e, "view", data("n", 1));
    events_publish(e, "step", data("n", 2));
    assert_string_equal(read_all(&s), "id: 1\nevent: hello\ndata: {\"v\": 0}\n\n"
                                      "id: 2\nevent: view\ndata: {\"n\": 1}\n\n"
                                      "id: 3\nevent: step\ndata: {\"n\": 2}\n\n");
    assert_int_equal(n_asleep, 1);
    events_publish(e, "view", data("n", 3));
    events_publish(e, "view", data("n", 4));
    assert_int_equal(n_woken, 1); /* once: it was asleep once */
    assert_string_equal(read_all(&s), "id: 4\nevent: view\ndata: {\"n\": 3}\n\n"
                                      "id: 5\nevent: view\ndata: {\"n\": 4}\n\n");
    events_heartbeat(e);
    assert_string_equal(read_all(&s), ": still here\n\n");
    s.free(s.ctx);
    events_free(e);
}

static void a_slow_client_loses_events_and_is_told(void **state)
{
    struct events *e = open_events(200);
    struct http_stream slow = listen_to(e);
    struct events_status st;
    const char *text;
    char tail[80];
    (void)state;

    (void)read_all(&slow);
    for (int i = 0; i < 100; i++)
        events_publish(e, "step", data("n", i));
    events_status(e, &st);
    assert_int_equal(st.n_published, 100);
    assert_true(st.n_lost > 90 && st.n_lost < 100);
    text = read_all(&slow);
    assert_true(strlen(text) < 300);
    assert_non_null(strstr(text, "{\"n\": 0}"));
    assert_null(strstr(text, "{\"n\": 99}"));
    snprintf(tail, sizeof(tail), "event: lost\ndata: {\"events\": %llu}\n\n",
             (unsigned long long)st.n_lost);
    assert_non_null(strstr(text, tail));
    events_publish(e, "step", data("n", 100));
    assert_non_null(strstr(read_all(&slow), "{\"n\": 100}"));
    slow.free(slow.ctx);
    events_free(e);
}

/* A reader that is never quite done must not make the buffer grow. */
static void a_buffer_that_is_never_empty_stays_bounded(void **state)
{
    struct events *e = open_events(200);
    struct http_stream s = listen_to(e);
    struct events_status st;
    char some[40];
    (void)state;

    for (int i = 0; i < 1000; i++) {
        events_publish(e, "step", data("n", i));
        assert_true(s.read(s.ctx, NULL, some, sizeof(some)) > 0);
    }
    events_status(e, &st);
    assert_true(st.n_lost < 10);
    s.free(s.ctx);
    events_free(e);
}

static void listeners_are_bounded_and_end(void **state)
{
    struct events *e = open_events(4096);
    struct http_stream a = listen_to(e), b = listen_to(e), c;
    struct events_status st;
    char some[8];
    pf_error err;
    (void)state;

    assert_int_equal(events_listen(e, NULL, data("v", 0), &c, &err), PF_E_BUSY);
    assert_err(&err, PF_E_BUSY, "2 clients");
    (void)read_all(&a);
    (void)read_all(&b);
    a.gone(a.ctx);
    assert_int_equal(n_woken, 1);
    assert_int_equal(a.read(a.ctx, NULL, some, sizeof(some)), -1);
    a.free(a.ctx);
    events_status(e, &st);
    assert_int_equal(st.n_clients, 1);
    events_close(e);
    assert_int_equal(b.read(b.ctx, NULL, some, sizeof(some)), -1);
    assert_int_equal(events_listen(e, NULL, data("v", 0), &c, &err), PF_E_BUSY);
    b.free(b.ctx);
    events_publish(e, "view", data("n", 1)); /* nobody listens: no harm */
    events_free(e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(events_come_in_their_format_and_order),
        cmocka_unit_test(a_slow_client_loses_events_and_is_told),
        cmocka_unit_test(a_buffer_that_is_never_empty_stays_bounded),
        cmocka_unit_test(listeners_are_bounded_and_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
