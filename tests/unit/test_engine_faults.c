/*
 * What goes wrong around a running engine: the cache, the base and the adapters vanish, fill up, shrink or are replaced; builds are
 * cancelled, programs fork and close. After each the composition before is still served, or the error is clear.
 */
#include "engine_fixture.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define BASE_FILE MODEL "/transformer/diffusion_pytorch_model.safetensors"

static const struct pf_change_opts OVERLAY = {.size = sizeof OVERLAY, .way = PF_WAY_OVERLAY};

static void copy_file(const char *from, const char *to)
{
    char *bytes;
    size_t n;
    pf_error err;
    assert_ok(file_read_all(from, (size_t)64 << 20, &bytes, &n, &err), &err);
    write_file(to, bytes, n);
    mem_free(bytes);
}

/* Same inode, same size, same mtime, other bytes: only the ctime tells. */
static void overwrite_in_place(const char *path, const char *with)
{
    struct stat st;
    char *bytes;
    size_t n;
    pf_error err;
    assert_ok(file_read_all(with, (size_t)64 << 20, &bytes, &n, &err), &err);
    assert_int_equal(stat(path, &st), 0);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_true(n >= (size_t)st.st_size);
    assert_int_equal(pwrite(fd, bytes, (size_t)st.st_size, 0), st.st_size);
    struct timespec t[2] = {st.st_atim, st.st_mtim};
    assert_int_equal(futimens(fd, t), 0);
    close(fd);
    mem_free(bytes);
}

/* Another inode of the same size and mtime under the name. */
static void replace(void **state, const char *path, const char *with)
{
    struct stat st;
    const char *other = test_path(state, "replacement");
    copy_file(with, other);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(truncate(other, st.st_size), 0);
    struct timespec t[2] = {st.st_atim, st.st_mtim};
    assert_int_equal(utimensat(AT_FDCWD, other, t, 0), 0);
    assert_int_equal(rename(other, path), 0);
}

/* An engine on the copies of base and adapters that a test may ruin. */
static void open_again(void **state, struct fixture *f, struct pf_engine_opts o)
{
    static const char *const names[2] = {"noto", "turbo"};
    pf_error err;
    o.size = sizeof o;
    if (!o.cache_dir)
        o.cache_dir = test_path(state, "cache");
    assert_ok(pf_checkpoint_open(test_path(state, "base.safetensors"), NULL, &f->ckpt, &err), &err);
    assert_ok(pf_engine_open(f->ckpt, &o, &f->engine, &err), &err);
    for (int i = 0; i < 2; i++)
        assert_ok(pf_engine_load(f->engine, names[i], adapter_file(state, names[i]), &err), &err);
}

static void open_copy(void **state, struct fixture *f, struct pf_engine_opts o)
{
    copy_file(BASE_FILE, test_path(state, "base.safetensors"));
    copy_file(NOTO, adapter_file(state, "noto"));
    copy_file(TURBO, adapter_file(state, "turbo"));
    open_again(state, f, o);
}

static void set_overlay(struct fixture *f, const char *nickname, struct pf_change_report *r)
{
    pf_error err;
    struct pf_engine_lora l = {.nickname = nickname, .strength = 1};
    assert_ok(pf_engine_set(f->engine, &l, 1, NULL, &OVERLAY, r, &err), &err);
}

/* Reads one changed tensor; the code that it ends with. */
static int read_changed(struct pf_checkpoint *ckpt, struct pf_view *v, pf_error *err)
{
    static uint8_t buf[4 << 20];
    struct pf_reader *r;
    uint32_t i = (uint32_t)view_composition(v)->i_tensors[0];
    struct pf_panel p = {.i_tensor = i, .n_rows = shape_rows(&ckpt->tensors[i].shape)};
    assert_ok(pf_reader_new(v, &r, err), err);
    int rc = pf_reader_read(r, &p, PF_NATIVE, buf, sizeof buf, err);
    pf_reader_free(r);
    return rc;
}

static size_t n_complete(struct fixture *f)
{
    struct overlay_entry *entries;
    size_t n, n_complete = 0;
    pf_error err;
    assert_ok(overlay_list(f->engine->store, &entries, &n, &err), &err);
    for (size_t i = 0; i < n; i++)
        n_complete += !entries[i].is_partial;
    overlay_list_free(entries, n);
    return n_complete;
}

