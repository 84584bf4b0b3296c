/*
 * Building an overlay: layer by layer, blocks of 4 MiB merged by a pool, hashed, written with bounded dirty pages, and each
 * layer file published whole. A killed build leaves whole layers; the next one checks and keeps them. Called by the engine's background
 * builder. Must never touch an entry that is complete, or one that another process builds.
 */
#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/proc.h"
#include "overlay/overlay_int.h"
#include "tensor/dtype.h"

struct worker {
    uint8_t *buffer; /* one block */
    struct merge_scratch *scratch;
};

/* One layer being written. Tasks are blocks: first the merged ones, then those of the base that only need a digest. */
struct job {
    const struct pf_composition *comp;
    const struct layer_targets *lt;
    const struct st_layout *layout;
    struct layer_digests digests;
    int fd;
    const char *path;
    struct worker *workers;
    const struct overlay_build_opts *opts;
    uint64_t n_done_before, n_total;
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

/* One 4 MiB block (the last of a tensor: less) of the merged bytes, or of the base bytes, of a layer. */
struct block {
    const struct merge_target *target;
    size_t i_tensor; /* within the layer's targets */
    uint64_t off;
    size_t n_bytes;
};

static struct block find_block(const struct job *job, size_t i, bool is_base)
{
    for (size_t k = 0;; k++) {
        const struct merge_target *t = &job->comp->targets[job->lt->i_target0 + k];
        uint64_t all = is_base ? target_base_bytes(t) : target_bytes(t);
        if (i < n_blocks(all)) {
            uint64_t off = (uint64_t)i * HASH_BLOCK_BYTES;
            uint64_t n = all - off < HASH_BLOCK_BYTES ? all - off : HASH_BLOCK_BYTES;
            return (struct block){t, k, off, (size_t)n};
        }
        i -= n_blocks(all);
    }
}

static void write_block(struct job *job, size_t i, struct worker *w)
{
    struct block b = find_block(job, i, false);
    pf_error e;
    merge_bytes(b.target, b.off, b.n_bytes, w->buffer, w->scratch);
    job->digests.merged[i] = hash_bytes(w->buffer, b.n_bytes);
    uint64_t at = st_layout_offset(job->layout, b.i_tensor) + b.off;
    int rc = file_pwrite(job->fd, w->buffer, b.n_bytes, at, job->path, &e);
    if (rc) {
        fail(job, rc, &e);
        return;
    }
    /* Starts writeback now, so that dirty pages never pile up; waiting is left to the final fdatasync. */
    (void)sync_file_range(job->fd, (off64_t)at, (off64_t)b.n_bytes, SYNC_FILE_RANGE_WRITE);
    atomic_fetch_add_explicit(&job->n_done, b.n_bytes, memory_order_relaxed);
}

static void hash_base_block(struct job *job, size_t i)
{
    struct block b = find_block(job, i, true);
    job->digests.base[i] = hash_bytes(b.target->base + b.off, b.n_bytes);
}

static void run_task(void *ctx, size_t i_task, unsigned i_worker)
{
    struct job *job = ctx;
    if (atomic_load_explicit(&job->rc, memory_order_relaxed) ||
        atomic_load_explicit(&job->is_cancelled, memory_order_relaxed))
        return;
    if (i_task < job->digests.n_merged)
        write_block(job, i_task, &job->workers[i_worker]);
    else
        hash_base_block(job, i_task - job->digests.n_merged);
    /* Worker 0 is the caller's own thread: only it may call back. */
    if (i_worker == 0 && job->opts->progress &&
        !job->opts->progress(job->opts->progress_ctx, "overlay",
                             job->n_done_before + atomic_load(&job->n_done), job->n_total))
        atomic_store(&job->is_cancelled, true);
}

static int write_layer(struct job *job, struct file_new *f, pf_error *err)
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
    pool_run(job->opts->pool, job->digests.n_merged + job->digests.n_base, run_task, job);
    rc = atomic_load(&job->rc);
    if (rc == PF_OK && atomic_load(&job->is_cancelled))
        rc = err_set(err, PF_E_CANCELLED, "building the overlay was cancelled");
    for (size_t i = 0; rc == PF_OK && i < job->lt->n; i++)
        rc = ckpt_tensor_guard(job->comp->ckpt, job->comp->i_tensors[job->lt->i_target0 + i], err);
    if (rc == PF_OK && comp_is_truncated(job->comp))
        rc = err_set(err, PF_E_TRUNCATED, "an adapter file shrank while it was merged");
    if (rc)
        goto out;
    strbuf_clear(&header);
    rc = layer_header(job->comp, job->lt, &job->digests, &header, NULL, err);
    if (rc == PF_OK)
        rc = file_pwrite(f->fd, strbuf_z(&header), header.n, 0, f->temp_path, err);
    if (rc == PF_OK)
        rc = pf_checkpoint_verify(job->comp->ckpt, err);
    if (rc == PF_OK)
        rc = file_new_publish(f, err);
out:
    strbuf_release(&header);
    st_layout_free(layout);
    return rc;
}

