/*
 * Building an overlay: layer by layer, blocks of 4 MiB merged by a pool, hashed, written with bounded dirty pages, and each
 * layer file published whole. A killed build leaves whole layers; the next one checks and keeps them. Called by the engine's background
 * builder. Must never touch an entry that is complete, or one that another process builds, and never publish what was computed from
 * bytes that changed meanwhile.
 */
#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "overlay/overlay_int.h"
#include "tensor/dtype.h"

#define MANIFEST_RESERVE ((uint64_t)64 << 10)

struct worker {
    uint8_t *buffer; /* one block */
    struct merge_scratch *scratch;
    struct dirty dirty;
};

/* A changed layer, and whether an earlier build left its file whole. */
struct layer_plan {
    struct layer_targets lt;
    char *path;
    uint64_t n_file_bytes, n_merged_bytes;
    bool is_kept;
};

/* The build, and the layer being written. Tasks are blocks of the base: each is read once, for its digest and for what is made of it. */
struct job {
    const struct pf_composition *comp;
    const struct overlay_build_opts *opts;
    struct layer_plan *plan;
    struct digest *headers; /* of the layer files, kept or written; one per plan */
    size_t n_plan;
    struct worker *workers;
    struct behind *behind;
    struct digest stamp;     /* of the base when the build began */
    struct file_new reserve; /* room on the disk for what is still missing */

    const struct layer_targets *lt;
    const struct st_layout *layout;
    struct layer_digests digests;
    int fd;
    const char *path;
    uint64_t n_done_before, n_total; /* merged bytes */
    _Atomic uint64_t n_done;
    _Atomic int rc; /* of the first worker that failed */
    pf_error *err;  /* written by that worker alone */
    _Atomic bool is_cancelled;
};

static void fail(struct job *job, int rc, const pf_error *e)
{
    int none = PF_OK;
    /* relaxed: pool_run joins before anybody reads err */
    if (atomic_compare_exchange_strong_explicit(&job->rc, &none, rc, memory_order_relaxed,
                                                memory_order_relaxed) &&
        job->err)
        *job->err = *e;
}

/* On the thread that called overlay_build only. */
static void tell(struct job *job)
{
    uint64_t n_done = job->n_done_before + atomic_load_explicit(&job->n_done, memory_order_relaxed);
    if (job->opts->progress &&
        !job->opts->progress(job->opts->progress_ctx, "overlay", n_done, job->n_total))
        atomic_store_explicit(&job->is_cancelled, true, memory_order_relaxed);
}

static int check_cancelled(const struct job *job, pf_error *err)
{
    return atomic_load_explicit(&job->is_cancelled, memory_order_relaxed)
               ? err_set(err, PF_E_CANCELLED, "building overlay %s was cancelled",
                         job->comp->digest_hex)
               : PF_OK;
}

/* ----------------------------------------------------------------------------------------- blocks */

/* Merged bytes [off, off + n) of a tensor: the end of one row, whole rows, the beginning of another. */
static void merge_bytes(const struct merge_target *t, uint64_t off, size_t n, uint8_t *out,
                        struct merge_scratch *scratch)
{
    size_t size = dtype_size(t->out_dtype);
    int64_t at = (int64_t)(off / size), end = (int64_t)((off + n) / size);
    while (at < end) {
        int64_t row = at / t->n_cols, col = at % t->n_cols;
        struct merge_panel p = {row, 1, col, t->n_cols - col};
        if (col == 0 && end - at >= t->n_cols)
            p.n_rows = (end - at) / t->n_cols;
        else if (p.n_cols > end - at)
            p.n_cols = end - at;
        merge_read(t, &p, false, out, scratch);
        out += (size_t)(p.n_rows * p.n_cols) * size;
        at += p.n_rows * p.n_cols;
    }
}

