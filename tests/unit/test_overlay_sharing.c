/*
 * One cache, many users: processes and threads that start on one digest, eviction beside readers, budgets, last use under a clock that
 * jumps, and programs that fork.
 */
#include "overlay_fixture.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

#include "base/proc.h"

#define DEADLINE_NS ((uint64_t)60 * 1000000000)

/* ------------------------------------------------------------------------------------------ together */

/* What an engine does: adopt, else build, else wait for whoever builds. Exit status: layers written + 1; 0: trouble. */
static int adopt_or_build(struct fx *fx, void *arg)
{
    int gate = *(int *)arg;
    char byte;
    uint32_t n_written = 0;
    uint64_t t0 = clock_ns();
    struct overlay_store *s = NULL;
    struct pool *pool = NULL;
    struct overlay *o = NULL;
    if (read(gate, &byte, 1) != 0) /* all start when the gate closes */
        return 0;
    if (overlay_store_open(fx->cache, (uint64_t)1 << 40, &s, &fx->err) ||
        pool_new(1, &pool, &fx->err))
        return 0;
    while (clock_ns() - t0 < DEADLINE_NS) {
        int rc = overlay_adopt(s, fx->comp, OVERLAY_VERIFY_FULL, &o, &fx->err);
        if (rc == PF_OK)
            break;
        struct overlay_build_report r;
        if (rc == PF_E_NOTFOUND)
            rc = overlay_build(s, fx->comp, &(struct overlay_build_opts){.pool = pool}, &r,
                               &fx->err);
        if (rc == PF_OK)
            n_written += r.n_layers_written;
        else if (rc != PF_E_BUSY) {
            fprintf(stderr, "%s\n", fx->err.msg);
            return 0;
        }
    }
    if (!o)
        return 0;
    fx_assert_bytes(fx, fx->comp, o);
    overlay_unref(o);
    overlay_store_close(s);
    pool_free(pool);
    return (int)n_written + 1;
}

static void start_together(struct fx *fx, unsigned n)
{
    int gate[2];
    pid_t pids[8];
    unsigned n_builders = 0;
    assert_int_equal(pipe(gate), 0);
    fflush(NULL);
    for (unsigned i = 0; i < n; i++) {
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (pids[i] == 0) {
            close(gate[1]);
            _exit(adopt_or_build(fx, &gate[0]));
        }
    }
    close(gate[0]);
    close(gate[1]);
    for (unsigned i = 0; i < n; i++) {
        int status = 0;
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) >= 1);
        if (WEXITSTATUS(status) > 1) {
            n_builders++;
            assert_int_equal(WEXITSTATUS(status), fx->n_layers + 1);
        }
    }
    assert_int_equal(n_builders, 1);
    fx_assert_no_litter(fx);
}

static void of_many_processes_one_builds_and_all_adopt(void **state)
{
    static const unsigned n_processes[] = {2, 8};
    struct fx fx;
    fx_open(&fx, state, 6, 64, 64, 1);
    for (int i = 0; i < 6; i++) {
        start_together(&fx, n_processes[i % 2]);
        assert_ok(overlay_evict(fx.store, fx.comp->digest, &fx.err), &fx.err);
    }
    fx_close(&fx);
}

struct team {
    struct fx *fx;
    _Atomic unsigned n_written, n_adopted, n_bad;
    _Atomic bool is_over;
    _Atomic unsigned n_ready;
};

static void *member(void *arg)
{
    struct team *t = arg;
    struct pool *pool = NULL;
    struct overlay *o = NULL;
    pf_error err;
    if (pool_new(1, &pool, &err)) {
        atomic_fetch_add(&t->n_bad, 1);
        return NULL;
    }
    uint64_t t0 = clock_ns();
    while (!o && clock_ns() - t0 < DEADLINE_NS) {
        struct overlay_build_report r = {0};
        int rc = overlay_adopt(t->fx->store, t->fx->comp, OVERLAY_VERIFY_FULL, &o, &err);
        if (rc == PF_E_NOTFOUND)
            rc = overlay_build(t->fx->store, t->fx->comp,
                               &(struct overlay_build_opts){.pool = pool}, &r, &err);
        if (rc == PF_OK)
            atomic_fetch_add(&t->n_written, r.n_layers_written);
        else if (rc != PF_E_BUSY)
            atomic_fetch_add(&t->n_bad, 1);
    }
    if (o)
        atomic_fetch_add(&t->n_adopted, 1);
    overlay_unref(o);
    pool_free(pool);
    return NULL;
}

