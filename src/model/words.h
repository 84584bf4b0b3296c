/*
 * Class names, and the class that the words of a prompt pick. Names come from `id2label` of model_index.json or of the
 * component's config.json. Immutable after labels_read. No language model: words are compared as words.
 */
#ifndef PF_MODEL_WORDS_H
#define PF_MODEL_WORDS_H

#include "base/mem.h"
#include "base/str.h"
#include "pageflip.h"

struct json;

struct labels {
    const char **names; /* per class; NULL where there is none */
    uint32_t n_classes;
    uint32_t n_names; /* of them, how many have one */
    struct arena arena;
};

/* Takes the names of classes 0..n_classes-1 out of documents that may be NULL, the first that has any. PF_E_FORMAT. */
int labels_read(struct labels *l, uint32_t n_classes, const struct json *model_index,
                const struct json *config, pf_error *err);
void labels_release(struct labels *l);

/*
 * The longest name whose words stand side by side in the prompt, the earlier one of two (commas separate synonyms in a
 * name; a plural s is overlooked); else the only name that has all words of the prompt but articles. PF_E_NOTFOUND lists near names.
 */
int labels_find(const struct labels *l, const char *prompt, uint32_t *out_class, pf_error *err);

#endif
