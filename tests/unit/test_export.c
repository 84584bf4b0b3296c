/*
 * pf_merge, undisturbed: the bytes against the slow merge, the three layouts, refusals, threads, memory, cancelling.
 */
#include "export_fixture.h"

#include <fcntl.h>
#include <sys/stat.h>

#include "base/json.h"

static const struct pf_merge_opts two_threads = {.size = sizeof two_threads, .n_threads = 2};

static void put(const char *dir, const char *name, const char *text)
{
    char *path = path_join(dir, name);
    write_file(path, text, strlen(text));
    mem_free(path);
}

/* --------------------------------------------------------------------------------------------------- the bytes */

static void writes_what_the_slow_merge_says(void **state)
{
    const char *out = test_path(state, "out.safetensors"), *want = test_path(state, "want");
    struct fx f;
    struct pf_merge_report report = {0};
    pf_error err = {0};
    fx_open(&f, state, 0.75);
    fx_expect(&f, 0.75f, false, want);
    assert_ok(pf_merge(f.ckpt, f.comp, out, &two_threads, &report, &err), &err);
    assert_true(fx_same_file(out, want));
    assert_true(report.is_complete);
    assert_false(report.is_resumed);
    struct stat st;
    assert_int_equal(stat(out, &st), 0);
    assert_int_equal(report.n_bytes_written, st.st_size);
    assert_true(report.peak_anon_bytes > 0);
    assert_true(report.seconds > 0);
    assert_names(*state, (const char *const[]){"base.safetensors", "lora.safetensors",
                                               "out.safetensors", "want", NULL});
    fx_close(&f);
}

/* C107: what was read through a mapping and written is a file that reads back. */
static void the_output_opens_and_its_untouched_tensors_are_the_bases(void **state)
{
    const char *out = test_path(state, "out.safetensors");
    struct fx f;
    pf_error err = {0};
    fx_open(&f, state, 0.5);
    assert_ok(pf_merge(f.ckpt, f.comp, out, NULL, NULL, &err), &err);
    struct st_file *st = NULL;
    assert_ok(st_open(out, &st, &err), &err);
    for (size_t i = 0; i < f.model.n; i++) {
        const struct fx_tensor *t = &f.model.t[i];
        const struct st_tensor *got = st_find(st, str_of(t->name));
        assert_non_null(got);
        assert_int_equal(got->n_bytes, t->n_bytes);
        const bool is_same = !memcmp(st_data(st, got), t->p, t->n_bytes);
        assert_int_equal(is_same, !fx_find(&f.factors, t->name) &&
                                      (!t->d1 || strncmp(t->name, "blocks.", 7)));
    }
    st_close(st);
    fx_close(&f);
}

static void nothing_to_add_gives_the_base_byte_for_byte(void **state)
{
    const char *base = test_path(state, "base.safetensors");
    const char *zero = test_path(state, "zero.safetensors"), *none = test_path(state, "none");
    const char *null = test_path(state, "null");
    struct fx f;
    struct pf_composition *empty = NULL;
    pf_error err = {0};
    fx_open(&f, state, 0.0);
    assert_ok(pf_merge(f.ckpt, f.comp, zero, &two_threads, NULL, &err), &err);
    assert_true(fx_same_file(zero, base));
    assert_ok(pf_composition_new(f.ckpt, NULL, 0, NULL, &empty, &err), &err);
    assert_ok(pf_merge(f.ckpt, empty, none, &two_threads, NULL, &err), &err);
    assert_true(fx_same_file(none, base));
    assert_ok(pf_merge(f.ckpt, NULL, null, &two_threads, NULL, &err), &err);
    assert_true(fx_same_file(null, base));
    pf_composition_free(empty);
    fx_close(&f);
}

