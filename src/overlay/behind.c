/*
 * What a builder leaves behind: nothing. Base pages that were in the page cache only for its sake are dropped, those that others had
 * there stay; written pages go to the disk at once, a few blocks at a time, and leave the cache clean. Otherwise one build would
 * push the weights that are being served out of memory. Must never change bytes: all of it is advice.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "overlay/overlay_int.h"

#define PROBE_PAGES ((size_t)1024)

/* One changed tensor's pages: [page0, page0 + n_pages * page) covers it. */
struct span {
    const uint8_t *p; /* first byte of the tensor */
    uintptr_t page0;
    size_t i_first, n_pages; /* in `was_cached` */
    const struct file_map *map;
};

struct behind {
    size_t page;
    struct span *spans; /* per target of the composition */
    /* A bit per page: was it there before we came? Asked for all layers at the start: the kernel reads ahead of us, over the border of
     * the layer at hand, and what it brought would look like somebody else's later. */
    uint8_t *was_cached;
    struct stream_policy *how; /* finds out once which way of dropping works */
};

void behind_free(struct behind *b)
{
    if (!b)
        return;
    policy_unref(b->how);
    mem_free(b->spans);
    mem_free(b->was_cached);
    mem_free(b);
}

static size_t spans_init(struct behind *b, const struct pf_composition *comp)
{
    size_t n_pages = 0;
    for (size_t i = 0; i < comp->n_targets; i++) {
        const struct ckpt_tensor *t = &comp->ckpt->tensors[comp->i_tensors[i]];
        uintptr_t begin = (uintptr_t)t->p & ~(b->page - 1),
                  end = ((uintptr_t)t->p + t->n_bytes + b->page - 1) & ~(b->page - 1);
        b->spans[i] = (struct span){.p = t->p,
                                    .page0 = begin,
                                    .i_first = n_pages,
                                    .n_pages = (end - begin) / b->page,
                                    .map = st_map(comp->ckpt->files[t->i_file])};
        n_pages += b->spans[i].n_pages;
    }
    return n_pages;
}

static void probe(struct behind *b, const struct span *s)
{
    unsigned char in_core[PROBE_PAGES];
    for (size_t i = 0; i < s->n_pages; i += PROBE_PAGES) {
        size_t n = s->n_pages - i < PROBE_PAGES ? s->n_pages - i : PROBE_PAGES;
        /* Where the kernel will not say (a file that is not ours: it then says "cached"), nothing is dropped. */
        if (mincore((void *)(s->page0 + i * b->page), n * b->page, in_core))
            memset(in_core, 1, n);
        for (size_t k = 0; k < n; k++)
            if (in_core[k] & 1)
                b->was_cached[(s->i_first + i + k) / 8] |=
                    (uint8_t)(1u << ((s->i_first + i + k) % 8));
    }
}

int behind_new(const struct pf_composition *comp, struct behind **out, pf_error *err)
{
    struct behind *b = mem_calloc(1, sizeof *b);
    if (!b)
        return err_nomem(err, sizeof *b, "a list of pages");
    b->page = (size_t)sysconf(_SC_PAGESIZE);
    b->how = policy_new(0);
    b->spans = mem_calloc(comp->n_targets, sizeof *b->spans);
    size_t n_pages = b->spans ? spans_init(b, comp) : 0;
    b->was_cached = mem_calloc(n_pages / 8 + 1, 1);
    if (!b->how || !b->spans || !b->was_cached) {
        behind_free(b);
        return err_nomem(err, n_pages / 8, "a list of pages");
    }
    for (size_t i = 0; i < comp->n_targets; i++)
        probe(b, &b->spans[i]);
    *out = b;
    return PF_OK;
}

/* Pages from the one that holds byte off up to, not including, the one that holds byte off + n: blocks share none. */
static void pages_of(const struct behind *b, const struct span *s, uint64_t off, size_t n,
                     size_t *out_first, size_t *out_end)
{
    uintptr_t begin = (uintptr_t)s->p + off, end = begin + n;
    *out_first = (begin - s->page0) / b->page;
    *out_end = (end - s->page0) / b->page;
}

