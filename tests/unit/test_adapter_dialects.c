/*
 * Spellings: every prefix and suffix of the format notes that needs no table per model, alone (dialect.c) and against bases.
 */
#include "test_adapter_build.h"

#include "adapter/dialect.h"

static void check_split(const char *key, const char *module, enum ad_leaf leaf)
{
    struct ad_split s = dialect_split(str_of(key));
    if (s.leaf != leaf || !str_eqz(s.module, module))
        print_error("'%s' became '%.*s' and leaf %d\n", key, (int)s.module.n, s.module.p,
                    (int)s.leaf);
    assert_int_equal(s.leaf, leaf);
    assert_true(str_eqz(s.module, module));
}

static void suffixes_are_taken_off_at_the_end(void **state)
{
    (void)state;
    check_split("a.b.lora_up.weight", "a.b", LEAF_UP);
    check_split("a.b.lora_down.weight", "a.b", LEAF_DOWN);
    check_split("a.processor.to_q_lora.up.weight", "a.processor.to_q", LEAF_UP);
    check_split("a.processor.to_q_lora.down.weight", "a.processor.to_q", LEAF_DOWN);
    check_split("a.lora_B.weight", "a", LEAF_UP);
    check_split("a.lora_A.weight", "a", LEAF_DOWN);
    check_split("a.lora.up.weight", "a", LEAF_UP);
    check_split("a.lora.down.weight", "a", LEAF_DOWN);
    check_split("a.lora_B", "a", LEAF_UP);
    check_split("a.lora_A", "a", LEAF_DOWN);
    check_split("a.lora_linear_layer.up.weight", "a", LEAF_UP);
    check_split("a.lora_linear_layer.down.weight", "a", LEAF_DOWN);
    check_split("a.lora_B.default.weight", "a", LEAF_UP);
    check_split("a.lora_A.my-style.weight", "a", LEAF_DOWN);
    check_split("a.lora_A.default", "a", LEAF_DOWN);
    check_split("a.lora_embedding_A", "a", LEAF_EMB_DOWN);
    check_split("a.lora_embedding_B.default", "a", LEAF_EMB_UP);
    check_split("a.lora_B.bias", "a", LEAF_UP_BIAS);
    check_split("a.lora_B.default.bias", "a", LEAF_UP_BIAS);
    check_split("a.alpha", "a", LEAF_ALPHA);
    check_split("a.scale", "a", LEAF_SCALE);
    check_split("a.hada_w1_a", "a", LEAF_HADA_W1A);
    check_split("a.hada_w2_b.default", "a", LEAF_HADA_W2B);
    check_split("a.lokr_w1", "a", LEAF_LOKR_W1);
    check_split("a.lokr_w1_b", "a", LEAF_LOKR_W1B);
    check_split("a.lokr_w2_a.default", "a", LEAF_LOKR_W2A);
    check_split("a.diff", "a", LEAF_DIFF);
    check_split("a.diff_b", "a", LEAF_DIFF_B);
    check_split("a.diff_m", "a", LEAF_DIFF);
    check_split("a.w_norm", "a", LEAF_W_NORM);
    check_split("a.b_norm", "a", LEAF_B_NORM);
}

static void what_looks_like_a_leaf_elsewhere_means_nothing(void **state)
{
    (void)state;
    check_split("a.weight", "a.weight", LEAF_UNKNOWN);
    check_split("lora_A.weight.b", "lora_A.weight.b", LEAF_UNKNOWN);
    check_split(".lora_A.weight", ".lora_A.weight", LEAF_UNKNOWN); /* no module */
    check_split("", "", LEAF_UNKNOWN);
    check_split("alpha", "alpha", LEAF_UNKNOWN);
    check_split("a.lora_A.x.y.weight", "a.lora_A.x.y.weight", LEAF_UNKNOWN);
    check_split("a.lora_A.lora_B.weight", "a.lora_A", LEAF_UP);
    check_split("a.xalpha", "a.xalpha", LEAF_UNKNOWN);
}

static void check_candidates(const char *module, enum ad_role role, const char *const *paths)
{
    struct ad_candidate c[AD_CANDIDATES_MAX];
    size_t n = dialect_candidates(str_of(module), c), n_expected = 0;
    while (paths[n_expected] != NULL)
        n_expected++;
    assert_int_equal(n, n_expected);
    for (size_t i = 0; i < n; i++) {
        assert_true(str_eqz(c[i].path, paths[i]));
        assert_int_equal(c[i].role, role);
    }
}

