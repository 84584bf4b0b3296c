/*
 * Background builds: when they start, who waits for them, and what happens when they are cancelled, superseded, closed upon, forked beside or
 * made by somebody else. A gate in the progress function stops the builder where a test wants it: nothing here sleeps.
 */
#include "engine_fixture.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

/* A delay that is not reached; settling starts the build at once */
#define NEVER_MS ((int64_t)3600000)

static const struct pf_change_opts OVERLAY = {.size = sizeof OVERLAY, .way = PF_WAY_OVERLAY};

/* ------------------------------------------------------------------------------------------- the gate */

struct gate {
    pthread_mutex_t mu;
    pthread_cond_t moved;
    bool is_shut;    /* the builder waits at its next call */
    bool is_waiting; /* it does */
    unsigned n_calls;
    unsigned i_refused; /* this call says no; 0: none */
};

static void gate_init(struct gate *g)
{
    *g = (struct gate){0};
    pthread_mutex_init(&g->mu, NULL);
    pthread_cond_init(&g->moved, NULL);
}

static bool pass(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    struct gate *g = ctx;
    (void)what;
    assert_true(done <= total);
    pthread_mutex_lock(&g->mu);
    unsigned i = ++g->n_calls;
    while (g->is_shut) {
        g->is_waiting = true;
        pthread_cond_broadcast(&g->moved);
        pthread_cond_wait(&g->moved, &g->mu);
    }
    g->is_waiting = false;
    pthread_mutex_unlock(&g->mu);
    return i != g->i_refused;
}

static void shut(struct gate *g, bool is_shut)
{
    pthread_mutex_lock(&g->mu);
    g->is_shut = is_shut;
    pthread_cond_broadcast(&g->moved);
    pthread_mutex_unlock(&g->mu);
}

static void await_builder(struct gate *g)
{
    pthread_mutex_lock(&g->mu);
    while (!g->is_waiting)
        pthread_cond_wait(&g->moved, &g->mu);
    pthread_mutex_unlock(&g->mu);
}

static bool has_come(struct gate *g)
{
    pthread_mutex_lock(&g->mu);
    bool is_waiting = g->is_waiting;
    pthread_mutex_unlock(&g->mu);
    sched_yield();
    return is_waiting;
}

static void open_gated(void **state, struct fixture *f, struct gate *g, int64_t delay_ms)
{
    gate_init(g);
    open_engine(
        state, f,
        (struct pf_engine_opts){
            .build_delay_ms = delay_ms, .n_threads = 1, .progress = pass, .progress_ctx = g});
}

static const char *place_of(struct fixture *f)
{
    struct pf_view *v = pf_engine_view(f->engine);
    const char *way = pf_engine_way(f->engine, v);
    pf_view_release(v);
    return way;
}

static uint64_t n_builds(struct fixture *f)
{
    struct pf_engine_status s;
    pf_engine_status(f->engine, &s);
    return s.n_builds;
}

/* --------------------------------------------------------------------------------------- when they start */

static void a_composition_that_lasted_is_built(void **state)
{
    struct fixture f;
    struct gate g;
    struct pf_change_report r;
    pf_error err;
    open_gated(state, &f, &g, 1);
    set_one(&f, "noto", 1, &r);
    assert_string_equal(r.way, "stream");
    shut(&g, false);
    assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
    assert_string_equal(place_of(&f), "overlay");
    assert_int_equal(n_builds(&f), 1);
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, NOTO, 1));
    close_engine(&f);
}

/* A slider is moved: nothing is written at each step. */
/* Of a slider; the thread sanitizer makes each take a second. */
#ifdef __SANITIZE_THREAD__
#define N_MOVES 8
#else
#define N_MOVES 50
#endif

static void what_does_not_last_is_not_built(void **state)
{
    struct fixture f;
    struct gate g;
    struct pf_change_report r;
    struct pf_engine_status s;
    open_gated(state, &f, &g, NEVER_MS);
    for (int i = 1; i <= N_MOVES; i++)
        set_one(&f, "noto", 0.02 * i, &r);
    pf_engine_status(f.engine, &s);
    assert_int_equal(g.n_calls, 0);
    assert_int_equal(s.n_builds, 0);
    assert_int_equal(pf_engine_cache_bytes(f.engine), 0);
    close_engine(&f);
}

