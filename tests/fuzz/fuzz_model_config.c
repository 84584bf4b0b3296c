/*
 * Fuzz target: the documents of a model as bytes. One JSON text is read as config.json, as scheduler_config.json and for class names; what
 * follows its first NUL is a prompt, which clients of a server send. What is accepted is within the bounds that the forward counts on.
 */
#include "base/json.h"
#include "model/dit.h"
#include "model/schedule.h"
#include "model/words.h"

#include <stdlib.h>
#include <string.h>

enum { N_CLASSES = 40 };

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

static void require(bool is_true)
{
    if (!is_true)
        abort();
}

static void check_sizes(const struct dit_config *c)
{
    const int64_t side = c->size / c->patch;
    require(c->n_blocks > 0 && c->n_classes > 0 && c->dim == c->n_heads * c->head_dim);
    require(c->dim > 0 && c->dim <= 65536 && c->dim % 4 == 0 && c->n_inner == 4 * c->dim);
    require(c->n_tokens == side * side && side * c->patch == c->size && c->n_tokens <= 65536);
    require(c->patch_values == c->channels * c->patch * c->patch);
    require(c->channels * c->size * c->size % 16 == 0);
    require(c->norm_eps >= 0 && c->norm_eps <= 1);
}

static void find_class(const struct json *doc, const char *prompt)
{
    struct labels labels;
    pf_error err = {0};
    uint32_t i_class = UINT32_MAX;
    if (labels_read(&labels, N_CLASSES, doc, NULL, &err) != PF_OK)
        return;
    const int rc = labels_find(&labels, prompt, &i_class, &err);
    require(rc == PF_OK ? i_class < N_CLASSES && labels.names[i_class] : err.msg[0] != '\0');
    labels_release(&labels);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    const size_t n_json = strnlen((const char *)p, n), n_prompt = n_json < n ? n - n_json - 1 : 0;
    char *prompt = mem_strndup(n_prompt > 0 ? (const char *)p + n_json + 1 : "", n_prompt);
    struct json *doc = NULL;
    struct dit_config config;
    struct schedule schedule;
    pf_error err = {0};
    require(prompt != NULL);
    if (json_parse((const char *)p, n_json, "fuzz", &doc, &err) == PF_OK) {
        if (dit_config_read(doc, "fuzz", &config, &err) == PF_OK)
            check_sizes(&config);
        if (schedule_read(doc, "fuzz", &schedule, &err) == PF_OK)
            require(schedule.n_train_steps >= 1 && schedule.n_train_steps <= 1e6);
        find_class(doc, prompt);
        json_free(doc);
    }
    mem_free(prompt);
    return 0;
}
