/*
 * Questions that longer-lived owners ask about an open adapter: is its file still whole, still the same, still used by somebody. Cheap
 * enough for every change; none of them changes anything.
 */
#include <stdatomic.h>
#include <sys/stat.h>

#include "adapter/adapter_int.h"
#include "base/guard.h"

bool adapter_is_truncated(const struct pf_adapter *a)
{
    return a->file && guard_tripped(st_map(a->file)->i_guard);
}

uint32_t adapter_n_refs(const struct pf_adapter *a)
{
    return atomic_load_explicit(&a->n_refs, memory_order_relaxed);
}

/* Looks at the path, not at the open file: a new file may have been renamed over it. */
bool adapter_is_current(const struct pf_adapter *a)
{
    struct file_stamp now;
    return a->file && file_stamp_now(st_path(a->file), &now) &&
           file_stamp_eq(&now, &st_map(a->file)->stamp);
}

int adapter_check(const struct pf_adapter *a, pf_error *err)
{
    struct stat st;
    if (!a->file)
        return PF_OK;
    const struct file_map *m = st_map(a->file);
    int rc = file_map_check(m, st_path(a->file), err);
    if (rc != PF_E_CHANGED)
        return rc;
    /* Losing its last name changes a file's ctime and nothing else, and nobody can open it for writing any more. */
    if (fstat(m->fd, &st) == 0 && st.st_nlink == 0 && (uint64_t)st.st_size == m->n_bytes &&
        (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec == m->stamp.mtime_ns)
        return PF_OK;
    return err_set(err, PF_E_CHANGED, "adapter '%s' changed while in use: load it again",
                   st_path(a->file));
}
