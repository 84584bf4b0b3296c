/*
 * The delta of each family, element by element: factors as they lie in the file, strides, folded kernels, transposes, shapes
 * that a base refuses.
 */
#include "test_adapter_build.h"

/* Every element of the delta on `tensor` against expected(i, j). */
#define check_all(b, tensor, expected)                                                             \
    do {                                                                                           \
        const struct delta *check_d = delta_on(b, tensor);                                         \
        for (int64_t i = 0; i < check_d->n_rows; i++)                                              \
            for (int64_t j = 0; j < check_d->n_cols; j++)                                          \
                assert_true(delta_at(check_d, i, j) == (expected));                                \
    } while (0)

static double product(const char *up, const char *down, int64_t r, int64_t cols, int64_t i,
                      int64_t j)
{
    double sum = 0;
    for (int64_t k = 0; k < r; k++)
        sum += cell(up, r, i, k) * cell(down, cols, k, j);
    return sum;
}

static void lora_of_every_factor_dtype(void **state)
{
    static const char *const dtypes[] = {"F32", "F16", "BF16", "F64"};
    for (size_t k = 0; k < PF_COUNTOF(dtypes); k++) {
        struct built b = {0};
        char d[64], u[64];
        snprintf(d, sizeof d, "x.lora_A.weight 3,6 %s", dtypes[k]);
        snprintf(u, sizeof u, "x.lora_B.weight 4,3 %s", dtypes[k]);
        open_base(&b, state, specs("x.weight 4,6 BF16"));
        resolve_file(&b, state, specs(d, u));
        check_all(&b, "x.weight", product("x.lora_B.weight", "x.lora_A.weight", 3, 6, i, j));
        release(&b);
    }
}

static void max_abs_is_that_of_each_factor(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("x.weight 4,6"));
    resolve_file(&b, state, specs("x.lora_A.weight 2,6 F16 =-3", "x.lora_B.weight 4,2 F32 =0"));
    const struct delta *d = delta_on(&b, "x.weight");
    assert_true(d->max_abs[0] == 0 && d->max_abs[1] == 3 && d->max_abs[2] == 0);
    release(&b);
}

static void locon_kernels_are_folded_into_columns(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("c.weight 4,2,3,3", "p.weight 4,6,1,1", "v.weight 4,2,2,3,3"));
    resolve_file(&b, state,
                 specs("c.lora_down.weight 2,2,3,3", "c.lora_up.weight 4,2,1,1",
                       "p.lora_down.weight 2,6,1,1", "p.lora_up.weight 4,2,1,1",
                       "v.lora_down.weight 2,2,2,3,3", "v.lora_up.weight 4,2,1,1,1"));
    check_all(&b, "c.weight", product("c.lora_up.weight", "c.lora_down.weight", 2, 18, i, j));
    check_all(&b, "p.weight", product("p.lora_up.weight", "p.lora_down.weight", 2, 6, i, j));
    check_all(&b, "v.weight", product("v.lora_up.weight", "v.lora_down.weight", 2, 36, i, j));
    release(&b);
}

static void linear_and_1x1_conv_spellings_are_interchangeable(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("l.weight 4,6", "c.weight 4,6,1,1", "k.weight 4,2,3,3"));
    resolve_file(&b, state,
                 specs("l.lora_down.weight 2,6,1,1", "l.lora_up.weight 4,2,1,1",
                       "c.lora_down.weight 2,6", "c.lora_up.weight 4,2", "k.lora_down.weight 2,18",
                       "k.lora_up.weight 4,2"));
    check_all(&b, "l.weight", product("l.lora_up.weight", "l.lora_down.weight", 2, 6, i, j));
    check_all(&b, "c.weight", product("c.lora_up.weight", "c.lora_down.weight", 2, 6, i, j));
    check_all(&b, "k.weight", product("k.lora_up.weight", "k.lora_down.weight", 2, 18, i, j));
    release(&b);
}

