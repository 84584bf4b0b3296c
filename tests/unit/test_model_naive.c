/*
 * Made-up models of other sizes against the plainest forward there is: double, loops as in data/README.md, nothing shared with
 * the product. Odd heads, more tokens than a block of queries, one token alone, patches wider than the model, no bias on q k v.
 */
#include "model_testing.h"

#include "model/noise.h"

enum { DIM_MAX = 64, TOKENS_MAX = 100, VALUES_MAX = 64 };

struct naive {
    const struct made *m;
    const struct made_up *s;
    int d, t, values;
    double time[256];
    double x[TOKENS_MAX][DIM_MAX], h[TOKENS_MAX][4 * DIM_MAX], y[TOKENS_MAX][4 * DIM_MAX];
    double q[TOKENS_MAX][DIM_MAX], k[TOKENS_MAX][DIM_MAX], v[TOKENS_MAX][DIM_MAX];
    double cond_0[DIM_MAX], cond[DIM_MAX], mod[6 * DIM_MAX];
};

static void linear(const struct naive *n, const char *prefix, const char *leaf, const double *x,
                   double *y, int n_out, int n_in)
{
    char name[96];
    (void)snprintf(name, sizeof name, "%s.weight", leaf);
    const float *w = made_find(n->m, prefix, name);
    (void)snprintf(name, sizeof name, "%s.bias", leaf);
    const float *b = made_find(n->m, prefix, name);
    assert_non_null(w);
    for (int i = 0; i < n_out; i++) {
        y[i] = b != NULL ? (double)b[i] : 0.0;
        for (int j = 0; j < n_in; j++)
            y[i] += (double)w[i * n_in + j] * x[j];
    }
}

static double silu(double x)
{
    return x / (1.0 + exp(-x));
}

static double gelu(double x)
{
    return 0.5 * x * (1.0 + tanh(sqrt(2.0 / acos(-1.0)) * (x + 0.044715 * x * x * x)));
}

static void norm(struct naive *n, double eps, const double *shift, const double *scale)
{
    for (int t = 0; t < n->t; t++) {
        double mean = 0.0, variance = 0.0;
        for (int i = 0; i < n->d; i++)
            mean += n->x[t][i] / n->d;
        for (int i = 0; i < n->d; i++)
            variance += (n->x[t][i] - mean) * (n->x[t][i] - mean) / n->d;
        for (int i = 0; i < n->d; i++)
            n->h[t][i] = (n->x[t][i] - mean) / sqrt(variance + eps) * (1.0 + scale[i]) + shift[i];
    }
}

static void condition(struct naive *n, const char *prefix, uint32_t i_class)
{
    double hidden[DIM_MAX], active[DIM_MAX];
    const float *table = made_find(n->m, prefix, "norm1.emb.class_embedder.embedding_table.weight");
    linear(n, prefix, "norm1.emb.timestep_embedder.linear_1", n->time, hidden, n->d, 256);
    for (int i = 0; i < n->d; i++)
        hidden[i] = silu(hidden[i]);
    linear(n, prefix, "norm1.emb.timestep_embedder.linear_2", hidden, n->cond, n->d, n->d);
    for (int i = 0; i < n->d; i++) {
        n->cond[i] += (double)table[i_class * (uint32_t)n->d + (uint32_t)i];
        active[i] = silu(n->cond[i]);
    }
    linear(n, prefix, "norm1.linear", active, n->mod, 6 * n->d, n->d);
}

static void attend(struct naive *n)
{
    int hd = n->s->head_dim;
    for (int head = 0; head < n->s->n_heads; head++)
        for (int t = 0; t < n->t; t++) {
            double e[TOKENS_MAX], sum = 0.0;
            for (int u = 0; u < n->t; u++) {
                double dot = 0.0;
                for (int i = head * hd; i < (head + 1) * hd; i++)
                    dot += n->q[t][i] * n->k[u][i];
                sum += e[u] = exp(dot / sqrt((double)hd));
            }
            for (int i = head * hd; i < (head + 1) * hd; i++) {
                n->h[t][i] = 0.0;
                for (int u = 0; u < n->t; u++)
                    n->h[t][i] += e[u] / sum * n->v[u][i];
            }
        }
}

