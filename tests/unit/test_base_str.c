/*
 * Strings: slices, natural order, strict numbers, edit distance against a plain table, UTF-8 against a plain decoder, buffers.
 */
#include "testing.h"

#include "base/mem.h"
#include "base/str.h"

#include <locale.h>
#include <math.h>
#include <wchar.h>

#define S(literal) ((struct str){literal, sizeof(literal) - 1})

static void slices_compare_by_bytes_and_length(void **state)
{
    (void)state;
    struct str none = {NULL, 0};
    assert_true(str_eq(none, S("")));
    assert_true(str_eq(S("a\0b"), S("a\0b")));
    assert_false(str_eq(S("a\0b"), S("a\0c")));
    assert_false(str_eq(S("a"), S("ab")));
    assert_true(str_eqz(str_of("weight"), "weight"));
    assert_false(str_eqz(S("weight\0"), "weight"));
    assert_true(str_starts(S("lora_A.weight"), "lora_"));
    assert_false(str_starts(S("lor"), "lora_"));
    assert_true(str_starts(none, ""));
    assert_true(str_ends(S("lora_A.weight"), ".weight"));
    assert_false(str_ends(S("eight"), ".weight"));
    assert_true(str_ends(none, ""));
    assert_true(str_eqz(str_cut_front(S("a.b.c"), 2), "b.c"));
    assert_true(str_eqz(str_cut_back(S("a.b.c"), 2), "a.b"));
    assert_int_equal(str_cut_front(none, 0).n, 0);
    assert_int_equal(str_cut_front(S("abc"), 3).n, 0);
    assert_int_equal(str_cmp(S("a"), S("b")), -1);
    assert_int_equal(str_cmp(S("a"), S("a\0")), -1);
    assert_int_equal(str_cmp(S("\xff"), S("a")), 1); /* bytes are unsigned */
    assert_int_equal(str_cmp(none, S("")), 0);
}

static void natural_order_compares_numbers_as_numbers(void **state)
{
    (void)state;
    /* in ascending order */
    static const char *const z[] = {"",
                                    ".1",
                                    "0",
                                    "1",
                                    "01",
                                    "1.",
                                    "2",
                                    "10",
                                    "18446744073709551616",
                                    "99999999999999999999999999999999",
                                    "blocks",
                                    "blocks.",
                                    "blocks.2",
                                    "blocks.2.attn",
                                    "blocks.02.attnb",
                                    "blocks.10",
                                    "blocks.10.a2",
                                    "blocks.10.a10",
                                    "blocks.a",
                                    "blocks2.z",
                                    "blocks10.a"};
    for (size_t i = 0; i < PF_COUNTOF(z); i++)
        for (size_t k = 0; k < PF_COUNTOF(z); k++) {
            int want = (i > k) - (i < k), got = str_cmp_natural(str_of(z[i]), str_of(z[k]));
            if (i != k && (strcmp(z[i], "01") == 0 || strcmp(z[k], "01") == 0) &&
                (strcmp(z[i], "1") == 0 || strcmp(z[k], "1") == 0))
                continue; /* a tie by value: any order that is total */
            if (got != want)
                fail_msg("'%s' against '%s': %d, not %d", z[i], z[k], got, want);
        }
    assert_int_equal(str_cmp_natural(S("1"), S("01")), -str_cmp_natural(S("01"), S("1")));
    assert_int_not_equal(str_cmp_natural(S("1"), S("01")), 0);
}

static struct str random_text(struct rng *r, char *p, size_t n_max, const char *alphabet)
{
    size_t n = (size_t)rng_below(r, n_max + 1), n_alphabet = strlen(alphabet);
    for (size_t i = 0; i < n; i++)
        p[i] = alphabet[rng_below(r, n_alphabet)];
    return (struct str){p, n};
}

static void natural_order_is_total(void **state)
{
    (void)state;
    struct rng r = {11};
    char p[3][8];
    for (int i = 0; i < 200000; i++) {
        struct str a = random_text(&r, p[0], 5, "01.a"), b = random_text(&r, p[1], 5, "01.a"),
                   c = random_text(&r, p[2], 5, "01.a");
        int ab = str_cmp_natural(a, b), bc = str_cmp_natural(b, c), ac = str_cmp_natural(a, c);
        assert_int_equal(ab, -str_cmp_natural(b, a));
        assert_int_equal(ab == 0, str_eq(a, b));
        if (ab <= 0 && bc <= 0)
            assert_true(ac <= 0);
    }
}

static void u64_takes_digits_only(void **state)
{
    (void)state;
    uint64_t v = 77;
    assert_true(str_to_u64(S("0"), &v) && v == 0);
    assert_true(str_to_u64(S("007"), &v) && v == 7);
    assert_true(str_to_u64(S("18446744073709551615"), &v) && v == UINT64_MAX);
    v = 77;
    static const char *const bad[] = {
        "",   "-1", "+1", " 1", "1 ", "1.0", "0x1", "18446744073709551616", "99999999999999999999",
        "1e3"};
    for (size_t i = 0; i < PF_COUNTOF(bad); i++)
        assert_false(str_to_u64(str_of(bad[i]), &v));
    assert_false(str_to_u64(S("1\0"), &v));
    assert_int_equal(v, 77);
}

