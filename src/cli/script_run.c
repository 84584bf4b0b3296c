/*
 * The runner of scripts. The main thread reads lines, changes adapters and starts generations; each generation in the background
 * is a thread with a model object of its own and the view that was current when its line was run. Whoever finishes prints its
 * result, under the mutex. Must never lose a picture: a script that ends, also by an error, waits for what it started.
 */
#include "cli/script_run.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/proc.h"
#include "cli/command.h"
#include "cli/drawing.h"
#include "cli/interrupt.h"
#include "cli/script.h"
#include "cli/session.h"

#define N_RUNNING_MAX 64 /* generations at a time */

struct runner;

/* A model that nobody draws with. */
struct idle_model {
    struct pf_model *model;
    uint32_t n_threads;
};

/* One generation. Owned by its thread until is_done, then by the main thread. */
struct job {
    struct runner *runner;
    unsigned i_line;
    bool is_background, is_done; /* is_done: guarded by the runner's mu */
    pthread_t thread;
    uint32_t n_threads;
    struct drawing drawing;
};

struct runner {
    const struct out *o;
    const struct generate_args *args;
    struct session session;
    struct job *jobs[N_RUNNING_MAX]; /* in the background */
    size_t n_jobs;
    struct idle_model idle[N_RUNNING_MAX + 1];
    size_t n_idle;
    unsigned i_line;
    pthread_mutex_t mu; /* guards what follows, and printing */
    unsigned n_failed;
    bool is_interrupted;
};

/* ------------------------------------------------------------------------------------------------ results */

static struct json *result_new(unsigned i_line, const char *op)
{
    struct json *doc = json_new_object();

    json_set_int(doc, "line", i_line);
    json_set_z(doc, "op", op);
    return doc;
}

/* A line of the report: "12 unmerge     ...". Caller holds mu. */
static void say(const struct runner *r, unsigned i_line, const char *op, const char *text)
{
    char label[32];

    (void)snprintf(label, sizeof(label), "%u %s", i_line, op);
    out_field(r->o, label, "%s", text);
    (void)fflush(stdout); /* a failure shows at the end: out_finish */
}

/* Prints either form and frees both. */
static void result(struct runner *r, unsigned i_line, const char *op, struct json *doc,
                   struct strbuf *text)
{
    (void)pthread_mutex_lock(&r->mu);
    if (r->o->is_json) {
        if (out_json_line(r->o, doc) != EXIT_STATUS_OK)
            r->n_failed++;
    } else {
        say(r, i_line, op, strbuf_z(text));
        json_free(doc);
    }
    (void)pthread_mutex_unlock(&r->mu);
    strbuf_release(text);
}

/* Says what failed; a Ctrl-C is no failure, and is said once at the end. */
static void failed(struct runner *r, unsigned i_line, const char *op, int rc, pf_error *err)
{
    struct json *doc, *error;

    (void)pthread_mutex_lock(&r->mu);
    if (rc == PF_E_CANCELLED && interrupt_seen()) {
        r->is_interrupted = true;
    } else {
        r->n_failed++;
        if (r->o->is_json) {
            doc = result_new(i_line, op);
            error = json_new_object();
            json_set_z(error, "code", pf_error_name(rc));
            json_set(error, "message", json_new_string(str_of(err->msg)));
            json_set(doc, "error", error);
            (void)out_json_line(r->o, doc); /* the sentence below says the same */
        }
        (void)err_prefix(err, rc, "line %u: ", i_line);
        (void)out_fail(&(struct out){.command = r->o->command}, err);
    }
    (void)pthread_mutex_unlock(&r->mu);
}

static void report_change(struct runner *r, const char *op, const struct pf_change_report *c)
{
    struct json *doc = result_new(r->i_line, op);
    struct strbuf text;
    char size[16];

    json_set_z(doc, "composition", c->composition);
    json_set_z(doc, "way", c->way);
    json_set_real(doc, "ms", c->took_ms);
    json_set_int(doc, "peak_anon_bytes", (int64_t)c->peak_anon_bytes);
    change_json(doc, c);
    strbuf_init(&text);
    strbuf_addf(&text, "%s, effect after %.2f ms, all %.2f ms, %s, composition %s", c->way,
                c->effect_ms, c->took_ms, out_mib(c->peak_anon_bytes, size), c->composition);
    if (c->n_tensors_changed)
        strbuf_addf(&text, ", survival %.4f", c->fidelity.survival);
    change_warn(r->o, c);
    result(r, r->i_line, op, doc, &text);
}

