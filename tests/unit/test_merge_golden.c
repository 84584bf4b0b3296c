/*
 * Golden: the bundled model with its adapters, merged, against an f64 reference recomputed here and against the files that PyTorch made
 * (tests/golden). Differences are allowed only where the f64 value lies at a rounding boundary, by the bound that r + 4 roundings give.
 */
#include "adapter/adapter.h"
#include "merge_ref.h"
#include "safetensors/safetensors.h"

enum { MOST_TERMS = 4 };

struct source {
    struct pf_adapter *adapter;
    struct resolution res;
};

struct bed {
    struct pf_checkpoint *ckpt;
    struct source sources[2]; /* by digest: canonical */
    int n_sources;
    struct merge_scratch *scratch;
    struct st_file *golden;
};

static void bed_open(struct bed *bed, const char *const *adapters, const char *golden)
{
    pf_error err;
    memset(bed, 0, sizeof(*bed));
    assert_ok(pf_checkpoint_open(PF_SOURCE_DIR "/data/emoji-dit", NULL, &bed->ckpt, &err), &err);
    for (; adapters[bed->n_sources] != NULL; bed->n_sources++) {
        struct source *s = &bed->sources[bed->n_sources];
        const struct resolve_opts opts = {.target = NULL};
        assert_ok(pf_adapter_open(adapters[bed->n_sources], &s->adapter, &err), &err);
        assert_ok(adapter_resolve(s->adapter, bed->ckpt, &opts, &s->res, &err), &err);
    }
    if (bed->n_sources == 2 && digest_cmp(adapter_digest(bed->sources[0].adapter),
                                          adapter_digest(bed->sources[1].adapter)) > 0) {
        const struct source first = bed->sources[0];
        bed->sources[0] = bed->sources[1];
        bed->sources[1] = first;
    }
    assert_ok(merge_scratch_new(&bed->scratch, &err), &err);
    assert_ok(st_open(golden, &bed->golden, &err), &err);
}

static void bed_close(struct bed *bed)
{
    for (int i = 0; i < bed->n_sources; i++) {
        resolution_release(&bed->sources[i].res);
        pf_adapter_close(bed->sources[i].adapter);
    }
    merge_scratch_free(bed->scratch);
    st_close(bed->golden);
    pf_checkpoint_close(bed->ckpt);
}

static size_t terms_of(const struct bed *bed, uint32_t i_tensor, struct merge_term *terms)
{
    size_t n = 0;
    for (int i = 0; i < bed->n_sources; i++) {
        const struct resolution *res = &bed->sources[i].res;
        for (size_t j = 0; j < res->n_deltas; j++) {
            if (res->deltas[j].i_tensor != i_tensor)
                continue;
            assert_true(n < MOST_TERMS);
            terms[n++] = (struct merge_term){&res->deltas[j], (float)res->deltas[j].scale};
        }
    }
    return n;
}

/* sum over k of B A and of |B| |A| */
static void f64_chain(const struct factor *b, const struct factor *a, int64_t m, int64_t n,
                      double *sum, double *magnitude)
{
    *sum = *magnitude = 0;
    for (int64_t k = 0; k < a->n_rows; k++) {
        const double x = (double)ref_at(b, m, k) * (double)ref_at(a, k, n);
        *sum += x;
        *magnitude += fabs(x);
    }
}

static void f64_side(const struct factor *f, int64_t m, int64_t n, double *sum, double *magnitude)
{
    if (f[1].p != NULL) {
        f64_chain(&f[0], &f[1], m, n, sum, magnitude);
    } else {
        *sum = (double)ref_at(&f[0], m, n);
        *magnitude = fabs(*sum);
    }
}

static void f64_delta(const struct delta *d, int64_t m, int64_t n, double *sum, double *magnitude)
{
    double u, v, mu, mv;
    if (d->kind != DELTA_LOKR) {
        assert_int_equal(d->kind, DELTA_LORA);
        f64_chain(&d->f[0], &d->f[1], m, n, sum, magnitude);
        return;
    }
    const int64_t p = d->f[2].n_rows;
    const int64_t q = d->f[3].p != NULL ? d->f[3].n_cols : d->f[2].n_cols;
    f64_side(&d->f[0], m / p, n / q, &u, &mu);
    f64_side(&d->f[2], m % p, n % q, &v, &mv);
    *sum = u * v;
    *magnitude = mu * mv;
}

struct tally {
    int n_elements, n_changed, n_off_f64, n_off_golden;
};

static double of_bf16(uint16_t h)
{
    return (double)ref_decode(PF_BF16, (const uint8_t *)&h);
}

/* got may differ from best only if the exact value lies at the border of best that is towards got. Where W and delta cancel, bf16 is finer than
 * the chain's own error, and there may be several steps between them: each still within that error. */
