/*
 * The arithmetic contract once more, element by element, written from docs/arithmetic.md alone: what the kernels are compared with.
 * It shares no code with src/merge and decodes and rounds by methods of its own. Also what the merge tests build their cases from.
 */
#ifndef PF_TEST_MERGE_REF_H
#define PF_TEST_MERGE_REF_H

#include "testing.h"

#include <math.h>

#include "merge/merge_int.h"
#include "tensor/dtype.h"

static PF_UNUSED int64_t rng_range(struct rng *r, int64_t low, int64_t high) /* both included */
{
    return low + (int64_t)(rng_next(r) % (uint64_t)(high - low + 1));
}

static PF_UNUSED double rng_normal(struct rng *r)
{
    return sqrt(-2 * log(rng_unit(r) + 0x1p-60)) * cos(6.283185307179586 * rng_unit(r));
}

static PF_UNUSED uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static PF_UNUSED float of_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, 4);
    return x;
}

/* sign, exponent and mantissa fields of any small format, by arithmetic; a NaN keeps its payload and becomes quiet */
static PF_UNUSED float ref_small_float(uint32_t v, int n_exp, int n_man, bool has_inf)
{
    const uint32_t man = v & ((1u << n_man) - 1);
    const uint32_t exp = (v >> n_man) & ((1u << n_exp) - 1);
    const bool is_negative = (v >> (n_man + n_exp)) & 1;
    const int bias = (1 << (n_exp - 1)) - 1;
    if (has_inf && exp == (1u << n_exp) - 1)
        return of_bits((is_negative ? 0x80000000u : 0) | 0x7f800000u | (man != 0 ? 0x400000u : 0) |
                       man << (23 - n_man));
    const double x = exp == 0 ? ldexp((double)man, 1 - bias - n_man)
                              : ldexp((double)(man | 1u << n_man), (int)exp - bias - n_man);
    return (float)(is_negative ? -x : x);
}

static PF_UNUSED float ref_decode(int32_t dtype, const uint8_t *p)
{
    uint16_t h;
    float f;
    double d;
    switch (dtype) {
    case PF_BF16:
        memcpy(&h, p, 2);
        return of_bits((uint32_t)h << 16);
    case PF_F16:
        memcpy(&h, p, 2);
        return ref_small_float(h, 5, 10, true);
    case PF_F8_E4M3:
        return ref_small_float(*p, 4, 3, false);
    case PF_F8_E5M2:
        return ref_small_float(*p, 5, 2, true);
    case PF_F64:
        memcpy(&d, p, 8);
        return (float)d;
    default:
        memcpy(&f, p, 4);
        return f;
    }
}

/* The nearer of the two neighbours in a format of n_man mantissa bits and least exponent e_min; the even one on a tie. */
static PF_UNUSED double ref_round(double x, int n_man, int e_min)
{
    int e;
    (void)frexp(x, &e);
    e = e - 1 < e_min ? e_min : e - 1;
    const double ulp = ldexp(1, e - n_man);
    const double down = floor(x / ulp); /* a power of two divides exactly */
    const double rest = x / ulp - down;
    const bool is_up = rest > 0.5 || (rest == 0.5 && fmod(down, 2) != 0);
    return copysign((down + (is_up ? 1 : 0)) * ulp, x);
}

static PF_UNUSED uint16_t ref_encode16(int32_t dtype, float x)
{
    if (isinf(x))
        return (uint16_t)((dtype == PF_BF16 ? 0x7f80 : 0x7c00) | (signbit(x) ? 0x8000 : 0));
    const bool is_bf16 = dtype == PF_BF16;
    const double r = ref_round((double)x, is_bf16 ? 7 : 10, is_bf16 ? -126 : -14);
    if (is_bf16)
        return (uint16_t)(bits_of((float)r) >> 16);
    /* every f16 value in order of magnitude is its own bit pattern: find it by its fields */
    const double m = fabs(r);
    uint32_t u;
    if (m < 0x1p-14) {
        u = (uint32_t)(m * 0x1p24);
    } else {
        int e;
        const double f = frexp(m, &e); /* m = f * 2^e, f in [0.5, 1) */
        u = (uint32_t)((e + 14) << 10) + (uint32_t)((2 * f - 1) * 1024);
    }
    return (uint16_t)(u | (signbit(r) ? 0x8000 : 0));
}

static PF_UNUSED float ref_at(const struct factor *f, int64_t i, int64_t j)
{
    return ref_decode(f->dtype, f->p + (i * f->row_stride + j * f->col_stride) *
                                           (int64_t)dtype_size(f->dtype));
}

static PF_UNUSED float ref_chain(const struct factor *b, const struct factor *a, int64_t m,
                                 int64_t n)
{
    float acc = 0;
    for (int64_t k = 0; k < a->n_rows; k++)
        acc = fmaf(ref_at(b, m, k), ref_at(a, k, n), acc);
    return acc;
}

