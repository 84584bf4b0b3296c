/*
 * What the files of overlay/ share: names on disk, one layer's file (what is in it and how it proves itself), the manifest, and the
 * pages that a builder leaves behind. Nobody else includes this, tests excepted.
 */
#ifndef PF_OVERLAY_OVERLAY_INT_H
#define PF_OVERLAY_OVERLAY_INT_H

#include <pthread.h>

#include "base/json.h"
#include "base/mem.h"
#include "overlay/overlay.h"

#define OVERLAY_FORMAT_VERSION 1
#define OVERLAY_ALIGN          ((size_t)4096)
#define MANIFEST_BYTES_MAX     ((size_t)64 << 20)
#define MANIFEST_NAME          "manifest.json"
#define BASES_NAME             "bases"
#define N_PROOFS               64

struct overlay_store {
    char *dir;
    uint64_t n_budget_bytes;
    _Atomic uint64_t n_evicted;
    pthread_mutex_t mu; /* guards proofs */
    /* Bases that were rechecked for an entry of a cache that cannot be written, each a digest of both; a ring. */
    struct digest proofs[N_PROOFS];
    size_t n_proofs;
};

/* Is a directory, a FIFO or the like where a file of ours belongs? */
bool file_is_foreign(const char *path);
/* For whatever makes that a file of an entry cannot be proved. Returns PF_E_FORMAT. */
int err_in_format(pf_error *err, const char *path);

/* Paths; owned by caller, NULL: out of memory. */
char *entry_dir(const struct overlay_store *s, struct digest digest);
char *entry_file(const struct overlay_store *s, struct digest digest, const char *name);
char *entry_lock_path(const struct overlay_store *s, struct digest digest, const char *suffix);
char *layer_file_name(uint32_t i_layer);

/* A lock that a housekeeper may hold for a moment: tries a few times before it says PF_E_BUSY. */
int lock_patiently(const char *path, bool is_shared, struct file_lock *out, pf_error *err);
int entry_lock(const struct overlay_store *s, struct digest digest, const char *suffix,
               bool is_shared, struct file_lock *out, pf_error *err);
/* Does anybody hold it in a way that excludes us? Never creates the file. */
bool entry_is_locked(const struct overlay_store *s, struct digest digest, const char *suffix,
                     bool is_shared);
bool store_is_writable(const struct overlay_store *s);
/* Removes temporary files from a directory of the cache; the caller holds its lock. */
void remove_temporaries(const char *dir);
/* Marks the entry as used now: later than anything in the cache, even if the clock went back. */
void touch_used(struct overlay_store *s, struct digest digest);
int64_t used_at_ns(const struct overlay_store *s, struct digest digest);
uint64_t dir_bytes(const char *dir);

/*
 * Makes n_total bytes fit into the budget, n_missing of which are not on the disk yet: evicts partial entries, then the least recently used,
 * nothing when it would not be enough. The bytes of `own` count as part of n_total. Then reserves n_missing in a temporary file of the entry.
 */
int room_reserve(struct overlay_store *s, struct digest own, uint64_t n_total, uint64_t n_missing,
                 struct file_new *out_reserve, pf_error *err);

/* ---------------------------------------------------------------------------------------- layer files */

/* The changed tensors of one layer of a composition: targets [i_target0, i_target0 + n). */
struct layer_targets {
    uint32_t i_layer;
    size_t i_target0, n;
};
/* The k-th changed layer; false past the end. Walk with *io_next = 0 at first. */
bool layer_targets_next(const struct pf_composition *comp, size_t *io_next,
                        struct layer_targets *out);

/* 4 MiB blocks of merged bytes (of the file) and of base bytes (as read), hashed one by one, so that threads may finish in any order; the
 * digest of a tensor is XXH3-128 over those of its blocks (hi then lo, little endian). */
struct layer_digests {
    struct digest *merged, *base; /* one per block; tensors one after another */
    size_t n_merged, n_base;
    bool is_stamp_known; /* the base has the stat stamps with which the layer was built */
};
int layer_digests_new(const struct pf_composition *comp, const struct layer_targets *lt,
                      struct layer_digests *out, pf_error *err);
void layer_digests_release(struct layer_digests *d);
size_t n_blocks(uint64_t n_bytes);
uint64_t target_bytes(const struct merge_target *t); /* merged */

/* One block of the base bytes of a layer, and which merged blocks come from it: one, or two when f32 is made of 16 bits. */
struct base_block {
    const struct merge_target *target;
    size_t i_tensor; /* within the layer's targets */
    uint64_t off;
    size_t n_bytes;
    size_t i_merged0; /* of the tensor's first merged block, in layer_digests */
};
struct base_block find_base_block(const struct pf_composition *comp, const struct layer_targets *lt,
                                  size_t i);

/* Header bytes with the digests inside; a header of zeros has the same length. */
int layer_header(const struct pf_composition *comp, const struct layer_targets *lt,
                 const struct layer_digests *d, struct strbuf *out_header,
                 struct st_layout **out_layout, pf_error *err);
/* Does an existing file hold exactly these tensors of this composition? Fills d with the digests that it carries. */
int layer_file_check(const struct pf_composition *comp, const struct layer_targets *lt,
                     const struct st_file *f, struct layer_digests *d, pf_error *err);

