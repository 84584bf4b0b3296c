/*
 * Opening a checkpoint: locate, open every file, take the tensors that belong to it, sort them into layers, build the tables
 * that everybody above reads. After pf_checkpoint_open nothing changes any more, except for what identity.c knows.
 * Memory per tensor is one entry of the arrays and its name in the arena; weights are mapped and never touched here.
 */
#include "checkpoint/checkpoint_int.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/opts.h"

/* What lives only while the checkpoint is being opened. */
struct opening {
    struct pf_checkpoint *ckpt;
    struct ckpt_location where;
    struct ckpt_index *indices; /* one per component, zeroed where there is none */
    struct ckpt_entry *entries;
    size_t n_entries;
    struct ckpt_layer_list layers;
};

/* ------------------------------------------------------------------------------------------------ the files */

static int missing_file(const char *path, const char *index_path, pf_error *err)
{
    char target[1];
    const char *why = readlink(path, target, sizeof target) > 0
                          ? "is a link to a file that is not there: its download was not finished"
                          : "is missing";
    if (index_path != NULL)
        return err_set(err, PF_E_NOTFOUND, "index '%s': shard '%s' %s", index_path, path, why);
    return err_set(err, PF_E_NOTFOUND, "'%s' %s", path, why);
}

/* The paths of the shards that the index of place i names, relative to where the index is, whatever it links to. */
static int place_shards(struct opening *o, size_t i, pf_error *err)
{
    struct ckpt_place *place = &o->where.places[i];
    struct ckpt_index *index = &o->indices[i];
    struct arena *a = &o->ckpt->priv->arena;
    if (file_kind(place->index_path) == FILE_ABSENT)
        return missing_file(place->index_path, NULL, err);
    int rc = ckpt_index_load(place->index_path, index, err);
    if (rc != PF_OK)
        return rc;
    const char *dir = ckpt_arena_dir(a, place->index_path);
    place->files = arena_alloc(a, index->n_shards * sizeof *place->files);
    if (dir == NULL || place->files == NULL)
        return err_nomem(err, index->n_shards * sizeof *place->files, "shard names");
    for (size_t k = 0; k < index->n_shards; k++) {
        place->files[k] = ckpt_arena_join(a, dir, index->shards[k]);
        if (place->files[k] == NULL)
            return err_nomem(err, strlen(dir), "path");
    }
    place->n_files = index->n_shards;
    return PF_OK;
}

static int open_files(struct opening *o, pf_error *err)
{
    struct pf_checkpoint *ckpt = o->ckpt;
    size_t n_files = 0;
    for (size_t i = 0; i < o->where.n_places; i++) {
        int rc = o->where.places[i].index_path != NULL ? place_shards(o, i, err) : PF_OK;
        if (rc != PF_OK)
            return rc;
        n_files += o->where.places[i].n_files;
    }
    if (n_files > UINT32_MAX)
        return err_set(err, PF_E_RANGE, "'%s' has %zu files", ckpt->path, n_files);
    ckpt->files = mem_calloc(n_files, sizeof(struct st_file *));
    if (ckpt->files == NULL)
        return err_nomem(err, n_files * sizeof(struct st_file *), "files");
    for (size_t i = 0; i < o->where.n_places; i++) {
        const struct ckpt_place *place = &o->where.places[i];
        ckpt->components[i].i_file0 = ckpt->n_files;
        ckpt->components[i].n_files = (uint32_t)place->n_files;
        for (size_t k = 0; k < place->n_files; k++) {
            if (file_kind(place->files[k]) == FILE_ABSENT)
                return missing_file(place->files[k], place->index_path, err);
            int rc = st_open(place->files[k], &ckpt->files[ckpt->n_files], err);
            if (rc != PF_OK)
                return rc;
            ckpt->n_files++;
        }
    }
    ckpt->priv->stamps = mem_calloc(n_files + 1, sizeof *ckpt->priv->stamps);
    if (ckpt->priv->stamps == NULL)
        return err_nomem(err, n_files * sizeof *ckpt->priv->stamps, "files");
    for (uint32_t i = 0; i < ckpt->n_files; i++)
        ckpt->priv->stamps[i] = st_map(ckpt->files[i])->stamp;
    return PF_OK;
}

