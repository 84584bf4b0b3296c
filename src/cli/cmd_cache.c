/*
 * `pageflip cache list|verify|evict|clear|path`: what lies in the cache of merged weights, whether it is sound, and taking things out.
 * All of it is done by pf_cache_*; here it is said.
 */
#include <inttypes.h>
#include <stdio.h>
#include <time.h>

#include "base/file.h"
#include "base/mem.h"
#include "cli/command.h"

#define N_DIGITS_SHOWN 12

struct cache_args {
    struct common_args common;
    const char *cache_dir, *digest;
};

static const struct opt opts[] = {
    {"cache-dir", 0, OPT_FILE, "DIR",
     "the cache; $PAGEFLIP_CACHE, else pageflip in $XDG_CACHE_HOME or ~/.cache unless said",
     offsetof(struct cache_args, cache_dir), NULL, 0, 0, false},
};
static const struct operand one_digest[] = {
    {"DIGEST", "the entry: the first 4 digits of its digest, or more", OPT_STRING,
     offsetof(struct cache_args, digest), true},
};
static const struct operand maybe_digest[] = {
    {"DIGEST",
     "the entry: the first 4 digits of its digest, or more; all complete ones unless said",
     OPT_STRING, offsetof(struct cache_args, digest), false},
};

/* What a command prints, filled by its callback. */
struct listing {
    const struct out *o;
    const struct cache_args *args;
    struct table table;
    struct json *array;
    uint64_t n_bytes;
    uint32_t n_entries, n_failed;
    pf_error *err;
    char (*digests)[33];
    size_t cap_digests;
};

static const char *utc(int64_t at_s, char text[32])
{
    time_t t = (time_t)at_s;
    struct tm tm;

    if (!gmtime_r(&t, &tm) || !strftime(text, 32, "%Y-%m-%dT%H:%M:%SZ", &tm))
        return "?";
    return text;
}

/* "noto 1, turbo 0.5 (transformer)" */
static void adapters_text(const struct pf_cache_entry *e, struct strbuf *b)
{
    for (uint32_t i = 0; i < e->n_adapters; i++) {
        const struct pf_cache_adapter *a = &e->adapters[i];
        struct str name = path_base(a->path);

        if (str_ends(name, ".safetensors"))
            name = str_cut_back(name, sizeof(".safetensors") - 1);
        strbuf_addf(b, "%s%.*s %g", i ? ", " : "", (int)name.n, name.p, a->strength);
        if (a->has_alpha)
            strbuf_addf(b, " alpha %g", a->alpha);
        if (!str_eqz(str_of(a->target), "all"))
            strbuf_addf(b, " (%s)", a->target);
    }
    if (e->merge_dtype && str_eqz(str_of(e->merge_dtype), "f32"))
        strbuf_adds(b, " in f32");
}

static struct json *entry_json(const struct pf_cache_entry *e)
{
    struct json *it = json_new_object(), *adapters = json_new_array();
    char when[32];

    json_set_z(it, "digest", e->digest);
    json_set_z(it, "state", e->state);
    json_set_bool(it, "in_use", e->is_in_use);
    json_set_int(it, "bytes", (int64_t)e->n_bytes);
    json_set_z(it, "last_use", utc(e->used_at_s, when));
    json_set_z(it, "base", e->base);
    json_set_z(it, "merge_dtype", e->merge_dtype);
    for (uint32_t i = 0; i < e->n_adapters; i++) {
        const struct pf_cache_adapter *a = &e->adapters[i];
        struct json *one = json_new_object();

        json_set_z(one, "path", a->path);
        json_set_real(one, "strength", a->strength);
        json_set(one, "alpha", a->has_alpha ? json_new_real(a->alpha) : json_new_null());
        json_set_z(one, "target", a->target);
        json_add(adapters, one);
    }
    json_set(it, "adapters", adapters);
    return it;
}

/* ------------------------------------------------------------------------------------------------ list */

static bool list_entry(void *ctx, const struct pf_cache_entry *e)
{
    struct listing *l = ctx;
    struct strbuf adapters;
    char size[16], when[32];

    l->n_bytes += e->n_bytes;
    l->n_entries++;
    if (l->o->is_json) {
        json_add(l->array, entry_json(e));
        return true;
    }
    strbuf_init(&adapters);
    adapters_text(e, &adapters);
    table_cell(&l->table, "%s", adapters.n ? strbuf_z(&adapters) : "?");
    table_cell(&l->table, "%s", e->base ? e->base : "?");
    table_cell(&l->table, "%.*s", N_DIGITS_SHOWN, e->digest);
    table_cell(&l->table, "%s%s", e->state, e->is_in_use ? ", in use" : "");
    table_cell(&l->table, "%s", out_bytes((double)e->n_bytes, size));
    table_cell(&l->table, "%s", utc(e->used_at_s, when));
    strbuf_release(&adapters);
    return true;
}

