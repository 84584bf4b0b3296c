/*
 * Layers from names. A stack is a module with numbered children that look alike (`transformer_blocks.0.`, `.1.`, ...); each
 * child of it is a layer. Going from the front of a name, the first stack decides, so that `net.0.` or `to_out.0` inside a
 * block never become layers. What belongs to no stack is the stem. Called by checkpoint.c, once per component.
 *
 * Numbered children are alike when two of them share the name of a tensor below them. A small Sequential shares names too
 * (`time_embed.0.weight`, `time_embed.2.weight`), but it holds bare weights with gaps where the activations are: not a stack.
 * A single child, `blocks.0.`, is one when at least two modules lie below it.
 */
#include "checkpoint/checkpoint_int.h"

#include <stdlib.h>
#include <string.h>

/* Names are hostile: no deeper recursion than this, the rest is stem. Real names have at most a dozen dots. */
#define DEPTH_MAX 32

struct walk {
    struct arena *arena;
    struct ckpt_entry *entries;
    uint32_t i_component;
    struct ckpt_layer_list *layers;
    bool is_failed;
};

/* Entries [lo, hi) share their first `end` bytes, the last of which is a dot; the segment before it begins at `off`. */
struct group {
    size_t lo, hi, off, end;
    bool is_numbered;
    uint64_t number;
};

/* The group that begins at entry i among [.., hi) which share `off` bytes; end == off when entry i has no more segments. */
static struct group group_at(const struct walk *w, size_t i, size_t hi, size_t off)
{
    struct str name = w->entries[i].name;
    const char *dot = memchr(name.p + off, '.', name.n - off);
    struct group g = {.lo = i, .hi = i + 1, .off = off, .end = off};
    if (dot == NULL)
        return g;
    g.end = (size_t)(dot - name.p) + 1;
    while (g.hi < hi && w->entries[g.hi].name.n >= g.end &&
           memcmp(w->entries[g.hi].name.p + off, name.p + off, g.end - off) == 0)
        g.hi++;
    size_t n_digits = g.end - 1 - off;
    g.is_numbered = n_digits <= 9 && str_to_u64((struct str){name.p + off, n_digits}, &g.number) &&
                    n_digits > 0;
    return g;
}

static struct str rest_of(const struct walk *w, size_t i, const struct group *g)
{
    return str_cut_front(w->entries[i].name, g->end);
}

/* Do two groups share the name of a tensor below them? Both are sorted: one walk. */
static bool share_a_name(const struct walk *w, const struct group *a, const struct group *b)
{
    size_t i = a->lo, j = b->lo;
    while (i < a->hi && j < b->hi) {
        int c = str_cmp(rest_of(w, i, a), rest_of(w, j, b));
        if (c == 0)
            return true;
        if (c < 0)
            i++;
        else
            j++;
    }
    return false;
}

/* How many modules lie directly below the group: 0, 1, or 2 for more. */
static unsigned count_children(const struct walk *w, const struct group *g)
{
    unsigned n = 0;
    for (size_t i = g->lo; i < g->hi && n < 2;) {
        struct group child = group_at(w, i, g->hi, g->end);
        n += child.end > child.off;
        i = child.hi;
    }
    return n;
}

/* Are the numbered children of what [lo, hi) share a stack? */
static bool is_stack(const struct walk *w, size_t lo, size_t hi, size_t off)
{
    struct group last[2] = {{0}, {0}}; /* the two before: stacks may alternate between two kinds */
    uint64_t n = 0, min = UINT64_MAX, max = 0;
    unsigned n_children = 0;
    bool is_alike = false;
    for (size_t i = lo; i < hi;) {
        struct group g = group_at(w, i, hi, off);
        i = g.hi;
        if (!g.is_numbered)
            continue;
        min = g.number < min ? g.number : min;
        max = g.number > max ? g.number : max;
        if (n_children < 2) {
            unsigned c = count_children(w, &g);
            n_children = c > n_children ? c : n_children;
        }
        for (unsigned k = 0; k < 2 && !is_alike; k++)
            is_alike = n > k && share_a_name(w, &last[k], &g);
        last[1] = last[0];
        last[0] = g;
        n++;
    }
    if (n == 1)
        return min == 0 && n_children == 2;
    return n > 1 && is_alike && (n_children > 0 || max - min + 1 == n);
}

