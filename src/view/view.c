/*
 * Views and readers: one composition, and for every layer where its bytes are. Readers take a placement with a hazard slot of
 * their own, publishers swap a pointer and free what no slot names; nobody waits for anybody. Called by the model, the engine, export
 * and the public API. Must never allocate or lock in pf_reader_read, _enter and _leave.
 */
#include "view/view.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "base/guard.h"
#include "base/mem.h"
#include "tensor/dtype.h"

#define PANEL_BYTES_MAX ((size_t)4 << 20)

/* A reader's announcement of the placement that it is inside of. Slots are pushed once, reused, and freed with the view, so that
 * readers come and go without a lock. */
struct slot {
    _Atomic(struct placement *) placement;
    _Atomic bool is_taken;
    struct slot *next; /* immutable once pushed */
};

struct pf_view {
    _Atomic uint32_t n_refs, n_uses;
    struct pf_checkpoint *ckpt;
    struct pf_composition *comp;
    struct stream_policy *policy;        /* a reference; NULL: nothing is dropped */
    _Atomic(struct placement *) current; /* NULL: base and stream everywhere */
    _Atomic(struct slot *) slots;
    pthread_mutex_t mu; /* guards retired; between publishers, never taken by a reader */
    struct placement *retired;
};

/* Owned by one thread, except for what its slot says, which publishers look at. */
struct pf_reader {
    struct pf_view *view;
    struct merge_scratch *scratch;
    struct slot *slot;
    struct placement *held; /* what the slot protects */
    bool is_in_layer;
    bool has_merged; /* it computed panels from adapters */
};

/* -------------------------------------------------------------------------------------- placements */

struct placement *placement_new(uint32_t n_layers)
{
    struct placement *p = mem_calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->layers = mem_calloc(n_layers ? n_layers : 1, sizeof *p->layers);
    if (!p->layers) {
        mem_free(p);
        return NULL;
    }
    p->n_layers = n_layers;
    return p;
}

void placement_free(struct placement *p)
{
    if (!p)
        return;
    if (p->free_fn)
        p->free_fn(p->free_ctx);
    mem_free(p->layers);
    mem_free(p);
}

static bool is_held(const struct pf_view *v, const struct placement *p)
{
    for (const struct slot *s = atomic_load(&v->slots); s; s = s->next)
        if (atomic_load(&s->placement) == p)
            return true;
    return false;
}

/* Frees what no reader can name any more. Caller holds mu. */
static void sweep(struct pf_view *v)
{
    for (struct placement **at = &v->retired; *at;) {
        struct placement *p = *at;
        if (is_held(v, p)) {
            at = &p->next_retired;
        } else {
            *at = p->next_retired;
            placement_free(p);
        }
    }
}

void view_publish(struct pf_view *v, struct placement *next)
{
    pthread_mutex_lock(&v->mu);
    /* seq_cst: a reader that announced the old placement either is seen by the sweep or sees the new one. */
    struct placement *old = atomic_exchange(&v->current, next);
    if (old) {
        old->next_retired = v->retired;
        v->retired = old;
    }
    sweep(v);
    pthread_mutex_unlock(&v->mu);
}

bool view_has_stale_readers(struct pf_view *v)
{
    pthread_mutex_lock(&v->mu);
    sweep(v);
    bool stale = v->retired != NULL;
    pthread_mutex_unlock(&v->mu);
    return stale;
}

/* ------------------------------------------------------------------------------------------- views */

