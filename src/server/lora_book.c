/*
 * The table of nicknames and the judgement of paths. A path is judged by where it really leads (realpath), and a directory by where
 * each of its entries leads. Between judgement and opening only somebody who may write into the adapter directory can
 * change that, and whoever may do so decides what is in it anyway.
 */
#include "server/lora_book.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"

struct entry {
    char *nickname, *given, *path;
    uint64_t i_passing; /* when it was last loaded for one request alone; 0: somebody named it */
};

struct undo_item {
    char *nickname;
    char *old_given, *old_path; /* NULL: it was not known before */
};

struct lora_book {
    struct book_opts opts;
    char **roots; /* as realpath says; immutable */
    size_t n_roots;
    pthread_mutex_t mu_paths; /* book_lock_paths; before mu */
    pthread_mutex_t mu;       /* guards the entries */
    struct entry *entries;
    size_t n, cap;
    uint64_t i_clock;
};

int book_new(const struct book_opts *opts, struct lora_book **out_book, pf_error *err)
{
    struct lora_book *b = mem_calloc(1, sizeof(*b));
    int rc = PF_OK;

    if (!b)
        return err_nomem(err, sizeof(*b), "adapters");
    b->opts = *opts;
    (void)pthread_mutex_init(&b->mu, NULL); /* these cannot fail with default attributes */
    (void)pthread_mutex_init(&b->mu_paths, NULL);
    b->roots = mem_calloc(opts->n_dirs + 1, sizeof(*b->roots));
    if (!b->roots)
        rc = err_nomem(err, opts->n_dirs, "adapter directories");
    for (size_t i = 0; !rc && i < opts->n_dirs; i++) {
        rc = file_realpath(opts->dirs[i], &b->roots[i], err);
        if (!rc)
            b->n_roots++;
        if (!rc && file_kind(b->roots[i]) != FILE_DIRECTORY)
            rc =
                err_set(err, PF_E_INVALID, "adapter directory '%s' is no directory", opts->dirs[i]);
    }
    if (rc) {
        book_free(b);
        return rc;
    }
    *out_book = b;
    return PF_OK;
}

static void entry_release(struct entry *e)
{
    mem_free(e->nickname);
    mem_free(e->given);
    mem_free(e->path);
}

void book_free(struct lora_book *b)
{
    if (!b)
        return;
    for (size_t i = 0; i < b->n; i++)
        entry_release(&b->entries[i]);
    mem_free(b->entries);
    for (size_t i = 0; i < b->n_roots; i++)
        mem_free(b->roots[i]);
    mem_free(b->roots);
    (void)pthread_mutex_destroy(&b->mu);
    (void)pthread_mutex_destroy(&b->mu_paths);
    mem_free(b);
}

void book_lock_paths(struct lora_book *b)
{
    (void)pthread_mutex_lock(&b->mu_paths);
}

void book_unlock_paths(struct lora_book *b)
{
    (void)pthread_mutex_unlock(&b->mu_paths);
}

/* ---------------------------------------------------------------------------------------------- paths */

static bool is_inside(const struct lora_book *b, const char *real)
{
    for (size_t i = 0; i < b->n_roots; i++) {
        if (path_is_below(real, b->roots[i]))
            return true;
    }
    return false;
}

/* Does everything in the directory lead inside? One level: adapters have no folders. */
static bool are_entries_inside(const struct lora_book *b, const char *dir)
{
    char **names = NULL;
    size_t n = 0;
    bool is_fine = !file_list(dir, &names, &n, NULL);

    for (size_t i = 0; is_fine && i < n; i++) {
        char *path = path_join(dir, names[i]), *real = NULL;

        is_fine = path != NULL;
        if (path && !file_realpath(path, &real, NULL))
            is_fine = is_inside(b, real);
        mem_free(real);
        mem_free(path);
    }
    file_list_free(names, n);
    return is_fine;
}

enum verdict { PATH_ABSENT, PATH_OUTSIDE, PATH_INSIDE };

static enum verdict judge(const struct lora_book *b, const char *path)
{
    char *real = NULL;
    enum verdict v = PATH_OUTSIDE;

    if (file_realpath(path, &real, NULL))
        return PATH_ABSENT;
    if (is_inside(b, real) && (file_kind(real) != FILE_DIRECTORY || are_entries_inside(b, real)))
        v = PATH_INSIDE;
    mem_free(real);
    return v;
}

static bool is_lexically_inside(const struct lora_book *b, const char *path)
{
    return is_inside(b, path) && !strstr(path, "/../") && !str_ends(str_of(path), "/..");
}

/* Nothing is said about files outside, not even whether they exist. */
static int refuse_outside(const char *text, int *out_status, pf_error *err)
{
    *out_status = 403;
    return err_set(err, PF_E_INVALID,
                   "adapter '%s' is outside of the directories that adapters are taken from", text);
}

