/*
 * `pageflip inspect`: what a file is, decided by what is in it. Reads headers (of an adapter, everything: it is
 * validated), writes nothing. With --model also how an adapter fits that checkpoint.
 */
#include "cli/bundled.h"
#include "cli/command.h"
#include "cli/inspect.h"
#include "cli/setup.h"

#include <string.h>

#include "base/file.h"
#include "base/mem.h"

struct inspect_args {
    struct common_args common;
    const char *path, *model, *merge_dtype;
    bool is_long;
};

static const struct opt opts[] = {
    {"model", 'm', OPT_MODEL, "M", "also match an adapter with this checkpoint",
     offsetof(struct inspect_args, model), NULL, 0, 0, false},
    {"long", 'L', OPT_FLAG, NULL, "list every tensor of a checkpoint, and metadata in full",
     offsetof(struct inspect_args, is_long), NULL, 0, 0, false},
    {"merge-dtype", 0, OPT_CHOICE, "D",
     "with --model: reckon with merged tensors in base (the default) or f32",
     offsetof(struct inspect_args, merge_dtype), "base|f32", 0, 0, false},
};
static const struct operand operands[] = {
    {"PATH",
     "a checkpoint or an adapter: a file, a directory, org/name, or a bundled adapter's name",
     OPT_LORA, offsetof(struct inspect_args, path), true},
};

/* Leaves that only adapters have. What they mean is the library's to judge. */
static bool is_adapter_key(const char *name)
{
    static const char *const marks[] = {".lora_A",
                                        ".lora_B",
                                        ".lora_E",
                                        ".lora_down",
                                        ".lora_up",
                                        ".lora_mid",
                                        ".lora.down",
                                        ".lora.up",
                                        "_lora.down",
                                        "_lora.up",
                                        "_lora1.down",
                                        "_lora1.up",
                                        "_lora2.down",
                                        "_lora2.up",
                                        ".hada_",
                                        ".lokr_",
                                        ".lora_magnitude_vector",
                                        ".dora_scale",
                                        ".lora_embedding_",
                                        ".lora_linear_layer",
                                        ".oft_",
                                        ".boft_",
                                        ".glora",
                                        ".vera_",
                                        ".ia3_",
                                        ".set_weight",
                                        ".reshape_weight",
                                        ".modules_to_save.",
                                        ".trainable_tokens_"};
    static const char *const prefixes[] = {
        "lora_unet_",      "lora_te",  "lora_transformer_", "lora_prior_",
        "lora_controlnet", "lycoris_", "base_model.model."};
    static const char *const ends[] = {".diff", ".diff_b", ".diff_m", ".w_norm", ".b_norm"};

    for (size_t i = 0; i < PF_COUNTOF(marks); i++)
        if (strstr(name, marks[i]))
            return true;
    for (size_t i = 0; i < PF_COUNTOF(prefixes); i++)
        if (str_starts(str_of(name), prefixes[i]))
            return true;
    for (size_t i = 0; i < PF_COUNTOF(ends); i++)
        if (str_ends(str_of(name), ends[i]))
            return true;
    return false;
}

static bool has_adapter_keys(const struct pf_checkpoint *ckpt)
{
    struct pf_checkpoint_info info;
    struct pf_tensor_info tensor;

    pf_checkpoint_info(ckpt, &info);
    for (uint32_t i = 0; i < info.n_tensors; i++) {
        pf_checkpoint_tensor(ckpt, i, &tensor);
        if (is_adapter_key(tensor.name))
            return true;
    }
    return false;
}

static bool has_adapter_config(const char *path)
{
    char *config = path_join(path, "adapter_config.json");
    bool is_there = config && file_kind(config) == FILE_REGULAR;

    mem_free(config);
    return is_there;
}

/*
 * Exactly one of the outputs is set. Headers decide first, so that a checkpoint of any size is not scanned as an adapter, and a
 * refused adapter is not shown as a checkpoint.
 */