static void double_takes_the_whole_slice(void **state)
{
    (void)state;
    double v = 77;
    assert_true(str_to_double(S("0.8"), &v) && v == 0.8);
    assert_true(str_to_double(S("-1e-3"), &v) && v == -1e-3);
    assert_true(str_to_double(S("16"), &v) && v == 16);
    assert_true(str_to_double(S("nan"), &v) && isnan(v));
    assert_true(str_to_double(S("-inf"), &v) && isinf(v));
    /* No terminator needed */
    assert_true(str_to_double((struct str){"1.25xyz", 4}, &v) && v == 1.25);
    v = 77;
    static const char *const bad[] = {"",    " 1", "\t1", "\n1", "1 ", "1x",
                                      "1,5", "x",  ".",   "--1", "1e"};
    for (size_t i = 0; i < PF_COUNTOF(bad); i++)
        assert_false(str_to_double(str_of(bad[i]), &v));
    assert_false(str_to_double(S("1\0"), &v));
    char many[300];
    memset(many, '1', sizeof(many));
    assert_true(str_to_double((struct str){many, 255}, &v));
    v = 77;
    assert_false(str_to_double((struct str){many, 256}, &v));
    assert_true(v == 77);
}

static size_t min3(size_t a, size_t b, size_t c)
{
    size_t m = a < b ? a : b;
    return m < c ? m : c;
}

/* The full table. */
static size_t plain_distance(struct str a, struct str b)
{
    size_t t[40][40];
    for (size_t i = 0; i <= a.n; i++)
        for (size_t k = 0; k <= b.n; k++)
            if (i == 0 || k == 0)
                t[i][k] = i + k;
            else
                t[i][k] = min3(t[i - 1][k] + 1, t[i][k - 1] + 1,
                               t[i - 1][k - 1] + (a.p[i - 1] != b.p[k - 1]));
    return t[a.n][b.n];
}

static void distance_equals_the_full_table_up_to_its_cap(void **state)
{
    (void)state;
    struct rng r = {3};
    char p[2][40];
    assert_int_equal(str_distance(S("kitten"), S("sitting"), 5), 3);
    for (int i = 0; i < 30000; i++) {
        struct str a = random_text(&r, p[0], 1 + i % 38, "abc"),
                   b = random_text(&r, p[1], 1 + i % 38, "abc");
        size_t want = plain_distance(a, b);
        for (size_t cap = 0; cap < 42; cap += 1 + cap / 4)
            assert_int_equal(str_distance(a, b, cap), want <= cap ? want : cap + 1);
        assert_int_equal(str_distance(a, b, SIZE_MAX), want);
    }
    /* A band wider than the row on the stack. */
    char x[500], y[500];
    memset(x, 'x', sizeof(x));
    memset(y, 'y', sizeof(y));
    assert_int_equal(str_distance((struct str){x, 500}, (struct str){y, 500}, 1000), 500);
    assert_int_equal(str_distance((struct str){x, 500}, (struct str){y, 500}, 100), 101);
    assert_int_equal(str_distance((struct str){x, 500}, S(""), 3), 4);
}

/* Decodes by the definition: the length from the lead byte, then the ranges of what came out. */
static bool plain_utf8(const unsigned char *p, size_t n, size_t *off)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    for (size_t i = 0; i < n;) {
        *off = i;
        size_t len = p[i] < 0x80             ? 1
                     : (p[i] & 0xe0) == 0xc0 ? 2
                     : (p[i] & 0xf0) == 0xe0 ? 3
                     : (p[i] & 0xf8) == 0xf0 ? 4
                                             : 0;
        if (len == 0 || i + len > n)
            return false;
        uint32_t c = len == 1 ? p[i] : p[i] & (0xffu >> (len + 1));
        for (size_t k = 1; k < len; k++) {
            if ((p[i + k] & 0xc0) != 0x80)
                return false;
            c = c << 6 | (p[i + k] & 0x3f);
        }
        if (c < least[len] || c > 0x10ffff || (c >= 0xd800 && c <= 0xdfff))
            return false;
        i += len;
    }
    return true;
}

static void assert_utf8_as_plain(const unsigned char *p, size_t n)
{
    size_t got_off = 99, want_off = 99;
    bool want = plain_utf8(p, n, &want_off);
    assert_int_equal(str_is_utf8((struct str){(const char *)p, n}, &got_off), want);
    if (!want)
        assert_int_equal(got_off, want_off);
    else
        assert_int_equal(got_off, 99);
}

