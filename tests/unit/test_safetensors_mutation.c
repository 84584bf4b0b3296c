/*
 * Thousands of seeded mutations of valid headers. Nothing may crash; whatever is accepted must satisfy every invariant, as checked
 * here by slow code that shares nothing with the scanner (a byte map for the tiling, base/json.h for the text); and what
 * that code finds valid must be accepted.
 */
#include "st_testing.h"

#include "base/json.h"

#define N_MUTATIONS 30000
#define N_DATA_MAX  4096

/* ------------------------------------------------------------------------------------- the slow validator */

/* Every byte of the data belongs to exactly one tensor, names differ, sizes follow from shapes. */
static void check_invariants(const struct st_header *h, const uint8_t *file, size_t n, size_t data0)
{
    uint8_t owners[N_DATA_MAX] = {0};
    size_t i, k;

    for (i = 0; i < st_header_n_tensors(h); i++) {
        const struct st_tensor *t = st_header_tensor(h, i);
        unsigned __int128 bits = pf_dtype_bits(t->dtype);
        int32_t d;

        assert_true(t->dtype >= 0 && t->dtype < PF_N_DTYPES && bits > 0);
        assert_true(t->shape.rank >= 0 && t->shape.rank <= PF_MAX_RANK);
        for (d = 0; d < t->shape.rank; d++) {
            assert_true(t->shape.dim[d] >= 0);
            bits *= (uint64_t)t->shape.dim[d];
        }
        assert_true(bits == (unsigned __int128)t->n_bytes * 8);
        assert_true(t->off_bytes >= data0 && t->off_bytes <= n && t->n_bytes <= n - t->off_bytes);
        for (k = 0; k < t->n_bytes; k++)
            owners[t->off_bytes - data0 + k]++;
        assert_true(i == 0 || t->off_bytes >= st_header_tensor(h, i - 1)->off_bytes);
        assert_true(str_is_utf8(t->name, &(size_t){0}));
        assert_null(t->name.n == 0 ? NULL : memchr(t->name.p, 0, t->name.n));
        assert_false(str_eqz(t->name, "__metadata__"));
        for (k = 0; k < i; k++)
            assert_false(str_eq(t->name, st_header_tensor(h, k)->name));
        assert_ptr_equal(st_header_find(h, t->name), t);
    }
    for (k = 0; k < n - data0; k++)
        assert_int_equal(owners[k], 1);
    for (i = 0; i < st_header_n_meta(h); i++)
        for (k = 0; k < i; k++)
            assert_false(str_eq(st_header_meta(h, i)->key, st_header_meta(h, k)->key));
    (void)file;
}

/* The same header through the other JSON parser: every tensor that it finds is in h, as it says. */
static void check_agreement(const struct st_header *h, const struct json *root, size_t data0)
{
    const struct json *v;
    size_t n_tensors = 0;
    void *iter = NULL;
    const char *key;

    while ((iter = json_iter_next(root, iter, &key, &v)) != NULL) {
        const struct st_tensor *t;
        size_t i;

        if (strcmp(key, "__metadata__") == 0) {
            assert_int_equal(st_header_n_meta(h), json_len(v));
            continue;
        }
        t = st_header_find(h, str_of(key));
        assert_non_null(t);
        n_tensors++;
        assert_true(str_eqz(json_str(json_get(v, "dtype")), pf_dtype_name(t->dtype)));
        assert_int_equal(json_len(json_get(v, "shape")), t->shape.rank);
        for (i = 0; i < (size_t)t->shape.rank; i++)
            assert_true(json_int(json_at(json_get(v, "shape"), i)) == t->shape.dim[i]);
        v = json_get(v, "data_offsets");
        assert_true((uint64_t)json_int(json_at(v, 0)) == t->off_bytes - data0);
        assert_true((uint64_t)json_int(json_at(v, 1)) == t->off_bytes - data0 + t->n_bytes);
    }
    assert_int_equal(n_tensors, st_header_n_tensors(h));
}

