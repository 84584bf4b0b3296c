/*
 * Building overlays: the bytes are those of the streamed composition, whole layers are kept, nothing is built in vain or half, and
 * neither memory nor the page cache pays for it.
 */
#include "overlay_fixture.h"

#include <sys/mman.h>
#include <sys/vfs.h>

#include "base/proc.h"

#define TMPFS 0x01021994

static bool is_on_disk(const char *path)
{
    struct statfs s;
    assert_int_equal(statfs(path, &s), 0);
    return s.f_type != TMPFS;
}

static void bytes_are_those_of_the_stream(void **state)
{
    static const struct {
        int64_t n_rows, n_cols;
        unsigned n_threads;
    } cases[] = {
        {16, 24, 1},
        {1531, 1433, 2}, /* a row lies across the border of two 4 MiB blocks, in bf16 and in f32 */
        {3, 1500000, 2}, /* a row is longer than a block */
    };
    for (size_t i = 0; i < PF_COUNTOF(cases); i++) {
        struct fx fx;
        fx = (struct fx){
            .n_layers = 2, .n_linears = 2, .n_rows = cases[i].n_rows, .n_cols = cases[i].n_cols};
        fx_open_shape(&fx, state, cases[i].n_threads);
        struct overlay_build_report r;
        assert_ok(fx_build(&fx, fx.comp, &r), &fx.err);
        assert_int_equal(r.n_layers_written, 2);
        assert_int_equal(r.n_layers_kept, 0);
        fx_assert_adopts(&fx, fx.comp);
        struct pf_composition *f32 = fx_compose(&fx, -0.75, PF_MERGE_F32);
        assert_ok(fx_build(&fx, f32, &r), &fx.err);
        assert_true(r.n_bytes_written > 4 * 4 * (uint64_t)(cases[i].n_rows * cases[i].n_cols));
        fx_assert_adopts(&fx, f32);
        fx_assert_no_litter(&fx);
        pf_composition_free(f32);
        fx_close(&fx);
        assert_ok(file_remove_tree(fx.cache, &fx.err), &fx.err);
    }
}

static void layer_files_are_plain_safetensors_on_a_page_boundary(void **state)
{
    struct fx fx;
    fx_open(&fx, state, 2, 40, 24, 1);
    assert_ok(fx_build(&fx, fx.comp, NULL), &fx.err);
    char *name = fx_layer_name(&fx, 1);
    struct st_file *f = NULL;
    assert_ok(st_open(fx_entry(&fx, fx.comp, name), &f, &fx.err), &fx.err);
    assert_int_equal(st_n_tensors(f), 1);
    assert_true(str_eqz(st_tensor(f, 0)->name, "transformer_blocks.1.attn1.to_q.weight"));
    assert_int_equal(st_tensor(f, 0)->dtype, PF_BF16);
    assert_int_equal(st_tensor(f, 0)->off_bytes % 4096, 0);
    st_close(f);
    mem_free(name);
    fx_close(&fx);
}

static void a_complete_entry_is_left_alone(void **state)
{
    struct fx fx;
    struct overlay_build_report r;
    fx_open(&fx, state, 3, 16, 16, 1);
    assert_ok(fx_build(&fx, fx.comp, NULL), &fx.err);
    struct stat before, after;
    assert_int_equal(stat(fx_entry(&fx, fx.comp, "manifest.json"), &before), 0);
    uint64_t n_written = file_bytes_written();
    assert_ok(fx_build(&fx, fx.comp, &r), &fx.err);
    assert_int_equal(file_bytes_written(), n_written);
    assert_int_equal(r.n_layers_kept, 3);
    assert_int_equal(r.n_layers_written, 0);
    assert_int_equal(stat(fx_entry(&fx, fx.comp, "manifest.json"), &after), 0);
    assert_int_equal(before.st_ino, after.st_ino);
    struct pf_composition *none = fx_compose(&fx, 0, PF_MERGE_BASE);
    assert_int_equal(fx_build(&fx, none, NULL), PF_E_INVALID);
    assert_err(&fx.err, PF_E_INVALID, "changes nothing");
    pf_composition_free(none);
    fx_close(&fx);
}

static bool cancel_at(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    unsigned *n_left = ctx;
    assert_string_equal(what, "overlay");
    assert_true(done <= total);
    return (*n_left)-- > 1;
}

