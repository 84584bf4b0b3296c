/*
 * What the kernel says about this process. Files of /proc are read into a buffer on the stack: measuring memory must not
 * allocate any.
 */
#include "base/proc.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/str.h"
#include "base/thread.h"

#define SAMPLE_NS   5000000
#define STACK_BYTES ((size_t)64 << 10)

struct peak {
    pthread_t thread;
    pthread_mutex_t mu;
    pthread_cond_t stop;
    bool is_stopping; /* guarded by mu */
    uint64_t n_max;   /* the thread's, until it was joined */
};

uint64_t clock_ns(void)
{
    struct timespec t = {0};
    (void)clock_gettime(CLOCK_MONOTONIC, &t); /* cannot fail for this clock */
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static size_t read_proc(const char *path, char *p, size_t n_max)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t n = 0;
    if (fd < 0)
        return 0;
    while (n < n_max) {
        const ssize_t got = read(fd, p + n, n_max - n);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        n += (size_t)got;
    }
    (void)close(fd); /* only read from */
    return n;
}

/* The number after "key:" at the start of a line; 0 when there is none. */
static uint64_t field(const char *p, size_t n, const char *key)
{
    const size_t n_key = strlen(key);
    for (const char *line = p, *end = p + n; line < end;) {
        const char *eol = memchr(line, '\n', (size_t)(end - line));
        const char *stop = eol ? eol : end;
        if ((size_t)(stop - line) > n_key && !memcmp(line, key, n_key) && line[n_key] == ':') {
            uint64_t v = 0;
            const char *c = line + n_key + 1;
            while (c < stop && (*c == ' ' || *c == '\t'))
                c++;
            for (; c < stop && *c >= '0' && *c <= '9'; c++)
                v = v * 10 + (uint64_t)(*c - '0');
            return v;
        }
        line = stop + 1;
    }
    return 0;
}

uint64_t proc_anon_bytes(void)
{
    char text[4096];
    const size_t n = read_proc("/proc/self/status", text, sizeof text);
    return 1024 * (field(text, n, "RssAnon") + field(text, n, "RssShmem") +
                   field(text, n, "HugetlbPages"));
}

uint64_t proc_read_bytes(void)
{
    char text[1024];
    return field(text, read_proc("/proc/self/io", text, sizeof text), "read_bytes");
}

uint64_t proc_write_bytes(void)
{
    char text[1024];
    return field(text, read_proc("/proc/self/io", text, sizeof text), "write_bytes");
}

static void sample(struct peak *p)
{
    const uint64_t n = proc_anon_bytes();
    if (n > p->n_max)
        p->n_max = n;
}

static void *sampler_main(void *arg)
{
    struct peak *p = arg;
    (void)pthread_mutex_lock(&p->mu);
    while (!p->is_stopping) {
        (void)pthread_mutex_unlock(&p->mu);
        sample(p);
        struct timespec until;
        (void)clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += SAMPLE_NS;
        if (until.tv_nsec >= 1000000000) {
            until.tv_nsec -= 1000000000;
            until.tv_sec++;
        }
        (void)pthread_mutex_lock(&p->mu);
        while (!p->is_stopping && pthread_cond_timedwait(&p->stop, &p->mu, &until) != ETIMEDOUT) {
        }
    }
    (void)pthread_mutex_unlock(&p->mu);
    return NULL;
}

int peak_start(struct peak **out, pf_error *err)
{
    struct peak *p = mem_calloc(1, sizeof *p);
    if (!p)
        return err_nomem(err, sizeof *p, "the memory sampler");
    pthread_condattr_t attr;
    int rc = pthread_condattr_init(&attr);
    if (!rc) {
        (void)pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
        rc = pthread_cond_init(&p->stop, &attr);
        (void)pthread_condattr_destroy(&attr);
    }
    if (rc) {
        mem_free(p);
        return err_sys(err, rc, "memory sampler: condition variable");
    }
    (void)pthread_mutex_init(&p->mu, NULL); /* cannot fail on Linux with default attributes */
    sample(p);
    rc = thread_start(&p->thread, STACK_BYTES, sampler_main, p);
    if (rc) {
        (void)pthread_cond_destroy(&p->stop);
        (void)pthread_mutex_destroy(&p->mu);
        mem_free(p);
        return err_sys(err, rc, "cannot start the memory sampler");
    }
    *out = p;
    return PF_OK;
}

uint64_t peak_stop(struct peak *p)
{
    if (!p)
        return 0;
    (void)pthread_mutex_lock(&p->mu);
    p->is_stopping = true;
    (void)pthread_cond_signal(&p->stop);
    (void)pthread_mutex_unlock(&p->mu);
    (void)pthread_join(p->thread, NULL);
    sample(p);
    const uint64_t n_max = p->n_max;
    (void)pthread_cond_destroy(&p->stop);
    (void)pthread_mutex_destroy(&p->mu);
    mem_free(p);
    return n_max;
}
