/*
 * From what a user typed to components and their files: a path is looked at first, and only what is no path is taken for
 * a hub name. What a directory offers is judged in weigh.c. Called by checkpoint.c; reads names and configs, never weights.
 */
#include "checkpoint/ckpt_locate.h"

#include <string.h>
#include <strings.h>

#include "base/log.h"

const char *ckpt_arena_join(struct arena *a, const char *dir, const char *name)
{
    size_t n_dir = strlen(dir), n_name = strlen(name), n = 0;
    if (!add_size(n_dir, n_name, &n) || !add_size(n, 2, &n))
        return NULL;
    char *p = arena_alloc(a, n);
    if (p == NULL)
        return NULL;
    bool has_slash = n_dir > 0 && dir[n_dir - 1] == '/';
    memcpy(p, dir, n_dir);
    if (!has_slash)
        p[n_dir++] = '/';
    memcpy(p + n_dir, name, n_name);
    return p;
}

const char *ckpt_arena_dir(struct arena *a, const char *path)
{
    const char *slash = strrchr(path, '/');
    if (slash == NULL)
        return arena_strndup(a, ".", 1);
    return slash == path ? arena_strndup(a, "/", 1)
                         : arena_strndup(a, path, (size_t)(slash - path));
}

const char *ckpt_foreign_hint(struct str name)
{
    static const char pickle[] = "is a pickle file: it can run code when it is loaded and is not "
                                 "read, convert it to safetensors";
    static const struct {
        const char *suffix, *hint;
    } table[] = {
        {".bin", pickle},
        {".ckpt", pickle},
        {".pt", pickle},
        {".pth", pickle},
        {".pkl", pickle},
        {".bin.index.json", "is the index of pickle files, which are not read: convert them to "
                            "safetensors"},
        {".gguf", "is a GGUF file, which is not read: use the model's safetensors files"},
    };
    for (size_t i = 0; i < PF_COUNTOF(table); i++) {
        size_t n = strlen(table[i].suffix);
        if (name.n > n && strncasecmp(name.p + name.n - n, table[i].suffix, n) == 0)
            return table[i].hint;
    }
    return NULL;
}

/* By content, for files whose name says nothing or lies. NULL when it may be safetensors. */
static const char *foreign_content(const char *path)
{
    struct file_map map;
    const char *hint = NULL;
    if (file_map_open(&map, path, NULL) != PF_OK)
        return NULL;
    /* Read, not looked at through the mapping: the file may shrink between open and here. */
    uint8_t head[9];
    if (map.n_bytes >= sizeof head &&
        file_pread(map.fd, head, sizeof head, 0, path, NULL) == PF_OK && head[8] != '{') {
        if (memcmp(head, "GGUF", 4) == 0)
            hint = ckpt_foreign_hint(str_of("x.gguf"));
        else if (memcmp(head, "PK\3\4", 4) == 0)
            hint = ckpt_foreign_hint(str_of("x.ckpt"));
    }
    file_map_close(&map);
    return hint;
}

static const char *config_beside(struct arena *a, const char *dir)
{
    const char *path = ckpt_arena_join(a, dir, "config.json");
    return path != NULL && file_kind(path) == FILE_REGULAR ? path : NULL;
}

static int one_place(struct arena *a, struct ckpt_location *out, const struct ckpt_place *place,
                     pf_error *err)
{
    out->places = arena_alloc(a, sizeof *out->places);
    if (out->places == NULL)
        return err_nomem(err, sizeof *out->places, "component");
    out->places[0] = *place;
    out->n_places = 1;
    return PF_OK;
}

static int locate_file(struct arena *a, const char *path, struct ckpt_location *out, pf_error *err)
{
    const char *hint = ckpt_foreign_hint(str_of(path));
    if (hint == NULL)
        hint = foreign_content(path);
    if (hint != NULL)
        return err_set(err, PF_E_UNSUPPORTED, "'%s' %s", path, hint);
    const char *dir = ckpt_arena_dir(a, path);
    const char **files = arena_alloc(a, sizeof *files);
    if (dir == NULL || files == NULL)
        return err_nomem(err, strlen(path), "path");
    struct ckpt_place place = {
        .name = CKPT_COMPONENT_DEFAULT, .path = path, .config_path = config_beside(a, dir)};
    if (str_ends(str_of(path), ".json")) {
        /* Below the directory that its shards are below, by name too: an output is laid out by what follows it. */
        place.index_path = ckpt_arena_join(a, dir, path_base(path).p);
        if (place.index_path == NULL)
            return err_nomem(err, strlen(path), "path");
        out->layout = "sharded";
    } else {
        files[0] = path;
        place.files = files;
        place.n_files = 1;
        out->layout = "file";
    }
    return one_place(a, out, &place, err);
}

/* Is `dir/name` a directory that may hold a component? Adapters that lie in a model's directory are none. */
static const char *component_dir(struct arena *a, const char *dir, const char *name)
{
    const char *path = name[0] != '.' ? ckpt_arena_join(a, dir, name) : NULL;
    if (path == NULL || file_kind(path) != FILE_DIRECTORY)
        return NULL;
    const char *adapter = ckpt_arena_join(a, path, "adapter_config.json");
    return adapter != NULL && file_kind(adapter) == FILE_ABSENT ? path : NULL;
}

