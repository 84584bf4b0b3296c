/*
 * config.json of a DiTTransformer2DModel -> struct dit_config. Keys that are absent have the defaults of diffusers; what
 * this forward would compute differently is refused by name, so that no picture is quietly wrong.
 */
#include "base/json.h"
#include "model/dit.h"

#define CLASS_NAME "DiTTransformer2DModel"

struct int_field {
    const char *key;
    int64_t fallback, min, max;
};

static int read_int(const struct json *config, const char *path, const struct int_field *field,
                    int64_t *out, pf_error *err)
{
    const struct json *v = json_get(config, field->key);
    *out = field->fallback;
    if (json_typeof(v) == JSON_T_NULL)
        return PF_OK;
    if (json_typeof(v) != JSON_T_INT)
        return err_set(err, PF_E_FORMAT, "'%s': '%s' is not a whole number", path, field->key);
    *out = json_int(v);
    if (*out < field->min || *out > field->max)
        return err_set(err, PF_E_RANGE, "'%s': '%s' is %lld, not in %lld..%lld", path, field->key,
                       (long long)*out, (long long)field->min, (long long)field->max);
    return PF_OK;
}

/* A setting of which only one value is implemented. */
static int require_text(const struct json *config, const char *path, const char *key,
                        const char *want, pf_error *err)
{
    const struct json *v = json_get(config, key);
    if (json_typeof(v) == JSON_T_NULL)
        return PF_OK;
    const char *have = json_z(v);
    if (have == NULL)
        return err_set(err, PF_E_FORMAT, "'%s': '%s' is not a string", path, key);
    if (!str_eqz(str_of(have), want))
        return err_set(err, PF_E_UNSUPPORTED, "'%s': %s '%.64s' is not supported, only '%s'", path,
                       key, have, want);
    return PF_OK;
}

static int read_bool(const struct json *config, const char *path, const char *key, bool fallback,
                     bool *out, pf_error *err)
{
    const struct json *v = json_get(config, key);
    *out = fallback;
    if (json_typeof(v) == JSON_T_NULL)
        return PF_OK;
    if (json_typeof(v) != JSON_T_BOOL)
        return err_set(err, PF_E_FORMAT, "'%s': '%s' is neither true nor false", path, key);
    *out = json_bool(v);
    return PF_OK;
}

static int check_class(const struct json *config, const char *path, pf_error *err)
{
    const char *name = json_z(json_get(config, "_class_name"));
    if (name == NULL)
        return err_set(err, PF_E_UNSUPPORTED,
                       "'%s' names no model class in '_class_name': pictures are drawn with "
                       "" CLASS_NAME " only",
                       path);
    if (!str_eqz(str_of(name), CLASS_NAME))
        return err_set(err, PF_E_UNSUPPORTED,
                       "'%s': model class '%.128s' is not supported: pictures are drawn with "
                       "" CLASS_NAME " only",
                       path, name);
    return PF_OK;
}

static int check_variant(const struct json *config, const char *path, pf_error *err)
{
    int rc = require_text(config, path, "activation_fn", "gelu-approximate", err);
    if (rc == PF_OK)
        rc = require_text(config, path, "norm_type", "ada_norm_zero", err);
    bool is_affine = false;
    if (rc == PF_OK)
        rc = read_bool(config, path, "norm_elementwise_affine", false, &is_affine, err);
    if (rc == PF_OK && is_affine)
        rc = err_set(err, PF_E_UNSUPPORTED,
                     "'%s': norm_elementwise_affine true is not supported, only false", path);
    return rc;
}

static int read_sizes(const struct json *config, const char *path, struct dit_config *c,
                      pf_error *err)
{
    static const struct int_field fields[] = {
        {"num_layers", 28, 1, 4096},
        {"num_attention_heads", 16, 1, 1024},
        {"attention_head_dim", 72, 1, 1024},
        {"in_channels", 4, 1, 64},
        {"sample_size", 32, 1, 4096},
        {"patch_size", 2, 1, 64},
        {"num_embeds_ada_norm", 1000, 1, 1000000},
    };
    int64_t *const out[PF_COUNTOF(fields)] = {&c->n_blocks, &c->n_heads, &c->head_dim, &c->channels,
                                              &c->size,     &c->patch,   &c->n_classes};
    for (size_t i = 0; i < PF_COUNTOF(fields); i++) {
        int rc = read_int(config, path, &fields[i], out[i], err);
        if (rc != PF_OK)
            return rc;
    }
    int64_t out_channels = 0;
    const struct int_field field = {"out_channels", c->channels, 1, 128};
    int rc = read_int(config, path, &field, &out_channels, err);
    if (rc == PF_OK && out_channels != c->channels)
        rc = err_set(err, PF_E_UNSUPPORTED,
                     "'%s': out_channels %lld with in_channels %lld (a learned sigma) is not "
                     "supported, only equal ones",
                     path, (long long)out_channels, (long long)c->channels);
    return rc;
}

static int derive_sizes(const char *path, struct dit_config *c, pf_error *err)
{
    c->dim = c->n_heads * c->head_dim;
    c->n_inner = 4 * c->dim;
    c->patch_values = c->channels * c->patch * c->patch;
    if (c->size % c->patch != 0)
        return err_set(err, PF_E_UNSUPPORTED,
                       "'%s': sample_size %lld is not a multiple of patch_size %lld", path,
                       (long long)c->size, (long long)c->patch);
    int64_t side = c->size / c->patch;
    c->n_tokens = side * side;
    if (c->dim % 4 != 0)
        return err_set(err, PF_E_UNSUPPORTED,
                       "'%s': the width %lld (num_attention_heads x attention_head_dim) is not a "
                       "multiple of 4",
                       path, (long long)c->dim);
    if (c->dim > 65536 || c->n_tokens > 65536)
        return err_set(err, PF_E_RANGE,
                       "'%s': width %lld and %lld tokens: at most 65536 of each are supported",
                       path, (long long)c->dim, (long long)c->n_tokens);
    int64_t n_values = c->channels * c->size * c->size;
    if (n_values % 16 != 0)
        return err_set(err, PF_E_UNSUPPORTED,
                       "'%s': a picture has %lld x %lld x %lld = %lld values, which is not a "
                       "multiple of 16: its starting noise would depend on the other pictures",
                       path, (long long)c->channels, (long long)c->size, (long long)c->size,
                       (long long)n_values);
    return PF_OK;
}

int dit_config_read(const struct json *config, const char *path, struct dit_config *out,
                    pf_error *err)
{
    struct dit_config c = {0};
    int rc = check_class(config, path, err);
    if (rc == PF_OK)
        rc = check_variant(config, path, err);
    if (rc == PF_OK)
        rc = read_sizes(config, path, &c, err);
    if (rc == PF_OK)
        rc = derive_sizes(path, &c, err);
    if (rc == PF_OK)
        rc = read_bool(config, path, "attention_bias", true, &c.has_attn_bias, err);
    if (rc != PF_OK)
        return rc;
    const struct json *eps = json_get(config, "norm_eps");
    double norm_eps = json_is_number(eps) ? json_number(eps) : 1e-5;
    if (!(norm_eps > 0.0 && norm_eps < 1.0))
        return err_set(err, PF_E_RANGE, "'%s': norm_eps %g is not in (0, 1)", path, norm_eps);
    c.norm_eps = (float)norm_eps;
    *out = c;
    return PF_OK;
}
