/*
 * base/proc.c: anonymous memory as the kernel counts it, and a peak that was gone before anybody asked.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "base/proc.h"

enum { N_BYTES = 32 << 20 };

/* What else the process may have touched meanwhile; the thread sanitizer's shadow is four times what we touch. */
#if defined(__SANITIZE_THREAD__)
enum { N_SLACK = 8 * N_BYTES };
#else
enum { N_SLACK = 16 << 20 };
#endif

static uint8_t *touch(int flags)
{
    uint8_t *p = mmap(NULL, N_BYTES, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0);
    assert_true(p != MAP_FAILED);
    memset(p, 1, N_BYTES);
    return p;
}

static void counts_private_and_shared_anonymous_memory(void **state)
{
    (void)state;
    static const int flags[] = {MAP_PRIVATE, MAP_SHARED};
    for (size_t i = 0; i < 2; i++) {
        const uint64_t before = proc_anon_bytes();
        assert_true(before > 0);
        uint8_t *p = touch(flags[i]);
        const uint64_t during = proc_anon_bytes();
        assert_in_range(during - before, N_BYTES - (1 << 20), N_BYTES + N_SLACK);
        assert_int_equal(munmap(p, N_BYTES), 0);
        assert_true(proc_anon_bytes() < during);
    }
}

static void a_peak_between_start_and_stop_is_kept(void **state)
{
    (void)state;
    struct peak *peak = NULL;
    pf_error err = {0};
    const uint64_t before = proc_anon_bytes();
    assert_int_equal(peak_start(&peak, &err), PF_OK);
    uint8_t *p = touch(MAP_PRIVATE);
    /* Held for some sampling periods of work, not of sleep. */
    const clock_t until = clock() + CLOCKS_PER_SEC / 10;
    clock_t now = 0;
    for (size_t i = 0; (now = clock()) < until; i++)
        p[i % N_BYTES] = (uint8_t)now;
    assert_int_equal(munmap(p, N_BYTES), 0);
    const uint64_t most = peak_stop(peak);
    assert_true(most >= before + N_BYTES - (1 << 20));
    assert_true(most < before + N_BYTES + N_SLACK);
    assert_int_equal(peak_stop(NULL), 0);
}

static void the_sample_at_stop_counts(void **state)
{
    (void)state;
    struct peak *peak = NULL;
    assert_int_equal(peak_start(&peak, NULL), PF_OK);
    uint8_t *p = touch(MAP_PRIVATE);
    const uint64_t now = proc_anon_bytes();
    assert_true(peak_stop(peak) + (1 << 20) >= now);
    assert_int_equal(munmap(p, N_BYTES), 0);
}

static void the_clock_goes_forward(void **state)
{
    (void)state;
    const uint64_t a = clock_ns();
    assert_true(a > 0);
    assert_true(clock_ns() >= a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts_private_and_shared_anonymous_memory),
        cmocka_unit_test(a_peak_between_start_and_stop_is_kept),
        cmocka_unit_test(the_sample_at_stop_counts),
        cmocka_unit_test(the_clock_goes_forward),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
