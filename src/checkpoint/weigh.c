/*
 * What one directory offers: an index with its shards, a single file, a set of shards without index, and variants of each
 * (`x.fp16.safetensors`). Names alone decide: plain before variant, an index before a file, a name that diffusers or
 * transformers give before others. Two that are equally good are an error, not a guess. Called by ckpt_locate.c.
 */
#include "checkpoint/ckpt_locate.h"

#include <string.h>

#include "base/log.h"

enum offer_kind { OFFER_INDEX, OFFER_SINGLE, OFFER_SET };

/* A file name taken apart. */
struct offer {
    enum offer_kind kind;
    struct str name, stem, variant;
    uint64_t i_shard, n_shards; /* OFFER_SET */
};

static bool is_known_stem(struct str s)
{
    return str_eqz(s, "diffusion_pytorch_model") || str_eqz(s, "model");
}

static bool is_known_variant(struct str s)
{
    static const char *const known[] = {"fp16", "bf16", "fp32", "fp8", "ema", "non_ema"};
    for (size_t i = 0; i < PF_COUNTOF(known); i++)
        if (str_eqz(s, known[i]))
            return true;
    return false;
}

/* "model.fp16" -> "model", "fp16". A dot alone makes no variant: "wan2.1" is a name. */
static void split_variant(struct offer *o)
{
    struct str s = o->stem;
    size_t i = s.n;
    while (i > 0 && s.p[i - 1] != '.')
        i--;
    if (i < 2)
        return;
    struct str stem = {s.p, i - 1}, variant = str_cut_front(s, i);
    if (variant.n > 0 && (is_known_stem(stem) || is_known_variant(variant))) {
        o->stem = stem;
        o->variant = variant;
    }
}

/* Takes the digits at the end of *s off. */
static bool take_number(struct str *s, uint64_t *out)
{
    size_t i = s->n;
    while (i > 0 && s->p[i - 1] >= '0' && s->p[i - 1] <= '9')
        i--;
    if (!str_to_u64(str_cut_front(*s, i), out) || i == s->n)
        return false;
    s->n = i;
    return true;
}

/* "x-00001-of-00003" -> "x", 1, 3. */
static void split_shard(struct offer *o)
{
    struct str s = o->stem;
    uint64_t i_shard = 0, n_shards = 0;
    if (!take_number(&s, &n_shards) || !str_ends(s, "-of-"))
        return;
    s.n -= strlen("-of-");
    if (!take_number(&s, &i_shard) || !str_ends(s, "-") || n_shards == 0)
        return;
    o->stem = (struct str){s.p, s.n - 1};
    o->kind = OFFER_SET;
    o->i_shard = i_shard;
    o->n_shards = n_shards;
}

static bool parse_offer(const char *z, struct offer *out)
{
    static const char infix[] = ".safetensors.index.";
    struct str name = str_of(z);
    *out = (struct offer){.kind = OFFER_SINGLE, .name = name};
    const char *at = strstr(z, infix);
    if (z[0] == '.')
        return false;
    if (at != NULL && str_ends(name, ".json")) {
        /* "x.safetensors.index.json", or with a variant before the last dot. */
        struct str tail = str_cut_front(name, (size_t)(at - z) + sizeof infix - 1);
        out->kind = OFFER_INDEX;
        out->stem = (struct str){z, (size_t)(at - z)};
        if (tail.n > strlen(".json"))
            out->variant = str_cut_back(tail, strlen(".json"));
        else
            split_variant(out);
        return true;
    }
    if (!str_ends(name, ".safetensors"))
        return false;
    out->stem = str_cut_back(name, strlen(".safetensors"));
    split_shard(out); /* "x.fp16-00001-of-00002" */
    split_variant(out);
    if (out->kind == OFFER_SINGLE && out->variant.n > 0)
        split_shard(out); /* "x-00001-of-00002.fp16" */
    return true;
}

/* Lower is better; equal needs the same stem and variant, or is ambiguous. */
static unsigned rank(const struct offer *o)
{
    return (o->variant.n > 0 ? 4u : 0u) + (o->kind != OFFER_INDEX ? 2u : 0u) +
           (!is_known_stem(o->stem) ? 1u : 0u);
}

static bool is_same_model(const struct offer *x, const struct offer *y)
{
    return str_eq(x->stem, y->stem) && str_eq(x->variant, y->variant);
}

static bool is_same_set(const struct offer *x, const struct offer *y)
{
    return x->kind == OFFER_SET && y->kind == OFFER_SET && is_same_model(x, y) &&
           x->n_shards == y->n_shards;
}

