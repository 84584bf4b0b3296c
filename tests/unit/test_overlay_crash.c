/*
 * Builds that die or fail at every write point: what stands afterwards is whole layers or nothing, the next build writes only what
 * is missing, and no reader ever adopts half. Children do the building, so that a SIGKILL is one.
 */
#include "overlay_fixture.h"

#include <sched.h>
#include <signal.h>
#include <sys/mount.h>

#define N_LAYERS 3

struct run {
    const char *fault; /* "kill" */
    unsigned i_point;
    int rc; /* expected of a failing build */
};

static struct overlay *try_adopt(struct fx *fx, int *out_rc)
{
    struct overlay *o = NULL;
    *out_rc = overlay_adopt(fx->store, fx->comp, OVERLAY_VERIFY_FULL, &o, &fx->err);
    return o;
}

static unsigned n_whole_layers(struct fx *fx, uint64_t *out_n_bytes)
{
    unsigned n = 0;
    *out_n_bytes = 0;
    for (unsigned i = 0; i < N_LAYERS; i++) {
        char *name = fx_layer_name(fx, i);
        const char *path = fx_entry(fx, fx->comp, name);
        if (file_kind(path) == FILE_REGULAR) {
            n++;
            *out_n_bytes += fx_size(path);
        }
        mem_free(name);
    }
    return n;
}

static int build_with_fault(struct fx *fx, void *arg)
{
    const struct run *run = arg;
    char spec[64];
    snprintf(spec, sizeof spec, "%s@%u", run->fault, run->i_point);
    if (!file_fault_set(spec))
        return 100;
    int rc = fx_build(fx, fx->comp, NULL);
    return rc ? -rc : 0;
}

/* Points of a build that nothing disturbs. */
static int count_points(struct fx *fx, void *arg)
{
    (void)arg;
    file_fault_set(NULL);
    return fx_build(fx, fx->comp, NULL) ? 0 : (int)file_n_points();
}

/* After trouble: served from before or not at all; then resumed, writing no more than what is missing. */
static void assert_resumes(struct fx *fx, uint64_t n_total_max)
{
    uint64_t n_whole_bytes = 0, n_before = file_bytes_written();
    unsigned n_whole = n_whole_layers(fx, &n_whole_bytes);
    struct overlay_build_report r;
    int rc = PF_OK;
    struct overlay *o = try_adopt(fx, &rc);
    bool was_complete = o != NULL;
    if (o)
        fx_assert_bytes(fx, fx->comp, o);
    else
        assert_int_equal(rc, PF_E_NOTFOUND);
    overlay_unref(o);
    assert_ok(fx_build(fx, fx->comp, &r), &fx->err);
    assert_int_equal(r.n_layers_kept, n_whole);
    assert_true(!was_complete || r.n_layers_written == 0);
    assert_true(file_bytes_written() - n_before <= n_total_max - n_whole_bytes);
    fx_assert_adopts(fx, fx->comp);
    fx_assert_no_litter(fx);
    assert_ok(overlay_evict(fx->store, fx->comp->digest, &fx->err), &fx->err);
}

static unsigned open_and_count(struct fx *fx, void **state, uint64_t *out_n_total)
{
    fx_open(fx, state, N_LAYERS, 16, 24, 1);
    int status = fx_in_child(count_points, fx, NULL);
    assert_true(WIFEXITED(status));
    unsigned n = (unsigned)WEXITSTATUS(status);
    assert_true(n > 3 * N_LAYERS);
    assert_int_equal(n_whole_layers(fx, out_n_total), N_LAYERS);
    *out_n_total += fx_size(fx_entry(fx, fx->comp, "manifest.json"));
    assert_ok(overlay_evict(fx->store, fx->comp->digest, &fx->err), &fx->err);
    return n;
}

static void killed_at_every_write_point(void **state)
{
    struct fx fx;
    uint64_t n_total;
    unsigned n = open_and_count(&fx, state, &n_total);
    static const char *const faults[] = {"kill", "tear"};
    unsigned n_resumed = 0;
    for (size_t f = 0; f < PF_COUNTOF(faults); f++)
        for (unsigned i = 1; i <= n; i++) {
            struct run run = {.fault = faults[f], .i_point = i};
            int status = fx_in_child(build_with_fault, &fx, &run);
            if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL)
                fail_msg("%s@%u of %u: status %x", faults[f], i, n, (unsigned)status);
            uint64_t n_bytes;
            n_resumed += n_whole_layers(&fx, &n_bytes) > 0;
            /* A new start removes what the dead left half-written; every second time the running process has to. */
            if (i % 2)
                fx_open_store(&fx, (uint64_t)1 << 40);
            assert_resumes(&fx, n_total);
        }
    assert_true(n_resumed > n); /* of 2 n */
    fx_close(&fx);
}