static bool look_at_priority(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    int *nice = ctx;
    (void)what;
    (void)done;
    (void)total;
    *nice = getpriority(PRIO_PROCESS, 0); /* of this thread */
    return true;
}

/* Where both want a CPU, the reader has it. */
static void the_builder_is_less_urgent_than_readers(void **state)
{
    struct fixture f;
    int nice = -1;
    pf_error err;
    open_engine(state, &f,
                (struct pf_engine_opts){.build_delay_ms = NEVER_MS,
                                        .n_threads = 1,
                                        .progress = look_at_priority,
                                        .progress_ctx = &nice});
    set_one(&f, "noto", 1, NULL);
    assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
    assert_int_equal(n_builds(&f), 1);
    assert_true(nice >= 10);
    assert_true(nice > getpriority(PRIO_PROCESS, 0) || nice == 19);
    close_engine(&f);
}

/* Three generations are worth an overlay, for the global composition and for a request's own. */
static void three_generations_are_worth_a_build(void **state)
{
    struct fixture f;
    struct gate g;
    struct pf_change_report r;
    struct pf_view *mine;
    pf_error err;
    open_gated(state, &f, &g, NEVER_MS);
    set_one(&f, "noto", 1, &r);
    struct pf_engine_lora l = {.nickname = "night", .strength = 1};
    assert_ok(pf_engine_view_of(f.engine, &l, 1, NULL, &mine, &err), &err);
    shut(&g, true);
    pf_engine_served(f.engine, mine);
    pf_engine_served(f.engine, mine);
    assert_int_equal(g.n_calls, 0);
    do /* the third one; another when the builder was just looking */
        pf_engine_served(f.engine, mine);
    while (!has_come(&g));
    shut(&g, false);
    while (strcmp(pf_engine_way(f.engine, mine), "overlay") != 0)
        sched_yield();
    assert_string_equal(place_of(&f), "stream"); /* the global one has not served */
    struct pf_view *v = pf_engine_view(f.engine);
    while (strcmp(pf_engine_way(f.engine, v), "overlay") != 0)
        pf_engine_served(f.engine, v);
    assert_int_equal(n_builds(&f), 2);
    assert_same(view_bytes(f.ckpt, mine), fresh_bytes(f.ckpt, NIGHT, 1));
    assert_same(view_bytes(f.ckpt, v), fresh_bytes(f.ckpt, NOTO, 1));
    pf_view_release(v);
    pf_view_release(mine);
    close_engine(&f);
}

/* -------------------------------------------------------------------------------------- how far, how fast */

/* What a progress function looks at. */
struct looker {
    struct fixture f;
    uint64_t t0_ns, done_last, total, bytes_per_s;
    unsigned n_calls;
};

/* Layers are written one after another: all before the one that is being written are whole, all behind it have nothing. */
static bool look(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    struct looker *k = ctx;
    uint64_t n_built = 0, t = clock_ns();
    bool is_end = false;
    (void)what;
    k->n_calls++;
    for (uint32_t i = 0; i < k->f.ckpt->n_layers; i++) {
        struct pf_layer_status l;
        pf_error err;
        assert_ok(pf_engine_layer_status(k->f.engine, i, &l, &err), &err);
        assert_true(l.n_built_bytes <= l.n_merged_bytes);
        assert_true(!is_end || l.n_built_bytes == 0);
        is_end = is_end || l.n_built_bytes < l.n_merged_bytes;
        n_built += l.n_built_bytes;
    }
    assert_int_equal(n_built, done);
    if (k->bytes_per_s) /* what came before was held back */
        assert_true((t - k->t0_ns) + 1000000 >= k->done_last * 1000000000 / k->bytes_per_s);
    k->done_last = done;
    k->total = total;
    return true;
}