static void mismatch(void **state, const char *base, const char *const *tensors, const char *rule)
{
    struct built b = {0};
    open_base(&b, state, specs(base, "other.weight 2,2"));
    assert_ok(open_file(&b, state, tensors), &b.err);
    assert_int_equal(resolve(&b), PF_E_MISMATCH);
    assert_err(&b.err, PF_E_MISMATCH, "of the base is [", rule);
    release(&b);
}

static void shapes_that_the_base_denies_are_refused(void **state)
{
    mismatch(state, "x.weight 5,6", specs("x.lora_A.weight 2,6", "x.lora_B.weight 4,2"),
             "the rows differ");
    mismatch(state, "x.weight 4,7", specs("x.lora_A.weight 2,6", "x.lora_B.weight 4,2"),
             "the columns differ");
    mismatch(state, "x.weight 4,2,1,9",
             specs("x.lora_down.weight 2,2,3,3", "x.lora_up.weight 4,2,1,1"), "the kernels differ");
    mismatch(state, "x.weight 4,18",
             specs("x.lora_down.weight 2,2,3,3", "x.lora_up.weight 4,2,1,1"), "the kernels differ");
    mismatch(state, "x.weight 4,2,3,3",
             specs("x.lora_down.weight 2,18,1,1", "x.lora_up.weight 4,2,1,1"),
             "the kernels differ");
    mismatch(state, "x.weight 24", specs("x.lora_A.weight 2,1", "x.lora_B.weight 24,2"),
             "changes a matrix");
    mismatch(state, "x.weight 4,6", specs("x.diff 6,4"), "the shape of what it is added to");
    mismatch(state, "x.weight 4,6", specs("x.diff 24"), "the shape of what it is added to");
    mismatch(state, "x.bias 4", specs("x.diff_b 5"), "the shape of what it is added to");
    mismatch(state, "x.weight 4,6", specs("x.lokr_w1 2,2", "x.lokr_w2 3,3"), "the rows differ");
    mismatch(state, "x.weight 4,6", specs("x.lokr_w1 2,2", "x.lokr_w2 2,2"),
             "multiply to another number");
    mismatch(state, "x.weight 4,4,1,9", specs("x.lokr_w1 2,2", "x.lokr_w2 2,2,3,3"),
             "the kernels differ");
    mismatch(state, "x.weight 4,7",
             specs("x.hada_w1_a 4,2", "x.hada_w1_b 2,6", "x.hada_w2_a 4,2", "x.hada_w2_b 2,6"),
             "the columns differ");
    mismatch(state, "x.weight 4,6", specs("x.lora_embedding_A 2,6", "x.lora_embedding_B 4,2"),
             "stored transposed");
}

static void lora_bias_adds_to_the_base_bias_with_the_scale(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("x.weight 4,6", "x.bias 4"));
    resolve_file(
        &b, state,
        specs("x.lora_A.weight 2,6", "x.lora_B.weight 4,2", "x.lora_B.bias 4", "x.alpha - =1"));
    assert_int_equal(b.r.n_deltas, 2);
    const struct delta *d = delta_on(&b, "x.bias");
    assert_int_equal(d->kind, DELTA_DIFF);
    assert_true(d->scale == 0.5);
    check_all(&b, "x.bias", cell("x.lora_B.bias", 1, i, j));
    b.opts = (struct resolve_opts){.has_alpha = true, .alpha = 6};
    assert_ok(resolve(&b), &b.err);
    assert_true(delta_on(&b, "x.bias")->scale == 3);
    struct pf_adapter_module m;
    pf_adapter_module(b.a, 1, &m);
    assert_string_equal(m.kind, "bias");
    release(&b);
}

