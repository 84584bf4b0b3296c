/*
 * Small adapters and bases for the tests of src/adapter, one tensor a line:
 *
 *     "x.lora_A.weight 2,6"          F32, values that differ from name to name
 *     "x.alpha - BF16 =8"            a scalar (shape []), every element 8
 *
 * Files are written by hand here, so that the tests do not lean on the writer of the product.
 */
#ifndef PF_TESTS_ADAPTER_BUILD_H
#define PF_TESTS_ADAPTER_BUILD_H

#include "testing.h"

#include "adapter/adapter.h"
#include "base/mem.h"
#include "tensor/dtype.h"

#include <math.h>
#include <sys/stat.h>

#define specs(...) ((const char *const[]){__VA_ARGS__, NULL})

struct built {
    struct pf_checkpoint *ckpt;
    struct pf_adapter *a;
    struct resolution r;
    bool is_resolved;
    struct resolve_opts opts;
    pf_error err;
};

/* ------------------------------------------------------------------------------------------------- writing */

/* Element i of a tensor: a multiple of 1/8 in [-1, 1], never 0, exact in every float dtype from F8_E4M3 on. */
static PF_UNUSED float value_of(const char *name, size_t i)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (const char *p = name; *p != '\0'; p++)
        h = (h ^ (unsigned char)*p) * 0x100000001b3u;
    struct rng r = {h + i * 0x9e37u};
    int v = (int)rng_below(&r, 8) + 1;
    return (float)(rng_below(&r, 2) ? v : -v) / 8;
}

static void put_value(struct strbuf *out, int32_t dtype, double v)
{
    float f = (float)v;
    uint16_t h;
    int64_t i = (int64_t)v;
    uint8_t b = (uint8_t)i;
    switch (dtype) {
    case PF_F32:
        strbuf_add(out, (const char *)&f, 4);
        break;
    case PF_F64:
        strbuf_add(out, (const char *)&v, 8);
        break;
    case PF_BF16:
        h = bf16_from_f32(f);
        strbuf_add(out, (const char *)&h, 2);
        break;
    case PF_F16:
        h = f16_from_f32(f);
        strbuf_add(out, (const char *)&h, 2);
        break;
    case PF_I64:
        strbuf_add(out, (const char *)&i, 8);
        break;
    default: /* one byte, raw */
        strbuf_add(out, (const char *)&b, 1);
        break;
    }
}

static void put_tensor(struct strbuf *header, struct strbuf *data, const char *spec)
{
    char name[256], shape[64], dtype_name[32] = "F32", value[32] = "";
    int n = sscanf(spec, "%255s %63s %31s %31s", name, shape, dtype_name, value);
    assert_in_range(n, 2, 4);
    if (dtype_name[0] == '=') {
        memcpy(value, dtype_name, sizeof value);
        memcpy(dtype_name, "F32", 4);
    }
    int32_t dtype;
    assert_true(dtype_parse(str_of(dtype_name), &dtype));
    size_t n_elements = 1, off = data->n;
    if (shape[0] == '-')
        shape[0] = '\0';
    for (char *p = shape; *p != '\0';) {
        char *end;
        n_elements *= strtoul(p, &end, 10);
        p = *end == ',' ? end + 1 : end;
    }
    for (size_t i = 0; i < n_elements; i++)
        put_value(data, dtype,
                  value[0] == '=' ? strtod(value + 1, NULL) : (double)value_of(name, i));
    strbuf_addf(header, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
                header->n > 1 ? "," : "", name, dtype_name, shape, off, data->n);
}

static void put_json_string(struct strbuf *out, const char *s)
{
    strbuf_adds(out, "\"");
    for (; *s != '\0'; s++)
        strbuf_addf(out, *s == '"' || *s == '\\' ? "\\%c" : "%c", *s);
    strbuf_adds(out, "\"");
}

/* meta_key NULL: no metadata */
static void save_tensors(const char *path, const char *const *tensors, const char *meta_key,
                         const char *meta_value)
{
    struct strbuf header, data, file;
    strbuf_init(&header);
    strbuf_init(&data);
    strbuf_init(&file);
    strbuf_adds(&header, "{");
    if (meta_key != NULL) {
        strbuf_adds(&header, "\"__metadata__\":{");
        put_json_string(&header, meta_key);
        strbuf_adds(&header, ":");
        put_json_string(&header, meta_value);
        strbuf_adds(&header, "}");
    }
    for (; *tensors != NULL; tensors++)
        put_tensor(&header, &data, *tensors);
    strbuf_adds(&header, "}");
    uint64_t n_header = header.n;
    strbuf_add(&file, (const char *)&n_header, 8);
    strbuf_add(&file, header.p, header.n);
    strbuf_add(&file, strbuf_z(&data), data.n);
    assert_true(strbuf_ok(&file));
    write_file(path, file.p, file.n);
    strbuf_release(&header);
    strbuf_release(&data);
    strbuf_release(&file);
}

/* -------------------------------------------------------------------------------------------------- opening */

static PF_UNUSED void open_base(struct built *b, void **state, const char *const *tensors)
{
    const char *path = test_path(state, "base.safetensors");
    save_tensors(path, tensors, NULL, NULL);
    assert_ok(pf_checkpoint_open(path, NULL, &b->ckpt, &b->err), &b->err);
}

/* One component of a diffusers directory; open_components reads what was made. */
static PF_UNUSED void make_component(void **state, const char *name, const char *const *tensors)
{
    char path[512];
    const char *dir = test_path(state, "model");
    (void)mkdir(dir, 0777); /* may be there already */
    snprintf(path, sizeof path, "%s/%s", dir, name);
    assert_int_equal(mkdir(path, 0777), 0);
    snprintf(path, sizeof path, "%s/%s/%s.safetensors", dir, name,
             strncmp(name, "text", 4) == 0 ? "model" : "diffusion_pytorch_model");
    save_tensors(path, tensors, NULL, NULL);
}

