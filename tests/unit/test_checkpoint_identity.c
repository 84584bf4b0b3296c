/*
 * Which checkpoint is it, and is it still the one that was opened: the content id against copies, touches and changes, stamps
 * and guards against files that change or shrink under us (C103), and which output paths belong to a checkpoint.
 */
#include "checkpoint_fixture.h"

#include <fcntl.h>

#include "base/guard.h"

#define EMOJI PF_SOURCE_DIR "/data/emoji-dit"

static void id_of(const char *path, char out[33])
{
    struct pf_checkpoint *ckpt = fx_open(path);
    pf_error err = {0};
    if (pf_checkpoint_content_id(ckpt, out, &err) != PF_OK)
        fail_msg("content id of '%s': %s", path, err.msg);
    assert_int_equal(strlen(out), 32);
    pf_checkpoint_close(ckpt);
}

static void assert_same_id(const char *a, const char *b)
{
    char id_a[33], id_b[33];
    id_of(a, id_a);
    id_of(b, id_b);
    assert_string_equal(id_a, id_b);
}

static void assert_other_id(const char *a, const char *b)
{
    char id_a[33], id_b[33];
    id_of(a, id_a);
    id_of(b, id_b);
    assert_string_not_equal(id_a, id_b);
}

static void overwrite(const char *path, uint64_t off, const void *p, size_t n)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, p, n, (off_t)off), n);
    assert_int_equal(close(fd), 0);
}

static void copy_to(struct fx *fx, const char *from, const char *rel)
{
    char *p = NULL;
    size_t n = 0;
    assert_int_equal(file_read_all(from, 1 << 30, &p, &n, NULL), PF_OK);
    (void)fx_write(fx, rel, p, n);
    mem_free(p);
}

