/*
 * POST /v1/images/generations: OpenAI's fields -> a job with a view that is fixed now; DELETE of a job; kept pictures.
 */
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/mem.h"
#include "base/proc.h"
#include "server/draw.h"
#include "server/lora_request.h"
#include "server/reply.h"
#include "server/route.h"
#include "server/service.h"

#define N_CLASSES_LISTED 100

/* What can be wrong with a generation, in the words of the answer. */
struct refusal {
    int status;
    const char *code;
    char param[64];
    pf_error err;
};

static bool is_null(const struct json *v)
{
    return json_typeof(v) == JSON_T_NULL; /* absent too */
}

static int check_size(const struct service *s, const struct json *size, struct refusal *no)
{
    char own[32];

    (void)snprintf(own, sizeof(own), "%ux%u", s->model.width, s->model.height);
    if (is_null(size) || str_eqz(json_str(size), own) || str_eqz(json_str(size), "auto"))
        return PF_OK;
    no->status = 422;
    no->code = "size_not_supported";
    (void)snprintf(no->param, sizeof(no->param), "size");
    return err_set(&no->err, PF_E_INVALID, "'size' is '%.40s'; this model draws %s, and no other",
                   json_str(size).p, own);
}

/* Near matches are in the message already; a list helps whoever was not near. */
static void list_classes(const struct service *s, pf_error *err)
{
    const char *name;

    if (s->model.n_classes > N_CLASSES_LISTED)
        return;
    err_append(err, "; the classes are ");
    for (uint32_t i = 0; (name = pf_model_class_name(s->models[0], i)); i++)
        err_append(err, "%s%.40s", i ? ", " : "", name);
}

static int read_fields(const struct service *s, const struct json *body, struct job *job,
                       struct refusal *no)
{
    const struct json *n = json_get(body, "n"), *steps = json_get(body, "num_inference_steps"),
                      *guidance = json_get(body, "guidance_scale");
    int rc = check_size(s, json_get(body, "size"), no);

    if (rc)
        return rc;
    job->n_images = is_null(n) ? 1 : (uint32_t)json_int(n);
    job->n_steps = is_null(steps) ? s->model.default_steps : (uint32_t)json_int(steps);
    job->guidance = is_null(guidance) ? s->model.default_guidance : json_number(guidance);
    job->seed = (uint64_t)json_int(json_get(body, "seed"));
    rc = pf_model_find_class(s->models[0], json_z(json_get(body, "prompt")), &job->i_class,
                             &no->err);
    if (rc) {
        no->status = 422;
        no->code = "no_class_for_prompt";
        list_classes(s, &no->err);
        (void)snprintf(no->param, sizeof(no->param), "prompt");
    }
    return rc;
}

static int load_own(struct service *s, struct lora_request *lr, size_t i, struct book_undo *undo,
                    struct refusal *no)
{
    struct pf_engine_lora *l = &lr->loras[i];
    char *nickname = NULL;
    int rc = book_load_passing(s->book, l->nickname, lr->paths[i], undo, &nickname, &no->status,
                               &no->err);

    if (rc)
        return rc;
    l->nickname = arena_strndup(&lr->arena, nickname, strlen(nickname));
    if (!l->nickname) {
        no->status = 503;
        rc = err_nomem(&no->err, strlen(nickname), "a nickname");
    }
    mem_free(nickname);
    return rc;
}

/* A composition for this request alone. Its adapters stay loaded when it fails later: nothing acts by that. */
static int own_view(struct service *s, const struct json *loras, struct job *job,
                    struct refusal *no)
{
    struct pf_change_opts opts = {.size = sizeof(opts),
                                  .allow_unmatched = s->opts->allow_unmatched};
    struct lora_request lr;
    struct book_undo undo = {0};
    bool has_paths = false;
    int rc = lora_request_parse_own(loras, s->opts->merge_dtype, &lr, &no->err);

    no->status = 422;
    (void)snprintf(no->param, sizeof(no->param), "%s", lr.param[0] ? lr.param : "loras");
    for (size_t i = 0; !rc && i < lr.n; i++)
        has_paths = has_paths || lr.paths[i];
    if (has_paths)
        book_lock_paths(s->book);
    for (size_t i = 0; !rc && i < lr.n; i++) {
        rc = load_own(s, &lr, i, &undo, no);
        if (rc) {
            (void)snprintf(no->param, sizeof(no->param), "loras[%zu]", i);
            no->code = no->status == 403 ? "path_not_allowed" : pf_error_name(rc);
        }
    }
    opts.merge_dtype = lr.merge_dtype;
    if (!rc) {
        rc = pf_engine_view_of(s->engine, lr.loras, lr.n, &opts, &job->view, &no->err);
        no->status = rc ? reply_status_of(rc) : 0;
    }
    if (rc)
        book_undo(s->book, &undo);
    else
        no->param[0] = '\0';
    if (has_paths)
        book_unlock_paths(s->book);
    book_undo_release(&undo);
    lora_request_release(&lr);
    return rc;
}