static void lora_bias_without_a_base_bias_is_refused(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("x.weight 4,6", "y.weight 4,6"));
    assert_ok(open_file(&b, state,
                        specs("x.lora_A.weight 2,6", "x.lora_B.weight 4,2", "x.lora_B.bias 4")),
              &b.err);
    b.opts.allow_unmatched = true; /* not even then: the pair belongs to its bias */
    assert_int_equal(resolve(&b), PF_E_MISMATCH);
    assert_err(&b.err, PF_E_MISMATCH, "'x.lora_B.bias'", "the base has none");
    release(&b);
}

static void embeddings_are_transposed_by_strides(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("emb.weight 10,4", "x.weight 4,4"));
    resolve_file(&b, state,
                 specs("base_model.model.emb.lora_embedding_A 2,10",
                       "base_model.model.emb.lora_embedding_B 4,2"));
    assert_int_equal(delta_on(&b, "emb.weight")->n_rows, 10);
    check_all(&b, "emb.weight",
              product("base_model.model.emb.lora_embedding_B",
                      "base_model.model.emb.lora_embedding_A", 2, 10, j, i));
    release(&b);
}

static void fan_in_fan_out_is_a_transpose_by_strides(void **state)
{
    struct built b = {0};
    const char *up = "base_model.model.h.0.c_attn.lora_B.weight",
               *down = "base_model.model.h.0.c_attn.lora_A.weight";
    static const char config[] =
        "{\"peft_type\":\"LORA\",\"r\":2,\"lora_alpha\":4,\"fan_in_fan_out\":true}";
    open_base(&b, state, specs("h.0.c_attn.weight 6,12", "h.1.c_attn.weight 6,12"));
    assert_ok(open_peft(&b, state,
                        specs("base_model.model.h.0.c_attn.lora_A.weight 2,6",
                              "base_model.model.h.0.c_attn.lora_B.weight 12,2"),
                        config),
              &b.err);
    assert_ok(resolve(&b), &b.err);
    const struct delta *d = delta_on(&b, "h.0.c_attn.weight");
    assert_int_equal(d->n_rows, 6);
    assert_int_equal(d->n_cols, 12);
    assert_true(d->scale == 2);
    check_all(&b, "h.0.c_attn.weight", product(up, down, 2, 6, j, i));
    release(&b);
}

static void fan_in_fan_out_transposes_a_square_weight_and_spares_a_linear(void **state)
{
    struct built b = {0};
    static const char config[] =
        "{\"peft_type\":\"LORA\",\"r\":2,\"lora_alpha\":2,\"fan_in_fan_out\":true}";
    open_base(&b, state, specs("s.weight 6,6", "l.weight 4,6"));
    assert_ok(open_peft(&b, state,
                        specs("base_model.model.s.lora_A.weight 2,6",
                              "base_model.model.s.lora_B.weight 6,2",
                              "base_model.model.l.lora_A.weight 2,6",
                              "base_model.model.l.lora_B.weight 4,2"),
                        config),
              &b.err);
    assert_ok(resolve(&b), &b.err);
    check_all(&b, "s.weight",
              product("base_model.model.s.lora_B.weight", "base_model.model.s.lora_A.weight", 2, 6,
                      j, i));
    check_all(&b, "l.weight",
              product("base_model.model.l.lora_B.weight", "base_model.model.l.lora_A.weight", 2, 6,
                      i, j));
    release(&b);
}

static void loha_is_the_product_of_two_products(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("x.weight 4,6", "c.weight 4,2,3,3"));
    resolve_file(&b, state,
                 specs("x.hada_w1_a 4,2", "x.hada_w1_b 2,6", "x.hada_w2_a 4,2", "x.hada_w2_b 2,6",
                       "x.alpha - =1", "c.hada_w1_a 4,3", "c.hada_w1_b 3,18", "c.hada_w2_a 4,3",
                       "c.hada_w2_b 3,18"));
    assert_int_equal(delta_on(&b, "x.weight")->kind, DELTA_LOHA);
    assert_int_equal(delta_on(&b, "x.weight")->rank, 2);
    assert_true(delta_on(&b, "x.weight")->scale == 0.5);
    check_all(&b, "x.weight",
              product("x.hada_w1_a", "x.hada_w1_b", 2, 6, i, j) *
                  product("x.hada_w2_a", "x.hada_w2_b", 2, 6, i, j));
    check_all(&b, "c.weight",
              product("c.hada_w1_a", "c.hada_w1_b", 3, 18, i, j) *
                  product("c.hada_w2_a", "c.hada_w2_b", 3, 18, i, j));
    release(&b);
}

