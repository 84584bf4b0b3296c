/*
 * Configs: PEFT's fields, its pattern semantics, the metadata of diffusers, and every field that is refused by name.
 */
#include "test_adapter_build.h"

#include "adapter/config.h"

/* ----------------------------------------------------------------------------------------------- patterns */

/* 1: matches, 0: does not, -1: refused */
static int matches(const char *pattern, const char *path)
{
    struct arena arena;
    struct ad_pattern p;
    pf_error err = {0};
    arena_init(&arena);
    int result = -1;
    if (pattern_compile(&arena, str_of(pattern), 1, &p, &err) == PF_OK) {
        result = pattern_matches(&p, str_of(path));
        pattern_release(&p);
    } else {
        assert_err(&err, PF_E_UNSUPPORTED, "pattern '");
    }
    arena_release(&arena);
    return result;
}

static void plain_patterns_match_whole_last_segments(void **state)
{
    (void)state;
    assert_int_equal(matches("to_q", "a.b.to_q"), 1);
    assert_int_equal(matches("to_q", "to_q"), 1);
    assert_int_equal(matches("to_q", "a.into_q"), 0);
    assert_int_equal(matches("to_q", "a.to_q.b"), 0);
    assert_int_equal(matches("attn.to_q", "a.attn.to_q"), 1);
    /* A dot is any character, as in PEFT */
    assert_int_equal(matches("attn.to_q", "a.attnxto_q"), 1);
    assert_int_equal(matches("^a.to_q", "a.to_q"), 1);
    assert_int_equal(matches("^a.to_q", "b.a.to_q"), 0);
    assert_int_equal(matches("^to_q", "a.to_q"), 0);
}

static void regular_expressions_mean_what_they_mean_in_python(void **state)
{
    (void)state;
    assert_int_equal(matches("blocks\\.\\d+\\.to_q", "x.blocks.12.to_q"), 1);
    assert_int_equal(matches("blocks\\.\\d+\\.to_q", "x.blocks.x.to_q"), 0);
    assert_int_equal(matches("to_(?:q|k)", "x.to_k"), 1);
    assert_int_equal(matches("to_(q|k)", "x.to_v"), 0);
    assert_int_equal(matches(".*\\.to_q", "x.y.to_q"), 1);
    assert_int_equal(matches("blocks\\.[0-3]\\..*to_[qk]", "blocks.2.attn.to_k"), 1);
    assert_int_equal(matches("blocks\\.[0-3]\\..*to_[qk]", "blocks.7.attn.to_k"), 0);
    assert_int_equal(matches("blocks\\.[^0]\\.a", "blocks.0.a"), 0);
    assert_int_equal(matches("b\\w+s\\.a+?", "blocks.aa"), 1); /* lazy matches the same strings */
    assert_int_equal(matches("x{2,3}", "xxx"), 1);
    assert_int_equal(matches("x{2,3}", "x"), 0);
    assert_int_equal(matches("^blocks\\.0$", "blocks.0"), 1);
    assert_int_equal(matches("a\\.b", "axb"), 0);
}

static void what_has_no_exact_counterpart_is_refused_naming_the_pattern(void **state)
{
    (void)state;
    static const char *const refused[] = {
        "a(?!b)", "(?<=a)b",    "(?i)a",       "(a)\\1", "a*+",      "[\\d]x", "\\Za",
        "a{",     "a{2}{3}{4}", "(a{2,}){2}",  "x{999}", "(?P<n>a)", "*a",     "",
        "a\\",    "[a",         "(a",          "a)",     "x{,3}",    "+",      "a}",
        "\\x41",  "(*a)",       "[[:alpha:]]", "a{3,2}", "\\Aa",     "()"};
    for (size_t i = 0; i < PF_COUNTOF(refused); i++) {
        int m = matches(refused[i], "a");
        if (m >= 0)
            print_error("'%s' was accepted\n", refused[i]);
        assert_int_equal(m, -1);
    }
}

