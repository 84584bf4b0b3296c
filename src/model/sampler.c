/*
 * pf_generate: flow matching from noise to picture by Euler steps, with classifier-free guidance, in batches. A batch only decides
 * who shares a reading of the weights: pictures take their noise one after another from one generator, and nothing else is shared.
 */
#include "base/cpu.h"
#include "base/mem.h"
#include "base/opts.h"
#include "base/proc.h"
#include "model/forward.h"
#include "model/model.h"
#include "model/noise.h"

#include <math.h>
#include <string.h>

#define ACTIVATION_BYTES_MAX ((size_t)256 << 20) /* when the batch is ours to choose */
#define STEPS_MAX            100000u

/* One call of pf_generate. */
struct drawing {
    struct pf_model *model;
    const struct pf_generate_opts *opts;
    struct forward forward;
    struct noise noise;
    float *latents; /* of the batch: (channels, size, size) each */
    size_t n_values;
    uint32_t n_steps, n_batch;
    float guidance;
    bool is_guided;
    float dt; /* of the present step */
    uint64_t n_layers_done, n_layers;
};

static int check_opts(const struct pf_model *m, const struct pf_view *view,
                      const struct pf_generate_opts *o, const uint8_t *rgb, pf_error *err)
{
    const struct dit_config *c = &m->dit.config;
    if (view_checkpoint(view) != m->ckpt)
        return err_set(err, PF_E_INVALID, "the view is not of the model's checkpoint");
    if (o->n_images == 0 || o->classes == NULL)
        return err_set(err, PF_E_INVALID, "no classes were given to draw");
    if ((o->seeds == NULL) != (o->indices == NULL))
        return err_set(err, PF_E_INVALID, "seeds and indices are given together or not at all");
    for (uint32_t i = 0; i < o->n_images; i++)
        if (o->classes[i] >= c->n_classes)
            return err_set(err, PF_E_INVALID, "class %u does not exist: the model has 0..%lld",
                           o->classes[i], (long long)c->n_classes - 1);
    if (o->n_steps > STEPS_MAX)
        return err_set(err, PF_E_RANGE, "%u steps are more than %u", o->n_steps, STEPS_MAX);
    if (!isfinite(o->guidance_scale) || fabs(o->guidance_scale) > 1e6)
        return err_set(err, PF_E_INVALID, "guidance scale %g is not a number in -1e6..1e6",
                       o->guidance_scale);
    if (rgb != NULL && c->channels != 3)
        return err_set(err, PF_E_UNSUPPORTED,
                       "the model has %lld channels: only three make a picture",
                       (long long)c->channels);
    return PF_OK;
}