static void layers_tell_how_far_a_build_is(void **state)
{
    struct looker k = {0};
    struct pf_change_report r;
    struct pf_layer_status l;
    pf_error err;
    uint64_t n_merged = 0;
    open_engine(
        state, &k.f,
        (struct pf_engine_opts){
            .build_delay_ms = NEVER_MS, .n_threads = 1, .progress = look, .progress_ctx = &k});
    assert_ok(pf_engine_layer_status(k.f.engine, 1, &l, &err), &err);
    assert_int_equal(l.n_merged_bytes, 0); /* the base */
    set_one(&k.f, "noto", 1, &r);
    assert_ok(pf_engine_layer_status(k.f.engine, 1, &l, &err), &err);
    assert_true(l.n_merged_bytes > 0);
    assert_int_equal(l.n_built_bytes, 0);
    assert_ok(pf_engine_settle(k.f.engine, SETTLE_MS, &err), &err);
    assert_true(k.n_calls > k.f.ckpt->n_layers);
    for (uint32_t i = 0; i < k.f.ckpt->n_layers; i++) {
        assert_ok(pf_engine_layer_status(k.f.engine, i, &l, &err), &err);
        assert_int_equal(l.n_built_bytes, l.n_merged_bytes);
        n_merged += l.n_merged_bytes;
    }
    assert_int_equal(n_merged, k.total);
    close_engine(&k.f);
}

static void a_rate_holds_a_build_back(void **state)
{
    struct looker k = {.bytes_per_s = 8 << 20};
    struct pf_change_report r;
    pf_error err;
    struct pf_engine_opts o = {.build_delay_ms = NEVER_MS,
                               .n_threads = 1,
                               .build_bytes_per_s = k.bytes_per_s,
                               .progress = look,
                               .progress_ctx = &k};
    open_engine(state, &k.f, o);
    k.t0_ns = clock_ns(); /* the build begins later, so it has been held back since then */
    set_one(&k.f, "noto", 1, &r);
    assert_ok(pf_engine_settle(k.f.engine, SETTLE_MS, &err), &err);
    assert_string_equal(place_of(&k.f), "overlay");
    assert_int_equal(k.done_last, k.total);
    close_engine(&k.f);
    /* One that would take weeks ends at once when it is told to. */
    struct gate g;
    gate_init(&g);
    o = (struct pf_engine_opts){.build_delay_ms = 1,
                                .n_threads = 1,
                                .build_bytes_per_s = 1,
                                .progress = pass,
                                .progress_ctx = &g};
    open_engine(state, &k.f, o);
    shut(&g, true);
    set_one(&k.f, "turbo", 1, &r);
    await_builder(&g);
    shut(&g, false);
    pf_engine_cancel_build(k.f.engine);
    assert_ok(pf_engine_settle(k.f.engine, SETTLE_MS, &err), &err);
    close_engine(&k.f);
}

/* --------------------------------------------------------------------------------- cancelled, superseded */

/* At every call of the progress function, one after another, until a build goes through. */
static void cancelled_at_any_moment(void **state)
{
    struct fixture f;
    struct gate g;
    struct pf_change_report r;
    pf_error err;
    open_gated(state, &f, &g, NEVER_MS);
    struct pf_engine_lora l = {.nickname = "turbo", .strength = 1};
    struct digest want = fresh_bytes(f.ckpt, TURBO, 1);
    unsigned n = 1;
    for (;; n++) {
        g.n_calls = 0;
        g.i_refused = n;
        assert_ok(pf_engine_set(f.engine, &l, 1, NULL, &OVERLAY, &r, &err), &err);
        assert_same(current_bytes(&f), want);
        if (strcmp(r.way, "overlay") == 0)
            break;
        assert_string_equal(r.way, "stream");
        assert_string_equal(r.note, "streaming instead of an overlay: the build was cancelled");
        assert_string_equal(place_of(&f), "stream");
        /* Not started again by itself. */
        assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
        assert_string_equal(place_of(&f), "stream");
    }
    assert_true(n > 3);
    close_engine(&f);
}

struct setter {
    struct pf_engine *engine;
    struct pf_change_report r;
    pf_error err;
    int rc;
};

static void *set_turbo(void *arg)
{
    struct setter *s = arg;
    struct pf_engine_lora l = {.nickname = "turbo", .strength = 1};
    s->rc = pf_engine_set(s->engine, &l, 1, NULL, &OVERLAY, &s->r, &s->err);
    return NULL;
}