static int resolve_absolute(struct lora_book *b, const char *text, char **out_path, int *out_status,
                            pf_error *err)
{
    enum verdict v = judge(b, text);

    if (v == PATH_ABSENT && is_lexically_inside(b, text)) {
        *out_status = 404;
        return err_set(err, PF_E_NOTFOUND, "adapter '%s': no such file or directory", text);
    }
    if (v != PATH_INSIDE)
        return refuse_outside(text, out_status, err);
    *out_path = mem_strdup(text);
    return *out_path ? PF_OK : err_nomem(err, strlen(text) + 1, "a path");
}

static bool is_named_before(struct lora_book *b, const char *text, char **out_path)
{
    for (size_t i = 0; i < b->opts.n_bundled; i++)
        if (!strcmp(b->opts.bundled[i].name, text)) {
            *out_path = mem_strdup(b->opts.bundled[i].path);
            return true;
        }
    return false;
}

int book_resolve(struct lora_book *b, const char *text, char **out_path, int *out_status,
                 pf_error *err)
{
    bool is_outside = strstr(text, "../") || str_ends(str_of(text), "..");
    char *path = NULL;

    *out_status = 422;
    if (!*text)
        return err_set(err, PF_E_INVALID, "an adapter's path is empty");
    if (text[0] == '/')
        return resolve_absolute(b, text, out_path, out_status, err);
    for (size_t i = 0; i < b->n_roots; i++) {
        enum verdict v;

        path = path_join(b->roots[i], text);
        if (!path)
            return err_nomem(err, strlen(text), "a path");
        v = judge(b, path);
        if (v == PATH_INSIDE) {
            *out_path = path;
            return PF_OK;
        }
        is_outside = is_outside || v == PATH_OUTSIDE;
        mem_free(path);
    }
    if (is_outside)
        return refuse_outside(text, out_status, err);
    if (is_named_before(b, text, out_path))
        return *out_path ? PF_OK : err_nomem(err, strlen(text), "a path");
    *out_status = 404;
    return err_set(err, PF_E_NOTFOUND,
                   b->n_roots ? "adapter '%s': no such file in the adapter directories, and no "
                                "bundled adapter has that name"
                              : "adapter '%s': no bundled adapter has that name, and no adapter "
                                "directory was given when the server was started",
                   text);
}

/* ------------------------------------------------------------------------------------------ nicknames */

/* Caller holds mu. */
static struct entry *find(struct lora_book *b, const char *nickname)
{
    for (size_t i = 0; i < b->n; i++)
        if (!strcmp(b->entries[i].nickname, nickname))
            return &b->entries[i];
    return NULL;
}

/* Caller holds mu. NULL: nothing of this path is loaded. */
static struct entry *find_path(struct lora_book *b, const char *path)
{
    for (size_t i = 0; i < b->n; i++)
        if (!strcmp(b->entries[i].path, path))
            return &b->entries[i];
    return NULL;
}

static void forget(struct lora_book *b, const char *nickname)
{
    struct entry *e;

    (void)pthread_mutex_lock(&b->mu);
    e = find(b, nickname);
    if (e) {
        entry_release(e);
        *e = b->entries[--b->n];
    }
    (void)pthread_mutex_unlock(&b->mu);
}

/* Notes the nickname; what it was before goes to *old (zeroed when it is new), owned by caller. */
static int note(struct lora_book *b, const char *nickname, const char *given, const char *path,
                struct entry *old, pf_error *err)
{
    struct entry e = {mem_strdup(nickname), mem_strdup(given), mem_strdup(path), 0}, *have;
    int rc = PF_OK;

    *old = (struct entry){0};
    if (!e.nickname || !e.given || !e.path) {
        entry_release(&e);
        return err_nomem(err, strlen(path), "a nickname");
    }
    (void)pthread_mutex_lock(&b->mu);
    have = find(b, nickname);
    if (have) {
        e.i_passing = have->i_passing;
        *old = *have;
        *have = e;
    } else if (!mem_grow((void **)&b->entries, &b->cap, b->n, sizeof(e))) {
        rc = err_nomem(err, sizeof(e), "a nickname");
    } else {
        b->entries[b->n++] = e;
    }
    (void)pthread_mutex_unlock(&b->mu);
    if (rc)
        entry_release(&e);
    return rc;
}

static bool is_full(struct lora_book *b, const char *nickname)
{
    bool is;

    (void)pthread_mutex_lock(&b->mu);
    is = b->n >= BOOK_NICKNAMES_MAX && !find(b, nickname);
    (void)pthread_mutex_unlock(&b->mu);
    return is;
}

