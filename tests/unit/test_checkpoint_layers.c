/*
 * Layers from names: what is a stack and what only looks like one, the order of layers, and names that are hostile. Each test
 * gives a list of names and expects a list of layers, written "name:tensors".
 */
#include "checkpoint_fixture.h"

static void assert_layers(struct fx *fx, const char *names, const char *expected)
{
    struct pf_checkpoint *ckpt = fx_open(fx_weights(fx, "m.safetensors", names, 1));
    struct strbuf got;
    strbuf_init(&got);
    uint64_t n_bytes = 0;
    uint32_t i_tensor = 0;
    for (uint32_t i = 0; i < ckpt->n_layers; i++) {
        const struct ckpt_layer *l = &ckpt->layers[i];
        strbuf_addf(&got, "%s%s:%u", i > 0 ? " " : "", l->name, l->n_tensors);
        assert_int_equal(l->is_stem, strcmp(l->name, "stem") == 0);
        assert_int_equal(l->n_bytes, l->n_tensors * FX_TENSOR_BYTES);
        assert_int_equal(l->i_tensor0, i_tensor);
        i_tensor += l->n_tensors;
        n_bytes += l->n_bytes;
    }
    assert_string_equal(strbuf_z(&got), expected);
    assert_int_equal(i_tensor, ckpt->n_tensors);
    assert_int_equal(n_bytes, ckpt->n_bytes);
    strbuf_release(&got);
    pf_checkpoint_close(ckpt);
}

static void finds_blocks_and_stem(void **state)
{
    assert_layers(*state, "a.w t.0.q.w t.1.q.w b", "stem:2 t.0:1 t.1:1");
    assert_layers(*state, "t.0.q.w t.1.q.w", "t.0:1 t.1:1");
    assert_layers(*state, "a b.w", "stem:2");
    assert_layers(*state, "model.diffusion_model.blocks.0.q.w model.diffusion_model.blocks.1.q.w",
                  "model.diffusion_model.blocks.0:1 model.diffusion_model.blocks.1:1");
}

static void finds_several_stacks(void **state)
{
    assert_layers(*state,
                  "double_blocks.0.a.w double_blocks.1.a.w single_blocks.0.b.w single_blocks.1.b.w "
                  "txt_in.refiner.blocks.0.c.w txt_in.refiner.blocks.1.c.w img_in.weight",
                  "stem:1 double_blocks.0:1 double_blocks.1:1 single_blocks.0:1 single_blocks.1:1 "
                  "txt_in.refiner.blocks.0:1 txt_in.refiner.blocks.1:1");
}

static void orders_numbers_as_numbers(void **state)
{
    assert_layers(*state, "t.10.q.w t.9.q.w t.100.q.w t.2.q.w", "t.2:1 t.9:1 t.10:1 t.100:1");
}

static void does_not_descend_into_a_block(void **state)
{
    assert_layers(*state,
                  "t.0.ff.net.0.proj.w t.0.ff.net.2.w t.0.to_out.0.w "
                  "t.1.ff.net.0.proj.w t.1.ff.net.2.w t.1.to_out.0.w",
                  "t.0:3 t.1:3");
    /* Experts in a block are part of it, alike as they are. */
    assert_layers(*state, "t.0.e.0.a.w t.0.e.1.a.w t.1.e.0.a.w t.1.e.1.a.w", "t.0:2 t.1:2");
}

static void leaves_small_sequentials_in_the_stem(void **state)
{
    assert_layers(*state,
                  "time_embed.0.weight time_embed.0.bias time_embed.2.weight time_embed.2.bias",
                  "stem:4");
    assert_layers(*state, "final.adaLN_modulation.1.weight final.adaLN_modulation.1.bias",
                  "stem:2");
    assert_layers(*state, "net.0.proj.weight net.2.weight", "stem:2");
    assert_layers(*state, "to_out.0.weight to_out.0.bias", "stem:2");
}

static void takes_bare_weights_numbered_without_a_gap(void **state)
{
    assert_layers(*state, "t.0.w t.1.w t.2.w", "t.0:1 t.1:1 t.2:1");
    assert_layers(*state, "t.0.w t.3.w", "stem:2");
}

