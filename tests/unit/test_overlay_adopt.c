/*
 * Adopting: only what can be proved is used. Flipped bytes, foreign manifests, bases that were copied, touched or replaced, remembered
 * content ids, and caches that can be read but not written.
 */
#include "overlay_fixture.h"

#include <time.h>

#define SAMPLED_BYTES ((uint64_t)70 << 20) /* above 64 MiB a content id is made of samples */

static int adopt_rc(struct fx *fx, struct pf_composition *comp, enum overlay_verify verify)
{
    struct overlay *o = NULL;
    int rc = overlay_adopt(fx->store, comp, verify, &o, &fx->err);
    overlay_unref(o);
    return rc;
}

static void assert_absent(struct fx *fx, struct pf_composition *comp)
{
    assert_int_equal(adopt_rc(fx, comp, OVERLAY_VERIFY_FULL), PF_E_NOTFOUND);
}

/* ------------------------------------------------------------------------------------------ sampling */

static void every_block_is_sampled_with_the_stated_chance(void **state)
{
    (void)state;
    static const struct {
        uint64_t n, k;
    } cases[] = {{1, 1}, {7, 7}, {8, 8}, {9, 8}, {63, 8}, {512, 8}, {513, 9}, {700, 11}};
    assert_int_equal(sampling_of(4096, UINT64_MAX, 5).k, 64);
    assert_int_equal(sampling_of(9216, UINT64_MAX, 5).k, 64);
    assert_int_equal(sampling_of(700, 32 << 20, 5).k, 700);
    assert_int_equal(sampling_of(700, (32 << 20) + 1, 5).k, 11);
    for (size_t c = 0; c < PF_COUNTOF(cases); c++) {
        uint64_t n = cases[c].n, k = cases[c].k;
        unsigned *n_hits = calloc(n, sizeof *n_hits);
        assert_non_null(n_hits);
        for (uint64_t phase = 0; phase < n; phase++) {
            struct sampling s = sampling_of(n, UINT64_MAX, phase);
            assert_int_equal(s.k, k);
            uint64_t n_taken = 0;
            for (uint64_t i = 0; i < n; i++) {
                bool is_taken = sampling_takes(&s, i);
                n_taken += is_taken;
                n_hits[i] += is_taken;
            }
            assert_int_equal(n_taken, k);
        }
        for (uint64_t i = 0; i < n; i++)
            assert_int_equal(n_hits[i], k);
        free(n_hits);
    }
}

/* With the right name on it, which no foreign file has: the tensors that it lacks are not looked for behind its end. */
static void a_file_of_fewer_tensors_is_none_of_the_layer(void **state)
{
    const char *path = test_path(state, "none.safetensors");
    struct fx fx;
    struct layer_targets lt;
    struct layer_digests d = {0};
    struct st_layout *l;
    struct st_file *f;
    struct strbuf header = {0};
    size_t next = 0;
    fx_open(&fx, state, 1, 64, 64, 1);
    assert_true(layer_targets_next(fx.comp, &next, &lt));
    assert_ok(st_layout_new(&l, &fx.err), &fx.err);
    assert_ok(
        st_layout_meta(l, str_of("pageflip.composition"), str_of(fx.comp->digest_hex), &fx.err),
        &fx.err);
    assert_ok(st_layout_finish(l, 4096, &header, &fx.err), &fx.err);
    write_file(path, header.p, header.n);
    assert_ok(st_open(path, &f, &fx.err), &fx.err);
    assert_int_equal(layer_file_check(fx.comp, &lt, f, &d, &fx.err), PF_E_MISMATCH);
    assert_err(&fx.err, PF_E_MISMATCH, path, "holds 0 tensors, expected 1");
    st_close(f);
    st_layout_free(l);
    strbuf_release(&header);
    fx_close(&fx);
}

static void what_is_no_digest_names_no_entry(void **state)
{
    const char *cache = test_path(state, "cache");
    static const char *const texts[] = {NULL, "", "abc", "xyzxyzxyz"};
    pf_error err = {0};
    for (size_t i = 0; i < PF_COUNTOF(texts); i++) {
        assert_int_equal(pf_cache_verify(cache, texts[i], NULL, &err), PF_E_INVALID);
        assert_err(&err, PF_E_INVALID, texts[i] ? texts[i] : "''", "is no digest");
        assert_int_equal(pf_cache_evict(cache, texts[i], &err), PF_E_INVALID);
        assert_err(&err, PF_E_INVALID, "is no digest");
    }
    assert_int_equal(file_kind(cache), FILE_ABSENT);
}