static PF_UNUSED float ref_delta(const struct delta *d, int64_t m, int64_t n)
{
    const struct factor *f = d->f;
    switch (d->kind) {
    case DELTA_LORA:
        return ref_chain(&f[0], &f[1], m, n);
    case DELTA_LOHA:
        return ref_chain(&f[0], &f[1], m, n) * ref_chain(&f[2], &f[3], m, n);
    case DELTA_LOKR: {
        const int64_t p = f[2].n_rows;
        const int64_t q = f[3].p != NULL ? f[3].n_cols : f[2].n_cols;
        const float w1 =
            f[1].p != NULL ? ref_chain(&f[0], &f[1], m / p, n / q) : ref_at(&f[0], m / p, n / q);
        const float w2 =
            f[3].p != NULL ? ref_chain(&f[2], &f[3], m % p, n % q) : ref_at(&f[2], m % p, n % q);
        return w1 * w2;
    }
    case DELTA_DIFF:
        return ref_at(&f[0], m, n);
    }
    return 0;
}

/* false: no term covers the row */
static PF_UNUSED bool ref_total(const struct merge_target *t, int64_t m, int64_t n, float *out)
{
    bool is_covered = false;
    float total = 0;
    for (size_t i = 0; i < t->n_terms; i++) {
        const struct delta *d = t->terms[i].delta;
        if (m < d->row0 || m >= d->row0 + d->n_rows)
            continue;
        is_covered = true;
        total = fmaf(t->terms[i].s, ref_delta(d, m - d->row0, n), total);
    }
    *out = total;
    return is_covered;
}

/* One element: its bytes in out_dtype, and the f32 of those bytes. */
static PF_UNUSED void ref_element(const struct merge_target *t, int64_t m, int64_t n,
                                  uint8_t *native, float *as_f32)
{
    const size_t size = dtype_size(t->dtype);
    const uint8_t *base = t->base + (size_t)(m * t->n_cols + n) * size;
    const float w = ref_decode(t->dtype, base);
    float total;
    if (!ref_total(t, m, n, &total) || isnan(w)) {
        if (t->out_dtype == t->dtype)
            memcpy(native, base, size);
        else
            memcpy(native, &w, 4);
        memcpy(as_f32, &w, 4);
        return;
    }
    const float sum = w + total;
    if (t->out_dtype == PF_F32) {
        memcpy(native, &sum, 4);
        memcpy(as_f32, &sum, 4);
        return;
    }
    const uint16_t h = ref_encode16(t->dtype, sum);
    memcpy(native, &h, 2);
    const float f = ref_decode(t->dtype, native);
    memcpy(as_f32, &f, 4);
}

/* ------------------------------------------------------------------------------------- making cases */

enum { ANY_KIND = -1, CASE_TERMS = 4, CASE_BUFFERS = CASE_TERMS * 4 + 1 };

struct merge_case {
    struct merge_target t;
    struct merge_term terms[CASE_TERMS];
    struct delta deltas[CASE_TERMS];
    /* Each as long as it must be, so that a sanitizer sees a step beyond */
    uint8_t *buffers[CASE_BUFFERS];
    size_t n_buffers;
};

static PF_UNUSED void encode(int32_t dtype, double x, uint8_t *p)
{
    const float f = (float)x;
    if (dtype == PF_F32) {
        memcpy(p, &f, 4);
    } else if (dtype == PF_F64) {
        memcpy(p, &x, 8);
    } else if (dtype == PF_BF16 || dtype == PF_F16) {
        const uint16_t h = ref_encode16(dtype, f);
        memcpy(p, &h, 2);
    }
}

/* n elements at an odd address, of relative size `scale`; fp8 ones are finite bit patterns. */
static PF_UNUSED uint8_t *case_values(struct merge_case *c, struct rng *r, int32_t dtype, int64_t n,
                                      double scale)
{
    const size_t size = dtype_size(dtype);
    const size_t shift = (size_t)rng_range(r, 0, 3);
    uint8_t *buffer = malloc((size_t)n * size + shift);
    c->buffers[c->n_buffers++] = buffer;
    for (int64_t i = 0; i < n; i++) {
        uint8_t *p = buffer + shift + (size_t)i * size;
        if (dtype == PF_F8_E4M3 || dtype == PF_F8_E5M2)
            *p = (uint8_t)(rng_next(r) & (dtype == PF_F8_E4M3 ? 0xb7 : 0xbb));
        else
            encode(dtype, rng_range(r, 0, 40) == 0 ? -0.0 : rng_normal(r) * scale, p);
    }
    return buffer + shift;
}

