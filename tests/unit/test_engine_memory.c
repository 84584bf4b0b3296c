/*
 * Memory of a running engine: flat over ten thousand cycles, no second copy of a layer, no copy of an adapter, and a switch that takes no more
 * than the first set. Measured from outside: anonymous memory, mappings, descriptors, bytes read from storage.
 */
#include "engine_fixture.h"

#include <dirent.h>
#include <fcntl.h>
#include <malloc.h>
#include <sys/vfs.h>
#include <unistd.h>

#define MIB      ((uint64_t)1 << 20)
#define N_CYCLES 10000

static const struct pf_change_opts OVERLAY = {.size = sizeof OVERLAY, .way = PF_WAY_OVERLAY};

static size_t n_mappings(void)
{
    size_t n = 0;
    FILE *f = fopen("/proc/self/maps", "re");
    assert_non_null(f);
    for (int c; (c = fgetc(f)) != EOF;)
        n += c == '\n';
    fclose(f);
    return n;
}

static size_t n_descriptors(void)
{
    size_t n = 0;
    DIR *d = opendir("/proc/self/fd");
    assert_non_null(d);
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

/* One cycle: set by one of the ways, a look at the bytes now and then, unset. */
static void cycle(struct fixture *f, int i)
{
    static const char *const names[] = {"noto", "turbo", "night"};
    pf_error err;
    struct pf_change_report r;
    struct pf_engine_lora l = {.nickname = names[i % 3], .strength = 1 + i / 3 % 2};
    assert_ok(pf_engine_set(f->engine, &l, 1, NULL, NULL, i % 100 ? NULL : &r, &err), &err);
    if (i % 500 == 0)
        (void)current_bytes(f);
    if (i % 7 == 0) {
        struct pf_view *v;
        l.strength = 0.5;
        assert_ok(pf_engine_view_of(f->engine, &l, 1, NULL, &v, &err), &err);
        pf_view_release(v);
    }
    if (i % 2)
        assert_ok(pf_engine_unmerge(f->engine, NULL, NULL, &err), &err);
    else
        assert_ok(pf_engine_deactivate(f->engine, NULL, NULL, &err), &err);
    if (i % 50 == 0) { /* loading again under the same nickname, too */
        assert_ok(pf_engine_deactivate(f->engine, NULL, NULL, &err), &err);
        assert_ok(pf_engine_unload(f->engine, "night", &err), &err);
        assert_ok(pf_engine_load(f->engine, "night", NIGHT, &err), &err);
    }
}

/* What is allocated and not freed, to the byte; what the allocator keeps free for later is given back first, so that anonymous memory
 * says nothing of which thread freed when. */
static size_t n_allocated(void)
{
    struct mallinfo2 m = mallinfo2();
    (void)malloc_trim(0);
    return m.uordblks + m.hblkhd;
}

/* C93; and C1: after all of it the base is the base, bit by bit. */
static void C93_ten_thousand_cycles_leave_nothing(void **state)
{
    struct fixture f;
    pf_error err;
    open_engine(state, &f, (struct pf_engine_opts){.build_delay_ms = -1, .n_resident_layers = 2});
    struct digest base = current_bytes(&f);
    struct pf_engine_lora l = {.nickname = "turbo", .strength = 1};
    /* One is adopted */
    assert_ok(pf_engine_set(f.engine, &l, 1, NULL, &OVERLAY, NULL, &err), &err);
    for (int i = 0; i < 300; i++) /* arenas, lists and the recent compositions have their size */
        cycle(&f, i);
    assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
    size_t allocated = n_allocated();
    uint64_t anon = proc_anon_bytes();
    size_t maps = n_mappings(), fds = n_descriptors();
    for (int i = 0; i < N_CYCLES; i++)
        cycle(&f, i);
    for (int i = 0; i < 300; i++) /* the list ends with the same compositions */
        cycle(&f, i);
    assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
    size_t allocated_after = n_allocated();
    uint64_t anon_after = proc_anon_bytes();
    size_t maps_after = n_mappings(), fds_after = n_descriptors();
    print_message("allocated %zu -> %zu KiB, anonymous memory %llu -> %llu KiB, mappings %zu -> "
                  "%zu, descriptors %zu -> %zu\n",
                  allocated >> 10, allocated_after >> 10, (unsigned long long)(anon >> 10),
                  (unsigned long long)(anon_after >> 10), maps, maps_after, fds, fds_after);
    assert_int_equal(fds_after, fds);
    assert_true(maps_after <= maps + 4); /* the allocator's and threads' stacks come and go */
    assert_true(allocated_after <= allocated + 262144);
    assert_true(anon_after <= anon + 2 * MIB);
    assert_same(current_bytes(&f), base);
    close_engine(&f);
}

/* ------------------------------------------------------------------------------- a base with large layers */

#define N_BIG 2

static void open_big(void **state, struct fixture *f, struct pf_engine_opts o)
{
    pf_error err;
    make_big(state, N_BIG);
    o.size = sizeof o;
    o.cache_dir = "off";
    o.build_delay_ms = -1;
    o.n_threads = 1;
    assert_ok(pf_checkpoint_open(test_path(state, "big.safetensors"), NULL, &f->ckpt, &err), &err);
    assert_ok(pf_engine_open(f->ckpt, &o, &f->engine, &err), &err);
    for (int a = 0; a < 2; a++)
        assert_ok(pf_engine_load(f->engine, NAMES[a], adapter_file(state, NAMES[a]), &err), &err);
}

static struct digest pass(struct fixture *f)
{
    struct pf_view *v = pf_engine_view(f->engine);
    struct digest d = big_bytes(f->ckpt, v);
    pf_view_release(v);
    return d;
}

/* Peak of anonymous memory over what there was, while A is set, B takes its place, and both are taken off; each read once. */
static void C7_a_swap_takes_less_than_a_tensor(void **state)
{
    struct fixture f;
    pf_error err;
    struct pf_change_report first, second, off;
    struct peak *peak;
    open_big(state, &f, (struct pf_engine_opts){0});
    uint64_t before = proc_anon_bytes();
    assert_ok(peak_start(&peak, &err), &err);
    struct digest base = pass(&f);
    set_one(&f, "a", 1, &first);
    struct digest a = pass(&f);
    set_one(&f, "ab", 1, &second);
    assert_differ(pass(&f), a);
    assert_ok(pf_engine_deactivate(f.engine, NULL, &off, &err), &err);
    assert_same(pass(&f), base);
    uint64_t most = peak_stop(peak) - before;
    print_message("a swap of tensors of %llu MiB: %llu KiB more anonymous memory at the peak\n",
                  (unsigned long long)(BIG_BYTES / MIB), (unsigned long long)(most >> 10));
    assert_true(most < 2 * BIG_BYTES); /* the cap of the case */
    assert_true(most < 16 * MIB);      /* what it takes: panels */
    /* The switch at its peak: no more than the first set. One page of a thread's stack is noise. */
    assert_true(second.peak_anon_bytes <= first.peak_anon_bytes + 65536);
    assert_true(off.peak_anon_bytes <= first.peak_anon_bytes + 65536);
    close_engine(&f);
}

/* Rewriting a resident layer: the buffer and a panel of scratch, never a second copy. */
static void resident_layers_are_never_there_twice(void **state)
{
    struct fixture f;
    struct pf_engine_status s;
    struct peak *peak;
    pf_error err;
    uint64_t before = proc_anon_bytes();
    open_big(state, &f, (struct pf_engine_opts){.n_resident_layers = 16});
    pf_engine_status(f.engine, &s);
    assert_int_equal(s.n_layers_resident, f.ckpt->n_layers);
    assert_in_range(s.n_bytes_resident, N_BIG * BIG_BYTES, N_BIG * BIG_BYTES + MIB);
    assert_ok(peak_start(&peak, &err), &err);
    assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
    struct digest base = pass(&f), a;
    for (int i = 0; i < 3; i++) {
        set_one(&f, "a", 1, NULL);
        assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
        uint64_t n_merged = merge_n_panels();
        a = pass(&f);
        assert_int_equal(merge_n_panels(), n_merged); /* from the copies */
        assert_differ(a, base);
        set_one(&f, "ab", 1, NULL);
        assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
        assert_differ(pass(&f), a);
        assert_ok(pf_engine_unmerge(f.engine, NULL, NULL, &err), &err);
        assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
        assert_same(pass(&f), base);
    }
    uint64_t most = peak_stop(peak) - before;
    print_message("%llu MiB resident: %llu MiB of anonymous memory at the peak\n",
                  (unsigned long long)(s.n_bytes_resident / MIB), (unsigned long long)(most / MIB));
    assert_true(most <= s.n_bytes_resident + 16 * MIB);
    close_engine(&f);
}

/* --------------------------------------------------------------------------------- what a change touches */

/* C19: another strength costs no reload, and nothing that the adapter does not name is touched. */
static void C19_a_strength_change_touches_what_the_adapter_names(void **state)
{
    struct fixture f;
    struct pf_change_report one, half;
    pf_error err;
    open_engine(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    set_one(&f, "noto", 1, &one);
    uint64_t n_read = proc_read_bytes(), n_merged = merge_n_panels();
    struct pf_engine_lora l = {.nickname = "noto", .strength = 0.5};
    assert_ok(pf_engine_set(f.engine, &l, 1, NULL, NULL, NULL, &err), &err);
    assert_int_equal(merge_n_panels(), n_merged); /* merged when it is read, not before */
    assert_int_equal(proc_read_bytes(), n_read);
    assert_ok(pf_engine_set(f.engine, &l, 1, NULL, NULL, &half, &err), &err);
    assert_int_equal(half.n_tensors_changed, one.n_tensors_changed);
    struct pf_view *v = pf_engine_view(f.engine);
    uint32_t n_mapped = 0;
    for (uint32_t i = 0; i < f.ckpt->n_tensors; i++) {
        const void *p = pf_view_map(v, i);
        assert_true((p == NULL) == pf_composition_changes(view_composition(v), i));
        assert_true(p == NULL || p == f.ckpt->tensors[i].p);
        n_mapped += p != NULL;
    }
    assert_int_equal(n_mapped, f.ckpt->n_tensors - half.n_tensors_changed);
    assert_true(n_mapped > 0);
    pf_view_release(v);
    close_engine(&f);
}

#define N_TWIN 8

/* C97, C99, a small twin of a large adapter: its bytes come from storage once, whatever is done with it afterwards. */
static void C99_an_adapter_is_read_once(void **state)
{
    struct fixture f;
    struct rng rng = {7};
    struct tensor t[2 * N_TWIN] = {0}, w[N_TWIN] = {0};
    struct pf_change_report r;
    pf_error err;
    for (int b = 0; b < N_TWIN; b++) {
        w[b] = (struct tensor){.rows = 256, .cols = 2048, .dtype = PF_BF16};
        snprintf(w[b].name, sizeof w->name, "blocks.%d.q.weight", b);
        t[2 * b] = (struct tensor){.rows = 64, .cols = 2048, .dtype = PF_F32};
        snprintf(t[2 * b].name, sizeof t->name, "blocks.%d.q.lora_A.weight", b);
        t[2 * b + 1] = (struct tensor){.rows = 256, .cols = 64, .dtype = PF_F32};
        snprintf(t[2 * b + 1].name, sizeof t->name, "blocks.%d.q.lora_B.weight", b);
    }
    write_tensors(test_path(state, "base.safetensors"), w, N_TWIN, &rng, 0.1f);
    const char *path = adapter_file(state, "twin");
    write_tensors(path, t, 2 * N_TWIN, &rng, 0.5f);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct statfs fs;
    assert_int_equal(fstatfs(fd, &fs), 0);
    uint64_t n_file = (uint64_t)lseek(fd, 0, SEEK_END);
    assert_int_equal(fsync(fd), 0);
    assert_int_equal(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    close(fd);
    struct pf_engine_opts o = {.size = sizeof o, .cache_dir = "off", .build_delay_ms = -1};
    assert_ok(pf_checkpoint_open(test_path(state, "base.safetensors"), NULL, &f.ckpt, &err), &err);
    assert_ok(pf_engine_open(f.ckpt, &o, &f.engine, &err), &err);
    uint64_t n0 = proc_read_bytes();
    assert_ok(pf_engine_load(f.engine, "twin", path, &err), &err);
    uint64_t n_loaded = proc_read_bytes() - n0, anon = proc_anon_bytes();
    if (fs.f_type == 0x01021994 || n_loaded < n_file / 2) {
        print_message("SKIP: engine_memory reads: they are not counted here (%s)\n",
                      fs.f_type == 0x01021994 ? "tmpfs" : "the file stayed in the page cache");
        close_engine(&f);
        skip();
    }
    assert_true(n_loaded <= n_file + n_file / 20 + 65536);
    for (int i = 0; i < 20; i++) {
        set_one(&f, "twin", 1 + i % 4, &r);
        (void)current_bytes(&f);
        assert_ok(pf_engine_load(f.engine, "twin", path, &err), &err); /* unchanged: not read */
    }
    uint64_t n_all = proc_read_bytes() - n0, n_base = (uint64_t)N_TWIN * 256 * 2048 * 2;
    print_message("adapter of %llu KiB: %llu KiB read when loaded, %llu KiB after 20 changes\n",
                  (unsigned long long)(n_file >> 10), (unsigned long long)(n_loaded >> 10),
                  (unsigned long long)(n_all >> 10));
    assert_true(n_all <= n_loaded + n_base + 65536); /* and the base at most once */
    assert_true(proc_anon_bytes() < anon + 24 * MIB);
    close_engine(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(C93_ten_thousand_cycles_leave_nothing),
        in_dir(C7_a_swap_takes_less_than_a_tensor),
        in_dir(resident_layers_are_never_there_twice),
        in_dir(C19_a_strength_change_touches_what_the_adapter_names),
        in_dir(C99_an_adapter_is_read_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