static void refuse(struct http_request *req, const struct refusal *no)
{
    reply_error(req, no->status ? no->status : reply_status_of(no->err.code),
                no->code ? no->code : pf_error_name(no->err.code), no->param, no->err.msg);
}

static struct answer *answer_new(struct service *s, struct http_request *req,
                                 const struct json *body)
{
    struct answer *a = mem_calloc(1, sizeof(*a));
    const char *host = http_header(req, "Host");
    const char *scheme = http_header(req, "X-Forwarded-Proto"); /* of a proxy in front of us */

    if (!a)
        return NULL;
    a->s = s;
    a->req = req;
    a->is_url = str_eqz(json_str(json_get(body, "response_format")), "url");
    (void)snprintf(a->url_base, sizeof(a->url_base), "%s://%.300s",
                   scheme && !strcasecmp(scheme, "https") ? "https" : "http",
                   host ? host : "localhost");
    return a;
}

static void submit(struct service *s, struct http_request *req, struct job *job)
{
    struct http_response r = {0};
    struct answer *a = job->owner;
    pf_error err = {0};

    job->out_i_job = &req->i_job;
    job->is_gone = &req->is_gone;
    if (s->opts->generation_s)
        job->t_deadline_ns = clock_ns() + (uint64_t)s->opts->generation_s * 1000000000;
    if (!queue_submit(s->queue, job, &err))
        return; /* answered by now, or later: neither job nor req may be touched */
    reply_fill_error(&r, 429, "queue_full", NULL, err.msg);
    reply_retry_after(&r, queue_retry_after_s(s->queue));
    job_free(job);
    mem_free(a);
    http_reply(req, &r);
}

void api_generate(struct service *s, struct http_request *req, const struct json *body)
{
    const struct json *loras = json_get(body, "loras");
    struct job *job = job_new();
    struct refusal no = {0};
    int rc = job ? read_fields(s, body, job, &no) : err_nomem(&no.err, sizeof(*job), "a job");

    if (!rc && loras)
        rc = own_view(s, loras, job, &no);
    else if (!rc)
        job->view = pf_engine_view(s->engine); /* what is current now, whatever comes */
    if (!rc && !(job->owner = answer_new(s, req, body)))
        rc = err_nomem(&no.err, sizeof(struct answer), "an answer");
    if (rc) {
        refuse(req, &no);
        job_free(job);
        return;
    }
    (void)snprintf(job->id, sizeof(job->id), "%s", req->id);
    (void)snprintf(job->composition, sizeof(job->composition), "%s", pf_view_digest(job->view));
    submit(s, req, job);
}

void api_delete_job(struct service *s, struct http_request *req, const struct json *body)
{
    char id[HTTP_ID_MAX + 1];
    struct json *doc;
    size_t n = 0;

    (void)body;
    if (route_param(req, id, sizeof(id)))
        n = queue_cancel_id(s->queue, id);
    if (!n) {
        reply_error(req, 404, "job_not_found", "id",
                    "no generation with this id waits or runs; it may have ended");
        return;
    }
    doc = json_new_object();
    json_set_z(doc, "status", "ok");
    json_set_z(doc, "id", id);
    json_set_int(doc, "jobs_cancelled", (int64_t)n);
    reply_json(req, 200, doc);
}

void api_picture(struct service *s, struct http_request *req, const struct json *body)
{
    struct http_response r = {.status = 200, .content_type = "image/png"};
    char name[PICTURE_NAME_BYTES];
    pf_error err = {0};

    (void)body;
    strbuf_init(&r.body);
    if (!route_param(req, name, sizeof(name)))
        (void)err_set(&err, PF_E_NOTFOUND, "there is no such picture, or no longer");
    else
        (void)pictures_read(s->pictures, name, &r.body, &err);
    if (err.code) {
        http_response_release(&r);
        reply_pf_error(req, "name", &err);
        return;
    }
    http_response_header(&r, "Cache-Control", "private, max-age=3600, immutable");
    http_reply(req, &r);
}
