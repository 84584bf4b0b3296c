/*
 * The life of a server: check options, listen, open, drop privileges, start, wait for a signal, drain, stop. In this order the
 * pieces are torn down backwards; nothing of a later stage is used by an earlier one.
 */
#include "server/server.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/pool.h"
#include "base/proc.h"
#include "server/draw.h"
#include "server/layer_map.h"
#include "server/notify.h"
#include "server/privilege.h"
#include "server/route.h"
#include "server/service.h"
#include "server/ticker.h"

#define ROOT_CACHE_DIR  "/var/cache/pageflip"
#define N_CREW_MAX      64
#define N_OTHER_FDS     512
#define N_LISTENERS_MAX 64
#define N_EVENT_BYTES   ((size_t)256 << 10)
#define N_HEADER_BYTES  16384
#define ANSWER_GRACE_NS 2000000000u /* for answers on their way when the server stops */
#define CREW_GRACE_NS   5000000000u

/* --------------------------------------------------------------------------------------------- options */

static uint32_t or32(uint32_t v, uint32_t otherwise)
{
    return v ? v : otherwise;
}

static void fill_defaults(struct server_opts *o)
{
    o->address = o->address ? o->address : "127.0.0.1";
    o->port = o->has_port ? o->port : 8000;
    o->unix_mode = or32(o->unix_mode, 0600);
    o->n_workers = or32(o->n_workers, 1);
    o->n_threads = or32(o->n_threads, pool_default_threads());
    o->n_queue_max = or32(o->n_queue_max, 64);
    o->n_batch_max = or32(o->n_batch_max, 8);
    o->generation_s = or32(o->generation_s, 600);
    o->drain_s = or32(o->drain_s, 30);
    o->n_connections_max = or32(o->n_connections_max, 1024);
    o->n_body_max = or32(o->n_body_max, 1 << 20);
    o->headers_ms = or32(o->headers_ms, 10000);
    o->body_ms = or32(o->body_ms, 30000);
    o->reply_ms = or32(o->reply_ms, 120000);
    o->idle_ms = or32(o->idle_ms, 75000);
    o->picture_s = or32(o->picture_s, 3600);
    if (!o->picture_bytes_max)
        o->picture_bytes_max = (uint64_t)64 << 20;
}

static int check_opts(const struct server_opts *o, pf_error *err)
{
    if (o->unix_path && o->address && strcmp(o->address, "127.0.0.1") != 0)
        return err_set(err, PF_E_INVALID, "a UNIX socket has no address: give one of the two");
    for (size_t i = 0; i < o->n_cors_origins; i++)
        if (!strcmp(o->cors_origins[i], "*") || !strstr(o->cors_origins[i], "://"))
            return err_set(
                err, PF_E_INVALID,
                "origin '%s' is none: one is written 'https://name' and '*' is not taken",
                o->cors_origins[i]);
    return PF_OK;
}

static int open_listener(struct service *s, pf_error *err)
{
    const struct server_opts *o = s->opts;
    int rc;

    if (o->unix_path)
        rc = listen_unix(o->unix_path, o->unix_mode, &s->listener, err);
    else
        rc = listen_tcp(o->address, o->port, &s->listener, err);
    if (!rc && !s->listener.is_loopback && !auth_has_key(s->auth) && !o->is_insecure)
        rc =
            err_set(err, PF_E_INVALID,
                    "listening on '%s', which others can reach, needs --api-key-file or --insecure",
                    o->address);
    if (!rc && o->unix_path)
        rc = privilege_give_file(o->user, o->unix_path, err);
    return rc;
}

static int open_auth(struct service *s, pf_error *err)
{
    const struct server_opts *o = s->opts;
    struct auth_opts auth_opts = {.key_path = o->key_path,
                                  .is_unix = o->unix_path != NULL,
                                  .allowed_hosts = o->allowed_hosts,
                                  .n_allowed_hosts = o->n_allowed_hosts,
                                  .cors_origins = o->cors_origins,
                                  .n_cors_origins = o->n_cors_origins};
    struct stat st;

    if (o->key_path && !stat(o->key_path, &st) && st.st_mode & 077)
        log_at(PF_LOG_WARN, "API key file '%s' can be read by others (mode %03o): chmod 600 it",
               o->key_path, (unsigned)(st.st_mode & 0777));
    return auth_new(&auth_opts, &s->auth, err);
}

