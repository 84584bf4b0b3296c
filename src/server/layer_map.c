/*
 * mincore on pages at a fixed stride: a model of 60 GB is looked over in about a millisecond. Nothing is touched, so nothing is
 * read in by looking.
 */
#include "server/layer_map.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"

#define LAYER_PAGES 128

struct layer_state {
    struct pf_layer_info info;
    const char *component;
    const char *place, *residency;
    const char *cached;                     /* "yes", "partly", "no", "unknown" */
    double fraction;                        /* of sampled pages; only when known */
    uint64_t n_merged_bytes, n_built_bytes; /* as pf_layer_status has them */
};

struct layer_map {
    struct pf_checkpoint *ckpt; /* the caller's, outlives us */
    struct pf_checkpoint_info info;
    struct pf_view *base;   /* its mappings stand in for layers that are computed on the way */
    uint32_t *first_tensor; /* per layer, and one past the last */
    bool is_known;          /* the kernel answers truly about the base's files */
    size_t n_page;
};

static bool is_truth_told(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool is_told = fd >= 0 && file_shows_cache(fd);

    if (fd >= 0)
        (void)close(fd);
    return is_told;
}

static int index_tensors(struct layer_map *m, pf_error *err)
{
    struct pf_tensor_info t;
    const char *file = NULL;
    uint32_t layer = 0;

    m->first_tensor = mem_calloc(m->info.n_layers + 1, sizeof(*m->first_tensor));
    if (!m->first_tensor)
        return err_nomem(err, m->info.n_layers * sizeof(*m->first_tensor), "the layer map");
    m->is_known = true;
    for (uint32_t i = 0; i < m->info.n_tensors; i++) {
        pf_checkpoint_tensor(m->ckpt, i, &t);
        if (file != t.file)
            m->is_known = m->is_known && is_truth_told(t.file);
        file = t.file;
        while (layer < t.i_layer)
            m->first_tensor[++layer] = i;
    }
    while (layer < m->info.n_layers)
        m->first_tensor[++layer] = m->info.n_tensors;
    return PF_OK;
}

int layer_map_new(struct pf_checkpoint *ckpt, struct layer_map **out_map, pf_error *err)
{
    struct layer_map *m = mem_calloc(1, sizeof(*m));
    int rc;

    if (!m)
        return err_nomem(err, sizeof(*m), "the layer map");
    m->ckpt = ckpt;
    m->n_page = (size_t)sysconf(_SC_PAGESIZE);
    pf_checkpoint_info(ckpt, &m->info);
    rc = index_tensors(m, err);
    if (!rc)
        rc = pf_view_open(ckpt, NULL, &m->base, err);
    if (rc) {
        layer_map_free(m);
        return rc;
    }
    *out_map = m;
    return PF_OK;
}

void layer_map_free(struct layer_map *m)
{
    if (!m)
        return;
    pf_view_release(m->base);
    mem_free(m->first_tensor);
    mem_free(m);
}

struct sample {
    uint64_t n_pages, n_cached, stride, skip; /* skip: pages to pass over before the next look */
    bool is_failed;
};

static void look(const struct layer_map *m, struct sample *s, const void *p, uint64_t n_bytes)
{
    uintptr_t at = (uintptr_t)p & ~(uintptr_t)(m->n_page - 1), end = (uintptr_t)p + n_bytes;
    unsigned char page;

    for (; at < end && !s->is_failed; at += m->n_page) {
        if (s->skip) {
            uint64_t n_left = (end - at + m->n_page - 1) / m->n_page,
                     n_hop = s->skip < n_left ? s->skip : n_left;

            s->skip -= n_hop;
            at += (n_hop - 1) * m->n_page;
            continue;
        }
        s->is_failed = mincore((void *)at, m->n_page, &page) != 0;
        s->n_pages++;
        s->n_cached += page & 1;
        s->skip = s->stride - 1;
    }
}

/* One layer as the current view of the engine has it. Samples at most LAYER_PAGES pages. */
static int layer_map_state(struct layer_map *m, struct pf_engine *engine, struct pf_view *view,
                           uint32_t i_layer, struct layer_state *out, pf_error *err)
{
    struct pf_layer_status status;
    struct pf_component_info component;
    struct sample s = {0};
    int rc = pf_engine_layer_status(engine, i_layer, &status, err);

    if (rc)
        return rc;
    *out = (struct layer_state){.place = status.place,
                                .residency = status.residency,
                                .cached = "unknown",
                                .n_merged_bytes = status.n_merged_bytes,
                                .n_built_bytes = status.n_built_bytes};
    pf_checkpoint_layer(m->ckpt, i_layer, &out->info);
    pf_checkpoint_component(m->ckpt, out->info.i_component, &component);
    out->component = component.name;
    s.stride = out->info.n_bytes / m->n_page / LAYER_PAGES + 1;
    for (uint32_t i = m->first_tensor[i_layer]; i < m->first_tensor[i_layer + 1]; i++) {
        struct pf_tensor_info t;
        const void *p = pf_view_map(view, i);

        pf_checkpoint_tensor(m->ckpt, i, &t);
        p = p ? p : pf_view_map(m->base, i);
        if (p)
            look(m, &s, p, t.n_bytes);
    }
    if (!m->is_known || s.is_failed || !s.n_pages)
        return PF_OK;
    out->fraction = (double)s.n_cached / (double)s.n_pages;
    out->cached = s.n_cached == s.n_pages ? "yes" : s.n_cached ? "partly" : "no";
    return PF_OK;
}

struct json *layer_map_json(struct layer_map *m, struct pf_engine *engine)
{
    struct json *list = json_new_array();
    struct pf_view *view = pf_engine_view(engine);
    struct layer_state st;

    for (uint32_t i = 0; i < m->info.n_layers; i++) {
        struct json *it;

        if (layer_map_state(m, engine, view, i, &st, NULL))
            continue;
        it = json_new_object();
        json_set(it, "name", json_new_string(str_of(st.info.name)));
        json_set_z(it, "component", st.component);
        json_set_int(it, "bytes", (int64_t)st.info.n_bytes);
        json_set_z(it, "place", st.place);
        json_set_int(it, "merged_bytes", (int64_t)st.n_merged_bytes);
        json_set_int(it, "built_bytes", (int64_t)st.n_built_bytes);
        json_set_z(it, "residency", st.residency);
        json_set_z(it, "cached", st.cached);
        json_set(it, "cached_fraction",
                 strcmp(st.cached, "unknown") != 0 ? json_new_real(st.fraction) : json_new_null());
        json_add(list, it);
    }
    pf_view_release(view);
    return list;
}
