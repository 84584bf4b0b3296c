/*
 * `bench make`: what it writes opens, has the promised geometry, is the same for any number of threads, and its adapters resolve
 * against its checkpoints in every dialect with the delta that was asked for.
 */
#include "st_testing.h"

#include <math.h>

#include "adapter/adapter.h"
#include "base/json.h"
#include "bench/make.h"

/* Makes <dir>/name; the path is the caller's. */
static char *make(void **state, const char *name, struct bench_make_opts opts)
{
    char *path = path_join(*state, name);
    pf_error err = {0};

    opts.size = sizeof(opts);
    opts.out = path;
    if (bench_make(&opts, &err) != PF_OK)
        fail_msg("%s", err.msg);
    return path;
}

static void same_bytes(const char *a, const char *b, const char *below)
{
    char *path_a = below == NULL ? mem_strdup(a) : path_join(a, below);
    char *path_b = below == NULL ? mem_strdup(b) : path_join(b, below);
    char *p = NULL, *q = NULL;
    size_t n = 0, n_q = 0;

    assert_int_equal(file_read_all(path_a, 1u << 30, &p, &n, NULL), PF_OK);
    assert_int_equal(file_read_all(path_b, 1u << 30, &q, &n_q, NULL), PF_OK);
    assert_int_equal(n, n_q);
    assert_memory_equal(p, q, n);
    mem_free(p);
    mem_free(q);
    mem_free(path_a);
    mem_free(path_b);
}

static struct pf_checkpoint *open_checkpoint(const char *path)
{
    struct pf_checkpoint *ckpt = NULL;
    pf_error err = {0};

    if (pf_checkpoint_open(path, NULL, &ckpt, &err) != PF_OK)
        fail_msg("%s", err.msg);
    return ckpt;
}

static struct pf_tensor_info tensor_of(const struct pf_checkpoint *ckpt, const char *name)
{
    struct pf_tensor_info info;
    int64_t i = pf_checkpoint_find(ckpt, "transformer", name);

    if (i < 0)
        fail_msg("no tensor '%s'", name);
    pf_checkpoint_tensor(ckpt, (uint32_t)i, &info);
    return info;
}

static void check_shape(const struct pf_checkpoint *ckpt, const char *name, int64_t d0, int64_t d1)
{
    struct pf_tensor_info info = tensor_of(ckpt, name);

    assert_int_equal(info.dtype, PF_BF16);
    assert_int_equal(info.rank, 2);
    assert_int_equal(info.shape[0], d0);
    assert_int_equal(info.shape[1], d1);
}

/* ------------------------------------------------------------------------------------------------ checkpoints */

static void h3_has_the_promised_geometry(void **state)
{
    struct bench_make_report report = {0};
    /* 5 blocks and 1 refiner block, every width divided by 64 */
    char *path =
        make(state, "h3.safetensors",
             (struct bench_make_opts){
                 .shape = "h3", .scale = 1.0 / 12, .width_divisor = 64, .report = &report});
    struct pf_checkpoint *ckpt = open_checkpoint(path);
    struct pf_checkpoint_info info;
    uint32_t i, n_blocks = 0;

    pf_checkpoint_info(ckpt, &info);
    assert_string_equal(report.what, "checkpoint");
    assert_int_equal(report.n_targets, 24);
    assert_int_equal(report.n_tensors, info.n_tensors);
    check_shape(ckpt, "transformer_blocks.0.attn.to_qkv.weight", 336, 84);
    check_shape(ckpt, "transformer_blocks.4.attn.to_out.0.weight", 84, 112);
    check_shape(ckpt, "transformer_blocks.4.ff.net.0.proj.weight", 448, 84);
    check_shape(ckpt, "refiner_blocks.0.ff.net.2.weight", 84, 224);
    assert_true(pf_checkpoint_find(ckpt, "transformer", "transformer_blocks.5.ff.net.2.weight") <
                0);
    assert_true(pf_checkpoint_find(ckpt, "transformer", "refiner_blocks.1.ff.net.2.weight") < 0);
    for (i = 0; i < info.n_layers; i++) {
        struct pf_layer_info layer;
        pf_checkpoint_layer(ckpt, i, &layer);
        n_blocks += strncmp(layer.name, "transformer_blocks.", 19) == 0;
    }
    assert_int_equal(n_blocks, 5);
    /* At width 1/64 a matrix has 1/4096 of the bytes: 6.4 GB become 1.57 MB. */
    assert_true(report.n_bytes > 1550000 && report.n_bytes < 1590000);
    pf_checkpoint_close(ckpt);
    mem_free(path);
}

