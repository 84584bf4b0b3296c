/*
 * Parsing of option tables by getopt_long, which is built from them. Called by the main thread alone, for getopt has
 * global state: once for the command line, once for each `generate` line of a script. Never prints: the caller decides how an error is shown.
 */
#include "cli/option.h"

#include <assert.h>
#include <getopt.h>
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"

#define VAL_BASE   256 /* long option i returns VAL_BASE + i; below are short letters */
#define N_OPTS_MAX 40

const struct opt common_opts[] = {
    {"json", 0, OPT_FLAG, NULL, "print one JSON document on standard output; errors too",
     offsetof(struct common_args, json), NULL, 0, 0, false},
    {"quiet", 'q', OPT_FLAG, NULL, "no progress bar and no warnings",
     offsetof(struct common_args, quiet), NULL, 0, 0, false},
    {"verbose", 'v', OPT_FLAG, NULL, "say more on standard error",
     offsetof(struct common_args, verbose), NULL, 0, 0, false},
    {"help", 'h', OPT_FLAG, NULL, "explain the command and its options",
     offsetof(struct common_args, help), NULL, 0, 0, false},
};
const size_t n_common_opts = PF_COUNTOF(common_opts);

bool opt_is_list(const struct opt *opt)
{
    return opt->type == OPT_LORA || opt->type == OPT_TEXTS || opt->type == OPT_FILES;
}

const struct opt *command_opt(const struct command *cmd, size_t i)
{
    if (i < cmd->n_opts)
        return &cmd->opts[i];
    i -= cmd->n_opts;
    return i < n_common_opts ? &common_opts[i] : NULL;
}

const char *near_name(const char *word, const char *const *names, size_t n)
{
    const char *best = NULL;
    size_t len = strlen(word), d_best = len <= 3 ? 1 : len <= 6 ? 2 : 3;

    for (size_t i = 0; i < n; i++) {
        size_t d = str_distance(str_of(word), str_of(names[i]), d_best);

        if (d < d_best || (d == d_best && !best)) {
            best = names[i];
            d_best = d;
        }
    }
    for (size_t i = 0; i < n && !best && len >= 2; i++) /* "comp" for "completion" */
        if (str_starts(str_of(names[i]), word))
            best = names[i];
    return best;
}

static int parse_int(const struct opt *opt, const char *text, struct arg_int *out, pf_error *err)
{
    uint64_t v, max = opt->max ? opt->max : UINT64_MAX;

    if (!str_to_u64(str_of(text), &v) || v < opt->min || v > max) {
        if (!opt->max)
            return err_set(err, PF_E_INVALID, "option '--%s' takes a whole number, not '%s'",
                           opt->name, text);
        return err_set(err, PF_E_INVALID,
                       "option '--%s' takes a whole number from %llu to %llu, not '%s'", opt->name,
                       (unsigned long long)opt->min, (unsigned long long)max, text);
    }
    *out = (struct arg_int){true, v};
    return PF_OK;
}

/* "4096", "512M", "512MiB" (powers of 1024), "4GB" (powers of 1000). */
static bool size_of(const char *text, uint64_t *out)
{
    static const char units[] = "KMGT";
    size_t n = strspn(text, "0123456789.");
    const char *unit = text + n, *at = *unit ? strchr(units, *unit == 'k' ? 'K' : *unit) : NULL;
    double v, step = !strcmp(unit, "") || !strcmp(unit + 1, "B") ? 1000 : 1024;

    if (!str_to_double((struct str){text, n}, &v) || (*unit && !at) ||
        (*unit && unit[1] && strcmp(unit + 1, "B") && strcmp(unit + 1, "iB")))
        return false;
    for (ptrdiff_t i = at ? at - units : -1; i >= 0; i--)
        v *= step;
    if (v < 1 || v >= 0x1p63)
        return false;
    *out = (uint64_t)v;
    return true;
}

static int parse_size(const struct opt *opt, const char *text, struct arg_int *out, pf_error *err)
{
    out->is_set = size_of(text, &out->v);
    return out->is_set ? PF_OK
                       : err_set(err, PF_E_INVALID,
                                 "option '--%s' takes a size in bytes, or like 512M, 4G, not '%s'",
                                 opt->name, text);
}

