/*
 * What is done where formats disagree: the policy table of the format notes, row by row, each with its message.
 */
#include "test_adapter_build.h"

#include <unistd.h>

#define BASE                                                                                       \
    specs("blocks.0.a.weight 4,6", "blocks.0.a.bias 4", "blocks.1.a.weight 4,6",                   \
          "blocks.1.a.bias 4")
#define PAIR0 "blocks.0.a.lora_A.weight 2,6", "blocks.0.a.lora_B.weight 4,2"
#define PAIR1 "blocks.1.a.lora_A.weight 2,6", "blocks.1.a.lora_B.weight 4,2"

/* ------------------------------------------------------------------------------------------ unmatched keys */

static void unmatched_keys_list_the_first_20_the_count_and_nearest_names(void **state)
{
    struct built b = {0};
    char text[64][96];
    const char *tensors[64] = {PAIR0};
    size_t n = 2;
    for (int i = 0; i < 15; i++)
        for (int k = 0; k < 2; k++, n++) {
            snprintf(text[n], sizeof text[n], "blocks.%d.aa.lora_%c.weight %s", i + 2, "AB"[k],
                     k == 0 ? "2,6" : "4,2");
            tensors[n] = text[n];
        }
    open_base(&b, state, BASE);
    assert_ok(open_file(&b, state, tensors), &b.err);
    assert_int_equal(resolve(&b), PF_E_UNMATCHED);
    assert_err(&b.err, PF_E_UNMATCHED, "30 of 32 keys match no tensor of the base",
               "'blocks.2.aa.lora_A.weight' (nearest: 'blocks.", "'blocks.11.aa.lora_B.weight'",
               "and 10 more");
    assert_null(strstr(b.err.msg, "blocks.12.aa"));
    b.opts.allow_unmatched = true;
    assert_ok(resolve(&b), &b.err);
    assert_int_equal(b.r.n_unmatched, 30);
    assert_int_equal(b.r.n_keys_matched, 2);
    assert_int_equal(b.r.n_deltas, 1);
    assert_string_equal(b.r.unmatched[29].key, "blocks.16.aa.lora_B.weight");
    assert_true(has_note(&b, "30 of 32 keys match no tensor"));
    release(&b);
}

static void nothing_matched_is_an_error_even_when_unmatched_is_allowed(void **state)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    assert_ok(open_file(&b, state, specs("x.lora_A.weight 2,6", "x.lora_B.weight 4,2")), &b.err);
    b.opts.allow_unmatched = true;
    assert_int_equal(resolve(&b), PF_E_UNMATCHED);
    assert_err(&b.err, PF_E_UNMATCHED, "nothing matches the base", "'x.lora_A.weight'");
    release(&b);
}

static void nothing_but_a_bias_that_the_base_lacks_is_nothing_matched(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("a.weight 4,6", "b.weight 4,6"));
    assert_ok(open_file(&b, state, specs("a.diff_b 4")), &b.err);
    b.opts.allow_unmatched = true;
    assert_int_equal(resolve(&b), PF_E_UNMATCHED);
    assert_err(&b.err, PF_E_UNMATCHED, "nothing matches the base", "'a.diff_b'");
    release(&b);
}

static void a_diff_b_without_a_base_bias_is_an_unmatched_key(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("a.weight 4,6", "b.weight 4,6"));
    assert_ok(
        open_file(&b, state, specs("a.lora_A.weight 2,6", "a.lora_B.weight 4,2", "a.diff_b 4")),
        &b.err);
    assert_int_equal(resolve(&b), PF_E_UNMATCHED);
    assert_err(&b.err, PF_E_UNMATCHED, "1 of 3 keys", "'a.diff_b'");
    b.opts.allow_unmatched = true;
    assert_ok(resolve(&b), &b.err);
    assert_int_equal(b.r.n_deltas, 1);
    assert_int_equal(b.r.n_keys_matched, 2);
    release(&b);
}

/* ------------------------------------------------------------------------------------------- unknown leaves */

static void whole_tensors_of_the_base_are_refused_by_name(void **state)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    assert_ok(open_file(&b, state, specs(PAIR0, "diffusion_model.blocks.1.a.weight 4,6")), &b.err);
    assert_int_equal(resolve(&b), PF_E_UNSUPPORTED);
    assert_err(&b.err, PF_E_UNSUPPORTED, "'diffusion_model.blocks.1.a.weight'", "modules_to_save");
    release(&b);
}

