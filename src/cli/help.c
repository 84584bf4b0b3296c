/*
 * `pageflip help` and every --help, printed from the option tables. `help --json` gives the tables themselves: the test of the
 * man page reads them from there.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli/command.h"

#define N_COL_OPTION 28

struct help_args {
    struct common_args common;
    const char *command, *subcommand;
};

static const struct operand operands[] = {
    {"COMMAND", "the command to explain", OPT_STRING, offsetof(struct help_args, command), false},
    {"SUBCOMMAND", "its second word", OPT_STRING, offsetof(struct help_args, subcommand), false},
};

/* Words of text in lines of at most `width` columns, each after n_indent blanks; the cursor stands at column `at`. */
static void print_text(const char *text, unsigned at, unsigned n_indent)
{
    unsigned width = out_width(STDOUT_FILENO);

    width = width > 100 ? 100 : width;
    while (*text) {
        size_t n = strcspn(text, " ");
        bool is_first = at <= n_indent;

        if (!is_first && at + 1 + n > width) {
            (void)putchar('\n');
            at = 0;
            is_first = true;
        }
        if (at < n_indent) {
            (void)printf("%*s", (int)(n_indent - at), "");
            at = n_indent;
            is_first = true;
        }
        (void)printf("%s%.*s", is_first ? "" : " ", (int)n, text);
        at += (unsigned)n + !is_first;
        text += n + (text[n] == ' ');
    }
    (void)putchar('\n');
}

static void print_option(const struct opt *opt)
{
    char left[80];
    int n;

    if (opt->short_name)
        n = snprintf(left, sizeof(left), "  -%c, --%s", opt->short_name, opt->name);
    else
        n = snprintf(left, sizeof(left), "      --%s", opt->name);
    if (opt->arg)
        n += snprintf(left + n, sizeof(left) - (size_t)n, " %s", opt->arg);
    (void)printf("%s", left);
    if (n + 2 > N_COL_OPTION) {
        (void)putchar('\n');
        n = 0;
    }
    print_text(opt->help, (unsigned)n, N_COL_OPTION);
}

void help_command(const struct command *cmd)
{
    const struct opt *opt;

    (void)printf("usage: pageflip %s%s%s\n\n", cmd->name, *cmd->synopsis ? " " : "", cmd->synopsis);
    print_text(cmd->detail, 0, 0);
    if (cmd->n_operands)
        (void)printf("\narguments:\n");
    for (size_t i = 0; i < cmd->n_operands; i++) {
        int n = printf("  %s", cmd->operands[i].name);

        print_text(cmd->operands[i].help, (unsigned)n, N_COL_OPTION);
    }
    (void)printf("\noptions:\n");
    for (size_t i = 0; (opt = command_opt(cmd, i)); i++)
        print_option(opt);
}

void help_overview(void)
{
    const struct command *cmd;

    (void)printf("usage: pageflip COMMAND [OPTIONS]\n\n");
    print_text(
        "Diffusion weights bigger than memory, and LoRA adapters on them, exactly. Without --model "
        "the bundled "
        "model is meant, and a bare word that is no path names a bundled adapter (--lora turbo).",
        0, 0);
    (void)printf("\ncommands:\n");
    for (size_t i = 0; (cmd = command_at(i)); i++)
        print_text(cmd->summary, (unsigned)printf("  %s", cmd->name), 18);
    (void)printf(
        "\n'pageflip COMMAND --help' explains a command, 'pageflip --version' says the version.\n");
}

static struct json *opt_json(const struct opt *opt)
{
    struct json *it = json_new_object();
    char letter[2] = {opt->short_name, 0};

    json_set_z(it, "name", opt->name);
    json_set_z(it, "short", opt->short_name ? letter : NULL);
    json_set_z(it, "arg", opt->arg);
    json_set_z(it, "help", opt->help);
    json_set_z(it, "choices", opt->choices);
    json_set_bool(it, "required", opt->is_required);
    json_set_bool(it, "repeatable", opt_is_list(opt));
    return it;
}

static struct json *command_json(const struct command *cmd)
{
    struct json *it = json_new_object(), *opts = json_new_array(), *list = json_new_array();

    json_set_z(it, "name", cmd->name);
    json_set_z(it, "summary", cmd->summary);
    json_set_z(it, "synopsis", cmd->synopsis);
    for (size_t i = 0; i < cmd->n_opts; i++)
        json_add(opts, opt_json(&cmd->opts[i]));
    json_set(it, "options", opts);
    for (size_t i = 0; i < cmd->n_operands; i++) {
        struct json *operand = json_new_object();

        json_set_z(operand, "name", cmd->operands[i].name);
        json_set_z(operand, "help", cmd->operands[i].help);
        json_set_bool(operand, "required", cmd->operands[i].is_required);
        json_add(list, operand);
    }
    json_set(it, "operands", list);
    return it;
}

static struct json *tables_json(const struct command *only)
{
    struct json *doc = json_new_object(), *list = json_new_array(), *common = json_new_array();
    const struct command *cmd;

    json_set_z(doc, "version", pf_version());
    for (size_t i = 0; (cmd = command_at(i)); i++)
        if (!only || cmd == only)
            json_add(list, command_json(cmd));
    json_set(doc, "commands", list);
    for (size_t i = 0; i < n_common_opts; i++)
        json_add(common, opt_json(&common_opts[i]));
    json_set(doc, "common_options", common);
    return doc;
}

static int run(struct out *o, const void *p)
{
    const struct help_args *args = p;
    char words[2][32], *argv[2] = {words[0], words[1]};
    const struct command *cmd = NULL;
    pf_error err = {0};
    int n_words;

    if (args->command) {
        (void)snprintf(words[0], sizeof(words[0]), "%s", args->command);
        (void)snprintf(words[1], sizeof(words[1]), "%s", args->subcommand ? args->subcommand : "");
        if (command_find(args->subcommand ? 2 : 1, argv, &cmd, &n_words, &err))
            return out_usage(o, "%s", err.msg);
        if (args->subcommand && n_words == 1)
            return out_usage(o, "'%s' has no second word: '%s'", args->command, args->subcommand);
    }
    if (o->is_json)
        return out_json(o, tables_json(cmd));
    if (cmd)
        help_command(cmd);
    else
        help_overview();
    return EXIT_STATUS_OK;
}

const struct command cmd_help = {
    .name = "help",
    .summary = "explain the commands",
    .synopsis = "[COMMAND]",
    .detail = "Explains a command, or lists them all. With --json the option tables themselves are "
              "printed.",
    .operands = operands,
    .n_operands = PF_COUNTOF(operands),
    .args_bytes = sizeof(struct help_args),
    .run = run,
};