/* -------------------------------------------------------------------------------------------- the components */

/* "_class_name", or architectures[0]. A config that cannot be read is for whoever needs it to complain about. */
static const char *read_class_name(struct arena *a, const char *config_path)
{
    struct json *config = NULL;
    pf_error why = {0};
    if (json_parse_file(config_path, CKPT_CONFIG_BYTES_MAX, &config, &why) != PF_OK) {
        log_at(PF_LOG_WARN, "%s", why.msg);
        return NULL;
    }
    const char *z = json_z(json_get(config, "_class_name"));
    if (z == NULL)
        z = json_z(json_at(json_get(config, "architectures"), 0));
    const char *name = z != NULL ? arena_strndup(a, z, strlen(z)) : NULL;
    json_free(config);
    return name;
}

static int make_components(struct opening *o, pf_error *err)
{
    struct pf_checkpoint *ckpt = o->ckpt;
    size_t n = o->where.n_places;
    ckpt->path = o->where.path;
    ckpt->layout = o->where.layout;
    ckpt->components = mem_calloc(n, sizeof *ckpt->components);
    o->indices = mem_calloc(n, sizeof *o->indices);
    if (ckpt->components == NULL || o->indices == NULL)
        return err_nomem(err, n * sizeof *ckpt->components, "components");
    ckpt->n_components = (uint32_t)n;
    for (size_t i = 0; i < n; i++) {
        const struct ckpt_place *place = &o->where.places[i];
        struct ckpt_component *c = &ckpt->components[i];
        c->name = place->name;
        c->path = place->path;
        c->config_path = place->config_path;
        c->index_path = place->index_path;
        if (c->config_path != NULL)
            c->class_name = read_class_name(&ckpt->priv->arena, c->config_path);
    }
    return PF_OK;
}

/* ----------------------------------------------------------------------------------------------- the tensors */

/* "x.base_layer.weight", as training tools save a wrapped module, is addressed as "x.weight". */
static bool without_base_layer(struct str name, size_t *out_cut)
{
    static const char infix[] = ".base_layer";
    size_t n = sizeof infix - 1, i_dot = name.n;
    while (i_dot > 0 && name.p[i_dot - 1] != '.')
        i_dot--;
    if (i_dot < n + 2 || memcmp(name.p + i_dot - 1 - n, infix, n) != 0)
        return false;
    *out_cut = i_dot - 1;
    return true;
}

/* Names hold no NUL: the file reader refuses those. */
static int set_names(struct opening *o, struct ckpt_entry *e, struct str in_file, pf_error *err)
{
    static const size_t n_infix = sizeof ".base_layer" - 1;
    struct arena *a = &o->ckpt->priv->arena;
    size_t cut = 0;
    char *z = arena_strndup(a, in_file.p, in_file.n);
    if (z == NULL)
        return err_nomem(err, in_file.n + 1, "tensor name");
    e->name_in_file = e->name = (struct str){z, in_file.n};
    if (!without_base_layer(in_file, &cut))
        return PF_OK;
    z = arena_strndup(a, in_file.p, in_file.n);
    if (z == NULL)
        return err_nomem(err, in_file.n + 1, "tensor name");
    memmove(z + cut - n_infix, z + cut, in_file.n - cut + 1);
    e->name = (struct str){z, in_file.n - n_infix};
    return PF_OK;
}

/* An entry of the index that no tensor answered. */
static int not_in_shard(const struct opening *o, size_t i_component, pf_error *err)
{
    const struct ckpt_component *c = &o->ckpt->components[i_component];
    const struct ckpt_index *index = &o->indices[i_component];
    for (size_t k = 0; k < index->n_entries; k++) {
        const struct ckpt_index_entry *e = &index->entries[k];
        if (st_find(o->ckpt->files[c->i_file0 + e->i_shard], e->name) == NULL)
            return err_set(err, PF_E_FORMAT, "index '%s': tensor '%.300s' is not in shard '%s'",
                           c->index_path, e->name.p, index->shards[e->i_shard]);
    }
    return err_set(err, PF_E_FORMAT, "index '%s' does not agree with its shards", c->index_path);
}