/* More threads than there can be: it streams, and whoever waits for an overlay is not kept waiting. */
static void without_a_builder_nothing_is_waited_for(void **state)
{
    struct fixture f;
    pf_error err;
    open_engine(state, &f, (struct pf_engine_opts){.build_delay_ms = NEVER_MS, .n_threads = 257});
    set_one(&f, "noto", 1, NULL);
    assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
    assert_int_equal(n_builds(&f), 0);
    assert_string_equal(place_of(&f), "stream");
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, NOTO, 1));
    close_engine(&f);
}

/* Somebody waits for his overlay; another thread cancels it, or sets something else. Both changes end, and say what happened. */
static void who_waits_for_an_overlay_is_not_forgotten(void **state)
{
    struct fixture f;
    struct gate g;
    struct pf_change_report r;
    pf_error err;
    pthread_t t;
    open_gated(state, &f, &g, NEVER_MS);
    for (int is_superseded = 0; is_superseded < 2; is_superseded++) {
        struct setter s = {.engine = f.engine};
        shut(&g, true);
        assert_int_equal(pthread_create(&t, NULL, set_turbo, &s), 0);
        await_builder(&g);
        struct pf_engine_status status;
        pf_engine_status(f.engine, &status);
        assert_true(status.is_building);
        /* It took effect before it was complete. */
        assert_same(current_bytes(&f), fresh_bytes(f.ckpt, TURBO, 1));
        if (is_superseded)
            set_one(&f, "noto", 1, &r);
        else
            pf_engine_cancel_build(f.engine);
        shut(&g, false);
        pthread_join(t, NULL);
        assert_ok(s.rc, &s.err);
        assert_non_null(
            strstr(s.r.note, is_superseded ? "another change came first" : "was cancelled"));
        assert_ok(pf_engine_deactivate(f.engine, NULL, &r, &err), &err);
        /* The builder has left the gate, which is shut again in the next round. */
        assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
    }
    assert_int_equal(n_builds(&f), 0);
    close_engine(&f);
}

/* What a cancelled build left is not done again. */
static void a_cancelled_build_is_continued(void **state)
{
    struct fixture f;
    struct gate g;
    struct pf_change_report r;
    pf_error err;
    open_gated(state, &f, &g, NEVER_MS);
    struct pf_engine_lora l = {.nickname = "turbo", .strength = 1};
    uint64_t n0 = merge_n_panels();
    assert_ok(pf_engine_set(f.engine, &l, 1, NULL, &OVERLAY, NULL, &err), &err);
    uint64_t n_whole = merge_n_panels() - n0;
    unsigned n_calls = g.n_calls;
    assert_ok(pf_engine_deactivate(f.engine, NULL, &r, &err), &err);
    close_engine(&f);
    assert_ok(file_remove_tree(test_path(state, "cache"), &err), &err);
    open_gated(state, &f, &g, NEVER_MS);
    g.i_refused = n_calls * 3 / 4;
    assert_ok(pf_engine_set(f.engine, &l, 1, NULL, &OVERLAY, NULL, &err), &err);
    assert_string_equal(place_of(&f), "stream");
    g.i_refused = 0;
    n0 = merge_n_panels();
    assert_ok(pf_engine_set(f.engine, &l, 1, NULL, &OVERLAY, NULL, &err), &err);
    assert_string_equal(place_of(&f), "overlay");
    assert_true(merge_n_panels() - n0 < n_whole / 2);
    close_engine(&f);
}

/* An adapter that only a build holds, for a composition that nobody wants any more, can go at once. */
static void unloading_ends_a_build_that_nobody_wants(void **state)
{
    struct fixture f;
    struct gate g;
    struct pf_change_report r;
    struct pf_view *mine;
    pf_error err;
    gate_init(&g);
    open_engine(state, &f,
                (struct pf_engine_opts){.build_delay_ms = NEVER_MS,
                                        .build_bytes_per_s = 1 << 20, /* seconds, if it went on */
                                        .n_threads = 1,
                                        .progress = pass,
                                        .progress_ctx = &g});
    struct pf_engine_lora l = {.nickname = "night", .strength = 1};
    assert_ok(pf_engine_view_of(f.engine, &l, 1, NULL, &mine, &err), &err);
    shut(&g, true);
    do
        pf_engine_served(f.engine, mine);
    while (!has_come(&g));
    pf_view_release(mine);
    shut(&g, false);
    assert_ok(pf_engine_unload(f.engine, "night", &err), &err);
    assert_int_equal(n_builds(&f), 0);
    set_one(&f, "noto", 1, &r);
    close_engine(&f);
}

