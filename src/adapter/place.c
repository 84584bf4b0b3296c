/*
 * Names of a module against names of a base. Every candidate spelling is tried, in the order of dialect_candidates, in every
 * component that its prefix addresses; two that lead to different tensors are an ambiguity, never a choice. Flattened names are
 * looked up whole among the flattened base names: nobody turns an underscore back into a dot. Only when nothing answers are
 * the fused and split tables asked.
 */
#include "adapter/place.h"

#include <stdlib.h>
#include <string.h>

#define NAME_BYTES_MAX 1280u
#define HITS_MAX       4u

/* What a checkpoint may have in front of the names that everybody else uses. */
static const char *const base_prefixes[] = {"", "model.diffusion_model.", "diffusion_model.",
                                            "transformer.", "unet."};

/* Siblings that some bases keep as one tensor, rows in this order. Only layouts whose rows are whole blocks: bases that
 * interleave heads (query_key_value) or pairs need a table per model. */
struct fusion {
    const char *fused;
    const char *parts[PLACE_PARTS_MAX + 1];
};

static const struct fusion fusions[] = {
    {"to_qkv", {"to_q", "to_k", "to_v"}},
    {"to_kv", {"to_k", "to_v"}},
    {"to_added_qkv", {"add_q_proj", "add_k_proj", "add_v_proj"}},
    {"qkv", {"to_q", "to_k", "to_v"}},
    {"qkv", {"q_proj", "k_proj", "v_proj"}},
    {"qkv", {"q", "k", "v"}},
    {"kv", {"k", "v"}},
    {"qkv_proj", {"q_proj", "k_proj", "v_proj"}},
    {"W_pack", {"q_proj", "k_proj", "v_proj"}},
    {"in_proj_weight", {"q_proj", "k_proj", "v_proj"}},
    {"in_proj", {"q_proj", "k_proj", "v_proj"}},
    {"gate_up_proj", {"gate_proj", "up_proj"}},
};

/* A name under construction. */
struct name {
    char p[NAME_BYTES_MAX];
    size_t n;
    bool is_cut;
};

static void name_add(struct name *name, struct str s)
{
    if (name->is_cut || s.n > sizeof name->p - name->n) {
        name->is_cut = true;
        return;
    }
    memcpy(name->p + name->n, s.p, s.n);
    name->n += s.n;
}

static struct str name_str(const struct name *name)
{
    return (struct str){name->p, name->n};
}

/* ------------------------------------------------------------------------------------------ flattened names */

static int cmp_flat(const void *pa, const void *pb)
{
    const struct flat_name *a = pa, *b = pb;
    int c = str_cmp(a->flat, b->flat);
    if (c != 0)
        return c;
    if (a->i_component != b->i_component)
        return a->i_component < b->i_component ? -1 : 1;
    return str_cmp(a->path, b->path);
}

static struct str module_of(struct str tensor)
{
    if (str_ends(tensor, ".weight"))
        return str_cut_back(tensor, 7);
    if (str_ends(tensor, ".bias"))
        return str_cut_back(tensor, 5);
    return tensor;
}

/* An entry for path without its first n_prefix and its last n_tail bytes. */
static bool add_flat(struct base_names *b, size_t n_prefix, size_t n_tail, struct str path,
                     uint32_t i_component)
{
    struct str rest = str_cut_back(str_cut_front(path, n_prefix), n_tail);
    char *flat = arena_strndup(&b->arena, rest.p, rest.n);
    if (flat == NULL)
        return false;
    for (size_t i = 0; i < rest.n; i++)
        if (flat[i] == '.')
            flat[i] = '_';
    b->flat[b->n_flat++] =
        (struct flat_name){.flat = {flat, rest.n}, .path = path, .i_component = i_component};
    return true;
}

static bool add_names(struct base_names *b, struct str path, uint32_t i_component)
{
    size_t n_prefix = 0, n_tail = str_ends(path, ".in_proj_weight") ? 7 : 0; /* also `in_proj` */
    for (size_t k = 1; k < PF_COUNTOF(base_prefixes) && n_prefix == 0; k++)
        if (str_starts(path, base_prefixes[k]))
            n_prefix = strlen(base_prefixes[k]);
    bool is_good = add_flat(b, 0, 0, path, i_component);
    if (is_good && n_prefix > 0)
        is_good = add_flat(b, n_prefix, 0, path, i_component);
    if (is_good && n_tail > 0)
        is_good = add_flat(b, 0, n_tail, path, i_component);
    if (is_good && n_prefix > 0 && n_tail > 0)
        is_good = add_flat(b, n_prefix, n_tail, path, i_component);
    return is_good;
}

