/*
 * Generation never stops: readers go on while one composition is replaced by another a thousand times. Every panel belongs to the
 * composition that its view names, and no reader thread ever calls a mutex or a condition variable: those calls are interposed here.
 */
#include "testing.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>

#include "base/mem.h"
#include "engine/engine_int.h"

#define MODEL     PF_SOURCE_DIR "/data/emoji-dit"
#define N_READERS 4
#define N_COMPS   12
#ifdef __SANITIZE_THREAD__ /* some fifty times as slow, and it needs no thousand to see a race */
#define N_CHANGES 72
#elif defined(__SANITIZE_ADDRESS__)
#define N_CHANGES 250
#else
#define N_CHANGES 1000
#endif
#define N_PANELS 24 /* per visit of a view */

/* ------------------------------------------------------------------------------------ interposed calls */

static _Thread_local bool is_reader;
static _Atomic unsigned long n_waits_of_readers;

static PF_UNUSED void count(void)
{
    if (is_reader)
        atomic_fetch_add(&n_waits_of_readers, 1);
}

#ifndef __SANITIZE_THREAD__ /* the thread sanitizer interposes them itself, and watches more closely */

/* The function that is interposed; looked up again and again by whoever comes first, with one result. */
static void *real(_Atomic(void *) *cache, const char *name)
{
    void *p = atomic_load(cache);
    if (!p) {
        p = dlsym(RTLD_NEXT, name);
        atomic_store(cache, p);
    }
    return p;
}

int pthread_mutex_lock(pthread_mutex_t *m)
{
    static _Atomic(void *) cache;
    int (*fn)(pthread_mutex_t *);
    *(void **)(void *)&fn = real(&cache, "pthread_mutex_lock");
    count();
    return fn(m);
}

int pthread_cond_wait(pthread_cond_t *c, pthread_mutex_t *m)
{
    static _Atomic(void *) cache;
    int (*fn)(pthread_cond_t *, pthread_mutex_t *);
    *(void **)(void *)&fn = real(&cache, "pthread_cond_wait");
    count();
    return fn(c, m);
}

int pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *m, const struct timespec *t)
{
    static _Atomic(void *) cache;
    int (*fn)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    *(void **)(void *)&fn = real(&cache, "pthread_cond_timedwait");
    count();
    return fn(c, m, t);
}

#endif

/* ---------------------------------------------------------------------------------------- expectations */

/* 12 compositions: a third streams, a third has overlays, a third is built and evicted all the time. */
struct expected {
    const char *nickname;
    double strength;
    int32_t way;
    bool is_evicted;
    char digest[33];
    struct digest *tensors;
};

struct world {
    struct pf_checkpoint *ckpt;
    struct pf_engine *engine;
    struct expected comps[N_COMPS];
    struct digest *base;
    char base_digest[33];
    _Atomic bool is_over;
    _Atomic unsigned long n_visits, n_wrong;
};

static struct digest read_tensor(struct world *w, struct pf_reader *r, uint32_t i, uint8_t *buf,
                                 size_t n_buf)
{
    pf_error err;
    const struct shape *s = &w->ckpt->tensors[i].shape;
    struct pf_panel p = {.i_tensor = i, .n_rows = shape_rows(s)};
    assert_ok(pf_reader_read(r, &p, PF_NATIVE, buf, n_buf, &err), &err);
    return hash_bytes(buf, (size_t)w->ckpt->tensors[i].n_bytes);
}

static struct digest *expect(struct world *w, const char *path, double strength,
                             char out_digest[33])
{
    pf_error err;
    struct pf_adapter *a = NULL;
    struct pf_composition *c;
    struct pf_view *v;
    struct pf_reader *r;
    static uint8_t buf[1 << 20];
    struct digest *d = mem_calloc(w->ckpt->n_tensors, sizeof *d);
    if (path)
        assert_ok(pf_adapter_open(path, &a, &err), &err);
    struct pf_lora lora = {.adapter = a, .strength = strength};
    assert_ok(pf_composition_new(w->ckpt, &lora, path ? 1 : 0, NULL, &c, &err), &err);
    assert_ok(pf_view_open(w->ckpt, c, &v, &err), &err);
    assert_ok(pf_reader_new(v, &r, &err), &err);
    for (uint32_t i = 0; i < w->ckpt->n_tensors; i++)
        d[i] = read_tensor(w, r, i, buf, sizeof buf);
    memcpy(out_digest, pf_view_digest(v), 33);
    pf_reader_free(r);
    pf_view_release(v);
    pf_composition_free(c);
    pf_adapter_close(a);
    return d;
}

static const struct digest *expected_of(const struct world *w, const char *digest)
{
    for (int i = 0; i < N_COMPS; i++)
        if (strcmp(w->comps[i].digest, digest) == 0)
            return w->comps[i].tensors;
    return strcmp(w->base_digest, digest) == 0 ? w->base : NULL;
}

/* --------------------------------------------------------------------------------------------- readers */

