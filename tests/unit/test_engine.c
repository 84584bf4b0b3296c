/*
 * The engine on the bundled model: what the operations mean, that bytes are those of a fresh merge, and that nothing is lost when
 * something fails.
 */
#include "engine_fixture.h"

/* C3 two of them in turn, C5 one cycle, C9 taken off and back, C17 one in place of another, C21 three strengths */
static void set_switch_and_unmerge_give_fresh_bytes(void **state)
{
    struct fixture f;
    pf_error err;
    struct pf_change_report r;
    open_engine(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    struct digest base = current_bytes(&f);
    set_one(&f, "noto", 1, &r);
    assert_string_equal(r.way, "stream");
    assert_int_equal(r.n_keys_unmatched, 0);
    assert_true(r.fidelity.survival > 0.5);
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, NOTO, 1));
    set_one(&f, "night", 0.5, &r);
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, NIGHT, 0.5));
    set_one(&f, "noto", 0, &r);
    assert_same(current_bytes(&f), base);
    set_one(&f, "noto", 0.5, &r);
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, NOTO, 0.5));
    assert_differ(current_bytes(&f), fresh_bytes(f.ckpt, NOTO, 1));
    assert_ok(pf_engine_unmerge(f.engine, NULL, &r, &err), &err);
    assert_string_equal(r.way, "base");
    assert_same(current_bytes(&f), base);
    assert_ok(pf_engine_merge(f.engine, NULL, 2, &r, &err), &err);
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, NOTO, 1));
    close_engine(&f);
}

/* An overlay serves without a single merged panel, and shows the same bytes. */
static void overlay_shows_the_same_bytes_without_merging(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    pf_error err;
    open_engine(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    set_one(&f, "turbo", 1, &r);
    struct digest streamed = current_bytes(&f);
    struct pf_engine_lora l = {.nickname = "turbo", .strength = 1};
    struct pf_change_opts o = {.size = sizeof o, .way = PF_WAY_OVERLAY};
    assert_ok(pf_engine_set(f.engine, &l, 1, NULL, &o, &r, &err), &err);
    assert_string_equal(r.note, "");
    assert_string_equal(r.way, "overlay");
    struct pf_view *v = pf_engine_view(f.engine);
    assert_string_equal(pf_engine_way(f.engine, v), "overlay");
    pf_view_release(v);
    uint64_t n_before = merge_n_panels();
    assert_same(current_bytes(&f), streamed);
    assert_int_equal(merge_n_panels() - n_before, 0);
    set_one(&f, "noto", 1, &r);
    assert_string_equal(r.way, "stream");
    set_one(&f, "turbo", 1, &r);
    assert_string_equal(r.way, "overlay");
    close_engine(&f);
}

/* Every byte of the changed tensors comes from files of the cache; true when none was merged. */
static bool reads_come_from_overlay_files(struct fixture *f)
{
    struct pf_view *v = pf_engine_view(f->engine);
    const struct pf_composition *comp = view_composition(v);
    struct pf_reader *r;
    struct place at;
    pf_error err;
    bool is_all = true;
    assert_ok(pf_reader_new(v, &r, &err), &err);
    for (size_t i = 0; i < comp->n_targets; i++) {
        uint32_t i_tensor = comp->i_tensors[i];
        assert_ok(pf_reader_enter(r, f->ckpt->tensors[i_tensor].i_layer, &err), &err);
        reader_place(r, i_tensor, &at);
        is_all = is_all && at.kind == PLACE_OVERLAY && at.p >= at.map->p &&
                 at.p < at.map->p + at.map->n_bytes;
        pf_reader_leave(r);
    }
    pf_reader_free(r);
    pf_view_release(v);
    return is_all;
}

/* Returning to a recent composition costs no merge while its overlay is there, and one per panel once it was evicted. */
static void returning_costs_no_merge_until_the_overlay_is_evicted(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    pf_error err;
    struct digest digest;
    open_engine(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    struct pf_engine_lora l = {.nickname = "turbo", .strength = 1};
    struct pf_change_opts o = {.size = sizeof o, .way = PF_WAY_OVERLAY};
    assert_ok(pf_engine_set(f.engine, &l, 1, NULL, &o, NULL, &err), &err);
    for (int i = 0; i < 3; i++) {
        uint64_t n_before = merge_n_panels();
        assert_ok(pf_engine_set(f.engine, NULL, 0, NULL, NULL, NULL, &err), &err);
        assert_ok(pf_engine_set(f.engine, &l, 1, NULL, NULL, NULL, &err), &err);
        (void)current_bytes(&f);
        assert_int_equal(merge_n_panels(), n_before);
        assert_true(reads_come_from_overlay_files(&f));
    }
    struct pf_view *v = pf_engine_view(f.engine);
    assert_true(digest_parse(pf_view_digest(v), &digest));
    pf_view_release(v);
    assert_int_equal(overlay_evict(f.engine->store, digest, &err), PF_E_BUSY); /* we map it */
    for (int i = 1; i <= N_RECENT; i++) /* until it is no recent composition any more */
        set_one(&f, "noto", 0.1 * i, &r);
    assert_ok(overlay_evict(f.engine->store, digest, &err), &err);
    assert_ok(pf_engine_set(f.engine, &l, 1, NULL, NULL, NULL, &err), &err);
    uint64_t n_before = merge_n_panels();
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, TURBO, 1));
    assert_true(merge_n_panels() > n_before);
    assert_false(reads_come_from_overlay_files(&f));
    close_engine(&f);
}

