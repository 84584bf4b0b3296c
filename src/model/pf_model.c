/*
 * Public entry points of a model: open (config, tensors, names, times, threads), close, info. No weight is read here.
 */
#include "model/model.h"

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/opts.h"
#include "model/gemm.h"

#define JSON_BYTES_MAX ((size_t)16 << 20)

/* A document beside the components of a directory: NULL when it is absent. */
static int read_beside(const struct pf_checkpoint *ckpt, const char *name, struct json **out,
                       char **out_path, pf_error *err)
{
    *out = NULL;
    *out_path = path_join(ckpt->path, name);
    if (*out_path == NULL)
        return err_nomem(err, str_of(name).n, "path");
    if (file_kind(*out_path) != FILE_REGULAR)
        return PF_OK;
    return json_parse_file(*out_path, JSON_BYTES_MAX, out, err);
}

static int read_labels(struct pf_model *m, pf_error *err)
{
    struct json *index = NULL, *config = NULL;
    char *path = NULL;
    int rc = read_beside(m->ckpt, "model_index.json", &index, &path, err);
    if (rc == PF_OK)
        rc = json_parse_file(m->ckpt->components[m->i_component].config_path, JSON_BYTES_MAX,
                             &config, err);
    if (rc == PF_OK)
        rc = labels_read(&m->labels, (uint32_t)m->dit.config.n_classes, index, config, err);
    json_free(index);
    json_free(config);
    mem_free(path);
    return rc;
}

static int read_schedule(struct pf_model *m, pf_error *err)
{
    struct json *config = NULL;
    char *path = NULL;
    int rc = read_beside(m->ckpt, "scheduler/scheduler_config.json", &config, &path, err);
    if (rc == PF_OK)
        rc = schedule_read(config, path, &m->schedule, err);
    json_free(config);
    mem_free(path);
    return rc;
}

int pf_model_open(struct pf_checkpoint *ckpt, const struct pf_model_opts *opts,
                  struct pf_model **out_model, pf_error *err)
{
    struct pf_model_opts o;
    if (ckpt == NULL || out_model == NULL)
        return err_set(err, PF_E_INVALID, "a model needs a checkpoint");
    opts_read(&o, sizeof o, opts);
    const char *component = o.component == NULL ? "transformer" : o.component;
    int64_t i_component = ckpt_component_find(ckpt, str_of(component));
    if (i_component < 0)
        return err_set(err, PF_E_NOTFOUND, "checkpoint '%s' has no component '%s'", ckpt->path,
                       component);
    struct pf_model *m = mem_calloc(1, sizeof *m);
    if (m == NULL)
        return err_nomem(err, sizeof *m, "model");
    atomic_flag_clear(&m->is_busy);
    m->i_component = (uint32_t)i_component;
    m->ckpt = ckpt;
    ckpt_ref(ckpt);
    int rc = dit_load(&m->dit, ckpt, m->i_component, err);
    if (rc == PF_OK)
        rc = read_labels(m, err);
    if (rc == PF_OK)
        rc = read_schedule(m, err);
    if (rc == PF_OK)
        rc = gemm_init(err); /* before any thread of ours exists */
    if (rc == PF_OK)
        rc = pool_new(o.n_threads, &m->pool, err);
    if (rc != PF_OK) {
        pf_model_close(m);
        return rc;
    }
    *out_model = m;
    return PF_OK;
}

void pf_model_close(struct pf_model *m)
{
    if (m == NULL)
        return;
    pool_free(m->pool);
    labels_release(&m->labels);
    dit_release(&m->dit);
    pf_checkpoint_close(m->ckpt);
    mem_free(m);
}

void pf_model_info(const struct pf_model *m, struct pf_model_info *out_info)
{
    const struct dit_config *c = &m->dit.config;
    *out_info = (struct pf_model_info){
        .width = (uint32_t)c->size,
        .height = (uint32_t)c->size,
        .channels = (uint32_t)c->channels,
        .n_classes = (uint32_t)c->n_classes,
        .n_blocks = (uint32_t)c->n_blocks,
        .n_heads = (uint32_t)c->n_heads,
        .head_dim = (uint32_t)c->head_dim,
        .patch = (uint32_t)c->patch,
        .default_steps = MODEL_STEPS,
        .default_guidance = MODEL_GUIDANCE,
    };
}

const char *pf_model_class_name(const struct pf_model *m, uint32_t i_class)
{
    return i_class < m->labels.n_classes ? m->labels.names[i_class] : NULL;
}

int pf_model_find_class(const struct pf_model *m, const char *prompt, uint32_t *out_class,
                        pf_error *err)
{
    if (prompt == NULL || out_class == NULL)
        return err_set(err, PF_E_INVALID, "a prompt is needed");
    return labels_find(&m->labels, prompt, out_class, err);
}
