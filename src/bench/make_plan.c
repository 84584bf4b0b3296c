/*
 * Which tensors a synthetic checkpoint or adapter has. Called by make.c. Knows names and shapes, writes nothing; make.h documents the
 * geometry that is built here.
 */
#include "bench/make_int.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void plan_init(struct plan *p, int32_t dtype, double rms)
{
    *p = (struct plan){.dtype = dtype, .rms = rms};
    arena_init(&p->arena);
}

void plan_release(struct plan *p)
{
    mem_free(p->tensors);
    mem_free(p->targets);
    arena_release(&p->arena);
    *p = (struct plan){0};
}

static bool plan_ok(const struct plan *p)
{
    return !p->is_failed;
}

static struct str print_name(struct plan *p, const char *fmt, va_list args) PF_PRINTF(2, 0);
static struct str print_name(struct plan *p, const char *fmt, va_list args)
{
    char name[256];
    int n = vsnprintf(name, sizeof(name), fmt, args);
    char *copy =
        n < 0 || (size_t)n >= sizeof(name) ? NULL : arena_strndup(&p->arena, name, (size_t)n);

    if (copy == NULL) {
        p->is_failed = true;
        return (struct str){"", 0};
    }
    return (struct str){copy, (size_t)n};
}

static void add(struct plan *p, const struct plan_tensor *t)
{
    void *tensors = p->tensors;

    if (p->is_failed || !mem_grow(&tensors, &p->cap_tensors, p->n_tensors, sizeof(*t))) {
        p->is_failed = true;
        return;
    }
    p->tensors = tensors;
    p->tensors[p->n_tensors++] = *t;
}

/* The name is printed; the shape is (d0), or (d0, d1) when d1 > 0. */
PF_PRINTF(4, 5)
static void plan_add(struct plan *p, int64_t d0, int64_t d1, const char *fmt, ...)
{
    struct plan_tensor t = {.shape = {.rank = d1 > 0 ? 2 : 1, .dim = {d0, d1 > 0 ? d1 : 0}}};
    va_list args;

    va_start(args, fmt);
    t.name = print_name(p, fmt, args);
    va_end(args);
    add(p, &t);
}

PF_PRINTF(3, 4)
static void plan_add_constant(struct plan *p, float v, const char *fmt, ...)
{
    struct plan_tensor t = {.is_constant = true, .constant = v};
    va_list args;

    va_start(args, fmt);
    t.name = print_name(p, fmt, args);
    va_end(args);
    add(p, &t);
}

static void add_target(struct plan *p, int64_t n_out, int64_t n_in, const char *block, int64_t i,
                       const char *leaf)
{
    void *targets = p->targets;
    char name[128];
    int n = snprintf(name, sizeof(name), "%s.%" PRId64 ".%s", block, i, leaf);
    char *copy = arena_strndup(&p->arena, name, (size_t)n);

    plan_add(p, n_out, n_in, "%s.weight", name);
    if (copy == NULL || !mem_grow(&targets, &p->cap_targets, p->n_targets, sizeof(*p->targets))) {
        p->is_failed = true;
        return;
    }
    p->targets = targets;
    p->targets[p->n_targets++] = (struct plan_target){{copy, (size_t)n}, n_out, n_in};
}

/* ---------------------------------------------------------------------------------------------------- h3 */

#define H3_BYTES       61.7e9
#define H3_TENSOR_MAX  ((int64_t)1 << 30)
#define H3_BLOCKS      50
#define H3_REFINERS    2
#define H3_BLOCK_BYTES (2.0 * 5376 * (21504 + 7168 + 28672 + 14336 + 2))

static void add_h3_block(struct plan *p, const char *block, int64_t i, int64_t div)
{
    const int64_t d = 5376 / div;

    add_target(p, 21504 / div, d, block, i, "attn.to_qkv");
    add_target(p, d, 7168 / div, block, i, "attn.to_out.0");
    add_target(p, 28672 / div, d, block, i, "ff.net.0.proj");
    add_target(p, d, 14336 / div, block, i, "ff.net.2");
    plan_add(p, d, 0, "%s.%" PRId64 ".norm1.weight", block, i);
    plan_add(p, d, 0, "%s.%" PRId64 ".norm2.weight", block, i);
}