static void a_flipped_byte_is_found_always_by_full_and_at_the_rate_by_sampling(void **state)
{
    struct fx fx;
    struct overlay *held = NULL; /* so that a bad layer alone is set aside and built again */
    /* 33 MiB: a block each, if a short one, 8 of 24 are looked at */
    fx_open(&fx, state, 24, 1024, 704, 1);
    assert_ok(fx_build(&fx, fx.comp, NULL), &fx.err);
    assert_ok(overlay_adopt(fx.store, fx.comp, OVERLAY_VERIFY_SAMPLED, &held, &fx.err), &fx.err);
    char *name = fx_layer_name(&fx, 17);
    char path[600];
    snprintf(path, sizeof path, "%s", fx_entry(&fx, fx.comp, name));
    uint64_t off = fx_size(path) - 7;
    unsigned n_found = 0;
    fx_flip(path, off);
    for (uint64_t phase = 0; phase < 24; phase++) {
        struct overlay *o = NULL;
        int rc = overlay_adopt_phase(fx.store, fx.comp, OVERLAY_VERIFY_SAMPLED, phase, &o, &fx.err);
        overlay_unref(o);
        if (rc == PF_OK)
            continue;
        n_found++;
        assert_err(&fx.err, PF_E_FORMAT, name, "to_q", "not those that were written");
        assert_absent(&fx, fx.comp); /* set aside */
        struct overlay_build_report r;
        assert_ok(fx_build(&fx, fx.comp, &r), &fx.err);
        assert_int_equal(r.n_layers_written, 1);
        fx_flip(path, off);
    }
    assert_int_equal(n_found, 8); /* 24 phases, each block in 8 of them */
    enum overlay_base_state base;
    assert_int_equal(overlay_verify_entry(fx.store, fx.comp->digest, &base, &fx.err), PF_E_FORMAT);
    assert_err(&fx.err, PF_E_FORMAT, name, "not those that were written");
    assert_int_equal(adopt_rc(&fx, fx.comp, OVERLAY_VERIFY_FULL), PF_E_FORMAT);
    overlay_unref(held);
    mem_free(name);
    fx_close(&fx);
}

/* Few bytes, many tensors: all of it is looked at, whatever is drawn. */
static void a_flipped_byte_of_a_small_entry_is_always_found(void **state)
{
    struct fx fx;
    fx_open(&fx, state, 12, 16, 16, 1);
    char *name = fx_layer_name(&fx, 9);
    for (uint64_t phase = 0; phase < 12; phase += 3) {
        struct overlay *o = NULL;
        assert_ok(fx_build(&fx, fx.comp, NULL), &fx.err);
        const char *path = fx_entry(&fx, fx.comp, name);
        fx_flip(path, fx_size(path) - 7);
        assert_int_equal(
            overlay_adopt_phase(fx.store, fx.comp, OVERLAY_VERIFY_SAMPLED, phase, &o, &fx.err),
            PF_E_FORMAT);
    }
    mem_free(name);
    fx_close(&fx);
}

/* Every byte of a small entry, one after another: found by verify, and never adopted. */
static void no_byte_of_an_entry_is_beyond_proof(void **state)
{
    struct fx fx;
    enum overlay_base_state base;
    fx_open(&fx, state, 1, 4, 4, 1);
    assert_ok(fx_build(&fx, fx.comp, NULL), &fx.err);
    assert_ok(overlay_verify_entry(fx.store, fx.comp->digest, &base, &fx.err), &fx.err);
    assert_int_equal(base, OVERLAY_BASE_PROVED);
    char *name = fx_layer_name(&fx, 0);
    const char *names[2] = {name, "manifest.json"};
    for (int f = 0; f < 2; f++) {
        uint64_t n = fx_size(fx_entry(&fx, fx.comp, names[f]));
        for (uint64_t off = 0; off < n; off += f == 0 && off > 1000 && off < n - 40 ? 37 : 1) {
            fx_flip(fx_entry(&fx, fx.comp, names[f]), off);
            if (overlay_verify_entry(fx.store, fx.comp->digest, &base, &fx.err) == PF_OK)
                fail_msg("byte %llu of %s", (unsigned long long)off, names[f]);
            fx_flip(fx_entry(&fx, fx.comp, names[f]), off);
        }
    }
    assert_ok(overlay_verify_entry(fx.store, fx.comp->digest, &base, &fx.err), &fx.err);
    fx_flip(fx_entry(&fx, fx.comp, "manifest.json"), 30);
    assert_int_equal(adopt_rc(&fx, fx.comp, OVERLAY_VERIFY_SAMPLED), PF_E_FORMAT);
    assert_err(&fx.err, PF_E_FORMAT, "manifest.json", "damaged");
    assert_absent(&fx, fx.comp);
    mem_free(name);
    fx_close(&fx);
}

