/*
 * PEFT's LoraConfig, LoHaConfig and LoKrConfig, as adapter_config.json and as `lora_adapter_metadata`. Fields that only steer
 * training are skipped; a field that changes what the factors mean is either kept or refused by name. Nothing is guessed: what
 * is absent has PEFT's default.
 */
#include "adapter/config.h"

#include <math.h>
#include <string.h>
#include <strings.h>

#define PATTERNS_MAX   10000u /* modules times patterns are compared */
#define REGEXES_MAX    256u   /* that are more than a path: each is tried against each module */
#define COMPONENTS_MAX 16u
#define RANK_MAX       (1 << 20)

struct reader {
    const struct json *root;
    struct str component;
    const char *what;
    pf_error *err;
};

static const struct json *field(const struct reader *r, const char *name)
{
    char key[256];
    if (r->component.n == 0)
        return json_get(r->root, name);
    size_t n_name = strlen(name);
    if (r->component.n + n_name + 2 > sizeof key)
        return NULL;
    memcpy(key, r->component.p, r->component.n);
    key[r->component.n] = '.';
    memcpy(key + r->component.n + 1, name, n_name + 1);
    return json_get(r->root, key);
}

/* Absent, null, false, 0, "" and empty containers ask for nothing. */
static bool is_set(const struct json *v)
{
    switch (json_typeof(v)) {
    case JSON_T_NULL:
        return false;
    case JSON_T_BOOL:
        return json_bool(v);
    case JSON_T_INT:
    case JSON_T_REAL:
        return json_number(v) != 0;
    case JSON_T_STRING:
        return json_str(v).n > 0;
    default:
        return json_len(v) > 0;
    }
}

/* ------------------------------------------------------------------------------------------------ refusals */

static int refuse(const struct reader *r, const char *name, const char *why)
{
    return err_set(r->err, PF_E_UNSUPPORTED, "%s: '%s' is set: %s", r->what, name, why);
}

static int refuse_fields(const struct reader *r)
{
    static const struct {
        const char *name, *why;
    } refused[] = {
        {"use_dora", "DoRA is not supported yet"},
        {"use_qalora", "QALoRA is not supported"},
        {"use_bdlora", "block-diagonal LoRA is not supported"},
        {"layer_replication",
         "it was trained on a model whose layers were duplicated and renumbered"},
        {"target_parameters", "LoRA on parameters of experts (MoE) is not supported yet"},
        {"trainable_token_indices",
         "trained token rows replace rows of an embedding, which is not supported yet"},
        {"modules_to_save", "whole replacement tensors are not supported yet"},
        {"alora_invocation_tokens", "an activated LoRA acts on some tokens only: no change of a "
                                    "weight can do that"},
        {"arrow_config", "an arrow router chooses adapters per token: no change of a weight can do "
                         "that"},
    };
    for (size_t i = 0; i < PF_COUNTOF(refused); i++)
        if (is_set(field(r, refused[i].name)))
            return refuse(r, refused[i].name, refused[i].why);
    const struct json *v = field(r, "bias");
    struct str bias = json_str(v);
    if (json_typeof(v) != JSON_T_STRING && is_set(v))
        return err_set(r->err, PF_E_FORMAT, "%s: 'bias' is no string", r->what);
    if (bias.n > 0 && !str_eqz(bias, "none"))
        return err_set(r->err, PF_E_UNSUPPORTED,
                       "%s: 'bias' is '%.*s': trained biases replace those of the base, which is "
                       "not supported yet",
                       r->what, (int)bias.n, bias.p);
    return PF_OK;
}

/* Inits that took something out of the base: the factors belong to that other base. */
static int refuse_init(const struct reader *r)
{
    static const char *const residual[] = {"pissa", "olora", "corda", "loftq", "lora_ga", "mica"};
    static const char *const harmless[] = {"gaussian", "eva", "orthogonal", "lycoris", "default"};
    const struct json *v = field(r, "init_lora_weights");
    if (json_typeof(v) == JSON_T_NULL)
        v = field(r, "init_weights");
    if (json_typeof(v) == JSON_T_NULL || json_typeof(v) == JSON_T_BOOL)
        return PF_OK;
    if (json_typeof(v) != JSON_T_STRING)
        return err_set(r->err, PF_E_FORMAT,
                       "%s: 'init_lora_weights' is neither true, false nor a name", r->what);
    struct str s = json_str(v);
    for (size_t i = 0; i < PF_COUNTOF(residual); i++)
        if (s.n >= strlen(residual[i]) && strncasecmp(s.p, residual[i], strlen(residual[i])) == 0)
            return err_set(r->err, PF_E_UNSUPPORTED,
                           "%s: 'init_lora_weights' is '%.*s': training changed the base too, so "
                           "the factors are wrong on the original; convert the adapter first",
                           r->what, (int)s.n, s.p);
    for (size_t i = 0; i < PF_COUNTOF(harmless); i++)
        if (s.n == strlen(harmless[i]) && strncasecmp(s.p, harmless[i], s.n) == 0)
            return PF_OK;
    return err_set(r->err, PF_E_UNSUPPORTED,
                   "%s: 'init_lora_weights' is '%.*s', which is not known here: it may have "
                   "changed the base",
                   r->what, (int)s.n, s.p);
}

