/*
 * Advice to the page cache, see export_pages.h. Called by every worker around every item.
 */
#include "export/export_pages.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/mem.h"

#define N_PAGES_SEEN      2048 /* of an item: 8 MiB of 4 KiB pages */
#define MEMINFO_BYTES_MAX 65536

/* "MemAvailable:   123 kB"; 0 when unknown. */
static uint64_t available_bytes(void)
{
    static const char key[] = "MemAvailable:";
    char *text = NULL;
    size_t n = 0;
    uint64_t kib = 0;
    if (file_read_all("/proc/meminfo", MEMINFO_BYTES_MAX, &text, &n, NULL))
        return 0;
    const char *p = strstr(text, key); /* the text ends with a NUL */
    for (p = p ? p + sizeof key - 1 : ""; *p == ' '; p++) {
    }
    for (; *p >= '0' && *p <= '9'; p++)
        kib = kib * 10 + (uint64_t)(*p - '0');
    mem_free(text);
    return kib * 1024;
}

int pages_init(struct pages *p, const struct export_plan *plan, pf_error *err)
{
    const uint64_t n_free = available_bytes();
    *p = (struct pages){.is_in_large = n_free && plan->ckpt->n_bytes > n_free,
                        .is_out_large = n_free && plan->n_bytes > n_free / 2};
    if (!p->is_in_large)
        return PF_OK;
    p->is_ours = mem_calloc(plan->n_items, 1);
    return p->is_ours ? PF_OK : err_nomem(err, plan->n_items, "page notes");
}

void pages_release(struct pages *p)
{
    mem_free((void *)(uintptr_t)p->is_ours);
    *p = (struct pages){0};
}

/* The whole pages around the origin of an item, in its mapping. */
static bool origin(const struct export_plan *plan, const struct item *item, uint8_t **out_p,
                   size_t *out_n)
{
    const struct out_file *f = &plan->files[item->i_file];
    if (!f->st || item->kind == ITEM_TEXT)
        return false;
    const uint64_t n_page = (uint64_t)sysconf(_SC_PAGESIZE);
    const uint64_t begin = item->off_in & ~(n_page - 1);
    /* madvise takes no const, and changes nothing that a reader could see. */
    *out_p = (uint8_t *)(uintptr_t)st_map(f->st)->p + begin;
    *out_n = (size_t)(item->off_in + item->n_in - begin);
    return true;
}

/* Were most pages in the cache? Some are anyway: the content id samples every tensor. For files of other users the kernel says yes. */
static bool is_cached(uint8_t *p, size_t n_bytes)
{
    unsigned char seen[N_PAGES_SEEN + 1];
    const size_t n_page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t n = (n_bytes + n_page - 1) / n_page;
    if (n > sizeof seen || mincore(p, n_bytes, seen))
        return true;
    size_t n_seen = 0;
    for (size_t i = 0; i < n; i++)
        n_seen += seen[i] & 1;
    return n_seen > n / 2;
}

void pages_ahead(struct pages *p, const struct export_plan *plan, size_t i_item)
{
    uint8_t *at = NULL;
    size_t n = 0;
    if (i_item >= plan->i_item1 || !origin(plan, &plan->items[i_item], &at, &n))
        return;
    const struct item *item = &plan->items[i_item];
    if (p->is_ours && !is_cached(at, n))
        atomic_store_explicit(&p->is_ours[i_item], 1, memory_order_relaxed); /* a hint, no order */
    file_map_fetch(st_map(plan->files[item->i_file].st), item->off_in, item->n_in);
}

void pages_populate(const struct export_plan *plan, const struct item *item)
{
    uint8_t *at = NULL;
    size_t n = 0;
    if (item->kind == ITEM_MERGE && origin(plan, item, &at, &n))
        (void)madvise(at, n, MADV_POPULATE_READ); /* one call in place of a fault per 16 pages */
}

void pages_behind(struct pages *p, const struct export_plan *plan, size_t i_item)
{
    const struct item *item = &plan->items[i_item];
    uint8_t *at = NULL;
    size_t n = 0;
    if (!origin(plan, item, &at, &n))
        return;
    const bool is_ours =
        p->is_ours && atomic_load_explicit(&p->is_ours[i_item], memory_order_relaxed);
    if (item->kind == ITEM_MERGE || is_ours) /* page tables; the cache keeps the pages */
        (void)madvise(at, n, MADV_DONTNEED);
    if (is_ours)
        (void)posix_fadvise(st_map(plan->files[item->i_file].st)->fd, (off_t)item->off_in,
                            (off_t)item->n_in, POSIX_FADV_DONTNEED);
}
