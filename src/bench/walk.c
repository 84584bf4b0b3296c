/*
 * Passes over the weights. Both kinds copy into one panel's buffer, so that what differs is where the bytes come from and what happens
 * to the page cache.
 */
#include "bench/walk.h"

#include <stdatomic.h>
#include <string.h>

#include "base/mem.h"
#include "tensor/dtype.h"

enum { PANEL_BYTES = 4 << 20 };

int walk_open(struct walk *w, struct pf_view *view, pf_error *err)
{
    *w = (struct walk){.ckpt = view_checkpoint(view), .view = view};
    view_ref(view);
    w->buffer = mem_aligned(4096, PANEL_BYTES);
    int rc = w->buffer ? PF_OK : err_nomem(err, PANEL_BYTES, "a panel");
    if (rc == PF_OK)
        rc = pf_reader_new(view, &w->reader, err);
    if (rc == PF_OK)
        rc = readahead_new(view, &w->ahead, err);
    if (rc)
        walk_close(w);
    return rc;
}

void walk_close(struct walk *w)
{
    readahead_free(w->ahead);
    pf_reader_free(w->reader);
    pf_view_release(w->view);
    mem_free(w->buffer);
    *w = (struct walk){.ckpt = NULL};
}

/* Rows of tensor i that fill the buffer, as many as fit; 0: it has no rows, or elements of less than a byte. */
static int64_t panel_rows(const struct walk *w, uint32_t i_tensor, size_t *out_n_row_bytes)
{
    const struct shape *shape = &w->ckpt->tensors[i_tensor].shape;
    const size_t n_element = dtype_size(pf_view_dtype(w->view, i_tensor));
    const int64_t n_rows = shape_rows(shape);
    *out_n_row_bytes = (size_t)shape_cols(shape) * n_element;
    if (*out_n_row_bytes == 0 || *out_n_row_bytes > PANEL_BYTES)
        return 0;
    const int64_t n = view_panel_rows(w->view, i_tensor, PANEL_BYTES);
    return n < n_rows ? n : n_rows;
}

static int read_tensor(struct walk *w, uint32_t i_tensor, _Atomic uint64_t *out_n_bytes,
                       pf_error *err)
{
    size_t n_row;
    const int64_t n_rows = shape_rows(&w->ckpt->tensors[i_tensor].shape);
    const int64_t step = panel_rows(w, i_tensor, &n_row);
    int rc = PF_OK;
    for (int64_t row = 0; step > 0 && rc == PF_OK && row < n_rows; row += step) {
        const int64_t n = n_rows - row < step ? n_rows - row : step;
        const struct pf_panel panel = {.i_tensor = i_tensor, .row0 = row, .n_rows = n};
        rc = pf_reader_read(w->reader, &panel, PF_NATIVE, w->buffer, PANEL_BYTES, err);
        if (rc == PF_OK) /* relaxed: a count that somebody may look at */
            atomic_fetch_add_explicit(out_n_bytes, (uint64_t)n * n_row, memory_order_relaxed);
    }
    return rc;
}

int walk_pass(struct walk *w, const _Atomic bool *stop, _Atomic uint64_t *out_n_bytes,
              pf_error *err)
{
    int rc = PF_OK;
    readahead_layer(w->ahead, 0);
    for (uint32_t l = 0; rc == PF_OK && l < w->ckpt->n_layers; l++) {
        if (stop && atomic_load(stop))
            break;
        const struct ckpt_layer *layer = &w->ckpt->layers[l];
        rc = pf_reader_enter(w->reader, l, err);
        if (rc)
            return rc;
        if (l + 1 < w->ckpt->n_layers)
            readahead_layer(w->ahead, l + 1);
        for (uint32_t i = 0; rc == PF_OK && i < layer->n_tensors; i++)
            rc = read_tensor(w, layer->i_tensor0 + i, out_n_bytes, err);
        pf_reader_leave(w->reader);
        readahead_done(w->ahead, l);
    }
    return rc;
}

int walk_compare(struct walk *w, uint32_t i_tensor, uint64_t *n, pf_error *err)
{
    const struct ckpt_tensor *t = &w->ckpt->tensors[i_tensor];
    const size_t n_element = dtype_size(t->dtype);
    const int64_t n_rows = shape_rows(&t->shape);
    size_t n_row;
    const int64_t step = panel_rows(w, i_tensor, &n_row);
    int rc = PF_OK;
    for (int64_t row = 0; step > 0 && rc == PF_OK && row < n_rows; row += step) {
        const int64_t n_here = n_rows - row < step ? n_rows - row : step;
        const struct pf_panel panel = {.i_tensor = i_tensor, .row0 = row, .n_rows = n_here};
        const uint8_t *base = t->p + (size_t)row * n_row;
        rc = pf_reader_read(w->reader, &panel, PF_NATIVE, w->buffer, PANEL_BYTES, err);
        if (rc || memcmp(base, w->buffer, (size_t)n_here * n_row) == 0)
            continue;
        for (size_t at = 0; at < (size_t)n_here * n_row; at += n_element)
            *n += memcmp(base + at, w->buffer + at, n_element) != 0;
    }
    return rc;
}

int walk_plain(const struct pf_checkpoint *ckpt, _Atomic uint64_t *out_n_bytes, pf_error *err)
{
    uint8_t *buffer = mem_aligned(4096, PANEL_BYTES);
    if (!buffer)
        return err_nomem(err, PANEL_BYTES, "a panel");
    int rc = PF_OK;
    for (uint32_t i = 0; rc == PF_OK && i < ckpt->n_tensors; i++) {
        const struct ckpt_tensor *t = &ckpt->tensors[i];
        for (uint64_t at = 0; at < t->n_bytes; at += PANEL_BYTES) {
            const uint64_t n = t->n_bytes - at < PANEL_BYTES ? t->n_bytes - at : PANEL_BYTES;
            memcpy(buffer, t->p + at, (size_t)n);
            atomic_fetch_add_explicit(out_n_bytes, n, memory_order_relaxed);
        }
        rc = ckpt_tensor_guard(ckpt, i, err); /* it shrank: what was copied are zeros */
    }
    mem_free(buffer);
    return rc;
}