int base_names_init(struct base_names *b, const struct pf_checkpoint *ckpt, const bool *is_target,
                    pf_error *err)
{
    *b = (struct base_names){.ckpt = ckpt, .is_target = is_target};
    arena_init(&b->arena);
    b->flat = mem_calloc((size_t)ckpt->n_tensors * 4 + 1, sizeof *b->flat);
    bool is_good = b->flat != NULL;
    for (uint32_t i = 0; is_good && i < ckpt->n_tensors; i++) {
        const struct ckpt_tensor *t = &ckpt->tensors[i];
        is_good = add_names(b, module_of(t->name), t->i_component);
    }
    if (!is_good) {
        base_names_release(b);
        return err_nomem(err, (size_t)ckpt->n_tensors * sizeof *b->flat, "the names of a base");
    }
    qsort(b->flat, b->n_flat, sizeof *b->flat, cmp_flat);
    size_t n = 0; /* weight and bias gave the same module */
    for (size_t i = 0; i < b->n_flat; i++)
        if (n == 0 || cmp_flat(&b->flat[n - 1], &b->flat[i]) != 0)
            b->flat[n++] = b->flat[i];
    b->n_flat = n;
    return PF_OK;
}

void base_names_release(struct base_names *b)
{
    mem_free(b->flat);
    arena_release(&b->arena);
    *b = (struct base_names){0};
}