/* One tensor object that the other parser read: does it describe bytes of the data? Counts them in owners. */
static bool is_good_tensor(const struct json *v, size_t n_data, uint8_t *owners)
{
    const struct json *shape = json_get(v, "shape"), *range = json_get(v, "data_offsets");
    unsigned __int128 bits;
    int64_t begin, end, k;
    int32_t dtype;
    size_t i;

    if (json_typeof(v) != JSON_T_OBJECT || json_typeof(shape) != JSON_T_ARRAY ||
        json_typeof(range) != JSON_T_ARRAY || json_len(range) != 2 ||
        json_len(shape) > PF_MAX_RANK || !dtype_parse(json_str(json_get(v, "dtype")), &dtype))
        return false;
    bits = 1;
    for (i = 0; i < json_len(shape); i++) {
        const struct json *dim = json_at(shape, i);
        if (json_typeof(dim) != JSON_T_INT || json_int(dim) < 0)
            return false;
        bits *= (uint64_t)json_int(dim);
        if (bits > UINT64_MAX)
            return false;
    }
    bits *= pf_dtype_bits(dtype);
    if (json_typeof(json_at(range, 0)) != JSON_T_INT ||
        json_typeof(json_at(range, 1)) != JSON_T_INT)
        return false;
    begin = json_int(json_at(range, 0));
    end = json_int(json_at(range, 1));
    if (begin < 0 || end < begin || (uint64_t)end > n_data ||
        bits != (unsigned __int128)(end - begin) * 8)
        return false;
    for (k = begin; k < end; k++)
        owners[k]++;
    return true;
}

/* An empty tensor strictly inside another one makes the file bad, though no byte has two owners. */
static bool is_inside_another(const struct json *root, int64_t at)
{
    const struct json *v;
    void *iter = NULL;
    const char *key;

    while ((iter = json_iter_next(root, iter, &key, &v)) != NULL) {
        const struct json *range = json_get(v, "data_offsets");
        if (strcmp(key, "__metadata__") != 0 && json_int(json_at(range, 0)) < at &&
            at < json_int(json_at(range, 1)))
            return true;
    }
    return false;
}

static bool is_good_file(const struct json *root, size_t n_data)
{
    uint8_t owners[N_DATA_MAX] = {0};
    const struct json *v, *value;
    void *iter = NULL, *iter_meta;
    const char *key, *key_meta;
    size_t i;

    if (json_typeof(root) != JSON_T_OBJECT)
        return false;
    while ((iter = json_iter_next(root, iter, &key, &v)) != NULL) {
        if (strcmp(key, "__metadata__") != 0) {
            if (!is_good_tensor(v, n_data, owners))
                return false;
            continue;
        }
        if (json_typeof(v) != JSON_T_NULL && json_typeof(v) != JSON_T_OBJECT)
            return false;
        for (iter_meta = NULL;
             (iter_meta = json_iter_next(v, iter_meta, &key_meta, &value)) != NULL;)
            if (json_typeof(value) != JSON_T_STRING)
                return false;
    }
    for (iter = NULL; (iter = json_iter_next(root, iter, &key, &v)) != NULL;)
        if (strcmp(key, "__metadata__") != 0 &&
            is_inside_another(root, json_int(json_at(json_get(v, "data_offsets"), 0))) &&
            json_int(json_at(json_get(v, "data_offsets"), 0)) ==
                json_int(json_at(json_get(v, "data_offsets"), 1)))
            return false;
    for (i = 0; i < n_data; i++)
        if (owners[i] != 1)
            return false;
    return true;
}

/* ------------------------------------------------------------------------------------------- the mutations */

