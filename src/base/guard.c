/*
 * The SIGBUS guard: a fixed table of mappings that the signal handler reads without locks. Writers (register, unregister)
 * hold a mutex and bracket every change of a slot with an odd sequence number; the handler skips a slot that is being changed,
 * so it can never combine the start of one mapping with the length of another. The handler calls nothing that is not
 * async-signal-safe, and must never act on an address outside the table: everything else goes to whoever was there before.
 */
#include "base/guard.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/compiler.h"

#define N_SLOTS    65536
#define N_PREVIOUS 64

struct slot {
    _Atomic uint32_t seq; /* odd while begin and end change */
    _Atomic bool is_tripped;
    _Atomic uintptr_t begin, end; /* whole pages; begin 0: free */
};

/* 1.5 MiB of zero pages: only the slots that were ever used become memory. */
static struct slot slots[N_SLOTS];
static _Atomic int n_used; /* slots below this may be in use */
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static int i_free_hint; /* guarded by mu: no free slot below */
static _Atomic uintptr_t page_bytes;

/* Handlers that ours was installed over, each once; an entry never changes after i_previous was set to it. */
static struct sigaction previous[N_PREVIOUS];
static int n_previous; /* guarded by mu */
static _Atomic int i_previous;
/* Set while this thread is in somebody else's handler: one that chains back to us must not send us round for ever. */
static PF_TLS_IN_HANDLER volatile sig_atomic_t is_chaining;

/* The default action, by the default handler: the signal is blocked now and arrives when we return. */
static void die_by_default(int sig)
{
    struct sigaction dfl = {.sa_handler = SIG_DFL};
    (void)sigemptyset(&dfl.sa_mask);
    /* If this failed we would come back here: nothing better to do */
    (void)sigaction(sig, &dfl, NULL);
    (void)raise(sig);
}

/* What would have happened without us. */
static void chain(int sig, siginfo_t *info, void *context)
{
    const struct sigaction *old =
        &previous[atomic_load_explicit(&i_previous, memory_order_acquire)];
    const bool is_fault = info->si_code > 0;
    const bool is_plain = !(old->sa_flags & SA_SIGINFO);
    if (is_plain && old->sa_handler == SIG_IGN && !is_fault)
        return;
    if (is_chaining || (is_plain && (old->sa_handler == SIG_DFL || old->sa_handler == SIG_IGN))) {
        die_by_default(sig);
        return;
    }
    is_chaining = 1;
    if (is_plain)
        old->sa_handler(sig);
    else
        old->sa_sigaction(sig, info, context);
    is_chaining = 0;
}

static bool map_zeros(uintptr_t page, size_t n_bytes)
{
    // NOLINTNEXTLINE(performance-no-int-to-ptr): an address from siginfo
    return mmap((void *)page, n_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) !=
           MAP_FAILED;
}

static bool repair(uintptr_t address)
{
    const uintptr_t n_page = atomic_load_explicit(&page_bytes, memory_order_relaxed);
    const uintptr_t page = address & ~(n_page - 1);
    const int n = atomic_load_explicit(&n_used, memory_order_acquire);
    for (int i = 0; i < n; i++) {
        struct slot *s = &slots[i];
        /* A sequence lock: acquire before the fields, fence and re-read after them. */
        const uint32_t seq = atomic_load_explicit(&s->seq, memory_order_acquire);
        const uintptr_t begin = atomic_load_explicit(&s->begin, memory_order_acquire);
        const uintptr_t end = atomic_load_explicit(&s->end, memory_order_acquire);
        if ((seq & 1) || atomic_load_explicit(&s->seq, memory_order_relaxed) != seq)
            continue;
        if (!begin || page < begin || page >= end)
            continue;
        /* The flag first: whoever reads the zeros must be able to see it. */
        atomic_store_explicit(&s->is_tripped, true, memory_order_release);
        /* Scattered faults could use up the process's mappings: then the whole rest becomes one. */
        return map_zeros(page, n_page) || map_zeros(page, end - page);
    }
    return false;
}