static void *read_on(void *arg)
{
    struct world *w = arg;
    uint8_t *buf = malloc(1 << 20);
    uint64_t x = (uint64_t)(uintptr_t)buf | 1;
    pf_error err;
    is_reader = true;
    while (!atomic_load(&w->is_over)) {
        struct pf_view *v = pf_engine_view(w->engine);
        const struct digest *want = expected_of(w, pf_view_digest(v));
        struct pf_reader *r = NULL;
        bool ok = want && pf_reader_new(v, &r, &err) == PF_OK;
        for (int k = 0; ok && k < N_PANELS; k++) {
            x ^= x << 13, x ^= x >> 7, x ^= x << 17;
            const struct ckpt_layer *l = &w->ckpt->layers[x % w->ckpt->n_layers];
            uint32_t i = l->i_tensor0 + (uint32_t)((x >> 20) % l->n_tensors);
            ok = pf_reader_enter(r, w->ckpt->tensors[i].i_layer, &err) == PF_OK &&
                 digest_eq(read_tensor(w, r, i, buf, 1 << 20), want[i]);
            pf_reader_leave(r);
        }
        if (!ok)
            atomic_fetch_add(&w->n_wrong, 1);
        pf_engine_served(w->engine, v); /* as after a picture: it may not wait either */
        atomic_fetch_add(&w->n_visits, 1);
        pf_reader_free(r);
        pf_view_release(v);
    }
    is_reader = false;
    free(buf);
    return NULL;
}

static void change(struct world *w, int i)
{
    struct pf_change_report report;
    pf_error err;
    struct expected *c = &w->comps[i % N_COMPS];
    struct pf_engine_lora l = {.nickname = c->nickname, .strength = c->strength};
    struct pf_change_opts o = {.size = sizeof o, .way = c->way};
    /* a build of the evicted third in one round of eight: a thousand builds are a disk's business */
    if (c->is_evicted && i / N_COMPS % 8 != 0)
        o.way = PF_WAY_AUTO;
    assert_ok(pf_engine_set(w->engine, &l, 1, NULL, &o, i % 50 == 0 ? &report : NULL, &err), &err);
    assert_ok(pf_engine_set(w->engine, NULL, 0, i % 7 == 0 ? NULL : "transformer", &o, NULL, &err),
              &err);
    assert_ok(pf_engine_set(w->engine, &l, 1, NULL, &o, NULL, &err), &err);
    struct digest digest;
    if (c->is_evicted && digest_parse(w->comps[(i + 5) % N_COMPS].digest, &digest) &&
        w->comps[(i + 5) % N_COMPS].is_evicted)
        (void)overlay_evict(w->engine->store, digest,
                            NULL); /* refused while somebody has it mapped */
}

static void run(void **state, uint32_t n_resident, int n_changes)
{
    static const char *const names[3] = {"noto", "turbo", "night"};
    static const char *const paths[3] = {PF_SOURCE_DIR "/data/adapters/noto.safetensors",
                                         PF_SOURCE_DIR "/data/adapters/turbo.safetensors",
                                         PF_SOURCE_DIR "/data/adapters/night"};
    struct world w = {0};
    pf_error err;
    pthread_t readers[N_READERS];
    struct pf_engine_opts o = {.size = sizeof o,
                               .cache_dir = test_path(state, "cache"),
                               .build_delay_ms = -1,
                               .n_resident_layers = n_resident};
    assert_ok(pf_checkpoint_open(MODEL, NULL, &w.ckpt, &err), &err);
    assert_ok(pf_engine_open(w.ckpt, &o, &w.engine, &err), &err);
    for (int i = 0; i < 3; i++)
        assert_ok(pf_engine_load(w.engine, names[i], paths[i], &err), &err);
    w.base = expect(&w, NULL, 1, w.base_digest);
    for (int i = 0; i < N_COMPS; i++) {
        struct expected *c = &w.comps[i];
        *c = (struct expected){.nickname = names[i % 3], .strength = 0.25 * (1 + i / 3)};
        c->way = i % 4 == 0 ? PF_WAY_STREAM : i % 4 == 3 ? PF_WAY_AUTO : PF_WAY_OVERLAY;
        c->is_evicted = i % 4 == 2;
        c->tensors = expect(&w, paths[i % 3], c->strength, c->digest);
    }
    atomic_store(&n_waits_of_readers, 0);
    for (int i = 0; i < N_READERS; i++)
        assert_int_equal(pthread_create(&readers[i], NULL, read_on, &w), 0);
    for (int i = 0; i < n_changes; i++)
        change(&w, i);
    while (atomic_load(&w.n_visits) < 100) /* on a slow machine: the readers have seen something */
        change(&w, 0);
    atomic_store(&w.is_over, true);
    for (int i = 0; i < N_READERS; i++)
        pthread_join(readers[i], NULL);
    assert_int_equal(atomic_load(&w.n_wrong), 0);
    assert_int_equal(atomic_load(&n_waits_of_readers), 0);
    pf_engine_close(w.engine);
    for (int i = 0; i < N_COMPS; i++)
        mem_free(w.comps[i].tensors);
    mem_free(w.base);
    pf_checkpoint_close(w.ckpt);
}

static void readers_see_one_composition_and_never_wait(void **state)
{
    run(state, 0, N_CHANGES / 3 + 1); /* three replacements each */
}

static void the_same_with_resident_layers(void **state)
{
    run(state, 5, N_CHANGES / 12);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(readers_see_one_composition_and_never_wait),
        in_dir(the_same_with_resident_layers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