/* --------------------------------------------------------------------------------------------------- scales */

#define TWO                                                                                        \
    specs("base_model.model.blocks.0.a.lora_A.weight 4,6",                                         \
          "base_model.model.blocks.0.a.lora_B.weight 4,4",                                         \
          "base_model.model.blocks.1.a.lora_A.weight 4,6",                                         \
          "base_model.model.blocks.1.a.lora_B.weight 4,4")
#define BASE                                                                                       \
    specs("blocks.0.a.weight 4,6", "blocks.0.a.bias 4", "blocks.1.a.weight 4,6",                   \
          "blocks.1.a.bias 4")

static void check_scales(void **state, const char *config, double scale0, double scale1)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    assert_ok(open_peft(&b, state, TWO, config), &b.err);
    assert_ok(resolve(&b), &b.err);
    assert_true(delta_on(&b, "blocks.0.a.weight")->scale == scale0);
    assert_true(delta_on(&b, "blocks.1.a.weight")->scale == scale1);
    assert_false(has_note(&b, "assumed"));
    release(&b);
}

static void the_config_gives_the_scale(void **state)
{
    check_scales(state, "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":6}", 1.5, 1.5);
    check_scales(state, "{\"r\":4,\"lora_alpha\":6}", 1.5, 1.5);
    /* PEFT's default lora_alpha is 8 */
    check_scales(state, "{\"peft_type\":\"LORA\",\"r\":4}", 2, 2);
    check_scales(state, "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":6,\"use_rslora\":true}", 3,
                 3);
    check_scales(
        state,
        "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":4,\"alpha_pattern\":{\"blocks.1.a\":2}}", 1,
        0.5);
    check_scales(state,
                 "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":4,\"alpha_pattern\":{\"^blocks.1."
                 "a\":2,\"a\":8}}",
                 2, 0.5);
    check_scales(state,
                 "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":4,\"alpha_pattern\":{\"a\":8,\"^"
                 "blocks.1.a\":2}}",
                 2, 2); /* the first wins */
    check_scales(state,
                 "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":4,\"alpha_pattern\":{\"blocks\\\\."
                 "[1-9]\\\\.a\":2}}",
                 1, 0.5);
    check_scales(state,
                 "{\"peft_type\":\"LORA\",\"r\":16,\"lora_alpha\":16,\"rank_pattern\":{\"a\":4}}",
                 4, 4);
    check_scales(state,
                 "{\"peft_type\":\"LORA\",\"r\":16,\"lora_alpha\":16,\"rank_pattern\":{\"a\":4},"
                 "\"use_rslora\":true}",
                 8, 8);
}

static void an_explicit_alpha_keeps_the_root_of_rslora(void **state)
{
    struct built b = {0};
    open_base(&b, state, BASE);
    assert_ok(open_peft(&b, state, TWO,
                        "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":6,\"use_rslora\":true}"),
              &b.err);
    b.opts = (struct resolve_opts){.has_alpha = true, .alpha = 5};
    assert_ok(resolve(&b), &b.err);
    assert_true(delta_on(&b, "blocks.0.a.weight")->scale == 2.5);
    release(&b);
}

static void check_metadata(void **state, const char *prefix, const char *metadata, double scale)
{
    struct built b = {0};
    char d[96], u[96];
    snprintf(d, sizeof d, "%sblocks.0.a.lora_A.weight 4,6", prefix);
    snprintf(u, sizeof u, "%sblocks.0.a.lora_B.weight 4,4", prefix);
    open_base(&b, state, BASE);
    assert_ok(open_file_meta(&b, state, specs(d, u), "lora_adapter_metadata", metadata), &b.err);
    assert_ok(resolve(&b), &b.err);
    assert_true(delta_on(&b, "blocks.0.a.weight")->scale == scale);
    release(&b);
}

