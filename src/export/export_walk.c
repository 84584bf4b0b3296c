/*
 * What a model directory holds besides the weights that are merged: configs, tokenizers, schedulers, licences. All of it goes
 * into the output, by content: links are followed, since a snapshot of the hub cache is made of them. Left out are hidden
 * names, leftovers of ours, and weights that lie beside merged ones: unmerged variants must not pass for the result.
 */
#include "export/export_int.h"

#include <string.h>

#include "base/log.h"
#include "base/mem.h"

#define DEPTH_MAX 16

struct level {
    const struct level *up;
    const char *path;
};

static bool is_weights_name(struct str name)
{
    static const char *const ends[] = {".safetensors",
                                       ".bin",
                                       ".ckpt",
                                       ".pt",
                                       ".pth",
                                       ".gguf",
                                       ".msgpack",
                                       ".h5",
                                       ".safetensors.index.json",
                                       ".bin.index.json"};
    for (size_t i = 0; i < PF_COUNTOF(ends); i++) {
        if (str_ends(name, ends[i]))
            return true;
    }
    return false;
}

/* Is a file of the plan (weights, an index) in this directory? */
static bool holds_weights(const struct export_plan *plan, const char *dir, size_t n_planned)
{
    const size_t n = strlen(dir);
    for (size_t i = 0; i < n_planned; i++) {
        const char *path = plan->files[i].path_in;
        const char *slash = strrchr(path, '/');
        if (slash && (size_t)(slash - path) == n && !strncmp(path, dir, n))
            return true;
    }
    return false;
}

static bool is_planned(const struct export_plan *plan, const char *path, size_t n_planned)
{
    for (size_t i = 0; i < n_planned; i++) {
        if (!strcmp(plan->files[i].path_in, path))
            return true;
    }
    return false;
}

static bool is_ancestor(const struct level *at, const char *path)
{
    for (; at; at = at->up) {
        if (file_same(at->path, path))
            return true;
    }
    return false;
}

static int walk(struct export_plan *plan, const struct level *at, unsigned depth, size_t n_planned,
                pf_error *err);

static int visit(struct export_plan *plan, const struct level *at, const char *name,
                 bool has_weights, unsigned depth, size_t n_planned, pf_error *err)
{
    int rc = PF_OK;
    if (name[0] == '.' || str_ends(str_of(name), ".partial"))
        return PF_OK;
    char *path = path_join(at->path, name);
    if (!path)
        return err_nomem(err, 0, "a path");
    switch (file_kind(path)) {
    case FILE_REGULAR:
        if (is_planned(plan, path, n_planned))
            break;
        if (has_weights && is_weights_name(str_of(name)))
            log_at(PF_LOG_INFO, "'%s' is not part of the merge and is left out", path);
        else
            rc = plan_add_file(plan, plan_rel(plan, path), path, NULL, NULL, err);
        break;
    case FILE_DIRECTORY:
        if (depth >= DEPTH_MAX || is_ancestor(at, path)) {
            log_at(PF_LOG_WARN, "'%s' leads back or too deep and is left out", path);
        } else {
            const struct level below = {at, path};
            rc = walk(plan, &below, depth + 1, n_planned, err);
        }
        break;
    case FILE_ABSENT:
    case FILE_OTHER:
        log_at(PF_LOG_WARN, "'%s' is no file that can be copied and is left out", path);
        break;
    }
    mem_free(path);
    return rc;
}

static int walk(struct export_plan *plan, const struct level *at, unsigned depth, size_t n_planned,
                pf_error *err)
{
    char **names = NULL;
    size_t n = 0;
    int rc = file_list(at->path, &names, &n, err);
    if (rc)
        return rc;
    /* At the root of a model directory, weights are single-file copies of the components. */
    const bool has_weights = !depth || holds_weights(plan, at->path, n_planned);
    for (size_t i = 0; i < n && !rc; i++)
        rc = visit(plan, at, names[i], has_weights, depth, n_planned, err);
    file_list_free(names, n);
    return rc;
}

/* A sharded set that was opened by its index: the directory may hold anything, so only the config goes along. */
static int add_config(struct export_plan *plan, pf_error *err)
{
    const char *config = plan->ckpt->components[0].config_path;
    const char *rel = config ? plan_rel(plan, config) : NULL;
    return rel ? plan_add_file(plan, rel, config, NULL, NULL, err) : PF_OK;
}

int plan_walk(struct export_plan *plan, pf_error *err)
{
    if (file_kind(plan->ckpt->path) != FILE_DIRECTORY)
        return add_config(plan, err);
    const struct level root = {NULL, plan->root};
    return walk(plan, &root, 0, plan->n_files, err);
}
