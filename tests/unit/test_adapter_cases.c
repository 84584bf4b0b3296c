/*
 * The rows of docs/cases-status.md that concern reading adapters, one test each: the smallest input that showed the failure in the field,
 * and what must come out.
 */
#include "test_adapter_build.h"

#include <sys/stat.h>

#define BASE                                                                                       \
    specs("blocks.0.a.weight 4,6", "blocks.0.a.bias 4", "blocks.1.a.weight 4,6",                   \
          "blocks.1.a.bias 4")

/* ------------------------------------------------------------------------------- alpha, rank, scale */

static void C23_fused_rank_3r_keeps_the_files_scale_and_says_block_diagonal(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("blocks.0.qkv.weight 6,4", "blocks.1.qkv.weight 6,4"));
    /* B [6, 3]: rows 0-1 from column 0, rows 2-3 from column 1, rows 4-5 from column 2 */
    const char *path = test_path(state, "adapter.safetensors");
    static const float up[18] = {1, 0, 0, 2, 0, 0, 0, 3, 0, 0, 4, 0, 0, 0, 5, 0, 0, 6};
    static const float down[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    static const char header[] =
        "{\"blocks.0.qkv.lora_B.weight\":{\"dtype\":\"F32\",\"shape\":[6,3],\"data_offsets\":[0,72]"
        "},"
        "\"blocks.0.qkv.lora_A.weight\":{\"dtype\":\"F32\",\"shape\":[3,4],\"data_offsets\":[72,"
        "120]},"
        "\"blocks.0.qkv.alpha\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[120,124]}}";
    uint64_t n = sizeof header - 1;
    float alpha = 1;
    struct strbuf f;
    strbuf_init(&f);
    strbuf_add(&f, (const char *)&n, 8);
    strbuf_add(&f, header, n);
    strbuf_add(&f, (const char *)up, sizeof up);
    strbuf_add(&f, (const char *)down, sizeof down);
    strbuf_add(&f, (const char *)&alpha, 4);
    write_file(path, f.p, f.n);
    strbuf_release(&f);
    assert_ok(pf_adapter_open(path, &b.a, &b.err), &b.err);
    assert_ok(resolve(&b), &b.err);
    const struct delta *d = delta_on(&b, "blocks.0.qkv.weight");
    assert_true(d->scale == 1.0 / 3);
    assert_int_equal(d->rank, 3);
    assert_true(has_note(&b, "block diagonal"));
    assert_non_null(adapter_note_with(&b, "blocks.0.qkv"));
    b.opts = (struct resolve_opts){.has_alpha = true, .alpha = 3};
    assert_ok(resolve(&b), &b.err);
    assert_true(delta_on(&b, "blocks.0.qkv.weight")->scale == 1);
    assert_true(b.r.alpha_effective == 3);
    release(&b);
}

static void C23_a_dense_B_is_not_called_block_diagonal(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("blocks.0.qkv.weight 6,4"));
    resolve_file(&b, state,
                 specs("blocks.0.qkv.lora_B.weight 6,3", "blocks.0.qkv.lora_A.weight 3,4"));
    assert_false(has_note(&b, "block diagonal"));
    release(&b);
}

static void C25_each_layer_divides_by_its_own_rank_and_the_far_one_is_named(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("m.0.a.weight 40,40", "m.1.a.weight 40,40", "m.2.a.weight 40,40"));
    resolve_file(
        &b, state,
        specs("m.0.a.lora_B.weight 40,1", "m.0.a.lora_A.weight 1,40", "m.0.a.alpha - F32 =181",
              "m.1.a.lora_B.weight 40,32", "m.1.a.lora_A.weight 32,40", "m.1.a.alpha - F32 =181",
              "m.2.a.lora_B.weight 40,64", "m.2.a.lora_A.weight 64,40", "m.2.a.alpha - F32 =181"));
    assert_true(delta_on(&b, "m.0.a.weight")->scale == 181.0);
    assert_true(delta_on(&b, "m.1.a.weight")->scale == 181.0 / 32);
    assert_true(delta_on(&b, "m.2.a.weight")->scale == 181.0 / 64);
    const char *note = adapter_note_with(&b, "more than 4 times off");
    assert_non_null(note);
    assert_non_null(strstr(note, "'m.0.a' (181)"));
    assert_null(strstr(note, "'m.1.a'"));
    assert_null(strstr(note, "'m.2.a'"));
    assert_true(has_note(&b, "more than 4 times off"));
    release(&b);
}

