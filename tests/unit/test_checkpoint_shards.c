/*
 * The index of a sharded checkpoint: every way in which it can be wrong, alone or against its shards, with its message; and
 * that good ones assign tensors as they say.
 */
#include "checkpoint_fixture.h"

/* Parses text as an index named "x.json"; the error holds code and texts. */
#define ASSERT_BAD_INDEX(text, code, ...)                                                          \
    do {                                                                                           \
        struct ckpt_index index_ = {0};                                                            \
        pf_error err_ = {0};                                                                       \
        int rc_ = ckpt_index_parse(text, strlen(text), "x.json", &index_, &err_);                  \
        assert_null(index_.root);                                                                  \
        fx_assert_error(rc_, &err_, code, "x.json", __VA_ARGS__, NULL);                            \
    } while (0)

static void numbers_distinct_shards_in_order(void **state)
{
    (void)state;
    static const char text[] =
        "{\"metadata\":{\"total_size\":1},\"weight_map\":{\"z\":\"2.safetensors\",\"m\":"
        "\"1.safetensors\",\"a\":\"2.safetensors\",\"b\":\"sub/3.safetensors\"}}";
    struct ckpt_index index;
    pf_error err = {0};
    assert_int_equal(ckpt_index_parse(text, sizeof text - 1, "x", &index, &err), PF_OK);
    assert_int_equal(index.n_shards, 3);
    assert_string_equal(index.shards[0], "1.safetensors");
    assert_string_equal(index.shards[1], "2.safetensors");
    assert_string_equal(index.shards[2], "sub/3.safetensors");
    assert_int_equal(index.n_entries, 4);
    assert_int_equal(ckpt_index_find(&index, str_of("a")), 1);
    assert_int_equal(ckpt_index_find(&index, str_of("b")), 2);
    assert_int_equal(ckpt_index_find(&index, str_of("m")), 0);
    assert_int_equal(ckpt_index_find(&index, str_of("z")), 1);
    assert_int_equal(ckpt_index_find(&index, str_of("zz")), -1);
    assert_int_equal(ckpt_index_find(&index, str_of("")), -1);
    ckpt_index_release(&index);
    ckpt_index_release(&index);
}

static void refuses_a_broken_document(void **state)
{
    (void)state;
    ASSERT_BAD_INDEX("", PF_E_FORMAT, "");
    ASSERT_BAD_INDEX("{", PF_E_FORMAT, "");
    ASSERT_BAD_INDEX("[]", PF_E_FORMAT, "no weight_map object");
    ASSERT_BAD_INDEX("{}", PF_E_FORMAT, "no weight_map object");
    ASSERT_BAD_INDEX("{\"weight_map\":[]}", PF_E_FORMAT, "no weight_map object");
    ASSERT_BAD_INDEX("{\"weight_map\":{}}", PF_E_FORMAT, "names no shard");
    ASSERT_BAD_INDEX("{\"weight_map\":{\"a\":1}}", PF_E_FORMAT, "shard of tensor 'a' is no string");
    ASSERT_BAD_INDEX("{\"weight_map\":{\"a\":\"x.safetensors\",\"b\":null}}", PF_E_FORMAT,
                     "tensor 'b' is no string");
    ASSERT_BAD_INDEX("{\"weight_map\":{\"a\":\"x.safetensors\",\"a\":\"y.safetensors\"}}",
                     PF_E_FORMAT, "");
}

static void refuses_shard_names_that_lead_elsewhere(void **state)
{
    (void)state;
    static const struct {
        const char *name, *fault;
    } cases[] = {
        {"../x.safetensors", "climbs out of the directory"},
        {"a/../../x.safetensors", "climbs out of the directory"},
        {"a/..", "climbs out of the directory"},
        {"/etc/x.safetensors", "is an absolute path"},
        {"..\\\\x.safetensors", "holds a backslash"},
        {"a\\\\x.safetensors", "holds a backslash"},
        {"", "is empty"},
        {"./x.safetensors", "is no plain relative path"},
        {"a//x.safetensors", "is no plain relative path"},
        {"a/", "is no plain relative path"},
        {"a\\nb.safetensors", "holds a control character"},
    };
    for (size_t i = 0; i < PF_COUNTOF(cases); i++) {
        char text[256];
        (void)snprintf(text, sizeof text,
                       "{\"weight_map\":{\"b\":\"o.safetensors\",\"a.w\":\"%s\"}}", cases[i].name);
        ASSERT_BAD_INDEX(text, PF_E_FORMAT, "shard name '", "of tensor 'a.w'", cases[i].fault);
    }
    /* Dots inside a name are a name. */
    struct ckpt_index index;
    static const char text[] = "{\"weight_map\":{\"a\":\"..x/y..z...safetensors\"}}";
    assert_int_equal(ckpt_index_parse(text, sizeof text - 1, "x", &index, NULL), PF_OK);
    ckpt_index_release(&index);
}

static void refuses_shards_of_other_formats(void **state)
{
    (void)state;
    ASSERT_BAD_INDEX("{\"weight_map\":{\"a\":\"pytorch_model-00001-of-00002.bin\"}}",
                     PF_E_UNSUPPORTED, "'pytorch_model-00001-of-00002.bin'", "convert");
}

static void passes_on_a_broken_index(void **state)
{
    struct fx *fx = *state;
    FX_ASSERT_REFUSED(fx_text(fx, "m.safetensors.index.json", "{\"weight_map\":"), PF_E_FORMAT,
                      "m.safetensors.index.json");
    FX_ASSERT_REFUSED(fx_path(fx, "."), PF_E_FORMAT, "m.safetensors.index.json");
}