static void an_alpha_without_factors_is_never_left_out(void **state)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    assert_ok(open_file(&b, state, specs(PAIR0, "blocks.1.a.alpha - =1")), &b.err);
    assert_int_equal(resolve(&b), PF_E_UNSUPPORTED);
    assert_err(&b.err, PF_E_UNSUPPORTED, "'.alpha'", "'blocks.1.a'", "without its factors");
    release(&b);
}

/* ------------------------------------------------------------------------------ shapes and incomplete sets */

static void one_error(void **state, const char *const *tensors, int code, const char *x,
                      const char *y)
{
    struct built b = {0};
    assert_int_equal(open_file(&b, state, tensors), code);
    assert_err(&b.err, code, x, y);
    release(&b);
}

static void incomplete_factor_sets_are_refused_naming_what_is_missing(void **state)
{
    one_error(state, specs("x.lora_A.weight 2,6"), PF_E_MISMATCH, "'x.lora_A.weight'",
              "without its B (up)");
    one_error(state, specs("x.lora_up.weight 4,2"), PF_E_MISMATCH, "'x.lora_up.weight'",
              "without its A (down)");
    one_error(state, specs("x.lora_embedding_A 2,6"), PF_E_MISMATCH, "'x.lora_embedding_A'",
              "without its B");
    one_error(state, specs("x.hada_w1_b 2,6", "x.hada_w2_a 4,2", "x.hada_w2_b 2,6"), PF_E_MISMATCH,
              "'x.hada_w1_b'", "without hada_w1_a");
    one_error(state, specs("x.hada_w1_a 4,2", "x.hada_w1_b 2,6", "x.hada_w2_a 4,2"), PF_E_MISMATCH,
              "'x.hada_w1_a'", "without hada_w2_b");
    one_error(state, specs("x.lokr_w1 2,2"), PF_E_MISMATCH, "'x.lokr_w1'", "without its w2");
    one_error(state, specs("x.lokr_w2 2,2"), PF_E_MISMATCH, "'x.lokr_w2'", "without its w1");
    one_error(state, specs("x.lokr_w1 2,2", "x.lokr_w2_a 2,2"), PF_E_MISMATCH, "'x.lokr_w2_a'",
              "without lokr_w2_b");
    one_error(state, specs("x.lora_B.bias 4"), PF_E_MISMATCH, "'x.lora_B.bias'",
              "without lora_A and lora_B");
}

static void factors_that_disagree_among_themselves_show_both_shapes(void **state)
{
    one_error(state, specs("x.lora_A.weight 3,6", "x.lora_B.weight 4,2"), PF_E_MISMATCH,
              "'x.lora_B.weight' is [4, 2]", "'x.lora_A.weight' is [3, 6]");
    one_error(state,
              specs("x.hada_w1_a 4,2", "x.hada_w1_b 2,6", "x.hada_w2_a 5,2", "x.hada_w2_b 2,6"),
              PF_E_MISMATCH, "[5, 2]", "same rows");
    one_error(state,
              specs("x.hada_w1_a 4,2", "x.hada_w1_b 2,6", "x.hada_w2_a 4,3", "x.hada_w2_b 3,6"),
              PF_E_MISMATCH, "[3, 6]", "same rank");
    one_error(state,
              specs("x.hada_w1_a 4,2", "x.hada_w1_b 2,6", "x.hada_w2_a 4,2", "x.hada_w2_b 2,7"),
              PF_E_MISMATCH, "[2, 7]", "same columns");
    one_error(state, specs("x.lokr_w1 2,2", "x.lokr_w2_a 2,1", "x.lokr_w2_b 2,3"), PF_E_MISMATCH,
              "'x.lokr_w2_a' is [2, 1]", "'x.lokr_w2_b' is [2, 3]");
    one_error(state, specs("x.lora_down.weight 18,6,3,3", "x.lora_up.weight 4,2,3,3"),
              PF_E_MISMATCH, "'x.lora_up.weight' is [4, 2, 3, 3]", "is a matrix");
    one_error(state, specs("x.lora_A.weight 2,6", "x.lora_B.weight 4,2", "x.lora_B.bias 5"),
              PF_E_MISMATCH, "'x.lora_B.bias' is [5]", "one number for each row");
    one_error(state, specs("x.lora_A.weight 12", "x.lora_B.weight 4,12"), PF_E_MISMATCH,
              "'x.lora_A.weight'", "rows and columns");
    one_error(state, specs("x.lora_A.weight 0,6", "x.lora_B.weight 4,0"), PF_E_MISMATCH,
              "'x.lora_B.weight'", "at least one element");
    one_error(state, specs("x.lora_A.weight 2,6", "x.lora_B.weight 4,2", "x.alpha 2"),
              PF_E_MISMATCH, "'x.alpha' has shape [2]", "one number");
}