static void dit_has_the_promised_geometry(void **state)
{
    struct bench_make_report report = {0};
    char *path = make(state, "dit",
                      (struct bench_make_opts){.shape = "dit", .scale = 0.001, .report = &report});
    struct pf_checkpoint *ckpt = open_checkpoint(path);
    struct pf_component_info info;
    struct json *config = NULL;
    struct pf_model *model = NULL;
    pf_error err = {0};

    if (pf_model_open(ckpt, NULL, &model, &err) != PF_OK)
        fail_msg("%s", err.msg);
    pf_model_close(model);
    pf_checkpoint_component(ckpt, 0, &info);
    assert_string_equal(info.name, "transformer");
    assert_string_equal(info.class_name, "DiTTransformer2DModel");
    assert_int_equal(json_parse_file(info.config_path, 1 << 20, &config, &err), PF_OK);
    assert_int_equal(json_int(json_get(config, "num_attention_heads")) *
                         json_int(json_get(config, "attention_head_dim")),
                     192);
    check_shape(ckpt, "transformer_blocks.0.norm1.linear.weight", 6 * 192, 192);
    check_shape(ckpt, "transformer_blocks.0.norm1.emb.class_embedder.embedding_table.weight", 65,
                192);
    assert_true(report.n_bytes > 7500000 && report.n_bytes < 8500000); /* 8 GB x 0.001 */
    json_free(config);
    pf_checkpoint_close(ckpt);
    mem_free(path);
}

/* Tensor by tensor what the bundled model has: names, dtypes, shapes. */
static void emoji_has_the_geometry_of_the_bundled_model(void **state)
{
    char *path = make(state, "emoji", (struct bench_make_opts){.shape = "emoji"});
    char *bundled = path_join(PF_SOURCE_DIR, "data/emoji-dit");
    struct pf_checkpoint *a = open_checkpoint(path), *b = open_checkpoint(bundled);
    struct pf_checkpoint_info info_a, info_b;
    uint32_t i;

    pf_checkpoint_info(a, &info_a);
    pf_checkpoint_info(b, &info_b);
    assert_int_equal(info_a.n_tensors, info_b.n_tensors);
    assert_int_equal(info_a.n_bytes, info_b.n_bytes);
    assert_int_equal(info_a.n_layers, info_b.n_layers);
    for (i = 0; i < info_b.n_tensors; i++) {
        struct pf_tensor_info want, got;
        pf_checkpoint_tensor(b, i, &want);
        got = tensor_of(a, want.name);
        assert_int_equal(got.dtype, want.dtype);
        assert_int_equal(got.rank, want.rank);
        assert_memory_equal(got.shape, want.shape, sizeof(*got.shape) * (size_t)got.rank);
    }
    pf_checkpoint_close(a);
    pf_checkpoint_close(b);
    mem_free(bundled);
    mem_free(path);
}

static void weights_are_normal_noise_of_rms_002(void **state)
{
    char *path =
        make(state, "noise", (struct bench_make_opts){.shape = "emoji", .scale = 0.25, .seed = 3});
    struct pf_checkpoint *ckpt = open_checkpoint(path);
    struct pf_tensor_info info = tensor_of(ckpt, "transformer_blocks.1.ff.net.2.weight");
    struct st_file *f = NULL;
    pf_error err = {0};
    const uint8_t *p;
    double sum = 0, sum2 = 0, sum4 = 0, lag = 0, before = 0;
    size_t n, i;

    assert_int_equal(st_open(info.file, &f, &err), PF_OK);
    p = st_map(f)->p + info.off_bytes;
    n = info.n_bytes / 2;
    for (i = 0; i < n; i++) {
        uint16_t bits;
        double v;
        memcpy(&bits, p + 2 * i, 2);
        v = (double)f32_from_bf16(bits);
        sum += v;
        sum2 += v * v;
        sum4 += v * v * v * v;
        lag += v * before;
        before = v;
    }
    assert_true(fabs(sqrt(sum2 / (double)n) / 0.02 - 1) < 0.01);
    assert_true(fabs(sum / (double)n) < 0.02 * 0.02);
    /* Kurtosis */
    assert_true(fabs(sum4 / (double)n / (sum2 / (double)n) / (sum2 / (double)n) - 3) < 0.1);
    assert_true(fabs(lag / sum2) < 0.02);
    st_close(f);
    pf_checkpoint_close(ckpt);
    mem_free(path);
}

