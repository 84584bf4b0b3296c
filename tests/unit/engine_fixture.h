/*
 * What the test_engine_* programs share: an engine on the bundled model with its three adapters, a digest of everything that a view
 * shows, the same composition made without any engine, and small safetensors files of one's own.
 */
#ifndef PF_TESTS_ENGINE_FIXTURE_H
#define PF_TESTS_ENGINE_FIXTURE_H

#include "testing.h"

#include "base/mem.h"
#include "engine/engine_int.h"
#include "merge/merge.h"
#include "safetensors/safetensors.h"
#include "tensor/dtype.h"

#define MODEL PF_SOURCE_DIR "/data/emoji-dit"
#define NOTO  PF_SOURCE_DIR "/data/adapters/noto.safetensors"
#define TURBO PF_SOURCE_DIR "/data/adapters/turbo.safetensors"
#define NIGHT PF_SOURCE_DIR "/data/adapters/night"

/* Against hanging, no bound on speed: the builder is nice, sanitizers and busy machines are slow. */
#define SETTLE_MS 600000

struct fixture {
    struct pf_checkpoint *ckpt;
    struct pf_engine *engine;
};

static PF_UNUSED void open_engine(void **state, struct fixture *f, struct pf_engine_opts o)
{
    pf_error err;
    o.size = sizeof o;
    if (!o.cache_dir)
        o.cache_dir = test_path(state, "cache");
    assert_ok(pf_checkpoint_open(MODEL, NULL, &f->ckpt, &err), &err);
    assert_ok(pf_engine_open(f->ckpt, &o, &f->engine, &err), &err);
    assert_ok(pf_engine_load(f->engine, "noto", NOTO, &err), &err);
    assert_ok(pf_engine_load(f->engine, "turbo", TURBO, &err), &err);
    assert_ok(pf_engine_load(f->engine, "night", NIGHT, &err), &err);
}

static PF_UNUSED void close_engine(struct fixture *f)
{
    pf_engine_close(f->engine);
    pf_checkpoint_close(f->ckpt);
}

/* A digest of all bytes that a view shows, read panel by panel through a reader. */
static PF_UNUSED struct digest view_bytes(struct pf_checkpoint *ckpt, struct pf_view *view)
{
    pf_error err;
    struct pf_reader *r;
    struct hasher *h = hasher_new();
    static uint8_t buf[4 << 20];
    assert_ok(pf_reader_new(view, &r, &err), &err);
    for (uint32_t l = 0; l < ckpt->n_layers; l++) {
        assert_ok(pf_reader_enter(r, l, &err), &err);
        for (uint32_t i = 0; i < ckpt->layers[l].n_tensors; i++) {
            uint32_t i_tensor = ckpt->layers[l].i_tensor0 + i;
            const struct shape *s = &ckpt->tensors[i_tensor].shape;
            struct pf_panel p = {.i_tensor = i_tensor, .n_rows = shape_rows(s)};
            size_t n = (size_t)(shape_rows(s) * shape_cols(s)) *
                       (pf_dtype_bits(pf_view_dtype(view, i_tensor)) / 8);
            assert_true(n <= sizeof buf);
            assert_ok(pf_reader_read(r, &p, PF_NATIVE, buf, sizeof buf, &err), &err);
            hasher_add(h, buf, n);
        }
        pf_reader_leave(r);
    }
    pf_reader_free(r);
    struct digest d = hasher_digest(h);
    hasher_free(h);
    return d;
}

static PF_UNUSED struct digest current_bytes(struct fixture *f)
{
    struct pf_view *v = pf_engine_view(f->engine);
    struct digest d = view_bytes(f->ckpt, v);
    pf_view_release(v);
    return d;
}

/* The same composition made from nothing: own adapters, own view, no engine. */
static PF_UNUSED struct digest fresh_bytes(struct pf_checkpoint *ckpt, const char *path,
                                           double strength)
{
    pf_error err;
    struct pf_adapter *a;
    struct pf_composition *c;
    struct pf_view *v;
    assert_ok(pf_adapter_open(path, &a, &err), &err);
    struct pf_lora lora = {.adapter = a, .strength = strength};
    assert_ok(pf_composition_new(ckpt, &lora, 1, NULL, &c, &err), &err);
    assert_ok(pf_view_open(ckpt, c, &v, &err), &err);
    struct digest d = view_bytes(ckpt, v);
    pf_view_release(v);
    pf_composition_free(c);
    pf_adapter_close(a);
    return d;
}