int pf_view_open(struct pf_checkpoint *ckpt, struct pf_composition *comp, struct pf_view **out_view,
                 pf_error *err)
{
    if (comp && comp->ckpt != ckpt)
        return err_set(err, PF_E_INVALID,
                       "the composition was made for checkpoint '%s', not for '%s'",
                       comp->ckpt->path, ckpt->path);
    struct pf_view *v = mem_calloc(1, sizeof *v);
    if (!v)
        return err_nomem(err, sizeof *v, "a view");
    if (comp) {
        comp_ref(comp);
    } else {
        int rc = pf_composition_new(ckpt, NULL, 0, NULL, &comp, err);
        if (rc) {
            mem_free(v);
            return rc;
        }
    }
    if (pthread_mutex_init(&v->mu, NULL)) {
        pf_composition_free(comp);
        mem_free(v);
        return err_nomem(err, sizeof *v, "a view");
    }
    atomic_init(&v->n_refs, 1);
    atomic_init(&v->current, NULL);
    ckpt_ref(ckpt);
    v->ckpt = ckpt;
    v->comp = comp;
    *out_view = v;
    return PF_OK;
}

void view_ref_n(struct pf_view *v, uint32_t n)
{
    atomic_fetch_add_explicit(&v->n_refs, n, memory_order_relaxed);
}

void view_unref_n(struct pf_view *v, uint32_t n)
{
    /* acq_rel: the last owner must see everything that the others did with the object. */
    if (n == 0 || atomic_fetch_sub_explicit(&v->n_refs, n, memory_order_acq_rel) != n)
        return;
    /* Readers hold a reference each, so there is none left. */
    sweep(v);
    placement_free(atomic_load(&v->current));
    policy_unref(v->policy);
    for (struct slot *slot = atomic_load(&v->slots), *next; slot; slot = next) {
        next = slot->next;
        mem_free(slot);
    }
    pthread_mutex_destroy(&v->mu);
    pf_composition_free(v->comp);
    pf_checkpoint_close(v->ckpt);
    mem_free(v);
}

void view_ref(struct pf_view *v)
{
    view_ref_n(v, 1);
}

void pf_view_release(struct pf_view *v)
{
    if (v)
        view_unref_n(v, 1);
}

uint32_t view_n_refs(const struct pf_view *v)
{
    return atomic_load_explicit(&v->n_refs, memory_order_relaxed);
}

uint32_t view_count_use(struct pf_view *v)
{
    /* relaxed: a number that informs */
    return atomic_fetch_add_explicit(&v->n_uses, 1, memory_order_relaxed) + 1;
}

uint32_t view_n_uses(const struct pf_view *v)
{
    return atomic_load_explicit(&v->n_uses, memory_order_relaxed);
}

void view_set_policy(struct pf_view *v, struct stream_policy *policy)
{
    policy_ref(policy);
    v->policy = policy;
}

struct stream_policy *view_policy(const struct pf_view *v)
{
    return v->policy;
}

const char *pf_view_digest(const struct pf_view *view)
{
    return view->comp->digest_hex;
}

const struct pf_composition *view_composition(const struct pf_view *v)
{
    return v->comp;
}

struct pf_checkpoint *view_checkpoint(const struct pf_view *v)
{
    return v->ckpt;
}

int32_t pf_view_dtype(const struct pf_view *view, uint32_t i_tensor)
{
    if (i_tensor >= view->ckpt->n_tensors)
        return -1;
    const struct merge_target *t = comp_target(view->comp, i_tensor);
    return t ? t->out_dtype : view->ckpt->tensors[i_tensor].dtype;
}

const void *pf_view_map(const struct pf_view *view, uint32_t i_tensor)
{
    if (i_tensor >= view->ckpt->n_tensors || comp_target(view->comp, i_tensor))
        return NULL;
    return view->ckpt->tensors[i_tensor].p;
}

int64_t view_panel_rows(const struct pf_view *v, uint32_t i_tensor, size_t n_bytes_max)
{
    const struct shape *shape = &v->ckpt->tensors[i_tensor].shape;
    int64_t n_rows = shape_rows(shape), n_cols = shape_cols(shape);
    int64_t n_max = (int64_t)((n_bytes_max ? n_bytes_max : PANEL_BYTES_MAX) / sizeof(float));
    int64_t n = n_cols > 0 ? n_max / n_cols : n_rows;
    if (n > n_rows)
        n = n_rows;
    return n < 1 ? 1 : n;
}