static void what_is_missing_or_cut_is_not_adopted_but_built_again(void **state)
{
    struct fx fx;
    fx_open(&fx, state, 3, 16, 16, 1);
    char *name = fx_layer_name(&fx, 1);
    for (int i = 0; i < 4; i++) {
        assert_ok(fx_build(&fx, fx.comp, NULL), &fx.err);
        const char *path = fx_entry(&fx, fx.comp, name);
        if (i == 0)
            assert_int_equal(unlink(path), 0);
        else if (i == 1)
            assert_int_equal(truncate(path, (off_t)fx_size(path) - 1), 0);
        else if (i == 2)
            write_file(path, "hello", 5);
        else
            fx_flip(path, 9); /* in the header */
        assert_int_equal(adopt_rc(&fx, fx.comp, OVERLAY_VERIFY_SAMPLED), PF_E_FORMAT);
        assert_err(&fx.err, PF_E_FORMAT, name);
        assert_absent(&fx, fx.comp);
    }
    mem_free(name);
    fx_close(&fx);
}

/* Sound in itself, and somebody else's. */
static void the_manifest_of_another_composition_proves_nothing(void **state)
{
    struct fx fx;
    char *text = NULL;
    size_t n = 0;
    fx_open(&fx, state, 1, 16, 16, 1);
    struct pf_composition *other = fx_compose(&fx, 0.5, PF_MERGE_BASE);
    assert_ok(fx_build(&fx, fx.comp, NULL), &fx.err);
    assert_ok(fx_build(&fx, other, NULL), &fx.err);
    assert_ok(file_read_all(fx_entry(&fx, other, "manifest.json"), 1 << 20, &text, &n, &fx.err),
              &fx.err);
    write_file(fx_entry(&fx, fx.comp, "manifest.json"), text, n);
    assert_int_equal(adopt_rc(&fx, fx.comp, OVERLAY_VERIFY_SAMPLED), PF_E_MISMATCH);
    assert_err(&fx.err, PF_E_MISMATCH, fx.comp->digest_hex, "names another composition or base");
    assert_absent(&fx, fx.comp);
    assert_ok(adopt_rc(&fx, other, OVERLAY_VERIFY_FULL), &fx.err);
    mem_free(text);
    pf_composition_free(other);
    fx_close(&fx);
}

/* In the place of a layer or the manifest, of an entry that is read or not. */
static void what_is_no_file_is_built_again(void **state)
{
    struct fx fx;
    struct overlay *held = NULL;
    fx_open(&fx, state, 3, 16, 16, 1);
    char *name = fx_layer_name(&fx, 1);
    for (int i = 0; i < 8; i++) {
        assert_ok(fx_build(&fx, fx.comp, NULL), &fx.err);
        if (i & 4)
            assert_ok(overlay_adopt(fx.store, fx.comp, OVERLAY_VERIFY_FULL, &held, &fx.err),
                      &fx.err);
        const char *path = fx_entry(&fx, fx.comp, i & 1 ? name : "manifest.json");
        assert_int_equal(unlink(path), 0);
        assert_int_equal(i & 2 ? mkdir(path, 0777) : mkfifo(path, 0666), 0);
        assert_int_equal(adopt_rc(&fx, fx.comp, OVERLAY_VERIFY_SAMPLED), PF_E_FORMAT);
        assert_err(&fx.err, PF_E_FORMAT, path, "not a regular file");
        assert_ok(fx_build(&fx, fx.comp, NULL), &fx.err);
        fx_assert_adopts(&fx, fx.comp);
        overlay_unref(held);
        held = NULL;
        assert_ok(overlay_evict(fx.store, fx.comp->digest, &fx.err), &fx.err);
    }
    mem_free(name);
    fx_close(&fx);
}