/* ---------------------------------------------------------------------------------------------- generating */

static bool keep_on(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    (void)ctx, (void)what, (void)done, (void)total;
    return !interrupt_seen();
}

static void draw(struct job *job)
{
    struct runner *r = job->runner;
    struct drawing *d = &job->drawing;
    pf_error err = {0};
    struct json *doc;
    struct strbuf text;
    char size[16], read[16];
    int rc = drawing_run(d, keep_on, NULL, &err);

    if (rc) {
        failed(r, job->i_line, "generate", rc, &err);
        return;
    }
    pf_engine_served(r->session.engine, d->view);
    doc = result_new(job->i_line, "generate");
    json_set_bool(doc, "background", job->is_background);
    drawing_json(doc, d);
    strbuf_init(&text);
    strbuf_addf(&text, "%s, %s, %.2f s, %s, %s read, composition %s", d->output, d->way,
                d->ms * 1e-3, out_mib(d->report.peak_anon_bytes, size),
                out_bytes((double)d->report.n_bytes_read, read), pf_view_digest(d->view));
    result(r, job->i_line, "generate", doc, &text);
}

static void *draw_in_background(void *arg)
{
    struct job *job = arg;

    draw(job);
    (void)pthread_mutex_lock(&job->runner->mu);
    job->is_done = true;
    (void)pthread_mutex_unlock(&job->runner->mu);
    return NULL;
}

/* The model goes back to the idle ones, the rest is freed. */
static void job_free(struct job *job)
{
    struct runner *r = job->runner;

    if (job->drawing.model)
        r->idle[r->n_idle++] = (struct idle_model){job->drawing.model, job->n_threads};
    drawing_release(&job->drawing);
    mem_free(job);
}

/* Joins the generations that are done; all of them, when is_waiting. */
static size_t reap(struct runner *r, bool is_waiting)
{
    size_t n_left = 0, n_reaped = 0;

    for (size_t i = 0; i < r->n_jobs; i++) {
        struct job *job = r->jobs[i];
        bool is_done;

        (void)pthread_mutex_lock(&r->mu);
        is_done = job->is_done;
        (void)pthread_mutex_unlock(&r->mu);
        if (!is_done && !is_waiting) {
            r->jobs[n_left++] = job;
            continue;
        }
        (void)pthread_join(job->thread, NULL);
        job_free(job);
        n_reaped++;
    }
    r->n_jobs = n_left;
    return n_reaped;
}

static int take_model(struct runner *r, uint32_t n_threads, struct pf_model **out, pf_error *err)
{
    struct pf_model_opts opts = {.size = sizeof(opts), .n_threads = n_threads};

    for (size_t i = 0; i < r->n_idle; i++)
        if (r->idle[i].n_threads == n_threads) {
            *out = r->idle[i].model;
            r->idle[i] = r->idle[--r->n_idle];
            return PF_OK;
        }
    if (r->n_idle) { /* of another thread count: not kept, so that the idle ones stay few */
        pf_model_close(r->idle[--r->n_idle].model);
    }
    return pf_model_open(r->session.ckpt, &opts, out, err);
}

