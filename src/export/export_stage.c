/*
 * OUT.partial/: where an output grows until it is whole. In it
 *
 *     lock          shared while a part is written; exclusive while the files are made or an earlier attempt is thrown away
 *     part.<i>      exclusive: one process per part
 *     finish        exclusive: one process decides whether all is there
 *     plan          which output this is; written last when the files are made, removed first when they go
 *     journal.<i>   what of part i is durable
 *     out           the output itself, a file or a directory
 *     old           the directory that a forced merge replaces, between two renames
 *     done          the plan, renamed when the output has its final name and only tidying is left
 *
 * Must never remove or replace what is not a partial output of ours or a checkpoint that the caller said to replace.
 */
#include "export/export_int.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "checkpoint/ckpt_locate.h"

#define WAIT_NS         20000000
#define PLAN_BYTES_MAX  4096
#define N_ENTER_RETRIES 100

/* ------------------------------------------------------------------------------------------------------ names */

int stage_init(struct stage *s, const char *out_path, bool is_force, pf_error *err)
{
    struct stage t = {.is_force = is_force, .part_lock = {.fd = -1}, .shared_lock = {.fd = -1}};
    struct strbuf b;
    size_t n = strlen(out_path);
    while (n > 1 && out_path[n - 1] == '/')
        n--;
    strbuf_init(&b);
    strbuf_add(&b, out_path, n);
    strbuf_adds(&b, ".partial");
    t.out = mem_strndup(out_path, n);
    t.out_dir = path_dir(out_path);
    t.dir = strbuf_take(&b);
    strbuf_release(&b);
    if (t.dir) {
        t.payload = path_join(t.dir, "out");
        t.old = path_join(t.dir, "old");
        t.plan_file = path_join(t.dir, "plan");
        t.done_file = path_join(t.dir, "done");
        t.lock = path_join(t.dir, "lock");
    }
    *s = t;
    if (t.out && t.out_dir && t.payload && t.old && t.plan_file && t.done_file && t.lock)
        return PF_OK;
    export_stage_release(s);
    return err_nomem(err, n, "paths of the output");
}

void export_stage_release(struct stage *s)
{
    if (!s)
        return;
    file_lock_release(&s->shared_lock);
    file_lock_release(&s->part_lock);
    mem_free(s->out);
    mem_free(s->out_dir);
    mem_free(s->dir);
    mem_free(s->payload);
    mem_free(s->old);
    mem_free(s->plan_file);
    mem_free(s->done_file);
    mem_free(s->lock);
    *s = (struct stage){.part_lock = {.fd = -1}, .shared_lock = {.fd = -1}};
}

static char *numbered(const struct stage *s, const char *name, uint32_t i)
{
    struct strbuf b;
    strbuf_init(&b);
    strbuf_addf(&b, "%s/%s.%u", s->dir, name, i);
    char *path = strbuf_take(&b);
    strbuf_release(&b);
    return path;
}

char *stage_journal_path(const struct stage *s, uint32_t i_part)
{
    return numbered(s, "journal", i_part);
}

/* ---------------------------------------------------------------------------------------------------- refusals */

static bool is_below(const char *path, const char *dir)
{
    char *a = NULL, *b = NULL;
    bool is = false;
    if (!file_realpath(path, &a, NULL) && !file_realpath(dir, &b, NULL))
        is = path_is_below(a, b);
    mem_free(a);
    mem_free(b);
    return is;
}

/* A forced merge removes what stands there: only what looks like a checkpoint, or nothing, may go. */
static bool is_replaceable_dir(const char *path)
{
    char **names = NULL;
    size_t n = 0;
    struct pf_checkpoint *ckpt = NULL;
    if (file_list(path, &names, &n, NULL))
        return false;
    file_list_free(names, n);
    if (!n)
        return true;
    if (pf_checkpoint_open(path, NULL, &ckpt, NULL))
        return false;
    pf_checkpoint_close(ckpt);
    return true;
}

