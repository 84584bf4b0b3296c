/*
 * Fault points: the process-wide count of things that change a disk, and the one of them at which a test wants trouble. PF_FAULT
 * is read once, at the first point. Without it the cost is one atomic increment per write.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/file_int.h"
#include "base/log.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Atomic int kind;         /* enum fault */
static _Atomic uint64_t i_fault; /* from 1 */
static _Atomic uint64_t n_points, n_written;

static bool parse(const char *spec, enum fault *out_kind, uint64_t *out_i)
{
    static const struct {
        const char *name;
        enum fault kind;
    } names[] = {{"kill@", FAULT_KILL},
                 {"tear@", FAULT_TEAR},
                 {"enospc@", FAULT_ENOSPC},
                 {"eio@", FAULT_EIO},
                 {"short@", FAULT_SHORT}};
    const struct str s = str_of(spec);
    for (size_t i = 0; i < PF_COUNTOF(names); i++) {
        if (str_starts(s, names[i].name)) {
            *out_kind = names[i].kind;
            return str_to_u64(str_cut_front(s, strlen(names[i].name)), out_i) && *out_i;
        }
    }
    return false;
}

static bool set(const char *spec)
{
    enum fault k = FAULT_NONE;
    uint64_t i = 0;
    const bool is_ok = !spec || parse(spec, &k, &i);
    if (!is_ok)
        k = FAULT_NONE;
    /* Relaxed everywhere in this file: counters, and a setting made before the writes that it concerns. */
    atomic_store_explicit(&i_fault, i, memory_order_relaxed);
    atomic_store_explicit(&kind, (int)k, memory_order_relaxed);
    atomic_store_explicit(&n_points, 0, memory_order_relaxed);
    return is_ok;
}

static void read_environment(void)
{
    const char *spec = getenv("PF_FAULT");
    if (spec && *spec && !set(spec))
        log_at(PF_LOG_WARN, "PF_FAULT '%s' is not one of kill@N, tear@N, enospc@N, eio@N, short@N",
               spec);
}

bool file_fault_set(const char *spec)
{
    (void)pthread_once(&once, read_environment);
    return set(spec);
}

uint64_t file_n_points(void)
{
    return atomic_load_explicit(&n_points, memory_order_relaxed);
}

uint64_t file_bytes_written(void)
{
    return atomic_load_explicit(&n_written, memory_order_relaxed);
}

void fault_count_written(uint64_t n_bytes)
{
    (void)atomic_fetch_add_explicit(&n_written, n_bytes, memory_order_relaxed);
}

/* SIGKILL, like the kernel's own: no handler, no flush, no atexit. */
void fault_die(void)
{
    (void)kill(getpid(), SIGKILL);
    for (;;)
        (void)pause();
}

enum fault fault_point(enum fault_where where)
{
    (void)pthread_once(&once, read_environment);
    const uint64_t i = atomic_fetch_add_explicit(&n_points, 1, memory_order_relaxed) + 1;
    const enum fault k = (enum fault)atomic_load_explicit(&kind, memory_order_relaxed);
    if (k == FAULT_NONE)
        return FAULT_NONE;
    const uint64_t at = atomic_load_explicit(&i_fault, memory_order_relaxed);
    if (k == FAULT_ENOSPC) /* a disk that is full stays full */
        return i >= at && where == FAULT_AT_WRITE ? k : FAULT_NONE;
    if (i != at)
        return FAULT_NONE;
    if (k == FAULT_KILL)
        fault_die();
    return k;
}

int fault_errno(enum fault fault)
{
    return fault == FAULT_ENOSPC ? ENOSPC : fault == FAULT_EIO ? EIO : 0;
}