const char *config_type_name(enum ad_peft type)
{
    static const char *const names[] = {"LORA", "LOHA", "LOKR"};
    return names[type];
}

static int read_type(const struct reader *r, struct ad_config *out)
{
    const struct json *v = field(r, "peft_type");
    struct str s = json_str(v);
    out->type = AD_PEFT_LORA;
    if (json_typeof(v) == JSON_T_NULL)
        return PF_OK;
    for (int i = AD_PEFT_LORA; i <= AD_PEFT_LOKR; i++)
        if (str_eqz(s, config_type_name((enum ad_peft)i))) {
            out->type = (enum ad_peft)i;
            return PF_OK;
        }
    return err_set(r->err, PF_E_UNSUPPORTED,
                   "%s: peft_type '%.*s' is not supported: LORA, LOHA and LOKR are", r->what,
                   (int)s.n, s.p);
}

/* ------------------------------------------------------------------------------------------------- numbers */

static int check_number(const struct reader *r, const char *name, const struct json *v,
                        bool is_rank, double *out)
{
    double x = json_number(v);
    bool is_good = json_is_number(v) && isfinite(x);
    if (is_good && is_rank)
        is_good = x >= 1 && x <= RANK_MAX && x == floor(x);
    if (!is_good)
        return err_set(r->err, PF_E_FORMAT, "%s: '%s' is not %s", r->what, name,
                       is_rank ? "a whole number from 1 on" : "a finite number");
    *out = x;
    return PF_OK;
}

static int read_number(const struct reader *r, const char *name, bool is_rank, double *out)
{
    const struct json *v = field(r, name);
    if (v == NULL)
        return PF_OK;
    return check_number(r, name, v, is_rank, out);
}

static int read_bool(const struct reader *r, const char *name, bool *out)
{
    const struct json *v = field(r, name);
    if (json_typeof(v) != JSON_T_NULL && json_typeof(v) != JSON_T_BOOL)
        return err_set(r->err, PF_E_FORMAT, "%s: '%s' is neither true nor false", r->what, name);
    *out = json_bool(v);
    return PF_OK;
}

static int read_patterns(struct arena *arena, const struct reader *r, const char *name,
                         bool is_rank, struct ad_patterns *out)
{
    const struct json *v = field(r, name), *value;
    if (json_typeof(v) == JSON_T_NULL)
        return PF_OK;
    if (json_typeof(v) != JSON_T_OBJECT || json_len(v) > PATTERNS_MAX)
        return err_set(r->err, PF_E_FORMAT, "%s: '%s' is not an object of at most %u entries",
                       r->what, name, PATTERNS_MAX);
    out->items = arena_alloc(arena, json_len(v) * sizeof *out->items);
    if (out->items == NULL)
        return err_nomem(r->err, json_len(v) * sizeof *out->items, "patterns");
    const char *key;
    unsigned n_regexes = 0;
    for (void *it = json_iter_next(v, NULL, &key, &value); it != NULL;
         it = json_iter_next(v, it, &key, &value)) {
        double x = 0;
        int rc = check_number(r, name, value, is_rank, &x);
        if (rc != PF_OK)
            return rc;
        rc = pattern_compile(arena, str_of(key), x, &out->items[out->n], r->err);
        if (rc != PF_OK)
            return err_prefix(r->err, rc, "%s: '%s'", r->what, name);
        n_regexes += out->items[out->n].regex != NULL;
        out->n++;
        if (n_regexes > REGEXES_MAX)
            return err_set(r->err, PF_E_RANGE, "%s: '%s' has more than %u regular expressions",
                           r->what, name, REGEXES_MAX);
    }
    return PF_OK;
}

static int read_targets(struct arena *arena, const struct reader *r, struct ad_config *out)
{
    const struct json *v = field(r, "target_modules");
    size_t n = json_typeof(v) == JSON_T_ARRAY ? json_len(v) : 0;
    if (n == 0)
        return PF_OK; /* a regular expression, "all-linear", or nothing: the tensors say it */
    out->targets = arena_alloc(arena, n * sizeof *out->targets);
    if (out->targets == NULL)
        return err_nomem(r->err, n * sizeof *out->targets, "target modules");
    for (size_t i = 0; i < n; i++) {
        struct str s = json_str(json_at(v, i));
        char *copy = arena_strndup(arena, s.p, s.n);
        if (copy == NULL)
            return err_nomem(r->err, s.n, "target modules");
        out->targets[i] = (struct str){copy, s.n};
    }
    out->n_targets = n;
    return PF_OK;
}

