/*
 * Drawing of the progress bar: at most ten times a second, never wider than the terminal, one line that is redrawn and wiped
 * at the end. All text goes to standard error.
 */
#include "cli/progress.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/proc.h"
#include "base/str.h"
#include "cli/interrupt.h"
#include "cli/out.h"

#define N_REDRAW_NS 100000000u
#define N_BAR_MAX   40

void progress_begin(struct progress *p, bool is_wanted, bool is_bytes)
{
    *p = (struct progress){.is_on = is_wanted && isatty(STDERR_FILENO), .is_bytes = is_bytes};
    p->width = out_width(STDERR_FILENO);
    interrupt_begin();
}

/* "  1.2 GB/s, 0:42 left" into text; empty while nothing is known. */
static void rate_text(const struct progress *p, uint64_t done, uint64_t total, uint64_t t_ns,
                      char *text, size_t n_text)
{
    double seconds = (double)(t_ns - p->t_start_ns) * 1e-9;
    double moved = (double)(done - p->n_done_at_start), rate = moved / seconds;
    char size[16];
    uint64_t left;
    int n = 0;

    text[0] = 0;
    if (seconds < 0.02 || moved <= 0)
        return;
    if (p->is_bytes)
        n = snprintf(text, n_text, "  %s/s", out_bytes(rate, size));
    left = total > done ? (uint64_t)((double)(total - done) / rate + 0.5) : 0;
    if (total && n >= 0 && (size_t)n < n_text)
        (void)snprintf(text + n, n_text - (size_t)n, "  %" PRIu64 ":%02u left", left / 60,
                       (unsigned)(left % 60));
}

static void draw(const struct progress *p, const char *what, uint64_t done, uint64_t total,
                 uint64_t t_ns)
{
    char rate[64], bar[N_BAR_MAX + 1], line[256];
    double part = total ? (double)(done < total ? done : total) / (double)total : 0;
    unsigned n_bar = p->width > 70 ? N_BAR_MAX : 10, n_full = (unsigned)(part * n_bar);

    memset(bar, '.', n_bar);
    memset(bar, '#', n_full);
    bar[n_bar] = 0;
    rate_text(p, done, total, t_ns, rate, sizeof(rate));
    (void)snprintf(line, sizeof(line), "%.40s [%s] %3.0f %%%s", what, bar, 100 * part, rate);
    (void)fprintf(stderr, "\r%.*s\033[K", (int)(p->width - 1), line);
    (void)fflush(stderr);
}

bool progress_tick(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    struct progress *p = ctx;
    uint64_t t_ns;

    if (interrupt_seen())
        return false;
    if (!p->is_on)
        return true;
    t_ns = clock_ns();
    if (!p->is_begun || done < p->n_done_at_start) {
        p->is_begun = true;
        p->t_start_ns = t_ns;
        p->n_done_at_start = done;
    }
    if (t_ns - p->t_drawn_ns >= N_REDRAW_NS || done == total) {
        draw(p, what, done, total, t_ns);
        p->t_drawn_ns = t_ns;
    }
    return true;
}

void progress_end(struct progress *p)
{
    interrupt_end();
    if (p->is_on && p->is_begun) {
        (void)fputs("\r\033[K", stderr);
        (void)fflush(stderr);
    }
    p->is_on = false;
}
