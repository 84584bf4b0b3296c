/*
 * The engine's parts, for its own files only: the current view, what is remembered per target, recent compositions, residents, the
 * memory plan, the background thread.
 *
 * Locks: `mu` guards everything in struct pf_engine that is not said to be atomic or immutable. Order: engine mu, then a view's own
 * mutex. Taking the current view touches neither. The background thread releases mu while it merges.
 */
#ifndef PF_ENGINE_ENGINE_INT_H
#define PF_ENGINE_ENGINE_INT_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/mem.h"
#include "base/opts.h"
#include "base/pool.h"
#include "base/proc.h"
#include "overlay/overlay.h"

/* ---------------------------------------------------------------------------------- the current view */

/*
 * A pointer that can be taken with one atomic addition and swapped without waiting: the upper 16 bits count how often it was
 * taken since it was published, and the view carries that many references in advance (BIAS of current.c).
 */
struct current {
    _Atomic uint64_t word;
};
/* Takes a reference of its own; NULL empties */
void current_set(struct current *c, struct pf_view *view);
/* A reference for the caller; never NULL after the first set */
struct pf_view *current_take(struct current *c);

/* ------------------------------------------------------------------------------------------- targets */

struct target_entry {
    char *nickname;
    /* A reference: the registry may load another file under the nickname */
    struct pf_adapter *adapter;
    double strength, alpha;
    bool has_alpha;
};

enum target_phase { TARGET_EMPTY, TARGET_ACTIVE, TARGET_UNMERGED };

/* One component's composition: what was set, and whether it acts. */
struct target_state {
    enum target_phase phase;
    struct target_entry *entries;
    size_t n_entries;
    double factor;
};

/* -------------------------------------------------------------------------------------- compositions */

/* A composition that is served or was recently. Its view is shared by everybody who asks for the same digest. */
struct served {
    struct pf_view *view;
    struct overlay *overlay;   /* NULL: none adopted */
    struct digest *layer_keys; /* per layer: what its bytes depend on; equal keys, equal bytes */
    int32_t way;
    uint64_t i_used;      /* clock of use, for eviction from the recent list */
    uint64_t t_global_ns; /* since when it is the global one; 0: it is not */
    uint32_t n_uses0;     /* generations that do not count any more; view_n_uses counts all */
    bool is_build_wanted; /* now, whatever the delay */
    bool is_build_failed, is_build_cancelled /* failed because somebody said so */;
    bool is_recheck_needed;
    struct served *next_lingering;
};

/* Which ways read merged layers from an overlay, and which from residents. */
static inline bool way_takes_overlay(int32_t way)
{
    return way == PF_WAY_AUTO || way == PF_WAY_OVERLAY;
}
static inline bool way_takes_residents(int32_t way)
{
    return way == PF_WAY_AUTO || way == PF_WAY_INPLACE;
}

#define N_RECENT 8

/* ----------------------------------------------------------------------------------------- residents */

/* A private copy of one layer. p[] points into buf. `key` tells which bytes it holds; is_ready false: being rewritten. */
struct resident {
    uint32_t i_layer;
    uint8_t *buf;
    size_t n_buf_bytes;
    struct digest key, failed_key; /* failed_key: of the bytes that could not be made last */
    bool is_ready, is_locked, has_failed;
    struct layer_bytes bytes;
};

/* All of them. Placements that name one hold a reference: a view that outlives its engine keeps its bytes. */
struct resident_set {
    _Atomic uint32_t n_refs;
    uint32_t n, n_locked;
    uint64_t n_bytes;
    struct resident items[];
};

/* ---------------------------------------------------------------------------------------------- plan */

struct memory_plan {
    uint64_t available_bytes;
    char note[512];
};
/* min(MemAvailable, tightest cgroup limit - what is not page cache, cap). root: "" for the real system. */
int plan_memory(const char *root, uint64_t n_cap_bytes, struct memory_plan *out, pf_error *err);

/* -------------------------------------------------------------------------------------------- engine */

struct registered {
    char *nickname, *path;
    struct pf_adapter *adapter;
};

struct pf_engine {
    struct pf_checkpoint *ckpt;
    struct pf_engine_opts opts;   /* strings inside are not kept */
    struct overlay_store *store;  /* NULL: no cache; immutable */
    struct stream_policy *policy; /* immutable */
    struct memory_plan plan;      /* immutable */
    uint32_t n_kept;
    uint64_t n_kept_bytes;

    struct current current;

