/*
 * Building a composition: resolve every adapter against the checkpoint, put entries into canonical order, collect per
 * base tensor the terms that change it, prove that nothing overflows, and give the whole a digest. Nothing is merged here.
 * Called by the public API and the engine. Must never look at the bytes of W beyond what the overflow proof needs.
 */
#include "view/composition.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/opts.h"
#include "tensor/dtype.h"

struct comp_priv {
    struct str_list {
        const char **keys, **nearest;
        size_t n;
    } unmatched;
    char **notes; /* owned */
    size_t n_notes, cap_notes;
    pthread_mutex_t mu; /* guards fidelity */
    bool has_fidelity;
    struct pf_fidelity fidelity;
};

/* ------------------------------------------------------------------------------------------- order */

static int cmp_double(double a, double b)
{
    return (a > b) - (a < b);
}

/* Does the resolution change anything in component c? */
static bool touches(const struct comp_entry *e, const struct pf_checkpoint *ckpt, uint32_t c)
{
    for (size_t i = 0; i < e->res.n_deltas; i++)
        if (ckpt->tensors[e->res.deltas[i].i_tensor].i_component == c)
            return true;
    return false;
}

/* Targets compare by what they resolved to, so that "all" and a list of everything are one. */
static int cmp_targets(const struct comp_entry *a, const struct comp_entry *b)
{
    size_t n = a->res.n_deltas < b->res.n_deltas ? a->res.n_deltas : b->res.n_deltas;
    for (size_t i = 0; i < n; i++) {
        uint32_t ta = a->res.deltas[i].i_tensor, tb = b->res.deltas[i].i_tensor;
        if (ta != tb)
            return ta < tb ? -1 : 1;
    }
    return (a->res.n_deltas > b->res.n_deltas) - (a->res.n_deltas < b->res.n_deltas);
}

/* Canonical order of entries (DESIGN 4): digest, alpha, strength, targets. */
static int cmp_entry(const void *pa, const void *pb)
{
    const struct comp_entry *a = pa, *b = pb;
    int c = digest_cmp(adapter_digest(a->adapter), adapter_digest(b->adapter));
    if (c)
        return c;
    if (a->has_alpha != b->has_alpha)
        return a->has_alpha ? 1 : -1;
    if (a->has_alpha && (c = cmp_double(a->alpha, b->alpha)))
        return c;
    if ((c = cmp_double(a->strength, b->strength)))
        return c;
    return cmp_targets(a, b);
}

/* ------------------------------------------------------------------------------------------ digest */

static bool entry_is_active(const struct comp_entry *e)
{
    return e->strength != 0 && e->res.n_deltas > 0;
}

static int comp_digest(struct pf_composition *comp, pf_error *err)
{
    struct digest base;
    int rc = ckpt_content_id(comp->ckpt, &base, err);
    if (rc)
        return rc;
    comp->base_id = base;
    struct hasher *h = hasher_new();
    if (!h)
        return err_nomem(err, 0, "a digest");
    hasher_add_str(h, "pageflip composition", 20);
    hasher_add_u64(h, ARITHMETIC_VERSION);
    hasher_add_u64(h, base.hi);
    hasher_add_u64(h, base.lo);
    /* A composition that changes nothing is the base, whatever precision was asked for. */
    hasher_add_u64(h, comp->n_targets ? (uint64_t)comp->merge_dtype : PF_MERGE_BASE);
    for (size_t i = 0; i < comp->n_entries; i++) {
        const struct comp_entry *e = &comp->entries[i];
        if (!entry_is_active(e))
            continue;
        struct digest d = adapter_digest(e->adapter);
        hasher_add_u64(h, d.hi);
        hasher_add_u64(h, d.lo);
        hasher_add_u64(h, e->has_alpha);
        hasher_add_double(h, e->has_alpha ? e->alpha : 0);
        hasher_add_double(h, e->strength);
        for (uint32_t c = 0; c < comp->ckpt->n_components; c++)
            if (touches(e, comp->ckpt, c))
                hasher_add_str(h, comp->ckpt->components[c].name,
                               strlen(comp->ckpt->components[c].name));
        hasher_add_str(h, "", 0);
    }
    comp->digest = hasher_digest(h);
    digest_hex(comp->digest, comp->digest_hex);
    hasher_free(h);
    return PF_OK;
}

