/*
 * What the kernel says about this process: clock, anonymous memory, bytes read. Reading /proc costs ~0.1 ms: not for loops.
 */
#ifndef PF_BASE_PROC_H
#define PF_BASE_PROC_H

#include "base/err.h"

uint64_t clock_ns(void); /* monotonic */

uint64_t proc_anon_bytes(void); /* RssAnon + RssShmem + HugetlbPages of this process */
/* read_bytes of /proc/self/io: from storage, honest about readahead; 0 when unreadable */
uint64_t proc_read_bytes(void);
uint64_t proc_write_bytes(void);

/* Samples proc_anon_bytes every 5 ms on its own thread (and at start and stop) and keeps the peak. Its stack is 64 KiB. */
struct peak;
int peak_start(struct peak **out, pf_error *err);
uint64_t peak_stop(struct peak *p); /* the peak in bytes; frees p; NULL gives 0 */

#endif
