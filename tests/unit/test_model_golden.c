/*
 * The bundled model against PyTorch: the forward after the embedding, after each block and at the end, and sampled pictures with the
 * base and with every composition. Tolerances are those of tests/golden/README.md.
 */
#include "model_testing.h"

enum { N = 4, VALUES = 3 * 32 * 32, HIDDEN = 64 * 128 };

struct forward_check {
    const struct st_file *golden;
    size_t i_sample;
    unsigned n_seen;
};

static void compare_hidden(void *ctx, int64_t i_block, const float *x, size_t stride)
{
    struct forward_check *c = ctx;
    char name[32];
    (void)stride;
    (void)snprintf(name, sizeof name, i_block < 0 ? "pos_embed" : "block.%d", (int)i_block);
    float *want = golden_floats(c->golden, name, (size_t)N * HIDDEN);
    double largest = 0.0;
    for (size_t i = 0; i < (size_t)N * HIDDEN; i++)
        largest = fmax(largest, fabs((double)want[i]));
    struct difference d = compare(x, want + c->i_sample * HIDDEN, HIDDEN);
    if (!(d.max_abs <= 3e-6 * largest))
        fail_msg("%s of sample %zu is off by %g x the largest magnitude", name, c->i_sample,
                 d.max_abs / largest);
    if (getenv("PF_VERBOSE") != NULL)
        print_message("%s[%zu]: %g\n", name, c->i_sample, d.max_abs / largest);
    c->n_seen++;
    free(want);
}

/* Patches (token, (row, column, channel)) of the bundled model -> (channel, row, column) */
static void unpatch(const float *patches, float *out)
{
    for (int ch = 0; ch < 3; ch++)
        for (int y = 0; y < 32; y++)
            for (int x = 0; x < 32; x++)
                *out++ = patches[(y / 4 * 8 + x / 4) * 48 + (y % 4 * 4 + x % 4) * 3 + ch];
}

static void forward_equals_torch(void **state)
{
    struct st_file *golden = NULL;
    struct drawn d;
    struct forward f;
    pf_error err = {0};
    static float have[N * VALUES];
    int64_t classes[N];
    (void)state;
    drawn_open(&d, BUNDLED, 2);
    assert_ok(st_open(GOLDEN "forward.safetensors", &golden, &err), &err);
    float *x = golden_floats(golden, "x", N * VALUES), *t = golden_floats(golden, "t", N);
    float *want = golden_floats(golden, "velocity", N * VALUES);
    memcpy(classes, st_data(golden, st_find(golden, str_of("class"))), sizeof classes);
    assert_ok(forward_open(&f, &d.model->dit, d.view, d.model->pool, 1, false, &err), &err);
    struct forward_check check = {.golden = golden};
    f.hook = compare_hidden;
    f.hook_ctx = &check;
    for (size_t i = 0; i < N; i++) {
        const uint32_t i_class = (uint32_t)classes[i];
        check.i_sample = i;
        forward_batch(&f, 1, &i_class);
        assert_ok(forward_run(&f, x + i * VALUES, 1000.0f * t[i], &err), &err);
        unpatch(forward_patches(&f, 0), have + i * VALUES);
    }
    assert_int_equal(check.n_seen, N * 9);
    struct difference diff = compare(have, want, N * VALUES);
    if (!(diff.max_abs <= 3e-6 * diff.largest))
        fail_msg("velocity is off by %g x the largest magnitude", diff.max_abs / diff.largest);
    forward_release(&f);
    free(x);
    free(t);
    free(want);
    st_close(golden);
    drawn_close(&d);
}

struct part {
    const char *path;
    double strength;
};

