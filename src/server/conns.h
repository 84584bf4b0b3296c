/*
 * Open connections: absolute deadlines for headers, bodies and replies, and whether a client that waits for its answer is still
 * there. One thread of its own watches the sockets. The HTTP library only knows idle time, which a client that sends a byte now and
 * then never reaches. Called by http.c alone. Must never close a socket: it shuts it down, and the owner sees the end.
 */
#ifndef PF_SERVER_CONNS_H
#define PF_SERVER_CONNS_H

#include "base/err.h"

struct conns;
struct conn;

enum conn_phase {
    CONN_DOOR,    /* opened, nothing whole has come: the door looks into the socket (door.h) */
    CONN_HEADERS, /* the HTTP library has it, and has not read the headers */
    CONN_BODY,    /* headers have come, the body has not */
    CONN_WORKING, /* the server's turn, or on its way from the door: no deadline, never shut down */
    CONN_REPLY,   /* an answer of known length is on its way */
    CONN_STREAM,  /* an answer without end: no deadline */
    CONN_IDLE,    /* between requests */
};

struct conns_opts {
    uint32_t n_max; /* above 7/8 of it the oldest waiting connection is shut down */
    uint32_t headers_ms, body_ms, reply_ms, idle_ms;
};

/* Called on the watching thread with the table locked: it may set flags and wake threads, and must not call back into conns. */
typedef void (*conn_gone_fn)(void *ctx);

int conns_new(const struct conns_opts *opts, struct conns **out_conns, pf_error *err);
void conns_free(struct conns *c); /* after the last conns_remove */

struct conn *conns_add(struct conns *c, int fd); /* NULL: out of memory */
void conns_remove(struct conns *c, struct conn *conn);
void conns_phase(struct conns *c, struct conn *conn, enum conn_phase phase);
/* Tells once when the client hangs up while its request is worked on. fn NULL: no longer. */
void conns_watch(struct conns *c, struct conn *conn, conn_gone_fn fn, void *ctx);
uint32_t conns_count(struct conns *c);

#endif
