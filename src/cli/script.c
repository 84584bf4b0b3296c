/*
 * Parser of script lines: first the words, as a shell would cut them, then what the operation makes of them. Must not guess: a word
 * that an operation does not know is an error that names it.
 */
#include "cli/script.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "cli/option.h"

static const char *const op_names[] = {"",      "load",    "unload",     "set",
                                       "merge", "unmerge", "deactivate", "generate",
                                       "wait",  "status",  "settle"};

const char *script_op_name(enum script_op op)
{
    return op_names[op];
}

void script_line_release(struct script_line *line)
{
    for (size_t i = 0; i < line->n_specs; i++)
        lora_spec_release(&line->specs[i]);
    mem_free(line->specs);
    mem_free(line->words);
    mem_free(line->text);
    *line = (struct script_line){0};
}

/* ------------------------------------------------------------------------------------------------- words */

/* Where the cutter is. Output never gets longer than the input. */
struct cutter {
    struct str in;
    size_t i;  /* next character */
    char *out; /* next free byte of line->text */
};

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r';
}

/* After the opening quote; copies up to the closing one. */
static int cut_quoted(struct cutter *c, char quote, pf_error *err)
{
    for (; c->i < c->in.n && c->in.p[c->i] != quote; c->i++) {
        if (quote == '"' && c->in.p[c->i] == '\\' && c->i + 1 < c->in.n &&
            strchr("\"\\", c->in.p[c->i + 1]))
            c->i++;
        *c->out++ = c->in.p[c->i];
    }
    if (c->i == c->in.n)
        return err_set(err, PF_E_INVALID, "a quote %c is not closed", quote);
    c->i++;
    return PF_OK;
}

static int cut_word(struct cutter *c, pf_error *err)
{
    while (c->i < c->in.n && !is_blank(c->in.p[c->i]) && c->in.p[c->i] != '&') {
        char ch = c->in.p[c->i++];
        int rc = PF_OK;

        if (ch == '\'' || ch == '"')
            rc = cut_quoted(c, ch, err);
        else if (ch == '\\' && c->i == c->in.n)
            rc = err_set(err, PF_E_INVALID, "a backslash ends the line: lines cannot be continued");
        else
            *c->out++ = ch == '\\' ? c->in.p[c->i++] : ch;
        if (rc)
            return rc;
    }
    *c->out++ = 0;
    return PF_OK;
}

static int cut_words(struct str text, struct script_line *line, pf_error *err)
{
    struct cutter c = {.in = text};
    int rc = PF_OK;

    if (text.n > SCRIPT_LINE_MAX)
        return err_set(err, PF_E_INVALID, "the line has more than %d characters", SCRIPT_LINE_MAX);
    if (memchr(text.p, 0, text.n))
        return err_set(err, PF_E_INVALID, "the line holds a NUL byte: a script is text");
    line->text = c.out = mem_alloc(2 * text.n + 1);
    line->words = mem_calloc(text.n + 2, sizeof(*line->words));
    if (!line->text || !line->words)
        return err_nomem(err, text.n, "a line");
    while (!rc) {
        while (c.i < text.n && is_blank(text.p[c.i]))
            c.i++;
        if (c.i == text.n || text.p[c.i] == '#')
            return PF_OK;
        if (line->is_background)
            return err_set(err, PF_E_INVALID,
                           "'&' ends a line: quote it where it is part of a word");
        if (text.p[c.i] == '&') {
            line->is_background = true;
            c.i++;
            continue;
        }
        line->words[line->n_words++] = c.out;
        rc = cut_word(&c, err);
    }
    return rc;
}

/* ------------------------------------------------------------------------------------------- operations */

static int choice(const char *what, const char *value, const char *const *choices, size_t n,
                  const char **out, pf_error *err)
{
    struct strbuf list;

    if (*out)
        return err_set(err, PF_E_INVALID, "'%s' is given twice", what);
    for (size_t i = 0; i < n; i++)
        if (!strcmp(value, choices[i])) {
            *out = choices[i];
            return PF_OK;
        }
    strbuf_init(&list);
    for (size_t i = 0; i < n; i++)
        strbuf_addf(&list, "%s%s", i ? ", " : "", choices[i]);
    (void)err_set(err, PF_E_INVALID, "'%s' is one of %s, not '%s'", what, strbuf_z(&list), value);
    strbuf_release(&list);
    return PF_E_INVALID;
}

/* "target=..." into line; *out_is false: the word is something else. */
static int take_target(struct script_line *line, const char *word, bool *out_is, pf_error *err)
{
    *out_is = !strncmp(word, "target=", 7);
    if (!*out_is)
        return PF_OK;
    if (line->target)
        return err_set(err, PF_E_INVALID, "'target' is given twice");
    if (!word[7])
        return err_set(err, PF_E_INVALID, "'target=' names no component");
    line->target = word + 7;
    return PF_OK;
}