static void an_entry_that_is_read_is_set_aside_without_taking_it_away(void **state)
{
    struct fx fx;
    struct overlay *o = NULL;
    struct overlay_build_report r;
    fx_open(&fx, state, 3, 16, 16, 1);
    assert_ok(fx_build(&fx, fx.comp, NULL), &fx.err);
    assert_ok(overlay_adopt(fx.store, fx.comp, OVERLAY_VERIFY_FULL, &o, &fx.err), &fx.err);
    char *name = fx_layer_name(&fx, 1);
    const char *path = fx_entry(&fx, fx.comp, name);
    assert_int_equal(unlink(path), 0);
    write_file(path, "rubbish", 7);
    assert_int_equal(adopt_rc(&fx, fx.comp, OVERLAY_VERIFY_SAMPLED), PF_E_FORMAT);
    fx_assert_bytes(&fx, fx.comp, o);
    assert_ok(fx_build(&fx, fx.comp, &r), &fx.err);
    assert_int_equal(r.n_layers_kept, 2);
    fx_assert_adopts(&fx, fx.comp);
    fx_assert_bytes(&fx, fx.comp, o);
    overlay_unref(o);
    mem_free(name);
    fx_close(&fx);
}

/* --------------------------------------------------------------------------------- the base meanwhile */

static void reopen(struct fx *fx)
{
    fx_close_base(fx);
    fx_open_base(fx);
}

