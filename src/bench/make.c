/*
 * `bench make`: options in, a published checkpoint or adapter out. Called by the command line and by tests. Decides what stands
 * where (files, directories, configs); make_plan.c knows the tensors, make_fill.c the bytes. Never touches anything that exists.
 */
#include "bench/make_int.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "base/proc.h"
#include "tensor/dtype.h"

/* The options with their defaults filled in. */
struct make {
    const struct bench_make_opts *opts;
    struct pool *pool;
    char *out;     /* without trailing slashes */
    char *partial; /* the directory that becomes out, or NULL */
    const char *dialect;
    double alpha, delta_rms;
    int32_t dtype;
    struct bench_make_report report;
};

static int write_json(const char *dir, const char *name, struct json *root, pf_error *err)
{
    char *path = path_join(dir, name);
    struct strbuf b;
    int rc;

    strbuf_init(&b);
    rc = path == NULL ? err_nomem(err, 0, name) : json_write(root, 2, &b, err);
    if (rc == PF_OK) {
        strbuf_adds(&b, "\n");
        rc = strbuf_ok(&b) ? file_write_atomic(path, b.p, b.n, err) : err_nomem(err, b.n, name);
    }
    strbuf_release(&b);
    json_free(root);
    mem_free(path);
    return rc;
}

static int write_weights(const struct make *m, const char *dir, const char *name,
                         const struct plan *p, const struct plan_meta *meta, size_t n_meta,
                         uint64_t *out_n_bytes, pf_error *err)
{
    const struct fill_opts opts = {.seed = m->opts->seed,
                                   .pool = m->pool,
                                   .progress = m->opts->progress,
                                   .progress_ctx = m->opts->progress_ctx,
                                   .meta = meta,
                                   .n_meta = n_meta};
    char *path = dir == NULL ? mem_strdup(name) : path_join(dir, name);
    int rc = path == NULL ? err_nomem(err, 0, name) : fill_file(path, p, &opts, out_n_bytes, err);

    mem_free(path);
    return rc;
}

/* --------------------------------------------------------------------------------------------- checkpoints */

static struct json *class_of(const char *library, const char *name)
{
    struct json *pair = json_new_array();

    json_add(pair, json_new_string(str_of(library)));
    json_add(pair, json_new_string(str_of(name)));
    return pair;
}

static struct json *model_index(void)
{
    struct json *root = json_new_object(), *labels = json_new_object();
    int i;

    for (i = 0; i < 64; i++) {
        char key[16], label[32];
        (void)snprintf(key, sizeof(key), "%d", i);
        (void)snprintf(label, sizeof(label), "thing_%d", i);
        json_set_z(labels, key, label);
    }
    json_set_z(root, "_class_name", "SyntheticDiTPipeline");
    json_set(root, "transformer", class_of("diffusers", "DiTTransformer2DModel"));
    json_set(root, "scheduler", class_of("diffusers", "FlowMatchEulerDiscreteScheduler"));
    json_set(root, "id2label", labels);
    return root;
}

static struct json *transformer_config(const struct plan *p)
{
    struct json *c = json_new_object();

    json_set_z(c, "_class_name", "DiTTransformer2DModel");
    json_set_z(c, "activation_fn", "gelu-approximate");
    json_set_bool(c, "attention_bias", true);
    json_set_int(c, "attention_head_dim", p->head_dim);
    json_set_real(c, "dropout", 0);
    json_set_int(c, "in_channels", 3);
    json_set_bool(c, "norm_elementwise_affine", false);
    json_set_real(c, "norm_eps", 1e-5);
    json_set_int(c, "norm_num_groups", 32);
    json_set_z(c, "norm_type", "ada_norm_zero");
    json_set_int(c, "num_attention_heads", p->dim / p->head_dim);
    json_set_int(c, "num_embeds_ada_norm", 64);
    json_set_int(c, "num_layers", p->n_blocks);
    json_set_int(c, "out_channels", 3);
    json_set_int(c, "patch_size", 4);
    json_set_int(c, "sample_size", 32);
    json_set_bool(c, "upcast_attention", false);
    return c;
}

static struct json *scheduler_config(void)
{
    struct json *c = json_new_object();

    json_set_z(c, "_class_name", "FlowMatchEulerDiscreteScheduler");
    json_set_int(c, "num_train_timesteps", 1000);
    json_set_real(c, "shift", 1);
    return c;
}

