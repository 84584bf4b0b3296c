/*
 * What the tests of builds in trouble share: children that build with a fault at a given write point, and the proof that what they leave
 * is whole and is completed with no more writing than needed.
 */
#ifndef PF_TESTS_OVERLAY_TROUBLE_H
#define PF_TESTS_OVERLAY_TROUBLE_H

#include "overlay_fixture.h"

#define N_LAYERS 2

struct run {
    const char *fault; /* "kill" */
    unsigned i_point;
    int rc; /* expected of a failing build */
};

static PF_UNUSED struct overlay *try_adopt(struct fx *fx, int *out_rc)
{
    struct overlay *o = NULL;
    *out_rc = overlay_adopt(fx->store, fx->comp, OVERLAY_VERIFY_FULL, &o, &fx->err);
    return o;
}

static PF_UNUSED unsigned n_whole_layers(struct fx *fx, uint64_t *out_n_bytes)
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

static PF_UNUSED int build_with_fault(struct fx *fx, void *arg)
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
static PF_UNUSED int count_points(struct fx *fx, void *arg)
{
    (void)arg;
    file_fault_set(NULL);
    return fx_build(fx, fx->comp, NULL) ? 0 : (int)file_n_points();
}

/* After trouble: served from before or not at all; then resumed, writing no more than what is missing. */
static PF_UNUSED void assert_resumes(struct fx *fx, uint64_t n_total_max)
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

static PF_UNUSED unsigned open_and_count(struct fx *fx, void **state, uint64_t *out_n_total)
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

#endif