/* ------------------------------------------------------------------------------------------- notes */

static bool add_note(struct comp_priv *p, const char *path, const char *text)
{
    struct strbuf b;
    strbuf_init(&b);
    if (path) {
        struct str base = path_base(path);
        strbuf_addf(&b, "%.*s: ", (int)base.n, base.p);
    }
    strbuf_adds(&b, text);
    char *note = strbuf_take(&b);
    if (!note || !mem_grow((void **)&p->notes, &p->cap_notes, p->n_notes, sizeof *p->notes)) {
        mem_free(note);
        return false;
    }
    p->notes[p->n_notes++] = note;
    return true;
}

/* Strength times scale is 0 in f32, though neither is. */
static bool add_lost_note(struct comp_priv *p, const struct comp_entry *e, size_t n_lost)
{
    char text[128];
    snprintf(text, sizeof text,
             "warning: strength %g adds nothing to %zu of %zu places: it vanishes in f32",
             e->strength, n_lost, e->res.n_deltas);
    return add_note(p, adapter_path(e->adapter), text);
}

/* ----------------------------------------------------------------------------------------- resolve */

static int check_lora(const struct pf_lora *l, size_t i, pf_error *err)
{
    if (!l->adapter)
        return err_set(err, PF_E_INVALID, "adapter %zu of the composition is missing", i);
    if (!isfinite(l->strength))
        return err_set(err, PF_E_INVALID, "strength %g of adapter '%s' is not a finite number",
                       l->strength, adapter_path(l->adapter));
    if (l->has_alpha && !isfinite(l->alpha))
        return err_set(err, PF_E_INVALID, "alpha %g of adapter '%s' is not a finite number",
                       l->alpha, adapter_path(l->adapter));
    return PF_OK;
}

static int resolve_entry(struct pf_composition *comp, const struct pf_lora *l, bool allow_unmatched,
                         struct comp_entry *e, pf_error *err)
{
    struct resolve_opts ro = {.has_alpha = l->has_alpha,
                              .alpha = l->alpha,
                              .target = l->target,
                              .allow_unmatched = allow_unmatched};
    int rc = adapter_resolve(l->adapter, comp->ckpt, &ro, &e->res, err);
    if (rc)
        return rc;
    /* The adapter is immutable; only its reference count is touched through this pointer. */
    e->adapter = (struct pf_adapter *)(uintptr_t)l->adapter;
    adapter_ref(e->adapter);
    e->strength = l->strength == 0 ? 0 : l->strength; /* -0 is 0 */
    e->has_alpha = l->has_alpha;
    e->alpha = l->alpha;
    if (l->target && !(e->target = mem_strdup(l->target)))
        return err_nomem(err, strlen(l->target), "a target");
    if (e->strength == 0 &&
        !add_note(comp->priv, adapter_path(e->adapter), "strength 0 adds nothing"))
        return err_nomem(err, 0, "a note");
    for (size_t i = 0; i < e->res.n_notes; i++)
        if (!add_note(comp->priv, adapter_path(e->adapter), e->res.notes[i]))
            return err_nomem(err, 0, "a note");
    return PF_OK;
}

/* ----------------------------------------------------------------------------------------- targets */

/* Provably nothing: a factor that is all zeros. Its rows are then copied, not recomputed (-0 + 0 would flip a sign). */
static bool delta_is_zero(const struct delta *d)
{
    for (size_t i = 0; i < PF_COUNTOF(d->f); i++)
        if (d->f[i].p && d->max_abs[i] == 0)
            return true;
    return d->n_rows == 0 || d->n_cols == 0;
}

