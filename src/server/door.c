/*
 * One thread with an epoll of its own. A connection is looked at by MSG_PEEK whenever more has come (edge-triggered, since the bytes
 * stay), and again from its first byte only when a line ended.
 */
#include "server/door.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/mem.h"

#define N_EVENTS       64
#define FULL_MS        20                /* until it is looked again whether there is room */
#define N_DISCARD_MAX  ((size_t)1 << 20) /* of what a refused client goes on to send */
#define N_DISCARD_STEP 16384

/* One that has not been let in. */
struct guest {
    struct guest *prev, *next;
    int fd;
    struct conn *conn;
    size_t n_seen;
    /* Answered: the rest is read and dropped, for a close would overtake the answer */
    bool is_refused;
    size_t n_dropped;
};

struct door {
    struct door_opts opts;
    int fd_epoll, fd_end;
    pthread_t thread;
    bool has_thread;
    /* The thread's own: */
    struct guest *guests;
    char *buffer;
    size_t n_buffer;
    bool is_accepting, is_ending;
};

static void forget(struct door *d, struct guest *g)
{
    *(g->prev ? &g->prev->next : &d->guests) = g->next;
    if (g->next)
        g->next->prev = g->prev;
    mem_free(g);
}

static void turn_away(struct door *d, struct guest *g)
{
    conns_remove(d->opts.conns, g->conn);
    (void)close(g->fd); /* takes it out of the epoll too */
    forget(d, g);
}

static void let_in(struct door *d, struct guest *g)
{
    int fd = g->fd;
    struct conn *conn = g->conn;

    (void)epoll_ctl(d->fd_epoll, EPOLL_CTL_DEL, fd, NULL);
    forget(d, g);
    d->opts.let_in(d->opts.ctx, fd, conn);
}

/* False: it is over. */
static bool discard(struct door *d, struct guest *g)
{
    size_t n_step = d->n_buffer < N_DISCARD_STEP ? d->n_buffer : N_DISCARD_STEP;

    while (g->n_dropped <= N_DISCARD_MAX) {
        ssize_t n = recv(g->fd, d->buffer, n_step, MSG_DONTWAIT);

        if (n < 0)
            return errno == EAGAIN || errno == EINTR;
        if (n == 0)
            return false;
        g->n_dropped += (size_t)n;
    }
    return false;
}

/* The answer fits into the empty buffer of a socket that has sent nothing yet; a client that does not take it gets none. */
static void refuse(struct door *d, struct guest *g, const struct head_refusal *why)
{
    struct strbuf text;

    strbuf_init(&text);
    d->opts.refuse(d->opts.ctx, why, &text);
    if (strbuf_ok(&text))
        (void)send(g->fd, text.p, text.n, MSG_NOSIGNAL | MSG_DONTWAIT);
    strbuf_release(&text);
    (void)shutdown(g->fd, SHUT_WR);
    g->is_refused = true;
    if (!discard(d, g))
        turn_away(d, g);
}

static void look(struct door *d, struct guest *g, bool is_ended)
{
    ssize_t n = recv(g->fd, d->buffer, d->n_buffer, MSG_PEEK | MSG_DONTWAIT);
    struct head_refusal why;
    enum head_state state = HEAD_PARTIAL;

    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
        turn_away(d, g);
        return;
    }
    if (n > 0 &&
        (!g->n_seen || (size_t)n == d->n_buffer || (size_t)n > HEAD_LINE_MAX ||
         ((size_t)n > g->n_seen && memchr(d->buffer + g->n_seen, '\n', (size_t)n - g->n_seen))))
        state = head_scan(d->buffer, (size_t)n, d->opts.n_header_max, &why);
    g->n_seen = n > 0 ? (size_t)n : g->n_seen;
    if (state == HEAD_WHOLE)
        let_in(d, g);
    else if (state == HEAD_REFUSED)
        refuse(d, g, &why);
    else if (is_ended)
        turn_away(d, g); /* nothing more will come */
}

static void welcome(struct door *d, int fd)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET};
    struct guest *g = mem_calloc(1, sizeof(*g));

    if (!g || !(g->conn = conns_add(d->opts.conns, fd))) {
        mem_free(g);
        (void)close(fd);
        return;
    }
    g->fd = fd;
    g->next = d->guests;
    if (g->next)
        g->next->prev = g;
    d->guests = g;
    event.data.ptr = g;
    if (epoll_ctl(d->fd_epoll, EPOLL_CTL_ADD, fd, &event))
        turn_away(d, g);
}

