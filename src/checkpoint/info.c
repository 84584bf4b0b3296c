/*
 * Questions to an open checkpoint: lookups by name, and the public pf_checkpoint_* getters. Nothing here allocates, locks
 * or reads a file. An index out of range gives a zeroed answer.
 */
#include "checkpoint/checkpoint_int.h"

#include <string.h>

int64_t ckpt_find(const struct pf_checkpoint *ckpt, uint32_t i_component, struct str name)
{
    if (i_component >= ckpt->n_components)
        return -1;
    const struct ckpt_component *c = &ckpt->components[i_component];
    const uint32_t *by_name = ckpt->priv->by_name + c->i_tensor0;
    size_t lo = 0, hi = c->n_tensors;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int d = str_cmp(ckpt->tensors[by_name[mid]].name, name);
        if (d == 0)
            return by_name[mid];
        if (d < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return -1;
}

int64_t ckpt_component_find(const struct pf_checkpoint *ckpt, struct str name)
{
    for (uint32_t i = 0; i < ckpt->n_components; i++)
        if (str_eqz(name, ckpt->components[i].name))
            return i;
    return -1;
}

int64_t pf_checkpoint_find(const struct pf_checkpoint *ckpt, const char *component,
                           const char *name)
{
    if (component == NULL || name == NULL)
        return -1;
    int64_t i = ckpt_component_find(ckpt, str_of(component));
    return i >= 0 ? ckpt_find(ckpt, (uint32_t)i, str_of(name)) : -1;
}

void pf_checkpoint_info(const struct pf_checkpoint *ckpt, struct pf_checkpoint_info *out_info)
{
    *out_info = (struct pf_checkpoint_info){
        .path = ckpt->path,
        .layout = ckpt->layout,
        .n_components = ckpt->n_components,
        .n_layers = ckpt->n_layers,
        .n_tensors = ckpt->n_tensors,
        .n_files = ckpt->n_files,
        .n_bytes = ckpt->n_bytes,
    };
}

void pf_checkpoint_component(const struct pf_checkpoint *ckpt, uint32_t i,
                             struct pf_component_info *out_info)
{
    *out_info = (struct pf_component_info){0};
    if (i >= ckpt->n_components)
        return;
    const struct ckpt_component *c = &ckpt->components[i];
    *out_info = (struct pf_component_info){
        .name = c->name,
        .path = c->path,
        .config_path = c->config_path,
        .class_name = c->class_name,
        .n_tensors = c->n_tensors,
        .n_layers = c->n_layers,
        .n_files = c->n_files,
        .n_bytes = c->n_bytes,
    };
}

void pf_checkpoint_layer(const struct pf_checkpoint *ckpt, uint32_t i,
                         struct pf_layer_info *out_info)
{
    *out_info = (struct pf_layer_info){0};
    if (i >= ckpt->n_layers)
        return;
    const struct ckpt_layer *l = &ckpt->layers[i];
    *out_info = (struct pf_layer_info){
        .name = l->name,
        .i_component = l->i_component,
        .is_stem = l->is_stem,
        .n_tensors = l->n_tensors,
        .n_bytes = l->n_bytes,
    };
}

void pf_checkpoint_tensor(const struct pf_checkpoint *ckpt, uint32_t i,
                          struct pf_tensor_info *out_info)
{
    *out_info = (struct pf_tensor_info){0};
    if (i >= ckpt->n_tensors)
        return;
    const struct ckpt_tensor *t = &ckpt->tensors[i];
    *out_info = (struct pf_tensor_info){
        .name = t->name.p,
        .component = ckpt->components[t->i_component].name,
        .file = st_path(ckpt->files[t->i_file]),
        .dtype = t->dtype,
        .rank = t->shape.rank,
        .off_bytes = t->off_bytes,
        .n_bytes = t->n_bytes,
        .i_component = t->i_component,
        .i_layer = t->i_layer,
    };
    for (int32_t k = 0; k < t->shape.rank && k < PF_MAX_RANK; k++)
        out_info->shape[k] = t->shape.dim[k];
}
