/*
 * A picture is its own affair: the same (class, seed, index) gives the same bytes in a request of 7 and of 64, in any batch, with 1
 * and 2 threads. Also what pf_generate reports, refuses, and does when it is told to stop.
 */
#include "model_testing.h"

#include <stdatomic.h>

#include "base/proc.h"
#include "view/view.h"

enum { VALUES = 3 * 32 * 32, STEPS = 2 };

static void draw(unsigned n_threads, uint32_t n_images, uint32_t batch, double guidance,
                 float *samples, uint8_t *rgb, struct pf_generate_report *report)
{
    struct drawn d;
    pf_error err = {0};
    uint32_t classes[64];
    for (uint32_t i = 0; i < 64; i++)
        classes[i] = (i * 7 + 25) % 64;
    const struct pf_generate_opts opts = {.size = sizeof opts,
                                          .n_images = n_images,
                                          .classes = classes,
                                          .seed = 42,
                                          .n_steps = STEPS,
                                          .guidance_scale = guidance,
                                          .batch = batch};
    drawn_open(&d, BUNDLED, n_threads);
    assert_ok(pf_generate(d.model, d.view, &opts, samples, rgb, report, &err), &err);
    drawn_close(&d);
}

static void pictures_do_not_depend_on_request_batch_or_threads(void **state)
{
    static float all[64 * VALUES], some[7 * VALUES];
    static uint8_t all_rgb[64 * VALUES], some_rgb[7 * VALUES];
    static const struct {
        unsigned n_threads;
        uint32_t batch;
    } rows[] = {{1, 0}, {2, 0}, {2, 1}, {1, 3}, {3, 7}};
    struct pf_generate_report report;
    (void)state;
    draw(2, 64, 0, 2.0, all, all_rgb, &report);
    assert_true(isfinite(all[0]));
    for (size_t i = 0; i < PF_COUNTOF(rows); i++) {
        memset(some, 0, sizeof some);
        memset(some_rgb, 0, sizeof some_rgb);
        draw(rows[i].n_threads, 7, rows[i].batch, 2.0, some, some_rgb, &report);
        assert_memory_equal(some, all, sizeof some);
        assert_memory_equal(some_rgb, all_rgb, sizeof some_rgb);
    }
    assert_memory_not_equal(all, all + VALUES, VALUES * sizeof(float));
}

static void unguided_pictures_do_not_depend_on_batch(void **state)
{
    static float a[7 * VALUES], b[7 * VALUES];
    struct pf_generate_report report;
    (void)state;
    draw(1, 7, 0, 1.0, a, NULL, &report);
    draw(2, 7, 2, 1.0, b, NULL, &report);
    assert_memory_equal(a, b, sizeof a);
    draw(2, 7, 0, 2.0, b, NULL, &report);
    assert_memory_not_equal(a, b, sizeof a);
}

static void pixels_are_clamped_samples(void **state)
{
    static float x[2 * VALUES];
    static uint8_t rgb[2 * VALUES];
    struct pf_generate_report report;
    (void)state;
    draw(2, 2, 0, 2.0, x, rgb, &report);
    for (int i = 0; i < 2; i++)
        for (int p = 0; p < 1024; p++)
            for (int ch = 0; ch < 3; ch++) {
                float v = fminf(fmaxf(x[i * VALUES + ch * 1024 + p], -1.0f), 1.0f);
                assert_int_equal(rgb[i * VALUES + p * 3 + ch], (int)((v + 1.0f) * 127.5f));
            }
}

