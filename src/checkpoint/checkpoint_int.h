/*
 * What the files of this module share: a path is located (ckpt_locate.c, hub.c) into components and their files, an index is
 * parsed (shards.c), names are sorted into layers (layers.c), and checkpoint.c puts the pieces together. Nobody outside
 * src/checkpoint/ includes this, fuzz targets and tests of the index parser excepted.
 */
#ifndef PF_CHECKPOINT_CHECKPOINT_INT_H
#define PF_CHECKPOINT_CHECKPOINT_INT_H

#include <pthread.h>

#include "base/json.h"
#include "base/mem.h"
#include "checkpoint/checkpoint.h"

/* The only component of a checkpoint that has none. */
#define CKPT_COMPONENT_DEFAULT "transformer"
#define CKPT_INDEX_BYTES_MAX   ((size_t)512 << 20)
#define CKPT_CONFIG_BYTES_MAX  ((size_t)16 << 20)
#define CKPT_STEM              UINT32_MAX

/* ------------------------------------------------------------------------------------------ where things are */

/* One component as found on disk. Either index_path or files is set; strings live in the arena. */
struct ckpt_place {
    const char *name, *path;
    const char *config_path, *index_path; /* or NULL */
    const char **files;                   /* paths, sorted by name */
    size_t n_files;
};

struct ckpt_location {
    const char *path, *layout;
    struct ckpt_place *places; /* sorted by name */
    size_t n_places;
};

/* PF_E_NOTFOUND, PF_E_UNSUPPORTED, PF_E_AMBIGUOUS, PF_E_IO, PF_E_NOMEM. */
int ckpt_locate(struct arena *a, const char *path, struct ckpt_location *out, pf_error *err);

/* "org/name" in the local hub cache, offline: the directory of the snapshot to use. PF_E_NOTFOUND. */
int ckpt_hub_find(struct arena *a, const char *name, const char **out_dir, pf_error *err);
/* Could `name` be a hub name at all: one slash, and characters that the hub allows. */
bool ckpt_hub_is_name(const char *name);
/* A repository's directory of the cache, `models--org--name`: the snapshot to use. PF_E_NOTFOUND. */
int ckpt_hub_snapshot(struct arena *a, const char *repo_dir, const char **out_dir, pf_error *err);

/* NULL: no memory */
const char *ckpt_arena_join(struct arena *a, const char *dir, const char *name);
const char *ckpt_arena_dir(struct arena *a, const char *path); /* "." when there is none */

/* ------------------------------------------------------------------------------------------- the shard index */

struct ckpt_index_entry {
    struct str name; /* borrowed from root */
    uint32_t i_shard;
};

struct ckpt_index {
    struct json *root;
    struct ckpt_index_entry *entries; /* sorted by name */
    const char **shards;              /* distinct, sorted bytewise; borrowed from root */
    size_t n_entries, n_shards;
};

/* `what` names the document in errors. PF_E_FORMAT, PF_E_UNSUPPORTED (a shard that is no safetensors), PF_E_NOMEM. */
int ckpt_index_parse(const char *p, size_t n, const char *what, struct ckpt_index *out,
                     pf_error *err);
int ckpt_index_load(const char *path, struct ckpt_index *out, pf_error *err);
void ckpt_index_release(struct ckpt_index *index); /* a zeroed one is fine */
/* Shard of a tensor, or -1. */
int64_t ckpt_index_find(const struct ckpt_index *index, struct str name);

/* --------------------------------------------------------------------------------------------------- layers */

/* A tensor on its way into the checkpoint. */
struct ckpt_entry {
    struct str name, name_in_file;
    uint32_t i_component, i_layer, i_file, i_in_file;
    uint32_t i_by_name; /* position in (component, name) order */
};

struct ckpt_layer_list {
    struct ckpt_layer *items;
    size_t n, cap;
};

/*
 * Finds the layers of one component. entries are sorted by name; their i_layer is set to an index into `layers`, to which
 * the component's layers are appended: the stem first, then blocks in natural order. Ranges and sizes are left zero.
 */
int ckpt_layers_find(struct arena *a, struct ckpt_entry *entries, size_t n_entries,
                     uint32_t i_component, struct ckpt_layer_list *layers, pf_error *err);

/* -------------------------------------------------------------------------------------------------- the rest */

struct ckpt_priv {
    struct arena arena;
    uint32_t *by_name; /* tensor indices in (component, name) order */
    pthread_mutex_t mu;
    bool has_content_id;         /* guarded by mu, like the next three */
    bool is_suspect, is_refined; /* of the id: other bytes were seen; the full digests are in it */
    struct digest content_id;
    pthread_mutex_t stamp_mu; /* may be taken while holding mu */
    /* Per file, under which its bytes were proved last; guarded by stamp_mu */
    struct file_stamp *stamps;
};

#endif
