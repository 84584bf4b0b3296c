/*
 * The starting noise against what PyTorch drew (tests/golden/noise.safetensors): every seed, both paths, the tail, and the
 * promise that pictures' blocks of one long draw are the draws of a generator that goes on.
 */
#include "testing.h"

#include "model/noise.h"
#include "safetensors/safetensors.h"

#include <math.h>

static size_t n_elements(const struct st_tensor *t)
{
    return t->n_bytes / sizeof(float);
}

static void equals_torch_for_every_seed_and_shape(void **state)
{
    struct st_file *file = NULL;
    pf_error err = {0};
    (void)state;
    assert_ok(st_open(PF_SOURCE_DIR "/tests/golden/noise.safetensors", &file, &err), &err);
    assert_int_equal(st_n_tensors(file), 16);
    for (size_t i = 0; i < st_n_tensors(file); i++) {
        const struct st_tensor *t = st_tensor(file, i);
        uint64_t seed = 0;
        struct str name = t->name;
        struct noise g;
        assert_true(str_starts(name, "seed"));
        const char *dot = memchr(name.p, '.', name.n);
        assert_non_null(dot);
        assert_true(str_to_u64((struct str){name.p + 4, (size_t)(dot - name.p) - 4}, &seed));
        size_t n = n_elements(t);
        float *have = malloc(n * sizeof(float)), *want = malloc(n * sizeof(float));
        assert_non_null(have);
        assert_non_null(want);
        memcpy(want, st_data(file, t), n * sizeof(float));
        noise_seed(&g, seed);
        noise_fill(&g, have, n);
        for (size_t j = 0; j < n; j++)
            if (!(fabs((double)have[j] - (double)want[j]) <= 1e-5))
                fail_msg("%.*s[%zu]: %.9g, torch %.9g", (int)name.n, name.p, j, (double)have[j],
                         (double)want[j]);
        free(have);
        free(want);
    }
    st_close(file);
}

static void blocks_of_sixteen_go_on_where_the_last_ended(void **state)
{
    float whole[96], part[96];
    struct noise a, b;
    (void)state;
    noise_seed(&a, 7);
    noise_seed(&b, 7);
    noise_fill(&a, whole, 96);
    noise_fill(&b, part, 16);
    noise_fill(&b, part + 16, 48);
    noise_fill(&b, part + 64, 32);
    assert_memory_equal(whole, part, sizeof whole);
}

static void seeds_count_mod_two_to_the_32(void **state)
{
    float low[16], high[16];
    struct noise a, b;
    (void)state;
    noise_seed(&a, 3);
    noise_seed(&b, (UINT64_C(1) << 40) + 3);
    noise_fill(&a, low, 16);
    noise_fill(&b, high, 16);
    assert_memory_equal(low, high, sizeof low);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_torch_for_every_seed_and_shape),
        cmocka_unit_test(blocks_of_sixteen_go_on_where_the_last_ended),
        cmocka_unit_test(seeds_count_mod_two_to_the_32),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