static void C27_alpha_beside_lora_A_and_B_in_diffusers_layout_counts(void **state)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    resolve_file(&b, state,
                 specs("transformer.blocks.0.a.lora_B.weight 4,2",
                       "transformer.blocks.0.a.lora_A.weight 2,6",
                       "transformer.blocks.0.a.alpha - =1"));
    assert_true(delta_on(&b, "blocks.0.a.weight")->scale == 0.5);
    assert_int_equal(b.r.n_keys_matched, 3);
    assert_int_equal(b.r.n_notes, 0);
    release(&b);
}

static void C29_rank_8_alpha_16_is_scale_2(void **state)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    resolve_file(&b, state,
                 specs("blocks.0.a.lora_up.weight 4,8", "blocks.0.a.lora_down.weight 8,6",
                       "blocks.0.a.alpha - =16"));
    assert_true(delta_on(&b, "blocks.0.a.weight")->scale == 2);
    release(&b);
}

static void C31_strength_is_no_part_of_the_deltas_scale(void **state)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    resolve_file(&b, state,
                 specs("blocks.0.a.lora_up.weight 4,8", "blocks.0.a.lora_down.weight 8,6"));
    /* Not 0.5 / 8, whatever the strength */
    assert_true(delta_on(&b, "blocks.0.a.weight")->scale == 1);
    release(&b);
}

static void C33_factored_lokr_divides_alpha_by_the_rank_of_w2(void **state)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    resolve_file(
        &b, state,
        specs("blocks.0.a.lokr_w1 2,2", "blocks.0.a.lokr_w2_a 2,1", "blocks.0.a.lokr_w2_b 1,3",
              "blocks.0.a.alpha - =0.25", "blocks.1.a.lokr_w1_a 2,2", "blocks.1.a.lokr_w1_b 2,2",
              "blocks.1.a.lokr_w2_a 2,1", "blocks.1.a.lokr_w2_b 1,3", "blocks.1.a.alpha - =0.25"));
    assert_true(delta_on(&b, "blocks.0.a.weight")->scale == 0.25);
    assert_true(delta_on(&b, "blocks.1.a.weight")->scale == 0.25);
    assert_int_equal(delta_on(&b, "blocks.1.a.weight")->rank, 2);
    release(&b);
}

static void C33_lokr_with_w1_alone_factored_divides_by_its_rank(void **state)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    resolve_file(&b, state,
                 specs("blocks.0.a.lokr_w1_a 2,2", "blocks.0.a.lokr_w1_b 2,2",
                       "blocks.0.a.lokr_w2 2,3", "blocks.0.a.alpha - =4"));
    assert_true(delta_on(&b, "blocks.0.a.weight")->scale == 2);
    release(&b);
}

static void C111_config_rank_disagrees_is_refused(void **state)
{
    struct built b = {0};
    int rc = open_peft(
        &b, state,
        specs("base_model.model.qkv.lora_A.weight 6,8", "base_model.model.qkv.lora_B.weight 24,6",
              "base_model.model.out.lora_A.weight 2,8", "base_model.model.out.lora_B.weight 8,2"),
        "{\"peft_type\":\"LORA\",\"r\":6,\"lora_alpha\":6}");
    assert_int_equal(rc, PF_E_MISMATCH);
    assert_err(&b.err, PF_E_MISMATCH, "adapter_config.json",
               "'base_model.model.out' has rank 2, not 6");
    assert_null(strstr(b.err.msg, "qkv")); /* the module that agrees is not accused */
    release(&b);
}

static void C111_the_same_in_lora_adapter_metadata_is_refused(void **state)
{
    struct built b = {0};
    int rc = open_file_meta(
        &b, state, specs("transformer.out.lora_A.weight 2,8", "transformer.out.lora_B.weight 8,2"),
        "lora_adapter_metadata", "{\"transformer.r\":6,\"transformer.lora_alpha\":6}");
    assert_int_equal(rc, PF_E_MISMATCH);
    assert_err(&b.err, PF_E_MISMATCH, "lora_adapter_metadata",
               "'transformer.out' has rank 2, not 6");
    release(&b);
}

