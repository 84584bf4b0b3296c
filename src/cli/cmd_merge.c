/*
 * `pageflip merge`: writes a checkpoint with the adapters merged in. All care about durability and about what stands under
 * the final name is the library's; here are the options, the bar, and the report.
 */
#include "cli/command.h"
#include "cli/launcher.h"
#include "cli/merged_already.h"
#include "cli/progress.h"
#include "cli/setup.h"

#include <string.h>

struct merge_args {
    struct common_args common;
    const char *model, *merge_dtype, *output;
    struct arg_list loras;
    bool allow_unmatched, force;
    struct arg_part part;
    struct arg_int threads;
};

static const struct opt opts[] = {
    {"model", 'm', OPT_MODEL, "M",
     "checkpoint: a .safetensors file, an index, a directory, or org/name; "
     "the bundled model unless said",
     offsetof(struct merge_args, model), NULL, 0, 0, false},
    {"lora", 'l', OPT_LORA, "L",
     "adapter: PATH[:STRENGTH][,alpha=A][,target=COMPONENT], or the name of a "
     "bundled one; may be repeated",
     offsetof(struct merge_args, loras), NULL, 0, 0, false},
    {"output", 'o', OPT_FILE, "OUT",
     "where to write, in the layout of the model: a file, or a directory",
     offsetof(struct merge_args, output), NULL, 0, 0, true},
    {"force", 'f', OPT_FLAG, NULL, "replace OUT if it exists", offsetof(struct merge_args, force),
     NULL, 0, 0, false},
    {"allow-unmatched", 0, OPT_FLAG, NULL, "leave out keys that match no tensor of the model",
     offsetof(struct merge_args, allow_unmatched), NULL, 0, 0, false},
    {"merge-dtype", 0, OPT_CHOICE, "D", "dtype of merged tensors: base (the default) or f32",
     offsetof(struct merge_args, merge_dtype), "base|f32", 0, 0, false},
    {"part", 'p', OPT_PART, "I/N",
     "write share I of N (1/4 to 4/4) and let other processes write theirs; auto: the share that "
     "mpirun, srun or an indexed job gives",
     offsetof(struct merge_args, part), NULL, 0, 0, false},
    {"threads", 't', OPT_INT, "N", "threads; one per usable CPU unless said",
     offsetof(struct merge_args, threads), NULL, 1, 256, false},
};

static int report(const struct out *o, const struct setup *s, const struct merge_args *args,
                  const struct arg_part *part, const struct pf_merge_report *r)
{
    struct json *doc;
    char a[16], b[16], c[16];

    if (o->is_json) {
        doc = json_new_object();
        setup_json(doc, s);
        json_set(doc, "output", json_new_string(str_of(args->output)));
        if (part->n) {
            json_set_int(doc, "part", part->i);
            json_set_int(doc, "parts", part->n);
        }
        json_set_bool(doc, "complete", r->is_complete);
        json_set_bool(doc, "resumed", r->is_resumed);
        json_set_int(doc, "bytes_read", (int64_t)r->n_bytes_read);
        json_set_int(doc, "bytes_written", (int64_t)r->n_bytes_written);
        json_set_int(doc, "peak_anon_bytes", (int64_t)r->peak_anon_bytes);
        json_set_real(doc, "seconds", r->seconds);
        return out_json(o, doc);
    }
    setup_print(o, s);
    if (r->is_complete)
        out_field(o, "output", "%s%s", args->output, r->is_resumed ? " (continued)" : "");
    else
        out_field(o, "output", "part %u of %u is written; '%s' appears when the other parts are",
                  part->i, part->n, args->output);
    out_field(o, "written", "%s in %.2f s (%s/s), %s read",
              out_bytes((double)r->n_bytes_written, a), r->seconds,
              out_bytes(r->seconds > 0 ? (double)r->n_bytes_written / r->seconds : 0, b),
              out_bytes((double)r->n_bytes_read, c));
    out_field(o, "memory", "%s of anonymous memory at most", out_mib(r->peak_anon_bytes, a));
    return EXIT_STATUS_OK;
}

static int failed(const struct out *o, int rc, bool is_usage, const char *output, pf_error *err)
{
    if (is_usage)
        return out_usage(o, "%s", err->msg);
    if (rc == PF_E_CANCELLED)
        return out_interrupted(
            o, "interrupted: nothing new stands under '%s'; the same command continues", output);
    if (rc == PF_E_EXISTS && strstr(err->msg, "forced"))
        err_append(err, " (--force)");
    setup_hint(err);
    return out_fail(o, err);
}

/* Writes, or finds that a process of another part has published everything while this one was starting. */
static int merge(const struct setup *s, const struct merge_args *args, const struct arg_part *part,
                 struct progress *bar, struct pf_merge_report *out_merged, pf_error *err)
{
    struct pf_merge_opts opts_merge = {.size = sizeof(opts_merge),
                                       .force = args->force,
                                       .n_threads = (uint32_t)args->threads.v,
                                       .i_part = part->n ? part->i - 1 : 0,
                                       .n_parts = part->n,
                                       .progress = progress_tick,
                                       .progress_ctx = bar};
    int rc;

    /* Before a forced merge too: it would begin anew what the others have just finished. */
    if (part->is_auto && args->force &&
        merged_already(s->ckpt, s->comp, args->output, part->i - 1, part->n)) {
        *out_merged = (struct pf_merge_report){.is_complete = true, .is_resumed = true};
        return PF_OK;
    }
    rc = pf_merge(s->ckpt, s->comp, args->output, &opts_merge, out_merged, err);
    if (rc == PF_E_EXISTS && part->is_auto &&
        merged_already(s->ckpt, s->comp, args->output, part->i - 1, part->n)) {
        *out_merged = (struct pf_merge_report){.is_complete = true, .is_resumed = true};
        rc = PF_OK;
    }
    return rc;
}

static int run(struct out *o, const void *p)
{
    const struct merge_args *args = p;
    struct pf_merge_report merged = {0};
    struct arg_part part = args->part;
    struct progress bar;
    struct setup s = {0};
    pf_error err = {0};
    bool is_usage = false;
    int rc = part.is_auto ? launcher_part(NULL, NULL, &part, &err) : PF_OK, status;

    part.is_auto = args->part.is_auto;
    if (!rc)
        rc = setup_open(&s,
                        &(struct setup_opts){.model = args->model,
                                             .loras = &args->loras,
                                             .merge_dtype = args->merge_dtype,
                                             .allow_unmatched = args->allow_unmatched},
                        &is_usage, &err);
    if (!rc)
        rc = setup_fidelity(&s, &err);
    if (!rc) {
        setup_warn(o, &s);
        progress_begin(&bar, !o->is_quiet, true);
        rc = merge(&s, args, &part, &bar, &merged, &err);
        progress_end(&bar);
    }
    status = rc ? failed(o, rc, is_usage, args->output, &err) : report(o, &s, args, &part, &merged);
    setup_release(&s);
    return status;
}

const struct command cmd_merge = {
    .name = "merge",
    .summary = "write a checkpoint with adapters merged in",
    .synopsis = "[--model M] --lora L ... -o OUT",
    .detail =
        "Writes OUT in the layout of the model. Tensors that no adapter changes are "
        "byte-identical. Nothing stands under "
        "the name OUT until all of it is durable; after an interruption the same command "
        "continues where it "
        "stopped. OUT cannot be the model itself, by any name. Any number of processes, on any "
        "hosts that see the same directory, can share the work with --part.",
    .opts = opts,
    .n_opts = PF_COUNTOF(opts),
    .args_bytes = sizeof(struct merge_args),
    .run = run,
};
