/*
 * `pageflip completion bash|zsh`: a completion script, printed from the option tables. The scripts are complete in themselves:
 * completing a word never starts the program.
 */
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "cli/bundled.h"
#include "cli/command.h"

struct completion_args {
    struct common_args common;
    const char *shell;
};

static const struct operand operands[] = {
    {"SHELL", "bash or zsh", OPT_STRING, offsetof(struct completion_args, shell), true},
};

/* First words of the commands, each once: "bench" for all of its subcommands. */
static void first_words(struct strbuf *b)
{
    const struct command *cmd;
    struct str last = {"", 0};

    for (size_t i = 0; (cmd = command_at(i)); i++) {
        struct str word = {cmd->name, strcspn(cmd->name, " ")};

        if (!str_eq(word, last))
            strbuf_addf(b, "%s%.*s", b->n ? " " : "", (int)word.n, word.p);
        last = word;
    }
}

/* Second words of a group; empty when `first` is a command by itself. */
static void second_words(struct str first, struct strbuf *b)
{
    const struct command *cmd;

    for (size_t i = 0; (cmd = command_at(i)); i++)
        if (strlen(cmd->name) > first.n && cmd->name[first.n] == ' ' &&
            str_eq((struct str){cmd->name, first.n}, first))
            strbuf_addf(b, "%s%s", b->n ? " " : "", cmd->name + first.n + 1);
}

/* Every first word that other words follow ("bench"), with those words. */
static void each_group(void (*fn)(struct str first, const char *seconds, struct strbuf *b),
                       struct strbuf *b)
{
    const struct command *cmd;
    struct str last = {"", 0};

    for (size_t i = 0; (cmd = command_at(i)); i++) {
        struct str first = {cmd->name, strcspn(cmd->name, " ")};
        struct strbuf seconds;

        if (!cmd->name[first.n] || str_eq(first, last))
            continue;
        last = first;
        strbuf_init(&seconds);
        second_words(first, &seconds);
        fn(first, strbuf_z(&seconds), b);
        strbuf_release(&seconds);
    }
}

static void adapter_names(struct strbuf *b)
{
    char **names = NULL;
    size_t n = 0;

    if (bundled_adapter_names(NULL, &names, &n, NULL))
        return; /* no data installed: nothing to offer */
    for (size_t i = 0; i < n; i++)
        strbuf_addf(b, "%s%s", i ? " " : "", names[i]);
    file_list_free(names, n);
}

static void add_choices(struct strbuf *b, const char *choices)
{
    for (; *choices; choices++)
        strbuf_add(b, *choices == '|' ? " " : choices, 1);
}

static bool takes_path(const struct opt *opt)
{
    return opt->type == OPT_FILE || opt->type == OPT_FILES || opt->type == OPT_MODEL;
}

/* One case per option that takes a value: "merge:--merge-dtype) words='base f32' ;;". */
static void bash_values(const struct command *cmd, const char *adapters, struct strbuf *b)
{
    const struct opt *opt;

    for (size_t i = 0; (opt = command_opt(cmd, i)); i++) {
        if (!opt->arg)
            continue;
        strbuf_addf(b, "        '%s:--%s'", cmd->name, opt->name);
        if (opt->short_name)
            strbuf_addf(b, "|'%s:-%c'", cmd->name, opt->short_name);
        strbuf_adds(b, ") ");
        if (opt->type == OPT_CHOICE) {
            strbuf_adds(b, "words='");
            add_choices(b, opt->choices);
            strbuf_adds(b, "' ;;\n");
        } else if (opt->type == OPT_LORA) {
            strbuf_addf(b, "words='%s' files=1 ;;\n", adapters);
        } else if (takes_path(opt)) {
            strbuf_adds(b, "files=1 ;;\n");
        } else {
            strbuf_adds(b, ";;\n");
        }
    }
}

