/*
 * Bytes -> an adapter in memory -> its deltas on a small base. Input: two bytes with the length of a config text (0: none),
 * that text, and the JSON header of a safetensors file; the data behind it is zeros, of the length that the header speaks of, so
 * that mutations of names, shapes and fields get past the container's own checks.
 */
#include "adapter/adapter_int.h"
#include "base/str.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DATA_BYTES_MAX ((size_t)64 << 10)
#define KEYS_MAX       4096u

static struct pf_checkpoint *ckpt;

/* Names and shapes that the corpus speaks of: dotted, fused, convolutions, a bias, a parameter, a head. */
static const char header[] =
    "{\"blocks.0.attn.to_q.weight\":{\"dtype\":\"F32\",\"shape\":[4,6],\"data_offsets\":[0,96]},"
    "\"blocks.0.attn.to_q.bias\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[96,112]},"
    "\"blocks.1.attn.qkv.weight\":{\"dtype\":\"F32\",\"shape\":[12,6],\"data_offsets\":[112,400]},"
    "\"blocks.1.attn.qkv.bias\":{\"dtype\":\"F32\",\"shape\":[12],\"data_offsets\":[400,448]},"
    "\"c.to_k.weight\":{\"dtype\":\"BF16\",\"shape\":[4,2,3,3],\"data_offsets\":[448,592]},"
    "\"s.q_proj.weight\":{\"dtype\":\"F16\",\"shape\":[4,6],\"data_offsets\":[592,640]},"
    "\"s.k_proj.weight\":{\"dtype\":\"F16\",\"shape\":[2,6],\"data_offsets\":[640,664]},"
    "\"s.v_proj.weight\":{\"dtype\":\"F16\",\"shape\":[2,6],\"data_offsets\":[664,688]},"
    "\"a.in_proj_weight\":{\"dtype\":\"F32\",\"shape\":[12,4],\"data_offsets\":[688,880]},"
    "\"norm.weight\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[880,904]},"
    "\"blocks.0.modulation\":{\"dtype\":\"F32\",\"shape\":[1,6],\"data_offsets\":[904,928]},"
    "\"embed_tokens.weight\":{\"dtype\":\"F32\",\"shape\":[6,4],\"data_offsets\":[928,1024]},"
    "\"quantised.weight\":{\"dtype\":\"U8\",\"shape\":[4,6],\"data_offsets\":[1024,1048]}}";

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

/* Once, for the life of the process. */
static void open_base(void)
{
    const char *tmp = getenv("TMPDIR");
    char path[4096];
    (void)snprintf(path, sizeof path, "%s/pf-fuzz-XXXXXX.safetensors", tmp && *tmp ? tmp : "/tmp");
    int fd = mkstemps(path, 12);
    pf_error err;
    struct strbuf b;
    strbuf_init(&b);
    uint64_t n = sizeof header - 1;
    strbuf_add(&b, (const char *)&n, 8);
    strbuf_add(&b, header, n);
    for (int i = 0; i < 1048; i++)
        strbuf_add(&b, "", 1);
    if (fd < 0 || !strbuf_ok(&b) || write(fd, b.p, b.n) != (ssize_t)b.n ||
        pf_checkpoint_open(path, NULL, &ckpt, &err) != PF_OK)
        abort();
    strbuf_release(&b);
    (void)close(fd);    /* only a descriptor of a file that is gone */
    (void)unlink(path); /* it stays mapped */
}

/* The largest number before a closing bracket: where the last tensor ends, if the header is a good one. */
static size_t data_bytes(const uint8_t *p, size_t n)
{
    size_t max = 0;
    for (size_t i = 0; i < n; i++) {
        size_t v = 0, k = i;
        while (k < n && p[k] >= '0' && p[k] <= '9' && v <= DATA_BYTES_MAX)
            v = v * 10 + (size_t)(p[k++] - '0');
        if (k > i && k < n && p[k] == ']' && v <= DATA_BYTES_MAX && v > max)
            max = v;
        i = k;
    }
    return max;
}

static void use(struct pf_adapter *a)
{
    struct resolve_opts opts[] = {{.allow_unmatched = true},
                                  {.has_alpha = true, .alpha = 3, .target = "transformer"}};
    for (size_t i = 0; i < PF_COUNTOF(opts); i++) {
        struct resolution r;
        pf_error err;
        if (adapter_resolve(a, ckpt, &opts[i], &r, &err) != PF_OK)
            continue;
        for (size_t k = 0; k < r.n_deltas; k++) {
            const struct delta *d = &r.deltas[k];
            const struct ckpt_tensor *w = &ckpt->tensors[d->i_tensor];
            if (d->row0 < 0 || d->n_rows <= 0 || d->row0 + d->n_rows > shape_rows(&w->shape) ||
                d->n_cols != shape_cols(&w->shape))
                abort();
        }
        resolution_release(&r);
    }
    struct pf_adapter_module m;
    for (uint32_t i = 0; i < a->info.n_modules; i++)
        pf_adapter_module(a, i, &m);
}

static void parse(const struct st_header *h, const uint8_t *base, const char *config,
                  size_t n_config)
{
    size_t n_keys = st_header_n_tensors(h), n_meta = st_header_n_meta(h);
    if (n_keys > KEYS_MAX || n_meta > KEYS_MAX)
        return;
    static const struct st_tensor *keys[KEYS_MAX];
    static const struct st_meta *meta[KEYS_MAX];
    for (size_t i = 0; i < n_keys; i++)
        keys[i] = st_header_tensor(h, i);
    for (size_t i = 0; i < n_meta; i++)
        meta[i] = st_header_meta(h, i);
    struct ad_input in = {.path = "fuzz",
                          .keys = keys,
                          .n_keys = n_keys,
                          .base = base,
                          .meta = meta,
                          .n_meta = n_meta,
                          .config = config,
                          .n_config = n_config};
    struct pf_adapter a = {0};
    pf_error err;
    arena_init(&a.arena);
    if (adapter_parse(&a, &in, &err) == PF_OK)
        use(&a);
    adapter_release(&a);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
    if (ckpt == NULL)
        open_base();
    if (n < 2)
        return 0;
    size_t n_config = (size_t)p[0] | (size_t)p[1] << 8;
    if (n_config > n - 2)
        n_config = n - 2;
    const uint8_t *json = p + 2 + n_config;
    uint64_t n_json = n - 2 - n_config;
    size_t n_data = data_bytes(json, n_json);
    uint8_t *file = mem_calloc(1, 8 + n_json + n_data);
    if (file == NULL)
        return 0;
    memcpy(file, &n_json, 8);
    memcpy(file + 8, json, n_json);
    struct st_header *h = NULL;
    pf_error err;
    if (st_header_parse(file, 8 + n_json + n_data, 8 + n_json + n_data, "fuzz", &h, &err) ==
        PF_OK) {
        parse(h, file, n_config > 0 ? (const char *)p + 2 : NULL, n_config);
        st_header_free(h);
    }
    mem_free(file);
    return 0;
}
