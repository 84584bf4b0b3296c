/*
 * Checks of three headers. Nothing here allocates per request.
 */
#include "server/auth.h"

#include <arpa/inet.h>
#include <string.h>
#include <strings.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/str.h"

#define KEY_FILE_MAX  65536
#define KEY_MIN_BYTES 16
#define KEY_MAX_BYTES 512
#define N_KEYS_MAX    64

struct auth {
    struct auth_opts opts; /* lists are the caller's and outlive us */
    char *text;            /* of the key file */
    struct str keys[N_KEYS_MAX];
    size_t n_keys;
};

static struct str trim(struct str s)
{
    while (s.n && s.p[0] && strchr(" \t\r", s.p[0]))
        s = str_cut_front(s, 1);
    while (s.n && s.p[s.n - 1] && strchr(" \t\r", s.p[s.n - 1]))
        s.n--;
    return s;
}

static int read_keys(struct auth *a, const char *path, pf_error *err)
{
    size_t n = 0;
    int rc = file_read_all(path, KEY_FILE_MAX, &a->text, &n, err);
    struct str rest = {a->text, n};

    if (rc)
        return rc;
    while (rest.n) {
        const char *end = memchr(rest.p, '\n', rest.n);
        struct str line = trim((struct str){rest.p, end ? (size_t)(end - rest.p) : rest.n});

        rest = str_cut_front(rest, end ? (size_t)(end - rest.p) + 1 : rest.n);
        if (!line.n || line.p[0] == '#')
            continue;
        if (line.n < KEY_MIN_BYTES || line.n > KEY_MAX_BYTES)
            return err_set(err, PF_E_INVALID,
                           "API key file '%s': a key of %zu bytes; %d to %d are accepted", path,
                           line.n, KEY_MIN_BYTES, KEY_MAX_BYTES);
        if (a->n_keys == N_KEYS_MAX)
            return err_set(err, PF_E_RANGE, "API key file '%s' has more than %d keys", path,
                           N_KEYS_MAX);
        a->keys[a->n_keys++] = line;
    }
    if (!a->n_keys)
        return err_set(err, PF_E_INVALID, "API key file '%s' has no key", path);
    return PF_OK;
}

int auth_new(const struct auth_opts *opts, struct auth **out_auth, pf_error *err)
{
    struct auth *a = mem_calloc(1, sizeof(*a));
    int rc;

    if (!a)
        return err_nomem(err, sizeof(*a), "keys");
    a->opts = *opts;
    rc = opts->key_path ? read_keys(a, opts->key_path, err) : PF_OK;
    if (rc) {
        auth_free(a);
        return rc;
    }
    *out_auth = a;
    return PF_OK;
}

void auth_free(struct auth *a)
{
    if (!a)
        return;
    mem_free(a->text);
    mem_free(a);
}

bool auth_has_key(const struct auth *a)
{
    return a->n_keys > 0;
}

/* Walks the whole of `given` whatever it finds; how long our key is does not show. */
static unsigned differs(struct str key, struct str given)
{
    unsigned diff = key.n != given.n;

    for (size_t i = 0; i < given.n; i++)
        diff |= (unsigned char)given.p[i] ^ (unsigned char)key.p[i % key.n];
    return diff;
}

bool auth_key_fits(const struct auth *a, const char *authorization)
{
    static const char bearer[] = "Bearer ";
    struct str given;
    unsigned fits = 0;

    if (!authorization || strncasecmp(authorization, bearer, sizeof(bearer) - 1) != 0)
        return false;
    given = trim(str_of(authorization + sizeof(bearer) - 1));
    if (!given.n || given.n > KEY_MAX_BYTES)
        return false;
    for (size_t i = 0; i < a->n_keys; i++)
        fits |= differs(a->keys[i], given) == 0;
    return fits;
}

/* "name:port" -> "name", "[::1]:80" -> "::1". False: neither. */
static bool split_host(const char *host, char *out, size_t n_out)
{
    struct str s = str_of(host), port;
    const char *colon;

    if (s.n && s.p[0] == '[') {
        const char *end = memchr(s.p, ']', s.n);

        if (!end || (end[1] && end[1] != ':'))
            return false;
        port = str_of(end[1] ? end + 2 : end + 1);
        s = (struct str){s.p + 1, (size_t)(end - s.p - 1)};
    } else {
        colon = memchr(s.p, ':', s.n);
        port = str_of(colon ? colon + 1 : "");
        s.n = colon ? (size_t)(colon - s.p) : s.n;
    }
    if (s.n && s.p[s.n - 1] == '.')
        s.n--; /* "localhost." is localhost */
    if (!s.n || s.n >= n_out || strspn(port.p, "0123456789") != port.n || port.n > 5)
        return false;
    memcpy(out, s.p, s.n);
    out[s.n] = '\0';
    return true;
}

bool auth_host_fits(const struct auth *a, const char *host)
{
    char name[256];
    struct in6_addr any;

    if (a->opts.is_unix)
        return true;
    if (!host)
        return true; /* HTTP/1.0 without one, which no browser sends */
    if (!split_host(host, name, sizeof(name)))
        return false;
    if (!strcasecmp(name, "localhost") || inet_pton(AF_INET, name, &any) == 1 ||
        inet_pton(AF_INET6, name, &any) == 1)
        return true;
    for (size_t i = 0; i < a->opts.n_allowed_hosts; i++)
        if (!strcasecmp(name, a->opts.allowed_hosts[i]))
            return true;
    return false;
}

bool auth_origin_fits(const struct auth *a, const char *origin, const char *host, bool *out_is_cors)
{
    struct str o = str_of(origin);

    *out_is_cors = false;
    for (size_t i = 0; i < a->opts.n_cors_origins; i++)
        if (!strcmp(origin, a->opts.cors_origins[i])) {
            *out_is_cors = true;
            return true;
        }
    if (str_starts(o, "http://"))
        o = str_cut_front(o, strlen("http://"));
    else if (str_starts(o, "https://"))
        o = str_cut_front(o, strlen("https://"));
    else
        return false;
    return host && o.n == strlen(host) && !strncasecmp(o.p, host, o.n);
}
