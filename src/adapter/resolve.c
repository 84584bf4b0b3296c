/*
 * An adapter against a checkpoint. First every module finds its place, or is listed as unmatched; then rows are shared out among
 * the parts of fused tensors; then deltas are made, sorted, and two that change the same rows must be the same. Nothing is
 * dropped on the way: what does not end in a delta ends in a list that the caller sees.
 */
#include "adapter/emit.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Modules for which a nearest name is looked for: each costs a pass over the base */
#define NEAREST_MAX AD_LIST_MAX

struct resolver {
    const struct pf_adapter *a;
    const struct resolve_opts *opts;
    struct base_names names;
    struct place *places; /* of each module */
    /* Of each base tensor that is fused here; NULL: none is */
    int64_t (*slot_rows)[PLACE_PARTS_MAX];
    bool *is_left_out; /* of each tensor: a leaf of a placed module that has no target */
    struct delta_list deltas;
    struct unmatched *unmatched;
    size_t n_unmatched, cap_unmatched, n_elsewhere, n_nearest;
    struct ad_notes notes;
    pf_error *err;
};

static const char *path_of(const struct resolver *r)
{
    return r->a->path;
}

/* --------------------------------------------------------------------------------------------- what matches */

static int add_unmatched(struct resolver *r, const struct ad_tensor *t, const char *name)
{
    if (!mem_grow((void **)&r->unmatched, &r->cap_unmatched, r->n_unmatched, sizeof *r->unmatched))
        return err_nomem(r->err, sizeof *r->unmatched, "unmatched keys");
    r->unmatched[r->n_unmatched++] = (struct unmatched){.key = t->name.p, .nearest = name};
    return PF_OK;
}

/* Tensors of the base that a place covers, each with a weight, a bias, or both. */
static uint32_t n_parts(const struct place *p)
{
    if (p->kind == PLACE_SPREAD)
        return p->n_slots;
    return p->kind >= PLACE_WHOLE ? 1 : 0;
}

static bool has_weight(const struct place *p)
{
    for (uint32_t k = 0; k < n_parts(p); k++)
        if (p->parts[k].i_weight < 0)
            return false;
    return true;
}

static bool has_bias(const struct place *p)
{
    for (uint32_t k = 0; k < n_parts(p); k++)
        if (p->parts[k].i_bias < 0)
            return false;
    return true;
}

static int place_modules(struct resolver *r)
{
    for (size_t i = 0; i < r->a->n_modules; i++) {
        struct place *p = &r->places[i];
        int rc = place_find(&r->names, path_of(r), &r->a->modules[i], p, r->err);
        if (rc != PF_OK)
            return rc;
        /* Factors need a weight: a module of the base that has a bias alone is no match for them. */
        if (r->a->modules[i].family != AD_BIAS_ONLY && !has_weight(p))
            p->kind = PLACE_NONE;
        r->n_elsewhere += p->kind == PLACE_ELSEWHERE;
    }
    return PF_OK;
}

/* Does tensor i of the file take part? */
static bool is_matched(const struct resolver *r, size_t i)
{
    int32_t m = r->a->tensors[i].i_module;
    return m >= 0 && r->places[m].kind >= PLACE_WHOLE && !r->is_left_out[i];
}

static const char *nearest(struct resolver *r, struct str name)
{
    return r->n_nearest++ < NEAREST_MAX ? nearest_name(&r->names, name) : NULL;
}

static int check_lora_bias(struct resolver *r, const struct ad_module *m, const struct place *p)
{
    const struct ad_tensor *t = module_leaf(r->a, m, LEAF_UP_BIAS);
    if (t == NULL || has_bias(p))
        return PF_OK;
    return err_set(r->err, PF_E_MISMATCH,
                   "adapter '%s': '%s' adds to a bias, and the base has none for '%s'", path_of(r),
                   t->name.p, m->name.p);
}

