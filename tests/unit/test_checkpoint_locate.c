/*
 * From a path to files: what each kind of path opens, which of several files is meant, what is refused and how it is said,
 * and the local hub cache with its links.
 */
#include "checkpoint_fixture.h"

#include <fcntl.h>

static void assert_file(struct pf_checkpoint *ckpt, const char *tensor, const char *suffix)
{
    int64_t i = pf_checkpoint_find(ckpt, "transformer", tensor);
    struct pf_tensor_info t;
    assert_true(i >= 0);
    pf_checkpoint_tensor(ckpt, (uint32_t)i, &t);
    if (!str_ends(str_of(t.file), suffix))
        fail_msg("'%s' came from '%s', not '%s'", tensor, t.file, suffix);
}

/* Opens path, which must hold `tensor` (in a file that ends with suffix) and be of this layout. */
static void assert_opens(const char *path, const char *layout, const char *tensor,
                         const char *suffix)
{
    struct pf_checkpoint *ckpt = fx_open(path);
    struct pf_checkpoint_info info;
    pf_checkpoint_info(ckpt, &info);
    assert_string_equal(info.layout, layout);
    assert_int_equal(info.n_components, 1);
    assert_file(ckpt, tensor, suffix);
    pf_checkpoint_close(ckpt);
}

static void index_of_two(struct fx *fx, const char *dir, const char *stem)
{
    char rel[256], text[1024];
    for (int i = 1; i <= 2; i++) {
        (void)snprintf(rel, sizeof rel, "%s/%s-0000%d-of-00002.safetensors", dir, stem, i);
        (void)fx_weights(fx, rel, i == 1 ? "a" : "b", 1);
    }
    (void)snprintf(rel, sizeof rel, "%s/%s.safetensors.index.json", dir, stem);
    (void)snprintf(
        text, sizeof text,
        "{\"metadata\":{\"total_size\":32},\"weight_map\":{"
        "\"a\":\"%s-00001-of-00002.safetensors\",\"b\":\"%s-00002-of-00002.safetensors\"}}",
        stem, stem);
    (void)fx_text(fx, rel, text);
}

static void opens_one_file_and_the_config_beside_it(void **state)
{
    struct fx *fx = *state;
    const char *path = fx_weights(fx, "d/any.name.safetensors", "w", 1);
    const char *config = fx_text(fx, "d/config.json", "{\"_class_name\":\"Some\"}");
    assert_opens(path, "file", "w", "d/any.name.safetensors");
    struct pf_checkpoint *ckpt = fx_open(path);
    assert_string_equal(ckpt->components[0].name, "transformer");
    assert_string_equal(ckpt->components[0].path, path);
    assert_string_equal(ckpt->components[0].config_path, config);
    assert_string_equal(ckpt->components[0].class_name, "Some");
    assert_null(ckpt->components[0].index_path);
    pf_checkpoint_close(ckpt);
    /* Nothing beside it: no config and no class. */
    ckpt = fx_open(fx_weights(fx, "e/x.safetensors", "w", 1));
    assert_null(ckpt->components[0].config_path);
    assert_null(ckpt->components[0].class_name);
    pf_checkpoint_close(ckpt);
}

static void opens_a_relative_path(void **state)
{
    struct fx *fx = *state;
    (void)fx_weights(fx, "d/x.safetensors", "w", 1);
    index_of_two(fx, "s", "model");
    int old = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    assert_int_equal(chdir(fx_path(fx, "d")), 0);
    assert_opens("x.safetensors", "file", "w", "x.safetensors");
    assert_opens(".", "directory", "w", "x.safetensors");
    assert_int_equal(chdir(fx_path(fx, "s")), 0);
    assert_opens("model.safetensors.index.json", "sharded", "b", "00002-of-00002.safetensors");
    assert_int_equal(fchdir(old), 0);
    (void)close(old);
}

static void opens_a_component_directory(void **state)
{
    struct fx *fx = *state;
    (void)fx_weights(fx, "text_encoder/model.safetensors", "w", 1);
    (void)fx_text(fx, "text_encoder/config.json", "{\"architectures\":[\"CLIPTextModel\",\"X\"]}");
    struct pf_checkpoint *ckpt = fx_open(fx_path(fx, "text_encoder"));
    assert_string_equal(ckpt->layout, "directory");
    assert_int_equal(ckpt->n_components, 1);
    assert_string_equal(ckpt->components[0].name, "transformer");
    assert_string_equal(ckpt->components[0].class_name, "CLIPTextModel");
    pf_checkpoint_close(ckpt);
}