struct use { /* one delta of one entry, before it is sorted to its tensor */
    uint32_t i_tensor;
    size_t i_order; /* canonical */
    struct merge_term term;
};

static int cmp_use(const void *pa, const void *pb)
{
    const struct use *a = pa, *b = pb;
    if (a->i_tensor != b->i_tensor)
        return a->i_tensor < b->i_tensor ? -1 : 1;
    return (a->i_order > b->i_order) - (a->i_order < b->i_order);
}

static int collect_uses(struct pf_composition *comp, struct use **out_uses, size_t *out_n,
                        pf_error *err)
{
    size_t n_max = 0, n = 0, i_order = 0;
    for (size_t i = 0; i < comp->n_entries; i++)
        n_max += comp->entries[i].res.n_deltas;
    struct use *uses = mem_calloc(n_max ? n_max : 1, sizeof *uses);
    if (!uses)
        return err_nomem(err, n_max * sizeof *uses, "the deltas of a composition");
    for (size_t i = 0; i < comp->n_entries; i++) {
        const struct comp_entry *e = &comp->entries[i];
        size_t n_lost = 0, n_zero = 0;
        for (size_t j = 0; j < e->res.n_deltas; j++, i_order++) {
            const struct delta *d = &e->res.deltas[j];
            double wanted = e->strength * d->scale;
            float s = (float)wanted;
            if (!isfinite(s)) {
                mem_free(uses);
                return err_set(err, PF_E_RANGE,
                               "strength %g times scale %g of '%s' is beyond f32: lower the "
                               "strength or the alpha",
                               e->strength, d->scale, d->key);
            }
            n_lost += s == 0 && e->strength != 0 && d->scale != 0;
            n_zero += delta_is_zero(d);
            if (s == 0 || delta_is_zero(d))
                continue;
            uses[n++] = (struct use){d->i_tensor, i_order, {.delta = d, .s = s}};
        }
        if (n_zero > 0 && n_zero == e->res.n_deltas &&
            !add_note(comp->priv, adapter_path(e->adapter),
                      "warning: it adds nothing: everywhere a factor is all zeros, as before "
                      "training")) {
            mem_free(uses);
            return err_nomem(err, 0, "a note");
        }
        if (n_lost > 0 && !add_lost_note(comp->priv, e, n_lost)) {
            mem_free(uses);
            return err_nomem(err, 0, "a note");
        }
    }
    qsort(uses, n, sizeof *uses, cmp_use);
    *out_uses = uses;
    *out_n = n;
    return PF_OK;
}

static int check_base_dtype(const struct pf_composition *comp, const struct use *u, pf_error *err)
{
    const struct ckpt_tensor *t = &comp->ckpt->tensors[u->i_tensor];
    if (dtype_is_mergeable(t->dtype))
        return PF_OK;
    return err_set(err, PF_E_UNSUPPORTED,
                   "adapter module '%s' changes tensor '%.*s' of dtype %s: only F32, F16 and BF16 "
                   "weights can be merged; quantised storage is not the matrix",
                   u->term.delta->key, (int)t->name.n, t->name.p, pf_dtype_name(t->dtype));
}