static void C112_a_silent_file_has_scale_1_and_says_so(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("a.weight 200,200", "b.weight 4,4"));
    resolve_file(&b, state, specs("a.lora_A.weight 128,200", "a.lora_B.weight 200,128"));
    assert_true(delta_on(&b, "a.weight")->scale == 1);
    assert_true(has_note(&b, "no alpha and no config: scale 1 is assumed"));
    assert_non_null(adapter_note_with(&b, "scale 1 is assumed"));
    b.opts = (struct resolve_opts){.has_alpha = true, .alpha = 8};
    assert_ok(resolve(&b), &b.err);
    assert_true(delta_on(&b, "a.weight")->scale == 1.0 / 16);
    assert_true(b.r.alpha_effective == 8);
    assert_false(has_note(&b, "assumed")); /* nothing is assumed any more */
    release(&b);
}

static void C112_the_training_metadata_is_quoted(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("a.weight 4,4"));
    assert_ok(
        open_file_meta(&b, state,
                       specs("lora_unet_a.lora_down.weight 2,4", "lora_unet_a.lora_up.weight 4,2"),
                       "ss_network_alpha", "16"),
        &b.err);
    assert_non_null(adapter_note_with(&b, "ss_network_alpha 16"));
    release(&b);
}

/* ------------------------------------------------------------------------- keys and silent losses */

static void C39_C41_C115_dora_under_any_leaf_is_refused_by_name(void **state)
{
    static const char *const leaves[] = {
        "x.dora_scale 4",
        "x.dora_scale 4,1",
        "x.dora_scale 1,4",
        "x.dora_scale 1,4,1,1",
        "x.lora_magnitude_vector 4",
        "x.lora_magnitude_vector.weight 4",
        "x.lora_magnitude_vector.default 4",
        "x.lora_magnitude_vector.default.weight 4",
        "x.magnitude 4",
    };
    for (size_t i = 0; i < PF_COUNTOF(leaves); i++) {
        struct built b = {0};
        int rc =
            open_file(&b, state, specs("x.lora_A.weight 2,4", "x.lora_B.weight 4,2", leaves[i]));
        assert_int_equal(rc, PF_E_UNSUPPORTED);
        char name[64];
        assert_int_equal(sscanf(leaves[i], "%63s", name), 1);
        assert_err(&b.err, PF_E_UNSUPPORTED, name, "DoRA");
        release(&b);
    }
}

static void C43_lora_on_expert_parameters_is_refused_by_config(void **state)
{
    struct built b = {0};
    int rc = open_peft(
        &b, state,
        specs("base_model.model.e.lora_A.weight 6,4", "base_model.model.e.lora_B.weight 5,6"),
        "{\"peft_type\":\"LORA\",\"r\":6,\"lora_alpha\":6,\"target_parameters\":[\"e.w\"]}");
    assert_int_equal(rc, PF_E_UNSUPPORTED);
    assert_err(&b.err, PF_E_UNSUPPORTED, "target_parameters", "MoE");
    release(&b);
}

static void C47_C59_xlabs_keys_are_refused_by_name(void **state)
{
    static const char *const keys[] = {"double_blocks.0.processor.qkv_lora1.down.weight 2,4",
                                       "double_blocks.0.processor.proj_lora2.up.weight 4,2",
                                       "single_blocks.3.processor.qkv_lora.down.weight 2,4",
                                       "single_blocks.3.processor.proj_lora.up.weight 4,2"};
    for (size_t i = 0; i < PF_COUNTOF(keys); i++) {
        struct built b = {0};
        assert_int_equal(open_file(&b, state, specs(keys[i])), PF_E_UNSUPPORTED);
        assert_err(&b.err, PF_E_UNSUPPORTED, "XLabs", "processor");
        release(&b);
    }
}

static void C49_an_unknown_leaf_on_a_known_module_fails(void **state)
{
    struct built b = {0};
    int rc =
        open_file(&b, state, specs("x.lora_A.weight 2,4", "x.lora_B.weight 4,2", "x.sparkle 4"));
    assert_int_equal(rc, PF_E_UNSUPPORTED);
    assert_err(&b.err, PF_E_UNSUPPORTED, "'.sparkle'", "'x'");
    release(&b);
}