static int make_checkpoint(struct make *m, const struct plan *p, pf_error *err)
{
    const struct plan_meta meta[] = {{"format", "pt"}};
    char *transformer, *scheduler;
    int rc;

    if (m->partial == NULL)
        return write_weights(m, NULL, m->out, p, meta, PF_COUNTOF(meta), &m->report.n_bytes, err);
    transformer = path_join(m->partial, "transformer");
    scheduler = path_join(m->partial, "scheduler");
    rc = transformer == NULL || scheduler == NULL ? err_nomem(err, 0, "a path") : PF_OK;
    if (rc == PF_OK)
        rc = file_mkdirs(transformer, err);
    if (rc == PF_OK)
        rc = file_mkdirs(scheduler, err);
    if (rc == PF_OK)
        rc = write_json(m->partial, "model_index.json", model_index(), err);
    if (rc == PF_OK)
        rc = write_json(scheduler, "scheduler_config.json", scheduler_config(), err);
    if (rc == PF_OK)
        rc = write_json(transformer, "config.json", transformer_config(p), err);
    if (rc == PF_OK)
        rc = write_weights(m, transformer, "diffusion_pytorch_model.safetensors", p, meta,
                           PF_COUNTOF(meta), &m->report.n_bytes, err);
    mem_free(transformer);
    mem_free(scheduler);
    return rc;
}

/* ------------------------------------------------------------------------------------------------ adapters */

static struct json *target_names(const struct plan *base)
{
    struct json *names = json_new_array();
    size_t i;

    for (i = 0; base->target_names[i] != NULL; i++)
        json_add(names, json_new_string(str_of(base->target_names[i])));
    return names;
}

/* What rank and scale are, where the keys alone do not say it. prefix: "" or "transformer.". */
static struct json *lora_config(const struct make *m, const struct plan *base, const char *prefix)
{
    struct json *c = json_new_object();
    char key[64];

    (void)snprintf(key, sizeof(key), "%sr", prefix);
    json_set_int(c, key, m->opts->rank);
    (void)snprintf(key, sizeof(key), "%slora_alpha", prefix);
    if (m->alpha == floor(m->alpha) && fabs(m->alpha) < 1e9)
        json_set_int(c, key, (int64_t)m->alpha);
    else
        json_set_real(c, key, m->alpha);
    (void)snprintf(key, sizeof(key), "%suse_rslora", prefix);
    json_set_bool(c, key, false);
    (void)snprintf(key, sizeof(key), "%starget_modules", prefix);
    json_set(c, key, target_names(base));
    return c;
}

static struct json *peft_config(const struct make *m, const struct plan *base)
{
    struct json *c = lora_config(m, base, "");

    json_set_z(c, "peft_type", "LORA");
    json_set(c, "rank_pattern", json_new_object());
    json_set(c, "alpha_pattern", json_new_object());
    json_set_bool(c, "fan_in_fan_out", false);
    json_set_z(c, "bias", "none");
    json_set_bool(c, "lora_bias", false);
    json_set_bool(c, "use_dora", false);
    json_set_bool(c, "init_lora_weights", true);
    json_set_bool(c, "inference_mode", true);
    return c;
}

static int make_peft(struct make *m, const struct plan *base, const struct plan *p, pf_error *err)
{
    const struct plan_meta meta[] = {{"format", "pt"}};
    int rc = file_mkdirs(m->partial, err);

    if (rc == PF_OK)
        rc = write_json(m->partial, "adapter_config.json", peft_config(m, base), err);
    if (rc == PF_OK)
        rc = write_weights(m, m->partial, "adapter_model.safetensors", p, meta, PF_COUNTOF(meta),
                           &m->report.n_bytes, err);
    return rc;
}

static int make_adapter_file(struct make *m, const struct plan *base, const struct plan *p,
                             pf_error *err)
{
    char rank[16], alpha[32];
    const struct plan_meta kohya[] = {{"ss_network_module", "networks.lora"},
                                      {"ss_network_dim", rank},
                                      {"ss_network_alpha", alpha}};
    struct plan_meta plain[] = {{"format", "pt"}, {"lora_adapter_metadata", NULL}};
    struct strbuf text;
    int rc = PF_OK;

    (void)snprintf(rank, sizeof(rank), "%u", m->opts->rank);
    (void)snprintf(alpha, sizeof(alpha), "%.9g", m->alpha);
    if (strcmp(m->dialect, "kohya") == 0)
        return write_weights(m, NULL, m->out, p, kohya, PF_COUNTOF(kohya), &m->report.n_bytes, err);
    if (strcmp(m->dialect, "diffusers") != 0)
        return write_weights(m, NULL, m->out, p, plain, 1, &m->report.n_bytes, err);
    strbuf_init(&text);
    {
        struct json *config = lora_config(m, base, "transformer.");
        rc = json_write(config, 0, &text, err);
        json_free(config);
    }
    plain[1].value = strbuf_z(&text);
    if (rc == PF_OK)
        rc = write_weights(m, NULL, m->out, p, plain, 2, &m->report.n_bytes, err);
    strbuf_release(&text);
    return rc;
}

static int make_adapter(struct make *m, const struct plan *base, pf_error *err)
{
    const double rank = m->opts->rank;
    /* The entries of alpha / rank x B A have variance (alpha / rank)^2 rank a^2 b^2; a = b keeps both far from f16's edges. */
    const double product = m->delta_rms * BENCH_WEIGHT_RMS / (fabs(m->alpha) / rank * sqrt(rank));
    struct plan p;
    int rc;

    plan_init(&p, m->dtype, sqrt(product));
    rc = plan_adapter(&p, base, m->dialect, m->opts->rank, m->alpha, err);
    if (rc == PF_OK)
        rc = m->partial != NULL ? make_peft(m, base, &p, err) : make_adapter_file(m, base, &p, err);
    m->report.n_tensors = (uint32_t)p.n_tensors;
    plan_release(&p);
    return rc;
}

