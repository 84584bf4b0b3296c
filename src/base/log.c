/*
 * The process-wide log sink, one of the few globals of the project. A program installs it once, before it starts threads;
 * without one the library is silent. Lines are formatted on the stack: logging must work when memory is short.
 */
#include "base/log.h"

#include "base/str.h"

#include <stdarg.h>
#include <stdio.h>

static struct {
    pf_log_fn fn;
    void *ctx;
    int max_level;
} sink; /* written by pf_log_set alone, before other threads exist */

void pf_log_set(pf_log_fn fn, void *ctx, int max_level)
{
    sink.fn = fn;
    sink.ctx = ctx;
    sink.max_level = max_level;
}

void log_at(int level, const char *fmt, ...)
{
    if (sink.fn == NULL || level > sink.max_level)
        return;
    char line[4096];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(line, sizeof(line), fmt, ap);
    va_end(ap);
    if (n < 0)
        return;
    size_t len = (size_t)n < sizeof(line) ? (size_t)n : sizeof(line) - 1;
    while (len > 0 && line[len - 1] == '\n')
        line[--len] = '\0';
    str_tame(line, len);
    sink.fn(sink.ctx, level, line);
}