static void two_families_on_one_module_are_refused(void **state)
{
    one_error(state, specs("x.lora_A.weight 2,6", "x.lora_B.weight 4,2", "x.diff 4,6"),
              PF_E_CONFLICT, "'x'", "two families");
    one_error(state, specs("x.lokr_w1 2,2", "x.lokr_w1_a 2,1", "x.lokr_w1_b 1,2", "x.lokr_w2 2,3"),
              PF_E_CONFLICT, "'x.lokr_w1'", "whole and factored");
    one_error(state, specs("x.diff 4", "x.alpha - =1"), PF_E_UNSUPPORTED, "'x.alpha'",
              "no meaning");
}

static void factors_of_a_dtype_without_numbers_are_refused(void **state)
{
    one_error(state, specs("x.lora_A.weight 2,6 I8", "x.lora_B.weight 4,2"), PF_E_UNSUPPORTED,
              "'x.lora_A.weight' is I8", "F32");
}

/* ----------------------------------------------------------------------------------------------- duplicates */

static void two_spellings_with_the_same_bytes_are_used_once(void **state)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    resolve_file(&b, state,
                 specs("blocks.0.a.lora_A.weight 2,6 F32 =1", "blocks.0.a.lora_B.weight 4,2 F32 =2",
                       "blocks.0.a.lora_A.default.weight 2,6 F32 =1",
                       "blocks.0.a.lora_up.weight 4,2 F32 =2"));
    assert_int_equal(b.r.n_deltas, 1);
    assert_int_equal(b.r.n_keys_matched, 4);
    assert_true(has_note(&b, "used once"));
    /* and across prefixes, where only the base shows that they are one */
    resolve_file(&b, state,
                 specs("transformer.blocks.0.a.lora_A.weight 2,6 F32 =1",
                       "transformer.blocks.0.a.lora_B.weight 4,2 F32 =2",
                       "lora_unet_blocks_0_a.lora_down.weight 2,6 F32 =1",
                       "lora_unet_blocks_0_a.lora_up.weight 4,2 F32 =2"));
    assert_int_equal(b.r.n_deltas, 1);
    assert_true(has_note(&b, "used once"));
    release(&b);
}

static void two_spellings_with_different_bytes_are_an_error(void **state)
{
    struct built b = {0};
    assert_int_equal(open_file(&b, state,
                               specs("x.lora_A.weight 2,6 F32 =1", "x.lora_B.weight 4,2",
                                     "x.lora_A.other.weight 2,6 F32 =3")),
                     PF_E_CONFLICT);
    assert_err(&b.err, PF_E_CONFLICT, "'x.lora_A.weight'", "'x.lora_A.other.weight'", "differ");
    open_base(&b, state, BASE);
    assert_ok(open_file(&b, state,
                        specs("transformer.blocks.0.a.lora_A.weight 2,6 F32 =1",
                              "transformer.blocks.0.a.lora_B.weight 4,2 F32 =2",
                              "lora_unet_blocks_0_a.lora_down.weight 2,6 F32 =1",
                              "lora_unet_blocks_0_a.lora_up.weight 4,2 F32 =3")),
              &b.err);
    assert_int_equal(resolve(&b), PF_E_CONFLICT);
    assert_err(&b.err, PF_E_CONFLICT, "'lora_unet_blocks_0_a' and 'transformer.blocks.0.a'",
               "rows 0 to 4");
    release(&b);
}

static void factors_of_two_adapters_make_no_pair(void **state)
{
    const char *const *const files[] = {
        specs("x.lora_A.one.weight 2,6", "x.lora_B.two.weight 4,2"),
        specs("x.hada_w1_a.one 4,2", "x.hada_w1_b.one 2,6", "x.hada_w2_a.two 4,2",
              "x.hada_w2_b.two 2,6"),
    };
    for (size_t i = 0; i < PF_COUNTOF(files); i++) {
        struct built b = {0};
        assert_int_equal(open_file(&b, state, files[i]), PF_E_CONFLICT);
        assert_err(&b.err, PF_E_CONFLICT, "'one'", "'two'", "do not belong together");
        release(&b);
    }
}

static void modules_of_several_adapters_are_remarked(void **state)
{
    struct built b = {0};
    assert_ok(open_file(&b, state,
                        specs("x.lora_A.one.weight 2,6", "x.lora_B.one.weight 4,2",
                              "y.lora_A.two.weight 2,6", "y.lora_B.two.weight 4,2",
                              "z.lora_A.weight 2,6", "z.lora_B.weight 4,2")),
              &b.err);
    assert_non_null(adapter_note_with(&b, "warning: it holds the modules of several adapters, "
                                          "'one' and 'two' among them"));
    assert_ok(open_file(&b, state,
                        specs("x.lora_A.one.weight 2,6", "x.lora_B.one.weight 4,2",
                              "z.lora_A.weight 2,6", "z.lora_B.weight 4,2")),
              &b.err);
    assert_null(adapter_note_with(&b, "several adapters"));
    release(&b);
}

