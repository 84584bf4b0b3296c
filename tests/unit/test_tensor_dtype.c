/*
 * Element types: the table, and every conversion against an independent formula in f64. All f16, bf16 and fp8 values are
 * visited; rounding to 16 bits is tried at every midpoint and both its neighbours.
 */
#include "testing.h"

#include "tensor/dtype.h"

#include <fenv.h>
#include <math.h>

static uint32_t bits_of(float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof(bits));
    return bits;
}

static float of_bits(uint32_t bits)
{
    float v;
    memcpy(&v, &bits, sizeof(v));
    return v;
}

/* The value of a small float by its definition; exponent all ones counts as an ordinary exponent. */
static double by_definition(uint32_t v, int n_exp, int n_man, int bias)
{
    int exp = (int)(v >> n_man) & ((1 << n_exp) - 1);
    double man = (double)(v & ((1u << n_man) - 1)) + (exp > 0 ? ldexp(1, n_man) : 0);
    double magnitude = ldexp(man, (exp > 0 ? exp : 1) - bias - n_man);
    return (v >> (n_exp + n_man) & 1) != 0 ? -magnitude : magnitude;
}

/* ------------------------------------------------------------------------------------------------ the table */

static const struct {
    int32_t dtype;
    const char *name;
    uint32_t n_bits, size;
    bool is_mergeable, is_factor;
} table[] = {
    {PF_BOOL, "BOOL", 8, 1, false, false},
    {PF_F4, "F4", 4, 0, false, false},
    {PF_F6_E2M3, "F6_E2M3", 6, 0, false, false},
    {PF_F6_E3M2, "F6_E3M2", 6, 0, false, false},
    {PF_U8, "U8", 8, 1, false, false},
    {PF_I8, "I8", 8, 1, false, false},
    {PF_F8_E5M2, "F8_E5M2", 8, 1, false, true},
    {PF_F8_E4M3, "F8_E4M3", 8, 1, false, true},
    {PF_F8_E8M0, "F8_E8M0", 8, 1, false, false},
    {PF_F8_E4M3FNUZ, "F8_E4M3FNUZ", 8, 1, false, false},
    {PF_F8_E5M2FNUZ, "F8_E5M2FNUZ", 8, 1, false, false},
    {PF_I16, "I16", 16, 2, false, false},
    {PF_U16, "U16", 16, 2, false, false},
    {PF_F16, "F16", 16, 2, true, true},
    {PF_BF16, "BF16", 16, 2, true, true},
    {PF_I32, "I32", 32, 4, false, false},
    {PF_U32, "U32", 32, 4, false, false},
    {PF_F32, "F32", 32, 4, true, true},
    {PF_C64, "C64", 64, 8, false, false},
    {PF_F64, "F64", 64, 8, false, true},
    {PF_I64, "I64", 64, 8, false, false},
    {PF_U64, "U64", 64, 8, false, false},
};

static void names_sizes_and_roles(void **state)
{
    (void)state;
    assert_int_equal(PF_COUNTOF(table), PF_N_DTYPES);
    for (size_t i = 0; i < PF_COUNTOF(table); i++) {
        int32_t dtype = table[i].dtype, parsed = -1;
        assert_string_equal(pf_dtype_name(dtype), table[i].name);
        assert_int_equal(pf_dtype_bits(dtype), table[i].n_bits);
        assert_int_equal(dtype_size(dtype), table[i].size);
        assert_int_equal(dtype_is_mergeable(dtype), table[i].is_mergeable);
        assert_int_equal(dtype_is_factor(dtype), table[i].is_factor);
        assert_true(dtype_parse(str_of(table[i].name), &parsed));
        assert_int_equal(parsed, dtype);
    }
    static const int32_t unknown[] = {-1, PF_N_DTYPES, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < PF_COUNTOF(unknown); i++) {
        assert_string_equal(pf_dtype_name(unknown[i]), "?");
        assert_int_equal(pf_dtype_bits(unknown[i]), 0);
        assert_int_equal(dtype_size(unknown[i]), 0);
        assert_false(dtype_is_mergeable(unknown[i]));
        assert_false(dtype_is_factor(unknown[i]));
    }
}

