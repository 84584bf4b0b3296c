/*
 * Estimates by measuring: one reader of the composition's view reads changed panels for a moment, which gives the time per
 * byte and the scratch per worker on this machine, for these ranks. Writing is reckoned at WRITE_RATE.
 */
#include "cli/estimate.h"

#include "base/file.h"
#include "base/mem.h"
#include "base/pool.h"
#include "base/proc.h"

#define WRITE_RATE    1e9 /* bytes per second: an ordinary NVMe disk */
#define N_PANEL_BYTES ((uint64_t)4 << 20)
#define N_BUDGET_NS   250000000u

/* The largest panel of whole rows at row 0, or part of one row, within N_PANEL_BYTES. */
static struct pf_panel first_panel(uint32_t i, const struct pf_tensor_info *info, int32_t dtype)
{
    uint64_t n_item = pf_dtype_bits(dtype) / 8, n_cols = 1;
    struct pf_panel panel = {.i_tensor = i, .n_rows = 1};

    for (int32_t d = 1; d < info->rank; d++)
        n_cols *= (uint64_t)info->shape[d];
    if (!n_item || !n_cols)
        return panel;
    if (n_cols * n_item > N_PANEL_BYTES) {
        panel.n_cols = (int64_t)(N_PANEL_BYTES / n_item);
        return panel;
    }
    panel.n_cols = (int64_t)n_cols;
    panel.n_rows = (int64_t)(N_PANEL_BYTES / (n_cols * n_item));
    if (panel.n_rows > info->shape[0])
        panel.n_rows = info->shape[0];
    return panel;
}

/* Seconds per merged byte of one worker; 0 when nothing changes. */
static int measure(const struct pf_checkpoint *ckpt, struct pf_view *view, uint32_t n_tensors,
                   const struct pf_composition *comp, double *out_s_per_byte, pf_error *err)
{
    struct pf_reader *reader = NULL;
    uint64_t t0, n_bytes = 0;
    void *buffer = mem_alloc(N_PANEL_BYTES);
    int rc = buffer ? pf_reader_new(view, &reader, err) : err_nomem(err, N_PANEL_BYTES, "a panel");

    t0 = clock_ns();
    for (uint32_t i = 0; !rc && i < n_tensors && clock_ns() - t0 < N_BUDGET_NS; i++) {
        struct pf_tensor_info info;
        struct pf_panel panel;

        if (!pf_composition_changes(comp, i))
            continue;
        pf_checkpoint_tensor(ckpt, i, &info);
        panel = first_panel(i, &info, pf_view_dtype(view, i));
        rc = pf_reader_read(reader, &panel, PF_NATIVE, buffer, N_PANEL_BYTES, err);
        n_bytes +=
            (uint64_t)(panel.n_rows * panel.n_cols) * pf_dtype_bits(pf_view_dtype(view, i)) / 8;
    }
    if (!rc)
        *out_s_per_byte = n_bytes ? (double)(clock_ns() - t0) * 1e-9 / (double)n_bytes : 0;
    pf_reader_free(reader);
    mem_free(buffer);
    return rc;
}

int estimate_merge(struct pf_checkpoint *ckpt, struct pf_composition *comp, uint32_t n_threads,
                   struct estimate *out, pf_error *err)
{
    struct pf_checkpoint_info base;
    struct pf_composition_info info;
    struct pf_tensor_info tensor;
    struct pf_view *view = NULL;
    struct peak *peak = NULL;
    struct estimate est = {.n_threads = n_threads ? n_threads : pool_default_threads()};
    uint64_t n_before = proc_anon_bytes(), n_during;
    double s_per_byte = 0;
    int rc;

    pf_checkpoint_info(ckpt, &base);
    pf_composition_info(comp, &info);
    est.n_disk_bytes = base.n_bytes + info.n_bytes_changed;
    for (uint32_t i = 0; i < base.n_tensors; i++)
        if (pf_composition_changes(comp, i)) {
            pf_checkpoint_tensor(ckpt, i, &tensor);
            est.n_disk_bytes -= tensor.n_bytes;
        }
    est.n_free_bytes = file_free_bytes(".");
    rc = pf_view_open(ckpt, comp, &view, err);
    if (!rc)
        rc = peak_start(&peak, err);
    if (!rc)
        rc = measure(ckpt, view, base.n_tensors, comp, &s_per_byte, err);
    n_during = peak_stop(peak);
    pf_view_release(view);
    if (rc)
        return rc;
    n_during = n_during > n_before ? n_during : n_before;
    est.n_memory_bytes = n_before + est.n_threads * (n_during - n_before);
    est.seconds = s_per_byte * (double)info.n_bytes_changed / est.n_threads +
                  (double)est.n_disk_bytes / WRITE_RATE;
    *out = est;
    return PF_OK;
}

void estimate_json(struct json *doc, const struct estimate *est)
{
    struct json *it = json_new_object();

    json_set_int(it, "disk_bytes", (int64_t)est->n_disk_bytes);
    json_set_int(it, "free_bytes", (int64_t)est->n_free_bytes);
    json_set_int(it, "memory_bytes", (int64_t)est->n_memory_bytes);
    json_set_int(it, "threads", est->n_threads);
    json_set_real(it, "seconds", est->seconds);
    json_set(doc, "estimate", it);
}