/* ----------------------------------------------------------------------------------------- readers */

/* A free slot, or a new one; NULL: out of memory. */
static struct slot *take_slot(struct pf_view *v)
{
    for (struct slot *s = atomic_load(&v->slots); s; s = s->next) {
        bool is_taken = false;
        if (atomic_compare_exchange_strong(&s->is_taken, &is_taken, true))
            return s;
    }
    struct slot *s = mem_calloc(1, sizeof *s);
    if (!s)
        return NULL;
    atomic_init(&s->is_taken, true);
    s->next = atomic_load(&v->slots);
    while (!atomic_compare_exchange_weak(&v->slots, &s->next, s))
        continue;
    return s;
}

int reader_new_placing(struct pf_view *view, struct pf_reader **out_reader, pf_error *err)
{
    struct pf_reader *r = mem_calloc(1, sizeof *r);
    if (!r || !(r->slot = take_slot(view))) {
        mem_free(r);
        return err_nomem(err, sizeof *r, "a reader");
    }
    view_ref(view);
    r->view = view;
    *out_reader = r;
    return PF_OK;
}

int pf_reader_new(struct pf_view *view, struct pf_reader **out_reader, pf_error *err)
{
    struct merge_scratch *scratch = NULL;
    int rc = merge_scratch_new(&scratch, err);
    if (rc == PF_OK)
        rc = reader_new_placing(view, out_reader, err);
    if (rc == PF_OK)
        (*out_reader)->scratch = scratch;
    else
        merge_scratch_free(scratch);
    return rc;
}

void pf_reader_free(struct pf_reader *reader)
{
    if (!reader)
        return;
    struct pf_view *v = reader->view;
    pf_reader_leave(reader);
    atomic_store(&reader->slot->is_taken, false);
    merge_scratch_free(reader->scratch);
    mem_free(reader);
    pf_view_release(v);
}

/* Announces the newest placement and keeps it. Ends after one round unless a publisher swaps at that very moment. */
static void hold(struct pf_reader *r)
{
    struct placement *p;
    do {
        p = atomic_load(&r->view->current);
        atomic_store(&r->slot->placement, p);
    } while (atomic_load(&r->view->current) != p);
    r->held = p;
}

static void let_go(struct pf_reader *r)
{
    /* release: reads through the placement happen before a publisher may free it. */
    atomic_store_explicit(&r->slot->placement, NULL, memory_order_release);
    r->held = NULL;
}

int pf_reader_enter(struct pf_reader *reader, uint32_t i_layer, pf_error *err)
{
    if (i_layer >= reader->view->ckpt->n_layers)
        return err_set(err, PF_E_RANGE, "layer %u of a checkpoint of %u layers", i_layer,
                       reader->view->ckpt->n_layers);
    hold(reader);
    reader->is_in_layer = true;
    return PF_OK;
}

void pf_reader_leave(struct pf_reader *reader)
{
    if (reader->is_in_layer)
        let_go(reader);
    reader->is_in_layer = false;
}

static bool is_cut(const struct file_map *m)
{
    return m && guard_tripped(m->i_guard);
}

void reader_place(struct pf_reader *r, uint32_t i_tensor, struct place *out)
{
    const struct ckpt_tensor *t = &r->view->ckpt->tensors[i_tensor];
    const struct merge_target *target = comp_target(r->view->comp, i_tensor);
    *out = (struct place){.dtype = target ? target->out_dtype : t->dtype};
    const struct layer_bytes *bytes =
        r->held && t->i_layer < r->held->n_layers ? r->held->layers[t->i_layer] : NULL;
    uint32_t i = i_tensor - r->view->ckpt->layers[t->i_layer].i_tensor0;
    /* An overlay file that somebody cut is passed over: base and deltas say the same. */
    if (bytes && bytes->p[i] && !is_cut(bytes->map)) {
        out->kind = bytes->kind;
        out->p = bytes->p[i];
        out->map = bytes->map;
        return;
    }
    out->map = st_map(r->view->ckpt->files[t->i_file]);
    out->kind = target ? PLACE_STREAM : PLACE_BASE;
    out->p = target ? NULL : t->p;
    out->target = target;
}

