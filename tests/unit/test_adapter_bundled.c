/*
 * The three bundled adapters on the bundled model: three dialects and two families that must resolve to the last key.
 */
#include "testing.h"

#include "adapter/adapter.h"
#include "base/mem.h"
#include "tensor/dtype.h"

#include <math.h>

#define MODEL PF_SOURCE_DIR "/data/emoji-dit"

static struct pf_adapter *open_adapter(const char *path)
{
    pf_error err = {0};
    struct pf_adapter *a = NULL;
    assert_ok(pf_adapter_open(path, &a, &err), &err);
    return a;
}

static struct pf_checkpoint *open_model(void)
{
    pf_error err = {0};
    struct pf_checkpoint *ckpt = NULL;
    assert_ok(pf_checkpoint_open(MODEL, NULL, &ckpt, &err), &err);
    return ckpt;
}

static struct resolution resolve(const struct pf_adapter *a, const struct pf_checkpoint *ckpt)
{
    pf_error err = {0};
    struct resolve_opts opts = {0};
    struct resolution r;
    assert_ok(adapter_resolve(a, ckpt, &opts, &r, &err), &err);
    assert_int_equal(r.n_unmatched, 0);
    assert_true(isnan(r.alpha_effective));
    for (size_t i = 0; i < r.n_deltas; i++) {
        const struct delta *d = &r.deltas[i];
        assert_int_equal(d->row0, 0);
        assert_int_equal(d->n_rows, shape_rows(&ckpt->tensors[d->i_tensor].shape));
        assert_int_equal(d->n_cols, shape_cols(&ckpt->tensors[d->i_tensor].shape));
        if (i > 0)
            assert_true(r.deltas[i - 1].i_tensor < d->i_tensor);
    }
    return r;
}

static float at(const struct factor *f, int64_t i, int64_t j)
{
    float v;
    dtype_to_f32(f->dtype,
                 f->p + (size_t)(i * f->row_stride + j * f->col_stride) * dtype_size(f->dtype), 1,
                 &v);
    return v;
}

static void check_max_abs(const struct delta *d)
{
    for (int k = 0; k < 4; k++) {
        float max = 0;
        for (int64_t i = 0; d->f[k].p != NULL && i < d->f[k].n_rows; i++)
            for (int64_t j = 0; j < d->f[k].n_cols; j++)
                max = fmaxf(max, fabsf(at(&d->f[k], i, j)));
        assert_true(d->max_abs[k] == (double)max);
    }
}

static void noto_diffusers_file_resolves_with_its_metadata(void **state)
{
    (void)state;
    struct pf_adapter *a = open_adapter(PF_SOURCE_DIR "/data/adapters/noto.safetensors");
    struct pf_checkpoint *ckpt = open_model();
    struct pf_adapter_info info;
    pf_adapter_info(a, &info);
    assert_string_equal(info.family, "lora");
    assert_string_equal(info.dialect, "diffusers");
    assert_string_equal(info.dtypes, "F32");
    assert_int_equal(info.n_modules, 56);
    assert_int_equal(info.n_keys, 112);
    assert_int_equal(info.rank_min, 16);
    assert_int_equal(info.rank_max, 16);
    assert_true(info.scale_min == 1 && info.scale_max == 1);
    assert_null(pf_adapter_note(a, 0)); /* the metadata gives the alpha: nothing is assumed */
    struct resolution r = resolve(a, ckpt);
    assert_int_equal(r.n_deltas, 56);
    assert_int_equal(r.n_keys_matched, 112);
    assert_int_equal(r.n_notes, 0);
    int64_t i_tensor =
        pf_checkpoint_find(ckpt, "transformer", "transformer_blocks.0.norm1.linear.weight");
    const struct delta *d = NULL;
    for (size_t i = 0; i < r.n_deltas; i++)
        if (r.deltas[i].i_tensor == (uint32_t)i_tensor)
            d = &r.deltas[i];
    assert_non_null(d);
    assert_int_equal(d->kind, DELTA_LORA);
    assert_int_equal(d->rank, 16);
    assert_int_equal(d->f[0].n_rows, 768);
    assert_int_equal(d->f[0].n_cols, 16);
    assert_int_equal(d->f[1].n_rows, 16);
    assert_int_equal(d->f[1].n_cols, 128);
    check_max_abs(d);
    resolution_release(&r);
    pf_checkpoint_close(ckpt);
    pf_adapter_close(a);
}

