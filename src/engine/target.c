/*
 * What is remembered per target (component): entries in the order of `set`, whether they act, and the factor of the last `merge`. Turns
 * all targets together into one composition. Called by the operations, under the engine's mutex. Must never change a state that a
 * failed operation leaves behind: operations work on copies.
 */
#include <string.h>

#include "engine/engine_int.h"

/* Marks the components that a list names; NULL, "" and "all" name every one. */
int targets_parse(const struct pf_checkpoint *ckpt, const char *targets, bool *out_is_named,
                  pf_error *err)
{
    struct str rest = str_of(targets ? targets : "all");
    bool is_all = rest.n == 0 || str_eqz(rest, "all");
    for (uint32_t c = 0; c < ckpt->n_components; c++)
        out_is_named[c] = is_all;
    while (!is_all && rest.n) {
        const char *comma = memchr(rest.p, ',', rest.n);
        struct str name = {rest.p, comma ? (size_t)(comma - rest.p) : rest.n};
        int64_t c = ckpt_component_find(ckpt, name);
        if (c < 0)
            return err_set(err, PF_E_NOTFOUND,
                           "target '%.*s' is no component of '%s'; it has '%s'%s", (int)name.n,
                           name.p, ckpt->path, ckpt->components[0].name,
                           ckpt->n_components > 1 ? " and others: see pageflip inspect" : "");
        out_is_named[c] = true;
        rest = str_cut_front(rest, comma ? name.n + 1 : name.n);
    }
    return PF_OK;
}

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

int targets_compose(struct pf_checkpoint *ckpt, const struct target_state *targets,
                    const struct pf_composition_opts *opts, struct pf_composition **out,
                    pf_error *err)
{
    struct lora_list l = {0};
    int rc = PF_OK;
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