static void takes_a_single_block_with_modules(void **state)
{
    assert_layers(*state, "t.0.attn.q.w t.0.mlp.fc.w x", "stem:1 t.0:2");
    /* The first of it decides, not the Sequential inside. */
    assert_layers(*state, "t.0.attn.w t.0.ff.net.0.proj.w t.0.ff.net.1.proj.w", "t.0:3");
    /* One module below it is no block, and a lone child that is not the first is none either. */
    assert_layers(*state, "net.0.proj.w net.0.proj.b", "stem:2");
    assert_layers(*state, "t.1.attn.q.w t.1.mlp.fc.w", "stem:2");
}

static void takes_stacks_whose_blocks_differ(void **state)
{
    /* Alternating kinds: every second one is alike. */
    assert_layers(*state, "t.0.attn.w t.1.mlp.w t.2.attn.w t.3.mlp.w", "t.0:1 t.1:1 t.2:1 t.3:1");
    /* A UNet's levels differ in part. */
    assert_layers(*state,
                  "down.0.resnets.0.conv.w down.0.resnets.1.conv.w down.1.resnets.0.conv.w "
                  "down.1.attentions.0.proj.w",
                  "down.0:2 down.1:2");
}

static void names_beside_numbers_stay_out(void **state)
{
    assert_layers(*state, "t.0.q.w t.1.q.w t.norm.w t.x", "stem:2 t.0:1 t.1:1");
    assert_layers(*state, "t.0.q.w t.1.q.w t.0a.q.w t.-1.q.w t..q.w", "stem:3 t.0:1 t.1:1");
    /* No number of a block has ten digits. */
    assert_layers(*state, "t.1000000000.q.w t.1000000001.q.w", "stem:2");
}

static void wrapped_names_belong_to_their_block(void **state)
{
    assert_layers(*state, "t.0.q.base_layer.weight t.1.q.weight", "t.0:1 t.1:1");
}

static void components_keep_their_layers_apart(void **state)
{
    struct fx *fx = *state;
    (void)fx_weights(fx, "m/text_encoder/model.safetensors", "e.w layers.0.q.w layers.1.q.w", 1);
    (void)fx_weights(fx, "m/transformer/model.safetensors", "layers.0.q.w layers.1.q.w p.w", 1);
    struct pf_checkpoint *ckpt = fx_open(fx_path(fx, "m"));
    static const char *const names[] = {"stem", "layers.0", "layers.1",
                                        "stem", "layers.0", "layers.1"};
    assert_int_equal(ckpt->n_layers, 6);
    for (uint32_t i = 0; i < 6; i++) {
        assert_string_equal(ckpt->layers[i].name, names[i]);
        assert_int_equal(ckpt->layers[i].i_component, i / 3);
        assert_int_equal(ckpt->layers[i].n_tensors, 1);
        assert_int_equal(ckpt->tensors[ckpt->layers[i].i_tensor0].i_component, i / 3);
    }
    assert_int_equal(ckpt->components[1].i_layer0, 3);
    pf_checkpoint_close(ckpt);
}

/* Recursion and cost are bounded, whatever a name looks like. */
static void survives_a_name_of_dots(void **state)
{
    struct strbuf names;
    strbuf_init(&names);
    for (unsigned k = 0; k < 2; k++) {
        strbuf_adds(&names, k > 0 ? " " : "");
        for (unsigned i = 0; i < 100000; i++)
            strbuf_adds(&names, "0.");
        strbuf_addf(&names, "%u", k);
    }
    struct pf_checkpoint *ckpt = fx_open(fx_weights(*state, "m.safetensors", names.p, 1));
    assert_int_equal(ckpt->n_tensors, 2);
    pf_checkpoint_close(ckpt);
    strbuf_release(&names);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FX_TEST(finds_blocks_and_stem),
        FX_TEST(finds_several_stacks),
        FX_TEST(orders_numbers_as_numbers),
        FX_TEST(does_not_descend_into_a_block),
        FX_TEST(leaves_small_sequentials_in_the_stem),
        FX_TEST(takes_bare_weights_numbered_without_a_gap),
        FX_TEST(takes_a_single_block_with_modules),
        FX_TEST(takes_stacks_whose_blocks_differ),
        FX_TEST(names_beside_numbers_stay_out),
        FX_TEST(wrapped_names_belong_to_their_block),
        FX_TEST(components_keep_their_layers_apart),
        FX_TEST(survives_a_name_of_dots),
    };
    return cmocka_run_group_tests_name("checkpoint_layers", tests, NULL, NULL);
}
