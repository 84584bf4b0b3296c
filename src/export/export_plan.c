/*
 * The plan of an output: its files, in the shape of the input, cut into items that one worker writes in one go. Depends only on the
 * checkpoint, the composition and the number of parts, so that processes that share the work agree without talking. Reads
 * headers and names, never weights.
 */
#include "export/export_int.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/json.h"
#include "base/mem.h"

#define HEADER_ALIGN 4096

/* A tensor that the composition changes, as the file sees it. */
struct changed {
    uint64_t off_bytes, n_bytes;
    uint32_t i_target;
};

/* ------------------------------------------------------------------------------------------------ files and items */

int plan_add_file(struct export_plan *plan, const char *rel, const char *path_in,
                  const struct st_file *st, struct strbuf *text, pf_error *err)
{
    struct stat info;
    if (!mem_grow((void **)&plan->files, &plan->cap_files, plan->n_files, sizeof *plan->files))
        return err_nomem(err, sizeof *plan->files, "the list of output files");
    struct out_file *f = &plan->files[plan->n_files];
    *f = (struct out_file){.st = st, .fd_out = -1, .fd_wait = -1};
    strbuf_init(&f->text);
    plan->n_files++; /* from here on released with the plan */
    f->rel = mem_strdup(rel);
    f->path_in = mem_strdup(path_in);
    if (!f->rel || !f->path_in)
        return err_nomem(err, strlen(path_in) + 1, "a path");
    if (text) {
        f->text = *text;
        strbuf_init(text);
    }
    if (st)
        f->n_bytes = st_map(st)->n_bytes;
    else if (f->text.n)
        f->n_bytes = f->text.n;
    else if (stat(path_in, &info))
        return err_sys(err, errno, "cannot stat '%s'", path_in);
    else
        f->n_bytes = (uint64_t)info.st_size;
    return PF_OK;
}

static struct item *add_item(struct export_plan *plan, enum item_kind kind, pf_error *err)
{
    if (!mem_grow((void **)&plan->items, &plan->cap_items, plan->n_items, sizeof *plan->items)) {
        (void)err_nomem(err, sizeof *plan->items, "the list of items");
        return NULL;
    }
    struct item *item = &plan->items[plan->n_items++];
    *item = (struct item){.i_file = (uint32_t)(plan->n_files - 1), .kind = kind};
    return item;
}

/* COPY or TEXT: n_bytes from off_in to off_out of the newest file. */
static int add_range(struct export_plan *plan, enum item_kind kind, uint64_t off_in,
                     uint64_t off_out, uint64_t n_bytes, pf_error *err)
{
    for (uint64_t n = 0; n < n_bytes;) {
        struct item *item = add_item(plan, kind, err);
        if (!item)
            return PF_E_NOMEM;
        item->n_bytes = n_bytes - n < ITEM_COPY_BYTES ? n_bytes - n : ITEM_COPY_BYTES;
        item->n_in = item->n_bytes;
        item->off_in = off_in + n;
        item->off_out = off_out + n;
        n += item->n_bytes;
    }
    return PF_OK;
}

/* Whole rows up to ITEM_MERGE_BYTES of output, or pieces of a row that is longer. */
static int add_merge(struct export_plan *plan, uint32_t i_target, uint64_t off_in, uint64_t off_out,
                     pf_error *err)
{
    const struct merge_target *t = &plan->comp->targets[i_target];
    const uint64_t n_elem_in = pf_dtype_bits(t->dtype) / 8;
    const uint64_t n_elem_out = pf_dtype_bits(t->out_dtype) / 8;
    const int64_t most = (int64_t)(ITEM_MERGE_BYTES / n_elem_out);
    const int64_t col_step = t->n_cols < most ? t->n_cols : most;
    const int64_t row_step = t->n_cols < most ? most / t->n_cols : 1;
    for (int64_t row = 0; row < t->n_rows; row += row_step) {
        for (int64_t col = 0; col < t->n_cols; col += col_step) {
            struct item *item = add_item(plan, ITEM_MERGE, err);
            if (!item)
                return PF_E_NOMEM;
            item->i_target = i_target;
            item->row0 = row;
            item->n_rows = t->n_rows - row < row_step ? t->n_rows - row : row_step;
            item->col0 = col;
            item->n_cols = t->n_cols - col < col_step ? t->n_cols - col : col_step;
            const uint64_t n = (uint64_t)item->n_rows * (uint64_t)item->n_cols;
            const uint64_t i = (uint64_t)row * (uint64_t)t->n_cols + (uint64_t)col;
            item->n_bytes = n * n_elem_out;
            item->off_out = off_out + i * n_elem_out;
            item->n_in = n * n_elem_in;
            item->off_in = off_in + i * n_elem_in;
        }
    }
    return PF_OK;
}