static void id_does_not_depend_on_place_or_time(void **state)
{
    struct fx *fx = *state;
    const char *a = fx_weights(fx, "a/one.safetensors", "x y", 1);
    const char *b = fx_weights(fx, "b/two.safetensors", "x y", 1);
    const struct timespec t[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
    assert_same_id(a, b);
    assert_int_equal(utimensat(AT_FDCWD, b, t, 0), 0);
    assert_same_id(a, b);
    assert_same_id(a, fx_link(fx, "c.safetensors", "b/two.safetensors"));
    /* The only component of a directory is the one of a file. */
    assert_same_id(a, fx_path(fx, "a"));
    copy_to(fx, EMOJI "/transformer/diffusion_pytorch_model.safetensors",
            "m/transformer/renamed.safetensors");
    assert_same_id(EMOJI, fx_path(fx, "m"));
}

static void id_depends_on_every_byte_of_a_small_checkpoint(void **state)
{
    struct fx *fx = *state;
    const char *a = fx_weights(fx, "a.safetensors", "x yy", 1);
    const char *b = fx_weights(fx, "b.safetensors", "x yy", 1);
    struct pf_checkpoint *ckpt = fx_open(a);
    uint64_t n_file = st_map(ckpt->files[0])->n_bytes;
    uint64_t n_header = st_header_bytes(ckpt->files[0]);
    pf_checkpoint_close(ckpt);
    for (uint64_t off = n_header; off < n_file; off++) {
        uint8_t byte = 0;
        int fd = open(b, O_RDONLY | O_CLOEXEC);
        assert_int_equal(pread(fd, &byte, 1, (off_t)off), 1);
        assert_int_equal(close(fd), 0);
        byte ^= 1;
        overwrite(b, off, &byte, 1);
        assert_other_id(a, b);
        byte ^= 1;
        overwrite(b, off, &byte, 1);
    }
    assert_same_id(a, b);
}

static void id_depends_on_names_shapes_and_metadata(void **state)
{
    struct fx *fx = *state;
    const char *a = fx_weights(fx, "a.safetensors", "x y", 1);
    assert_other_id(a, fx_weights(fx, "b.safetensors", "x z", 1));
    assert_other_id(a, fx_weights(fx, "c.safetensors", "x y z", 1));
    assert_other_id(a, fx_weights(fx, "d.safetensors", "y x", 1));
}

static void id_covers_all_components_and_their_names(void **state)
{
    struct fx *fx = *state;
    static const char *const dirs[] = {"m", "n", "o", "p"};
    for (size_t i = 0; i < PF_COUNTOF(dirs); i++) {
        char rel[64];
        (void)snprintf(rel, sizeof rel, "%s/transformer/model.safetensors", dirs[i]);
        (void)fx_weights(fx, rel, "x", 1);
        (void)snprintf(rel, sizeof rel, "%s/%s/model.safetensors", dirs[i],
                       i == 2 ? "text_encoder_2" : "text_encoder");
        (void)fx_weights(fx, rel, "x", i == 1 ? 3 : 2);
    }
    assert_same_id(fx_path(fx, "m"), fx_path(fx, "p"));
    assert_other_id(fx_path(fx, "m"), fx_path(fx, "n")); /* other bytes in a component */
    assert_other_id(fx_path(fx, "m"), fx_path(fx, "o")); /* another name of one */
    assert_int_equal(file_remove_tree(fx_path(fx, "p/text_encoder"), NULL), PF_OK);
    assert_other_id(fx_path(fx, "m"), fx_path(fx, "p"));
}

static void id_depends_on_what_the_index_selects(void **state)
{
    struct fx *fx = *state;
    (void)fx_weights(fx, "s.safetensors", "a b", 1);
    const char *both =
        fx_text(fx, "x.safetensors.index.json",
                "{\"weight_map\":{\"a\":\"s.safetensors\",\"b\":\"s.safetensors\"}}");
    const char *one =
        fx_text(fx, "y.safetensors.index.json", "{\"weight_map\":{\"a\":\"s.safetensors\"}}");
    assert_other_id(both, one);
    assert_same_id(both, fx_path(fx, "s.safetensors"));
}

/* Two tensors of 48 MiB, sparse: too large to be read whole. */
static const char *big_file(struct fx *fx, const char *rel)
{
    static const char header[] =
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[12582912],\"data_offsets\":[0,50331648]},"
        "\"b\":{\"dtype\":\"F32\",\"shape\":[12582913],\"data_offsets\":[50331648,100663300]}}";
    uint8_t head[8 + sizeof header - 1] = {(uint8_t)(sizeof header - 1)};
    memcpy(head + 8, header, sizeof header - 1);
    const char *path = fx_write(fx, rel, head, sizeof head);
    assert_int_equal(truncate(path, (off_t)(sizeof head + 100663300)), 0);
    return path;
}

static void id_of_a_large_checkpoint_samples_every_tensor(void **state)
{
    struct fx *fx = *state;
    const char *a = big_file(fx, "a.safetensors"), *b = big_file(fx, "b.safetensors");
    struct pf_checkpoint *ckpt = fx_open(a);
    uint64_t middle[2];
    for (uint32_t i = 0; i < 2; i++)
        middle[i] = ckpt->tensors[i].off_bytes + ckpt->tensors[i].n_bytes / 2;
    pf_checkpoint_close(ckpt);
    assert_same_id(a, b);
    for (unsigned i = 0; i < 2; i++) {
        overwrite(b, middle[i], "x", 1);
        assert_other_id(a, b);
        overwrite(b, middle[i], "", 1);
    }
    assert_same_id(a, b);
}

static void id_is_computed_once(void **state)
{
    struct fx *fx = *state;
    const char *path = fx_weights(fx, "a.safetensors", "x", 1);
    struct pf_checkpoint *ckpt = fx_open(path);
    char first[33], second[33];
    assert_int_equal(pf_checkpoint_content_id(ckpt, first, NULL), PF_OK);
    assert_int_equal(truncate(path, 0), 0);
    assert_int_equal(pf_checkpoint_content_id(ckpt, second, NULL), PF_OK);
    assert_string_equal(first, second);
    struct digest d;
    char third[33];
    assert_int_equal(ckpt_content_id(ckpt, &d, NULL), PF_OK);
    digest_hex(d, third);
    assert_string_equal(first, third);
    pf_checkpoint_close(ckpt);
}

static bool count_calls(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    unsigned *n_left = ctx;
    assert_string_equal(what, "base");
    assert_true(done < total);
    return (*n_left)-- > 0;
}

/* Two that the samples cannot tell apart: refined, they differ, and each stays what it is wherever it lies. */
static void a_refined_id_depends_on_every_byte(void **state)
{
    struct fx *fx = *state;
    const char *names[3] = {"a.safetensors", "b.safetensors", "c.safetensors"};
    struct digest sampled[3], refined[3], none = {0};
    for (int i = 0; i < 3; i++) {
        const char *header = "{\"x\":{\"dtype\":\"U8\",\"shape\":[73400320],\"data_offsets\":[0,"
                             "73400320]}}";
        uint8_t head[8] = {(uint8_t)strlen(header)};
        const char *path = fx_write(fx, names[i], head, 8);
        overwrite(path, 8, header, strlen(header));
        assert_int_equal(truncate(path, (off_t)(8 + strlen(header) + 73400320)), 0);
        if (i == 1)
            overwrite(path, 1000, "!", 1);
        struct pf_checkpoint *ckpt = fx_open(path);
        pf_error err;
        assert_int_equal(ckpt_content_id(ckpt, &sampled[i], &err), PF_OK);
        assert_true(ckpt_content_id_holds(ckpt, sampled[i]));
        assert_false(ckpt_content_id_holds(ckpt, none));
        unsigned n_left = 3;
        fx_assert_error(ckpt_content_id_refine(ckpt, count_calls, &n_left, &err), &err,
                        PF_E_CANCELLED, names[i], "cancelled", NULL);
        /* Distrusted, though it has no other */
        assert_false(ckpt_content_id_holds(ckpt, sampled[i]));
        assert_int_equal(ckpt_content_id_refine(ckpt, NULL, NULL, &err), PF_OK);
        assert_true(ckpt_content_id_is_refined(ckpt));
        assert_int_equal(ckpt_content_id(ckpt, &refined[i], &err), PF_OK);
        assert_true(ckpt_content_id_holds(ckpt, refined[i]));
        assert_false(ckpt_content_id_holds(ckpt, sampled[i]));
        pf_checkpoint_close(ckpt);
    }
    assert_true(digest_eq(sampled[0], sampled[1]) && digest_eq(sampled[0], sampled[2]));
    assert_false(digest_eq(refined[0], sampled[0]));
    assert_false(digest_eq(refined[0], refined[1]));
    assert_true(digest_eq(refined[0], refined[2]));
}

static void *ask_for_id(void *ckpt)
{
    char *id = calloc(1, 33);
    if (id != NULL && pf_checkpoint_content_id(ckpt, id, NULL) != PF_OK)
        id[0] = '\0';
    return id;
}

static void id_is_the_same_in_every_thread(void **state)
{
    (void)state;
    struct pf_checkpoint *ckpt = fx_open(EMOJI);
    pthread_t threads[4];
    char id[33];
    for (size_t i = 0; i < PF_COUNTOF(threads); i++)
        assert_int_equal(pthread_create(&threads[i], NULL, ask_for_id, ckpt), 0);
    assert_int_equal(pf_checkpoint_content_id(ckpt, id, NULL), PF_OK);
    for (size_t i = 0; i < PF_COUNTOF(threads); i++) {
        void *other = NULL;
        assert_int_equal(pthread_join(threads[i], &other), 0);
        assert_string_equal(other, id);
        free(other);
    }
    pf_checkpoint_close(ckpt);
}

static void verify_tells_when_a_file_changed(void **state)
{
    struct fx *fx = *state;
    (void)fx_weights(fx, "m/transformer/model.safetensors", "x", 1);
    const char *path = fx_weights(fx, "m/vae/model.safetensors", "x", 1);
    struct pf_checkpoint *ckpt = fx_open(fx_path(fx, "m"));
    const struct timespec t[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
    pf_error err = {0};
    char id[33];
    assert_int_equal(pf_checkpoint_verify(ckpt, &err), PF_OK);
    overwrite(path, 8, "{", 1);
    assert_int_equal(utimensat(AT_FDCWD, path, t, 0), 0); /* whatever the clock's resolution */
    fx_assert_error(pf_checkpoint_verify(ckpt, &err), &err, PF_E_CHANGED, "vae/model.safetensors'",
                    "changed", NULL);
    /* No id for bytes that are not those that were opened. */
    fx_assert_error(pf_checkpoint_content_id(ckpt, id, &err), &err, PF_E_CHANGED,
                    "vae/model.safetensors'", NULL);
    pf_checkpoint_close(ckpt);
}

/* C103: the file is rewritten in place, with a longer header, while it is mapped. */
static void c103_verify_tells_when_a_file_was_rewritten(void **state)
{
    struct fx *fx = *state;
    const char *path = fx_weights(fx, "a.safetensors", "x", 1);
    struct pf_checkpoint *ckpt = fx_open(path);
    pf_error err = {0};
    char id[33];
    assert_string_equal(path, fx_weights(fx, "a.safetensors", "x_with_a_longer_name", 1));
    fx_assert_error(pf_checkpoint_verify(ckpt, &err), &err, PF_E_CHANGED, "a.safetensors'", NULL);
    fx_assert_error(pf_checkpoint_content_id(ckpt, id, &err), &err, PF_E_CHANGED, "a.safetensors'",
                    NULL);
    pf_checkpoint_close(ckpt);
}

static void truncation_is_an_error_and_no_signal(void **state)
{
    struct fx *fx = *state;
    const char *path = big_file(fx, "a.safetensors");
    struct pf_checkpoint *ckpt = fx_open(path);
    pf_error err = {0};
    char id[33];
    assert_int_equal(ckpt_tensor_guard(ckpt, 0, &err), PF_OK);
    assert_int_equal(truncate(path, 8192), 0);
    fx_assert_error(pf_checkpoint_verify(ckpt, &err), &err, PF_E_TRUNCATED, "a.safetensors'",
                    "8192", NULL);
    fx_assert_error(pf_checkpoint_content_id(ckpt, id, &err), &err, PF_E_TRUNCATED,
                    "a.safetensors'", NULL);
    /* Nobody has touched the missing pages yet, so no guard is flagged; the touch flags it and reads zeroes. */
    assert_int_equal(ckpt_tensor_guard(ckpt, 1, &err), PF_OK);
    volatile const uint8_t *p = ckpt->tensors[1].p;
    assert_int_equal(p[ckpt->tensors[1].n_bytes - 1], 0);
    fx_assert_error(ckpt_tensor_guard(ckpt, 1, &err), &err, PF_E_TRUNCATED, "a.safetensors'",
                    "tensor 'b'", NULL);
    pf_checkpoint_close(ckpt);
}

static void owns_its_files_by_any_name(void **state)
{
    struct fx *fx = *state;
    const char *path = fx_weights(fx, "d/a.safetensors", "x", 1);
    const char *config = fx_text(fx, "d/config.json", "{}");
    const char *soft = fx_link(fx, "soft", "d/a.safetensors");
    const char *hard = fx_path(fx, "hard");
    assert_int_equal(link(path, hard), 0);
    struct pf_checkpoint *ckpt = fx_open(path);
    assert_true(ckpt_contains_path(ckpt, path));
    assert_true(ckpt_contains_path(ckpt, soft));
    assert_true(ckpt_contains_path(ckpt, hard));
    assert_true(ckpt_contains_path(ckpt, config));
    assert_true(ckpt_contains_path(ckpt, fx_path(fx, "d/../d/./a.safetensors")));
    /* A directory that holds it would be replaced with it. */
    assert_true(ckpt_contains_path(ckpt, fx_path(fx, "d")));
    assert_true(ckpt_contains_path(ckpt, fx->dir));
    assert_true(ckpt_contains_path(ckpt, "/"));
    /* Its neighbours are free. */
    assert_false(ckpt_contains_path(ckpt, fx_path(fx, "d/b.safetensors")));
    assert_false(ckpt_contains_path(ckpt, fx_path(fx, "d/a.safetensors.x")));
    assert_false(ckpt_contains_path(ckpt, fx_path(fx, "e/f/g")));
    assert_false(ckpt_contains_path(ckpt, "surely-not-here.safetensors"));
    pf_checkpoint_close(ckpt);
}

static void owns_its_directory(void **state)
{
    struct fx *fx = *state;
    (void)fx_weights(fx, "blobs/b", "x", 1);
    (void)fx_link(fx, "m/transformer/model.safetensors", "../../blobs/b");
    const char *alias = fx_link(fx, "alias", "m");
    struct pf_checkpoint *ckpt = fx_open(fx_path(fx, "m"));
    assert_true(ckpt_contains_path(ckpt, fx_path(fx, "m")));
    assert_true(ckpt_contains_path(ckpt, fx_path(fx, "m/")));
    assert_true(ckpt_contains_path(ckpt, alias));
    assert_true(ckpt_contains_path(ckpt, fx_path(fx, "m/new")));
    assert_true(ckpt_contains_path(ckpt, fx_path(fx, "m/transformer/new/deep")));
    assert_true(ckpt_contains_path(ckpt, fx_path(fx, "alias/new")));
    assert_true(ckpt_contains_path(ckpt, fx_path(fx, "blobs/b")));
    assert_true(ckpt_contains_path(ckpt, fx_path(fx, "blobs")));
    assert_false(ckpt_contains_path(ckpt, fx_path(fx, "mm")));
    assert_false(ckpt_contains_path(ckpt, fx_path(fx, "new")));
    assert_false(ckpt_contains_path(ckpt, fx_path(fx, "blobs/c")));
    pf_checkpoint_close(ckpt);
    /* A set opened by its index: index and shards, not the directory's other names. */
    (void)fx_weights(fx, "s/1.safetensors", "x", 1);
    const char *index =
        fx_text(fx, "s/m.safetensors.index.json", "{\"weight_map\":{\"x\":\"1.safetensors\"}}");
    ckpt = fx_open(index);
    assert_true(ckpt_contains_path(ckpt, index));
    assert_true(ckpt_contains_path(ckpt, fx_path(fx, "s/1.safetensors")));
    assert_true(ckpt_contains_path(ckpt, fx_path(fx, "s")));
    assert_false(ckpt_contains_path(ckpt, fx_path(fx, "s/out.safetensors")));
    pf_checkpoint_close(ckpt);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FX_TEST(id_does_not_depend_on_place_or_time),
        FX_TEST(id_depends_on_every_byte_of_a_small_checkpoint),
        FX_TEST(id_depends_on_names_shapes_and_metadata),
        FX_TEST(id_covers_all_components_and_their_names),
        FX_TEST(id_depends_on_what_the_index_selects),
        FX_TEST(id_of_a_large_checkpoint_samples_every_tensor),
        FX_TEST(id_is_computed_once),
        FX_TEST(a_refined_id_depends_on_every_byte),
        cmocka_unit_test(id_is_the_same_in_every_thread),
        FX_TEST(verify_tells_when_a_file_changed),
        FX_TEST(c103_verify_tells_when_a_file_was_rewritten),
        FX_TEST(truncation_is_an_error_and_no_signal),
        FX_TEST(owns_its_files_by_any_name),
        FX_TEST(owns_its_directory),
    };
    return cmocka_run_group_tests_name("checkpoint_identity", tests, NULL, NULL);
}
