/*
 * A memory control group for a measurement: made beside or below the group of this process, with a limit, and removed afterwards. v1
 * (the memory controller mounted at /sys/fs/cgroup/memory) and v2. Used by bench/ and by tests, which skip with the reason
 * when no group can be made: it takes root, or a delegated group. Must never touch the group that this process is in.
 */
#ifndef PF_BENCH_CGROUP_H
#define PF_BENCH_CGROUP_H

#include "base/err.h"

struct cgroup {
    char path[512]; /* empty: none */
    bool is_v2;
};

/* PF_E_UNSUPPORTED: none can be made here, and the message says why. */
int cgroup_make(struct cgroup *g, uint64_t n_limit_bytes, pf_error *err);
/* Moves the calling process, with all its threads, into the group: page cache and memory that it touches from now on count there. */
int cgroup_enter(const struct cgroup *g, pf_error *err);
/* The highest usage so far, page cache included; 0: unknown. */
uint64_t cgroup_peak_bytes(const struct cgroup *g);
/* After the last process in it has ended. No group: nothing to do. */
void cgroup_remove(struct cgroup *g);

#endif
