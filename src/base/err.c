/*
 * Filling the caller's pf_error. Every module ends its failing paths here. Messages are formatted aside first, so an argument
 * may point into the error that is being rewritten; they are cut at a character border, and control bytes are replaced, for
 * the names that they quote come from foreign files. Nothing here allocates, prints or keeps state.
 */
#include "base/err.h"

#include "base/str.h"

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MSG_BYTES sizeof(((pf_error *)NULL)->msg)

static const char *const names[] = {
    "ok",          "invalid",  "nomem",     "io",        "notfound", "format",    "range",
    "unsupported", "mismatch", "unmatched", "ambiguous", "conflict", "nonfinite", "overflow",
    "truncated",   "changed",  "exists",    "nospace",   "busy",     "cancelled", "state",
};
static_assert(PF_COUNTOF(names) == 1 - PF_E_STATE, "a name for every code");

const char *pf_error_name(int code)
{
    if (code > 0 || code < PF_E_STATE)
        return "unknown";
    return names[-code];
}

const char *pf_version(void)
{
    return PF_VERSION_STRING;
}

/* Length of text[0..n) without a UTF-8 character that was cut at the end. */
static size_t cut_partial(const char *text, size_t n)
{
    size_t n_tail = 0; /* continuation bytes at the end */
    while (n_tail < 3 && n_tail < n && ((unsigned char)text[n - 1 - n_tail] & 0xc0) == 0x80)
        n_tail++;
    if (n_tail == n)
        return n;
    unsigned char first = (unsigned char)text[n - 1 - n_tail];
    size_t n_char = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc0 ? 2 : 1;
    return n_char > n_tail + 1 ? n - n_tail - 1 : n;
}

/* vsnprintf into a message-sized buffer; returns the length kept. */
PF_PRINTF(2, 0)
static size_t format_text(char text[MSG_BYTES], const char *fmt, va_list ap)
{
    int n = vsnprintf(text, MSG_BYTES, fmt, ap);
    if (n < 0) {
        text[0] = '\0';
        return 0;
    }
    size_t len = (size_t)n;
    if (len >= MSG_BYTES) {
        len = cut_partial(text, MSG_BYTES - 1);
        text[len] = '\0';
    }
    str_tame(text, len);
    return len;
}

static void fill(pf_error *err, int code, int sys_errno, uint64_t off, const char *text, size_t n)
{
    err->code = code;
    err->sys_errno = sys_errno;
    err->off = off;
    memcpy(err->msg, text, n);
    err->msg[n] = '\0';
}

int err_set(pf_error *err, int code, const char *fmt, ...)
{
    if (err != NULL) {
        char text[MSG_BYTES];
        va_list ap;
        va_start(ap, fmt);
        size_t n = format_text(text, fmt, ap);
        va_end(ap);
        fill(err, code, 0, 0, text, n);
    }
    return code;
}

int err_at(pf_error *err, int code, uint64_t off, const char *fmt, ...)
{
    if (err != NULL) {
        char text[MSG_BYTES];
        va_list ap;
        va_start(ap, fmt);
        size_t n = format_text(text, fmt, ap);
        va_end(ap);
        fill(err, code, 0, off, text, n);
    }
    return code;
}

static int code_of_errno(int sys_errno)
{
    switch (sys_errno) {
    case ENOSPC:
    case EDQUOT:
        return PF_E_NOSPACE;
    case ENOMEM:
        return PF_E_NOMEM;
    case ENOENT:
    case ENOTDIR:
        return PF_E_NOTFOUND;
    default:
        return PF_E_IO;
    }
}

int err_sys(pf_error *err, int sys_errno, const char *fmt, ...)
{
    int code = code_of_errno(sys_errno);
    if (err != NULL) {
        char text[MSG_BYTES];
        va_list ap;
        va_start(ap, fmt);
        size_t n = format_text(text, fmt, ap);
        va_end(ap);
        fill(err, code, sys_errno, 0, text, n);
        /* The untranslated text: messages do not change with the caller's locale. */
        const char *why = strerrordesc_np(sys_errno);
        if (why != NULL)
            err_append(err, ": %s", why);
        else
            err_append(err, ": system error %d", sys_errno);
    }
    return code;
}

int err_nomem(pf_error *err, size_t n_bytes, const char *what)
{
    return err_set(err, PF_E_NOMEM, "out of memory for %zu bytes of %s", n_bytes, what);
}

int err_prefix(pf_error *err, int rc, const char *fmt, ...)
{
    if (err != NULL) {
        char text[MSG_BYTES];
        va_list ap;
        va_start(ap, fmt);
        size_t n = format_text(text, fmt, ap);
        va_end(ap);
        pf_error old = *err;
        bool is_joined = n > 0 && text[n - 1] == ' '; /* the caller wrote the separator */
        fill(err, old.code != PF_OK ? old.code : rc, old.sys_errno, old.off, text, n);
        err_append(err, "%s%s", is_joined ? "" : ": ", old.msg);
    }
    return rc;
}

void err_append(pf_error *err, const char *fmt, ...)
{
    if (err == NULL)
        return;
    char text[MSG_BYTES];
    va_list ap;
    va_start(ap, fmt);
    size_t n = format_text(text, fmt, ap);
    va_end(ap);
    size_t used = strnlen(err->msg, MSG_BYTES - 1);
    size_t n_free = MSG_BYTES - 1 - used;
    if (n > n_free)
        n = cut_partial(text, n_free);
    memcpy(err->msg + used, text, n);
    err->msg[used + n] = '\0';
}
