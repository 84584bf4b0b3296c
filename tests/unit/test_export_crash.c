/*
 * pf_merge, disturbed: killed at every point at which it changes the disk, out of space, failing disks. Whatever happens, the final
 * name holds nothing, or the old output whole, or the new one whole; and the same call continues from what is durable.
 */
#include "export_fixture.h"

#include <signal.h>
#include <sys/wait.h>

#include "export/export_int.h"

enum { N_POINTS_MAX = 400 };

/* What a child has to tell. */
struct told {
    int rc;
    struct pf_merge_report report;
};

/* One merge in a child, with a fault; a fault that kills leaves no told. Returns the wait status. */
static int in_child(const struct fx *f, const char *out, const struct pf_merge_opts *opts,
                    const char *spec, struct told *told)
{
    int fds[2];
    assert_int_equal(pipe(fds), 0);
    const pid_t pid = fork();
    if (!pid) {
        struct told t = {0};
        (void)signal(SIGALRM, SIG_DFL);
        (void)alarm(60); /* a hang is a failure, not a timeout of everything */
        if (!file_fault_set(spec))
            _exit(9);
        t.rc = pf_merge(f->ckpt, f->comp, out, opts, &t.report, NULL);
        _exit(write(fds[1], &t, sizeof t) == sizeof t ? 0 : 9);
    }
    (void)close(fds[1]);
    *told = (struct told){.rc = 1};
    (void)!read(fds[0], told, sizeof *told);
    (void)close(fds[0]);
    int status = -1;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

/* The bytes of the items that the journal of the only part says are durable: what need not be written again. */
static uint64_t durable_bytes(const struct export_plan *plan, const char *partial)
{
    char *path = path_join(partial, "journal.0"), *text = NULL;
    size_t n = 0;
    uint64_t n_bytes = 0;
    if (!file_read_all(path, 1u << 20, &text, &n, NULL)) {
        for (size_t off = 32; off + 24 <= n; off += 24) { /* head, then (item, items, check) */
            uint64_t r[3];
            memcpy(r, text + off, sizeof r);
            for (uint64_t i = r[0]; i < r[0] + r[1]; i++)
                n_bytes += plan->items[i].n_bytes;
        }
    }
    mem_free(text);
    mem_free(path);
    return n_bytes;
}

/* Kills at point i for i = 1, 2, ... until a run survives; after each kill the same call must finish the job. */
static void kill_everywhere(const struct fx *f, const char *kind, const char *out, const char *want,
                            const char *old, const struct pf_merge_opts *opts)
{
    struct told told;
    struct export_plan plan;
    pf_error err = {0};
    unsigned i = 1, n_resumed = 0;
    assert_ok(plan_build(f->ckpt, f->comp, 0, 1, &plan, &err), &err);
    char *partial = mem_alloc(strlen(out) + 9);
    (void)snprintf(partial, strlen(out) + 9, "%s.partial", out);
    for (; i < N_POINTS_MAX; i++) {
        char spec[32];
        (void)snprintf(spec, sizeof spec, "%s@%u", kind, i);
        assert_int_equal(file_remove_tree(out, NULL), PF_OK);
        assert_int_equal(file_remove_tree(partial, NULL), PF_OK);
        if (old)
            write_file(out, old, strlen(old));
        const int status = in_child(f, out, opts, spec, &told);
        if (WIFEXITED(status)) {
            assert_int_equal(told.rc, PF_OK);
            break;
        }
        assert_int_equal(WTERMSIG(status), SIGKILL);
        /* Nothing, or the old, or the new: whole. */
        if (file_kind(out) != FILE_ABSENT && !fx_same_tree(out, want)) {
            char *got = NULL;
            size_t n = 0;
            assert_non_null(old);
            assert_int_equal(file_read_all(out, 100, &got, &n, NULL), PF_OK);
            assert_string_equal(got, old);
            mem_free(got);
        }
        const bool is_named = !old && file_kind(out) != FILE_ABSENT;
        const uint64_t n_durable = is_named ? plan.n_bytes : durable_bytes(&plan, partial);
        struct pf_merge_report report = {0};
        assert_ok(pf_merge(f->ckpt, f->comp, out, opts, &report, &err), &err);
        assert_true(report.is_complete);
        assert_true(fx_same_tree(out, want));
        assert_int_equal(file_kind(partial), FILE_ABSENT);
        if (n_durable && !old) { /* with an old output, a finished run is simply done again */
            assert_true(report.is_resumed);
            assert_int_equal(report.n_bytes_written, plan.n_bytes - n_durable);
            n_resumed++;
        }
    }
    export_plan_release(&plan);
    assert_in_range(i, 12, N_POINTS_MAX - 1); /* there were points, and they ended */
    assert_true(old || n_resumed > 3);
    mem_free(partial);
}

static void a_kill_anywhere_is_continued(void **state)
{
    static const char *const kinds[] = {"kill", "tear"};
    const char *out = test_path(state, "out"), *want = test_path(state, "want");
    const struct pf_merge_opts opts = {.size = sizeof opts, .n_threads = 1};
    struct fx f;
    fx_open(&f, state, 0.75);
    fx_expect(&f, 0.75f, false, want);
    for (size_t k = 0; k < PF_COUNTOF(kinds); k++)
        kill_everywhere(&f, kinds[k], out, want, NULL, &opts);
    fx_close(&f);
}

static void a_kill_while_replacing_keeps_the_old_file_or_has_the_new(void **state)
{
    const char *out = test_path(state, "out"), *want = test_path(state, "want");
    const struct pf_merge_opts opts = {.size = sizeof opts, .n_threads = 2, .force = true};
    struct fx f;
    fx_open(&f, state, 0.75);
    fx_expect(&f, 0.75f, false, want);
    kill_everywhere(&f, "kill", out, want, "the old output", &opts);
    fx_close(&f);
}

/* ------------------------------------------------------------------------------------------------- directories */

static void put(const char *dir, const char *name, const char *text)
{
    char *path = path_join(dir, name);
    write_file(path, text, strlen(text));
    mem_free(path);
}

static void make_directory(const struct fx_set *s, const char *dir)
{
    char *transformer = path_join(dir, "transformer");
    char *weights = path_join(transformer, "diffusion_pytorch_model.safetensors");
    assert_int_equal(file_mkdirs(transformer, NULL), PF_OK);
    put(dir, "model_index.json", "{\"_class_name\": \"Pipe\"}\n");
    put(transformer, "config.json", "{\"_class_name\": \"X\"}\n");
    fx_save(s, 0, s->n, weights);
    mem_free(weights);
    mem_free(transformer);
}

static void open_directory(struct fx *f, void **state, const char *base, const char *want)
{
    struct fx_set merged;
    fx_open(f, state, 0.75);
    pf_composition_free(f->comp);
    pf_checkpoint_close(f->ckpt);
    f->comp = NULL;
    f->ckpt = NULL;
    make_directory(&f->model, base);
    fx_compose(f, base, 0.75, PF_MERGE_BASE);
    fx_merge(&f->model, &f->factors, 0.75f, false, &merged);
    make_directory(&merged, want);
    fx_free(&merged);
}

static void a_kill_anywhere_in_a_directory_is_continued(void **state)
{
    const char *out = test_path(state, "out"), *want = test_path(state, "want");
    const struct pf_merge_opts opts = {.size = sizeof opts, .n_threads = 1};
    struct fx f;
    open_directory(&f, state, test_path(state, "dir"), want);
    kill_everywhere(&f, "kill", out, want, NULL, &opts);
    fx_close(&f);
}

/* Between the two renames the old directory is not under its name; it is never lost. */
static void a_kill_while_replacing_a_directory_loses_neither(void **state)
{
    const char *out = test_path(state, "out"), *want = test_path(state, "want");
    const char *partial = test_path(state, "out.partial"), *old = test_path(state, "dir");
    const struct pf_merge_opts opts = {.size = sizeof opts, .n_threads = 1, .force = true};
    const struct pf_merge_opts polite = {.size = sizeof polite, .n_threads = 1};
    struct fx f;
    struct told told;
    unsigned i = 1, n_absent = 0;
    open_directory(&f, state, old, want);
    for (; i < N_POINTS_MAX; i++) {
        char spec[32];
        pf_error err = {0};
        (void)snprintf(spec, sizeof spec, "kill@%u", i);
        assert_int_equal(file_remove_tree(out, NULL), PF_OK);
        assert_int_equal(file_remove_tree(partial, NULL), PF_OK);
        make_directory(&f.model, out);
        if (WIFEXITED(in_child(&f, out, &opts, spec, &told)))
            break;
        const enum file_kind kind = file_kind(out);
        n_absent += kind == FILE_ABSENT;
        if (kind == FILE_ABSENT) /* a run without force must not take this for its chance */
            assert_int_equal(pf_merge(f.ckpt, f.comp, out, &polite, NULL, &err), PF_E_EXISTS);
        assert_true(fx_same_tree(out, old) || fx_same_tree(out, want));
        assert_ok(pf_merge(f.ckpt, f.comp, out, &opts, NULL, &err), &err);
        assert_true(fx_same_tree(out, want));
        assert_int_equal(file_kind(partial), FILE_ABSENT);
    }
    assert_in_range(i, 12, N_POINTS_MAX - 1);
    assert_int_equal(n_absent, 1);
    fx_close(&f);
}

/* ------------------------------------------------------------------------------------------------ failing disks */

static void a_full_disk_is_said_and_continued_later(void **state)
{
    const char *out = test_path(state, "out"), *want = test_path(state, "want");
    const struct pf_merge_opts opts = {.size = sizeof opts, .n_threads = 1};
    struct fx f;
    unsigned n_failed = 0;
    fx_open(&f, state, 0.75);
    fx_expect(&f, 0.75f, false, want);
    for (unsigned i = 1; i < N_POINTS_MAX; i += 2) {
        char spec[32];
        pf_error err = {0};
        (void)snprintf(spec, sizeof spec, "enospc@%u", i);
        assert_true(file_fault_set(spec));
        const int rc = pf_merge(f.ckpt, f.comp, out, &opts, NULL, &err);
        assert_true(file_fault_set(NULL));
        if (!rc)
            break;
        n_failed++;
        assert_int_equal(rc, PF_E_NOSPACE);
        assert_err(&err, PF_E_NOSPACE, "out.partial", "No space left on device");
        assert_int_equal(file_kind(out), FILE_ABSENT);
        if (i == 1) /* nothing could be reserved: nothing stays */
            assert_int_equal(file_kind(test_path(state, "out.partial")), FILE_ABSENT);
        assert_ok(pf_merge(f.ckpt, f.comp, out, &opts, NULL, &err), &err);
        assert_true(fx_same_file(out, want));
        assert_int_equal(unlink(out), 0);
    }
    assert_true(n_failed >= 4);
    fx_close(&f);
}

static void a_failing_disk_is_said_and_nothing_is_published(void **state)
{
    const char *out = test_path(state, "out"), *want = test_path(state, "want");
    const struct pf_merge_opts opts = {.size = sizeof opts, .n_threads = 2};
    struct fx f;
    unsigned i = 1;
    fx_open(&f, state, 0.75);
    fx_expect(&f, 0.75f, false, want);
    for (; i < N_POINTS_MAX; i++) {
        char spec[32];
        pf_error err = {0};
        (void)snprintf(spec, sizeof spec, "eio@%u", i);
        assert_true(file_fault_set(spec));
        const int rc = pf_merge(f.ckpt, f.comp, out, &opts, NULL, &err);
        const bool is_passed = file_n_points() < i;
        assert_true(file_fault_set(NULL));
        if (is_passed) {
            assert_int_equal(rc, PF_OK);
            break;
        }
        if (rc) { /* tidying may fail without harm */
            assert_err(&err, PF_E_IO, "Input/output error");
            assert_true(file_kind(out) == FILE_ABSENT || fx_same_file(out, want));
        }
        assert_ok(rc ? pf_merge(f.ckpt, f.comp, out, &opts, NULL, &err) : PF_OK, &err);
        assert_true(fx_same_file(out, want));
        assert_int_equal(unlink(out), 0);
    }
    assert_in_range(i, 12, N_POINTS_MAX - 1);
    fx_close(&f);
}

/* ---------------------------------------------------------------------------------------------- several processes */

/* Three processes at once, one of them killed on the way and started again. */
static void parts_in_processes_at_once_survive_a_kill(void **state)
{
    const char *out = test_path(state, "out"), *want = test_path(state, "want");
    struct fx f;
    pid_t pids[3];
    fx_open(&f, state, 0.75);
    fx_expect(&f, 0.75f, false, want);
    for (uint32_t i = 0; i < 3; i++) {
        const struct pf_merge_opts opts = {
            .size = sizeof opts, .n_threads = 1, .i_part = i, .n_parts = 3};
        pids[i] = fork();
        if (!pids[i]) {
            (void)alarm(60);
            if (i == 1)
                (void)file_fault_set("kill@12");
            _exit(pf_merge(f.ckpt, f.comp, out, &opts, NULL, NULL) ? 1 : 0);
        }
    }
    unsigned n_killed = 0;
    for (uint32_t i = 0; i < 3; i++) {
        int status = -1;
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        n_killed += WIFSIGNALED(status);
        assert_true(WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL && i == 1
                                        : WEXITSTATUS(status) == 0);
    }
    /* Its 12th write lies before the rename, or behind it when it was the last to finish and renamed. */
    if (n_killed && file_kind(out) == FILE_ABSENT) {
        const struct pf_merge_opts opts = {
            .size = sizeof opts, .n_threads = 1, .i_part = 1, .n_parts = 3};
        struct pf_merge_report report = {0};
        pf_error err = {0};
        assert_ok(pf_merge(f.ckpt, f.comp, out, &opts, &report, &err), &err);
        assert_true(report.is_complete);
    }
    assert_true(fx_same_file(out, want));
    fx_close(&f);
}

/* Says that it is there, and stays until it is told to go on. */
struct hold {
    int fd_there, fd_go;
    bool is_asked;
};

static bool hold_part(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    struct hold *h = ctx;
    char c = 0;
    (void)what;
    (void)total;
    if (h->is_asked || !done)
        return true;
    h->is_asked = true;
    return write(h->fd_there, "x", 1) == 1 && read(h->fd_go, &c, 1) == 1;
}

static void a_part_that_is_being_written_is_refused_to_others(void **state)
{
    const char *out = test_path(state, "out");
    const struct pf_merge_opts again = {.size = sizeof again, .i_part = 0, .n_parts = 2};
    const struct pf_merge_opts other = {.size = sizeof other, .i_part = 1, .n_parts = 3};
    struct fx f;
    pf_error err = {0};
    int there[2], go[2], status = -1;
    char c = 0;
    fx_open(&f, state, 0.75);
    assert_int_equal(pipe(there), 0);
    assert_int_equal(pipe(go), 0);
    const pid_t pid = fork();
    if (!pid) {
        struct hold h = {there[1], go[0], false};
        const struct pf_merge_opts opts = {.size = sizeof opts,
                                           .n_threads = 1,
                                           .n_parts = 2,
                                           .progress = hold_part,
                                           .progress_ctx = &h};
        (void)alarm(60);
        _exit(pf_merge(f.ckpt, f.comp, out, &opts, NULL, NULL) ? 1 : 0);
    }
    assert_int_equal(read(there[0], &c, 1), 1);
    assert_int_equal(pf_merge(f.ckpt, f.comp, out, &again, NULL, &err), PF_E_BUSY);
    assert_err(&err, PF_E_BUSY, "part 1 of 2", "by another process");
    assert_int_equal(pf_merge(f.ckpt, f.comp, out, &other, NULL, &err), PF_E_BUSY);
    assert_err(&err, PF_E_BUSY, "belongs to another merge that is running");
    assert_int_equal(write(go[1], "x", 1), 1);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    for (int i = 0; i < 2; i++) {
        (void)close(there[i]);
        (void)close(go[i]);
    }
    fx_close(&f);
}

/* A kill leaves the page cache as it is, so memory does as well as a disk and syncs in no time. */
static void prefer_memory(void)
{
    static const char dir[] = "/dev/shm";
    if (!access(dir, W_OK) && file_free_bytes(dir) > (uint64_t)64 << 20)
        (void)setenv("TMPDIR", dir, 0); /* unless somebody said otherwise */
}

int main(void)
{
    prefer_memory();
    const struct CMUnitTest tests[] = {
        in_dir(a_kill_anywhere_is_continued),
        in_dir(a_kill_while_replacing_keeps_the_old_file_or_has_the_new),
        in_dir(a_kill_anywhere_in_a_directory_is_continued),
        in_dir(a_kill_while_replacing_a_directory_loses_neither),
        in_dir(a_full_disk_is_said_and_continued_later),
        in_dir(a_failing_disk_is_said_and_nothing_is_published),
        in_dir(parts_in_processes_at_once_survive_a_kill),
        in_dir(a_part_that_is_being_written_is_refused_to_others),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