/* Takes the tensors of one file. With an index, those that it leaves out are none of the checkpoint's. */
static int take_file(struct opening *o, uint32_t i_component, uint32_t i_file, pf_error *err)
{
    const struct ckpt_component *c = &o->ckpt->components[i_component];
    const struct ckpt_index *index = c->index_path != NULL ? &o->indices[i_component] : NULL;
    const struct st_file *f = o->ckpt->files[i_file];
    size_t n_left_out = 0;
    for (size_t k = 0; k < st_n_tensors(f); k++) {
        const struct st_tensor *t = st_tensor(f, k);
        int64_t i_shard = index != NULL ? ckpt_index_find(index, t->name) : 0;
        if (i_shard < 0) {
            n_left_out++;
            continue;
        }
        if (index != NULL && (uint32_t)i_shard != i_file - c->i_file0)
            return err_set(err, PF_E_CONFLICT,
                           "index '%s': tensor '%.*s' is in shard '%s' and also in '%s'",
                           c->index_path, t->name.n < 300 ? (int)t->name.n : 300, t->name.p,
                           index->shards[i_shard], index->shards[i_file - c->i_file0]);
        struct ckpt_entry *e = &o->entries[o->n_entries];
        *e = (struct ckpt_entry){
            .i_component = i_component, .i_file = i_file, .i_in_file = (uint32_t)k};
        int rc = set_names(o, e, t->name, err);
        if (rc != PF_OK)
            return rc;
        o->n_entries++;
    }
    if (n_left_out > 0)
        log_at(PF_LOG_INFO, "'%s': %zu tensors are not in the index and are left out", st_path(f),
               n_left_out);
    return PF_OK;
}

static int take_tensors(struct opening *o, pf_error *err)
{
    struct pf_checkpoint *ckpt = o->ckpt;
    size_t n = 0;
    for (uint32_t i = 0; i < ckpt->n_files; i++)
        n += st_n_tensors(ckpt->files[i]);
    if (n > UINT32_MAX)
        return err_set(err, PF_E_RANGE, "'%s' has %zu tensors", ckpt->path, n);
    o->entries = mem_calloc(n + 1, sizeof *o->entries);
    if (o->entries == NULL)
        return err_nomem(err, (n + 1) * sizeof *o->entries, "tensors");
    for (uint32_t i = 0; i < ckpt->n_components; i++) {
        struct ckpt_component *c = &ckpt->components[i];
        size_t n_before = o->n_entries;
        for (uint32_t k = 0; k < c->n_files; k++) {
            int rc = take_file(o, i, c->i_file0 + k, err);
            if (rc != PF_OK)
                return rc;
        }
        c->n_tensors = (uint32_t)(o->n_entries - n_before);
        c->i_tensor0 = (uint32_t)n_before;
        if (c->index_path != NULL && c->n_tensors != o->indices[i].n_entries)
            return not_in_shard(o, i, err);
    }
    return PF_OK;
}

/* -------------------------------------------------------------------------------------------- order and tables */

static int cmp_by_name(const void *x, const void *y)
{
    const struct ckpt_entry *a = x, *b = y;
    if (a->i_component != b->i_component)
        return a->i_component < b->i_component ? -1 : 1;
    int c = str_cmp(a->name, b->name);
    if (c != 0)
        return c;
    /* Equal names are an error; a fixed order makes its message one. */
    return a->i_file != b->i_file         ? (a->i_file < b->i_file ? -1 : 1)
           : a->i_in_file != b->i_in_file ? (a->i_in_file < b->i_in_file ? -1 : 1)
                                          : 0;
}