/* PEFT matches the path inside the model that it wrapped: `transformer.` belongs to it here, `base_model.model.` never does. */
static void patterns_see_the_path_that_peft_saw(void **state)
{
    static const struct {
        const char *pattern;
        double scale;
    } cases[] = {{"^transformer.h.0.a", 0.5},
                 {"h.0.a", 0.5},
                 {"a", 0.5},
                 {"^h.0.a", 1},
                 {"^base_model.model.transformer.h.0.a", 1},
                 {"model.transformer.h.0.a", 1},
                 {"^base.*", 1}};
    struct built b = {0};
    for (size_t i = 0; i < PF_COUNTOF(cases); i++) {
        char config[256];
        struct pf_adapter_module m;
        snprintf(config, sizeof config, "{\"r\":4,\"lora_alpha\":4,\"alpha_pattern\":{\"%s\":2}}",
                 cases[i].pattern);
        assert_ok(open_peft(&b, state,
                            specs("base_model.model.transformer.h.0.a.lora_A.weight 4,6",
                                  "base_model.model.transformer.h.0.a.lora_B.weight 4,4"),
                            config),
                  &b.err);
        pf_adapter_module(b.a, 0, &m);
        if (m.scale != cases[i].scale)
            print_error("pattern '%s'\n", cases[i].pattern);
        assert_true(m.scale == cases[i].scale);
    }
    release(&b);
    check_metadata(state, "transformer.",
                   "{\"transformer.r\":4,\"transformer.lora_alpha\":4,\"transformer.alpha_"
                   "pattern\":{\"^transformer.blocks.0.a\":2}}",
                   1);
}

static void lora_adapter_metadata_is_read_plain_and_prefixed(void **state)
{
    check_metadata(state, "transformer.", "{\"transformer.r\":4,\"transformer.lora_alpha\":6}",
                   1.5);
    check_metadata(state, "transformer.", "{\"r\":4,\"lora_alpha\":6}", 1.5);
    check_metadata(state, "", "{\"r\":4,\"lora_alpha\":6,\"use_rslora\":true}", 3);
    check_metadata(state, "transformer.",
                   "{\"transformer.r\":4,\"transformer.lora_alpha\":4,\"transformer.alpha_"
                   "pattern\":{\"^blocks.0.a\":2}}",
                   0.5);
    check_metadata(state, "diffusion_model.", "{\"transformer.r\":4,\"transformer.lora_alpha\":6}",
                   1.5); /* keys were renamed, the metadata stayed */
    /* Speaks of somebody else */
    check_metadata(state, "unet.", "{\"text_encoder.r\":4,\"text_encoder.lora_alpha\":6}", 1);
}

static void metadata_of_another_layout_is_refused_rather_than_read_as_defaults(void **state)
{
    struct built b = {0};
    static const char *const documents[] = {"{\"transformer\":{\"r\":8,\"lora_alpha\":16}}",
                                            "{\"transformer.lora_alpha\":16}", "[]", "{"};
    for (size_t i = 0; i < PF_COUNTOF(documents); i++) {
        assert_int_equal(open_file_meta(&b, state,
                                        specs("x.lora_A.weight 8,6", "x.lora_B.weight 4,8"),
                                        "lora_adapter_metadata", documents[i]),
                         PF_E_FORMAT);
        assert_err(&b.err, PF_E_FORMAT, "lora_adapter_metadata");
    }
    release(&b);
}

static void a_component_without_metadata_is_silent(void **state)
{
    struct built b = {0};
    assert_ok(open_file_meta(&b, state,
                             specs("unet.x.lora_A.weight 4,6", "unet.x.lora_B.weight 4,4",
                                   "text_encoder.x.lora_A.weight 2,6",
                                   "text_encoder.x.lora_B.weight 4,2"),
                             "lora_adapter_metadata", "{\"unet.r\":4,\"unet.lora_alpha\":6}"),
              &b.err);
    assert_non_null(adapter_note_with(&b, "1 of 2 modules"));
    assert_null(adapter_note_with(&b, "speaks of"));
    release(&b);
}

