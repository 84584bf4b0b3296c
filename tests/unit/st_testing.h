/*
 * What the safetensors tests share: building a file's bytes from JSON text, a temporary directory, a seeded random number
 * generator, and the check that an error says what it should.
 */
#ifndef PF_TESTS_ST_TESTING_H
#define PF_TESTS_ST_TESTING_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/proc.h"
#include "base/str.h"
#include "safetensors/st_int.h"
#include "tensor/dtype.h"

/* CPU seconds of this process: what a busy machine does not make longer. For growth that a test must notice, not for speed. */
static inline double test_cpu_seconds(void)
{
    return (double)clock() / CLOCKS_PER_SEC;
}

/* 8 bytes of length, n_json bytes of header, n_data bytes 0, 1, 2, ... Appended to out. */
static inline void st_bytes(struct strbuf *out, const char *json, size_t n_json, size_t n_data)
{
    size_t i;

    for (i = 0; i < 8; i++) {
        char c = (char)((uint64_t)n_json >> (8 * i) & 0xff);
        strbuf_add(out, &c, 1);
    }
    strbuf_add(out, json, n_json);
    for (i = 0; i < n_data; i++) {
        char c = (char)(i & 0xff);
        strbuf_add(out, &c, 1);
    }
    assert_true(strbuf_ok(out));
}

static inline uint64_t st_random(uint64_t *state) /* splitmix64 */
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline void st_assert_error(int rc, int code, const pf_error *err, const char *text)
{
    if (rc != code || err->code != code || strstr(err->msg, text) == NULL)
        fail_msg("expected %s with \"%s\", got %s (%s): %s", pf_error_name(code), text,
                 pf_error_name(rc), pf_error_name(err->code), err->msg);
}

/* A fresh directory; every test program makes one and removes it. */
static inline char *st_temp_dir(void)
{
    const char *base = getenv("TMPDIR");
    char *dir = path_join(base != NULL ? base : "/tmp", "pf-st-XXXXXX");

    assert_non_null(dir);
    assert_non_null(mkdtemp(dir));
    return dir;
}

static inline void st_remove_dir(char *dir)
{
    assert_int_equal(file_remove_tree(dir, NULL), PF_OK);
    mem_free(dir);
}

static inline void st_write(const char *path, const void *p, size_t n)
{
    pf_error err = {0};

    if (file_write_atomic(path, p, n, &err) != PF_OK)
        fail_msg("%s", err.msg);
}

#endif