/* -------------------------------------------------------------------------------------------- the cache */

static void the_cache_directory_is_removed_while_running(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    struct pf_engine_status s;
    pf_error err;
    open_engine(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    set_overlay(&f, "turbo", &r);
    assert_string_equal(r.way, "overlay");
    struct digest turbo = current_bytes(&f);
    assert_ok(file_remove_tree(test_path(state, "cache"), &err), &err);
    assert_same(current_bytes(&f), turbo); /* what is mapped lives on */
    set_overlay(&f, "noto", &r);           /* made anew */
    assert_string_equal(r.way, "overlay");
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, NOTO, 1));
    /* Something else stands in its place: no directory can be made. */
    assert_ok(file_remove_tree(test_path(state, "cache"), &err), &err);
    write_file(test_path(state, "cache"), "x", 1);
    set_overlay(&f, "night", &r);
    assert_string_equal(r.way, "stream");
    assert_non_null(strstr(r.note, "overlay cache"));
    pf_engine_status(f.engine, &s);
    assert_non_null(strstr(s.cache_note, "overlay cache"));
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, NIGHT, 1));
    /* And back: the next change tries again, and the note goes. */
    assert_int_equal(unlink(test_path(state, "cache")), 0);
    set_overlay(&f, "night", &r);
    assert_string_equal(r.way, "overlay");
    assert_string_equal(r.note, "");
    pf_engine_status(f.engine, &s);
    assert_string_equal(s.cache_note, "");
    close_engine(&f);
}

static int chmod_one(const char *path, const struct stat *st, int flag, struct FTW *w)
{
    (void)flag, (void)w;
    return chmod(path, S_ISDIR(st->st_mode) ? 0555 : 0444);
}