static void bash_options(const struct command *cmd, const char *adapters, struct strbuf *b)
{
    const struct opt *opt;

    strbuf_addf(b, "        '%s') words='", cmd->name);
    for (size_t i = 0; (opt = command_opt(cmd, i)); i++)
        strbuf_addf(b, "%s--%s", i ? " " : "", opt->name);
    strbuf_adds(b, "'");
    for (size_t i = 0; i < cmd->n_operands; i++) {
        if (cmd->operands[i].type == OPT_LORA)
            strbuf_addf(b, "\n            [[ $cur != -* ]] && words='%s' && files=1", adapters);
        else if (cmd->operands[i].type == OPT_FILE)
            strbuf_adds(b, "\n            [[ $cur != -* ]] && words='' && files=1");
    }
    if (cmd == &cmd_completion)
        strbuf_adds(b, "\n            [[ $cur != -* ]] && words='bash zsh'");
    if (cmd == &cmd_help)
        strbuf_adds(b, "\n            [[ $cur != -* ]] && words=$commands");
    strbuf_adds(b, " ;;\n");
}

static void bash_group(struct str first, const char *seconds, struct strbuf *b)
{
    strbuf_addf(b,
                "    if [[ $cmd == %.*s ]]; then\n"
                "        if [[ $COMP_CWORD -eq 2 ]]; then\n"
                "            mapfile -t COMPREPLY < <(compgen -W '%s' -- \"$cur\")\n"
                "            return\n        fi\n"
                "        cmd=\"$cmd ${COMP_WORDS[2]}\"\n    fi\n",
                (int)first.n, first.p, seconds);
}

static void bash_script(struct strbuf *b)
{
    struct strbuf firsts, adapters;
    const struct command *cmd;

    strbuf_init(&firsts);
    strbuf_init(&adapters);
    first_words(&firsts);
    adapter_names(&adapters);
    strbuf_addf(
        b,
        "# bash completion for pageflip\n_pageflip()\n{\n"
        "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]}\n"
        "    local cmd=${COMP_WORDS[1]} words='' files=0\n"
        "    local commands='%s'\n"
        "    COMPREPLY=()\n"
        "    if [[ $cur == = ]]; then cur=''; elif [[ $prev == = ]]; then "
        "prev=${COMP_WORDS[COMP_CWORD - 2]}; fi\n"
        "    if [[ $COMP_CWORD -eq 1 ]]; then\n"
        "        mapfile -t COMPREPLY < <(compgen -W \"$commands --help --version\" -- \"$cur\")\n"
        "        return\n    fi\n",
        strbuf_z(&firsts));
    each_group(bash_group, b);
    strbuf_adds(b, "    case \"$cmd:$prev\" in\n");
    for (size_t i = 0; (cmd = command_at(i)); i++)
        bash_values(cmd, strbuf_z(&adapters), b);
    strbuf_adds(b, "        *) case \"$cmd\" in\n");
    for (size_t i = 0; (cmd = command_at(i)); i++)
        bash_options(cmd, strbuf_z(&adapters), b);
    strbuf_adds(b, "        esac ;;\n    esac\n"
                   "    mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$cur\"; ((files)) && "
                   "compgen -f -- \"$cur\")\n"
                   "    ((files)) && compopt -o filenames 2>/dev/null\n"
                   "}\ncomplete -F _pageflip pageflip\n");
    strbuf_release(&firsts);
    strbuf_release(&adapters);
}

/* Text inside '...[help]...' of _arguments: quotes and brackets must not end it. */
static void zsh_text(struct strbuf *b, const char *text)
{
    for (; *text; text++) {
        if (*text == '\'')
            strbuf_adds(b, "'\\''");
        else if (strchr("[]:\\", *text))
            strbuf_addf(b, "\\%c", *text);
        else
            strbuf_add(b, text, 1);
    }
}

static void zsh_option(const struct opt *opt, struct strbuf *b)
{
    const char *star = opt_is_list(opt) ? "*" : "";

    strbuf_addf(b, " \\\n            '%s--%s%s[", star, opt->name, opt->arg ? "=" : "");
    zsh_text(b, opt->help);
    strbuf_adds(b, "]");
    if (opt->arg) {
        strbuf_addf(b, ":%s:", opt->name);
        if (opt->type == OPT_CHOICE) {
            strbuf_adds(b, "(");
            add_choices(b, opt->choices);
            strbuf_adds(b, ")");
        } else if (opt->type == OPT_LORA) {
            strbuf_adds(b, "_pageflip_adapters");
        } else if (takes_path(opt)) {
            strbuf_adds(b, "_files");
        }
    }
    strbuf_adds(b, "'");
}

