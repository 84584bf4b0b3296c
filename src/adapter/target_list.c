/*
 * Target lists: "transformer,text_encoder" -> which components of a checkpoint are meant. Called by the resolver and by the engine, so
 * that both understand the same words. Must never guess: a name that no component has is an error that lists those that there are.
 */
#include <string.h>

#include "adapter/adapter_int.h"

static int not_there(const struct pf_checkpoint *ckpt, struct str name, pf_error *err)
{
    err_set(err, PF_E_NOTFOUND, "target '%.*s' is no component of '%s', which has", (int)name.n,
            name.p, ckpt->path);
    for (uint32_t i = 0; i < ckpt->n_components && i < AD_LIST_MAX; i++)
        err_append(err, "%s '%s'", i > 0 ? "," : "", ckpt->components[i].name);
    return PF_E_NOTFOUND;
}

int target_list_parse(const struct pf_checkpoint *ckpt, const char *list, bool *out_is_named,
                      pf_error *err)
{
    struct str rest = str_of(list ? list : "all");
    bool is_all = rest.n == 0 || str_eqz(rest, "all");
    for (uint32_t c = 0; c < ckpt->n_components; c++)
        out_is_named[c] = is_all;
    while (!is_all) {
        const char *comma = memchr(rest.p, ',', rest.n);
        struct str name = {rest.p, comma ? (size_t)(comma - rest.p) : rest.n};
        int64_t c = ckpt_component_find(ckpt, name);
        if (c < 0)
            return not_there(ckpt, name, err);
        out_is_named[c] = true;
        if (!comma)
            break;
        rest = str_cut_front(rest, name.n + 1);
    }
    return PF_OK;
}