/* Layers are numbered through the whole checkpoint, component by component. */
static int cmp_by_place(const void *x, const void *y)
{
    const struct ckpt_entry *a = x, *b = y;
    if (a->i_layer != b->i_layer)
        return a->i_layer < b->i_layer ? -1 : 1;
    if (a->i_file != b->i_file)
        return a->i_file < b->i_file ? -1 : 1;
    return (a->i_in_file > b->i_in_file) - (a->i_in_file < b->i_in_file);
}

static int check_names(const struct opening *o, pf_error *err)
{
    for (size_t i = 1; i < o->n_entries; i++) {
        const struct ckpt_entry *a = &o->entries[i - 1], *b = &o->entries[i];
        if (a->i_component != b->i_component || !str_eq(a->name, b->name))
            continue;
        const char *file_a = st_path(o->ckpt->files[a->i_file]);
        const char *file_b = st_path(o->ckpt->files[b->i_file]);
        if (str_eq(a->name_in_file, b->name_in_file))
            return err_set(err, PF_E_CONFLICT, "tensor '%.300s' is in '%s' and also in '%s'",
                           a->name.p, file_a, file_b);
        return err_set(err, PF_E_AMBIGUOUS,
                       "'%s': tensors '%.300s' and '%.300s' both answer to '%.300s'", file_b,
                       a->name_in_file.p, b->name_in_file.p, a->name.p);
    }
    return PF_OK;
}

static int find_layers(struct opening *o, pf_error *err)
{
    struct pf_checkpoint *ckpt = o->ckpt;
    for (uint32_t i = 0; i < ckpt->n_components; i++) {
        struct ckpt_component *c = &ckpt->components[i];
        c->i_layer0 = (uint32_t)o->layers.n;
        int rc = ckpt_layers_find(&ckpt->priv->arena, o->entries + c->i_tensor0, c->n_tensors, i,
                                  &o->layers, err);
        if (rc != PF_OK)
            return rc;
        c->n_layers = (uint32_t)o->layers.n - c->i_layer0;
    }
    ckpt->layers = o->layers.items;
    ckpt->n_layers = (uint32_t)o->layers.n;
    o->layers = (struct ckpt_layer_list){0};
    return PF_OK;
}

static void fill_tensor(struct pf_checkpoint *ckpt, uint32_t i, const struct ckpt_entry *e)
{
    const struct st_file *f = ckpt->files[e->i_file];
    const struct st_tensor *s = st_tensor(f, e->i_in_file);
    struct ckpt_tensor *t = &ckpt->tensors[i];
    struct ckpt_layer *layer = &ckpt->layers[e->i_layer];
    struct ckpt_component *c = &ckpt->components[e->i_component];
    t->name = e->name;
    t->name_in_file = e->name_in_file;
    t->dtype = s->dtype;
    t->shape = s->shape;
    t->i_component = e->i_component;
    t->i_layer = e->i_layer;
    t->i_file = e->i_file;
    t->off_bytes = s->off_bytes;
    t->n_bytes = s->n_bytes;
    t->p = st_data(f, s);
    if (layer->n_tensors++ == 0)
        layer->i_tensor0 = i;
    layer->n_bytes += s->n_bytes;
    c->n_bytes += s->n_bytes;
    ckpt->n_bytes += s->n_bytes;
    ckpt->priv->by_name[e->i_by_name] = i;
}

static int build_tables(struct opening *o, pf_error *err)
{
    struct pf_checkpoint *ckpt = o->ckpt;
    size_t n = o->n_entries;
    qsort(o->entries, n, sizeof *o->entries, cmp_by_name);
    int rc = check_names(o, err);
    if (rc == PF_OK)
        rc = find_layers(o, err);
    if (rc != PF_OK)
        return rc;
    for (size_t i = 0; i < n; i++)
        o->entries[i].i_by_name = (uint32_t)i;
    qsort(o->entries, n, sizeof *o->entries, cmp_by_place);
    ckpt->tensors = mem_calloc(n + 1, sizeof *ckpt->tensors);
    ckpt->priv->by_name = mem_calloc(n + 1, sizeof *ckpt->priv->by_name);
    if (ckpt->tensors == NULL || ckpt->priv->by_name == NULL)
        return err_nomem(err, (n + 1) * sizeof *ckpt->tensors, "tensors");
    ckpt->n_tensors = (uint32_t)n;
    for (size_t i = 0; i < n; i++)
        fill_tensor(ckpt, (uint32_t)i, &o->entries[i]);
    return PF_OK;
}

