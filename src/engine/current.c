/*
 * The current view: taken by any number of threads with one atomic addition, swapped without waiting for them. Called for every
 * generation and every change. Must never lock: a reader that asks while a change is under way gets the view before it, at once.
 */
#include "engine/engine_int.h"

#include <assert.h>

#define POINTER_BITS 48
#define POINTER_MASK (((uint64_t)1 << POINTER_BITS) - 1)
#define ONE_TAKEN    ((uint64_t)1 << POINTER_BITS)
#define BIAS         ((uint32_t)1 << 16) /* references that a published view carries in advance */
#define FOLD_AT      ((uint32_t)1 << 15)

static struct pf_view *view_of(uint64_t word)
{
    return (struct pf_view *)(uintptr_t)(word & POINTER_MASK);
}

void current_set(struct current *c, struct pf_view *view)
{
    assert(((uintptr_t)view & ~POINTER_MASK) == 0); /* user addresses fit into 48 bits */
    if (view)
        view_ref_n(view, BIAS);
    /* acq_rel: the new view is whole before it is seen, and the takers of the old one are counted. */
    uint64_t old =
        atomic_exchange_explicit(&c->word, (uint64_t)(uintptr_t)view, memory_order_acq_rel);
    if (view_of(old))
        view_unref_n(view_of(old), BIAS - (uint32_t)(old >> POINTER_BITS));
}

/* The advance of references is half used up: give it back before the 16 bits run over. */
static void fold(struct current *c, struct pf_view *view, uint64_t word)
{
    uint32_t n = (uint32_t)(word >> POINTER_BITS);
    view_ref_n(view, n);
    if (!atomic_compare_exchange_strong(&c->word, &word, word & POINTER_MASK))
        view_unref_n(view, n); /* somebody took or swapped meanwhile: the next one folds */
}

struct pf_view *current_take(struct current *c)
{
    /* acquire: pairs with the exchange in current_set */
    uint64_t word = atomic_fetch_add_explicit(&c->word, ONE_TAKEN, memory_order_acquire);
    struct pf_view *view = view_of(word);
    if ((uint32_t)(word >> POINTER_BITS) + 1 >= FOLD_AT)
        fold(c, view, word + ONE_TAKEN);
    return view;
}