/* The first entry whose flat name is not smaller. */
static size_t flat_lower(const struct base_names *b, struct str flat)
{
    size_t lo = 0, hi = b->n_flat;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (str_cmp(b->flat[mid].flat, flat) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* ------------------------------------------------------------------------------------ who is being addressed */

static bool is_text_encoder(const char *component)
{
    return strncmp(component, "text_encoder", 12) == 0;
}

static bool has_component(const struct pf_checkpoint *ckpt, const char *name)
{
    return ckpt_component_find(ckpt, str_of(name)) >= 0;
}

/* Which text encoder is meant, by the name of its component. */
static bool te_allows(const struct pf_checkpoint *ckpt, enum ad_role role, const char *component)
{
    const char *wanted = "text_encoder";
    if (role == AD_TE_ANY)
        return is_text_encoder(component);
    if (role == AD_TE_3)
        wanted = has_component(ckpt, "text_encoder_3") ? "text_encoder_3" : "text_encoder_2";
    else if (role == AD_TE_2 ||
             !has_component(ckpt, wanted)) /* an SDXL refiner has the second alone */
        wanted = "text_encoder_2";
    return strcmp(component, wanted) == 0;
}

/* May this candidate name something in component i? */
static bool allows(const struct base_names *b, const struct ad_candidate *c, uint32_t i)
{
    const struct pf_checkpoint *ckpt = b->ckpt;
    const char *component = ckpt->components[i].name;
    if (b->is_target && !b->is_target[i])
        return false;
    if (c->role == AD_ANY || (c->is_whole && ckpt->n_components == 1))
        return true;
    if (c->role >= AD_TE)
        return te_allows(ckpt, c->role, component);
    if (is_text_encoder(component))
        return false;
    if (c->role == AD_DENOISER || b->is_target || ckpt->n_components == 1)
        return true;
    /* A component's own name means it alone; a name that nobody has means whatever draws. */
    return str_eqz(c->component, component) || ckpt_component_find(ckpt, c->component) < 0;
}

/* Would it name something if no target had been asked for? */
static bool is_elsewhere(const struct base_names *b, const struct ad_candidate *c, size_t n)
{
    for (size_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < b->ckpt->n_components; k++)
            if (allows(b, &c[i], k) && !(c[i].is_whole && c[i].role >= AD_TE))
                return false;
    return b->is_target != NULL;
}

/* --------------------------------------------------------------------------------------------- looking one up */

struct hits {
    const struct base_names *b;
    struct base_module items[HITS_MAX];
    size_t n;
};

static void hit(struct hits *h, struct base_module m)
{
    for (size_t i = 0; i < h->n; i++)
        if (h->items[i].i_weight == m.i_weight && h->items[i].i_bias == m.i_bias)
            return;
    if (h->n < HITS_MAX)
        h->items[h->n++] = m;
}

static int64_t find_joined(const struct hits *h, uint32_t i_component, struct str path,
                           const char *tail)
{
    struct name name = {.n = 0};
    name_add(&name, path);
    name_add(&name, str_of(tail));
    return name.is_cut ? -1 : ckpt_find(h->b->ckpt, i_component, name_str(&name));
}

/* `path.weight`, a bare parameter `path`, or nn.MultiheadAttention's `path.in_proj_weight`; and the bias beside it. */
static bool hit_path(struct hits *h, uint32_t i_component, struct str path)
{
    struct base_module m = {find_joined(h, i_component, path, ".weight"),
                            find_joined(h, i_component, path, ".bias")};
    if (m.i_weight < 0) {
        m.i_weight = find_joined(h, i_component, path, "");
        if (m.i_weight >= 0 && str_ends(path, ".in_proj_weight"))
            m.i_bias = find_joined(h, i_component, str_cut_back(path, 6), "bias");
    }
    if (m.i_weight < 0 && m.i_bias < 0) {
        bool is_named = str_ends(path, ".in_proj"); /* a Linear elsewhere, two parameters here */
        m.i_weight = find_joined(h, i_component, path, is_named ? "_weight" : ".in_proj_weight");
        m.i_bias = find_joined(h, i_component, path, is_named ? "_bias" : ".in_proj_bias");
    }
    if (m.i_weight < 0 && m.i_bias < 0)
        return false;
    hit(h, m);
    return true;
}

/* The path without `.processor` (old diffusers) and `.base_layer` (PEFT around nn.MultiheadAttention). */
static void clean_path(struct name *out, struct str path)
{
    static const char *const dropped[] = {".processor.", ".base_layer."};
    size_t i = 0;
    if (str_ends(path, ".base_layer"))
        path = str_cut_back(path, strlen(".base_layer"));
    while (i < path.n) {
        size_t n_skip = 0;
        for (size_t k = 0; k < PF_COUNTOF(dropped); k++)
            if (str_starts(str_cut_front(path, i), dropped[k]))
                n_skip = strlen(dropped[k]) - 1;
        if (n_skip > 0)
            i += n_skip;
        else
            name_add(out, (struct str){path.p + i++, 1});
    }
}

static void look_up_dotted(struct hits *h, uint32_t i_component, struct str path)
{
    struct name clean = {.n = 0};
    clean_path(&clean, path);
    if (clean.is_cut)
        return;
    for (size_t k = 0; k < PF_COUNTOF(base_prefixes); k++) {
        struct name name = {.n = 0};
        name_add(&name, str_of(base_prefixes[k]));
        size_t n_prefix = name.n;
        name_add(&name, path);
        bool is_found = !name.is_cut && hit_path(h, i_component, name_str(&name));
        if (is_found || name.is_cut || (clean.n == path.n && !str_ends(path, ".to_out")))
            continue;
        name.n = n_prefix;
        name_add(&name, name_str(&clean));
        if (hit_path(h, i_component, name_str(&name)) || !str_ends(name_str(&name), ".to_out"))
            continue;
        name_add(&name, str_of(".0")); /* old diffusers left the Sequential's index out */
        if (!name.is_cut)
            (void)hit_path(h, i_component, name_str(&name)); /* hits are counted in h */
    }
}

static void look_up_flat(struct hits *h, const struct ad_candidate *c, struct str path)
{
    struct name flat = {.n = 0};
    name_add(&flat, path);
    for (size_t i = 0; i < flat.n; i++)
        if (flat.p[i] == '.')
            flat.p[i] = '_';
    if (flat.is_cut)
        return;
    const struct base_names *b = h->b;
    for (size_t i = flat_lower(b, name_str(&flat));
         i < b->n_flat && str_eq(b->flat[i].flat, name_str(&flat)); i++)
        if (allows(b, c, b->flat[i].i_component))
            (void)hit_path(h, b->flat[i].i_component, b->flat[i].path); /* counted in h */
}

static void look_up(struct hits *h, const struct ad_candidate *c, struct str path)
{
    if (c->is_flat) {
        look_up_flat(h, c, path);
        return;
    }
    const struct pf_checkpoint *ckpt = h->b->ckpt;
    for (uint32_t i = 0; i < ckpt->n_components; i++) {
        if (!allows(h->b, c, i))
            continue;
        look_up_dotted(h, i, path);
        /* `controlnet.x`: a first segment that is a component's name addresses it, known prefix or not. */
        struct str component = str_of(ckpt->components[i].name);
        if (ckpt->n_components > 1 && c->role == AD_ANY && path.n > component.n + 1 &&
            path.p[component.n] == '.' && memcmp(path.p, component.p, component.n) == 0)
            look_up_dotted(h, i, str_cut_front(path, component.n + 1));
    }
}

/* All candidates, their paths ending in `to` instead of `from` where given ("" keeps them; nothing otherwise). */
static void look_up_all(struct hits *h, const struct ad_candidate *c, size_t n, const char *from,
                        const char *to)
{
    for (size_t i = 0; i < n; i++) {
        struct str path = c[i].path;
        size_t n_from = strlen(from);
        if (n_from > 0) {
            if (path.n < n_from || !str_ends(path, from))
                continue;
            char before = path.n > n_from ? path.p[path.n - n_from - 1] : '.';
            if (before != '.' && before != '_')
                continue;
        }
        struct name name = {.n = 0};
        name_add(&name, str_cut_back(path, n_from));
        name_add(&name, str_of(to));
        if (!name.is_cut)
            look_up(h, &c[i], name_str(&name));
    }
}

/* ----------------------------------------------------------------------------------------------- whole places */

static struct str base_name(const struct base_names *b, const struct base_module *m)
{
    return b->ckpt->tensors[m->i_weight >= 0 ? m->i_weight : m->i_bias].name;
}

static const char *base_component(const struct base_names *b, const struct base_module *m)
{
    const struct ckpt_tensor *t = &b->ckpt->tensors[m->i_weight >= 0 ? m->i_weight : m->i_bias];
    return b->ckpt->components[t->i_component].name;
}

static int ambiguous(const struct base_names *b, const char *path, const struct ad_module *m,
                     const struct base_module *x, const struct base_module *y, pf_error *err)
{
    const char *cx = base_component(b, x), *cy = base_component(b, y);
    struct str nx = base_name(b, x), ny = base_name(b, y);
    return err_set(err, PF_E_AMBIGUOUS,
                   "adapter '%s': module '%s' may mean '%.*s' of '%s' or '%.*s' of '%s'%s", path,
                   m->name.p, (int)nx.n, nx.p, cx, (int)ny.n, ny.p, cy,
                   strcmp(cx, cy) != 0 ? ": say which component with target=" : "");
}

/* Rows of a fused base tensor: the tables that know this module as a part. */
static int find_slot(const struct base_names *b, const char *path, const struct ad_module *m,
                     const struct ad_candidate *c, size_t n, struct place *out, pf_error *err)
{
    for (size_t i = 0; i < PF_COUNTOF(fusions); i++)
        for (uint32_t k = 0; k < PLACE_PARTS_MAX && fusions[i].parts[k] != NULL; k++) {
            struct hits h = {.b = b};
            look_up_all(&h, c, n, fusions[i].parts[k], fusions[i].fused);
            if (h.n > 1)
                return ambiguous(b, path, m, &h.items[0], &h.items[1], err);
            if (h.n == 0)
                continue;
            if (out->kind == PLACE_SLOT && out->parts[0].i_weight != h.items[0].i_weight)
                return ambiguous(b, path, m, &out->parts[0], &h.items[0], err);
            if (out->kind == PLACE_SLOT)
                continue;
            uint32_t n_slots = fusions[i].parts[2] != NULL ? 3 : 2;
            *out = (struct place){.kind = PLACE_SLOT,
                                  .parts = {h.items[0]},
                                  .slot = k,
                                  .n_slots = n_slots,
                                  .slot_name = fusions[i].parts[k]};
        }
    return PF_OK;
}

/* A fused module on a base that keeps its parts apart: all of them must be there. */
static int find_spread(const struct base_names *b, const char *path, const struct ad_module *m,
                       const struct ad_candidate *c, size_t n, struct place *out, pf_error *err)
{
    for (size_t i = 0; i < PF_COUNTOF(fusions); i++) {
        struct place found = {.kind = PLACE_SPREAD};
        for (uint32_t k = 0; k < PLACE_PARTS_MAX && fusions[i].parts[k] != NULL; k++) {
            struct hits h = {.b = b};
            look_up_all(&h, c, n, fusions[i].fused, fusions[i].parts[k]);
            if (h.n > 1)
                return ambiguous(b, path, m, &h.items[0], &h.items[1], err);
            if (h.n == 0) {
                found.kind = PLACE_NONE;
                break;
            }
            found.parts[found.n_slots++] = h.items[0];
        }
        if (found.kind == PLACE_NONE)
            continue;
        if (out->kind == PLACE_SPREAD && out->parts[0].i_weight != found.parts[0].i_weight)
            return ambiguous(b, path, m, &out->parts[0], &found.parts[0], err);
        if (out->kind != PLACE_SPREAD)
            *out = found;
    }
    return PF_OK;
}

int place_find(const struct base_names *b, const char *path, const struct ad_module *m,
               struct place *out, pf_error *err)
{
    struct ad_candidate c[AD_CANDIDATES_MAX];
    size_t n = dialect_candidates(m->name, c);
    struct hits h = {.b = b};
    *out = (struct place){.kind = PLACE_NONE};
    look_up_all(&h, c, n, "", "");
    if (h.n > 1)
        return ambiguous(b, path, m, &h.items[0], &h.items[1], err);
    if (h.n == 1) {
        *out = (struct place){.kind = PLACE_WHOLE, .parts = {h.items[0]}};
        return PF_OK;
    }
    int rc = find_slot(b, path, m, c, n, out, err);
    if (rc == PF_OK && out->kind == PLACE_NONE)
        rc = find_spread(b, path, m, c, n, out, err);
    if (rc == PF_OK && out->kind == PLACE_NONE && is_elsewhere(b, c, n))
        out->kind = PLACE_ELSEWHERE;
    return rc;
}

/* -------------------------------------------------------------------------------------- keys that are no leaves */

static bool names_module(const struct base_names *b, struct str name, bool exactly)
{
    struct ad_candidate c[AD_CANDIDATES_MAX];
    size_t n = dialect_candidates(name, c);
    struct hits h = {.b = b};
    if (!exactly) {
        look_up_all(&h, c, n, "", "");
        return h.n > 0;
    }
    for (size_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < b->ckpt->n_components; k++)
            for (size_t p = 0; p < PF_COUNTOF(base_prefixes); p++) {
                struct name full = {.n = 0};
                name_add(&full, str_of(base_prefixes[p]));
                name_add(&full, c[i].path);
                if (!full.is_cut && allows(b, &c[i], k) &&
                    ckpt_find(b->ckpt, k, name_str(&full)) >= 0)
                    return true;
            }
    return false;
}

enum key_meaning key_meaning(const struct base_names *b, struct str key, struct str *out_module)
{
    struct ad_candidate c[AD_CANDIDATES_MAX];
    size_t n = dialect_candidates(key, c);
    if (is_elsewhere(b, c, n))
        return KEY_ELSEWHERE;
    if (names_module(b, key, true))
        return KEY_IS_BASE_TENSOR;
    struct str rest = key;
    for (unsigned i = 0; i < 3; i++) { /* `.leaf`, `.leaf.weight`, `.leaf.name.weight` */
        const char *dot = memrchr(rest.p, '.', rest.n);
        if (dot == NULL || dot == rest.p)
            break;
        rest.n = (size_t)(dot - rest.p);
        if (names_module(b, rest, false)) {
            *out_module = rest;
            return KEY_IS_UNKNOWN_LEAF;
        }
    }
    return KEY_UNMATCHED;
}

/* ------------------------------------------------------------------------------------------------ nearest name */

const char *nearest_name(const struct base_names *b, struct str module)
{
    struct ad_candidate c[AD_CANDIDATES_MAX];
    size_t n = dialect_candidates(module, c);
    struct name flat = {.n = 0};
    name_add(&flat, c[n - 1].path);
    if (flat.is_cut)
        return NULL;
    for (size_t i = 0; i < flat.n; i++)
        if (flat.p[i] == '.')
            flat.p[i] = '_';
    size_t best = flat.n / 3 + 1;
    const struct flat_name *found = NULL;
    for (size_t i = 0; i < b->n_flat && best > 0; i++) {
        if (!allows(b, &c[n - 1], b->flat[i].i_component))
            continue;
        size_t d = str_distance(name_str(&flat), b->flat[i].flat, best - 1);
        if (d >= best)
            continue;
        best = d;
        found = &b->flat[i];
    }
    if (found == NULL)
        return NULL;
    struct hits h = {.b = b};
    if (!hit_path(&h, found->i_component, found->path))
        return NULL;
    return base_name(b, &h.items[0]).p; /* NUL-terminated by contract */
}