static void opens_a_sharded_set_by_index_or_directory(void **state)
{
    struct fx *fx = *state;
    index_of_two(fx, "s", "diffusion_pytorch_model");
    const char *index = fx_path(fx, "s/diffusion_pytorch_model.safetensors.index.json");
    assert_opens(index, "sharded", "a", "00001-of-00002.safetensors");
    assert_opens(fx_path(fx, "s"), "sharded", "b", "00002-of-00002.safetensors");
    struct pf_checkpoint *ckpt = fx_open(fx_path(fx, "s"));
    assert_int_equal(ckpt->n_files, 2);
    assert_string_equal(ckpt->components[0].index_path, index);
    assert_string_equal(ckpt->components[0].path, fx_path(fx, "s"));
    pf_checkpoint_close(ckpt);
}

static void opens_a_model_directory_with_components(void **state)
{
    struct fx *fx = *state;
    (void)fx_text(fx, "m/model_index.json", "{\"_class_name\":\"P\"}");
    (void)fx_text(fx, "m/transformer/config.json", "{\"_class_name\":\"T\"}");
    (void)fx_text(fx, "m/text_encoder/config.json", "not json");
    (void)fx_text(fx, "m/scheduler/scheduler_config.json", "{}");
    (void)fx_text(fx, "m/tokenizer/vocab.json", "{}");
    (void)fx_text(fx, "m/safety_checker/pytorch_model.bin", "PK");
    (void)fx_weights(fx, "m/.cache/x.safetensors", "hidden", 1);
    (void)fx_weights(fx, "m/style/adapter_model.safetensors", "lora", 1);
    (void)fx_text(fx, "m/style/adapter_config.json", "{}");
    (void)fx_weights(fx, "m/flux1-dev.safetensors", "root", 1);
    (void)fx_weights(fx, "m/text_encoder/model.safetensors", "w both", 3);
    index_of_two(fx, "m/transformer", "diffusion_pytorch_model");
    struct pf_checkpoint *ckpt = fx_open(fx_path(fx, "m"));
    assert_string_equal(ckpt->layout, "directory");
    assert_int_equal(ckpt->n_components, 2);
    assert_int_equal(ckpt->n_files, 3);
    assert_string_equal(ckpt->components[0].name, "text_encoder");
    assert_non_null(ckpt->components[0].config_path);
    assert_null(ckpt->components[0].class_name); /* its config is broken: not fatal here */
    assert_string_equal(ckpt->components[1].name, "transformer");
    assert_string_equal(ckpt->components[1].class_name, "T");
    assert_string_equal(ckpt->components[1].path, fx_path(fx, "m/transformer"));
    assert_int_equal(ckpt->components[0].n_tensors, 2);
    assert_int_equal(ckpt->components[1].n_tensors, 2);
    assert_int_equal(ckpt->components[1].i_tensor0, 2);
    assert_int_equal(ckpt->components[1].i_layer0, 1);
    assert_int_equal(ckpt->components[1].i_file0, 1);
    assert_true(pf_checkpoint_find(ckpt, "text_encoder", "w") >= 0);
    assert_int_equal(pf_checkpoint_find(ckpt, "transformer", "w"), -1);
    assert_true(pf_checkpoint_find(ckpt, "transformer", "a") >= 2);
    pf_checkpoint_close(ckpt);
    /* By its model_index.json, too. */
    ckpt = fx_open(fx_path(fx, "m/model_index.json"));
    assert_int_equal(ckpt->n_components, 2);
    assert_string_equal(ckpt->path, fx_path(fx, "m"));
    pf_checkpoint_close(ckpt);
}

static void needs_no_model_index_for_components(void **state)
{
    struct fx *fx = *state;
    (void)fx_weights(fx, "m/transformer/model.safetensors", "w", 1);
    (void)fx_weights(fx, "m/vae/model.safetensors", "w", 1);
    struct pf_checkpoint *ckpt = fx_open(fx_path(fx, "m"));
    assert_int_equal(ckpt->n_components, 2);
    assert_string_equal(ckpt->components[1].name, "vae");
    pf_checkpoint_close(ckpt);
    /* Weights at the root are the model when nothing says that it is a pipeline. */
    (void)fx_weights(fx, "m/x.safetensors", "root", 1);
    assert_opens(fx_path(fx, "m"), "directory", "root", "m/x.safetensors");
}