/* The current view, or one of the line's own adapters. */
static int take_view(struct runner *r, const struct picture_args *picture, struct pf_view **out,
                     pf_error *err)
{
    struct pf_change_opts change = {.size = sizeof(change),
                                    .allow_unmatched = picture->allow_unmatched,
                                    .merge_dtype = merge_dtype_by_name(picture->merge_dtype)};
    struct session *s = &r->session;
    struct lora_spec *specs = NULL;
    struct pf_engine_lora *loras = NULL;
    size_t n = picture->loras.n;
    int rc;

    if (!n && (picture->merge_dtype || picture->allow_unmatched))
        return err_set(err, PF_E_INVALID,
                       "'--%s' of a 'generate' line goes with its own --lora: say it on 'set'",
                       picture->merge_dtype ? "merge-dtype" : "allow-unmatched");
    if (!n) {
        *out = pf_engine_view(s->engine);
        return PF_OK;
    }
    rc = specs_parse(&picture->loras, &specs, err);
    if (!rc)
        rc = session_loras(s, specs, n, true, &loras, err);
    if (!rc)
        rc = pf_engine_view_of(s->engine, loras, n, &change, out, err);
    mem_free(loras);
    specs_free(specs, n);
    return rc;
}

static int check_line(const struct generate_args *args, pf_error *err)
{
    const char *wrong = picture_check(&args->picture);

    if (args->common.json || args->common.quiet || args->common.verbose || args->common.help)
        return err_set(err, PF_E_INVALID,
                       "a 'generate' line takes no --json, --quiet, --verbose or --help");
    return wrong ? err_set(err, PF_E_INVALID, "%s", wrong) : PF_OK;
}

static int job_new(struct runner *r, struct script_line *line, struct job **out, pf_error *err)
{
    struct generate_args args = {0};
    struct job *job = mem_calloc(1, sizeof(*job));
    struct pf_model *model = NULL;
    int rc = job ? args_parse(&script_generate, (int)line->n_words, line->words, &args, err)
                 : err_nomem(err, sizeof(*job), "a generation");

    if (!rc)
        rc = check_line(&args, err);
    if (!rc) {
        job->runner = r;
        job->i_line = r->i_line;
        job->is_background = line->is_background;
        job->n_threads = (uint32_t)(args.picture.threads.is_set ? args.picture.threads
                                                                : r->args->picture.threads)
                             .v;
        rc = take_model(r, job->n_threads, &model, err);
    }
    if (!rc) {
        job->drawing.model = model;
        rc = drawing_prepare(&job->drawing, model, &args.picture, err);
        if (!rc)
            rc = take_view(r, &args.picture, &job->drawing.view, err);
    }
    args_release(&script_generate, &args);
    if (!rc) {
        job->drawing.way = pf_engine_way(r->session.engine, job->drawing.view);
        *out = job;
    } else if (model) {
        job_free(job);
    } else {
        mem_free(job);
    }
    return rc;
}

static int run_generate(struct runner *r, struct script_line *line, pf_error *err)
{
    struct job *job = NULL;
    int rc, sys_errno;

    if (line->is_background && r->n_jobs == N_RUNNING_MAX)
        return err_set(err, PF_E_STATE, "%d generations are running: 'wait' first", N_RUNNING_MAX);
    rc = job_new(r, line, &job, err);
    if (rc)
        return rc;
    if (!line->is_background) {
        draw(job);
        job_free(job);
        return PF_OK;
    }
    sys_errno = pthread_create(&job->thread, NULL, draw_in_background, job);
    if (sys_errno) {
        job_free(job);
        return err_sys(err, sys_errno, "cannot start a generation in the background");
    }
    r->jobs[r->n_jobs++] = job;
    return PF_OK;
}

/* ------------------------------------------------------------------------------------------------- changes */

static int set(struct runner *r, const struct lora_spec *specs, size_t n, const char *targets,
               const struct pf_change_opts *change, bool by_nickname, pf_error *err)
{
    struct pf_change_report report;
    struct pf_engine_lora *loras = NULL;
    int rc = session_loras(&r->session, specs, n, by_nickname, &loras, err);

    if (!rc)
        rc = pf_engine_set(r->session.engine, loras, n, targets, change, &report, err);
    mem_free(loras);
    if (!rc)
        report_change(r, "set", &report);
    return rc;
}

static int run_set(struct runner *r, const struct script_line *line, pf_error *err)
{
    struct pf_change_opts change = {.size = sizeof(change),
                                    .allow_unmatched = line->allow_unmatched,
                                    .merge_dtype = merge_dtype_by_name(line->merge_dtype),
                                    .way = way_by_name(line->way)};

    return set(r, line->specs, line->n_specs, line->target, &change, true, err);
}