/* --------------------------------------------------------------------------------------------------- weights */

static int compare_changed(const void *a, const void *b)
{
    const struct changed *x = a, *y = b;
    return (x->off_bytes > y->off_bytes) - (x->off_bytes < y->off_bytes);
}

/* The changed tensors of one file, by offset. *out is NULL when there are none; owned by caller. */
static int changed_of(const struct export_plan *plan, uint32_t i_file, struct changed **out,
                      size_t *out_n, bool *out_is_wider, pf_error *err)
{
    const struct pf_composition *comp = plan->comp;
    size_t n = 0, cap = 0;
    struct changed *list = NULL;
    *out_is_wider = false;
    for (size_t j = 0; comp && j < comp->n_targets; j++) {
        const struct ckpt_tensor *t = &plan->ckpt->tensors[comp->i_tensors[j]];
        if (t->i_file != i_file)
            continue;
        if (!mem_grow((void **)&list, &cap, n, sizeof *list)) {
            mem_free(list);
            return err_nomem(err, sizeof *list, "changed tensors");
        }
        list[n++] = (struct changed){t->off_bytes, t->n_bytes, (uint32_t)j};
        *out_is_wider |= comp->targets[j].out_dtype != comp->targets[j].dtype;
    }
    if (n)
        qsort(list, n, sizeof *list, compare_changed);
    *out = list;
    *out_n = n;
    return PF_OK;
}

/* No dtype changes: every byte stays where it was, the header too. */
static int cut_in_place(struct export_plan *plan, const struct changed *list, size_t n,
                        pf_error *err)
{
    const uint64_t n_bytes = plan->files[plan->n_files - 1].n_bytes;
    uint64_t at = 0;
    for (size_t i = 0; i < n; i++) {
        const struct changed *c = &list[i];
        int rc = add_range(plan, ITEM_COPY, at, at, c->off_bytes - at, err);
        if (!rc)
            rc = add_merge(plan, c->i_target, c->off_bytes, c->off_bytes, err);
        if (rc)
            return rc;
        at = c->off_bytes + c->n_bytes;
    }
    return add_range(plan, ITEM_COPY, at, at, n_bytes - at, err);
}

static const struct changed *find_changed(const struct changed *list, size_t n, uint64_t off_bytes,
                                          uint64_t n_bytes)
{
    const struct changed key = {.off_bytes = off_bytes};
    return n && n_bytes ? bsearch(&key, list, n, sizeof *list, compare_changed) : NULL;
}

static int lay_out(const struct export_plan *plan, const struct st_file *st,
                   const struct changed *list, size_t n, struct st_layout *l, struct strbuf *text,
                   pf_error *err)
{
    int rc = PF_OK;
    for (size_t i = 0; i < st_n_meta(st) && !rc; i++)
        rc = st_layout_meta(l, st_meta(st, i)->key, st_meta(st, i)->value, err);
    for (size_t i = 0; i < st_n_tensors(st) && !rc; i++) {
        const struct st_tensor *t = st_tensor(st, i);
        const struct changed *c = find_changed(list, n, t->off_bytes, t->n_bytes);
        const int32_t dtype = c ? plan->comp->targets[c->i_target].out_dtype : t->dtype;
        rc = st_layout_tensor(l, t->name, dtype, &t->shape, err);
    }
    return rc ? rc : st_layout_finish(l, HEADER_ALIGN, text, err);
}

/* Some tensors become wider: a new header, the same tensors in the same order. */
static int cut_anew(struct export_plan *plan, const struct changed *list, size_t n, pf_error *err)
{
    struct out_file *f = &plan->files[plan->n_files - 1];
    struct st_layout *l = NULL;
    int rc = st_layout_new(&l, err);
    if (!rc)
        rc = lay_out(plan, f->st, list, n, l, &f->text, err);
    if (!rc) {
        f->n_bytes = st_layout_file_bytes(l);
        rc = add_range(plan, ITEM_TEXT, 0, 0, f->text.n, err);
    }
    for (size_t i = 0; !rc && i < st_n_tensors(f->st); i++) {
        const struct st_tensor *t = st_tensor(f->st, i);
        const struct changed *c = find_changed(list, n, t->off_bytes, t->n_bytes);
        const uint64_t off = st_layout_offset(l, i);
        rc = c ? add_merge(plan, c->i_target, t->off_bytes, off, err)
               : add_range(plan, ITEM_COPY, t->off_bytes, off, t->n_bytes, err);
    }
    st_layout_free(l);
    return rc;
}

