/*
 * Overlays: the merged tensors of one composition, in files that the page cache can hold and drop (DESIGN 6).
 *
 *     <cache>/<digest>/layer-<n>.safetensors   one per changed layer, data on a page boundary
 *     <cache>/<digest>/manifest.json           last: an entry without it is `partial`
 *     <cache>/<digest>.use                     locked shared by every process that has the entry mapped
 *     <cache>/<digest>.build                   locked by the one process that builds it
 *
 * Called by the engine and by `pageflip cache`. An overlay is adopted only when manifest, sizes, shapes, dtypes and digests
 * agree with the composition; anything else is rebuilt. Must never write to an entry that is complete.
 */
#ifndef PF_OVERLAY_OVERLAY_H
#define PF_OVERLAY_OVERLAY_H

#include "base/file.h"
#include "view/view.h"

/* A cache directory. Thread-safe: everything it knows is on disk, and locks there are between processes and threads alike. */
struct overlay_store;

/* Creates the directory when needed and removes temporary files that no builder owns. budget 0: a quarter of the free space. PF_E_IO,
 * PF_E_NOSPACE: the caller goes on without a cache and says why. */
int overlay_store_open(const char *dir, uint64_t n_budget_bytes, struct overlay_store **out,
                       pf_error *err);
void overlay_store_close(struct overlay_store *s);
const char *overlay_store_dir(const struct overlay_store *s);
uint64_t overlay_store_budget(const struct overlay_store *s);

/* Merged tensors, mapped. Reference counted; the mapping and the shared lock live as long as it. Immutable. */
struct overlay;
void overlay_ref(struct overlay *o);
void overlay_unref(struct overlay *o);
/* Indexed by layer of the checkpoint; NULL where the composition changes nothing. Borrowed. */
const struct layer_bytes *overlay_layer(const struct overlay *o, uint32_t i_layer);
uint64_t overlay_n_bytes(const struct overlay *o);
/* The mapped file behind a layer, for read-ahead and drop-behind; NULL where there is none. */
const struct file_map *overlay_layer_map(const struct overlay *o, uint32_t i_layer);

enum overlay_verify {
    OVERLAY_VERIFY_SAMPLED, /* one block of 64, at least 8, at most 64 blocks of 4 MiB of every entry */
    OVERLAY_VERIFY_FULL,
};

/*
 * PF_E_NOTFOUND: no complete entry. PF_E_FORMAT, PF_E_MISMATCH: something is there and cannot be proved (the entry is set
 * aside for rebuilding and the message says why). PF_E_CHANGED: the base's stat stamp is not the recorded one; call
 * overlay_recheck_base first.
 */
int overlay_adopt(struct overlay_store *s, const struct pf_composition *comp,
                  enum overlay_verify verify, struct overlay **out, pf_error *err);
/* Reads the base tensors that the entry was made from, compares their recorded digests, and records the new stamp. */
int overlay_recheck_base(struct overlay_store *s, const struct pf_composition *comp, pf_error *err);

struct overlay_build_opts {
    struct pool *pool;
    pf_progress_fn progress; /* done and total in bytes; returning false cancels */
    void *progress_ctx;
};
struct overlay_build_report {
    uint64_t n_bytes_written,
        n_bytes_kept; /* kept: whole layers that an earlier, killed build left */
    uint32_t n_layers_written, n_layers_kept;
};
/*
 * Merges every changed tensor into the cache, or completes what a killed build left. PF_E_BUSY: another process builds it;
 * PF_E_NOSPACE: budget or disk; PF_E_CANCELLED. After any failure the entry is partial or absent and nothing else was touched.
 */
int overlay_build(struct overlay_store *s, const struct pf_composition *comp,
                  const struct overlay_build_opts *opts, struct overlay_build_report *out_report,
                  pf_error *err);

/* ------------------------------------------------------------------------------------- housekeeping */

struct overlay_entry {
    struct digest digest;
    char digest_hex[DIGEST_HEX_LEN + 1];
    bool is_partial, is_in_use, is_building;
    uint64_t n_bytes;
    int64_t used_at_s; /* seconds since 1970, of the last adoption */
    char *description; /* "noto.safetensors 1.0 + ..."; NULL when partial */
    char *base;        /* path of the checkpoint when it was built; NULL when partial */
};
/* Sorted by last use, oldest first. Owned by caller: overlay_list_free. */
int overlay_list(struct overlay_store *s, struct overlay_entry **out, size_t *out_n, pf_error *err);
void overlay_list_free(struct overlay_entry *entries, size_t n);
/* Proves the merged bytes of a complete entry against its own digests. PF_E_FORMAT names file and tensor. */
int overlay_verify_entry(struct overlay_store *s, struct digest digest, pf_error *err);
/* PF_E_BUSY when any process has it mapped or is building it. */
int overlay_evict(struct overlay_store *s, struct digest digest, pf_error *err);
/* Evicts partial entries, then the least recently used, until n_needed_bytes more fit into the budget. PF_E_NOSPACE. */
int overlay_make_room(struct overlay_store *s, uint64_t n_needed_bytes, pf_error *err);

#endif
