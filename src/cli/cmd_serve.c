/*
 * `pageflip serve`: the options of the HTTP server, turned into the struct that server_run takes. Says on standard output where it
 * listens, one line (or one JSON document), and nothing else there.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "cli/bundled.h"
#include "cli/command.h"
#include "cli/generate_opts.h"
#include "cli/lora_spec.h"
#include "cli/setup.h"
#include "server/server.h"

struct serve_args {
    struct common_args common;
    const char *model, *model_id, *address, *unix_path, *socket_mode, *key_path, *user, *way, *log;
    const char *cache_dir, *picture_dir, *merge_dtype;
    struct arg_list loras, adapter_dirs, allowed_hosts, cors_origins;
    struct arg_int port, workers, threads, queue, batch, deadline, drain, connections, body_limit;
    struct arg_int headers_timeout, body_timeout, resident, picture_budget, picture_time;
    struct arg_int cache_budget, host_memory, build_rate;
    struct arg_real build_delay;
    bool insecure, allow_unmatched;
};

#define AT(field) offsetof(struct serve_args, field)

static const struct opt opts[] = {
    {"model", 'm', OPT_MODEL, "M", "model directory; the bundled model unless said", AT(model),
     NULL, 0, 0, false},
    {"model-id", 0, OPT_STRING, "NAME",
     "name of the model in the API; its directory's name unless said", AT(model_id), NULL, 0, 0,
     false},
    {"lora", 'l', OPT_LORA, "NICK=L",
     "load an adapter under a nickname and apply it; may be repeated", AT(loras), NULL, 0, 0,
     false},
    {"adapter-dir", 'a', OPT_FILES, "DIR",
     "clients may load adapters from this directory; may be repeated", AT(adapter_dirs), NULL, 0, 0,
     false},
    {"address", 0, OPT_STRING, "IP", "listen here; 127.0.0.1 unless said", AT(address), NULL, 0, 0,
     false},
    {"port", 'p', OPT_INT, "N", "listen on this port; 8000 unless said, 0 for any free one",
     AT(port), NULL, 0, 65535, false},
    {"socket", 0, OPT_FILE, "PATH", "listen on a UNIX socket instead", AT(unix_path), NULL, 0, 0,
     false},
    {"socket-mode", 0, OPT_STRING, "MODE", "permissions of the socket; 0600 unless said",
     AT(socket_mode), NULL, 0, 0, false},
    {"api-key-file", 0, OPT_FILE, "FILE",
     "ask every client for one of the keys in FILE, one per line", AT(key_path), NULL, 0, 0, false},
    {"insecure", 0, OPT_FLAG, NULL, "listen on an address that others reach, without a key",
     AT(insecure), NULL, 0, 0, false},
    {"allowed-host", 0, OPT_TEXTS, "NAME",
     "a name that clients reach this server by, beside localhost; may be repeated",
     AT(allowed_hosts), NULL, 0, 0, false},
    {"cors-origin", 0, OPT_TEXTS, "ORIGIN",
     "let pages of this origin call the API; may be repeated", AT(cors_origins), NULL, 0, 0, false},
    {"user", 'u', OPT_STRING, "NAME", "when started as root, become this user; nobody unless said",
     AT(user), NULL, 0, 0, false},
    {"workers", 'w', OPT_INT, "N", "generations at a time, which share the threads; 1 unless said",
     AT(workers), NULL, 1, 64, false},
    {"threads", 't', OPT_INT, "N", "threads of all workers; one per usable CPU unless said",
     AT(threads), NULL, 1, 256, false},
    {"queue", 0, OPT_INT, "N", "generations that may wait; 64 unless said", AT(queue), NULL, 1,
     100000, false},
    {"batch", 0, OPT_INT, "N",
     "pictures of different requests that may share a pass; 8 unless said; changes no picture",
     AT(batch), NULL, 1, 1024, false},
    {"deadline", 0, OPT_INT, "S",
     "cancel a generation after S seconds, waiting included; 600 unless said", AT(deadline), NULL,
     1, 86400, false},
    {"drain", 0, OPT_INT, "S", "when told to stop, wait S seconds for generations; 30 unless said",
     AT(drain), NULL, 1, 86400, false},
    {"connections", 0, OPT_INT, "N", "connections at a time; 1024 unless said", AT(connections),
     NULL, 8, 100000, false},
    {"body-limit", 0, OPT_SIZE, "SIZE", "largest body of a request; 1M unless said", AT(body_limit),
     NULL, 0, 0, false},
    {"headers-timeout", 0, OPT_INT, "S", "time for the headers of a first request; 10 unless said",
     AT(headers_timeout), NULL, 1, 3600, false},
    {"body-timeout", 0, OPT_INT, "S", "time for a body; 30 unless said", AT(body_timeout), NULL, 1,
     3600, false},
    {"way", 0, OPT_CHOICE, "W",
     "how adapters are applied: auto (the default), overlay, stream, inplace", AT(way),
     "auto|overlay|stream|inplace", 0, 0, false},
    {"merge-dtype", 0, OPT_CHOICE, "D", "precision of the merge: base (the default) or f32",
     AT(merge_dtype), "base|f32", 0, 0, false},
    {"allow-unmatched", 0, OPT_FLAG, NULL,
     "leave out adapter keys that match no tensor of the model", AT(allow_unmatched), NULL, 0, 0,
     false},
    {"cache-dir", 0, OPT_FILE, "DIR", "overlay cache; 'off' for none", AT(cache_dir), NULL, 0, 0,
     false},
    {"cache-budget", 0, OPT_SIZE, "SIZE",
     "size of the overlay cache; a quarter of the free space unless said", AT(cache_budget), NULL,
     0, 0, false},
    {"build-delay", 0, OPT_REAL, "S",
     "seconds until a composition that lasts is cached; 2 unless said", AT(build_delay), NULL, 0, 0,
     false},
    {"build-rate", 0, OPT_SIZE, "SIZE",
     "build overlays no faster than SIZE per second; as fast as possible unless said",
     AT(build_rate), NULL, 0, 0, false},
    {"host-memory", 0, OPT_SIZE, "SIZE", "plan with this much memory at most", AT(host_memory),
     NULL, 0, 0, false},
    {"resident", 0, OPT_INT, "N", "keep private copies of the first N layers", AT(resident), NULL,
     0, 65536, false},
    {"picture-dir", 0, OPT_FILE, "DIR",
     "where pictures asked for by url are kept; a temporary directory unless said", AT(picture_dir),
     NULL, 0, 0, false},
    {"picture-budget", 0, OPT_SIZE, "SIZE", "size of the kept pictures; 64M unless said",
     AT(picture_budget), NULL, 0, 0, false},
    {"picture-time", 0, OPT_INT, "S", "how long pictures are kept; 3600 unless said",
     AT(picture_time), NULL, 1, 31536000, false},
    {"log", 0, OPT_CHOICE, "FORMAT", "access log on standard error: text (the default), json, none",
     AT(log), "text|json|none", 0, 0, false},
};

/* What outlives server_run: texts and lists that the options point to. */
struct held {
    char *model_path;
    struct lora_spec *specs;
    char **nicknames, **paths;
    struct server_lora *loras;
    size_t n_loras;
    char **bundled_names, **bundled_paths;
    size_t n_bundled;
    struct server_bundled *bundled;
};

