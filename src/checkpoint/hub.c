/*
 * The local Hugging Face hub cache, read and never written, and never the network. A repository is a directory
 * `models--org--name` with `refs/main` (a commit) and `snapshots/<commit>/`, whose files are links into `blobs/`. Called by
 * ckpt_locate.c with a name that is no local path, or with a repository's directory itself.
 */
#include "checkpoint/checkpoint_int.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/log.h"

#define REF_BYTES_MAX 4096

static bool is_name_char(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_' || c == '.';
}

/* One half of org/name: not empty, no dot in front (so neither "." nor ".."). */
static bool is_name_part(const char *p, size_t n)
{
    if (n == 0 || n > 96 || p[0] == '.')
        return false;
    for (size_t i = 0; i < n; i++)
        if (!is_name_char(p[i]))
            return false;
    return true;
}

bool ckpt_hub_is_name(const char *name)
{
    const char *slash = strchr(name, '/');
    return slash != NULL && is_name_part(name, (size_t)(slash - name)) &&
           is_name_part(slash + 1, strlen(slash + 1));
}

/* The cache's own order of precedence. Empty variables count as unset; without any the answer is "". */
static const char *cache_dir(struct arena *a)
{
    static const char *const direct[] = {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"};
    for (size_t i = 0; i < PF_COUNTOF(direct); i++) {
        const char *v = getenv(direct[i]);
        if (v != NULL && *v != '\0')
            return arena_strndup(a, v, strlen(v));
    }
    static const struct {
        const char *variable, *below;
    } roots[] = {{"HF_HOME", "hub"},
                 {"XDG_CACHE_HOME", "huggingface/hub"},
                 {"HOME", ".cache/huggingface/hub"}};
    for (size_t i = 0; i < PF_COUNTOF(roots); i++) {
        const char *v = getenv(roots[i].variable);
        if (v != NULL && *v != '\0')
            return ckpt_arena_join(a, v, roots[i].below);
    }
    return arena_strndup(a, "", 0);
}

/* The commit in refs/main, or NULL when there is none or it is no plain name. */
static const char *read_ref(struct arena *a, const char *repo_dir)
{
    const char *path = ckpt_arena_join(a, repo_dir, "refs/main");
    char *text = NULL;
    size_t n = 0;
    if (path == NULL || file_read_all(path, REF_BYTES_MAX, &text, &n, NULL) != PF_OK)
        return NULL;
    while (n > 0 && (text[n - 1] == '\n' || text[n - 1] == '\r' || text[n - 1] == ' '))
        n--;
    const char *commit = is_name_part(text, n) ? arena_strndup(a, text, n) : NULL;
    mem_free(text);
    return commit;
}

static const char *newest_snapshot(struct arena *a, const char *snapshots)
{
    char **names = NULL;
    size_t n_names = 0;
    if (file_list(snapshots, &names, &n_names, NULL) != PF_OK)
        return NULL;
    const char *best = NULL;
    struct timespec best_time = {0};
    for (size_t i = 0; i < n_names; i++) {
        const char *dir = ckpt_arena_join(a, snapshots, names[i]);
        struct stat st;
        if (dir == NULL || names[i][0] == '.' || stat(dir, &st) != 0 || !S_ISDIR(st.st_mode))
            continue;
        /* Names are sorted: of two equally old ones the first stays, whatever the directory's order. */
        if (best == NULL || st.st_mtim.tv_sec > best_time.tv_sec ||
            (st.st_mtim.tv_sec == best_time.tv_sec && st.st_mtim.tv_nsec > best_time.tv_nsec)) {
            best = dir;
            best_time = st.st_mtim;
        }
    }
    file_list_free(names, n_names);
    return best;
}

int ckpt_hub_snapshot(struct arena *a, const char *repo_dir, const char **out_dir, pf_error *err)
{
    const char *snapshots = ckpt_arena_join(a, repo_dir, "snapshots");
    if (snapshots == NULL)
        return err_nomem(err, strlen(repo_dir), "path");
    const char *commit = read_ref(a, repo_dir);
    if (commit != NULL) {
        const char *dir = ckpt_arena_join(a, snapshots, commit);
        if (dir != NULL && file_kind(dir) == FILE_DIRECTORY) {
            *out_dir = dir;
            return PF_OK;
        }
    }
    const char *dir = newest_snapshot(a, snapshots);
    if (dir == NULL)
        return err_set(err, PF_E_NOTFOUND,
                       "hub cache '%s' holds no snapshot: the download was not finished", repo_dir);
    if (commit != NULL)
        log_at(PF_LOG_WARN,
               "'%s': refs/main means snapshot '%s', which is not there: the newest, '%s', is used",
               repo_dir, commit, path_base(dir).p);
    *out_dir = dir;
    return PF_OK;
}

int ckpt_hub_find(struct arena *a, const char *name, const char **out_dir, pf_error *err)
{
    const char *cache = cache_dir(a);
    if (cache != NULL && *cache == '\0')
        return err_set(err, PF_E_NOTFOUND,
                       "'%s' is no path, and there is no hub cache to look in: neither "
                       "HF_HUB_CACHE nor HF_HOME nor HOME is set",
                       name);
    const char *slash = strchr(name, '/');
    struct strbuf repo;
    strbuf_init(&repo);
    strbuf_addf(&repo, "models--%.*s--%s", (int)(slash - name), name, slash + 1);
    const char *dir =
        cache != NULL && strbuf_ok(&repo) ? ckpt_arena_join(a, cache, strbuf_z(&repo)) : NULL;
    strbuf_release(&repo);
    if (dir == NULL)
        return err_nomem(err, strlen(name), "path");
    if (file_kind(dir) != FILE_DIRECTORY)
        return err_set(err, PF_E_NOTFOUND,
                       "'%s' is neither a path nor a model in the hub cache '%s': nothing is "
                       "downloaded, fetch it first",
                       name, cache);
    return ckpt_hub_snapshot(a, dir, out_dir, err);
}
