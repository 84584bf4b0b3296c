/*
 * The text after --lora: PATH[:STRENGTH][,alpha=A][,target=COMPONENT]. A colon that no number follows and a comma that no
 * known key follows belong to the path, so paths of every kind can be said: "C:\x.safetensors", "a,b:c". What looks
 * like a suffix is one: a file named "x:2" is said as "x:2:1". Nothing is opened here.
 */
#ifndef PF_CLI_LORA_SPEC_H
#define PF_CLI_LORA_SPEC_H

#include "base/err.h"

struct lora_spec {
    char *path;
    double strength; /* 1 unless said; finite */
    bool has_alpha;
    double alpha;
    char *target; /* NULL: every component */
};

/* PF_E_INVALID, PF_E_NOMEM. Owned by the caller: lora_spec_release. */
int lora_spec_parse(const char *text, struct lora_spec *out, pf_error *err);
void lora_spec_release(struct lora_spec *spec);

/* May a nickname hold this character? Letters, digits, '_', '-' and '.': none that means something in the text above. */
bool nickname_has(char c);

#endif