static void C49_an_unknown_leaf_on_a_module_that_only_the_base_knows_fails(void **state)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    assert_ok(open_file(&b, state,
                        specs("blocks.0.a.lora_A.weight 2,6", "blocks.0.a.lora_B.weight 4,2",
                              "lora_unet_blocks_1_a.sparkle.weight 4")),
              &b.err);
    b.opts.allow_unmatched = true; /* not even then */
    assert_int_equal(resolve(&b), PF_E_UNSUPPORTED);
    assert_err(&b.err, PF_E_UNSUPPORTED, "'.sparkle.weight'", "'lora_unet_blocks_1_a'");
    release(&b);
}

static void C51_diff_m_changes_the_modulation(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("blocks.0.modulation 1,6,4", "blocks.0.a.weight 4,6"));
    resolve_file(&b, state, specs("diffusion_model.blocks.0.diff_m 1,6,4"));
    const struct delta *d = delta_on(&b, "blocks.0.modulation");
    assert_int_equal(d->kind, DELTA_DIFF);
    assert_int_equal(d->n_rows, 1);
    assert_int_equal(d->n_cols, 24);
    assert_true(delta_at(d, 0, 23) == cell("diffusion_model.blocks.0.diff_m", 24, 0, 23));
    release(&b);
}

static void C53_more_blocks_than_the_base_has_is_an_error_that_lists_them(void **state)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    assert_ok(open_file(&b, state,
                        specs("diffusion_model.blocks.0.a.lora_A.weight 2,6",
                              "diffusion_model.blocks.0.a.lora_B.weight 4,2",
                              "diffusion_model.blocks.30.a.lora_A.weight 2,6",
                              "diffusion_model.blocks.30.a.lora_B.weight 4,2")),
              &b.err);
    assert_int_equal(resolve(&b), PF_E_UNMATCHED);
    assert_err(&b.err, PF_E_UNMATCHED, "2 of 4 keys", "'diffusion_model.blocks.30.a.lora_A.weight'",
               "nearest: 'blocks.0.a.weight'");
    release(&b);
}

static void C53_other_widths_are_a_mismatch_with_both_shapes(void **state)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    assert_ok(
        open_file(&b, state, specs("blocks.0.a.lora_A.weight 2,7", "blocks.0.a.lora_B.weight 4,2")),
        &b.err);
    assert_int_equal(resolve(&b), PF_E_MISMATCH);
    assert_err(&b.err, PF_E_MISMATCH, "'blocks.0.a.lora_A.weight' is [2, 7]",
               "'blocks.0.a.weight' of the base is [4, 6]");
    release(&b);
}

static void C55_a_two_expert_base_needs_a_target_for_a_neutral_prefix(void **state)
{
    struct built b = {0};
    make_component(state, "transformer", specs("blocks.0.a.weight 4,6"));
    make_component(state, "transformer_2", specs("blocks.0.a.weight 4,6"));
    open_components(&b, state);
    assert_ok(open_file(&b, state,
                        specs("diffusion_model.blocks.0.a.lora_A.weight 2,6",
                              "diffusion_model.blocks.0.a.lora_B.weight 4,2")),
              &b.err);
    assert_int_equal(resolve(&b), PF_E_AMBIGUOUS);
    assert_err(&b.err, PF_E_AMBIGUOUS, "'transformer'", "'transformer_2'", "target=");
    for (uint32_t i = 0; i < 2; i++) {
        b.opts.target = b.ckpt->components[i].name;
        assert_ok(resolve(&b), &b.err);
        assert_int_equal(b.r.n_deltas, 1);
        assert_int_equal(b.ckpt->tensors[b.r.deltas[0].i_tensor].i_component, i);
    }
    b.opts.target = "transformer_3";
    assert_int_equal(resolve(&b), PF_E_NOTFOUND);
    assert_err(&b.err, PF_E_NOTFOUND, "'transformer_3'", "'transformer', 'transformer_2'");
    release(&b);
}

