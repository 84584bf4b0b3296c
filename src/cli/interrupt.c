/*
 * The signal handler and its two words of state, the only mutable globals of the command: a handler has no other way to say
 * something. Both are lock-free atomics, relaxed: the flag carries no data with it.
 */
#include "cli/interrupt.h"

#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <unistd.h>

static atomic_int is_polled;
static atomic_int is_seen;

static void on_signal(int sig)
{
    (void)sig;
    if (!atomic_load_explicit(&is_polled, memory_order_relaxed) ||
        atomic_exchange_explicit(&is_seen, 1, memory_order_relaxed))
        _exit(EXIT_INTERRUPTED);
}

void interrupt_install(void)
{
    struct sigaction sa = {.sa_handler = on_signal, .sa_flags = SA_RESTART};

    sigemptyset(&sa.sa_mask);
    (void)sigaction(SIGINT, &sa, NULL); /* cannot fail with valid arguments */
    (void)sigaction(SIGTERM, &sa, NULL);
}

void interrupt_begin(void)
{
    atomic_store_explicit(&is_polled, 1, memory_order_relaxed);
}

void interrupt_end(void)
{
    atomic_store_explicit(&is_polled, 0, memory_order_relaxed);
}

bool interrupt_seen(void)
{
    return atomic_load_explicit(&is_seen, memory_order_relaxed) != 0;
}