static void the_same_factors_with_another_alpha_are_an_error(void **state)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    assert_ok(open_file(&b, state,
                        specs("transformer.blocks.0.a.lora_A.weight 2,6 F32 =1",
                              "transformer.blocks.0.a.lora_B.weight 4,2 F32 =2",
                              "lora_unet_blocks_0_a.lora_down.weight 2,6 F32 =1",
                              "lora_unet_blocks_0_a.lora_up.weight 4,2 F32 =2",
                              "lora_unet_blocks_0_a.alpha - =1")),
              &b.err);
    assert_int_equal(resolve(&b), PF_E_CONFLICT);
    release(&b);
}

static void duplicate_keys_in_the_header_are_an_error(void **state)
{
    one_error(state, specs("x.lora_A.weight 2,6", "x.lora_B.weight 4,2", "x.lora_A.weight 2,6"),
              PF_E_FORMAT, "x.lora_A.weight", "adapter.safetensors");
}

/* --------------------------------------------------------------------------------------------------- scales */

static double scale_with_alpha(void **state, const char *alpha)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    resolve_file(&b, state, specs(PAIR0, alpha));
    double scale = delta_on(&b, "blocks.0.a.weight")->scale;
    release(&b);
    return scale;
}

static void alphas_of_every_spelling_are_exact(void **state)
{
    assert_true(scale_with_alpha(state, "blocks.0.a.alpha - F32 =0.3") == (double)0.3f / 2);
    assert_true(scale_with_alpha(state, "blocks.0.a.alpha 1 F64 =0.3") == 0.3 / 2);
    assert_true(scale_with_alpha(state, "blocks.0.a.alpha 1 BF16 =1.5") == 0.75);
    assert_true(scale_with_alpha(state, "blocks.0.a.alpha - F16 =0.5") == 0.25);
    assert_true(scale_with_alpha(state, "blocks.0.a.alpha - I64 =7") == 3.5);
    assert_true(scale_with_alpha(state, "blocks.0.a.alpha - =-1") == -0.5);
    assert_true(scale_with_alpha(state, "blocks.0.a.scale - =0.75") == 0.75); /* absolute */
}

static void alpha_0_adds_nothing_and_says_so(void **state)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    resolve_file(&b, state, specs(PAIR0, "blocks.0.a.alpha - =0", PAIR1, "blocks.1.a.alpha - =2"));
    assert_true(delta_on(&b, "blocks.0.a.weight")->scale == 0);
    assert_true(delta_on(&b, "blocks.1.a.weight")->scale == 1);
    assert_true(has_note(&b, "adds nothing: 1 module: 'blocks.0.a'"));
    assert_false(has_note(&b, "times off")); /* zero is no outlier */
    release(&b);
}

static void an_alpha_that_is_nan_is_refused(void **state)
{
    one_error(state, specs(PAIR0, "blocks.0.a.alpha - =nan"), PF_E_NONFINITE, "'blocks.0.a.alpha'",
              "nan");
}

static void sources_that_contradict_each_other_are_an_error_that_shows_both(void **state)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    assert_ok(open_peft(&b, state, specs(PAIR0, "blocks.0.a.alpha - =4"),
                        "{\"peft_type\":\"LORA\",\"r\":2,\"lora_alpha\":2}"),
              &b.err);
    assert_non_null(adapter_note_with(&b, "alpha 4"));
    assert_int_equal(resolve(&b), PF_E_CONFLICT);
    assert_err(&b.err, PF_E_CONFLICT, "adapter_config.json says alpha 2 (scale 1)",
               "alpha tensor says alpha 4 (scale 2)", "'blocks.0.a'");
    b.opts = (struct resolve_opts){.has_alpha = true, .alpha = 8}; /* overrides them all */
    assert_ok(resolve(&b), &b.err);
    assert_true(delta_on(&b, "blocks.0.a.weight")->scale == 4);
    release(&b);
}