static int build_targets(struct pf_composition *comp, pf_error *err)
{
    struct use *uses = NULL;
    size_t n = 0, n_targets = 0;
    int rc = collect_uses(comp, &uses, &n, err);
    if (rc)
        return rc;
    for (size_t i = 0; i < n; i++)
        n_targets += i == 0 || uses[i].i_tensor != uses[i - 1].i_tensor;
    comp->terms = mem_calloc(n ? n : 1, sizeof *comp->terms);
    comp->targets = mem_calloc(n_targets ? n_targets : 1, sizeof *comp->targets);
    comp->i_tensors = mem_calloc(n_targets ? n_targets : 1, sizeof *comp->i_tensors);
    if (!comp->terms || !comp->targets || !comp->i_tensors) {
        rc = err_nomem(err, n * sizeof *comp->terms, "the targets of a composition");
        goto out;
    }
    for (size_t i = 0; i < n; i++) {
        if (i == 0 || uses[i].i_tensor != uses[i - 1].i_tensor) {
            rc = check_base_dtype(comp, &uses[i], err);
            if (rc)
                goto out;
            const struct ckpt_tensor *t = &comp->ckpt->tensors[uses[i].i_tensor];
            comp->i_tensors[comp->n_targets] = uses[i].i_tensor;
            comp->targets[comp->n_targets++] = (struct merge_target){
                .base = t->p,
                .dtype = t->dtype,
                .out_dtype = comp->merge_dtype == PF_MERGE_F32 ? PF_F32 : t->dtype,
                .n_rows = shape_rows(&t->shape),
                .n_cols = shape_cols(&t->shape),
                .terms = &comp->terms[i],
            };
        }
        comp->terms[i] = uses[i].term;
        comp->targets[comp->n_targets - 1].n_terms++;
    }
out:
    mem_free(uses);
    return rc;
}

static int check_bounds(struct pf_composition *comp, pf_error *err)
{
    for (size_t i = 0; i < comp->n_targets; i++) {
        const struct ckpt_tensor *t = &comp->ckpt->tensors[comp->i_tensors[i]];
        int rc = merge_bound_check(&comp->targets[i], t->name.p, NULL, err);
        if (rc == PF_OK)
            rc = ckpt_tensor_guard(comp->ckpt, comp->i_tensors[i], err);
        if (rc)
            return rc;
    }
    return PF_OK;
}

/* -------------------------------------------------------------------------------------------- info */

static int collect_unmatched(struct pf_composition *comp, pf_error *err)
{
    struct str_list *u = &comp->priv->unmatched;
    size_t n = 0;
    for (size_t i = 0; i < comp->n_entries; i++)
        n += comp->entries[i].res.n_unmatched;
    u->keys = mem_calloc(n ? n : 1, sizeof *u->keys);
    u->nearest = mem_calloc(n ? n : 1, sizeof *u->nearest);
    if (!u->keys || !u->nearest)
        return err_nomem(err, n * sizeof *u->keys, "unmatched keys");
    for (size_t i = 0; i < comp->n_entries; i++) {
        const struct resolution *r = &comp->entries[i].res;
        for (size_t j = 0; j < r->n_unmatched; j++, u->n++) {
            u->keys[u->n] = r->unmatched[j].key;
            u->nearest[u->n] = r->unmatched[j].nearest;
        }
    }
    return PF_OK;
}

static void fill_info(struct pf_composition *comp)
{
    struct pf_composition_info *info = &comp->info;
    info->digest = comp->digest_hex;
    info->n_entries = (uint32_t)comp->n_entries;
    info->merge_dtype = comp->merge_dtype;
    for (size_t i = 0; i < comp->n_entries; i++)
        info->n_keys_matched += comp->entries[i].res.n_keys_matched;
    info->n_keys_unmatched = (uint32_t)comp->priv->unmatched.n;
    info->n_tensors_changed = (uint32_t)comp->n_targets;
    uint32_t i_layer_last = UINT32_MAX;
    for (size_t i = 0; i < comp->n_targets; i++) {
        const struct merge_target *t = &comp->targets[i];
        uint32_t i_layer = comp->ckpt->tensors[comp->i_tensors[i]].i_layer;
        info->n_layers_changed += i_layer != i_layer_last; /* tensors are sorted by layer */
        i_layer_last = i_layer;
        info->n_bytes_changed +=
            (uint64_t)t->n_rows * (uint64_t)t->n_cols * dtype_size(t->out_dtype);
    }
}

/* --------------------------------------------------------------------------------------------- api */

