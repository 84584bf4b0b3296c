/*
 * A measurement in a process of its own: a fresh memory account, nothing mapped, and, where one was made, a control group. The child
 * hands its result back as JSON. Call it while this process has no other threads of its own that hold locks: it forks.
 */
#ifndef PF_BENCH_CHILD_H
#define PF_BENCH_CHILD_H

#include "base/json.h"
#include "bench/cgroup.h"

typedef int (*child_fn)(void *ctx, struct json **out, pf_error *err);

/* Runs fn(ctx) in a child, inside g if that is not NULL. Its result or its error becomes ours. A child that was killed is PF_E_NOMEM in a
 * group (that is how the kernel says so), else PF_E_IO. *out is owned by the caller. */
int child_run(child_fn fn, void *ctx, const struct cgroup *g, struct json **out, pf_error *err);

#endif