static void block(struct naive *n, int i_block, uint32_t i_class)
{
    char prefix[40];
    int d = n->d;
    const double *m = n->mod;
    (void)snprintf(prefix, sizeof prefix, "transformer_blocks.%d.", i_block);
    condition(n, prefix, i_class);
    if (i_block == 0)
        memcpy(n->cond_0, n->cond, sizeof n->cond);
    norm(n, 1e-6, m, m + d);
    for (int t = 0; t < n->t; t++) {
        linear(n, prefix, "attn1.to_q", n->h[t], n->q[t], d, d);
        linear(n, prefix, "attn1.to_k", n->h[t], n->k[t], d, d);
        linear(n, prefix, "attn1.to_v", n->h[t], n->v[t], d, d);
    }
    attend(n);
    for (int t = 0; t < n->t; t++) {
        linear(n, prefix, "attn1.to_out.0", n->h[t], n->y[t], d, d);
        for (int i = 0; i < d; i++)
            n->x[t][i] += m[2 * d + i] * n->y[t][i];
    }
    norm(n, n->s->norm_eps, m + 3 * d, m + 4 * d);
    for (int t = 0; t < n->t; t++) {
        double out[DIM_MAX];
        linear(n, prefix, "ff.net.0.proj", n->h[t], n->y[t], 4 * d, d);
        for (int i = 0; i < 4 * d; i++)
            n->y[t][i] = gelu(n->y[t][i]);
        linear(n, prefix, "ff.net.2", n->y[t], out, d, 4 * d);
        for (int i = 0; i < d; i++)
            n->x[t][i] += m[5 * d + i] * out[i];
    }
}

static void embed(struct naive *n, const double *picture)
{
    const struct made_up *s = n->s;
    int side = s->size / s->patch, quarter = n->d / 4;
    for (int t = 0; t < n->t; t++) {
        double patch[VALUES_MAX];
        for (int i = 0; i < n->values; i++) {
            int ch = i / (s->patch * s->patch), y = i / s->patch % s->patch, x = i % s->patch;
            int row = t / side * s->patch + y, col = t % side * s->patch + x;
            patch[i] = picture[(ch * s->size + row) * s->size + col];
        }
        linear(n, "", "pos_embed.proj", patch, n->x[t], n->d, n->values);
        for (int i = 0; i < n->d; i++) {
            double at = i < 2 * quarter ? t % side : t / side;
            double angle = at * pow(10000.0, -(double)(i % quarter) / quarter);
            n->x[t][i] += i / quarter % 2 == 0 ? sin(angle) : cos(angle);
        }
    }
}

/* velocity (channel, row, column) for a picture of the same shape */
static void naive_velocity(struct naive *n, const double *picture, double timestep,
                           uint32_t i_class, double *velocity)
{
    const struct made_up *s = n->s;
    double active[DIM_MAX], mod[2 * DIM_MAX];
    int side = s->size / s->patch;
    for (int i = 0; i < 128; i++) {
        double angle = timestep * exp(-log(10000.0) * i / 127.0);
        n->time[i] = cos(angle);
        n->time[128 + i] = sin(angle);
    }
    embed(n, picture);
    for (int b = 0; b < s->n_blocks; b++)
        block(n, b, i_class);
    for (int i = 0; i < n->d; i++)
        active[i] = silu(n->cond_0[i]);
    linear(n, "", "proj_out_1", active, mod, 2 * n->d, n->d);
    norm(n, 1e-6, mod, mod + n->d);
    for (int t = 0; t < n->t; t++) {
        double out[VALUES_MAX];
        linear(n, "", "proj_out_2", n->h[t], out, n->values, n->d);
        for (int i = 0; i < n->values; i++) {
            int ch = i % s->channels, pixel = i / s->channels;
            int row = t / side * s->patch + pixel / s->patch;
            int col = t % side * s->patch + pixel % s->patch;
            velocity[(ch * s->size + row) * s->size + col] = out[i];
        }
    }
}

enum { STEPS = 3, IMAGES = 3 };

/* One picture by the naive way: its noise (taken from the product), three Euler steps, guidance. */
static void naive_picture(const struct made *m, const float *noise, uint32_t i_class, double g,
                          double *x)
{
    struct naive *n = calloc(1, sizeof *n);
    const struct made_up *s = &m->shape;
    int size = s->channels * s->size * s->size;
    double *with = calloc((size_t)size, sizeof *with), *without = calloc((size_t)size, sizeof *x);
    assert_true(n != NULL && with != NULL && without != NULL);
    n->m = m;
    n->s = s;
    n->d = s->n_heads * s->head_dim;
    n->t = s->size / s->patch * (s->size / s->patch);
    n->values = s->channels * s->patch * s->patch;
    for (int i = 0; i < size; i++)
        x[i] = (double)noise[i];
    for (int k = 0; k < STEPS; k++) {
        double t = 1.0 - (double)k / STEPS;
        naive_velocity(n, x, 1000.0 * t, i_class, with);
        naive_velocity(n, x, 1000.0 * t, (uint32_t)s->n_classes, without);
        for (int i = 0; i < size; i++)
            x[i] -= (without[i] + g * (with[i] - without[i])) / STEPS;
    }
    free(n);
    free(with);
    free(without);
}