/* k of n blocks: block i is taken when (i k + phase) mod n < k. Over all phases below n, each block is taken k times. */
struct sampling {
    uint64_t n, k, phase;
};
struct sampling sampling_of(uint64_t n_blocks, uint64_t n_bytes, uint64_t phase);
bool sampling_takes(const struct sampling *s, uint64_t i_block);
/* Hashes the sampled merged blocks and compares; s NULL: all. i_block0: number of the layer's first block within the entry. */
int layer_file_verify(const struct st_file *f, const struct layer_digests *d,
                      const struct sampling *s, uint64_t i_block0, pf_error *err);

/* Opens a layer file of a complete entry and proves all but its blocks. PF_E_FORMAT, PF_E_MISMATCH, PF_E_IO, PF_E_NOMEM. On success the
 * caller closes *out_f and releases *out_d. */
int layer_open_proved(struct overlay_store *s, const struct pf_composition *comp,
                      const struct layer_targets *lt, const struct json *m, struct st_file **out_f,
                      struct layer_digests *out_d, pf_error *err);
/* Proves every block of one file of an entry by the digests in its header, and the header by the manifest's word; against `base` (may be NULL)
 * also the base tensors that it was made from. */
int layer_file_verify_alone(struct overlay_store *s, struct digest digest, const char *name,
                            const char *header_hex, const struct pf_checkpoint *base,
                            pf_error *err);
struct digest layer_header_digest(const struct st_file *f);
struct behind;
/* The base bytes against recorded block digests. PF_E_MISMATCH names the tensor. */
int layer_base_check(const struct pf_composition *comp, const struct layer_targets *lt,
                     const struct layer_digests *d, struct behind *behind,
                     const struct overlay_build_opts *opts, pf_error *err);

/* ------------------------------------------------------------------------------------------- manifest */

struct digest base_stamp(const struct pf_checkpoint *ckpt);
/* headers: of the layer files, in the order of layer_targets_next; or NULL and the manifest that is replaced, whose headers and stamps it
 * takes over. */
int manifest_write(struct overlay_store *s, const struct pf_composition *comp,
                   const struct digest *headers, const struct json *old, pf_error *err);
int manifest_read(struct overlay_store *s, struct digest digest, struct json **out, pf_error *err);
/* PF_E_MISMATCH when it speaks of another composition, version or base. */
int manifest_check(const struct json *m, const struct pf_composition *comp, pf_error *err);
/* PF_E_CHANGED when the base files have none of the recorded stat stamps. */
int manifest_check_stamps(struct overlay_store *s, const struct json *m,
                          const struct pf_composition *comp, pf_error *err);
void proof_add(struct overlay_store *s, const struct pf_composition *comp);
/* The manifest's word for a layer file's header; false when it does not name the file. */
bool manifest_header(const struct json *m, const char *name, struct digest *out);

/* JSON with its own digest as last member: a flipped byte is an error like any other. m is changed, not freed. */
int json_write_sealed(const char *path, struct json *m, pf_error *err);
int json_read_sealed(const char *path, struct json **out, pf_error *err);

/* Writes the id down, now (0) or at a time to test by. */
int base_id_remember(struct overlay_store *s, struct pf_checkpoint *ckpt, int64_t now_ns,
                     pf_error *err);
void base_ids_forget(struct overlay_store *s);
bool base_id_recall(struct overlay_store *s, struct pf_checkpoint *ckpt);
/* The log line, the refined id, and its memory, after other bytes were found. Returns PF_E_MISMATCH with err as it was. */
int base_distrust(struct overlay_store *s, const struct pf_composition *comp,
                  const struct overlay_build_opts *opts, pf_error *err);
/* PF_E_CHANGED when comp was composed before other bytes were found behind its base's id. */
int base_id_check(const struct pf_composition *comp, pf_error *err);

/* As overlay_adopt, with the phase of the sampling to test by. */
int overlay_adopt_phase(struct overlay_store *s, const struct pf_composition *comp,
                        enum overlay_verify verify, uint64_t phase, struct overlay **out,
                        pf_error *err);

/* ------------------------------------------------------------------------------- what is left behind */

/* The pages of the base tensors that a composition changes: which of them were in the page cache before we came. */
struct behind;
int behind_new(const struct pf_composition *comp, struct behind **out, pf_error *err);
void behind_free(struct behind *b);
/* Reads what is not there of a block. i_target: of the composition. */
void behind_fetch(struct behind *b, size_t i_target, uint64_t off, size_t n_bytes);
/* Drops what was not there before. */
void behind_drop(struct behind *b, size_t i_target, uint64_t off, size_t n_bytes);

/* Once more over whole tensors: pages that another CPU read a moment ago do not go at the first try, for the kernel has not filed them. */
void behind_sweep(struct behind *b, size_t i_target0, size_t n_targets);

/* What one worker has written and not waited for: at most N_DIRTY ranges. */
#define N_DIRTY 2
struct dirty {
    uint64_t off[N_DIRTY];
    size_t n_bytes[N_DIRTY];
    unsigned n;
};
/* Starts writing the range back; waits for the oldest one and drops it from the page cache. PF_E_IO, PF_E_NOSPACE: a block was lost. */
int dirty_add(struct dirty *d, int fd, uint64_t off, size_t n_bytes, const char *path,
              pf_error *err);

#endif
