/*
 * An overlay across a power cut: kills leave the page cache as it is, so what is not synced before it gets its name shows only to a model of
 * the disk.
 */
#include "disk_model.h"
#include "overlay_fixture.h"

static void nothing_has_its_name_before_its_bytes_are_durable(void **state)
{
    struct fx fx;
    struct overlay_build_report r;
    fx_open(&fx, state, 3, 64, 512, 1);
    disk_reset();
    assert_ok(fx_build(&fx, fx.comp, &r), &fx.err);
    assert_int_equal(r.n_layers_written, 3);
    assert_int_equal(disk.n_undurable, 0);
    /* layers, manifest, and the directory each time; the entry's own name */
    assert_true(disk.n_syncs >= 2 * (3 + 1));
    for (size_t i = 0; i < disk.n_nodes; i++)
        assert_false(disk.nodes[i].is_dirty);
    fx_assert_adopts(&fx, fx.comp);
    fx_close(&fx);
}

/* A block that does not reach the disk, whichever: never published, and the next build makes it good. */
static void a_failed_write_back_is_an_error_and_nothing_is_published(void **state)
{
    struct fx fx;
    struct overlay_build_report r;
    struct overlay *o = NULL;
    /* 20 MiB each: five blocks, of which two are not waited for */
    fx_open(&fx, state, 2, 4096, 2560, 1);
    disk_reset();
    assert_ok(fx_build(&fx, fx.comp, &r), &fx.err);
    unsigned n = disk.n_write_backs;
    assert_int_equal(n, 10);
    assert_in_range(disk.n_behind_max, 1, 3); /* 12 MiB of one worker */
    for (unsigned i = 1; i <= n; i++) {
        assert_ok(overlay_evict(fx.store, fx.comp->digest, &fx.err), &fx.err);
        disk_reset();
        disk.i_failing = i;
        assert_int_equal(fx_build(&fx, fx.comp, &r), PF_E_IO);
        assert_int_equal(r.n_layers_written, (i - 1) / 5);
        assert_int_equal(overlay_adopt(fx.store, fx.comp, OVERLAY_VERIFY_FULL, &o, &fx.err),
                         PF_E_NOTFOUND);
        disk_reset();
        assert_ok(fx_build(&fx, fx.comp, &r), &fx.err);
        assert_int_equal(r.n_layers_kept, (i - 1) / 5);
    }
    fx_assert_adopts(&fx, fx.comp);
    fx_close(&fx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(nothing_has_its_name_before_its_bytes_are_durable),
        in_dir(a_failed_write_back_is_an_error_and_nothing_is_published),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
