/*
 * What is remembered per target (component): entries in the order of `set`, whether they act, and the factor of the last `merge`. Turns
 * all targets together into one composition. Called by the operations, under the engine's mutex. Must never change a state that a
 * failed operation leaves behind: operations work on copies.
 */
#include <math.h>
#include <string.h>

#include "engine/engine_int.h"

void target_release(struct target_state *t)
{
    for (size_t i = 0; i < t->n_entries; i++) {
        mem_free(t->entries[i].nickname);
        pf_adapter_close(t->entries[i].adapter);
    }
    mem_free(t->entries);
    *t = (struct target_state){.factor = 1};
}

int target_entries_copy(const struct target_state *from, struct target_state *to, pf_error *err)
{
    struct target_state t = {.phase = from->phase, .factor = from->factor};
    t.entries = mem_calloc(from->n_entries + 1, sizeof *t.entries);
    if (!t.entries)
        return err_nomem(err, from->n_entries * sizeof *t.entries, "a target");
    for (size_t i = 0; i < from->n_entries; i++) {
        struct target_entry e = from->entries[i];
        e.nickname = mem_strdup(e.nickname);
        if (!e.nickname) {
            target_release(&t);
            return err_nomem(err, 0, "a nickname");
        }
        adapter_ref(e.adapter);
        t.entries[t.n_entries++] = e;
    }
    *to = t;
    return PF_OK;
}

static int check_lora(struct pf_engine *e, const struct pf_engine_lora *l, pf_error *err)
{
    if (!l->nickname || !registry_find(e, l->nickname))
        return err_set(err, PF_E_NOTFOUND,
                       "no adapter is loaded as '%s': load it with its path first",
                       l->nickname ? l->nickname : "");
    if (!isfinite(l->strength))
        return err_set(err, PF_E_INVALID, "strength %g of '%s' is not a finite number", l->strength,
                       l->nickname);
    if (l->has_alpha && !isfinite(l->alpha))
        return err_set(err, PF_E_INVALID, "alpha %g of '%s' is not a finite number", l->alpha,
                       l->nickname);
    return PF_OK;
}

static int append(struct target_state *t, const struct pf_engine_lora *l, struct pf_adapter *a,
                  pf_error *err)
{
    char *nickname = mem_strdup(l->nickname);
    struct target_entry *grown =
        nickname ? mem_realloc_array(t->entries, t->n_entries + 1, sizeof *grown) : NULL;
    if (!grown) {
        mem_free(nickname);
        return err_nomem(err, sizeof *grown, "a target");
    }
    adapter_ref(a);
    t->entries = grown;
    t->entries[t->n_entries++] = (struct target_entry){.nickname = nickname,
                                                       .adapter = a,
                                                       .strength = l->strength,
                                                       .alpha = l->alpha,
                                                       .has_alpha = l->has_alpha};
    t->phase = TARGET_ACTIVE;
    return PF_OK;
}

int targets_add(struct pf_engine *e, struct target_state *targets, const bool *limit,
                const struct pf_engine_lora *l, pf_error *err)
{
    uint32_t n = e->ckpt->n_components;
    bool *named = mem_calloc(n + 1, sizeof *named), is_any = false;
    int rc = named ? check_lora(e, l, err) : err_nomem(err, n, "targets");
    if (rc == PF_OK)
        rc = target_list_parse(e->ckpt, l->target, named, err);
    for (uint32_t c = 0; rc == PF_OK && c < n; c++) {
        if (!named[c] || (limit && !limit[c]))
            continue;
        is_any = true;
        rc = append(&targets[c], l, registry_find(e, l->nickname)->adapter, err);
    }
    if (rc == PF_OK && !is_any)
        rc = err_set(err, PF_E_INVALID,
                     "adapter '%s' is for target '%s', which this change is not about", l->nickname,
                     l->target);
    mem_free(named);
    return rc;
}

/* ----------------------------------------------------------------------------------------- compose */

struct lora_list {
    struct pf_lora *loras;
    struct strbuf *targets; /* one list per lora */
    size_t n, n_max;
};

static void list_release(struct lora_list *l)
{
    for (size_t i = 0; l->targets && i < l->n; i++)
        strbuf_release(&l->targets[i]);
    mem_free(l->loras);
    mem_free(l->targets);
}

static bool is_in_list(const struct strbuf *list, struct str component)
{
    struct str rest = str_of(strbuf_z(list));
    while (rest.n) {
        const char *comma = memchr(rest.p, ',', rest.n);
        struct str name = {rest.p, comma ? (size_t)(comma - rest.p) : rest.n};
        if (str_eq(name, component))
            return true;
        rest = str_cut_front(rest, comma ? name.n + 1 : name.n);
    }
    return false;
}

/* Joins equal entries of different components, so that "all" and a list of everything are one entry; the same adapter twice in one
 * component stays two. */