static int add_weights(struct export_plan *plan, uint32_t i_file, pf_error *err)
{
    const struct st_file *st = plan->ckpt->files[i_file];
    const char *rel = plan->is_file ? "" : plan_rel(plan, st_path(st));
    struct changed *list = NULL;
    size_t n = 0;
    bool is_wider = false;
    if (!rel)
        return err_set(err, PF_E_UNSUPPORTED, "'%s' is not below '%s'", st_path(st), plan->root);
    int rc = plan_add_file(plan, rel, st_path(st), st, NULL, err);
    if (!rc)
        rc = changed_of(plan, i_file, &list, &n, &is_wider, err);
    if (!rc)
        rc = is_wider ? cut_anew(plan, list, n, err) : cut_in_place(plan, list, n, err);
    mem_free(list);
    return rc;
}

/* ----------------------------------------------------------------------------------------------------- the index */

/* How many bytes the tensors of a component gain. */
static uint64_t gained_bytes(const struct export_plan *plan, uint32_t i_component)
{
    const struct pf_composition *comp = plan->comp;
    uint64_t n = 0;
    for (size_t j = 0; comp && j < comp->n_targets; j++) {
        const struct merge_target *t = &comp->targets[j];
        const uint32_t n_wider = (pf_dtype_bits(t->out_dtype) - pf_dtype_bits(t->dtype)) / 8;
        if (plan->ckpt->tensors[comp->i_tensors[j]].i_component == i_component)
            n += (uint64_t)t->n_rows * (uint64_t)t->n_cols * n_wider;
    }
    return n;
}

/* The index as it is, or with a new total_size. */
static int add_index(struct export_plan *plan, uint32_t i_component, pf_error *err)
{
    const struct ckpt_component *c = &plan->ckpt->components[i_component];
    const char *rel = plan_rel(plan, c->index_path);
    const uint64_t n_gained = gained_bytes(plan, i_component);
    struct json *root = NULL;
    struct strbuf text;
    strbuf_init(&text);
    int rc = PF_OK;
    if (!rel)
        return err_set(err, PF_E_UNSUPPORTED, "'%s' is not below '%s'", c->index_path, plan->root);
    if (n_gained) {
        rc = json_parse_file(c->index_path, EXPORT_INDEX_BYTES, &root, err);
        const struct json *meta = json_get(root, "metadata");
        const struct json *size = json_get(meta, "total_size");
        if (!rc && json_typeof(size) == JSON_T_INT) {
            /* The getters give const: the document is ours to change. */
            json_set_int((struct json *)(uintptr_t)meta, "total_size",
                         json_int(size) + (int64_t)n_gained);
            rc = json_write(root, 2, &text, err);
            strbuf_adds(&text, "\n");
            if (!rc && !strbuf_ok(&text))
                rc = err_nomem(err, text.n, "an index");
        }
    }
    if (!rc)
        rc = plan_add_file(plan, rel, c->index_path, NULL, &text, err);
    if (!rc)
        rc = add_range(plan, plan->files[plan->n_files - 1].text.n ? ITEM_TEXT : ITEM_COPY, 0, 0,
                       plan->files[plan->n_files - 1].n_bytes, err);
    strbuf_release(&text);
    json_free(root);
    return rc;
}

/* ------------------------------------------------------------------------------------------------------ whole */

const char *plan_rel(const struct export_plan *plan, const char *path)
{
    if (!path_is_below(path, plan->root))
        return NULL;
    path += strlen(plan->root);
    while (*path == '/')
        path++;
    return *path ? path : NULL;
}

void plan_part(const struct export_plan *plan, uint32_t i_part, size_t *out_i0, size_t *out_i1)
{
    const uint64_t n = plan->n_parts;
    uint64_t at = 0;
    size_t i = 0;
    /* An item belongs to the part that its first byte falls into. */
    for (; i < plan->n_items && at * n / plan->n_bytes < i_part; i++)
        at += plan->items[i].n_bytes;
    *out_i0 = i;
    for (; i < plan->n_items && at * n / plan->n_bytes == i_part; i++)
        at += plan->items[i].n_bytes;
    *out_i1 = i;
}