static void names_are_spelled_exactly(void **state)
{
    (void)state;
    int32_t dtype = 77;
    static const char *const bad[] = {"",   "bf16",      "BF1", "BF16 ",
                                      "F8", "F8_E4M3FN", "?",   "float32"};
    for (size_t i = 0; i < PF_COUNTOF(bad); i++)
        assert_false(dtype_parse(str_of(bad[i]), &dtype));
    assert_false(dtype_parse((struct str){NULL, 0}, &dtype));
    assert_false(dtype_parse((struct str){"F16\0", 4}, &dtype));
    assert_int_equal(dtype, 77);
}

/* ------------------------------------------------------------------------------------------------- widening */

static void assert_value(float got, double want, uint32_t code)
{
    double wide = (double)got;
    if (memcmp(&wide, &want, sizeof(want)) != 0)
        fail_msg("0x%x: %a, not %a", code, wide, want);
}

static void every_f16_widens_exactly(void **state)
{
    (void)state;
    for (uint32_t v = 0; v < 65536; v++) {
        uint32_t got = bits_of(f32_from_f16((uint16_t)v)), sign = v >> 15 << 31, man = v & 0x3ff;
        if ((v & 0x7c00) != 0x7c00)
            assert_value(f32_from_f16((uint16_t)v), by_definition(v, 5, 10, 15), v);
        else if (man == 0)
            assert_int_equal(got, sign | 0x7f800000);
        else /* the payload stays on top, quiet */
            assert_int_equal(got, sign | 0x7fc00000 | man << 13);
    }
}

static void every_bf16_widens_to_its_own_bits(void **state)
{
    (void)state;
    for (uint32_t v = 0; v < 65536; v++) {
        assert_int_equal(bits_of(f32_from_bf16((uint16_t)v)), v << 16);
        if ((v & 0x7f80) != 0x7f80)
            assert_value(f32_from_bf16((uint16_t)v), by_definition(v, 8, 7, 127), v);
    }
}

static void every_fp8_widens_exactly(void **state)
{
    (void)state;
    for (uint32_t v = 0; v < 256; v++) {
        float e4m3 = f32_from_f8_e4m3((uint8_t)v), e5m2 = f32_from_f8_e5m2((uint8_t)v);
        if ((v & 0x7f) != 0x7f)
            assert_value(e4m3, by_definition(v, 4, 3, 7), v);
        else
            assert_true(isnan(e4m3) && (signbit(e4m3) != 0) == (v > 0x7f));
        if ((v & 0x7c) != 0x7c)
            assert_value(e5m2, by_definition(v, 5, 2, 15), v);
        else if ((v & 3) == 0)
            assert_true(isinf(e5m2) && (e5m2 < 0) == (v > 0x7f));
        else
            assert_true(isnan(e5m2) && (signbit(e5m2) != 0) == (v > 0x7f));
    }
    assert_true(f32_from_f8_e4m3(0x7e) == 448.0f); /* "FN": the top exponent holds numbers */
    assert_true(f32_from_f8_e5m2(0x7b) == 57344.0f);
}

/* ------------------------------------------------------------------------------------------------ narrowing */

struct narrow {
    uint16_t (*round)(float);
    int n_exp, n_man, bias;
    uint32_t inf; /* code of infinity, one above the largest finite one */
};
static const struct narrow to_f16 = {f16_from_f32, 5, 10, 15, 0x7c00};
static const struct narrow to_bf16 = {bf16_from_f32, 8, 7, 127, 0x7f80};

/* Nearest by search: positive codes ascend with their values, infinity standing for the power of two that comes next. */
static uint16_t nearest(const struct narrow *t, float v)
{
    double x = fabs((double)v);
    uint32_t lo = 0, hi = t->inf, sign = signbit(v) ? 0x8000 : 0;
    if (x >= by_definition(hi, t->n_exp, t->n_man, t->bias))
        return (uint16_t)(sign | hi);
    while (hi - lo > 1) {
        uint32_t mid = (lo + hi) / 2;
        if (by_definition(mid, t->n_exp, t->n_man, t->bias) <= x)
            lo = mid;
        else
            hi = mid;
    }
    double middle = (by_definition(lo, t->n_exp, t->n_man, t->bias) +
                     by_definition(hi, t->n_exp, t->n_man, t->bias)) /
                    2;
    if (x == middle)
        return (uint16_t)(sign | (lo % 2 == 0 ? lo : hi));
    return (uint16_t)(sign | (x < middle ? lo : hi));
}

