/*
 * What the test_overlay_* programs share: a synthetic base of n blocks with one linear each, adapters for it, a cache directory, and
 * the oracle: what a plain view, which merges while it reads, says that the bytes are.
 */
#ifndef PF_TESTS_OVERLAY_FIXTURE_H
#define PF_TESTS_OVERLAY_FIXTURE_H

#include "testing.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "overlay/overlay_int.h"

#include "base/pool.h"

struct fx {
    void **state;
    unsigned n_layers, n_linears; /* blocks, and adapted linears in each */
    int64_t n_rows, n_cols;
    /* Bytes of a last tensor of zeros, so that a small base is as large as one that is identified by samples */
    uint64_t n_pad;
    const char *base, *adapter, *cache; /* paths; of the ring of test_path, so copied */
    char paths[3][512];
    struct pf_checkpoint *ckpt;
    struct pf_adapter *lora;
    struct pf_composition *comp;
    struct overlay_store *store;
    struct pool *pool;
    pf_error err;
};

static PF_UNUSED uint16_t fx_bf16(struct rng *r, double scale)
{
    float f = (float)((rng_unit(r) - 0.5) * scale);
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)(u >> 16);
}

/* A safetensors file of n tensors of bf16, written piece by piece. name(i) and shape(i) come from the callback. */
typedef void (*fx_tensor_fn)(const struct fx *fx, unsigned i, char name[128], int64_t shape[2]);

static PF_UNUSED void fx_write_weights(const struct fx *fx, const char *path, unsigned n,
                                       fx_tensor_fn fn, double scale, uint64_t seed)
{
    struct strbuf h;
    struct rng r = {seed};
    uint64_t off = 0;
    strbuf_init(&h);
    strbuf_adds(&h, "{");
    for (unsigned i = 0; i < n; i++) {
        char name[128];
        int64_t shape[2];
        fn(fx, i, name, shape);
        uint64_t end = off + (uint64_t)shape[0] * (uint64_t)shape[1] * 2;
        strbuf_addf(&h,
                    "%s\"%s\":{\"dtype\":\"BF16\",\"shape\":[%lld,%lld],\"data_offsets\":[%llu,%"
                    "llu]}",
                    i ? "," : "", name, (long long)shape[0], (long long)shape[1],
                    (unsigned long long)off, (unsigned long long)end);
        off = end;
    }
    uint64_t n_pad = scale < 0.2 ? fx->n_pad : 0; /* of a base, not of an adapter */
    if (n_pad > 0)
        strbuf_addf(
            &h, ",\"stem.pad\":{\"dtype\":\"U8\",\"shape\":[%llu],\"data_offsets\":[%llu,%llu]}",
            (unsigned long long)n_pad, (unsigned long long)off, (unsigned long long)(off + n_pad));
    strbuf_adds(&h, "}");
    while (h.n % 8)
        strbuf_adds(&h, " ");
    FILE *f = fopen(path, "wbe");
    assert_non_null(f);
    uint64_t n_header = h.n;
    assert_int_equal(fwrite(&n_header, 8, 1, f), 1);
    assert_int_equal(fwrite(h.p, 1, h.n, f), h.n);
    strbuf_release(&h);
    uint64_t n_data = off;
    uint16_t *chunk = malloc(1 << 20);
    assert_non_null(chunk);
    while (off > 0) {
        size_t n_now = off < 1 << 20 ? (size_t)off : 1 << 20;
        for (size_t i = 0; i < n_now / 2; i++)
            chunk[i] = fx_bf16(&r, scale);
        assert_int_equal(fwrite(chunk, 1, n_now, f), n_now);
        off -= n_now;
    }
    free(chunk);
    assert_int_equal(fclose(f), 0);
    if (n_pad > 0)
        assert_int_equal(truncate(path, (off_t)(8 + n_header + n_data + n_pad)), 0);
}

/* Two of the stem's, which no adapter touches, then the linears of each block. */
static PF_UNUSED void fx_base_tensor(const struct fx *fx, unsigned i, char name[128],
                                     int64_t shape[2])
{
    if (i < 2)
        snprintf(name, 128, "stem%u.weight", i);
    else
        snprintf(name, 128, "transformer_blocks.%u.attn1.to_%c.weight", (i - 2) / fx->n_linears,
                 "qkv"[(i - 2) % fx->n_linears]);
    shape[0] = i < 2 ? 8 : fx->n_rows;
    shape[1] = i < 2 ? 8 : fx->n_cols;
}