static void bytes_depend_on_the_seed_and_not_on_threads(void **state)
{
    static const char file[] = "transformer/diffusion_pytorch_model.safetensors";
    struct bench_make_opts opts = {.shape = "emoji", .scale = 0.5, .seed = 42, .n_threads = 1};
    char *one = make(state, "one", opts), *seven, *other;
    struct st_file *a = NULL, *b = NULL;

    opts.n_threads = 7;
    seven = make(state, "seven", opts);
    same_bytes(one, seven, file);
    same_bytes(one, seven, "model_index.json");
    same_bytes(one, seven, "transformer/config.json");
    opts.seed = 43;
    other = make(state, "other", opts);
    {
        char *pa = path_join(one, file), *pb = path_join(other, file);
        const struct st_tensor *t;
        assert_int_equal(st_open(pa, &a, NULL), PF_OK);
        assert_int_equal(st_open(pb, &b, NULL), PF_OK);
        t = st_tensor(a, 0);
        assert_int_equal(st_map(a)->n_bytes, st_map(b)->n_bytes);
        assert_memory_not_equal(st_data(a, t), st_data(b, st_find(b, t->name)), t->n_bytes);
        assert_int_equal(st_header_bytes(a) % 4096, 0);
        mem_free(pa);
        mem_free(pb);
    }
    st_close(a);
    st_close(b);
    mem_free(one);
    mem_free(seven);
    mem_free(other);
}

/* A block has the same bytes in a bigger model: noise goes by name. */
static void a_tensor_is_the_same_at_every_scale(void **state)
{
    struct bench_make_opts opts = {.shape = "h3", .scale = 0.02, .width_divisor = 128};
    char *small = make(state, "small.safetensors", opts), *big;
    const char *name = "refiner_blocks.0.attn.to_qkv.weight";
    struct st_file *a = NULL, *b = NULL;
    const struct st_tensor *t;

    opts.scale = 0.1;
    big = make(state, "big.safetensors", opts);
    assert_int_equal(st_open(small, &a, NULL), PF_OK);
    assert_int_equal(st_open(big, &b, NULL), PF_OK);
    t = st_find(a, str_of(name));
    assert_non_null(t);
    assert_memory_equal(st_data(a, t), st_data(b, st_find(b, str_of(name))), t->n_bytes);
    assert_true(t->off_bytes != st_find(b, str_of(name))->off_bytes);
    st_close(a);
    st_close(b);
    mem_free(small);
    mem_free(big);
}

/* --------------------------------------------------------------------------------------------------- adapters */

/* The rms of scale x B A over the rms of W, for the first target of an adapter. */
static double relative_delta(const char *path, const char *down, const char *up, double scale)
{
    struct st_file *f = NULL;
    const struct st_tensor *a, *b;
    int64_t r, n_in, n_out, m, n, k;
    double sum = 0;
    float *fa, *fb;

    assert_int_equal(st_open(path, &f, NULL), PF_OK);
    a = st_find(f, str_of(down));
    b = st_find(f, str_of(up));
    assert_non_null(a);
    assert_non_null(b);
    r = a->shape.dim[0];
    n_in = a->shape.dim[1];
    n_out = b->shape.dim[0];
    assert_int_equal(b->shape.dim[1], r);
    fa = mem_realloc_array(NULL, (size_t)(r * n_in), sizeof(*fa));
    fb = mem_realloc_array(NULL, (size_t)(n_out * r), sizeof(*fb));
    assert_true(fa != NULL && fb != NULL);
    dtype_to_f32(a->dtype, st_data(f, a), (size_t)(r * n_in), fa);
    dtype_to_f32(b->dtype, st_data(f, b), (size_t)(n_out * r), fb);
    for (m = 0; m < n_out; m++)
        for (n = 0; n < n_in; n++) {
            double v = 0;
            for (k = 0; k < r; k++)
                v += (double)fb[m * r + k] * (double)fa[k * n_in + n];
            sum += v * v;
        }
    mem_free(fa);
    mem_free(fb);
    st_close(f);
    return scale * sqrt(sum / (double)(n_out * n_in)) / BENCH_WEIGHT_RMS;
}