static void held_release(struct held *h)
{
    for (size_t i = 0; i < h->n_loras; i++) {
        lora_spec_release(&h->specs[i]);
        mem_free(h->nicknames[i]);
        mem_free(h->paths[i]);
    }
    for (size_t i = 0; h->bundled_paths && i < h->n_bundled; i++)
        mem_free(h->bundled_paths[i]);
    file_list_free(h->bundled_names, h->n_bundled);
    mem_free(h->bundled_paths);
    mem_free(h->bundled);
    mem_free(h->specs);
    mem_free(h->nicknames);
    mem_free(h->paths);
    mem_free(h->loras);
    mem_free(h->model_path);
}

/* "night=night:0.8" */
static int read_lora(struct held *h, const char *text, bool *out_is_usage, pf_error *err)
{
    const char *eq = strchr(text, '=');
    size_t i = h->n_loras;
    int rc;

    *out_is_usage = true;
    if (!eq || eq == text || !eq[1])
        return err_set(err, PF_E_INVALID, "option '--lora' takes NICKNAME=L, not '%s'", text);
    rc = lora_spec_parse(eq + 1, &h->specs[i], err);
    if (rc)
        return rc;
    h->n_loras++;
    *out_is_usage = false;
    h->nicknames[i] = mem_strndup(text, (size_t)(eq - text));
    if (!h->nicknames[i])
        return err_nomem(err, strlen(text), "a nickname");
    rc = bundled_adapter(NULL, h->specs[i].path, &h->paths[i], err);
    h->loras[i] = (struct server_lora){.nickname = h->nicknames[i],
                                       .path = h->paths[i],
                                       .strength = h->specs[i].strength,
                                       .has_alpha = h->specs[i].has_alpha,
                                       .alpha = h->specs[i].alpha,
                                       .target = h->specs[i].target};
    return rc;
}

