/*
 * Views and readers: panels of any shape are pieces of one tensor, placements change where bytes come from and never what they are, and
 * a thousand compositions later the base is the base.
 */
#include "testing.h"

#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/proc.h"
#include "tensor/dtype.h"
#include "view/view.h"

#define MODEL PF_SOURCE_DIR "/data/emoji-dit"
#define NOTO  PF_SOURCE_DIR "/data/adapters/noto.safetensors"

struct fixture {
    struct pf_checkpoint *ckpt;
    struct pf_adapter *noto;
    struct pf_composition *comp;
    struct pf_view *view, *base;
    struct pf_reader *reader, *base_reader;
    uint32_t i_tensor; /* changed by the composition */
};

static void open_fixture(struct fixture *f, int32_t merge_dtype)
{
    pf_error err;
    struct pf_composition_opts o = {.size = sizeof o, .merge_dtype = merge_dtype};
    assert_ok(pf_checkpoint_open(MODEL, NULL, &f->ckpt, &err), &err);
    assert_ok(pf_adapter_open(NOTO, &f->noto, &err), &err);
    struct pf_lora l = {.adapter = f->noto, .strength = 1};
    assert_ok(pf_composition_new(f->ckpt, &l, 1, &o, &f->comp, &err), &err);
    assert_ok(pf_view_open(f->ckpt, f->comp, &f->view, &err), &err);
    assert_ok(pf_view_open(f->ckpt, NULL, &f->base, &err), &err);
    assert_ok(pf_reader_new(f->view, &f->reader, &err), &err);
    assert_ok(pf_reader_new(f->base, &f->base_reader, &err), &err);
    f->i_tensor = (uint32_t)pf_checkpoint_find(f->ckpt, "transformer",
                                               "transformer_blocks.3.ff.net.0.proj.weight");
    assert_true(pf_composition_changes(f->comp, f->i_tensor));
}

static void close_fixture(struct fixture *f)
{
    pf_reader_free(f->reader);
    pf_reader_free(f->base_reader);
    pf_view_release(f->view);
    pf_view_release(f->base);
    pf_composition_free(f->comp);
    pf_adapter_close(f->noto);
    pf_checkpoint_close(f->ckpt);
}

/* The tensor is 512 x 128 bf16. */
static void read_whole(struct pf_reader *r, uint32_t i_tensor, int32_t format, void *out, size_t n)
{
    struct pf_panel p = {.i_tensor = i_tensor, .n_rows = 512};
    pf_error err;
    assert_ok(pf_reader_read(r, &p, format, out, n, &err), &err);
}