static void lokr_in_each_mixture_of_whole_and_factored(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("a.weight 6,8", "b.weight 6,8", "c.weight 6,8", "d.weight 6,8"));
    resolve_file(&b, state,
                 specs("a.lokr_w1 2,2", "a.lokr_w2 3,4", "b.lokr_w1 2,2", "b.lokr_w2_a 3,2",
                       "b.lokr_w2_b 2,4", "c.lokr_w1_a 2,1", "c.lokr_w1_b 1,2", "c.lokr_w2 3,4",
                       "d.lokr_w1_a 2,1", "d.lokr_w1_b 1,2", "d.lokr_w2_a 3,2", "d.lokr_w2_b 2,4"));
    check_all(&b, "a.weight",
              cell("a.lokr_w1", 2, i / 3, j / 4) * cell("a.lokr_w2", 4, i % 3, j % 4));
    check_all(&b, "b.weight",
              cell("b.lokr_w1", 2, i / 3, j / 4) *
                  product("b.lokr_w2_a", "b.lokr_w2_b", 2, 4, i % 3, j % 4));
    check_all(&b, "c.weight",
              product("c.lokr_w1_a", "c.lokr_w1_b", 1, 2, i / 3, j / 4) *
                  cell("c.lokr_w2", 4, i % 3, j % 4));
    check_all(&b, "d.weight",
              product("d.lokr_w1_a", "d.lokr_w1_b", 1, 2, i / 3, j / 4) *
                  product("d.lokr_w2_a", "d.lokr_w2_b", 2, 4, i % 3, j % 4));
    assert_int_equal(delta_on(&b, "a.weight")->rank, 0);
    assert_int_equal(delta_on(&b, "d.weight")->rank, 2);
    release(&b);
}

static void lokr_of_a_convolution_folds_its_kernel(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("a.weight 4,4,3,3", "b.weight 4,4,3,3"));
    resolve_file(&b, state,
                 specs("a.lokr_w1 2,2", "a.lokr_w2 2,2,3,3", "b.lokr_w1 2,2,1,1", "b.lokr_w2_a 2,1",
                       "b.lokr_w2_b 1,18"));
    check_all(&b, "a.weight",
              cell("a.lokr_w1", 2, i / 2, j / 18) * cell("a.lokr_w2", 18, i % 2, j % 18));
    check_all(&b, "b.weight",
              cell("b.lokr_w1", 2, i / 2, j / 18) *
                  product("b.lokr_w2_a", "b.lokr_w2_b", 1, 18, i % 2, j % 18));
    release(&b);
}

static void lokr_with_both_sides_whole_ignores_alpha_outside_peft(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("x.weight 6,8", "y.weight 1,1"));
    resolve_file(&b, state, specs("x.lokr_w1 2,2", "x.lokr_w2 3,4", "x.alpha - =10000000000"));
    assert_true(delta_on(&b, "x.weight")->scale == 1);
    /* There is no rank to divide it by */
    b.opts = (struct resolve_opts){.has_alpha = true, .alpha = 7};
    assert_ok(resolve(&b), &b.err);
    assert_true(delta_on(&b, "x.weight")->scale == 1);
    b.opts = (struct resolve_opts){.has_alpha = false};
    assert_ok(open_peft(&b, state,
                        specs("base_model.model.x.lokr_w1 2,2", "base_model.model.x.lokr_w2 3,4"),
                        "{\"peft_type\":\"LOKR\",\"r\":8,\"alpha\":2}"),
              &b.err);
    assert_ok(resolve(&b), &b.err);
    assert_true(delta_on(&b, "x.weight")->scale == 0.25);
    release(&b);
}

