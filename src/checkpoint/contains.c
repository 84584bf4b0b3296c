/*
 * Does a path lead into a checkpoint? Asked before anything is written or replaced: an output may not be the base by any
 * name, nor lie in its directory, nor be a directory that holds it. Existing paths are compared by inode, all by their
 * resolved names.
 */
#include "checkpoint/checkpoint_int.h"

#include <string.h>

/* The resolved name that `path` has, or would have: what exists of it is resolved, the rest kept. NULL: no memory. */
static char *resolve(const char *path)
{
    char *real = NULL;
    if (file_realpath(path, &real, NULL) == PF_OK)
        return real;
    char *dir = path_dir(path);
    struct str base = path_base(path);
    char *parent = NULL, *out = NULL;
    if (dir != NULL && strcmp(dir, path) != 0)
        parent = resolve(dir);
    char *name = mem_strndup(base.p, base.n);
    if (parent != NULL && name != NULL)
        out = path_join(parent, name);
    mem_free(name);
    mem_free(parent);
    mem_free(dir);
    return out;
}

/* Is `path` (resolved: `real`) this file of the checkpoint, another name of it, or a directory above it? */
static bool covers_file(const char *path, const char *real, const char *file)
{
    char *real_file = resolve(file);
    bool covers = file_same(path, file) || (real_file != NULL && path_is_below(real_file, real));
    mem_free(real_file);
    return covers;
}

static bool is_in_dir(const char *real, const char *dir)
{
    if (file_kind(dir) != FILE_DIRECTORY)
        return false;
    char *real_dir = resolve(dir);
    bool is_in =
        real_dir != NULL && (path_is_below(real, real_dir) || path_is_below(real_dir, real));
    mem_free(real_dir);
    return is_in;
}

bool ckpt_contains_path(const struct pf_checkpoint *ckpt, const char *path)
{
    char *real = resolve(path);
    if (real == NULL)
        return true; /* cannot tell: the caller must not write there */
    bool is_inside = is_in_dir(real, ckpt->path) || covers_file(path, real, ckpt->path);
    for (uint32_t i = 0; i < ckpt->n_components && !is_inside; i++) {
        const struct ckpt_component *c = &ckpt->components[i];
        is_inside = is_in_dir(real, c->path) ||
                    (c->index_path != NULL && covers_file(path, real, c->index_path)) ||
                    (c->config_path != NULL && covers_file(path, real, c->config_path));
    }
    for (uint32_t i = 0; i < ckpt->n_files && !is_inside; i++)
        is_inside = covers_file(path, real, st_path(ckpt->files[i]));
    mem_free(real);
    return is_inside;
}
