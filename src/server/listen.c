/*
 * Sockets by hand, so that the address that was asked for is exactly the one that is bound: no name is looked up, no wildcard is
 * implied.
 */
#include "server/listen.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/mem.h"

#define BACKLOG 1024

union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    struct sockaddr_un un;
};

static int parse_address(const char *text, uint16_t port, union address *out, socklen_t *out_n,
                         bool *out_is_loopback, pf_error *err)
{
    if (!strcmp(text, "localhost"))
        text = "127.0.0.1";
    memset(out, 0, sizeof(*out));
    if (inet_pton(AF_INET, text, &out->v4.sin_addr) == 1) {
        out->v4.sin_family = AF_INET;
        out->v4.sin_port = htons(port);
        *out_n = sizeof(out->v4);
        *out_is_loopback = ntohl(out->v4.sin_addr.s_addr) >> 24 == 127;
        return PF_OK;
    }
    if (inet_pton(AF_INET6, text, &out->v6.sin6_addr) == 1) {
        out->v6.sin6_family = AF_INET6;
        out->v6.sin6_port = htons(port);
        *out_n = sizeof(out->v6);
        *out_is_loopback = IN6_IS_ADDR_LOOPBACK(&out->v6.sin6_addr);
        return PF_OK;
    }
    return err_set(err, PF_E_INVALID,
                   "address '%s' is no IP address; names other than 'localhost' are not looked up",
                   text);
}

static int open_socket(const union address *a, socklen_t n, const char *what, int *out_fd,
                       pf_error *err)
{
    int on = 1, rc, fd = socket(a->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0)
        return err_sys(err, errno, "socket for '%s'", what);
    if (a->any.sa_family != AF_UNIX)
        (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on,
                         sizeof(on)); /* a restart may be quick */
    if (a->any.sa_family == AF_INET6)
        (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
    if (bind(fd, &a->any, n) || listen(fd, BACKLOG)) {
        rc = err_sys(err, errno, "cannot listen on '%s'", what);
        (void)close(fd);
        return rc;
    }
    *out_fd = fd;
    return PF_OK;
}

int listen_tcp(const char *address, uint16_t port, struct listener *out, pf_error *err)
{
    struct listener l = {.fd = -1};
    union address a;
    socklen_t n;
    char what[80], host[INET6_ADDRSTRLEN] = "";
    int rc = parse_address(address, port, &a, &n, &l.is_loopback, err);

    if (rc)
        return rc;
    (void)snprintf(what, sizeof(what), "%.60s port %u", address, port);
    rc = open_socket(&a, n, what, &l.fd, err);
    if (rc)
        return rc;
    if (getsockname(l.fd, &a.any, &n)) {
        rc = err_sys(err, errno, "port of '%s'", what);
        (void)close(l.fd);
        return rc;
    }
    if (a.any.sa_family == AF_INET) {
        l.port = ntohs(a.v4.sin_port);
        (void)inet_ntop(AF_INET, &a.v4.sin_addr, host, sizeof(host));
        (void)snprintf(l.url, sizeof(l.url), "http://%s:%u", host, l.port);
    } else {
        l.port = ntohs(a.v6.sin6_port);
        (void)inet_ntop(AF_INET6, &a.v6.sin6_addr, host, sizeof(host));
        (void)snprintf(l.url, sizeof(l.url), "http://[%s]:%u", host, l.port);
    }
    *out = l;
    return PF_OK;
}

/* A socket file left behind by a process that is gone. PF_E_BUSY: it is not gone. */
static int clear_stale(const char *path, const union address *a, pf_error *err)
{
    struct stat st;
    int fd, rc = PF_OK;

    if (lstat(path, &st))
        return PF_OK; /* bind will say what else is wrong */
    if (!S_ISSOCK(st.st_mode))
        return err_set(err, PF_E_EXISTS, "'%s' exists and is no socket", path);
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return err_sys(err, errno, "socket for '%s'", path);
    /* EAGAIN: it listens, and is too busy to accept. */
    if (!connect(fd, &a->any, sizeof(a->un)) || errno == EAGAIN)
        rc = err_set(err, PF_E_BUSY, "another process listens on '%s'", path);
    else if (errno == ECONNREFUSED && unlink(path))
        rc = err_sys(err, errno, "cannot replace '%s'", path);
    (void)close(fd);
    return rc;
}

int listen_unix(const char *path, uint32_t mode, struct listener *out, pf_error *err)
{
    struct listener l = {.fd = -1, .is_loopback = true};
    union address a;
    struct stat st;
    mode_t mask;
    int rc;

    memset(&a, 0, sizeof(a));
    a.un.sun_family = AF_UNIX;
    if (strlen(path) >= sizeof(a.un.sun_path))
        return err_set(err, PF_E_RANGE, "socket path '%s' is longer than %zu bytes", path,
                       sizeof(a.un.sun_path) - 1);
    memcpy(a.un.sun_path, path, strlen(path) + 1);
    rc = clear_stale(path, &a, err);
    if (rc)
        return rc;
    mask = umask(0777 & ~(mode_t)mode);
    rc = open_socket(&a, sizeof(a.un), path, &l.fd, err);
    (void)umask(mask);
    if (rc)
        return rc;
    l.unix_path = mem_strdup(path);
    if (!l.unix_path || lstat(path, &st)) {
        rc = l.unix_path ? err_sys(err, errno, "socket '%s'", path)
                         : err_nomem(err, strlen(path) + 1, "a path");
        (void)close(l.fd);
        mem_free(l.unix_path);
        return rc;
    }
    l.dev = st.st_dev;
    l.ino = st.st_ino;
    (void)snprintf(l.url, sizeof(l.url), "unix:%s", path);
    *out = l;
    return PF_OK;
}

void listener_release(struct listener *l)
{
    struct stat st;

    if (l->fd >= 0)
        (void)close(l->fd);
    l->fd = -1;
    /* Somebody may have removed ours and put another server's there. */
    if (l->unix_path && !lstat(l->unix_path, &st) && st.st_dev == l->dev && st.st_ino == l->ino)
        (void)unlink(l->unix_path);
    mem_free(l->unix_path);
    l->unix_path = NULL;
}