#define FX_RANK 4

static PF_UNUSED void fx_lora_tensor(const struct fx *fx, unsigned i, char name[128],
                                     int64_t shape[2])
{
    bool is_b = i % 2;
    snprintf(name, 128, "transformer.transformer_blocks.%u.attn1.to_%c.lora_%s.weight",
             i / 2 / fx->n_linears, "qkv"[i / 2 % fx->n_linears], is_b ? "B" : "A");
    shape[0] = is_b ? fx->n_rows : FX_RANK;
    shape[1] = is_b ? FX_RANK : fx->n_cols;
}

static PF_UNUSED void fx_write_base(const struct fx *fx, const char *path, uint64_t seed)
{
    fx_write_weights(fx, path, fx->n_layers * fx->n_linears + 2, fx_base_tensor, 0.1, seed);
}

static PF_UNUSED void fx_write_lora(const struct fx *fx, const char *path, uint64_t seed)
{
    fx_write_weights(fx, path, 2 * fx->n_layers * fx->n_linears, fx_lora_tensor, 0.5, seed);
}

/* A composition of one adapter; owned by the caller. */
static PF_UNUSED struct pf_composition *fx_compose(struct fx *fx, double strength,
                                                   int32_t merge_dtype)
{
    struct pf_lora l = {.adapter = fx->lora, .strength = strength};
    struct pf_composition_opts o = {.size = sizeof o, .merge_dtype = merge_dtype};
    struct pf_composition *comp = NULL;
    assert_ok(pf_composition_new(fx->ckpt, &l, 1, &o, &comp, &fx->err), &fx->err);
    return comp;
}

static PF_UNUSED void fx_open_base(struct fx *fx)
{
    assert_ok(pf_checkpoint_open(fx->base, NULL, &fx->ckpt, &fx->err), &fx->err);
    fx->comp = fx_compose(fx, 1, PF_MERGE_BASE);
}

static PF_UNUSED void fx_close_base(struct fx *fx)
{
    pf_composition_free(fx->comp);
    pf_checkpoint_close(fx->ckpt);
    fx->comp = NULL;
    fx->ckpt = NULL;
}

static PF_UNUSED void fx_open_store(struct fx *fx, uint64_t n_budget)
{
    overlay_store_close(fx->store);
    fx->store = NULL;
    assert_ok(overlay_store_open(fx->cache, n_budget, &fx->store, &fx->err), &fx->err);
}

/* Opens what the geometry in fx (n_layers ... n_pad) says. */
static PF_UNUSED void fx_open_shape(struct fx *fx, void **state, unsigned n_threads)
{
    fx->state = state;
    static const char *const names[3] = {"base.safetensors", "lora.safetensors", "cache"};
    for (int i = 0; i < 3; i++)
        snprintf(fx->paths[i], sizeof fx->paths[i], "%s", test_path(state, names[i]));
    fx->base = fx->paths[0];
    fx->adapter = fx->paths[1];
    fx->cache = fx->paths[2];
    fx_write_base(fx, fx->base, 1);
    fx_write_lora(fx, fx->adapter, 2);
    assert_ok(pf_adapter_open(fx->adapter, &fx->lora, &fx->err), &fx->err);
    fx_open_base(fx);
    fx_open_store(fx, (uint64_t)1 << 40);
    assert_ok(pool_new(n_threads, &fx->pool, &fx->err), &fx->err);
}

static PF_UNUSED void fx_open(struct fx *fx, void **state, unsigned n_layers, int64_t n_rows,
                              int64_t n_cols, unsigned n_threads)
{
    *fx = (struct fx){.n_layers = n_layers, .n_linears = 1, .n_rows = n_rows, .n_cols = n_cols};
    fx_open_shape(fx, state, n_threads);
}

static PF_UNUSED void fx_close(struct fx *fx)
{
    fx_close_base(fx);
    pf_adapter_close(fx->lora);
    overlay_store_close(fx->store);
    pool_free(fx->pool);
}

static PF_UNUSED int fx_build(struct fx *fx, const struct pf_composition *comp,
                              struct overlay_build_report *r)
{
    struct overlay_build_opts o = {.pool = fx->pool};
    return overlay_build(fx->store, comp, &o, r, &fx->err);
}