static void zsh_command(const struct command *cmd, struct strbuf *b)
{
    const struct opt *opt;

    strbuf_addf(b, "        '%s')\n            _arguments", cmd->name);
    for (size_t i = 0; (opt = command_opt(cmd, i)); i++)
        zsh_option(opt, b);
    if (cmd == &cmd_completion)
        strbuf_adds(b, " \\\n            ':shell:(bash zsh)'");
    else if (cmd == &cmd_help)
        strbuf_adds(b, " \\\n            ':command:($commands)'");
    else if (cmd->n_operands)
        strbuf_addf(b, " \\\n            ':file:%s'",
                    cmd->operands[0].type == OPT_LORA ? "_pageflip_adapters" : "_files");
    strbuf_adds(b, " ;;\n");
}

static void zsh_group(struct str first, const char *seconds, struct strbuf *b)
{
    strbuf_addf(
        b,
        "    if [[ $cmd == %.*s ]]; then\n"
        "        if ((CURRENT == 3)); then\n            compadd -- %s\n"
        "            return\n        fi\n"
        "        cmd=\"$cmd $words[3]\"\n        shift words\n        ((CURRENT--))\n    fi\n",
        (int)first.n, first.p, seconds);
}

static void zsh_script(struct strbuf *b)
{
    struct strbuf firsts, adapters;
    const struct command *cmd;

    strbuf_init(&firsts);
    strbuf_init(&adapters);
    first_words(&firsts);
    adapter_names(&adapters);
    strbuf_addf(b,
                "#compdef pageflip\n# zsh completion for pageflip\n"
                "_pageflip_adapters() {\n"
                "    _alternative 'names:adapter:(%s)' 'files:file:_files'\n}\n"
                "_pageflip() {\n"
                "    local -a commands=(%s)\n    local cmd=$words[2]\n"
                "    if ((CURRENT == 2)); then\n        compadd -- $commands --help --version\n"
                "        return\n    fi\n",
                strbuf_z(&adapters), strbuf_z(&firsts));
    each_group(zsh_group, b);
    strbuf_adds(b, "    shift words\n    ((CURRENT--))\n    case $cmd in\n");
    for (size_t i = 0; (cmd = command_at(i)); i++)
        zsh_command(cmd, b);
    strbuf_adds(b, "    esac\n}\n_pageflip \"$@\"\n");
    strbuf_release(&firsts);
    strbuf_release(&adapters);
}

static int run(struct out *o, const void *p)
{
    const struct completion_args *args = p;
    struct strbuf script;
    struct json *doc;
    pf_error err = {0};
    int status = EXIT_STATUS_OK;

    strbuf_init(&script);
    if (!strcmp(args->shell, "bash"))
        bash_script(&script);
    else if (!strcmp(args->shell, "zsh"))
        zsh_script(&script);
    else
        return out_usage(o, "no completion for shell '%s': there is bash and zsh", args->shell);
    if (!strbuf_ok(&script)) {
        (void)err_nomem(&err, script.cap, "a completion script");
        status = out_fail(o, &err);
    } else if (o->is_json) {
        doc = json_new_object();
        json_set_z(doc, "shell", args->shell);
        json_set_z(doc, "script", strbuf_z(&script));
        status = out_json(o, doc);
    } else {
        (void)fputs(strbuf_z(&script), stdout);
    }
    strbuf_release(&script);
    return status;
}

const struct command cmd_completion = {
    .name = "completion",
    .summary = "print a completion script for bash or zsh",
    .synopsis = "bash|zsh",
    .detail = "Prints a script that completes commands, options and their values: source "
              "<(pageflip completion bash).",
    .operands = operands,
    .n_operands = PF_COUNTOF(operands),
    .args_bytes = sizeof(struct completion_args),
    .run = run,
};
