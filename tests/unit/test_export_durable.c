/*
 * A merge across a power cut, by a model of the disk: what the journal says is durable, what has its name is whole, and a write-back that
 * failed is not forgotten. Also what a merge takes of the machine: workers and syncs, counted.
 */
#include "disk_model.h"
#include "export_fixture.h"

#include <dirent.h>
#include <sched.h>

#include "base/pool.h"

#define N_BLOCKS 80 /* more items than are on their way to the disk at a time */
#define SIDE     128

/* N_BLOCKS linears of 64 KiB, and an adapter for all of them. */
static void open_many(struct fx *f, void **state)
{
    struct rng r = {7};
    pf_error err = {0};
    *f = (struct fx){0};
    for (int is_lora = 0; is_lora < 2; is_lora++) {
        struct st_layout *l = NULL;
        struct strbuf head;
        strbuf_init(&head);
        assert_ok(st_layout_new(&l, &err), &err);
        for (int i = 0; i < N_BLOCKS * (1 + is_lora); i++) {
            char name[64];
            const bool is_b = i % 2;
            struct shape shape = {.rank = 2, .dim = {SIDE, SIDE}};
            if (is_lora) {
                snprintf(name, sizeof name, "blocks.%d.w.lora_%c.weight", i / 2, is_b ? 'B' : 'A');
                shape.dim[!is_b ? 0 : 1] = FX_RANK;
            } else {
                snprintf(name, sizeof name, "blocks.%d.w.weight", i);
            }
            assert_ok(st_layout_tensor(l, str_of(name), PF_F32, &shape, &err), &err);
        }
        assert_ok(st_layout_finish(l, 8, &head, &err), &err);
        uint8_t *p = mem_alloc(st_layout_file_bytes(l));
        for (uint64_t i = 0; i < st_layout_file_bytes(l); i += 4) {
            float v = (float)(rng_unit(&r) - 0.5);
            memcpy(p + i, &v, i + 4 <= st_layout_file_bytes(l) ? 4 : 1);
        }
        memcpy(p, head.p, head.n);
        write_file(test_path(state, is_lora ? "lora.safetensors" : "base.safetensors"), p,
                   st_layout_file_bytes(l));
        mem_free(p);
        strbuf_release(&head);
        st_layout_free(l);
    }
    assert_ok(pf_adapter_open(test_path(state, "lora.safetensors"), &f->adapter, &err), &err);
    fx_compose(f, test_path(state, "base.safetensors"), 1, PF_MERGE_BASE);
}

/* ---------------------------------------------------------------------------------------------- durable */

/* Before a record is written, everything else is on the disk. */
static unsigned n_records, n_early;

static void watch_journal(const char *path)
{
    if (!strstr(path, ".partial/journal"))
        return;
    n_records++;
    n_early += disk_n_dirty_files(path) > 0;
}

/* A merge whose records are counted. */
static void merge_watched(struct fx *f, void **state)
{
    const struct pf_merge_opts opts = {.size = sizeof opts, .n_threads = 1};
    pf_error err = {0};
    open_many(f, state);
    disk_reset();
    n_records = n_early = 0;
    disk.on_write = watch_journal;
    assert_ok(pf_merge(f->ckpt, f->comp, test_path(state, "out"), &opts, NULL, &err), &err);
}

static void the_journal_speaks_of_what_is_durable(void **state)
{
    struct fx f;
    merge_watched(&f, state);
    assert_true(n_records >= 2); /* a head, and one at least */
    assert_int_equal(n_early, 0);
    assert_int_equal(disk.n_undurable, 0);
    fx_close(&f);
}

static void a_write_back_that_fails_is_not_forgotten(void **state)
{
    static const unsigned at[] = {1, 2, 15, N_BLOCKS - 1, N_BLOCKS};
    const struct pf_merge_opts opts = {.size = sizeof opts, .n_threads = 1};
    const char *out = test_path(state, "out"), *want = test_path(state, "want");
    struct pf_merge_report report;
    struct fx f;
    pf_error err = {0};
    open_many(&f, state);
    disk_reset();
    assert_ok(pf_merge(f.ckpt, f.comp, want, &opts, NULL, &err), &err);
    assert_true(disk.n_write_backs >= N_BLOCKS);
    assert_in_range(disk.n_behind_max, 1, 65); /* of one worker */
    for (size_t i = 0; i < PF_COUNTOF(at); i++) {
        disk_reset();
        disk.i_failing = at[i];
        assert_int_equal(pf_merge(f.ckpt, f.comp, out, &opts, NULL, &err), PF_E_IO);
        assert_int_equal(file_kind(out), FILE_ABSENT);
        disk_reset();
        assert_ok(pf_merge(f.ckpt, f.comp, out, &opts, &report, &err), &err);
        assert_true(report.n_bytes_written >= (uint64_t)SIDE * SIDE * 4); /* that item at least */
        assert_true(fx_same_file(out, want));
        assert_int_equal(unlink(out), 0);
    }
    fx_close(&f);
}

/* ------------------------------------------------------------------------------------------ what it takes */

static unsigned n_threads(void)
{
    unsigned n = 0;
    DIR *d = opendir("/proc/self/task");
    assert_non_null(d);
    for (const struct dirent *e; (e = readdir(d)) != NULL;)
        n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

static bool count_threads(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    unsigned *most = ctx, n = n_threads();
    (void)what;
    (void)done;
    (void)total;
    *most = n > *most ? n : *most;
    return true;
}

static unsigned most_threads(struct fx *f, const char *out, uint32_t n)
{
    unsigned most = 0;
    const struct pf_merge_opts opts = {
        .size = sizeof opts, .n_threads = n, .progress = count_threads, .progress_ctx = &most};
    pf_error err = {0};
    assert_ok(pf_merge(f->ckpt, f->comp, out, &opts, NULL, &err), &err);
    return most;
}

/* One worker more than CPUs, so that one may wait for the disk; and eight at most, for their memory. */
static void a_worker_more_than_cpus_and_no_more_than_eight(void **state)
{
    const unsigned n_cpus = pool_default_threads();
    struct fx f;
    open_many(&f, state);
    const unsigned n_before = n_threads();
    /* Others than workers are in both: one samples memory. */
    const unsigned n_others = most_threads(&f, test_path(state, "one"), 1) - 1;
    while (n_threads() > n_before) /* one that was joined stays in /proc a moment longer */
        sched_yield();
    assert_int_equal(most_threads(&f, test_path(state, "default"), 0) - n_others,
                     n_cpus + 1 < 8 ? n_cpus + 1 : 8);
    fx_close(&f);
}

/* A sixteenth at a time, or a MiB: a kill costs little, and a disk is not asked to flush after every item. */
static void it_syncs_a_sixteenth_at_a_time(void **state)
{
    const unsigned n_commits = N_BLOCKS * SIDE * SIDE * 4 >> 20;
    struct fx f;
    merge_watched(&f, state);
    assert_in_range(n_records - 1, n_commits, n_commits + 1);
    fx_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(the_journal_speaks_of_what_is_durable),
        in_dir(a_write_back_that_fails_is_not_forgotten),
        in_dir(a_worker_more_than_cpus_and_no_more_than_eight),
        in_dir(it_syncs_a_sixteenth_at_a_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