/* Weights pass once per step and batch, whatever the number of pictures; what is held is little. */
static void report_counts_weights_and_memory(void **state)
{
    struct pf_generate_report one, many, twice;
    uint64_t n_before = proc_anon_bytes(); /* sanitizers hold what earlier tests freed */
    (void)state;
    draw(2, 7, 0, 2.0, NULL, NULL, &many);
    draw(2, 7, 4, 2.0, NULL, NULL, &twice);
    draw(2, 1, 0, 2.0, NULL, NULL, &one);
    /* 5.8 MB but for the class tables, of which one row per class is read */
    assert_in_range(one.n_weight_bytes, STEPS * 5500000, STEPS * 5800000);
    uint64_t rows = STEPS * 8 * 128 * 2;
    assert_int_equal(many.n_weight_bytes, one.n_weight_bytes + 6 * rows);
    assert_int_equal(twice.n_weight_bytes, 2 * one.n_weight_bytes + 5 * rows);
    assert_in_range(many.activation_bytes, 14 * 6 * 64 * 128 * 4, 16 * 6 * 64 * 128 * 4);
    assert_in_range(many.peak_anon_bytes, 1, n_before + many.activation_bytes + (64 << 20));
    assert_true(one.seconds > 0.0);
}

/* Whole pages of a layer's tensors: the edges belong to neighbours too. */
static uint64_t whole_pages(const struct pf_checkpoint *ckpt, uint32_t i_layer)
{
    const struct ckpt_layer *layer = &ckpt->layers[i_layer];
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), n = 0;
    for (uint32_t i = layer->i_tensor0; i < layer->i_tensor0 + layer->n_tensors; i++) {
        uint64_t begin = ((uintptr_t)ckpt->tensors[i].p + page - 1) / page,
                 end = ((uintptr_t)ckpt->tensors[i].p + ckpt->tensors[i].n_bytes) / page;
        n += end > begin ? (end - begin) * page : 0;
    }
    return n;
}

/* Every block that is not kept, once per pass; it is read again from the file, and is the same. */
static void what_is_not_kept_is_dropped_behind_each_pass(void **state)
{
    static uint8_t kept[3 * VALUES], dropped[3 * VALUES];
    const uint32_t classes[3] = {1, 2, 3};
    const struct pf_generate_opts opts = {
        .size = sizeof opts, .n_images = 3, .classes = classes, .n_steps = STEPS, .batch = 2};
    struct drawn d;
    uint64_t n_pass = 0;
    pf_error err = {0};
    (void)state;
    drawn_open(&d, BUNDLED, 2);
    struct stream_policy *policy = policy_new(d.ckpt->n_layers);
    assert_non_null(policy);
    for (uint32_t i = 0; i < d.ckpt->n_layers; i++) {
        policy->is_kept[i] = d.ckpt->layers[i].is_stem || i % 3 == 0;
        n_pass += policy->is_kept[i] ? 0 : whole_pages(d.ckpt, i);
    }
    assert_ok(pf_generate(d.model, d.view, &opts, NULL, kept, NULL, &err), &err);
    view_set_policy(d.view, policy);
    assert_ok(pf_generate(d.model, d.view, &opts, NULL, dropped, NULL, &err), &err);
    assert_true(n_pass > 1000000);
    assert_int_equal(atomic_load(&policy->n_bytes_dropped), 2 * STEPS * n_pass);
    assert_memory_equal(kept, dropped, sizeof kept);
    policy_unref(policy);
    drawn_close(&d);
}

struct stop {
    uint64_t n_calls, stop_at, last_total;
};

static bool count_and_stop(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    struct stop *s = ctx;
    assert_non_null(what);
    assert_int_equal(done, s->n_calls + 1);
    s->last_total = total;
    return ++s->n_calls != s->stop_at;
}