static int run_change(struct runner *r, const struct script_line *line, pf_error *err)
{
    struct pf_engine *engine = r->session.engine;
    struct pf_change_report report;
    int rc =
        line->op == SCRIPT_MERGE ? pf_engine_merge(engine, line->target, line->factor, &report, err)
        : line->op == SCRIPT_UNMERGE ? pf_engine_unmerge(engine, line->target, &report, err)
                                     : pf_engine_deactivate(engine, line->target, &report, err);

    if (!rc)
        report_change(r, script_op_name(line->op), &report);
    return rc;
}

static int run_load(struct runner *r, const struct script_line *line, pf_error *err)
{
    uint64_t t0 = clock_ns();
    const char *name = line->name;
    struct json *doc;
    struct strbuf text;
    double ms;
    int rc = line->op == SCRIPT_LOAD ? session_load(&r->session, line->path, line->name, &name, err)
                                     : session_unload(&r->session, line->name, err);

    if (rc)
        return rc;
    ms = (double)(clock_ns() - t0) * 1e-6;
    doc = result_new(r->i_line, script_op_name(line->op));
    json_set_z(doc, "name", name);
    json_set_real(doc, "ms", ms);
    strbuf_init(&text);
    strbuf_addf(&text, "%s, %.2f ms", name, ms);
    result(r, r->i_line, script_op_name(line->op), doc, &text);
    return PF_OK;
}

/* --------------------------------------------------------------------------------------- wait, settle, status */

/* With Ctrl-C the generations end by themselves. */
static int run_wait(struct runner *r, const struct script_line *line, pf_error *err)
{
    uint64_t t0 = clock_ns();
    size_t n = line->op == SCRIPT_WAIT ? reap(r, true) : 0;
    int rc = line->op == SCRIPT_WAIT ? PF_OK : session_settle(&r->session, err);
    struct json *doc;
    struct strbuf text;
    double ms = (double)(clock_ns() - t0) * 1e-6;

    if (rc)
        return rc;
    doc = result_new(r->i_line, script_op_name(line->op));
    json_set_real(doc, "ms", ms);
    strbuf_init(&text);
    if (line->op == SCRIPT_WAIT) {
        json_set_int(doc, "generations", (int64_t)n);
        strbuf_addf(&text, "%zu generation%s, ", n, n == 1 ? "" : "s");
    }
    strbuf_addf(&text, "%.0f ms", ms);
    result(r, r->i_line, script_op_name(line->op), doc, &text);
    return PF_OK;
}

/* Collects under the engine's lock: builds texts, calls nothing of the engine. */
struct listing {
    struct json *adapters, *active;
    struct strbuf text;
};

static void list_adapter(void *ctx, const char *nickname, const struct pf_adapter *adapter)
{
    struct listing *list = ctx;
    struct pf_adapter_info info;
    struct json *it = json_new_object();

    pf_adapter_info(adapter, &info);
    json_set_z(it, "name", nickname);
    json_set(it, "path", json_new_string(str_of(info.path)));
    json_add(list->adapters, it);
}

static void list_active(void *ctx, const struct pf_active_info *a)
{
    struct listing *list = ctx;
    struct json *it = json_new_object();

    json_set_z(it, "name", a->nickname);
    json_set(it, "path", json_new_string(str_of(a->path)));
    json_set_z(it, "target", a->component);
    json_set_real(it, "strength", a->strength);
    json_set_bool(it, "merged", a->is_merged);
    json_add(list->active, it);
    strbuf_addf(&list->text, "%s%s:%g on %s%s", list->text.n ? ", " : "", a->nickname, a->strength,
                a->component, a->is_merged ? "" : " (not merged)");
}