/* ---------------------------------------------------------------------------------- closing and forking */

struct closer {
    struct gate *g;
};

static void *open_soon(void *arg)
{
    shut(((struct closer *)arg)->g, false);
    return NULL;
}

static void closing_while_building(void **state)
{
    struct fixture f;
    struct gate g;
    struct pf_change_report r;
    pf_error err;
    pthread_t t;
    for (int i = 0; i < 3; i++) {
        open_gated(state, &f, &g, 1);
        shut(&g, true);
        set_one(&f, "turbo", 2 + i, &r); /* another each time: one may have been completed */
        await_builder(&g);
        struct closer c = {&g};
        assert_int_equal(pthread_create(&t, NULL, open_soon, &c), 0);
        close_engine(&f); /* whichever comes first */
        pthread_join(t, NULL);
    }
    open_gated(state, &f, &g, NEVER_MS);
    set_one(&f, "turbo", 1, &r);
    assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
    assert_string_equal(place_of(&f), "overlay");
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, TURBO, 1));
    close_engine(&f);
}

/* The host program forks in the middle of a build: the child goes without touching the engine, and takes nothing with it. */
static void the_host_program_forks(void **state)
{
    struct fixture f;
    struct gate g;
    struct pf_change_report r;
    pf_error err;
    open_gated(state, &f, &g, NEVER_MS);
    struct pf_engine_lora l = {.nickname = "noto", .strength = 1};
    assert_ok(pf_engine_set(f.engine, &l, 1, NULL, &OVERLAY, &r, &err), &err);
    struct pf_view *noto = pf_engine_view(f.engine);
    struct digest noto_digest = view_composition(noto)->digest;
    set_one(&f, "turbo", 1, &r);
    struct pf_engine_status s;
    shut(&g, true);
    assert_int_equal(pf_engine_settle(f.engine, 0, &err), PF_E_BUSY); /* starts the build */
    await_builder(&g);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        _exit(0);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    /* The locks are still ours: what we have mapped cannot be evicted, what we build nobody else builds. */
    struct overlay_store *other;
    assert_ok(overlay_store_open(test_path(state, "cache"), 0, &other, &err), &err);
    assert_int_equal(overlay_evict(other, noto_digest, &err), PF_E_BUSY);
    struct overlay_entry *entries;
    size_t n, n_building = 0;
    assert_ok(overlay_list(other, &entries, &n, &err), &err);
    for (size_t i = 0; i < n; i++)
        n_building += entries[i].is_building;
    overlay_list_free(entries, n);
    assert_int_equal(n_building, 1);
    overlay_store_close(other);
    shut(&g, false);
    assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
    pf_engine_status(f.engine, &s);
    assert_int_equal(s.n_builds, 2);
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, TURBO, 1));
    assert_same(view_bytes(f.ckpt, noto), fresh_bytes(f.ckpt, NOTO, 1));
    pf_view_release(noto);
    close_engine(&f);
}

/* A child may go on with what it inherited, by streaming, and may close it: nothing waits for a thread that is the parent's. */
static int use_in_child(struct fixture *f)
{
    pf_error err;
    (void)alarm(600); /* a child that waits for ever is a failure, not a hanging test */
    struct pf_engine_lora l = {.nickname = "night", .strength = 1};
    /* No report: its sampler would be a thread, which the thread sanitizer forbids here. */
    if (pf_engine_set(f->engine, &l, 1, NULL, &OVERLAY, NULL, &err) ||
        strcmp(place_of(f), "stream") != 0)
        return 1;
    if (!digest_eq(current_bytes(f), fresh_bytes(f->ckpt, NIGHT, 1)))
        return 2;
    if (pf_engine_settle(f->engine, 3600000, &err) != PF_E_BUSY ||
        pf_engine_deactivate(f->engine, NULL, NULL, &err) ||
        pf_engine_unload(f->engine, "night", &err))
        return 3;
    close_engine(f);
    return 0;
}