static int check_existing(const struct stage *s, bool is_file, pf_error *err)
{
    struct stat st;
    if (lstat(s->out, &st))
        return errno == ENOENT ? PF_OK : err_sys(err, errno, "output '%s'", s->out);
    const bool is_dir = S_ISDIR(st.st_mode);
    if (is_file && is_dir)
        return err_set(err, PF_E_EXISTS,
                       "output '%s' is a directory, and this checkpoint is one file: name a file",
                       s->out);
    if (file_kind(s->out) == FILE_OTHER)
        return err_prefix(err, file_kind_refuse(s->out, err), "output");
    if (!s->is_force)
        return err_set(err, PF_E_EXISTS, "output '%s' exists; it is replaced only when forced",
                       s->out);
    if (!is_file && !is_dir)
        return err_set(err, PF_E_EXISTS,
                       "output '%s' is no directory, and this checkpoint is one: name another",
                       s->out);
    if (is_dir && !is_replaceable_dir(s->out))
        return err_set(err, PF_E_EXISTS,
                       "output '%s' is a directory that holds no checkpoint: it is not replaced",
                       s->out);
    return PF_OK;
}

int stage_check_output(const struct stage *s, const struct pf_checkpoint *ckpt,
                       const struct pf_composition *comp, bool is_file, pf_error *err)
{
    if (file_kind(s->out_dir) != FILE_DIRECTORY)
        return err_set(err, PF_E_NOTFOUND, "output '%s': there is no directory '%s'", s->out,
                       s->out_dir);
    if (ckpt_contains_path(ckpt, s->out) || ckpt_contains_path(ckpt, s->dir))
        return err_set(err, PF_E_INVALID,
                       "output '%s' is the checkpoint that is merged, or part of it", s->out);
    for (size_t i = 0; comp && i < comp->n_entries; i++) {
        struct pf_adapter_info info;
        pf_adapter_info(comp->entries[i].adapter, &info);
        if (is_below(info.path, s->out) || is_below(info.path, s->dir))
            return err_set(err, PF_E_INVALID, "output '%s' holds the adapter '%s' that is merged",
                           s->out, info.path);
    }
    if (is_file && (ckpt_foreign_hint(str_of(s->out)) || str_ends(str_of(s->out), ".json")))
        return err_set(
            err, PF_E_INVALID,
            "output '%s' would be a safetensors file under the name of another kind: end "
            "it in .safetensors",
            s->out);
    return check_existing(s, is_file, err);
}

/* ----------------------------------------------------------------------------------------------- the plan file */

static void plan_text(const struct stage *s, char text[DIGEST_HEX_LEN + 2])
{
    digest_hex(s->plan->identity, text);
    text[DIGEST_HEX_LEN] = '\n';
    text[DIGEST_HEX_LEN + 1] = '\0';
}

static bool is_plan_in(const struct stage *s, const char *path)
{
    char want[DIGEST_HEX_LEN + 2], *got = NULL;
    size_t n = 0;
    plan_text(s, want);
    const bool is = !file_read_all(path, PLAN_BYTES_MAX, &got, &n, NULL) &&
                    n == DIGEST_HEX_LEN + 1 && !memcmp(got, want, n);
    mem_free(got);
    return is;
}

static bool is_plan_ours(const struct stage *s)
{
    return is_plan_in(s, s->plan_file);
}

static bool are_files_whole(const struct export_plan *plan)
{
    struct stat st;
    for (size_t i = 0; i < plan->n_files; i++) {
        const struct out_file *f = &plan->files[i];
        if (lstat(f->path_out, &st) || !S_ISREG(st.st_mode) || (uint64_t)st.st_size != f->n_bytes)
            return false;
    }
    return true;
}

/* The locks stay: others may be waiting for them. */
static int discard(struct stage *s, pf_error *err)
{
    char **names = NULL;
    size_t n = 0;
    if (unlink(s->plan_file) && errno != ENOENT)
        return err_sys(err, errno, "cannot remove '%s'", s->plan_file);
    int rc = file_sync_dir(s->dir, err); /* no plan before anything else is gone */
    if (!rc)
        rc = file_list(s->dir, &names, &n, err);
    for (size_t i = 0; i < n && !rc; i++) {
        const struct str name = str_of(names[i]);
        if (!str_starts(name, "journal.") && !str_eqz(name, "out") && !str_eqz(name, "old") &&
            !str_starts(name, ".plan."))
            continue;
        char *path = path_join(s->dir, names[i]);
        rc = path ? file_remove_tree(path, err) : err_nomem(err, 0, "a path");
        mem_free(path);
    }
    file_list_free(names, n);
    return rc;
}

void stage_distrust(struct stage *s)
{
    (void)unlink(s->plan_file); /* best effort: an error is already on its way to the caller */
}

/* ------------------------------------------------------------------------------------------------- making files */