static PF_UNUSED void set_one(struct fixture *f, const char *nickname, double strength,
                              struct pf_change_report *report)
{
    pf_error err;
    struct pf_engine_lora l = {.nickname = nickname, .strength = strength};
    assert_ok(pf_engine_set(f->engine, &l, 1, NULL, NULL, report, &err), &err);
}

static PF_UNUSED void assert_same(struct digest a, struct digest b)
{
    assert_true(digest_eq(a, b));
}

static PF_UNUSED void assert_differ(struct digest a, struct digest b)
{
    assert_false(digest_eq(a, b));
}

/* -------------------------------------------------------------------------------------- small files */

struct tensor {
    char name[96];
    int64_t rows, cols;
    int32_t dtype;
};

static PF_UNUSED void write_tensors(const char *path, const struct tensor *t, size_t n,
                                    struct rng *rng, float scale)
{
    struct st_layout *l;
    struct strbuf h;
    pf_error err;
    strbuf_init(&h);
    assert_ok(st_layout_new(&l, &err), &err);
    for (size_t i = 0; i < n; i++) {
        struct shape s = {.rank = t[i].cols ? 2 : 1, .dim = {t[i].rows, t[i].cols}};
        assert_ok(st_layout_tensor(l, str_of(t[i].name), t[i].dtype, &s, &err), &err);
    }
    assert_ok(st_layout_finish(l, 64, &h, &err), &err);
    uint64_t n_file = st_layout_file_bytes(l);
    uint8_t *bytes = mem_calloc(1, n_file);
    memcpy(bytes, strbuf_z(&h), h.n);
    for (size_t i = 0; i < n; i++) {
        int64_t n_el = t[i].rows * (t[i].cols ? t[i].cols : 1);
        for (int64_t k = 0; k < n_el; k++) {
            float v = scale * ((float)(rng_next(rng) >> 40) / 8388608.0f - 1.0f);
            uint8_t *p = bytes + st_layout_offset(l, i);
            uint16_t b = bf16_from_f32(v);
            if (t[i].dtype == PF_F32)
                memcpy(p + 4 * k, &v, 4);
            else
                memcpy(p + 2 * k, &b, 2);
        }
    }
    write_file(path, bytes, n_file);
    mem_free(bytes);
    strbuf_release(&h);
    st_layout_free(l);
}

/* ----------------------------------------------------------------- a small model of two components */

#define N_ADAPTERS 3
#define N_TARGETS  2
#define N_BLOCKS   4

static PF_UNUSED const char *const TARGETS[N_TARGETS] = {"text_encoder", "transformer"};
/* C15: one name inside another */
static PF_UNUSED const char *const NAMES[N_ADAPTERS] = {"a", "ab", "b"};

static PF_UNUSED void make_base(void **state)
{
    struct rng rng;
    struct tensor t[2 * N_BLOCKS + 1];
    rng = (struct rng){1};
    for (int c = 0; c < N_TARGETS; c++) {
        char dir[64];
        size_t n = 0;
        snprintf(dir, sizeof dir, "model/%s", TARGETS[c]);
        pf_error err;
        assert_ok(file_mkdirs(test_path(state, dir), &err), &err);
        for (int b = 0; b < N_BLOCKS; b++) {
            t[n] = (struct tensor){.rows = 24, .cols = 17, .dtype = PF_BF16};
            snprintf(t[n++].name, sizeof t->name, "blocks.%d.q.weight", b);
            t[n] = (struct tensor){.rows = 8, .cols = 24, .dtype = PF_BF16};
            snprintf(t[n++].name, sizeof t->name, "blocks.%d.o.weight", b);
        }
        t[n++] = (struct tensor){.name = "head.weight", .rows = 5, .cols = 24, .dtype = PF_BF16};
        snprintf(dir, sizeof dir, "model/%s/model.safetensors", TARGETS[c]);
        write_tensors(test_path(state, dir), t, n, &rng, 0.1f);
    }
    write_file(test_path(state, "model/model_index.json"), "{}", 2);
}

