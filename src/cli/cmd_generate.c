/*
 * `pageflip generate`: draws pictures with the weights of a view, one PNG: a single picture, or a sheet of several. What is
 * drawn depends on model, composition, class, seed, index, steps and guidance only.
 */

#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "cli/command.h"
#include "cli/progress.h"
#include "cli/setup.h"

#define N_SHEET_COLS 8

struct generate_args {
    struct common_args common;
    const char *model, *merge_dtype, *prompt, *output;
    struct arg_list loras;
    struct arg_int class, n, seed, steps, threads, zoom, batch;
    struct arg_real guidance;
    bool grid, allow_unmatched;
};

static const struct opt opts[] = {
    {"model", 'm', OPT_MODEL, "M", "model directory; the bundled model unless said",
     offsetof(struct generate_args, model), NULL, 0, 0, false},
    {"lora", 'l', OPT_LORA, "L",
     "adapter: PATH[:STRENGTH][,alpha=A][,target=COMPONENT], or the name of a "
     "bundled one; may be repeated",
     offsetof(struct generate_args, loras), NULL, 0, 0, false},
    {"prompt", 0, OPT_STRING, "TEXT", "draw the class that these words name",
     offsetof(struct generate_args, prompt), NULL, 0, 0, false},
    {"class", 'c', OPT_INT, "I", "draw the class of this number",
     offsetof(struct generate_args, class), NULL, 0, UINT32_MAX, false},
    {"grid", 0, OPT_FLAG, NULL, "draw every class once, as a contact sheet",
     offsetof(struct generate_args, grid), NULL, 0, 0, false},
    {"n", 'n', OPT_INT, "N",
     "pictures of the class, as a sheet when there are several; 1 unless said",
     offsetof(struct generate_args, n), NULL, 1, 4096, false},
    {"seed", 's', OPT_INT, "S", "seed of the starting noise; 0 unless said",
     offsetof(struct generate_args, seed), NULL, 0, 0, false},
    {"steps", 0, OPT_INT, "N", "sampling steps; 16 unless said",
     offsetof(struct generate_args, steps), NULL, 1, 10000, false},
    {"guidance-scale", 'g', OPT_REAL, "G", "classifier-free guidance; 2 unless said, 1 for none",
     offsetof(struct generate_args, guidance), NULL, 0, 0, false},
    {"output", 'o', OPT_FILE, "FILE",
     "the PNG to write; named after what is drawn and the seed unless said",
     offsetof(struct generate_args, output), NULL, 0, 0, false},
    {"zoom", 0, OPT_INT, "Z", "enlarge the pictures of a sheet Z times",
     offsetof(struct generate_args, zoom), NULL, 1, 64, false},
    {"batch", 0, OPT_INT, "N",
     "pictures that share a pass; changes no picture, only memory and time",
     offsetof(struct generate_args, batch), NULL, 1, 4096, false},
    {"allow-unmatched", 0, OPT_FLAG, NULL, "leave out keys that match no tensor of the model",
     offsetof(struct generate_args, allow_unmatched), NULL, 0, 0, false},
    {"merge-dtype", 0, OPT_CHOICE, "D", "precision of the merge: base (the default) or f32",
     offsetof(struct generate_args, merge_dtype), "base|f32", 0, 0, false},
    {"threads", 't', OPT_INT, "N", "threads; one per usable CPU unless said",
     offsetof(struct generate_args, threads), NULL, 1, 256, false},
};

/* One request while it is being worked on. */
struct job {
    const struct generate_args *args;
    struct setup setup;
    struct pf_model *model;
    struct pf_model_info info;
    struct pf_view *view;
    uint32_t *classes;
    uint32_t n;
    uint8_t *rgb; /* (n, height, width, 3) */
    char output[4096];
    struct pf_generate_report report;
};

static void job_release(struct job *job)
{
    mem_free(job->rgb);
    mem_free(job->classes);
    pf_view_release(job->view);
    pf_model_close(job->model);
    setup_release(&job->setup);
}