static int check_panel(const struct pf_reader *r, const struct pf_panel *p, struct merge_panel *out,
                       pf_error *err)
{
    if (p->i_tensor >= r->view->ckpt->n_tensors)
        return err_set(err, PF_E_RANGE, "tensor %u of a checkpoint of %u tensors", p->i_tensor,
                       r->view->ckpt->n_tensors);
    const struct ckpt_tensor *t = &r->view->ckpt->tensors[p->i_tensor];
    int64_t n_rows = shape_rows(&t->shape), n_cols = shape_cols(&t->shape);
    *out = (struct merge_panel){p->row0, p->n_rows, p->col0, p->n_cols};
    if (out->n_cols == 0 && out->col0 == 0)
        out->n_cols = n_cols;
    bool has_no_width = out->n_cols == 0 && out->col0 != 0; /* whole rows begin at column 0 */
    if (has_no_width || out->row0 < 0 || out->n_rows < 0 || out->row0 > n_rows ||
        out->n_rows > n_rows - out->row0 || out->col0 < 0 || out->n_cols < 0 ||
        out->col0 > n_cols || out->n_cols > n_cols - out->col0)
        return err_set(err, PF_E_RANGE,
                       "panel of rows %lld+%lld and columns %lld+%lld lies outside tensor '%s' of "
                       "%lld x %lld",
                       (long long)out->row0, (long long)out->n_rows, (long long)out->col0,
                       (long long)out->n_cols, t->name.p, (long long)n_rows, (long long)n_cols);
    return PF_OK;
}

/* Rows of a packed matrix, converted or copied. dtype_size > 0 was checked. */
static void read_plain(const struct place *at, int64_t n_cols_all, const struct merge_panel *p,
                       bool as_f32, uint8_t *out)
{
    size_t size = dtype_size(at->dtype);
    size_t n_row = (size_t)p->n_cols * size, n_out = as_f32 ? (size_t)p->n_cols * 4 : n_row;
    const uint8_t *src = at->p + ((size_t)p->row0 * (size_t)n_cols_all + (size_t)p->col0) * size;
    bool is_whole = p->n_cols == n_cols_all;
    int64_t n_runs = is_whole ? 1 : p->n_rows;
    size_t n_run = is_whole ? (size_t)(p->n_rows * p->n_cols) : (size_t)p->n_cols;
    for (int64_t i = 0; i < n_runs; i++) {
        if (as_f32)
            merge_to_f32(at->dtype, src, n_run, (float *)(void *)out);
        else
            memcpy(out, src, n_run * size);
        src += (size_t)n_cols_all * size;
        out += n_out;
    }
}

static void read_place(struct pf_reader *r, const struct place *at, int64_t n_cols_all,
                       const struct merge_panel *p, bool as_f32, void *out)
{
    if (at->kind == PLACE_STREAM) {
        r->has_merged = true;
        merge_read(at->target, p, as_f32, out, r->scratch);
    } else {
        read_plain(at, n_cols_all, p, as_f32, out);
    }
}

bool reader_has_merged(const struct pf_reader *r)
{
    return r->has_merged;
}

int view_verify(const struct pf_view *v, bool has_merged, pf_error *err)
{
    int rc = ckpt_verify_again(v->ckpt, err);
    return rc == PF_OK && has_merged ? comp_check_adapters(v->comp, err) : rc;
}