static void f32_keeps_the_sum_unrounded_in_a_new_header(void **state)
{
    const char *out = test_path(state, "out.safetensors"), *want = test_path(state, "want");
    struct fx f;
    pf_error err = {0};
    fx_open(&f, state, 1.5);
    fx_compose(&f, NULL, 1.5, PF_MERGE_F32);
    struct fx_set merged;
    fx_merge(&f.model, &f.factors, 1.5f, true, &merged);
    fx_save(&merged, 0, merged.n, want);
    assert_ok(pf_merge(f.ckpt, f.comp, out, &two_threads, NULL, &err), &err);
    struct st_file *a = NULL, *b = NULL;
    assert_ok(st_open(out, &a, &err), &err);
    assert_ok(st_open(want, &b, &err), &err);
    assert_int_equal(st_header_bytes(a) % 4096, 0);
    struct str format;
    assert_true(st_meta_find(a, "format", &format) && str_eqz(format, "pt"));
    assert_int_equal(st_n_tensors(a), st_n_tensors(b));
    for (size_t i = 0; i < st_n_tensors(a); i++) {
        const struct st_tensor *t = st_tensor(a, i), *u = st_tensor(b, i);
        assert_true(str_eq(t->name, u->name));
        assert_int_equal(t->dtype, u->dtype);
        assert_int_equal(t->n_bytes, u->n_bytes);
        assert_memory_equal(st_data(a, t), st_data(b, u), t->n_bytes);
    }
    st_close(a);
    st_close(b);
    fx_free(&merged);
    fx_close(&f);
}

/* One row longer than an item, and rows that do not divide one; panels of every worker count. */
static void long_rows_and_any_number_of_threads_give_the_same_bytes(void **state)
{
    const char *base = test_path(state, "long.safetensors"), *want = test_path(state, "want");
    const char *lora = test_path(state, "l.safetensors");
    static const unsigned threads[] = {1, 2, 7, 40};
    struct rng r = {7};
    struct fx f = {0};
    pf_error err = {0};
    fx_add(&f.model, &r, "blocks.0.wide.weight", PF_BF16, 1, 2100001, 0.1f);
    fx_add(&f.model, &r, "blocks.0.tall.weight", PF_F32, 20003, 61, 0.1f);
    fx_adapter(&f.model, &f.factors, 8);
    fx_save(&f.model, 0, f.model.n, base);
    fx_save(&f.factors, 0, f.factors.n, lora);
    assert_ok(pf_adapter_open(lora, &f.adapter, &err), &err);
    fx_compose(&f, base, 1.0, PF_MERGE_BASE);
    fx_expect(&f, 1.0f, false, want);
    for (size_t i = 0; i < PF_COUNTOF(threads); i++) {
        const char *out = test_path(state, "out");
        const struct pf_merge_opts opts = {
            .size = sizeof opts, .n_threads = threads[i], .force = true};
        assert_ok(pf_merge(f.ckpt, f.comp, out, &opts, NULL, &err), &err);
        assert_true(fx_same_file(out, want));
    }
    fx_close(&f);
}

/* As many workers as the default allows, and the model of this test on the heap besides. */
static void eight_workers_stay_below_64_mib(void **state)
{
    const struct pf_merge_opts opts = {.size = sizeof opts, .n_threads = 8};
    struct pf_merge_report report = {0};
    struct fx f;
    pf_error err = {0};
    fx_open(&f, state, 0.75);
    assert_ok(pf_merge(f.ckpt, f.comp, test_path(state, "out"), &opts, &report, &err), &err);
    fx_close(&f);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    print_message("skipped: memory of a sanitized build says nothing\n");
    skip();
#endif
    assert_in_range(report.peak_anon_bytes, 1 << 20, 64 << 20);
}

/* --------------------------------------------------------------------------------------------------- the layouts */

static void write_index(const char *path, const struct fx_set *s, size_t i_cut)
{
    struct json *root = json_new_object(), *meta = json_new_object(), *map = json_new_object();
    struct strbuf b;
    pf_error err = {0};
    int64_t n = 0;
    for (size_t i = 0; i < s->n; i++) {
        n += (int64_t)s->t[i].n_bytes;
        json_set_z(map, s->t[i].name,
                   i < i_cut ? "model-00001-of-00002.safetensors"
                             : "model-00002-of-00002.safetensors");
    }
    json_set_int(meta, "total_size", n);
    json_set(root, "metadata", meta);
    json_set(root, "weight_map", map);
    strbuf_init(&b);
    assert_ok(json_write(root, 2, &b, &err), &err);
    strbuf_adds(&b, "\n");
    write_file(path, b.p, b.n);
    strbuf_release(&b);
    json_free(root);
}

static void make_sharded(const struct fx_set *s, const char *dir)
{
    char *a = path_join(dir, "model-00001-of-00002.safetensors");
    char *b = path_join(dir, "model-00002-of-00002.safetensors");
    char *index = path_join(dir, "model.safetensors.index.json");
    assert_int_equal(file_mkdirs(dir, NULL), PF_OK);
    fx_save(s, 0, 3, a);
    fx_save(s, 3, s->n, b);
    write_index(index, s, 3);
    put(dir, "config.json", "{\"_class_name\": \"X\"}\n");
    mem_free(a);
    mem_free(b);
    mem_free(index);
}

