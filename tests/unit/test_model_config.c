/*
 * Opening models: what the bundled one says of itself, sizes from config.json, and every refusal, by name.
 */
#include "model_testing.h"

#include "base/json.h"

static const struct made_up tiny = {.n_blocks = 1,
                                    .n_heads = 2,
                                    .head_dim = 6,
                                    .channels = 1,
                                    .size = 4,
                                    .patch = 2,
                                    .n_classes = 3,
                                    .has_attn_bias = true,
                                    .norm_eps = 1e-5};

static void bundled_model_says_what_it_is(void **state)
{
    struct drawn d;
    struct pf_model_info info;
    uint32_t i_class = 0;
    pf_error err = {0};
    (void)state;
    drawn_open(&d, BUNDLED, 1);
    pf_model_info(d.model, &info);
    assert_int_equal(info.width, 32);
    assert_int_equal(info.height, 32);
    assert_int_equal(info.channels, 3);
    assert_int_equal(info.n_classes, 64);
    assert_int_equal(info.n_blocks, 8);
    assert_int_equal(info.n_heads, 4);
    assert_int_equal(info.head_dim, 32);
    assert_int_equal(info.patch, 4);
    assert_int_equal(info.default_steps, 16);
    assert_true(info.default_guidance == 2.0);
    assert_string_equal(pf_model_class_name(d.model, 25), "cat");
    assert_null(pf_model_class_name(d.model, 64));
    assert_ok(pf_model_find_class(d.model, "a cat, please", &i_class, &err), &err);
    assert_int_equal(i_class, 25);
    assert_int_equal(pf_model_find_class(d.model, "apple", &i_class, &err), PF_E_NOTFOUND);
    assert_err(&err, PF_E_NOTFOUND, "'red_apple'", "'green_apple'");
    drawn_close(&d);
}

static int read_config(const char *text, struct dit_config *c, pf_error *err)
{
    struct json *config = NULL;
    assert_ok(json_parse(text, strlen(text), "config.json", &config, err), err);
    int rc = dit_config_read(config, "config.json", c, err);
    json_free(config);
    return rc;
}

#define CLASS "\"_class_name\":\"DiTTransformer2DModel\""

static void absent_keys_have_the_defaults_of_diffusers(void **state)
{
    struct dit_config c;
    pf_error err = {0};
    (void)state;
    assert_ok(read_config("{" CLASS "}", &c, &err), &err);
    assert_int_equal(c.n_blocks, 28);
    assert_int_equal(c.dim, 16 * 72);
    assert_int_equal(c.n_inner, 4 * 16 * 72);
    assert_int_equal(c.channels, 4);
    assert_int_equal(c.n_tokens, 256);
    assert_int_equal(c.n_classes, 1000);
    assert_true(c.norm_eps == 1e-5f);
    assert_true(c.has_attn_bias);
}

static void refuses_by_name_what_it_does_not_compute(void **state)
{
    static const struct {
        const char *text;
        int code;
        const char *part;
    } rows[] = {
        {"{\"_class_name\":\"FluxTransformer2DModel\"}", PF_E_UNSUPPORTED,
         "'FluxTransformer2DModel'"},
        {"{}", PF_E_UNSUPPORTED, "_class_name"},
        {"{" CLASS ",\"out_channels\":8}", PF_E_UNSUPPORTED, "learned sigma"},
        {"{" CLASS ",\"activation_fn\":\"geglu\"}", PF_E_UNSUPPORTED, "activation_fn 'geglu'"},
        {"{" CLASS ",\"norm_type\":\"layer_norm\"}", PF_E_UNSUPPORTED, "norm_type 'layer_norm'"},
        {"{" CLASS ",\"norm_elementwise_affine\":true}", PF_E_UNSUPPORTED,
         "norm_elementwise_affine"},
        {"{" CLASS ",\"sample_size\":33}", PF_E_UNSUPPORTED, "not a multiple of patch_size 2"},
        {"{" CLASS ",\"attention_head_dim\":1,\"num_attention_heads\":6}", PF_E_UNSUPPORTED,
         "width 6"},
        {"{" CLASS ",\"sample_size\":6,\"in_channels\":3}", PF_E_UNSUPPORTED,
         "3 x 6 x 6 = 108 values"},
        {"{" CLASS ",\"num_layers\":0}", PF_E_RANGE, "'num_layers' is 0"},
        {"{" CLASS ",\"num_layers\":-3}", PF_E_RANGE, "'num_layers' is -3"},
        {"{" CLASS ",\"sample_size\":99999999999}", PF_E_RANGE, "'sample_size'"},
        {"{" CLASS ",\"num_attention_heads\":1024,\"attention_head_dim\":1024}", PF_E_RANGE,
         "width 1048576"},
        {"{" CLASS ",\"sample_size\":4096,\"patch_size\":1}", PF_E_RANGE, "16777216 tokens"},
        {"{" CLASS ",\"norm_eps\":0}", PF_E_RANGE, "norm_eps"},
        {"{" CLASS ",\"patch_size\":\"2\"}", PF_E_FORMAT, "'patch_size' is not a whole number"},
        {"{" CLASS ",\"attention_bias\":1}", PF_E_FORMAT, "'attention_bias'"},
        {"{" CLASS ",\"activation_fn\":7}", PF_E_FORMAT, "'activation_fn'"},
    };
    (void)state;
    for (size_t i = 0; i < PF_COUNTOF(rows); i++) {
        struct dit_config c;
        pf_error err = {0};
        assert_int_equal(read_config(rows[i].text, &c, &err), rows[i].code);
        assert_err(&err, rows[i].code, rows[i].part, "config.json");
    }
}