static void threads_of_one_process_too(void **state)
{
    struct fx fx;
    fx_open(&fx, state, 4, 64, 64, 1);
    struct team t = {.fx = &fx};
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, member, &t), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(t.n_bad, 0);
    assert_int_equal(t.n_adopted, 4);
    assert_int_equal(t.n_written, 4);
    fx_close(&fx);
}

/* Adopts and reads all the time, while others list and evict all the time. */
static void *read_on(void *arg)
{
    struct team *t = arg;
    pf_error err;
    while (!atomic_load(&t->is_over)) {
        struct overlay *o = NULL;
        int rc = overlay_adopt(t->fx->store, t->fx->comp, OVERLAY_VERIFY_FULL, &o, &err);
        if (rc == PF_OK)
            atomic_fetch_add(&t->n_adopted, 1);
        else if (rc != PF_E_NOTFOUND)
            atomic_fetch_add(&t->n_bad, 1);
        overlay_unref(o);
    }
    return NULL;
}

static void *housekeep(void *arg)
{
    struct team *t = arg;
    pf_error err;
    while (!atomic_load(&t->is_over)) {
        struct overlay_entry *e = NULL;
        size_t n = 0;
        if (overlay_list(t->fx->store, &e, &n, &err))
            atomic_fetch_add(&t->n_bad, 1);
        overlay_list_free(e, n);
        int rc = overlay_evict(t->fx->store, t->fx->comp->digest, &err);
        if (rc == PF_OK)
            atomic_fetch_add(&t->n_written, 1);
        else if (rc != PF_E_BUSY && rc != PF_E_NOTFOUND)
            atomic_fetch_add(&t->n_bad, 1);
    }
    return NULL;
}

static void readers_housekeepers_and_a_builder_get_along(void **state)
{
    struct fx fx;
    fx_open(&fx, state, 2, 64, 64, 1);
    struct team t = {.fx = &fx};
    pthread_t threads[3];
    assert_int_equal(pthread_create(&threads[0], NULL, read_on, &t), 0);
    assert_int_equal(pthread_create(&threads[1], NULL, read_on, &t), 0);
    assert_int_equal(pthread_create(&threads[2], NULL, housekeep, &t), 0);
    uint64_t t0 = clock_ns();
    unsigned n_builds = 0;
    /* At least 8 builds, and until both an adoption and an eviction have happened. */
    while ((n_builds < 8 || t.n_adopted == 0 || t.n_written == 0) &&
           clock_ns() - t0 < DEADLINE_NS) {
        int rc = fx_build(&fx, fx.comp, NULL);
        n_builds += rc == PF_OK;
        if (rc != PF_OK && rc != PF_E_BUSY)
            fail_msg("%s", fx.err.msg);
    }
    atomic_store(&t.is_over, true);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(t.n_bad, 0);
    assert_true(t.n_adopted > 0 && t.n_written > 0);
    fx_close(&fx);
}

/* ---------------------------------------------------------------------------------------- eviction */

/* Compositions that differ in strength; one entry of each takes about the same. */
#define N_COMPS 5
static uint64_t build_some(struct fx *fx, struct pf_composition *comps[N_COMPS], unsigned n_built)
{
    for (unsigned i = 0; i < N_COMPS; i++) {
        comps[i] = fx_compose(fx, 0.1 * (i + 1), PF_MERGE_BASE);
        if (i < n_built)
            assert_ok(fx_build(fx, comps[i], NULL), &fx->err);
    }
    return dir_bytes(fx_entry(fx, comps[0], ""));
}

static void use(struct fx *fx, struct pf_composition *comp)
{
    struct overlay *o = NULL;
    assert_ok(overlay_adopt(fx->store, comp, OVERLAY_VERIFY_SAMPLED, &o, &fx->err), &fx->err);
    overlay_unref(o);
}

static void set_used(struct fx *fx, struct pf_composition *comp, int64_t at_s)
{
    char *path = entry_lock_path(fx->store, comp->digest, "use");
    struct timespec t[2] = {{.tv_sec = at_s}, {.tv_sec = at_s}};
    assert_int_equal(utimensat(AT_FDCWD, path, t, 0), 0);
    mem_free(path);
}