static void plan_h3(struct plan *p, double scale, int64_t div)
{
    static const char *const targets[] = {"attn.to_qkv", "attn.to_out.0", "ff.net.0.proj",
                                          "ff.net.2", NULL};
    const int64_t d = 5376 / div, rows_max = H3_TENSOR_MAX / (2 * d);
    const double rest = (H3_BYTES - (H3_BLOCKS + H3_REFINERS) * H3_BLOCK_BYTES) * scale;
    int64_t n_rows = (int64_t)(rest / (double)(div * div) / 2 / (double)d), n, i;

    p->target_names = targets;
    p->n_blocks = (int64_t)ceil(H3_BLOCKS * scale);
    for (i = 0; i < p->n_blocks; i++)
        add_h3_block(p, "transformer_blocks", i, div);
    n = (int64_t)ceil(H3_REFINERS * scale);
    for (i = 0; i < n; i++)
        add_h3_block(p, "refiner_blocks", i, div);
    n = (n_rows + rows_max - 1) / rows_max;
    for (i = 0; i < n; i++) /* as equal as whole rows can be */
        plan_add(p, n_rows * (i + 1) / n - n_rows * i / n, d,
                 "context_blocks.%" PRId64 ".mlp.weight", i);
}

/* --------------------------------------------------------------------------------------------------- dit */

#define DIT_BYTES    8e9
#define DIT_CLASSES  64
#define DIT_CHANNELS 3
#define DIT_PATCH    4
#define DIT_FREQS    256

static void add_linear(struct plan *p, int64_t n_out, int64_t n_in, const char *name)
{
    plan_add(p, n_out, n_in, "%s.weight", name);
    plan_add(p, n_out, 0, "%s.bias", name);
}

static void add_dit_target(struct plan *p, int64_t n_out, int64_t n_in, int64_t i, const char *leaf)
{
    add_target(p, n_out, n_in, "transformer_blocks", i, leaf);
    plan_add(p, n_out, 0, "transformer_blocks.%" PRId64 ".%s.bias", i, leaf);
}

static void add_dit_block(struct plan *p, int64_t d, int64_t i)
{
    char name[128];

    add_dit_target(p, d, d, i, "attn1.to_q");
    add_dit_target(p, d, d, i, "attn1.to_k");
    add_dit_target(p, d, d, i, "attn1.to_v");
    add_dit_target(p, d, d, i, "attn1.to_out.0");
    add_dit_target(p, 4 * d, d, i, "ff.net.0.proj");
    add_dit_target(p, d, 4 * d, i, "ff.net.2");
    add_dit_target(p, 6 * d, d, i, "norm1.linear");
    plan_add(p, DIT_CLASSES + 1, d,
             "transformer_blocks.%" PRId64 ".norm1.emb.class_embedder.embedding_table.weight", i);
    (void)snprintf(name, sizeof(name),
                   "transformer_blocks.%" PRId64 ".norm1.emb.timestep_embedder.linear_1", i);
    add_linear(p, d, DIT_FREQS, name);
    (void)snprintf(name, sizeof(name),
                   "transformer_blocks.%" PRId64 ".norm1.emb.timestep_embedder.linear_2", i);
    add_linear(p, d, d, name);
}

static void plan_dit(struct plan *p, int64_t dim, int64_t head_dim, int64_t n_blocks)
{
    static const char *const targets[] = {
        "attn1.to_q",    "attn1.to_k", "attn1.to_v",   "attn1.to_out.0",
        "ff.net.0.proj", "ff.net.2",   "norm1.linear", NULL};
    const int64_t n_values = DIT_CHANNELS * DIT_PATCH * DIT_PATCH;
    struct plan_tensor *conv;
    int64_t i;

    p->target_names = targets;
    p->dim = dim;
    p->head_dim = head_dim;
    p->n_blocks = n_blocks;
    plan_add(p, dim, n_values, "pos_embed.proj.weight");
    if (p->is_failed)
        return;
    conv = &p->tensors[p->n_tensors - 1];
    conv->shape = (struct shape){.rank = 4, .dim = {dim, DIT_CHANNELS, DIT_PATCH, DIT_PATCH}};
    plan_add(p, dim, 0, "pos_embed.proj.bias");
    add_linear(p, 2 * dim, dim, "proj_out_1");
    add_linear(p, n_values, dim, "proj_out_2");
    for (i = 0; i < n_blocks; i++)
        add_dit_block(p, dim, i);
}

