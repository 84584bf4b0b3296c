/*
 * The checkpoint as an object: the bundled model, getters, lookups, `.base_layer` names, references, sizes. Locating,
 * indices, layers and identity have test programs of their own.
 */
#include "checkpoint_fixture.h"

#include <time.h>

#define EMOJI PF_SOURCE_DIR "/data/emoji-dit"

static void opens_the_bundled_model(void **state)
{
    (void)state;
    struct pf_checkpoint *ckpt = fx_open(EMOJI);
    struct pf_checkpoint_info info;
    struct pf_component_info c;
    struct pf_layer_info layer;
    pf_checkpoint_info(ckpt, &info);
    assert_string_equal(info.path, EMOJI);
    assert_string_equal(info.layout, "directory");
    assert_int_equal(info.n_components, 1);
    assert_int_equal(info.n_layers, 9);
    assert_int_equal(info.n_tensors, 158);
    assert_int_equal(info.n_files, 1);
    assert_int_equal(info.n_bytes, 5781720 - 8 - 17776);
    pf_checkpoint_component(ckpt, 0, &c);
    assert_string_equal(c.name, "transformer");
    assert_string_equal(c.path, EMOJI "/transformer");
    assert_string_equal(c.config_path, EMOJI "/transformer/config.json");
    assert_string_equal(c.class_name, "DiTTransformer2DModel");
    assert_int_equal(c.n_layers, 9);
    assert_int_equal(c.n_tensors, 158);
    assert_int_equal(c.n_files, 1);
    assert_int_equal(c.n_bytes, info.n_bytes);
    uint64_t n_bytes = 0;
    for (uint32_t i = 0; i < 9; i++) {
        char name[64];
        (void)snprintf(name, sizeof name, "transformer_blocks.%u", i - 1);
        pf_checkpoint_layer(ckpt, i, &layer);
        assert_string_equal(layer.name, i == 0 ? "stem" : name);
        assert_int_equal(layer.is_stem, i == 0);
        assert_int_equal(layer.n_tensors, i == 0 ? 6 : 19);
        assert_int_equal(layer.n_bytes, i == 0 ? 90976 : 800096 - 90976);
        n_bytes += layer.n_bytes;
    }
    assert_int_equal(n_bytes, info.n_bytes);
    pf_checkpoint_close(ckpt);
}

static void describes_a_tensor(void **state)
{
    (void)state;
    struct pf_checkpoint *ckpt = fx_open(EMOJI "/");
    int64_t i = pf_checkpoint_find(ckpt, "transformer", "pos_embed.proj.weight");
    assert_true(i >= 0);
    struct pf_tensor_info t;
    pf_checkpoint_tensor(ckpt, (uint32_t)i, &t);
    assert_string_equal(t.name, "pos_embed.proj.weight");
    assert_string_equal(t.component, "transformer");
    assert_string_equal(t.file, EMOJI "/transformer/diffusion_pytorch_model.safetensors");
    assert_int_equal(t.dtype, PF_BF16);
    assert_int_equal(t.rank, 4);
    assert_int_equal(t.shape[0], 128);
    assert_int_equal(t.shape[1], 3);
    assert_int_equal(t.shape[3], 4);
    assert_int_equal(t.off_bytes, 8 + 17776 + 256);
    assert_int_equal(t.n_bytes, 12544 - 256);
    assert_int_equal(t.i_layer, 0);
    assert_ptr_equal(ckpt->tensors[i].p, st_map(ckpt->files[0])->p + t.off_bytes);
    pf_checkpoint_close(ckpt);
}

static void finds_every_name_and_no_other(void **state)
{
    (void)state;
    struct pf_checkpoint *ckpt = fx_open(EMOJI);
    for (uint32_t i = 0; i < ckpt->n_tensors; i++)
        assert_int_equal(ckpt_find(ckpt, 0, ckpt->tensors[i].name), i);
    assert_int_equal(pf_checkpoint_find(ckpt, "transformer", "pos_embed.proj.weigh"), -1);
    assert_int_equal(pf_checkpoint_find(ckpt, "transformer", ""), -1);
    assert_int_equal(pf_checkpoint_find(ckpt, "vae", "pos_embed.proj.weight"), -1);
    assert_int_equal(pf_checkpoint_find(ckpt, NULL, "pos_embed.proj.weight"), -1);
    assert_int_equal(ckpt_find(ckpt, 1, str_of("pos_embed.proj.weight")), -1);
    assert_int_equal(ckpt_component_find(ckpt, str_of("transformer")), 0);
    assert_int_equal(ckpt_component_find(ckpt, str_of("transforme")), -1);
    pf_checkpoint_close(ckpt);
}

