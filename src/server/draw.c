/*
 * Drawing for the queue: runs on its workers, each with a model object of its own.
 */
#include "server/draw.h"

#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "server/reply.h"
#include "server/service.h"

#define MIB 1048576.0

/* ------------------------------------------------------------------------------------------- one pass */

struct ticking {
    queue_tick_fn tick;
    void *ctx;
    uint32_t n_steps;
};

static bool on_progress(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    const struct ticking *t = ctx;

    (void)what;
    return t->tick(t->ctx, total ? (uint32_t)(done * t->n_steps / total) : 0);
}

/* The pictures of all jobs, one behind the other. */
struct sheet {
    uint32_t n;
    uint32_t *classes, *indices;
    uint64_t *seeds;
    uint8_t *rgb;
};

static void sheet_release(struct sheet *sheet)
{
    mem_free(sheet->classes);
    mem_free(sheet->indices);
    mem_free(sheet->seeds);
    mem_free(sheet->rgb);
}

static int sheet_fill(struct sheet *sheet, struct job *const *jobs, size_t n_jobs, size_t n_picture,
                      pf_error *err)
{
    uint32_t at = 0;

    *sheet = (struct sheet){0};
    for (size_t i = 0; i < n_jobs; i++)
        sheet->n += jobs[i]->n_images;
    sheet->classes = mem_calloc(sheet->n, sizeof(*sheet->classes));
    sheet->indices = mem_calloc(sheet->n, sizeof(*sheet->indices));
    sheet->seeds = mem_calloc(sheet->n, sizeof(*sheet->seeds));
    sheet->rgb = mem_calloc(sheet->n, n_picture);
    if (!sheet->classes || !sheet->indices || !sheet->seeds || !sheet->rgb)
        return err_nomem(err, sheet->n * n_picture, "pictures");
    for (size_t i = 0; i < n_jobs; i++)
        for (uint32_t k = 0; k < jobs[i]->n_images; k++, at++) {
            sheet->classes[at] = jobs[i]->i_class;
            sheet->indices[at] = k;
            sheet->seeds[at] = jobs[i]->seed;
        }
    return PF_OK;
}

/* Hands the pictures to their jobs. A job that left meanwhile gets some too, which does no harm. */
static int sheet_share(const struct sheet *sheet, struct job *const *jobs, size_t n_jobs,
                       size_t n_picture, const struct pf_generate_report *report, pf_error *err)
{
    const uint8_t *from = sheet->rgb;

    for (size_t i = 0; i < n_jobs; i++) {
        size_t n_bytes = jobs[i]->n_images * n_picture;

        jobs[i]->rgb = mem_alloc(n_bytes);
        if (!jobs[i]->rgb)
            return err_nomem(err, n_bytes, "pictures");
        memcpy(jobs[i]->rgb, from, n_bytes);
        from += n_bytes;
        jobs[i]->report = *report;
    }
    return PF_OK;
}

int draw_pass(void *ctx, unsigned i_worker, struct job *const *jobs, size_t n, queue_tick_fn tick,
              void *tick_ctx, pf_error *err)
{
    struct service *s = ctx;
    size_t n_picture = (size_t)s->model.width * s->model.height * 3;
    struct ticking ticking = {tick, tick_ctx, jobs[0]->n_steps};
    struct pf_generate_report report = {0};
    struct sheet sheet;
    int rc = sheet_fill(&sheet, jobs, n, n_picture, err);

    if (!rc) {
        struct pf_generate_opts opts = {.size = sizeof(opts),
                                        .n_images = sheet.n,
                                        .classes = sheet.classes,
                                        .seeds = sheet.seeds,
                                        .indices = sheet.indices,
                                        .n_steps = jobs[0]->n_steps,
                                        .guidance_scale = jobs[0]->guidance,
                                        .progress = on_progress,
                                        .progress_ctx = &ticking};

        rc = pf_generate(s->models[i_worker], jobs[0]->view, &opts, NULL, sheet.rgb, &report, err);
    }
    if (!rc)
        rc = sheet_share(&sheet, jobs, n, n_picture, &report, err);
    if (!rc) {
        pf_engine_served(s->engine, jobs[0]->view);
        metrics_add(&s->metrics.weight_bytes, report.n_weight_bytes);
        metrics_add(&s->metrics.passes, 1);
        metrics_add(&s->metrics.shared_jobs, n > 1 ? n : 0);
        metrics_observe(&s->metrics.drawing, report.seconds);
    }
    sheet_release(&sheet);
    return rc;
}