static bool was_cached(const struct behind *b, const struct span *s, size_t i)
{
    return b->was_cached[(s->i_first + i) / 8] >> ((s->i_first + i) % 8) & 1;
}

/* The next run of pages that were not cached; false: there is none before `end`. */
static bool next_run(const struct behind *b, const struct span *s, size_t *io_at, size_t end,
                     size_t *out_n)
{
    size_t i = *io_at, k;
    while (i < end && was_cached(b, s, i))
        i++;
    for (k = i; k < end && !was_cached(b, s, k);)
        k++;
    *io_at = i;
    *out_n = k - i;
    return k > i;
}

void behind_fetch(struct behind *b, size_t i_target, uint64_t off, size_t n_bytes)
{
    const struct span *s = &b->spans[i_target];
    size_t at, end, n;
    pages_of(b, s, off, n_bytes, &at, &end);
    if (end < s->n_pages)
        end++; /* the last page of a block is read with it, though it is dropped with the next one */
    for (; next_run(b, s, &at, end, &n); at += n)
        file_map_fetch(s->map, s->page0 + at * b->page - (uintptr_t)s->map->p, n * b->page);
}

void behind_drop(struct behind *b, size_t i_target, uint64_t off, size_t n_bytes)
{
    const struct span *s = &b->spans[i_target];
    size_t at, end, n;
    pages_of(b, s, off, n_bytes, &at, &end);
    for (; next_run(b, s, &at, end, &n); at += n)
        policy_drop(b->how, s->map, (const uint8_t *)(s->page0 + at * b->page), n * b->page);
}

static bool is_any_cached(const struct behind *b, uintptr_t p, size_t n_pages)
{
    unsigned char in_core[PROBE_PAGES];
    if (mincore((void *)p, n_pages * b->page, in_core))
        return false;
    for (size_t i = 0; i < n_pages; i++)
        if (in_core[i] & 1)
            return true;
    return false;
}

void behind_sweep(struct behind *b, size_t i_target0, size_t n_targets)
{
    for (size_t i = i_target0; i < i_target0 + n_targets; i++) {
        const struct span *s = &b->spans[i];
        size_t n;
        for (size_t at = 0; next_run(b, s, &at, s->n_pages, &n); at += n) {
            n = n < PROBE_PAGES ? n : PROBE_PAGES;
            uintptr_t p = s->page0 + at * b->page;
            if (!is_any_cached(b, p, n))
                continue;
            (void)madvise((void *)p, n * b->page, MADV_DONTNEED);
            (void)posix_fadvise(s->map->fd, (off_t)(p - (uintptr_t)s->map->p), (off_t)(n * b->page),
                                POSIX_FADV_DONTNEED);
        }
    }
}

/* ----------------------------------------------------------------------------------------- written pages */

int dirty_add(struct dirty *d, int fd, uint64_t off, size_t n_bytes, const char *path,
              pf_error *err)
{
    int sys_errno = 0;
    (void)sync_file_range(fd, (off64_t)off, (off64_t)n_bytes, SYNC_FILE_RANGE_WRITE);
    if (d->n == N_DIRTY) {
        off64_t o = (off64_t)d->off[0], n = (off64_t)d->n_bytes[0];
        /* This call consumes a writeback error: the fdatasync at the end would not hear of it again. */
        if (sync_file_range(fd, o, n,
                            SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                                SYNC_FILE_RANGE_WAIT_AFTER))
            sys_errno = errno;
        (void)posix_fadvise(fd, o, n, POSIX_FADV_DONTNEED);
        d->n--;
        memmove(&d->off[0], &d->off[1], d->n * sizeof d->off[0]);
        memmove(&d->n_bytes[0], &d->n_bytes[1], d->n * sizeof d->n_bytes[0]);
    }
    d->off[d->n] = off;
    d->n_bytes[d->n++] = n_bytes;
    if (sys_errno == EIO || sys_errno == ENOSPC || sys_errno == EDQUOT)
        return err_sys(err, sys_errno, "cannot write back %zu bytes of '%s'", d->n_bytes[0], path);
    return PF_OK; /* file systems without the call leave it to the fdatasync */
}