/* The largest batch whose activations stay below the bound; at least one picture. */
static uint32_t choose_batch(const struct drawing *d)
{
    const struct pf_generate_opts *o = d->opts;
    if (o->batch != 0)
        return o->batch < o->n_images ? o->batch : o->n_images;
    uint32_t low = 1, high = o->n_images; /* low fits, or is 1 */
    while (low < high) {
        uint32_t middle = low + (high - low + 1) / 2;
        size_t n_bytes = 0;
        if (forward_bytes(&d->model->dit.config, middle, d->is_guided, &n_bytes) &&
            n_bytes <= ACTIVATION_BYTES_MAX)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

static bool report_layer(void *ctx)
{
    struct drawing *d = ctx;
    d->n_layers_done++;
    return d->opts->progress == NULL ||
           d->opts->progress(d->opts->progress_ctx, "drawing", d->n_layers_done, d->n_layers);
}

/* x += dt (u + g (c - u)), where both come as patches (token, (row, column, channel)) */
static void step_task(void *ctx, size_t i_image, unsigned i_worker)
{
    struct drawing *d = ctx;
    const struct dit_config *c = &d->model->dit.config;
    int64_t side = c->size / c->patch, patch = c->patch;
    const float *with = forward_patches(&d->forward, (uint32_t)i_image);
    const float *without =
        d->is_guided ? forward_patches(&d->forward, d->forward.n_images + (uint32_t)i_image) : with;
    float *x = d->latents + i_image * d->n_values;
    (void)i_worker;
    for (int64_t ch = 0; ch < c->channels; ch++)
        for (int64_t row = 0; row < c->size; row++)
            for (int64_t col = 0; col < c->size; col++, x++) {
                int64_t token = row / patch * side + col / patch;
                int64_t value = (row % patch * patch + col % patch) * c->channels + ch;
                int64_t i = token * c->patch_values + value;
                float v = with[i];
                if (d->is_guided)
                    v = without[i] + d->guidance * (with[i] - without[i]);
                *x += d->dt * v;
            }
}

static void write_rgb(const struct drawing *d, uint32_t n, uint8_t *rgb)
{
    size_t area = d->n_values / 3;
    for (uint32_t i = 0; i < n; i++)
        for (size_t p = 0; p < area; p++)
            for (size_t ch = 0; ch < 3; ch++) {
                float v = d->latents[i * d->n_values + ch * area + p];
                v = v > 1.0f ? 1.0f : v;
                v = v >= -1.0f ? v : -1.0f; /* NaN is black */
                *rgb++ = (uint8_t)((v + 1.0f) * 127.5f);
            }
}

/* The noise of picture i: the next draw of the one generator, or the draw number indices[i] of generator seeds[i]. */
static void start_noise(struct drawing *d, uint32_t i, float *latent)
{
    const struct pf_generate_opts *o = d->opts;
    if (o->seeds != NULL) {
        uint32_t n_skip = o->indices[i];
        if (i > 0 && o->seeds[i] == o->seeds[i - 1] && n_skip == o->indices[i - 1] + 1) {
            n_skip = 0; /* continues where the picture before it stopped */
        } else {
            noise_seed(&d->noise, o->seeds[i]);
        }
        for (uint32_t k = 0; k < n_skip; k++)
            noise_fill(&d->noise, latent, d->n_values);
    }
    noise_fill(&d->noise, latent, d->n_values);
}

static int draw_batch(struct drawing *d, uint32_t i_first, uint32_t n, pf_error *err)
{
    for (uint32_t i = 0; i < n; i++)
        start_noise(d, i_first + i, d->latents + i * d->n_values);
    forward_batch(&d->forward, n, d->opts->classes + i_first);
    for (uint32_t k = 0; k < d->n_steps; k++) {
        double t = schedule_time(k, d->n_steps);
        int rc = forward_run(&d->forward, d->latents, (float)(d->model->schedule.n_train_steps * t),
                             err);
        if (rc != PF_OK)
            return rc;
        d->dt = (float)(schedule_time(k + 1, d->n_steps) - t);
        rc = stage_tasks(&d->forward.stage, n, step_task, d, err);
        if (rc != PF_OK)
            return rc;
    }
    return PF_OK;
}

static int draw_all(struct drawing *d, float *out_samples, uint8_t *out_rgb, pf_error *err)
{
    uint32_t n_images = d->opts->n_images;
    for (uint32_t i = 0; i < n_images; i += d->n_batch) {
        uint32_t n = n_images - i < d->n_batch ? n_images - i : d->n_batch;
        int rc = draw_batch(d, i, n, err);
        if (rc != PF_OK)
            return rc;
        if (out_samples != NULL)
            memcpy(out_samples + i * d->n_values, d->latents, n * d->n_values * sizeof(float));
        if (out_rgb != NULL)
            write_rgb(d, n, out_rgb + i * d->n_values);
    }
    return PF_OK;
}

static int prepare(struct drawing *d, struct pf_view *view, pf_error *err)
{
    const struct dit_config *c = &d->model->dit.config;
    const struct pf_generate_opts *o = d->opts;
    size_t n_bytes = 0;
    double guidance = o->guidance_scale == 0.0 ? MODEL_GUIDANCE : o->guidance_scale;
    d->guidance = (float)guidance;
    d->is_guided = guidance != 1.0;
    d->n_steps = o->n_steps == 0 ? MODEL_STEPS : o->n_steps;
    d->n_values = (size_t)(c->channels * c->size * c->size);
    d->n_batch = choose_batch(d);
    d->n_layers =
        ((uint64_t)o->n_images + d->n_batch - 1) / d->n_batch * d->n_steps * (uint64_t)c->n_blocks;
    noise_seed(&d->noise, o->seed);
    if (!mul_size(d->n_batch, d->n_values * sizeof(float), &n_bytes))
        return err_set(err, PF_E_RANGE, "a batch of %u pictures is too large", d->n_batch);
    d->latents = mem_alloc(n_bytes);
    if (d->latents == NULL)
        return err_nomem(err, n_bytes, "pictures");
    int rc = forward_open(&d->forward, &d->model->dit, view, d->model->pool, d->n_batch,
                          d->is_guided, err);
    d->forward.on_layer = report_layer;
    d->forward.layer_ctx = d;
    return rc;
}

static void fill_report(const struct drawing *d, struct pf_generate_report *r)
{
    r->activation_bytes =
        d->forward.n_block_bytes + (uint64_t)d->n_batch * d->n_values * sizeof(float);
    r->n_weight_bytes = stage_weight_bytes(&d->forward.stage);
}

int pf_generate(struct pf_model *model, struct pf_view *view, const struct pf_generate_opts *opts,
                float *out_samples, uint8_t *out_rgb, struct pf_generate_report *out_report,
                pf_error *err)
{
    if (model == NULL || view == NULL || opts == NULL)
        return err_set(err, PF_E_INVALID, "drawing needs a model, a view and options");
    struct pf_generate_opts o;
    opts_read(&o, sizeof o, opts);
    int rc = check_opts(model, view, &o, out_rgb, err);
    if (rc != PF_OK)
        return rc;
    if (atomic_flag_test_and_set(&model->is_busy))
        return err_set(err, PF_E_BUSY, "the model is drawing already: one generation at a time");
    struct fp_env env = fp_enter();
    struct drawing d = {.model = model, .opts = &o};
    struct pf_generate_report report = {0};
    struct peak *peak = NULL;
    uint64_t t_start = clock_ns(), n_read = proc_read_bytes();
    rc = peak_start(&peak, err);
    if (rc == PF_OK)
        rc = prepare(&d, view, err);
    if (rc == PF_OK)
        rc = draw_all(&d, out_samples, out_rgb, err);
    if (rc == PF_OK)
        rc = stage_verify(&d.forward.stage, err);
    report.peak_anon_bytes = peak_stop(peak);
    if (rc == PF_OK) {
        fill_report(&d, &report);
        report.n_bytes_read = proc_read_bytes() - n_read;
        report.seconds = (double)(clock_ns() - t_start) * 1e-9;
        if (out_report != NULL)
            *out_report = report;
    }
    forward_release(&d.forward);
    mem_free(d.latents);
    fp_leave(env);
    atomic_flag_clear(&model->is_busy);
    return rc;
}
