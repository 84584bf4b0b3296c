/*
 * What the unit tests share: cmocka with the includes it wants, a temp dir per test, error assertions, a seeded generator.
 *
 *     static void rejects_x(void **state) { const char *path = test_path(state, "x.bin"); write_file(path, "abc", 3); ... }
 *     cmocka_unit_test_setup_teardown(rejects_x, test_dir_setup, test_dir_teardown)     or shorter: in_dir(rejects_x)
 *
 *     assert_err(&err, PF_E_FORMAT, "tensor 'a'", "96");      code, and every text is in the message
 */
#ifndef PF_TESTS_TESTING_H
#define PF_TESTS_TESTING_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/compiler.h"
#include "pageflip.h"

#include <ftw.h>
#include <linux/capability.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

/* ------------------------------------------------------------------------------------- a directory per test */

#define in_dir(test) cmocka_unit_test_setup_teardown(test, test_dir_setup, test_dir_teardown)

/* TMPDIR, else /tmp; /var/tmp where /tmp lies in memory, as mapped files would be counted as anonymous memory there. */
static PF_UNUSED const char *test_tmp(void)
{
    struct statfs fs;
    const char *tmp = getenv("TMPDIR");
    if (tmp != NULL)
        return tmp;
    return statfs("/tmp", &fs) == 0 && fs.f_type == TMPFS_MAGIC ? "/var/tmp" : "/tmp";
}

/* Makes an empty directory under test_tmp(); *state is its path. */
static PF_UNUSED int test_dir_setup(void **state)
{
    char template[1024];
    int n = snprintf(template, sizeof(template), "%s/pf-test-XXXXXX", test_tmp());
    if (n < 0 || (size_t)n >= sizeof(template) || mkdtemp(template) == NULL)
        return -1;
    *state = strdup(template);
    return *state != NULL ? 0 : -1;
}

/*
 * Where we are root, becomes nobody who may read what root may (a checkout below /root), but write nowhere: root ignores modes. For a child of
 * its own: there is no way back. false: it cannot be done.
 */
static PF_UNUSED bool test_drop_root(void)
{
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct caps[2] = {{0}};
    if (geteuid() != 0)
        return true;
    caps[0].effective = caps[0].permitted = 1u << CAP_DAC_READ_SEARCH;
    return prctl(PR_SET_KEEPCAPS, 1) == 0 && setgid(65534) == 0 && setuid(65534) == 0 &&
           syscall(SYS_capset, &head, caps) == 0;
}

static PF_UNUSED int test_remove_one(const char *path, const struct stat *st, int flag,
                                     struct FTW *w)
{
    (void)st;
    (void)flag;
    (void)w;
    return remove(path);
}

static PF_UNUSED int test_dir_teardown(void **state)
{
    int rc = nftw(*state, test_remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(*state);
    *state = NULL;
    return rc;
}

/* "<temp dir>/<name>"; valid until 16 more were asked for. One thread. */
static PF_UNUSED const char *test_path(void **state, const char *name)
{
    static char ring[16][1280];
    static unsigned i_next;
    char *path = ring[i_next++ % PF_COUNTOF(ring)];
    int n = snprintf(path, sizeof(ring[0]), "%s/%s", (const char *)*state, name);
    assert_in_range(n, 1, sizeof(ring[0]) - 1);
    return path;
}

static PF_UNUSED void write_file(const char *path, const void *bytes, size_t n)
{
    FILE *f = fopen(path, "wbe");
    assert_non_null(f);
    if (n > 0)
        assert_int_equal(fwrite(bytes, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

/* ---------------------------------------------------------------------------------------------- assertions */

/* assert_err(const pf_error *, code, "text", ...): the code, and each text somewhere in the message. */
#define assert_err(err, expected_code, ...)                                                        \
    test_assert_err(err, expected_code, (const char *const[]){__VA_ARGS__, NULL}, __FILE__,        \
                    __LINE__)

static PF_UNUSED void test_assert_err(const pf_error *err, int code, const char *const *texts,
                                      const char *file, int line)
{
    if (err->code != code) {
        print_error("expected %s, got %s: \"%s\"\n", pf_error_name(code), pf_error_name(err->code),
                    err->msg);
        _fail(file, line);
    }
    for (; *texts != NULL; texts++) {
        if (strstr(err->msg, *texts) == NULL) {
            print_error("expected \"%s\" in \"%s\"\n", *texts, err->msg);
            _fail(file, line);
        }
    }
}

/* assert_ok(call, &err): prints the message of an unexpected error. */
#define assert_ok(rc, err) test_assert_ok(rc, err, __FILE__, __LINE__)

static PF_UNUSED void test_assert_ok(int rc, const pf_error *err, const char *file, int line)
{
    if (rc != PF_OK) {
        print_error("unexpected error %s: \"%s\"\n", pf_error_name(rc), err->msg);
        _fail(file, line);
    }
}

/* ----------------------------------------------------------------------------------------- random numbers */

/* splitmix64: the same numbers on every machine. */
struct rng {
    uint64_t state; /* the seed */
};

static PF_UNUSED uint64_t rng_next(struct rng *r)
{
    uint64_t z = r->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* 0..n-1; n > 0 */
static PF_UNUSED uint64_t rng_below(struct rng *r, uint64_t n)
{
    return rng_next(r) % n;
}

/* [0, 1) */
static PF_UNUSED double rng_unit(struct rng *r)
{
    return (double)(rng_next(r) >> 11) * 0x1p-53;
}

#endif