static void on_sigbus(int sig, siginfo_t *info, void *context)
{
    const int saved_errno = errno;
    if (info->si_code != BUS_ADRERR || !repair((uintptr_t)info->si_addr))
        chain(sig, info, context);
    errno = saved_errno;
}

static bool is_same_action(const struct sigaction *a, const struct sigaction *b)
{
    return a->sa_flags == b->sa_flags && a->sa_sigaction == b->sa_sigaction;
}

/* At every registration, because somebody may have put another handler in our place, or "restored" the one before us. */
static bool install(void)
{
    struct sigaction ours = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO | SA_ONSTACK}, now;
    int i = 0;
    is_chaining = 0; /* a handler that we called may have left by longjmp */
    atomic_store_explicit(&page_bytes, (uintptr_t)sysconf(_SC_PAGESIZE), memory_order_relaxed);
    /* Read first what is there: our handler may run before a combined call has returned. */
    if (sigaction(SIGBUS, NULL, &now))
        return false;
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_sigbus)
        return true;
    while (i < n_previous && !is_same_action(&previous[i], &now))
        i++;
    if (i == N_PREVIOUS)
        return true; /* still guarded if whoever is there calls us; no room to call them */
    if (i == n_previous)
        previous[n_previous++] = now;
    atomic_store_explicit(&i_previous, i, memory_order_release);
    (void)sigemptyset(&ours.sa_mask);
    return !sigaction(SIGBUS, &ours, NULL);
}

static void set_slot(struct slot *s, uintptr_t begin, uintptr_t end)
{
    const uint32_t seq = atomic_load_explicit(&s->seq, memory_order_relaxed);
    /* In this order for every reader: odd before the fields, even after them. */
    atomic_store_explicit(&s->seq, seq + 1, memory_order_seq_cst);
    atomic_store_explicit(&s->begin, begin, memory_order_seq_cst);
    atomic_store_explicit(&s->end, end, memory_order_seq_cst);
    atomic_store_explicit(&s->seq, seq + 2, memory_order_release);
}

int guard_register(const void *p, size_t n_bytes)
{
    int i_found = -1;
    if (!p || !n_bytes)
        return -1;
    (void)pthread_mutex_lock(&mu);
    if (install()) {
        const uintptr_t n_page = atomic_load_explicit(&page_bytes, memory_order_relaxed);
        const uintptr_t begin = (uintptr_t)p & ~(n_page - 1);
        const uintptr_t end = ((uintptr_t)p + n_bytes + n_page - 1) & ~(n_page - 1);
        for (int i = i_free_hint; i < N_SLOTS && i_found < 0; i++) {
            if (!atomic_load_explicit(&slots[i].begin, memory_order_relaxed))
                i_found = i;
        }
        if (i_found >= 0) {
            i_free_hint = i_found + 1;
            atomic_store_explicit(&slots[i_found].is_tripped, false, memory_order_relaxed);
            set_slot(&slots[i_found], begin, end);
            if (i_found >= atomic_load_explicit(&n_used, memory_order_relaxed))
                atomic_store_explicit(&n_used, i_found + 1, memory_order_release);
        }
    }
    (void)pthread_mutex_unlock(&mu);
    return i_found;
}

void guard_unregister(int i_guard)
{
    if (i_guard < 0 || i_guard >= N_SLOTS)
        return;
    (void)pthread_mutex_lock(&mu);
    set_slot(&slots[i_guard], 0, 0);
    if (i_guard < i_free_hint)
        i_free_hint = i_guard;
    (void)pthread_mutex_unlock(&mu);
}

bool guard_tripped(int i_guard)
{
    return i_guard >= 0 && i_guard < N_SLOTS &&
           atomic_load_explicit(&slots[i_guard].is_tripped, memory_order_acquire);
}