/* A request's own way for a composition that is also the global one: the bytes are equal, and the global placement stays. */
static void a_request_does_not_change_how_the_global_one_is_read(void **state)
{
    struct fixture f;
    pf_error err;
    struct pf_view *mine;
    open_engine(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    struct pf_engine_lora l = {.nickname = "turbo", .strength = 1};
    struct pf_change_opts o = {.size = sizeof o, .way = PF_WAY_OVERLAY};
    assert_ok(pf_engine_set(f.engine, &l, 1, NULL, &o, NULL, &err), &err);
    o.way = PF_WAY_STREAM;
    assert_ok(pf_engine_view_of(f.engine, &l, 1, &o, &mine, &err), &err);
    assert_string_equal(pf_engine_way(f.engine, mine), "overlay");
    assert_true(reads_come_from_overlay_files(&f));
    pf_view_release(mine);
    l.strength = 0.5; /* one of its own is read as it says */
    assert_ok(pf_engine_view_of(f.engine, &l, 1, &o, &mine, &err), &err);
    assert_string_equal(pf_engine_way(f.engine, mine), "stream");
    pf_view_release(mine);
    o.way = 9;
    assert_int_equal(pf_engine_view_of(f.engine, &l, 1, &o, &mine, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "way 9");
    close_engine(&f);
}

static void resident_layers_are_rewritten_in_place(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    pf_error err;
    open_engine(state, &f,
                (struct pf_engine_opts){
                    .build_delay_ms = -1, .n_resident_layers = 9, .way = PF_WAY_INPLACE});
    struct digest base = fresh_bytes(f.ckpt, NOTO, 0);
    for (int i = 0; i < 3; i++) {
        set_one(&f, "noto", 1, &r);
        assert_same(current_bytes(&f), fresh_bytes(f.ckpt, NOTO, 1));
        assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
        uint64_t n_before = merge_n_panels();
        struct pf_view *v = pf_engine_view(f.engine);
        struct digest d = view_bytes(f.ckpt, v);
        pf_view_release(v);
        assert_int_equal(merge_n_panels() - n_before, 0);
        assert_same(d, fresh_bytes(f.ckpt, NOTO, 1));
        assert_ok(pf_engine_deactivate(f.engine, NULL, &r, &err), &err);
        assert_same(current_bytes(&f), base);
        assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
        assert_same(current_bytes(&f), base);
    }
    close_engine(&f);
}

/* All tensors of one layer, as a reader that is inside of it sees them. */
static struct digest layer_bytes_of(struct fixture *f, struct pf_reader *r, struct pf_view *v,
                                    uint32_t i_layer)
{
    static uint8_t buf[4 << 20];
    struct hasher *h = hasher_new();
    pf_error err;
    for (uint32_t i = 0; i < f->ckpt->layers[i_layer].n_tensors; i++) {
        uint32_t i_tensor = f->ckpt->layers[i_layer].i_tensor0 + i;
        const struct shape *s = &f->ckpt->tensors[i_tensor].shape;
        struct pf_panel p = {.i_tensor = i_tensor, .n_rows = shape_rows(s)};
        assert_ok(pf_reader_read(r, &p, PF_NATIVE, buf, sizeof buf, &err), &err);
        hasher_add(h, buf,
                   (size_t)(shape_rows(s) * shape_cols(s)) *
                       (pf_dtype_bits(pf_view_dtype(v, i_tensor)) / 8));
    }
    struct digest d = hasher_digest(h);
    hasher_free(h);
    return d;
}

/* Has a layer a copy that new readers may take? */
static bool has_copy(struct fixture *f, uint32_t i_layer)
{
    pthread_mutex_lock(&f->engine->mu);
    bool is_ready = f->engine->residents->items[i_layer].is_ready;
    pthread_mutex_unlock(&f->engine->mu);
    return is_ready;
}

/* Rewriting waits for who reads the copy, and nobody comes to read it meanwhile. */
static void a_copy_is_taken_from_readers_before_it_is_rewritten(void **state)
{
    const uint32_t i_layer = 1; /* the first that the adapters change */
    struct fixture f;
    struct pf_reader *early, *late;
    struct pf_layer_status s;
    pf_error err;
    open_engine(state, &f, (struct pf_engine_opts){.build_delay_ms = -1, .n_resident_layers = 9});
    set_one(&f, "noto", 1, NULL);
    assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
    struct pf_view *noto = pf_engine_view(f.engine);
    assert_ok(pf_reader_new(noto, &early, &err), &err);
    assert_ok(pf_reader_new(noto, &late, &err), &err);
    assert_ok(pf_reader_enter(early, i_layer, &err), &err);
    struct digest want = layer_bytes_of(&f, early, noto, i_layer);
    set_one(&f, "turbo", 1, NULL);
    const uint64_t t_taken = clock_ns() + (uint64_t)SETTLE_MS * 1000000;
    while (has_copy(&f, i_layer) && clock_ns() < t_taken) /* late must come after it was taken */
        sched_yield();
    assert_int_equal(pf_engine_settle(f.engine, 30, &err), PF_E_BUSY); /* early is inside */
    assert_same(layer_bytes_of(&f, early, noto, i_layer), want);
    assert_ok(pf_reader_enter(late, i_layer, &err), &err);
    pf_reader_leave(early);
    const uint64_t t_end = clock_ns() + (uint64_t)SETTLE_MS * 1000000;
    do /* until the copy holds turbo's */
        assert_ok(pf_engine_layer_status(f.engine, i_layer, &s, &err), &err);
    while (strcmp(s.place, "resident") != 0 && clock_ns() < t_end);
    assert_string_equal(s.place, "resident");
    assert_same(layer_bytes_of(&f, late, noto, i_layer), want);
    pf_reader_leave(late);
    assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, TURBO, 1));
    pf_reader_free(early);
    pf_reader_free(late);
    pf_view_release(noto);
    close_engine(&f);
}