static void prefixes_say_whom_they_address(void **state)
{
    (void)state;
    check_candidates("base_model.model.x.y", AD_ANY, specs("base_model.model.x.y", "x.y"));
    check_candidates("base_model.model.model.x", AD_ANY,
                     specs("base_model.model.model.x", "model.x"));
    check_candidates("base_model.model.transformer.h.0", AD_ANY,
                     specs("base_model.model.transformer.h.0", "transformer.h.0", "h.0"));
    check_candidates("unet.base_model.model.x", AD_COMPONENT,
                     specs("unet.base_model.model.x", "base_model.model.x", "x"));
    check_candidates("transformer.x", AD_COMPONENT, specs("transformer.x", "x"));
    check_candidates("diffusion_model.x", AD_DENOISER, specs("diffusion_model.x", "x"));
    check_candidates("model.diffusion_model.x", AD_DENOISER, specs("model.diffusion_model.x", "x"));
    check_candidates("text_encoder.x", AD_TE, specs("text_encoder.x", "x"));
    check_candidates("text_encoder_2.x", AD_TE_2, specs("text_encoder_2.x", "x"));
    check_candidates("text_encoders.clip_l.transformer.x", AD_TE,
                     specs("text_encoders.clip_l.transformer.x", "x"));
    check_candidates("text_encoders.qwen.transformer.x", AD_TE_ANY,
                     specs("text_encoders.qwen.transformer.x", "x"));
    check_candidates("lora_unet_x_y", AD_DENOISER, specs("x_y"));
    check_candidates("lora_unet__x_y", AD_DENOISER, specs("_x_y", "x_y"));
    check_candidates("lora_te1_x", AD_TE, specs("x"));
    check_candidates("lora_te2_x", AD_TE_2, specs("x"));
    check_candidates("lora_te3_x", AD_TE_3, specs("x"));
    check_candidates("lora_te_x", AD_TE, specs("x"));
    check_candidates("lycoris_x", AD_DENOISER, specs("x"));
    check_candidates("lora_transformer_x", AD_DENOISER, specs("x"));
    check_candidates("lora_prior_unet_x", AD_DENOISER, specs("x"));
    check_candidates("x.y", AD_ANY, specs("x.y"));
}

/* ------------------------------------------------------------------------------------------ against a base */

#define BASE                                                                                       \
    specs("blocks.0.attn.to_q.weight 4,6", "blocks.0.attn.to_out.0.weight 4,6",                    \
          "blocks.1.attn.to_q.weight 4,6", "blocks.1.attn.to_out.0.weight 4,6")

/* down and up: the spelled keys; both on to_q of block 0 unless said */
static void check_pair_on(void **state, const char *down, const char *up, const char *dialect,
                          const char *tensor)
{
    struct built b = {0};
    char d[128], u[128];
    snprintf(d, sizeof d, "%s 2,6", down);
    snprintf(u, sizeof u, "%s 4,2", up);
    open_base(&b, state, BASE);
    resolve_file(&b, state, specs(d, u));
    assert_int_equal(b.r.n_deltas, 1);
    const struct delta *x = delta_on(&b, tensor);
    assert_true(delta_at(x, 3, 5) ==
                cell(up, 2, 3, 0) * cell(down, 6, 0, 5) + cell(up, 2, 3, 1) * cell(down, 6, 1, 5));
    struct pf_adapter_info info;
    pf_adapter_info(b.a, &info);
    assert_string_equal(info.dialect, dialect);
    release(&b);
}

static void check_pair(void **state, const char *down, const char *up, const char *dialect)
{
    check_pair_on(state, down, up, dialect, "blocks.0.attn.to_q.weight");
}