static void set_accepting(struct door *d, bool is_accepting)
{
    struct epoll_event event = {.events = is_accepting ? EPOLLIN : 0};

    if (d->is_accepting == is_accepting)
        return;
    event.data.ptr = d;
    (void)epoll_ctl(d->fd_epoll, EPOLL_CTL_MOD, d->opts.fd_listen, &event); /* it is in there */
    d->is_accepting = is_accepting;
}

/* Some at a time, so that those who are in the house are served meanwhile. */
static void accept_some(struct door *d)
{
    for (int i = 0; i < N_EVENTS; i++) {
        int fd;

        if (conns_count(d->opts.conns) >= d->opts.n_connections_max) {
            set_accepting(d, false);
            return;
        }
        fd = accept4(d->opts.fd_listen, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0)
            welcome(d, fd);
        else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
            set_accepting(d, false); /* until something was closed */
        if (fd < 0 && errno != ECONNABORTED && errno != EINTR)
            return;
    }
}

static void attend(struct door *d, const struct epoll_event *event)
{
    struct guest *g = event->data.ptr;
    bool is_ended = event->events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR);

    if (event->data.ptr == &d->fd_end)
        d->is_ending = true;
    else if (event->data.ptr == d)
        accept_some(d);
    else if (!g->is_refused)
        look(d, g, is_ended);
    else if (!discard(d, g))
        turn_away(d, g);
}

static void *run(void *arg)
{
    struct door *d = arg;
    struct epoll_event events[N_EVENTS];

    while (!d->is_ending) {
        int n = epoll_wait(d->fd_epoll, events, N_EVENTS, d->is_accepting ? -1 : FULL_MS);

        for (int i = 0; i < n; i++)
            attend(d, &events[i]);
        set_accepting(d, true);
    }
    while (d->guests)
        turn_away(d, d->guests);
    return NULL;
}

static int watch(struct door *d, int fd, void *what, pf_error *err)
{
    struct epoll_event event = {.events = EPOLLIN};

    event.data.ptr = what;
    return epoll_ctl(d->fd_epoll, EPOLL_CTL_ADD, fd, &event)
               ? err_sys(err, errno, "epoll of the door")
               : PF_OK;
}

static int open_door(struct door *d, pf_error *err)
{
    int rc;

    d->n_buffer = head_scan_max(d->opts.n_header_max);
    d->buffer = mem_alloc(d->n_buffer);
    if (!d->buffer)
        return err_nomem(err, d->n_buffer, "heads of requests");
    d->fd_epoll = epoll_create1(EPOLL_CLOEXEC);
    d->fd_end = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (d->fd_epoll < 0 || d->fd_end < 0)
        return err_sys(err, errno, "epoll of the door");
    d->is_accepting = true;
    rc = watch(d, d->opts.fd_listen, d, err);
    if (!rc)
        rc = watch(d, d->fd_end, &d->fd_end, err);
    if (rc)
        return rc;
    rc = pthread_create(&d->thread, NULL, run, d);
    if (rc)
        return err_sys(err, rc, "cannot start the thread of the door");
    d->has_thread = true;
    return PF_OK;
}

int door_new(const struct door_opts *opts, struct door **out_door, pf_error *err)
{
    struct door *d = mem_calloc(1, sizeof(*d));
    int rc;

    if (!d)
        return err_nomem(err, sizeof(*d), "the door");
    d->opts = *opts;
    d->fd_epoll = d->fd_end = -1;
    rc = open_door(d, err);
    if (rc) {
        d->opts.fd_listen = -1; /* still the caller's */
        door_free(d);
        return rc;
    }
    *out_door = d;
    return PF_OK;
}

void door_free(struct door *d)
{
    const uint64_t one = 1;

    if (!d)
        return;
    if (d->has_thread) {
        while (write(d->fd_end, &one, sizeof(one)) < 0 && errno == EINTR)
            ;
        (void)pthread_join(d->thread, NULL);
    }
    if (d->opts.fd_listen >= 0)
        (void)close(d->opts.fd_listen);
    if (d->fd_epoll >= 0)
        (void)close(d->fd_epoll);
    if (d->fd_end >= 0)
        (void)close(d->fd_end);
    mem_free(d->buffer);
    mem_free(d);
}