static void check_model(void **state, const struct made_up *s, uint64_t seed)
{
    struct made m;
    struct drawn d;
    struct noise noise;
    pf_error err = {0};
    size_t size = (size_t)(s->channels * s->size * s->size);
    const uint32_t classes[IMAGES] = {1, 0, 1};
    const struct pf_generate_opts opts = {.size = sizeof opts,
                                          .n_images = IMAGES,
                                          .classes = classes,
                                          .seed = seed,
                                          .n_steps = STEPS,
                                          .guidance_scale = 3.0,
                                          .batch = 2};
    float *have = calloc(IMAGES * size, sizeof *have), *start = calloc(size, sizeof *start);
    double *want = calloc(size, sizeof *want);
    assert_true(have != NULL && start != NULL && want != NULL);
    made_fill(&m, s, seed);
    made_write(state, &m, NULL);
    drawn_open(&d, *state, 2);
    assert_ok(pf_generate(d.model, d.view, &opts, have, NULL, NULL, &err), &err);
    noise_seed(&noise, seed);
    for (size_t i = 0; i < IMAGES; i++) {
        double largest = 0.0;
        noise_fill(&noise, start, size);
        naive_picture(&m, start, classes[i], 3.0, want);
        for (size_t j = 0; j < size; j++)
            largest = fmax(largest, fabs(want[j]));
        for (size_t j = 0; j < size; j++)
            if (!(fabs((double)have[i * size + j] - want[j]) <= 1e-4 * largest))
                fail_msg("picture %zu value %zu: %.9g, not %.9g", i, j, (double)have[i * size + j],
                         want[j]);
    }
    drawn_close(&d);
    made_release(&m);
    free(have);
    free(start);
    free(want);
}

static void odd_heads_without_bias(void **state)
{
    check_model(state,
                &(const struct made_up){.n_blocks = 3,
                                        .n_heads = 3,
                                        .head_dim = 20,
                                        .channels = 3,
                                        .size = 12,
                                        .patch = 3,
                                        .n_classes = 5,
                                        .norm_eps = 1e-2},
                11);
}

static void more_tokens_than_a_block_of_queries(void **state)
{
    check_model(state,
                &(const struct made_up){.n_blocks = 2,
                                        .n_heads = 1,
                                        .head_dim = 12,
                                        .channels = 1,
                                        .size = 20,
                                        .patch = 2,
                                        .n_classes = 2,
                                        .has_attn_bias = true,
                                        .norm_eps = 1e-5},
                12);
}

static void one_token_and_patches_wider_than_the_model(void **state)
{
    check_model(state,
                &(const struct made_up){.n_blocks = 1,
                                        .n_heads = 2,
                                        .head_dim = 6,
                                        .channels = 1,
                                        .size = 8,
                                        .patch = 8,
                                        .n_classes = 2,
                                        .has_attn_bias = true,
                                        .norm_eps = 1e-5},
                13);
}

static void only_three_channels_make_a_picture(void **state)
{
    const struct made_up s = {.n_blocks = 1,
                              .n_heads = 1,
                              .head_dim = 4,
                              .channels = 1,
                              .size = 4,
                              .patch = 2,
                              .n_classes = 2,
                              .norm_eps = 1e-5};
    const uint32_t i_class = 0;
    const struct pf_generate_opts opts = {.size = sizeof opts, .n_images = 1, .classes = &i_class};
    struct made m;
    struct drawn d;
    uint8_t rgb[48];
    pf_error err = {0};
    made_fill(&m, &s, 14);
    made_write(state, &m, NULL);
    drawn_open(&d, *state, 1);
    assert_int_equal(pf_generate(d.model, d.view, &opts, NULL, rgb, NULL, &err), PF_E_UNSUPPORTED);
    assert_err(&err, PF_E_UNSUPPORTED, "1 channels");
    drawn_close(&d);
    made_release(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(odd_heads_without_bias),
        in_dir(more_tokens_than_a_block_of_queries),
        in_dir(one_token_and_patches_wider_than_the_model),
        in_dir(only_three_channels_make_a_picture),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