/* Everything that is made of one block of the base: as many bytes, or twice as many when 16 bits become f32. */
static int write_block(struct job *job, const struct base_block *b, struct worker *w, pf_error *err)
{
    size_t ratio = dtype_size(b->target->out_dtype) / dtype_size(b->target->dtype);
    uint64_t off = b->off * ratio, end = off + (uint64_t)b->n_bytes * ratio;
    for (; off < end; off += HASH_BLOCK_BYTES) {
        size_t n = end - off < HASH_BLOCK_BYTES ? (size_t)(end - off) : HASH_BLOCK_BYTES;
        uint64_t at = st_layout_offset(job->layout, b->i_tensor) + off;
        merge_bytes(b->target, off, n, w->buffer, w->scratch);
        job->digests.merged[b->i_merged0 + (size_t)(off / HASH_BLOCK_BYTES)] =
            hash_bytes(w->buffer, n);
        int rc = file_pwrite(job->fd, w->buffer, n, at, job->path, err);
        if (rc == PF_OK)
            rc = dirty_add(&w->dirty, job->fd, at, n, job->path, err);
        if (rc)
            return rc;
        atomic_fetch_add_explicit(&job->n_done, n, memory_order_relaxed);
    }
    return PF_OK;
}

static void run_task(void *ctx, size_t i_task, unsigned i_worker)
{
    struct job *job = ctx;
    pf_error e;
    if (atomic_load_explicit(&job->rc, memory_order_relaxed) ||
        atomic_load_explicit(&job->is_cancelled, memory_order_relaxed))
        return;
    struct base_block b = find_base_block(job->comp, job->lt, i_task);
    behind_fetch(job->behind, job->lt->i_target0 + b.i_tensor, b.off, b.n_bytes);
    job->digests.base[i_task] = hash_bytes(b.target->base + b.off, b.n_bytes);
    int rc = write_block(job, &b, &job->workers[i_worker], &e);
    behind_drop(job->behind, job->lt->i_target0 + b.i_tensor, b.off, b.n_bytes);
    if (rc)
        fail(job, rc, &e);
    if (i_worker == 0) /* the caller's own thread */
        tell(job);
}

/* ----------------------------------------------------------------------------------------- layers */

/* Is what the layer was computed from still what the composition speaks of? */
static int check_sources(const struct job *job, pf_error *err)
{
    const struct pf_composition *comp = job->comp;
    int rc = PF_OK;
    for (size_t i = 0; rc == PF_OK && i < job->lt->n; i++)
        rc = ckpt_tensor_guard(comp->ckpt, comp->i_tensors[job->lt->i_target0 + i], err);
    if (rc == PF_OK && comp_is_truncated(comp))
        rc = err_set(err, PF_E_TRUNCATED, "an adapter file shrank while it was merged");
    for (size_t i = 0; rc == PF_OK && i < comp->n_entries; i++)
        if (!adapter_is_current(comp->entries[i].adapter))
            rc = err_set(err, PF_E_CHANGED,
                         "adapter '%s' was replaced or removed: what it was is not written to the "
                         "cache",
                         adapter_path(comp->entries[i].adapter));
    if (rc == PF_OK)
        rc = pf_checkpoint_verify(comp->ckpt, err);
    if (rc == PF_OK && !digest_eq(job->stamp, base_stamp(comp->ckpt)))
        rc = err_set(err, PF_E_CHANGED, "base '%s' was touched while overlay %s was built from it",
                     comp->ckpt->path, comp->digest_hex);
    return rc ? rc : base_id_check(comp, err);
}

