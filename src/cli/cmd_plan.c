/*
 * `pageflip plan`: what a merge would change and cost. Reads, computes, writes nothing. Keys that match nothing are listed
 * instead of refused, with the nearest names, because finding out is what the command is for.
 */
#include "cli/command.h"
#include "cli/estimate.h"
#include "cli/setup.h"

struct plan_args {
    struct common_args common;
    const char *model, *merge_dtype;
    struct arg_list loras;
    bool allow_unmatched;
    struct arg_int threads;
};

static const struct opt opts[] = {
    {"model", 'm', OPT_MODEL, "M",
     "checkpoint: a .safetensors file, an index, a directory, or org/name; "
     "the bundled model unless said",
     offsetof(struct plan_args, model), NULL, 0, 0, false},
    {"lora", 'l', OPT_LORA, "L",
     "adapter: PATH[:STRENGTH][,alpha=A][,target=COMPONENT], or the name of a "
     "bundled one; may be repeated",
     offsetof(struct plan_args, loras), NULL, 0, 0, false},
    {"merge-dtype", 0, OPT_CHOICE, "D", "dtype of merged tensors: base (the default) or f32",
     offsetof(struct plan_args, merge_dtype), "base|f32", 0, 0, false},
    {"threads", 't', OPT_INT, "N", "threads to reckon with; one per usable CPU unless said",
     offsetof(struct plan_args, threads), NULL, 1, 256, false},
    {"allow-unmatched", 0, OPT_FLAG, NULL,
     "reckon with a merge that leaves out keys without a match",
     offsetof(struct plan_args, allow_unmatched), NULL, 0, 0, false},
};

static void print_plan(const struct out *o, const struct estimate *est)
{
    char a[16], b[16];

    out_field(o, "disk", "%s to write; %s are free here", out_bytes((double)est->n_disk_bytes, a),
              out_bytes((double)est->n_free_bytes, b));
    out_field(o, "memory", "about %s of anonymous memory with %u thread%s",
              out_mib(est->n_memory_bytes, a), est->n_threads, est->n_threads == 1 ? "" : "s");
    out_field(o, "time",
              est->seconds < 1 ? "under a second" : "about %.0f s, if the disk takes 1 GB/s",
              est->seconds);
}

static int run(struct out *o, const void *p)
{
    const struct plan_args *args = p;
    struct setup s = {0};
    struct estimate est = {0};
    struct pf_composition_info info;
    struct json *doc = NULL;
    pf_error err = {0};
    bool is_usage = false, is_refused = false;
    int rc, status = EXIT_STATUS_OK;

    rc = setup_open(&s,
                    &(struct setup_opts){.model = args->model,
                                         .loras = &args->loras,
                                         .merge_dtype = args->merge_dtype,
                                         .allow_unmatched = true},
                    &is_usage, &err);
    if (!rc)
        rc = setup_fidelity(&s, &err);
    if (!rc)
        rc = estimate_merge(s.ckpt, s.comp, (uint32_t)args->threads.v, &est, &err);
    if (rc) {
        status = is_usage ? out_usage(o, "%s", err.msg) : out_fail(o, &err);
        goto out;
    }
    pf_composition_info(s.comp, &info);
    is_refused = info.n_keys_unmatched && !args->allow_unmatched;
    setup_warn(o, &s);
    if (o->is_json) {
        doc = json_new_object();
        setup_json(doc, &s);
        json_set_bool(doc, "merge_refused", is_refused);
        estimate_json(doc, &est);
        status = out_json(o, doc);
    } else {
        setup_print(o, &s);
        print_plan(o, &est);
        if (is_refused)
            out_field(o, "merge",
                      "would refuse: %u key%s match%s nothing; --allow-unmatched leaves "
                      "them out",
                      info.n_keys_unmatched, info.n_keys_unmatched == 1 ? "" : "s",
                      info.n_keys_unmatched == 1 ? "es" : "");
    }
out:
    setup_release(&s);
    return status;
}

const struct command cmd_plan = {
    .name = "plan",
    .summary = "say what a merge would change and cost, and write nothing",
    .synopsis = "[--model M] --lora L ...",
    .detail = "Resolves the adapters against the checkpoint and shows which keys match, which do "
              "not (with the nearest names), "
              "how many tensors and layers change, how much of the change survives rounding, and "
              "what a merge would "
              "need of disk, memory and time. The status is 1 when no key matches at all.",
    .opts = opts,
    .n_opts = PF_COUNTOF(opts),
    .args_bytes = sizeof(struct plan_args),
    .run = run,
};