/* Keys of the file in file order, so that lists read like the file. */
static int list_unmatched(struct resolver *r)
{
    const struct pf_adapter *a = r->a;
    const char *name = NULL;
    int32_t i_last = -1;
    for (size_t i = 0; i < a->n_tensors; i++) {
        const struct ad_tensor *t = &a->tensors[i];
        if (t->i_module < 0)
            continue;
        const struct ad_module *m = &a->modules[t->i_module];
        const struct place *p = &r->places[t->i_module];
        bool is_bias = t == module_leaf(a, m, LEAF_DIFF_B) || t == module_leaf(a, m, LEAF_B_NORM);
        bool is_missing = p->kind == PLACE_NONE;
        if (p->kind >= PLACE_WHOLE && is_bias && !has_bias(p))
            is_missing = r->is_left_out[i] = true;
        if (!is_missing)
            continue;
        if (t->i_module != i_last)
            name = nearest(r, m->name);
        i_last = t->i_module;
        int rc = add_unmatched(r, t, name);
        if (rc != PF_OK)
            return rc;
    }
    for (size_t i = 0; i < a->n_modules; i++)
        if (r->places[i].kind >= PLACE_WHOLE) {
            int rc = check_lora_bias(r, &a->modules[i], &r->places[i]);
            if (rc != PF_OK)
                return rc;
        }
    return PF_OK;
}

/* Keys that are no leaf of any module: a whole tensor of the base, a leaf that is not known, or nothing. */
static int judge_unknown(struct resolver *r)
{
    for (size_t i = 0; i < r->a->n_unknown; i++) {
        const struct ad_tensor *t = &r->a->tensors[r->a->unknown[i]];
        struct str module;
        switch (key_meaning(&r->names, t->name, &module)) {
        case KEY_IS_BASE_TENSOR:
            return err_set(r->err, PF_E_UNSUPPORTED,
                           "adapter '%s': '%s' replaces a whole tensor of the base "
                           "(modules_to_save), which is not supported yet",
                           path_of(r), t->name.p);
        case KEY_IS_UNKNOWN_LEAF:
            return err_set(
                r->err, PF_E_UNSUPPORTED,
                "adapter '%s': leaf '%s' of module '%.*s' is not known, or comes without "
                "its factors: it cannot be left out, and is not guessed",
                path_of(r), t->name.p + module.n, (int)module.n, module.p);
        case KEY_UNMATCHED: {
            int rc = add_unmatched(r, t, nearest(r, t->name));
            if (rc != PF_OK)
                return rc;
            break;
        }
        case KEY_ELSEWHERE:
            r->n_elsewhere++;
            break;
        }
    }
    return PF_OK;
}

/* An output head that the base ties to its embedding has no tensor of its own (C77). */
static const char *tied_to(const struct resolver *r)
{
    static const char *const embeddings[] = {"embed_tokens.weight", "wte.weight", "shared.weight",
                                             "word_embeddings.weight"};
    bool any = false;
    for (size_t i = 0; i < r->a->n_modules; i++)
        any |= r->places[i].kind == PLACE_NONE && str_ends(r->a->modules[i].name, "lm_head");
    const struct pf_checkpoint *ckpt = r->names.ckpt;
    for (uint32_t i = 0; any && i < ckpt->n_tensors; i++)
        for (size_t k = 0; k < PF_COUNTOF(embeddings); k++)
            if (str_ends(ckpt->tensors[i].name, embeddings[k]))
                return ckpt->tensors[i].name.p;
    return NULL;
}

static void write_unmatched(const struct resolver *r, struct strbuf *out)
{
    strbuf_addf(out, "%zu of %zu keys match no tensor of the base: ", r->n_unmatched,
                r->a->n_tensors);
    for (size_t i = 0; i < r->n_unmatched && i < AD_LIST_MAX; i++) {
        strbuf_addf(out, "%s'%s'", i > 0 ? ", " : "", r->unmatched[i].key);
        if (r->unmatched[i].nearest != NULL)
            strbuf_addf(out, " (nearest: '%s')", r->unmatched[i].nearest);
    }
    if (r->n_unmatched > AD_LIST_MAX)
        strbuf_addf(out, ", and %zu more", r->n_unmatched - AD_LIST_MAX);
    const char *tied = tied_to(r);
    if (tied != NULL)
        strbuf_addf(out,
                    "; the base has no 'lm_head.weight': it is tied to '%s', and a change of one "
                    "would change both",
                    tied);
}

