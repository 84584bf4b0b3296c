/*
 * Threads with small stacks: a stack counts as anonymous memory, and the default one is 8 MiB of address space. Called by whoever runs
 * a thread of its own; workers that share one job are a pool (pool.h).
 */
#ifndef PF_BASE_THREAD_H
#define PF_BASE_THREAD_H

#include <pthread.h>
#include <stddef.h>

/* 0 or an errno. A stack that the process's thread-local data does not fit into becomes the default one. */
int thread_start(pthread_t *out_thread, size_t n_stack_bytes, void *(*fn)(void *), void *arg);

#endif