static void a_child_of_fork_may_use_and_close_the_engine(void **state)
{
    struct fixture f;
    struct gate g;
    struct pf_change_report r;
    int status;
    open_gated(state, &f, &g, NEVER_MS);
    struct pf_engine_lora l = {.nickname = "turbo", .strength = 1};
    pf_error err;
    assert_ok(pf_engine_set(f.engine, &l, 1, NULL, &OVERLAY, &r, &err), &err);
    assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err); /* it waits, and holds no lock */
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        _exit(use_in_child(&f));
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, TURBO, 1));
    set_one(&f, "noto", 1, &r);
    assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
    assert_string_equal(place_of(&f), "overlay");
    close_engine(&f);
}

/* A progress function may ask and change; what would wait for the build that it reports says so instead. */
struct meddler {
    struct fixture f;
    bool is_done, is_ok;
};

static bool meddle(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    struct meddler *m = ctx;
    struct pf_change_report r;
    pf_error err;
    (void)what;
    (void)done;
    (void)total;
    if (m->is_done)
        return true;
    m->is_done = true;
    struct pf_engine_lora l = {.nickname = "noto", .strength = 1};
    m->is_ok = pf_engine_settle(m->f.engine, 3600000, &err) == PF_E_BUSY &&
               pf_engine_set(m->f.engine, &l, 1, NULL, &OVERLAY, &r, &err) == PF_OK &&
               strcmp(r.way, "stream") == 0 && strstr(r.note, "progress function") &&
               pf_engine_unload(m->f.engine, "turbo", &err) == PF_E_BUSY;
    return true;
}

static void a_progress_function_does_not_wait_for_itself(void **state)
{
    struct meddler m = {.is_ok = false};
    struct pf_change_report r;
    pf_error err;
    open_engine(
        state, &m.f,
        (struct pf_engine_opts){
            .build_delay_ms = NEVER_MS, .n_threads = 1, .progress = meddle, .progress_ctx = &m});
    set_one(&m.f, "turbo", 1, &r);
    assert_ok(pf_engine_settle(m.f.engine, SETTLE_MS, &err), &err);
    assert_true(m.is_done);
    assert_true(m.is_ok);
    assert_same(current_bytes(&m.f), fresh_bytes(m.f.ckpt, NOTO, 1));
    assert_ok(pf_engine_unload(m.f.engine, "turbo", &err), &err);
    close_engine(&m.f);
}

/* -------------------------------------------------------------------------------- engines beside engines */

/* Another process has the build lock: stream, look again, adopt or build when it lets go. Meanwhile the composition leaves the list. */
static void what_another_process_builds_is_waited_for(void **state)
{
    struct fixture f;
    struct gate g;
    struct pf_change_report r;
    struct file_lock lock;
    pf_error err;
    char path[512];
    open_gated(state, &f, &g, NEVER_MS);
    set_one(&f, "turbo", 1, &r);
    snprintf(path, sizeof path, "%s/%s.build", test_path(state, "cache"), r.composition);
    assert_ok(file_lock_try(&lock, path, &err), &err);
    for (int round = 0; round < 2; round++) {
        set_one(&f, "turbo", 1, &r);
        assert_int_equal(pf_engine_settle(f.engine, 60, &err), PF_E_BUSY);
        assert_string_equal(place_of(&f), "stream");
        for (int i = 1; i <= 2 * N_RECENT; i++) /* turbo's is forgotten while it is waited for */
            set_one(&f, "noto", 0.1 * i, NULL);
    }
    assert_int_equal(g.n_calls, 0);
    set_one(&f, "turbo", 1, &r);
    file_lock_release(&lock);
    assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
    assert_string_equal(place_of(&f), "overlay");
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, TURBO, 1));
    close_engine(&f);
}

