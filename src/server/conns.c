/*
 * The table of connections is a list under one mutex; the thread waits in epoll for hang-ups of those that are watched, and looks
 * through the list for deadlines four times a second. A socket is shut down under the mutex, and its owner takes it out of the list
 * under the mutex before closing it, so no foreign descriptor is ever touched.
 */
#include "server/conns.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/proc.h"

#define SWEEP_MS 250
#define N_EVENTS 64
#define N_LOOKS  128        /* at connections, per new one */
#define YOUNG_NS 200000000u /* for the first request to arrive */

struct conn {
    struct conn *prev, *next; /* by age, oldest first */
    int fd;
    uint64_t i_conn;
    enum conn_phase phase;
    uint64_t t_born_ns, t_deadline_ns; /* deadline 0: none */
    bool is_in_epoll, is_down, is_end_seen;
    conn_gone_fn gone_fn;
    void *gone_ctx;
};

struct conns {
    struct conns_opts opts;
    int fd_epoll;
    pthread_t thread;
    bool has_thread;
    pthread_mutex_t mu; /* guards what follows */
    struct conn *first, *last;
    uint32_t n;
    uint64_t n_ever;
    bool is_ending;
};

static void put_down(struct conn *conn)
{
    if (!conn->is_down)
        (void)shutdown(conn->fd, SHUT_RDWR); /* may have ended by itself meanwhile */
    conn->is_down = true;
}

static void tell_gone(struct conns *c, uint64_t i_conn)
{
    struct conn *conn = c->first;

    while (conn && conn->i_conn != i_conn)
        conn = conn->next;
    if (conn && conn->gone_fn) {
        conn_gone_fn fn = conn->gone_fn;

        conn->gone_fn = NULL;
        fn(conn->gone_ctx);
    }
}

enum inbox { INBOX_EMPTY, INBOX_FULL, INBOX_ENDED };

/* What lies in the socket unread. */
static enum inbox look_into(const struct conn *conn)
{
    char byte;
    ssize_t n = recv(conn->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);

    if (n > 0)
        return INBOX_FULL;
    return n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) ? INBOX_EMPTY
                                                                                : INBOX_ENDED;
}

/* Nobody works for it, and nothing came that somebody could still work for. In a burst many are accepted before any is read, and a
   client needs a moment between connecting and sending. */
static bool may_go(const struct conn *conn, uint64_t now)
{
    bool is_between = conn->phase == CONN_HEADERS || conn->phase == CONN_IDLE;
    enum inbox inbox;

    if (conn->phase == CONN_DOOR) /* what has come is not whole: it would not be there */
        return !conn->is_down && now - conn->t_born_ns >= YOUNG_NS;
    if ((!is_between && conn->phase != CONN_BODY) || conn->is_down)
        return false;
    inbox = look_into(conn);
    return inbox == INBOX_ENDED ||
           (is_between && inbox == INBOX_EMPTY && now - conn->t_born_ns >= YOUNG_NS);
}

/* An end that came together with bytes is not noticed by the library, which waits for an edge. Seen twice, so that what it read
   just before has been looked at. */
static bool is_ended(struct conn *conn)
{
    bool was_seen = conn->is_end_seen;

    conn->is_end_seen =
        (conn->phase == CONN_HEADERS || conn->phase == CONN_IDLE || conn->phase == CONN_BODY) &&
        !conn->is_down && look_into(conn) == INBOX_ENDED;
    return was_seen && conn->is_end_seen;
}

static bool is_crowded(const struct conns *c)
{
    return c->n > c->opts.n_max - c->opts.n_max / 8;
}

/* At the limit nobody is let in whose coming would make room, so that half of the places are freed here. */
static void thin_out(struct conns *c, uint64_t now)
{
    uint32_t n_up = 0;

    for (const struct conn *conn = c->first; conn; conn = conn->next)
        n_up += !conn->is_down;
    for (struct conn *conn = c->first; conn && n_up > c->opts.n_max / 2; conn = conn->next)
        if (may_go(conn, now)) {
            put_down(conn);
            n_up--;
        }
}

static void sweep(struct conns *c)
{
    uint64_t now = clock_ns();

    for (struct conn *conn = c->first; conn; conn = conn->next)
        if ((conn->t_deadline_ns && now >= conn->t_deadline_ns) || is_ended(conn))
            put_down(conn);
    if (is_crowded(c))
        thin_out(c, now);
}

static void *run(void *arg)
{
    struct conns *c = arg;
    struct epoll_event events[N_EVENTS];
    uint64_t t_swept = clock_ns();

    (void)pthread_mutex_lock(&c->mu);
    while (!c->is_ending) {
        int n;

        (void)pthread_mutex_unlock(&c->mu);
        n = epoll_wait(c->fd_epoll, events, N_EVENTS, SWEEP_MS);
        (void)pthread_mutex_lock(&c->mu);
        for (int i = 0; i < n; i++)
            tell_gone(c, events[i].data.u64);
        if (clock_ns() - t_swept >= (uint64_t)SWEEP_MS * 1000000) {
            sweep(c);
            t_swept = clock_ns();
        }
    }
    (void)pthread_mutex_unlock(&c->mu);
    return NULL;
}