static void list_add(struct lora_list *l, const struct target_entry *e, double factor,
                     const char *component)
{
    double strength = e->strength * factor;
    for (size_t i = 0; i < l->n; i++) {
        const struct pf_lora *have = &l->loras[i];
        if (have->adapter == e->adapter && have->strength == strength &&
            have->has_alpha == e->has_alpha && (!e->has_alpha || have->alpha == e->alpha) &&
            !is_in_list(&l->targets[i], str_of(component))) {
            strbuf_addf(&l->targets[i], ",%s", component);
            return;
        }
    }
    l->loras[l->n] = (struct pf_lora){
        .adapter = e->adapter, .strength = strength, .has_alpha = e->has_alpha, .alpha = e->alpha};
    strbuf_init(&l->targets[l->n]);
    strbuf_adds(&l->targets[l->n++], component);
}

static bool names_all(const struct pf_checkpoint *ckpt, const struct strbuf *list)
{
    for (uint32_t c = 0; c < ckpt->n_components; c++)
        if (!is_in_list(list, str_of(ckpt->components[c].name)))
            return false;
    return true;
}

static bool acts_on(const struct pf_composition *comp, const struct pf_adapter *a,
                    uint32_t i_component)
{
    for (size_t i = 0; i < comp->n_entries; i++) {
        const struct resolution *r = &comp->entries[i].res;
        for (size_t k = 0; comp->entries[i].adapter == a && k < r->n_deltas; k++)
            if (comp->ckpt->tensors[r->deltas[k].i_tensor].i_component == i_component)
                return true;
    }
    return false;
}

static bool has_entry(const struct target_state *t, const struct pf_adapter *a)
{
    for (size_t i = 0; i < t->n_entries; i++)
        if (t->entries[i].adapter == a)
            return true;
    return false;
}

int targets_check(const struct pf_composition *comp, const struct target_state *targets,
                  const bool *is_named, pf_error *err)
{
    uint32_t n = comp->ckpt->n_components;
    for (uint32_t c = 0; c < n; c++)
        for (size_t i = 0; is_named[c] && i < targets[c].n_entries; i++) {
            const struct pf_adapter *a = targets[c].entries[i].adapter;
            bool is_any = false;
            for (uint32_t k = 0; !is_any && k < n; k++)
                is_any = is_named[k] && has_entry(&targets[k], a) && acts_on(comp, a, k);
            if (!is_any)
                return err_set(err, PF_E_UNMATCHED,
                               "adapter '%s': nothing matches the base with target '%s'",
                               adapter_path(a), comp->ckpt->components[c].name);
        }
    return PF_OK;
}

void targets_prune(const struct pf_composition *comp, struct target_state *targets)
{
    for (uint32_t c = 0; c < comp->ckpt->n_components; c++) {
        struct target_state *t = &targets[c];
        size_t n = 0;
        if (t->phase != TARGET_ACTIVE)
            continue;
        for (size_t i = 0; i < t->n_entries; i++) {
            if (acts_on(comp, t->entries[i].adapter, c)) {
                t->entries[n++] = t->entries[i];
            } else {
                mem_free(t->entries[i].nickname);
                pf_adapter_close(t->entries[i].adapter);
            }
        }
        t->n_entries = n;
        if (n == 0)
            target_release(t);
    }
}

/* Mapped bytes that were written to since they were digested are not what their names say. */
static int check_files(struct pf_checkpoint *ckpt, const struct lora_list *l, pf_error *err)
{
    int rc = ckpt_verify_again(ckpt, err);
    if (rc && err)
        err_append(err, ": nothing is changed; start again with the file as it is now");
    for (size_t i = 0; rc == PF_OK && i < l->n; i++)
        rc = adapter_check(l->loras[i].adapter, err);
    return rc;
}

int targets_compose(struct pf_checkpoint *ckpt, const struct target_state *targets,
                    const struct pf_composition_opts *opts, struct pf_composition **out,
                    pf_error *err)
{
    struct lora_list l = {0};
    for (uint32_t c = 0; c < ckpt->n_components; c++)
        l.n_max += targets[c].n_entries;
    l.loras = mem_calloc(l.n_max + 1, sizeof *l.loras);
    l.targets = mem_calloc(l.n_max + 1, sizeof *l.targets);
    if (!l.loras || !l.targets) {
        list_release(&l);
        return err_nomem(err, l.n_max * sizeof *l.loras, "a composition");
    }
    for (uint32_t c = 0; c < ckpt->n_components; c++)
        if (targets[c].phase == TARGET_ACTIVE)
            for (size_t i = 0; i < targets[c].n_entries; i++)
                list_add(&l, &targets[c].entries[i], targets[c].factor, ckpt->components[c].name);
    int rc = check_files(ckpt, &l, err);
    for (size_t i = 0; rc == PF_OK && i < l.n; i++) {
        l.loras[i].target = names_all(ckpt, &l.targets[i]) ? NULL : strbuf_z(&l.targets[i]);
        if (!strbuf_ok(&l.targets[i]))
            rc = err_nomem(err, 0, "a target list");
    }
    if (rc == PF_OK)
        rc = pf_composition_new(ckpt, l.loras, l.n, opts, out, err);
    list_release(&l);
    return rc;
}