static void progress_counts_layers_and_cancels(void **state)
{
    struct drawn d;
    pf_error err = {0};
    const uint32_t classes[3] = {1, 2, 3};
    struct stop stop = {0};
    uint8_t rgb[3 * VALUES];
    struct pf_generate_opts opts = {.size = sizeof opts,
                                    .n_images = 3,
                                    .classes = classes,
                                    .n_steps = STEPS,
                                    .batch = 2,
                                    .progress = count_and_stop,
                                    .progress_ctx = &stop};
    (void)state;
    drawn_open(&d, BUNDLED, 2);
    assert_ok(pf_generate(d.model, d.view, &opts, NULL, rgb, NULL, &err), &err);
    assert_int_equal(stop.n_calls, 2 * STEPS * 8);
    assert_int_equal(stop.last_total, 2 * STEPS * 8);
    stop = (struct stop){.stop_at = 5};
    assert_int_equal(pf_generate(d.model, d.view, &opts, NULL, rgb, NULL, &err), PF_E_CANCELLED);
    assert_int_equal(stop.n_calls, 5);
    stop = (struct stop){0}; /* and it draws again afterwards */
    assert_ok(pf_generate(d.model, d.view, &opts, NULL, rgb, NULL, &err), &err);
    drawn_close(&d);
}

struct again {
    struct drawn *d;
    const struct pf_generate_opts *opts;
    int rc;
    pf_error err;
};

static bool draw_again(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    struct again *a = ctx;
    struct pf_generate_opts opts = *a->opts;
    (void)what;
    (void)done;
    (void)total;
    opts.progress = NULL;
    a->rc = pf_generate(a->d->model, a->d->view, &opts, NULL, NULL, NULL, &a->err);
    return true;
}

static void one_generation_at_a_time(void **state)
{
    struct drawn d;
    pf_error err = {0};
    const uint32_t i_class = 5;
    struct pf_generate_opts opts = {
        .size = sizeof opts, .n_images = 1, .classes = &i_class, .n_steps = 1};
    struct again again = {.d = &d, .opts = &opts};
    (void)state;
    opts.progress = draw_again;
    opts.progress_ctx = &again;
    drawn_open(&d, BUNDLED, 1);
    assert_ok(pf_generate(d.model, d.view, &opts, NULL, NULL, NULL, &err), &err);
    assert_int_equal(again.rc, PF_E_BUSY);
    assert_err(&again.err, PF_E_BUSY, "one generation at a time");
    drawn_close(&d);
}

static void refuses_bad_requests(void **state)
{
    struct drawn d, other;
    const uint32_t good = 5, bad = 64;
    const struct pf_generate_opts ok = {.size = sizeof ok, .n_images = 1, .classes = &good};
    struct pf_generate_opts o;
    pf_error err = {0};
    (void)state;
    drawn_open(&d, BUNDLED, 1);
    drawn_open(&other, BUNDLED, 1);
    o = ok;
    o.classes = &bad;
    assert_int_equal(pf_generate(d.model, d.view, &o, NULL, NULL, NULL, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "class 64", "0..63");
    o = ok;
    o.n_images = 0;
    assert_int_equal(pf_generate(d.model, d.view, &o, NULL, NULL, NULL, &err), PF_E_INVALID);
    o = ok;
    o.guidance_scale = (double)NAN;
    assert_int_equal(pf_generate(d.model, d.view, &o, NULL, NULL, NULL, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "guidance scale nan");
    o = ok;
    o.n_steps = 200000;
    assert_int_equal(pf_generate(d.model, d.view, &o, NULL, NULL, NULL, &err), PF_E_RANGE);
    assert_err(&err, PF_E_RANGE, "200000 steps");
    assert_int_equal(pf_generate(d.model, other.view, &ok, NULL, NULL, NULL, &err), PF_E_INVALID);
    assert_err(&err, PF_E_INVALID, "view");
    drawn_close(&d);
    drawn_close(&other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pictures_do_not_depend_on_request_batch_or_threads),
        cmocka_unit_test(unguided_pictures_do_not_depend_on_batch),
        cmocka_unit_test(pixels_are_clamped_samples),
        cmocka_unit_test(report_counts_weights_and_memory),
        cmocka_unit_test(what_is_not_kept_is_dropped_behind_each_pass),
        cmocka_unit_test(progress_counts_layers_and_cancels),
        cmocka_unit_test(one_generation_at_a_time),
        cmocka_unit_test(refuses_bad_requests),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