static int parse_part(const struct opt *opt, const char *text, struct arg_part *out, pf_error *err)
{
    const char *slash = strchr(text, '/');
    uint64_t i = 0, n = 0;

    if (!strcmp(text, "auto")) {
        *out = (struct arg_part){.is_auto = true};
        return PF_OK;
    }
    if (!slash || !str_to_u64((struct str){text, (size_t)(slash - text)}, &i) ||
        !str_to_u64(str_of(slash + 1), &n) || i < 1 || i > n || n > 65536)
        return err_set(err, PF_E_INVALID,
                       "option '--%s' takes I/N with I from 1 to N (1/4 is the first of four), or "
                       "auto, not '%s'",
                       opt->name, text);
    *out = (struct arg_part){(uint32_t)i, (uint32_t)n, false};
    return PF_OK;
}

static bool is_choice(const char *choices, const char *text)
{
    struct str want = str_of(text);

    for (const char *p = choices; *p;) {
        size_t n = strcspn(p, "|");

        if (str_eq((struct str){p, n}, want))
            return true;
        p += n + (p[n] == '|');
    }
    return false;
}

static int store(const struct opt *opt, const char *text, int argc, char *args, pf_error *err)
{
    void *field = args + opt->off;

    switch (opt->type) {
    case OPT_FLAG:
        *(bool *)field = true;
        return PF_OK;
    case OPT_CHOICE:
        if (!is_choice(opt->choices, text))
            return err_set(err, PF_E_INVALID, "option '--%s' takes one of %s, not '%s'", opt->name,
                           opt->choices, text);
        *(const char **)field = text;
        return PF_OK;
    case OPT_STRING:
    case OPT_FILE:
    case OPT_MODEL:
        if (!*text)
            return err_set(err, PF_E_INVALID, "option '--%s' was given an empty text", opt->name);
        *(const char **)field = text;
        return PF_OK;
    case OPT_LORA:
    case OPT_TEXTS:
    case OPT_FILES: {
        struct arg_list *list = field;

        if (!list->v && !(list->v = mem_calloc((size_t)argc, sizeof(*list->v))))
            return err_nomem(err, (size_t)argc * sizeof(*list->v), "arguments");
        list->v[list->n++] = text;
        return PF_OK;
    }
    case OPT_INT:
        return parse_int(opt, text, field, err);
    case OPT_SIZE:
        return parse_size(opt, text, field, err);
    case OPT_REAL: {
        struct arg_real *real = field;

        if (!str_to_double(str_of(text), &real->v) || !isfinite(real->v))
            return err_set(err, PF_E_INVALID, "option '--%s' takes a number, not '%s'", opt->name,
                           text);
        real->is_set = true;
        return PF_OK;
    }
    case OPT_PART:
        return parse_part(opt, text, field, err);
    }
    return PF_OK;
}

/* "--modle" -> the sentence that names it and the nearest option. */
static int unknown_option(const struct command *cmd, const char *word, pf_error *err)
{
    const char *names[N_OPTS_MAX], *near;
    const struct opt *opt;
    char bare[64];
    size_t n = 0, n_word = strcspn(word, "=");

    if (n_word > 2 && n_word - 2 < sizeof(bare)) {
        memcpy(bare, word + 2, n_word - 2);
        bare[n_word - 2] = 0;
        for (size_t i = 0; (opt = command_opt(cmd, i)) && n < N_OPTS_MAX; i++)
            names[n++] = opt->name;
        near = near_name(bare, names, n);
        if (near)
            return err_set(err, PF_E_INVALID, "unknown option '%.*s'; did you mean '--%s'?",
                           (int)n_word, word, near);
    }
    return err_set(err, PF_E_INVALID, "unknown option '%.*s'", (int)n_word, word);
}

