/*
 * Starting a thread, the one place that knows that a stack can be too small for what the loader puts on it.
 */
#include "base/thread.h"

#include <errno.h>

int thread_start(pthread_t *out_thread, size_t n_stack_bytes, void *(*fn)(void *), void *arg)
{
    pthread_attr_t attr;
    int rc = pthread_attr_init(&attr);
    if (rc)
        return rc;
    (void)pthread_attr_setstacksize(&attr, n_stack_bytes);
    rc = pthread_create(out_thread, &attr, fn, arg);
    if (rc == EINVAL) /* of a sanitizer, say, or of a host program */
        rc = pthread_create(out_thread, NULL, fn, arg);
    (void)pthread_attr_destroy(&attr);
    return rc;
}