/* All sequences of up to two bytes, and for longer ones all leads with second bytes at every border. */
static void utf8_is_strict(void **state)
{
    (void)state;
    static const unsigned char border[] = {0x00, 0x7f, 0x80, 0x8f, 0x90,
                                           0x9f, 0xa0, 0xbf, 0xc0, 0xff};
    unsigned char p[8];
    for (unsigned a = 0; a < 256; a++) {
        p[0] = (unsigned char)a;
        assert_utf8_as_plain(p, 1);
        for (unsigned b = 0; b < 256; b++) {
            p[1] = (unsigned char)b;
            assert_utf8_as_plain(p, 2);
            for (size_t c = 0; c < sizeof(border); c++) {
                p[2] = border[c];
                assert_utf8_as_plain(p, 3);
                for (size_t d = 0; d < sizeof(border); d++) {
                    p[3] = border[d];
                    p[4] = 'a';
                    assert_utf8_as_plain(p, 4);
                    assert_utf8_as_plain(p, 5);
                }
            }
        }
    }
    assert_true(str_is_utf8((struct str){NULL, 0}, NULL));
    assert_false(str_is_utf8(S("ab\xff"), NULL));
    assert_true(str_is_utf8(S("a\0b"), NULL));
}

static void tame_replaces_control_bytes_only(void **state)
{
    (void)state;
    char p[] = "a\x1b\0b\n\x7f\xc3\xa4~ ";
    str_tame(p, sizeof(p) - 1);
    assert_memory_equal(p, "a??b??\xc3\xa4~ ", sizeof(p));
}

static void buffer_grows_and_terminates(void **state)
{
    (void)state;
    struct strbuf b;
    strbuf_init(&b);
    assert_string_equal(strbuf_z(&b), "");
    assert_true(strbuf_ok(&b));
    strbuf_add(&b, NULL, 0);
    strbuf_adds(&b, "abc");
    strbuf_add(&b, "d\0e", 3);
    assert_int_equal(b.n, 6);
    assert_memory_equal(b.p, "abcd\0e", 7);
    strbuf_clear(&b);
    assert_int_equal(b.n, 0);
    assert_string_equal(strbuf_z(&b), "");
    char want[4000] = "";
    size_t n = 0;
    for (int i = 0; i < 300; i++) {
        strbuf_addf(&b, "%d,%s;", i, "xyz");
        n += (size_t)snprintf(want + n, sizeof(want) - n, "%d,%s;", i, "xyz");
    }
    assert_string_equal(strbuf_z(&b), want);
    assert_int_equal(b.n, n);
    strbuf_addf(&b, "%*d", 5000, 7); /* longer than what is free */
    assert_int_equal(b.n, n + 5000);
    assert_int_equal(b.p[b.n - 1], '7');
    assert_int_equal(b.p[b.n], 0);
    strbuf_release(&b);
    strbuf_release(&b);
    strbuf_release(NULL);
    assert_string_equal(strbuf_z(&b), "");
}

static void taken_text_belongs_to_the_caller(void **state)
{
    (void)state;
    struct strbuf b;
    strbuf_init(&b);
    char *z = strbuf_take(&b);
    assert_string_equal(z, "");
    mem_free(z);
    strbuf_adds(&b, "text");
    z = strbuf_take(&b);
    assert_string_equal(z, "text");
    assert_null(b.p);
    assert_int_equal(b.n, 0);
    mem_free(z);
}

static void failure_is_sticky(void **state)
{
    (void)state;
    volatile size_t huge = SIZE_MAX;
    struct strbuf b;
    strbuf_init(&b);
    strbuf_adds(&b, "before");
    strbuf_add(&b, "x", huge / 2);
    assert_false(strbuf_ok(&b));
    strbuf_adds(&b, "after");
    strbuf_addf(&b, "%d", 1);
    assert_string_equal(strbuf_z(&b), "before");
    assert_null(strbuf_take(&b));
    assert_true(strbuf_ok(&b)); /* taken: a fresh buffer */
    strbuf_add(&b, "x", huge);
    assert_false(strbuf_ok(&b));
    assert_string_equal(strbuf_z(&b), "");
    strbuf_clear(&b);
    strbuf_adds(&b, "again");
    assert_true(strbuf_ok(&b));
    strbuf_release(&b);
}

/* A wide character that the C locale cannot print makes vsnprintf fail. */
static void format_that_cannot_be_printed_is_a_failure(void **state)
{
    (void)state;
    assert_non_null(setlocale(LC_ALL, "C"));
    struct strbuf b;
    strbuf_init(&b);
    strbuf_adds(&b, "before");
    strbuf_addf(&b, "ab%lc", (wint_t)0x20ac);
    assert_false(strbuf_ok(&b));
    assert_string_equal(strbuf_z(&b), "before");
    strbuf_release(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slices_compare_by_bytes_and_length),
        cmocka_unit_test(natural_order_compares_numbers_as_numbers),
        cmocka_unit_test(natural_order_is_total),
        cmocka_unit_test(u64_takes_digits_only),
        cmocka_unit_test(double_takes_the_whole_slice),
        cmocka_unit_test(distance_equals_the_full_table_up_to_its_cap),
        cmocka_unit_test(utf8_is_strict),
        cmocka_unit_test(tame_replaces_control_bytes_only),
        cmocka_unit_test(buffer_grows_and_terminates),
        cmocka_unit_test(taken_text_belongs_to_the_caller),
        cmocka_unit_test(failure_is_sticky),
        cmocka_unit_test(format_that_cannot_be_printed_is_a_failure),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
