/*
 * Looking up bundled data. Only names are looked at here; opening and judging files is the library's work.
 */
#include "cli/bundled.h"

#include <errno.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "cli/option.h"

#define SUFFIX ".safetensors"

/* The data directory. PF_E_NOTFOUND names the places looked at. Owned by caller. */
static int bundled_data(char **out_dir, pf_error *err)
{
    /* PF_DATADIR_FROM_BINDIR: CMake's relative path between the two, "../share/pageflip". */
    static const char *const places[] = {"share/pageflip", PF_DATADIR_FROM_BINDIR};
    char exe[PATH_MAX], *dir = NULL;
    ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);

    if (n < 0)
        return err_sys(err, errno, "cannot find the program's own path '/proc/self/exe'");
    exe[n] = 0;
    dir = path_dir(exe);
    if (!dir)
        return err_nomem(err, (size_t)n, "a path");
    for (size_t i = 0; i < PF_COUNTOF(places); i++) {
        char *data = path_join(dir, places[i]);

        if (data && file_kind(data) == FILE_DIRECTORY) {
            mem_free(dir);
            *out_dir = data;
            return PF_OK;
        }
        mem_free(data);
    }
    (void)err_set(err, PF_E_NOTFOUND,
                  "no bundled data found in '%s/%s' or '%s/%s'; name a model with --model", dir,
                  places[0], dir, places[1]);
    mem_free(dir);
    return PF_E_NOTFOUND;
}

/* <data>/<a>[/<b>], with data_dir or the located one. */
static int data_path(const char *data_dir, const char *a, char **out, pf_error *err)
{
    char *found = NULL;
    int rc = data_dir ? PF_OK : bundled_data(&found, err);

    if (rc)
        return rc;
    *out = path_join(data_dir ? data_dir : found, a);
    mem_free(found);
    return *out ? PF_OK : err_nomem(err, PATH_MAX, "a path");
}

int bundled_model(const char *data_dir, const char *word, char **out_path, pf_error *err)
{
    if (!word)
        return data_path(data_dir, "emoji-dit", out_path, err);
    *out_path = mem_strdup(word);
    return *out_path ? PF_OK : err_nomem(err, strlen(word) + 1, "a path");
}

int bundled_adapter_names(const char *data_dir, char ***out_names, size_t *out_n, pf_error *err)
{
    char *dir = NULL;
    int rc = data_path(data_dir, "adapters", &dir, err);

    if (!rc)
        rc = file_list(dir, out_names, out_n, err);
    mem_free(dir);
    for (size_t i = 0; !rc && i < *out_n; i++) {
        struct str name = str_of((*out_names)[i]);

        if (str_ends(name, SUFFIX))
            (*out_names)[i][name.n - strlen(SUFFIX)] = 0;
    }
    return rc;
}

/* The bundled adapter of that name, a file or a directory. PF_E_NOTFOUND without a message. */
static int find_bundled(const char *data_dir, const char *word, char **out_path, pf_error *err)
{
    static const char *const suffixes[] = {SUFFIX, ""};
    char *dir = NULL;
    int rc = data_path(data_dir, "adapters", &dir, err);

    if (rc)
        return rc;
    rc = PF_E_NOTFOUND;
    for (size_t i = 0; rc && i < PF_COUNTOF(suffixes); i++) {
        struct strbuf path;

        strbuf_init(&path);
        strbuf_addf(&path, "%s/%s%s", dir, word, suffixes[i]);
        if (strbuf_ok(&path) && file_kind(strbuf_z(&path)) != FILE_ABSENT) {
            *out_path = strbuf_take(&path);
            rc = PF_OK;
        }
        strbuf_release(&path);
    }
    mem_free(dir);
    return rc;
}

static int not_found(const char *data_dir, const char *word, pf_error *err)
{
    char **names = NULL;
    const char *near;
    size_t n = 0;

    (void)err_set(err, PF_E_NOTFOUND, "no file '%s', and no bundled adapter of that name", word);
    if (strchr(word, '/') || bundled_adapter_names(data_dir, &names, &n, NULL) || n == 0)
        return PF_E_NOTFOUND;
    near = near_name(word, (const char *const *)names, n);
    if (near)
        err_append(err, "; did you mean '%s'?", near);
    else
        for (size_t i = 0; i < n; i++)
            err_append(err, "%s '%s'", i ? "," : "; there are", names[i]);
    file_list_free(names, n);
    return PF_E_NOTFOUND;
}

int bundled_adapter(const char *data_dir, const char *word, char **out_path, pf_error *err)
{
    struct str s = str_of(word);

    if (file_kind(word) != FILE_ABSENT) {
        *out_path = mem_strdup(word);
        return *out_path ? PF_OK : err_nomem(err, s.n + 1, "a path");
    }
    if (!strchr(word, '/') && s.n && word[0] != '.' &&
        !find_bundled(data_dir, word, out_path, NULL))
        return PF_OK;
    if (strchr(word, '/'))
        return err_set(err, PF_E_NOTFOUND, "no file or directory '%s'", word);
    return not_found(data_dir, word, err);
}