/* Descriptors for every connection, and enough beside them for weights, adapters and overlays. */
static void raise_descriptors(struct server_opts *o)
{
    struct rlimit limit;
    rlim_t want = (rlim_t)o->n_connections_max + N_OTHER_FDS;

    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur >= want)
        return;
    limit.rlim_cur = limit.rlim_max < want ? limit.rlim_max : want;
    (void)setrlimit(RLIMIT_NOFILE, &limit); /* up to the hard limit anybody may */
    if (limit.rlim_cur >= want)
        return;
    o->n_connections_max =
        limit.rlim_cur > 2 * N_OTHER_FDS ? (uint32_t)limit.rlim_cur - N_OTHER_FDS : N_OTHER_FDS / 8;
    log_at(PF_LOG_WARN, "only %llu descriptors are allowed: %u connections at a time",
           (unsigned long long)limit.rlim_cur, o->n_connections_max);
}

/* ---------------------------------------------------------------------------------------------- opening */

static void name_model(struct service *s)
{
    struct str base = s->opts->model_id ? str_of(s->opts->model_id) : path_base(s->ckpt_info.path);

    (void)snprintf(s->model_id, sizeof(s->model_id), "%.*s", (int)(base.n < 200 ? base.n : 200),
                   base.p);
}

static int open_models(struct service *s, pf_error *err)
{
    const struct server_opts *o = s->opts;
    int rc = pf_checkpoint_open(o->model_path, NULL, &s->ckpt, err);

    if (rc)
        return rc;
    pf_checkpoint_info(s->ckpt, &s->ckpt_info);
    name_model(s);
    s->n_workers = o->n_workers;
    s->models = mem_calloc(s->n_workers, sizeof(struct pf_model *));
    if (!s->models)
        return err_nomem(err, s->n_workers * sizeof(struct pf_model *), "models");
    for (unsigned i = 0; !rc && i < s->n_workers; i++) {
        /* Threads are shared out; what is left over goes to the first workers. */
        uint32_t n = o->n_threads / s->n_workers + (i < o->n_threads % s->n_workers);
        struct pf_model_opts model_opts = {.size = sizeof(model_opts), .n_threads = n ? n : 1};

        rc = pf_model_open(s->ckpt, &model_opts, &s->models[i], err);
    }
    if (rc)
        return rc;
    pf_model_info(s->models[0], &s->model);
    if (s->model.channels != 3)
        return err_set(err, PF_E_UNSUPPORTED,
                       "the model has %u channels: only three make a picture", s->model.channels);
    return PF_OK;
}

/* Directories that root makes would be out of reach after the change of user. */
static int give_dirs(struct service *s, struct pf_engine_opts *engine, pf_error *err)
{
    const char *user = s->opts->user, *env = getenv("PAGEFLIP_CACHE");
    int rc = PF_OK;

    if (!privilege_will_drop(user))
        return PF_OK;
    if (s->opts->picture_dir)
        rc = privilege_give_dir(user, s->opts->picture_dir, err);
    if (rc)
        return rc;
    if (!engine->cache_dir && !(env && *env))
        engine->cache_dir = ROOT_CACHE_DIR;
    env = engine->cache_dir ? engine->cache_dir : env;
    return strcmp(env, "off") ? privilege_give_dir(user, env, err) : PF_OK;
}

static int open_engine(struct service *s, const struct pf_engine_opts *engine, pf_error *err)
{
    const struct server_opts *o = s->opts;
    struct book_opts book_opts = {.dirs = o->adapter_dirs,
                                  .n_dirs = o->n_adapter_dirs,
                                  .bundled = o->bundled,
                                  .n_bundled = o->n_bundled};
    int rc = pf_engine_open(s->ckpt, engine, &s->engine, err);

    book_opts.engine = s->engine;
    if (!rc)
        rc = book_new(&book_opts, &s->book, err);
    if (!rc)
        rc = layer_map_new(s->ckpt, &s->layers, err);
    return rc;
}

