/*
 * Fuzz target: a whole safetensors file, as bytes, through the header scanner. What is accepted must tile the data and be
 * found again by name; anything else is a crash here. Also linked with run_corpus.c to measure what the corpus reaches.
 */
#include "safetensors/safetensors.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

static void require(bool is_true)
{
    if (!is_true)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    struct st_header *h = NULL;
    pf_error err = {0};
    uint64_t end = 8;
    size_t i;
    int rc = st_header_parse(p, n, n, "fuzz", &h, &err);

    if (rc != PF_OK) {
        require(h == NULL && err.code == rc && err.msg[0] == '\'' && err.off <= n);
        return 0;
    }
    for (i = 0; i < 4; i++)
        end += (uint64_t)p[i] << (8 * i); /* the bound on N leaves four bytes */
    for (i = 0; i < st_header_n_tensors(h); i++) {
        const struct st_tensor *t = st_header_tensor(h, i);
        uint64_t n_bytes = 0;

        require(t->off_bytes == end && shape_n_bytes(&t->shape, t->dtype, &n_bytes) &&
                n_bytes == t->n_bytes);
        require(st_header_find(h, t->name) == t && str_is_utf8(t->name, &(size_t){0}));
        end += t->n_bytes;
    }
    require(end == n);
    for (i = 0; i < st_header_n_meta(h); i++)
        require(str_is_utf8(st_header_meta(h, i)->key, &(size_t){0}) &&
                str_is_utf8(st_header_meta(h, i)->value, &(size_t){0}));
    st_header_free(h);
    return 0;
}
