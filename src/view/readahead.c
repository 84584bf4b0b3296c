/*
 * Reading ahead: one background thread that makes the kernel read the bytes of a layer before the compute asks for them. Base
 * mappings only: an overlay's owner reads its own files ahead. Called by whoever walks layers. Never blocks the walker: a request
 * replaces the one before it, and a layer that is no longer wanted is left unfinished.
 */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/mem.h"
#include "view/view.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

#define STEP_BYTES ((uintptr_t)2 << 20)
#define NO_LAYER   UINT32_MAX

struct readahead {
    struct pf_view *view;
    pthread_t thread;
    pthread_mutex_t mu; /* guards asked and is_ending */
    pthread_cond_t wake;
    uint32_t asked;
    bool is_ending;
    _Atomic uint32_t generation; /* raised with every request: the thread looks between steps */
};

/* Faults a range in, step by step. Errors are nobody's business here: the reader meets them itself. */
static bool populate(struct readahead *ra, uint32_t generation, const uint8_t *p, uint64_t n_bytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t at = (uintptr_t)p & ~(page - 1), end = (uintptr_t)p + n_bytes;
    while (at < end) {
        uintptr_t n = end - at < STEP_BYTES ? end - at : STEP_BYTES;
        if (madvise((void *)at, n, MADV_POPULATE_READ) != 0 && errno == EINVAL)
            (void)madvise((void *)at, n, MADV_WILLNEED); /* a kernel before 5.14 */
        /* relaxed: only a hint to stop early */
        if (atomic_load_explicit(&ra->generation, memory_order_relaxed) != generation)
            return false;
        at += n;
    }
    return true;
}

static void read_layer(struct readahead *ra, uint32_t generation, uint32_t i_layer)
{
    const struct pf_checkpoint *ckpt = view_checkpoint(ra->view);
    const struct ckpt_layer *layer = &ckpt->layers[i_layer];
    for (uint32_t i = 0; i < layer->n_tensors; i++) {
        const struct ckpt_tensor *t = &ckpt->tensors[layer->i_tensor0 + i];
        if (t->n_bytes && !populate(ra, generation, t->p, t->n_bytes))
            return;
    }
}

static void *run(void *arg)
{
    struct readahead *ra = arg;
    pthread_mutex_lock(&ra->mu);
    for (;;) {
        while (!ra->is_ending && ra->asked == NO_LAYER)
            pthread_cond_wait(&ra->wake, &ra->mu);
        if (ra->is_ending)
            break;
        uint32_t i_layer = ra->asked;
        uint32_t generation = atomic_load_explicit(&ra->generation, memory_order_relaxed);
        ra->asked = NO_LAYER;
        pthread_mutex_unlock(&ra->mu);
        read_layer(ra, generation, i_layer);
        pthread_mutex_lock(&ra->mu);
    }
    pthread_mutex_unlock(&ra->mu);
    return NULL;
}

int readahead_new(struct pf_view *v, struct readahead **out, pf_error *err)
{
    struct readahead *ra = mem_calloc(1, sizeof *ra);
    if (!ra)
        return err_nomem(err, sizeof *ra, "read-ahead");
    ra->view = v;
    ra->asked = NO_LAYER;
    pthread_mutex_init(&ra->mu, NULL);
    pthread_cond_init(&ra->wake, NULL);
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, (size_t)64 << 10);
    int e = pthread_create(&ra->thread, &attr, run, ra);
    pthread_attr_destroy(&attr);
    if (e) {
        pthread_cond_destroy(&ra->wake);
        pthread_mutex_destroy(&ra->mu);
        mem_free(ra);
        return err_sys(err, e, "cannot start the read-ahead thread");
    }
    view_ref(v);
    *out = ra;
    return PF_OK;
}

static void ask(struct readahead *ra, uint32_t i_layer, bool is_ending)
{
    pthread_mutex_lock(&ra->mu);
    ra->asked = i_layer;
    ra->is_ending = is_ending;
    atomic_fetch_add_explicit(&ra->generation, 1, memory_order_relaxed);
    pthread_cond_signal(&ra->wake);
    pthread_mutex_unlock(&ra->mu);
}

void readahead_layer(struct readahead *ra, uint32_t i_layer)
{
    if (i_layer < view_checkpoint(ra->view)->n_layers)
        ask(ra, i_layer, false);
}

void readahead_free(struct readahead *ra)
{
    if (!ra)
        return;
    ask(ra, NO_LAYER, true);
    pthread_join(ra->thread, NULL);
    pthread_cond_destroy(&ra->wake);
    pthread_mutex_destroy(&ra->mu);
    pf_view_release(ra->view);
    mem_free(ra);
}