/* ------------------------------------------------------------------------------------------ the answer */

static void add_base64(struct strbuf *out, const uint8_t *p, size_t n)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

    for (size_t i = 0; i < n; i += 3) {
        uint32_t v = (uint32_t)p[i] << 16 | (i + 1 < n ? (uint32_t)p[i + 1] << 8 : 0) |
                     (i + 2 < n ? p[i + 2] : 0);
        char four[4] = {digits[v >> 18], digits[v >> 12 & 63],
                        i + 1 < n ? digits[v >> 6 & 63] : '=', i + 2 < n ? digits[v & 63] : '='};

        strbuf_add(out, four, sizeof(four));
    }
}

/* The i-th picture of a job. Owned by caller. */
static int encode(const struct answer *a, const struct job *job, uint32_t i, uint8_t **out_png,
                  size_t *out_n_bytes, pf_error *err)
{
    const struct pf_model_info *m = &a->s->model;
    const uint8_t *rgb = job->rgb + (size_t)i * m->width * m->height * 3;
    size_t n_bytes = 0;
    int rc = pf_png_encode(rgb, m->width, m->height, NULL, &n_bytes, err); /* the most it can be */

    *out_png = rc ? NULL : mem_alloc(n_bytes);
    if (!rc && !*out_png)
        rc = err_nomem(err, n_bytes, "a picture");
    if (!rc)
        rc = pf_png_encode(rgb, m->width, m->height, *out_png, &n_bytes, err);
    *out_n_bytes = n_bytes;
    return rc;
}

/* Addresses whose pictures would be driven out by the later ones of the same answer are not given away; and an answer that is refused
 * for that has driven out nobody else's. One picture at a time: the answer's memory is not multiplied. */
static int check_budget(const struct answer *a, const struct job *job, pf_error *err)
{
    uint64_t n_all = 0;
    int rc = PF_OK;

    for (uint32_t i = 0; !rc && i < job->n_images; i++) {
        uint8_t *png;
        size_t n_bytes;

        rc = encode(a, job, i, &png, &n_bytes, err);
        n_all += n_bytes;
        mem_free(png);
    }
    if (rc || n_all <= a->s->opts->picture_bytes_max)
        return rc;
    return err_set(err, PF_E_RANGE,
                   "the pictures of this answer have more than the %llu bytes that are kept: ask "
                   "for fewer, or for b64_json",
                   (unsigned long long)a->s->opts->picture_bytes_max);
}

static int picture_json(const struct answer *a, const struct job *job, uint32_t i,
                        const char *class_name, struct json *data, pf_error *err)
{
    struct json *it = json_new_object();
    char name[PICTURE_NAME_BYTES];
    struct strbuf text;
    size_t n_bytes = 0;
    uint8_t *png = NULL;
    int rc = encode(a, job, i, &png, &n_bytes, err);

    strbuf_init(&text);
    if (!rc && a->is_url) {
        rc = pictures_keep(a->s->pictures, png, n_bytes, name, err);
        strbuf_addf(&text, "%s/v1/images/files/%s", a->url_base, rc ? "" : name);
    } else if (!rc) {
        add_base64(&text, png, n_bytes);
    }
    if (!rc && !strbuf_ok(&text))
        rc = err_nomem(err, n_bytes, "a picture");
    if (!rc)
        json_set(it, a->is_url ? "url" : "b64_json",
                 json_new_string((struct str){strbuf_z(&text), text.n}));
    json_set_z(it, "revised_prompt", class_name);
    json_add(data, it);
    strbuf_release(&text);
    mem_free(png);
    return rc;
}

