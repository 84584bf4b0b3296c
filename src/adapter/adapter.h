/*
 * Adapters: one LoRA-family file or PEFT directory, mapped and parsed into modules (pf_adapter_open), then resolved against a
 * checkpoint into deltas (adapter_resolve). Opening knows nothing of any base; resolving decides names, shapes and rows. What is
 * not understood is refused by name, never left out. The public half is in pageflip.h. Immutable after open.
 *
 *     source.c     file or directory -> tensors, config, metadata; one pass over the bytes: digest and finite scan
 *     dialect.c    key = prefix + module path + leaf: the one table of spellings, and of what is refused
 *     module.c     keys -> modules; family.c: their leaves make one family, complete or refused
 *     config.c     peft config, lora_adapter_metadata; pattern.c: the keys of rank_pattern and alpha_pattern
 *     scale.c      configs and alpha tensors -> one scale per module, or a contradiction
 *     place.c      module path -> base tensor(s): exact, flattened, fused
 *     resolve.c    what matches, which rows, duplicates; emit.c: shapes against the base, deltas
 *     target_list.c "a,b" -> components
 *     pf_adapter.c public entry points
 */
#ifndef PF_ADAPTER_ADAPTER_H
#define PF_ADAPTER_ADAPTER_H

#include "adapter/delta.h"
#include "base/hash.h"
#include "checkpoint/checkpoint.h"

void adapter_ref(struct pf_adapter *a);
struct digest adapter_digest(const struct pf_adapter *a);
/* True once the mapped file shrank under us (base/guard.h). No system call. */
bool adapter_is_truncated(const struct pf_adapter *a);
uint32_t adapter_n_refs(const struct pf_adapter *a); /* a hint: others may change it meanwhile */
/* False when the file under the adapter's path is no longer the one that was opened (stat stamp). */
bool adapter_is_current(const struct pf_adapter *a);
/*
 * Are the mapped bytes still those that were digested? PF_E_TRUNCATED; PF_E_CHANGED when the open file was written to. A file whose
 * last name is gone (another was renamed over it) keeps its bytes. One system call.
 */
int adapter_check(const struct pf_adapter *a, pf_error *err);
const char *adapter_path(const struct pf_adapter *a);

struct resolve_opts {
    bool has_alpha;
    double alpha;       /* overrides every source */
    const char *target; /* components: "a" or "a,b"; NULL, "" and "all": every one */
    bool allow_unmatched;
};

/* Marks the components that a list names ("a", "a,b"; NULL, "" and "all": every one) in out_is_named[n_components]. PF_E_NOTFOUND
 * names those that there are. */
int target_list_parse(const struct pf_checkpoint *ckpt, const char *list, bool *out_is_named,
                      pf_error *err);

struct unmatched {
    const char *key;     /* full key as in the file; borrowed from the adapter */
    const char *nearest; /* nearest name in the base, or NULL; borrowed from the checkpoint */
};

/* The adapter against one checkpoint. deltas are sorted by (i_tensor, row0, key): canonical inside an adapter. */
struct resolution {
    struct delta *deltas;
    size_t n_deltas;
    struct unmatched *unmatched;
    size_t n_unmatched;
    uint32_t n_keys_matched; /* tensors of the file that take part */
    char **notes; /* warnings and remarks, those of the adapter (pf_adapter_note) included; owned */
    size_t n_notes;
    double alpha_effective; /* NaN when the file's own alphas rule; enters the composition digest */
};

/*
 * PF_E_UNMATCHED (keys listed: first 20, the count, nearest names; also when allowed but nothing matched at all),
 * PF_E_MISMATCH, PF_E_AMBIGUOUS, PF_E_CONFLICT, PF_E_UNSUPPORTED. Thread-safe.
 */
int adapter_resolve(const struct pf_adapter *a, const struct pf_checkpoint *ckpt,
                    const struct resolve_opts *opts, struct resolution *out, pf_error *err);
void resolution_release(struct resolution *r);

#endif
