/*
 * The listening socket: loopback or another address, or a UNIX socket. Made before privileges are dropped and handed to http.c.
 */
#ifndef PF_SERVER_LISTEN_H
#define PF_SERVER_LISTEN_H

#include "base/err.h"

struct listener {
    int fd;
    bool is_loopback;  /* UNIX sockets too */
    char url[512];     /* "http://127.0.0.1:8000", "unix:/run/x.sock" */
    uint16_t port;     /* 0: UNIX */
    char *unix_path;   /* NULL: TCP; unlinked by listener_release while it is still ours */
    uint64_t dev, ino; /* of the socket file */
};

/* "127.0.0.1", "::1", "localhost", "0.0.0.0"; names other than localhost are not resolved. port 0: any free one. */
int listen_tcp(const char *address, uint16_t port, struct listener *out, pf_error *err);
/* A socket file that nobody answers on is replaced. PF_E_BUSY when somebody does. */
int listen_unix(const char *path, uint32_t mode, struct listener *out, pf_error *err);
/* The descriptor belongs to http.c by then, unless fd >= 0 */
void listener_release(struct listener *l);

#endif