/* Is a layer of an earlier build whole and ours? Its blocks were durable before it got its name; a few are looked at anyway. */
static bool can_keep(const struct pf_composition *comp, const struct layer_targets *lt,
                     const char *path, uint64_t *out_n_bytes)
{
    struct st_file *f = NULL;
    struct layer_digests d = {0};
    bool keep = file_kind(path) == FILE_REGULAR && st_open(path, &f, NULL) == PF_OK &&
                layer_digests_new(comp, lt, &d, NULL) == PF_OK &&
                layer_file_check(comp, lt, f, &d, NULL) == PF_OK &&
                layer_file_verify(f, &d, 16, (size_t)clock_ns(), NULL) == PF_OK;
    if (keep)
        *out_n_bytes = st_map(f)->n_bytes;
    layer_digests_release(&d);
    st_close(f);
    return keep;
}

static uint64_t layer_bytes_total(const struct pf_composition *comp, const struct layer_targets *lt)
{
    uint64_t n = 0;
    for (size_t i = 0; i < lt->n; i++)
        n += target_bytes(&comp->targets[lt->i_target0 + i]);
    return n;
}

static int build_layer(struct job *job, const char *path, pf_error *err)
{
    struct file_new f = {.fd = -1};
    int rc = layer_digests_new(job->comp, job->lt, &job->digests, err);
    if (rc == PF_OK)
        rc = file_new_open(&f, path, err);
    if (rc == PF_OK)
        rc = write_layer(job, &f, err);
    file_new_abort(&f);
    layer_digests_release(&job->digests);
    return rc;
}

static int build_layers(struct overlay_store *s, struct job *job,
                        struct overlay_build_report *report, pf_error *err)
{
    struct layer_targets lt;
    int rc = PF_OK;
    for (size_t next = 0; rc == PF_OK && layer_targets_next(job->comp, &next, &lt);) {
        char *name = layer_file_name(lt.i_layer);
        char *path = name ? entry_file(s, job->comp->digest, name) : NULL;
        uint64_t n_kept = 0;
        job->lt = &lt;
        if (!path) {
            rc = err_nomem(err, 0, "a path");
        } else if (can_keep(job->comp, &lt, path, &n_kept)) {
            report->n_layers_kept++;
            report->n_bytes_kept += n_kept;
        } else {
            rc = build_layer(job, path, err);
            report->n_layers_written += rc == PF_OK;
        }
        job->n_done_before += layer_bytes_total(job->comp, &lt);
        atomic_store(&job->n_done, 0);
        mem_free(path);
        mem_free(name);
    }
    return rc;
}

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

int overlay_build(struct overlay_store *s, const struct pf_composition *comp,
                  const struct overlay_build_opts *opts, struct overlay_build_report *out_report,
                  pf_error *err)
{
    struct file_lock lock = {.fd = -1};
    struct overlay_build_report report = {0};
    uint64_t n_written0 = file_bytes_written();
    struct job job = {.comp = comp, .opts = opts};
    char *dir = entry_dir(s, comp->digest);
    struct layer_targets lt;
    for (size_t next = 0; layer_targets_next(comp, &next, &lt);)
        job.n_total += layer_bytes_total(comp, &lt);
    int rc =
        dir ? entry_lock(s, comp->digest, "build", false, &lock, err) : err_nomem(err, 0, "a path");
    if (rc == PF_OK)
        rc = overlay_make_room_for(s, comp->digest, job.n_total, err);
    if (rc == PF_OK)
        rc = file_mkdirs(dir, err);
    if (rc == PF_OK)
        rc = workers_new(pool_n_workers(opts->pool), &job.workers, err);
    if (rc == PF_OK)
        rc = build_layers(s, &job, &report, err);
    if (rc == PF_OK)
        rc = manifest_write(s, comp, err);
    report.n_bytes_written = file_bytes_written() - n_written0;
    workers_free(job.workers, pool_n_workers(opts->pool));
    file_lock_release(&lock);
    mem_free(dir);
    if (out_report)
        *out_report = report;
    return rc;
}