static int apply_loras(struct service *s, pf_error *err)
{
    const struct server_opts *o = s->opts;
    struct pf_change_opts change = {.size = sizeof(change),
                                    .allow_unmatched = o->allow_unmatched,
                                    .merge_dtype = o->merge_dtype};
    struct pf_engine_lora *loras = mem_calloc(o->n_loras + 1, sizeof(*loras));
    int rc = loras ? PF_OK : err_nomem(err, sizeof(*loras), "adapters");

    for (size_t i = 0; !rc && i < o->n_loras; i++) {
        const struct server_lora *l = &o->loras[i];

        loras[i] =
            (struct pf_engine_lora){l->nickname, l->strength, l->has_alpha, l->alpha, l->target};
        rc = book_load_trusted(s->book, l->nickname, l->path, err);
    }
    if (!rc && o->n_loras)
        rc = pf_engine_set(s->engine, loras, o->n_loras, NULL, &change, NULL, err);
    mem_free(loras);
    return rc;
}

static int open_parts(struct service *s, pf_error *err)
{
    const struct server_opts *o = s->opts;
    struct pictures_opts picture_opts = {o->picture_dir, o->picture_bytes_max, o->picture_s};
    struct events_opts events_opts = {N_LISTENERS_MAX, N_EVENT_BYTES};
    struct queue_opts queue_opts = {.n_workers = s->n_workers,
                                    .n_max = o->n_queue_max,
                                    .n_batch_max = o->n_batch_max,
                                    .draw = draw_pass,
                                    .done = draw_done,
                                    .event = draw_event,
                                    .ctx = s};
    int rc = pictures_new(&picture_opts, &s->pictures, err);

    if (!rc)
        rc = events_new(&events_opts, &s->events, err);
    if (!rc)
        rc = crew_new(N_CREW_MAX, &s->crew, err);
    if (!rc)
        rc = queue_new(&queue_opts, &s->queue, err);
    return rc;
}

static int open_http(struct service *s, pf_error *err)
{
    const struct server_opts *o = s->opts;
    struct http_opts http_opts = {.fd_listen = s->listener.fd,
                                  .n_connections_max = o->n_connections_max,
                                  .n_body_max = o->n_body_max,
                                  .n_header_max = N_HEADER_BYTES,
                                  .headers_ms = o->headers_ms,
                                  .body_ms = o->body_ms,
                                  .reply_ms = o->reply_ms,
                                  .idle_ms = o->idle_ms};
    int rc;

    route_handlers(s, &http_opts.handlers);
    rc = http_start(&http_opts, &s->http, err);
    if (!rc)
        s->listener.fd = -1; /* the daemon's now */
    return rc;
}

static int open_all(struct service *s, pf_error *err)
{
    struct pf_engine_opts engine = s->opts->engine;
    bool is_dropped = false;
    int rc = open_auth(s, err);

    if (!rc)
        rc = open_listener(s, err);
    if (!rc)
        rc = open_models(s, err);
    if (!rc)
        rc = give_dirs(s, &engine, err);
    if (!rc)
        rc = privilege_drop(s->opts->user, &is_dropped, err);
    if (!rc)
        rc = open_engine(s, &engine, err);
    if (!rc && (rc = apply_loras(s, err)) && is_dropped)
        err_append(err, "; adapters are read as user '%s', see --user",
                   s->opts->user ? s->opts->user : "nobody");
    if (!rc)
        rc = open_parts(s, err);
    s->is_ready = !rc;
    if (!rc)
        rc = open_http(s, err);
    return rc;
}

/* --------------------------------------------------------------------------------------------- stopping */

/* Waits for a condition that other threads bring about, looking now and then. */
static void wait_for(bool (*is_so)(struct service *s), struct service *s, uint64_t n_ns)
{
    const struct timespec nap = {.tv_nsec = 5000000};
    uint64_t t_end = clock_ns() + n_ns;

    while (!is_so(s) && clock_ns() < t_end)
        (void)nanosleep(&nap, NULL);
}

static bool has_answered(struct service *s)
{
    return http_n_open_requests(s->http) == 0;
}

static bool is_crew_idle(struct service *s)
{
    return crew_count(s->crew) == 0;
}

/* What came in between the closing and the cancelling is cancelled too. */
static bool does_nobody_work(struct service *s)
{
    queue_cancel_all(s->queue);
    return http_n_working(s->http) == 0;
}