static void peft_loha_takes_alpha_from_its_config(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("x.weight 4,6", "y.weight 1,1"));
    assert_ok(
        open_peft(&b, state,
                  specs("base_model.model.x.hada_w1_a 4,2", "base_model.model.x.hada_w1_b 2,6",
                        "base_model.model.x.hada_w2_a 4,2", "base_model.model.x.hada_w2_b 2,6"),
                  "{\"peft_type\":\"LOHA\",\"r\":2,\"alpha\":3}"),
        &b.err);
    assert_ok(resolve(&b), &b.err);
    assert_true(delta_on(&b, "x.weight")->scale == 1.5);
    release(&b);
}

static void differences_have_scale_1_whatever_alpha_is_asked_for(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("x.weight 4,6", "n.weight 5", "n.bias 5"));
    b.opts = (struct resolve_opts){.has_alpha = true, .alpha = 4};
    resolve_file(&b, state, specs("x.diff 4,6", "n.w_norm 5", "n.b_norm 5"));
    assert_true(delta_on(&b, "x.weight")->scale == 1);
    check_all(&b, "x.weight", cell("x.diff", 6, i, j));
    check_all(&b, "n.weight", cell("n.w_norm", 1, i, j));
    check_all(&b, "n.bias", cell("n.b_norm", 1, i, j));
    struct pf_adapter_info info;
    pf_adapter_info(b.a, &info);
    assert_string_equal(info.family, "diff");
    assert_int_equal(info.rank_max, 0);
    release(&b);
}

static void deltas_come_in_canonical_order(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("b.qkv.weight 6,4", "a.weight 4,6"));
    resolve_file(&b, state,
                 specs("b.v.lora_A.weight 1,4", "b.v.lora_B.weight 2,1", "b.q.lora_A.weight 1,4",
                       "b.q.lora_B.weight 2,1", "a.lora_A.weight 1,6", "a.lora_B.weight 4,1",
                       "b.k.lora_A.weight 1,4", "b.k.lora_B.weight 2,1"));
    assert_int_equal(b.r.n_deltas, 4);
    for (size_t i = 1; i < 4; i++) {
        const struct delta *x = &b.r.deltas[i - 1], *y = &b.r.deltas[i];
        assert_true(x->i_tensor < y->i_tensor || (x->i_tensor == y->i_tensor && x->row0 < y->row0));
    }
    release(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(lora_of_every_factor_dtype),
        in_dir(max_abs_is_that_of_each_factor),
        in_dir(locon_kernels_are_folded_into_columns),
        in_dir(linear_and_1x1_conv_spellings_are_interchangeable),
        in_dir(shapes_that_the_base_denies_are_refused),
        in_dir(lora_bias_adds_to_the_base_bias_with_the_scale),
        in_dir(lora_bias_without_a_base_bias_is_refused),
        in_dir(embeddings_are_transposed_by_strides),
        in_dir(fan_in_fan_out_is_a_transpose_by_strides),
        in_dir(fan_in_fan_out_transposes_a_square_weight_and_spares_a_linear),
        in_dir(loha_is_the_product_of_two_products),
        in_dir(lokr_in_each_mixture_of_whole_and_factored),
        in_dir(lokr_of_a_convolution_folds_its_kernel),
        in_dir(lokr_with_both_sides_whole_ignores_alpha_outside_peft),
        in_dir(peft_loha_takes_alpha_from_its_config),
        in_dir(differences_have_scale_1_whatever_alpha_is_asked_for),
        in_dir(deltas_come_in_canonical_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
