/*
 * The base weights as one object: files, components, layers, tensors, identity. Read-only, mapped, never written. The public
 * half (pf_checkpoint_*) is in pageflip.h; this is what the lower floors of the house see. Immutable after open, except for
 * the content id, which is computed once under its own mutex, and the stamps under which the files were proved last.
 */
#ifndef PF_CHECKPOINT_CHECKPOINT_H
#define PF_CHECKPOINT_CHECKPOINT_H

#include "base/hash.h"
#include "safetensors/safetensors.h"

struct ckpt_tensor {
    struct str name; /* NUL-terminated too; without ".base_layer" */
    struct str name_in_file;
    int32_t dtype;
    struct shape shape;
    uint32_t i_component, i_layer, i_file;
    uint64_t off_bytes, n_bytes;
    const uint8_t *p; /* mapped, unaligned */
};

struct ckpt_layer {
    const char *name; /* "transformer_blocks.7", "stem" */
    uint32_t i_component;
    bool is_stem;
    uint32_t i_tensor0, n_tensors; /* a contiguous run of the tensor array */
    uint64_t n_bytes;
};

struct ckpt_component {
    const char *name;        /* "transformer"; the directory's name in a diffusers directory */
    const char *path;        /* directory, or the file */
    const char *config_path; /* or NULL */
    const char *class_name;  /* or NULL */
    const char *index_path;  /* the .index.json, or NULL */
    uint32_t i_tensor0, n_tensors;
    /* The stem is the first layer when there is one, then blocks in natural order */
    uint32_t i_layer0, n_layers;
    uint32_t i_file0, n_files;
    uint64_t n_bytes;
};

struct pf_checkpoint {
    _Atomic uint32_t n_refs;
    const char *path;   /* resolved */
    const char *layout; /* "file", "sharded", "directory" */
    struct ckpt_component *components;
    struct ckpt_layer *layers;
    struct ckpt_tensor *tensors; /* sorted by (component, layer, file, offset) */
    struct st_file **files;      /* a shard each */
    uint32_t n_components, n_layers, n_tensors, n_files;
    uint64_t n_bytes;
    struct ckpt_priv *priv; /* arena, name index, content id: checkpoint*.c only */
};

void ckpt_ref(struct pf_checkpoint *ckpt);
/* Index in `tensors`, or -1. */
int64_t ckpt_find(const struct pf_checkpoint *ckpt, uint32_t i_component, struct str name);
/* Component index by name, or -1. */
int64_t ckpt_component_find(const struct pf_checkpoint *ckpt, struct str name);
int ckpt_content_id(struct pf_checkpoint *ckpt, struct digest *out, pf_error *err);
/* The stat stamp of file i under which its bytes are those of the content id. */
struct file_stamp ckpt_stamp(const struct pf_checkpoint *ckpt, uint32_t i_file);
/*
 * As pf_checkpoint_verify; but files that were only touched, linked or given another mode are no others: they have their names, their
 * sizes and their content id, which is read again. Their new stamps count from then on. PF_E_CHANGED, PF_E_TRUNCATED.
 */
int ckpt_verify_again(struct pf_checkpoint *ckpt, pf_error *err);
/* What was remembered for files with the same stat stamps; no effect once there is an id. */
void ckpt_content_id_recall(struct pf_checkpoint *ckpt, struct digest id, bool is_refined);
/*
 * Other bytes than expected were found behind the content id: the digests of all tensors enter it from now on. Reads the whole
 * checkpoint, holding no lock; from the call on, ckpt_content_id_holds says no to the id before. progress may be NULL. PF_E_CHANGED,
 * PF_E_TRUNCATED, PF_E_CANCELLED: the id before stays, distrusted.
 */
int ckpt_content_id_refine(struct pf_checkpoint *ckpt, pf_progress_fn progress, void *ctx,
                           pf_error *err);
bool ckpt_content_id_is_refined(struct pf_checkpoint *ckpt);
/* May what was computed under this id be published? */
bool ckpt_content_id_holds(struct pf_checkpoint *ckpt, struct digest id);
/* Is `path` (by any name: link, hard link, inside the directory) part of this checkpoint? Guards outputs. */
bool ckpt_contains_path(const struct pf_checkpoint *ckpt, const char *path);
/* PF_E_TRUNCATED when the guard of the file behind tensor i tripped. Cheap: no system call. */
int ckpt_tensor_guard(const struct pf_checkpoint *ckpt, uint32_t i_tensor, pf_error *err);

#endif