static int bad_option(const struct command *cmd, int c, char *const *argv, pf_error *err)
{
    const struct opt *opt = NULL, *it;
    char letter[3] = {'-', 0, 0};

    for (size_t i = 0; (it = command_opt(cmd, i)); i++)
        if (optopt && (optopt == VAL_BASE + (int)i || optopt == it->short_name))
            opt = it;
    if (opt && c == ':')
        return err_set(err, PF_E_INVALID, "option '--%s' needs a value: --%s %s", opt->name,
                       opt->name, opt->arg);
    if (opt && opt->type == OPT_FLAG)
        return err_set(err, PF_E_INVALID, "option '--%s' takes no value", opt->name);
    if (optopt && optopt < VAL_BASE) {
        letter[1] = (char)optopt;
        return err_set(err, PF_E_INVALID, "unknown option '%s'", letter);
    }
    return unknown_option(cmd, argv[optind - 1], err);
}

static void build_tables(const struct command *cmd, struct option *longs, char *shorts)
{
    const struct opt *opt;
    size_t i, n = 0;

    shorts[n++] = ':'; /* a missing value is told apart from an unknown option */
    for (i = 0; (opt = command_opt(cmd, i)); i++) {
        longs[i] = (struct option){opt->name, opt->arg ? required_argument : no_argument, NULL,
                                   VAL_BASE + (int)i};
        if (opt->short_name) {
            shorts[n++] = opt->short_name;
            if (opt->arg)
                shorts[n++] = ':';
        }
    }
    longs[i] = (struct option){0};
    shorts[n] = 0;
}

static int parse_operands(const struct command *cmd, int argc, char **argv, char *args,
                          pf_error *err)
{
    size_t n = 0;

    for (int i = optind; i < argc; i++, n++) {
        if (n >= cmd->n_operands)
            return err_set(err, PF_E_INVALID, "'%s' is one argument too many", argv[i]);
        if (!*argv[i])
            return err_set(err, PF_E_INVALID, "%s is an empty text", cmd->operands[n].name);
        *(const char **)(void *)(args + cmd->operands[n].off) = argv[i];
    }
    if (n < cmd->n_operands && cmd->operands[n].is_required)
        return err_set(err, PF_E_INVALID, "%s is missing: %s", cmd->operands[n].name,
                       cmd->operands[n].help);
    return PF_OK;
}

int args_parse(const struct command *cmd, int argc, char **argv, void *args, pf_error *err)
{
    struct option longs[N_OPTS_MAX + 1];
    char shorts[2 * N_OPTS_MAX + 2];
    bool seen[N_OPTS_MAX] = {false};
    const struct opt *opt;
    int c, rc;

    assert(cmd->n_opts + n_common_opts <= N_OPTS_MAX);
    build_tables(cmd, longs, shorts);
    optind = 0;
    opterr = 0;
    while ((c = getopt_long(argc, argv, shorts, longs, NULL)) != -1) {
        size_t i = 0;

        if (c == '?' || c == ':')
            return bad_option(cmd, c, argv, err);
        while ((opt = command_opt(cmd, i)) && c != VAL_BASE + (int)i && c != opt->short_name)
            i++;
        if (seen[i] && !opt_is_list(opt) && opt->type != OPT_FLAG)
            return err_set(err, PF_E_INVALID, "option '--%s' was given twice", opt->name);
        seen[i] = true;
        if ((rc = store(opt, optarg, argc, args, err)))
            return rc;
    }
    if (((const struct common_args *)args)->help)
        return PF_OK;
    if ((rc = parse_operands(cmd, argc, argv, args, err)))
        return rc;
    for (size_t i = 0; i < cmd->n_opts; i++)
        if (cmd->opts[i].is_required && !seen[i])
            return err_set(err, PF_E_INVALID, "option '--%s' is missing: %s", cmd->opts[i].name,
                           cmd->opts[i].help);
    return PF_OK;
}

void args_release(const struct command *cmd, void *args)
{
    for (size_t i = 0; i < cmd->n_opts; i++)
        if (opt_is_list(&cmd->opts[i]))
            mem_free(((struct arg_list *)(void *)((char *)args + cmd->opts[i].off))->v);
}