static int open_any(const char *path, struct pf_checkpoint **out_ckpt,
                    struct pf_adapter **out_adapter, pf_error *err)
{
    struct pf_checkpoint *ckpt = NULL;
    pf_error err_adapter = {0};
    int rc;

    if (has_adapter_config(path))
        return pf_adapter_open(path, out_adapter, err);
    rc = pf_checkpoint_open(path, NULL, &ckpt, err);
    if (!rc && !has_adapter_keys(ckpt)) {
        *out_ckpt = ckpt;
        return PF_OK;
    }
    pf_checkpoint_close(ckpt);
    if (!rc)
        return pf_adapter_open(path, out_adapter, err);
    /* No checkpoint: a file may still be an adapter; else the first error is the one that helps. */
    if (file_kind(path) == FILE_ABSENT || pf_adapter_open(path, out_adapter, &err_adapter))
        return rc;
    return PF_OK;
}

/* A path that exists, or a bundled adapter; anything else is left to the checkpoint's rules (org/name). */
static int resolve(const char *word, char **out_path, pf_error *err)
{
    if (!bundled_adapter(NULL, word, out_path, NULL))
        return PF_OK;
    if (!strchr(word, '/') && word[0] != '.')
        return bundled_adapter(NULL, word, out_path, err);
    return bundled_model(NULL, word, out_path, err);
}

static int match(const struct out *o, const struct inspect_args *args, const char *path,
                 struct json *doc, pf_error *err)
{
    struct setup s = {0};
    bool is_usage;
    int rc;

    rc = setup_open(&s,
                    &(struct setup_opts){.model = args->model,
                                         .adapter_path = path,
                                         .merge_dtype = args->merge_dtype,
                                         .allow_unmatched = true},
                    &is_usage, err);
    if (!rc)
        rc = setup_fidelity(&s, err);
    if (!rc && o->is_json) {
        setup_json(doc, &s);
    } else if (!rc) {
        setup_print(o, &s);
    }
    if (!rc)
        setup_warn(o, &s);
    setup_release(&s);
    return rc;
}

static int run(struct out *o, const void *p)
{
    const struct inspect_args *args = p;
    struct pf_checkpoint *ckpt = NULL;
    struct pf_adapter *adapter = NULL;
    struct json *doc = NULL;
    char *path = NULL;
    pf_error err = {0};
    int rc, status = EXIT_STATUS_OK;

    rc = resolve(args->path, &path, &err);
    if (!rc)
        rc = open_any(path, &ckpt, &adapter, &err);
    if (!rc && ckpt && args->model) {
        status = out_usage(o, "option '--model' goes with an adapter, and '%s' is a checkpoint",
                           args->path);
        goto out;
    }
    if (!rc)
        doc = json_new_object();
    if (!rc && ckpt)
        rc = inspect_checkpoint(o, ckpt, args->is_long, doc, &err);
    else if (!rc)
        inspect_adapter(o, adapter, args->is_long, doc);
    if (!rc && args->model)
        rc = match(o, args, path, doc, &err);
    if (rc) {
        status = out_fail(o, &err);
    } else if (o->is_json) {
        status = out_json(o, doc);
        doc = NULL;
    }
out:
    json_free(doc);
    pf_adapter_close(adapter);
    pf_checkpoint_close(ckpt);
    mem_free(path);
    return status;
}

const struct command cmd_inspect = {
    .name = "inspect",
    .summary = "show what a checkpoint or an adapter is",
    .synopsis = "PATH [--model M]",
    .detail = "A checkpoint: format, components, layers, dtypes, sizes, and what is odd. An "
              "adapter: family, dialect, ranks, "
              "scales, targets, training metadata and trigger words; with --model also what "
              "matches that checkpoint and "
              "how much of the change survives rounding.",
    .opts = opts,
    .n_opts = PF_COUNTOF(opts),
    .operands = operands,
    .n_operands = PF_COUNTOF(operands),
    .args_bytes = sizeof(struct inspect_args),
    .run = run,
};