static int write_layer(struct job *job, struct file_new *f, struct digest *out_header,
                       pf_error *err)
{
    struct strbuf header;
    struct st_layout *layout = NULL;
    strbuf_init(&header);
    int rc = layer_header(job->comp, job->lt, &job->digests, &header, &layout, err);
    if (rc == PF_OK)
        rc = file_reserve(f->fd, st_layout_file_bytes(layout), f->temp_path, err);
    if (rc)
        goto out;
    job->layout = layout;
    job->fd = f->fd;
    job->path = f->temp_path;
    job->err = err;
    pool_run(job->opts->pool, job->digests.n_base, run_task, job);
    rc = atomic_load(&job->rc);
    if (rc == PF_OK)
        rc = check_cancelled(job, err);
    if (rc == PF_OK)
        rc = check_sources(job, err);
    if (rc)
        goto out;
    strbuf_clear(&header);
    rc = layer_header(job->comp, job->lt, &job->digests, &header, NULL, err);
    if (rc == PF_OK)
        rc = file_pwrite(f->fd, strbuf_z(&header), header.n, 0, f->temp_path, err);
    *out_header = hash_bytes(strbuf_z(&header), header.n);
    if (rc == PF_OK)
        rc = file_sync(f->fd, f->temp_path, err);
    if (rc == PF_OK)
        (void)posix_fadvise(f->fd, 0, 0, POSIX_FADV_DONTNEED);
    if (rc == PF_OK)
        rc = file_new_publish(f, err);
out:
    strbuf_release(&header);
    st_layout_free(layout);
    return rc;
}

static int build_layer(struct job *job, size_t i, pf_error *err)
{
    const struct layer_plan *p = &job->plan[i];
    struct file_new f = {.fd = -1};
    job->lt = &p->lt;
    for (unsigned k = 0; k < pool_n_workers(job->opts->pool); k++)
        job->workers[k].dirty.n = 0;
    int rc = layer_digests_new(job->comp, &p->lt, &job->digests, err);
    if (rc == PF_OK)
        rc = file_new_open(&f, p->path, err);
    if (rc == PF_OK)
        rc = write_layer(job, &f, &job->headers[i], err);
    file_new_abort(&f);
    behind_sweep(job->behind, p->lt.i_target0, p->lt.n);
    layer_digests_release(&job->digests);
    return rc;
}

/* What is missing shrinks by the layer that is written next, which reserves that room for itself. */
static void pass_on_room(struct job *job, uint64_t *io_n_missing, uint64_t n_bytes)
{
    *io_n_missing -= n_bytes;
    if (job->reserve.fd >= 0)
        (void)ftruncate(job->reserve.fd, (off_t)*io_n_missing); /* a reserve too large is no harm */
}

static int build_layers(struct job *job, uint64_t n_missing, struct overlay_build_report *report,
                        pf_error *err)
{
    int rc = PF_OK;
    for (size_t i = 0; rc == PF_OK && i < job->n_plan; i++) {
        const struct layer_plan *p = &job->plan[i];
        tell(job);
        rc = check_cancelled(job, err);
        if (rc == PF_OK && p->is_kept) {
            report->n_layers_kept++;
            report->n_bytes_kept += p->n_file_bytes;
        } else if (rc == PF_OK) {
            pass_on_room(job, &n_missing, p->n_file_bytes);
            rc = build_layer(job, i, err);
            report->n_layers_written += rc == PF_OK;
            report->n_bytes_written += rc == PF_OK ? p->n_file_bytes : atomic_load(&job->n_done);
        }
        job->n_done_before += p->n_merged_bytes;
        atomic_store(&job->n_done, 0);
    }
    if (rc == PF_OK) {
        tell(job);
        rc = check_cancelled(job, err);
    }
    return rc;
}

/* ------------------------------------------------------------------------------------------- planning */

/* Is a layer of an earlier build whole and ours? Its bytes were durable before it got its name; a few are looked at anyway. PF_E_MISMATCH:
 * it was made from other base bytes behind the same content id. */
static int find_kept(const struct job *job, struct layer_plan *p, struct digest *out_header,
                     pf_error *err)
{
    struct st_file *f = NULL;
    struct layer_digests d = {0};
    int rc = PF_OK;
    if (file_kind(p->path) == FILE_REGULAR && st_open(p->path, &f, NULL) == PF_OK &&
        layer_digests_new(job->comp, &p->lt, &d, NULL) == PF_OK &&
        layer_file_check(job->comp, &p->lt, f, &d, NULL) == PF_OK) {
        struct sampling some = sampling_of(d.n_merged, p->n_merged_bytes, 0);
        p->is_kept = layer_file_verify(f, &d, &some, 0, NULL) == PF_OK;
        *out_header = layer_header_digest(f);
        if (p->is_kept && !d.is_stamp_known)
            rc = layer_base_check(job->comp, &p->lt, &d, job->behind, job->opts, err);
    }
    layer_digests_release(&d);
    st_close(f);
    if (rc == PF_OK && !p->is_kept)
        (void)file_remove_tree(p->path, NULL); /* mostly nothing; what is there is no good */
    return rc;
}

