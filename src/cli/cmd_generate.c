/*
 * `pageflip generate`: draws pictures with the weights of a view, one PNG: a single picture, or a sheet of several; or runs a
 * script of changes and pictures. What is drawn depends on model, composition, class, seed, index, steps and guidance only.
 */
#include "base/mem.h"
#include "cli/command.h"
#include "cli/drawing.h"
#include "cli/progress.h"
#include "cli/script_run.h"
#include "cli/session.h"
#include "cli/setup.h"

/* One picture request while it is being worked on. */
struct job {
    const struct generate_args *args;
    struct session session;
    struct pf_model *model;
    struct drawing drawing;
    struct pf_change_report change; /* of the adapters; zeros without any */
};

static void job_release(struct job *job)
{
    drawing_release(&job->drawing);
    pf_model_close(job->model);
    session_close(&job->session);
}

/* Adapters on, and resident layers rewritten, before the view is taken. */
static int apply(struct job *job, const struct lora_spec *specs, pf_error *err)
{
    const struct picture_args *picture = &job->args->picture;
    struct pf_change_opts change = {.size = sizeof(change),
                                    .allow_unmatched = picture->allow_unmatched,
                                    .merge_dtype = merge_dtype_by_name(picture->merge_dtype)};
    struct session *s = &job->session;
    struct pf_engine_lora *loras = NULL;
    int rc = PF_OK;

    if (picture->loras.n) {
        rc = session_loras(s, specs, picture->loras.n, false, &loras, err);
        if (!rc)
            rc =
                pf_engine_set(s->engine, loras, picture->loras.n, NULL, &change, &job->change, err);
        mem_free(loras);
    }
    return !rc && job->args->serving.resident.v ? session_settle(s, err) : rc;
}

static int prepare(struct job *job, bool *out_is_usage, pf_error *err)
{
    const struct generate_args *args = job->args;
    struct pf_model_opts model_opts = {.size = sizeof(model_opts),
                                       .n_threads = (uint32_t)args->picture.threads.v};
    struct session_opts session_opts = {.model = args->model,
                                        .serving = &args->serving,
                                        .n_threads = model_opts.n_threads,
                                        .is_one_shot = true,
                                        .wants_adapters = args->picture.loras.n > 0};
    struct lora_spec *specs = NULL;
    int rc = specs_parse(&args->picture.loras, &specs, err);

    *out_is_usage = rc == PF_E_INVALID;
    if (!rc)
        rc = session_open(&job->session, &session_opts, err);
    if (!rc)
        rc = pf_model_open(job->session.ckpt, &model_opts, &job->model, err);
    if (!rc)
        rc = drawing_prepare(&job->drawing, job->model, &args->picture, err);
    if (!rc)
        rc = apply(job, specs, err);
    specs_free(specs, args->picture.loras.n);
    if (rc)
        return rc;
    job->drawing.view = pf_engine_view(job->session.engine);
    job->drawing.way = pf_engine_way(job->session.engine, job->drawing.view);
    return PF_OK;
}

static int report(const struct out *o, const struct job *job)
{
    const struct drawing *d = &job->drawing;
    const struct pf_generate_report *r = &d->report;
    struct json *doc;
    char a[16];

    if (o->is_json) {
        doc = json_new_object();
        drawing_json(doc, d);
        if (job->args->picture.loras.n)
            change_json(doc, &job->change);
        json_set(doc, "plan", session_plan_json(&job->session));
        return out_json(o, doc);
    }
    out_field(o, "output", "%s (%u picture%s of %u x %u)", d->output, d->n, d->n == 1 ? "" : "s",
              d->info.width, d->info.height);
    out_field(o, "seconds", "%.2f", r->seconds);
    out_field(o, "memory", "%s of anonymous memory at most", out_mib(r->peak_anon_bytes, a));
    out_field(o, "read", "%s from storage", out_bytes((double)r->n_bytes_read, a));
    out_field(o, "weights", "%s passed through the view", out_bytes((double)r->n_weight_bytes, a));
    out_field(o, "composition", "%s", pf_view_digest(d->view));
    out_field(o, "way", "%s", d->way);
    return EXIT_STATUS_OK;
}

static int draw(const struct out *o, struct job *job, pf_error *err)
{
    struct progress bar;
    int rc;

    change_warn(o, &job->change);
    progress_begin(&bar, !o->is_quiet, false);
    rc = drawing_run(&job->drawing, progress_tick, &bar, err);
    progress_end(&bar);
    return rc;
}

static int run(struct out *o, const void *p)
{
    struct job job = {.args = p};
    const char *wrong = generate_check(p);
    pf_error err = {0};
    bool is_usage = false;
    int rc, status;

    if (wrong)
        return out_usage(o, "%s", wrong);
    if (job.args->script)
        return script_run(o, p);
    rc = prepare(&job, &is_usage, &err);
    if (!rc)
        rc = draw(o, &job, &err);
    if (!rc)
        status = report(o, &job);
    else if (is_usage)
        status = out_usage(o, "%s", err.msg);
    else if (rc == PF_E_CANCELLED)
        status = out_interrupted(o, "interrupted: '%s' was not written", job.drawing.output);
    else {
        setup_hint(&err);
        status = out_fail(o, &err);
    }
    job_release(&job);
    return status;
}

const struct command cmd_generate = {
    .name = "generate",
    .summary = "draw pictures with a model, adapters applied on the way",
    .synopsis = "[-l L ...] (--prompt TEXT | --class I | --grid | --script FILE) [-o FILE]",
    .detail = "Weights are read from the file layer by layer and adapters are added to each panel "
              "as it is read; nothing is merged on disk unless '--way overlay' says so. The same "
              "model, adapters, class, seed, steps and guidance give the same picture, whatever "
              "the number of threads and pictures and the way. A script changes adapters while "
              "pictures are being drawn; the man page explains its lines.",
    .opts = generate_opts,
    .n_opts = N_GENERATE_OPTS,
    .args_bytes = sizeof(struct generate_args),
    .run = run,
};
