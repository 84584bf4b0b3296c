/*
 * Fills a planned file with seeded noise at the speed of memory: element e of a tensor is entry h(seed, name, e / 4) of a table
 * of 65,536 quantiles of the normal distribution, so that any thread can make any panel and the bytes come out the same.
 * Written in batches with bounded dirty pages; appears under its name only when it is whole and durable.
 */
#include "bench/make_int.h"

#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/file.h"
#include "base/hash.h"
#include "safetensors/safetensors.h"
#include "tensor/dtype.h"

#define N_QUANTILES    65536u
#define PANEL_BYTES    ((size_t)1 << 20)
#define BATCH_PANELS   64u
#define BATCH_BYTES    (BATCH_PANELS * PANEL_BYTES)
#define BATCHES_DIRTY  3u /* written and not yet waited for: what bounds the dirty pages */
#define STEPS_PER_UNIT 8192

struct fill {
    const struct plan *plan;
    const struct st_layout *layout;
    uint64_t *keys;          /* per tensor: what its noise is drawn from */
    void *table;             /* N_QUANTILES values in the plan's dtype */
    uint8_t *panels;         /* PANEL_BYTES per worker */
    uint64_t data0, n_bytes; /* of the file */
    uint64_t batch0;         /* file offset of the present batch */
    int fd;
    const char *path; /* for messages */
    _Atomic int rc;   /* the first failure of a worker; its error is in err */
    pf_error err;     /* written by the one worker that changed rc from PF_OK */
};

/* --------------------------------------------------------------------------------------------- the noise */

/* Values that cut the normal distribution into 65,536 parts of equal probability, by walking along its density; scaled so that their
 * root mean square is 1. */
static void normal_quantiles(float *q)
{
    const double step = 1.0 / STEPS_PER_UNIT, norm = 0.3989422804014327; /* 1 / sqrt(2 pi) */
    double x = 0, p = 0.5, density = norm, sum = 0;
    uint32_t i, half = N_QUANTILES / 2;

    for (i = 0; i < half; i++) {
        const double want = 0.5 + (i + 0.5) / N_QUANTILES;
        double next = 0, gain = 0;
        for (;;) {
            next = norm * exp(-0.5 * (x + step) * (x + step));
            gain = 0.5 * step * (density + next);
            if (p + gain >= want)
                break;
            p += gain;
            x += step;
            density = next;
        }
        q[half + i] = (float)(x + step * (want - p) / gain);
        sum += 2.0 * (double)q[half + i] * (double)q[half + i];
    }
    for (i = 0; i < half; i++) {
        q[half + i] = (float)((double)q[half + i] / sqrt(sum / N_QUANTILES));
        q[half - 1 - i] = -q[half + i];
    }
}

/* The quantiles times rms, in dtype. NULL: out of memory. */
static void *noise_table(int32_t dtype, double rms)
{
    float *q = mem_realloc_array(NULL, N_QUANTILES, sizeof(*q));
    void *table = mem_realloc_array(NULL, N_QUANTILES, dtype_size(dtype));
    uint32_t i;

    if (q == NULL || table == NULL) {
        mem_free(q);
        mem_free(table);
        return NULL;
    }
    normal_quantiles(q);
    for (i = 0; i < N_QUANTILES; i++) {
        const float v = (float)((double)q[i] * rms);
        if (dtype == PF_F32)
            ((float *)table)[i] = v;
        else
            ((uint16_t *)table)[i] = dtype == PF_F16 ? f16_from_f32(v) : bf16_from_f32(v);
    }
    mem_free(q);
    return table;
}