static void every_spelling_reaches_the_same_tensor(void **state)
{
    check_pair(state, "base_model.model.blocks.0.attn.to_q.lora_A.weight",
               "base_model.model.blocks.0.attn.to_q.lora_B.weight", "peft");
    check_pair(state, "base_model.model.blocks.0.attn.to_q.lora_A.default.weight",
               "base_model.model.blocks.0.attn.to_q.lora_B.default.weight", "peft");
    check_pair(state, "base_model.model.blocks.0.attn.to_q.base_layer.lora_A.weight",
               "base_model.model.blocks.0.attn.to_q.base_layer.lora_B.weight", "peft");
    check_pair(state, "transformer.blocks.0.attn.to_q.lora_A.weight",
               "transformer.blocks.0.attn.to_q.lora_B.weight", "diffusers");
    check_pair(state, "unet.blocks.0.attn.to_q.lora.down.weight",
               "unet.blocks.0.attn.to_q.lora.up.weight", "diffusers");
    check_pair(state, "unet.blocks.0.attn.processor.to_q_lora.down.weight",
               "unet.blocks.0.attn.processor.to_q_lora.up.weight", "diffusers");
    check_pair(state, "prior.blocks.0.attn.to_q.lora_A.weight",
               "prior.blocks.0.attn.to_q.lora_B.weight", "diffusers");
    check_pair(state, "diffusion_model.blocks.0.attn.to_q.lora_down.weight",
               "diffusion_model.blocks.0.attn.to_q.lora_up.weight", "native");
    check_pair(state, "model.diffusion_model.blocks.0.attn.to_q.lora_down.weight",
               "model.diffusion_model.blocks.0.attn.to_q.lora_up.weight", "native");
    check_pair(state, "lora_unet_blocks_0_attn_to_q.lora_down.weight",
               "lora_unet_blocks_0_attn_to_q.lora_up.weight", "kohya");
    check_pair(state, "lora_unet__blocks_0_attn_to_q.lora_down.weight",
               "lora_unet__blocks_0_attn_to_q.lora_up.weight", "kohya");
    check_pair(state, "lora_transformer_blocks_0_attn_to_q.lora_down.weight",
               "lora_transformer_blocks_0_attn_to_q.lora_up.weight", "kohya");
    check_pair(state, "lora_prior_unet_blocks_0_attn_to_q.lora_down.weight",
               "lora_prior_unet_blocks_0_attn_to_q.lora_up.weight", "kohya");
    check_pair(state, "lycoris_blocks_0_attn_to_q.lora_down.weight",
               "lycoris_blocks_0_attn_to_q.lora_up.weight", "kohya");
    check_pair(state, "blocks.0.attn.to_q.lora_A.weight", "blocks.0.attn.to_q.lora_B.weight",
               "raw");
    check_pair(state, "blocks.0.attn.to_q.lora_A", "blocks.0.attn.to_q.lora_B", "raw");
    check_pair_on(state, "unet.blocks.0.attn.processor.to_out_lora.down.weight",
                  "unet.blocks.0.attn.processor.to_out_lora.up.weight", "diffusers",
                  "blocks.0.attn.to_out.0.weight");
}

static void a_base_may_carry_a_prefix_of_its_own(void **state)
{
    static const char *const bases[][2] = {
        {"model.diffusion_model.x.y.weight 4,6", "model.diffusion_model.x.y.weight"},
        {"transformer.x.y.weight 4,6", "transformer.x.y.weight"},
        {"diffusion_model.x.y.weight 4,6", "diffusion_model.x.y.weight"}};
    static const char *const modules[] = {"x.y", "diffusion_model.x.y", "transformer.x.y",
                                          "lora_unet_x_y", "model.diffusion_model.x.y"};
    for (size_t i = 0; i < PF_COUNTOF(bases); i++)
        for (size_t k = 0; k < PF_COUNTOF(modules); k++) {
            struct built b = {0};
            char d[128], u[128];
            snprintf(d, sizeof d, "%s.lora_down.weight 2,6", modules[k]);
            snprintf(u, sizeof u, "%s.lora_up.weight 4,2", modules[k]);
            open_base(&b, state, specs(bases[i][0], "z.weight 4,6"));
            resolve_file(&b, state, specs(d, u));
            (void)delta_on(&b, bases[i][1]); /* asserts that there is one */
            release(&b);
        }
}

static void a_name_with_two_meanings_is_ambiguous(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("transformer.x.weight 4,6", "x.weight 4,6"));
    assert_ok(
        open_file(&b, state,
                  specs("transformer.x.lora_A.weight 2,6", "transformer.x.lora_B.weight 4,2")),
        &b.err);
    assert_int_equal(resolve(&b), PF_E_AMBIGUOUS);
    assert_err(&b.err, PF_E_AMBIGUOUS, "'transformer.x'", "'transformer.x.weight'", "'x.weight'");
    release(&b);
}