static int report_unmatched(struct resolver *r)
{
    bool any = false;
    for (size_t i = 0; i < r->a->n_tensors; i++)
        any |= is_matched(r, i);
    if (any && r->n_unmatched == 0)
        return PF_OK;
    struct strbuf text;
    strbuf_init(&text);
    if (r->n_unmatched > 0)
        write_unmatched(r, &text);
    int rc = PF_OK;
    if (!any)
        rc = err_set(r->err, PF_E_UNMATCHED, "adapter '%s': nothing matches the base%s%s%s%s%s",
                     path_of(r), r->opts->target != NULL ? " with target '" : "",
                     r->opts->target != NULL ? r->opts->target : "",
                     r->opts->target != NULL ? "'" : "", text.n > 0 ? ": " : "", strbuf_z(&text));
    else if (!r->opts->allow_unmatched)
        rc = err_set(r->err, PF_E_UNMATCHED, "adapter '%s': %s", path_of(r), strbuf_z(&text));
    else
        notes_addf(&r->notes, "warning: %s", strbuf_z(&text));
    strbuf_release(&text);
    return rc;
}

/* ---------------------------------------------------------------------------------------------- rows and parts */

static int64_t i_tensor_of(const struct base_module *b)
{
    return b->i_weight >= 0 ? b->i_weight : b->i_bias;
}

static int64_t base_rows(const struct resolver *r, const struct base_module *b)
{
    return shape_rows(&r->names.ckpt->tensors[i_tensor_of(b)].shape);
}

/* The rows that the file has for each slot of each fused tensor; 0: no adapter for it. */
static int collect_slot_rows(struct resolver *r)
{
    size_t n = r->names.ckpt->n_tensors;
    for (size_t i = 0; i < r->a->n_modules; i++) {
        const struct place *p = &r->places[i];
        const struct ad_module *m = &r->a->modules[i];
        if (p->kind != PLACE_SLOT)
            continue;
        if (r->slot_rows == NULL && (r->slot_rows = mem_calloc(n, sizeof *r->slot_rows)) == NULL)
            return err_nomem(r->err, n * sizeof *r->slot_rows, "parts of fused tensors");
        int64_t *rows = &r->slot_rows[i_tensor_of(&p->parts[0])][p->slot];
        if (*rows != 0 && *rows != m->rows)
            return err_set(r->err, PF_E_MISMATCH,
                           "adapter '%s': '%s' changes %lld rows, another module for the same part "
                           "%lld",
                           path_of(r), m->name.p, (long long)m->rows, (long long)*rows);
        *rows = m->rows;
    }
    return PF_OK;
}

/* Of q, k and v one is not in the file: k has as many rows as v, so the other two say how many it has, or contradict the base. */
static void infer_missing(int64_t rows[PLACE_PARTS_MAX], uint32_t n_slots, int64_t total)
{
    int64_t q = rows[0], k = rows[1], v = rows[2];
    if (n_slots != 3 || (q == 0) + (k == 0) + (v == 0) != 1)
        return;
    int64_t kv = k > 0 ? k : v;
    if (q == 0 && k == v && kv < total / 2)
        rows[0] = total - 2 * kv;
    else if (q > 0 && kv < total / 2 && q == total - 2 * kv)
        rows[1] = rows[2] = kv;
}

/* Where a part's rows begin: from the sizes of all parts when they are known, else equal shares or nothing. */
static int find_slot_rows(struct resolver *r, size_t i_module, struct rows *out)
{
    const struct place *p = &r->places[i_module];
    const struct ad_module *m = &r->a->modules[i_module];
    const struct base_module *b = &p->parts[0];
    int64_t rows[PLACE_PARTS_MAX], total = base_rows(r, b), sum = 0, row0 = 0;
    memcpy(rows, r->slot_rows[i_tensor_of(b)], sizeof rows);
    infer_missing(rows, p->n_slots, total);
    bool has_all = true, is_equal = total % p->n_slots == 0;
    for (uint32_t k = 0; k < p->n_slots; k++) {
        has_all &= rows[k] > 0;
        is_equal &= rows[k] == 0 || rows[k] == total / p->n_slots;
        row0 += k < p->slot ? rows[k] : 0;
        sum = rows[k] < INT64_MAX - sum ? sum + rows[k] : INT64_MAX;
    }
    if (!has_all && is_equal)
        row0 = p->slot * (total / p->n_slots);
    if (has_all ? sum != total : !is_equal) {
        struct str name = r->names.ckpt->tensors[i_tensor_of(b)].name;
        return err_set(r->err, PF_E_MISMATCH,
                       "adapter '%s': module '%s' changes %lld rows of part '%s' of the fused "
                       "'%.*s', which has %lld rows: %s",
                       path_of(r), m->name.p, (long long)m->rows, p->slot_name, (int)name.n, name.p,
                       (long long)total,
                       has_all ? "the parts do not add up to it"
                               : "not all parts are in the file and they are not equal shares, so "
                                 "where this one begins is unknown");
    }
    *out = (struct rows){.row0 = row0, .n_rows = m->rows, .is_part = true};
    return PF_OK;
}