/* One row of samples.safetensors per (composition, seed). */
static void check_samples(const char *name, const struct part *parts, size_t n_parts,
                          uint32_t n_steps, double guidance)
{
    static const uint32_t classes[2][N] = {{25, 0, 50, 63}, {24, 31, 57, 12}};
    static const uint64_t seeds[2] = {42, 1};
    static float have[N * VALUES];
    struct pf_adapter *adapters[3] = {NULL};
    struct pf_lora loras[3] = {{0}};
    struct pf_composition *comp = NULL;
    struct st_file *golden = NULL;
    struct drawn d;
    pf_error err = {0};
    drawn_open(&d, BUNDLED, 2);
    assert_ok(st_open(GOLDEN "samples.safetensors", &golden, &err), &err);
    for (size_t i = 0; i < n_parts; i++) {
        assert_ok(pf_adapter_open(parts[i].path, &adapters[i], &err), &err);
        loras[i] = (struct pf_lora){.adapter = adapters[i], .strength = parts[i].strength};
    }
    assert_ok(pf_composition_new(d.ckpt, loras, n_parts, NULL, &comp, &err), &err);
    pf_view_release(d.view);
    assert_ok(pf_view_open(d.ckpt, comp, &d.view, &err), &err);
    for (int s = 0; s < 2; s++) {
        char key[128];
        const struct pf_generate_opts opts = {.size = sizeof opts,
                                              .n_images = N,
                                              .classes = classes[s],
                                              .seed = seeds[s],
                                              .n_steps = n_steps,
                                              .guidance_scale = guidance};
        (void)snprintf(key, sizeof key, "%s.seed%d.steps%u.cfg%.1f.classes%u-%u-%u-%u", name,
                       (int)seeds[s], n_steps, guidance, classes[s][0], classes[s][1],
                       classes[s][2], classes[s][3]);
        float *want = golden_floats(golden, key, N * VALUES);
        assert_ok(pf_generate(d.model, d.view, &opts, have, NULL, NULL, &err), &err);
        struct difference diff = compare(have, want, N * VALUES);
        if (!(diff.mean_abs <= 2e-5 && diff.max_abs <= 2e-3))
            fail_msg("%s: mean abs %g, max abs %g", key, diff.mean_abs, diff.max_abs);
        if (getenv("PF_VERBOSE") != NULL)
            print_message("%s: mean %g max %g\n", key, diff.mean_abs, diff.max_abs);
        free(want);
    }
    pf_composition_free(comp);
    for (size_t i = 0; i < n_parts; i++)
        pf_adapter_close(adapters[i]);
    st_close(golden);
    drawn_close(&d);
}

#define NOTO  PF_SOURCE_DIR "/data/adapters/noto.safetensors"
#define TURBO PF_SOURCE_DIR "/data/adapters/turbo.safetensors"
#define NIGHT PF_SOURCE_DIR "/data/adapters/night"

static void base_pictures_equal_torch(void **state)
{
    (void)state;
    check_samples("base", NULL, 0, 16, 2.0);
}

static void turbo_pictures_equal_torch(void **state)
{
    (void)state;
    check_samples("turbo", (const struct part[]){{TURBO, 1.0}}, 1, 4, 1.0);
}

static void noto_pictures_equal_torch(void **state)
{
    (void)state;
    check_samples("noto", (const struct part[]){{NOTO, 1.0}}, 1, 16, 2.0);
    check_samples("noto*0.5", (const struct part[]){{NOTO, 0.5}}, 1, 16, 2.0);
    check_samples("noto*-0.5", (const struct part[]){{NOTO, -0.5}}, 1, 16, 2.0);
}

static void night_pictures_equal_torch(void **state)
{
    (void)state;
    check_samples("night", (const struct part[]){{NIGHT, 1.0}}, 1, 16, 2.0);
}

static void several_adapters_at_once_equal_torch(void **state)
{
    (void)state;
    check_samples("noto+turbo", (const struct part[]){{NOTO, 1.0}, {TURBO, 1.0}}, 2, 4, 1.0);
    check_samples("all3", (const struct part[]){{NOTO, 0.7}, {TURBO, 1.0}, {NIGHT, 0.4}}, 3, 4,
                  1.0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward_equals_torch),
        cmocka_unit_test(base_pictures_equal_torch),
        cmocka_unit_test(turbo_pictures_equal_torch),
        cmocka_unit_test(noto_pictures_equal_torch),
        cmocka_unit_test(night_pictures_equal_torch),
        cmocka_unit_test(several_adapters_at_once_equal_torch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