static void check_element(double exact, double bound, uint16_t got, uint16_t best, int *n_off)
{
    if (got == best)
        return;
    const double x = of_bf16(got), y = of_bf16(best);
    const uint16_t next = (uint16_t)(best + (fabs(x) > fabs(y) ? 1 : -1));
    assert_true((got & 0x8000) == (best & 0x8000));
    assert_true(fabs(exact - (y + of_bf16(next)) / 2) <= bound);
    assert_true(fabs(exact - x) <= bound + fabs(y - of_bf16(next)));
    ++*n_off;
}

static void check_tensor(const struct bed *bed, uint32_t i_tensor, struct tally *tally)
{
    const struct ckpt_tensor *tensor = &bed->ckpt->tensors[i_tensor];
    struct merge_term terms[MOST_TERMS];
    const size_t n_terms = terms_of(bed, i_tensor, terms);
    const struct st_tensor *golden = st_find(bed->golden, tensor->name);
    assert_true((n_terms > 0) == (golden != NULL));
    if (golden == NULL)
        return;
    const struct merge_target t = {tensor->p,
                                   tensor->dtype,
                                   tensor->dtype,
                                   shape_rows(&tensor->shape),
                                   shape_cols(&tensor->shape),
                                   terms,
                                   n_terms};
    const struct merge_panel whole = {0, t.n_rows, 0, t.n_cols};
    assert_int_equal(merge_bound_check(&t, tensor->name.p, NULL, NULL), PF_OK);
    uint8_t *out = malloc((size_t)tensor->n_bytes);
    merge_read(&t, &whole, false, out, bed->scratch);
    const uint8_t *torch = st_data(bed->golden, golden);
    assert_int_equal(golden->n_bytes, tensor->n_bytes);
    for (int64_t i = 0; i < t.n_rows * t.n_cols; i++) {
        const double w = (double)ref_decode(PF_BF16, t.base + i * 2);
        double exact = w, magnitude = fabs(w);
        int64_t rank = 0;
        for (size_t k = 0; k < n_terms; k++) {
            double sum, abs_sum;
            f64_delta(terms[k].delta, i / t.n_cols, i % t.n_cols, &sum, &abs_sum);
            exact += (double)terms[k].s * sum;
            magnitude += fabs((double)terms[k].s) * abs_sum;
            rank = terms[k].delta->rank > rank ? terms[k].delta->rank : rank;
        }
        const double bound = (double)(rank + 4) * 0x1p-24 * magnitude;
        /* bf16 is in f32 */
        const uint16_t best = (uint16_t)(bits_of((float)ref_round(exact, 7, -126)) >> 16);
        uint16_t got, theirs;
        memcpy(&got, out + i * 2, 2);
        memcpy(&theirs, torch + i * 2, 2);
        check_element(exact, bound, got, best, &tally->n_off_f64);
        check_element(exact, bound, got, theirs, &tally->n_off_golden);
        tally->n_elements++;
        tally->n_changed += memcmp(out + i * 2, t.base + i * 2, 2) != 0;
    }
    free(out);
}

static void check_composition(const char *const *adapters, const char *golden)
{
    struct bed bed;
    struct tally tally = {0};
    bed_open(&bed, adapters, golden);
    for (uint32_t i = 0; i < bed.ckpt->n_tensors; i++)
        check_tensor(&bed, i, &tally);
    print_message("%d elements, %d changed; at a border: %d from f64, %d from golden\n",
                  tally.n_elements, tally.n_changed, tally.n_off_f64, tally.n_off_golden);
    assert_true(tally.n_elements > 1000000);
    assert_true(tally.n_changed > tally.n_elements / 10);
    assert_true(tally.n_off_f64 < tally.n_elements / 1000);
    assert_true(tally.n_off_golden < tally.n_elements / 1000);
    bed_close(&bed);
}

static void noto_and_turbo_equal_f64_but_at_borders(void **state)
{
    (void)state;
    check_composition((const char *const[]){PF_SOURCE_DIR "/data/adapters/turbo.safetensors",
                                            PF_SOURCE_DIR "/data/adapters/noto.safetensors", NULL},
                      PF_SOURCE_DIR "/tests/golden/merged_noto_turbo.safetensors");
}

static void night_equals_f64_but_at_borders(void **state)
{
    (void)state;
    check_composition((const char *const[]){PF_SOURCE_DIR "/data/adapters/night", NULL},
                      PF_SOURCE_DIR "/tests/golden/merged_night.safetensors");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(noto_and_turbo_equal_f64_but_at_borders),
        cmocka_unit_test(night_equals_f64_but_at_borders),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
