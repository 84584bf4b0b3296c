/*
 * What the safetensors tests share beside testing.h: building a file's bytes from JSON text, the check that an error says what it
 * should, and a clock that a busy machine does not make faster.
 */
#ifndef PF_TESTS_ST_TESTING_H
#define PF_TESTS_ST_TESTING_H

#include "testing.h"

#include <inttypes.h>
#include <time.h>

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

static inline void st_assert_error(int rc, int code, const pf_error *err, const char *text)
{
    if (rc != code || err->code != code || strstr(err->msg, text) == NULL)
        fail_msg("expected %s with \"%s\", got %s (%s): %s", pf_error_name(code), text,
                 pf_error_name(rc), pf_error_name(err->code), err->msg);
}

#endif