/* Adapter i: `a` touches every block of both components, `ab` the first half, `b` heads and odd blocks. */
static PF_UNUSED void make_adapter(void **state, int i)
{
    struct rng rng;
    struct tensor t[4 * N_TARGETS * (2 * N_BLOCKS + 1)];
    char file[64];
    size_t n = 0;
    rng = (struct rng){100 + (uint64_t)i};
    for (int c = 0; c < N_TARGETS; c++) {
        for (int b = 0; b < N_BLOCKS; b++) {
            if ((i == 1 && b >= N_BLOCKS / 2) || (i == 2 && b % 2 == 0))
                continue;
            t[n] = (struct tensor){.rows = 3, .cols = 17, .dtype = PF_F32};
            snprintf(t[n++].name, sizeof t->name, "%s.blocks.%d.q.lora_A.weight", TARGETS[c], b);
            t[n] = (struct tensor){.rows = 24, .cols = 3, .dtype = PF_F32};
            snprintf(t[n++].name, sizeof t->name, "%s.blocks.%d.q.lora_B.weight", TARGETS[c], b);
        }
        if (i != 2)
            continue;
        t[n] = (struct tensor){.rows = 2, .cols = 24, .dtype = PF_F32};
        snprintf(t[n++].name, sizeof t->name, "%s.head.lora_A.weight", TARGETS[c]);
        t[n] = (struct tensor){.rows = 5, .cols = 2, .dtype = PF_F32};
        snprintf(t[n++].name, sizeof t->name, "%s.head.lora_B.weight", TARGETS[c]);
    }
    snprintf(file, sizeof file, "%s.safetensors", NAMES[i]);
    write_tensors(test_path(state, file), t, n, &rng, 0.5f);
}

static PF_UNUSED const char *adapter_file(void **state, const char *name)
{
    char file[64];
    snprintf(file, sizeof file, "%s.safetensors", name);
    return test_path(state, file);
}

/* The small model with its three adapters, loaded. */
static PF_UNUSED void open_small(void **state, struct fixture *f, struct pf_engine_opts o)
{
    pf_error err;
    o.size = sizeof o;
    if (!o.cache_dir)
        o.cache_dir = test_path(state, "cache");
    make_base(state);
    assert_ok(pf_checkpoint_open(test_path(state, "model"), NULL, &f->ckpt, &err), &err);
    assert_ok(pf_engine_open(f->ckpt, &o, &f->engine, &err), &err);
    for (int i = 0; i < N_ADAPTERS; i++) {
        make_adapter(state, i);
        assert_ok(pf_engine_load(f->engine, NAMES[i], adapter_file(state, NAMES[i]), &err), &err);
    }
}

/* ------------------------------------------------------------------------------ a base with large tensors */

#define BIG_ROWS  3072
#define BIG_COLS  4096 /* bf16: 24 MiB a tensor */
#define BIG_BYTES ((uint64_t)BIG_ROWS * BIG_COLS * 2)
#define BIG_RANK  4

/* n blocks of one linear each in big.safetensors; adapters `a` and `ab` for all of them. */
static PF_UNUSED void make_big(void **state, int n)
{
    struct rng rng = {5};
    struct tensor t[16] = {0};
    assert_in_range(n, 1, 8);
    for (int b = 0; b < n; b++) {
        t[b] = (struct tensor){.rows = BIG_ROWS, .cols = BIG_COLS, .dtype = PF_BF16};
        snprintf(t[b].name, sizeof t->name, "blocks.%d.q.weight", b);
    }
    write_tensors(test_path(state, "big.safetensors"), t, (size_t)n, &rng, 0.1f);
    for (int a = 0; a < 2; a++) {
        for (int b = 0; b < n; b++) {
            t[2 * b] = (struct tensor){.rows = BIG_RANK, .cols = BIG_COLS, .dtype = PF_BF16};
            snprintf(t[2 * b].name, sizeof t->name, "blocks.%d.q.lora_A.weight", b);
            t[2 * b + 1] = (struct tensor){.rows = BIG_ROWS, .cols = BIG_RANK, .dtype = PF_BF16};
            snprintf(t[2 * b + 1].name, sizeof t->name, "blocks.%d.q.lora_B.weight", b);
        }
        write_tensors(adapter_file(state, NAMES[a]), t, 2 * (size_t)n, &rng, 0.5f);
    }
}

/* A pass over everything in panels, as a model makes it. */
static PF_UNUSED struct digest big_bytes(struct pf_checkpoint *ckpt, struct pf_view *v)
{
    static uint8_t panel[1 << 20];
    struct hasher *h = hasher_new();
    struct pf_reader *r;
    pf_error err;
    assert_ok(pf_reader_new(v, &r, &err), &err);
    for (uint32_t i = 0; i < ckpt->n_tensors; i++) {
        assert_ok(pf_reader_enter(r, ckpt->tensors[i].i_layer, &err), &err);
        for (int64_t row = 0; row < BIG_ROWS; row += 128) {
            struct pf_panel p = {.i_tensor = i, .row0 = row, .n_rows = 128};
            assert_ok(pf_reader_read(r, &p, PF_NATIVE, panel, sizeof panel, &err), &err);
            hasher_add(h, panel, sizeof panel);
        }
        pf_reader_leave(r);
    }
    pf_reader_free(r);
    struct digest d = hasher_digest(h);
    hasher_free(h);
    return d;
}

#endif
