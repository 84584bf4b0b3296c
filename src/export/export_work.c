/*
 * The workers of a merge. Each takes the next item, writes it, tells the kernel to start writing it back and waits for what
 * it wrote a little earlier, so that dirty pages stay bounded and the disk never idles. At every sixteenth, or GiB, one of them
 * commits: data synced, base verified, journal appended. Must never let a byte that was computed from a changed base
 * reach the journal.
 */
#include "export/export_int.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/mem.h"
#include "export/export_pages.h"

#define N_WORKERS_DEFAULT 8 /* more than feed a disk; their memory counts */
#define PANELS_BYTES      ((size_t)16 << 20)
#define PANEL_BYTES_MIN   ((size_t)256 << 10)
#define COMMIT_BYTES_MIN  ((uint64_t)1 << 20)
#define COMMIT_BYTES_MAX  ((uint64_t)1024 << 20)
/* Items of a worker that may still be on their way to the disk: what a disk writes in a blink */
#define N_BEHIND 64

struct behind {
    int fd;
    uint64_t off, n_bytes;
};

/* Owned by its worker. */
struct worker {
    uint8_t *panel;
    struct merge_scratch *scratch;
    struct behind ring[N_BEHIND];
    unsigned i_ring;
};

struct run {
    struct export_plan *plan;
    struct stage *stage;
    const struct pf_merge_opts *opts;
    struct pool *pool;
    struct worker *workers;
    size_t n_panel;
    struct pages pages;
    _Atomic uint8_t *states; /* enum item_state, of all items */
    _Atomic bool is_stopping;
    _Atomic uint64_t n_done, n_written, n_uncommitted;
    uint64_t n_commit;  /* bytes between commits */
    pthread_mutex_t mu; /* guards rc and err */
    int rc;
    pf_error err;
    pthread_mutex_t commit_mu; /* guards what follows */
    struct journal journal;
    bool *needs_sync; /* per file */
    /* One failed: the next would succeed, and what it says of earlier writes is worth nothing */
    bool is_sync_lost;
};

static void fail(struct run *r, int rc, const pf_error *err)
{
    (void)pthread_mutex_lock(&r->mu);
    if (!r->rc) { /* the first one counts */
        r->rc = rc;
        r->err = *err;
    }
    (void)pthread_mutex_unlock(&r->mu);
    atomic_store_explicit(&r->is_stopping, true, memory_order_relaxed);
}

/* ----------------------------------------------------------------------------------------------------- committing */

