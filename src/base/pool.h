/*
 * A thread pool for loops: pool_run calls fn(ctx, i_task, i_worker) for every task and returns when all are done. The
 * caller is worker 0 and works too, so a pool of 1 has no threads and no locks. Tasks are handed out by an atomic counter;
 * results must not depend on who runs what. Workers set the default rounding mode and clear FTZ/DAZ when they start.
 * One pool_run at a time per pool; no allocation in it.
 */
#ifndef PF_BASE_POOL_H
#define PF_BASE_POOL_H

#include "base/err.h"

struct pool;
typedef void (*pool_fn)(void *ctx, size_t i_task, unsigned i_worker);

/* 0: pool_default_threads() */
int pool_new(unsigned n_threads, struct pool **out_pool, pf_error *err);
void pool_free(struct pool *pool);
unsigned pool_n_workers(const struct pool *pool);
void pool_run(struct pool *pool, size_t n_tasks, pool_fn fn, void *ctx);
/* CPUs in the affinity mask, capped by the cgroup CPU quota (rounded up), 1..256 */
unsigned pool_default_threads(void);
/* The tightest "cpu.max" from the process's cgroup (a line of proc_cgroup, "/proc/self/cgroup") up to cgroup_root, in CPUs, rounded up;
 * 0: no quota. */
unsigned pool_quota_cpus(const char *cgroup_root, const char *proc_cgroup);

#endif
