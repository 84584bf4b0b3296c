/*
 * export/export_pages.c: what a merge alone read from a base larger than memory leaves the page cache behind it; what was cached
 * before stays; and reading ahead reads.
 */
#include "export_fixture.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "export/export_pages.h"

/* Of the origin of an item, the share of pages that are cached, in percent. */
static unsigned cached_percent(const struct export_plan *plan, size_t i_item)
{
    static unsigned char seen[4096];
    const struct item *item = &plan->items[i_item];
    const size_t n_page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t n = (item->n_in + n_page - 1) / n_page;
    const uint64_t off = item->off_in & ~(uint64_t)(n_page - 1);
    unsigned n_in = 0;
    void *p = mmap(NULL, n * n_page, PROT_READ, MAP_SHARED,
                   st_map(plan->files[item->i_file].st)->fd, (off_t)off);
    assert_true(p != MAP_FAILED && n <= sizeof seen);
    assert_int_equal(mincore(p, n * n_page, seen), 0);
    for (size_t i = 0; i < n; i++)
        n_in += seen[i] & 1;
    assert_int_equal(munmap(p, n * n_page), 0);
    return (unsigned)(100 * n_in / n);
}

static void evict(const struct fx *f, const char *path)
{
    const struct file_map *m = st_map(f->ckpt->files[0]);
    /* mapped pages cannot be evicted */
    assert_int_equal(madvise((void *)(uintptr_t)m->p, m->n_bytes, MADV_DONTNEED), 0);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(fdatasync(fd), 0);
    assert_int_equal(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    (void)close(fd);
}

static size_t first_merge(const struct export_plan *plan)
{
    size_t i = 0;
    while (i < plan->n_items && plan->items[i].kind != ITEM_MERGE)
        i++;
    assert_true(i < plan->n_items);
    return i;
}

static void drops_what_only_we_read_and_keeps_what_was_there(void **state)
{
    const char *base = test_path(state, "base.safetensors");
    struct fx f;
    struct export_plan plan;
    pf_error err = {0};
    fx_open(&f, state, 0.75);
    assert_ok(plan_build(f.ckpt, f.comp, 0, 1, &plan, &err), &err);
    const size_t i = first_merge(&plan);
    struct pages p = {.is_in_large = true, .is_ours = mem_calloc(plan.n_items, 1)};
    evict(&f, base);
    if (cached_percent(&plan, i) > 0) {
        print_message("skipped: this file system keeps its pages\n");
    } else {
        pages_ahead(&p, &plan, i);
        assert_int_equal(atomic_load(&p.is_ours[i]), 1);
        pages_populate(&plan, &plan.items[i]);
        assert_int_equal(cached_percent(&plan, i), 100);
        pages_behind(&p, &plan, i);
        assert_in_range(cached_percent(&plan, i), 0, 5); /* border pages belong to neighbours too */
        /* Somebody else has it in the cache: it stays. */
        atomic_store(&p.is_ours[i], 0);
        pages_populate(&plan, &plan.items[i]);
        pages_ahead(&p, &plan, i);
        assert_int_equal(atomic_load(&p.is_ours[i]), 0);
        pages_behind(&p, &plan, i);
        assert_int_equal(cached_percent(&plan, i), 100);
    }
    pages_release(&p);
    export_plan_release(&plan);
    fx_close(&f);
}

static void a_small_base_is_not_dropped(void **state)
{
    struct fx f;
    struct export_plan plan;
    struct pages p;
    pf_error err = {0};
    fx_open(&f, state, 0.75);
    assert_ok(plan_build(f.ckpt, f.comp, 0, 1, &plan, &err), &err);
    assert_ok(pages_init(&p, &plan, &err), &err);
    assert_false(p.is_in_large);
    assert_false(p.is_out_large);
    assert_null((void *)(uintptr_t)p.is_ours);
    const size_t i = first_merge(&plan);
    pages_ahead(&p, &plan, i);
    pages_populate(&plan, &plan.items[i]);
    pages_behind(&p, &plan, i);
    assert_int_equal(cached_percent(&plan, i), 100);
    pages_release(&p);
    export_plan_release(&plan);
    fx_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(drops_what_only_we_read_and_keeps_what_was_there),
        in_dir(a_small_base_is_not_dropped),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