/* ARCHITECTURE.md, table "state x operation": every cell. */
static void every_cell_of_the_state_table(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    pf_error err;
    open_engine(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    struct digest base = current_bytes(&f), noto = fresh_bytes(f.ckpt, NOTO, 1);
    /* empty */
    assert_int_equal(pf_engine_merge(f.engine, NULL, 1, &r, &err), PF_E_STATE);
    assert_err(&err, PF_E_STATE, "nothing is remembered");
    assert_ok(pf_engine_unmerge(f.engine, NULL, &r, &err), &err);
    assert_ok(pf_engine_deactivate(f.engine, NULL, &r, &err), &err);
    assert_same(current_bytes(&f), base);
    assert_int_equal(pf_engine_merge(f.engine, NULL, 1, &r, &err), PF_E_STATE);
    set_one(&f, "noto", 1, &r);
    /* active */
    assert_same(current_bytes(&f), noto);
    assert_ok(pf_engine_merge(f.engine, NULL, 0.5, &r, &err), &err);
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, NOTO, 0.5));
    assert_ok(pf_engine_merge(f.engine, NULL, 1, &r, &err), &err); /* replaces the factor */
    assert_same(current_bytes(&f), noto);
    set_one(&f, "night", 1, &r);
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, NIGHT, 1));
    set_one(&f, "noto", 1, &r);
    assert_ok(pf_engine_unmerge(f.engine, NULL, &r, &err), &err);
    /* unmerged */
    assert_same(current_bytes(&f), base);
    assert_ok(pf_engine_unmerge(f.engine, NULL, &r, &err), &err);
    assert_ok(pf_engine_merge(f.engine, NULL, 1, &r, &err), &err);
    assert_same(current_bytes(&f), noto);
    assert_ok(pf_engine_unmerge(f.engine, NULL, &r, &err), &err);
    set_one(&f, "night", 1, &r);
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, NIGHT, 1));
    assert_ok(pf_engine_deactivate(f.engine, NULL, &r, &err), &err);
    assert_same(current_bytes(&f), base);
    assert_int_equal(pf_engine_merge(f.engine, NULL, 1, &r, &err), PF_E_STATE);
    set_one(&f, "noto", 1, &r);
    assert_ok(pf_engine_unmerge(f.engine, NULL, &r, &err), &err);
    assert_ok(pf_engine_deactivate(f.engine, NULL, &r, &err), &err);
    assert_int_equal(pf_engine_merge(f.engine, NULL, 1, &r, &err), PF_E_STATE);
    close_engine(&f);
}