/* About 8 GB x scale: width and depth grow alike. */
static void plan_dit_scaled(struct plan *p, double scale)
{
    const double width = round(32 * cbrt(scale)), d = 64 * (width < 1 ? 1 : width);
    /* 12 d^2 in attention and feed-forward, 6 in norm1, 1 in the embedder; tables and biases are linear in d */
    const double block_bytes = 2 * (19 * d * d + (DIT_FREQS + DIT_CLASSES + 1 + 17) * d);
    const double n_blocks = round(DIT_BYTES * scale / block_bytes);

    plan_dit(p, (int64_t)d, 64, n_blocks < 1 ? 1 : (int64_t)n_blocks);
}

int plan_shape(struct plan *p, const struct bench_make_opts *opts, pf_error *err)
{
    const double scale = opts->scale == 0 ? 1 : opts->scale;
    const int64_t div = opts->width_divisor == 0 ? 1 : opts->width_divisor;

    if (opts->shape == NULL)
        return err_set(err, PF_E_INVALID, "no shape is given: h3, dit or emoji");
    if (!(scale > 0 && scale <= 64))
        return err_set(err, PF_E_INVALID, "scale %g is not in (0, 64]", scale);
    if (div > 128 || (div & (div - 1)) != 0)
        return err_set(err, PF_E_INVALID, "width divisor %u is no power of two up to 128",
                       opts->width_divisor);
    if (strcmp(opts->shape, "h3") == 0)
        plan_h3(p, scale, div);
    else if (strcmp(opts->shape, "dit") == 0)
        plan_dit_scaled(p, scale);
    else if (strcmp(opts->shape, "emoji") == 0)
        plan_dit(p, 128, 32, (int64_t)ceil(8 * scale));
    else
        return err_set(err, PF_E_INVALID, "shape '%s' is not known: h3, dit or emoji", opts->shape);
    return plan_ok(p) ? PF_OK
                      : err_nomem(err, p->n_tensors * sizeof(*p->tensors), "a list of tensors");
}

/* ----------------------------------------------------------------------------------------------- adapters */

struct dialect {
    const char *name, *prefix, *down, *up;
    bool is_flat;   /* dots of the module path become underscores */
    bool has_alpha; /* a scalar of its own per module */
};

static const struct dialect dialects[] = {
    {"peft", "base_model.model.", "lora_A.weight", "lora_B.weight", false, false},
    {"diffusers", "transformer.", "lora_A.weight", "lora_B.weight", false, false},
    {"kohya", "lora_unet_", "lora_down.weight", "lora_up.weight", true, true},
    {"native", "diffusion_model.", "lora_A.weight", "lora_B.weight", false, true},
};

static const char *spell_module(const struct dialect *d, struct str module, char buf[128])
{
    size_t i;

    (void)snprintf(buf, 128, "%.*s", (int)module.n, module.p);
    for (i = 0; d->is_flat && buf[i] != 0; i++)
        if (buf[i] == '.')
            buf[i] = '_';
    return buf;
}

int plan_adapter(struct plan *p, const struct plan *base, const char *dialect, uint32_t rank,
                 double alpha, pf_error *err)
{
    const struct dialect *d = NULL;
    char module[128];
    size_t i;

    for (i = 0; i < PF_COUNTOF(dialects); i++)
        if (strcmp(dialects[i].name, dialect) == 0)
            d = &dialects[i];
    if (d == NULL)
        return err_set(err, PF_E_INVALID,
                       "dialect '%s' is not known: peft, diffusers, kohya or native", dialect);
    for (i = 0; d->has_alpha && i < base->n_targets; i++)
        plan_add_constant(p, (float)alpha, "%s%s.alpha", d->prefix,
                          spell_module(d, base->targets[i].module, module));
    for (i = 0; i < base->n_targets; i++) {
        const struct plan_target *t = &base->targets[i];
        (void)spell_module(d, t->module, module);
        plan_add(p, rank, t->n_in, "%s%s.%s", d->prefix, module, d->down);
        plan_add(p, t->n_out, rank, "%s%s.%s", d->prefix, module, d->up);
    }
    return plan_ok(p) ? PF_OK
                      : err_nomem(err, p->n_tensors * sizeof(*p->tensors), "a list of tensors");
}