static void cancelled_at_any_moment_it_is_resumed(void **state)
{
    struct fx fx;
    fx_open(&fx, state, 4, 16, 16, 1);
    bool was_cancelled = true;
    uint32_t n_kept_max = 0;
    for (unsigned k = 1; was_cancelled; k++) {
        unsigned n_left = k;
        struct overlay_build_report r;
        struct overlay_build_opts o = {
            .pool = fx.pool, .progress = cancel_at, .progress_ctx = &n_left};
        (void)overlay_evict(fx.store, fx.comp->digest, NULL);
        int rc = overlay_build(fx.store, fx.comp, &o, &r, &fx.err);
        fx_assert_no_litter(&fx);
        was_cancelled = rc != PF_OK;
        if (!was_cancelled)
            break;
        assert_err(&fx.err, PF_E_CANCELLED, "cancelled");
        struct overlay *none = NULL;
        assert_int_equal(overlay_adopt(fx.store, fx.comp, OVERLAY_VERIFY_FULL, &none, &fx.err),
                         PF_E_NOTFOUND);
        uint32_t n_whole = r.n_layers_written;
        assert_ok(fx_build(&fx, fx.comp, &r), &fx.err);
        assert_int_equal(r.n_layers_kept, n_whole);
        assert_int_equal(r.n_layers_written, 4 - n_whole);
        n_kept_max = r.n_layers_kept > n_kept_max ? r.n_layers_kept : n_kept_max;
        fx_assert_adopts(&fx, fx.comp);
        assert_true(k < 100);
    }
    assert_int_equal(n_kept_max, 4); /* cancelled at the very end: only the manifest was missing */
    fx_close(&fx);
}

static void a_layer_that_is_not_ours_is_written_again(void **state)
{
    struct fx fx;
    struct overlay_build_report r;
    fx_open(&fx, state, 3, 16, 16, 1);
    assert_ok(fx_build(&fx, fx.comp, NULL), &fx.err);
    assert_int_equal(unlink(fx_entry(&fx, fx.comp, "manifest.json")), 0);
    char *a = fx_layer_name(&fx, 0), *b = fx_layer_name(&fx, 2);
    fx_flip(fx_entry(&fx, fx.comp, a), fx_size(fx_entry(&fx, fx.comp, a)) - 1);
    assert_int_equal(truncate(fx_entry(&fx, fx.comp, b), 4000), 0);
    assert_ok(fx_build(&fx, fx.comp, &r), &fx.err);
    assert_int_equal(r.n_layers_kept, 1);
    fx_assert_adopts(&fx, fx.comp);
    mem_free(a);
    mem_free(b);
    fx_close(&fx);
}

/* Pages of the base that came since the start, at most at any time. */
struct watch {
    uint8_t *p;
    size_t n_pages, n_max;
    const unsigned char *before;
    unsigned char *now;
};

static bool watch_pages(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    struct watch *w = ctx;
    size_t n = 0;
    (void)what;
    (void)done;
    (void)total;
    assert_int_equal(mincore(w->p, w->n_pages * 4096, w->now), 0);
    for (size_t i = 0; i < w->n_pages; i++)
        n += ~w->before[i] & w->now[i] & 1;
    w->n_max = n > w->n_max ? n : w->n_max;
    return true;
}

