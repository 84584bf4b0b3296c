/*
 * Ten thousand random steps: set, strength, switch, merge, unmerge, deactivate, per-request views, evictions, on two targets, over all ways
 * of applying, with kept, mapped and resident layers. After every step every tensor that is looked at equals a fresh merge of the
 * composition that a plain model of the rules predicts, and base bytes after unmerge.
 */
#include "engine_fixture.h"

#define N_STEPS 10000
#define MAX_SET 2

/* ------------------------------------------------------------------------------- the model of the rules */

struct entry {
    int i_adapter;
    double strength;
};
struct target {
    enum { EMPTY, ACTIVE, UNMERGED } phase;
    struct entry entries[MAX_SET];
    int n;
    double factor;
};

struct world {
    struct pf_checkpoint *ckpt;
    struct pf_engine *engine;
    struct pf_adapter *adapters[N_ADAPTERS]; /* opened beside the engine, for fresh merges */
    struct target targets[N_TARGETS];
    int32_t merge_dtype;
    struct rng rng;
};

static unsigned pick(struct world *w, unsigned n)
{
    return (unsigned)(rng_next(&w->rng) >> 33) % n;
}

static struct pf_view *fresh_view(struct world *w, const struct target *targets,
                                  int32_t merge_dtype)
{
    struct pf_lora loras[N_TARGETS * MAX_SET];
    struct pf_composition *c;
    struct pf_view *v;
    struct pf_composition_opts o = {
        .size = sizeof o, .merge_dtype = merge_dtype, .allow_unmatched = true};
    pf_error err;
    size_t n = 0;
    for (int t = 0; t < N_TARGETS; t++)
        for (int i = 0; targets[t].phase == ACTIVE && i < targets[t].n; i++)
            loras[n++] =
                (struct pf_lora){.adapter = w->adapters[targets[t].entries[i].i_adapter],
                                 .strength = targets[t].entries[i].strength * targets[t].factor,
                                 .target = TARGETS[t]};
    assert_ok(pf_composition_new(w->ckpt, loras, n, &o, &c, &err), &err);
    assert_ok(pf_view_open(w->ckpt, c, &v, &err), &err);
    pf_composition_free(c);
    return v;
}

static size_t read_all(struct world *w, struct pf_reader *r, struct pf_view *v, uint32_t i,
                       uint8_t *buf)
{
    const struct shape *s = &w->ckpt->tensors[i].shape;
    size_t n = (size_t)(shape_rows(s) * shape_cols(s)) * (pf_dtype_bits(pf_view_dtype(v, i)) / 8);
    struct pf_panel p = {.i_tensor = i, .n_rows = shape_rows(s)};
    pf_error err;
    assert_ok(pf_reader_enter(r, w->ckpt->tensors[i].i_layer, &err), &err);
    assert_ok(pf_reader_read(r, &p, PF_NATIVE, buf, 4096, &err), &err);
    pf_reader_leave(r);
    return n;
}

static void assert_views_agree(struct world *w, struct pf_view *a, struct pf_view *b)
{
    static uint8_t buf_a[4096], buf_b[4096];
    struct pf_reader *ra, *rb;
    pf_error err;
    assert_ok(pf_reader_new(a, &ra, &err), &err);
    assert_ok(pf_reader_new(b, &rb, &err), &err);
    for (uint32_t i = 0; i < w->ckpt->n_tensors; i++) {
        assert_int_equal(pf_view_dtype(a, i), pf_view_dtype(b, i));
        size_t n = read_all(w, ra, a, i, buf_a);
        assert_int_equal(read_all(w, rb, b, i, buf_b), n);
        assert_memory_equal(buf_a, buf_b, n);
    }
    pf_reader_free(ra);
    pf_reader_free(rb);
}

static void check(struct world *w)
{
    struct pf_view *want = fresh_view(w, w->targets, w->merge_dtype),
                   *have = pf_engine_view(w->engine);
    assert_views_agree(w, have, want);
    pf_view_release(have);
    pf_view_release(want);
}

/* ------------------------------------------------------------------------------------------------ steps */

static const double STRENGTHS[] = {0, 1, -0.5, 0.25, 2};

static int pick_loras(struct world *w, struct pf_engine_lora *l, struct entry *e)
{
    int n = (int)pick(w, MAX_SET + 1);
    for (int i = 0; i < n; i++) {
        e[i] = (struct entry){(int)pick(w, N_ADAPTERS), STRENGTHS[pick(w, PF_COUNTOF(STRENGTHS))]};
        l[i] =
            (struct pf_engine_lora){.nickname = NAMES[e[i].i_adapter], .strength = e[i].strength};
    }
    return n;
}

static void step_set(struct world *w, const bool *named, const char *targets)
{
    struct pf_engine_lora l[MAX_SET];
    struct entry e[MAX_SET];
    struct pf_change_opts o = {.size = sizeof o,
                               .merge_dtype = pick(w, 8) == 0 ? PF_MERGE_F32 : PF_MERGE_BASE};
    struct pf_change_report report;
    pf_error err;
    int n = pick_loras(w, l, e);
    o.way = (int32_t)pick(w, 12) % 4; /* overlay one time in three, as the disk allows */
    if (o.way == PF_WAY_OVERLAY && pick(w, 8))
        o.way = PF_WAY_AUTO;
    assert_ok(
        pf_engine_set(w->engine, l, (size_t)n, targets, &o, pick(w, 50) ? NULL : &report, &err),
        &err);
    w->merge_dtype = o.merge_dtype;
    for (int t = 0; t < N_TARGETS; t++)
        if (named[t]) {
            w->targets[t] = (struct target){.phase = n ? ACTIVE : EMPTY, .n = n, .factor = 1};
            memcpy(w->targets[t].entries, e, sizeof e);
        }
}