static void prefers_plain_index_and_known_names(void **state)
{
    struct fx *fx = *state;
    /* A variant is taken only when nothing plain is there. */
    (void)fx_weights(fx, "v/model.fp16.safetensors", "w", 1);
    assert_opens(fx_path(fx, "v"), "directory", "w", "model.fp16.safetensors");
    (void)fx_weights(fx, "v/model.safetensors", "w", 1);
    assert_opens(fx_path(fx, "v"), "directory", "w", "/model.safetensors");
    /* An index before one file; the file alone before a variant's index. */
    (void)fx_weights(fx, "i/model.safetensors", "single", 1);
    index_of_two(fx, "i", "model.fp16");
    assert_opens(fx_path(fx, "i"), "directory", "single", "i/model.safetensors");
    index_of_two(fx, "i", "model");
    assert_opens(fx_path(fx, "i"), "sharded", "a", "i/model-00001-of-00002.safetensors");
    /* The other spelling of a variant's index. */
    (void)fx_weights(fx, "o/model.fp16-00001-of-00001.safetensors", "w", 1);
    (void)fx_text(fx, "o/model.safetensors.index.fp16.json",
                  "{\"weight_map\":{\"w\":\"model.fp16-00001-of-00001.safetensors\"}}");
    assert_opens(fx_path(fx, "o"), "sharded", "w", "fp16-00001-of-00001.safetensors");
    /* A name that diffusers writes, beside one that it does not. */
    (void)fx_weights(fx, "k/diffusion_pytorch_model.safetensors", "w", 1);
    (void)fx_weights(fx, "k/extra.safetensors", "x", 1);
    assert_opens(fx_path(fx, "k"), "directory", "w", "diffusion_pytorch_model.safetensors");
    /* A set of shards beside the same model in one file. */
    (void)fx_weights(fx, "s/x-00001-of-00001.safetensors", "set", 1);
    (void)fx_weights(fx, "s/x.safetensors", "one", 1);
    assert_opens(fx_path(fx, "s"), "directory", "one", "s/x.safetensors");
}

static void refuses_to_guess(void **state)
{
    struct fx *fx = *state;
    (void)fx_weights(fx, "d/wan2.1.safetensors", "w", 1);
    assert_opens(fx_path(fx, "d"), "directory", "w", "wan2.1.safetensors");
    (void)fx_weights(fx, "d/wan2.2.safetensors", "w", 1);
    FX_ASSERT_REFUSED(fx_path(fx, "d"), PF_E_AMBIGUOUS, "d' holds several checkpoints",
                      "'wan2.1.safetensors'", "'wan2.2.safetensors'", "name one");
    (void)fx_weights(fx, "v/model.bf16.safetensors", "w", 1);
    (void)fx_weights(fx, "v/model.fp16.safetensors", "w", 1);
    FX_ASSERT_REFUSED(fx_path(fx, "v"), PF_E_AMBIGUOUS, "'model.bf16.safetensors'",
                      "'model.fp16.safetensors'");
    index_of_two(fx, "i", "x");
    index_of_two(fx, "i", "y");
    FX_ASSERT_REFUSED(fx_path(fx, "i"), PF_E_AMBIGUOUS, "'x.safetensors.index.json'",
                      "'y.safetensors.index.json'");
    (void)fx_weights(fx, "n/x-00001-of-00001.safetensors", "w", 1);
    (void)fx_weights(fx, "n/x-00001-of-00002.safetensors", "w", 1);
    FX_ASSERT_REFUSED(fx_path(fx, "n"), PF_E_AMBIGUOUS, "'x-00001-of-00001.safetensors'",
                      "'x-00001-of-00002.safetensors'");
    /* A component that is ambiguous makes its model so. */
    (void)fx_weights(fx, "m/transformer/a.safetensors", "w", 1);
    (void)fx_weights(fx, "m/transformer/b.safetensors", "w", 1);
    FX_ASSERT_REFUSED(fx_path(fx, "m"), PF_E_AMBIGUOUS, "m/transformer'", "'a.safetensors'");
}