/* Every request has to be answered before the HTTP server can be stopped: first the queue, then the changes, then the streams. */
static void stop_serving(struct service *s, bool is_cut)
{
    if (!s->http)
        return;
    http_close(s->http);
    queue_cancel_all(s->queue);
    (void)queue_wait_empty(s->queue, UINT64_MAX);
    wait_for(is_crew_idle, s, is_cut ? 0 : CREW_GRACE_NS);
    if (!is_crew_idle(s)) {
        /* A change waits for its overlay: taking the composition off ends that. */
        (void)pf_engine_deactivate(s->engine, NULL, NULL, NULL);
        pf_engine_cancel_build(s->engine);
        wait_for(is_crew_idle, s, UINT64_MAX / 2);
    }
    wait_for(does_nobody_work, s, UINT64_MAX / 2);
    events_close(s->events);
    wait_for(has_answered, s, ANSWER_GRACE_NS);
    http_stop(s->http);
    s->http = NULL;
}

static void close_all(struct service *s, bool is_cut)
{
    stop_serving(s, is_cut);
    queue_free(s->queue);
    crew_free(s->crew);
    events_free(s->events);
    pictures_free(s->pictures);
    layer_map_free(s->layers);
    book_free(s->book);
    pf_engine_close(s->engine);
    for (unsigned i = 0; s->models && i < s->n_workers; i++)
        pf_model_close(s->models[i]);
    mem_free(s->models);
    pf_checkpoint_close(s->ckpt);
    listener_release(&s->listener);
    auth_free(s->auth);
}

/* True: a signal came before the time was over. */
static bool wait_signal(const sigset_t *set, uint64_t n_ns)
{
    struct timespec t = {.tv_sec = (time_t)(n_ns / 1000000000),
                         .tv_nsec = (long)(n_ns % 1000000000)};
    int sig;

    do
        sig = n_ns == UINT64_MAX ? sigwaitinfo(set, NULL) : sigtimedwait(set, NULL, &t);
    while (sig < 0 && errno == EINTR);
    return sig > 0;
}

/* Ready turns 503, what was accepted is finished. True: not all of it, because the time was over or a second signal came. */
static bool drain(struct service *s, const sigset_t *set)
{
    uint64_t t_end = clock_ns() + (uint64_t)s->opts->drain_s * 1000000000;

    s->is_draining = true;
    notify_manager("STOPPING=1\nSTATUS=draining");
    log_at(PF_LOG_INFO,
           "draining: generations are finished for at most %u s; a second signal stops",
           s->opts->drain_s);
    while (!queue_wait_empty(s->queue, clock_ns() + 20000000) || !is_crew_idle(s)) {
        if (clock_ns() >= t_end || wait_signal(set, 1))
            return true;
    }
    return false;
}

static void announce(struct service *s)
{
    char note[256] = "";

    if (s->listener.port && !s->listener.is_loopback && !auth_has_key(s->auth))
        (void)snprintf(note, sizeof(note),
                       "anybody who reaches this address may use it: there is no key");
    notify_manager("READY=1\nSTATUS=serving");
    if (s->opts->on_listening)
        s->opts->on_listening(s->opts->ctx, s->listener.url, s->listener.port, note);
}

int server_run(const struct server_opts *opts, bool *out_is_cut, pf_error *err)
{
    struct server_opts o = *opts;
    struct service *s = mem_calloc(1, sizeof(*s));
    struct ticker *ticker = NULL;
    sigset_t set, before;
    struct sigaction hup;
    int rc;

    if (!s)
        return err_nomem(err, sizeof(*s), "the server");
    *out_is_cut = false;
    fill_defaults(&o);
    s->opts = &o;
    s->listener.fd = -1;
    s->t_start_ns = clock_ns();
    s->t_created_s = (int64_t)time(NULL);
    s->log = (struct access_log){(enum access_format)o.access_format, STDERR_FILENO};
    (void)sigemptyset(&set);
    (void)sigaddset(&set, SIGTERM);
    (void)sigaddset(&set, SIGINT);
    if (!sigaction(SIGHUP, NULL, &hup) && hup.sa_handler != SIG_IGN) /* as nohup wants it */
        (void)sigaddset(&set, SIGHUP);                               /* a terminal that closes */
    (void)pthread_sigmask(SIG_BLOCK, &set, &before); /* inherited by every thread from here on */
    (void)signal(SIGPIPE, SIG_IGN);
    raise_descriptors(&o);
    rc = check_opts(&o, err);
    if (!rc)
        rc = open_all(s, err);
    if (!rc)
        rc = ticker_start(s, &ticker, err);
    if (!rc) {
        announce(s);
        (void)wait_signal(&set, UINT64_MAX);
        *out_is_cut = drain(s, &set);
    }
    ticker_stop(ticker);
    close_all(s, *out_is_cut);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    mem_free(s);
    return rc;
}
