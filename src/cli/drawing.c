/*
 * From options to a PNG: classes, a name for the file, the pictures, and the proof that the base was still itself when the last
 * one was done.
 */
#include "cli/drawing.h"

#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/proc.h"

#define N_SHEET_COLS 8

void drawing_release(struct drawing *d)
{
    mem_free(d->rgb);
    mem_free(d->classes);
    pf_view_release(d->view);
    *d = (struct drawing){0};
}

static int choose_classes(struct drawing *d, pf_error *err)
{
    const struct picture_args *args = &d->args;
    uint32_t i_class = (uint32_t)args->class.v;
    int rc;

    d->n = args->grid ? d->info.n_classes : args->n.is_set ? (uint32_t)args->n.v : 1;
    d->classes = mem_calloc(d->n, sizeof(*d->classes));
    if (!d->classes)
        return err_nomem(err, d->n * sizeof(*d->classes), "classes");
    if (args->prompt && (rc = pf_model_find_class(d->model, args->prompt, &i_class, err)))
        return rc;
    if (!args->grid && i_class >= d->info.n_classes)
        return err_set(err, PF_E_NOTFOUND, "class %u does not exist; the model has 0 to %u",
                       i_class, d->info.n_classes - 1);
    for (uint32_t i = 0; i < d->n; i++)
        d->classes[i] = args->grid ? i : i_class;
    return PF_OK;
}

/* "cat-0.png", "grid-7.png", "class-3-0.png": letters and digits of the class name, no path in it. */
static void choose_output(struct drawing *d)
{
    const char *name = d->args.grid ? "grid" : pf_model_class_name(d->model, d->classes[0]);
    char stem[64];
    size_t n = 0;

    for (; name && *name && n + 1 < sizeof(stem); name++)
        stem[n++] = strchr("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", *name)
                        ? *name
                        : '-';
    stem[n] = 0;
    if (d->args.output)
        (void)snprintf(d->output, sizeof(d->output), "%s", d->args.output);
    else if (n)
        (void)snprintf(d->output, sizeof(d->output), "%s-%llu.png", stem,
                       (unsigned long long)d->args.seed.v);
    else
        (void)snprintf(d->output, sizeof(d->output), "class-%u-%llu.png", d->classes[0],
                       (unsigned long long)d->args.seed.v);
}

/* Nothing in it, or a picture: whatever else has that name, weights among it, is not replaced. */
static bool may_replace(const char *path)
{
    static const unsigned char signature[8] = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
    unsigned char head[8];
    FILE *file = fopen(path, "rbe");
    size_t n = file ? fread(head, 1, sizeof(head), file) : 0;
    bool is_picture = file && n == sizeof(head) && !memcmp(head, signature, sizeof(head));

    if (file)
        (void)fclose(file);
    return (file && !n) || is_picture;
}

static int check_output(const struct drawing *d, pf_error *err)
{
    char *dir = path_dir(d->output);
    int rc = dir ? PF_OK : err_nomem(err, sizeof(d->output), "a path");

    if (!rc && file_kind(dir) != FILE_DIRECTORY)
        rc = err_set(err, PF_E_NOTFOUND, "cannot write '%s': there is no directory '%s'", d->output,
                     dir);
    if (!rc && file_kind(d->output) == FILE_DIRECTORY)
        rc = err_set(err, PF_E_INVALID, "cannot write '%s': it is a directory", d->output);
    if (!rc && file_kind(d->output) == FILE_OTHER)
        rc = err_prefix(err, file_kind_refuse(d->output, err), "cannot write a picture");
    if (!rc && file_kind(d->output) == FILE_REGULAR && !may_replace(d->output))
        rc = err_set(err, PF_E_EXISTS,
                     "cannot write '%s': it exists and is no PNG picture: name "
                     "another file",
                     d->output);
    mem_free(dir);
    return rc;
}

int drawing_prepare(struct drawing *d, struct pf_model *model, const struct picture_args *args,
                    pf_error *err)
{
    size_t n_bytes;
    int rc;

    d->args = *args;
    d->model = model;
    pf_model_info(model, &d->info);
    if ((rc = choose_classes(d, err)))
        return rc;
    choose_output(d);
    if ((rc = check_output(d, err)))
        return rc;
    if (!mul_size((size_t)d->info.width * d->info.height, 3, &n_bytes) ||
        !mul_size(n_bytes, d->n, &n_bytes))
        return err_set(err, PF_E_RANGE, "%u pictures of %u x %u are too many", d->n, d->info.width,
                       d->info.height);
    d->rgb = mem_alloc(n_bytes);
    return d->rgb ? PF_OK : err_nomem(err, n_bytes, "pictures");
}

int drawing_run(struct drawing *d, pf_progress_fn progress, void *progress_ctx, pf_error *err)
{
    struct pf_generate_opts gen = {
        .size = sizeof(gen),
        .n_images = d->n,
        .classes = d->classes,
        .seed = d->args.seed.v,
        .n_steps = (uint32_t)d->args.steps.v,
        .guidance_scale = d->args.guidance.v,
        .batch = (uint32_t)d->args.batch.v,
        .progress = progress,
        .progress_ctx = progress_ctx,
    };
    uint32_t zoom = d->args.zoom.is_set ? (uint32_t)d->args.zoom.v : 1;
    uint64_t t0 = clock_ns();
    int rc = pf_generate(d->model, d->view, &gen, NULL, d->rgb, &d->report, err);

    if (rc == PF_E_CHANGED || rc == PF_E_TRUNCATED)
        return err_append(err, "; '%s' is not written", d->output), rc;
    if (!rc)
        rc = pf_sheet_write(d->output, d->rgb, d->n, d->info.width, d->info.height,
                            d->n < N_SHEET_COLS ? d->n : N_SHEET_COLS, zoom, err);
    d->ms = (double)(clock_ns() - t0) * 1e-6;
    return rc;
}

static struct json *images_json(const struct drawing *d)
{
    struct json *images = json_new_array();

    for (uint32_t i = 0; i < d->n; i++) {
        struct json *it = json_new_object();
        const char *name = pf_model_class_name(d->model, d->classes[i]);

        json_set_int(it, "index", i);
        json_set_int(it, "class", d->classes[i]);
        json_set(it, "name", name ? json_new_string(str_of(name)) : json_new_null());
        json_set(it, "path", json_new_string(str_of(d->output)));
        json_add(images, it);
    }
    return images;
}

void drawing_json(struct json *doc, const struct drawing *d)
{
    const struct pf_generate_report *r = &d->report;

    json_set(doc, "output", json_new_string(str_of(d->output)));
    json_set_z(doc, "composition", pf_view_digest(d->view));
    json_set_z(doc, "way", d->way);
    json_set_int(doc, "seed", (int64_t)(d->args.seed.v & UINT32_MAX));
    json_set_real(doc, "seconds", r->seconds);
    json_set_real(doc, "ms", d->ms);
    json_set_int(doc, "peak_anon_bytes", (int64_t)r->peak_anon_bytes);
    json_set_int(doc, "activation_bytes", (int64_t)r->activation_bytes);
    json_set_int(doc, "bytes_read", (int64_t)r->n_bytes_read);
    json_set_int(doc, "weight_bytes", (int64_t)r->n_weight_bytes);
    json_set(doc, "images", images_json(d));
}