static struct json *status_json(const struct runner *r, const struct pf_engine_status *status,
                                uint64_t n_cache_bytes, struct listing *list)
{
    struct json *doc = result_new(r->i_line, "status");

    json_set_z(doc, "composition", status->composition);
    json_set(doc, "adapters", list->adapters);
    json_set(doc, "active", list->active);
    json_set_int(doc, "running", (int64_t)r->n_jobs);
    json_set_bool(doc, "building", status->is_building);
    json_set_int(doc, "built_bytes", (int64_t)status->n_built_bytes);
    json_set_int(doc, "build_bytes", (int64_t)status->n_build_bytes);
    json_set_int(doc, "cache_bytes", (int64_t)n_cache_bytes);
    json_set_int(doc, "cache_budget_bytes", (int64_t)status->cache_budget_bytes);
    json_set_int(doc, "anon_bytes", (int64_t)status->anon_bytes);
    json_set_int(doc, "changes", (int64_t)status->n_changes);
    json_set_int(doc, "builds", (int64_t)status->n_builds);
    json_set_int(doc, "adoptions", (int64_t)status->n_adoptions);
    json_set(doc, "plan", session_plan_json(&r->session));
    return doc;
}

static int run_status(struct runner *r)
{
    struct pf_engine *engine = r->session.engine;
    struct listing list = {json_new_array(), json_new_array(), {0}};
    struct pf_engine_status status;
    struct pf_view *view = pf_engine_view(engine);
    const char *way = pf_engine_way(engine, view);
    uint64_t n_cache_bytes;
    struct json *doc;
    struct strbuf text;
    char a[16], b[16];

    pf_view_release(view);
    strbuf_init(&list.text);
    pf_engine_each_adapter(engine, list_adapter, &list);
    pf_engine_each_active(engine, list_active, &list);
    pf_engine_status(engine, &status);
    n_cache_bytes = pf_engine_cache_bytes(engine);
    doc = status_json(r, &status, n_cache_bytes, &list);
    json_set_z(doc, "way", way);
    strbuf_init(&text);
    strbuf_addf(&text, "%s, %zu running, %s now, ", way, r->n_jobs, out_mib(status.anon_bytes, a));
    if (*status.cache_dir)
        strbuf_addf(&text, "%s in the cache%s", out_bytes((double)n_cache_bytes, b),
                    status.is_building ? ", building" : "");
    else
        strbuf_adds(&text, status.cache_note);
    strbuf_addf(&text, ": %s; plan: %s; composition %s",
                list.text.n ? strbuf_z(&list.text) : "no adapter", status.plan_note,
                status.composition);
    strbuf_release(&list.text);
    result(r, r->i_line, "status", doc, &text);
    return PF_OK;
}

/* --------------------------------------------------------------------------------------------------- lines */

static int run_op(struct runner *r, struct script_line *line, pf_error *err)
{
    switch (line->op) {
    case SCRIPT_NOTHING:
        return PF_OK;
    case SCRIPT_LOAD:
    case SCRIPT_UNLOAD:
        return run_load(r, line, err);
    case SCRIPT_SET:
        return run_set(r, line, err);
    case SCRIPT_MERGE:
    case SCRIPT_UNMERGE:
    case SCRIPT_DEACTIVATE:
        return run_change(r, line, err);
    case SCRIPT_GENERATE:
        return run_generate(r, line, err);
    case SCRIPT_WAIT:
    case SCRIPT_SETTLE:
        return run_wait(r, line, err);
    case SCRIPT_STATUS:
        return run_status(r);
    }
    return PF_OK;
}

static void run_line(struct runner *r, struct str text)
{
    struct script_line line = {0};
    pf_error err = {0};
    int rc = script_parse(text, &line, &err);

    if (!rc)
        rc = run_op(r, &line, &err);
    if (rc)
        failed(r, r->i_line, line.op ? script_op_name(line.op) : NULL, rc, &err);
    script_line_release(&line);
    (void)reap(r, false);
}

static bool is_over(struct runner *r)
{
    bool is;

    (void)pthread_mutex_lock(&r->mu);
    is = r->is_interrupted || (r->n_failed && !r->args->keep_going);
    (void)pthread_mutex_unlock(&r->mu);
    return is || interrupt_seen();
}

