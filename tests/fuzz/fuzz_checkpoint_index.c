/*
 * Fuzz target: a shard index, as bytes. What is accepted has sorted, distinct shards whose names stay below the index's
 * directory, and finds every entry again. Touches no file.
 */
#include "checkpoint/checkpoint_int.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

static void require(bool is_true)
{
    if (!is_true)
        abort();
}

/* Written apart from the parser's own check: how deep below the directory does each step of the name stand? */
static bool stays_below(const char *name)
{
    int depth = 0;
    if (name[0] == '/')
        return false;
    for (const char *p = name; *p != '\0';) {
        size_t n = strcspn(p, "/\\");
        if (n == 2 && memcmp(p, "..", 2) == 0)
            depth--;
        else if (n > 0 && !(n == 1 && *p == '.'))
            depth++;
        if (depth < 0)
            return false;
        p += n + (p[n] != '\0');
    }
    return depth > 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    struct ckpt_index index = {0};
    pf_error err = {0};
    int rc = ckpt_index_parse((const char *)p, n, "fuzz", &index, &err);
    if (rc != PF_OK) {
        require(err.code == rc && err.msg[0] != '\0' && index.root == NULL);
        return 0;
    }
    require(index.n_entries > 0 && index.n_shards > 0 && index.n_shards <= index.n_entries);
    for (size_t i = 0; i < index.n_shards; i++) {
        require(stays_below(index.shards[i]) && str_ends(str_of(index.shards[i]), ".safetensors"));
        require(i == 0 || strcmp(index.shards[i - 1], index.shards[i]) < 0);
    }
    for (size_t i = 0; i < index.n_entries; i++) {
        const struct ckpt_index_entry *e = &index.entries[i];
        require(e->i_shard < index.n_shards && ckpt_index_find(&index, e->name) == e->i_shard);
        require(i == 0 || str_cmp(index.entries[i - 1].name, e->name) < 0);
    }
    ckpt_index_release(&index);
    return 0;
}
