/*
 * A progress bar on standard error, drawn only when that is a terminal and --quiet was not given. progress_tick is a
 * pf_progress_fn with a struct progress as context; it also is where a Ctrl-C becomes a cancellation.
 */
#ifndef PF_CLI_PROGRESS_H
#define PF_CLI_PROGRESS_H

#include "pageflip.h"

struct progress {
    bool is_on, is_bytes; /* is_bytes: amounts are bytes, and a rate is shown */
    bool is_begun;
    unsigned width;
    uint64_t t_start_ns, t_drawn_ns;
    /* A continued merge starts in the middle: that part took no time now */
    uint64_t n_done_at_start;
};

/* Also begins the section in which Ctrl-C is polled; progress_end ends it and wipes the bar. */
void progress_begin(struct progress *p, bool is_wanted, bool is_bytes);
bool progress_tick(void *ctx, const char *what, uint64_t done, uint64_t total);
void progress_end(struct progress *p);

#endif
