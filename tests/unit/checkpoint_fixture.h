/*
 * Small checkpoints on disk for the test_checkpoint_* programs: one temporary directory per test, files written byte by byte
 * (the safetensors writer is not involved), and the assertions that all of them need. Every tensor is F32 [2,2] unless a test
 * writes its own header.
 */
#ifndef CHECKPOINT_FIXTURE_H
#define CHECKPOINT_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "checkpoint/checkpoint_int.h"

#define FX_TENSOR_BYTES 16u

struct fx {
    char dir[256];
    char *text[64]; /* paths handed out by fx_path, used in turn */
    unsigned i_text;
};

static int fx_setup(void **state)
{
    const char *root = getenv("TMPDIR");
    struct fx *fx = calloc(1, sizeof *fx);
    if (fx == NULL)
        return -1;
    (void)snprintf(fx->dir, sizeof fx->dir, "%s/pf-checkpoint-XXXXXX",
                   root != NULL ? root : "/tmp");
    *state = fx;
    return mkdtemp(fx->dir) != NULL ? 0 : -1;
}

static int fx_teardown(void **state)
{
    struct fx *fx = *state;
    int rc = file_remove_tree(fx->dir, NULL);
    for (unsigned i = 0; i < PF_COUNTOF(fx->text); i++)
        mem_free(fx->text[i]);
    free(fx);
    return rc;
}

/* <directory of the test>/rel */
static const char *fx_path(struct fx *fx, const char *rel)
{
    unsigned i = fx->i_text++ % PF_COUNTOF(fx->text);
    mem_free(fx->text[i]);
    fx->text[i] = path_join(fx->dir, rel);
    assert_non_null(fx->text[i]);
    return fx->text[i];
}

static void fx_parents(const char *path)
{
    char *dir = path_dir(path);
    assert_non_null(dir);
    assert_int_equal(file_mkdirs(dir, NULL), PF_OK);
    mem_free(dir);
}

static const char *fx_write(struct fx *fx, const char *rel, const void *p, size_t n)
{
    const char *path = fx_path(fx, rel);
    fx_parents(path);
    FILE *f = fopen(path, "wbe");
    assert_non_null(f);
    assert_int_equal(fwrite(p, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
    return path;
}

PF_UNUSED static const char *fx_text(struct fx *fx, const char *rel, const char *z)
{
    return fx_write(fx, rel, z, strlen(z));
}

PF_UNUSED static const char *fx_link(struct fx *fx, const char *rel, const char *target)
{
    const char *path = fx_path(fx, rel);
    fx_parents(path);
    assert_int_equal(symlink(target, path), 0);
    return path;
}

/* A safetensors file of the names given, in their order, separated by spaces. Data byte i of tensor k is seed + 7 k + i. */
static const char *fx_weights(struct fx *fx, const char *rel, const char *names, unsigned seed)
{
    struct strbuf header;
    size_t n_tensors = 0;
    strbuf_init(&header);
    strbuf_adds(&header, "{");
    for (const char *p = names; *p != '\0';) {
        size_t n = strcspn(p, " ");
        strbuf_addf(&header,
                    "%s\"%.*s\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[%zu,%zu]}",
                    n_tensors > 0 ? "," : "", (int)n, p, n_tensors * FX_TENSOR_BYTES,
                    (n_tensors + 1) * FX_TENSOR_BYTES);
        n_tensors++;
        p += n;
        p += strspn(p, " ");
    }
    strbuf_adds(&header, "}");
    assert_true(strbuf_ok(&header));
    size_t n_file = 8 + header.n + n_tensors * FX_TENSOR_BYTES;
    uint8_t *file = calloc(1, n_file);
    assert_non_null(file);
    for (unsigned i = 0; i < 8; i++)
        file[i] = (uint8_t)((uint64_t)header.n >> (8 * i));
    memcpy(file + 8, header.p, header.n);
    for (size_t i = 0; i < n_tensors * FX_TENSOR_BYTES; i++)
        file[8 + header.n + i] = (uint8_t)(seed + 7 * (i / FX_TENSOR_BYTES) + i % FX_TENSOR_BYTES);
    const char *path = fx_write(fx, rel, file, n_file);
    free(file);
    strbuf_release(&header);
    return path;
}

PF_UNUSED static struct pf_checkpoint *fx_open(const char *path)
{
    struct pf_checkpoint *ckpt = NULL;
    pf_error err = {0};
    int rc = pf_checkpoint_open(path, NULL, &ckpt, &err);
    if (rc != PF_OK)
        fail_msg("open '%s': %s", path, err.msg);
    assert_non_null(ckpt);
    return ckpt;
}

/* The error is the expected code, and its message holds every one of the texts (NULL ends them). */
PF_UNUSED static void fx_assert_error(int rc, const pf_error *err, int code, ...)
{
    va_list args;
    if (rc != code || err->code != code)
        fail_msg("expected %s, got %s: %s", pf_error_name(code), pf_error_name(rc), err->msg);
    va_start(args, code);
    for (const char *text = va_arg(args, const char *); text != NULL;
         text = va_arg(args, const char *))
        if (strstr(err->msg, text) == NULL)
            fail_msg("message lacks \"%s\": %s", text, err->msg);
    va_end(args);
}

#define FX_ASSERT_REFUSED(path, code, ...)                                                         \
    do {                                                                                           \
        pf_error err_ = {0};                                                                       \
        struct pf_checkpoint *none_ = NULL;                                                        \
        int rc_ = pf_checkpoint_open(path, NULL, &none_, &err_);                                   \
        assert_null(none_);                                                                        \
        fx_assert_error(rc_, &err_, code, __VA_ARGS__, NULL);                                      \
    } while (0)

#define FX_TEST(name) cmocka_unit_test_setup_teardown(name, fx_setup, fx_teardown)

#endif
