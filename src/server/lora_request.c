/*
 * Broadcasting: a scalar stands for every adapter, a list must be as long as the list of nicknames, and an error names both lengths.
 */
#include "server/lora_request.h"

#include <stdio.h>
#include <string.h>

int lora_request_targets(struct arena *arena, const struct json *target, const char **out,
                         pf_error *err)
{
    bool is_list = json_typeof(target) == JSON_T_ARRAY;
    size_t n = is_list ? json_len(target) : target ? 1 : 0;
    struct strbuf text;
    int rc = PF_OK;

    *out = NULL;
    strbuf_init(&text);
    for (size_t i = 0; i < n; i++) {
        const char *one = json_z(is_list ? json_at(target, i) : target);

        if (!one || !*one) {
            rc = err_set(err, PF_E_INVALID, "a target is empty");
            break;
        }
        if (!strcmp(one, "all")) {
            strbuf_release(&text);
            return PF_OK;
        }
        strbuf_addf(&text, "%s%s", text.n ? "," : "", one);
    }
    if (!rc && n) {
        *out = strbuf_ok(&text) ? arena_strndup(arena, text.p, text.n) : NULL;
        if (!*out)
            rc = err_nomem(err, text.n + 1, "targets");
    }
    strbuf_release(&text);
    return rc;
}

/* The i-th value of a field that is absent, a scalar or a list of n. */
static const struct json *item(const struct json *field, size_t i)
{
    return json_typeof(field) == JSON_T_ARRAY ? json_at(field, i) : field;
}

static int check_lengths(struct lora_request *r, const struct json *body, pf_error *err)
{
    static const char *const names[] = {"lora_path", "target", "strength", "lora_alpha"};

    for (size_t i = 0; i < PF_COUNTOF(names); i++) {
        const struct json *v = json_get(body, names[i]);

        if (json_typeof(v) != JSON_T_ARRAY || json_len(v) == r->n)
            continue;
        (void)snprintf(r->param, sizeof(r->param), "%s", names[i]);
        return err_set(
            err, PF_E_INVALID,
            "'%s' has %zu items and 'lora_nickname' has %zu: lists are matched by position",
            names[i], json_len(v), r->n);
    }
    return PF_OK;
}

static int allocate(struct lora_request *r, size_t n, pf_error *err)
{
    r->n = n;
    r->loras = arena_alloc(&r->arena, (n + 1) * sizeof(*r->loras));
    r->paths = arena_alloc(&r->arena, (n + 1) * sizeof(*r->paths));
    return r->loras && r->paths ? PF_OK : err_nomem(err, n * sizeof(*r->loras), "adapters");
}

static int copy_text(struct lora_request *r, const struct json *v, const char **out, pf_error *err)
{
    struct str s = json_str(v);

    *out = NULL;
    if (json_typeof(v) != JSON_T_STRING)
        return PF_OK;
    *out = arena_strndup(&r->arena, s.p, s.n);
    return *out ? PF_OK : err_nomem(err, s.n + 1, "text");
}

static int32_t dtype_of(const struct json *v, int32_t otherwise)
{
    if (!v)
        return otherwise;
    return str_eqz(json_str(v), "f32") ? PF_MERGE_F32 : PF_MERGE_BASE;
}

/* The union of what the adapters name; NULL when one of them names everything. */
static int join_targets(struct lora_request *r, pf_error *err)
{
    struct strbuf text;

    strbuf_init(&text);
    for (size_t i = 0; i < r->n; i++) {
        if (!r->loras[i].target) {
            strbuf_release(&text);
            return PF_OK;
        }
        strbuf_addf(&text, "%s%s", i ? "," : "", r->loras[i].target);
    }
    r->targets = text.n && strbuf_ok(&text) ? arena_strndup(&r->arena, text.p, text.n) : NULL;
    strbuf_release(&text);
    return r->targets ? PF_OK : err_nomem(err, text.n, "targets");
}

