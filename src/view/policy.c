/*
 * Dropping behind: weights that do not fit into the page cache and are read over and over would hit nothing, so what is not kept leaves
 * at once. Called at layer borders. Must never change bytes: only clean pages of read-only mappings are touched.
 */
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "base/mem.h"
#include "view/view.h"

#define PROBE_PAGES ((size_t)1024)
#define PROBE_MIN   ((size_t)64) /* fewer pages say nothing */

struct stream_policy *policy_new(uint32_t n_layers)
{
    struct stream_policy *p = mem_calloc(1, sizeof *p);
    bool *is_kept = mem_calloc(n_layers + 1, sizeof *is_kept);
    if (!p || !is_kept) {
        mem_free(p);
        mem_free(is_kept);
        return NULL;
    }
    atomic_init(&p->n_refs, 1);
    p->n_layers = n_layers;
    p->is_kept = is_kept;
    return p;
}

void policy_ref(struct stream_policy *p)
{
    if (p)
        atomic_fetch_add_explicit(&p->n_refs, 1, memory_order_relaxed);
}

void policy_unref(struct stream_policy *p)
{
    /* acq_rel: the last owner must see everything that the others did with the object. */
    if (!p || atomic_fetch_sub_explicit(&p->n_refs, 1, memory_order_acq_rel) != 1)
        return;
    mem_free(p->is_kept);
    mem_free(p);
}

static void drop_as(int how, const struct file_map *m, uint8_t *at, size_t n)
{
    if (how == DROP_PAGEOUT) {
        /* Advice: what it did is looked at, not what it returns */
        (void)madvise(at, n, MADV_PAGEOUT);
    } else if (how == DROP_DONTNEED) {
        /* fadvise does nothing while the range is mapped: unmap the pages first. */
        (void)madvise(at, n, MADV_DONTNEED);
        (void)posix_fadvise(m->fd, (off_t)(at - m->p), (off_t)n, POSIX_FADV_DONTNEED);
    }
}

/* Pages of the first stretch that are in the page cache. */
static size_t n_cached(uint8_t *at, size_t n_pages, size_t page)
{
    unsigned char in_core[PROBE_PAGES];
    size_t n = 0;
    if (mincore(at, n_pages * page, in_core))
        return 0;
    for (size_t i = 0; i < n_pages; i++)
        n += in_core[i] & 1;
    return n;
}

/* PAGEOUT has no effect on files of another user: look once, and remember what works. */
static int settle(const struct file_map *m, uint8_t *at, size_t n, size_t page)
{
    size_t n_pages = n / page < PROBE_PAGES ? n / page : PROBE_PAGES;
    if (!file_shows_cache(m->fd)) { /* PAGEOUT would do nothing, and nothing can be seen */
        drop_as(DROP_DONTNEED, m, at, n);
        return DROP_DONTNEED;
    }
    size_t before = n_cached(at, n_pages, page);
    if (before < PROBE_MIN) {
        drop_as(DROP_PAGEOUT, m, at, n);
        return DROP_UNTRIED;
    }
    for (int how = DROP_PAGEOUT; how < DROP_NOTHING; how++) {
        drop_as(how, m, at, n);
        if (n_cached(at, n_pages, page) < before / 2)
            return how;
    }
    log_at(PF_LOG_WARN,
           "pages of mapped weights cannot be dropped here: the page cache decides alone");
    return DROP_NOTHING;
}

void policy_drop(struct stream_policy *policy, const struct file_map *m, const uint8_t *p,
                 uint64_t n_bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    /* Whole pages only: the edges belong to neighbours too. */
    uintptr_t at = ((uintptr_t)p + page - 1) & ~(page - 1),
              end = ((uintptr_t)p + n_bytes) & ~(page - 1);
    if (at >= end)
        return;
    /* relaxed: two threads may settle at the same time and find the same */
    int how = atomic_load_explicit(&policy->how_to_drop, memory_order_relaxed);
    if (how == DROP_UNTRIED) {
        how = settle(m, (uint8_t *)at, end - at, page);
        atomic_store_explicit(&policy->how_to_drop, how, memory_order_relaxed);
    } else {
        drop_as(how, m, (uint8_t *)at, end - at);
    }
    if (how != DROP_NOTHING)
        atomic_fetch_add_explicit(&policy->n_bytes_dropped, end - at, memory_order_relaxed);
}