static int run_list(struct out *o, const void *p)
{
    const struct cache_args *args = p;
    struct listing l = {.o = o, .array = json_new_array()};
    struct json *doc;
    char path[4096], size[16];
    pf_error err = {0};
    int status = EXIT_STATUS_OK;
    static const char *const head[] = {"adapters", "base", "digest", "state", "size", "last use"};

    table_init(&l.table, PF_COUNTOF(head), 0x10);
    for (size_t i = 0; i < PF_COUNTOF(head); i++)
        table_cell(&l.table, "%s", head[i]);
    if (pf_cache_path(args->cache_dir, path, sizeof(path), &err) ||
        pf_cache_list(args->cache_dir, list_entry, &l, &err)) {
        status = out_fail(o, &err);
    } else if (o->is_json) {
        doc = json_new_object();
        json_set_z(doc, "path", path);
        json_set_int(doc, "bytes", (int64_t)l.n_bytes);
        json_set(doc, "entries", l.array);
        l.array = NULL;
        status = out_json(o, doc);
    } else {
        out_field(o, "cache", "%s", path);
        out_field(o, "entries", "%u, %s", l.n_entries, out_bytes((double)l.n_bytes, size));
        if (l.n_entries)
            table_print(&l.table, "  ");
    }
    json_free(l.array);
    table_release(&l.table);
    return status;
}

/* ---------------------------------------------------------------------------------------------- verify */

/* Digests first: an entry is not verified under the eyes of the list. */
static bool take_digest(void *ctx, const struct pf_cache_entry *e)
{
    struct listing *l = ctx;

    if (!str_eqz(str_of(e->state), "complete"))
        return true;
    if (!mem_grow((void **)&l->digests, &l->cap_digests, l->n_entries, sizeof(*l->digests)))
        return false;
    (void)snprintf(l->digests[l->n_entries++], sizeof(*l->digests), "%s", e->digest);
    return true;
}

static void verify_one(struct listing *l, const char *digest)
{
    const char *base = NULL;
    pf_error err = {0};
    int rc = pf_cache_verify(l->args->cache_dir, digest, &base, &err);

    l->n_failed += rc != PF_OK;
    if (l->o->is_json) {
        struct json *it = json_new_object();

        json_set_z(it, "digest", digest);
        json_set_bool(it, "sound", rc == PF_OK);
        json_set_z(it, "base", base);
        json_set_z(it, "message", rc ? err.msg : NULL);
        json_add(l->array, it);
    } else if (rc) {
        out_field(l->o, digest, "NOT sound: %s", err.msg);
    } else {
        out_field(l->o, digest, "sound; base %s", base);
    }
}

static int run_verify(struct out *o, const void *p)
{
    const struct cache_args *args = p;
    struct listing l = {.o = o, .args = args};
    struct json *doc;
    const char *base;
    pf_error err = {0};
    int rc = PF_OK, status = EXIT_STATUS_OK;

    if (args->digest) {
        rc = pf_cache_verify(args->cache_dir, args->digest, &base, &err);
        if (rc)
            return out_fail(o, &err);
        if (!o->is_json) {
            out_field(o, args->digest, "sound; base %s", base);
            return EXIT_STATUS_OK;
        }
        doc = json_new_object();
        json_set_z(doc, "digest", args->digest);
        json_set_bool(doc, "sound", true);
        json_set_z(doc, "base", base);
        return out_json(o, doc);
    }
    rc = pf_cache_list(args->cache_dir, take_digest, &l, &err);
    if (rc)
        return out_fail(o, &err);
    l.array = json_new_array();
    for (uint32_t i = 0; i < l.n_entries; i++)
        verify_one(&l, l.digests[i]);
    if (o->is_json) {
        doc = json_new_object();
        json_set(doc, "entries", l.array);
        json_set_int(doc, "unsound", l.n_failed);
        status = out_json(o, doc);
    } else {
        json_free(l.array);
        out_field(o, "entries", "%u complete, %u not sound%s", l.n_entries, l.n_failed,
                  l.n_failed ? ": 'pageflip cache evict' removes them" : "");
    }
    mem_free(l.digests);
    return l.n_failed && status == EXIT_STATUS_OK ? EXIT_STATUS_FAILED : status;
}

