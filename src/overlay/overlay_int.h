/*
 * What the files of overlay/ share: names on disk, one layer's file (what is in it and how it proves itself), and the manifest.
 * Nobody else includes this.
 */
#ifndef PF_OVERLAY_OVERLAY_INT_H
#define PF_OVERLAY_OVERLAY_INT_H

#include "base/json.h"
#include "base/mem.h"
#include "overlay/overlay.h"

#define OVERLAY_FORMAT_VERSION 1
#define OVERLAY_ALIGN          ((size_t)4096)
#define MANIFEST_BYTES_MAX     ((size_t)64 << 20)

struct overlay_store {
    char *dir;
    uint64_t n_budget_bytes;
};

/* Paths; owned by caller, NULL: out of memory. */
char *entry_dir(const struct overlay_store *s, struct digest digest);
char *entry_file(const struct overlay_store *s, struct digest digest, const char *name);
char *entry_lock_path(const struct overlay_store *s, struct digest digest, const char *suffix);
char *layer_file_name(uint32_t i_layer);

/* A lock that a housekeeper may hold for a moment: tries a few times before it says PF_E_BUSY. */
int entry_lock(const struct overlay_store *s, struct digest digest, const char *suffix,
               bool is_shared, struct file_lock *out, pf_error *err);

/* As overlay_make_room, for an entry whose bytes so far are part of what is needed. */
int overlay_make_room_for(struct overlay_store *s, struct digest own, uint64_t n_needed_bytes,
                          pf_error *err);

/* ---------------------------------------------------------------------------------------- layer files */

/* The changed tensors of one layer of a composition: targets [i_target0, i_target0 + n). */
struct layer_targets {
    uint32_t i_layer;
    size_t i_target0, n;
};
/* The k-th changed layer; false past the end. Walk with *io_next = 0 at first. */
bool layer_targets_next(const struct pf_composition *comp, size_t *io_next,
                        struct layer_targets *out);

/* 4 MiB blocks of merged bytes (of the file) and of base bytes (as read), hashed one by one. */
struct layer_digests {
    struct digest *merged, *base; /* one per block; tensors one after another */
    size_t n_merged, n_base;
};
int layer_digests_new(const struct pf_composition *comp, const struct layer_targets *lt,
                      struct layer_digests *out, pf_error *err);
void layer_digests_release(struct layer_digests *d);
size_t n_blocks(uint64_t n_bytes);
uint64_t target_bytes(const struct merge_target *t); /* merged */
uint64_t target_base_bytes(const struct merge_target *t);
struct digest digest_of_blocks(const struct digest *blocks,
                               size_t n); /* the tensor digest of DESIGN 5 */

/* Header bytes with the digests inside; a header of zeros has the same length. */
int layer_header(const struct pf_composition *comp, const struct layer_targets *lt,
                 const struct layer_digests *d, struct strbuf *out_header,
                 struct st_layout **out_layout, pf_error *err);
/* Does an existing file hold exactly these tensors of this composition? Fills d with the digests that it carries. */
int layer_file_check(const struct pf_composition *comp, const struct layer_targets *lt,
                     const struct st_file *f, struct layer_digests *d, pf_error *err);
/* Hashes blocks [stride i + phase] of the merged bytes and compares. stride 1: all. */
int layer_file_verify(const struct st_file *f, const struct layer_digests *d, size_t stride,
                      size_t phase, pf_error *err);
/* Proves every block of one file of an entry by the digests in its header, and the header by the manifest's word. */
int layer_file_verify_alone(struct overlay_store *s, struct digest digest, const char *name,
                            const char *header_hex, pf_error *err);
struct digest layer_header_digest(const struct st_file *f);

/* ------------------------------------------------------------------------------------------- manifest */

int manifest_write(struct overlay_store *s, const struct pf_composition *comp, pf_error *err);
int manifest_read(struct overlay_store *s, struct digest digest, struct json **out, pf_error *err);
/* PF_E_MISMATCH when it speaks of another composition, version or base. */
int manifest_check(const struct json *m, const struct pf_composition *comp, pf_error *err);
/* PF_E_CHANGED when the base files have other stat stamps than recorded. */
int manifest_check_stamps(const struct json *m, const struct pf_composition *comp, pf_error *err);

#endif