static void step_merge(struct world *w, const bool *named, const char *targets)
{
    double factor = STRENGTHS[1 + pick(w, 4)];
    bool is_any = false;
    pf_error err;
    for (int t = 0; t < N_TARGETS; t++)
        is_any |= named[t] && w->targets[t].phase != EMPTY;
    int rc = pf_engine_merge(w->engine, targets, factor, NULL, &err);
    assert_int_equal(rc, is_any ? PF_OK : PF_E_STATE);
    for (int t = 0; t < N_TARGETS; t++)
        if (named[t] && w->targets[t].phase != EMPTY) {
            w->targets[t].phase = ACTIVE;
            w->targets[t].factor = factor;
        }
}

static void step_off(struct world *w, const bool *named, const char *targets, bool is_forgotten)
{
    pf_error err;
    assert_ok(
        (is_forgotten ? pf_engine_deactivate : pf_engine_unmerge)(w->engine, targets, NULL, &err),
        &err);
    for (int t = 0; t < N_TARGETS; t++)
        if (named[t]) {
            if (is_forgotten)
                w->targets[t] = (struct target){.factor = 1};
            else if (w->targets[t].phase == ACTIVE)
                w->targets[t].phase = UNMERGED;
        }
}

static void step_view_of(struct world *w)
{
    struct pf_engine_lora l[MAX_SET];
    struct entry e[MAX_SET];
    struct target targets[N_TARGETS];
    struct pf_view *mine, *want;
    pf_error err;
    int n = pick_loras(w, l, e);
    assert_ok(pf_engine_view_of(w->engine, l, (size_t)n, NULL, &mine, &err), &err);
    for (int t = 0; t < N_TARGETS; t++) {
        targets[t] = (struct target){.phase = ACTIVE, .n = n, .factor = 1};
        memcpy(targets[t].entries, e, sizeof e);
    }
    want = fresh_view(w, targets, PF_MERGE_BASE);
    assert_views_agree(w, mine, want);
    pf_view_release(mine);
    pf_view_release(want);
}

static void step_evict(struct world *w)
{
    struct overlay_entry *entries;
    size_t n;
    pf_error err;
    assert_ok(overlay_list(w->engine->store, &entries, &n, &err), &err);
    if (n)
        (void)overlay_evict(w->engine->store, entries[pick(w, (unsigned)n)].digest,
                            NULL); /* refused when mapped */
    overlay_list_free(entries, n);
}

static void step(struct world *w)
{
    bool named[N_TARGETS];
    unsigned which = pick(w, 3);
    const char *targets = which == 2 ? pick(w, 2) ? NULL : "all" : TARGETS[which];
    for (unsigned t = 0; t < N_TARGETS; t++)
        named[t] = which == 2 || which == t;
    switch (pick(w, 12)) {
    case 0:
    case 1:
    case 2:
    case 3:
        step_set(w, named, targets);
        break;
    case 4:
    case 5:
        step_merge(w, named, targets);
        break;
    case 6:
    case 7:
        step_off(w, named, targets, false);
        break;
    case 8:
        step_off(w, named, targets, true);
        break;
    case 9:
        step_view_of(w);
        break;
    case 10:
        step_evict(w);
        break;
    default:
        if (pick(w, 40) == 0)
            (void)pf_engine_settle(w->engine, 5000,
                                   NULL); /* a busy machine may not settle: nothing depends on it */
        break;
    }
}

static void walk(void **state, uint64_t host_memory_bytes, uint32_t n_resident, int n_steps,
                 uint64_t seed)
{
    struct world w = {0};
    pf_error err;
    struct pf_engine_opts o = {.size = sizeof o,
                               .cache_dir = test_path(state, "cache"),
                               .cache_budget_bytes =
                                   200000, /* a few entries: the budget evicts as well */
                               .host_memory_bytes = host_memory_bytes,
                               .n_resident_layers = n_resident,
                               .build_delay_ms = 1};
    make_base(state);
    for (int i = 0; i < N_ADAPTERS; i++)
        make_adapter(state, i);
    assert_ok(pf_checkpoint_open(test_path(state, "model"), NULL, &w.ckpt, &err), &err);
    assert_int_equal(w.ckpt->n_components, N_TARGETS);
    assert_ok(pf_engine_open(w.ckpt, &o, &w.engine, &err), &err);
    for (int i = 0; i < N_ADAPTERS; i++) {
        char file[64];
        snprintf(file, sizeof file, "%s.safetensors", NAMES[i]);
        assert_ok(pf_engine_load(w.engine, NAMES[i], test_path(state, file), &err), &err);
        assert_ok(pf_adapter_open(test_path(state, file), &w.adapters[i], &err), &err);
    }
    for (int t = 0; t < N_TARGETS; t++)
        w.targets[t].factor = 1;
    w.rng = (struct rng){seed};
    for (int i = 0; i < n_steps; i++) {
        step(&w);
        check(&w);
    }
    assert_ok(pf_engine_deactivate(w.engine, NULL, NULL, &err), &err);
    memset(w.targets, 0, sizeof w.targets);
    check(&w);
    for (int i = 0; i < N_ADAPTERS; i++)
        pf_adapter_close(w.adapters[i]);
    pf_engine_close(w.engine);
    pf_checkpoint_close(w.ckpt);
}

static void kept_layers(void **state)
{
    walk(state, 0, 0, N_STEPS * 4 / 10, 1);
}

static void mapped_layers(void **state)
{
    walk(state, 1024, 0, N_STEPS * 3 / 10, 2);
}

static void resident_layers(void **state)
{
    walk(state, 0, 6, N_STEPS * 3 / 10, 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {in_dir(kept_layers), in_dir(mapped_layers),
                                       in_dir(resident_layers)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