static void config_and_metadata_must_agree_too(void **state)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    const char *path = test_path(state, "adapter.safetensors");
    save_tensors(path, specs(PAIR0), "lora_adapter_metadata", "{\"r\":2,\"lora_alpha\":6}");
    (void)mkdir(test_path(state, "peft"), 0777);
    assert_int_equal(rename(path, test_path(state, "peft/adapter_model.safetensors")), 0);
    static const char config[] = "{\"peft_type\":\"LORA\",\"r\":2,\"lora_alpha\":2}";
    write_file(test_path(state, "peft/adapter_config.json"), config, sizeof config - 1);
    assert_ok(pf_adapter_open(test_path(state, "peft"), &b.a, &b.err), &b.err);
    assert_int_equal(resolve(&b), PF_E_CONFLICT);
    assert_err(&b.err, PF_E_CONFLICT, "adapter_config.json says alpha 2",
               "lora_adapter_metadata says alpha 6");
    release(&b);
}

static void sources_that_agree_are_one(void **state)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    assert_ok(open_peft(&b, state, specs(PAIR0, "blocks.0.a.alpha - BF16 =0.3"),
                        "{\"peft_type\":\"LORA\",\"r\":2,\"lora_alpha\":0.3}"),
              &b.err);
    assert_ok(resolve(&b), &b.err); /* the tensor was rounded to bf16 */
    assert_true(delta_on(&b, "blocks.0.a.weight")->scale == 0.15);
    release(&b);
}

/* ------------------------------------------------------------------------------------------------ NaN and Inf */

static void nan_and_infinity_in_factors_name_the_tensor(void **state)
{
    static const char *const bad[] = {
        "x.lora_A.weight 2,6 F32 =nan",     "x.lora_A.weight 2,6 BF16 =inf",
        "x.lora_A.weight 2,6 F16 =-inf",    "x.lora_A.weight 2,6 F64 =nan",
        "x.lora_A.weight 2,6 F8_E4M3 =127", "x.lora_A.weight 2,6 F8_E5M2 =124",
        "x.lora_A.weight 2,6 F64 =1e300"};
    for (size_t i = 0; i < PF_COUNTOF(bad); i++)
        one_error(state, specs(bad[i], "x.lora_B.weight 4,2"), PF_E_NONFINITE, "'x.lora_A.weight'",
                  "element 0");
    one_error(state, specs("x.lora_A.weight 2,6 F64 =1e300", "x.lora_B.weight 4,2"), PF_E_NONFINITE,
              "1e+300", "beyond f32");
    one_error(state, specs("x.diff_b 4 F32 =nan"), PF_E_NONFINITE, "'x.diff_b'", "NaN");
}

static void one_nan_among_many_is_found_at_its_place(void **state)
{
    struct built b = {0};
    const char *path = test_path(state, "adapter.safetensors");
    save_tensors(path, specs("x.lora_A.weight 3,1400000 BF16 =1", "x.lora_B.weight 4,3"), NULL,
                 NULL);
    FILE *f = fopen(path, "r+e"); /* beyond the first block of 4 MiB */
    assert_non_null(f);
    uint64_t n_header;
    assert_int_equal(fread(&n_header, 8, 1, f), 1);
    assert_int_equal(fseek(f, (long)(8 + n_header + 2 * 4100000), SEEK_SET), 0);
    assert_int_equal(fwrite("\xc1\xff", 1, 2, f), 2);
    assert_int_equal(fclose(f), 0);
    assert_int_equal(pf_adapter_open(path, &b.a, &b.err), PF_E_NONFINITE);
    assert_err(&b.err, PF_E_NONFINITE, "'x.lora_A.weight'", "NaN at element 4100000");
    release(&b);
}

/* ------------------------------------------------------------------------------------------ refused families */

static void refused_leaves_are_named_with_the_reason(void **state)
{
    static const struct {
        const char *spec, *reason;
    } rows[] = {
        {"x.lora_mid.weight 2,2,3,3", "Tucker"},
        {"x.hada_t1 2,2,3,3", "Tucker"},
        {"x.hada_t2 2,2,3,3", "Tucker"},
        {"x.lokr_t2 2,2,3,3", "Tucker"},
        {"x.set_weight 4,6", "set_weight"},
        {"x.reshape_weight 2 I64", "reshape_weight"},
        {"x.lora_A.bias 2", "HunyuanVideo"},
        {"x.oft_blocks 2,2,2", "OFT"},
        {"x.rescale 4,1", "OFT"},
        {"x.oft_R.weight 2,3", "OFT"},
        {"x.oft_R.default.weight 2,3", "OFT"},
        {"x.boft_R 2,2,2", "BOFT"},
        {"x.boft_s 4,1", "BOFT"},
        {"x.a1.weight 6,2", "GLoRA"},
        {"x.bm.weight 6,2", "GLoRA"},
        {"x.on_input - =1", "IA3"},
        {"base_model.model.x.ia3_l 1,6", "IA3"},
        {"base_model.model.x.vera_lambda_d 2", "VeRA"},
        {"base_model.vera_A 2,6", "VeRA"},
        {"x.lora_E 2,1", "AdaLoRA"},
        {"x.ranknum - =2", "AdaLoRA"},
        {"x.fourierft_spectrum.default 4", "FourierFT"},
        {"x.hra_u 4,2", "HRA"},
        {"x.modules_to_save.default.weight 4,6", "modules_to_save"},
        {"x.token_adapter.trainable_tokens_delta 2,6", "token rows"},
        {"lora_controlnet 1", "control LoRA"},
    };
    for (size_t i = 0; i < PF_COUNTOF(rows); i++) {
        char name[64];
        assert_int_equal(sscanf(rows[i].spec, "%63s", name), 1);
        one_error(state, specs(PAIR0, rows[i].spec), PF_E_UNSUPPORTED, name, rows[i].reason);
    }
}

