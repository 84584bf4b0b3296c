/*
 * Comparing a published output with what would be written: the view of base and adapters on one side, the plain view of the output
 * on the other, panel by panel. Any doubt, and any error, is a no: the merge then says what is wrong.
 */
#include "cli/merged_already.h"

#include <string.h>

#include "base/mem.h"

#define PANEL_BYTES ((int64_t)4 << 20)

struct side {
    struct pf_checkpoint *ckpt;
    struct pf_view *view;
    struct pf_reader *reader;
    uint8_t *panel;
};

static bool side_open(struct side *s, struct pf_composition *comp)
{
    s->panel = mem_alloc((size_t)PANEL_BYTES);
    return s->panel && !pf_view_open(s->ckpt, comp, &s->view, NULL) &&
           !pf_reader_new(s->view, &s->reader, NULL);
}

static void side_close(struct side *s)
{
    pf_reader_free(s->reader);
    pf_view_release(s->view);
    mem_free(s->panel);
}

static bool same_layout(const struct pf_checkpoint *a, const struct pf_view *view,
                        const struct pf_checkpoint *b)
{
    struct pf_checkpoint_info info_a, info_b;

    pf_checkpoint_info(a, &info_a);
    pf_checkpoint_info(b, &info_b);
    if (info_a.n_tensors != info_b.n_tensors || strcmp(info_a.layout, info_b.layout) != 0)
        return false;
    for (uint32_t i = 0; i < info_a.n_tensors; i++) {
        struct pf_tensor_info x, y;

        pf_checkpoint_tensor(a, i, &x);
        pf_checkpoint_tensor(b, i, &y);
        if (strcmp(x.name, y.name) != 0 || pf_view_dtype(view, i) != y.dtype || x.rank != y.rank ||
            memcmp(x.shape, y.shape, (size_t)x.rank * sizeof(*x.shape)) != 0)
            return false;
    }
    return true;
}

static bool same_panel(struct side *a, struct side *b, const struct pf_panel *p, size_t n_bytes)
{
    return !pf_reader_read(a->reader, p, PF_NATIVE, a->panel, n_bytes, NULL) &&
           !pf_reader_read(b->reader, p, PF_NATIVE, b->panel, n_bytes, NULL) &&
           !memcmp(a->panel, b->panel, n_bytes);
}

/* Dtypes below a byte have no panels; they are never merged either. */
static bool same_mapping(const struct side *a, const struct side *b, uint32_t i, uint64_t n_bytes)
{
    const void *x = pf_view_map(a->view, i), *y = pf_view_map(b->view, i);

    return !n_bytes || (x && y && !memcmp(x, y, (size_t)n_bytes));
}

static bool same_tensor(struct side *a, struct side *b, uint32_t i)
{
    struct pf_tensor_info t;
    int64_t rows, cols = 1, size = (int64_t)pf_dtype_bits(pf_view_dtype(a->view, i)) / 8;

    pf_checkpoint_tensor(b->ckpt, i, &t);
    if (!size)
        return same_mapping(a, b, i, t.n_bytes);
    rows = t.rank ? t.shape[0] : 1;
    for (int32_t k = 1; k < t.rank; k++)
        cols *= t.shape[k];
    if (!rows || !cols)
        return true;
    for (int64_t row = 0, n_rows; row < rows; row += n_rows) {
        int64_t n_fit = PANEL_BYTES / (cols * size), n_cols;

        n_rows = n_fit < 1 ? 1 : n_fit < rows - row ? n_fit : rows - row;
        for (int64_t col = 0; col < cols; col += n_cols) {
            struct pf_panel p = {.i_tensor = i, .row0 = row, .n_rows = n_rows, .col0 = col};

            n_cols = n_fit                             ? cols
                     : PANEL_BYTES / size < cols - col ? PANEL_BYTES / size
                                                       : cols - col;
            p.n_cols = n_cols;
            if (!same_panel(a, b, &p, (size_t)(n_rows * n_cols * size)))
                return false;
        }
    }
    return true;
}

bool merged_already(struct pf_checkpoint *ckpt, struct pf_composition *comp, const char *path,
                    uint32_t i_part, uint32_t n_parts)
{
    struct side base = {.ckpt = ckpt}, out = {0};
    struct pf_checkpoint_info info;
    bool is = !pf_checkpoint_open(path, NULL, &out.ckpt, NULL) && side_open(&base, comp) &&
              side_open(&out, NULL) && same_layout(ckpt, base.view, out.ckpt);

    pf_checkpoint_info(ckpt, &info);
    for (uint32_t i = i_part; is && i < info.n_tensors; i += n_parts)
        is = same_tensor(&base, &out, i);
    side_close(&base);
    side_close(&out);
    pf_checkpoint_close(out.ckpt);
    return is;
}