static void a_sharded_set_stays_one(void **state)
{
    const char *base = test_path(state, "set"), *want = test_path(state, "want");
    const char *out = test_path(state, "out"), *wide = test_path(state, "wide");
    struct fx f;
    struct fx_set merged;
    pf_error err = {0};
    fx_open(&f, state, 0.75);
    pf_composition_free(f.comp);
    pf_checkpoint_close(f.ckpt);
    f.comp = NULL;
    f.ckpt = NULL;
    make_sharded(&f.model, base);
    put(base, "README.md", "hello\n");
    fx_compose(&f, base, 0.75, PF_MERGE_BASE);
    fx_merge(&f.model, &f.factors, 0.75f, false, &merged);
    make_sharded(&merged, want);
    put(want, "README.md", "hello\n");
    assert_ok(pf_merge(f.ckpt, f.comp, out, &two_threads, NULL, &err), &err);
    assert_true(fx_same_tree(out, want));
    fx_free(&merged);
    /* In f32 the index says the new size; everything else of it stays. */
    fx_compose(&f, NULL, 0.75, PF_MERGE_F32);
    fx_merge(&f.model, &f.factors, 0.75f, true, &merged);
    assert_ok(pf_merge(f.ckpt, f.comp, wide, &two_threads, NULL, &err), &err);
    const char *index = test_path(state, "index.json");
    write_index(index, &merged, 3);
    assert_true(fx_same_file(test_path(state, "wide/model.safetensors.index.json"), index));
    struct pf_checkpoint *again = NULL;
    assert_ok(pf_checkpoint_open(wide, NULL, &again, &err), &err);
    pf_checkpoint_close(again);
    fx_free(&merged);
    fx_close(&f);
}

static void a_set_opened_by_its_index_brings_its_config_only(void **state)
{
    const char *dir = test_path(state, "set"), *out = test_path(state, "out");
    struct fx f;
    pf_error err = {0};
    fx_open(&f, state, 0.75);
    pf_composition_free(f.comp);
    pf_checkpoint_close(f.ckpt);
    f.comp = NULL;
    f.ckpt = NULL;
    make_sharded(&f.model, dir);
    put(dir, "other.txt", "x");
    fx_compose(&f, test_path(state, "set/model.safetensors.index.json"), 0.75, PF_MERGE_BASE);
    assert_ok(pf_merge(f.ckpt, f.comp, out, &two_threads, NULL, &err), &err);
    assert_names(out, (const char *const[]){"config.json", "model-00001-of-00002.safetensors",
                                            "model-00002-of-00002.safetensors",
                                            "model.safetensors.index.json", NULL});
    fx_close(&f);
}

static void a_model_directory_is_copied_whole(void **state)
{
    const char *base = test_path(state, "dir"), *out = test_path(state, "out");
    const char *want = test_path(state, "want"), *outside = test_path(state, "outside.txt");
    struct fx f;
    pf_error err = {0};
    fx_open(&f, state, 0.75);
    pf_composition_free(f.comp);
    pf_checkpoint_close(f.ckpt);
    f.comp = NULL;
    f.ckpt = NULL;
    static const char *const dirs[] = {"transformer", "text_encoder", "tokenizer/deep", ".cache",
                                       "scheduler"};
    for (size_t i = 0; i < PF_COUNTOF(dirs); i++) {
        char *path = path_join(base, dirs[i]);
        assert_int_equal(file_mkdirs(path, NULL), PF_OK);
        mem_free(path);
    }
    put(base, "model_index.json", "{\"_class_name\": \"Pipe\"}\n");
    put(base, "transformer/config.json", "{\"_class_name\": \"X\"}\n");
    put(base, "tokenizer/deep/vocab.json", "{}\n");
    put(base, "tokenizer/empty", "");
    put(base, "scheduler/scheduler_config.json", "{}\n");
    put(base, ".cache/hidden", "h");
    put(base, "left.partial", "l");
    put(base, "transformer/diffusion_pytorch_model.bin", "unmerged weights");
    write_file(outside, "content", 7);
    assert_int_equal(symlink(outside, test_path(state, "dir/tokenizer/link.txt")), 0);
    assert_int_equal(symlink("/nonexistent/x", test_path(state, "dir/tokenizer/dangling")), 0);
    assert_int_equal(symlink("..", test_path(state, "dir/tokenizer/up")), 0);
    fx_save(&f.model, 0, f.model.n,
            test_path(state, "dir/transformer/diffusion_pytorch_model.safetensors"));
    fx_save(&f.model, 1, 3, test_path(state, "dir/text_encoder/model.safetensors"));
    fx_compose(&f, base, 0.75, PF_MERGE_BASE);
    assert_ok(pf_merge(f.ckpt, f.comp, out, &two_threads, NULL, &err), &err);
    assert_names(out, (const char *const[]){"model_index.json", "scheduler", "text_encoder",
                                            "tokenizer", "transformer", NULL});
    assert_names(test_path(state, "out/transformer"),
                 (const char *const[]){"config.json", "diffusion_pytorch_model.safetensors", NULL});
    assert_names(test_path(state, "out/tokenizer"),
                 (const char *const[]){"deep", "empty", "link.txt", NULL});
    fx_expect(&f, 0.75f, false, want);
    assert_true(fx_same_file(
        test_path(state, "out/transformer/diffusion_pytorch_model.safetensors"), want));
    assert_true(fx_same_file(test_path(state, "out/text_encoder/model.safetensors"),
                             test_path(state, "dir/text_encoder/model.safetensors")));
    assert_true(fx_same_file(test_path(state, "out/model_index.json"),
                             test_path(state, "dir/model_index.json")));
    struct stat st;
    assert_int_equal(lstat(test_path(state, "out/tokenizer/link.txt"), &st), 0);
    assert_true(S_ISREG(st.st_mode));
    assert_int_equal(st.st_size, 7);
    fx_close(&f);
}