static bool is_there(struct fx *fx, struct pf_composition *comp)
{
    return file_kind(fx_entry(fx, comp, "")) == FILE_DIRECTORY;
}

static void partial_entries_go_first_then_the_least_recently_used(void **state)
{
    struct fx fx;
    struct pf_composition *c[N_COMPS];
    fx_open(&fx, state, 2, 128, 256, 1);
    uint64_t n_one = build_some(&fx, c, 4);
    assert_int_equal(unlink(fx_entry(&fx, c[2], "manifest.json")), 0); /* partial */
    use(&fx, c[3]);
    use(&fx, c[1]);
    use(&fx, c[0]);
    set_used(&fx, c[2], (int64_t)time(NULL) + 5);
    /* Oldest use first: c[3], c[1], c[0], and c[2], which is partial. Room for four, slack for the manifest's reserve. */
    fx_open_store(&fx, 4 * n_one + 100000);
    assert_ok(fx_build(&fx, c[4], NULL), &fx.err);
    assert_false(is_there(&fx, c[2]));
    assert_true(is_there(&fx, c[3]) && is_there(&fx, c[1]) && is_there(&fx, c[0]));
    fx_open_store(&fx, 3 * n_one + 100000);
    assert_ok(fx_build(&fx, c[2], NULL), &fx.err);
    assert_false(is_there(&fx, c[3]));
    assert_false(is_there(&fx, c[1]));
    assert_true(is_there(&fx, c[0]) && is_there(&fx, c[4]) && is_there(&fx, c[2]));
    for (int i = 0; i < N_COMPS; i++)
        pf_composition_free(c[i]);
    fx_close(&fx);
}

/* Maps comp and tells; lets go when the pipe closes. */
static pid_t map_in_child(struct fx *fx, struct pf_composition *comp, int *out_gate)
{
    int ready[2], gate[2];
    char byte = 0;
    assert_int_equal(pipe(ready), 0);
    assert_int_equal(pipe(gate), 0);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct overlay_store *s = NULL;
        struct overlay *o = NULL;
        close(gate[1]);
        if (overlay_store_open(fx->cache, 1, &s, NULL) ||
            overlay_adopt(s, comp, OVERLAY_VERIFY_SAMPLED, &o, NULL) ||
            write(ready[1], "x", 1) != 1)
            _exit(1);
        if (read(gate[0], &byte, 1) != 0)
            _exit(2);
        fx_assert_bytes(fx, comp, o); /* still whole, whatever happened meanwhile */
        _exit(0);
    }
    close(ready[1]);
    close(gate[0]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    *out_gate = gate[1];
    return pid;
}

static void what_any_process_has_mapped_stays(void **state)
{
    struct fx fx;
    struct pf_composition *c[N_COMPS];
    struct overlay *ours = NULL;
    fx_open(&fx, state, 2, 128, 256, 1);
    uint64_t n_one = build_some(&fx, c, 3);
    int gate = -1, status = 0;
    pid_t pid = map_in_child(&fx, c[0], &gate);
    assert_ok(overlay_adopt(fx.store, c[1], OVERLAY_VERIFY_SAMPLED, &ours, &fx.err), &fx.err);
    use(&fx, c[2]); /* the most recently used, and the only one that may go */
    assert_int_equal(overlay_evict(fx.store, c[0]->digest, &fx.err), PF_E_BUSY);
    assert_err(&fx.err, PF_E_BUSY, c[0]->digest_hex, "in use");
    assert_int_equal(overlay_evict(fx.store, c[1]->digest, &fx.err), PF_E_BUSY);
    fx_open_store(&fx, 3 * n_one + 100000);
    assert_ok(fx_build(&fx, c[3], NULL), &fx.err);
    assert_true(is_there(&fx, c[0]) && is_there(&fx, c[1]) && is_there(&fx, c[3]));
    assert_false(is_there(&fx, c[2]));
    struct overlay_entry *e = NULL;
    size_t n = 0;
    assert_ok(overlay_list(fx.store, &e, &n, &fx.err), &fx.err);
    assert_int_equal(n, 3);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(e[i].is_in_use, digest_eq(e[i].digest, c[0]->digest) ||
                                             digest_eq(e[i].digest, c[1]->digest));
    overlay_list_free(e, n);
    /* Too little may go: an error that says so, and nothing goes in vain. */
    fx_open_store(&fx, 2 * n_one + 100000);
    assert_int_equal(fx_build(&fx, c[4], NULL), PF_E_NOSPACE);
    assert_err(&fx.err, PF_E_NOSPACE, "in use", "--cache-budget");
    assert_true(is_there(&fx, c[3]));
    close(gate);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    assert_ok(overlay_evict(fx.store, c[0]->digest, &fx.err), &fx.err);
    overlay_unref(ours);
    assert_ok(overlay_evict(fx.store, c[1]->digest, &fx.err), &fx.err);
    for (int i = 0; i < N_COMPS; i++)
        pf_composition_free(c[i]);
    fx_close(&fx);
}