static const char *const seeds[] = {
    "{}",
    "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}}",
    "{\"__metadata__\":{\"format\":\"pt\",\"a\\u0062\":\"x\\n\"},\"w\":{\"dtype\":\"BF16\","
    "\"shape\":[2,2],\"data_offsets\":[0,8]},"
    "\"w.alpha\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[8,12]},\"e\":{\"dtype\":\"U8\","
    "\"shape\":[0],\"data_offsets\":[12,12]}}",
    " {\"q\":{\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":[10,11]},\"p\":{\"dtype\":\"I64\","
    "\"shape\":[1],\"data_offsets\":[2,10]},"
    "\"o\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2],\"x\":{\"y\":[1,-2.5e3,null,true,"
    "\"s\"]}}} \n",
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"b\":{\"dtype\":\"U8\","
    "\"shape\":[1],\"data_offsets\":[1,2]},"
    "\"c\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]},\"\\u00e9\\ud83d\\ude00\":{"
    "\"dtype\":\"BOOL\",\"shape\":[1],\"data_offsets\":[3,4]}}",
    "{\"__metadata__\":null,\"c\":{\"dtype\":\"C64\",\"shape\":[1,1,1],\"data_offsets\":[0,8]}}",
};
static const size_t seed_data[] = {0, 24, 12, 11, 4, 8};

static const char *const pieces[] = {"\"",
                                     "{",
                                     "}",
                                     "[",
                                     "]",
                                     ",",
                                     ":",
                                     "0",
                                     "1",
                                     "8",
                                     "-",
                                     ".",
                                     "e5",
                                     "\\",
                                     "\\u0061",
                                     "\\ud83d",
                                     "null",
                                     "true",
                                     " ",
                                     "\xc3",
                                     "\xc3\xa9",
                                     "\"F32\"",
                                     "\"dtype\"",
                                     "\"shape\"",
                                     "\"a\"",
                                     "[0,0]",
                                     "18446744073709551615",
                                     "9223372036854775808",
                                     "\n",
                                     "{\"a\":1}",
                                     "\\u0000",
                                     "__metadata__"};

/* text[0..n) with one random edit; returns the new length. */
static size_t mutate_once(char *text, size_t n, size_t cap, struct rng *rng)
{
    size_t at = n == 0 ? 0 : rng_next(rng) % n, len, to;
    const char *piece = pieces[rng_next(rng) % PF_COUNTOF(pieces)];

    switch (rng_next(rng) % 7) {
    case 0: /* another byte */
        if (n > 0)
            text[at] = (char)rng_next(rng);
        return n;
    case 1: /* another digit, where there is one */
        for (len = 0; len < n; len++, at = (at + 1) % n)
            if (text[at] >= '0' && text[at] <= '9') {
                text[at] = (char)('0' + rng_next(rng) % 10);
                break;
            }
        return n;
    case 2: /* a piece more */
        len = strlen(piece);
        if (n + len > cap)
            return n;
        memmove(text + at + len, text + at, n - at);
        memcpy(text + at, piece, len);
        return n + len;
    case 3: /* a range less */
        len = rng_next(rng) % 8;
        len = len < n - at ? len : n - at;
        memmove(text + at, text + at + len, n - at - len);
        return n - len;
    case 4: /* a range twice */
        len = rng_next(rng) % 60;
        len = len < n - at ? len : n - at;
        if (n + len > cap)
            return n;
        memmove(text + at + len, text + at, n - at);
        return n + len;
    case 5: /* a range copied over another */
        len = rng_next(rng) % 20;
        to = n == 0 ? 0 : rng_next(rng) % n;
        len = len < n - at ? len : n - at;
        len = len < n - to ? len : n - to;
        memmove(text + to, text + at, len);
        return n;
    default: /* cut */
        return rng_next(rng) % 4 == 0 ? at : n;
    }
}

struct counts {
    size_t n_accepted, n_refused, n_agreed, n_valid, n_without_second_opinion;
};

