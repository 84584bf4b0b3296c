/*
 * Parser of the --lora grammar, from the back: known ",key=value" suffixes are cut off as long as there are any, then one
 * ":number". Whatever is left is the path, untouched.
 */
#include "cli/lora_spec.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"

/* Offset of the last `c` in s, or s.n when there is none. */
static size_t rfind(struct str s, char c)
{
    for (size_t i = s.n; i > 0; i--)
        if (s.p[i - 1] == c)
            return i - 1;
    return s.n;
}

static int take_alpha(struct str value, const char *text, struct lora_spec *out, pf_error *err)
{
    if (out->has_alpha)
        return err_set(err, PF_E_INVALID, "lora '%s' gives alpha twice", text);
    if (!str_to_double(value, &out->alpha) || !isfinite(out->alpha))
        return err_set(err, PF_E_INVALID, "lora '%s': alpha is no finite number: '%.*s'", text,
                       (int)value.n, value.p);
    out->has_alpha = true;
    return PF_OK;
}

static int take_target(struct str value, const char *text, struct lora_spec *out, pf_error *err)
{
    if (out->target)
        return err_set(err, PF_E_INVALID, "lora '%s' gives target twice", text);
    if (!value.n)
        return err_set(err, PF_E_INVALID, "lora '%s' names no target after 'target='", text);
    out->target = mem_strndup(value.p, value.n);
    return out->target ? PF_OK : err_nomem(err, value.n + 1, "a lora target");
}

/* Cuts one known ",key=value" off the end. *out_cut false: there is none. */
static int cut_suffix(struct str *s, const char *text, struct lora_spec *out, bool *out_cut,
                      pf_error *err)
{
    size_t at = rfind(*s, ',');
    struct str tail = str_cut_front(*s, at < s->n ? at + 1 : s->n);
    int rc = PF_OK;

    *out_cut = true;
    if (str_starts(tail, "alpha="))
        rc = take_alpha(str_cut_front(tail, strlen("alpha=")), text, out, err);
    else if (str_starts(tail, "target="))
        rc = take_target(str_cut_front(tail, strlen("target=")), text, out, err);
    else
        *out_cut = false;
    if (*out_cut)
        s->n = at;
    return rc;
}

int lora_spec_parse(const char *text, struct lora_spec *out, pf_error *err)
{
    struct lora_spec spec = {.strength = 1};
    struct str s = str_of(text);
    bool is_cut = true;
    double strength;
    size_t colon;
    int rc = PF_OK;

    while (is_cut && !rc)
        rc = cut_suffix(&s, text, &spec, &is_cut, err);
    if (rc)
        goto fail;
    colon = rfind(s, ':');
    if (colon < s.n && str_to_double(str_cut_front(s, colon + 1), &strength)) {
        rc = PF_E_INVALID;
        if (!isfinite(strength)) {
            (void)err_set(err, rc, "lora '%s': strength is not finite: '%.*s'", text,
                          (int)(s.n - colon - 1), s.p + colon + 1);
            goto fail;
        }
        spec.strength = strength;
        s.n = colon;
    }
    if (!s.n) {
        rc = err_set(err, PF_E_INVALID, "lora '%s' names no file", text);
        goto fail;
    }
    spec.path = mem_strndup(s.p, s.n);
    if (!spec.path) {
        rc = err_nomem(err, s.n + 1, "a lora path");
        goto fail;
    }
    *out = spec;
    return PF_OK;

fail:
    lora_spec_release(&spec);
    return rc;
}

void lora_spec_release(struct lora_spec *spec)
{
    mem_free(spec->path);
    mem_free(spec->target);
    *spec = (struct lora_spec){0};
}

bool nickname_has(char c)
{
    return c && strchr("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.", c);
}
