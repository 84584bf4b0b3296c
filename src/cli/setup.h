/*
 * What plan, merge, generate and `inspect --model` begin with: a checkpoint, adapters from --lora texts, and their
 * composition; and the part of their reports that speaks of it. Owned by the command; one thread.
 */
#ifndef PF_CLI_SETUP_H
#define PF_CLI_SETUP_H

#include "cli/lora_spec.h"
#include "cli/option.h"
#include "cli/out.h"

struct setup {
    struct pf_checkpoint *ckpt;
    struct lora_spec *specs;
    struct pf_adapter **adapters;
    struct pf_lora *loras;
    size_t n_loras;
    struct pf_composition *comp;
    struct pf_fidelity fidelity;
    bool is_bundled; /* the model */
};

struct setup_opts {
    const char *model; /* NULL: bundled */
    const struct arg_list *loras;
    const char *adapter_path; /* instead of loras: one adapter by its path alone, at strength 1 */
    const char *merge_dtype;  /* NULL, "base", "f32" */
    bool allow_unmatched;
};

/* PF_E_INVALID for a bad --lora text: the only error of usage here, *out_is_usage. Half-built on failure: setup_release. */
int setup_open(struct setup *s, const struct setup_opts *opts, bool *out_is_usage, pf_error *err);
int setup_fidelity(struct setup *s, pf_error *err);
void setup_release(struct setup *s);

/* Adds to an error about keys without a match what the user can do. */
void setup_hint(pf_error *err);

/* Fields "model" .. "composition" of the report, as text and into a JSON object. */
void setup_print(const struct out *o, const struct setup *s);
void setup_json(struct json *doc, const struct setup *s);
/* Says on standard error what the composition has to note, and that the change is largely rounded away where it is. */
void setup_warn(const struct out *o, const struct setup *s);

#endif