static void try_one(const char *text, size_t n_text, size_t n_data, struct counts *counts)
{
    struct st_header *h = NULL;
    struct json *root = NULL;
    struct strbuf b;
    pf_error err = {0};
    bool has_json;
    int rc;

    strbuf_init(&b);
    st_bytes(&b, text, n_text, n_data);
    has_json = json_parse(text, n_text, "h", &root, NULL) == PF_OK;
    rc = st_header_parse((const uint8_t *)b.p, b.n, b.n, "f", &h, &err);
    if (rc == PF_OK) {
        counts->n_accepted++;
        check_invariants(h, (const uint8_t *)b.p, b.n, 8 + n_text);
        if (has_json) {
            check_agreement(h, root, 8 + n_text);
            counts->n_agreed++;
        } else {
            counts->n_without_second_opinion++; /* a NUL in metadata, a number beyond its range */
        }
    } else {
        counts->n_refused++;
        assert_true(strncmp(err.msg, "'f': ", 5) == 0);
        assert_true(rc == PF_E_FORMAT || rc == PF_E_UNSUPPORTED || rc == PF_E_RANGE);
        assert_true(err.code == rc && err.off <= b.n);
    }
    if (has_json && is_good_file(root, n_data)) {
        counts->n_valid++;
        /* The other parser reads "-0" as an integer and "0" before digits not at all. */
        if (rc != PF_OK && strstr(err.msg, "negative number") == NULL)
            fail_msg("%.*s was refused: %s", (int)n_text, text, err.msg);
    }
    json_free(root);
    st_header_free(h);
    strbuf_release(&b);
}

static void mutations_never_crash_and_never_lie(void **state)
{
    struct counts counts = {0};
    struct rng rng = {20260101};
    size_t i;
    (void)state;

    for (i = 0; i < N_MUTATIONS; i++) {
        size_t i_seed = i % PF_COUNTOF(seeds), n = strlen(seeds[i_seed]),
               n_data = seed_data[i_seed];
        size_t n_edits = 1 + rng_next(&rng) % 3;
        char text[1024];

        memcpy(text, seeds[i_seed], n);
        while (n_edits-- > 0)
            n = mutate_once(text, n, sizeof(text), &rng);
        if (rng_next(&rng) % 16 == 0)
            n_data += rng_next(&rng) % 3;
        try_one(text, n, n_data, &counts);
    }
    print_message("%zu accepted (%zu agreed), %zu refused, %zu valid to the slow parser\n",
                  counts.n_accepted, counts.n_agreed, counts.n_refused, counts.n_valid);
    assert_true(counts.n_accepted > N_MUTATIONS / 20 && counts.n_refused > N_MUTATIONS / 4);
    assert_true(counts.n_without_second_opinion < counts.n_accepted / 20);
    assert_true(counts.n_valid > counts.n_accepted / 2);
}

/* The whole file, length and all; p exactly as long as the file, so that a sanitizer sees a read beyond it. */
static void mutated_prefixes_and_lengths_never_crash(void **state)
{
    struct rng rng = {99};
    size_t i, n_accepted = 0;
    (void)state;

    for (i = 0; i < 5000; i++) {
        size_t i_seed = i % PF_COUNTOF(seeds), n;
        struct st_header *h = NULL;
        uint8_t *exact;
        struct strbuf b;

        strbuf_init(&b);
        st_bytes(&b, seeds[i_seed], strlen(seeds[i_seed]), seed_data[i_seed]);
        n = b.n;
        if (i % 3 == 0)
            n = rng_next(&rng) % (b.n + 1);
        else if (i % 3 == 1)
            b.p[rng_next(&rng) % 8] = (char)(rng_next(&rng) % (i % 2 == 0 ? 256 : 3));
        exact = mem_alloc(n + (n == 0));
        assert_non_null(exact);
        memcpy(exact, b.p, n);
        if (st_header_parse(exact, n, n, "f", &h, NULL) == PF_OK) {
            uint64_t n_header = 0;
            int k;
            for (k = 7; k >= 0; k--)
                n_header = n_header << 8 | exact[k];
            check_invariants(h, exact, n, 8 + n_header);
            n_accepted++;
        }
        st_header_free(h);
        mem_free(exact);
        strbuf_release(&b);
    }
    assert_true(n_accepted >= 5000 / 3 && n_accepted < 4000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mutations_never_crash_and_never_lie),
        cmocka_unit_test(mutated_prefixes_and_lengths_never_crash),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