static void killed_again_and_again_it_gets_there(void **state)
{
    struct fx fx;
    uint64_t n_total, n_written = 0;
    (void)open_and_count(&fx, state, &n_total);
    unsigned n_runs = 0;
    for (;; n_runs++) {
        struct run run = {.fault = "kill", .i_point = 12}; /* a layer and a half */
        uint64_t n_before, n_after;
        (void)n_whole_layers(&fx, &n_before);
        int status = fx_in_child(build_with_fault, &fx, &run);
        (void)n_whole_layers(&fx, &n_after);
        assert_true(n_after >= n_before);
        n_written += n_after - n_before;
        if (WIFEXITED(status))
            break;
        assert_true(n_runs < 10);
    }
    assert_true(n_runs >= 2);
    assert_true(n_written <= n_total);
    fx_assert_adopts(&fx, fx.comp);
    fx_close(&fx);
}

static void failed_at_every_write_point(void **state)
{
    static const struct {
        const char *fault;
        int rc;
        bool may_succeed; /* short writes go on; a full disk does not hurt syncs and renames */
    } cases[] = {{"eio", PF_E_IO, false}, {"enospc", PF_E_NOSPACE, true}, {"short", PF_OK, true}};
    struct fx fx;
    uint64_t n_total;
    unsigned n = open_and_count(&fx, state, &n_total);
    for (size_t k = 0; k < PF_COUNTOF(cases); k++) {
        unsigned n_failed = 0;
        for (unsigned i = 1; i <= n; i++) {
            struct run run = {.fault = cases[k].fault, .i_point = i};
            int status = fx_in_child(build_with_fault, &fx, &run);
            assert_true(WIFEXITED(status));
            bool is_ok = WEXITSTATUS(status) == 0;
            n_failed += !is_ok;
            if (is_ok ? !cases[k].may_succeed : WEXITSTATUS(status) != -cases[k].rc)
                fail_msg("%s@%u of %u: exit status %d", cases[k].fault, i, n, WEXITSTATUS(status));
            fx_assert_no_litter(&fx); /* it cleaned up behind itself */
            assert_resumes(&fx, n_total);
        }
        assert_true(cases[k].rc == PF_OK ? n_failed == 0 : n_failed > n / 3);
    }
    fx_close(&fx);
}

/* ----------------------------------------------------------------------------------------- a full disk */

/* In a mount namespace of its own, so that nothing stays mounted whatever happens. Exit status 77: not allowed here. */
static int on_small_disk(struct fx *fx, void *arg)
{
    (void)arg;
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
        return 77;
    unsigned n_failed = 0;
    for (unsigned n_kib = 16; n_kib < 1000; n_kib += 28) {
        char size[64];
        snprintf(size, sizeof size, "size=%uk,nr_inodes=64", n_kib);
        if (mount("tmpfs", fx->cache, "tmpfs", 0, size))
            return n_failed ? 1 : 77;
        fx_open_store(fx, (uint64_t)1 << 40);
        int rc = fx_build(fx, fx->comp, NULL);
        if (rc != PF_OK && rc != PF_E_NOSPACE) {
            fprintf(stderr, "%u KiB: %s\n", n_kib, fx->err.msg);
            return 2;
        }
        n_failed += rc != PF_OK;
        struct overlay *o = NULL;
        if (overlay_adopt(fx->store, fx->comp, OVERLAY_VERIFY_FULL, &o, &fx->err) != rc &&
            !(rc == PF_E_NOSPACE && fx->err.code == PF_E_NOTFOUND))
            return 3;
        if (o)
            fx_assert_bytes(fx, fx->comp, o);
        overlay_unref(o);
        fx_assert_no_litter(fx);
        bool is_enough = rc == PF_OK;
        overlay_store_close(fx->store);
        fx->store = NULL;
        if (umount(fx->cache))
            return 4;
        if (is_enough)
            return n_failed >= 3 ? 0 : 5;
    }
    return 6;
}

static void a_full_disk_is_an_error_whatever_its_size(void **state)
{
    struct fx fx;
    fx_open(&fx, state, N_LAYERS, 128, 256, 1); /* 64 KiB each */
    int status = fx_in_child(on_small_disk, &fx, NULL);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77) {
        fx_close(&fx);
        print_message("no mount allowed: the small tmpfs is left out\n");
        skip();
    }
    assert_int_equal(WEXITSTATUS(status), 0);
    fx_close(&fx);
}

static void a_full_disk_is_noticed_before_the_first_byte(void **state)
{
    struct fx fx;
    fx_open(&fx, state, N_LAYERS, 16, 24, 1);
    uint64_t n_before = file_bytes_written();
    struct file_new reserve = {.fd = -1};
    int rc = room_reserve(fx.store, fx.comp->digest, 1000, (uint64_t)1 << 60, &reserve, &fx.err);
    assert_int_equal(rc, PF_E_NOSPACE);
    assert_err(&fx.err, PF_E_NOSPACE, "1152921504606846976 more bytes", "disk");
    assert_int_equal(file_bytes_written(), n_before);
    fx_close(&fx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(killed_at_every_write_point),
        in_dir(killed_again_and_again_it_gets_there),
        in_dir(failed_at_every_write_point),
        in_dir(a_full_disk_is_an_error_whatever_its_size),
        in_dir(a_full_disk_is_noticed_before_the_first_byte),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