static int check_space(const struct stage *s, pf_error *err)
{
    const uint64_t n_free = file_free_bytes(s->dir), n_bytes = s->plan->n_bytes;
    if (n_free && n_bytes > n_free)
        return err_set(err, PF_E_NOSPACE, "output '%s' takes %llu bytes, and %llu are free in '%s'",
                       s->out, (unsigned long long)n_bytes, (unsigned long long)n_free, s->out_dir);
    return PF_OK;
}

static int make_file(const struct out_file *f, pf_error *err)
{
    char *dir = path_dir(f->path_out);
    int rc = dir ? file_mkdirs(dir, err) : err_nomem(err, 0, "a path");
    mem_free(dir);
    if (rc)
        return rc;
    const int fd = open(f->path_out, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0)
        return err_sys(err, errno, "cannot create '%s'", f->path_out);
    rc = file_reserve(fd, f->n_bytes, f->path_out, err);
    if (!rc && ftruncate(fd, (off_t)f->n_bytes)) /* where nothing could be reserved */
        rc = err_sys(err, errno, "cannot set the size of '%s'", f->path_out);
    (void)close(fd); /* nothing was written */
    return rc;
}

/* From the directory of a file up to the payload: their entries, durable. */
static int sync_dirs_above(const struct stage *s, const char *path, pf_error *err)
{
    int rc = PF_OK;
    char *dir = path_dir(path);
    while (dir && !rc && strlen(dir) >= strlen(s->payload)) {
        rc = file_sync_dir(dir, err);
        char *up = path_dir(dir);
        mem_free(dir);
        dir = up;
    }
    if (!dir && !rc)
        rc = err_nomem(err, 0, "a path");
    mem_free(dir);
    return rc;
}

static bool is_same_dir(const char *a, const char *b)
{
    const char *x = strrchr(a, '/'), *y = strrchr(b, '/');
    return x && y && x - a == y - b && !strncmp(a, b, (size_t)(x - a));
}

static int sync_dirs(const struct stage *s, pf_error *err)
{
    const struct out_file *files = s->plan->files;
    int rc = PF_OK;
    for (size_t i = 0; i < s->plan->n_files && !rc; i++) {
        if (!i || !is_same_dir(files[i].path_out, files[i - 1].path_out))
            rc = sync_dirs_above(s, files[i].path_out, err);
    }
    return rc ? rc : file_sync_dir(s->dir, err);
}

static int make_files(struct stage *s, pf_error *err)
{
    char text[DIGEST_HEX_LEN + 2];
    int rc = check_space(s, err);
    for (size_t i = 0; i < s->plan->n_files && !rc; i++)
        rc = make_file(&s->plan->files[i], err);
    if (!rc)
        rc = sync_dirs(s, err);
    plan_text(s, text);
    return rc ? rc : file_write_atomic(s->plan_file, text, DIGEST_HEX_LEN + 1, err);
}

/* Alone in the directory: puts back what an interrupted replacement had moved, and continues or starts over. */
static int prepare(struct stage *s, pf_error *err)
{
    if (file_kind(s->out) == FILE_ABSENT && file_kind(s->old) == FILE_DIRECTORY) {
        const int rc = file_rename(s->old, s->out, err);
        if (rc)
            return rc;
    }
    if (is_plan_ours(s)) {
        if (are_files_whole(s->plan))
            return PF_OK;
    } else if (s->plan->n_parts > 1 && !s->is_force && file_kind(s->plan_file) != FILE_ABSENT) {
        return err_set(err, PF_E_EXISTS,
                       "'%s' holds parts of another merge (another checkpoint, or other adapters, "
                       "strengths or parts): finish that one, or start over with force",
                       s->dir);
    }
    int rc = discard(s, err);
    if (!rc)
        rc = make_files(s, err);
    if (rc)
        stage_tidy(s); /* a full disk should not stay full of our zeros */
    return rc;
}

/* ------------------------------------------------------------------------------------------------------- entering */

static int pause_for_others(stage_wait_fn wait, void *wait_ctx, const struct stage *s,
                            pf_error *err)
{
    const struct timespec t = {.tv_nsec = WAIT_NS};
    if (!wait(wait_ctx))
        return err_set(err, PF_E_CANCELLED, "merge into '%s' was cancelled", s->out);
    (void)nanosleep(&t, NULL); /* shorter is fine */
    return PF_OK;
}