    pthread_mutex_t mu;
    struct registered *adapters;
    size_t n_adapters, cap_adapters;
    struct target_state *targets; /* per component */
    int32_t merge_dtype;
    struct served *recent[N_RECENT];
    struct served *global;    /* one of recent */
    struct served *lingering; /* left `recent`; freed when nobody else holds them */
    uint64_t i_clock;
    struct resident_set *residents; /* never NULL once open; its items are guarded by mu */
    char cache_note[512];
    uint64_t n_changes, n_builds, n_adoptions, n_build_failures;

    int64_t pid; /* who opened it: the thread is there, not in a child of fork; immutable */
    pthread_t thread;
    bool has_thread, is_ending, is_idle;
    bool has_no_builder; /* the thread could not start its pool */
    /* What the background thread works on with mu released; it holds the view */
    struct served *busy;
    pthread_cond_t wake;                         /* for the background thread: something changed */
    pthread_cond_t idle;                         /* for whoever waits for it: look again */
    _Atomic bool cancel_build, is_build_refused; /* by us; by the caller's progress function */
    _Atomic uint64_t n_built_bytes, n_build_bytes; /* 0 when nothing is built */
    uint64_t t_build_ns; /* when the background thread began; its own, and its pool's to read */
};

/* registry.c, caller holds mu */
struct registered *registry_find(struct pf_engine *e, const char *nickname);
void registry_release(struct pf_engine *e);

/* serve.c, caller holds mu. is_way_asked: the caller said which, rather than leaving it to the engine. */
int engine_serve(struct pf_engine *e, struct pf_composition *comp, int32_t way, bool is_way_asked,
                 struct served **out, pf_error *err);
void engine_place_all(struct pf_engine *e);
void engine_served_free(struct served *s);
struct served *served_of(struct pf_engine *e, const struct pf_view *view); /* NULL: none of ours */
/* How most of the changed layers are read now. */
const char *served_way(struct pf_engine *e, const struct served *s);
/* Does any reader hold a placement that was replaced? Frees what none does. */
bool engine_has_stale_readers(struct pf_engine *e);
/* Drops recent compositions that nobody holds and that use `a`. */
void engine_forget_unused(struct pf_engine *e, const struct pf_adapter *a);
bool served_uses(const struct served *s, const struct pf_adapter *a);
bool engine_try_adopt(struct pf_engine *e, struct served *s);

/* resident.c, caller holds mu */
/* PF_E_NOMEM: they take more than is available; asked before any of it is taken. */
int residents_new(struct pf_checkpoint *ckpt, uint32_t n, const struct memory_plan *plan,
                  struct resident_set **out, pf_error *err);
void residents_ref(struct resident_set *set);
void residents_unref(struct resident_set *set);
const struct layer_bytes *residents_find(const struct pf_engine *e, const struct served *s,
                                         uint32_t i_layer);
enum resident_step { RESIDENT_NOTHING, RESIDENT_DONE, RESIDENT_BLOCKED /* by readers */ };
/* Rewrites at most one resident layer towards `s`; releases mu while copying. */
enum resident_step residents_step(struct pf_engine *e, struct served *s);

/* background.c */
int background_start(struct pf_engine *e, pf_error *err);
void background_stop(struct pf_engine *e);
void background_wake(struct pf_engine *e); /* caller holds mu */
/* Not where there is none (a child of fork, no memory for threads), nor on the thread itself (a progress function): that would take for ever. */
bool background_may_be_awaited(const struct pf_engine *e);

/* target.c */
int target_entries_copy(const struct target_state *from, struct target_state *to, pf_error *err);
void target_release(struct target_state *t);
/* Appends one adapter to the targets that it names; `limit` (may be NULL) says which the change is about. Caller holds mu. */
int targets_add(struct pf_engine *e, struct target_state *targets, const bool *limit,
                const struct pf_engine_lora *l, pf_error *err);
/* The global composition as it acts: entries of all components, equal ones joined into one with a target list. Proves that the bytes of
 * base and adapters are still those that were opened. */
int targets_compose(struct pf_checkpoint *ckpt, const struct target_state *targets,
                    const struct pf_composition_opts *opts, struct pf_composition **out,
                    pf_error *err);
/* PF_E_UNMATCHED when an adapter changes nothing in any of the named targets that it was added to: it may act elsewhere already, which
 * is no answer to being asked for here. */
int targets_check(const struct pf_composition *comp, const struct target_state *targets,
                  const bool *is_named, pf_error *err);
/* Drops entries from targets in which their adapter changes nothing: `all` means all that it addresses. */
void targets_prune(const struct pf_composition *comp, struct target_state *targets);

#endif