static void gives_zeroes_out_of_range(void **state)
{
    (void)state;
    struct pf_checkpoint *ckpt = fx_open(EMOJI);
    struct pf_tensor_info t = {.name = "x"};
    struct pf_layer_info l = {.name = "x"};
    struct pf_component_info c = {.name = "x"};
    pf_checkpoint_tensor(ckpt, ckpt->n_tensors, &t);
    pf_checkpoint_layer(ckpt, ckpt->n_layers, &l);
    pf_checkpoint_component(ckpt, ckpt->n_components, &c);
    assert_null(t.name);
    assert_null(l.name);
    assert_null(c.name);
    pf_checkpoint_close(ckpt);
}

static void sorts_tensors_by_layer_file_and_offset(void **state)
{
    struct pf_checkpoint *ckpt =
        fx_open(fx_weights(*state, "m.safetensors",
                           "b.10.z.w b.10.a.w b.2.y.w z b.2.x.w b.10.x.w b.0.x.w a b.1.x.w", 1));
    static const char *const expected[] = {"z",       "a",        "b.0.x.w",  "b.1.x.w", "b.2.y.w",
                                           "b.2.x.w", "b.10.z.w", "b.10.a.w", "b.10.x.w"};
    assert_int_equal(ckpt->n_tensors, PF_COUNTOF(expected));
    for (uint32_t i = 0; i < ckpt->n_tensors; i++)
        assert_string_equal(ckpt->tensors[i].name.p, expected[i]);
    for (uint32_t i = 0; i < ckpt->n_layers; i++)
        for (uint32_t k = 0; k < ckpt->layers[i].n_tensors; k++)
            assert_int_equal(ckpt->tensors[ckpt->layers[i].i_tensor0 + k].i_layer, i);
    pf_checkpoint_close(ckpt);
}

static void addresses_base_layer_by_its_module(void **state)
{
    struct pf_checkpoint *ckpt = fx_open(fx_weights(
        *state, "m.safetensors",
        "x.base_layer.weight x.base_layer.bias y.weight base_layer.weight q_base_layer.w", 1));
    int64_t i = pf_checkpoint_find(ckpt, "transformer", "x.weight");
    assert_true(i >= 0);
    assert_int_equal(ckpt->tensors[i].name.n, strlen("x.weight"));
    assert_string_equal(ckpt->tensors[i].name_in_file.p, "x.base_layer.weight");
    assert_true(pf_checkpoint_find(ckpt, "transformer", "x.bias") >= 0);
    assert_int_equal(pf_checkpoint_find(ckpt, "transformer", "x.base_layer.weight"), -1);
    /* Neither is below a module of another name. */
    assert_true(pf_checkpoint_find(ckpt, "transformer", "base_layer.weight") >= 0);
    assert_true(pf_checkpoint_find(ckpt, "transformer", "q_base_layer.w") >= 0);
    pf_checkpoint_close(ckpt);
}

static void refuses_a_base_layer_beside_its_plain_name(void **state)
{
    FX_ASSERT_REFUSED(fx_weights(*state, "m.safetensors", "x.weight x.base_layer.weight", 1),
                      PF_E_AMBIGUOUS, "m.safetensors'", "'x.weight'", "'x.base_layer.weight'",
                      "both answer to 'x.weight'");
}

static void refuses_a_name_with_a_nul(void **state)
{
    FX_ASSERT_REFUSED(fx_weights(*state, "m.safetensors", "a\\u0000b", 1), PF_E_UNSUPPORTED,
                      "m.safetensors'", "NUL");
}