static PF_UNUSED struct factor case_factor(struct merge_case *c, struct rng *r, int64_t n_rows,
                                           int64_t n_cols)
{
    static const int32_t dtypes[] = {PF_F32, PF_BF16, PF_F16, PF_F64, PF_F8_E4M3, PF_F8_E5M2};
    struct factor f = {.dtype = dtypes[rng_range(r, 0, 7) % 6], .n_rows = n_rows, .n_cols = n_cols};
    const bool is_transposed = rng_range(r, 0, 3) == 0;
    f.row_stride = is_transposed ? 1 : n_cols;
    f.col_stride = is_transposed ? n_rows : 1;
    f.p = case_values(c, r, f.dtype, n_rows * n_cols, 0.3);
    return f;
}

static PF_UNUSED int64_t a_divisor(struct rng *r, int64_t n)
{
    int64_t d = rng_range(r, 1, n);
    while (n % d != 0)
        d--;
    return d;
}

static PF_UNUSED void case_lokr(struct merge_case *c, struct rng *r, struct delta *d, int64_t rank)
{
    const int64_t p = a_divisor(r, d->n_rows);
    const int64_t q = a_divisor(r, d->n_cols);
    const int64_t rows[2] = {d->n_rows / p, p};
    const int64_t cols[2] = {d->n_cols / q, q};
    for (int i = 0; i < 2; i++) {
        const bool is_factored = rng_range(r, 0, 1) == 1;
        d->f[2 * i] = case_factor(c, r, rows[i], is_factored ? rank : cols[i]);
        if (is_factored)
            d->f[2 * i + 1] = case_factor(c, r, rank, cols[i]);
    }
}

static PF_UNUSED void case_delta(struct merge_case *c, struct rng *r, struct delta *d,
                                 enum delta_kind kind, int64_t rank)
{
    const int64_t rows = c->t.n_rows;
    *d = (struct delta){.kind = kind, .n_rows = rows, .n_cols = c->t.n_cols, .rank = rank};
    if (rng_range(r, 0, 2) == 0) {
        d->row0 = rng_range(r, 0, rows - 1);
        d->n_rows = rng_range(r, 1, rows - d->row0);
    }
    if (kind == DELTA_DIFF) {
        d->f[0] = case_factor(c, r, d->n_rows, d->n_cols);
    } else if (kind == DELTA_LOKR) {
        case_lokr(c, r, d, rank);
    } else {
        for (int i = 0; i < (kind == DELTA_LOHA ? 4 : 2); i += 2) {
            d->f[i] = case_factor(c, r, d->n_rows, rank);
            d->f[i + 1] = case_factor(c, r, rank, d->n_cols);
        }
    }
}

/* Some of every odd value that a base may hold. */
static PF_UNUSED void case_specials(struct merge_case *c, struct rng *r, uint8_t *base)
{
    static const uint32_t of_f32[] = {0x80000000u, 0,           1,           0x807fffffu,
                                      0x7f800001u, 0xffc12345u, 0x7f800000u, 0xff800000u,
                                      0x00800000u, 0x7fa00000u};
    static const uint16_t of_bf16[] = {0x8000, 0,      1,      0x807f, 0x7f81,
                                       0xffd1, 0x7f80, 0xff80, 0x0080, 0x7fa0};
    static const uint16_t of_f16[] = {0x8000, 0,      1,      0x83ff, 0x7c01,
                                      0xfe55, 0x7c00, 0xfc00, 0x0400, 0x7d00};
    const int64_t n = c->t.n_rows * c->t.n_cols;
    for (int64_t i = 0; i < n; i += rng_range(r, 1, 30)) {
        const int64_t which = rng_range(r, 0, 9);
        if (c->t.dtype == PF_F32)
            memcpy(base + i * 4, &of_f32[which], 4);
        else
            memcpy(base + i * 2, c->t.dtype == PF_BF16 ? &of_bf16[which] : &of_f16[which], 2);
    }
}

static PF_UNUSED void case_new(struct merge_case *c, struct rng *r, int32_t dtype, int64_t n_rows,
                               int64_t n_cols, int64_t rank, int n_terms, int kind)
{
    memset(c, 0, sizeof(*c));
    c->t = (struct merge_target){.dtype = dtype,
                                 .out_dtype = dtype,
                                 .n_rows = n_rows,
                                 .n_cols = n_cols,
                                 .terms = c->terms,
                                 .n_terms = (size_t)n_terms};
    uint8_t *base = case_values(c, r, dtype, n_rows * n_cols, 0.02);
    case_specials(c, r, base);
    c->t.base = base;
    for (int i = 0; i < n_terms; i++) {
        const int any = (int)(rng_range(r, 0, 6) % 4);
        case_delta(c, r, &c->deltas[i], (enum delta_kind)(kind == ANY_KIND ? any : kind),
                   i == 0 ? rank : rng_range(r, 1, 9));
        c->terms[i] = (struct merge_term){&c->deltas[i], (float)(rng_normal(r) * 0.01)};
    }
}

static PF_UNUSED void case_free(struct merge_case *c)
{
    for (size_t i = 0; i < c->n_buffers; i++)
        free(c->buffers[i]);
}

#endif