static void assert_nearest(const struct narrow *t, float v)
{
    uint16_t got = t->round(v), want = nearest(t, v);
    if (got != want)
        fail_msg("%a: 0x%04x, not 0x%04x", (double)v, got, want);
}

static void assert_rounds_to_nearest_even(const struct narrow *t)
{
    for (uint32_t code = 0; code < t->inf; code++) {
        double value = by_definition(code, t->n_exp, t->n_man, t->bias);
        double middle = (value + by_definition(code + 1, t->n_exp, t->n_man, t->bias)) / 2;
        float m = (float)middle;
        assert_true((double)m == middle);
        const float tries[] = {(float)value, m, nextafterf(m, 0), nextafterf(m, (float)INFINITY)};
        for (size_t i = 0; i < PF_COUNTOF(tries); i++) {
            assert_nearest(t, tries[i]);
            assert_nearest(t, -tries[i]);
        }
        assert_int_equal(t->round((float)value), code);
    }
    assert_int_equal(t->round((float)INFINITY), t->inf);
    assert_int_equal(t->round(-(float)INFINITY), t->inf | 0x8000);
    struct rng r = {17};
    for (int i = 0; i < 300000; i++) {
        uint32_t bits = (uint32_t)rng_next(&r);
        if (i % 2 == 0) /* half of them in the range of f16 */
            bits = (bits & 0x87ffffff) | (uint32_t)(102 + rng_below(&r, 42)) << 23;
        if ((bits & 0x7f800000) != 0x7f800000)
            assert_nearest(t, of_bits(bits));
    }
}

static void f16_rounds_to_nearest_even(void **state)
{
    (void)state;
    assert_rounds_to_nearest_even(&to_f16);
    assert_int_equal(f16_from_f32(65519.996f), 0x7bff);
    assert_int_equal(f16_from_f32(65520.0f), 0x7c00);
    assert_int_equal(f16_from_f32(0x1p-24f), 1);
    assert_int_equal(f16_from_f32(0x1p-25f), 0);
    assert_int_equal(f16_from_f32(0x1.000002p-25f), 1);
    assert_int_equal(f16_from_f32(-0x1p-149f), 0x8000);
}

static void bf16_rounds_to_nearest_even(void **state)
{
    (void)state;
    assert_rounds_to_nearest_even(&to_bf16);
    assert_int_equal(bf16_from_f32(of_bits(0x7f7f7fff)), 0x7f7f);
    assert_int_equal(bf16_from_f32(of_bits(0x7f7f8000)), 0x7f80);
    assert_int_equal(bf16_from_f32(of_bits(1)), 0);
    assert_int_equal(bf16_from_f32(of_bits(0x80008001)), 0x8001);
}

static void nans_become_quiet_and_keep_their_upper_payload(void **state)
{
    (void)state;
    struct rng r = {23};
    for (int i = 0; i < 100000; i++) {
        uint32_t bits = (uint32_t)rng_next(&r) | 0x7f800000;
        if (i < 23)
            bits = 0x7f800000 | 1u << i; /* one bit each: none may round away to infinity */
        else if ((bits & 0x7fffff) == 0)
            continue;
        assert_int_equal(f16_from_f32(of_bits(bits)),
                         (bits >> 16 & 0x8000) | 0x7e00 | (bits >> 13 & 0x3ff));
        assert_int_equal(bf16_from_f32(of_bits(bits)), (bits >> 16) | 0x40);
    }
}