static void a_budget_below_one_composition_evicts_nothing(void **state)
{
    struct fx fx;
    struct pf_composition *c[N_COMPS];
    fx_open(&fx, state, 2, 128, 256, 1);
    uint64_t n_one = build_some(&fx, c, 2);
    fx_open_store(&fx, n_one / 2);
    assert_int_equal(fx_build(&fx, c[2], NULL), PF_E_NOSPACE);
    assert_err(&fx.err, PF_E_NOSPACE, "larger than the budget", fx.cache, "--cache-budget");
    assert_true(is_there(&fx, c[0]) && is_there(&fx, c[1]));
    assert_false(is_there(&fx, c[2]));
    use(&fx, c[0]);
    for (int i = 0; i < N_COMPS; i++)
        pf_composition_free(c[i]);
    fx_close(&fx);
}

/* Room on the disk, not only in the books, that a build holds for what it has not written yet. */
static uint64_t reserved_bytes(struct fx *fx, struct pf_composition *comp)
{
    char **names = NULL;
    size_t n = 0;
    uint64_t n_bytes = 0;
    assert_ok(file_list(fx_entry(fx, comp, ""), &names, &n, &fx->err), &fx->err);
    for (size_t i = 0; i < n; i++) {
        struct stat st;
        if (str_starts(str_of(names[i]), ".reserve.") &&
            stat(fx_entry(fx, comp, names[i]), &st) == 0)
            n_bytes += (uint64_t)st.st_blocks * 512;
    }
    file_list_free(names, n);
    return n_bytes;
}

struct second {
    struct fx *fx;
    struct pf_composition *comp, *reserving;
    uint64_t n_reserved;
    struct pool *pool;
    int rc;
    bool is_done;
    pf_error err;
};

static bool try_second(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    struct second *s = ctx;
    (void)what;
    (void)total;
    if (done > 0 && !s->is_done) {
        s->n_reserved = reserved_bytes(s->fx, s->reserving);
        s->rc = overlay_build(s->fx->store, s->comp, &(struct overlay_build_opts){.pool = s->pool},
                              NULL, &s->err);
        s->is_done = true;
    }
    return true;
}

static void two_builds_at_once_do_not_find_the_same_room(void **state)
{
    struct fx fx;
    struct pf_composition *c[N_COMPS];
    fx_open(&fx, state, 4, 128, 256, 1);
    uint64_t n_one = build_some(&fx, c, 1);
    assert_ok(overlay_evict(fx.store, c[0]->digest, &fx.err), &fx.err);
    fx_open_store(&fx, n_one * 3 / 2 + 100000);
    struct second s = {.fx = &fx, .comp = c[1], .reserving = c[0]};
    assert_ok(pool_new(1, &s.pool, &fx.err), &fx.err);
    struct overlay_build_opts o = {.pool = fx.pool, .progress = try_second, .progress_ctx = &s};
    assert_ok(overlay_build(fx.store, c[0], &o, NULL, &fx.err), &fx.err);
    assert_true(s.is_done);
    assert_true(s.n_reserved >= n_one / 2); /* three layers of four are still to come */
    assert_int_equal(s.rc, PF_E_NOSPACE);
    assert_err(&s.err, PF_E_NOSPACE, "in use");
    assert_false(is_there(&fx, c[1]));
    use(&fx, c[0]);
    pool_free(s.pool);
    for (int i = 0; i < N_COMPS; i++)
        pf_composition_free(c[i]);
    fx_close(&fx);
}

