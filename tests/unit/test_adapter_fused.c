/*
 * Fused and split targets (format notes, B.8): row ranges of one base tensor, one module over several, biases with them.
 */
#include "test_adapter_build.h"

#define PAIR(module, rank, rows, cols)                                                             \
    module ".lora_A.weight " #rank "," #cols, module ".lora_B.weight " #rows "," #rank

static void check_range(const struct built *b, size_t i, const char *key, int64_t row0,
                        int64_t n_rows)
{
    assert_true(i < b->r.n_deltas);
    const struct delta *d = &b->r.deltas[i];
    assert_string_equal(d->key, key);
    assert_int_equal(d->row0, row0);
    assert_int_equal(d->n_rows, n_rows);
    assert_int_equal(d->f[0].n_rows, n_rows);
}

static void missing_parts_leave_their_rows_alone(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("x.to_qkv.weight 12,6"));
    resolve_file(&b, state, specs(PAIR("x.to_q", 2, 4, 6), PAIR("x.to_v", 3, 4, 6)));
    assert_int_equal(b.r.n_deltas, 2);
    check_range(&b, 0, "x.to_q", 0, 4);
    check_range(&b, 1, "x.to_v", 8, 4);
    assert_int_equal(b.r.deltas[1].rank, 3); /* each part has its own rank and alpha */
    release(&b);
}

static void one_part_alone_is_placed_by_equal_shares(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("x.gate_up_proj.weight 8,6"));
    resolve_file(&b, state, specs(PAIR("x.up_proj", 2, 4, 6)));
    check_range(&b, 0, "x.up_proj", 4, 4);
    release(&b);
}

static void grouped_queries_take_their_sizes_from_the_file(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("x.qkv_proj.weight 16,6"));
    resolve_file(
        &b, state,
        specs(PAIR("x.q_proj", 2, 8, 6), PAIR("x.k_proj", 2, 4, 6), PAIR("x.v_proj", 2, 4, 6)));
    check_range(&b, 0, "x.q_proj", 0, 8);
    check_range(&b, 1, "x.k_proj", 8, 4);
    check_range(&b, 2, "x.v_proj", 12, 4);
    release(&b);
}

/* Keys have as many rows as values, so two of the three say what the third has. */
static void grouped_queries_with_one_part_missing_are_placed_by_the_other_two(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("x.qkv_proj.weight 16,6"));
    resolve_file(&b, state, specs(PAIR("x.q_proj", 2, 8, 6), PAIR("x.v_proj", 2, 4, 6)));
    check_range(&b, 0, "x.q_proj", 0, 8);
    check_range(&b, 1, "x.v_proj", 12, 4);
    resolve_file(&b, state, specs(PAIR("x.q_proj", 2, 8, 6), PAIR("x.k_proj", 2, 4, 6)));
    check_range(&b, 0, "x.q_proj", 0, 8);
    check_range(&b, 1, "x.k_proj", 8, 4);
    resolve_file(&b, state, specs(PAIR("x.k_proj", 2, 4, 6), PAIR("x.v_proj", 2, 4, 6)));
    check_range(&b, 0, "x.k_proj", 8, 4);
    check_range(&b, 1, "x.v_proj", 12, 4);
    release(&b);
}

static void grouped_queries_whose_missing_part_is_not_certain_are_refused(void **state)
{
    const char *const *const files[] = {
        specs(PAIR("x.q_proj", 2, 8, 6), PAIR("x.v_proj", 2, 3, 6)),
        specs(PAIR("x.k_proj", 2, 8, 6), PAIR("x.v_proj", 2, 8, 6)),
        specs(PAIR("x.k_proj", 2, 4, 6)),
        specs(PAIR("x.q_proj", 2, 8, 6)),
    };
    struct built b = {0};
    open_base(&b, state, specs("x.qkv_proj.weight 16,6"));
    for (size_t i = 0; i < PF_COUNTOF(files); i++) {
        assert_ok(open_file(&b, state, files[i]), &b.err);
        assert_int_equal(resolve(&b), PF_E_MISMATCH);
        assert_err(&b.err, PF_E_MISMATCH, "'x.qkv_proj.weight', which has 16 rows",
                   "where this one begins is unknown");
    }
    release(&b);
}