static int plan_layer(struct overlay_store *s, struct job *job, size_t i_plan, pf_error *err)
{
    struct layer_plan *p = &job->plan[i_plan];
    struct layer_digests d = {0};
    struct strbuf header;
    struct st_layout *layout = NULL;
    char *name = layer_file_name(p->lt.i_layer);
    strbuf_init(&header);
    p->path = name ? entry_file(s, job->comp->digest, name) : NULL;
    mem_free(name);
    if (!p->path)
        return err_nomem(err, 0, "a path");
    for (size_t i = 0; i < p->lt.n; i++)
        p->n_merged_bytes += target_bytes(&job->comp->targets[p->lt.i_target0 + i]);
    int rc = layer_digests_new(job->comp, &p->lt, &d, err);
    if (rc == PF_OK)
        rc = layer_header(job->comp, &p->lt, &d, &header, &layout, err);
    if (rc == PF_OK)
        p->n_file_bytes = st_layout_file_bytes(layout);
    st_layout_free(layout);
    strbuf_release(&header);
    layer_digests_release(&d);
    return rc ? rc : find_kept(job, p, &job->headers[i_plan], err);
}

static void plan_free(struct job *job)
{
    for (size_t i = 0; job->plan && i < job->n_plan; i++)
        mem_free(job->plan[i].path);
    mem_free(job->plan);
    mem_free(job->headers);
}

static int plan_layers(struct overlay_store *s, struct job *job, pf_error *err)
{
    struct layer_targets lt;
    size_t n = 0;
    int rc = PF_OK;
    for (size_t next = 0; layer_targets_next(job->comp, &next, &lt);)
        n++;
    job->plan = mem_calloc(n, sizeof *job->plan);
    job->headers = mem_calloc(n, sizeof *job->headers);
    if (!job->plan || !job->headers)
        return err_nomem(err, n * sizeof *job->plan, "a build plan");
    for (size_t next = 0; rc == PF_OK && layer_targets_next(job->comp, &next, &lt);) {
        job->plan[job->n_plan++].lt = lt;
        rc = plan_layer(s, job, job->n_plan - 1, err);
        job->n_total += job->plan[job->n_plan - 1].n_merged_bytes;
    }
    return rc;
}

/* --------------------------------------------------------------------------------------------- build */

static void workers_free(struct worker *w, unsigned n)
{
    for (unsigned i = 0; w && i < n; i++) {
        mem_free(w[i].buffer);
        merge_scratch_free(w[i].scratch);
    }
    mem_free(w);
}

static int workers_new(unsigned n, struct worker **out, pf_error *err)
{
    struct worker *w = mem_calloc(n, sizeof *w);
    int rc = w ? PF_OK : err_nomem(err, n * sizeof *w, "builders");
    for (unsigned i = 0; rc == PF_OK && i < n; i++) {
        w[i].buffer = mem_aligned(4096, HASH_BLOCK_BYTES);
        rc = w[i].buffer ? merge_scratch_new(&w[i].scratch, err)
                         : err_nomem(err, HASH_BLOCK_BYTES, "a block");
    }
    if (rc) {
        workers_free(w, n);
        return rc;
    }
    *out = w;
    return PF_OK;
}