/* A target may be a list: what it names takes part, what it does not name is left out; a list of everything is "all". */
static void a_list_of_targets_is_a_set_of_components(void **state)
{
    struct built b = {0};
    static const char *const names[] = {"text_encoder", "text_encoder_2", "transformer"};
    for (int i = 0; i < 3; i++)
        make_component(state, names[i], specs("blocks.0.a.weight 4,6"));
    open_components(&b, state);
    assert_ok(open_file(&b, state,
                        specs("text_encoder.blocks.0.a.lora_A.weight 2,6",
                              "text_encoder.blocks.0.a.lora_B.weight 4,2",
                              "text_encoder_2.blocks.0.a.lora_A.weight 2,6",
                              "text_encoder_2.blocks.0.a.lora_B.weight 4,2",
                              "transformer.blocks.0.a.lora_A.weight 2,6",
                              "transformer.blocks.0.a.lora_B.weight 4,2")),
              &b.err);
    static const struct {
        const char *list;
        unsigned mask;
    } lists[] = {{NULL, 7},
                 {"", 7},
                 {"all", 7},
                 {"text_encoder,text_encoder_2,transformer", 7},
                 {"transformer,text_encoder", 5},
                 {"text_encoder_2,transformer,text_encoder_2", 6},
                 {"text_encoder_2", 2}};
    for (size_t k = 0; k < PF_COUNTOF(lists); k++) {
        unsigned mask = 0;
        b.opts.target = lists[k].list;
        assert_ok(resolve(&b), &b.err);
        for (size_t i = 0; i < b.r.n_deltas; i++)
            mask |= 1u << b.ckpt->tensors[b.r.deltas[i].i_tensor].i_component;
        assert_int_equal(mask, lists[k].mask);
        assert_int_equal(b.r.n_unmatched, 0);
    }
    static const char *const bad[] = {
        "transformer,",    ",transformer",    "transformer,,text_encoder",
        "transformer,vae", "all,transformer", "transformer "};
    for (size_t k = 0; k < PF_COUNTOF(bad); k++) {
        b.opts.target = bad[k];
        assert_int_equal(resolve(&b), PF_E_NOTFOUND);
        assert_err(&b.err, PF_E_NOTFOUND, "is no component",
                   "'text_encoder', 'text_encoder_2', 'transformer'");
    }
    release(&b);
}

static void C57_lokr_with_comfy_names_on_a_fused_qkv_resolves(void **state)
{
    struct built b = {0};
    open_base(&b, state,
              specs("double_blocks.0.img_attn.qkv.weight 12,4",
                    "double_blocks.1.img_attn.qkv.weight 12,4"));
    resolve_file(&b, state,
                 specs("diffusion_model.double_blocks.0.img_attn.qkv.lokr_w1 3,2",
                       "diffusion_model.double_blocks.0.img_attn.qkv.lokr_w2 4,2"));
    const struct delta *d = delta_on(&b, "double_blocks.0.img_attn.qkv.weight");
    assert_int_equal(d->kind, DELTA_LOKR);
    assert_int_equal(d->f[2].n_rows, 4);
    assert_true(d->scale == 1);
    assert_true(delta_at(d, 5, 3) ==
                cell("diffusion_model.double_blocks.0.img_attn.qkv.lokr_w1", 2, 1, 1) *
                    cell("diffusion_model.double_blocks.0.img_attn.qkv.lokr_w2", 2, 1, 1));
    release(&b);
}

static void C61_split_qkv_names_apply_to_a_fused_base(void **state)
{
    struct built b = {0};
    open_base(&b, state,
              specs("blocks.0.attn.to_qkv.weight 12,6", "blocks.1.attn.to_qkv.weight 12,6"));
    resolve_file(&b, state,
                 specs("transformer.blocks.0.attn.to_q.lora_A.weight 2,6",
                       "transformer.blocks.0.attn.to_q.lora_B.weight 4,2",
                       "transformer.blocks.0.attn.to_k.lora_A.weight 2,6",
                       "transformer.blocks.0.attn.to_k.lora_B.weight 4,2",
                       "transformer.blocks.0.attn.to_v.lora_A.weight 2,6",
                       "transformer.blocks.0.attn.to_v.lora_B.weight 4,2"));
    assert_int_equal(b.r.n_deltas, 3);
    assert_int_equal(b.r.n_keys_matched, 6);
    static const char *const keys[] = {"transformer.blocks.0.attn.to_q",
                                       "transformer.blocks.0.attn.to_k",
                                       "transformer.blocks.0.attn.to_v"};
    for (int i = 0; i < 3; i++) {
        assert_string_equal(b.r.deltas[i].key, keys[i]);
        assert_int_equal(b.r.deltas[i].row0, 4 * i);
        assert_int_equal(b.r.deltas[i].n_rows, 4);
    }
    release(&b);
}