static void takes_shards_without_an_index_only_when_complete(void **state)
{
    struct fx *fx = *state;
    (void)fx_weights(fx, "d/model-00001-of-00003.safetensors", "a", 1);
    (void)fx_weights(fx, "d/model-00003-of-00003.safetensors", "c", 1);
    FX_ASSERT_REFUSED(fx_path(fx, "d"), PF_E_NOTFOUND, "d': shard 2 of the 3 of 'model' is missing",
                      "no index");
    (void)fx_weights(fx, "d/model-00002-of-00003.safetensors", "b", 1);
    assert_opens(fx_path(fx, "d"), "sharded", "b", "model-00002-of-00003.safetensors");
    /* One of them, named, is opened as the file that it is. */
    assert_opens(fx_path(fx, "d/model-00002-of-00003.safetensors"), "file", "b",
                 "of-00003.safetensors");
    /* Counted, not sorted as text; a variant behind the numbers. */
    for (int i = 1; i <= 11; i++) {
        char rel[64], name[16];
        (void)snprintf(rel, sizeof rel, "u/x-%d-of-11.fp16.safetensors", i);
        (void)snprintf(name, sizeof name, "t%d", i);
        (void)fx_weights(fx, rel, name, 1);
    }
    assert_opens(fx_path(fx, "u"), "sharded", "t10", "u/x-10-of-11.fp16.safetensors");
    /* A number that no directory can satisfy. */
    (void)fx_weights(fx, "h/x-00001-of-18446744073709551615.safetensors", "a", 1);
    FX_ASSERT_REFUSED(fx_path(fx, "h"), PF_E_NOTFOUND, "shard 2 of the 18446744073709551615");
    (void)fx_weights(fx, "z/x-00000-of-00001.safetensors", "a", 1);
    FX_ASSERT_REFUSED(fx_path(fx, "z"), PF_E_NOTFOUND, "shard 1 of the 1 of 'x' is missing");
}

static void refuses_a_name_in_two_shards(void **state)
{
    struct fx *fx = *state;
    (void)fx_weights(fx, "d/model-00001-of-00002.safetensors", "a b", 1);
    (void)fx_weights(fx, "d/model-00002-of-00002.safetensors", "c b", 1);
    FX_ASSERT_REFUSED(fx_path(fx, "d"), PF_E_CONFLICT, "tensor 'b' is in", "00001-of-00002",
                      "and also in", "00002-of-00002");
}

/* Pickles and GGUF (C89: a quantised base of ggml). */
static void refuses_other_formats_by_name(void **state)
{
    struct fx *fx = *state;
    static const char *const pickles[] = {"x.bin", "x.ckpt", "x.pt", "x.PTH", "x.pkl"};
    for (size_t i = 0; i < PF_COUNTOF(pickles); i++)
        FX_ASSERT_REFUSED(fx_text(fx, pickles[i], "12345678{}"), PF_E_UNSUPPORTED, pickles[i],
                          "pickle", "convert it to safetensors");
    FX_ASSERT_REFUSED(fx_text(fx, "x.gguf", "GGUF"), PF_E_UNSUPPORTED, "x.gguf' is a GGUF file",
                      "safetensors");
    FX_ASSERT_REFUSED(fx_text(fx, "x.bin.index.json", "{}"), PF_E_UNSUPPORTED, "x.bin.index.json'",
                      "convert them to safetensors");
    /* By content, under a name that lies. */
    FX_ASSERT_REFUSED(fx_text(fx, "g.safetensors", "GGUF\3\1\1\1\1\1\1"), PF_E_UNSUPPORTED,
                      "g.safetensors' is a GGUF file");
    FX_ASSERT_REFUSED(fx_text(fx, "p.safetensors", "PK\3\4\1\1\1\1\1\1\1"), PF_E_UNSUPPORTED,
                      "p.safetensors' is a pickle file");
}