static void a_clock_that_goes_back_does_not_turn_the_order(void **state)
{
    struct fx fx;
    struct pf_composition *c[N_COMPS];
    fx_open(&fx, state, 2, 128, 256, 1);
    uint64_t n_one = build_some(&fx, c, 3);
    /* These were used while the clock was a hundred years ahead. Now it is right again, and c[0] is used. */
    int64_t ahead = (int64_t)time(NULL) + 100LL * 365 * 86400;
    set_used(&fx, c[0], ahead);
    set_used(&fx, c[1], ahead + 1);
    set_used(&fx, c[2], ahead + 2);
    use(&fx, c[0]);
    use(&fx, c[1]);
    struct overlay_entry *e = NULL;
    size_t n = 0;
    assert_ok(overlay_list(fx.store, &e, &n, &fx.err), &fx.err);
    assert_int_equal(n, 3);
    assert_true(digest_eq(e[0].digest, c[2]->digest));
    assert_true(digest_eq(e[1].digest, c[0]->digest));
    assert_true(digest_eq(e[2].digest, c[1]->digest));
    overlay_list_free(e, n);
    fx_open_store(&fx, 3 * n_one + 100000);
    assert_ok(fx_build(&fx, c[3], NULL), &fx.err);
    assert_false(is_there(&fx, c[2]));
    assert_true(is_there(&fx, c[0]) && is_there(&fx, c[1]));
    for (int i = 0; i < N_COMPS; i++)
        pf_composition_free(c[i]);
    fx_close(&fx);
}

static size_t n_entries_of(struct fx *fx)
{
    struct overlay_entry *e;
    size_t n;
    assert_ok(overlay_list(fx->store, &e, &n, &fx->err), &fx->err);
    overlay_list_free(e, n);
    return n;
}

/* A directory that is the cache of nobody, or of somebody else too: what is not ours is neither listed nor removed. */
static void what_is_not_ours_stays(void **state)
{
    static const char *const paths[] = {"bases/letter.json", "bases/notes/x",
                                        "0123456789abcdef0123456789abcdef/letter",
                                        "0123456789abcdef0123456789abcdee/layer-1/x", "readme"};
    struct fx fx;
    struct pf_cache_clear_report r;
    fx_open(&fx, state, 2, 16, 16, 1);
    for (size_t i = 0; i < PF_COUNTOF(paths); i++) {
        char path[700];
        snprintf(path, sizeof path, "%s/%s", fx.cache, paths[i]);
        char *dir = path_dir(path);
        assert_ok(file_mkdirs(dir, &fx.err), &fx.err);
        mem_free(dir);
        write_file(path, "x", 1);
    }
    assert_ok(fx_build(&fx, fx.comp, NULL), &fx.err);
    assert_ok(base_id_remember(fx.store, fx.ckpt, INT64_MAX, &fx.err), &fx.err);
    assert_int_equal(n_entries_of(&fx), 1);
    assert_ok(pf_cache_clear(fx.cache, &r, &fx.err), &fx.err);
    assert_int_equal(r.n_evicted, 1);
    assert_int_equal(n_entries_of(&fx), 0);
    assert_false(base_id_recall(fx.store, fx.ckpt));
    for (size_t i = 0; i < PF_COUNTOF(paths); i++) {
        char path[700];
        snprintf(path, sizeof path, "%s/%s", fx.cache, paths[i]);
        assert_int_equal(file_kind(path), FILE_REGULAR);
    }
    fx_close(&fx);
}

static void listing_says_what_was_merged(void **state)
{
    struct fx fx;
    struct overlay_entry *e = NULL;
    size_t n = 0;
    fx_open(&fx, state, 2, 16, 16, 1);
    struct pf_composition *comp = fx_compose(&fx, -0.25, PF_MERGE_F32);
    assert_ok(fx_build(&fx, comp, NULL), &fx.err);
    assert_ok(overlay_list(fx.store, &e, &n, &fx.err), &fx.err);
    assert_int_equal(n, 1);
    assert_string_equal(e[0].digest_hex, comp->digest_hex);
    assert_string_equal(e[0].base, fx.ckpt->path);
    assert_string_equal(e[0].merge_dtype, "f32");
    assert_int_equal(e[0].n_adapters, 1);
    assert_non_null(strstr(e[0].adapters[0].path, "lora.safetensors"));
    assert_true(e[0].adapters[0].strength == -0.25);
    assert_false(e[0].adapters[0].has_alpha);
    assert_string_equal(e[0].adapters[0].target, "all");
    assert_int_equal(e[0].n_bytes, dir_bytes(fx_entry(&fx, comp, "")));
    assert_true(e[0].used_at_ns > (int64_t)1600000000 * 1000000000);
    overlay_list_free(e, n);
    pf_composition_free(comp);
    fx_close(&fx);
}