static void parts_that_do_not_add_up_are_refused(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("x.qkv_proj.weight 16,6"));
    assert_ok(open_file(&b, state,
                        specs(PAIR("x.q_proj", 2, 8, 6), PAIR("x.k_proj", 2, 4, 6),
                              PAIR("x.v_proj", 2, 3, 6))),
              &b.err);
    assert_int_equal(resolve(&b), PF_E_MISMATCH);
    assert_err(&b.err, PF_E_MISMATCH, "do not add up");
    release(&b);
}

static void kohya_parts_reach_a_fused_base_too(void **state)
{
    struct built b = {0};
    open_base(&b, state,
              specs("x.attn.qkv.weight 12,6", "y.in_proj_weight 12,6", "y.in_proj_bias 12"));
    resolve_file(&b, state,
                 specs(PAIR("lora_unet_x_attn_q", 2, 4, 6), PAIR("lora_unet_x_attn_k", 2, 4, 6),
                       PAIR("lora_unet_x_attn_v", 2, 4, 6), PAIR("y.v_proj", 2, 4, 6),
                       "y.v_proj.diff_b 4"));
    assert_int_equal(b.r.n_deltas, 5);
    check_range(&b, 0, "lora_unet_x_attn_q", 0, 4);
    check_range(&b, 2, "lora_unet_x_attn_v", 8, 4);
    for (size_t i = 3; i < 5; i++)
        check_range(&b, i, "y.v_proj", 8, 4);
    release(&b);
}

static void a_fused_adapter_is_split_over_the_bases_tensors(void **state)
{
    struct built b = {0};
    open_base(&b, state,
              specs("x.to_q.weight 8,6", "x.to_q.bias 8", "x.to_k.weight 4,6", "x.to_k.bias 4",
                    "x.to_v.weight 4,6", "x.to_v.bias 4"));
    resolve_file(&b, state,
                 specs(PAIR("x.to_qkv", 2, 16, 6), "x.to_qkv.diff_b 16", "x.to_qkv.alpha - =1"));
    assert_int_equal(b.r.n_deltas, 6);
    assert_int_equal(b.r.n_keys_matched, 4);
    const struct delta *v = delta_on(&b, "x.to_v.weight");
    assert_int_equal(v->row0, 0);
    assert_int_equal(v->n_rows, 4);
    assert_true(v->scale == 0.5);
    const char *up = "x.to_qkv.lora_B.weight", *down = "x.to_qkv.lora_A.weight";
    assert_true(delta_at(v, 3, 5) == cell(up, 2, 15, 0) * cell(down, 6, 0, 5) +
                                         cell(up, 2, 15, 1) * cell(down, 6, 1, 5));
    assert_true(delta_at(delta_on(&b, "x.to_k.bias"), 0, 0) == cell("x.to_qkv.diff_b", 1, 8, 0));
    release(&b);
}

/* What adds nothing to a tensor leaves its bytes alone: the proof is max_abs 0, of these rows and no others. */
static void rows_of_zeros_for_one_part_are_known_to_be_zeros(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("x.gate_proj.weight 4,6", "x.up_proj.weight 4,6"));
    assert_ok(
        open_file(&b, state,
                  specs("x.gate_up_proj.lora_A.weight 2,6", "x.gate_up_proj.lora_B.weight 8,2")),
        &b.err);
    assert_ok(resolve(&b), &b.err);
    assert_true(delta_on(&b, "x.gate_proj.weight")->max_abs[0] > 0);
    const char *path = test_path(state, "adapter.safetensors");
    FILE *f = fopen(path, "r+e");
    assert_non_null(f);
    assert_int_equal(fseek(f, -4 * 2 * 4, SEEK_END), 0); /* the last rows of B are the last bytes */
    float zeros[8] = {0};
    assert_int_equal(fwrite(zeros, sizeof zeros, 1, f), 1);
    assert_int_equal(fclose(f), 0);
    pf_adapter_close(b.a);
    assert_ok(pf_adapter_open(path, &b.a, &b.err), &b.err);
    assert_ok(resolve(&b), &b.err);
    assert_true(delta_on(&b, "x.gate_proj.weight")->max_abs[0] > 0);
    assert_true(delta_on(&b, "x.up_proj.weight")->max_abs[0] == 0);
    release(&b);
}

