/*
 * Inside export/: how a merged checkpoint is cut into items, where it grows, and what of it is durable.
 *
 *     export.c           pf_merge: checks, then plan -> stage -> work -> publish
 *     export_plan.c      the files of the output and their items, in order; the same for every process that shares the work
 *     export_walk.c      the files of a model directory that are not weights
 *     export_stage.c     OUT.partial/: who may write in it, what is in it, how it becomes OUT
 *     export_journal.c   which items are durable, across kills
 *     export_work.c      the workers: read, merge, write, push to disk, commit
 */
#ifndef PF_EXPORT_EXPORT_INT_H
#define PF_EXPORT_EXPORT_INT_H

#include "view/composition.h"

/* Part of the identity of a partial output: changing one starts a partial output over. */
#define EXPORT_FORMAT      1u
#define ITEM_MERGE_BYTES   ((uint64_t)4 << 20)
#define ITEM_COPY_BYTES    ((uint64_t)8 << 20)
#define EXPORT_PARTS_MAX   65536u
#define EXPORT_INDEX_BYTES ((size_t)512 << 20)

/* One file of the output. */
struct out_file {
    char *rel;     /* below the root; "" when the output is one file */
    char *path_in; /* its origin */
    char *path_out;
    const struct st_file *st; /* weights; NULL: copied as it is */
    struct strbuf text; /* a new header, or the whole file where it is rewritten; else empty */
    uint64_t n_bytes;
    int fd_out; /* of weights while work goes on; -1: opened when needed */
    /* Opened once more, to wait by: waiting takes a write-back error away from the descriptor that it is done through, and fd_out's sync
     * has to hear of it. */
    int fd_wait;
};

enum item_kind { ITEM_COPY, ITEM_MERGE, ITEM_TEXT };

/* A contiguous range of one output file, written as a whole by one worker. */
struct item {
    uint32_t i_file;
    uint32_t i_target; /* MERGE: into the composition's targets */
    enum item_kind kind;
    uint64_t off_out, n_bytes;
    uint64_t off_in;    /* COPY, MERGE: in the origin; TEXT: in text */
    uint64_t n_in;      /* bytes there */
    int64_t row0, col0; /* MERGE: whole rows, or a piece of one row */
    int64_t n_rows, n_cols;
};

/* Immutable once built, but for fd_out and fd_wait. */
struct export_plan {
    struct pf_checkpoint *ckpt;
    const struct pf_composition *comp; /* NULL: nothing changes */
    bool is_file;                      /* the output is one file, else a directory */
    char *root; /* the directory that rel is relative to; NULL when is_file */
    struct out_file *files;
    size_t n_files, cap_files;
    struct item *items;
    size_t n_items, cap_items;
    uint64_t n_bytes;
    uint32_t i_part, n_parts;
    size_t i_item0, i_item1; /* the items of this part */
    struct digest identity;
};

/* Are the base and the adapters still what was planned with? PF_E_CHANGED or PF_E_TRUNCATED. */
int plan_verify(const struct export_plan *plan, pf_error *err);
int plan_build(struct pf_checkpoint *ckpt, const struct pf_composition *comp, uint32_t i_part,
               uint32_t n_parts, struct export_plan *out, pf_error *err);
void export_plan_release(struct export_plan *plan);
/* Takes over text. For plan_build and plan_walk. */
int plan_add_file(struct export_plan *plan, const char *rel, const char *path_in,
                  const struct st_file *st, struct strbuf *text, pf_error *err);
/* Adds everything of a model directory that is no weights of the checkpoint. */
int plan_walk(struct export_plan *plan, pf_error *err);
/* The name of a file of the checkpoint relative to plan->root; NULL: not below it. */
const char *plan_rel(const struct export_plan *plan, const char *path);
/* First and past-the-end item of a part. */
void plan_part(const struct export_plan *plan, uint32_t i_part, size_t *out_i0, size_t *out_i1);

/* --------------------------------------------------------------------------------------------------- journal */

enum item_state { ITEM_TODO, ITEM_WRITTEN, ITEM_SYNCING, ITEM_DURABLE };

/* One part's append-only record of durable items. Owned by the process that has the part's lock. */
struct journal {
    int fd;
    uint64_t off_bytes; /* where the next record goes */
    char *path;
    struct digest identity;
    uint32_t i_part;
};

/* Opens or creates; marks what is durable in states (one per item of the plan). What does not check ends the reading. */
int journal_open(struct journal *j, const char *path, const struct export_plan *plan,
                 uint32_t i_part, _Atomic uint8_t *states, pf_error *err);
/* Appends runs of items whose state is ITEM_SYNCING, durably. Their data must be. */
int journal_append(struct journal *j, const _Atomic uint8_t *states, size_t i0, size_t i1,
                   pf_error *err);
void journal_close(struct journal *j);
/* Only reads: does the journal at path say that every item of the part is durable? */
bool journal_is_complete(const char *path, const struct export_plan *plan, uint32_t i_part);

/* ----------------------------------------------------------------------------------------------------- stage */

/* OUT.partial/ and the locks in it. One process. */
struct stage {
    const struct export_plan *plan;
    char *out, *out_dir; /* the final name, without trailing slashes, and its directory */
    char *dir;           /* OUT.partial */
    char *payload, *old, *plan_file, *done_file, *lock; /* in it */
    struct file_lock part_lock, shared_lock;
    bool is_force;
};

/* Called while waiting for another process; false gives up. */
typedef bool (*stage_wait_fn)(void *ctx);

int stage_init(struct stage *s, const char *out_path, bool is_force, pf_error *err);
void export_stage_release(struct stage *s); /* locks too */
/* Refuses an output that exists (unless forced and of our kind), that is the base, or that holds an adapter in use. */
int stage_check_output(const struct stage *s, const struct pf_checkpoint *ckpt,
                       const struct pf_composition *comp, bool is_file, pf_error *err);
/* Locks this part and has the files of the output there, of full size, from a matching earlier run or new. */
int stage_enter(struct stage *s, struct export_plan *plan, stage_wait_fn wait, void *wait_ctx,
                pf_error *err);
char *stage_journal_path(const struct stage *s, uint32_t i_part); /* owned by caller */
/* Renames when every part is durable; *out_is_complete says whether. */
int stage_publish(struct stage *s, stage_wait_fn wait, void *wait_ctx, bool *out_is_complete,
                  pf_error *err);
/* OUT exists: is it because a killed run of this very merge got as far as the rename? Then only tidying is left. */
bool stage_was_published(struct stage *s, struct export_plan *plan);
/* Removes OUT.partial: after the publish, or when nothing in it is worth keeping */
void stage_tidy(struct stage *s);
void stage_distrust(struct stage *s); /* the base changed: the next run must start over */

/* ------------------------------------------------------------------------------------------------------ work */

struct work_result {
    uint64_t n_bytes_resumed; /* durable before */
    uint64_t n_bytes_written;
};

/* Writes the items of this part. PF_E_CANCELLED and failures leave what is durable in the journal. */
int work_run(struct export_plan *plan, struct stage *stage, const struct pf_merge_opts *opts,
             struct work_result *out, pf_error *err);

#endif