static void refuses_a_missing_shard(void **state)
{
    struct fx *fx = *state;
    (void)fx_weights(fx, "1.safetensors", "a", 1);
    const char *index =
        fx_text(fx, "m.safetensors.index.json",
                "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\"}}");
    FX_ASSERT_REFUSED(index, PF_E_NOTFOUND, "m.safetensors.index.json': shard '",
                      "2.safetensors' is missing");
}

static void refuses_a_tensor_that_is_not_in_its_shard(void **state)
{
    struct fx *fx = *state;
    (void)fx_weights(fx, "1.safetensors", "a", 1);
    (void)fx_weights(fx, "2.safetensors", "c", 1);
    const char *index = fx_text(fx, "m.safetensors.index.json",
                                "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\","
                                "\"c\":\"2.safetensors\"}}");
    FX_ASSERT_REFUSED(index, PF_E_FORMAT,
                      "m.safetensors.index.json': tensor 'b' is not in shard "
                      "'2.safetensors'");
}

static void refuses_a_tensor_in_two_shards(void **state)
{
    struct fx *fx = *state;
    (void)fx_weights(fx, "1.safetensors", "a b", 1);
    (void)fx_weights(fx, "2.safetensors", "b", 1);
    const char *index =
        fx_text(fx, "m.safetensors.index.json",
                "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\"}}");
    FX_ASSERT_REFUSED(index, PF_E_CONFLICT,
                      "m.safetensors.index.json': tensor 'b' is in shard "
                      "'2.safetensors' and also in '1.safetensors'");
}

/* As the hub's loaders do: what the index does not name is not part of the model, not even when two shards have it. */
static void leaves_out_what_the_index_does_not_name(void **state)
{
    struct fx *fx = *state;
    (void)fx_weights(fx, "1.safetensors", "spare a", 1);
    (void)fx_weights(fx, "2.safetensors", "b spare", 1);
    struct pf_checkpoint *ckpt =
        fx_open(fx_text(fx, "m.safetensors.index.json",
                        "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\"}}"));
    assert_int_equal(ckpt->n_tensors, 2);
    assert_int_equal(ckpt->n_bytes, 2 * FX_TENSOR_BYTES);
    assert_int_equal(pf_checkpoint_find(ckpt, "transformer", "spare"), -1);
    int64_t i = pf_checkpoint_find(ckpt, "transformer", "a");
    assert_int_equal(ckpt->tensors[i].p[0], 1 + 7);
    assert_int_equal(ckpt->tensors[i].i_file, 0);
    pf_checkpoint_close(ckpt);
}

static void passes_on_a_broken_shard(void **state)
{
    struct fx *fx = *state;
    (void)fx_text(fx, "1.safetensors", "nonsense, nonsense");
    FX_ASSERT_REFUSED(
        fx_text(fx, "m.safetensors.index.json", "{\"weight_map\":{\"a\":\"1.safetensors\"}}"),
        PF_E_FORMAT, "1.safetensors'");
}

static void opens_100_shards_of_1000_tensors(void **state)
{
    struct fx *fx = *state;
    struct strbuf index, names;
    strbuf_init(&index);
    strbuf_init(&names);
    strbuf_adds(&index, "{\"weight_map\":{");
    for (unsigned s = 0; s < 100; s++) {
        char rel[64];
        (void)snprintf(rel, sizeof rel, "s-%05u.safetensors", s);
        strbuf_clear(&names);
        for (unsigned i = 0; i < 1000; i++) {
            strbuf_addf(&names, "%sblocks.%u.m%u.weight", i > 0 ? " " : "", i % 50, s * 1000 + i);
            strbuf_addf(&index, "%s\"blocks.%u.m%u.weight\":\"%s\"", s + i > 0 ? "," : "", i % 50,
                        s * 1000 + i, rel);
        }
        assert_true(strbuf_ok(&names));
        (void)fx_weights(fx, rel, names.p, s);
    }
    strbuf_adds(&index, "}}");
    assert_true(strbuf_ok(&index));
    const char *path = fx_write(fx, "m.safetensors.index.json", index.p, index.n);
    struct pf_checkpoint *ckpt = fx_open(path);
    assert_int_equal(ckpt->n_files, 100);
    assert_int_equal(ckpt->n_tensors, 100000);
    for (uint32_t i = 1; i < ckpt->n_tensors; i++) {
        const struct ckpt_tensor *a = &ckpt->tensors[i - 1], *b = &ckpt->tensors[i];
        assert_true(
            a->i_layer < b->i_layer ||
            (a->i_layer == b->i_layer &&
             (a->i_file < b->i_file || (a->i_file == b->i_file && a->off_bytes < b->off_bytes))));
    }
    pf_checkpoint_close(ckpt);
    strbuf_release(&index);
    strbuf_release(&names);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers_distinct_shards_in_order),
        cmocka_unit_test(refuses_a_broken_document),
        cmocka_unit_test(refuses_shard_names_that_lead_elsewhere),
        cmocka_unit_test(refuses_shards_of_other_formats),
        FX_TEST(passes_on_a_broken_index),
        FX_TEST(refuses_a_missing_shard),
        FX_TEST(refuses_a_tensor_that_is_not_in_its_shard),
        FX_TEST(refuses_a_tensor_in_two_shards),
        FX_TEST(leaves_out_what_the_index_does_not_name),
        FX_TEST(passes_on_a_broken_shard),
        FX_TEST(opens_100_shards_of_1000_tensors),
    };
    return cmocka_run_group_tests_name("checkpoint_shards", tests, NULL, NULL);
}