int pf_composition_new(struct pf_checkpoint *ckpt, const struct pf_lora *loras, size_t n_loras,
                       const struct pf_composition_opts *opts, struct pf_composition **out_comp,
                       pf_error *err)
{
    struct pf_composition_opts o;
    opts_read(&o, sizeof o, opts);
    if (o.merge_dtype != PF_MERGE_BASE && o.merge_dtype != PF_MERGE_F32)
        return err_set(err, PF_E_INVALID, "merge precision %d is neither base nor f32",
                       o.merge_dtype);
    if (n_loras > 0 && !loras)
        return err_set(err, PF_E_INVALID, "%zu adapters are announced and none is given", n_loras);
    int rc = merge_kernel_init(NULL, err);
    if (rc)
        return rc;
    struct pf_composition *comp = mem_calloc(1, sizeof *comp);
    struct comp_priv *priv = mem_calloc(1, sizeof *priv);
    struct comp_entry *entries = mem_calloc(n_loras ? n_loras : 1, sizeof *entries);
    if (!comp || !priv || !entries || pthread_mutex_init(&priv->mu, NULL)) {
        mem_free(comp);
        mem_free(priv);
        mem_free(entries);
        return err_nomem(err, sizeof *comp, "a composition");
    }
    atomic_init(&comp->n_refs, 1);
    comp->priv = priv;
    comp->entries = entries;
    comp->merge_dtype = o.merge_dtype;
    comp->ckpt = ckpt;
    ckpt_ref(ckpt);
    for (size_t i = 0; rc == PF_OK && i < n_loras; i++) {
        rc = check_lora(&loras[i], i, err);
        if (rc == PF_OK) {
            comp->n_entries++;
            rc = resolve_entry(comp, &loras[i], o.allow_unmatched, &comp->entries[i], err);
        }
    }
    if (rc == PF_OK) {
        qsort(comp->entries, comp->n_entries, sizeof *comp->entries, cmp_entry);
        rc = build_targets(comp, err);
    }
    if (rc == PF_OK)
        rc = check_bounds(comp, err);
    if (rc == PF_OK)
        rc = comp_digest(comp, err);
    if (rc == PF_OK)
        rc = collect_unmatched(comp, err);
    if (rc) {
        pf_composition_free(comp);
        return rc;
    }
    fill_info(comp);
    *out_comp = comp;
    return PF_OK;
}

void comp_ref(struct pf_composition *comp)
{
    atomic_fetch_add_explicit(&comp->n_refs, 1, memory_order_relaxed);
}

void pf_composition_free(struct pf_composition *comp)
{
    /* acq_rel: the last owner must see everything that the others did with the object. */
    if (!comp || atomic_fetch_sub_explicit(&comp->n_refs, 1, memory_order_acq_rel) != 1)
        return;
    for (size_t i = 0; i < comp->n_entries; i++) {
        resolution_release(&comp->entries[i].res);
        pf_adapter_close(comp->entries[i].adapter);
        mem_free(comp->entries[i].target);
    }
    for (size_t i = 0; i < comp->priv->n_notes; i++)
        mem_free(comp->priv->notes[i]);
    mem_free(comp->priv->notes);
    mem_free(comp->priv->unmatched.keys);
    mem_free(comp->priv->unmatched.nearest);
    pthread_mutex_destroy(&comp->priv->mu);
    mem_free(comp->priv);
    mem_free(comp->entries);
    mem_free(comp->targets);
    mem_free(comp->i_tensors);
    mem_free(comp->terms);
    pf_checkpoint_close(comp->ckpt);
    mem_free(comp);
}

const struct merge_target *comp_target(const struct pf_composition *comp, uint32_t i_tensor)
{
    size_t lo = 0, hi = comp->n_targets;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (comp->i_tensors[mid] < i_tensor)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < comp->n_targets && comp->i_tensors[lo] == i_tensor ? &comp->targets[lo] : NULL;
}

bool comp_is_truncated(const struct pf_composition *comp)
{
    for (size_t i = 0; i < comp->n_entries; i++)
        if (adapter_is_truncated(comp->entries[i].adapter))
            return true;
    return false;
}