static void a_file_without_any_factor_is_refused(void **state)
{
    one_error(state, specs("blocks.0.a.weight 4,6"), PF_E_UNSUPPORTED, "none of its 1 tensors",
              "'blocks.0.a.weight'");
    one_error(state, specs(NULL), PF_E_UNSUPPORTED, "none of its 0 tensors", "known family");
}

static void files_of_other_kinds_are_refused_by_name(void **state)
{
    static const char *const names[] = {"a.bin", "a.pt", "a.pth", "a.ckpt", "a.pkl", "A.CKPT"};
    struct built b = {0};
    for (size_t i = 0; i < PF_COUNTOF(names); i++) {
        write_file(test_path(state, names[i]), "x", 1);
        assert_int_equal(pf_adapter_open(test_path(state, names[i]), &b.a, &b.err),
                         PF_E_UNSUPPORTED);
        assert_err(&b.err, PF_E_UNSUPPORTED, names[i], "pickle");
    }
    write_file(test_path(state, "a.gguf"), "x", 1);
    assert_int_equal(pf_adapter_open(test_path(state, "a.gguf"), &b.a, &b.err), PF_E_UNSUPPORTED);
    assert_err(&b.err, PF_E_UNSUPPORTED, "a.gguf", "GGUF");
    assert_int_equal(pf_adapter_open(test_path(state, "absent"), &b.a, &b.err), PF_E_NOTFOUND);
    assert_err(&b.err, PF_E_NOTFOUND, "absent", "does not exist");
    release(&b);
}

/* One adapter, one scale, whether its directory or its file is named; a config that is not the file's own is not used silently. */
static void a_file_named_by_itself_keeps_the_config_that_its_directory_would_give_it(void **state)
{
    static const char *const own[] = {"d/adapter_model.safetensors",
                                      "d/pytorch_lora_weights.safetensors"};
    static const char config[] = "{\"r\":2,\"lora_alpha\":8}";
    struct built b = {0};
    assert_int_equal(mkdir(test_path(state, "d"), 0777), 0);
    write_file(test_path(state, "d/adapter_config.json"), config, strlen(config));
    for (size_t i = 0; i < PF_COUNTOF(own); i++) {
        struct pf_adapter_module m;
        save_tensors(test_path(state, own[i]), specs(PAIR0), NULL, NULL);
        assert_ok(pf_adapter_open(test_path(state, own[i]), &b.a, &b.err), &b.err);
        pf_adapter_module(b.a, 0, &m);
        assert_true(m.scale == 4);
        assert_null(adapter_note_with(&b, "is not read"));
        pf_adapter_close(b.a);
    }
    save_tensors(test_path(state, "d/style.safetensors"), specs(PAIR0), NULL, NULL);
    assert_ok(pf_adapter_open(test_path(state, "d/style.safetensors"), &b.a, &b.err), &b.err);
    assert_non_null(adapter_note_with(&b, "adapter_config.json"));
    assert_non_null(adapter_note_with(&b, "is not read"));
    release(&b);
}

/* A hub cache whose download was cut short: without its config the adapter would have another scale. */
static void a_config_whose_download_was_not_finished_is_an_error(void **state)
{
    struct built b = {0};
    const char *link = test_path(state, "d/adapter_config.json");
    assert_int_equal(mkdir(test_path(state, "d"), 0777), 0);
    save_tensors(test_path(state, "d/adapter_model.safetensors"), specs(PAIR0), NULL, NULL);
    assert_int_equal(symlink("../blobs/absent", link), 0);
    assert_int_equal(pf_adapter_open(test_path(state, "d"), &b.a, &b.err), PF_E_NOTFOUND);
    assert_err(&b.err, PF_E_NOTFOUND, "adapter_config.json", "download was not finished");
    assert_int_equal(pf_adapter_open(test_path(state, "d/adapter_model.safetensors"), &b.a, &b.err),
                     PF_E_NOTFOUND);
    release(&b);
}