static void memory_is_bounded_and_the_page_cache_left_as_it_was(void **state)
{
    struct fx fx;
    fx_open(&fx, state, 3, 8192, 2048, 2); /* 100 MB */
    int fd = open(fx.base, O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(fsync(fd), 0);
    struct pf_composition *comp = fx_compose(&fx, 0.5, PF_MERGE_BASE);
    size_t n = (size_t)fx_size(fx.base), n_pages = (n + 4095) / 4096;
    uint8_t *p = mmap(NULL, n, PROT_READ, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(p, MAP_FAILED);
    /* Half of it is in the cache before. */
    const struct file_map *m = st_map(fx.ckpt->files[0]);
    (void)madvise((void *)(uintptr_t)m->p, n, MADV_DONTNEED);
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    /* Exact reads: what the kernel reads ahead arrives later, and would look like the builder's. */
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
    uint8_t chunk[65536];
    for (size_t off = 0; off < n / 2; off += sizeof chunk)
        assert_int_equal(pread(fd, chunk, sizeof chunk, (off_t)off), sizeof chunk);
    (void)madvise(p, n, MADV_DONTNEED);
    unsigned char *before = malloc(n_pages), *after = malloc(n_pages);
    assert_non_null(before);
    assert_non_null(after);
    assert_int_equal(mincore(p, n, before), 0);

    struct peak *peak = NULL;
    struct overlay_build_report r;
    assert_ok(peak_start(&peak, &fx.err), &fx.err);
    uint64_t n_anon = proc_anon_bytes();
    struct watch w = {.p = p, .n_pages = n_pages, .before = before, .now = after};
    struct overlay_build_opts o = {.pool = fx.pool, .progress = watch_pages, .progress_ctx = &w};
    assert_ok(overlay_build(fx.store, comp, &o, &r, &fx.err), &fx.err);
    uint64_t n_peak = peak_stop(peak);
    assert_true(r.n_bytes_written > 100000000);
    print_message("built %llu MB: %llu MiB of anonymous memory above %llu\n",
                  (unsigned long long)(r.n_bytes_written / 1000000),
                  (unsigned long long)((n_peak - n_anon) >> 20),
                  (unsigned long long)(n_anon >> 20));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    assert_true(n_peak - n_anon <= (uint64_t)64 << 20);
#endif
    assert_int_equal(mincore(p, n, after), 0);
    size_t n_before = 0, n_kept = 0, n_new = 0;
    for (size_t i = 0; i < n_pages; i++) {
        n_before += before[i] & 1;
        n_kept += before[i] & after[i] & 1;
        n_new += ~before[i] & after[i] & 1;
    }
    print_message("of %zu base pages %zu were cached before; %zu of them stayed, %zu came, %zu at "
                  "most meanwhile\n",
                  n_pages, n_before, n_kept, n_new, w.n_max);
    if (is_on_disk(fx.cache) && n_before < n_pages * 6 / 10) {
        assert_true(n_kept >= n_before * 9 / 10);
        assert_true(n_new <= n_pages / 100);
        assert_true(w.n_max <= 4 * 1024); /* of a layer of 8192: blocks go one by one */
        /* And what was written is on the disk, not in memory. */
        char *name = fx_layer_name(&fx, 1);
        struct file_map out;
        assert_ok(file_map_open(&out, fx_entry(&fx, comp, name), &fx.err), &fx.err);
        size_t n_out = 0, n_out_pages = (size_t)out.n_bytes / 4096;
        assert_int_equal(mincore((void *)(uintptr_t)out.p, n_out_pages * 4096, after), 0);
        for (size_t i = 0; i < n_out_pages; i++)
            n_out += after[i] & 1;
        assert_true(n_out <= n_out_pages / 10);
        file_map_close(&out);
        mem_free(name);
    } else {
        print_message("page cache: cannot be looked at here (tmpfs, or pages do not go)\n");
    }
    fx_assert_adopts(&fx, comp);
    munmap(p, n);
    close(fd);
    free(before);
    free(after);
    pf_composition_free(comp);
    fx_close(&fx);
}

/* ------------------------------------------------------------------------------- sources that change */

struct trick {
    struct fx *fx;
    unsigned n_calls, i_call;
    void (*fn)(struct fx *fx);
};

static bool play(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    struct trick *t = ctx;
    (void)what;
    (void)done;
    (void)total;
    if (++t->n_calls == t->i_call)
        t->fn(t->fx);
    return true;
}

static int build_with_trick(struct fx *fx, unsigned i_call, void (*fn)(struct fx *))
{
    struct trick t = {.fx = fx, .i_call = i_call, .fn = fn};
    struct overlay_build_opts o = {.pool = fx->pool, .progress = play, .progress_ctx = &t};
    int rc = overlay_build(fx->store, fx->comp, &o, NULL, &fx->err);
    assert_true(t.n_calls >= i_call);
    return rc;
}

static void cut_base(struct fx *fx)
{
    assert_int_equal(truncate(fx->base, 4096), 0);
}

static void touch_base(struct fx *fx)
{
    fx_flip(fx->base, fx_size(fx->base) - 3);
}

static void replace_adapter(struct fx *fx)
{
    char other[600];
    struct stat st;
    snprintf(other, sizeof other, "%s.new", fx->adapter);
    fx_write_lora(fx, other, 77);
    assert_int_equal(stat(fx->adapter, &st), 0);
    struct timespec t[2] = {st.st_atim, st.st_mtim};
    assert_int_equal(utimensat(AT_FDCWD, other, t, 0), 0);
    assert_int_equal(fx_size(other), fx_size(fx->adapter));
    assert_int_equal(rename(other, fx->adapter), 0);
}

static void remove_cache(struct fx *fx)
{
    assert_ok(file_remove_tree(fx->cache, &fx->err), &fx->err);
}

static void assert_nothing_published(struct fx *fx, uint32_t n_layers_max)
{
    struct overlay_entry *e = NULL;
    size_t n = 0;
    assert_ok(overlay_list(fx->store, &e, &n, &fx->err), &fx->err);
    assert_true(n <= 1);
    char **files = NULL;
    size_t n_files = 0;
    if (n == 1) {
        assert_true(e[0].is_partial);
        assert_int_equal(file_list(fx_entry(fx, fx->comp, ""), &files, &n_files, NULL), PF_OK);
        assert_true(n_files <= n_layers_max);
        file_list_free(files, n_files);
    }
    overlay_list_free(e, n);
    fx_assert_no_litter(fx);
}

static void a_base_that_shrinks_is_an_error_and_nothing_is_published(void **state)
{
    struct fx fx;
    fx_open(&fx, state, 3, 64, 512, 1);
    assert_int_equal(build_with_trick(&fx, 1, cut_base), PF_E_TRUNCATED);
    assert_err(&fx.err, PF_E_TRUNCATED, "base.safetensors", "shrank");
    assert_nothing_published(&fx, 0);
    fx_close(&fx);
}

static void a_base_that_is_written_to_is_an_error(void **state)
{
    struct fx fx;
    fx_open(&fx, state, 3, 64, 512, 1);
    assert_int_equal(build_with_trick(&fx, 3, touch_base), PF_E_CHANGED); /* before layer 1 */
    assert_err(&fx.err, PF_E_CHANGED, "base.safetensors");
    assert_nothing_published(&fx, 1);
    fx_close(&fx);
}

static void a_replaced_adapter_does_not_reach_the_cache(void **state)
{
    struct fx fx;
    fx_open(&fx, state, 3, 16, 16, 1);
    assert_int_equal(build_with_trick(&fx, 3, replace_adapter), PF_E_CHANGED);
    assert_err(&fx.err, PF_E_CHANGED, "lora.safetensors", "replaced");
    assert_nothing_published(&fx, 1);
    /* Opened again it is another one: size and mtime do not name it, its bytes do. */
    struct pf_adapter *old = fx.lora;
    assert_ok(pf_adapter_open(fx.adapter, &fx.lora, &fx.err), &fx.err);
    struct pf_composition *comp = fx_compose(&fx, 1, PF_MERGE_BASE);
    assert_string_not_equal(comp->digest_hex, fx.comp->digest_hex);
    assert_ok(fx_build(&fx, comp, NULL), &fx.err);
    fx_assert_adopts(&fx, comp);
    pf_composition_free(comp);
    pf_adapter_close(old);
    fx_close(&fx);
}

static void a_cache_that_is_removed_meanwhile_is_an_error_and_comes_back(void **state)
{
    struct fx fx;
    fx_open(&fx, state, 3, 16, 16, 1);
    assert_int_equal(build_with_trick(&fx, 3, remove_cache), PF_E_IO);
    assert_err(&fx.err, PF_E_IO, "was removed");
    assert_ok(fx_build(&fx, fx.comp, NULL), &fx.err);
    struct overlay *o = NULL, *none = NULL;
    assert_ok(overlay_adopt(fx.store, fx.comp, OVERLAY_VERIFY_SAMPLED, &o, &fx.err), &fx.err);
    remove_cache(&fx);
    fx_assert_bytes(&fx, fx.comp, o); /* what is mapped stays readable */
    assert_int_equal(overlay_adopt(fx.store, fx.comp, OVERLAY_VERIFY_SAMPLED, &none, &fx.err),
                     PF_E_NOTFOUND);
    struct overlay_entry *e = NULL;
    size_t n = 7;
    assert_ok(overlay_list(fx.store, &e, &n, &fx.err), &fx.err);
    assert_int_equal(n, 0);
    overlay_list_free(e, n);
    overlay_unref(o);
    fx_close(&fx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(bytes_are_those_of_the_stream),
        in_dir(layer_files_are_plain_safetensors_on_a_page_boundary),
        in_dir(a_complete_entry_is_left_alone),
        in_dir(cancelled_at_any_moment_it_is_resumed),
        in_dir(a_layer_that_is_not_ours_is_written_again),
        in_dir(memory_is_bounded_and_the_page_cache_left_as_it_was),
        in_dir(a_base_that_shrinks_is_an_error_and_nothing_is_published),
        in_dir(a_base_that_is_written_to_is_an_error),
        in_dir(a_replaced_adapter_does_not_reach_the_cache),
        in_dir(a_cache_that_is_removed_meanwhile_is_an_error_and_comes_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
