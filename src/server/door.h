/*
 * The door: accepts connections and looks at the head of the first request of each while it still lies in the socket. What is whole
 * and plain goes to the HTTP library with every byte; what is not is answered here, in the server's words, and closed. Called by http.c
 * alone. Must never take a byte that the library has to read.
 */
#ifndef PF_SERVER_DOOR_H
#define PF_SERVER_DOOR_H

#include "base/err.h"
#include "server/conns.h"
#include "server/head.h"

struct door;

struct door_opts {
    int fd_listen; /* taken over */
    uint32_t n_connections_max;
    size_t n_header_max;
    struct conns *conns;
    /* On the door's thread. Takes the descriptor over, and conn with it: conns_remove when it fails. */
    void (*let_in)(void *ctx, int fd, struct conn *conn);
    /* Writes the whole answer to a head that was refused, status line included. */
    void (*refuse)(void *ctx, const struct head_refusal *why, struct strbuf *out);
    void *ctx;
};

int door_new(const struct door_opts *opts, struct door **out_door, pf_error *err);
/* Stops accepting and closes what has not been let in. */
void door_free(struct door *d);

#endif