static void refuses_directories_without_safetensors(void **state)
{
    struct fx *fx = *state;
    (void)fx_text(fx, "d/pytorch_model.bin", "PK");
    (void)fx_text(fx, "d/config.json", "{}");
    FX_ASSERT_REFUSED(fx_path(fx, "d"), PF_E_UNSUPPORTED, "d' holds no safetensors",
                      "d/pytorch_model.bin' is a pickle file", "convert");
    (void)fx_text(fx, "m/unet/diffusion_pytorch_model.bin", "PK");
    (void)fx_text(fx, "m/model_index.json", "{}");
    FX_ASSERT_REFUSED(fx_path(fx, "m"), PF_E_UNSUPPORTED, "unet/diffusion_pytorch_model.bin'");
    (void)fx_text(fx, "e/readme", "");
    FX_ASSERT_REFUSED(fx_path(fx, "e"), PF_E_NOTFOUND, "e' holds no .safetensors file");
}

static void refuses_what_is_not_there(void **state)
{
    struct fx *fx = *state;
    FX_ASSERT_REFUSED(fx_path(fx, "nothing.safetensors"), PF_E_NOTFOUND, "nothing.safetensors'",
                      "does not exist");
    FX_ASSERT_REFUSED("no-such-name-here", PF_E_NOTFOUND, "'no-such-name-here' does not exist");
    FX_ASSERT_REFUSED("a/b/c", PF_E_NOTFOUND, "'a/b/c' does not exist");
    FX_ASSERT_REFUSED("../no-such-name-here", PF_E_NOTFOUND, "does not exist");
    assert_int_equal(mkfifo(fx_path(fx, "pipe"), 0600), 0);
    FX_ASSERT_REFUSED(fx_path(fx, "pipe"), PF_E_INVALID, "pipe' is neither a file nor a directory");
    FX_ASSERT_REFUSED(fx_link(fx, "loop", "loop"), PF_E_IO, "loop': Too many levels");
    assert_int_equal(mkfifo(fx_path(fx, "pipe.safetensors"), 0600), 0);
    FX_ASSERT_REFUSED(fx_path(fx, "pipe.safetensors"), PF_E_INVALID, "neither a file");
}

/* ------------------------------------------------------------------------------------------- the hub cache */

static const char *const hub_variables[] = {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME",
                                            "XDG_CACHE_HOME", "HOME"};

static void clear_environment(void)
{
    for (size_t i = 0; i < PF_COUNTOF(hub_variables); i++)
        assert_int_equal(unsetenv(hub_variables[i]), 0);
}

/* A snapshot as the hub client leaves it: real directories, files that are links into blobs. */
static void hub_snapshot(struct fx *fx, const char *repo, const char *commit, const char *tensor)
{
    char rel[256], target[256];
    (void)snprintf(rel, sizeof rel, "%s/blobs/%s-w", repo, commit);
    (void)fx_weights(fx, rel, tensor, 1);
    (void)snprintf(rel, sizeof rel, "%s/blobs/%s-c", repo, commit);
    (void)fx_text(fx, rel, "{\"_class_name\":\"T\"}");
    (void)snprintf(rel, sizeof rel, "%s/snapshots/%s/transformer/model.safetensors", repo, commit);
    (void)snprintf(target, sizeof target, "../../../blobs/%s-w", commit);
    (void)fx_link(fx, rel, target);
    (void)snprintf(rel, sizeof rel, "%s/snapshots/%s/transformer/config.json", repo, commit);
    (void)snprintf(target, sizeof target, "../../../blobs/%s-c", commit);
    (void)fx_link(fx, rel, target);
}

static void set_time(struct fx *fx, const char *rel, time_t seconds)
{
    const struct timespec t[2] = {{.tv_sec = seconds}, {.tv_sec = seconds}};
    assert_int_equal(utimensat(AT_FDCWD, fx_path(fx, rel), t, 0), 0);
}

static void opens_a_snapshot_of_links(void **state)
{
    struct fx *fx = *state;
    hub_snapshot(fx, "hub/models--org--name", "c1", "w");
    struct pf_checkpoint *ckpt = fx_open(fx_path(fx, "hub/models--org--name/snapshots/c1"));
    assert_string_equal(ckpt->layout, "directory");
    assert_string_equal(ckpt->components[0].class_name, "T");
    /* The name in the snapshot is kept: the blob's says nothing. */
    assert_file(ckpt, "w", "snapshots/c1/transformer/model.safetensors");
    pf_checkpoint_close(ckpt);
    /* The blob itself is a safetensors file without the name of one. */
    assert_opens(fx_path(fx, "hub/models--org--name/blobs/c1-w"), "file", "w", "c1-w");
}

