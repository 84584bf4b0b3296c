/*
 * Text, JSON and errors of the command; see out.h for who gets what. The table printer is in table.c.
 */
#include "cli/out.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "cli/interrupt.h"

#define N_LABEL   14
#define WIDTH_ANY 100

unsigned out_width(int fd)
{
    struct winsize size;

    if (isatty(fd) && !ioctl(fd, TIOCGWINSZ, &size) && size.ws_col >= 20)
        return size.ws_col;
    return WIDTH_ANY;
}

void out_clean(struct strbuf *b, struct str text)
{
    while (text.n) {
        size_t n_good = text.n, i = 0;

        (void)str_is_utf8(text, &n_good); /* the offset of the first bad byte is what is wanted */
        if (n_good > text.n)
            n_good = text.n;
        for (; i < n_good; i++) {
            unsigned char c = (unsigned char)text.p[i];

            /* C1 controls are two bytes in UTF-8: c2 80..9f */
            bool is_c1 = c == 0xc2 && i + 1 < n_good && (unsigned char)text.p[i + 1] < 0xa0;

            strbuf_add(b, c < 0x20 || c == 0x7f || is_c1 ? "?" : text.p + i, 1);
            i += is_c1;
        }
        if (n_good < text.n) {
            strbuf_adds(b, "?");
            n_good++;
        }
        text = str_cut_front(text, n_good);
    }
}

/* Prints words into lines of `width` columns, the first after n_used columns and the others indented by n_indent. */
static void print_wrapped(const char *text, unsigned n_used, unsigned n_indent, unsigned width)
{
    unsigned at = n_used;

    while (*text) {
        size_t n = strcspn(text, " ");

        if (at > n_indent && at + n >= width) {
            (void)printf("\n%*s", (int)n_indent, "");
            at = n_indent;
        }
        (void)printf("%.*s", (int)n, text);
        at += (unsigned)n;
        text += n;
        n = strspn(text, " ");
        if (text[n] && at + n + strcspn(text + n, " ") < width) {
            (void)printf("%.*s", (int)n, text);
            at += (unsigned)n;
        } else if (text[n]) {
            at = width; /* the next word opens a line */
        }
        text += n;
    }
    (void)putchar('\n');
}

void out_field(const struct out *o, const char *label, const char *fmt, ...)
{
    struct strbuf clean;
    va_list args;
    char text[4096];

    if (o->is_json)
        return;
    va_start(args, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, args); /* longer text is cut */
    va_end(args);
    strbuf_init(&clean);
    out_clean(&clean, str_of(text));
    (void)printf("%-*s", N_LABEL, label);
    if (isatty(STDOUT_FILENO))
        print_wrapped(strbuf_z(&clean), N_LABEL, N_LABEL, out_width(STDOUT_FILENO));
    else
        (void)printf("%s\n", strbuf_z(&clean));
    strbuf_release(&clean);
}

static void say(const char *kind, const char *text)
{
    struct strbuf clean;

    strbuf_init(&clean);
    out_clean(&clean, str_of(text));
    (void)fflush(stdout); /* keeps the order when both streams go to one place */
    (void)fprintf(stderr, "pageflip: %s%s\n", kind, strbuf_z(&clean));
    strbuf_release(&clean);
}

static PF_PRINTF(3, 0) void say_formatted(const struct out *o, const char *prefix, const char *fmt,
                                          va_list args)
{
    char text[4096];

    if (o->is_quiet)
        return;
    (void)vsnprintf(text, sizeof(text), fmt, args);
    say(prefix, text);
}

void out_warn(const struct out *o, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    say_formatted(o, "warning: ", fmt, args);
    va_end(args);
}

void out_note(const struct out *o, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    say_formatted(o, "note: ", fmt, args);
    va_end(args);
}

static int print_json(const struct out *o, struct json *doc, unsigned indent)
{
    struct strbuf text;
    pf_error err = {0};
    int rc;

    strbuf_init(&text);
    rc = json_write(doc, indent, &text, &err);
    json_free(doc);
    if (!rc)
        (void)printf("%s\n", strbuf_z(&text));
    strbuf_release(&text);
    return rc ? out_fail(o, &err) : EXIT_STATUS_OK;
}

int out_json(const struct out *o, struct json *doc)
{
    return print_json(o, doc, 2);
}

int out_json_line(const struct out *o, struct json *doc)
{
    int status = print_json(o, doc, 0);

    (void)fflush(stdout); /* a failure shows at the end: out_finish */
    return status;
}

static int fail(const struct out *o, const char *code, const char *text, int status)
{
    say("", text);
    if (o->is_json) {
        struct json *doc = json_new_object(), *error = json_new_object();

        json_set_z(error, "code", code);
        json_set(error, "message", json_new_string(str_of(text)));
        json_set(doc, "error", error);
        (void)out_json(&(struct out){.is_json = false}, doc); /* no error object for a failed one */
    }
    return status;
}

int out_fail(const struct out *o, const pf_error *err)
{
    if (err->code == PF_E_CANCELLED && interrupt_seen())
        return fail(o, pf_error_name(err->code), err->msg, EXIT_INTERRUPTED);
    return fail(o, pf_error_name(err->code), err->msg, EXIT_STATUS_FAILED);
}

int out_usage(const struct out *o, const char *fmt, ...)
{
    char text[4096], all[4200];
    va_list args;

    va_start(args, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    (void)snprintf(all, sizeof(all), "%s; see 'pageflip %s%s--help'", text,
                   o->command ? o->command : "", o->command ? " " : "");
    return fail(o, "usage", all, EXIT_STATUS_USAGE);
}

int out_interrupted(const struct out *o, const char *fmt, ...)
{
    char text[4096];
    va_list args;

    va_start(args, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    return fail(o, "cancelled", text, EXIT_INTERRUPTED);
}

int out_finish(const struct out *o, int status)
{
    (void)o;
    if (fflush(stdout) || ferror(stdout)) {
        say("", errno == ENOSPC ? "cannot write to standard output: the disk is full"
                                : "cannot write to standard output");
        return status ? status : EXIT_STATUS_FAILED;
    }
    return status;
}

const char *out_bytes(double n_bytes, char text[16])
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB"};
    size_t i = 0;

    while (n_bytes >= 999.95 && i + 1 < PF_COUNTOF(units)) {
        n_bytes /= 1000;
        i++;
    }
    (void)snprintf(text, 16, i ? "%.1f %s" : "%.0f %s", n_bytes, units[i]);
    return text;
}

const char *out_mib(uint64_t n_bytes, char text[16])
{
    (void)snprintf(text, 16, "%.1f MiB", (double)n_bytes / (1 << 20));
    return text;
}