static int read_loras(struct held *h, const struct arg_list *list, bool *out_is_usage,
                      pf_error *err)
{
    int rc = PF_OK;

    h->specs = mem_calloc(list->n + 1, sizeof(*h->specs));
    h->nicknames = mem_calloc(list->n + 1, sizeof(*h->nicknames));
    h->paths = mem_calloc(list->n + 1, sizeof(*h->paths));
    h->loras = mem_calloc(list->n + 1, sizeof(*h->loras));
    if (!h->specs || !h->nicknames || !h->paths || !h->loras)
        return err_nomem(err, list->n * sizeof(*h->specs), "adapters");
    for (size_t i = 0; !rc && i < list->n; i++)
        rc = read_lora(h, list->v[i], out_is_usage, err);
    return rc;
}

/* Bundled adapters can be loaded by name. Without installed data there are none, which is no error. */
static int read_bundled(struct held *h, pf_error *err)
{
    int rc = PF_OK;

    if (bundled_adapter_names(NULL, &h->bundled_names, &h->n_bundled, NULL))
        return PF_OK;
    h->bundled_paths = mem_calloc(h->n_bundled + 1, sizeof(*h->bundled_paths));
    h->bundled = mem_calloc(h->n_bundled + 1, sizeof(*h->bundled));
    if (!h->bundled_paths || !h->bundled)
        return err_nomem(err, h->n_bundled * sizeof(*h->bundled), "bundled adapters");
    for (size_t i = 0; !rc && i < h->n_bundled; i++) {
        rc = bundled_adapter(NULL, h->bundled_names[i], &h->bundled_paths[i], err);
        h->bundled[i] = (struct server_bundled){h->bundled_names[i], h->bundled_paths[i]};
    }
    return rc;
}

static bool read_mode(const char *text, uint32_t *out)
{
    uint32_t mode = 0;

    if (!*text || strspn(text, "01234567") != strlen(text) || strlen(text) > 4)
        return false;
    for (; *text; text++)
        mode = mode * 8 + (uint32_t)(*text - '0');
    *out = mode;
    return mode > 0 && mode <= 0777;
}

/* One line in either form: whoever starts the server reads a line and goes on. */
static void on_listening(void *ctx, const char *url, uint16_t port, const char *note)
{
    const struct out *o = ctx;
    struct json *doc = json_new_object();
    struct strbuf text;

    strbuf_init(&text);
    if (*note)
        out_warn(o, "%s", note);
    json_set_z(doc, "url", url);
    json_set_int(doc, "port", port);
    json_set_int(doc, "pid", getpid());
    if (!o->is_json)
        strbuf_addf(&text, "listening on %s", url);
    else
        (void)json_write(doc, 0, &text, NULL); /* short of memory: an empty line */
    (void)printf("%s\n", strbuf_z(&text));
    (void)fflush(stdout); /* a reader that is gone does not stop the server */
    strbuf_release(&text);
    json_free(doc);
}

static void fill_engine(const struct serve_args *a, struct pf_engine_opts *e)
{
    e->size = sizeof(*e);
    e->way = way_by_name(a->way);
    e->cache_dir = a->cache_dir;
    e->cache_budget_bytes = a->cache_budget.v;
    e->host_memory_bytes = a->host_memory.v;
    e->n_resident_layers = (uint32_t)a->resident.v;
    e->build_delay_ms = build_delay_ms(&a->build_delay);
    e->build_bytes_per_s = a->build_rate.v;
    e->n_threads = (uint32_t)a->threads.v;
}