static void a_failed_change_leaves_everything(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    pf_error err;
    open_engine(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    set_one(&f, "noto", 1, &r);
    struct digest noto = current_bytes(&f);
    struct pf_engine_lora bad[2] = {{.nickname = "night", .strength = 1},
                                    {.nickname = "nobody", .strength = 1}};
    assert_int_equal(pf_engine_set(f.engine, bad, 2, NULL, NULL, &r, &err), PF_E_NOTFOUND);
    assert_err(&err, PF_E_NOTFOUND, "'nobody'");
    bad[1] = (struct pf_engine_lora){.nickname = "turbo", .strength = 1e300 * 1e300};
    assert_int_equal(pf_engine_set(f.engine, bad, 2, NULL, NULL, &r, &err), PF_E_INVALID);
    assert_int_equal(pf_engine_set(f.engine, bad, 1, "vae", NULL, &r, &err), PF_E_NOTFOUND);
    assert_err(&err, PF_E_NOTFOUND, "'vae'", "'transformer'");
    assert_int_equal(pf_engine_set(f.engine, NULL, 1, NULL, NULL, &r, &err), PF_E_INVALID);
    assert_int_equal(pf_engine_unload(f.engine, NULL, &err), PF_E_INVALID);
    pf_engine_each_adapter(f.engine, NULL, NULL); /* tells nobody */
    pf_engine_each_active(f.engine, NULL, NULL);
    assert_same(current_bytes(&f), noto);
    assert_ok(pf_engine_merge(f.engine, NULL, 1, &r, &err), &err);
    assert_same(current_bytes(&f), noto);
    close_engine(&f);
}

/* Precision is part of what is set: no options are all defaults, also after f32; merging again keeps it. */
static void merge_precision_is_what_set_said_last(void **state)
{
    struct fixture f;
    struct pf_change_report f32, again, base;
    pf_error err;
    open_engine(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    struct pf_engine_lora l = {.nickname = "noto", .strength = 1};
    struct pf_change_opts o = {.size = sizeof o, .merge_dtype = PF_MERGE_F32};
    assert_ok(pf_engine_set(f.engine, &l, 1, NULL, &o, &f32, &err), &err);
    assert_ok(pf_engine_unmerge(f.engine, NULL, NULL, &err), &err);
    assert_ok(pf_engine_merge(f.engine, NULL, 1, &again, &err), &err);
    assert_string_equal(again.composition, f32.composition);
    assert_ok(pf_engine_set(f.engine, &l, 1, NULL, NULL, &base, &err), &err);
    assert_string_not_equal(base.composition, f32.composition);
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, NOTO, 1));
    close_engine(&f);
}