static void opens_a_file_without_tensors(void **state)
{
    struct pf_checkpoint *ckpt = fx_open(fx_weights(*state, "m.safetensors", "", 1));
    char id[33];
    assert_int_equal(ckpt->n_tensors, 0);
    assert_int_equal(ckpt->n_layers, 0);
    assert_int_equal(pf_checkpoint_content_id(ckpt, id, NULL), PF_OK);
    pf_checkpoint_close(ckpt);
}

static void lives_until_the_last_reference(void **state)
{
    struct pf_checkpoint *ckpt = fx_open(fx_weights(*state, "m.safetensors", "a", 1));
    ckpt_ref(ckpt);
    pf_checkpoint_close(ckpt);
    assert_int_equal(ckpt->n_tensors, 1);
    assert_int_equal(ckpt->tensors[0].p[0], 1);
    pf_checkpoint_close(ckpt);
    pf_checkpoint_close(NULL);
}

static void refuses_bad_arguments(void **state)
{
    struct fx *fx = *state;
    const char *path = fx_weights(fx, "m.safetensors", "a", 1);
    struct pf_checkpoint *ckpt = NULL;
    pf_error err = {0};
    struct pf_checkpoint_opts opts = {.size = sizeof opts, .flags = 4};
    FX_ASSERT_REFUSED(NULL, PF_E_INVALID, "no path");
    FX_ASSERT_REFUSED("", PF_E_INVALID, "no path");
    fx_assert_error(pf_checkpoint_open(path, &opts, &ckpt, &err), &err, PF_E_INVALID, "flags 0x4",
                    NULL);
    /* What the struct of an older caller has not is the default. */
    opts.size = offsetof(struct pf_checkpoint_opts, flags);
    assert_int_equal(pf_checkpoint_open(path, &opts, &ckpt, &err), PF_OK);
    pf_checkpoint_close(ckpt);
    opts = (struct pf_checkpoint_opts){.size = sizeof opts};
    assert_int_equal(pf_checkpoint_open(path, &opts, &ckpt, &err), PF_OK);
    pf_checkpoint_close(ckpt);
}

static void passes_on_what_the_file_reader_says(void **state)
{
    FX_ASSERT_REFUSED(fx_text(*state, "m.safetensors", "short"), PF_E_FORMAT, "m.safetensors'");
}

/* The bound is generous: it is about 0.2 s, and a quadratic slip takes minutes. */
static void opens_100000_tensors_quickly(void **state)
{
    struct strbuf names;
    strbuf_init(&names);
    for (unsigned i = 0; i < 100000; i++)
        strbuf_addf(&names, "%smodel.blocks.%u.experts.%u.proj.weight", i > 0 ? " " : "", i % 100,
                    i / 100);
    assert_true(strbuf_ok(&names));
    const char *path = fx_weights(*state, "m.safetensors", names.p, 1);
    const clock_t t0 = clock(); /* of the CPU: a busy machine makes it no longer */
    struct pf_checkpoint *ckpt = fx_open(path);
    double seconds = (double)(clock() - t0) / CLOCKS_PER_SEC;
    print_message("100,000 tensors: %.3f s\n", seconds);
    assert_true(seconds < 60);
    assert_int_equal(ckpt->n_tensors, 100000);
    assert_int_equal(ckpt->n_layers, 100);
    assert_string_equal(ckpt->layers[99].name, "model.blocks.99");
    assert_int_equal(ckpt->layers[99].n_tensors, 1000);
    pf_checkpoint_close(ckpt);
    strbuf_release(&names);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(opens_the_bundled_model),
        cmocka_unit_test(describes_a_tensor),
        cmocka_unit_test(finds_every_name_and_no_other),
        cmocka_unit_test(gives_zeroes_out_of_range),
        FX_TEST(sorts_tensors_by_layer_file_and_offset),
        FX_TEST(addresses_base_layer_by_its_module),
        FX_TEST(refuses_a_base_layer_beside_its_plain_name),
        FX_TEST(refuses_a_name_with_a_nul),
        FX_TEST(opens_a_file_without_tensors),
        FX_TEST(lives_until_the_last_reference),
        FX_TEST(refuses_bad_arguments),
        FX_TEST(passes_on_what_the_file_reader_says),
        FX_TEST(opens_100000_tensors_quickly),
    };
    return cmocka_run_group_tests_name("checkpoint", tests, NULL, NULL);
}
