/*
 * pf_merge: a checkpoint with a composition merged in, written beside the base and renamed when all of it is durable. The order of
 * things: refuse what must not be done, plan, enter OUT.partial, write, publish. Called by the command line and by programs.
 */
#include "export/export_int.h"

#include "base/opts.h"
#include "base/proc.h"

struct waiting {
    const struct pf_merge_opts *opts;
};

static bool wait_for_others(void *ctx)
{
    const struct waiting *w = ctx;
    return !w->opts->progress ||
           w->opts->progress(w->opts->progress_ctx, "waiting for another process", 0, 0);
}

static int check_arguments(const struct pf_checkpoint *ckpt, const struct pf_composition *comp,
                           const char *out_path, const struct pf_merge_opts *opts, pf_error *err)
{
    if (!out_path || !*out_path)
        return err_set(err, PF_E_INVALID, "no output path");
    if (comp && comp->ckpt != ckpt)
        return err_set(err, PF_E_INVALID, "the composition belongs to another checkpoint, '%s'",
                       comp->ckpt->path);
    if (opts->n_parts > EXPORT_PARTS_MAX)
        return err_set(err, PF_E_INVALID, "%u parts asked for, %u is the most", opts->n_parts,
                       EXPORT_PARTS_MAX);
    if (opts->i_part >= (opts->n_parts ? opts->n_parts : 1))
        return err_set(err, PF_E_INVALID, "part %u of %u parts, counted from 0", opts->i_part,
                       opts->n_parts);
    return PF_OK;
}

/* Writes this part, and publishes when it was the last. */
static int write_output(struct export_plan *plan, struct stage *s, const struct pf_merge_opts *opts,
                        struct pf_merge_report *report, pf_error *err)
{
    struct waiting waiting = {opts};
    struct work_result done = {0};
    int rc = stage_enter(s, plan, wait_for_others, &waiting, err);
    if (rc)
        return rc;
    rc = work_run(plan, s, opts, &done, err);
    report->n_bytes_written = done.n_bytes_written;
    report->is_resumed = done.n_bytes_resumed > 0;
    if (rc == PF_E_NOSPACE)
        err_append(err, "; what is written is kept in '%s': free space and start again", s->dir);
    return rc ? rc : stage_publish(s, wait_for_others, &waiting, &report->is_complete, err);
}

static int merge(struct pf_checkpoint *ckpt, struct pf_composition *comp, const char *out_path,
                 const struct pf_merge_opts *opts, struct pf_merge_report *report, pf_error *err)
{
    const uint32_t n_parts = opts->n_parts ? opts->n_parts : 1;
    const bool is_file = str_eqz(str_of(ckpt->layout), "file");
    struct export_plan plan = {0};
    struct stage s;
    int rc = merge_kernel_init(NULL, err);
    if (!rc)
        rc = stage_init(&s, out_path, opts->force, err);
    if (rc)
        return rc;
    rc = stage_check_output(&s, ckpt, comp, is_file, err);
    if (!rc) {
        rc = plan_build(ckpt, comp, opts->i_part, n_parts, &plan, err);
        if (!rc)
            rc = write_output(&plan, &s, opts, report, err);
    } else if (rc == PF_E_EXISTS && !opts->force && file_kind(s.dir) == FILE_DIRECTORY &&
               !plan_build(ckpt, comp, opts->i_part, n_parts, &plan, NULL) &&
               stage_was_published(&s, &plan)) {
        /* Ours: a killed run of this very merge got as far as the rename. */
        stage_tidy(&s);
        report->is_resumed = report->is_complete = true;
        rc = PF_OK;
    }
    export_plan_release(&plan);
    export_stage_release(&s);
    return rc;
}

int pf_merge(struct pf_checkpoint *ckpt, struct pf_composition *comp, const char *out_path,
             const struct pf_merge_opts *opts, struct pf_merge_report *out_report, pf_error *err)
{
    struct pf_merge_opts o;
    struct pf_merge_report report = {0};
    struct peak *peak = NULL;
    const uint64_t t0 = clock_ns(), n_read = proc_read_bytes();
    opts_read(&o, sizeof o, opts);
    int rc = check_arguments(ckpt, comp, out_path, &o, err);
    if (rc)
        return rc;
    rc = peak_start(&peak, err);
    if (!rc)
        rc = merge(ckpt, comp, out_path, &o, &report, err);
    report.peak_anon_bytes = peak_stop(peak);
    report.n_bytes_read = proc_read_bytes() - n_read;
    report.seconds = (double)(clock_ns() - t0) * 1e-9;
    if (!rc && out_report)
        *out_report = report;
    return rc;
}