/* ------------------------------------------------------------------------------------------------------ refusals */

/* C101: the output may not be the base, by whatever name, forced or not. */
static void refuses_to_write_over_the_base(void **state)
{
    const char *base = test_path(state, "base.safetensors"), *soft = test_path(state, "soft");
    const char *hard = test_path(state, "hard.safetensors");
    const char *dotted = test_path(state, "./x/../base.safetensors");
    struct fx f;
    pf_error err = {0};
    fx_open(&f, state, 1.0);
    assert_int_equal(link(base, hard), 0);
    assert_int_equal(symlink("base.safetensors", soft), 0);
    assert_int_equal(mkdir(test_path(state, "x"), 0700), 0);
    const char *const names[] = {base, hard, soft, dotted, *state};
    for (size_t i = 0; i < PF_COUNTOF(names); i++) {
        const struct pf_merge_opts opts = {.size = sizeof opts, .force = true};
        assert_int_equal(pf_merge(f.ckpt, f.comp, names[i], &opts, NULL, &err), PF_E_INVALID);
        assert_err(&err, PF_E_INVALID, "is the checkpoint that is merged, or part of it");
    }
    fx_expect(&f, 0.0f, false, test_path(state, "want"));
    assert_true(fx_same_file(base, test_path(state, "want")));
    fx_close(&f);
}