static struct json *usage_json(void)
{
    struct json *usage = json_new_object(), *details = json_new_object();

    json_set_int(details, "image_tokens", 0);
    json_set_int(details, "text_tokens", 0);
    json_set_int(usage, "input_tokens", 0);
    json_set_int(usage, "output_tokens", 0);
    json_set_int(usage, "total_tokens", 0);
    json_set(usage, "input_tokens_details", details);
    return usage;
}

/* The request was fine when it was accepted; what failed since then is ours. */
static void answer_error(const struct answer *a, const pf_error *err)
{
    int status = reply_status_of(err->code);

    if (status < 500 && err->code != PF_E_RANGE)
        status = 500;
    reply_error(a->req, status, pf_error_name(err->code), NULL, err->msg);
}

static void answer_drawn(const struct answer *a, const struct job *job)
{
    struct json *doc = json_new_object(), *data = json_new_array();
    const char *name = pf_model_class_name(a->s->models[0], job->i_class);
    pf_error err = {0};
    int rc = a->is_url ? check_budget(a, job, &err) : PF_OK;

    for (uint32_t i = 0; !rc && i < job->n_images; i++)
        rc = picture_json(a, job, i, name, data, &err);
    if (rc) {
        json_free(doc);
        json_free(data);
        answer_error(a, &err);
        return;
    }
    json_set_z(doc, "id", job->id);
    json_set_int(doc, "created", (int64_t)time(NULL));
    json_set(doc, "data", data);
    json_set_real(doc, "peak_memory_mb", (double)job->report.peak_anon_bytes / MIB);
    json_set_real(doc, "inference_time_s", job->report.seconds);
    json_set(doc, "usage", usage_json());
    json_set_z(doc, "composition", job->composition);
    reply_json(a->req, 200, doc);
}

void draw_done(void *ctx, struct job *job)
{
    struct service *s = ctx;
    struct answer *a = job->owner;

    if (job->t_started_ns)
        metrics_observe(&s->metrics.waiting,
                        (double)(job->t_started_ns - job->t_accepted_ns) * 1e-9);
    switch (job->end) {
    case JOB_DRAWN:
        answer_drawn(a, job);
        break;
    case JOB_EXPIRED:
        reply_error(a->req, 504, "deadline", NULL,
                    "the generation did not end before its deadline and was cancelled");
        break;
    case JOB_FAILED:
        answer_error(a, &job->err);
        break;
    default:
        reply_error(a->req, 409, "cancelled", NULL, "the generation was cancelled");
        break;
    }
    mem_free(a);
}

/* ---------------------------------------------------------------------------------------------- events */

static const char *state_of(const struct job *job, enum job_event what)
{
    static const char *const ends[] = {
        [JOB_NOT_ENDED] = "running", [JOB_DRAWN] = "done",      [JOB_CANCELLED] = "cancelled",
        [JOB_GONE] = "cancelled",    [JOB_EXPIRED] = "expired", [JOB_FAILED] = "failed"};

    return what == JOB_EVENT_QUEUED    ? "queued"
           : what == JOB_EVENT_STARTED ? "running"
                                       : ends[job->end];
}

void draw_event(void *ctx, const struct job *job, enum job_event what)
{
    struct service *s = ctx;
    struct json *data = json_new_object();

    json_set_z(data, "id", job->id);
    json_set_z(data, "composition", job->composition);
    if (what == JOB_EVENT_STEP) {
        json_set_int(data, "step", job->i_step);
        json_set_int(data, "steps", job->n_steps);
        events_publish(s->events, "step", data);
        return;
    }
    json_set_z(data, "state", state_of(job, what));
    json_set_int(data, "n", job->n_images);
    json_set_int(data, "shared_with", job->n_shared ? job->n_shared - 1 : 0);
    events_publish(s->events, "job", data);
}