static int sync_file(const struct out_file *f, pf_error *err)
{
    if (f->fd_out >= 0)
        return file_sync(f->fd_out, f->path_out, err);
    const int fd = open(f->path_out, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return err_sys(err, errno, "cannot open '%s'", f->path_out);
    const int rc = file_sync(fd, f->path_out, err);
    (void)close(fd); /* synced */
    return rc;
}

/* Moves items between states; returns how many bytes were moved. Only the committer leaves WRITTEN and SYNCING. */
static uint64_t move_states(struct run *r, enum item_state from, enum item_state to)
{
    const struct export_plan *plan = r->plan;
    uint64_t n_bytes = 0;
    for (size_t i = plan->i_item0; i < plan->i_item1; i++) {
        /* Acquire: pairs with the release of the worker that wrote the item. */
        if (atomic_load_explicit(&r->states[i], memory_order_acquire) != from)
            continue;
        atomic_store_explicit(&r->states[i], (uint8_t)to, memory_order_relaxed);
        n_bytes += plan->items[i].n_bytes;
        r->needs_sync[plan->items[i].i_file] = true;
    }
    return n_bytes;
}

static int commit_locked(struct run *r, pf_error *err)
{
    const struct export_plan *plan = r->plan;
    int rc = PF_OK;
    if (r->is_sync_lost)
        return PF_OK;
    memset(r->needs_sync, 0, plan->n_files * sizeof *r->needs_sync);
    const uint64_t n_bytes = move_states(r, ITEM_WRITTEN, ITEM_SYNCING);
    if (!n_bytes)
        return PF_OK;
    (void)atomic_fetch_sub_explicit(&r->n_uncommitted, n_bytes, memory_order_relaxed);
    for (size_t i = 0; i < plan->n_files && !rc; i++) {
        if (r->needs_sync[i])
            rc = sync_file(&plan->files[i], err);
    }
    r->is_sync_lost = rc != PF_OK;
    if (!rc) {
        rc = plan_verify(plan, err);
        if (rc)
            stage_distrust(r->stage);
    }
    if (!rc)
        rc = journal_append(&r->journal, r->states, plan->i_item0, plan->i_item1, err);
    (void)move_states(r, ITEM_SYNCING, rc ? ITEM_WRITTEN : ITEM_DURABLE);
    return rc;
}

static void commit_if_due(struct run *r)
{
    pf_error err = {0};
    if (atomic_load_explicit(&r->n_uncommitted, memory_order_relaxed) < r->n_commit ||
        pthread_mutex_trylock(&r->commit_mu))
        return;
    const int rc = commit_locked(r, &err);
    (void)pthread_mutex_unlock(&r->commit_mu);
    if (rc)
        fail(r, rc, &err);
}

/* -------------------------------------------------------------------------------------------------------- one item */

/* One panel of an item: at out of the file. */
static int write_panel(struct run *r, struct worker *w, const struct item *item,
                       const struct merge_panel *p, uint64_t off, pf_error *err)
{
    const struct merge_target *t = &r->plan->comp->targets[item->i_target];
    const struct out_file *f = &r->plan->files[item->i_file];
    const size_t n = (size_t)p->n_rows * (size_t)p->n_cols * (pf_dtype_bits(t->out_dtype) / 8);
    merge_read(t, p, false, w->panel, w->scratch);
    return file_pwrite(f->fd_out, w->panel, n, off, f->path_out, err);
}

static int merge_item(struct run *r, struct worker *w, const struct item *item, pf_error *err)
{
    const struct merge_target *t = &r->plan->comp->targets[item->i_target];
    const int64_t n_elem = pf_dtype_bits(t->out_dtype) / 8;
    const int64_t most = (int64_t)r->n_panel / n_elem; /* elements of a panel */
    const int64_t col_step = item->n_cols < most ? item->n_cols : most;
    const int64_t row_step = item->n_cols < most ? most / item->n_cols : 1;
    uint64_t off = item->off_out;
    for (int64_t i = 0; i < item->n_rows; i += row_step) {
        for (int64_t k = 0; k < item->n_cols; k += col_step) {
            const struct merge_panel p = {
                .row0 = item->row0 + i,
                .n_rows = item->n_rows - i < row_step ? item->n_rows - i : row_step,
                .col0 = item->col0 + k,
                .n_cols = item->n_cols - k < col_step ? item->n_cols - k : col_step};
            const int rc = write_panel(r, w, item, &p, off, err);
            if (rc)
                return rc;
            off += (uint64_t)(p.n_rows * p.n_cols * n_elem);
        }
    }
    return PF_OK;
}

/* A file that is no weights: both ends are opened for the item. */
static int copy_plain(const struct out_file *f, const struct item *item, pf_error *err)
{
    int rc = PF_OK;
    const int in = open(f->path_in, O_RDONLY | O_CLOEXEC);
    const int out = open(f->path_out, O_WRONLY | O_CLOEXEC);
    if (in < 0 || out < 0)
        rc = err_sys(err, errno, "cannot open '%s'", in < 0 ? f->path_in : f->path_out);
    else if (item->kind == ITEM_TEXT)
        rc = file_pwrite(out, f->text.p + item->off_in, item->n_bytes, item->off_out, f->path_out,
                         err);
    else
        rc = file_copy_range(in, item->off_in, out, item->off_out, item->n_bytes, f->path_out, err);
    if (in >= 0)
        (void)close(in); /* only read from */
    if (out >= 0)
        (void)close(out); /* synced by the commit */
    return rc;
}

static int do_item(struct run *r, struct worker *w, const struct item *item, pf_error *err)
{
    const struct out_file *f = &r->plan->files[item->i_file];
    if (!f->st)
        return copy_plain(f, item, err);
    if (item->kind == ITEM_MERGE)
        return merge_item(r, w, item, err);
    if (item->kind == ITEM_TEXT)
        return file_pwrite(f->fd_out, f->text.p + item->off_in, item->n_bytes, item->off_out,
                           f->path_out, err);
    return file_copy_range(st_map(f->st)->fd, item->off_in, f->fd_out, item->off_out, item->n_bytes,
                           f->path_out, err);
}

/* What went wrong with the base is a better story than what that did to a read. */
static void fail_item(struct run *r, int rc, const pf_error *err)
{
    pf_error why = {0};
    const int rc_files = plan_verify(r->plan, &why);
    if (rc_files)
        stage_distrust(r->stage);
    fail(r, rc_files ? rc_files : rc, rc_files ? &why : err);
}

/* Starts the write-back of an item and waits for that of an earlier one. Errors show at the commit's sync, through fd_out. */
static void push_out(struct run *r, struct worker *w, const struct item *item)
{
    const int fd = r->plan->files[item->i_file].fd_wait;
    struct behind *slot = &w->ring[w->i_ring++ % N_BEHIND];
    if (fd < 0)
        return;
    (void)sync_file_range(fd, (off64_t)item->off_out, (off64_t)item->n_bytes,
                          SYNC_FILE_RANGE_WRITE);
    if (slot->n_bytes) {
        (void)sync_file_range(slot->fd, (off64_t)slot->off, (off64_t)slot->n_bytes,
                              SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                                  SYNC_FILE_RANGE_WAIT_AFTER);
        if (r->pages.is_out_large)
            (void)posix_fadvise(slot->fd, (off_t)slot->off, (off_t)slot->n_bytes,
                                POSIX_FADV_DONTNEED);
    }
    *slot = (struct behind){fd, item->off_out, item->n_bytes};
}

static bool is_cancelled(struct run *r)
{
    return r->opts->progress &&
           !r->opts->progress(r->opts->progress_ctx, "merge",
                              atomic_load_explicit(&r->n_done, memory_order_relaxed),
                              r->plan->n_bytes);
}

static void task(void *ctx, size_t i_task, unsigned i_worker)
{
    struct run *r = ctx;
    const size_t i = r->plan->i_item0 + i_task;
    const struct item *item = &r->plan->items[i];
    struct worker *w = &r->workers[i_worker];
    pf_error err = {0};
    /* Relaxed: only this process's committer writes DURABLE, and nobody is told to do a durable item. */
    if (atomic_load_explicit(&r->is_stopping, memory_order_relaxed) ||
        atomic_load_explicit(&r->states[i], memory_order_relaxed) == ITEM_DURABLE)
        return;
    pages_ahead(&r->pages, r->plan, i + 2 * pool_n_workers(r->pool));
    pages_populate(r->plan, item);
    const int rc = do_item(r, w, item, &err);
    pages_behind(&r->pages, r->plan, i);
    if (rc) {
        fail_item(r, rc, &err);
        return;
    }
    push_out(r, w, item);
    (void)atomic_fetch_add_explicit(&r->n_done, item->n_bytes, memory_order_relaxed);
    (void)atomic_fetch_add_explicit(&r->n_written, item->n_bytes, memory_order_relaxed);
    (void)atomic_fetch_add_explicit(&r->n_uncommitted, item->n_bytes, memory_order_relaxed);
    /* Release: the committer that sees WRITTEN also sees the write. */
    atomic_store_explicit(&r->states[i], ITEM_WRITTEN, memory_order_release);
    commit_if_due(r);
    if (i_worker == 0 && is_cancelled(r)) {
        (void)err_set(&err, PF_E_CANCELLED, "merge into '%s' was cancelled", r->stage->out);
        fail(r, PF_E_CANCELLED, &err);
    }
}

/* --------------------------------------------------------------------------------------------------------- set-up */

static int make_workers(struct run *r, pf_error *err)
{
    unsigned n = r->opts->n_threads;
    if (!n) {
        /* One may wait for the disk while the others use the CPUs */
        n = pool_default_threads() + 1;
        n = n < N_WORKERS_DEFAULT ? n : N_WORKERS_DEFAULT;
    }
    int rc = pool_new(n, &r->pool, err);
    if (rc)
        return rc;
    r->n_panel = PANELS_BYTES / n;
    r->n_panel = r->n_panel < PANEL_BYTES_MIN    ? PANEL_BYTES_MIN
                 : r->n_panel > ITEM_MERGE_BYTES ? (size_t)ITEM_MERGE_BYTES
                                                 : r->n_panel;
    r->workers = mem_calloc(n, sizeof *r->workers);
    if (!r->workers)
        return err_nomem(err, n * sizeof *r->workers, "workers");
    for (unsigned i = 0; i < n && !rc && r->plan->comp; i++) {
        r->workers[i].panel = mem_aligned(4096, r->n_panel);
        rc = r->workers[i].panel ? merge_scratch_new(&r->workers[i].scratch, err)
                                 : err_nomem(err, r->n_panel, "a panel");
    }
    return rc;
}

static int open_outputs(struct run *r, pf_error *err)
{
    for (size_t i = 0; i < r->plan->n_files; i++) {
        struct out_file *f = &r->plan->files[i];
        if (!f->st)
            continue;
        f->fd_out = open(f->path_out, O_RDWR | O_CLOEXEC);
        f->fd_wait = f->fd_out < 0 ? -1 : open(f->path_out, O_RDWR | O_CLOEXEC);
        if (f->fd_wait < 0)
            return err_sys(err, errno, "cannot open '%s'", f->path_out);
    }
    return PF_OK;
}

static int set_up(struct run *r, struct work_result *out, pf_error *err)
{
    const struct export_plan *plan = r->plan;
    r->states = mem_calloc(plan->n_items + 1, 1);
    r->needs_sync = mem_calloc(plan->n_files + 1, sizeof *r->needs_sync);
    if (!r->states || !r->needs_sync)
        return err_nomem(err, plan->n_items, "item states");
    char *path = stage_journal_path(r->stage, plan->i_part);
    int rc = path ? journal_open(&r->journal, path, plan, plan->i_part, r->states, err)
                  : err_nomem(err, 0, "a path");
    mem_free(path);
    if (!rc)
        rc = make_workers(r, err);
    if (!rc)
        rc = open_outputs(r, err);
    if (!rc)
        rc = pages_init(&r->pages, plan, err);
    for (size_t i = plan->i_item0; i < plan->i_item1; i++) {
        if (atomic_load_explicit(&r->states[i], memory_order_relaxed) == ITEM_DURABLE)
            out->n_bytes_resumed += plan->items[i].n_bytes;
    }
    atomic_store_explicit(&r->n_done, out->n_bytes_resumed, memory_order_relaxed);
    r->n_commit = plan->n_bytes / 16;
    r->n_commit = r->n_commit < COMMIT_BYTES_MIN         ? COMMIT_BYTES_MIN
                  : plan->n_bytes > 4 * COMMIT_BYTES_MAX ? COMMIT_BYTES_MAX
                                                         : r->n_commit;
    return rc;
}

static void tear_down(struct run *r)
{
    const unsigned n = r->pool ? pool_n_workers(r->pool) : 0;
    for (unsigned i = 0; i < n && r->workers; i++) {
        mem_free(r->workers[i].panel);
        merge_scratch_free(r->workers[i].scratch);
    }
    pool_free(r->pool);
    mem_free(r->workers);
    for (size_t i = 0; i < r->plan->n_files; i++) {
        struct out_file *f = &r->plan->files[i];
        if (f->fd_out >= 0)
            (void)close(f->fd_out); /* what counts was synced */
        if (f->fd_wait >= 0)
            (void)close(f->fd_wait); /* only waited by */
        f->fd_out = f->fd_wait = -1;
    }
    journal_close(&r->journal);
    pages_release(&r->pages);
    mem_free((void *)(uintptr_t)r->states);
    mem_free(r->needs_sync);
    (void)pthread_mutex_destroy(&r->mu);
    (void)pthread_mutex_destroy(&r->commit_mu);
}

int work_run(struct export_plan *plan, struct stage *stage, const struct pf_merge_opts *opts,
             struct work_result *out, pf_error *err)
{
    struct run r = {.plan = plan, .stage = stage, .opts = opts, .journal = {.fd = -1}};
    pf_error late = {0};
    (void)pthread_mutex_init(&r.mu, NULL); /* cannot fail on Linux with default attributes */
    (void)pthread_mutex_init(&r.commit_mu, NULL);
    int rc = set_up(&r, out, err);
    if (!rc && is_cancelled(&r))
        rc = err_set(err, PF_E_CANCELLED, "merge into '%s' was cancelled", stage->out);
    if (!rc) {
        pool_run(r.pool, plan->i_item1 - plan->i_item0, task, &r);
        /* After a failure too: what is written whole need not be written again. */
        const int rc_commit = commit_locked(&r, &late);
        rc = r.rc ? r.rc : rc_commit;
        if (rc && err)
            *err = r.rc ? r.err : late;
        out->n_bytes_written = atomic_load_explicit(&r.n_written, memory_order_relaxed);
    }
    tear_down(&r);
    return rc;
}