/* The best offer, or an error that names two. */
static int choose(const char *dir, const struct offer *offers, size_t n, const struct offer **out,
                  pf_error *err)
{
    const struct offer *best = &offers[0], *rival = NULL;
    for (size_t i = 1; i < n; i++) {
        const struct offer *o = &offers[i];
        if (rank(o) < rank(best) ||
            (rank(o) == rank(best) && is_same_model(o, best) && o->kind < best->kind))
            best = o;
    }
    for (size_t i = 0; i < n && rival == NULL; i++) {
        const struct offer *o = &offers[i];
        if (o == best || rank(o) != rank(best) || is_same_set(o, best))
            continue;
        if (!is_same_model(o, best) || o->kind == best->kind)
            rival = o;
    }
    if (rival != NULL)
        return err_set(err, PF_E_AMBIGUOUS,
                       "directory '%s' holds several checkpoints, '%.*s' and '%.*s' among them: "
                       "name one of the files",
                       dir, (int)best->name.n, best->name.p, (int)rival->name.n, rival->name.p);
    *out = best;
    return PF_OK;
}

static void log_choice(const char *dir, const struct offer *offers, size_t n,
                       const struct offer *best)
{
    for (size_t i = 0; i < n; i++) {
        const struct offer *o = &offers[i];
        bool is_shard_of_best =
            best->kind == OFFER_INDEX && o->kind == OFFER_SET && is_same_model(o, best);
        if (o == best || is_same_set(o, best) || is_shard_of_best)
            continue;
        log_at(PF_LOG_INFO, "'%s': '%.*s' is used, '%.*s' beside it is not", dir, (int)best->name.n,
               best->name.p, (int)o->name.n, o->name.p);
    }
}

/* The files of a set of shards that has no index: complete, or refused. */
static int take_set(struct arena *a, const char *dir, const struct offer *offers, size_t n,
                    const struct offer *best, struct ckpt_place *out, pf_error *err)
{
    /* A complete set has at most n files; a slot more finds the gap of one that claims to have more. */
    size_t n_slots = best->n_shards <= n ? (size_t)best->n_shards : n + 1, i_gap = 0;
    const char **files = arena_alloc(a, (n + 1) * sizeof *files);
    if (files == NULL)
        return err_nomem(err, (n + 1) * sizeof *files, "shard names");
    for (size_t i = 0; i < n; i++) {
        const struct offer *o = &offers[i];
        if ((o != best && !is_same_set(o, best)) || o->i_shard == 0 || o->i_shard > n_slots)
            continue;
        files[o->i_shard - 1] = ckpt_arena_join(a, dir, o->name.p);
        if (files[o->i_shard - 1] == NULL)
            return err_nomem(err, o->name.n, "path");
    }
    while (i_gap < n_slots && files[i_gap] != NULL)
        i_gap++;
    if (i_gap < n_slots)
        return err_set(err, PF_E_NOTFOUND,
                       "directory '%s': shard %zu of the %llu of '%.*s' is missing, and there is "
                       "no index",
                       dir, i_gap + 1, (unsigned long long)best->n_shards, (int)best->stem.n,
                       best->stem.p);
    out->files = files;
    out->n_files = n_slots;
    return PF_OK;
}

static int take(struct arena *a, const char *dir, const struct offer *offers, size_t n,
                const struct offer *best, struct ckpt_place *out, pf_error *err)
{
    if (best->kind == OFFER_SET)
        return take_set(a, dir, offers, n, best, out, err);
    const char *path = ckpt_arena_join(a, dir, best->name.p);
    const char **files = arena_alloc(a, sizeof *files);
    if (path == NULL || files == NULL)
        return err_nomem(err, best->name.n, "path");
    if (best->kind == OFFER_INDEX) {
        out->index_path = path;
    } else {
        files[0] = path;
        out->files = files;
        out->n_files = 1;
    }
    return PF_OK;
}

static int weigh_names(struct arena *a, const char *dir, char **names, size_t n_names,
                       struct ckpt_place *out, const char **out_foreign, pf_error *err)
{
    struct offer *offers = arena_alloc(a, (n_names + 1) * sizeof *offers);
    size_t n = 0;
    if (offers == NULL)
        return err_nomem(err, (n_names + 1) * sizeof *offers, "file names");
    *out_foreign = NULL;
    for (size_t i = 0; i < n_names; i++) {
        if (parse_offer(names[i], &offers[n]))
            n++;
        else if (*out_foreign == NULL && ckpt_foreign_hint(str_of(names[i])) != NULL)
            *out_foreign = ckpt_arena_join(a, dir, names[i]);
    }
    if (n == 0)
        return PF_OK;
    out->path = dir;
    const struct offer *best = NULL;
    int rc = choose(dir, offers, n, &best, err);
    if (rc != PF_OK)
        return rc;
    log_choice(dir, offers, n, best);
    return take(a, dir, offers, n, best, out, err);
}

int ckpt_weigh(struct arena *a, const char *dir, struct ckpt_place *out, const char **out_foreign,
               pf_error *err)
{
    char **names = NULL;
    size_t n_names = 0;
    *out = (struct ckpt_place){0};
    int rc = file_list(dir, &names, &n_names, err);
    if (rc == PF_OK)
        rc = weigh_names(a, dir, names, n_names, out, out_foreign, err);
    file_list_free(names, n_names);
    return rc;
}