/* Whole layers and a manifest that fits: somebody was faster. A manifest that does not fit stands in the way. */
static int find_complete(struct overlay_store *s, const struct pf_composition *comp,
                         struct overlay_build_report *report, bool *out_is_complete, pf_error *err)
{
    struct json *m = NULL;
    int rc = manifest_read(s, comp->digest, &m, err);
    if (rc == PF_E_NOTFOUND)
        return PF_OK;
    if (rc == PF_OK)
        rc = manifest_check(m, comp, err);
    if (rc == PF_OK)
        rc = manifest_check_stamps(s, m, comp, err);
    *out_is_complete = rc == PF_OK;
    report->n_layers_kept = rc ? 0 : (uint32_t)json_len(json_get(m, "layers"));
    json_free(m);
    if (rc == PF_E_FORMAT || rc == PF_E_MISMATCH) {
        char *path = entry_file(s, comp->digest, MANIFEST_NAME);
        rc = path ? file_remove_tree(path, err) : err_nomem(err, 0, "a path");
        mem_free(path);
    }
    return rc;
}

static int build(struct overlay_store *s, struct job *job, const char *dir,
                 struct overlay_build_report *report, pf_error *err)
{
    uint64_t n_total = MANIFEST_RESERVE, n_missing = MANIFEST_RESERVE;
    remove_temporaries(dir);
    int rc = behind_new(job->comp, &job->behind, err);
    if (rc == PF_OK)
        rc = plan_layers(s, job, err);
    if (rc == PF_E_MISMATCH)
        return base_distrust(s, job->comp, job->opts, err);
    for (size_t i = 0; i < job->n_plan; i++) {
        n_total += job->plan[i].n_file_bytes;
        n_missing += job->plan[i].is_kept ? 0 : job->plan[i].n_file_bytes;
    }
    if (rc == PF_OK)
        rc = workers_new(pool_n_workers(job->opts->pool), &job->workers, err);
    if (rc == PF_OK)
        rc = room_reserve(s, job->comp->digest, n_total, n_missing, &job->reserve, err);
    if (rc == PF_OK)
        rc = build_layers(job, n_missing, report, err);
    file_new_abort(&job->reserve);
    if (rc == PF_OK)
        rc = base_id_check(job->comp, err);
    if (rc == PF_OK) {
        /* Before it can be adopted: readers of a read-only cache need the file to lock. */
        touch_used(s, job->comp->digest);
        rc = manifest_write(s, job->comp, job->headers, NULL, err);
    }
    if (rc == PF_E_NOTFOUND) /* nothing else that is opened here can be missing */
        rc = err_set(err, PF_E_IO, "overlay cache '%s' was removed while overlay %s was built",
                     s->dir, job->comp->digest_hex);
    if (rc)
        (void)rmdir(dir); /* where not even one layer is whole, there is no entry */
    return rc;
}

int overlay_build(struct overlay_store *s, const struct pf_composition *comp,
                  const struct overlay_build_opts *opts, struct overlay_build_report *out_report,
                  pf_error *err)
{
    struct file_lock lock = {.fd = -1};
    struct overlay_build_report report = {0};
    struct job job = {
        .comp = comp, .opts = opts, .stamp = base_stamp(comp->ckpt), .reserve = {.fd = -1}};
    bool is_complete = false;
    if (comp->n_targets == 0)
        return err_set(err, PF_E_INVALID, "composition %s changes nothing: it needs no overlay",
                       comp->digest_hex);
    int rc = file_mkdirs(s->dir, err); /* it may have been removed since it was opened */
    if (rc)
        return err_prefix(err, rc, "overlay cache: ");
    if (!store_is_writable(s))
        return err_set(err, PF_E_IO,
                       "overlay cache '%s' is read-only: what is in it is used, nothing is built",
                       s->dir);
    char *dir = entry_dir(s, comp->digest);
    if (!dir)
        return err_nomem(err, 0, "a path");
    rc = base_id_check(comp, err);
    if (rc == PF_OK)
        rc = entry_lock(s, comp->digest, "build", false, &lock, err);
    if (rc == PF_OK)
        rc = find_complete(s, comp, &report, &is_complete, err);
    if (rc == PF_OK && !is_complete)
        rc = build(s, &job, dir, &report, err);
    workers_free(job.workers, pool_n_workers(opts->pool));
    behind_free(job.behind);
    plan_free(&job);
    file_lock_release(&lock);
    mem_free(dir);
    if (out_report)
        *out_report = report;
    return rc;
}