int conns_new(const struct conns_opts *opts, struct conns **out_conns, pf_error *err)
{
    struct conns *c = mem_calloc(1, sizeof(*c));
    int rc;

    if (!c)
        return err_nomem(err, sizeof(*c), "connections");
    c->opts = *opts;
    (void)pthread_mutex_init(&c->mu, NULL); /* cannot fail with default attributes */
    c->fd_epoll = epoll_create1(EPOLL_CLOEXEC);
    if (c->fd_epoll < 0) {
        rc = err_sys(err, errno, "epoll of connections");
        conns_free(c);
        return rc;
    }
    rc = pthread_create(&c->thread, NULL, run, c);
    if (rc) {
        rc = err_sys(err, rc, "cannot start the thread that watches connections");
        conns_free(c);
        return rc;
    }
    c->has_thread = true;
    *out_conns = c;
    return PF_OK;
}

void conns_free(struct conns *c)
{
    if (!c)
        return;
    if (c->has_thread) {
        (void)pthread_mutex_lock(&c->mu);
        c->is_ending = true;
        (void)pthread_mutex_unlock(&c->mu);
        (void)pthread_join(c->thread, NULL);
    }
    if (c->fd_epoll >= 0)
        (void)close(c->fd_epoll);
    while (c->first) { /* let in while the library was being stopped */
        struct conn *next = c->first->next;

        mem_free(c->first);
        c->first = next;
    }
    (void)pthread_mutex_destroy(&c->mu);
    mem_free(c);
}

/* Makes room when connections run short: the oldest that may goes. */
static void make_room(struct conns *c)
{
    unsigned n_left = N_LOOKS;
    uint64_t now = clock_ns();

    if (!is_crowded(c))
        return;
    for (struct conn *conn = c->first; conn && n_left; conn = conn->next, n_left--)
        if (may_go(conn, now)) {
            put_down(conn);
            return;
        }
}

static uint64_t deadline(const struct conns *c, enum conn_phase phase)
{
    uint32_t ms = 0;

    if (phase == CONN_DOOR || phase == CONN_HEADERS)
        ms = c->opts.headers_ms;
    else if (phase == CONN_BODY)
        ms = c->opts.body_ms;
    else if (phase == CONN_REPLY)
        ms = c->opts.reply_ms;
    else if (phase == CONN_IDLE)
        ms = c->opts.idle_ms;
    return ms ? clock_ns() + (uint64_t)ms * 1000000 : 0;
}

struct conn *conns_add(struct conns *c, int fd)
{
    struct conn *conn = mem_calloc(1, sizeof(*conn));

    if (!conn)
        return NULL;
    conn->fd = fd;
    (void)pthread_mutex_lock(&c->mu);
    conn->i_conn = ++c->n_ever;
    conn->t_born_ns = clock_ns();
    conn->t_deadline_ns = deadline(c, CONN_DOOR);
    conn->prev = c->last;
    *(c->last ? &c->last->next : &c->first) = conn;
    c->last = conn;
    c->n++;
    make_room(c);
    (void)pthread_mutex_unlock(&c->mu);
    return conn;
}

void conns_remove(struct conns *c, struct conn *conn)
{
    if (!conn)
        return;
    (void)pthread_mutex_lock(&c->mu);
    *(conn->prev ? &conn->prev->next : &c->first) = conn->next;
    *(conn->next ? &conn->next->prev : &c->last) = conn->prev;
    c->n--;
    if (conn->is_in_epoll)
        (void)epoll_ctl(c->fd_epoll, EPOLL_CTL_DEL, conn->fd, NULL); /* closing does it too */
    (void)pthread_mutex_unlock(&c->mu);
    mem_free(conn);
}

void conns_phase(struct conns *c, struct conn *conn, enum conn_phase phase)
{
    if (!conn)
        return;
    (void)pthread_mutex_lock(&c->mu);
    conn->phase = phase;
    conn->t_deadline_ns = deadline(c, phase);
    conn->is_end_seen = false;
    (void)pthread_mutex_unlock(&c->mu);
}

void conns_watch(struct conns *c, struct conn *conn, conn_gone_fn fn, void *ctx)
{
    struct epoll_event event = {.events = fn ? EPOLLRDHUP | EPOLLONESHOT : EPOLLONESHOT};

    if (!conn)
        return;
    (void)pthread_mutex_lock(&c->mu);
    conn->gone_fn = fn;
    conn->gone_ctx = ctx;
    event.data.u64 = conn->i_conn;
    if (!conn->is_in_epoll && fn)
        conn->is_in_epoll = !epoll_ctl(c->fd_epoll, EPOLL_CTL_ADD, conn->fd, &event);
    else if (fn)
        (void)epoll_ctl(c->fd_epoll, EPOLL_CTL_MOD, conn->fd, &event);
    (void)pthread_mutex_unlock(&c->mu);
}

uint32_t conns_count(struct conns *c)
{
    uint32_t n;

    (void)pthread_mutex_lock(&c->mu);
    n = c->n;
    (void)pthread_mutex_unlock(&c->mu);
    return n;
}