/* C121 */
static void an_adapter_in_use_cannot_be_unloaded(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    pf_error err;
    open_engine(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    set_one(&f, "noto", 1, &r);
    assert_int_equal(pf_engine_unload(f.engine, "noto", &err), PF_E_BUSY);
    struct pf_view *v = pf_engine_view(f.engine);
    assert_ok(pf_engine_deactivate(f.engine, NULL, &r, &err), &err);
    assert_int_equal(pf_engine_unload(f.engine, "noto", &err), PF_E_BUSY);
    /* The view keeps what it was made with */
    assert_same(view_bytes(f.ckpt, v), fresh_bytes(f.ckpt, NOTO, 1));
    pf_view_release(v);
    assert_ok(pf_engine_unload(f.engine, "noto", &err), &err);
    assert_int_equal(pf_engine_unload(f.engine, "noto", &err), PF_E_NOTFOUND);
    close_engine(&f);
}

/* C11 */
static void per_request_views_stand_beside_the_global_one(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    pf_error err;
    struct pf_view *mine, *global;
    open_engine(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    set_one(&f, "noto", 1, &r);
    struct pf_engine_lora l = {.nickname = "night", .strength = 1};
    assert_ok(pf_engine_view_of(f.engine, &l, 1, NULL, &mine, &err), &err);
    global = pf_engine_view(f.engine);
    for (int i = 0; i < 2; i++) {
        assert_same(view_bytes(f.ckpt, mine), fresh_bytes(f.ckpt, NIGHT, 1));
        assert_same(view_bytes(f.ckpt, global), fresh_bytes(f.ckpt, NOTO, 1));
    }
    assert_string_not_equal(pf_view_digest(mine), pf_view_digest(global));
    assert_string_equal(pf_engine_way(f.engine, mine), "stream");
    assert_ok(pf_engine_deactivate(f.engine, NULL, &r, &err), &err);
    struct pf_view *base = pf_engine_view(f.engine);
    assert_string_equal(pf_engine_way(f.engine, base), "base");
    assert_string_equal(pf_engine_way(f.engine, global), "stream");
    pf_view_release(base);
    pf_view_release(mine);
    pf_view_release(global);
    close_engine(&f);
}

static void without_a_cache_it_streams_and_says_so(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    struct pf_engine_status s;
    pf_error err;
    open_engine(state, &f, (struct pf_engine_opts){.cache_dir = "off"});
    struct pf_engine_lora l = {.nickname = "turbo", .strength = 1};
    struct pf_change_opts o = {.size = sizeof o, .way = PF_WAY_OVERLAY};
    assert_ok(pf_engine_set(f.engine, &l, 1, NULL, &o, &r, &err), &err);
    assert_string_equal(r.way, "stream");
    assert_non_null(strstr(r.note, "the cache is off"));
    pf_engine_status(f.engine, &s);
    assert_string_equal(s.cache_dir, "");
    assert_string_equal(s.cache_note, "the cache is off");
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, TURBO, 1));
    close_engine(&f);
}

/* A second engine adopts what the first one built: no merge at all. */
static void a_second_start_adopts(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    struct pf_engine_status s;
    pf_error err;
    struct pf_engine_lora l = {.nickname = "turbo", .strength = 1};
    struct pf_change_opts o = {.size = sizeof o, .way = PF_WAY_OVERLAY};
    open_engine(state, &f, (struct pf_engine_opts){0});
    assert_ok(pf_engine_set(f.engine, &l, 1, NULL, &o, &r, &err), &err);
    close_engine(&f);
    uint64_t n_before = merge_n_panels();
    open_engine(state, &f, (struct pf_engine_opts){0});
    assert_ok(pf_engine_set(f.engine, &l, 1, NULL, NULL, NULL, &err), &err);
    struct digest d = current_bytes(&f);
    assert_int_equal(merge_n_panels() - n_before, 0);
    pf_engine_status(f.engine, &s);
    assert_int_equal(s.n_adoptions, 1);
    assert_int_equal(s.n_builds, 0);
    assert_same(d, fresh_bytes(f.ckpt, TURBO, 1));
    close_engine(&f);
}

/* References that are really held: those that were given in advance and not taken yet do not count. */
static uint32_t n_held(const struct fixture *f, const struct pf_view *v)
{
    uint32_t n_taken = (uint32_t)(atomic_load(&f->engine->current.word) >> 48);
    return view_n_refs(v) - (65536 - n_taken);
}

static void current_counts_references_whoever_takes(void **state)
{
    struct fixture f;
    open_engine(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    struct pf_view *v = pf_engine_view(f.engine);
    uint32_t n = n_held(&f, v);
    for (int i = 0; i < 200000; i++) /* more than the 16 bits of the counter hold */
        pf_view_release(pf_engine_view(f.engine));
    assert_int_equal(n_held(&f, v), n);
    for (int i = 0; i < 40000; i++)
        assert_ptr_equal(pf_engine_view(f.engine), v);
    assert_int_equal(n_held(&f, v), n + 40000);
    view_unref_n(v, 40000);
    assert_int_equal(n_held(&f, v), n);
    pf_view_release(v);
    close_engine(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(set_switch_and_unmerge_give_fresh_bytes),
        in_dir(overlay_shows_the_same_bytes_without_merging),
        in_dir(returning_costs_no_merge_until_the_overlay_is_evicted),
        in_dir(a_request_does_not_change_how_the_global_one_is_read),
        in_dir(resident_layers_are_rewritten_in_place),
        in_dir(a_copy_is_taken_from_readers_before_it_is_rewritten),
        in_dir(every_cell_of_the_state_table),
        in_dir(a_failed_change_leaves_everything),
        in_dir(merge_precision_is_what_set_said_last),
        in_dir(an_adapter_in_use_cannot_be_unloaded),
        in_dir(per_request_views_stand_beside_the_global_one),
        in_dir(without_a_cache_it_streams_and_says_so),
        in_dir(a_second_start_adopts),
        in_dir(current_counts_references_whoever_takes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