/* ---------------------------------------------------------------------------------------------- open and close */

static void free_checkpoint(struct pf_checkpoint *ckpt)
{
    for (uint32_t i = 0; i < ckpt->n_files; i++)
        st_close(ckpt->files[i]);
    mem_free(ckpt->files);
    mem_free(ckpt->tensors);
    mem_free(ckpt->layers);
    mem_free(ckpt->components);
    if (ckpt->priv != NULL) {
        mem_free(ckpt->priv->by_name);
        mem_free(ckpt->priv->stamps);
        arena_release(&ckpt->priv->arena);
        (void)pthread_mutex_destroy(&ckpt->priv->mu); /* nobody holds them any more */
        (void)pthread_mutex_destroy(&ckpt->priv->stamp_mu);
    }
    mem_free(ckpt->priv);
    mem_free(ckpt);
}

static struct pf_checkpoint *new_checkpoint(void)
{
    struct pf_checkpoint *ckpt = mem_calloc(1, sizeof *ckpt);
    struct ckpt_priv *priv = mem_calloc(1, sizeof *priv);
    if (ckpt == NULL || priv == NULL || pthread_mutex_init(&priv->mu, NULL) != 0) {
        mem_free(ckpt);
        mem_free(priv);
        return NULL;
    }
    (void)pthread_mutex_init(&priv->stamp_mu,
                             NULL); /* cannot fail on Linux with default attributes */
    arena_init(&priv->arena);
    ckpt->priv = priv;
    ckpt->n_refs = 1;
    return ckpt;
}

int pf_checkpoint_open(const char *path, const struct pf_checkpoint_opts *opts,
                       struct pf_checkpoint **out_ckpt, pf_error *err)
{
    if (path == NULL || *path == '\0' || out_ckpt == NULL)
        return err_set(err, PF_E_INVALID, "checkpoint: no path given");
    struct pf_checkpoint_opts given;
    opts_read(&given, sizeof given, opts);
    if (given.flags != 0)
        return err_set(err, PF_E_INVALID, "checkpoint '%s': unknown flags %#x", path, given.flags);
    struct opening o = {.ckpt = new_checkpoint()};
    if (o.ckpt == NULL)
        return err_nomem(err, sizeof *o.ckpt, "checkpoint");
    int rc = ckpt_locate(&o.ckpt->priv->arena, path, &o.where, err);
    if (rc == PF_OK)
        rc = make_components(&o, err);
    if (rc == PF_OK)
        rc = open_files(&o, err);
    if (rc == PF_OK)
        rc = take_tensors(&o, err);
    if (rc == PF_OK)
        rc = build_tables(&o, err);
    for (uint32_t i = 0; o.indices != NULL && i < o.ckpt->n_components; i++)
        ckpt_index_release(&o.indices[i]);
    mem_free(o.indices);
    mem_free(o.entries);
    mem_free(o.layers.items);
    if (rc != PF_OK)
        free_checkpoint(o.ckpt);
    else
        *out_ckpt = o.ckpt;
    return rc;
}

void ckpt_ref(struct pf_checkpoint *ckpt)
{
    /* Relaxed: whoever takes a reference already holds one. */
    (void)atomic_fetch_add_explicit(&ckpt->n_refs, 1, memory_order_relaxed);
}

void pf_checkpoint_close(struct pf_checkpoint *ckpt)
{
    /* Release and acquire: what other holders did happens before the last one frees. */
    if (ckpt != NULL && atomic_fetch_sub_explicit(&ckpt->n_refs, 1, memory_order_acq_rel) == 1)
        free_checkpoint(ckpt);
}