static int read_placed(struct pf_reader *r, uint32_t i_tensor, const struct merge_panel *p,
                       int32_t format, void *out, size_t n_out_bytes, pf_error *err)
{
    const struct ckpt_tensor *t = &r->view->ckpt->tensors[i_tensor];
    struct place at;
    reader_place(r, i_tensor, &at);
    size_t size = dtype_size(at.dtype);
    if (size == 0 || (format == PF_AS_F32 && !dtype_is_mergeable(at.dtype)))
        return err_set(err, PF_E_UNSUPPORTED, "tensor '%s' of dtype %s cannot be read %s",
                       t->name.p, pf_dtype_name(at.dtype),
                       format == PF_AS_F32 ? "as f32" : "by rows");
    size_t n_out = (size_t)p->n_rows * (size_t)p->n_cols * (format == PF_AS_F32 ? 4 : size);
    if (n_out == 0)
        return PF_OK;
    if (!out || n_out > n_out_bytes)
        return err_set(err, PF_E_INVALID,
                       "panel of tensor '%s' takes %zu bytes, the buffer has %zu", t->name.p, n_out,
                       out ? n_out_bytes : 0);
    read_place(r, &at, shape_cols(&t->shape), p, format == PF_AS_F32, out);
    if (at.kind == PLACE_OVERLAY && is_cut(at.map)) { /* just now: what was read are zeros */
        reader_place(r, i_tensor, &at);
        read_place(r, &at, shape_cols(&t->shape), p, format == PF_AS_F32, out);
    }
    if (is_cut(at.map) || (at.kind == PLACE_STREAM && comp_is_truncated(r->view->comp)))
        return err_set(err, PF_E_TRUNCATED,
                       "tensor '%s': a mapped file shrank while it was read; restore the file and "
                       "start again",
                       t->name.p);
    return PF_OK;
}

int pf_reader_read(struct pf_reader *reader, const struct pf_panel *panel, int32_t format,
                   void *out, size_t n_out_bytes, pf_error *err)
{
    struct merge_panel p;
    int rc = check_panel(reader, panel, &p, err);
    if (rc)
        return rc;
    if (format != PF_NATIVE && format != PF_AS_F32)
        return err_set(err, PF_E_INVALID, "panel format %d is neither native nor f32", format);
    bool is_visit = !reader->is_in_layer;
    if (is_visit)
        hold(reader);
    rc = read_placed(reader, panel->i_tensor, &p, format, out, n_out_bytes, err);
    if (is_visit)
        let_go(reader);
    return rc;
}

int pf_apply_into(struct pf_view *view, uint32_t i_tensor, void *buffer, size_t n_buffer_bytes,
                  pf_error *err)
{
    if (i_tensor >= view->ckpt->n_tensors)
        return err_set(err, PF_E_RANGE, "tensor %u of a checkpoint of %u tensors", i_tensor,
                       view->ckpt->n_tensors);
    const struct ckpt_tensor *t = &view->ckpt->tensors[i_tensor];
    size_t size = dtype_size(pf_view_dtype(view, i_tensor));
    int64_t n_rows = shape_rows(&t->shape), n_cols = shape_cols(&t->shape);
    size_t n_row = (size_t)n_cols * size;
    size_t n_room = buffer ? n_buffer_bytes : 0;
    if (size == 0 || n_room != (size_t)n_rows * n_row)
        return err_set(err, size ? PF_E_INVALID : PF_E_UNSUPPORTED,
                       "tensor '%s' of dtype %s takes %zu bytes, the buffer has %zu", t->name.p,
                       pf_dtype_name(pf_view_dtype(view, i_tensor)), (size_t)n_rows * n_row,
                       n_room);
    struct pf_reader *reader = NULL;
    int rc = pf_reader_new(view, &reader, err);
    int64_t step = view_panel_rows(view, i_tensor, 0);
    for (int64_t row = 0; rc == PF_OK && row < n_rows; row += step) {
        int64_t n = n_rows - row < step ? n_rows - row : step;
        struct pf_panel panel = {.i_tensor = i_tensor, .row0 = row, .n_rows = n};
        rc = pf_reader_read(reader, &panel, PF_NATIVE, (uint8_t *)buffer + (size_t)row * n_row,
                            (size_t)n * n_row, err);
    }
    pf_reader_free(reader);
    return rc;
}
