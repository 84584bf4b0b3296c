/*
 * Pictures of several requests in one call: each is what a call of its own draws. And PNGs into memory are those of the file.
 */
#include "model_testing.h"

enum { VALUES = 3 * 32 * 32 };

static void draw(struct drawn *d, const struct pf_generate_opts *opts, uint8_t *rgb)
{
    pf_error err = {0};

    assert_ok(pf_generate(d->model, d->view, opts, NULL, rgb, NULL, &err), &err);
}

static void a_shared_pass_draws_what_single_requests_draw(void **state)
{
    static const uint32_t classes[] = {25, 25, 7, 25, 3, 7};
    static const uint64_t seeds[] = {1, 1, 2, 1, 9, 2};
    static const uint32_t indices[] = {0, 1, 2, 0, 3, 0};
    static uint8_t together[6 * VALUES], alone[4 * VALUES];
    struct pf_generate_opts opts = {.size = sizeof opts, .n_steps = 1, .guidance_scale = 1};
    struct drawn d;
    (void)state;

    drawn_open(&d, BUNDLED, 2);
    for (uint32_t batch = 0; batch < 3; batch++) {
        opts.n_images = 6;
        opts.classes = classes;
        opts.seeds = seeds;
        opts.indices = indices;
        opts.batch = batch * 2;
        draw(&d, &opts, together);
        opts.seeds = NULL;
        opts.indices = NULL;
        for (uint32_t i = 0; i < 6; i++) {
            uint32_t same[4] = {classes[i], classes[i], classes[i], classes[i]};
            opts.n_images = indices[i] + 1;
            opts.classes = same;
            opts.seed = seeds[i];
            draw(&d, &opts, alone);
            assert_memory_equal(together + i * VALUES, alone + indices[i] * VALUES, VALUES);
        }
    }
    drawn_close(&d);
}

static void seeds_without_indices_are_refused(void **state)
{
    static const uint64_t seed = 1;
    static const uint32_t i_class = 1;
    const struct pf_generate_opts opts = {
        .size = sizeof opts, .n_images = 1, .classes = &i_class, .seeds = &seed};
    static uint8_t rgb[VALUES];
    struct drawn d;
    pf_error err;
    (void)state;

    drawn_open(&d, BUNDLED, 1);
    assert_int_equal(pf_generate(d.model, d.view, &opts, NULL, rgb, NULL, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "together");
    drawn_close(&d);
}

static void memory_and_file_have_the_same_png(void **state)
{
    static uint8_t rgb[VALUES], png[2 * VALUES];
    size_t n_bytes = 0, n_file = 0;
    char *file = NULL;
    pf_error err;

    for (size_t i = 0; i < VALUES; i++)
        rgb[i] = (uint8_t)(i * 7);
    assert_ok(pf_png_write(test_path(state, "a.png"), rgb, 32, 32, &err), &err);
    assert_ok(file_read_all(test_path(state, "a.png"), sizeof(png), &file, &n_file, &err), &err);
    assert_ok(pf_png_encode(rgb, 32, 32, NULL, &n_bytes, &err), &err);
    assert_true(n_bytes >= n_file && n_bytes <= sizeof(png));
    assert_ok(pf_png_encode(rgb, 32, 32, png, &n_bytes, &err), &err);
    assert_int_equal(n_bytes, n_file);
    assert_memory_equal(png, file, n_file);
    n_bytes = 10;
    assert_int_not_equal(pf_png_encode(rgb, 32, 32, png, &n_bytes, &err), PF_OK);
    mem_free(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_shared_pass_draws_what_single_requests_draw),
        cmocka_unit_test(seeds_without_indices_are_refused),
        in_dir(memory_and_file_have_the_same_png),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
