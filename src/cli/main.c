/*
 * The `pageflip` command: finds the command, parses its options by its table, runs it, and turns the outcome into an exit
 * status: 0 ok, 1 failed, 2 usage, 130 interrupted. The only place that leaves the process by returning.
 */
#include <fcntl.h>
#include <malloc.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "cli/command.h"
#include "cli/interrupt.h"

static void log_line(void *ctx, int level, const char *line)
{
    const struct out *o = ctx;

    if (level <= PF_LOG_WARN)
        out_warn(o, "%s", line);
    else
        (void)fprintf(stderr, "pageflip: %s\n", line);
}

/* Errors in options are reported as JSON too when --json stands anywhere before "--". */
static bool has_word(int argc, char **argv, const char *word)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--"); i++)
        if (!strcmp(argv[i], word))
            return true;
    return false;
}

static int run_command(struct out *o, const struct command *cmd, int argc, char **argv)
{
    const struct common_args *common;
    pf_error err = {0};
    void *args = mem_calloc(1, cmd->args_bytes);
    int status = EXIT_STATUS_OK;

    if (!args) {
        (void)err_nomem(&err, cmd->args_bytes, "options");
        return out_fail(o, &err);
    }
    common = args;
    if (args_parse(cmd, argc, argv, args, &err)) {
        status = out_usage(o, "%s", err.msg);
    } else if (common->help) {
        help_command(cmd);
    } else {
        o->is_json = common->json;
        o->is_quiet = common->quiet;
        pf_log_set(log_line, o, common->verbose ? PF_LOG_DEBUG : PF_LOG_WARN);
        status = cmd->run(o, args);
        pf_log_set(NULL, NULL, PF_LOG_ERROR);
    }
    args_release(cmd, args);
    mem_free(args);
    return status;
}

static int dispatch(struct out *o, int argc, char **argv)
{
    const struct command *cmd;
    pf_error err = {0};
    int n_words;

    if (argc > 1 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"))) {
        help_overview();
        return EXIT_STATUS_OK;
    }
    if (argc > 1 && (!strcmp(argv[1], "--version") || !strcmp(argv[1], "-V"))) {
        (void)printf("pageflip %s\n", pf_version());
        return EXIT_STATUS_OK;
    }
    if (argc > 1 && argv[1][0] == '-')
        return out_usage(o, "unknown option '%s' before a command; options follow the command",
                         argv[1]);
    if (command_find(argc - 1, argv + 1, &cmd, &n_words, &err))
        return out_usage(o, "%s", err.msg);
    o->command = cmd->name;
    return run_command(o, cmd, argc - n_words, argv + n_words);
}

/* A stream that the caller closed would be the next file that is opened, and what is printed would go into it. Held the wrong way round, it
 * stays an error to use it. */
static void hold_streams(void)
{
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0)
            (void)open("/dev/null", (fd ? O_RDONLY : O_WRONLY) | O_CLOEXEC); /* becomes fd */
}

int main(int argc, char **argv)
{
    struct out o = {.is_json = has_word(argc, argv, "--json")};

    hold_streams();
    /* Panels and activations go back to the system when they are freed, whichever thread had them: what is reported as memory is
     * then what is in use. Left alone, glibc raises the threshold with every block that is freed. */
    (void)mallopt(M_MMAP_THRESHOLD, 256 << 10);
    interrupt_install();
    return out_finish(&o, dispatch(&o, argc, argv));
}