static void C63_text_encoder_2_projections_apply_to_in_proj(void **state)
{
    struct built b = {0};
    make_component(state, "unet", specs("mid.weight 4,4"));
    make_component(
        state, "text_encoder_2",
        specs("resblocks.0.attn.in_proj_weight 12,4", "resblocks.0.attn.in_proj_bias 12"));
    open_components(&b, state);
    resolve_file(&b, state,
                 specs("lora_te2_resblocks_0_attn_k_proj.lora_down.weight 2,4",
                       "lora_te2_resblocks_0_attn_k_proj.lora_up.weight 4,2"));
    const struct delta *d = delta_on(&b, "resblocks.0.attn.in_proj_weight");
    assert_int_equal(d->row0, 4);
    assert_int_equal(d->n_rows, 4);
    release(&b);
}

static void C65_a_loha_module_keeps_its_whole_name(void **state)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    resolve_file(&b, state,
                 specs("blocks.0.a.hada_w1_a 4,2", "blocks.0.a.hada_w1_b 2,6",
                       "blocks.0.a.hada_w2_a 4,2", "blocks.0.a.hada_w2_b 2,6"));
    assert_string_equal(delta_on(&b, "blocks.0.a.weight")->key, "blocks.0.a");
    release(&b);
}

static void C67_no_alpha_keys_load_with_scale_1(void **state)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    resolve_file(&b, state,
                 specs("lora_unet_blocks_0_a.lora_down.weight 2,6",
                       "lora_unet_blocks_0_a.lora_up.weight 4,2"));
    assert_true(delta_on(&b, "blocks.0.a.weight")->scale == 1);
    release(&b);
}

static void C69_layers_outside_the_blocks_are_targets_too(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("img_in.weight 4,6", "txt_in.weight 4,6", "blocks.0.a.weight 4,6"));
    resolve_file(&b, state,
                 specs("diffusion_model.img_in.lora_A.weight 2,6",
                       "diffusion_model.img_in.lora_B.weight 4,2",
                       "lora_unet_txt_in.lora_down.weight 2,6",
                       "lora_unet_txt_in.lora_up.weight 4,2"));
    assert_int_equal(b.r.n_deltas, 2);
    struct pf_adapter_info info;
    pf_adapter_info(b.a, &info);
    assert_string_equal(info.dialect, "mixed");
    release(&b);
}

static void C71_diff_on_a_text_encoders_norms_needs_no_alpha(void **state)
{
    struct built b = {0};
    make_component(state, "transformer", specs("a.weight 4,4"));
    make_component(state, "text_encoder_3", specs("encoder.block.0.layer.0.layer_norm.weight 4"));
    open_components(&b, state);
    resolve_file(
        &b, state,
        specs("text_encoders.t5xxl.transformer.encoder.block.0.layer.0.layer_norm.diff 4"));
    const struct delta *d = delta_on(&b, "encoder.block.0.layer.0.layer_norm.weight");
    assert_int_equal(d->kind, DELTA_DIFF);
    assert_int_equal(d->n_rows, 4);
    assert_int_equal(d->n_cols, 1);
    assert_true(d->scale == 1);
    assert_int_equal(b.r.n_notes, 0);
    release(&b);
}

static void C73_a_resized_embedding_saved_whole_is_refused_by_name(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("model.embed_tokens.weight 10,4", "model.layers.0.a.weight 4,4"));
    assert_ok(open_file(&b, state,
                        specs("base_model.model.model.layers.0.a.lora_A.weight 2,4",
                              "base_model.model.model.layers.0.a.lora_B.weight 4,2",
                              "base_model.model.model.embed_tokens.weight 12,4")),
              &b.err);
    assert_int_equal(resolve(&b), PF_E_UNSUPPORTED);
    assert_err(&b.err, PF_E_UNSUPPORTED, "'base_model.model.model.embed_tokens.weight'",
               "replaces a whole tensor");
    release(&b);
}