static void a_base_that_was_touched_or_copied_keeps_its_overlays(void **state)
{
    struct fx fx;
    fx_open(&fx, state, 3, 16, 16, 1);
    assert_ok(fx_build(&fx, fx.comp, NULL), &fx.err);
    char digest[33];
    snprintf(digest, sizeof digest, "%s", fx.comp->digest_hex);
    struct timespec t[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
    for (int i = 0; i < 3; i++) {
        if (i == 0)
            assert_int_equal(utimensat(AT_FDCWD, fx.base, t, 0), 0);
        else if (i == 1) /* copied over itself: another inode */
            fx_write_base(&fx, test_path(state, "copy"), 1);
        if (i == 1)
            assert_int_equal(rename(test_path(state, "copy"), fx.base), 0);
        reopen(&fx);
        assert_string_equal(fx.comp->digest_hex, digest);
        if (i < 2) {
            assert_int_equal(adopt_rc(&fx, fx.comp, OVERLAY_VERIFY_SAMPLED), PF_E_CHANGED);
            assert_err(&fx.err, PF_E_CHANGED, "copied, touched or replaced");
            /* Nobody may stamp it without having looked. */
            assert_int_equal(fx_build(&fx, fx.comp, NULL), PF_E_CHANGED);
            assert_int_equal(adopt_rc(&fx, fx.comp, OVERLAY_VERIFY_SAMPLED), PF_E_CHANGED);
            assert_ok(overlay_recheck(fx.store, fx.comp, NULL, &fx.err), &fx.err);
        }
        fx_assert_adopts(&fx, fx.comp);
    }
    fx_close(&fx);
}

static void two_copies_in_turn_are_checked_once_each(void **state)
{
    struct fx fx;
    fx_open(&fx, state, 2, 16, 16, 1);
    assert_ok(fx_build(&fx, fx.comp, NULL), &fx.err);
    const char *first = fx.base;
    char copy[600];
    snprintf(copy, sizeof copy, "%s", test_path(state, "copy.safetensors"));
    fx_write_base(&fx, copy, 1);
    fx.base = copy;
    reopen(&fx);
    assert_int_equal(adopt_rc(&fx, fx.comp, OVERLAY_VERIFY_SAMPLED), PF_E_CHANGED);
    assert_ok(
        overlay_recheck(fx.store, fx.comp, &(struct overlay_build_opts){.pool = fx.pool}, &fx.err),
        &fx.err);
    for (int i = 0; i < 4; i++) {
        fx.base = i % 2 ? copy : first;
        reopen(&fx);
        fx_assert_adopts(&fx, fx.comp);
    }
    fx_close(&fx);
}

/* A base of more than 64 MiB is identified by samples: one byte elsewhere, same size, same mtime. */
static void replace_unseen(struct fx *fx)
{
    struct stat st;
    assert_int_equal(stat(fx->base, &st), 0);
    int64_t i = ckpt_find(fx->ckpt, 0, str_of("transformer_blocks.3.attn1.to_q.weight"));
    assert_true(i >= 0);
    uint64_t off = fx->ckpt->tensors[i].off_bytes + 100;
    fx_close_base(fx);
    fx_flip(fx->base, off);
    struct timespec t[2] = {st.st_atim, st.st_mtim};
    assert_int_equal(utimensat(AT_FDCWD, fx->base, t, 0), 0);
    fx_open_base(fx);
}

static void other_bytes_behind_a_known_id_get_an_id_of_their_own(void **state)
{
    struct fx fx;
    fx = (struct fx){
        .n_layers = 5, .n_linears = 1, .n_rows = 64, .n_cols = 512, .n_pad = SAMPLED_BYTES};
    fx_open_shape(&fx, state, 2);
    assert_ok(fx_build(&fx, fx.comp, NULL), &fx.err);
    struct digest old = fx.comp->digest;
    replace_unseen(&fx);
    assert_true(digest_eq(fx.comp->digest, old)); /* the samples agree */
    struct pf_composition *before = fx_compose(&fx, 0.5, PF_MERGE_BASE);
    assert_int_equal(adopt_rc(&fx, fx.comp, OVERLAY_VERIFY_FULL), PF_E_CHANGED);
    enum overlay_base_state base;
    assert_int_equal(overlay_verify_entry(fx.store, old, &base, &fx.err), PF_E_MISMATCH);
    assert_err(&fx.err, PF_E_MISMATCH, "transformer_blocks.3.attn1.to_q.weight", "made from");
    assert_int_equal(overlay_recheck(fx.store, fx.comp, NULL, &fx.err), PF_E_MISMATCH);
    assert_err(&fx.err, PF_E_MISMATCH, "transformer_blocks.3.attn1.to_q.weight",
               "although the sampled");

    /* What was composed before is neither adopted nor published, this composition or another. */
    assert_int_equal(adopt_rc(&fx, fx.comp, OVERLAY_VERIFY_FULL), PF_E_CHANGED);
    assert_int_equal(overlay_recheck(fx.store, fx.comp, NULL, &fx.err), PF_E_MISMATCH);
    assert_int_equal(fx_build(&fx, fx.comp, NULL), PF_E_CHANGED);
    assert_int_equal(fx_build(&fx, before, NULL), PF_E_CHANGED);
    assert_err(&fx.err, PF_E_CHANGED, "before other bytes were found");
    assert_int_equal(file_kind(fx_entry(&fx, before, "")), FILE_ABSENT);

    /* Composed again it is somebody else; the old entry stays, for its own base. */
    struct pf_composition *now = fx_compose(&fx, 1, PF_MERGE_BASE);
    assert_false(digest_eq(now->digest, old));
    assert_ok(fx_build(&fx, now, NULL), &fx.err);
    fx_assert_adopts(&fx, now);
    assert_ok(overlay_verify_entry(fx.store, now->digest, &base, &fx.err), &fx.err);
    assert_int_equal(base, OVERLAY_BASE_PROVED);
    assert_int_equal(file_kind(fx_entry(&fx, fx.comp, "manifest.json")), FILE_REGULAR);

    /* The next process reads the id that was found, without finding it again. */
    assert_ok(base_id_remember(fx.store, fx.ckpt, INT64_MAX / 2, &fx.err), &fx.err);
    fx_close_base(&fx);
    assert_ok(pf_checkpoint_open(fx.base, NULL, &fx.ckpt, &fx.err), &fx.err);
    struct digest id;
    assert_ok(overlay_base_id(fx.store, fx.ckpt, &id, &fx.err), &fx.err);
    fx.comp = fx_compose(&fx, 1, PF_MERGE_BASE);
    assert_true(digest_eq(id, now->base_id));
    assert_true(digest_eq(fx.comp->digest, now->digest));
    assert_int_equal(adopt_rc(&fx, fx.comp, OVERLAY_VERIFY_SAMPLED), PF_OK);
    pf_composition_free(now);
    pf_composition_free(before);
    fx_close(&fx);
}

/* The same discovery while completing what a killed build left of the other base. */
static void a_partial_entry_of_another_base_is_not_mixed_in(void **state)
{
    struct fx fx;
    fx = (struct fx){
        .n_layers = 5, .n_linears = 1, .n_rows = 64, .n_cols = 512, .n_pad = SAMPLED_BYTES};
    fx_open_shape(&fx, state, 2);
    assert_ok(fx_build(&fx, fx.comp, NULL), &fx.err);
    struct digest old = fx.comp->digest;
    char *last = fx_layer_name(&fx, 4);
    assert_int_equal(unlink(fx_entry(&fx, fx.comp, "manifest.json")), 0);
    assert_int_equal(unlink(fx_entry(&fx, fx.comp, last)), 0);
    replace_unseen(&fx);
    assert_true(digest_eq(fx.comp->digest, old));
    assert_int_equal(fx_build(&fx, fx.comp, NULL), PF_E_MISMATCH);
    assert_err(&fx.err, PF_E_MISMATCH, "transformer_blocks.3.attn1.to_q.weight");
    assert_int_equal(file_kind(fx_entry(&fx, fx.comp, last)), FILE_ABSENT);
    struct pf_composition *now = fx_compose(&fx, 1, PF_MERGE_BASE);
    assert_false(digest_eq(now->digest, old));
    pf_composition_free(now);
    mem_free(last);
    fx_close(&fx);
}

/* ---------------------------------------------------------------------------------- remembered ids */

static void an_unchanged_base_is_not_read_again(void **state)
{
    struct fx fx;
    struct digest id, truth;
    fx_open(&fx, state, 2, 16, 16, 1);
    assert_ok(ckpt_content_id(fx.ckpt, &truth, &fx.err), &fx.err);
    int64_t newest = st_map(fx.ckpt->files[0])->stamp.ctime_ns;
    /* Too young: the file could change again within the same tick. */
    assert_ok(base_id_remember(fx.store, fx.ckpt, newest + 1000000000, &fx.err), &fx.err);
    assert_false(base_id_recall(fx.store, fx.ckpt));
    assert_ok(base_id_remember(fx.store, fx.ckpt, newest + 3000000000, &fx.err), &fx.err);
    assert_true(base_id_recall(fx.store, fx.ckpt));

    /* That it is recalled and not computed shows when the memory is false. */
    struct digest lie = {truth.hi + 1, truth.lo};
    struct pf_checkpoint *again = NULL;
    assert_ok(pf_checkpoint_open(fx.base, NULL, &again, &fx.err), &fx.err);
    ckpt_content_id_recall(again, lie, false);
    assert_ok(base_id_remember(fx.store, again, newest + 3000000000, &fx.err), &fx.err);
    pf_checkpoint_close(again);
    assert_ok(pf_checkpoint_open(fx.base, NULL, &again, &fx.err), &fx.err);
    assert_ok(overlay_base_id(fx.store, again, &id, &fx.err), &fx.err);
    assert_true(digest_eq(id, lie));
    pf_checkpoint_close(again);

    /* Touched: computed. */
    struct timespec t[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
    assert_int_equal(utimensat(AT_FDCWD, fx.base, t, 0), 0);
    assert_ok(pf_checkpoint_open(fx.base, NULL, &again, &fx.err), &fx.err);
    assert_ok(overlay_base_id(fx.store, again, &id, &fx.err), &fx.err);
    assert_true(digest_eq(id, truth));
    pf_checkpoint_close(again);
    fx_close(&fx);
}

static void a_damaged_memory_is_worth_nothing(void **state)
{
    struct fx fx;
    fx_open(&fx, state, 2, 16, 16, 1);
    assert_ok(base_id_remember(fx.store, fx.ckpt, INT64_MAX / 2, &fx.err), &fx.err);
    char **names = NULL, dir[600];
    size_t n = 0;
    snprintf(dir, sizeof dir, "%s/bases", fx.cache);
    assert_ok(file_list(dir, &names, &n, &fx.err), &fx.err);
    assert_int_equal(n, 1);
    char *path = path_join(dir, names[0]);
    for (uint64_t off = 0; off < fx_size(path); off++) {
        fx_flip(path, off);
        assert_false(base_id_recall(fx.store, fx.ckpt));
        fx_flip(path, off);
    }
    assert_true(base_id_recall(fx.store, fx.ckpt));
    mem_free(path);
    file_list_free(names, n);
    /* And there are never too many of them. */
    for (int i = 0; i < 80; i++) {
        char name[64];
        snprintf(name, sizeof name, "cache/bases/%032x.json", (unsigned)i);
        write_file(test_path(state, name), "{}", 2);
    }
    assert_ok(base_id_remember(fx.store, fx.ckpt, INT64_MAX / 2, &fx.err), &fx.err);
    assert_ok(file_list(dir, &names, &n, &fx.err), &fx.err);
    assert_int_equal(n, 64);
    assert_true(base_id_recall(fx.store, fx.ckpt));
    file_list_free(names, n);
    fx_close(&fx);
}

/* ------------------------------------------------------------------------------------ no write access */

static int use_read_only(struct fx *fx, void *arg)
{
    (void)arg;
    if (geteuid() == 0 && (setgid(65534) || setuid(65534)))
        return 77;
    if (access(fx->cache, W_OK) == 0)
        return 77;
    fx_open_store(fx, 0);
    fx_assert_adopts(fx, fx->comp);
    struct pf_composition *other = fx_compose(fx, 0.5, PF_MERGE_BASE);
    int rc = fx_build(fx, other, NULL);
    assert_int_equal(rc, PF_E_IO);
    assert_err(&fx->err, PF_E_IO, "read-only", fx->cache);
    pf_composition_free(other);
    assert_int_equal(overlay_evict(fx->store, fx->comp->digest, &fx->err), PF_E_IO);
    assert_err(&fx->err, PF_E_IO, "read-only");
    struct overlay_entry *e = NULL;
    size_t n = 0;
    assert_ok(overlay_list(fx->store, &e, &n, &fx->err), &fx->err);
    assert_int_equal(n, 1);
    assert_false(e[0].is_partial || e[0].is_in_use || e[0].is_building);
    overlay_list_free(e, n);
    /* In use by somebody who cannot write: seen by those who can, so never evicted under it. */
    struct overlay *o = NULL;
    assert_ok(overlay_adopt(fx->store, fx->comp, OVERLAY_VERIFY_SAMPLED, &o, &fx->err), &fx->err);
    assert_true(entry_is_locked(fx->store, fx->comp->digest, "use", false));
    overlay_unref(o);
    return 0;
}

static int recheck_read_only(struct fx *fx, void *arg)
{
    (void)arg;
    if (geteuid() == 0 && (setgid(65534) || setuid(65534)))
        return 77;
    fx_open_store(fx, 0);
    assert_int_equal(adopt_rc(fx, fx->comp, OVERLAY_VERIFY_SAMPLED), PF_E_CHANGED);
    assert_ok(overlay_recheck(fx->store, fx->comp, NULL, &fx->err), &fx->err);
    fx_assert_adopts(fx, fx->comp); /* this process knows, though it could not write it down */
    return 0;
}

static int open_unreadable(struct fx *fx, void *arg)
{
    (void)arg;
    if (geteuid() != 0 || setgid(65534) || setuid(65534)) /* what is ours we can read */
        return 77;
    struct overlay_store *s = NULL;
    int rc = overlay_store_open(fx->cache, 0, &s, &fx->err);
    assert_int_equal(rc, PF_E_IO);
    assert_err(&fx->err, PF_E_IO, fx->cache, "cannot be read");
    rc = overlay_store_open(test_path(fx->state, "new/cache"), 0, &s, &fx->err);
    assert_int_equal(rc, PF_E_IO);
    assert_err(&fx->err, PF_E_IO, "overlay cache", "create directory");
    return 0;
}

static void as_somebody(struct fx *fx, int (*fn)(struct fx *, void *))
{
    int status = fx_in_child(fn, fx, NULL);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77)
        print_message("cannot become an unprivileged user: left out\n");
    else
        assert_int_equal(WEXITSTATUS(status), 0);
}

static void a_read_only_cache_is_adopted_from_and_never_built_in(void **state)
{
    struct fx fx;
    fx_open(&fx, state, 2, 16, 16, 1);
    assert_ok(fx_build(&fx, fx.comp, NULL), &fx.err);
    assert_int_equal(chmod(*state, 0755), 0);
    assert_int_equal(chmod(fx.cache, 0555), 0);
    as_somebody(&fx, use_read_only);
    struct timespec t[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
    assert_int_equal(utimensat(AT_FDCWD, fx.base, t, 0), 0);
    reopen(&fx);
    as_somebody(&fx, recheck_read_only);
    assert_int_equal(chmod(fx.cache, 0700), 0);
    as_somebody(&fx, open_unreadable);
    fx_close(&fx);
}

static void a_file_in_the_place_of_the_cache_is_an_error(void **state)
{
    struct overlay_store *s = NULL;
    pf_error err;
    write_file(test_path(state, "cache"), "x", 1);
    assert_int_equal(overlay_store_open(test_path(state, "cache"), 0, &s, &err), PF_E_EXISTS);
    assert_err(&err, PF_E_EXISTS, "overlay cache", "not a directory");
}

static void the_directory_follows_the_precedence(void **state)
{
    (void)state;
    pf_error err;
    char *dir = NULL;
    assert_int_equal(setenv("HOME", "/h", 1) | setenv("XDG_CACHE_HOME", "/x", 1) |
                         setenv("PAGEFLIP_CACHE", "/p", 1),
                     0);
    static const struct {
        const char *unset, *asked, *want;
    } cases[] = {{NULL, "/asked", "/asked"},
                 {NULL, NULL, "/p"},
                 {NULL, "", "/p"},
                 {"PAGEFLIP_CACHE", NULL, "/x/pageflip"},
                 {"XDG_CACHE_HOME", NULL, "/h/.cache/pageflip"}};
    for (size_t i = 0; i < PF_COUNTOF(cases); i++) {
        if (cases[i].unset)
            unsetenv(cases[i].unset);
        assert_ok(overlay_cache_dir(cases[i].asked, &dir, &err), &err);
        assert_string_equal(dir, cases[i].want);
        mem_free(dir);
    }
    setenv("XDG_CACHE_HOME", "x", 1); /* its specification: to be ignored */
    assert_ok(overlay_cache_dir(NULL, &dir, &err), &err);
    assert_string_equal(dir, "/h/.cache/pageflip");
    mem_free(dir);
    unsetenv("HOME");
    assert_int_equal(overlay_cache_dir(NULL, &dir, &err), PF_E_STATE);
    assert_err(&err, PF_E_STATE, "no cache", "PAGEFLIP_CACHE");
    setenv("PAGEFLIP_CACHE", "off", 1);
    assert_int_equal(overlay_cache_dir(NULL, &dir, &err), PF_E_STATE);
    assert_err(&err, PF_E_STATE, "the cache is off");
    assert_ok(overlay_cache_dir("/asked", &dir, &err), &err);
    mem_free(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_block_is_sampled_with_the_stated_chance),
        in_dir(a_file_of_fewer_tensors_is_none_of_the_layer),
        in_dir(what_is_no_digest_names_no_entry),
        in_dir(a_flipped_byte_is_found_always_by_full_and_at_the_rate_by_sampling),
        in_dir(a_flipped_byte_of_a_small_entry_is_always_found),
        in_dir(no_byte_of_an_entry_is_beyond_proof),
        in_dir(what_is_missing_or_cut_is_not_adopted_but_built_again),
        in_dir(the_manifest_of_another_composition_proves_nothing),
        in_dir(what_is_no_file_is_built_again),
        in_dir(an_entry_that_is_read_is_set_aside_without_taking_it_away),
        in_dir(a_base_that_was_touched_or_copied_keeps_its_overlays),
        in_dir(two_copies_in_turn_are_checked_once_each),
        in_dir(other_bytes_behind_a_known_id_get_an_id_of_their_own),
        in_dir(a_partial_entry_of_another_base_is_not_mixed_in),
        in_dir(an_unchanged_base_is_not_read_again),
        in_dir(a_damaged_memory_is_worth_nothing),
        in_dir(a_read_only_cache_is_adopted_from_and_never_built_in),
        in_dir(a_file_in_the_place_of_the_cache_is_an_error),
        cmocka_unit_test(the_directory_follows_the_precedence),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
