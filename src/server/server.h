/*
 * The HTTP server: a model behind the routes of route.c. The command `pageflip serve` fills the options and calls server_run, which
 * returns when the server has been told to stop and has stopped.
 */
#ifndef PF_SERVER_SERVER_H
#define PF_SERVER_SERVER_H

#include "base/err.h"

struct server_lora {
    const char *nickname, *path;
    double strength;
    bool has_alpha;
    double alpha;
    const char *target; /* NULL: all */
};

struct server_bundled { /* a word that stands for an adapter, and its file */
    const char *name, *path;
};

/* Zero is the default of every number. Strings and lists are the caller's and outlive the run. */
struct server_opts {
    const char *model_path, *model_id; /* id NULL: the last part of the path */
    const char *address;               /* NULL: 127.0.0.1 */
    bool has_port;
    uint16_t port;         /* 8000 unless has_port; 0: any free one */
    const char *unix_path; /* instead of address and port */
    uint32_t unix_mode;    /* 0600 */
    const char *key_path;
    bool is_insecure; /* another address than loopback without a key */
    const char *const *allowed_hosts;
    size_t n_allowed_hosts;
    const char *const *cors_origins;
    size_t n_cors_origins;
    const char *user; /* to become, when root; NULL: nobody; "root": stay */

    const struct server_lora *loras; /* applied before the first request */
    size_t n_loras;
    const char *const *adapter_dirs;
    size_t n_adapter_dirs;
    const struct server_bundled *bundled;
    size_t n_bundled;
    bool allow_unmatched;
    int32_t merge_dtype;

    struct pf_engine_opts engine;
    uint32_t n_workers;                     /* generations at a time; 1 */
    uint32_t n_threads;                     /* of all workers together; 0: one per CPU */
    uint32_t n_queue_max;                   /* waiting generations; 64 */
    uint32_t n_batch_max;                   /* pictures of requests drawn together; 8 */
    uint32_t generation_s;                  /* deadline of a generation, waiting included; 600 */
    uint32_t drain_s;                       /* how long a stop waits for generations; 30 */
    uint32_t n_connections_max, n_body_max; /* 1024, 1 MiB */
    uint32_t headers_ms, body_ms;           /* deadlines per connection; 10000, 30000 */
    uint32_t reply_ms, idle_ms;             /* 120000, 75000 */

    const char *picture_dir;    /* for url answers; NULL: a temporary one */
    uint64_t picture_bytes_max; /* 64 MiB */
    uint32_t picture_s;         /* 3600 */
    int access_format;          /* ACCESS_* of access_log.h: 0 text, 1 JSON lines, 2 none */

    /* Called once, when requests are answered. */
    void (*on_listening)(void *ctx, const char *url, uint16_t port, const char *note);
    void *ctx;
};

/*
 * SIGTERM, SIGINT and SIGHUP are taken by this call, which must be made before the process starts other threads: the first drains, the
 * second stops at once. *out_is_cut: generations were cancelled by the end of the drain or by the second signal.
 */
int server_run(const struct server_opts *opts, bool *out_is_cut, pf_error *err);

#endif
