/*
 * One mutex over all clients. A client's text lies in a buffer until the polling thread takes it; when there is nothing, the stream
 * sleeps, and the sleep is entered under the mutex, so that no wake-up is missed.
 */
#include "server/event.h"

#include <pthread.h>
#include <string.h>

#include "base/mem.h"

struct client {
    struct client *next;
    struct events *events;
    struct http_request *req;
    struct strbuf text;
    size_t off; /* already taken */
    uint64_t n_lost;
    bool is_asleep, is_ending;
};

struct events {
    struct events_opts opts;
    pthread_mutex_t mu; /* guards what follows, and the clients */
    struct client *clients;
    uint64_t n_ids;
    struct events_status status;
    bool is_closed;
};

int events_new(const struct events_opts *opts, struct events **out_events, pf_error *err)
{
    struct events *e = mem_calloc(1, sizeof(*e));

    if (!e)
        return err_nomem(err, sizeof(*e), "events");
    e->opts = *opts;
    (void)pthread_mutex_init(&e->mu, NULL); /* cannot fail with default attributes */
    *out_events = e;
    return PF_OK;
}

void events_free(struct events *e)
{
    if (!e)
        return;
    (void)pthread_mutex_destroy(&e->mu);
    mem_free(e);
}

static void wake(struct client *c)
{
    if (c->is_asleep) {
        c->is_asleep = false;
        http_wake(c->req);
    }
}

static void append(struct client *c, const char *text, size_t n)
{
    struct events *e = c->events;

    if (c->text.n - c->off + n > e->opts.n_buffer_max || !strbuf_ok(&c->text)) {
        c->n_lost++;
        e->status.n_lost++;
        return;
    }
    if (c->off) { /* what was taken makes room; the rest moves to the front */
        memmove(c->text.p, c->text.p + c->off, c->text.n - c->off);
        c->text.n -= c->off;
        c->off = 0;
    }
    strbuf_add(&c->text, text, n);
    wake(c);
}

/* "id: 7\nevent: view\ndata: {...}\n\n"; JSON in one line has no line breaks. */
static int format_event(uint64_t i_event, const char *name, struct json *data, struct strbuf *out)
{
    strbuf_addf(out, "id: %llu\nevent: %s\ndata: ", (unsigned long long)i_event, name);
    int rc = json_write(data, 0, out, NULL);
    strbuf_adds(out, "\n\n");
    json_free(data);
    return rc ? rc : strbuf_ok(out) ? PF_OK : PF_E_NOMEM;
}

void events_publish(struct events *e, const char *name, struct json *data)
{
    struct strbuf text;

    strbuf_init(&text);
    (void)pthread_mutex_lock(&e->mu);
    e->status.n_published++;
    if (!e->clients)
        json_free(data);
    else if (!format_event(++e->n_ids, name, data, &text))
        for (struct client *c = e->clients; c; c = c->next)
            append(c, text.p, text.n);
    (void)pthread_mutex_unlock(&e->mu);
    strbuf_release(&text);
}

void events_heartbeat(struct events *e)
{
    (void)pthread_mutex_lock(&e->mu);
    for (struct client *c = e->clients; c; c = c->next)
        append(c, ": still here\n\n", strlen(": still here\n\n"));
    (void)pthread_mutex_unlock(&e->mu);
}

static int64_t read_client(void *ctx, struct http_request *req, char *out, size_t n_max)
{
    struct client *c = ctx;
    struct events *e = c->events;
    size_t n;

    (void)pthread_mutex_lock(&e->mu);
    n = c->text.n - c->off;
    n = n < n_max ? n : n_max;
    if (n) {
        memcpy(out, c->text.p + c->off, n);
        c->off += n;
    }
    if (c->off == c->text.n && c->n_lost) {
        strbuf_clear(&c->text);
        c->off = 0;
        strbuf_addf(&c->text, "event: lost\ndata: {\"events\": %llu}\n\n",
                    (unsigned long long)c->n_lost);
        c->n_lost = 0;
    }
    if (!n && !c->is_ending && c->off == c->text.n) {
        c->is_asleep = true;
        http_sleep(req);
    }
    const bool is_end = !n && c->is_ending;
    (void)pthread_mutex_unlock(&e->mu);
    return is_end ? -1 : (int64_t)n;
}

static void leave(void *ctx)
{
    struct client *c = ctx;

    (void)pthread_mutex_lock(&c->events->mu);
    c->is_ending = true;
    wake(c);
    (void)pthread_mutex_unlock(&c->events->mu);
}

static void free_client(void *ctx)
{
    struct client *c = ctx;
    struct events *e = c->events;

    (void)pthread_mutex_lock(&e->mu);
    for (struct client **at = &e->clients; *at; at = &(*at)->next)
        if (*at == c) {
            *at = c->next;
            e->status.n_clients--;
            break;
        }
    (void)pthread_mutex_unlock(&e->mu);
    strbuf_release(&c->text);
    mem_free(c);
}

int events_listen(struct events *e, struct http_request *req, struct json *hello,
                  struct http_stream *out_stream, pf_error *err)
{
    struct client *c = mem_calloc(1, sizeof(*c));
    int rc = PF_OK;

    if (!c) {
        json_free(hello);
        return err_nomem(err, sizeof(*c), "a listener");
    }
    c->events = e;
    c->req = req;
    strbuf_init(&c->text);
    (void)pthread_mutex_lock(&e->mu);
    if (e->is_closed || e->status.n_clients >= e->opts.n_clients_max) {
        json_free(hello);
        rc = err_set(err, PF_E_BUSY, "%u clients listen to events already", e->status.n_clients);
    } else if (format_event(++e->n_ids, "hello", hello, &c->text)) {
        rc = err_nomem(err, 1, "a listener");
    } else {
        c->next = e->clients;
        e->clients = c;
        e->status.n_clients++;
    }
    (void)pthread_mutex_unlock(&e->mu);
    if (rc) {
        strbuf_release(&c->text);
        mem_free(c);
        return rc;
    }
    *out_stream =
        (struct http_stream){.ctx = c, .read = read_client, .gone = leave, .free = free_client};
    return PF_OK;
}

void events_close(struct events *e)
{
    (void)pthread_mutex_lock(&e->mu);
    e->is_closed = true;
    for (struct client *c = e->clients; c; c = c->next) {
        c->is_ending = true;
        wake(c);
    }
    (void)pthread_mutex_unlock(&e->mu);
}

void events_status(struct events *e, struct events_status *out)
{
    (void)pthread_mutex_lock(&e->mu);
    *out = e->status;
    (void)pthread_mutex_unlock(&e->mu);
}