static uint64_t mix64(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Four table indices, for the elements 4 i .. 4 i + 3. */
static uint64_t draw4(uint64_t key, uint64_t i)
{
    return mix64(key + (i + 1) * 0x9e3779b97f4a7c15u);
}

static void noise_u16(const uint16_t *table, uint64_t key, uint64_t e0, size_t n, uint16_t *out)
{
    size_t i = 0;

    for (; i < n && (e0 + i) % 4 != 0; i++)
        out[i] = table[draw4(key, (e0 + i) / 4) >> (16 * ((e0 + i) % 4)) & 0xffff];
    for (; i + 4 <= n; i += 4) {
        const uint64_t r = draw4(key, (e0 + i) / 4);
        out[i] = table[r & 0xffff];
        out[i + 1] = table[r >> 16 & 0xffff];
        out[i + 2] = table[r >> 32 & 0xffff];
        out[i + 3] = table[r >> 48];
    }
    for (; i < n; i++)
        out[i] = table[draw4(key, (e0 + i) / 4) >> (16 * ((e0 + i) % 4)) & 0xffff];
}

static void noise_f32(const float *table, uint64_t key, uint64_t e0, size_t n, float *out)
{
    size_t i;

    for (i = 0; i < n; i++)
        out[i] = table[draw4(key, (e0 + i) / 4) >> (16 * ((e0 + i) % 4)) & 0xffff];
}

/* ---------------------------------------------------------------------------------------------- the panels */

/* Bytes [off, off + n) of the file, which lie in tensor i. */
static void fill_piece(const struct fill *f, size_t i, uint64_t off, size_t n, uint8_t *out)
{
    const struct plan_tensor *t = &f->plan->tensors[i];
    const uint64_t at = off - st_layout_offset(f->layout, i);
    size_t k;

    if (t->is_constant) {
        for (k = 0; k < n; k += sizeof(t->constant))
            memcpy(out + k, &t->constant, sizeof(t->constant));
        return;
    }
    if (f->plan->dtype == PF_F32)
        noise_f32(f->table, f->keys[i], at / 4, n / 4, (float *)(void *)out);
    else
        noise_u16(f->table, f->keys[i], at / 2, n / 2, (uint16_t *)(void *)out);
}

/* The last tensor that begins at or before off. */
static size_t tensor_at(const struct fill *f, uint64_t off)
{
    size_t lo = 0, hi = f->plan->n_tensors;

    while (hi - lo > 1) {
        const size_t mid = lo + (hi - lo) / 2;
        if (st_layout_offset(f->layout, mid) <= off)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

static void fill_panel(void *ctx, size_t i_task, unsigned i_worker)
{
    struct fill *f = ctx;
    uint8_t *panel = f->panels + (size_t)i_worker * PANEL_BYTES;
    const uint64_t off = f->batch0 + i_task * PANEL_BYTES;
    const size_t n = f->n_bytes - off < PANEL_BYTES ? (size_t)(f->n_bytes - off) : PANEL_BYTES;
    size_t i = tensor_at(f, off), done = 0;
    pf_error err = {0};
    int rc, none = PF_OK;

    if (atomic_load_explicit(&f->rc, memory_order_relaxed) != PF_OK)
        return; /* relaxed: only to give up early; pool_run's end orders the rest */
    for (; done < n; i++) {
        const uint64_t end =
            i + 1 < f->plan->n_tensors ? st_layout_offset(f->layout, i + 1) : f->n_bytes;
        const size_t n_piece =
            end - (off + done) < n - done ? (size_t)(end - (off + done)) : n - done;
        fill_piece(f, i, off + done, n_piece, panel + done);
        done += n_piece;
    }
    rc = file_pwrite(f->fd, panel, n, off, f->path, &err);
    if (rc != PF_OK && atomic_compare_exchange_strong(&f->rc, &none, rc))
        f->err = err;
}

/* Starts writing batch i back, and waits for the one that is BATCHES_DIRTY - 1 older. Only paces: errors show in fdatasync. */
static void pace(const struct fill *f, uint64_t i)
{
    const off_t at = (off_t)(f->data0 + i * BATCH_BYTES);

    (void)sync_file_range(f->fd, at, BATCH_BYTES, SYNC_FILE_RANGE_WRITE);
    if (i + 1 >= BATCHES_DIRTY)
        (void)sync_file_range(f->fd, at - (off_t)((BATCHES_DIRTY - 1) * BATCH_BYTES), BATCH_BYTES,
                              SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                                  SYNC_FILE_RANGE_WAIT_AFTER);
}

static int fill_data(struct fill *f, const struct fill_opts *opts, pf_error *err)
{
    uint64_t i;

    for (i = 0; f->data0 + i * BATCH_BYTES < f->n_bytes; i++) {
        uint64_t left, done;
        f->batch0 = f->data0 + i * BATCH_BYTES;
        left = f->n_bytes - f->batch0;
        left = left < BATCH_BYTES ? left : BATCH_BYTES;
        pool_run(opts->pool, (size_t)((left + PANEL_BYTES - 1) / PANEL_BYTES), fill_panel, f);
        if (atomic_load_explicit(&f->rc, memory_order_relaxed) != PF_OK) {
            if (err != NULL)
                *err = f->err;
            return f->err.code;
        }
        pace(f, i);
        done = f->batch0 + left;
        if (opts->progress != NULL &&
            !opts->progress(opts->progress_ctx, "writing", done, f->n_bytes))
            return err_set(err, PF_E_CANCELLED, "'%s': cancelled", f->path);
    }
    return PF_OK;
}

/* ------------------------------------------------------------------------------------------------ the file */

static int lay_out(const struct plan *p, const struct fill_opts *opts, struct st_layout *layout,
                   struct strbuf *header, pf_error *err)
{
    size_t i;
    int rc = PF_OK;

    for (i = 0; i < opts->n_meta && rc == PF_OK; i++)
        rc = st_layout_meta(layout, str_of(opts->meta[i].key), str_of(opts->meta[i].value), err);
    for (i = 0; i < p->n_tensors && rc == PF_OK; i++) {
        const struct plan_tensor *t = &p->tensors[i];
        rc = st_layout_tensor(layout, t->name, t->is_constant ? PF_F32 : p->dtype, &t->shape, err);
    }
    return rc == PF_OK ? st_layout_finish(layout, 4096, header, err) : rc;
}

/* Memory for the fill, and one key per tensor, by name: a tensor has the same noise at every scale. */
static int prepare(struct fill *f, const struct fill_opts *opts, pf_error *err)
{
    const size_t n_workers = pool_n_workers(opts->pool);
    size_t i;

    f->keys = mem_realloc_array(NULL, f->plan->n_tensors + 1, sizeof(*f->keys));
    f->table = noise_table(f->plan->dtype, f->plan->rms);
    f->panels = mem_aligned(4096, n_workers * PANEL_BYTES);
    if (f->keys == NULL || f->table == NULL || f->panels == NULL)
        return err_nomem(err, n_workers * PANEL_BYTES, "panels");
    for (i = 0; i < f->plan->n_tensors; i++) {
        const struct str name = f->plan->tensors[i].name;
        f->keys[i] = mix64(hash_bytes(name.p, name.n).lo ^ mix64(opts->seed + 1));
    }
    return PF_OK;
}

/* Room is checked, not reserved: preallocated extents have to be converted when they are written back, which made this up to
 * three times slower, and a disk that fills up meanwhile is still an error. */
static int check_room(const struct file_new *file, uint64_t n_bytes, pf_error *err)
{
    const uint64_t n_free = file_free_bytes(file->temp_path);

    if (n_free != 0 && n_free < n_bytes)
        return err_set(err, PF_E_NOSPACE, "'%s': needs %" PRIu64 " bytes, %" PRIu64 " are free",
                       file->path, n_bytes, n_free);
    return PF_OK;
}

int fill_file(const char *path, const struct plan *p, const struct fill_opts *opts,
              uint64_t *out_n_bytes, pf_error *err)
{
    struct fill f = {.plan = p, .fd = -1, .path = path};
    struct file_new file = {.fd = -1};
    struct st_layout *layout = NULL;
    struct strbuf header;
    int rc;

    strbuf_init(&header);
    rc = st_layout_new(&layout, err);
    if (rc == PF_OK)
        rc = lay_out(p, opts, layout, &header, err);
    if (rc == PF_OK) {
        f.layout = layout;
        f.data0 = header.n;
        f.n_bytes = st_layout_file_bytes(layout);
        rc = prepare(&f, opts, err);
    }
    if (rc == PF_OK)
        rc = file_new_open(&file, path, err);
    if (rc != PF_OK)
        goto out;
    f.fd = file.fd;
    rc = check_room(&file, f.n_bytes, err);
    if (rc == PF_OK)
        rc = file_pwrite(f.fd, header.p, header.n, 0, path, err);
    if (rc == PF_OK)
        rc = fill_data(&f, opts, err);
    if (rc == PF_OK)
        rc = file_new_publish(&file, err);
    if (rc == PF_OK)
        *out_n_bytes = f.n_bytes;
out:
    file_new_abort(&file);
    mem_free(f.keys);
    mem_free(f.table);
    mem_free(f.panels);
    st_layout_free(layout);
    strbuf_release(&header);
    return rc;
}