static void a_fused_adapter_of_another_size_is_refused(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("x.to_q.weight 8,6", "x.to_k.weight 4,6", "x.to_v.weight 4,6"));
    assert_ok(open_file(&b, state, specs(PAIR("x.to_qkv", 2, 12, 6))), &b.err);
    assert_int_equal(resolve(&b), PF_E_MISMATCH);
    assert_err(&b.err, PF_E_MISMATCH, "changes 12 rows", "have 16");
    release(&b);
}

static void a_fused_loha_is_split_by_rows(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("x.to_q.weight 4,6", "x.to_k.weight 4,6", "x.to_v.weight 4,6"));
    resolve_file(&b, state,
                 specs("x.to_qkv.hada_w1_a 12,2", "x.to_qkv.hada_w1_b 2,6",
                       "x.to_qkv.hada_w2_a 12,2", "x.to_qkv.hada_w2_b 2,6"));
    const struct delta *k = delta_on(&b, "x.to_k.weight");
    double w1 = 0, w2 = 0;
    for (int i = 0; i < 2; i++) {
        w1 += cell("x.to_qkv.hada_w1_a", 2, 5, i) * cell("x.to_qkv.hada_w1_b", 6, i, 2);
        w2 += cell("x.to_qkv.hada_w2_a", 2, 5, i) * cell("x.to_qkv.hada_w2_b", 6, i, 2);
    }
    assert_true(delta_at(k, 1, 2) == w1 * w2);
    release(&b);
}

static void a_fused_lokr_is_split_only_between_groups_of_w2(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("x.to_q.weight 4,6", "x.to_k.weight 4,6", "x.to_v.weight 4,6"));
    resolve_file(&b, state, specs("x.to_qkv.lokr_w1 6,2", "x.to_qkv.lokr_w2 2,3"));
    const struct delta *v = delta_on(&b, "x.to_v.weight"); /* rows 8 to 11: w1 rows 4 and 5 */
    assert_int_equal(v->f[0].n_rows, 2);
    assert_true(delta_at(v, 3, 5) ==
                cell("x.to_qkv.lokr_w1", 2, 5, 1) * cell("x.to_qkv.lokr_w2", 3, 1, 2));
    assert_ok(open_file(&b, state, specs("x.to_qkv.lokr_w1 4,2", "x.to_qkv.lokr_w2 3,3")), &b.err);
    assert_int_equal(resolve(&b), PF_E_UNSUPPORTED);
    assert_err(&b.err, PF_E_UNSUPPORTED, "'x.to_qkv'", "cut through a group of 3 rows");
    release(&b);
}

static void a_fused_module_needs_all_its_parts_in_the_base(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("x.to_q.weight 4,6", "x.to_k.weight 4,6"));
    assert_ok(open_file(&b, state, specs(PAIR("x.to_qkv", 2, 12, 6))), &b.err);
    assert_int_equal(resolve(&b), PF_E_UNMATCHED);
    release(&b);
}

static void both_spellings_of_one_delta_are_used_once(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("x.qkv.weight 6,4"));
    resolve_file(&b, state,
                 specs("x.qkv.lora_A.weight 1,4 F32 =1", "x.qkv.lora_B.weight 6,1 F32 =2",
                       "x.k.lora_A.weight 1,4 F32 =1", "x.k.lora_B.weight 2,1 F32 =2"));
    assert_int_equal(b.r.n_deltas, 1);
    check_range(&b, 0, "x.qkv", 0, 6);
    assert_true(has_note(&b, "'x.k'"));
    assert_int_equal(b.r.n_keys_matched, 4);
    assert_ok(open_file(&b, state,
                        specs("x.qkv.lora_A.weight 1,4 F32 =1", "x.qkv.lora_B.weight 6,1 F32 =2",
                              "x.k.lora_A.weight 1,4 F32 =1", "x.k.lora_B.weight 2,1 F32 =3")),
              &b.err);
    assert_int_equal(resolve(&b), PF_E_CONFLICT);
    assert_err(&b.err, PF_E_CONFLICT, "'x.qkv' and 'x.k'", "rows 2 to 4");
    release(&b);
}