static int emit_on(struct resolver *r, const struct emit *e, const struct ad_module *m,
                   const struct base_module *b, const struct rows *rows)
{
    static const enum ad_leaf biases[] = {LEAF_UP_BIAS, LEAF_DIFF_B, LEAF_B_NORM};
    int rc = b->i_weight >= 0 ? emit_weight(e, m, b->i_weight, rows) : PF_OK;
    for (size_t i = 0; rc == PF_OK && i < PF_COUNTOF(biases); i++) {
        int32_t leaf = m->leaf[biases[i]];
        if (leaf >= 0 && !r->is_left_out[leaf])
            rc = emit_bias(e, m, biases[i], b->i_bias, rows);
    }
    return rc;
}

static int emit_spread(struct resolver *r, const struct emit *e, const struct ad_module *m,
                       const struct place *p)
{
    int64_t sum = 0;
    for (uint32_t k = 0; k < p->n_slots; k++)
        sum += base_rows(r, &p->parts[k]);
    if (sum != m->rows)
        return err_set(
            r->err, PF_E_MISMATCH,
            "adapter '%s': module '%s' is fused and changes %lld rows, but the %u tensors "
            "of the base that it covers have %lld",
            path_of(r), m->name.p, (long long)m->rows, p->n_slots, (long long)sum);
    int rc = PF_OK;
    struct rows rows = {.is_part = true};
    for (uint32_t k = 0; rc == PF_OK && k < p->n_slots; k++) {
        rows.n_rows = base_rows(r, &p->parts[k]);
        rc = emit_on(r, e, m, &p->parts[k], &rows);
        rows.src0 += rows.n_rows;
    }
    return rc;
}

static int emit_module(struct resolver *r, const struct emit *e, size_t i)
{
    const struct ad_module *m = &r->a->modules[i];
    const struct place *p = &r->places[i];
    struct rows rows = {.n_rows = m->rows};
    int rc;
    switch (p->kind) {
    case PLACE_WHOLE:
        return emit_on(r, e, m, &p->parts[0], &rows);
    case PLACE_SLOT:
        rc = find_slot_rows(r, i, &rows);
        return rc == PF_OK ? emit_on(r, e, m, &p->parts[0], &rows) : rc;
    case PLACE_SPREAD:
        return emit_spread(r, e, m, p);
    default:
        return PF_OK;
    }
}

static int check_conflicts(const struct resolver *r)
{
    for (size_t i = 0; !r->opts->has_alpha && i < r->a->n_modules; i++) {
        const struct ad_module *m = &r->a->modules[i];
        if (m->conflict != NULL && r->places[i].kind >= PLACE_WHOLE)
            return err_set(r->err, PF_E_CONFLICT,
                           "adapter '%s': module '%s': %s: choose with an explicit alpha",
                           path_of(r), m->name.p, m->conflict);
    }
    return PF_OK;
}

static int emit_all(struct resolver *r)
{
    struct emit e = {.a = r->a,
                     .ckpt = r->names.ckpt,
                     .has_alpha = r->opts->has_alpha,
                     .alpha = r->opts->alpha,
                     .out = &r->deltas,
                     .err = r->err};
    int rc = check_conflicts(r);
    if (rc == PF_OK)
        rc = collect_slot_rows(r);
    for (size_t i = 0; rc == PF_OK && i < r->a->n_modules; i++)
        rc = emit_module(r, &e, i);
    return rc;
}

/* ---------------------------------------------------------------------------------------- one target, two keys */