static void C75_a_tensor_that_is_no_factor_is_listed(void **state)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    assert_ok(open_file(&b, state,
                        specs("blocks.0.a.lora_A.weight 2,6", "blocks.0.a.lora_B.weight 4,2",
                              "rope_freqs.weight 4")),
              &b.err);
    assert_int_equal(resolve(&b), PF_E_UNMATCHED);
    assert_err(&b.err, PF_E_UNMATCHED, "1 of 3 keys", "'rope_freqs.weight'");
    b.opts.allow_unmatched = true;
    assert_ok(resolve(&b), &b.err);
    assert_int_equal(b.r.n_unmatched, 1);
    assert_string_equal(b.r.unmatched[0].key, "rope_freqs.weight");
    assert_int_equal(b.r.n_deltas, 1);
    assert_true(has_note(&b, "'rope_freqs.weight'"));
    release(&b);
}

static void C77_a_tied_lm_head_is_explained(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("model.embed_tokens.weight 10,4", "model.layers.0.a.weight 4,4"));
    assert_ok(open_file(&b, state,
                        specs("base_model.model.lm_head.lora_A.weight 2,4",
                              "base_model.model.lm_head.lora_B.weight 10,2",
                              "base_model.model.model.layers.0.a.lora_A.weight 2,4",
                              "base_model.model.model.layers.0.a.lora_B.weight 4,2")),
              &b.err);
    assert_int_equal(resolve(&b), PF_E_UNMATCHED);
    assert_err(&b.err, PF_E_UNMATCHED, "no 'lm_head.weight'",
               "tied to 'model.embed_tokens.weight'");
    release(&b);
}

static void C81_C125_quantised_bases_are_refused_naming_the_dtype(void **state)
{
    static const char *const bases[] = {"x.weight 4,6 F8_E4M3", "x.weight 4,6 U8",
                                        "x.weight 4,6 I8", "x.weight 4,6 F8_E5M2"};
    static const char *const names[] = {"F8_E4M3", "U8", "I8", "F8_E5M2"};
    for (size_t i = 0; i < PF_COUNTOF(bases); i++) {
        struct built b = {0};
        open_base(&b, state, specs(bases[i], "y.weight 4,6"));
        assert_ok(open_file(&b, state, specs("x.lora_A.weight 2,4", "x.lora_B.weight 6,2")),
                  &b.err); /* a delta [6,4] */
        assert_int_equal(resolve(&b), PF_E_UNSUPPORTED);
        assert_err(&b.err, PF_E_UNSUPPORTED, "'x.weight'", names[i], "quantised");
        release(&b);
    }
}

static void C119_every_additive_kind_of_a_distillation_file_applies(void **state)
{
    struct built b = {0};
    open_base(&b, state,
              specs("blocks.0.a.weight 4,6", "blocks.0.a.bias 4", "blocks.0.norm.weight 6",
                    "blocks.0.norm.bias 6", "head.weight 4,6", "head.bias 4"));
    resolve_file(&b, state,
                 specs("diffusion_model.blocks.0.a.lora_down.weight 2,6 BF16",
                       "diffusion_model.blocks.0.a.lora_up.weight 4,2 BF16",
                       "diffusion_model.blocks.0.a.diff_b 4 BF16",
                       "diffusion_model.blocks.0.norm.diff 6 BF16",
                       "diffusion_model.blocks.0.norm.diff_b 6 BF16",
                       "diffusion_model.head.w_norm 4,6", "diffusion_model.head.b_norm 4"));
    assert_int_equal(b.r.n_deltas, 6);
    assert_int_equal(b.r.n_keys_matched, 7);
    assert_int_equal(delta_on(&b, "blocks.0.a.weight")->kind, DELTA_LORA);
    assert_int_equal(delta_on(&b, "blocks.0.a.bias")->kind, DELTA_DIFF);
    assert_int_equal(delta_on(&b, "blocks.0.norm.weight")->kind, DELTA_DIFF);
    assert_int_equal(delta_on(&b, "blocks.0.norm.bias")->kind, DELTA_DIFF);
    assert_int_equal(delta_on(&b, "head.weight")->n_cols, 6);
    assert_int_equal(delta_on(&b, "head.bias")->n_rows, 4);
    struct pf_adapter_info info;
    pf_adapter_info(b.a, &info);
    assert_string_equal(info.family, "mixed");
    assert_string_equal(info.dtypes, "BF16,F32");
    unsigned n_lora = 0, n_diff = 0, n_diff_b = 0;
    for (uint32_t i = 0; i < info.n_modules; i++) {
        struct pf_adapter_module m;
        pf_adapter_module(b.a, i, &m);
        n_lora += strcmp(m.kind, "lora") == 0;
        n_diff += strcmp(m.kind, "diff") == 0;
        n_diff_b += strcmp(m.kind, "diff_b") == 0;
    }
    assert_int_equal(n_lora, 1);
    assert_int_equal(n_diff, 2);
    assert_int_equal(n_diff_b, 3);
    release(&b);
}