static void add_layer(struct walk *w, const struct group *g)
{
    struct ckpt_layer_list *l = w->layers;
    const char *name = arena_strndup(w->arena, w->entries[g->lo].name.p, g->end - 1);
    if (name == NULL || !mem_grow((void **)&l->items, &l->cap, l->n, sizeof *l->items)) {
        w->is_failed = true;
        return;
    }
    l->items[l->n] = (struct ckpt_layer){.name = name, .i_component = w->i_component};
    for (size_t i = g->lo; i < g->hi; i++)
        w->entries[i].i_layer = (uint32_t)l->n;
    l->n++;
}

static void walk_range(struct walk *w, size_t lo, size_t hi, size_t off, unsigned depth)
{
    bool stack = is_stack(w, lo, hi, off);
    for (size_t i = lo; i < hi && !w->is_failed;) {
        struct group g = group_at(w, i, hi, off);
        i = g.hi;
        if (g.end == g.off)
            continue;
        if (stack && g.is_numbered)
            add_layer(w, &g);
        else if (depth < DEPTH_MAX)
            walk_range(w, g.lo, g.hi, g.end, depth + 1);
    }
}

static int cmp_layer(const void *x, const void *y, void *ctx)
{
    const uint32_t *i = x, *j = y;
    const struct ckpt_layer *items = ctx;
    if (items[*i].is_stem != items[*j].is_stem)
        return items[*i].is_stem ? -1 : 1;
    int c = str_cmp_natural(str_of(items[*i].name), str_of(items[*j].name));
    return c != 0 ? c : strcmp(items[*i].name, items[*j].name);
}

/* Puts layers [i0, n) in order and renumbers the entries. */
static int sort_layers(struct ckpt_entry *entries, size_t n_entries, struct ckpt_layer_list *layers,
                       size_t i0, pf_error *err)
{
    size_t n = layers->n - i0;
    uint32_t *order = mem_calloc(n + 1, 2 * sizeof *order);
    struct ckpt_layer *copy = mem_calloc(n + 1, sizeof *copy);
    if (order == NULL || copy == NULL) {
        mem_free(order);
        mem_free(copy);
        return err_nomem(err, n * sizeof *copy, "layers");
    }
    uint32_t *place = order + n + 1;
    memcpy(copy, layers->items + i0, n * sizeof *copy);
    for (size_t i = 0; i < n; i++)
        order[i] = (uint32_t)i;
    qsort_r(order, n, sizeof *order, cmp_layer, copy);
    for (size_t i = 0; i < n; i++) {
        place[order[i]] = (uint32_t)i;
        layers->items[i0 + i] = copy[order[i]];
    }
    for (size_t i = 0; i < n_entries; i++)
        entries[i].i_layer = (uint32_t)i0 + place[entries[i].i_layer - i0];
    mem_free(order);
    mem_free(copy);
    return PF_OK;
}

int ckpt_layers_find(struct arena *a, struct ckpt_entry *entries, size_t n_entries,
                     uint32_t i_component, struct ckpt_layer_list *layers, pf_error *err)
{
    if (n_entries == 0)
        return PF_OK;
    size_t i0 = layers->n, n_stem = 0;
    struct walk w = {.arena = a, .entries = entries, .i_component = i_component, .layers = layers};
    for (size_t i = 0; i < n_entries; i++)
        entries[i].i_layer = CKPT_STEM;
    walk_range(&w, 0, n_entries, 0, 0);
    for (size_t i = 0; i < n_entries; i++) {
        if (entries[i].i_layer == CKPT_STEM) {
            entries[i].i_layer = (uint32_t)layers->n;
            n_stem++;
        }
    }
    if (!w.is_failed && n_stem > 0) {
        if (mem_grow((void **)&layers->items, &layers->cap, layers->n, sizeof *layers->items))
            layers->items[layers->n++] =
                (struct ckpt_layer){.name = "stem", .i_component = i_component, .is_stem = true};
        else
            w.is_failed = true;
    }
    if (w.is_failed)
        return err_nomem(err, layers->n * sizeof *layers->items, "layers");
    return sort_layers(entries, n_entries, layers, i0, err);
}