/* By tensor and rows; of two that begin together the longer first, so that a part follows what contains it. */
static int cmp_delta(const void *pa, const void *pb)
{
    const struct delta *a = pa, *b = pb;
    if (a->i_tensor != b->i_tensor)
        return a->i_tensor < b->i_tensor ? -1 : 1;
    if (a->row0 != b->row0)
        return a->row0 < b->row0 ? -1 : 1;
    if (a->n_rows != b->n_rows)
        return a->n_rows > b->n_rows ? -1 : 1;
    int c = strcmp(a->key, b->key);
    if (c != 0)
        return c;
    return a->f[0].p < b->f[0].p ? -1 : a->f[0].p > b->f[0].p; /* a module's own bias and diff_b */
}

static bool factor_eq(const struct factor *x, int64_t row0, const struct factor *y, int64_t n_rows)
{
    if (x->p == NULL || y->p == NULL)
        return x->p == y->p;
    if (x->dtype != y->dtype || x->n_cols != y->n_cols || x->row_stride != y->row_stride ||
        x->col_stride != y->col_stride || row0 + n_rows > x->n_rows || n_rows > y->n_rows)
        return false;
    size_t size = pf_dtype_bits(x->dtype) / 8;
    if (x->col_stride != 1) /* transposed: contiguous as a whole */
        return row0 == 0 && n_rows == x->n_rows &&
               memcmp(x->p, y->p, (size_t)(x->n_rows * x->n_cols) * size) == 0;
    return memcmp(x->p + (size_t)(row0 * x->row_stride) * size, y->p,
                  (size_t)(n_rows * x->n_cols) * size) == 0;
}

/* Does `part` say of its rows exactly what `all` says of them? Row ranges inside a Kronecker product are not compared. */
static bool says_the_same(const struct delta *all, const struct delta *part)
{
    if (all->kind != part->kind || all->rank != part->rank || all->scale != part->scale)
        return false;
    int64_t row0 = part->row0 - all->row0;
    if (all->kind == DELTA_LOKR) {
        if (row0 != 0 || all->n_rows != part->n_rows)
            return false;
        for (int i = 0; i < 4; i++)
            if (!factor_eq(&all->f[i], 0, &part->f[i], all->f[i].n_rows))
                return false;
        return true;
    }
    for (int i = 0; i < 4; i++) {
        bool is_left = i % 2 == 0;
        if (!factor_eq(&all->f[i], is_left ? row0 : 0, &part->f[i],
                       is_left ? part->n_rows : all->f[i].n_rows))
            return false;
    }
    return true;
}

static int merge_duplicates(struct resolver *r)
{
    struct delta_list *l = &r->deltas;
    size_t n = 0;
    if (l->n > 0)
        qsort(l->items, l->n, sizeof *l->items, cmp_delta);
    for (size_t i = 0; i < l->n; i++) {
        const struct delta *last = n > 0 ? &l->items[n - 1] : NULL, *d = &l->items[i];
        if (last == NULL || last->i_tensor != d->i_tensor || d->row0 >= last->row0 + last->n_rows) {
            l->items[n++] = *d;
            continue;
        }
        const struct ckpt_tensor *w = &r->names.ckpt->tensors[d->i_tensor];
        if (d->row0 + d->n_rows > last->row0 + last->n_rows || !says_the_same(last, d))
            return err_set(
                r->err, PF_E_CONFLICT,
                "adapter '%s': '%s' and '%s' both change rows %lld to %lld of '%.*s', and "
                "they differ",
                path_of(r), last->key, d->key, (long long)d->row0, (long long)(d->row0 + d->n_rows),
                (int)w->name.n, w->name.p);
        notes_addf(&r->notes, "'%s' says of '%.*s' what '%s' says: used once", d->key,
                   (int)w->name.n, w->name.p, last->key);
    }
    l->n = n;
    return PF_OK;
}

/* ---------------------------------------------------------------------------------------------------- public */

