/*
 * Compositions per component: a text encoder beside a transformer, each set, unmerged, merged and forgotten on its own, by names, lists
 * and `all`. Expectations come from fresh compositions that no engine saw.
 */
#include "engine_fixture.h"

struct want {
    const char *nickname, *target;
    double strength;
};

/* What a fresh view of these entries shows. */
static struct digest fresh(void **state, struct pf_checkpoint *ckpt, const struct want *w, size_t n,
                           char out_digest[33])
{
    pf_error err;
    struct pf_adapter *adapters[4];
    struct pf_lora loras[4] = {0};
    struct pf_composition *c;
    struct pf_view *v;
    for (size_t i = 0; i < n; i++) {
        assert_ok(pf_adapter_open(adapter_file(state, w[i].nickname), &adapters[i], &err), &err);
        loras[i] = (struct pf_lora){
            .adapter = adapters[i], .strength = w[i].strength, .target = w[i].target};
    }
    assert_ok(pf_composition_new(ckpt, loras, n, NULL, &c, &err), &err);
    assert_ok(pf_view_open(ckpt, c, &v, &err), &err);
    struct digest d = view_bytes(ckpt, v);
    memcpy(out_digest, pf_view_digest(v), 33);
    pf_view_release(v);
    pf_composition_free(c);
    for (size_t i = 0; i < n; i++)
        pf_adapter_close(adapters[i]);
    return d;
}

/* The engine serves exactly these entries: bytes and digest. */
#define assert_serves(f, ...)                                                                      \
    assert_serves_n(state, f, (const struct want[]){__VA_ARGS__},                                  \
                    sizeof((const struct want[]){__VA_ARGS__}) / sizeof(struct want))

static void assert_serves_n(void **state, struct fixture *f, const struct want *w, size_t n)
{
    char digest[33];
    struct digest want = fresh(state, f->ckpt, w, w[0].nickname ? n : 0, digest);
    struct pf_view *v = pf_engine_view(f->engine);
    assert_string_equal(pf_view_digest(v), digest);
    assert_same(view_bytes(f->ckpt, v), want);
    pf_view_release(v);
}

static void set(struct fixture *f, const char *nickname, double strength, const char *lora_target,
                const char *targets, struct pf_change_report *r)
{
    pf_error err;
    struct pf_engine_lora l = {.nickname = nickname, .strength = strength, .target = lora_target};
    assert_ok(pf_engine_set(f->engine, &l, 1, targets, NULL, r, &err), &err);
}