static int in_read_only_cache(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    struct pf_engine_status s;
    pf_error err;
    const char *cache = test_path(state, "cache");
    open_engine(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    set_overlay(&f, "turbo", &r);
    if (strcmp(r.way, "overlay") != 0)
        return 2;
    struct digest turbo = current_bytes(&f);
    nftw(cache, chmod_one, 8, FTW_DEPTH | FTW_PHYS);
    set_overlay(&f, "noto", &r);
    bool ok = strcmp(r.way, "stream") == 0 && strstr(r.note, "read-only") &&
              digest_eq(current_bytes(&f), fresh_bytes(f.ckpt, NOTO, 1));
    pf_engine_status(f.engine, &s);
    ok = ok && strstr(s.cache_note, "read-only");
    set_overlay(&f, "turbo", &r); /* what is in it is used */
    ok = ok && strcmp(r.way, "overlay") == 0 && digest_eq(current_bytes(&f), turbo);
    close_engine(&f);
    /* A new engine on it, too. */
    open_engine(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    struct pf_engine_lora l = {.nickname = "turbo", .strength = 1};
    ok = ok && pf_engine_set(f.engine, &l, 1, NULL, NULL, &r, &err) == PF_OK &&
         strcmp(r.way, "overlay") == 0;
    close_engine(&f);
    return ok ? 0 : 1;
}

/* Root ignores modes: as an unprivileged user. */
static int may_be_removed(const char *path, const struct stat *st, int flag, struct FTW *w)
{
    (void)flag;
    (void)w;
    return S_ISDIR(st->st_mode) ? chmod(path, 0777) : 0;
}

static void the_cache_becomes_read_only(void **state)
{
    fflush(NULL);
    assert_int_equal(chmod(*state, 0777), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        if (!test_drop_root())
            _exit(3);
        _exit(in_read_only_cache(state));
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    const char *cache = test_path(state, "cache");
    assert_int_equal(nftw(cache, may_be_removed, 8, FTW_PHYS), 0);
    assert_int_equal(status, 0);
}

/* The disk is full from the n-th write on, for every n until a build goes through. */
static void the_disk_fills_up_at_any_point_of_a_build(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    struct pf_engine_status s;
    unsigned n = 1;
    open_engine(state, &f, (struct pf_engine_opts){.build_delay_ms = -1, .n_threads = 1});
    struct digest want = fresh_bytes(f.ckpt, TURBO, 1);
    for (;; n = n * 5 / 4 + 1) {
        char fault[32];
        snprintf(fault, sizeof fault, "enospc@%u", n);
        assert_true(file_fault_set(fault));
        set_overlay(&f, "turbo", &r);
        assert_true(file_fault_set(NULL));
        assert_same(current_bytes(&f), want);
        if (strcmp(r.way, "overlay") == 0)
            break;
        assert_string_equal(r.way, "stream");
        assert_int_equal(n_complete(&f), 0);
        pf_engine_status(f.engine, &s);
        assert_non_null(strstr(r.note, "streaming instead of an overlay"));
        if (!strstr(s.cache_note, "space"))
            fail_msg("enospc@%u: %s", n, s.cache_note);
    }
    assert_true(n > 5);
    close_engine(&f);
}

static void a_budget_smaller_than_one_composition(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    open_engine(state, &f,
                (struct pf_engine_opts){.build_delay_ms = -1, .cache_budget_bytes = 65536});
    set_overlay(&f, "turbo", &r);
    assert_string_equal(r.way, "stream");
    assert_non_null(strstr(r.note, "budget"));
    uint64_t n_merged = merge_n_bytes();
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, TURBO, 1));
    struct pf_engine_status s;
    pf_engine_status(f.engine, &s);
    assert_int_equal(s.n_build_failures, 1);
    assert_int_equal(s.n_builds, 0);
    assert_true(s.n_merged_bytes > n_merged);
    close_engine(&f);
}

/* A budget of one composition: building another evicts the first, and the count says so. */
static void a_budget_of_one_composition_evicts(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    struct pf_engine_status s;
    pf_error err;
    open_engine(state, &f,
                (struct pf_engine_opts){.build_delay_ms = -1, .cache_budget_bytes = 6000000});
    set_overlay(&f, "turbo", &r);
    assert_string_equal(r.way, "overlay");
    for (int i = 0; i < 9; i++) { /* out of the recent ones, so that nobody has it mapped */
        struct pf_engine_lora l = {.nickname = "noto", .strength = 0.1 * i};
        assert_ok(pf_engine_set(f.engine, &l, 1, NULL, NULL, &r, &err), &err);
    }
    set_overlay(&f, "noto", &r);
    assert_string_equal(r.way, "overlay");
    pf_engine_status(f.engine, &s);
    assert_int_equal(s.n_evictions, 1);
    assert_int_equal(s.n_builds, 2);
    close_engine(&f);
}

/* --------------------------------------------------------------------------------------------- the base */

/* Composition, bytes and state are as before: a refused change left nothing. */
static void assert_refused(struct fixture *f, int code, const char *text)
{
    struct pf_engine_status before, after;
    struct pf_change_report r;
    struct pf_view *mine;
    pf_error err;
    struct pf_engine_lora l = {.nickname = "turbo", .strength = 1};
    pf_engine_status(f->engine, &before);
    assert_int_equal(pf_engine_set(f->engine, &l, 1, NULL, NULL, &r, &err), code);
    assert_err(&err, code, text);
    assert_int_equal(pf_engine_view_of(f->engine, &l, 1, NULL, &mine, &err), code);
    assert_int_equal(pf_engine_merge(f->engine, NULL, 0.5, &r, &err), code);
    pf_engine_status(f->engine, &after);
    assert_string_equal(before.composition, after.composition);
    assert_int_equal(before.n_changes, after.n_changes);
}

static void the_base_is_truncated_while_it_is_streamed(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    pf_error err;
    open_copy(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    set_one(&f, "noto", 1, &r);
    struct pf_view *v = pf_engine_view(f.engine);
    assert_ok(read_changed(f.ckpt, v, &err), &err);
    assert_int_equal(truncate(test_path(state, "base.safetensors"), 32768), 0);
    assert_int_equal(read_changed(f.ckpt, v, &err), PF_E_TRUNCATED);
    assert_err(&err, PF_E_TRUNCATED, "shrank");
    assert_refused(&f, PF_E_TRUNCATED, "base.safetensors");
    pf_view_release(v);
    close_engine(&f);
}

/* The file shrinks when the build has begun; nothing half is published. */
static bool truncate_base(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    (void)what, (void)done, (void)total;
    return truncate(ctx, 32768) == 0;
}

static void the_base_is_truncated_during_a_build(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    char path[512];
    snprintf(path, sizeof path, "%s", test_path(state, "base.safetensors"));
    open_copy(
        state, &f,
        (struct pf_engine_opts){
            .build_delay_ms = -1, .n_threads = 1, .progress = truncate_base, .progress_ctx = path});
    set_overlay(&f, "noto", &r);
    assert_string_equal(r.way, "stream");
    assert_non_null(strstr(r.note, "base.safetensors"));
    assert_int_equal(n_complete(&f), 0);
    assert_refused(&f, PF_E_TRUNCATED, "shrank");
    close_engine(&f);
}

static void base_changes(void **state, bool is_renamed)
{
    struct fixture f;
    struct pf_change_report r;
    pf_error err;
    char path[512], other[512];
    snprintf(path, sizeof path, "%s", test_path(state, "base.safetensors"));
    snprintf(other, sizeof other, "%s", test_path(state, "other.safetensors"));
    open_copy(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    set_overlay(&f, "noto", &r);
    struct pf_view *v = pf_engine_view(f.engine);
    struct digest noto = view_bytes(f.ckpt, v);
    copy_file(BASE_FILE, other);
    int fd = open(other, O_WRONLY | O_CLOEXEC);
    assert_int_equal(pwrite(fd, "\1\2\3\4", 4, 1 << 20), 4);
    close(fd);
    if (is_renamed)
        replace(state, path, other);
    else
        overwrite_in_place(path, other);
    assert_refused(&f, PF_E_CHANGED, "base.safetensors' changed while in use");
    assert_int_equal(pf_engine_unmerge(f.engine, NULL, &r, &err), PF_E_CHANGED);
    assert_err(&err, PF_E_CHANGED, "start again");
    if (is_renamed) /* the mapped file is the old one, whole */
        assert_same(view_bytes(f.ckpt, v), noto);
    assert_ok(read_changed(f.ckpt, v, &err), &err); /* an overlay: still served */
    pf_view_release(v);
    close_engine(&f);
}

static void the_base_is_replaced_by_one_of_the_same_size_and_mtime(void **state)
{
    base_changes(state, true);
}

static void the_base_is_overwritten_with_the_same_size_and_mtime(void **state)
{
    base_changes(state, false);
}

/* Touched between two runs: streamed at once, verified in the background, adopted; nothing is built again. */
static void a_touched_base_is_proved_in_the_background(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    struct pf_engine_status s;
    pf_error err;
    open_copy(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    set_overlay(&f, "noto", &r);
    close_engine(&f);
    struct timespec t[2] = {{.tv_sec = 1000000000}, {.tv_sec = 1000000000}};
    assert_int_equal(utimensat(AT_FDCWD, test_path(state, "base.safetensors"), t, 0), 0);
    open_again(state, &f, (struct pf_engine_opts){.build_delay_ms = 3600000});
    set_one(&f, "noto", 1, &r);
    assert_string_equal(r.way, "stream");
    struct digest streamed = current_bytes(&f);
    assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
    assert_string_equal(pf_engine_way(f.engine, f.engine->global->view), "overlay");
    pf_engine_status(f.engine, &s);
    assert_int_equal(s.n_builds, 0);
    assert_int_equal(s.n_adoptions, 1);
    assert_same(current_bytes(&f), streamed);
    close_engine(&f);
}

/* Touched, linked, given another mode, under a running engine: the same content, read again. Overlays from before are adopted once the base
 * was proved, new ones are built. */
static void a_base_touched_under_a_running_engine_is_proved(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    struct pf_engine_status before, after;
    pf_error err;
    char path[512];
    snprintf(path, sizeof path, "%s", test_path(state, "base.safetensors"));
    open_copy(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    set_overlay(&f, "noto", &r);
    close_engine(&f);
    open_again(state, &f, (struct pf_engine_opts){.build_delay_ms = 3600000});
    struct digest base = current_bytes(&f), noto = fresh_bytes(f.ckpt, NOTO, 1);
    struct timespec t[2] = {{.tv_sec = 1000000000}, {.tv_sec = 1000000000}};
    assert_int_equal(utimensat(AT_FDCWD, path, t, 0), 0);
    assert_int_equal(link(path, test_path(state, "link")), 0);
    assert_int_equal(chmod(path, 0600), 0);
    pf_engine_status(f.engine, &before);
    set_one(&f, "noto", 1, &r);
    assert_string_equal(r.way, "stream"); /* nothing is adopted by a stamp that nobody knows */
    assert_same(current_bytes(&f), noto);
    assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
    pf_engine_status(f.engine, &after);
    assert_string_equal(pf_engine_way(f.engine, f.engine->global->view), "overlay");
    assert_int_equal(after.n_builds, 0);
    assert_int_equal(after.n_adoptions, before.n_adoptions + 1);
    assert_same(current_bytes(&f), noto);
    set_overlay(&f, "turbo", &r);
    assert_string_equal(r.way, "overlay");
    assert_ok(pf_engine_unmerge(f.engine, NULL, &r, &err), &err);
    assert_same(current_bytes(&f), base);
    /* Other bytes are others, whatever the times say. */
    copy_file(BASE_FILE, test_path(state, "other"));
    int fd = open(test_path(state, "other"), O_WRONLY | O_CLOEXEC);
    assert_int_equal(pwrite(fd, "\1\2\3\4", 4, 1 << 20), 4);
    close(fd);
    overwrite_in_place(path, test_path(state, "other"));
    assert_refused(&f, PF_E_CHANGED, "base.safetensors' changed while in use");
    close_engine(&f);
}

static bool touch_base(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    struct fixture *f = ctx;
    struct pf_view *mine;
    pf_error err;
    (void)what;
    (void)total;
    if (done == 0) {
        struct timespec t[2] = {{.tv_sec = 1000000000}, {.tv_sec = 1000000000}};
        assert_int_equal(utimensat(AT_FDCWD, f->ckpt->path, t, 0), 0);
        /* Takes the new stamp over */
        struct pf_engine_lora l = {.nickname = "noto", .strength = 1};
        assert_ok(pf_engine_view_of(f->engine, &l, 1, NULL, &mine, &err), &err);
        pf_view_release(mine);
    }
    return true;
}

/* Between two readings of one build nobody knows what happened: it is not published, and made good by the next. */
static void a_base_touched_during_a_build_is_built_again(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    open_copy(
        state, &f,
        (struct pf_engine_opts){
            .build_delay_ms = -1, .n_threads = 1, .progress = touch_base, .progress_ctx = &f});
    set_overlay(&f, "turbo", &r);
    assert_string_equal(r.way, "stream");
    assert_non_null(strstr(r.note, "was touched while overlay"));
    assert_int_equal(n_complete(&f), 0);
    close_engine(&f);
    open_again(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    set_overlay(&f, "turbo", &r);
    assert_string_equal(r.way, "overlay");
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, TURBO, 1));
    close_engine(&f);
}

static void open_big(void **state, struct fixture *f, int64_t delay_ms)
{
    struct pf_engine_opts o = {
        .size = sizeof o, .cache_dir = test_path(state, "cache"), .build_delay_ms = delay_ms};
    pf_error err;
    assert_ok(pf_checkpoint_open(test_path(state, "big.safetensors"), NULL, &f->ckpt, &err), &err);
    assert_ok(pf_engine_open(f->ckpt, &o, &f->engine, &err), &err);
    assert_ok(pf_engine_load(f->engine, "a", adapter_file(state, "a"), &err), &err);
}

static struct digest current_big(struct fixture *f)
{
    struct pf_view *v = pf_engine_view(f->engine);
    struct digest d = big_bytes(f->ckpt, v);
    pf_view_release(v);
    return d;
}

/* Other bytes behind a known id (large checkpoints are not hashed whole): the old overlay is never shown, and the next change finds a better
 * id. */
static void other_bytes_behind_a_known_id_are_found(void **state)
{
    struct fixture f;
    struct pf_change_report first, r;
    struct pf_engine_status s;
    pf_error err;
    make_big(state, 3); /* 72 MiB */
    open_big(state, &f, -1);
    set_overlay(&f, "a", &first);
    assert_string_equal(first.way, "overlay");
    struct digest old = current_big(&f);
    uint64_t off = f.ckpt->tensors[0].off_bytes + 5000;
    close_engine(&f);
    int fd = open(test_path(state, "big.safetensors"), O_RDWR | O_CLOEXEC);
    uint8_t b;
    assert_int_equal(pread(fd, &b, 1, (off_t)off), 1);
    b ^= 1;
    assert_int_equal(pwrite(fd, &b, 1, (off_t)off), 1);
    close(fd);
    open_big(state, &f, 3600000);
    set_one(&f, "a", 1, &r);
    assert_string_equal(r.composition, first.composition);
    struct digest want = current_big(&f);
    assert_differ(old, want);
    assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
    assert_string_equal(pf_engine_way(f.engine, f.engine->global->view), "stream");
    assert_same(current_big(&f), want);
    pf_engine_status(f.engine, &s);
    assert_true(s.cache_note[0] != '\0');
    set_overlay(&f, "a", &r);
    assert_string_not_equal(r.composition, first.composition);
    assert_string_equal(r.way, "overlay");
    assert_same(current_big(&f), want);
    close_engine(&f);
}

/* A resident layer that cannot be made is given up, and whoever waits is told that nothing is left to do. */
static void residents_of_a_truncated_base_are_given_up(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    struct pf_reader *inside;
    pf_error err;
    open_copy(state, &f, (struct pf_engine_opts){.build_delay_ms = -1, .n_resident_layers = 9});
    set_one(&f, "noto", 1, &r);
    assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
    struct pf_view *v = pf_engine_view(f.engine);
    assert_ok(pf_reader_new(v, &inside, &err), &err);
    assert_ok(pf_reader_enter(inside, 2, &err), &err); /* nothing is rewritten meanwhile */
    assert_ok(pf_engine_unmerge(f.engine, NULL, &r, &err), &err);
    assert_int_equal(pf_engine_settle(f.engine, 30, &err), PF_E_BUSY);
    assert_int_equal(truncate(test_path(state, "base.safetensors"), 32768), 0);
    pf_reader_leave(inside);
    assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
    assert_true(f.engine->residents->items[8].has_failed);
    assert_false(f.engine->residents->items[8].is_ready);
    assert_refused(&f, PF_E_TRUNCATED, "shrank");
    pf_reader_free(inside);
    pf_view_release(v);
    close_engine(&f);
}

/* Base and deltas say what a file of the cache did: readers go on, and the next change sets the entry aside. */
static void an_overlay_is_cut_while_it_is_read(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    struct pf_reader *inside;
    pf_error err;
    /* One thread: to the thread sanitizer the zero page that the guard maps is a write beside another thread's reads. */
    open_copy(state, &f, (struct pf_engine_opts){.build_delay_ms = -1, .n_threads = 1});
    set_overlay(&f, "turbo", &r);
    assert_string_equal(r.way, "overlay");
    struct digest turbo = fresh_bytes(f.ckpt, TURBO, 1);
    struct pf_view *v = pf_engine_view(f.engine);
    assert_ok(pf_reader_new(v, &inside, &err), &err);
    assert_ok(pf_reader_enter(inside, 3, &err), &err);
    char path[1024];
    for (int i = 1; i <= 8; i++) {
        snprintf(path, sizeof path, "%s/%s/layer-%05d.safetensors", test_path(state, "cache"),
                 r.composition, i);
        assert_int_equal(truncate(path, i % 2 ? 4096 : 0), 0);
    }
    assert_same(view_bytes(f.ckpt, v), turbo);
    set_one(&f, "turbo", 1, &r);
    assert_string_equal(r.way, "stream");
    assert_same(current_bytes(&f), turbo);
    assert_int_equal(n_complete(&f), 0);
    set_overlay(&f, "turbo", &r);
    assert_string_equal(r.way, "overlay");
    assert_same(current_bytes(&f), turbo);
    assert_same(view_bytes(f.ckpt, v), turbo);
    pf_reader_free(inside);
    pf_view_release(v);
    close_engine(&f);
}

/* ------------------------------------------------------------------------------------------ adapters */

static void an_adapter_is_replaced_under_its_nickname(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    struct pf_engine_status s;
    pf_error err;
    open_copy(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    struct digest noto = fresh_bytes(f.ckpt, NOTO, 1), turbo = fresh_bytes(f.ckpt, TURBO, 1);
    set_one(&f, "noto", 1, &r);
    pf_engine_status(f.engine, &s);
    copy_file(TURBO, test_path(state, "new"));
    assert_int_equal(rename(test_path(state, "new"), adapter_file(state, "noto")), 0);
    assert_same(current_bytes(&f), noto); /* what acts keeps its bytes */
    assert_ok(pf_engine_merge(f.engine, NULL, 0.5, &r, &err), &err);
    assert_ok(pf_engine_merge(f.engine, NULL, 1, &r, &err), &err);
    assert_string_equal(r.composition, s.composition);
    assert_ok(pf_engine_load(f.engine, "noto", adapter_file(state, "noto"), &err), &err);
    assert_same(current_bytes(&f), noto);
    assert_ok(pf_engine_merge(f.engine, NULL, 1, &r, &err), &err);
    assert_same(current_bytes(&f), noto); /* remembered with what it was set with */
    set_one(&f, "noto", 1, &r);
    assert_same(current_bytes(&f), turbo);
    assert_string_not_equal(r.composition, s.composition);
    close_engine(&f);
}

static void an_adapter_is_overwritten_in_place(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    struct pf_engine_status before, after;
    pf_error err;
    char other[512];
    snprintf(other, sizeof other, "%s", test_path(state, "other"));
    open_copy(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    set_overlay(&f, "noto", &r);
    struct digest noto = current_bytes(&f);
    copy_file(NOTO, other);
    int fd = open(other, O_WRONLY | O_CLOEXEC);
    assert_int_equal(pwrite(fd, "\0\0\0\0\0\0\0\0", 8, lseek(fd, 0, SEEK_END) - 64), 8);
    close(fd);
    overwrite_in_place(adapter_file(state, "noto"), other);
    pf_engine_status(f.engine, &before);
    assert_int_equal(pf_engine_merge(f.engine, NULL, 0.5, &r, &err), PF_E_CHANGED);
    assert_err(&err, PF_E_CHANGED, "noto.safetensors", "load it again");
    struct pf_engine_lora l = {.nickname = "noto", .strength = 1};
    assert_int_equal(pf_engine_set(f.engine, &l, 1, NULL, NULL, &r, &err), PF_E_CHANGED);
    pf_engine_status(f.engine, &after);
    assert_string_equal(before.composition, after.composition);
    assert_same(current_bytes(&f), noto); /* from the overlay */
    assert_ok(pf_engine_load(f.engine, "noto", adapter_file(state, "noto"), &err), &err);
    set_one(&f, "noto", 1, &r);
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, other, 1));
    assert_differ(current_bytes(&f), noto);
    close_engine(&f);
}

/* The good file comes back and is loaded again: the view that maps the spoiled one is not served under the same digest. */
static void an_adapter_is_spoiled_and_restored(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    pf_error err;
    char zeros[4096] = {0};
    open_copy(state, &f, (struct pf_engine_opts){.build_delay_ms = -1});
    set_one(&f, "noto", 1, &r);
    struct digest noto = current_bytes(&f);
    int fd = open(adapter_file(state, "noto"), O_WRONLY | O_CLOEXEC);
    assert_int_equal(pwrite(fd, zeros, sizeof zeros, lseek(fd, 0, SEEK_END) - 4096), sizeof zeros);
    close(fd);
    copy_file(NOTO, test_path(state, "new"));
    assert_int_equal(rename(test_path(state, "new"), adapter_file(state, "noto")), 0);
    assert_ok(pf_engine_load(f.engine, "noto", adapter_file(state, "noto"), &err), &err);
    set_one(&f, "noto", 1, &r);
    assert_same(current_bytes(&f), noto);
    struct pf_engine_lora l = {.nickname = "noto", .strength = 1};
    struct pf_view *mine;
    assert_ok(pf_engine_view_of(f.engine, &l, 1, NULL, &mine, &err), &err);
    assert_same(view_bytes(f.ckpt, mine), noto);
    pf_view_release(mine);
    close_engine(&f);
}

static void an_adapter_is_truncated_while_in_use(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    pf_error err;
    /* One thread: to the thread sanitizer the zero page that the guard maps is a write beside another thread's reads. */
    open_copy(state, &f, (struct pf_engine_opts){.build_delay_ms = 3600000, .n_threads = 1});
    set_one(&f, "noto", 1, &r);
    struct pf_view *v = pf_engine_view(f.engine);
    assert_ok(read_changed(f.ckpt, v, &err), &err);
    assert_int_equal(truncate(adapter_file(state, "noto"), 4096), 0);
    assert_int_equal(read_changed(f.ckpt, v, &err), PF_E_TRUNCATED);
    assert_int_equal(pf_engine_merge(f.engine, NULL, 0.5, &r, &err), PF_E_TRUNCATED);
    assert_err(&err, PF_E_TRUNCATED, "noto.safetensors", "shrank");
    /* and nothing that was computed with it is published */
    assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
    assert_int_equal(n_complete(&f), 0);
    assert_int_equal(read_changed(f.ckpt, v, &err), PF_E_TRUNCATED);
    pf_view_release(v);
    set_one(&f, "turbo", 1, &r); /* the others are not affected */
    assert_same(current_bytes(&f), fresh_bytes(f.ckpt, TURBO, 1));
    close_engine(&f);
}

/* C121: a view keeps what it was made with, even beyond its engine; resident copies included. */
static void views_outlive_adapters_and_engines(void **state)
{
    struct fixture f;
    struct pf_change_report r;
    pf_error err;
    open_engine(state, &f, (struct pf_engine_opts){.build_delay_ms = -1, .n_resident_layers = 9});
    set_one(&f, "noto", 1, &r);
    assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
    assert_string_equal(pf_engine_way(f.engine, f.engine->global->view), "inplace");
    struct pf_view *resident = pf_engine_view(f.engine);
    set_overlay(&f, "turbo", &r);
    struct pf_view *overlaid = pf_engine_view(f.engine);
    set_one(&f, "noto", 1, &r);
    assert_ok(pf_engine_settle(f.engine, SETTLE_MS, &err), &err);
    struct pf_checkpoint *ckpt;
    assert_ok(pf_checkpoint_open(MODEL, NULL, &ckpt, &err), &err);
    struct pf_reader *inside;
    assert_ok(pf_reader_new(resident, &inside, &err), &err);
    assert_ok(pf_reader_enter(inside, 2, &err), &err);
    close_engine(&f);
    assert_same(view_bytes(ckpt, resident), fresh_bytes(ckpt, NOTO, 1));
    assert_same(view_bytes(ckpt, overlaid), fresh_bytes(ckpt, TURBO, 1));
    pf_reader_leave(inside);
    pf_reader_free(inside);
    pf_view_release(resident);
    pf_view_release(overlaid);
    pf_checkpoint_close(ckpt);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(the_cache_directory_is_removed_while_running),
        in_dir(the_cache_becomes_read_only),
        in_dir(the_disk_fills_up_at_any_point_of_a_build),
        in_dir(a_budget_smaller_than_one_composition),
        in_dir(a_budget_of_one_composition_evicts),
        in_dir(the_base_is_truncated_while_it_is_streamed),
        in_dir(the_base_is_truncated_during_a_build),
        in_dir(the_base_is_replaced_by_one_of_the_same_size_and_mtime),
        in_dir(the_base_is_overwritten_with_the_same_size_and_mtime),
        in_dir(a_touched_base_is_proved_in_the_background),
        in_dir(a_base_touched_under_a_running_engine_is_proved),
        in_dir(a_base_touched_during_a_build_is_built_again),
        in_dir(other_bytes_behind_a_known_id_are_found),
        in_dir(residents_of_a_truncated_base_are_given_up),
        in_dir(an_overlay_is_cut_while_it_is_read),
        in_dir(an_adapter_is_replaced_under_its_nickname),
        in_dir(an_adapter_is_overwritten_in_place),
        in_dir(an_adapter_is_spoiled_and_restored),
        in_dir(an_adapter_is_truncated_while_in_use),
        in_dir(views_outlive_adapters_and_engines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