static void two_base_modules_with_one_flat_name_are_ambiguous(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("a_b.c.weight 4,6", "a.b_c.weight 4,6", "d.weight 4,6"));
    assert_ok(open_file(&b, state,
                        specs("lora_unet_a_b_c.lora_down.weight 2,6",
                              "lora_unet_a_b_c.lora_up.weight 4,2")),
              &b.err);
    assert_int_equal(resolve(&b), PF_E_AMBIGUOUS);
    assert_err(&b.err, PF_E_AMBIGUOUS, "'lora_unet_a_b_c'", "'a.b_c.weight'", "'a_b.c.weight'");
    /* a collision that nobody asks about harms nobody */
    resolve_file(&b, state,
                 specs("lora_unet_d.lora_down.weight 2,6", "lora_unet_d.lora_up.weight 4,2"));
    assert_int_equal(b.r.n_deltas, 1);
    release(&b);
}

static void flat_names_match_whole_and_never_by_prefix(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("blocks.10.x.weight 4,6", "blocks.11.x.weight 4,6"));
    assert_ok(open_file(&b, state,
                        specs("lora_unet_blocks_1.lora_down.weight 2,6",
                              "lora_unet_blocks_1.lora_up.weight 4,2")),
              &b.err);
    assert_int_equal(resolve(&b), PF_E_UNMATCHED);
    resolve_file(&b, state,
                 specs("lora_unet_blocks_10_x.lora_down.weight 2,6",
                       "lora_unet_blocks_10_x.lora_up.weight 4,2"));
    (void)delta_on(&b, "blocks.10.x.weight"); /* asserts that there is one */
    release(&b);
}

/* ---------------------------------------------------------------------------------------------- components */

static void make_sdxl(struct built *b, void **state)
{
    make_component(state, "unet", specs("mid.to_q.weight 4,6"));
    make_component(state, "text_encoder", specs("text_model.layers.0.q_proj.weight 4,6"));
    make_component(state, "text_encoder_2", specs("text_model.layers.0.q_proj.weight 4,6"));
    open_components(b, state);
}

static const char *component_of(struct built *b, void **state, const char *module)
{
    char d[128], u[128];
    snprintf(d, sizeof d, "%s.lora_down.weight 2,6", module);
    snprintf(u, sizeof u, "%s.lora_up.weight 4,2", module);
    assert_ok(open_file(b, state, specs(d, u)), &b->err);
    if (resolve(b) != PF_OK)
        return pf_error_name(b->err.code);
    assert_int_equal(b->r.n_deltas, 1);
    return b->ckpt->components[b->ckpt->tensors[b->r.deltas[0].i_tensor].i_component].name;
}

static void prefixes_pick_components(void **state)
{
    struct built b = {0};
    make_sdxl(&b, state);
    assert_string_equal(component_of(&b, state, "unet.mid.to_q"), "unet");
    /* No such component: whatever draws */
    assert_string_equal(component_of(&b, state, "transformer.mid.to_q"), "unet");
    assert_string_equal(component_of(&b, state, "lora_unet_mid_to_q"), "unet");
    assert_string_equal(component_of(&b, state, "mid.to_q"), "unet");
    assert_string_equal(component_of(&b, state, "text_encoder.text_model.layers.0.q_proj"),
                        "text_encoder");
    assert_string_equal(component_of(&b, state, "text_encoder_2.text_model.layers.0.q_proj"),
                        "text_encoder_2");
    assert_string_equal(component_of(&b, state, "lora_te1_text_model_layers_0_q_proj"),
                        "text_encoder");
    assert_string_equal(component_of(&b, state, "lora_te_text_model_layers_0_q_proj"),
                        "text_encoder");
    assert_string_equal(component_of(&b, state, "lora_te2_text_model_layers_0_q_proj"),
                        "text_encoder_2");
    assert_string_equal(component_of(&b, state, "lora_te3_text_model_layers_0_q_proj"),
                        "text_encoder_2"); /* the last one */
    assert_string_equal(
        component_of(&b, state, "text_encoders.clip_l.transformer.text_model.layers.0.q_proj"),
        "text_encoder");
    assert_string_equal(
        component_of(&b, state, "text_encoders.clip_g.transformer.text_model.layers.0.q_proj"),
        "text_encoder_2");
    assert_string_equal(
        component_of(&b, state, "text_encoders.odd.transformer.text_model.layers.0.q_proj"),
        "ambiguous");
    assert_string_equal(component_of(&b, state, "text_model.layers.0.q_proj"), "ambiguous");
    assert_string_equal(component_of(&b, state, "lora_unet_text_model_layers_0_q_proj"),
                        "unmatched");
    assert_string_equal(component_of(&b, state, "text_encoder.mid.to_q"), "unmatched");
    release(&b);
}