static void shards_of_a_snapshot_lie_beside_the_link_to_the_index(void **state)
{
    struct fx *fx = *state;
    (void)fx_weights(fx, "r/blobs/b1", "a", 1);
    (void)fx_text(fx, "r/blobs/b0", "{\"weight_map\":{\"a\":\"m-00001-of-00001.safetensors\"}}");
    (void)fx_link(fx, "r/snapshots/c/m.safetensors.index.json", "../../blobs/b0");
    (void)fx_link(fx, "r/snapshots/c/m-00001-of-00001.safetensors", "../../blobs/b1");
    assert_opens(fx_path(fx, "r/snapshots/c/m.safetensors.index.json"), "sharded", "a",
                 "r/snapshots/c/m-00001-of-00001.safetensors");
    assert_opens(fx_path(fx, "r/snapshots/c"), "sharded", "a", "m-00001-of-00001.safetensors");
    assert_int_equal(unlink(fx_path(fx, "r/blobs/b1")), 0);
    FX_ASSERT_REFUSED(fx_path(fx, "r/snapshots/c"), PF_E_NOTFOUND, "index '",
                      "m-00001-of-00001.safetensors' is a link to a file that is not there",
                      "download was not finished");
}

static void says_that_a_download_was_not_finished(void **state)
{
    struct fx *fx = *state;
    (void)fx_link(fx, "r/snapshots/c/model.safetensors", "../../blobs/absent");
    FX_ASSERT_REFUSED(fx_path(fx, "r/snapshots/c"), PF_E_NOTFOUND,
                      "c/model.safetensors' is a link to a file that is not there");
    (void)fx_link(fx, "r/snapshots/d/model.safetensors.index.json", "../../blobs/absent");
    FX_ASSERT_REFUSED(fx_path(fx, "r/snapshots/d"), PF_E_NOTFOUND,
                      "index.json' is a link to a file that is not there");
}

static void resolves_org_name_offline(void **state)
{
    struct fx *fx = *state;
    static const struct {
        const char *variable, *value, *hub;
    } cases[] = {
        {"HF_HUB_CACHE", "one", "one"},
        {"HUGGINGFACE_HUB_CACHE", "two", "two"},
        {"HF_HOME", "three", "three/hub"},
        {"XDG_CACHE_HOME", "four", "four/huggingface/hub"},
        {"HOME", "five", "five/.cache/huggingface/hub"},
    };
    /* From the weakest variable to the strongest: each wins over those already set. */
    clear_environment();
    for (size_t i = PF_COUNTOF(cases); i-- > 0;) {
        char repo[256], tensor[32];
        (void)snprintf(repo, sizeof repo, "%s/models--org--my.Model_1", cases[i].hub);
        (void)snprintf(tensor, sizeof tensor, "t%zu", i);
        hub_snapshot(fx, repo, "0123abcd", tensor);
        assert_int_equal(setenv(cases[i].variable, fx_path(fx, cases[i].value), 1), 0);
        assert_opens("org/my.Model_1", "directory", tensor, "transformer/model.safetensors");
    }
    /* An empty variable is no variable. */
    assert_int_equal(setenv("HF_HUB_CACHE", "", 1), 0);
    assert_opens("org/my.Model_1", "directory", "t1", "transformer/model.safetensors");
    clear_environment();
}

static void follows_the_ref_then_the_newest_snapshot(void **state)
{
    struct fx *fx = *state;
    clear_environment();
    assert_int_equal(setenv("HF_HUB_CACHE", fx_path(fx, "hub"), 1), 0);
    hub_snapshot(fx, "hub/models--o--n", "aaaa", "first");
    hub_snapshot(fx, "hub/models--o--n", "bbbb", "second");
    hub_snapshot(fx, "hub/models--o--n", "cccc", "third");
    set_time(fx, "hub/models--o--n/snapshots/aaaa", 1000);
    set_time(fx, "hub/models--o--n/snapshots/bbbb", 3000);
    set_time(fx, "hub/models--o--n/snapshots/cccc", 2000);
    assert_opens("o/n", "directory", "second", "model.safetensors");
    (void)fx_text(fx, "hub/models--o--n/refs/main", "aaaa\n");
    assert_opens("o/n", "directory", "first", "model.safetensors");
    /* The directory of the repository names the same. */
    assert_opens(fx_path(fx, "hub/models--o--n"), "directory", "first", "model.safetensors");
    /* A ref to a snapshot that is not there, and one that would lead out of the cache. */
    (void)fx_text(fx, "hub/models--o--n/refs/main", "dddd");
    assert_opens("o/n", "directory", "second", "model.safetensors");
    (void)fx_text(fx, "hub/models--o--n/refs/main", "../../../outside");
    (void)fx_weights(fx, "outside/x.safetensors", "evil", 1);
    assert_opens("o/n", "directory", "second", "model.safetensors");
    clear_environment();
}