static void interleaved_layouts_are_not_guessed(void **state)
{
    struct built b = {0};
    open_base(&b, state, specs("x.query_key_value.weight 12,6"));
    assert_ok(open_file(&b, state,
                        specs(PAIR("x.q_proj", 2, 4, 6), PAIR("x.k_proj", 2, 4, 6),
                              PAIR("x.v_proj", 2, 4, 6))),
              &b.err);
    assert_int_equal(resolve(&b), PF_E_UNMATCHED);
    release(&b);
}

static void multihead_attention_itself_is_its_in_proj(void **state)
{
    struct built b = {0};
    open_base(&b, state,
              specs("x.attn.in_proj_weight 12,4", "x.attn.in_proj_bias 12",
                    "x.attn.out_proj.weight 4,4"));
    resolve_file(&b, state,
                 specs(PAIR("base_model.model.x.attn", 2, 12, 4),
                       PAIR("base_model.model.x.attn.base_layer.out_proj", 2, 4, 4)));
    assert_int_equal(delta_on(&b, "x.attn.in_proj_weight")->n_rows, 12);
    assert_int_equal(delta_on(&b, "x.attn.out_proj.weight")->n_rows, 4);
    release(&b);
}

static void an_in_proj_module_is_the_in_proj_parameters(void **state)
{
    struct built b = {0};
    static const char *const modules[] = {"x.attn.in_proj", "lora_unet_x_attn_in_proj",
                                          "base_model.model.x.attn"};
    open_base(&b, state,
              specs("x.attn.in_proj_weight 12,4", "x.attn.in_proj_bias 12",
                    "x.attn.out_proj.weight 4,4"));
    for (size_t i = 0; i < PF_COUNTOF(modules); i++) {
        char d[96], u[96], c[96];
        snprintf(d, sizeof d, "%s.lora_A.weight 2,4", modules[i]);
        snprintf(u, sizeof u, "%s.lora_B.weight 12,2", modules[i]);
        snprintf(c, sizeof c, "%s.diff_b 12", modules[i]);
        resolve_file(&b, state, specs(d, u, c));
        assert_int_equal(b.r.n_deltas, 2);
        assert_int_equal(delta_on(&b, "x.attn.in_proj_weight")->n_rows, 12);
        assert_int_equal(delta_on(&b, "x.attn.in_proj_bias")->n_rows, 12);
    }
    release(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(missing_parts_leave_their_rows_alone),
        in_dir(one_part_alone_is_placed_by_equal_shares),
        in_dir(grouped_queries_take_their_sizes_from_the_file),
        in_dir(grouped_queries_with_one_part_missing_are_placed_by_the_other_two),
        in_dir(grouped_queries_whose_missing_part_is_not_certain_are_refused),
        in_dir(parts_that_do_not_add_up_are_refused),
        in_dir(kohya_parts_reach_a_fused_base_too),
        in_dir(a_fused_adapter_is_split_over_the_bases_tensors),
        in_dir(rows_of_zeros_for_one_part_are_known_to_be_zeros),
        in_dir(a_fused_adapter_of_another_size_is_refused),
        in_dir(a_fused_loha_is_split_by_rows),
        in_dir(a_fused_lokr_is_split_only_between_groups_of_w2),
        in_dir(a_fused_module_needs_all_its_parts_in_the_base),
        in_dir(both_spellings_of_one_delta_are_used_once),
        in_dir(interleaved_layouts_are_not_guessed),
        in_dir(multihead_attention_itself_is_its_in_proj),
        in_dir(an_in_proj_module_is_the_in_proj_parameters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