struct spelling {
    const char *dialect, *dtype, *file, *prefix, *down, *up;
};

static const struct spelling spellings[] = {
    {"peft", "F32", "adapter_model.safetensors", "base_model.model.", "lora_A.weight",
     "lora_B.weight"},
    {"diffusers", "BF16", NULL, "transformer.", "lora_A.weight", "lora_B.weight"},
    {"kohya", "F16", NULL, "lora_unet_", "lora_down.weight", "lora_up.weight"},
    {"native", "BF16", NULL, "diffusion_model.", "lora_A.weight", "lora_B.weight"},
};

/* Every target of the checkpoint gets one delta with the scale alpha / rank, and no key is left over. */
static void check_adapter(void **state, const char *base, const struct spelling *s,
                          struct bench_make_opts opts, const char *module, uint32_t n_targets)
{
    char name[64], down[128], up[128], *path, *file;
    struct pf_checkpoint *ckpt = open_checkpoint(base);
    struct pf_adapter *adapter = NULL;
    struct pf_adapter_info info;
    struct bench_make_report report = {0};
    struct resolution r = {0};
    pf_error err = {0};
    double delta;

    (void)snprintf(name, sizeof(name), "%s-%s", opts.shape, s->dialect);
    (void)snprintf(down, sizeof(down), "%s%s.%s", s->prefix, module, s->down);
    (void)snprintf(up, sizeof(up), "%s%s.%s", s->prefix, module, s->up);
    opts.dialect = s->dialect;
    opts.dtype = s->dtype;
    opts.report = &report;
    path = make(state, name, opts);
    if (pf_adapter_open(path, &adapter, &err) != PF_OK)
        fail_msg("%s", err.msg);
    pf_adapter_info(adapter, &info);
    assert_string_equal(info.family, "lora");
    assert_int_equal(info.rank_min, opts.rank);
    assert_int_equal(info.rank_max, opts.rank);
    assert_true(info.scale_min == opts.alpha / opts.rank &&
                info.scale_max == opts.alpha / opts.rank);
    assert_int_equal(info.n_modules, n_targets);
    assert_int_equal(report.n_targets, n_targets);
    assert_string_equal(report.what, "adapter");
    if (adapter_resolve(adapter, ckpt, &(struct resolve_opts){0}, &r, &err) != PF_OK)
        fail_msg("%s", err.msg);
    assert_int_equal(r.n_deltas, n_targets);
    assert_int_equal(r.n_unmatched, 0);
    resolution_release(&r);
    file = s->file == NULL ? mem_strdup(path) : path_join(path, s->file);
    delta = relative_delta(file, down, up, opts.alpha / opts.rank);
    if (fabs(delta / opts.delta_rms - 1) > 0.1)
        fail_msg("%s: delta %g, not %g", name, delta, opts.delta_rms);
    pf_adapter_close(adapter);
    pf_checkpoint_close(ckpt);
    mem_free(file);
    mem_free(path);
}

static void adapters_resolve_in_every_dialect(void **state)
{
    struct bench_make_opts h3 = {.shape = "h3", .scale = 0.02, .width_divisor = 64};
    struct bench_make_opts emoji = {.shape = "emoji", .scale = 0.25};
    char *h3_path = make(state, "base-h3.safetensors", h3),
         *emoji_path = make(state, "base-emoji", emoji);
    size_t i;

    h3.rank = 12;
    h3.alpha = 3;
    h3.delta_rms = 3e-4;
    emoji.rank = 8;
    emoji.alpha = 12;
    emoji.delta_rms = 1e-2;
    for (i = 0; i < PF_COUNTOF(spellings); i++) {
        bool is_flat = strcmp(spellings[i].dialect, "kohya") == 0;
        check_adapter(
            state, h3_path, &spellings[i], h3,
            is_flat ? "transformer_blocks_0_attn_to_qkv" : "transformer_blocks.0.attn.to_qkv", 8);
        check_adapter(
            state, emoji_path, &spellings[i], emoji,
            is_flat ? "transformer_blocks_1_attn1_to_q" : "transformer_blocks.1.attn1.to_q", 14);
    }
    mem_free(h3_path);
    mem_free(emoji_path);
}

/* ----------------------------------------------------------------------------------------------------- refusals */

static bool cancel_at_once(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    (void)what;
    *(uint64_t *)ctx = total;
    return done > total;
}