static void says_where_it_looked_for_a_hub_name(void **state)
{
    struct fx *fx = *state;
    clear_environment();
    assert_int_equal(setenv("HF_HUB_CACHE", fx_path(fx, "hub"), 1), 0);
    FX_ASSERT_REFUSED("org/absent", PF_E_NOTFOUND, "'org/absent' is neither a path nor a model",
                      fx_path(fx, "hub"), "nothing is downloaded");
    (void)fx_text(fx, "hub/models--org--empty/refs/main", "aaaa");
    FX_ASSERT_REFUSED("org/empty", PF_E_NOTFOUND, "models--org--empty' holds no snapshot",
                      "download was not finished");
    clear_environment();
}

static void needs_a_cache_to_look_in(void **state)
{
    (void)state;
    clear_environment();
    FX_ASSERT_REFUSED("org/name", PF_E_NOTFOUND, "'org/name' is no path", "no hub cache",
                      "HF_HUB_CACHE");
}

static void a_local_path_wins_over_a_hub_name(void **state)
{
    struct fx *fx = *state;
    clear_environment();
    assert_int_equal(setenv("HF_HUB_CACHE", fx_path(fx, "hub"), 1), 0);
    hub_snapshot(fx, "hub/models--org--name", "aaaa", "hub");
    (void)fx_weights(fx, "cwd/org/name/model.safetensors", "local", 1);
    int old = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    assert_opens("org/name", "directory", "hub", "model.safetensors");
    assert_int_equal(chdir(fx_path(fx, "cwd")), 0);
    assert_opens("org/name", "directory", "local", "org/name/model.safetensors");
    assert_int_equal(fchdir(old), 0);
    (void)close(old);
    clear_environment();
}

static void knows_a_hub_name(void **state)
{
    (void)state;
    static const char *const good[] = {"a/b", "black-forest/FLUX.1-dev", "o_r-g/n.1_2-3"};
    static const char *const bad[] = {"a",    "a/",    "/a",    "a/b/c", "../b", "a/..",
                                      "a/.b", "a b/c", "a/b\n", "./a",   "~/a",  ""};
    for (size_t i = 0; i < PF_COUNTOF(good); i++)
        assert_true(ckpt_hub_is_name(good[i]));
    for (size_t i = 0; i < PF_COUNTOF(bad); i++)
        assert_false(ckpt_hub_is_name(bad[i]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FX_TEST(opens_one_file_and_the_config_beside_it),
        FX_TEST(opens_a_relative_path),
        FX_TEST(opens_a_component_directory),
        FX_TEST(opens_a_sharded_set_by_index_or_directory),
        FX_TEST(opens_a_model_directory_with_components),
        FX_TEST(needs_no_model_index_for_components),
        FX_TEST(prefers_plain_index_and_known_names),
        FX_TEST(refuses_to_guess),
        FX_TEST(takes_shards_without_an_index_only_when_complete),
        FX_TEST(refuses_a_name_in_two_shards),
        FX_TEST(refuses_other_formats_by_name),
        FX_TEST(refuses_directories_without_safetensors),
        FX_TEST(refuses_what_is_not_there),
        FX_TEST(opens_a_snapshot_of_links),
        FX_TEST(shards_of_a_snapshot_lie_beside_the_link_to_the_index),
        FX_TEST(says_that_a_download_was_not_finished),
        FX_TEST(resolves_org_name_offline),
        FX_TEST(follows_the_ref_then_the_newest_snapshot),
        FX_TEST(says_where_it_looked_for_a_hub_name),
        cmocka_unit_test(needs_a_cache_to_look_in),
        FX_TEST(a_local_path_wins_over_a_hub_name),
        cmocka_unit_test(knows_a_hub_name),
    };
    return cmocka_run_group_tests_name("checkpoint_locate", tests, NULL, NULL);
}
