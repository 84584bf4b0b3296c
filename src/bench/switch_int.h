/*
 * What the files of `bench switch` share: one run. Included by switch*.c alone.
 */
#ifndef PF_BENCH_SWITCH_INT_H
#define PF_BENCH_SWITCH_INT_H

#include "bench/ground.h"
#include "bench/switch.h"
#include "view/view.h"

enum { SWITCH_REPS_MAX = 50 };

enum switch_op {
    OP_LOAD_A,
    OP_LOAD_B,
    OP_FIRST_SET,
    OP_OVERLAY,
    OP_SET_AGAIN,
    OP_SWITCH,
    OP_BACK,
    OP_STRENGTH,
    OP_UNMERGE,
    OP_MERGE,
    N_SWITCH_OPS
};

/* Of the work that goes on meanwhile: on the base, merging what it reads, the same beside the builder, on the overlay. */
enum switch_phase { PHASE_BEFORE, PHASE_STREAMED, PHASE_DURING, PHASE_AFTER, N_SWITCH_PHASES };

struct op_stats {
    unsigned n;
    double ms[SWITCH_REPS_MAX], effect_ms[SWITCH_REPS_MAX], panel_ms[SWITCH_REPS_MAX];
    uint64_t n_read, n_written, n_peak, n_added, n_panels; /* of the largest repetition */
    const char *way;                                       /* NULL: no change of the composition */
};

struct switch_run {
    struct bench_switch_opts o; /* defaults filled in */
    char *dir, *cache;
    char *model, *adapters[2]; /* paths; ours or the caller's */
    struct ground_files files;
    struct pf_checkpoint *ckpt;
    struct pf_engine *engine;
    struct op_stats ops[N_SWITCH_OPS];
    struct pf_change_report first; /* of the first set */
    unsigned i_rep;
    uint64_t n_left; /* elements that differ from the base after the last unmerge */
    struct json *second_start, *warm_start;
    double passes_s[N_SWITCH_PHASES];
    double during_seconds;
    uint64_t n_pass_bytes;
    bool is_drawing;
    bool is_warm; /* some file could not be dropped from the page cache */
};

int switch_engine_open(struct switch_run *r, pf_error *err);

/* All of it that can be run with one engine: fills ops. */
int switch_ops_run(struct switch_run *r, pf_error *err);
int switch_make_cold(struct switch_run *r, pf_error *err);
/* A fresh process with the cache there; fills second_start. No engine may be open. */
int switch_second_start(struct switch_run *r, pf_error *err);
/* Work before, during and after a change; fills passes_s and during_seconds. */
int switch_load_run(struct switch_run *r, pf_error *err);

struct json *switch_result(struct switch_run *r, const struct ground_bounds *bounds);

#endif