static void C119_set_weight_is_refused_by_name(void **state)
{
    struct built b = {0};
    assert_int_equal(
        open_file(&b, state,
                  specs("diffusion_model.img_in.set_weight 4,8", "diffusion_model.a.diff 4")),
        PF_E_UNSUPPORTED);
    assert_err(&b.err, PF_E_UNSUPPORTED, "'diffusion_model.img_in.set_weight'", "set_weight");
    release(&b);
}

static void C123_a_file_of_another_length_is_one_error_with_its_size(void **state)
{
    struct built b = {0};
    const char *path = test_path(state, "adapter.safetensors");
    save_tensors(path, specs("a.lora_A.weight 2,4", "a.lora_B.weight 4,2"), NULL, NULL);
    FILE *f = fopen(path, "ae");
    assert_non_null(f);
    assert_int_equal(fwrite("12345678", 1, 8, f), 8);
    assert_int_equal(fclose(f), 0);
    assert_int_equal(pf_adapter_open(path, &b.a, &b.err), PF_E_FORMAT);
    assert_err(&b.err, PF_E_FORMAT, "adapter.safetensors");
    release(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(C23_fused_rank_3r_keeps_the_files_scale_and_says_block_diagonal),
        in_dir(C23_a_dense_B_is_not_called_block_diagonal),
        in_dir(C25_each_layer_divides_by_its_own_rank_and_the_far_one_is_named),
        in_dir(C27_alpha_beside_lora_A_and_B_in_diffusers_layout_counts),
        in_dir(C29_rank_8_alpha_16_is_scale_2),
        in_dir(C31_strength_is_no_part_of_the_deltas_scale),
        in_dir(C33_factored_lokr_divides_alpha_by_the_rank_of_w2),
        in_dir(C33_lokr_with_w1_alone_factored_divides_by_its_rank),
        in_dir(C111_config_rank_disagrees_is_refused),
        in_dir(C111_the_same_in_lora_adapter_metadata_is_refused),
        in_dir(C112_a_silent_file_has_scale_1_and_says_so),
        in_dir(C112_the_training_metadata_is_quoted),
        in_dir(C39_C41_C115_dora_under_any_leaf_is_refused_by_name),
        in_dir(C43_lora_on_expert_parameters_is_refused_by_config),
        in_dir(C47_C59_xlabs_keys_are_refused_by_name),
        in_dir(C49_an_unknown_leaf_on_a_known_module_fails),
        in_dir(C49_an_unknown_leaf_on_a_module_that_only_the_base_knows_fails),
        in_dir(C51_diff_m_changes_the_modulation),
        in_dir(C53_more_blocks_than_the_base_has_is_an_error_that_lists_them),
        in_dir(C53_other_widths_are_a_mismatch_with_both_shapes),
        in_dir(C55_a_two_expert_base_needs_a_target_for_a_neutral_prefix),
        in_dir(a_list_of_targets_is_a_set_of_components),
        in_dir(C57_lokr_with_comfy_names_on_a_fused_qkv_resolves),
        in_dir(C61_split_qkv_names_apply_to_a_fused_base),
        in_dir(C63_text_encoder_2_projections_apply_to_in_proj),
        in_dir(C65_a_loha_module_keeps_its_whole_name),
        in_dir(C67_no_alpha_keys_load_with_scale_1),
        in_dir(C69_layers_outside_the_blocks_are_targets_too),
        in_dir(C71_diff_on_a_text_encoders_norms_needs_no_alpha),
        in_dir(C73_a_resized_embedding_saved_whole_is_refused_by_name),
        in_dir(C75_a_tensor_that_is_no_factor_is_listed),
        in_dir(C77_a_tied_lm_head_is_explained),
        in_dir(C81_C125_quantised_bases_are_refused_naming_the_dtype),
        in_dir(C119_every_additive_kind_of_a_distillation_file_applies),
        in_dir(C119_set_weight_is_refused_by_name),
        in_dir(C123_a_file_of_another_length_is_one_error_with_its_size),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