static void what_cannot_be_looked_at_is_said_with_the_reason(void **state)
{
    struct built b = {0};
    assert_int_equal(mkdir(test_path(state, "d"), 0777), 0);
    assert_int_equal(
        symlink("adapter_model.safetensors", test_path(state, "d/adapter_model.safetensors")), 0);
    assert_int_equal(symlink("pytorch_lora_weights.safetensors",
                             test_path(state, "d/pytorch_lora_weights.safetensors")),
                     0);
    assert_int_equal(pf_adapter_open(test_path(state, "d"), &b.a, &b.err), PF_E_IO);
    assert_err(&b.err, PF_E_IO, "d/adapter_model.safetensors'", "Too many levels");
    assert_int_equal(pf_adapter_open(test_path(state, "d/adapter_model.safetensors"), &b.a, &b.err),
                     PF_E_IO);
    assert_err(&b.err, PF_E_IO, "d/adapter_model.safetensors'", "Too many levels");
    assert_int_equal(mkfifo(test_path(state, "pipe"), 0666), 0);
    assert_int_equal(pf_adapter_open(test_path(state, "pipe"), &b.a, &b.err), PF_E_INVALID);
    assert_err(&b.err, PF_E_INVALID, "pipe'", "neither a file nor a directory");
    release(&b);
}

static void directories_hold_one_adapter(void **state)
{
    struct built b = {0};
    const char *dir = test_path(state, "d");
    assert_int_equal(mkdir(dir, 0777), 0);
    assert_int_equal(pf_adapter_open(dir, &b.a, &b.err), PF_E_NOTFOUND);
    assert_err(&b.err, PF_E_NOTFOUND, "adapter_model.safetensors",
               "pytorch_lora_weights.safetensors");
    assert_null(strstr(b.err.msg, "name the file"));
    write_file(test_path(state, "d/notes.txt"), "x", 1);
    write_file(test_path(state, "d/style.safetensors"), "x", 1);
    assert_int_equal(pf_adapter_open(dir, &b.a, &b.err), PF_E_NOTFOUND);
    assert_err(&b.err, PF_E_NOTFOUND, "name the file that is meant", "'style.safetensors'");
    write_file(test_path(state, "d/adapter_model.bin"), "x", 1);
    assert_int_equal(pf_adapter_open(dir, &b.a, &b.err), PF_E_UNSUPPORTED);
    assert_err(&b.err, PF_E_UNSUPPORTED, "adapter_model.bin", "pickle");
    save_tensors(test_path(state, "d/pytorch_lora_weights.safetensors"), specs(PAIR0), NULL, NULL);
    assert_ok(pf_adapter_open(dir, &b.a, &b.err), &b.err);
    pf_adapter_close(b.a);
    b.a = NULL;
    save_tensors(test_path(state, "d/adapter_model.safetensors"), specs(PAIR0), NULL, NULL);
    assert_int_equal(pf_adapter_open(dir, &b.a, &b.err), PF_E_AMBIGUOUS);
    assert_err(&b.err, PF_E_AMBIGUOUS, "name one");
    release(&b);
}

/* --------------------------------------------------------------------------------------------------- others */

static void unaligned_factors_are_read_where_they_lie(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("n.weight 1", "n.bias 1", "x.weight 4,6"));
    resolve_file(&b, state,
                 specs("n.diff_b 1 F8_E4M3 =56", "x.lora_B.weight 4,2", "x.lora_A.weight 2,6 F16",
                       "x.alpha - =3"));
    const struct delta *d = delta_on(&b, "x.weight");
    assert_true(factor_at(&d->f[0], 3, 1) == cell("x.lora_B.weight", 2, 3, 1));
    assert_true(factor_at(&d->f[1], 1, 5) == cell("x.lora_A.weight", 6, 1, 5));
    assert_true(d->scale == 1.5);
    assert_true(delta_at(delta_on(&b, "n.bias"), 0, 0) == 1);
    release(&b);
}