/* ------------------------------------------------------------------------------------------------- public */

int config_parse(struct arena *arena, const struct json *root, struct str component,
                 const char *what, struct ad_config *out, pf_error *err)
{
    struct reader r = {.root = root, .component = component, .what = what, .err = err};
    *out = (struct ad_config){.what = what, .component = component, .r = 8, .alpha = 8};
    if (json_typeof(root) != JSON_T_OBJECT)
        return err_set(err, PF_E_FORMAT, "%s: not a JSON object", what);
    int rc = read_type(&r, out);
    if (rc == PF_OK)
        rc = refuse_fields(&r);
    if (rc == PF_OK)
        rc = refuse_init(&r);
    if (rc == PF_OK)
        rc = read_number(&r, "r", true, &out->r);
    if (rc == PF_OK)
        rc =
            read_number(&r, out->type == AD_PEFT_LORA ? "lora_alpha" : "alpha", false, &out->alpha);
    if (rc == PF_OK && out->type == AD_PEFT_LORA)
        rc = read_bool(&r, "use_rslora", &out->use_rslora);
    if (rc == PF_OK && out->type == AD_PEFT_LORA)
        rc = read_bool(&r, "fan_in_fan_out", &out->fan_in_fan_out);
    if (rc == PF_OK)
        rc = read_patterns(arena, &r, "rank_pattern", true, &out->ranks);
    if (rc == PF_OK)
        rc = read_patterns(arena, &r, "alpha_pattern", false, &out->alphas);
    if (rc == PF_OK)
        rc = read_targets(arena, &r, out);
    if (rc != PF_OK)
        config_release(out);
    return rc;
}

static void patterns_release(struct ad_patterns *p)
{
    for (size_t i = 0; i < p->n; i++)
        pattern_release(&p->items[i]);
    p->n = 0;
}

void config_release(struct ad_config *c)
{
    patterns_release(&c->ranks);
    patterns_release(&c->alphas);
}

int config_components(struct arena *arena, const struct json *root, const char *what,
                      struct str **out, size_t *out_n, pf_error *err)
{
    if (json_typeof(root) != JSON_T_OBJECT)
        return err_set(err, PF_E_FORMAT, "%s: not a JSON object", what);
    struct str *found = arena_alloc(arena, COMPONENTS_MAX * sizeof *found);
    if (found == NULL)
        return err_nomem(err, COMPONENTS_MAX * sizeof *found, "components");
    size_t n = 0;
    const char *key;
    const struct json *value;
    for (void *it = json_iter_next(root, NULL, &key, &value); it != NULL;
         it = json_iter_next(root, it, &key, &value)) {
        const char *dot = strrchr(key, '.');
        struct str component = {key, dot != NULL ? (size_t)(dot - key) : 0};
        size_t i = 0;
        while (i < n && !str_eq(found[i], component))
            i++;
        if (i < n)
            continue;
        if (n == COMPONENTS_MAX)
            return err_set(err, PF_E_FORMAT, "%s: more than %u components", what, COMPONENTS_MAX);
        char *copy = arena_strndup(arena, component.p, component.n);
        if (copy == NULL)
            return err_nomem(err, component.n, "components");
        /* PEFT writes every field: without r this is another document, and its defaults would be guesses. */
        struct reader r = {.root = root, .component = {copy, component.n}};
        if (field(&r, "r") == NULL)
            return err_set(err, PF_E_FORMAT, "%s: no '%s%sr' in it: it is no LoRA config", what,
                           copy, component.n > 0 ? "." : "");
        found[n++] = (struct str){copy, component.n};
    }
    *out = found;
    *out_n = n;
    return PF_OK;
}

static void patterns_hash(const struct ad_patterns *p, struct hasher *h)
{
    hasher_add_u64(h, p->n);
    for (size_t i = 0; i < p->n; i++) {
        hasher_add_str(h, p->items[i].text.p, p->items[i].text.n);
        hasher_add_double(h, p->items[i].value);
    }
}

void config_hash(const struct ad_config *c, struct hasher *h)
{
    hasher_add_u64(h, c->type);
    hasher_add_double(h, c->r);
    hasher_add_double(h, c->alpha);
    hasher_add_u64(h, c->use_rslora);
    hasher_add_u64(h, c->fan_in_fan_out);
    patterns_hash(&c->ranks, h);
    patterns_hash(&c->alphas, h);
}