/* The settings of a set line; *out_is false: the word is an adapter. */
static int take_setting(struct script_line *line, const char *word, bool *out_is, pf_error *err)
{
    static const char *const ways[] = {"auto", "overlay", "stream", "inplace"};
    static const char *const dtypes[] = {"base", "f32"};
    static const char *const keys[] = {"target", "way", "merge-dtype"};
    size_t n_key = strspn(word, "abcdefghijklmnopqrstuvwxyz-_");
    int rc = take_target(line, word, out_is, err);

    if (rc || *out_is)
        return rc;
    *out_is = true;
    if (!strncmp(word, "way=", 4))
        return choice("way", word + 4, ways, PF_COUNTOF(ways), &line->way, err);
    if (!strncmp(word, "merge-dtype=", 12))
        return choice("merge-dtype", word + 12, dtypes, PF_COUNTOF(dtypes), &line->merge_dtype,
                      err);
    if (!strcmp(word, "allow-unmatched")) {
        line->allow_unmatched = true;
        return PF_OK;
    }
    if (word[n_key] == '=') {
        char *key = mem_strndup(word, n_key);
        const char *near = key ? near_name(key, keys, PF_COUNTOF(keys)) : NULL;

        mem_free(key);
        (void)err_set(err, PF_E_INVALID, "'set' has no setting '%.*s'", (int)n_key, word);
        if (near)
            err_append(err, "; did you mean '%s='?", near);
        return PF_E_INVALID;
    }
    *out_is = false;
    return PF_OK;
}

static int parse_set(struct script_line *line, pf_error *err)
{
    bool is_setting;
    int rc = PF_OK;

    line->specs = mem_calloc(line->n_words, sizeof(*line->specs));
    if (!line->specs)
        return err_nomem(err, line->n_words * sizeof(*line->specs), "adapters");
    for (size_t i = 1; !rc && i < line->n_words; i++) {
        rc = take_setting(line, line->words[i], &is_setting, err);
        if (!rc && !is_setting)
            rc = lora_spec_parse(line->words[i], &line->specs[line->n_specs], err);
        if (!rc && !is_setting)
            line->n_specs++;
    }
    if (!rc && !line->n_specs)
        rc = err_set(err, PF_E_INVALID, "'set' names no adapter; 'deactivate' takes them off");
    return rc;
}

static int parse_load(struct script_line *line, pf_error *err)
{
    char *word = line->n_words == 2 ? line->words[1] : NULL;
    char *equals = word ? strchr(word, '=') : NULL;

    if (!equals || equals == word || !equals[1])
        return err_set(err, PF_E_INVALID, "'load' takes NAME=PATH");
    *equals = 0;
    for (const char *p = word; *p; p++)
        if (!nickname_has(*p))
            return err_set(err, PF_E_INVALID,
                           "'%s' cannot be a nickname: letters, digits, '_', '-' and '.' can",
                           word);
    line->name = word;
    line->path = equals + 1;
    return PF_OK;
}

static int parse_unload(struct script_line *line, pf_error *err)
{
    if (line->n_words != 2 || !*line->words[1])
        return err_set(err, PF_E_INVALID, "'unload' takes NAME");
    line->name = line->words[1];
    return PF_OK;
}

/* merge, unmerge, deactivate, and the operations that take no words at all. */
static int parse_others(struct script_line *line, pf_error *err)
{
    bool is_change =
        line->op == SCRIPT_MERGE || line->op == SCRIPT_UNMERGE || line->op == SCRIPT_DEACTIVATE;
    bool has_factor = false, is_target = false;
    int rc = PF_OK;

    line->factor = 1;
    for (size_t i = 1; !rc && i < line->n_words; i++) {
        const char *word = line->words[i];

        if (is_change)
            rc = take_target(line, word, &is_target, err);
        if (rc || is_target)
            continue;
        if (line->op != SCRIPT_MERGE || has_factor)
            rc = err_set(err, PF_E_INVALID, "'%s' does not take '%s'", line->words[0], word);
        else if (!str_to_double(str_of(word), &line->factor) || !isfinite(line->factor))
            rc = err_set(err, PF_E_INVALID, "'merge' takes a finite factor, not '%s'", word);
        has_factor = true;
    }
    return rc;
}

static int find_op(struct script_line *line, pf_error *err)
{
    const char *near;

    for (size_t i = 1; i < PF_COUNTOF(op_names); i++)
        if (!strcmp(line->words[0], op_names[i]))
            line->op = (enum script_op)i;
    if (line->op != SCRIPT_NOTHING)
        return PF_OK;
    (void)err_set(err, PF_E_INVALID, "unknown word '%s'", line->words[0]);
    near = near_name(line->words[0], op_names + 1, PF_COUNTOF(op_names) - 1);
    if (near)
        err_append(err, "; did you mean '%s'?", near);
    return PF_E_INVALID;
}

static int parse(struct str text, struct script_line *line, pf_error *err)
{
    int rc = cut_words(text, line, err);

    if (rc || (!line->n_words && !line->is_background))
        return rc;
    if (!line->n_words)
        return err_set(err, PF_E_INVALID, "'&' stands alone");
    if ((rc = find_op(line, err)))
        return rc;
    if (line->is_background && line->op != SCRIPT_GENERATE)
        return err_set(err, PF_E_INVALID, "only 'generate' runs in the background");
    switch (line->op) {
    case SCRIPT_GENERATE: /* its options are looked at when it is run */
        return PF_OK;
    case SCRIPT_SET:
        return parse_set(line, err);
    case SCRIPT_LOAD:
        return parse_load(line, err);
    case SCRIPT_UNLOAD:
        return parse_unload(line, err);
    default:
        return parse_others(line, err);
    }
}

int script_parse(struct str text, struct script_line *out, pf_error *err)
{
    struct script_line line = {0};
    int rc = parse(text, &line, err);

    if (rc)
        script_line_release(&line);
    else
        *out = line;
    return rc;
}
