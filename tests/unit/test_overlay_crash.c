/*
 * Builds that are killed at every write point: what stands afterwards is whole layers or nothing, the next build writes only what is
 * missing, and no reader ever adopts half. Children do the building, so that a SIGKILL is one.
 */
#include "overlay_trouble.h"

#include <signal.h>

static void c105_killed_at_every_write_point(void **state)
{
    struct fx fx;
    uint64_t n_total;
    unsigned n = open_and_count(&fx, state, &n_total);
    static const char *const faults[] = {"kill", "tear"};
    unsigned n_resumed = 0;
    for (size_t f = 0; f < PF_COUNTOF(faults); f++)
        for (unsigned i = 1; i <= n; i++) {
            struct run run = {.fault = faults[f], .i_point = i};
            int status = fx_in_child(build_with_fault, &fx, &run);
            if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL)
                fail_msg("%s@%u of %u: status %x", faults[f], i, n, (unsigned)status);
            uint64_t n_bytes;
            n_resumed += n_whole_layers(&fx, &n_bytes) > 0;
            /* A new start removes what the dead left half-written; every second time the running process has to. */
            if (i % 2) {
                fx_open_store(&fx, (uint64_t)1 << 40);
                fx_assert_no_litter(&fx);
            }
            assert_resumes(&fx, n_total);
        }
    assert_true(n_resumed > n); /* of 2 n */
    fx_close(&fx);
}

static void killed_again_and_again_it_gets_there(void **state)
{
    struct fx fx;
    uint64_t n_total, n_written = 0;
    (void)open_and_count(&fx, state, &n_total);
    unsigned n_runs = 0;
    for (;; n_runs++) {
        struct run run = {.fault = "kill", .i_point = 12}; /* a layer and a half */
        uint64_t n_before, n_after;
        (void)n_whole_layers(&fx, &n_before);
        int status = fx_in_child(build_with_fault, &fx, &run);
        (void)n_whole_layers(&fx, &n_after);
        assert_true(n_after >= n_before);
        n_written += n_after - n_before;
        if (WIFEXITED(status))
            break;
        assert_true(n_runs < 10);
    }
    assert_true(n_runs >= 2);
    assert_true(n_written <= n_total);
    fx_assert_adopts(&fx, fx.comp);
    fx_close(&fx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(c105_killed_at_every_write_point),
        in_dir(killed_again_and_again_it_gets_there),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
