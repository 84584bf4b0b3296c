/*
 * The SIGBUS guard: a checkpoint that shrinks while it is mapped must be an error, not a crash. One documented
 * process-global handler, installed at the first registration and chained to whatever was there. It acts only on faults inside
 * registered mappings: it maps a zero page over the faulting one and raises that mapping's flag. Whoever computed from the
 * mapping asks for the flag afterwards and throws the result away.
 *
 *     int g = guard_register(p, n);          after mmap
 *     ...compute...
 *     if (guard_tripped(g)) -> PF_E_TRUNCATED   before the result is used
 *     guard_unregister(g);                   before munmap
 *
 * Registration takes a lock; the handler and guard_tripped take none.
 */
#ifndef PF_BASE_GUARD_H
#define PF_BASE_GUARD_H

#include <stdbool.h>
#include <stddef.h>

/* Handle, or -1 when the table (65,536 mappings) is full or memory is short */
int guard_register(const void *p, size_t n_bytes);
void guard_unregister(int i_guard); /* -1 is fine */
bool guard_tripped(int i_guard);    /* stays true; -1 is never tripped */

#endif