static void remember(struct book_undo *undo, struct entry *old, const char *nickname)
{
    struct undo_item item = {mem_strdup(nickname), old->given, old->path};

    mem_free(old->nickname);
    if (item.nickname && mem_grow((void **)&undo->items, &undo->cap, undo->n, sizeof(item))) {
        undo->items[undo->n++] = item;
        return;
    }
    mem_free(item.nickname); /* then it stays loaded, which harms nobody */
    mem_free(item.old_given);
    mem_free(item.old_path);
}

static int load(struct lora_book *b, const char *nickname, const char *given, const char *path,
                struct book_undo *undo, pf_error *err)
{
    struct entry old;
    int rc = pf_engine_load(b->opts.engine, nickname, path, err);

    if (rc)
        return rc;
    rc = note(b, nickname, given, path, &old, err);
    if (rc)
        return rc;
    if (undo && !(old.path && !strcmp(old.path, path)))
        remember(undo, &old, nickname);
    else
        entry_release(&old);
    return PF_OK;
}

int book_load_trusted(struct lora_book *b, const char *nickname, const char *path, pf_error *err)
{
    return load(b, nickname, path, path, NULL, err);
}

static int status_of_load(int rc, const pf_error *err)
{
    if (rc == PF_E_NOTFOUND)
        return 404;
    if (rc == PF_E_IO)
        return err->sys_errno == EACCES || err->sys_errno == EPERM ? 403 : 422;
    if (rc == PF_E_CHANGED || rc == PF_E_TRUNCATED)
        return 409;
    return rc == PF_E_NOMEM ? 503 : 422;
}

/* What was loaded for requests that are over makes room, the longest unused first. What a view holds stays. */
static void drop_passing(struct lora_book *b)
{
    uint64_t i_after = 0;

    for (;;) {
        const struct entry *oldest = NULL;
        char *nickname = NULL;

        (void)pthread_mutex_lock(&b->mu);
        for (size_t i = 0; i < b->n; i++)
            if (b->entries[i].i_passing > i_after &&
                (!oldest || b->entries[i].i_passing < oldest->i_passing))
                oldest = &b->entries[i];
        if (oldest) {
            i_after = oldest->i_passing;
            nickname = mem_strdup(oldest->nickname);
        }
        (void)pthread_mutex_unlock(&b->mu);
        if (!nickname)
            return;
        bool is_gone = !book_unload(b, nickname, NULL);
        mem_free(nickname);
        if (is_gone)
            return;
    }
}

/* i_passing 0: somebody named it, and it stays until somebody unloads it. */
static void mark_passing(struct lora_book *b, const char *nickname, bool is_passing)
{
    struct entry *e;

    (void)pthread_mutex_lock(&b->mu);
    e = find(b, nickname);
    if (e)
        e->i_passing = is_passing ? ++b->i_clock : 0;
    (void)pthread_mutex_unlock(&b->mu);
}

/* A nickname without a path: known, and fresh. A file that is gone leaves what was loaded from it. */
static int refresh(struct lora_book *b, const char *nickname, int *out_status, pf_error *err)
{
    char *path = book_path(b, nickname);
    int rc;

    if (!path) {
        *out_status = 404;
        return err_set(err, PF_E_NOTFOUND,
                       "no adapter is loaded as '%s': load it with its path first", nickname);
    }
    rc = pf_engine_load(b->opts.engine, nickname, path, err);
    mem_free(path);
    *out_status = status_of_load(rc, err);
    return rc == PF_E_NOTFOUND ? PF_OK : rc;
}

static int load_resolved(struct lora_book *b, const char *nickname, const char *given,
                         const char *path, struct book_undo *undo, int *out_status, pf_error *err)
{
    int rc;

    if (is_full(b, nickname))
        drop_passing(b);
    if (is_full(b, nickname)) {
        *out_status = 409;
        return err_set(err, PF_E_BUSY, "%d adapters are loaded: unload one first",
                       BOOK_NICKNAMES_MAX);
    }
    rc = load(b, nickname, given, path, undo, err);
    if (rc)
        *out_status = status_of_load(rc, err);
    return rc;
}

int book_load(struct lora_book *b, const char *nickname, const char *text, struct book_undo *undo,
              int *out_status, pf_error *err)
{
    char *path = NULL;
    int rc;

    *out_status = 422;
    if (!*nickname)
        return err_set(err, PF_E_INVALID, "an adapter's nickname is empty");
    mark_passing(b, nickname, false);
    if (!text)
        return refresh(b, nickname, out_status, err);
    rc = book_resolve(b, text, &path, out_status, err);
    if (!rc)
        rc = load_resolved(b, nickname, text, path, undo, out_status, err);
    mem_free(path);
    return rc;
}