static int choose_classes(struct job *job, pf_error *err)
{
    const struct generate_args *args = job->args;
    uint32_t i_class = (uint32_t)args->class.v;
    int rc;

    job->n = args->grid ? job->info.n_classes : args->n.is_set ? (uint32_t)args->n.v : 1;
    job->classes = mem_calloc(job->n, sizeof(*job->classes));
    if (!job->classes)
        return err_nomem(err, job->n * sizeof(*job->classes), "classes");
    if (args->prompt && (rc = pf_model_find_class(job->model, args->prompt, &i_class, err)))
        return rc;
    if (!args->grid && i_class >= job->info.n_classes)
        return err_set(err, PF_E_NOTFOUND, "class %u does not exist; the model has 0 to %u",
                       i_class, job->info.n_classes - 1);
    for (uint32_t i = 0; i < job->n; i++)
        job->classes[i] = args->grid ? i : i_class;
    return PF_OK;
}

/* "cat-0.png", "grid-7.png", "class-3-0.png": letters and digits of the class name, no path in it. */
static void choose_output(struct job *job)
{
    const char *name = job->args->grid ? "grid" : pf_model_class_name(job->model, job->classes[0]);
    char stem[64];
    size_t n = 0;

    for (; name && *name && n + 1 < sizeof(stem); name++)
        stem[n++] = strchr("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", *name)
                        ? *name
                        : '-';
    stem[n] = 0;
    if (job->args->output)
        (void)snprintf(job->output, sizeof(job->output), "%s", job->args->output);
    else if (n)
        (void)snprintf(job->output, sizeof(job->output), "%s-%llu.png", stem,
                       (unsigned long long)job->args->seed.v);
    else
        (void)snprintf(job->output, sizeof(job->output), "class-%u-%llu.png", job->classes[0],
                       (unsigned long long)job->args->seed.v);
}

/* Said before the work, not after it. */
static int check_output(const struct job *job, pf_error *err)
{
    char *dir = path_dir(job->output);
    int rc = dir ? PF_OK : err_nomem(err, sizeof(job->output), "a path");

    if (!rc && file_kind(dir) != FILE_DIRECTORY)
        rc = err_set(err, PF_E_NOTFOUND, "cannot write '%s': there is no directory '%s'",
                     job->output, dir);
    if (!rc && file_kind(job->output) == FILE_DIRECTORY)
        rc = err_set(err, PF_E_INVALID, "cannot write '%s': it is a directory", job->output);
    mem_free(dir);
    return rc;
}

static int prepare(struct job *job, bool *out_is_usage, pf_error *err)
{
    const struct generate_args *args = job->args;
    struct pf_model_opts model_opts = {.size = sizeof(model_opts),
                                       .n_threads = (uint32_t)args->threads.v};
    size_t n_bytes;
    int rc;

    rc = setup_open(&job->setup,
                    &(struct setup_opts){.model = args->model,
                                         .loras = &args->loras,
                                         .merge_dtype = args->merge_dtype,
                                         .allow_unmatched = args->allow_unmatched},
                    out_is_usage, err);
    if (!rc)
        rc = pf_model_open(job->setup.ckpt, &model_opts, &job->model, err);
    if (rc)
        return rc;
    pf_model_info(job->model, &job->info);
    if ((rc = choose_classes(job, err)))
        return rc;
    choose_output(job);
    if ((rc = check_output(job, err)))
        return rc;
    if (!mul_size((size_t)job->info.width * job->info.height, 3, &n_bytes) ||
        !mul_size(n_bytes, job->n, &n_bytes))
        return err_set(err, PF_E_RANGE, "%u pictures of %u x %u are too many", job->n,
                       job->info.width, job->info.height);
    job->rgb = mem_alloc(n_bytes);
    if (!job->rgb)
        return err_nomem(err, n_bytes, "pictures");
    return pf_view_open(job->setup.ckpt, job->setup.comp, &job->view, err);
}

static int draw(struct job *job, const struct out *o, pf_error *err)
{
    const struct generate_args *args = job->args;
    struct progress bar;
    struct pf_generate_opts gen = {
        .size = sizeof(gen),
        .n_images = job->n,
        .classes = job->classes,
        .seed = args->seed.v,
        .n_steps = (uint32_t)args->steps.v,
        .guidance_scale = args->guidance.v,
        .batch = (uint32_t)args->batch.v,
        .progress = progress_tick,
        .progress_ctx = &bar,
    };
    uint32_t zoom = args->zoom.is_set ? (uint32_t)args->zoom.v : 1;
    int rc;

    progress_begin(&bar, !o->is_quiet, false);
    rc = pf_generate(job->model, job->view, &gen, NULL, job->rgb, &job->report, err);
    progress_end(&bar);
    if (rc)
        return rc;
    return pf_sheet_write(job->output, job->rgb, job->n, job->info.width, job->info.height,
                          job->n < N_SHEET_COLS ? job->n : N_SHEET_COLS, zoom, err);
}