int comp_check_adapters(const struct pf_composition *comp, pf_error *err)
{
    int rc = PF_OK;
    for (size_t i = 0; rc == PF_OK && i < comp->n_entries; i++)
        if (entry_is_active(&comp->entries[i]))
            rc = adapter_check(comp->entries[i].adapter, err);
    return rc;
}

void pf_composition_info(const struct pf_composition *comp, struct pf_composition_info *out_info)
{
    *out_info = comp->info;
}

bool pf_composition_unmatched(const struct pf_composition *comp, uint32_t i, const char **out_key,
                              const char **out_nearest)
{
    const struct str_list *u = &comp->priv->unmatched;
    if (i >= u->n)
        return false;
    *out_key = u->keys[i];
    *out_nearest = u->nearest[i];
    return true;
}

const char *pf_composition_note(const struct pf_composition *comp, uint32_t i)
{
    return i < comp->priv->n_notes ? comp->priv->notes[i] : NULL;
}

bool pf_composition_changes(const struct pf_composition *comp, uint32_t i_tensor)
{
    return comp_target(comp, i_tensor) != NULL;
}

/* ---------------------------------------------------------------------------------------- fidelity */

#define FIDELITY_ELEMENTS ((uint64_t)1 << 20)

/* The rows of a sample, and nothing around them: on a cold model, faults would read most of it for the sake of a few. */
static void fetch_rows(const struct pf_composition *comp, size_t i_target, int64_t stride)
{
    const struct ckpt_tensor *t = &comp->ckpt->tensors[comp->i_tensors[i_target]];
    const struct merge_target *target = &comp->targets[i_target];
    uint64_t n_row = (uint64_t)target->n_cols * dtype_size(target->dtype);
    if (stride == 1)
        return; /* a model so small is read whole */
    for (int64_t row = 0; row < target->n_rows; row += stride)
        file_map_fetch(st_map(comp->ckpt->files[t->i_file]), t->off_bytes + (uint64_t)row * n_row,
                       n_row);
}

static int fidelity_compute(const struct pf_composition *comp, struct pf_fidelity *out,
                            pf_error *err)
{
    struct merge_scratch *scratch = NULL;
    int rc = merge_scratch_new(&scratch, err);
    if (rc)
        return rc;
    uint64_t n_all = 0;
    for (size_t i = 0; i < comp->n_targets; i++)
        n_all += (uint64_t)comp->targets[i].n_rows * (uint64_t)comp->targets[i].n_cols;
    /* Every stride-th row of every tensor: at least 2^20 elements in all, since a tensor's share is rounded up. */
    int64_t stride = n_all > FIDELITY_ELEMENTS ? (int64_t)(n_all / FIDELITY_ELEMENTS) : 1;
    struct fidelity_sum sum = {0};
    for (size_t i = 0; rc == PF_OK && i < comp->n_targets; i++) {
        fetch_rows(comp, i, stride);
        rc = merge_fidelity(&comp->targets[i], 0, stride, &sum, scratch, err);
        if (rc == PF_OK)
            rc = ckpt_tensor_guard(comp->ckpt, comp->i_tensors[i], err);
    }
    merge_scratch_free(scratch);
    if (rc)
        return rc;
    out->survival = sum.wanted2 > 0 ? sum.applied_x_wanted / sum.wanted2 : 1;
    out->n_elements = sum.n_elements;
    out->fraction_changed = sum.n_elements ? (double)sum.n_changed / (double)sum.n_elements : 0;
    return PF_OK;
}

int pf_composition_fidelity(struct pf_composition *comp, struct pf_fidelity *out_fidelity,
                            pf_error *err)
{
    int rc = PF_OK;
    pthread_mutex_lock(&comp->priv->mu);
    if (!comp->priv->has_fidelity) {
        rc = fidelity_compute(comp, &comp->priv->fidelity, err);
        comp->priv->has_fidelity = rc == PF_OK;
    }
    if (rc == PF_OK)
        *out_fidelity = comp->priv->fidelity;
    pthread_mutex_unlock(&comp->priv->mu);
    return rc;
}