static bool is_our_name(struct str name)
{
    static const char *const names[] = {"lock", "finish", "plan", "done", "out", "old"};
    for (size_t i = 0; i < PF_COUNTOF(names); i++) {
        if (str_eqz(name, names[i]))
            return true;
    }
    return str_starts(name, "part.") || str_starts(name, "journal.") || str_starts(name, ".plan.");
}

/* A directory of that name that holds anything else is somebody's: it is left alone. */
static int make_dir(const struct stage *s, pf_error *err)
{
    char **names = NULL;
    size_t n = 0, n_foreign = 0;
    if (!mkdir(s->dir, 0777))
        return PF_OK;
    if (errno != EEXIST)
        return err_sys(err, errno, "cannot create directory '%s'", s->dir);
    const int rc = file_list(s->dir, &names, &n, err);
    if (rc == PF_E_NOTFOUND && file_kind(s->dir) == FILE_ABSENT)
        return PF_OK; /* just removed by whoever published: the locks will tell */
    for (size_t i = 0; !rc && i < n; i++)
        n_foreign += !is_our_name(str_of(names[i]));
    file_list_free(names, rc ? 0 : n);
    if (rc && rc != PF_E_NOTFOUND) /* not found: no directory, but a file of that name */
        return rc;
    if (rc || n_foreign)
        return err_set(err, PF_E_EXISTS,
                       "'%s' exists and is no partial output: remove or rename it", s->dir);
    return PF_OK;
}

enum settled { SETTLED, SETTLE_BUSY, SETTLE_GONE, SETTLE_FAILED };

static enum settled of_lock(int rc)
{
    return rc == PF_OK           ? SETTLED
           : rc == PF_E_BUSY     ? SETTLE_BUSY
           : rc == PF_E_NOTFOUND ? SETTLE_GONE /* the directory: whoever published removed it */
                                 : SETTLE_FAILED;
}

/* Ends with the shared lock held and the files of our plan there. */
static enum settled settle(struct stage *s, pf_error *err)
{
    struct file_lock alone;
    enum settled how = of_lock(file_lock_try(&alone, s->lock, err));
    if (how == SETTLED) {
        const int rc = prepare(s, err);
        file_lock_release(&alone);
        if (rc)
            return SETTLE_FAILED;
    } else if (how != SETTLE_BUSY) {
        return how;
    }
    how = of_lock(file_lock_shared_try(&s->shared_lock, s->lock, err));
    if (how != SETTLED || is_plan_ours(s))
        return how;
    const bool is_none = file_kind(s->plan_file) == FILE_ABSENT;
    file_lock_release(&s->shared_lock);
    if (is_none) /* between somebody's removing and making */
        return SETTLE_BUSY;
    (void)err_set(err, PF_E_BUSY,
                  "'%s' belongs to another merge that is running: wait for it, or choose another "
                  "output",
                  s->dir);
    return SETTLE_FAILED;
}

static enum settled lock_part(struct stage *s, pf_error *err)
{
    char *path = numbered(s, "part", s->plan->i_part);
    const int rc = path ? file_lock_try(&s->part_lock, path, err) : err_nomem(err, 0, "a path");
    mem_free(path);
    if (rc != PF_E_BUSY)
        return of_lock(rc);
    if (s->plan->n_parts == 1)
        (void)err_set(err, PF_E_BUSY,
                      "'%s' is being written by another process: wait for it, or choose another "
                      "output",
                      s->out);
    else
        (void)err_set(err, PF_E_BUSY, "part %u of %u of '%s' is being written by another process",
                      s->plan->i_part + 1, s->plan->n_parts, s->out);
    return SETTLE_FAILED;
}

static int set_paths(struct stage *s, struct export_plan *plan, pf_error *err)
{
    s->plan = plan;
    for (size_t i = 0; i < plan->n_files; i++) {
        struct out_file *f = &plan->files[i];
        mem_free(f->path_out);
        f->path_out = plan->is_file ? mem_strdup(s->payload) : path_join(s->payload, f->rel);
        if (!f->path_out)
            return err_nomem(err, 0, "a path");
    }
    return PF_OK;
}