static struct json *images_json(const struct job *job)
{
    struct json *images = json_new_array();

    for (uint32_t i = 0; i < job->n; i++) {
        struct json *it = json_new_object();
        const char *name = pf_model_class_name(job->model, job->classes[i]);

        json_set_int(it, "index", i);
        json_set_int(it, "class", job->classes[i]);
        json_set(it, "name", name ? json_new_string(str_of(name)) : json_new_null());
        json_set(it, "path", json_new_string(str_of(job->output)));
        json_add(images, it);
    }
    return images;
}

static int report(const struct out *o, const struct job *job)
{
    const struct pf_generate_report *r = &job->report;
    const char *digest = pf_view_digest(job->view);
    struct json *doc;
    char a[16];

    if (o->is_json) {
        doc = json_new_object();
        json_set(doc, "output", json_new_string(str_of(job->output)));
        json_set_z(doc, "composition", digest);
        json_set_int(doc, "seed", (int64_t)(job->args->seed.v & UINT32_MAX));
        json_set_real(doc, "seconds", r->seconds);
        json_set_int(doc, "peak_anon_bytes", (int64_t)r->peak_anon_bytes);
        json_set_int(doc, "activation_bytes", (int64_t)r->activation_bytes);
        json_set_int(doc, "bytes_read", (int64_t)r->n_bytes_read);
        json_set_int(doc, "weight_bytes", (int64_t)r->n_weight_bytes);
        json_set(doc, "images", images_json(job));
        return out_json(o, doc);
    }
    out_field(o, "output", "%s (%u picture%s of %u x %u)", job->output, job->n,
              job->n == 1 ? "" : "s", job->info.width, job->info.height);
    out_field(o, "seconds", "%.2f", r->seconds);
    out_field(o, "memory", "%s of anonymous memory at most", out_mib(r->peak_anon_bytes, a));
    out_field(o, "read", "%s from storage", out_bytes((double)r->n_bytes_read, a));
    out_field(o, "weights", "%s passed through the view", out_bytes((double)r->n_weight_bytes, a));
    out_field(o, "composition", "%s", digest);
    return EXIT_STATUS_OK;
}

/* What the table cannot say about combinations of options. NULL: fine. */
static const char *check(const struct generate_args *args)
{
    int n_what = (args->prompt != NULL) + args->class.is_set + args->grid;

    if (n_what == 0)
        return "nothing to draw: give --prompt TEXT, --class I or --grid";
    if (n_what > 1)
        return "give only one of --prompt, --class and --grid";
    if (args->grid && args->n.is_set)
        return "option '--n' does not go with --grid, which draws every class once";
    if (args->guidance.is_set && args->guidance.v <= 0)
        return "option '--guidance-scale' must be above 0; 1 means no guidance";
    return NULL;
}

static int run(struct out *o, const void *p)
{
    struct job job = {.args = p};
    const char *wrong = check(p);
    pf_error err = {0};
    bool is_usage = false;
    int rc, status;

    if (wrong)
        return out_usage(o, "%s", wrong);
    rc = prepare(&job, &is_usage, &err);
    if (!rc)
        rc = draw(&job, o, &err);
    if (!rc)
        status = report(o, &job);
    else if (is_usage)
        status = out_usage(o, "%s", err.msg);
    else if (rc == PF_E_CANCELLED)
        status = out_interrupted(o, "interrupted: '%s' was not written", job.output);
    else
        status = out_fail(o, &err);
    job_release(&job);
    return status;
}

const struct command cmd_generate = {
    .name = "generate",
    .summary = "draw pictures with a model, adapters applied on the way",
    .synopsis = "[--model M] [--lora L ...] (--prompt TEXT | --class I | --grid) [-o FILE]",
    .detail = "Weights are read from the file layer by layer and adapters are added to each panel "
              "as it is read; nothing is "
              "merged on disk. The same model, adapters, class, seed, steps and guidance give the "
              "same picture, whatever "
              "the number of threads and pictures.",
    .opts = opts,
    .n_opts = PF_COUNTOF(opts),
    .args_bytes = sizeof(struct generate_args),
    .run = run,
};