static void turbo_kohya_names_resolve_against_flattened_base_names(void **state)
{
    (void)state;
    struct pf_adapter *a = open_adapter(PF_SOURCE_DIR "/data/adapters/turbo.safetensors");
    struct pf_checkpoint *ckpt = open_model();
    struct pf_adapter_info info;
    pf_adapter_info(a, &info);
    assert_string_equal(info.family, "lora");
    assert_string_equal(info.dialect, "kohya");
    assert_string_equal(info.dtypes, "F16");
    assert_int_equal(info.n_modules, 48);
    assert_true(info.scale_min == 0.5 && info.scale_max == 0.5);
    struct pf_adapter_module m;
    pf_adapter_module(a, 2, &m);
    assert_string_equal(m.name, "lora_unet_transformer_blocks_0_attn1_to_q");
    assert_string_equal(m.kind, "lora");
    assert_true(m.has_alpha && m.alpha == 16 && m.rank == 32);
    const char *key, *value;
    bool has_dim = false;
    for (uint32_t i = 0; pf_adapter_metadata(a, i, &key, &value); i++)
        has_dim |= strcmp(key, "ss_network_dim") == 0 && strcmp(value, "32") == 0;
    assert_true(has_dim);
    struct resolution r = resolve(a, ckpt);
    assert_int_equal(r.n_deltas, 48);
    assert_int_equal(r.n_keys_matched, 144);
    for (size_t i = 0; i < r.n_deltas; i++)
        assert_true(r.deltas[i].scale == 0.5);
    check_max_abs(&r.deltas[0]);
    resolution_release(&r);
    pf_checkpoint_close(ckpt);
    pf_adapter_close(a);
}

static void night_peft_lokr_directory_resolves_with_its_config(void **state)
{
    (void)state;
    struct pf_adapter *a = open_adapter(PF_SOURCE_DIR "/data/adapters/night");
    struct pf_checkpoint *ckpt = open_model();
    struct pf_adapter_info info;
    pf_adapter_info(a, &info);
    assert_string_equal(info.family, "lokr");
    assert_string_equal(info.dialect, "peft");
    assert_int_equal(info.n_modules, 56);
    assert_true(info.scale_min == 0.5 && info.scale_max == 0.5);
    struct resolution r = resolve(a, ckpt);
    assert_int_equal(r.n_deltas, 56);
    assert_int_equal(r.n_keys_matched, 168);
    for (size_t i = 0; i < r.n_deltas; i++) {
        const struct delta *d = &r.deltas[i];
        assert_int_equal(d->kind, DELTA_LOKR);
        assert_int_equal(d->rank, 8);
        assert_true(d->scale == 0.5);
        assert_null(d->f[1].p);
        assert_int_equal(d->f[2].n_rows * d->f[0].n_rows, d->n_rows);
    }
    check_max_abs(&r.deltas[0]);
    resolution_release(&r);
    pf_checkpoint_close(ckpt);
    pf_adapter_close(a);
}

static void a_peft_file_named_by_itself_keeps_its_config(void **state)
{
    (void)state;
    struct pf_adapter *a = open_adapter(PF_SOURCE_DIR "/data/adapters/night");
    struct pf_adapter *b =
        open_adapter(PF_SOURCE_DIR "/data/adapters/night/adapter_model.safetensors");
    assert_true(digest_eq(adapter_digest(a), adapter_digest(b)));
    pf_adapter_close(a);
    pf_adapter_close(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(noto_diffusers_file_resolves_with_its_metadata),
        cmocka_unit_test(turbo_kohya_names_resolve_against_flattened_base_names),
        cmocka_unit_test(night_peft_lokr_directory_resolves_with_its_config),
        cmocka_unit_test(a_peft_file_named_by_itself_keeps_its_config),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