/* Neither the rounding mode nor flush-to-zero of the caller may matter for the bit-pattern conversions. */
static void rounding_mode_of_the_caller_does_not_matter(void **state)
{
    (void)state;
    static const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    for (size_t i = 0; i < PF_COUNTOF(modes); i++) {
        struct rng r = {29};
        for (int k = 0; k < 3000; k++) {
            float v = of_bits((uint32_t)rng_next(&r) & 0xbfffffff);
            uint16_t f16 = f16_from_f32(v), bf16 = bf16_from_f32(v);
            assert_int_equal(fesetround(modes[i]), 0);
            uint16_t f16_moded = f16_from_f32(v), bf16_moded = bf16_from_f32(v);
            float subnormal = f32_from_f16((uint16_t)(k & 0x83ff));
            assert_int_equal(fesetround(FE_TONEAREST), 0);
            assert_int_equal(f16, f16_moded);
            assert_int_equal(bf16, bf16_moded);
            assert_value(subnormal, by_definition((uint32_t)k & 0x83ff, 5, 10, 15), (uint32_t)k);
        }
    }
}

/* ------------------------------------------------------------------------------------------------- arrays */

/* Unaligned on both sides, one element at a time as the oracle, and nothing beyond n is written. */
static void arrays_convert_unaligned(void **state)
{
    (void)state;
    static const int32_t dtypes[] = {PF_F32, PF_F16, PF_BF16, PF_F64, PF_F8_E4M3, PF_F8_E5M2};
    enum { N = 777 };
    unsigned char src[N * 8 + 1], dst[N * 4 + 1 + 4];
    struct rng r = {31};
    for (size_t i = 0; i < sizeof(src); i++)
        src[i] = (unsigned char)rng_next(&r);
    for (size_t d = 0; d < PF_COUNTOF(dtypes); d++) {
        size_t size = dtype_size(dtypes[d]);
        memset(dst, 0xee, sizeof(dst));
        dtype_to_f32(dtypes[d], src + 1, N, (float *)(void *)(dst + 1));
        for (size_t i = 0; i < N; i++) {
            uint16_t half;
            double wide;
            float want, got;
            const unsigned char *p = src + 1 + i * size;
            memcpy(&half, p, sizeof(half));
            memcpy(&wide, p, sizeof(wide) < size ? sizeof(wide) : size);
            switch (dtypes[d]) {
            case PF_F16:
                want = f32_from_f16(half);
                break;
            case PF_BF16:
                want = f32_from_bf16(half);
                break;
            case PF_F8_E4M3:
                want = f32_from_f8_e4m3(*p);
                break;
            case PF_F8_E5M2:
                want = f32_from_f8_e5m2(*p);
                break;
            case PF_F64:
                want = (float)wide;
                break;
            default:
                memcpy(&want, p, sizeof(want));
            }
            memcpy(&got, dst + 1 + i * 4, sizeof(got));
            assert_int_equal(bits_of(got), bits_of(want));
        }
        assert_int_equal(dst[0], 0xee);
        for (size_t i = 1 + (size_t)N * 4; i < sizeof(dst); i++)
            assert_int_equal(dst[i], 0xee);
        dtype_to_f32(dtypes[d], NULL, 0, NULL); /* nothing to do is fine */
    }
}

static void f64_is_rounded_once_to_nearest_even(void **state)
{
    (void)state;
    static const struct {
        double from;
        float to;
    } rows[] = {
        {1 + 0x1p-24, 1},                         /* a tie, to even */
        {1 + 0x1.8p-23, 1 + 0x1p-22f},            /* a tie, to even, upwards */
        {1 + 0x1p-24 + 0x1p-52, 1 + 0x1p-23f},    /* just above one */
        {0x1.ffffffp127, (float)INFINITY},        /* halfway to 2^128 */
        {0x1.fffffefffffffp127, 0x1.fffffep127f}, /* just below */
        {0x1p-150, 0},                            /* half the smallest subnormal */
        {0x1.0000000000001p-150, 0x1p-149f},      /* just above */
        {-0x1p-1074, -0.0f},
    };
    for (size_t i = 0; i < PF_COUNTOF(rows); i++) {
        float got;
        dtype_to_f32(PF_F64, &rows[i].from, 1, &got);
        assert_int_equal(bits_of(got), bits_of(rows[i].to));
    }
}

/* ------------------------------------------------------------------------------------------------- scalars */

#define assert_scalar(dtype, type, literal, want)                                                  \
    do {                                                                                           \
        type value = literal;                                                                      \
        double got = 77;                                                                           \
        assert_true(dtype_scalar_to_double(dtype, &value, &got));                                  \
        assert_true(got == (want));                                                                \
    } while (0)