static void metadata_of_a_component_that_the_file_lacks_is_remarked(void **state)
{
    struct built b = {0};
    assert_ok(
        open_file_meta(&b, state,
                       specs("transformer.x.lora_A.weight 4,6", "transformer.x.lora_B.weight 4,4"),
                       "lora_adapter_metadata", "{\"unet.r\":4,\"unet.lora_alpha\":6}"),
        &b.err);
    assert_non_null(
        adapter_note_with(&b, "warning: lora_adapter_metadata speaks of 'unet', and the file has"));
    assert_non_null(adapter_note_with(&b, "scale 1 is assumed"));
    release(&b);
}

static void missing_targets_are_remarked(void **state)
{
    struct built b = {0};
    assert_ok(open_peft(&b, state, TWO,
                        "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":4,\"target_modules\":["
                        "\"a\",\"to_k\"]}"),
              &b.err);
    assert_non_null(adapter_note_with(&b, "'to_k'"));
    assert_null(adapter_note_with(&b, "targets 'a'"));
    release(&b);
}

/* ------------------------------------------------------------------------------------------------- refusals */

static void check_refused(void **state, const char *config, int code, const char *x, const char *y)
{
    struct built b = {0};
    assert_int_equal(open_peft(&b, state, TWO, config), code);
    assert_err(&b.err, code, "adapter_config.json", x, y);
    release(&b);
}

static void fields_that_change_the_meaning_are_refused_by_name(void **state)
{
#define WITH(field) "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":4," field "}"
    check_refused(state, WITH("\"use_dora\":true"), PF_E_UNSUPPORTED, "'use_dora'", "DoRA");
    check_refused(state, WITH("\"layer_replication\":[[0,4],[2,6]]"), PF_E_UNSUPPORTED,
                  "'layer_replication'", "renumbered");
    check_refused(state, WITH("\"target_parameters\":[\"w\"]"), PF_E_UNSUPPORTED,
                  "'target_parameters'", "MoE");
    check_refused(state, WITH("\"trainable_token_indices\":[1,2]"), PF_E_UNSUPPORTED,
                  "'trainable_token_indices'", "rows");
    check_refused(state, WITH("\"modules_to_save\":[\"head\"]"), PF_E_UNSUPPORTED,
                  "'modules_to_save'", "replacement");
    check_refused(state, WITH("\"bias\":\"all\""), PF_E_UNSUPPORTED, "'bias' is 'all'", "replace");
    check_refused(state, WITH("\"bias\":\"lora_only\""), PF_E_UNSUPPORTED, "'bias' is 'lora_only'",
                  "replace");
    check_refused(state, WITH("\"use_qalora\":true"), PF_E_UNSUPPORTED, "'use_qalora'", "QALoRA");
    check_refused(state, WITH("\"alora_invocation_tokens\":[1]"), PF_E_UNSUPPORTED,
                  "'alora_invocation_tokens'", "tokens");
    check_refused(state, WITH("\"rank_pattern\":{\"a(?!b)\":4}"), PF_E_UNSUPPORTED,
                  "'rank_pattern'", "pattern 'a(?!b)'");
    static const char *const inits[] = {"pissa", "pissa_niter_16", "olora", "corda",
                                        "loftq", "lora_ga",        "mica"};
    for (size_t i = 0; i < PF_COUNTOF(inits); i++) {
        char config[256];
        snprintf(config, sizeof config, WITH("\"init_lora_weights\":\"%s\""), inits[i]);
        check_refused(state, config, PF_E_UNSUPPORTED, inits[i], "training changed the base");
    }
    check_refused(state, WITH("\"init_lora_weights\":\"unheard_of\""), PF_E_UNSUPPORTED,
                  "unheard_of", "not known");
#undef WITH
    check_refused(state, "{\"peft_type\":\"VERA\",\"r\":4}", PF_E_UNSUPPORTED, "'VERA'",
                  "LORA, LOHA and LOKR");
    check_refused(state, "{\"peft_type\":\"ADALORA\",\"r\":4}", PF_E_UNSUPPORTED, "'ADALORA'",
                  "not supported");
    check_refused(state, "{\"peft_type\":\"IA3\"}", PF_E_UNSUPPORTED, "'IA3'", "not supported");
}

