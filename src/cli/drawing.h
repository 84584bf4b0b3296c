/*
 * One picture, or one sheet, on its way from options to a file: what `pageflip generate` makes once, and a script many times,
 * some of them at the same time. A drawing is used by one thread at a time.
 */
#ifndef PF_CLI_DRAWING_H
#define PF_CLI_DRAWING_H

#include "cli/generate_opts.h"
#include "cli/out.h"

struct drawing {
    struct picture_args args; /* its texts are read by drawing_prepare only */
    struct pf_model *model;   /* borrowed */
    struct pf_model_info info;
    struct pf_view *view; /* whoever prepared it sets it; released here */
    const char *way;      /* how the view was read when drawing began */
    uint32_t *classes;
    uint32_t n;
    uint8_t *rgb; /* (n, height, width, 3) */
    char output[4096];
    struct pf_generate_report report;
    double ms;
};

/* Says what is wrong before the work, not after it: class, prompt, output directory. Half-built on failure: drawing_release. */
int drawing_prepare(struct drawing *d, struct pf_model *model, const struct picture_args *args,
                    pf_error *err);
/* Draws and writes the file. PF_E_CHANGED, PF_E_TRUNCATED: base or adapters are not what they were; nothing is written. */
int drawing_run(struct drawing *d, pf_progress_fn progress, void *progress_ctx, pf_error *err);
void drawing_release(struct drawing *d);

void drawing_json(struct json *doc, const struct drawing *d);

#endif