static int fill_one(struct lora_request *r, size_t i, const struct json *nickname,
                    const struct json *path, const struct json *target, pf_error *err)
{
    struct pf_engine_lora *l = &r->loras[i];
    int rc = copy_text(r, nickname, &l->nickname, err);

    if (!rc)
        rc = copy_text(r, path, &r->paths[i], err);
    if (!rc && !l->nickname)
        l->nickname = r->paths[i]; /* a composition of its own may name a path alone */
    if (!rc && (!l->nickname || !*l->nickname)) {
        (void)snprintf(r->param, sizeof(r->param), "%s", nickname ? "lora_nickname" : "loras");
        rc = err_set(err, PF_E_INVALID, "adapter %zu has no nickname%s", i,
                     nickname ? "" : " and no path");
    }
    if (!rc && (rc = lora_request_targets(&r->arena, target, &l->target, err)))
        (void)snprintf(r->param, sizeof(r->param), "target");
    return rc;
}

/* One nickname is one file: the second path would take the place of the first. */
static int check_nicknames(struct lora_request *r, pf_error *err)
{
    for (size_t i = 0; i < r->n; i++)
        for (size_t k = 0; k < i; k++) {
            const char *a = r->paths[k], *b = r->paths[i];

            if (strcmp(r->loras[k].nickname, r->loras[i].nickname) != 0 || (!a && !b) ||
                (a && b && !strcmp(a, b)))
                continue;
            (void)snprintf(r->param, sizeof(r->param), "lora_path");
            return err_set(err, PF_E_INVALID,
                           "nickname '%s' comes twice, with different paths: give each its own",
                           r->loras[i].nickname);
        }
    return PF_OK;
}

int lora_request_parse(const struct json *body, int32_t merge_dtype, struct lora_request *r,
                       pf_error *err)
{
    const struct json *names = json_get(body, "lora_nickname");
    struct str mode = json_str(json_get(body, "merge_mode"));
    int rc;

    *r = (struct lora_request){.merge_dtype = dtype_of(json_get(body, "merge_dtype"), merge_dtype)};
    arena_init(&r->arena);
    r->way = str_eqz(mode, "merge")     ? PF_WAY_OVERLAY
             : str_eqz(mode, "dynamic") ? PF_WAY_STREAM
                                        : PF_WAY_AUTO;
    rc = allocate(r, json_typeof(names) == JSON_T_ARRAY ? json_len(names) : 1, err);
    if (!rc)
        rc = check_lengths(r, body, err);
    for (size_t i = 0; !rc && i < r->n; i++) {
        const struct json *strength = item(json_get(body, "strength"), i),
                          *alpha = item(json_get(body, "lora_alpha"), i);

        rc = fill_one(r, i, item(names, i), item(json_get(body, "lora_path"), i),
                      item(json_get(body, "target"), i), err);
        r->loras[i].strength = strength ? json_number(strength) : 1;
        r->loras[i].has_alpha = json_is_number(alpha);
        r->loras[i].alpha = json_number(alpha);
    }
    if (!rc)
        rc = check_nicknames(r, err);
    return rc ? rc : join_targets(r, err);
}

int lora_request_parse_own(const struct json *loras, int32_t merge_dtype, struct lora_request *r,
                           pf_error *err)
{
    const struct json *said = NULL;
    int rc;

    *r = (struct lora_request){.merge_dtype = merge_dtype};
    arena_init(&r->arena);
    rc = allocate(r, json_len(loras), err);
    for (size_t i = 0; !rc && i < r->n; i++) {
        const struct json *one = json_at(loras, i), *strength = json_get(one, "strength"),
                          *dtype = json_get(one, "merge_dtype");

        rc = fill_one(r, i, json_get(one, "nickname"), json_get(one, "path"),
                      json_get(one, "target"), err);
        r->loras[i].strength = strength ? json_number(strength) : 1;
        if (!rc && dtype && said && dtype_of(dtype, 0) != dtype_of(said, 0)) {
            (void)snprintf(r->param, sizeof(r->param), "loras[%zu].merge_dtype", i);
            rc = err_set(err, PF_E_INVALID, "a composition has one merge_dtype, this one has two");
        }
        said = dtype ? dtype : said;
    }
    r->merge_dtype = dtype_of(said, merge_dtype);
    return rc;
}

void lora_request_release(struct lora_request *r)
{
    arena_release(&r->arena);
    *r = (struct lora_request){0};
}