/* The subdirectories of `dir` that hold safetensors. `foreign` becomes the first other kind of weights seen. */
static int locate_components(struct arena *a, const char *dir, struct ckpt_location *out,
                             const char **foreign, pf_error *err)
{
    char **names = NULL;
    size_t n_names = 0;
    int rc = file_list(dir, &names, &n_names, err);
    if (rc != PF_OK)
        return rc;
    out->n_places = 0;
    out->places = arena_alloc(a, (n_names + 1) * sizeof *out->places);
    if (out->places == NULL)
        rc = err_nomem(err, (n_names + 1) * sizeof *out->places, "components");
    for (size_t i = 0; i < n_names && rc == PF_OK; i++) {
        const char *path = component_dir(a, dir, names[i]);
        struct ckpt_place *place = &out->places[out->n_places];
        const char *other = NULL;
        if (path == NULL)
            continue;
        rc = ckpt_weigh(a, path, place, &other, err);
        if (rc != PF_OK)
            break;
        if (place->path == NULL) { /* nothing of ours in there: a tokenizer, a scheduler */
            if (other != NULL)
                log_at(PF_LOG_WARN, "'%s' %s; it is left out", other,
                       ckpt_foreign_hint(str_of(other)));
            if (*foreign == NULL)
                *foreign = other;
            continue;
        }
        place->name = arena_strndup(a, names[i], strlen(names[i]));
        place->config_path = config_beside(a, path);
        if (place->name == NULL)
            rc = err_nomem(err, strlen(names[i]), "component name");
        out->n_places++;
    }
    file_list_free(names, n_names);
    return rc;
}

static int locate_dir(struct arena *a, const char *dir, struct ckpt_location *out, pf_error *err)
{
    const char *model_index = ckpt_arena_join(a, dir, "model_index.json");
    const char *foreign = NULL, *foreign_below = NULL;
    struct ckpt_place own = {0};
    if (model_index == NULL)
        return err_nomem(err, strlen(dir), "path");
    /* A model directory may hold single-file copies of its weights at its root: the components are meant. */
    if (file_kind(model_index) == FILE_REGULAR) {
        int rc = locate_components(a, dir, out, &foreign_below, err);
        out->layout = "directory";
        if (rc != PF_OK || out->n_places > 0)
            return rc;
    }
    int rc = ckpt_weigh(a, dir, &own, &foreign, err);
    if (rc != PF_OK)
        return rc;
    if (own.path != NULL) {
        own.name = CKPT_COMPONENT_DEFAULT;
        own.config_path = config_beside(a, dir);
        out->layout = own.index_path != NULL || own.n_files > 1 ? "sharded" : "directory";
        return one_place(a, out, &own, err);
    }
    out->layout = "directory";
    rc = locate_components(a, dir, out, &foreign_below, err);
    if (rc != PF_OK || out->n_places > 0)
        return rc;
    foreign = foreign != NULL ? foreign : foreign_below;
    if (foreign != NULL)
        return err_set(err, PF_E_UNSUPPORTED, "'%s' holds no safetensors: '%s' %s", dir, foreign,
                       ckpt_foreign_hint(str_of(foreign)));
    return err_set(err, PF_E_NOTFOUND,
                   "directory '%s' holds no .safetensors file, nor does a directory in it", dir);
}

/* Is it a repository's directory of the hub cache (the one with blobs, refs and snapshots)? */
static bool is_hub_repo(struct arena *a, const char *dir)
{
    const char *snapshots = ckpt_arena_join(a, dir, "snapshots");
    const char *blobs = ckpt_arena_join(a, dir, "blobs");
    return snapshots != NULL && blobs != NULL && file_kind(snapshots) == FILE_DIRECTORY &&
           file_kind(blobs) == FILE_DIRECTORY;
}

int ckpt_locate(struct arena *a, const char *path, struct ckpt_location *out, pf_error *err)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    const char *at = arena_strndup(a, path, n);
    if (at == NULL)
        return err_nomem(err, n, "path");
    enum file_kind kind = file_kind(at);
    if (kind == FILE_ABSENT) {
        if (!ckpt_hub_is_name(at))
            return err_set(err, PF_E_NOTFOUND, "'%s' does not exist", path);
        int rc = ckpt_hub_find(a, at, &at, err);
        if (rc != PF_OK)
            return rc;
        kind = FILE_DIRECTORY;
    } else if (kind == FILE_DIRECTORY && is_hub_repo(a, at)) {
        int rc = ckpt_hub_snapshot(a, at, &at, err);
        if (rc != PF_OK)
            return rc;
    } else if (kind == FILE_REGULAR && str_eqz(path_base(at), "model_index.json")) {
        at = ckpt_arena_dir(a, at);
        if (at == NULL)
            return err_nomem(err, n, "path");
        kind = FILE_DIRECTORY;
    }
    out->path = at;
    if (kind == FILE_OTHER)
        return file_kind_refuse(at, err);
    return kind == FILE_DIRECTORY ? locate_dir(a, at, out, err) : locate_file(a, at, out, err);
}
