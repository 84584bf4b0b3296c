/*
 * The table of commands and the search in it. A command's name may have two words ("bench make"); the first alone is no command.
 */
#include "cli/command.h"

#include <string.h>

static const struct command *const commands[] = {
    &cmd_inspect,      &cmd_plan,         &cmd_merge,       &cmd_generate,     &cmd_serve,
    &cmd_cache_list,   &cmd_cache_verify, &cmd_cache_evict, &cmd_cache_clear,  &cmd_cache_path,
    &cmd_bench_make,   &cmd_bench_merge,  &cmd_bench_read,  &cmd_bench_memory, &cmd_bench_stream,
    &cmd_bench_switch, &cmd_help,         &cmd_completion,
};

const struct command *command_at(size_t i)
{
    return i < PF_COUNTOF(commands) ? commands[i] : NULL;
}

static bool is_group(const char *word)
{
    size_t n = strlen(word);

    for (size_t i = 0; i < PF_COUNTOF(commands); i++)
        if (!strncmp(commands[i]->name, word, n) && commands[i]->name[n] == ' ')
            return true;
    return false;
}

/* "'bench' needs a second word: make, merge, ..." */
static int half_a_command(const char *group, pf_error *err)
{
    size_t n = strlen(group);
    const char *before = ": ";

    (void)err_set(err, PF_E_NOTFOUND, "'%s' needs a second word", group);
    for (size_t i = 0; i < PF_COUNTOF(commands); i++)
        if (!strncmp(commands[i]->name, group, n) && commands[i]->name[n] == ' ') {
            err_append(err, "%s%s", before, commands[i]->name + n + 1);
            before = ", ";
        }
    return PF_E_NOTFOUND;
}

/* The sentence for a word that is no command; `prefix` is the group that it should be in, or "". */
static int unknown_command(const char *prefix, const char *word, pf_error *err)
{
    const char *names[PF_COUNTOF(commands)], *near;
    size_t n = 0, n_prefix = strlen(prefix);

    for (size_t i = 0; i < PF_COUNTOF(commands); i++)
        if (!strncmp(commands[i]->name, prefix, n_prefix))
            names[n++] = commands[i]->name + n_prefix;
    near = near_name(word, names, n);
    if (near)
        return err_set(err, PF_E_NOTFOUND, "unknown command '%s%s'; did you mean '%s%s'?", prefix,
                       word, prefix, near);
    return err_set(err, PF_E_NOTFOUND, "unknown command '%s%s'", prefix, word);
}

int command_find(int argc, char **argv, const struct command **out_cmd, int *out_n_words,
                 pf_error *err)
{
    char name[64];
    int n_words = argc > 0 && is_group(argv[0]) ? 2 : 1;

    if (argc < 1)
        return err_set(err, PF_E_NOTFOUND, "no command was given");
    if (strlen(argv[0]) > 24 || (n_words == 2 && argc > 1 && strlen(argv[1]) > 24))
        return err_set(err, PF_E_NOTFOUND, "unknown command '%s'", argv[n_words - 1]);
    if (n_words == 2 && (argc < 2 || argv[1][0] == '-'))
        return half_a_command(argv[0], err);
    memcpy(name, argv[0], strlen(argv[0]) + 1);
    if (n_words == 2) {
        size_t n = strlen(name);

        name[n] = ' ';
        memcpy(name + n + 1, argv[1], strlen(argv[1]) + 1);
    }
    for (size_t i = 0; i < PF_COUNTOF(commands); i++)
        if (!strcmp(commands[i]->name, name)) {
            *out_cmd = commands[i];
            *out_n_words = n_words;
            return PF_OK;
        }
    if (n_words == 2) {
        memcpy(name + strlen(argv[0]), " ", 2);
        return unknown_command(name, argv[1], err);
    }
    return unknown_command("", argv[0], err);
}