static void expect_refusal(struct bench_make_opts opts, int code, const char *text)
{
    pf_error err = {0};

    opts.size = opts.size == 0 ? sizeof(opts) : opts.size;
    st_assert_error(bench_make(&opts, &err), code, &err, text);
}

static void refuses_what_makes_no_sense(void **state)
{
    char *out = path_join(*state, "refused"), *partial = path_join(*state, "refused.partial");
    uint64_t total = 0;

    expect_refusal((struct bench_make_opts){.size = 8, .shape = "h3", .out = out}, PF_E_INVALID,
                   "options of 8 bytes");
    expect_refusal((struct bench_make_opts){.out = out}, PF_E_INVALID, "no shape is given");
    expect_refusal((struct bench_make_opts){.shape = "h3"}, PF_E_INVALID, "no output is given");
    expect_refusal((struct bench_make_opts){.shape = "h4", .out = out}, PF_E_INVALID,
                   "shape 'h4' is not known");
    expect_refusal((struct bench_make_opts){.shape = "h3", .scale = -1, .out = out}, PF_E_INVALID,
                   "scale -1 is not in");
    expect_refusal((struct bench_make_opts){.shape = "h3", .scale = (double)NAN, .out = out},
                   PF_E_INVALID, "scale nan");
    expect_refusal((struct bench_make_opts){.shape = "h3", .width_divisor = 3, .out = out},
                   PF_E_INVALID, "width divisor 3");
    expect_refusal((struct bench_make_opts){.shape = "emoji", .rank = 5000, .out = out},
                   PF_E_INVALID, "rank 5000");
    expect_refusal(
        (struct bench_make_opts){.shape = "emoji", .rank = 4, .dialect = "dora", .out = out},
        PF_E_INVALID, "dialect 'dora' is not known");
    expect_refusal((struct bench_make_opts){.shape = "emoji", .rank = 4, .dtype = "I8", .out = out},
                   PF_E_INVALID, "factor dtype 'I8'");
    expect_refusal(
        (struct bench_make_opts){
            .shape = "emoji", .rank = 4, .alpha = (double)INFINITY, .out = out},
        PF_E_INVALID, "alpha inf");
    expect_refusal(
        (struct bench_make_opts){.shape = "emoji", .rank = 4, .delta_rms = -1, .out = out},
        PF_E_INVALID, "relative delta -1");
    expect_refusal((struct bench_make_opts){.shape = "emoji", .out = *state}, PF_E_EXISTS,
                   "exists: remove it first");
    expect_refusal(
        (struct bench_make_opts){
            .shape = "emoji", .out = out, .progress = cancel_at_once, .progress_ctx = &total},
        PF_E_CANCELLED, "cancelled");
    assert_true(total > 5000000);
    assert_int_equal(file_kind(out), FILE_ABSENT);
    assert_int_equal(file_kind(partial), FILE_ABSENT);
    mem_free(out);
    mem_free(partial);
}

/* A write that fails leaves nothing, and says which file. */
static void a_full_disk_leaves_nothing_behind(void **state)
{
    char *out = path_join(*state, "full.safetensors");
    char **names = NULL;
    size_t n = 0, n_before = 0;

    assert_int_equal(file_list(*state, &names, &n_before, NULL), PF_OK);
    file_list_free(names, n_before);
    assert_true(file_fault_set("enospc@2"));
    expect_refusal(
        (struct bench_make_opts){
            .shape = "h3", .scale = 0.02, .width_divisor = 64, .out = out, .n_threads = 1},
        PF_E_NOSPACE, "full.safetensors");
    assert_true(file_fault_set(NULL));
    assert_int_equal(file_list(*state, &names, &n, NULL), PF_OK);
    file_list_free(names, n);
    assert_int_equal(n, n_before);
    mem_free(out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(h3_has_the_promised_geometry),
        in_dir(dit_has_the_promised_geometry),
        in_dir(emoji_has_the_geometry_of_the_bundled_model),
        in_dir(weights_are_normal_noise_of_rms_002),
        in_dir(bytes_depend_on_the_seed_and_not_on_threads),
        in_dir(a_tensor_is_the_same_at_every_scale),
        in_dir(adapters_resolve_in_every_dialect),
        in_dir(refuses_what_makes_no_sense),
        in_dir(a_full_disk_leaves_nothing_behind),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