/* One line without its end into b, at most one character longer than allowed. false: there is none. */
static bool read_line(FILE *file, struct strbuf *b)
{
    int c;

    strbuf_clear(b);
    interrupt_end(); /* nothing is half done here, and a terminal may wait forever */
    while ((c = getc(file)) != EOF && c != '\n') {
        char ch = (char)c;

        if (b->n <= SCRIPT_LINE_MAX)
            strbuf_add(b, &ch, 1);
    }
    interrupt_begin();
    return c != EOF || b->n;
}

static void run_lines(struct runner *r, FILE *file)
{
    const char *name = r->args->script;
    struct strbuf line;
    pf_error err = {0};

    strbuf_init(&line);
    while (!is_over(r) && read_line(file, &line)) {
        r->i_line++;
        if (strbuf_ok(&line)) {
            run_line(r, (struct str){strbuf_z(&line), line.n});
        } else {
            failed(r, r->i_line, NULL, err_nomem(&err, line.n, "a line"), &err);
            break;
        }
    }
    if (ferror(file)) {
        r->i_line++;
        failed(r, r->i_line, NULL, err_sys(&err, errno, "cannot read script '%s'", name), &err);
    }
    strbuf_release(&line);
}

/* --lora of the command line: the composition that the script begins with, as "line 0". */
static int begin(struct runner *r, const struct lora_spec *specs, pf_error *err)
{
    const struct picture_args *picture = &r->args->picture;
    struct pf_change_opts change = {.size = sizeof(change),
                                    .allow_unmatched = picture->allow_unmatched,
                                    .merge_dtype = merge_dtype_by_name(picture->merge_dtype)};
    struct session_opts opts = {.model = r->args->model,
                                .serving = &r->args->serving,
                                .n_threads = (uint32_t)picture->threads.v};
    struct json *doc;
    int rc = session_open(&r->session, &opts, err);

    if (rc)
        return rc;
    if (r->o->is_json) {
        doc = result_new(0, "open");
        json_set(doc, "plan", session_plan_json(&r->session));
        (void)out_json_line(r->o, doc); /* a failed write shows at the end: out_finish */
    }
    return picture->loras.n ? set(r, specs, picture->loras.n, NULL, &change, false, err) : PF_OK;
}

static void runner_release(struct runner *r)
{
    for (size_t i = 0; i < r->n_idle; i++)
        pf_model_close(r->idle[i].model);
    session_close(&r->session);
    (void)pthread_mutex_destroy(&r->mu);
}

static int finish(struct runner *r)
{
    struct json *doc, *error;

    if (r->is_interrupted || interrupt_seen()) {
        if (r->o->is_json) {
            doc = result_new(r->i_line, NULL);
            error = json_new_object();
            json_set_z(error, "code", "cancelled");
            json_set_z(error, "message", "interrupted");
            json_set(doc, "error", error);
            (void)out_json_line(r->o, doc);
        }
        return out_interrupted(&(struct out){.command = r->o->command}, "line %u: interrupted",
                               r->i_line);
    }
    return r->n_failed ? EXIT_STATUS_FAILED : EXIT_STATUS_OK;
}

int script_run(const struct out *o, const struct generate_args *args)
{
    struct runner r = {.o = o, .args = args};
    bool is_stdin = !strcmp(args->script, "-");
    struct lora_spec *specs = NULL;
    FILE *file = NULL;
    pf_error err = {0};
    int rc = specs_parse(&args->picture.loras, &specs, &err), status;

    if (rc)
        return rc == PF_E_INVALID ? out_usage(o, "%s", err.msg) : out_fail(o, &err);
    if (pthread_mutex_init(&r.mu, NULL))
        rc = err_nomem(&err, 0, "a mutex");
    file = is_stdin ? stdin : fopen(args->script, "re");
    if (!rc && !file)
        rc = err_sys(&err, errno, "cannot open script '%s'", args->script);
    if (!rc)
        rc = begin(&r, specs, &err);
    if (!rc) {
        interrupt_begin();
        run_lines(&r, file);
        (void)reap(&r, true);
        interrupt_end();
    }
    status = rc ? out_fail(o, &err) : finish(&r);
    if (file && !is_stdin)
        (void)fclose(file); /* only read */
    specs_free(specs, args->picture.loras.n);
    runner_release(&r);
    return status;
}