/* ------------------------------------------------------------------------------- evict, clear, path */

static int run_evict(struct out *o, const void *p)
{
    const struct cache_args *args = p;
    struct json *doc;
    pf_error err = {0};

    if (pf_cache_evict(args->cache_dir, args->digest, &err))
        return out_fail(o, &err);
    if (!o->is_json) {
        out_field(o, "evicted", "%s", args->digest);
        return EXIT_STATUS_OK;
    }
    doc = json_new_object();
    json_set_z(doc, "evicted", args->digest);
    return out_json(o, doc);
}

static int run_clear(struct out *o, const void *p)
{
    const struct cache_args *args = p;
    struct pf_cache_clear_report r;
    struct json *doc;
    char size[16];
    pf_error err = {0};

    if (pf_cache_clear(args->cache_dir, &r, &err))
        return out_fail(o, &err);
    if (!o->is_json) {
        out_field(o, "evicted", "%u, %s", r.n_evicted, out_bytes((double)r.n_bytes, size));
        if (r.n_left)
            out_field(o, "left", "%u, in use", r.n_left);
        return EXIT_STATUS_OK;
    }
    doc = json_new_object();
    json_set_int(doc, "evicted", r.n_evicted);
    json_set_int(doc, "bytes", (int64_t)r.n_bytes);
    json_set_int(doc, "left", r.n_left);
    return out_json(o, doc);
}

static int run_path(struct out *o, const void *p)
{
    const struct cache_args *args = p;
    struct json *doc;
    char path[4096];
    pf_error err = {0};

    if (pf_cache_path(args->cache_dir, path, sizeof(path), &err))
        return out_fail(o, &err);
    if (!o->is_json) {
        (void)printf("%s\n", path);
        return EXIT_STATUS_OK;
    }
    doc = json_new_object();
    json_set_z(doc, "path", path);
    return out_json(o, doc);
}

#define CACHE_COMMAND                                                                              \
    .opts = opts, .n_opts = PF_COUNTOF(opts), .args_bytes = sizeof(struct cache_args)

const struct command cmd_cache_list = {
    .name = "cache list",
    .summary = "list merged weights in the cache: adapters, base, state, size, last use",
    .synopsis = "[--cache-dir DIR]",
    .detail = "Lists what the cache holds, the least recently used first. An entry is complete, or "
              "partial "
              "(its build was killed or cancelled; the next one continues it), or being built.",
    CACHE_COMMAND,
    .run = run_list,
};

const struct command cmd_cache_verify = {
    .name = "cache verify",
    .summary = "read merged weights in the cache and prove them",
    .synopsis = "[--cache-dir DIR] [DIGEST]",
    .detail = "Reads every byte of an entry, or of all complete ones, and compares it with its "
              "digests; then the base tensors that it was made from, unless the checkpoint is "
              "absent or was replaced by another one. The status is 1 when anything is not sound.",
    .operands = maybe_digest,
    .n_operands = PF_COUNTOF(maybe_digest),
    CACHE_COMMAND,
    .run = run_verify,
};

const struct command cmd_cache_evict = {
    .name = "cache evict",
    .summary = "remove one entry from the cache",
    .synopsis = "[--cache-dir DIR] DIGEST",
    .detail = "Removes an entry. One that any process uses or builds stays, and that is an error.",
    .operands = one_digest,
    .n_operands = PF_COUNTOF(one_digest),
    CACHE_COMMAND,
    .run = run_evict,
};

const struct command cmd_cache_clear = {
    .name = "cache clear",
    .summary = "remove everything from the cache that is not in use",
    .synopsis = "[--cache-dir DIR]",
    .detail = "Removes all entries that no process uses or builds, and what is remembered of "
              "checkpoints.",
    CACHE_COMMAND,
    .run = run_clear,
};

const struct command cmd_cache_path = {
    .name = "cache path",
    .summary = "say where the cache is",
    .synopsis = "[--cache-dir DIR]",
    .detail = "Prints the directory: --cache-dir, else $PAGEFLIP_CACHE ('off' for none), else "
              "$XDG_CACHE_HOME/pageflip, else ~/.cache/pageflip.",
    CACHE_COMMAND,
    .run = run_path,
};
