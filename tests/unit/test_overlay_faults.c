/*
 * Builds whose writes fail: full disks of every size, I/O errors and short writes at every point. Nothing half is published or left
 * lying about, and the next build goes on.
 */
#include "overlay_trouble.h"

#include <sched.h>
#include <sys/mount.h>

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
        in_dir(failed_at_every_write_point),
        in_dir(a_full_disk_is_an_error_whatever_its_size),
        in_dir(a_full_disk_is_noticed_before_the_first_byte),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