static int identify(struct export_plan *plan, pf_error *err)
{
    struct digest base;
    int rc = ckpt_content_id(plan->ckpt, &base, err);
    if (rc)
        return rc;
    struct hasher *h = hasher_new();
    if (!h)
        return err_nomem(err, 0, "a hasher");
    const struct digest comp = plan->comp ? plan->comp->digest : (struct digest){0};
    const uint64_t head[] = {EXPORT_FORMAT, ITEM_MERGE_BYTES, ITEM_COPY_BYTES, plan->n_parts,
                             base.hi,       base.lo,          comp.hi,         comp.lo,
                             plan->n_items, plan->n_bytes};
    for (size_t i = 0; i < PF_COUNTOF(head); i++)
        hasher_add_u64(h, head[i]);
    for (size_t i = 0; i < plan->n_files && !rc; i++) {
        const struct out_file *f = &plan->files[i];
        struct stat info;
        hasher_add_str(h, f->rel, strlen(f->rel));
        hasher_add_str(h, f->text.p ? f->text.p : "", f->text.n);
        hasher_add_u64(h, f->n_bytes);
        /* The content id samples. One process can afford to start over when a date changed; hosts with copies cannot. */
        if (plan->n_parts == 1 || !f->st) {
            if (stat(f->path_in, &info))
                rc = err_sys(err, errno, "cannot stat '%s'", f->path_in);
            else if (plan->n_parts == 1)
                hasher_add_u64(h, (uint64_t)info.st_mtim.tv_sec * 1000000000u +
                                      (uint64_t)info.st_mtim.tv_nsec);
        }
    }
    plan->identity = hasher_digest(h);
    hasher_free(h);
    return rc;
}

static int set_root(struct export_plan *plan, pf_error *err)
{
    const struct pf_checkpoint *ckpt = plan->ckpt;
    plan->is_file = !strcmp(ckpt->layout, "file");
    if (plan->is_file)
        return PF_OK;
    plan->root =
        file_kind(ckpt->path) == FILE_DIRECTORY ? mem_strdup(ckpt->path) : path_dir(ckpt->path);
    return plan->root ? PF_OK : err_nomem(err, 0, "a path");
}

static int build(struct export_plan *plan, pf_error *err)
{
    const struct pf_checkpoint *ckpt = plan->ckpt;
    int rc = set_root(plan, err);
    for (uint32_t i = 0; i < ckpt->n_files && !rc; i++)
        rc = add_weights(plan, i, err);
    for (uint32_t i = 0; i < ckpt->n_components && !rc; i++) {
        if (ckpt->components[i].index_path)
            rc = add_index(plan, i, err);
    }
    if (!rc && !plan->is_file) {
        const size_t n_before = plan->n_files;
        rc = plan_walk(plan, err);
        /* add_range serves the newest file, so the ranges of what the walk found are cut one by one. */
        const size_t n_files = plan->n_files;
        for (size_t i = n_before; i < n_files && !rc; i++) {
            plan->n_files = i + 1;
            rc = add_range(plan, ITEM_COPY, 0, 0, plan->files[i].n_bytes, err);
        }
        plan->n_files = n_files;
    }
    for (size_t i = 0; i < plan->n_files; i++)
        plan->n_bytes += plan->files[i].n_bytes;
    if (!rc && plan->n_bytes > UINT64_MAX / EXPORT_PARTS_MAX)
        rc = err_set(err, PF_E_RANGE, "an output of %llu bytes", (unsigned long long)plan->n_bytes);
    return rc ? rc : identify(plan, err);
}

int plan_build(struct pf_checkpoint *ckpt, const struct pf_composition *comp, uint32_t i_part,
               uint32_t n_parts, struct export_plan *out, pf_error *err)
{
    struct export_plan plan = {.ckpt = ckpt, .comp = comp, .i_part = i_part, .n_parts = n_parts};
    const int rc = build(&plan, err);
    if (rc) {
        export_plan_release(&plan);
        return rc;
    }
    plan_part(&plan, i_part, &plan.i_item0, &plan.i_item1);
    *out = plan;
    return PF_OK;
}

void export_plan_release(struct export_plan *plan)
{
    if (!plan)
        return;
    for (size_t i = 0; i < plan->n_files; i++) {
        struct out_file *f = &plan->files[i];
        mem_free(f->rel);
        mem_free(f->path_in);
        mem_free(f->path_out);
        strbuf_release(&f->text);
    }
    mem_free(plan->files);
    mem_free(plan->items);
    mem_free(plan->root);
    *plan = (struct export_plan){0};
}

int plan_verify(const struct export_plan *plan, pf_error *err)
{
    const int rc = pf_checkpoint_verify(plan->ckpt, err);
    return !rc && plan->comp ? comp_check_adapters(plan->comp, err) : rc;
}
