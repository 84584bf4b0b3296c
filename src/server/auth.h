/*
 * Who may ask: API keys, the Host header, the Origin of a page. Immutable after open; any thread.
 */
#ifndef PF_SERVER_AUTH_H
#define PF_SERVER_AUTH_H

#include "base/err.h"

struct auth;

struct auth_opts {
    const char *key_path; /* NULL: no key is asked for. One key per line */
    bool is_unix;         /* a UNIX socket: no name leads to it, so Host is not checked */
    const char *const *allowed_hosts; /* beside localhost and IP addresses */
    size_t n_allowed_hosts;
    const char *const *cors_origins;
    size_t n_cors_origins;
};

/* PF_E_INVALID: a key file without keys, or keys shorter than 16 bytes. */
int auth_new(const struct auth_opts *opts, struct auth **out_auth, pf_error *err);
void auth_free(struct auth *a);

bool auth_has_key(const struct auth *a);
/* "Bearer KEY"; NULL is no header. Takes the same time for every wrong key of a length. */
bool auth_key_fits(const struct auth *a, const char *authorization);
/* A page that has its own name for our address would send that name: only localhost, addresses and allowed names are ours. */
bool auth_host_fits(const struct auth *a, const char *host);
/* An Origin is our own when it is http(s)://HOST; *out_is_cors: it is on the list of those that may come from elsewhere. */
bool auth_origin_fits(const struct auth *a, const char *origin, const char *host,
                      bool *out_is_cors);

#endif