static void each_component_has_a_composition_of_its_own(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    pf_error err;
    open_small(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    set(&f, "a", 1, NULL, "transformer", &r);
    assert_int_equal(r.n_layers_changed, N_BLOCKS);
    assert_serves(&f, {"a", "transformer", 1});
    set(&f, "b", 0.5, NULL, "text_encoder", &r); /* leaves the transformer's */
    assert_serves(&f, {"a", "transformer", 1}, {"b", "text_encoder", 0.5});
    assert_ok(pf_engine_unmerge(f.engine, "transformer", &r, &err), &err);
    assert_serves(&f, {"b", "text_encoder", 0.5});
    assert_ok(pf_engine_unmerge(f.engine, "text_encoder", &r, &err), &err);
    assert_serves(&f, {NULL, NULL, 0});
    assert_ok(pf_engine_merge(f.engine, "transformer", 2, &r, &err), &err);
    assert_serves(&f, {"a", "transformer", 2});
    assert_ok(pf_engine_merge(f.engine, "all", 1, &r, &err), &err);
    assert_serves(&f, {"a", "transformer", 1}, {"b", "text_encoder", 0.5});
    assert_ok(pf_engine_deactivate(f.engine, "text_encoder", &r, &err), &err);
    assert_serves(&f, {"a", "transformer", 1});
    assert_int_equal(pf_engine_merge(f.engine, "text_encoder", 1, &r, &err), PF_E_STATE);
    assert_err(&err, PF_E_STATE, "'text_encoder'");
    set(&f, "ab", 1, NULL, "transformer,text_encoder", &r); /* a list replaces both */
    assert_serves(&f, {"ab", NULL, 1});
    close_engine(&f);
}

/* "all", nothing, and a list of everything are one composition with one digest, set at once or one after another. */
static void all_and_a_list_of_everything_are_one_entry(void **state)
{
    struct fixture f;
    struct pf_change_report all, r;
    open_small(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    set(&f, "a", 1, NULL, NULL, &all);
    static const char *const lists[] = {"all", "", "transformer,text_encoder",
                                        "text_encoder,transformer,text_encoder"};
    for (size_t i = 0; i < PF_COUNTOF(lists); i++) {
        set(&f, "a", 1, lists[i], NULL, &r);
        assert_string_equal(r.composition, all.composition);
        set(&f, "b", 1, NULL, NULL, &r);
        assert_string_not_equal(r.composition, all.composition);
        set(&f, "a", 1, NULL, lists[i], &r);
        assert_string_equal(r.composition, all.composition);
    }
    assert_serves(&f, {"a", "text_encoder,transformer", 1});
    set(&f, "b", 1, NULL, NULL, &r);
    set(&f, "a", 1, NULL, "text_encoder", &r);
    assert_string_not_equal(r.composition, all.composition);
    set(&f, "a", 1, NULL, "transformer", &r);
    assert_string_equal(r.composition, all.composition);
    close_engine(&f);
}

/* The same adapter twice in one component is two entries, and acts twice. */
static void an_adapter_listed_twice_acts_twice(void **state)
{
    struct fixture f;
    struct pf_change_report once, twice;
    pf_error err;
    open_small(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    struct pf_engine_lora l[2] = {{.nickname = "a", .strength = 1},
                                  {.nickname = "a", .strength = 1}};
    assert_ok(pf_engine_set(f.engine, l, 1, NULL, NULL, &once, &err), &err);
    assert_ok(pf_engine_set(f.engine, l, 2, NULL, NULL, &twice, &err), &err);
    assert_string_not_equal(once.composition, twice.composition);
    assert_serves(&f, {"a", NULL, 1}, {"a", NULL, 1});
    close_engine(&f);
}

static uint32_t n_active(struct fixture *f, const char *component);

/* Under `all` an adapter acts where it addresses something, and the other component does not remember it. */
static void an_adapter_of_one_component_under_all(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    pf_error err;
    struct rng rng = {9};
    struct tensor t[2] = {
        {"transformer.blocks.1.o.lora_A.weight", 2, 24, PF_F32},
        {"transformer.blocks.1.o.lora_B.weight", 8, 2, PF_F32},
    };
    open_small(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    write_tensors(adapter_file(state, "one"), t, 2, &rng, 0.5f);
    assert_ok(pf_engine_load(f.engine, "one", adapter_file(state, "one"), &err), &err);
    set(&f, "b", 1, NULL, "text_encoder", &r);
    set(&f, "one", 1, NULL, NULL, &r); /* replaces b: both targets were named */
    assert_int_equal(r.n_tensors_changed, 1);
    assert_serves(&f, {"one", "transformer", 1});
    assert_int_equal(n_active(&f, "transformer"), 1);
    assert_int_equal(n_active(&f, "text_encoder"), 0);
    assert_int_equal(pf_engine_merge(f.engine, "text_encoder", 1, &r, &err), PF_E_STATE);
    set(&f, "b", 1, NULL, "text_encoder", &r);
    assert_serves(&f, {"one", "transformer", 1}, {"b", "text_encoder", 1});
    /* Asked for where it has nothing to say, it is an error, and nothing changes. */
    struct pf_engine_lora l = {.nickname = "one", .strength = 1};
    assert_int_equal(pf_engine_set(f.engine, &l, 1, "text_encoder", NULL, &r, &err),
                     PF_E_UNMATCHED);
    assert_err(&err, PF_E_UNMATCHED, "target 'text_encoder'");
    l.target = "transformer";
    assert_int_equal(pf_engine_set(f.engine, &l, 1, "text_encoder", NULL, &r, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "'one'", "'transformer'", "not about");
    assert_serves(&f, {"one", "transformer", 1}, {"b", "text_encoder", 1});
    close_engine(&f);
}

struct count {
    const char *component;
    uint32_t n;
};

static void count_active(void *ctx, const struct pf_active_info *info)
{
    struct count *c = ctx;
    c->n += strcmp(c->component, info->component) == 0;
}

static uint32_t n_active(struct fixture *f, const char *component)
{
    struct count c = {.component = component};
    pf_engine_each_active(f->engine, count_active, &c);
    return c.n;
}

/* C15: one name inside another. Swapping `a` leaves what `ab` does. */
static void C15_a_name_inside_another_is_another_name(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    pf_error err;
    open_small(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    struct pf_engine_lora l[2] = {{.nickname = "a", .strength = 1},
                                  {.nickname = "ab", .strength = 1}};
    assert_ok(pf_engine_set(f.engine, l, 2, NULL, NULL, &r, &err), &err);
    assert_serves(&f, {"a", NULL, 1}, {"ab", NULL, 1});
    l[0].nickname = "b";
    assert_ok(pf_engine_set(f.engine, l, 2, NULL, NULL, &r, &err), &err);
    assert_serves(&f, {"b", NULL, 1}, {"ab", NULL, 1});
    assert_ok(pf_engine_unload(f.engine, "a", &err), &err);
    assert_int_equal(pf_engine_unload(f.engine, "ab", &err), PF_E_BUSY);
    assert_serves(&f, {"b", NULL, 1}, {"ab", NULL, 1});
    close_engine(&f);
}

/* An overlay of both components: built, adopted, and half of it left when one component is unmerged. */
static void overlays_hold_both_components(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    struct pf_layer_status l;
    pf_error err;
    open_small(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    struct pf_engine_lora loras[2] = {{.nickname = "a", .strength = 1, .target = "transformer"},
                                      {.nickname = "b", .strength = 2, .target = "text_encoder"}};
    struct pf_change_opts o = {.size = sizeof o, .way = PF_WAY_OVERLAY};
    assert_ok(pf_engine_set(f.engine, loras, 2, NULL, &o, &r, &err), &err);
    assert_string_equal(r.way, "overlay");
    uint64_t n_before = merge_n_panels();
    (void)current_bytes(&f);
    assert_int_equal(merge_n_panels() - n_before, 0);
    for (uint32_t i = 0; i < f.ckpt->n_layers; i++) {
        assert_ok(pf_engine_layer_status(f.engine, i, &l, &err), &err);
        bool is_stem_of_transformer =
            f.ckpt->layers[i].is_stem && f.ckpt->layers[i].i_component == 1;
        bool is_even_block_of_te = f.ckpt->layers[i].i_component == 0 &&
                                   !f.ckpt->layers[i].is_stem &&
                                   strchr("02", f.ckpt->layers[i].name[7]);
        assert_string_equal(l.place,
                            is_stem_of_transformer || is_even_block_of_te ? "base" : "overlay");
    }
    assert_serves(&f, {"a", "transformer", 1}, {"b", "text_encoder", 2});
    assert_ok(pf_engine_unmerge(f.engine, "text_encoder", &r, &err), &err);
    assert_string_equal(r.way, "stream");
    assert_serves(&f, {"a", "transformer", 1});
    assert_ok(pf_engine_merge(f.engine, "text_encoder", 1, &r, &err), &err);
    assert_string_equal(r.way, "overlay"); /* it is still there */
    close_engine(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(each_component_has_a_composition_of_its_own),
        in_dir(all_and_a_list_of_everything_are_one_entry),
        in_dir(an_adapter_listed_twice_acts_twice),
        in_dir(an_adapter_of_one_component_under_all),
        in_dir(C15_a_name_inside_another_is_another_name),
        in_dir(overlays_hold_both_components),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