/* Every changed tensor of the overlay against the plain view. */
static PF_UNUSED void fx_assert_bytes(struct fx *fx, struct pf_composition *comp,
                                      const struct overlay *o)
{
    struct pf_view *view = NULL;
    assert_ok(pf_view_open(fx->ckpt, comp, &view, &fx->err), &fx->err);
    for (size_t i = 0; i < comp->n_targets; i++) {
        const struct ckpt_tensor *t = &fx->ckpt->tensors[comp->i_tensors[i]];
        size_t n = (size_t)target_bytes(&comp->targets[i]);
        uint8_t *want = malloc(n);
        assert_non_null(want);
        assert_ok(pf_apply_into(view, comp->i_tensors[i], want, n, &fx->err), &fx->err);
        const struct layer_bytes *lb = overlay_layer(o, t->i_layer);
        assert_non_null(lb);
        const uint8_t *got = lb->p[comp->i_tensors[i] - fx->ckpt->layers[t->i_layer].i_tensor0];
        assert_non_null(got);
        assert_memory_equal(got, want, n);
        if (comp->targets[i].out_dtype == t->dtype)
            assert_memory_not_equal(got, t->p, n);
        free(want);
    }
    pf_view_release(view);
}

/* Adopts with full verification, compares, and lets go. */
static PF_UNUSED void fx_assert_adopts(struct fx *fx, struct pf_composition *comp)
{
    struct overlay *o = NULL;
    assert_ok(overlay_adopt(fx->store, comp, OVERLAY_VERIFY_FULL, &o, &fx->err), &fx->err);
    fx_assert_bytes(fx, comp, o);
    overlay_unref(o);
}

/* "<cache>/<digest of comp>/<name>", in a ring of 8. */
static PF_UNUSED const char *fx_entry(const struct fx *fx, const struct pf_composition *comp,
                                      const char *name)
{
    static char ring[8][768];
    static unsigned i_next;
    char *p = ring[i_next++ % 8];
    snprintf(p, sizeof ring[0], "%s/%s%s%s", fx->cache, comp->digest_hex, *name ? "/" : "", name);
    return p;
}

static PF_UNUSED char *fx_layer_name(const struct fx *fx, unsigned i_block)
{
    int64_t i = -1;
    char name[128];
    snprintf(name, sizeof name, "transformer_blocks.%u.attn1.to_q.weight", i_block);
    i = ckpt_find(fx->ckpt, 0, str_of(name));
    assert_true(i >= 0);
    return layer_file_name(fx->ckpt->tensors[i].i_layer);
}

static PF_UNUSED void fx_flip(const char *path, uint64_t off)
{
    uint8_t b = 0;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &b, 1, (off_t)off), 1);
    b ^= 1;
    assert_int_equal(pwrite(fd, &b, 1, (off_t)off), 1);
    close(fd);
}

static PF_UNUSED uint64_t fx_size(const char *path)
{
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    return (uint64_t)st.st_size;
}

/* Nothing in the cache but lock files and what overlay_list shows; no temporary file anywhere. */
static PF_UNUSED void fx_assert_no_litter(const struct fx *fx)
{
    char **names = NULL;
    size_t n = 0;
    assert_int_equal(file_list(fx->cache, &names, &n, NULL), PF_OK);
    for (size_t i = 0; i < n; i++) {
        struct digest d;
        struct str name = str_of(names[i]);
        if (str_ends(name, ".use") || str_ends(name, ".build") || str_ends(name, ".lock") ||
            str_eqz(name, "bases"))
            continue;
        assert_true(digest_parse(names[i], &d));
        char **files = NULL;
        size_t n_files = 0;
        char *dir = path_join(fx->cache, names[i]);
        assert_int_equal(file_list(dir, &files, &n_files, NULL), PF_OK);
        assert_true(n_files > 0);
        for (size_t k = 0; k < n_files; k++)
            if (files[k][0] == '.')
                fail_msg("litter: %s/%s", dir, files[k]);
        file_list_free(files, n_files);
        mem_free(dir);
    }
    file_list_free(names, n);
}

/* Runs fn in a child; returns its wait status. fn's return value is the exit status. */
static PF_UNUSED int fx_in_child(int (*fn)(struct fx *fx, void *arg), struct fx *fx, void *arg)
{
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        _exit(fn(fx, arg));
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

#endif