static void scalars_of_every_numeric_dtype(void **state)
{
    (void)state;
    assert_scalar(PF_U8, uint8_t, 200, 200);
    assert_scalar(PF_I8, int8_t, -100, -100);
    assert_scalar(PF_U16, uint16_t, 65535, 65535);
    assert_scalar(PF_I16, int16_t, -32768, -32768);
    assert_scalar(PF_U32, uint32_t, 4294967295u, 4294967295.0);
    assert_scalar(PF_I32, int32_t, INT32_MIN, -2147483648.0);
    assert_scalar(PF_U64, uint64_t, UINT64_MAX, 0x1p64);
    assert_scalar(PF_I64, int64_t, -16, -16);
    assert_scalar(PF_F64, double, 0.1, 0.1);
    assert_scalar(PF_F32, float, 0.1f, (double)0.1f);
    assert_scalar(PF_F16, uint16_t, 0x4c00, 16);
    assert_scalar(PF_BF16, uint16_t, 0x4180, 16);
    assert_scalar(PF_F8_E4M3, uint8_t, 0x58, 16);
    assert_scalar(PF_F8_E5M2, uint8_t, 0x4c, 16);
    assert_scalar(PF_F8_E8M0, uint8_t, 131, 16);
    assert_scalar(PF_F8_E8M0, uint8_t, 0, 0x1p-127);
    assert_scalar(PF_F8_E8M0, uint8_t, 254, 0x1p127);
    for (uint32_t v = 0; v < 256; v++) {
        uint8_t code = (uint8_t)v;
        double e4m3, e5m2;
        assert_true(dtype_scalar_to_double(PF_F8_E4M3FNUZ, &code, &e4m3));
        assert_true(dtype_scalar_to_double(PF_F8_E5M2FNUZ, &code, &e5m2));
        if (v == 0x80) {
            assert_true(isnan(e4m3) && isnan(e5m2));
        } else {
            assert_true(e4m3 == by_definition(v, 4, 3, 8));
            assert_true(e5m2 == by_definition(v, 5, 2, 16));
        }
    }
    uint8_t nan_code = 0xff;
    double got = 0;
    assert_true(dtype_scalar_to_double(PF_F8_E8M0, &nan_code, &got) && isnan(got));
}

static void scalars_may_be_unaligned(void **state)
{
    (void)state;
    unsigned char raw[16] = {0};
    double want = 12.5, got = 0;
    memcpy(raw + 1, &want, sizeof(want));
    assert_true(dtype_scalar_to_double(PF_F64, raw + 1, &got) && got == 12.5);
    memset(raw, 0, sizeof(raw));
    raw[3] = 8;
    assert_true(dtype_scalar_to_double(PF_I64, raw + 3, &got) && got == 8);
}

static void scalars_without_a_number_are_refused(void **state)
{
    (void)state;
    static const int32_t none[] = {PF_BOOL, PF_F4, PF_F6_E2M3, PF_F6_E3M2, PF_C64, -1, PF_N_DTYPES};
    uint64_t bytes = 1;
    double out = 77;
    for (size_t i = 0; i < PF_COUNTOF(none); i++)
        assert_false(dtype_scalar_to_double(none[i], &bytes, &out));
    assert_true(out == 77);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_sizes_and_roles),
        cmocka_unit_test(names_are_spelled_exactly),
        cmocka_unit_test(every_f16_widens_exactly),
        cmocka_unit_test(every_bf16_widens_to_its_own_bits),
        cmocka_unit_test(every_fp8_widens_exactly),
        cmocka_unit_test(f16_rounds_to_nearest_even),
        cmocka_unit_test(bf16_rounds_to_nearest_even),
        cmocka_unit_test(nans_become_quiet_and_keep_their_upper_payload),
        cmocka_unit_test(rounding_mode_of_the_caller_does_not_matter),
        cmocka_unit_test(arrays_convert_unaligned),
        cmocka_unit_test(f64_is_rounded_once_to_nearest_even),
        cmocka_unit_test(scalars_of_every_numeric_dtype),
        cmocka_unit_test(scalars_may_be_unaligned),
        cmocka_unit_test(scalars_without_a_number_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
