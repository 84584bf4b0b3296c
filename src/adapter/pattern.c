/*
 * The regular expressions of rank_pattern and alpha_pattern. PEFT takes the first key K, in the order of the config, for which
 * re.match(rf"(.*\.)?({K})$", path) holds. Nearly all keys are paths, compared by hand; the rest is translated to POSIX ERE, and
 * what cannot be translated faithfully, or could cost too much, is refused naming the pattern.
 */
#include "adapter/config.h"

#include <regex.h>
#include <string.h>

#define PATTERN_BYTES_MAX 1000u
#define REPEAT_MAX        255u

static bool is_letter(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* Letters, digits, underscores, hyphens, and dots (which match any character). */
static bool is_plain(struct str s)
{
    for (size_t i = 0; i < s.n; i++) {
        char c = s.p[i];
        if (!is_letter(c) && !is_digit(c) && c != '_' && c != '-' && c != '.')
            return false;
    }
    return s.n > 0;
}

/* ------------------------------------------------------------------------------------------- translation */

struct translation {
    struct str in;
    size_t i;
    struct strbuf *out;
    unsigned n_repeats, n_groups, n_open;
};

/* A backslash and what follows. */
static bool translate_escape(struct translation *t)
{
    if (t->i + 1 >= t->in.n)
        return false;
    char c = t->in.p[t->i + 1];
    t->i += 2;
    if (c == 'd')
        strbuf_adds(t->out, "[0-9]");
    else if (c == 'D')
        strbuf_adds(t->out, "[^0-9]");
    else if (c == 'w' || c == 'W' || c == 's' || c == 'S' || c == 'b' || c == 'B')
        strbuf_addf(t->out, "\\%c", c);
    else if (is_letter(c) || is_digit(c) || (unsigned char)c < 0x20 || (unsigned char)c >= 0x7f)
        return false;
    else if (strchr(".[]{}()*+?^$|\\", c) != NULL)
        strbuf_addf(t->out, "\\%c", c);
    else
        strbuf_add(t->out, &c, 1);
    return true;
}

static bool translate_bracket(struct translation *t)
{
    size_t i = t->i + 1;
    if (i < t->in.n && t->in.p[i] == '^')
        i++;
    size_t first = i;
    /* A backslash, or `[`, means one thing here to Python and another to POSIX. */
    while (i < t->in.n && (t->in.p[i] != ']' || i == first)) {
        if (t->in.p[i] == '\\' || t->in.p[i] == '[')
            return false;
        i++;
    }
    if (i >= t->in.n)
        return false;
    strbuf_add(t->out, t->in.p + t->i, i + 1 - t->i);
    t->i = i + 1;
    return true;
}

/* {m}, {m,} or {m,n}: at most one in a pattern, and small, for they multiply. */
static bool translate_repeat(struct translation *t)
{
    const char *close = memchr(t->in.p + t->i, '}', t->in.n - t->i);
    if (close == NULL || ++t->n_repeats > 1)
        return false;
    struct str body = {t->in.p + t->i + 1, (size_t)(close - t->in.p) - t->i - 1};
    const char *comma = memchr(body.p, ',', body.n);
    struct str low = {body.p, comma != NULL ? (size_t)(comma - body.p) : body.n};
    struct str high = comma != NULL ? str_cut_front(body, low.n + 1) : (struct str){body.p, 0};
    uint64_t m = 0, n = 0;
    if (!str_to_u64(low, &m) || m > REPEAT_MAX)
        return false;
    if (high.n > 0 && (!str_to_u64(high, &n) || n > REPEAT_MAX || n < m))
        return false;
    strbuf_add(t->out, t->in.p + t->i, body.n + 2);
    t->i += body.n + 2;
    return true;
}

/* A quantifier was just copied: a lazy one matches the same strings, a second one is an error or possessive. */
static bool after_quantifier(struct translation *t)
{
    if (t->i < t->in.n && t->in.p[t->i] == '?')
        t->i++;
    return t->i >= t->in.n || strchr("*+?{", t->in.p[t->i]) == NULL;
}

static bool translate_one(struct translation *t)
{
    char c = t->in.p[t->i];
    switch (c) {
    case '\\':
        return translate_escape(t);
    case '[':
        return translate_bracket(t);
    case '{':
        return translate_repeat(t) && after_quantifier(t);
    case '*':
    case '+':
    case '?':
        strbuf_add(t->out, &c, 1);
        t->i++;
        return after_quantifier(t);
    case '(':
        strbuf_add(t->out, &c, 1);
        t->i++;
        t->n_open++;
        if (++t->n_groups > 16)
            return false;
        if (t->i < t->in.n &&
            t->in.p[t->i] == '?') { /* (?: is a group; lookaround and flags are not */
            if (t->i + 1 >= t->in.n || t->in.p[t->i + 1] != ':')
                return false;
            t->i += 2;
        }
        /* What may not begin a group in one of the two languages. */
        return t->i < t->in.n && strchr("*+?{|)", t->in.p[t->i]) == NULL;
    case '|':
        strbuf_add(t->out, &c, 1);
        t->i++;
        return t->i >= t->in.n || strchr("*+?{", t->in.p[t->i]) == NULL;
    case ')':
        strbuf_add(t->out, &c, 1);
        t->i++;
        return t->n_open-- > 0;
    case '}':
    case '\0':
        return false;
    default:
        strbuf_add(t->out, &c, 1);
        t->i++;
        return true;
    }
}

static bool translate(struct str in, struct strbuf *out)
{
    struct translation t = {.in = in, .out = out};
    if (in.n == 0 || strchr("*+?{|", in.p[0]) != NULL)
        return false;
    strbuf_adds(out, "^(.*\\.)?(");
    while (t.i < in.n)
        if (!translate_one(&t))
            return false;
    strbuf_adds(out, ")$");
    return t.n_open == 0 && strbuf_ok(out);
}

/* ------------------------------------------------------------------------------------------------- public */

int pattern_compile(struct arena *arena, struct str text, double value, struct ad_pattern *out,
                    pf_error *err)
{
    *out = (struct ad_pattern){.value = value};
    char *copy = arena_strndup(arena, text.p, text.n);
    if (copy == NULL)
        return err_nomem(err, text.n, "a pattern");
    out->text = (struct str){copy, text.n};
    out->is_anchored = text.n > 0 && text.p[0] == '^';
    out->letters = str_cut_front(out->text, out->is_anchored ? 1 : 0);
    if (is_plain(out->letters))
        return PF_OK;
    struct strbuf ere;
    strbuf_init(&ere);
    int rc = PF_OK;
    regex_t *regex = NULL;
    if (text.n > PATTERN_BYTES_MAX || !translate(out->text, &ere))
        goto refused;
    regex = mem_calloc(1, sizeof *regex);
    if (regex == NULL) {
        rc = err_nomem(err, sizeof *regex, "a pattern");
        goto out;
    }
    if (regcomp(regex, ere.p, REG_EXTENDED | REG_NOSUB) != 0)
        goto refused;
    out->regex = regex;
    regex = NULL;
    goto out;
refused:
    rc = err_set(err, PF_E_UNSUPPORTED,
                 "pattern '%.*s': this regular expression has no exact counterpart here",
                 (int)(text.n > 200 ? 200 : text.n), text.p);
out:
    mem_free(regex);
    strbuf_release(&ere);
    return rc;
}

void pattern_release(struct ad_pattern *p)
{
    if (p->regex != NULL)
        regfree(p->regex);
    mem_free(p->regex);
    p->regex = NULL;
}

bool pattern_matches(const struct ad_pattern *p, struct str path)
{
    if (p->regex == NULL) {
        if (path.n < p->letters.n)
            return false;
        size_t at = path.n - p->letters.n;
        if (at > 0 && (p->is_anchored || path.p[at - 1] != '.'))
            return false;
        for (size_t i = 0; i < p->letters.n; i++)
            if (p->letters.p[i] != '.' && p->letters.p[i] != path.p[at + i])
                return false;
        return true;
    }
    char z[1024];
    if (path.n >= sizeof z)
        return false;
    memcpy(z, path.p, path.n);
    z[path.n] = '\0';
    return regexec(p->regex, z, 0, NULL, 0) == 0;
}