/* NULL in *out: every component, named or not. Owned by caller. */
static int find_targets(const struct pf_checkpoint *ckpt, const char *target, bool **out,
                        pf_error *err)
{
    bool *is_named = mem_calloc(ckpt->n_components + 1, sizeof *is_named), is_all = true;
    int rc = is_named ? target_list_parse(ckpt, target, is_named, err)
                      : err_nomem(err, ckpt->n_components, "targets");
    for (uint32_t c = 0; rc == PF_OK && c < ckpt->n_components; c++)
        is_all &= is_named[c];
    /* A list of everything means what `all` means; but where there is one component, to name it is to leave out what is for others. */
    bool is_said = target != NULL && *target != '\0' && strcmp(target, "all") != 0;
    if (rc || (is_all && !(is_said && ckpt->n_components == 1))) {
        mem_free(is_named);
        is_named = NULL;
    }
    *out = is_named;
    return rc;
}

static void copy_notes(struct ad_notes *to, const struct ad_notes *from)
{
    for (size_t i = 0; i < from->n; i++)
        notes_addf(to, "%s", from->items[i]);
}

static int finish(struct resolver *r, struct resolution *out)
{
    copy_notes(&r->notes, &r->a->notes);
    scales_remark(r->a, r->opts->has_alpha, r->opts->alpha, &r->notes);
    if (r->n_elsewhere > 0)
        notes_addf(&r->notes, "what is for other components than '%s' is left out: %zu module%s",
                   r->opts->target, r->n_elsewhere, r->n_elsewhere == 1 ? "" : "s");
    if (r->notes.is_failed)
        return err_nomem(r->err, 0, "notes");
    uint32_t n_matched = 0;
    for (size_t i = 0; i < r->a->n_tensors; i++)
        n_matched += is_matched(r, i);
    *out =
        (struct resolution){.deltas = r->deltas.items,
                            .n_deltas = r->deltas.n,
                            .unmatched = r->unmatched,
                            .n_unmatched = r->n_unmatched,
                            .n_keys_matched = n_matched,
                            .notes = r->notes.items,
                            .n_notes = r->notes.n,
                            .alpha_effective = r->opts->has_alpha ? r->opts->alpha : (double)NAN};
    return PF_OK;
}

static int resolve(struct resolver *r, struct resolution *out)
{
    size_t n_modules = r->a->n_modules, n_tensors = r->a->n_tensors;
    r->places = mem_calloc(n_modules > 0 ? n_modules : 1, sizeof *r->places);
    r->is_left_out = mem_calloc(n_tensors > 0 ? n_tensors : 1, sizeof *r->is_left_out);
    if (r->places == NULL || r->is_left_out == NULL)
        return err_nomem(r->err, n_modules * sizeof *r->places, "places");
    int rc = place_modules(r);
    if (rc == PF_OK)
        rc = list_unmatched(r);
    if (rc == PF_OK)
        rc = judge_unknown(r);
    if (rc == PF_OK)
        rc = report_unmatched(r);
    if (rc == PF_OK)
        rc = emit_all(r);
    if (rc == PF_OK)
        rc = merge_duplicates(r);
    if (rc == PF_OK)
        rc = finish(r, out);
    return rc;
}

int adapter_resolve(const struct pf_adapter *a, const struct pf_checkpoint *ckpt,
                    const struct resolve_opts *opts, struct resolution *out, pf_error *err)
{
    static const struct resolve_opts none = {0};
    struct resolver r = {.a = a, .opts = opts != NULL ? opts : &none, .err = err};
    bool *is_target;
    int rc = find_targets(ckpt, r.opts->target, &is_target, err);
    if (rc == PF_OK)
        rc = base_names_init(&r.names, ckpt, is_target, err);
    if (rc != PF_OK) {
        mem_free(is_target);
        return rc;
    }
    rc = resolve(&r, out);
    if (rc != PF_OK) {
        mem_free(r.deltas.items);
        mem_free(r.unmatched);
        notes_release(&r.notes);
    }
    mem_free(r.places);
    mem_free(r.slot_rows);
    mem_free(r.is_left_out);
    base_names_release(&r.names);
    mem_free(is_target);
    return rc;
}

void resolution_release(struct resolution *r)
{
    if (r == NULL)
        return;
    mem_free(r->deltas);
    mem_free(r->unmatched);
    for (size_t i = 0; i < r->n_notes; i++)
        mem_free(r->notes[i]);
    mem_free(r->notes);
    *r = (struct resolution){0};
}