static void fields_that_ask_for_nothing_are_fine(void **state)
{
    check_scales(
        state,
        "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":4,\"use_dora\":false,\"layer_replication\":"
        "null,\"target_parameters\":[],\"modules_to_save\":null,\"bias\":\"none\","
        "\"init_lora_weights\":true,\"rank_pattern\":{},\"alpha_pattern\":null,\"trainable_token_"
        "indices\":null,\"loftq_config\":{},\"target_modules\":\"all-linear\"}",
        1, 1);
    check_scales(state, "{\"r\":4,\"lora_alpha\":4,\"init_lora_weights\":\"gaussian\"}", 1, 1);
    check_scales(state, "{\"r\":4,\"lora_alpha\":4,\"init_lora_weights\":\"Gaussian\"}", 1, 1);
}

static void broken_configs_are_format_errors(void **state)
{
    check_refused(state, "{", PF_E_FORMAT, "adapter_config.json", "");
    check_refused(state, "[]", PF_E_FORMAT, "not a JSON object", "");
    check_refused(state, "{\"r\":0}", PF_E_FORMAT, "'r'", "whole number");
    check_refused(state, "{\"r\":2.5}", PF_E_FORMAT, "'r'", "whole number");
    check_refused(state, "{\"r\":\"4\"}", PF_E_FORMAT, "'r'", "whole number");
    check_refused(state, "{\"r\":4,\"lora_alpha\":\"x\"}", PF_E_FORMAT, "'lora_alpha'",
                  "finite number");
    check_refused(state, "{\"r\":4,\"use_rslora\":\"yes\"}", PF_E_FORMAT, "'use_rslora'",
                  "true nor false");
    check_refused(state, "{\"r\":4,\"rank_pattern\":[4]}", PF_E_FORMAT, "'rank_pattern'", "object");
    check_refused(state, "{\"r\":4,\"bias\":true}", PF_E_FORMAT, "'bias'", "no string");
    check_refused(state, "{\"r\":4,\"init_lora_weights\":[\"pissa\"]}", PF_E_FORMAT,
                  "'init_lora_weights'", "neither");
    check_refused(state, "{\"r\":4,\"rank_pattern\":{\"a\":0}}", PF_E_FORMAT, "'rank_pattern'",
                  "whole number");
}

static void a_config_of_another_family_contradicts_the_factors(void **state)
{
    struct built b = {0};
    assert_int_equal(open_peft(&b, state, TWO, "{\"peft_type\":\"LOKR\",\"r\":4,\"alpha\":4}"),
                     PF_E_CONFLICT);
    assert_err(&b.err, PF_E_CONFLICT, "says peft_type LOKR", "are LORA");
    release(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(plain_patterns_match_whole_last_segments),
        in_dir(regular_expressions_mean_what_they_mean_in_python),
        in_dir(what_has_no_exact_counterpart_is_refused_naming_the_pattern),
        in_dir(the_config_gives_the_scale),
        in_dir(an_explicit_alpha_keeps_the_root_of_rslora),
        in_dir(patterns_see_the_path_that_peft_saw),
        in_dir(lora_adapter_metadata_is_read_plain_and_prefixed),
        in_dir(metadata_of_another_layout_is_refused_rather_than_read_as_defaults),
        in_dir(a_component_without_metadata_is_silent),
        in_dir(metadata_of_a_component_that_the_file_lacks_is_remarked),
        in_dir(missing_targets_are_remarked),
        in_dir(fields_that_change_the_meaning_are_refused_by_name),
        in_dir(fields_that_ask_for_nothing_are_fine),
        in_dir(broken_configs_are_format_errors),
        in_dir(a_config_of_another_family_contradicts_the_factors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