static void a_target_picks_what_it_addresses_and_leaves_the_rest(void **state)
{
    struct built b = {0};
    make_sdxl(&b, state);
    assert_ok(open_file(&b, state,
                        specs("lora_unet_mid_to_q.lora_down.weight 2,6",
                              "lora_unet_mid_to_q.lora_up.weight 4,2",
                              "lora_te1_text_model_layers_0_q_proj.lora_down.weight 2,6",
                              "lora_te1_text_model_layers_0_q_proj.lora_up.weight 4,2")),
              &b.err);
    assert_ok(resolve(&b), &b.err);
    assert_int_equal(b.r.n_deltas, 2);
    b.opts.target = "all";
    assert_ok(resolve(&b), &b.err);
    assert_int_equal(b.r.n_deltas, 2);
    b.opts.target = "unet";
    assert_ok(resolve(&b), &b.err);
    assert_int_equal(b.r.n_deltas, 1);
    assert_int_equal(b.r.n_keys_matched, 2);
    assert_int_equal(b.r.n_unmatched, 0);
    assert_true(has_note(&b, "other components than 'unet'"));
    b.opts.target = "text_encoder_2";
    assert_int_equal(resolve(&b), PF_E_UNMATCHED);
    assert_err(&b.err, PF_E_UNMATCHED, "nothing matches the base with target 'text_encoder_2'");
    release(&b);
}

static void text_encoder_keys_never_address_a_lone_denoiser(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("text_model.layers.0.q_proj.weight 4,6", "x.weight 4,6"));
    assert_ok(open_file(&b, state,
                        specs("lora_te_text_model_layers_0_q_proj.lora_down.weight 2,6",
                              "lora_te_text_model_layers_0_q_proj.lora_up.weight 4,2",
                              "x.lora_A.weight 2,6", "x.lora_B.weight 4,2")),
              &b.err);
    static const char *const everything[] = {NULL, "all", ""};
    for (size_t i = 0; i < PF_COUNTOF(everything); i++) {
        b.opts.target = everything[i];
        assert_int_equal(resolve(&b), PF_E_UNMATCHED);
        assert_err(&b.err, PF_E_UNMATCHED, "2 of 4 keys", "lora_te_text_model");
    }
    b.opts.target = "transformer";
    assert_ok(resolve(&b), &b.err);
    assert_int_equal(b.r.n_deltas, 1);
    release(&b);
}

static void a_key_that_is_the_bases_own_name_matches_whatever_its_prefix(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("text_encoders.t5.transformer.x.weight 4,6", "y.weight 4,6"));
    resolve_file(&b, state,
                 specs("text_encoders.t5.transformer.x.lora_A.weight 2,6",
                       "text_encoders.t5.transformer.x.lora_B.weight 4,2"));
    assert_int_equal(b.r.n_deltas, 1);
    release(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(suffixes_are_taken_off_at_the_end),
        in_dir(what_looks_like_a_leaf_elsewhere_means_nothing),
        in_dir(prefixes_say_whom_they_address),
        in_dir(every_spelling_reaches_the_same_tensor),
        in_dir(a_base_may_carry_a_prefix_of_its_own),
        in_dir(a_name_with_two_meanings_is_ambiguous),
        in_dir(two_base_modules_with_one_flat_name_are_ambiguous),
        in_dir(flat_names_match_whole_and_never_by_prefix),
        in_dir(prefixes_pick_components),
        in_dir(a_target_picks_what_it_addresses_and_leaves_the_rest),
        in_dir(text_encoder_keys_never_address_a_lone_denoiser),
        in_dir(a_key_that_is_the_bases_own_name_matches_whatever_its_prefix),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
