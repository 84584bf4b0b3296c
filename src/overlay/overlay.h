/*
 * Overlays: the merged tensors of one composition, in files that the page cache can hold and drop.
 *
 *     <cache>/<digest>/layer-<n>.safetensors   one per changed layer, data on a page boundary
 *     <cache>/<digest>/manifest.json           last: an entry without it is `partial`
 *     <cache>/<digest>.use                     locked shared by every process that has the entry mapped; its time is the last use
 *     <cache>/<digest>.build                   locked by the one process that builds it
 *     <cache>/bases/<hash>.json                content ids of base files, remembered by their stat stamps
 *     <cache>/room.lock, bases.lock            held for a moment while room is made, or an id is written down
 *
 * Called by the engine and by `pageflip cache`. An overlay is adopted only when manifest, sizes, shapes, dtypes and digests
 * agree with the composition; anything else is rebuilt. Must never write to a layer file that has its name.
 *
 * Locks are flock(2) on descriptors that are O_CLOEXEC. A child of fork shares them with its parent: it may read what is mapped, and
 * it may exit or unref without taking anything from the parent. Only the process that opened a store should build through it.
 */
#ifndef PF_OVERLAY_OVERLAY_H
#define PF_OVERLAY_OVERLAY_H

#include "base/file.h"
#include "view/view.h"

/* Where the cache is: `asked` (--cache-dir), else PAGEFLIP_CACHE, else $XDG_CACHE_HOME/pageflip, else ~/.cache/pageflip. PF_E_STATE: there is
 * none ("off", or no variable is set), and the message says why. Owned by caller. */
int overlay_cache_dir(const char *asked, char **out_dir, pf_error *err);

/* A cache directory. Thread-safe: what it knows is on disk, and locks there are between processes and threads alike. */
struct overlay_store;

/* Creates the directory when needed and removes temporary files that no builder owns. budget 0: a quarter of what is free or could be
 * freed by clearing the cache. PF_E_IO, PF_E_NOSPACE: the caller goes on without a cache and says why. */
int overlay_store_open(const char *dir, uint64_t n_budget_bytes, struct overlay_store **out,
                       pf_error *err);
void overlay_store_close(struct overlay_store *s);
const char *overlay_store_dir(const struct overlay_store *s);
uint64_t overlay_store_budget(const struct overlay_store *s);
uint64_t overlay_store_n_evicted(const struct overlay_store *s); /* through this object */

/*
 * Gives ckpt its content id before anybody asks for it: remembered if the files have the stat stamps that they had then, so that an
 * unchanged checkpoint is not read again, else computed and written down. Files that changed within the last two seconds are not
 * remembered: another change in the same tick of their clock could not be told. Call it after opening, before compositions are made.
 */
int overlay_base_id(struct overlay_store *s, struct pf_checkpoint *ckpt, struct digest *out,
                    pf_error *err);

/* Merged tensors, mapped. Reference counted; the mapping and the shared lock live as long as it. Immutable. */
struct overlay;
void overlay_ref(struct overlay *o);
void overlay_unref(struct overlay *o);
/* Has every file the length that it was adopted with? One that was cut shows no bytes any more. */
bool overlay_is_whole(const struct overlay *o);
/* Indexed by layer of the checkpoint; NULL where the composition changes nothing. Borrowed. */
const struct layer_bytes *overlay_layer(const struct overlay *o, uint32_t i_layer);

/*
 * SAMPLED hashes k of the n blocks (4 MiB) of an entry: k = n / 64 rounded up, at least 8 and at most 64, all of an entry up to 32 MiB.
 * Which ones is drawn anew each time, each block with the same chance: one flipped byte is found by an adoption with probability k / n
 * (1 for entries up to 32 MiB, 1 in 64 from 2 GiB to 16 GiB), and by FULL always. Headers, sizes, shapes and dtypes are always checked.
 */
enum overlay_verify {
    OVERLAY_VERIFY_SAMPLED,
    OVERLAY_VERIFY_FULL,
};