/* Caller holds mu. wanted, else the path as it was given, else that with a number. Owned by caller; NULL: out of memory. */
static char *unused_nickname(struct lora_book *b, const char *wanted, const char *given)
{
    struct strbuf text;

    strbuf_init(&text);
    strbuf_adds(&text, wanted);
    for (unsigned i = 1; strbuf_ok(&text) && find(b, strbuf_z(&text)); i++) {
        strbuf_clear(&text);
        strbuf_adds(&text, given);
        if (i > 1)
            strbuf_addf(&text, " (%u)", i);
    }
    return strbuf_take(&text);
}

/* The nickname that path has or can have without taking one from another file. Owned by caller; NULL: out of memory. */
static char *free_nickname(struct lora_book *b, const char *wanted, const char *given,
                           const char *path, bool *out_is_passing)
{
    const struct entry *e;
    char *nickname;

    (void)pthread_mutex_lock(&b->mu);
    e = find(b, wanted);
    if (!e || strcmp(e->path, path) != 0)
        e = find_path(b, path);
    *out_is_passing = !e || e->i_passing;
    nickname = e ? mem_strdup(e->nickname) : unused_nickname(b, wanted, given);
    (void)pthread_mutex_unlock(&b->mu);
    return nickname;
}

int book_load_passing(struct lora_book *b, const char *wanted, const char *text,
                      struct book_undo *undo, char **out_nickname, int *out_status, pf_error *err)
{
    char *path = NULL, *nickname = NULL;
    bool is_passing = false;
    int rc =
        text ? book_resolve(b, text, &path, out_status, err) : refresh(b, wanted, out_status, err);

    if (!rc) {
        nickname = path ? free_nickname(b, wanted, text, path, &is_passing) : mem_strdup(wanted);
        *out_status = nickname ? *out_status : 503;
        rc = nickname ? PF_OK : err_nomem(err, strlen(wanted), "a nickname");
    }
    if (!rc && path)
        rc = load_resolved(b, nickname, text, path, undo, out_status, err);
    if (!rc && is_passing)
        mark_passing(b, nickname, true);
    mem_free(path);
    if (rc)
        mem_free(nickname);
    else
        *out_nickname = nickname;
    return rc;
}

int book_unload(struct lora_book *b, const char *nickname, pf_error *err)
{
    int rc = pf_engine_unload(b->opts.engine, nickname, err);

    if (!rc)
        forget(b, nickname);
    return rc;
}

void book_undo(struct lora_book *b, struct book_undo *undo)
{
    while (undo->n) {
        struct undo_item *item = &undo->items[--undo->n];
        struct entry old = {0};

        /* Failing to take back is harmless: a file too many stays loaded, nothing acts by it. */
        if (!item->old_path) {
            if (!pf_engine_unload(b->opts.engine, item->nickname, NULL))
                forget(b, item->nickname);
        } else if (!pf_engine_load(b->opts.engine, item->nickname, item->old_path, NULL)) {
            (void)note(b, item->nickname, item->old_given, item->old_path, &old, NULL);
        }
        entry_release(&old);
        mem_free(item->nickname);
        mem_free(item->old_given);
        mem_free(item->old_path);
    }
}

void book_undo_release(struct book_undo *undo)
{
    for (size_t i = 0; i < undo->n; i++) {
        mem_free(undo->items[i].nickname);
        mem_free(undo->items[i].old_given);
        mem_free(undo->items[i].old_path);
    }
    mem_free(undo->items);
    *undo = (struct book_undo){0};
}

char *book_path(struct lora_book *b, const char *nickname)
{
    const struct entry *e;
    char *path = NULL;

    (void)pthread_mutex_lock(&b->mu);
    e = find(b, nickname);
    if (e)
        path = mem_strdup(e->path);
    (void)pthread_mutex_unlock(&b->mu);
    return path;
}

struct json *book_given_path_json(struct lora_book *b, const char *nickname, const char *path)
{
    const struct entry *e;
    struct json *given;

    (void)pthread_mutex_lock(&b->mu);
    e = find(b, nickname);
    if (!e || strcmp(e->path, path) != 0)
        e = find_path(b, path); /* the nickname means another file by now */
    given = json_new_string(str_of(e ? e->given : path));
    (void)pthread_mutex_unlock(&b->mu);
    return given;
}

struct json *book_json(struct lora_book *b)
{
    struct json *list = json_new_array();

    (void)pthread_mutex_lock(&b->mu);
    for (size_t i = 0; i < b->n; i++) {
        struct json *it = json_new_object();

        json_set(it, "nickname", json_new_string(str_of(b->entries[i].nickname)));
        json_set(it, "path", json_new_string(str_of(b->entries[i].given)));
        json_add(list, it);
    }
    (void)pthread_mutex_unlock(&b->mu);
    return list;
}