int stage_enter(struct stage *s, struct export_plan *plan, stage_wait_fn wait, void *wait_ctx,
                pf_error *err)
{
    pf_error why = {0};
    int rc = set_paths(s, plan, err);
    for (unsigned n_gone = 0; !rc;) {
        rc = make_dir(s, err);
        if (rc)
            break;
        enum settled how = s->part_lock.fd < 0 ? lock_part(s, &why) : SETTLED;
        if (how == SETTLED)
            how = settle(s, &why);
        if (how == SETTLED)
            return PF_OK;
        if (how == SETTLE_GONE && n_gone++ < N_ENTER_RETRIES)
            file_lock_release(&s->part_lock); /* of a directory that is gone */
        else if (how == SETTLE_BUSY)
            rc = pause_for_others(wait, wait_ctx, s, err);
        else
            break;
    }
    if (!rc) {
        rc = why.code;
        if (err)
            *err = why;
    }
    return rc;
}

/* ------------------------------------------------------------------------------------------------------ publishing */

static bool are_all_durable(const struct stage *s)
{
    for (uint32_t i = 0; i < s->plan->n_parts; i++) {
        char *path = stage_journal_path(s, i);
        const bool is = path && journal_is_complete(path, s->plan, i);
        mem_free(path);
        if (!is)
            return false;
    }
    return true;
}

static int move_into_place(struct stage *s, pf_error *err)
{
    int rc = check_existing(s, s->plan->is_file, err); /* it may have appeared meanwhile */
    if (rc)
        return rc;
    if (!s->plan->is_file && file_kind(s->out) == FILE_DIRECTORY) {
        rc = file_rename(s->out, s->old, err);
        if (rc)
            return rc;
    }
    rc = file_rename(s->payload, s->out, err);
    if (rc) {
        if (file_kind(s->old) == FILE_DIRECTORY)
            (void)rename(s->old, s->out); /* else the next run puts it back */
        return rc;
    }
    rc = file_sync_dir(s->dir, err);
    if (!rc)
        rc = file_sync_dir(s->out_dir, err);
    if (!rc)
        (void)rename(s->plan_file,
                     s->done_file); /* a kill while tidying is told from a start over */
    return rc;
}

bool stage_was_published(struct stage *s, struct export_plan *plan)
{
    return !set_paths(s, plan, NULL) && file_kind(s->payload) == FILE_ABSENT &&
           (is_plan_in(s, s->done_file) || (is_plan_ours(s) && are_all_durable(s)));
}

int stage_publish(struct stage *s, stage_wait_fn wait, void *wait_ctx, bool *out_is_complete,
                  pf_error *err)
{
    struct file_lock finish = {.fd = -1};
    char *path = path_join(s->dir, "finish");
    int rc = path ? PF_E_BUSY : err_nomem(err, 0, "a path");
    while (rc == PF_E_BUSY) {
        rc = file_lock_try(&finish, path, err);
        if (rc == PF_E_BUSY && (rc = pause_for_others(wait, wait_ctx, s, err)) == PF_OK)
            rc = PF_E_BUSY;
    }
    mem_free(path);
    if (rc == PF_E_NOTFOUND && file_kind(s->out) == FILE_ABSENT)
        return err_set(err, PF_E_NOTFOUND,
                       "'%s' was removed while it was written, and there is no '%s': start again",
                       s->dir, s->out);
    if (rc == PF_E_NOTFOUND) { /* another part's process published and tidied while we waited */
        *out_is_complete = true;
        return PF_OK;
    }
    if (rc)
        return rc;
    const bool is_complete = are_all_durable(s);
    if (is_complete)
        rc = plan_verify(s->plan, err);
    if (is_complete && !rc)
        rc = move_into_place(s, err);
    if (is_complete && !rc)
        stage_tidy(s);
    file_lock_release(&finish);
    if (!rc)
        *out_is_complete = is_complete;
    return rc;
}

void stage_tidy(struct stage *s)
{
    static const char *const last[] = {"finish", "done", "lock"};
    char **names = NULL;
    size_t n = 0;
    if (discard(s, NULL) || file_list(s->dir, &names, &n, NULL))
        return; /* litter; the next run with this name removes it */
    for (size_t i = 0; i < n; i++) {
        char *path = str_starts(str_of(names[i]), "part.") ? path_join(s->dir, names[i]) : NULL;
        if (path)
            (void)unlink(path);
        mem_free(path);
    }
    file_list_free(names, n);
    for (size_t i = 0; i < PF_COUNTOF(last); i++) {
        char *path = path_join(s->dir, last[i]);
        if (path)
            (void)unlink(path);
        mem_free(path);
    }
    (void)rmdir(s->dir); /* stays when somebody put something else in it */
}