/* Nothing is dropped without a word: not even what f32 cannot hold. */
static void a_strength_that_vanishes_in_f32_is_said(void **state)
{
    struct fixture f;
    pf_error err;
    struct pf_composition_info info;
    struct pf_composition *comp = NULL;
    bool is_said = false;
    (void)state;
    open_fixture(&f, PF_MERGE_BASE);
    struct pf_lora l = {.adapter = f.noto, .strength = 1e-50};
    assert_ok(pf_composition_new(f.ckpt, &l, 1, NULL, &comp, &err), &err);
    pf_composition_info(comp, &info);
    assert_int_equal(info.n_tensors_changed, 0);
    const char *note;
    for (uint32_t i = 0; (note = pf_composition_note(comp, i)) != NULL; i++)
        is_said |= strstr(note, "noto") != NULL && strstr(note, "1e-50") != NULL &&
                   strstr(note, "adds nothing") != NULL;
    assert_true(is_said);
    pf_composition_free(comp);
    const struct pf_composition_opts o = {.size = sizeof o, .merge_dtype = 7};
    assert_int_equal(pf_composition_new(f.ckpt, &l, 1, &o, &comp, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "merge precision 7");
    close_fixture(&f);
}

/* Its struct ends before merge_dtype: what lies behind it is not looked at. */
static void options_of_an_older_header_are_understood(void **state)
{
    struct fixture f;
    pf_error err;
    struct pf_composition *comp = NULL;
    const struct pf_composition_opts o = {.size = offsetof(struct pf_composition_opts, merge_dtype),
                                          .merge_dtype = 77};
    (void)state;
    open_fixture(&f, PF_MERGE_BASE);
    const struct pf_lora l = {.adapter = f.noto, .strength = 1};
    assert_ok(pf_composition_new(f.ckpt, &l, 1, &o, &comp, &err), &err);
    struct pf_composition_info want, got;
    pf_composition_info(f.comp, &want);
    pf_composition_info(comp, &got);
    assert_string_equal(got.digest, want.digest);
    pf_composition_free(comp);
    close_fixture(&f);
}

static void panels_of_any_shape_are_pieces_of_one_tensor(void **state)
{
    struct fixture f;
    static uint16_t whole[512 * 128], part[512 * 128];
    static float whole_f32[512 * 128], part_f32[512 * 128];
    static const int64_t shapes[][2] = {{1, 128}, {512, 1}, {7, 13}, {64, 128}, {511, 127}, {3, 5}};
    pf_error err;
    (void)state;
    open_fixture(&f, PF_MERGE_BASE);
    read_whole(f.reader, f.i_tensor, PF_NATIVE, whole, sizeof whole);
    read_whole(f.reader, f.i_tensor, PF_AS_F32, whole_f32, sizeof whole_f32);
    for (size_t i = 0; i < 512 * 128; i++)
        assert_true(f32_from_bf16(whole[i]) == whole_f32[i]);
    for (size_t k = 0; k < PF_COUNTOF(shapes); k++)
        for (int64_t r = 0; r < 512; r += shapes[k][0])
            for (int64_t c = 0; c < 128; c += shapes[k][1]) {
                int64_t n_r = 512 - r < shapes[k][0] ? 512 - r : shapes[k][0];
                int64_t n_c = 128 - c < shapes[k][1] ? 128 - c : shapes[k][1];
                struct pf_panel p = {f.i_tensor, r, n_r, c, n_c};
                assert_ok(pf_reader_read(f.reader, &p, PF_NATIVE, part, sizeof part, &err), &err);
                assert_ok(pf_reader_read(f.reader, &p, PF_AS_F32, part_f32, sizeof part_f32, &err),
                          &err);
                for (int64_t i = 0; i < n_r; i++) {
                    assert_memory_equal(part + i * n_c, whole + (r + i) * 128 + c, (size_t)n_c * 2);
                    assert_memory_equal(part_f32 + i * n_c, whole_f32 + (r + i) * 128 + c,
                                        (size_t)n_c * 4);
                }
            }
    close_fixture(&f);
}

static void the_base_view_shows_the_bytes_of_the_file(void **state)
{
    struct fixture f;
    static uint16_t bytes[768 * 128]; /* the largest tensor */
    pf_error err;
    (void)state;
    open_fixture(&f, PF_MERGE_BASE);
    for (uint32_t i = 0; i < f.ckpt->n_tensors; i++) {
        const struct ckpt_tensor *t = &f.ckpt->tensors[i];
        struct pf_panel p = {.i_tensor = i, .n_rows = shape_rows(&t->shape)};
        uint64_t n_merged = merge_n_panels();
        assert_ok(pf_reader_read(f.base_reader, &p, PF_NATIVE, bytes, sizeof bytes, &err), &err);
        assert_int_equal(merge_n_panels(), n_merged);
        assert_memory_equal(bytes, t->p, t->n_bytes);
        assert_ptr_equal(pf_view_map(f.base, i), t->p);
        assert_true((pf_view_map(f.view, i) == NULL) == pf_composition_changes(f.comp, i));
    }
    close_fixture(&f);
}

/* C1, C5: not drift, because nothing is ever subtracted */
static void C1_a_thousand_cycles_later_the_base_is_the_base(void **state)
{
    struct fixture f;
    static uint16_t base[512 * 128], merged[512 * 128], again[512 * 128];
    (void)state;
    open_fixture(&f, PF_MERGE_BASE);
    read_whole(f.base_reader, f.i_tensor, PF_NATIVE, base, sizeof base);
    read_whole(f.reader, f.i_tensor, PF_NATIVE, merged, sizeof merged);
    assert_memory_not_equal(base, merged, sizeof base);
    for (int i = 0; i < 1000; i++) {
        read_whole(f.reader, f.i_tensor, PF_NATIVE, again, sizeof again);
        assert_memory_equal(again, merged, sizeof again);
        read_whole(f.base_reader, f.i_tensor, PF_NATIVE, again, sizeof again);
        assert_memory_equal(again, base, sizeof again);
    }
    close_fixture(&f);
}

/* pf_apply_into: the CPU weight store of another framework, set and unset in place */
static void apply_into_sets_and_unsets_a_callers_buffer(void **state)
{
    struct fixture f;
    static uint16_t store[512 * 128], merged[512 * 128];
    pf_error err;
    (void)state;
    open_fixture(&f, PF_MERGE_BASE);
    const struct ckpt_tensor *t = &f.ckpt->tensors[f.i_tensor];
    read_whole(f.reader, f.i_tensor, PF_NATIVE, merged, sizeof merged);
    memset(store, 0xff, sizeof store); /* what it held does not matter */
    for (int i = 0; i < 3; i++) {
        assert_ok(pf_apply_into(f.view, f.i_tensor, store, sizeof store, &err), &err);
        assert_memory_equal(store, merged, sizeof store);
        assert_ok(pf_apply_into(f.base, f.i_tensor, store, sizeof store, &err), &err);
        assert_memory_equal(store, t->p, sizeof store);
    }
    assert_int_equal(pf_apply_into(f.view, f.i_tensor, store, sizeof store - 1, &err),
                     PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "takes 131072 bytes", "131071");
    close_fixture(&f);
}

static void f32_precision_keeps_what_rounding_loses(void **state)
{
    struct fixture f;
    static float wide[512 * 128];
    static uint16_t narrow[512 * 128];
    struct pf_composition_info info;
    (void)state;
    open_fixture(&f, PF_MERGE_F32);
    assert_int_equal(pf_view_dtype(f.view, f.i_tensor), PF_F32);
    read_whole(f.reader, f.i_tensor, PF_NATIVE, wide, sizeof wide);
    pf_composition_info(f.comp, &info);
    char f32_digest[33];
    snprintf(f32_digest, sizeof f32_digest, "%s", info.digest);
    close_fixture(&f);
    open_fixture(&f, PF_MERGE_BASE);
    read_whole(f.reader, f.i_tensor, PF_NATIVE, narrow, sizeof narrow);
    for (size_t i = 0; i < 512 * 128; i++)
        assert_int_equal(bf16_from_f32(wide[i]), narrow[i]);
    pf_composition_info(f.comp, &info);
    assert_string_not_equal(f32_digest, info.digest); /* precision is part of the digest */
    close_fixture(&f);
}

static void write_ones(const char *path, const char *header, float first, size_t n)
{
    uint64_t n_header = strlen(header);
    FILE *f = fopen(path, "wbe");
    assert_non_null(f);
    assert_int_equal(fwrite(&n_header, 8, 1, f), 1);
    assert_int_equal(fwrite(header, 1, n_header, f), n_header);
    for (size_t i = 0; i < n; i++, first = 1)
        assert_int_equal(fwrite(&first, sizeof first, 1, f), 1);
    assert_int_equal(fclose(f), 0);
}

/* 1 + 1e8 - 1e8 is 0 in f32, -1e8 + 1e8 + 1 is 1: the order is that of the contract, whatever the caller's is. */
static void terms_are_added_in_canonical_order(void **state)
{
    static const struct pf_lora entries[3] = {{.strength = 1},
                                              {.strength = 1e8, .has_alpha = true, .alpha = 1},
                                              {.strength = -5e7, .has_alpha = true, .alpha = 2}};
    static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
                                     {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    const char *base = test_path(state, "base.safetensors"),
               *lora = test_path(state, "lora.safetensors");
    struct pf_checkpoint *ckpt;
    struct pf_adapter *a;
    char digest[33] = "";
    pf_error err;
    write_ones(base,
               "{\"blocks.0.q.weight\":{\"dtype\":\"F32\",\"shape\":[1,1],\"data_offsets\":[0,4]}}",
               0, 1);
    write_ones(
        lora,
        "{\"blocks.0.q.lora_A.weight\":{\"dtype\":\"F32\",\"shape\":[1,1],\"data_offsets\":[0,4]},"
        "\"blocks.0.q.lora_B.weight\":{\"dtype\":\"F32\",\"shape\":[1,1],\"data_offsets\":[4,8]}}",
        1, 2);
    assert_ok(pf_checkpoint_open(base, NULL, &ckpt, &err), &err);
    assert_ok(pf_adapter_open(lora, &a, &err), &err);
    for (int i = 0; i < 6; i++) {
        struct pf_lora loras[3];
        struct pf_composition *comp;
        struct pf_view *view;
        float merged = -1;
        for (int k = 0; k < 3; k++) {
            loras[k] = entries[orders[i][k]];
            loras[k].adapter = a;
        }
        assert_ok(pf_composition_new(ckpt, loras, 3, NULL, &comp, &err), &err);
        assert_ok(pf_view_open(ckpt, comp, &view, &err), &err);
        assert_ok(pf_apply_into(view, 0, &merged, sizeof merged, &err), &err);
        assert_true(merged == 0);
        if (i > 0)
            assert_string_equal(pf_view_digest(view), digest);
        snprintf(digest, sizeof digest, "%s", pf_view_digest(view));
        pf_view_release(view);
        pf_composition_free(comp);
    }
    pf_adapter_close(a);
    pf_checkpoint_close(ckpt);
}

/* --------------------------------------------------------------------------------------- placements */

static void count_free(void *ctx)
{
    ++*(int *)ctx;
}

static void a_placement_lives_as_long_as_a_reader_is_inside(void **state)
{
    struct fixture f;
    static uint16_t bytes[512 * 128];
    static const uint16_t other[512 * 128] = {1};
    pf_error err;
    int n_freed = 0;
    (void)state;
    open_fixture(&f, PF_MERGE_BASE);
    uint32_t i_layer = f.ckpt->tensors[f.i_tensor].i_layer;
    const uint8_t **p = mem_calloc(f.ckpt->layers[i_layer].n_tensors, sizeof *p);
    p[f.i_tensor - f.ckpt->layers[i_layer].i_tensor0] = (const uint8_t *)other;
    struct layer_bytes elsewhere = {.kind = PLACE_RESIDENT, .p = p};
    struct placement *first = placement_new(f.ckpt->n_layers);
    first->layers[i_layer] = &elsewhere;
    first->free_fn = count_free;
    first->free_ctx = &n_freed;
    view_publish(f.view, first);
    assert_ok(pf_reader_enter(f.reader, i_layer, &err), &err);
    uint64_t n_merged = merge_n_panels();
    read_whole(f.reader, f.i_tensor, PF_NATIVE, bytes, sizeof bytes);
    assert_memory_equal(bytes, other, sizeof bytes);
    assert_int_equal(merge_n_panels(), n_merged);
    view_publish(f.view, NULL);
    assert_true(view_has_stale_readers(f.view));
    assert_int_equal(n_freed, 0);
    /* Still inside: one layer, one place */
    read_whole(f.reader, f.i_tensor, PF_NATIVE, bytes, sizeof bytes);
    assert_memory_equal(bytes, other, sizeof bytes);
    pf_reader_leave(f.reader);
    assert_false(view_has_stale_readers(f.view));
    assert_int_equal(n_freed, 1);
    read_whole(f.reader, f.i_tensor, PF_NATIVE, bytes, sizeof bytes);
    assert_memory_not_equal(bytes, other, sizeof bytes);
    mem_free(p);
    close_fixture(&f);
}

static void read_ahead_and_drop_behind_change_no_byte(void **state)
{
    struct fixture f;
    static uint16_t before[512 * 128], after[512 * 128];
    struct readahead *ra;
    struct pf_view *view;
    struct pf_reader *reader;
    pf_error err;
    (void)state;
    open_fixture(&f, PF_MERGE_BASE);
    read_whole(f.reader, f.i_tensor, PF_NATIVE, before, sizeof before);
    struct stream_policy *policy = policy_new(f.ckpt->n_layers);
    assert_ok(pf_view_open(f.ckpt, f.comp, &view, &err), &err);
    view_set_policy(view, policy);
    assert_ok(pf_reader_new(view, &reader, &err), &err);
    assert_ok(readahead_new(view, &ra, &err), &err);
    for (int pass = 0; pass < 3; pass++)
        for (uint32_t i = 0; i < f.ckpt->n_layers; i++) {
            readahead_layer(ra, i + 1);
            if (i == f.ckpt->tensors[f.i_tensor].i_layer) {
                read_whole(reader, f.i_tensor, PF_NATIVE, after, sizeof after);
                assert_memory_equal(before, after, sizeof before);
            }
            readahead_done(ra, i);
        }
    assert_true(atomic_load(&policy->n_bytes_dropped) > 0);
    readahead_free(ra);
    pf_reader_free(reader);
    pf_view_release(view);
    policy_unref(policy);
    close_fixture(&f);
}

/* What the kernel was asked to read, by anybody in this program. */
static _Atomic uint64_t n_asked_bytes;

int posix_fadvise(int fd, off_t off, off_t n_bytes, int advice)
{
    if (advice == POSIX_FADV_WILLNEED)
        atomic_fetch_add(&n_asked_bytes, (uint64_t)n_bytes);
    return (int)-syscall(SYS_fadvise64, fd, off, n_bytes, advice);
}

/* Exactly the bytes of the layer, with nobody waiting for them but this test. */
static void a_layer_is_asked_for_ahead(void **state)
{
    struct fixture f;
    struct readahead *ra;
    pf_error err;
    (void)state;
    open_fixture(&f, PF_MERGE_BASE);
    assert_ok(readahead_new(f.view, &ra, &err), &err);
    for (uint32_t i = 0; i < f.ckpt->n_layers; i++) {
        const uint64_t want = f.ckpt->layers[i].n_bytes, t_end = clock_ns() + 60000000000;
        atomic_store(&n_asked_bytes, 0);
        readahead_layer(ra, i);
        while (atomic_load(&n_asked_bytes) < want && clock_ns() < t_end)
            sched_yield();
        assert_int_equal(atomic_load(&n_asked_bytes), want);
    }
    readahead_free(ra);
    close_fixture(&f);
}

/* -------------------------------------------------------------------------------------------- errors */

static void refuses_panels_outside_of_tensors(void **state)
{
    struct fixture f;
    static uint16_t bytes[512 * 128];
    pf_error err;
    (void)state;
    open_fixture(&f, PF_MERGE_BASE);
    assert_int_equal(pf_view_dtype(f.view, UINT32_MAX), -1);
    assert_null(pf_view_map(f.view, UINT32_MAX));
    const struct pf_panel bad[] = {
        {.i_tensor = f.i_tensor, .row0 = 512, .n_rows = 1},
        {.i_tensor = f.i_tensor, .row0 = -1, .n_rows = 1},
        {.i_tensor = f.i_tensor, .n_rows = 513},
        {.i_tensor = f.i_tensor, .n_rows = 1, .col0 = 128, .n_cols = 1},
        {.i_tensor = f.i_tensor, .n_rows = 1, .col0 = 1, .n_cols = 128},
        {.i_tensor = f.i_tensor, .n_rows = 1, .col0 = 1}, /* whole rows from their second column */
        {.i_tensor = f.i_tensor, .row0 = INT64_MAX, .n_rows = INT64_MAX},
        {.i_tensor = f.ckpt->n_tensors, .n_rows = 1},
    };
    for (size_t i = 0; i < PF_COUNTOF(bad); i++)
        assert_int_equal(pf_reader_read(f.reader, &bad[i], PF_NATIVE, bytes, sizeof bytes, &err),
                         PF_E_RANGE);
    struct pf_panel whole = {.i_tensor = f.i_tensor, .n_rows = 512};
    assert_int_equal(pf_reader_read(f.reader, &whole, PF_NATIVE, bytes, sizeof bytes - 1, &err),
                     PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "131072 bytes", "131071");
    assert_int_equal(pf_reader_read(f.reader, &whole, PF_NATIVE, NULL, sizeof bytes, &err),
                     PF_E_INVALID);
    assert_int_equal(pf_apply_into(f.view, f.i_tensor, NULL, sizeof bytes, &err), PF_E_INVALID);
    assert_int_equal(pf_view_dtype(f.view, f.ckpt->n_tensors), -1);
    assert_int_equal(pf_view_dtype(f.view, UINT32_MAX), -1);
    assert_null(pf_view_map(f.view, UINT32_MAX));
    struct pf_composition *none;
    assert_int_equal(pf_composition_new(f.ckpt, NULL, 2, NULL, &none, &err), PF_E_INVALID);
    assert_int_equal(pf_reader_read(f.reader, &whole, 7, bytes, sizeof bytes, &err), PF_E_INVALID);
    assert_int_equal(pf_reader_enter(f.reader, f.ckpt->n_layers, &err), PF_E_RANGE);
    struct pf_view *v;
    struct pf_checkpoint *other;
    assert_ok(pf_checkpoint_open(MODEL, NULL, &other, &err), &err);
    assert_int_equal(pf_view_open(other, f.comp, &v, &err), PF_E_INVALID);
    pf_checkpoint_close(other);
    close_fixture(&f);
}

static void what_is_no_number_of_a_weight_is_read_as_it_is_alone(void **state)
{
    const char *path = test_path(state, "ids.safetensors");
    float x[2] = {0};
    struct pf_checkpoint *ckpt;
    struct pf_view *view;
    struct pf_reader *reader;
    pf_error err;
    write_ones(path, "{\"ids\":{\"dtype\":\"I32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 1, 2);
    assert_ok(pf_checkpoint_open(path, NULL, &ckpt, &err), &err);
    assert_ok(pf_view_open(ckpt, NULL, &view, &err), &err);
    assert_ok(pf_reader_new(view, &reader, &err), &err);
    const struct pf_panel all = {.n_rows = 2};
    assert_int_equal(pf_reader_read(reader, &all, PF_AS_F32, x, sizeof x, &err), PF_E_UNSUPPORTED);
    assert_err(&err, PF_E_UNSUPPORTED, "'ids' of dtype I32 cannot be read as f32");
    assert_true(x[0] == 0);
    assert_ok(pf_reader_read(reader, &all, PF_NATIVE, x, sizeof x, &err), &err);
    assert_true(x[0] == 1 && x[1] == 1);
    pf_reader_free(reader);
    pf_view_release(view);
    pf_checkpoint_close(ckpt);
}

/* A base that shrinks while it is streamed is an error of the read, not a crash. */
static void a_base_truncated_under_a_reader_is_an_error(void **state)
{
    pf_error err;
    struct pf_checkpoint *ckpt;
    struct pf_view *view;
    struct pf_reader *r;
    char *bytes;
    size_t n;
    static uint16_t out[512 * 128];
    const char *path = test_path(state, "base.safetensors");
    assert_ok(file_read_all(MODEL "/transformer/diffusion_pytorch_model.safetensors", 64 << 20,
                            &bytes, &n, &err),
              &err);
    write_file(path, bytes, n);
    mem_free(bytes);
    assert_ok(pf_checkpoint_open(path, NULL, &ckpt, &err), &err);
    assert_ok(pf_view_open(ckpt, NULL, &view, &err), &err);
    assert_ok(pf_reader_new(view, &r, &err), &err);
    assert_int_equal(truncate(path, 32768), 0);
    struct pf_panel p = {.i_tensor = (uint32_t)pf_checkpoint_find(
                             ckpt, "transformer", "transformer_blocks.3.ff.net.0.proj.weight"),
                         .n_rows = 512};
    assert_int_equal(pf_reader_read(r, &p, PF_NATIVE, out, sizeof out, &err), PF_E_TRUNCATED);
    assert_err(&err, PF_E_TRUNCATED, "transformer_blocks.3.ff.net.0.proj.weight");
    assert_int_equal(pf_checkpoint_verify(ckpt, &err), PF_E_TRUNCATED);
    pf_reader_free(r);
    pf_view_release(view);
    pf_checkpoint_close(ckpt);
}

/* C7, C93: no copy of anything, however often it is read */
static void C93_anonymous_memory_stays_flat(void **state)
{
    struct fixture f;
    static uint16_t bytes[512 * 128];
    (void)state;
    open_fixture(&f, PF_MERGE_BASE);
    read_whole(f.reader, f.i_tensor, PF_NATIVE, bytes, sizeof bytes);
    uint64_t before = proc_anon_bytes();
    for (int i = 0; i < 200; i++)
        read_whole(f.reader, f.i_tensor, PF_NATIVE, bytes, sizeof bytes);
    assert_true(proc_anon_bytes() <= before + (64 << 10));
    close_fixture(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(a_strength_that_vanishes_in_f32_is_said),
        in_dir(options_of_an_older_header_are_understood),
        in_dir(panels_of_any_shape_are_pieces_of_one_tensor),
        in_dir(the_base_view_shows_the_bytes_of_the_file),
        in_dir(C1_a_thousand_cycles_later_the_base_is_the_base),
        in_dir(apply_into_sets_and_unsets_a_callers_buffer),
        in_dir(f32_precision_keeps_what_rounding_loses),
        in_dir(terms_are_added_in_canonical_order),
        in_dir(a_placement_lives_as_long_as_a_reader_is_inside),
        in_dir(read_ahead_and_drop_behind_change_no_byte),
        in_dir(a_layer_is_asked_for_ahead),
        in_dir(refuses_panels_outside_of_tensors),
        in_dir(what_is_no_number_of_a_weight_is_read_as_it_is_alone),
        in_dir(a_base_truncated_under_a_reader_is_an_error),
        in_dir(C93_anonymous_memory_stays_flat),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
