/*
 * Fault points of base/file*.c: where PF_FAULT, or file_fault_set, makes a write fail or the process die. Included by those
 * files alone; a function that changes something durable passes fault_point() right before it does so.
 */
#ifndef PF_BASE_FILE_INT_H
#define PF_BASE_FILE_INT_H

#include <stdint.h>

enum fault { FAULT_NONE, FAULT_KILL, FAULT_TEAR, FAULT_ENOSPC, FAULT_EIO, FAULT_SHORT };
enum fault_where { FAULT_AT_WRITE, FAULT_AT_STEP }; /* a full disk fails writes, not renames */

/* Counts; kills the process itself for FAULT_KILL; tells the caller what to do otherwise. */
enum fault fault_point(enum fault_where where);
int fault_errno(enum fault fault); /* 0: none */
void fault_die(void);
void fault_count_written(uint64_t n_bytes);

#endif