static void the_digest_follows_bytes_and_arithmetic_alone(void **state)
{
    struct built b = {0};
    static const char *const configs[] = {
        "{\"peft_type\":\"LORA\",\"r\":2,\"lora_alpha\":2}",
        "{\"peft_type\":\"LORA\",\"r\":2,\"lora_alpha\":2,\"lora_dropout\":0.5,\"revision\":\"x\"}",
        "{\"peft_type\":\"LORA\",\"r\":2,\"lora_alpha\":4}",
        "{\"peft_type\":\"LORA\",\"r\":2,\"lora_alpha\":2,\"use_rslora\":true}",
        "{\"peft_type\":\"LORA\",\"r\":2,\"lora_alpha\":2,\"fan_in_fan_out\":true}",
        "{\"peft_type\":\"LORA\",\"r\":2,\"lora_alpha\":2,\"alpha_pattern\":{\"a\":3}}",
    };
    struct digest d[PF_COUNTOF(configs)];
    for (size_t i = 0; i < PF_COUNTOF(configs); i++) {
        assert_ok(open_peft(&b, state, specs(PAIR0), configs[i]), &b.err);
        d[i] = adapter_digest(b.a);
    }
    assert_true(digest_eq(d[0], d[1]));
    for (size_t i = 2; i < PF_COUNTOF(configs); i++)
        for (size_t k = 0; k < i; k++)
            assert_true(digest_eq(d[i], d[k]) == false);
    assert_ok(open_peft(&b, state, specs(PAIR1), configs[0]), &b.err);
    assert_false(digest_eq(adapter_digest(b.a), d[0]));
    struct pf_adapter_info info;
    pf_adapter_info(b.a, &info);
    assert_int_equal(strlen(info.digest), 32);
    release(&b);
}

static void metadata_is_shown_in_file_order(void **state)
{
    struct built b = {0};
    assert_ok(
        open_file_meta(&b, state, specs(PAIR0), "modelspec.trigger_phrase", "a \"night\" sky"),
        &b.err);
    const char *key, *value;
    assert_true(pf_adapter_metadata(b.a, 0, &key, &value));
    assert_string_equal(key, "modelspec.trigger_phrase");
    assert_string_equal(value, "a \"night\" sky");
    assert_false(pf_adapter_metadata(b.a, 1, &key, &value));
    release(&b);
}

static void a_path_is_needed(void **state)
{
    struct pf_adapter *a = NULL;
    pf_error err = {0};
    (void)state;
    assert_int_equal(pf_adapter_open(NULL, &a, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "no path given");
    assert_int_equal(pf_adapter_open("", &a, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "no path given");
    assert_null(a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_path_is_needed),
        in_dir(unmatched_keys_list_the_first_20_the_count_and_nearest_names),
        in_dir(nothing_matched_is_an_error_even_when_unmatched_is_allowed),
        in_dir(nothing_but_a_bias_that_the_base_lacks_is_nothing_matched),
        in_dir(a_diff_b_without_a_base_bias_is_an_unmatched_key),
        in_dir(whole_tensors_of_the_base_are_refused_by_name),
        in_dir(an_alpha_without_factors_is_never_left_out),
        in_dir(incomplete_factor_sets_are_refused_naming_what_is_missing),
        in_dir(factors_that_disagree_among_themselves_show_both_shapes),
        in_dir(two_families_on_one_module_are_refused),
        in_dir(factors_of_a_dtype_without_numbers_are_refused),
        in_dir(two_spellings_with_the_same_bytes_are_used_once),
        in_dir(two_spellings_with_different_bytes_are_an_error),
        in_dir(factors_of_two_adapters_make_no_pair),
        in_dir(modules_of_several_adapters_are_remarked),
        in_dir(the_same_factors_with_another_alpha_are_an_error),
        in_dir(duplicate_keys_in_the_header_are_an_error),
        in_dir(alphas_of_every_spelling_are_exact),
        in_dir(alpha_0_adds_nothing_and_says_so),
        in_dir(an_alpha_that_is_nan_is_refused),
        in_dir(sources_that_contradict_each_other_are_an_error_that_shows_both),
        in_dir(config_and_metadata_must_agree_too),
        in_dir(sources_that_agree_are_one),
        in_dir(nan_and_infinity_in_factors_name_the_tensor),
        in_dir(one_nan_among_many_is_found_at_its_place),
        in_dir(refused_leaves_are_named_with_the_reason),
        in_dir(a_file_without_any_factor_is_refused),
        in_dir(files_of_other_kinds_are_refused_by_name),
        in_dir(a_file_named_by_itself_keeps_the_config_that_its_directory_would_give_it),
        in_dir(a_config_whose_download_was_not_finished_is_an_error),
        in_dir(what_cannot_be_looked_at_is_said_with_the_reason),
        in_dir(directories_hold_one_adapter),
        in_dir(unaligned_factors_are_read_where_they_lie),
        in_dir(the_digest_follows_bytes_and_arithmetic_alone),
        in_dir(metadata_is_shown_in_file_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