/* C11: two managers of one set of weights. Each serves its own, whatever the other does. */
static void C11_two_engines_on_one_checkpoint(void **state)
{
    struct fixture a, b;
    struct pf_change_report r;
    struct pf_engine_opts o = {.size = sizeof o,
                               .build_delay_ms = -1,
                               .n_resident_layers = 4,
                               .cache_dir = test_path(state, "cache")};
    static const char *const names[3] = {"noto", "turbo", "night"};
    static const char *const paths[3] = {NOTO, TURBO, NIGHT};
    pf_error err;
    open_engine(state, &a, o);
    b.ckpt = a.ckpt; /* the very same mapping */
    assert_ok(pf_engine_open(b.ckpt, &o, &b.engine, &err), &err);
    for (int i = 0; i < 3; i++)
        assert_ok(pf_engine_load(b.engine, names[i], paths[i], &err), &err);
    struct digest base = current_bytes(&a), want[3];
    for (int i = 0; i < 3; i++)
        want[i] = fresh_bytes(a.ckpt, paths[i], 1);
    for (int i = 0; i < 12; i++) {
        struct pf_engine_lora l = {.nickname = names[i % 3], .strength = 1};
        assert_ok(pf_engine_set(a.engine, &l, 1, NULL, i % 2 ? &OVERLAY : NULL, &r, &err), &err);
        l.nickname = names[(i + 1) % 3];
        assert_ok(pf_engine_set(b.engine, &l, 1, NULL, i % 4 ? NULL : &OVERLAY, &r, &err), &err);
        assert_same(current_bytes(&a), want[i % 3]);
        assert_same(current_bytes(&b), want[(i + 1) % 3]);
        assert_ok(pf_engine_unmerge(i % 2 ? a.engine : b.engine, NULL, &r, &err), &err);
        assert_same(current_bytes(i % 2 ? &a : &b), base);
        assert_same(current_bytes(i % 2 ? &b : &a), want[(i + i % 2) % 3]);
    }
    pf_engine_close(b.engine);
    assert_same(current_bytes(&a), base);
    close_engine(&a);
}

/* In a child: opens an engine on the shared cache when the gate closes, sets, and tells what it did. */
static int serve_in_child(void **state, int gate)
{
    struct fixture f;
    struct pf_change_report r;
    char byte;
    pf_error err;
    if (read(gate, &byte, 1) != 0)
        return 100;
    open_engine(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    struct pf_engine_lora l = {.nickname = "turbo", .strength = 1};
    if (pf_engine_set(f.engine, &l, 1, NULL, &OVERLAY, &r, &err) || strcmp(r.way, "overlay") != 0)
        return 101;
    bool ok = digest_eq(current_bytes(&f), fresh_bytes(f.ckpt, TURBO, 1));
    int n = (int)n_builds(&f);
    close_engine(&f);
    return ok ? n : 102;
}

static void two_processes_on_one_cache(void **state)
{
    int gate[2], n_built = 0;
    pid_t pids[2];
    assert_int_equal(pipe(gate), 0);
    fflush(NULL);
    for (int i = 0; i < 2; i++) {
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (pids[i] == 0) {
            close(gate[1]);
            _exit(serve_in_child(state, gate[0]));
        }
    }
    close(gate[0]);
    close(gate[1]);
    for (int i = 0; i < 2; i++) {
        int status;
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        assert_true(WIFEXITED(status));
        assert_true(WEXITSTATUS(status) < 100);
        n_built += WEXITSTATUS(status);
    }
    assert_int_equal(n_built, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(a_composition_that_lasted_is_built),
        in_dir(what_does_not_last_is_not_built),
        in_dir(the_builder_is_less_urgent_than_readers),
        in_dir(three_generations_are_worth_a_build),
        in_dir(layers_tell_how_far_a_build_is),
        in_dir(a_rate_holds_a_build_back),
        in_dir(cancelled_at_any_moment),
        in_dir(who_waits_for_an_overlay_is_not_forgotten),
        in_dir(without_a_builder_nothing_is_waited_for),
        in_dir(a_cancelled_build_is_continued),
        in_dir(unloading_ends_a_build_that_nobody_wants),
        in_dir(closing_while_building),
        in_dir(the_host_program_forks),
        in_dir(a_child_of_fork_may_use_and_close_the_engine),
        in_dir(a_progress_function_does_not_wait_for_itself),
        in_dir(what_another_process_builds_is_waited_for),
        in_dir(C11_two_engines_on_one_checkpoint),
        in_dir(two_processes_on_one_cache),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