/*
 * PF_E_NOTFOUND: no complete entry. PF_E_FORMAT, PF_E_MISMATCH: something was there and cannot be proved: it was set aside for
 * rebuilding and the message says why. PF_E_CHANGED: the base's stat stamp is none of the recorded ones; call
 * overlay_recheck first. A read-only cache is adopted from like any other.
 */
int overlay_adopt(struct overlay_store *s, const struct pf_composition *comp,
                  enum overlay_verify verify, struct overlay **out, pf_error *err);

struct overlay_build_opts {
    struct pool *pool;
    pf_progress_fn progress; /* done and total in bytes; returning false cancels */
    void *progress_ctx;
};

/*
 * Reads the base tensors that the entry was made from, compares their recorded digests, and records the new stamp, so that the next
 * adoption succeeds. PF_E_MISMATCH: other bytes behind a known content id. The entry stays, for its own base; the
 * digests of all tensors have entered the content id of comp's checkpoint, and neither comp nor anything else that was composed
 * before will be published: compose again. opts NULL: on this thread alone, without progress.
 */
int overlay_recheck(struct overlay_store *s, const struct pf_composition *comp,
                    const struct overlay_build_opts *opts, pf_error *err);

struct overlay_build_report {
    uint64_t n_bytes_written, /* of layer files */
        n_bytes_kept;         /* whole layers that an earlier, killed build left */
    uint32_t n_layers_written, n_layers_kept;
};
/*
 * Merges every changed tensor into the cache, or completes what a killed build left; a complete entry is left alone. Room is
 * reserved on the disk before the first byte. At most 12 MiB per worker are dirty at any time; base pages that nobody had cached are
 * dropped again. PF_E_BUSY: another process builds it, or makes room; PF_E_NOSPACE: budget or disk; PF_E_CANCELLED; PF_E_CHANGED: base
 * or adapter are not what they were; PF_E_TRUNCATED; PF_E_IO: the cache cannot be written. After any failure the entry is partial or
 * absent and nothing else was touched. Memory: one block and one scratch per worker, and a bit per base page that is read.
 */
int overlay_build(struct overlay_store *s, const struct pf_composition *comp,
                  const struct overlay_build_opts *opts, struct overlay_build_report *out_report,
                  pf_error *err);

/* ------------------------------------------------------------------------------------- housekeeping */

struct overlay_adapter {
    char *path;
    double strength, alpha;
    bool has_alpha;
    char *target; /* "all", or components */
};
struct overlay_entry {
    struct digest digest;
    char digest_hex[DIGEST_HEX_LEN + 1];
    bool is_partial, is_in_use, is_building;
    uint64_t n_bytes;
    /* Since 1970, of the last adoption; never before an earlier one's, whatever the clock did */
    int64_t used_at_ns;
    /* Known of complete entries only: */
    char *base;        /* path of the checkpoint when it was built or rechecked last */
    char *merge_dtype; /* "base" or "f32" */
    struct overlay_adapter *adapters;
    size_t n_adapters;
};
/* Sorted by last use, oldest first. No directory, no entries. Owned by caller: overlay_list_free. */
int overlay_list(struct overlay_store *s, struct overlay_entry **out, size_t *out_n, pf_error *err);
void overlay_list_free(struct overlay_entry *entries, size_t n);

enum overlay_base_state { OVERLAY_BASE_PROVED, OVERLAY_BASE_ABSENT, OVERLAY_BASE_REPLACED };
/* Proves every merged byte of a complete entry against its own digests, and the base tensors that it was made from where the
 * checkpoint still is what it was. PF_E_FORMAT and PF_E_MISMATCH name file and tensor. PF_E_NOTFOUND: no complete entry. */
int overlay_verify_entry(struct overlay_store *s, struct digest digest,
                         enum overlay_base_state *out_base, pf_error *err);
/* PF_E_BUSY when any process has it mapped or is building it. */
int overlay_evict(struct overlay_store *s, struct digest digest, pf_error *err);

#endif
