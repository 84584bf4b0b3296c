/*
 * The load: a thread, a counter, and the two kinds of work. Counters are for rates; nothing waits for anything here.
 */
#include "bench/load.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "base/mem.h"
#include "bench/walk.h"
#include "model/model.h"

enum { N_STEPS = 4, CLASS = 1, POLL_NS = 1000000 };

struct load {
    struct pf_checkpoint *ckpt;
    struct pf_engine *engine;
    struct pf_model *model; /* NULL: it reads */
    uint64_t n_pass_bytes;
    pthread_t thread;
    _Atomic bool stop, is_over;
    _Atomic uint64_t n_bytes;       /* reading */
    _Atomic uint64_t n_layers;      /* drawing: of finished pictures */
    _Atomic uint64_t n_layers_here; /* of the picture in progress */
    _Atomic uint64_t n_rounds;      /* whole ones: pictures, or passes */
    uint64_t n_blocks;
    int rc;
    pf_error err;
};

static bool on_layer(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    struct load *l = ctx;
    (void)what;
    (void)total;
    atomic_store(&l->n_layers_here, done);
    return !atomic_load(&l->stop);
}

static int draw_round(struct load *l, struct pf_view *view)
{
    static const uint32_t classes[] = {CLASS};
    const struct pf_generate_opts o = {.size = sizeof o,
                                       .n_images = 1,
                                       .classes = classes,
                                       .n_steps = N_STEPS,
                                       .guidance_scale = 1,
                                       .progress = on_layer,
                                       .progress_ctx = l};
    const int rc = pf_generate(l->model, view, &o, NULL, NULL, NULL, &l->err);
    if (rc == PF_OK) {
        /* Two stores that a reader may see between: off by one picture for a moment, which a rate does not mind. */
        atomic_store(&l->n_layers_here, 0);
        atomic_fetch_add(&l->n_layers, N_STEPS * l->n_blocks);
    }
    return rc == PF_E_CANCELLED && atomic_load(&l->stop) ? PF_OK : rc;
}

static int read_round(struct load *l, struct pf_view *view)
{
    struct walk w;
    int rc = walk_open(&w, view, &l->err);
    if (rc)
        return rc;
    rc = walk_pass(&w, &l->stop, &l->n_bytes, &l->err);
    walk_close(&w);
    return rc;
}

static void *run(void *arg)
{
    struct load *l = arg;
    while (l->rc == PF_OK && !atomic_load(&l->stop)) {
        struct pf_view *view = pf_engine_view(l->engine);
        l->rc = l->model ? draw_round(l, view) : read_round(l, view);
        pf_view_release(view);
        atomic_fetch_add(&l->n_rounds, 1);
    }
    atomic_store(&l->is_over, true);
    return NULL;
}

int load_start(struct load **out, struct pf_checkpoint *ckpt, struct pf_engine *engine,
               unsigned n_threads, pf_error *err)
{
    struct load *l = mem_calloc(1, sizeof *l);
    const struct pf_model_opts o = {.size = sizeof o, .n_threads = n_threads};
    struct pf_model_info info;
    if (!l)
        return err_nomem(err, sizeof *l, "a load");
    l->ckpt = ckpt;
    l->engine = engine;
    l->n_pass_bytes = ckpt->n_bytes;
    /* Any refusal means: not a model that can draw. */
    if (pf_model_open(ckpt, &o, &l->model, NULL) == PF_OK) {
        pf_model_info(l->model, &info);
        l->n_blocks = info.n_blocks;
        l->n_pass_bytes = ckpt->components[l->model->i_component].n_bytes;
    }
    const int sys_errno = pthread_create(&l->thread, NULL, run, l);
    if (sys_errno) {
        pf_model_close(l->model);
        mem_free(l);
        return err_sys(err, sys_errno, "cannot start a thread");
    }
    *out = l;
    return PF_OK;
}

double load_passes(const struct load *l)
{
    if (!l->model)
        return (double)atomic_load(&l->n_bytes) / (double)l->n_pass_bytes;
    return (double)(atomic_load(&l->n_layers) + atomic_load(&l->n_layers_here)) /
           (double)l->n_blocks;
}

uint64_t load_pass_bytes(const struct load *l)
{
    return l->n_pass_bytes;
}

bool load_is_drawing(const struct load *l)
{
    return l->model != NULL;
}

void load_wait(const struct load *l, uint64_t n_rounds)
{
    const uint64_t n_before = atomic_load(&l->n_rounds);
    while (atomic_load(&l->n_rounds) < n_before + n_rounds && !atomic_load(&l->is_over))
        (void)nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
}

int load_stop(struct load *l, pf_error *err)
{
    if (!l)
        return PF_OK;
    atomic_store(&l->stop, true);
    (void)pthread_join(l->thread, NULL);
    const int rc = l->rc;
    if (rc && err)
        *err = l->err;
    pf_model_close(l->model);
    mem_free(l);
    return rc;
}