static void fill_access(const struct serve_args *a, struct server_opts *s)
{
    s->address = a->address;
    s->has_port = a->port.is_set;
    s->port = (uint16_t)a->port.v;
    s->unix_path = a->unix_path;
    s->key_path = a->key_path;
    s->is_insecure = a->insecure;
    s->allowed_hosts = a->allowed_hosts.v;
    s->n_allowed_hosts = a->allowed_hosts.n;
    s->cors_origins = a->cors_origins.v;
    s->n_cors_origins = a->cors_origins.n;
    s->user = a->user;
    s->adapter_dirs = a->adapter_dirs.v;
    s->n_adapter_dirs = a->adapter_dirs.n;
    s->n_connections_max = (uint32_t)a->connections.v;
    s->n_body_max = (uint32_t)a->body_limit.v;
    s->headers_ms = (uint32_t)a->headers_timeout.v * 1000;
    s->body_ms = (uint32_t)a->body_timeout.v * 1000;
}

static void fill_work(const struct serve_args *a, struct server_opts *s)
{
    s->model_id = a->model_id;
    s->n_workers = (uint32_t)a->workers.v;
    s->n_threads = (uint32_t)a->threads.v;
    s->n_queue_max = (uint32_t)a->queue.v;
    s->n_batch_max = (uint32_t)a->batch.v;
    s->generation_s = (uint32_t)a->deadline.v;
    s->drain_s = (uint32_t)a->drain.v;
    s->picture_dir = a->picture_dir;
    s->picture_bytes_max = a->picture_budget.v;
    s->picture_s = (uint32_t)a->picture_time.v;
    s->allow_unmatched = a->allow_unmatched;
    s->merge_dtype = merge_dtype_by_name(a->merge_dtype);
    s->access_format = !a->log || !strcmp(a->log, "text") ? 0 : !strcmp(a->log, "json") ? 1 : 2;
}

/* NULL: fine. */
static const char *check(const struct serve_args *a)
{
    if (a->unix_path && (a->address || a->port.is_set))
        return "options '--address' and '--port' do not go with '--socket'";
    if (a->socket_mode && !a->unix_path)
        return "option '--socket-mode' needs '--socket'";
    if (a->body_limit.v > (uint64_t)1 << 30)
        return "option '--body-limit' takes at most 1G";
    return build_delay_check(&a->build_delay);
}

static int run(struct out *o, const void *p)
{
    const struct serve_args *args = p;
    struct server_opts s = {.on_listening = on_listening, .ctx = o};
    struct held held = {0};
    const char *wrong = check(args);
    bool is_usage = false, is_cut = false;
    pf_error err = {0};
    int rc, status;

    if (!wrong && args->socket_mode && !read_mode(args->socket_mode, &s.unix_mode))
        wrong = "option '--socket-mode' takes octal permissions, like 0660";
    if (wrong)
        return out_usage(o, "%s", wrong);
    rc = read_loras(&held, &args->loras, &is_usage, &err);
    if (!rc)
        rc = read_bundled(&held, &err);
    if (!rc)
        rc = bundled_model(NULL, args->model, &held.model_path, &err);
    fill_engine(args, &s.engine);
    fill_access(args, &s);
    fill_work(args, &s);
    s.model_path = held.model_path;
    s.loras = held.loras;
    s.n_loras = held.n_loras;
    s.bundled = held.bundled;
    s.n_bundled = held.n_bundled;
    if (!rc)
        rc = server_run(&s, &is_cut, &err);
    setup_hint(&err);
    status = !rc ? EXIT_STATUS_OK : is_usage ? out_usage(o, "%s", err.msg) : out_fail(o, &err);
    if (is_cut)
        out_warn(o, "stopped before every generation was finished");
    held_release(&held);
    return status;
}

const struct command cmd_serve = {
    .name = "serve",
    .summary = "serve a model over HTTP, with adapters that change while it draws",
    .synopsis = "[--model M] [--lora NICK=L ...] [--port N | --socket PATH]",
    .detail = "Answers OpenAI's image route and the LoRA routes of diffusion servers, with a page "
              "at /. Listens on "
              "loopback unless told otherwise; clients may load adapters from the directories that "
              "--adapter-dir "
              "names, and the bundled ones. SIGTERM finishes what was accepted and stops; a second "
              "one stops at "
              "once.",
    .opts = opts,
    .n_opts = PF_COUNTOF(opts),
    .args_bytes = sizeof(struct serve_args),
    .run = run,
};