/* ----------------------------------------------------------------------------------------- fork */

static void a_child_that_exits_takes_nothing_away(void **state)
{
    struct fx fx;
    struct overlay *o = NULL;
    int status = 0;
    fx_open(&fx, state, 2, 64, 64, 1);
    assert_ok(fx_build(&fx, fx.comp, NULL), &fx.err);
    assert_ok(overlay_adopt(fx.store, fx.comp, OVERLAY_VERIFY_SAMPLED, &o, &fx.err), &fx.err);
    /* One exits as it is, one cleans up as at an orderly end, and both could read. */
    for (int i = 0; i < 2; i++) {
        fflush(NULL);
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            fx_assert_bytes(&fx, fx.comp, o);
            if (i == 1) {
                overlay_unref(o);
                overlay_store_close(fx.store);
            }
            _exit(0);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_int_equal(status, 0);
        assert_int_equal(overlay_evict(fx.store, fx.comp->digest, &fx.err), PF_E_BUSY);
    }
    fx_assert_bytes(&fx, fx.comp, o);
    /* A child that lives on does not keep what its parent let go. */
    int gate[2];
    char byte;
    assert_int_equal(pipe(gate), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        close(gate[1]);
        _exit(read(gate[0], &byte, 1) == 0 ? 0 : 1);
    }
    close(gate[0]);
    overlay_unref(o);
    assert_ok(overlay_evict(fx.store, fx.comp->digest, &fx.err), &fx.err);
    close(gate[1]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    fx_close(&fx);
}

static bool fork_once(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    pid_t *pid = ctx;
    (void)what;
    (void)total;
    if (done > 0 && *pid == 0) {
        *pid = fork();
        if (*pid == 0)
            for (;;)
                pause(); /* lives on with the builder's locks and temporary file */
    }
    return true;
}

static void a_child_forked_during_a_build_does_not_keep_its_lock(void **state)
{
    struct fx fx;
    pid_t pid = 0;
    int status = 0;
    fx_open(&fx, state, 3, 64, 64, 1);
    fflush(NULL);
    struct overlay_build_opts o = {.pool = fx.pool, .progress = fork_once, .progress_ctx = &pid};
    assert_ok(overlay_build(fx.store, fx.comp, &o, NULL, &fx.err), &fx.err);
    assert_true(pid > 0);
    assert_false(entry_is_locked(fx.store, fx.comp->digest, "build", true));
    fx_assert_adopts(&fx, fx.comp);
    assert_ok(overlay_evict(fx.store, fx.comp->digest, &fx.err), &fx.err);
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    fx_close(&fx);
}

static void descriptors_do_not_survive_an_exec(void **state)
{
    struct fx fx;
    struct overlay *o = NULL;
    fx_open(&fx, state, 2, 16, 16, 1);
    assert_ok(fx_build(&fx, fx.comp, NULL), &fx.err);
    assert_ok(overlay_adopt(fx.store, fx.comp, OVERLAY_VERIFY_SAMPLED, &o, &fx.err), &fx.err);
    unsigned n = 0;
    for (int fd = 3; fd < 64; fd++) {
        char link[64], path[600];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t got = readlink(link, path, sizeof path - 1);
        path[got > 0 ? got : 0] = '\0';
        if (!strstr(path, *state))
            continue;
        n++;
        assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    }
    assert_true(n >= 4); /* base, adapter, two layers, the lock */
    overlay_unref(o);
    fx_close(&fx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(of_many_processes_one_builds_and_all_adopt),
        in_dir(threads_of_one_process_too),
        in_dir(readers_housekeepers_and_a_builder_get_along),
        in_dir(partial_entries_go_first_then_the_least_recently_used),
        in_dir(what_any_process_has_mapped_stays),
        in_dir(a_budget_below_one_composition_evicts_nothing),
        in_dir(two_builds_at_once_do_not_find_the_same_room),
        in_dir(a_clock_that_goes_back_does_not_turn_the_order),
        in_dir(what_is_not_ours_stays),
        in_dir(listing_says_what_was_merged),
        in_dir(a_child_that_exits_takes_nothing_away),
        in_dir(a_child_forked_during_a_build_does_not_keep_its_lock),
        in_dir(descriptors_do_not_survive_an_exec),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