static void refuses_other_schedulers(void **state)
{
    static const struct {
        const char *text;
        const char *part;
    } rows[] = {
        {"{\"_class_name\":\"DDIMScheduler\"}", "'DDIMScheduler'"},
        {"{}", "scheduler class ''"},
        {"{\"_class_name\":\"FlowMatchEulerDiscreteScheduler\",\"shift\":3.0}", "shift 3"},
        {"{\"_class_name\":\"FlowMatchEulerDiscreteScheduler\",\"use_dynamic_shifting\":true}",
         "use_dynamic_shifting"},
    };
    struct schedule s;
    pf_error err = {0};
    (void)state;
    for (size_t i = 0; i < PF_COUNTOF(rows); i++) {
        struct json *config = NULL;
        assert_ok(json_parse(rows[i].text, strlen(rows[i].text), "s.json", &config, &err), &err);
        assert_int_equal(schedule_read(config, "s.json", &s, &err), PF_E_UNSUPPORTED);
        assert_err(&err, PF_E_UNSUPPORTED, "'s.json'", rows[i].part);
        json_free(config);
    }
    assert_ok(schedule_read(NULL, "s.json", &s, &err), &err);
    assert_true(s.n_train_steps == 1000.0);
    assert_true(schedule_time(0, 4) == 1.0 && schedule_time(3, 4) == 0.25);
    assert_true(schedule_time(4, 4) == 0.0);
}

/* Opens the model in the test's directory and returns what pf_model_open says. */
static int open_model(void **state, const char *component, pf_error *err)
{
    struct pf_checkpoint *ckpt = NULL;
    struct pf_model *model = NULL;
    const struct pf_model_opts opts = {.size = sizeof opts, .n_threads = 1, .component = component};
    assert_ok(pf_checkpoint_open(*state, NULL, &ckpt, err), err);
    int rc = pf_model_open(ckpt, &opts, &model, err);
    pf_model_close(model);
    pf_checkpoint_close(ckpt);
    return rc;
}

static void tensors_must_agree_with_the_config(void **state)
{
    struct made m;
    struct made_up other = tiny;
    pf_error err = {0};
    made_fill(&m, &tiny, 1);
    made_write(state, &m, NULL);
    assert_ok(open_model(state, NULL, &err), &err);
    other.n_classes = 4;
    made_write_config(state, &other);
    assert_int_equal(open_model(state, NULL, &err), PF_E_MISMATCH);
    assert_err(&err, PF_E_MISMATCH, "embedding_table.weight", "[4, 12]", "[5, 12]");
    other = tiny;
    other.n_blocks = 2;
    made_write_config(state, &other);
    assert_int_equal(open_model(state, NULL, &err), PF_E_NOTFOUND);
    assert_err(&err, PF_E_NOTFOUND, "'transformer_blocks.1.");
    other = tiny;
    other.has_attn_bias = false;
    made_write_config(state, &other);
    assert_int_equal(open_model(state, NULL, &err), PF_E_MISMATCH);
    assert_err(&err, PF_E_MISMATCH, "attn1.to_", "bias'", "belongs to no part");
    made_write(state, &m, "proj_out_2.bias");
    assert_int_equal(open_model(state, NULL, &err), PF_E_NOTFOUND);
    assert_err(&err, PF_E_NOTFOUND, "'proj_out_2.bias'");
    made_release(&m);
}

static void refuses_what_is_no_model(void **state)
{
    struct made m;
    pf_error err = {0};
    made_fill(&m, &tiny, 1);
    made_write(state, &m, NULL);
    assert_int_equal(open_model(state, "unet", &err), PF_E_NOTFOUND);
    assert_err(&err, PF_E_NOTFOUND, "'unet'");
    made_write_text(state, "scheduler/scheduler_config.json",
                    "{\"_class_name\":\"EulerDiscreteScheduler\"}");
    assert_int_equal(open_model(state, NULL, &err), PF_E_UNSUPPORTED);
    assert_err(&err, PF_E_UNSUPPORTED, "'EulerDiscreteScheduler'", "scheduler_config.json");
    assert_int_equal(remove(test_path(state, "scheduler/scheduler_config.json")), 0);
    made_write_text(state, "model_index.json", "{\"id2label\":{\"zero\":\"dot\"}}");
    assert_int_equal(open_model(state, NULL, &err), PF_E_FORMAT);
    assert_err(&err, PF_E_FORMAT, "id2label");
    made_release(&m);
}

static void a_bare_file_without_config_says_so(void **state)
{
    struct pf_checkpoint *ckpt = NULL;
    struct pf_model *model = NULL;
    struct made m;
    pf_error err = {0};
    made_fill(&m, &tiny, 1);
    made_write(state, &m, NULL);
    assert_int_equal(rename(test_path(state, "transformer/diffusion_pytorch_model.safetensors"),
                            test_path(state, "alone.safetensors")),
                     0);
    assert_ok(pf_checkpoint_open(test_path(state, "alone.safetensors"), NULL, &ckpt, &err), &err);
    assert_int_equal(pf_model_open(ckpt, NULL, &model, &err), PF_E_NOTFOUND);
    assert_err(&err, PF_E_NOTFOUND, "config.json", "alone.safetensors");
    pf_checkpoint_close(ckpt);
    made_release(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bundled_model_says_what_it_is),
        cmocka_unit_test(absent_keys_have_the_defaults_of_diffusers),
        cmocka_unit_test(refuses_by_name_what_it_does_not_compute),
        cmocka_unit_test(refuses_other_schedulers),
        in_dir(tensors_must_agree_with_the_config),
        in_dir(refuses_what_is_no_model),
        in_dir(a_bare_file_without_config_says_so),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