/* ------------------------------------------------------------------------------------------------- outside */

static int check_options(struct make *m, pf_error *err)
{
    const struct bench_make_opts *o = m->opts;

    if (o->size != sizeof(*o))
        return err_set(err, PF_E_INVALID, "options of %u bytes instead of %zu", o->size,
                       sizeof(*o));
    if (o->out == NULL || o->out[0] == 0)
        return err_set(err, PF_E_INVALID, "no output is given");
    if (o->rank > 4096)
        return err_set(err, PF_E_INVALID, "rank %u is larger than 4096", o->rank);
    if (!isfinite(o->alpha))
        return err_set(err, PF_E_INVALID, "alpha %g is not a number", o->alpha);
    if (!(o->delta_rms >= 0 && o->delta_rms <= 100))
        return err_set(err, PF_E_INVALID, "relative delta %g is not in 0..100", o->delta_rms);
    m->dialect = o->dialect != NULL ? o->dialect : "peft";
    m->alpha = o->alpha != 0 ? o->alpha : o->rank;
    m->delta_rms = o->delta_rms != 0 ? o->delta_rms : 1e-3;
    if (!dtype_parse(str_of(o->dtype != NULL ? o->dtype : "F32"), &m->dtype) ||
        (m->dtype != PF_F32 && m->dtype != PF_F16 && m->dtype != PF_BF16))
        return err_set(err, PF_E_INVALID, "factor dtype '%s' is not F32, F16 or BF16", o->dtype);
    return PF_OK;
}

/* out, and partial where the output is a directory; what an earlier run left of partial goes. */
static int prepare_output(struct make *m, pf_error *err)
{
    const bool is_dir =
        m->opts->rank == 0 ? strcmp(m->opts->shape, "h3") != 0 : strcmp(m->dialect, "peft") == 0;
    struct strbuf b;
    size_t n = strlen(m->opts->out);

    while (n > 1 && m->opts->out[n - 1] == '/')
        n--;
    m->out = mem_strndup(m->opts->out, n);
    if (m->out == NULL)
        return err_nomem(err, n, "a path");
    if (file_kind(m->out) != FILE_ABSENT)
        return err_set(err, PF_E_EXISTS, "'%s' exists: remove it first, or choose another name",
                       m->out);
    if (!is_dir)
        return PF_OK;
    strbuf_init(&b);
    strbuf_addf(&b, "%s.partial", m->out);
    m->partial = strbuf_take(&b);
    if (m->partial == NULL)
        return err_nomem(err, n, "a path");
    return file_remove_tree(m->partial, err);
}

static int publish_dir(const struct make *m, pf_error *err)
{
    char *parent = path_dir(m->out);
    int rc = parent == NULL ? err_nomem(err, 0, "a path") : file_sync_dir(m->partial, err);

    if (rc == PF_OK)
        rc = file_rename(m->partial, m->out, err);
    if (rc == PF_OK)
        rc = file_sync_dir(parent, err);
    mem_free(parent);
    return rc;
}

static int make_all(struct make *m, const struct plan *base, pf_error *err)
{
    int rc = prepare_output(m, err);

    if (rc != PF_OK)
        return rc;
    rc = pool_new(m->opts->n_threads, &m->pool, err);
    if (rc != PF_OK)
        return rc;
    m->report.what = m->opts->rank == 0 ? "checkpoint" : "adapter";
    m->report.n_tensors = (uint32_t)base->n_tensors;
    m->report.n_targets = (uint32_t)base->n_targets;
    rc = m->opts->rank == 0 ? make_checkpoint(m, base, err) : make_adapter(m, base, err);
    if (rc == PF_OK && m->partial != NULL)
        rc = publish_dir(m, err);
    if (rc != PF_OK && m->partial != NULL)
        (void)file_remove_tree(m->partial, NULL); /* the first error is the one to report */
    return rc;
}

int bench_make(const struct bench_make_opts *opts, pf_error *err)
{
    struct make m = {.opts = opts};
    const uint64_t t0 = clock_ns();
    struct plan base;
    int rc = check_options(&m, err);

    if (rc != PF_OK)
        return rc;
    plan_init(&base, PF_BF16, BENCH_WEIGHT_RMS);
    rc = plan_shape(&base, opts, err);
    if (rc == PF_OK)
        rc = make_all(&m, &base, err);
    if (rc == PF_OK && opts->report != NULL) {
        m.report.seconds = (double)(clock_ns() - t0) * 1e-9;
        *opts->report = m.report;
    }
    pool_free(m.pool);
    plan_release(&base);
    mem_free(m.out);
    mem_free(m.partial);
    return rc;
}