static void refuses_to_replace_what_it_should_not(void **state)
{
    const char *lora = test_path(state, "lora.safetensors"), *out = test_path(state, "out");
    const char *dir = test_path(state, "dir"), *pipe_path = test_path(state, "pipe");
    const struct pf_merge_opts force = {.size = sizeof force, .force = true};
    struct fx f;
    pf_error err = {0};
    fx_open(&f, state, 1.0);
    assert_int_equal(pf_merge(f.ckpt, f.comp, lora, &force, NULL, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "holds the adapter");
    write_file(out, "x", 1);
    assert_int_equal(pf_merge(f.ckpt, f.comp, out, NULL, NULL, &err), PF_E_EXISTS);
    assert_err(&err, PF_E_EXISTS, out, "exists; it is replaced only when forced");
    assert_int_equal(mkfifo(pipe_path, 0600), 0);
    assert_int_equal(pf_merge(f.ckpt, f.comp, pipe_path, &force, NULL, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, pipe_path, "neither a file nor a directory");
    assert_int_equal(file_kind(pipe_path), FILE_OTHER);
    assert_int_equal(mkdir(dir, 0700), 0);
    assert_int_equal(pf_merge(f.ckpt, f.comp, dir, &force, NULL, &err), PF_E_EXISTS);
    assert_err(&err, PF_E_EXISTS, "is a directory, and this checkpoint is one file");
    assert_int_equal(pf_merge(f.ckpt, f.comp, test_path(state, "no/where"), NULL, NULL, &err),
                     PF_E_NOTFOUND);
    assert_err(&err, PF_E_NOTFOUND, "there is no directory");
    assert_int_equal(pf_merge(f.ckpt, f.comp, "", NULL, NULL, &err), PF_E_INVALID);
    /* OUT.partial that is somebody else's */
    assert_int_equal(mkdir(test_path(state, "new.partial"), 0700), 0);
    put(test_path(state, "new.partial"), "precious", "p");
    assert_int_equal(pf_merge(f.ckpt, f.comp, test_path(state, "new"), &force, NULL, &err),
                     PF_E_EXISTS);
    assert_err(&err, PF_E_EXISTS, "is no partial output");
    assert_int_equal(file_kind(test_path(state, "new.partial/precious")), FILE_REGULAR);
    const struct pf_merge_opts beyond = {.size = sizeof beyond, .i_part = 2, .n_parts = 2};
    assert_int_equal(pf_merge(f.ckpt, f.comp, out, &beyond, NULL, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "part 2 of 2");
    fx_close(&f);
}

static void force_replaces_a_checkpoint_and_nothing_else(void **state)
{
    const char *base = test_path(state, "set"), *out = test_path(state, "out");
    const struct pf_merge_opts force = {.size = sizeof force, .force = true};
    struct fx f;
    pf_error err = {0};
    fx_open(&f, state, 0.75);
    const char *file = test_path(state, "file");
    write_file(file, "old", 3);
    assert_ok(pf_merge(f.ckpt, f.comp, file, &force, NULL, &err), &err);
    fx_expect(&f, 0.75f, false, test_path(state, "want"));
    assert_true(fx_same_file(file, test_path(state, "want")));
    pf_composition_free(f.comp);
    pf_checkpoint_close(f.ckpt);
    f.comp = NULL;
    f.ckpt = NULL;
    make_sharded(&f.model, base);
    fx_compose(&f, base, 0.75, PF_MERGE_BASE);
    assert_int_equal(pf_merge(f.ckpt, f.comp, file, &force, NULL, &err), PF_E_EXISTS);
    assert_err(&err, PF_E_EXISTS, "is no directory, and this checkpoint is one");
    assert_true(fx_same_file(file, test_path(state, "want")));
    assert_int_equal(mkdir(out, 0700), 0);
    put(out, "diary.txt", "dear");
    assert_int_equal(pf_merge(f.ckpt, f.comp, out, &force, NULL, &err), PF_E_EXISTS);
    assert_err(&err, PF_E_EXISTS, "holds no checkpoint: it is not replaced");
    assert_int_equal(file_kind(test_path(state, "out/diary.txt")), FILE_REGULAR);
    assert_int_equal(unlink(test_path(state, "out/diary.txt")), 0);
    assert_ok(pf_merge(f.ckpt, f.comp, out, &force, NULL, &err), &err); /* an empty one goes */
    put(out, "stale.txt", "s");
    assert_ok(pf_merge(f.ckpt, f.comp, out, &force, NULL, &err), &err); /* so does a checkpoint */
    assert_int_equal(file_kind(test_path(state, "out/stale.txt")), FILE_ABSENT);
    assert_int_equal(file_kind(test_path(state, "out.partial")), FILE_ABSENT);
    fx_close(&f);
}

/* A terabyte of zeros that take no space: the output would. */
static void says_before_it_starts_that_the_disk_is_too_small(void **state)
{
    const char *base = test_path(state, "huge.safetensors"), *out = test_path(state, "out");
    static const char json[] = "{\"x\":{\"dtype\":\"U8\",\"shape\":[8796093022208],"
                               "\"data_offsets\":[0,8796093022208]}}";
    const uint64_t n = sizeof json - 1;
    struct pf_checkpoint *ckpt = NULL;
    pf_error err = {0};
    const int fd = open(base, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    assert_ok(file_pwrite(fd, &n, 8, 0, base, &err), &err);
    assert_ok(file_pwrite(fd, json, n, 8, base, &err), &err);
    if (ftruncate(fd, (off_t)(8 + n + (UINT64_C(8) << 40)))) {
        print_message("skipped: no sparse file of eight terabytes here\n");
        skip();
    }
    (void)close(fd);
    assert_ok(pf_checkpoint_open(base, NULL, &ckpt, &err), &err);
    assert_int_equal(pf_merge(ckpt, NULL, out, NULL, NULL, &err), PF_E_NOSPACE);
    assert_err(&err, PF_E_NOSPACE, out, "takes 8796093", "are free in");
    assert_names(*state, (const char *const[]){"huge.safetensors", NULL});
    pf_checkpoint_close(ckpt);
}

/* C103, C105: the base changed or went away while we read it: an error, and nothing under the final name. */
struct spoil {
    const char *path;
    bool is_truncated, is_done;
};

static bool spoil_once(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    struct spoil *s = ctx;
    (void)what;
    if (s->is_done || !done || done == total)
        return true;
    s->is_done = true;
    if (s->is_truncated)
        return !truncate(s->path, 1000);
    const int fd = open(s->path, O_WRONLY | O_CLOEXEC);
    static const char zeros[64];
    const bool is_ok = pwrite(fd, zeros, sizeof zeros, 1000) == sizeof zeros;
    (void)close(fd);
    return is_ok;
}

/* Spoils `name` in the middle of a merge, which must say so and publish nothing. */
static void merge_while_it_changes(void **state, const char *name, bool is_truncated)
{
    struct spoil spoil = {test_path(state, name), is_truncated, false};
    const char *out = test_path(state, "out");
    const struct pf_merge_opts opts = {
        .size = sizeof opts, .n_threads = 1, .progress = spoil_once, .progress_ctx = &spoil};
    struct fx f;
    pf_error err = {0};
    fx_open(&f, state, 0.75);
    const int rc = pf_merge(f.ckpt, f.comp, out, &opts, NULL, &err);
    assert_true(spoil.is_done);
    assert_int_equal(rc, is_truncated ? PF_E_TRUNCATED : PF_E_CHANGED);
    assert_err(&err, rc, name, is_truncated ? "shrank" : "changed");
    assert_int_equal(file_kind(out), FILE_ABSENT);
    fx_close(&f);
}

static void a_base_that_changes_meanwhile_is_an_error(void **state)
{
    for (unsigned i = 0; i < 2; i++) {
        const char *out = test_path(state, "out");
        struct fx f;
        pf_error err = {0};
        merge_while_it_changes(state, "base.safetensors", i);
        /* Whatever the first run believed is not trusted by the next one. */
        fx_open(&f, state, 0.75);
        struct pf_merge_report report;
        assert_ok(pf_merge(f.ckpt, f.comp, out, &two_threads, &report, &err), &err);
        assert_false(report.is_resumed);
        fx_expect(&f, 0.75f, false, test_path(state, "want"));
        assert_true(fx_same_file(out, test_path(state, "want")));
        assert_int_equal(unlink(out), 0);
        fx_close(&f);
    }
}

/* An adapter too: a trainer saves over it while it is merged. */
static void an_adapter_that_changes_meanwhile_is_an_error(void **state)
{
    for (unsigned i = 0; i < 2; i++)
        merge_while_it_changes(state, "lora.safetensors", i);
}

static bool remove_once(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    const char **dir = ctx;
    (void)what;
    if (*dir && done == total) { /* all is written, nothing is published */
        assert_int_equal(file_remove_tree(*dir, NULL), PF_OK);
        *dir = NULL;
    }
    return true;
}

/* Somebody tidies up under a running merge: it does not call complete what is nowhere. */
static void a_partial_output_that_is_removed_is_an_error(void **state)
{
    const char *dir = test_path(state, "out.partial");
    const struct pf_merge_opts opts = {
        .size = sizeof opts, .n_threads = 1, .progress = remove_once, .progress_ctx = &dir};
    struct fx f;
    pf_error err = {0};
    fx_open(&f, state, 0.75);
    assert_int_not_equal(pf_merge(f.ckpt, f.comp, test_path(state, "out"), &opts, NULL, &err),
                         PF_OK);
    assert_null(dir);
    assert_err(&err, PF_E_NOTFOUND, "out.partial' was removed while it was written");
    assert_int_equal(file_kind(test_path(state, "out")), FILE_ABSENT);
    fx_close(&f);
}

/* -------------------------------------------------------------------------------------------- cancelling, parts */

static bool stop_after(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    uint64_t *most = ctx;
    assert_string_equal(what, "merge");
    assert_true(done <= total);
    return done < *most;
}

static void a_cancelled_merge_continues(void **state)
{
    const char *out = test_path(state, "out");
    uint64_t most = 2000000;
    struct pf_merge_opts opts = {
        .size = sizeof opts, .n_threads = 2, .progress = stop_after, .progress_ctx = &most};
    struct pf_merge_report report = {0};
    struct fx f;
    pf_error err = {0};
    fx_open(&f, state, 0.75);
    assert_int_equal(pf_merge(f.ckpt, f.comp, out, &opts, &report, &err), PF_E_CANCELLED);
    assert_err(&err, PF_E_CANCELLED, out, "was cancelled");
    assert_int_equal(file_kind(out), FILE_ABSENT);
    most = UINT64_MAX;
    assert_ok(pf_merge(f.ckpt, f.comp, out, &opts, &report, &err), &err);
    assert_true(report.is_resumed);
    struct stat st;
    assert_int_equal(stat(out, &st), 0);
    assert_true(report.n_bytes_written <= (uint64_t)st.st_size - 2000000);
    fx_expect(&f, 0.75f, false, test_path(state, "want"));
    assert_true(fx_same_file(out, test_path(state, "want")));
    fx_close(&f);
}

/* Another strength, another adapter: a partial output of something else is not continued. */
static void a_partial_output_of_another_composition_is_started_over(void **state)
{
    const char *out = test_path(state, "out");
    uint64_t most = 2000000;
    struct pf_merge_opts opts = {
        .size = sizeof opts, .n_threads = 1, .progress = stop_after, .progress_ctx = &most};
    struct pf_merge_report report = {0};
    struct fx f;
    pf_error err = {0};
    fx_open(&f, state, 0.75);
    assert_int_equal(pf_merge(f.ckpt, f.comp, out, &opts, NULL, &err), PF_E_CANCELLED);
    fx_compose(&f, NULL, 0.25, PF_MERGE_BASE);
    assert_ok(pf_merge(f.ckpt, f.comp, out, NULL, &report, &err), &err);
    assert_false(report.is_resumed);
    fx_expect(&f, 0.25f, false, test_path(state, "want"));
    assert_true(fx_same_file(out, test_path(state, "want")));
    fx_close(&f);
}

static void an_output_that_another_process_writes_is_left_to_it(void **state)
{
    const char *out = test_path(state, "out");
    const struct pf_merge_opts part = {.size = sizeof part, .n_parts = 2};
    struct file_lock lock;
    struct fx f;
    pf_error err = {0};
    fx_open(&f, state, 0.75);
    assert_int_equal(mkdir(test_path(state, "out.partial"), 0700), 0);
    assert_ok(file_lock_try(&lock, test_path(state, "out.partial/part.0"), &err), &err);
    assert_int_equal(pf_merge(f.ckpt, f.comp, out, NULL, NULL, &err), PF_E_BUSY);
    assert_err(&err, PF_E_BUSY, "out' is being written by another process: wait for it");
    assert_null(strstr(err.msg, "part 1"));
    assert_int_equal(pf_merge(f.ckpt, f.comp, out, &part, NULL, &err), PF_E_BUSY);
    assert_err(&err, PF_E_BUSY, "part 1 of 2 of '", "out' is being written by another process");
    assert_int_equal(file_kind(out), FILE_ABSENT);
    file_lock_release(&lock);
    assert_ok(pf_merge(f.ckpt, f.comp, out, NULL, NULL, &err), &err);
    fx_close(&f);
}

static void parts_in_any_order_make_the_same_file(void **state)
{
    static const uint32_t orders[][3] = {{0, 1, 2}, {2, 0, 1}, {1, 2, 0}};
    const char *out = test_path(state, "out"), *want = test_path(state, "want");
    struct fx f;
    pf_error err = {0};
    fx_open(&f, state, 0.75);
    fx_expect(&f, 0.75f, false, want);
    struct stat st;
    assert_int_equal(stat(want, &st), 0);
    for (size_t i = 0; i < PF_COUNTOF(orders); i++) {
        uint64_t n_written = 0;
        for (unsigned k = 0; k < 3; k++) {
            const struct pf_merge_opts opts = {
                .size = sizeof opts, .i_part = orders[i][k], .n_parts = 3, .n_threads = 1};
            struct pf_merge_report report = {0};
            assert_ok(pf_merge(f.ckpt, f.comp, out, &opts, &report, &err), &err);
            assert_int_equal(report.is_complete, k == 2);
            assert_int_equal(file_kind(out), k == 2 ? FILE_REGULAR : FILE_ABSENT);
            assert_true(report.n_bytes_written > 0);
            n_written += report.n_bytes_written;
            if (k == 0) { /* again: nothing is left to do */
                assert_ok(pf_merge(f.ckpt, f.comp, out, &opts, &report, &err), &err);
                assert_int_equal(report.n_bytes_written, 0);
                assert_true(report.is_resumed);
                assert_false(report.is_complete);
            }
        }
        assert_int_equal(n_written, st.st_size);
        assert_true(fx_same_file(out, want));
        assert_int_equal(file_kind(test_path(state, "out.partial")), FILE_ABSENT);
        assert_int_equal(unlink(out), 0);
    }
    fx_close(&f);
}

/* Part 2 with another strength than part 1 had: what part 1 wrote is not thrown away behind its owner's back. */
static void parts_of_two_merges_do_not_mix(void **state)
{
    const char *out = test_path(state, "out");
    struct pf_merge_opts opts = {.size = sizeof opts, .n_parts = 2, .n_threads = 1};
    struct pf_merge_report report = {0};
    struct fx f;
    pf_error err = {0};
    fx_open(&f, state, 0.75);
    assert_ok(pf_merge(f.ckpt, f.comp, out, &opts, &report, &err), &err);
    fx_compose(&f, NULL, 0.25, PF_MERGE_BASE);
    opts.i_part = 1;
    assert_int_equal(pf_merge(f.ckpt, f.comp, out, &opts, NULL, &err), PF_E_EXISTS);
    assert_err(&err, PF_E_EXISTS, "out.partial' holds parts of another merge", "with force");
    /* The first one can still be finished. */
    fx_compose(&f, NULL, 0.75, PF_MERGE_BASE);
    assert_ok(pf_merge(f.ckpt, f.comp, out, &opts, &report, &err), &err);
    assert_true(report.is_complete);
    fx_expect(&f, 0.75f, false, test_path(state, "want"));
    assert_true(fx_same_file(out, test_path(state, "want")));
    assert_int_equal(unlink(out), 0);
    /* And forced, both parts of the second agree. */
    opts.i_part = 0;
    assert_ok(pf_merge(f.ckpt, f.comp, out, &opts, &report, &err), &err);
    fx_compose(&f, NULL, 0.25, PF_MERGE_BASE);
    opts.force = true;
    for (opts.i_part = 0; opts.i_part < 2; opts.i_part++)
        assert_ok(pf_merge(f.ckpt, f.comp, out, &opts, &report, &err), &err);
    assert_true(report.is_complete);
    fx_expect(&f, 0.25f, false, test_path(state, "want"));
    assert_true(fx_same_file(out, test_path(state, "want")));
    fx_close(&f);
}

/* More parts than items: some have nothing to do and must not be waited for. */
static void more_parts_than_items_are_fine(void **state)
{
    const char *out = test_path(state, "out"), *want = test_path(state, "want");
    struct fx f;
    pf_error err = {0};
    fx_open(&f, state, 0.75);
    fx_expect(&f, 0.75f, false, want);
    struct pf_merge_report report = {0};
    for (uint32_t i = 0; i < 40; i++) {
        const struct pf_merge_opts opts = {
            .size = sizeof opts, .i_part = i, .n_parts = 40, .n_threads = 1};
        assert_ok(pf_merge(f.ckpt, f.comp, out, &opts, &report, &err), &err);
    }
    assert_true(report.is_complete);
    assert_true(fx_same_file(out, want));
    fx_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(eight_workers_stay_below_64_mib), /* first: later ones leave the heap larger */
        in_dir(writes_what_the_slow_merge_says),
        in_dir(the_output_opens_and_its_untouched_tensors_are_the_bases),
        in_dir(nothing_to_add_gives_the_base_byte_for_byte),
        in_dir(f32_keeps_the_sum_unrounded_in_a_new_header),
        in_dir(long_rows_and_any_number_of_threads_give_the_same_bytes),
        in_dir(a_sharded_set_stays_one),
        in_dir(a_set_opened_by_its_index_brings_its_config_only),
        in_dir(a_model_directory_is_copied_whole),
        in_dir(refuses_to_write_over_the_base),
        in_dir(refuses_to_replace_what_it_should_not),
        in_dir(force_replaces_a_checkpoint_and_nothing_else),
        in_dir(says_before_it_starts_that_the_disk_is_too_small),
        in_dir(a_base_that_changes_meanwhile_is_an_error),
        in_dir(an_adapter_that_changes_meanwhile_is_an_error),
        in_dir(a_partial_output_that_is_removed_is_an_error),
        in_dir(a_cancelled_merge_continues),
        in_dir(a_partial_output_of_another_composition_is_started_over),
        in_dir(an_output_that_another_process_writes_is_left_to_it),
        in_dir(parts_in_any_order_make_the_same_file),
        in_dir(parts_of_two_merges_do_not_mix),
        in_dir(more_parts_than_items_are_fine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