static PF_UNUSED void open_components(struct built *b, void **state)
{
    char path[512];
    const char *dir = test_path(state, "model");
    snprintf(path, sizeof path, "%s/model_index.json", dir);
    write_file(path, "{}", 2);
    assert_ok(pf_checkpoint_open(dir, NULL, &b->ckpt, &b->err), &b->err);
}

/* Opens a plain file, with metadata or without. Returns the code. */
static int open_file_meta(struct built *b, void **state, const char *const *tensors,
                          const char *meta_key, const char *meta_value)
{
    const char *path = test_path(state, "adapter.safetensors");
    save_tensors(path, tensors, meta_key, meta_value);
    b->err = (pf_error){0};
    pf_adapter_close(b->a);
    b->a = NULL;
    return pf_adapter_open(path, &b->a, &b->err);
}

static PF_UNUSED int open_file(struct built *b, void **state, const char *const *tensors)
{
    return open_file_meta(b, state, tensors, NULL, NULL);
}

/* Opens a PEFT directory. */
static PF_UNUSED int open_peft(struct built *b, void **state, const char *const *tensors,
                               const char *config)
{
    const char *dir = test_path(state, "peft");
    (void)mkdir(dir, 0777); /* may be there already */
    save_tensors(test_path(state, "peft/adapter_model.safetensors"), tensors, NULL, NULL);
    write_file(test_path(state, "peft/adapter_config.json"), config, strlen(config));
    b->err = (pf_error){0};
    pf_adapter_close(b->a);
    b->a = NULL;
    return pf_adapter_open(dir, &b->a, &b->err);
}

static PF_UNUSED int resolve(struct built *b)
{
    if (b->is_resolved)
        resolution_release(&b->r);
    b->err = (pf_error){0};
    int rc = adapter_resolve(b->a, b->ckpt, &b->opts, &b->r, &b->err);
    b->is_resolved = rc == PF_OK;
    return rc;
}

/* Opens and resolves a plain file: the usual test. */
static PF_UNUSED void resolve_file(struct built *b, void **state, const char *const *tensors)
{
    assert_ok(open_file(b, state, tensors), &b->err);
    assert_ok(resolve(b), &b->err);
}

static PF_UNUSED void release(struct built *b)
{
    if (b->is_resolved)
        resolution_release(&b->r);
    pf_adapter_close(b->a);
    pf_checkpoint_close(b->ckpt);
}

/* --------------------------------------------------------------------------------------------------- asking */

/* The only delta on a tensor of the (first) component that has it. */
static PF_UNUSED const struct delta *delta_on(const struct built *b, const char *tensor)
{
    const struct delta *found = NULL;
    for (size_t i = 0; i < b->r.n_deltas; i++)
        if (str_eqz(b->ckpt->tensors[b->r.deltas[i].i_tensor].name, tensor)) {
            assert_null(found);
            found = &b->r.deltas[i];
        }
    if (found == NULL)
        print_error("no delta on '%s'\n", tensor);
    assert_non_null(found);
    return found;
}

static PF_UNUSED bool has_note(const struct built *b, const char *text)
{
    for (size_t i = 0; i < b->r.n_notes; i++)
        if (strstr(b->r.notes[i], text) != NULL)
            return true;
    return false;
}

static PF_UNUSED const char *adapter_note_with(const struct built *b, const char *text)
{
    const char *note;
    for (uint32_t i = 0; (note = pf_adapter_note(b->a, i)) != NULL; i++)
        if (strstr(note, text) != NULL)
            return note;
    return NULL;
}

static PF_UNUSED double factor_at(const struct factor *f, int64_t i, int64_t j)
{
    float v;
    assert_in_range(i, 0, f->n_rows - 1);
    assert_in_range(j, 0, f->n_cols - 1);
    dtype_to_f32(f->dtype,
                 f->p + (size_t)(i * f->row_stride + j * f->col_stride) * dtype_size(f->dtype), 1,
                 &v);
    return (double)v;
}

/* Element (i, j) of a x b, or of a alone when there is no b. */
static double side_at(const struct factor *a, const struct factor *b, int64_t i, int64_t j)
{
    if (b->p == NULL)
        return factor_at(a, i, j);
    double sum = 0;
    assert_int_equal(a->n_cols, b->n_rows);
    for (int64_t k = 0; k < a->n_cols; k++)
        sum += factor_at(a, i, k) * factor_at(b, k, j);
    return sum;
}

/* Element (i, j) of the change without its scale: row i of the delta, in double. */
static PF_UNUSED double delta_at(const struct delta *d, int64_t i, int64_t j)
{
    const struct factor *f = d->f;
    int64_t rows, cols;
    switch (d->kind) {
    case DELTA_LORA:
        return side_at(&f[0], &f[1], i, j);
    case DELTA_LOHA:
        return side_at(&f[0], &f[1], i, j) * side_at(&f[2], &f[3], i, j);
    case DELTA_LOKR:
        rows = f[2].n_rows;
        cols = f[3].p != NULL ? f[3].n_cols : f[2].n_cols;
        return side_at(&f[0], &f[1], i / rows, j / cols) *
               side_at(&f[2], &f[3], i % rows, j % cols);
    case DELTA_DIFF:
        return factor_at(&f[0], i, j);
    }
    return (double)NAN;
}

/* Element (i, j) of the n-column matrix that a spec with generated values describes. */
static PF_UNUSED double cell(const char *name, int64_t n_cols, int64_t i, int64_t j)
{
    return (double)value_of(name, (size_t)(i * n_cols + j));
}

#endif
