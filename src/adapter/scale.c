/*
 * One scale per module. Sources are the alpha (or absolute scale) tensor of the module and every config that speaks of it; they
 * must agree, and the factors must have the rank that a config says. A contradiction between sources is kept, not thrown: an
 * explicit alpha overrides all of them, so only a resolution without one fails. Factors that deny the config always fail.
 */
#include "adapter/adapter_int.h"

#include "tensor/dtype.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

double module_scale(const struct ad_module *m, bool has_alpha, double alpha)
{
    if (!has_alpha || m->denominator == 0)
        return m->scale;
    return alpha / m->denominator;
}

/* --------------------------------------------------------------------------------------- which config, which value */

struct paths {
    struct str items[AD_CANDIDATES_MAX];
    size_t n;
};

/* What patterns are matched against: behind PEFT's own prefix, or that of the config's component, exactly the path that PEFT
 * saw; any other prefix may be the model's or the file's, and with and without it are tried. */
static struct paths pattern_paths(const struct ad_config *cfg, const struct ad_module *m)
{
    static const char wrapper[] = "base_model.model.";
    struct ad_candidate c[AD_CANDIDATES_MAX];
    struct paths out = {.n = dialect_candidates(m->name, c)};
    for (size_t k = 0; k < out.n; k++) {
        out.items[k] = c[k].path;
        if (str_starts(c[k].path, wrapper)) {
            out.items[0] = str_cut_front(c[k].path, sizeof wrapper - 1);
            out.n = 1;
            return out;
        }
    }
    size_t n = cfg->component.n;
    if (n > 0 && m->name.n > n && m->name.p[n] == '.' &&
        memcmp(m->name.p, cfg->component.p, n) == 0) {
        out.items[0] = str_cut_front(m->name, n + 1);
        out.n = 1;
    }
    return out;
}

static double pattern_value(const struct ad_patterns *patterns, const struct paths *paths,
                            double otherwise)
{
    for (size_t i = 0; i < patterns->n; i++)
        for (size_t k = paths->n; k-- > 0;)
            if (pattern_matches(&patterns->items[i], paths->items[k]))
                return patterns->items[i].value;
    return otherwise;
}

static bool is_te(enum ad_role role)
{
    return role >= AD_TE;
}

/* A prefixed config speaks of the modules of its component, under whatever prefix they now stand. */
static bool config_covers(const struct ad_config *cfg, const struct ad_module *m)
{
    if (cfg->component.n == 0)
        return true;
    if (m->name.n > cfg->component.n && m->name.p[cfg->component.n] == '.' &&
        memcmp(m->name.p, cfg->component.p, cfg->component.n) == 0)
        return true;
    struct ad_candidate c[AD_CANDIDATES_MAX];
    (void)dialect_candidates(m->name, c); /* at least one */
    if (c[0].role == AD_COMPONENT)
        return false;
    static const struct {
        const char *name;
        enum ad_role role;
    } encoders[] = {
        {"text_encoder", AD_TE}, {"text_encoder_2", AD_TE_2}, {"text_encoder_3", AD_TE_3}};
    for (size_t i = 0; i < PF_COUNTOF(encoders); i++)
        if (str_eqz(cfg->component, encoders[i].name))
            return c[0].role == encoders[i].role;
    return !is_te(c[0].role);
}

static int check_type(const struct pf_adapter *a, const struct ad_module *m,
                      const struct ad_config *cfg, pf_error *err)
{
    enum ad_peft wanted = m->family == AD_LOHA   ? AD_PEFT_LOHA
                          : m->family == AD_LOKR ? AD_PEFT_LOKR
                                                 : AD_PEFT_LORA;
    if (wanted == cfg->type)
        return PF_OK;
    return err_set(err, PF_E_CONFLICT,
                   "adapter '%s': %s says peft_type %s, but the factors of '%s' are %s", a->path,
                   cfg->what, config_type_name(cfg->type), m->name.p, config_type_name(wanted));
}

/* ---------------------------------------------------------------------------------------------- the sources */

struct source {
    const char *what;
    double alpha, scale, denominator;
    int32_t dtype; /* of a tensor: another source may have been rounded to it; -1: exact */
};

static int read_scalar(const struct pf_adapter *a, const struct ad_tensor *t, double *out,
                       pf_error *err)
{
    if (!dtype_scalar_to_double(t->dtype, t->p, out))
        return err_set(err, PF_E_UNSUPPORTED, "adapter '%s': '%s' is %s, which is no number",
                       a->path, t->name.p, pf_dtype_name(t->dtype));
    if (!isfinite(*out))
        return err_set(err, PF_E_NONFINITE, "adapter '%s': '%s' is %g", a->path, t->name.p, *out);
    return PF_OK;
}

/* The rank that alpha is divided by: of LoKr that of w2 where it is factored. 0: both sides are whole. */
static int64_t scale_rank(const struct ad_module *m)
{
    if (m->family == AD_LOKR)
        return m->rank[1] > 0 ? m->rank[1] : m->rank[0];
    return m->rank[0];
}

static bool same_within(double x, double y, int32_t dtype)
{
    if (x == y)
        return true;
    double tolerance = dtype == PF_BF16 ? 0x1p-8 : dtype == PF_F16 ? 0x1p-11 : 0x1p-23;
    return dtype >= 0 && fabs(x - y) <= tolerance * fmax(fabs(x), fabs(y));
}

struct gather {
    struct pf_adapter *a;
    struct ad_module *m;
    struct source first;
    bool has_first;
    struct strbuf wrong_ranks; /* modules whose factors deny the config */
    size_t n_wrong;
    const char *wrong_what;
    pf_error *err;
};

static int add_source(struct gather *g, struct source s)
{
    if (!g->has_first) {
        g->first = s;
        g->has_first = true;
        return PF_OK;
    }
    int32_t dtype = g->first.dtype >= 0 ? g->first.dtype : s.dtype;
    if (same_within(g->first.scale, s.scale, dtype) || g->m->conflict != NULL)
        return PF_OK;
    char text[512];
    int n = snprintf(text, sizeof text,
                     "%s says alpha %.17g (scale %.9g), %s says alpha %.17g (scale %.9g)",
                     g->first.what, g->first.alpha, g->first.scale, s.what, s.alpha, s.scale);
    g->m->conflict = n > 0 ? arena_strndup(&g->a->arena, text, strlen(text)) : NULL;
    if (g->m->conflict == NULL)
        return err_nomem(g->err, sizeof text, "a message");
    return PF_OK;
}

static void add_wrong_rank(struct gather *g, int64_t is, double said, const char *what)
{
    g->wrong_what = what;
    if (g->n_wrong++ < AD_LIST_MAX)
        strbuf_addf(&g->wrong_ranks, "%s'%s' has rank %lld, not %.0f", g->n_wrong > 1 ? ", " : "",
                    g->m->name.p, (long long)is, said);
}

static int add_config(struct gather *g, const struct ad_config *cfg)
{
    struct ad_module *m = g->m;
    int rc = check_type(g->a, m, cfg, g->err);
    if (rc != PF_OK)
        return rc;
    struct paths paths = pattern_paths(cfg, m);
    double r = pattern_value(&cfg->ranks, &paths, cfg->r);
    double alpha = pattern_value(&cfg->alphas, &paths, cfg->alpha);
    for (int i = 0; i < 2; i++)
        if (m->rank[i] > 0 && (double)m->rank[i] != r && (i == 0 || m->rank[0] != m->rank[1]))
            add_wrong_rank(g, m->rank[i], r, cfg->what);
    double denominator = cfg->use_rslora ? sqrt(r) : r;
    m->is_transposed |= cfg->fan_in_fan_out && m->family == AD_LORA;
    return add_source(g, (struct source){.what = cfg->what,
                                         .alpha = alpha,
                                         .scale = alpha / denominator,
                                         .denominator = denominator,
                                         .dtype = -1});
}

static int add_tensors(struct gather *g)
{
    const struct ad_module *m = g->m;
    const struct ad_tensor *alpha = module_leaf(g->a, m, LEAF_ALPHA);
    const struct ad_tensor *scale = module_leaf(g->a, m, LEAF_SCALE);
    double r = (double)scale_rank(m), value = 0;
    int rc = alpha != NULL ? read_scalar(g->a, alpha, &value, g->err) : PF_OK;
    /* LyCORIS multiplies no scale onto two whole sides, whatever its alpha. PEFT does, from its config. */
    if (rc == PF_OK && alpha != NULL && (r > 0 || g->has_first)) {
        double denominator = g->has_first ? g->first.denominator : r;
        if (r > 0)
            denominator = r;
        rc = add_source(g, (struct source){.what = "its alpha tensor",
                                           .alpha = value,
                                           .scale = value / denominator,
                                           .denominator = denominator,
                                           .dtype = alpha->dtype});
    } else if (rc == PF_OK && alpha != NULL) {
        rc = add_source(g, (struct source){.what = "its alpha tensor",
                                           .alpha = value,
                                           .scale = 1,
                                           .denominator = 0,
                                           .dtype = -1});
    }
    if (rc == PF_OK && scale != NULL)
        rc = read_scalar(g->a, scale, &value, g->err);
    if (rc == PF_OK && scale != NULL)
        rc = add_source(g, (struct source){.what = "its scale tensor",
                                           .alpha = value * r,
                                           .scale = value,
                                           .denominator = r,
                                           .dtype = scale->dtype});
    return rc;
}

static int scale_one(struct gather *g)
{
    struct ad_module *m = g->m;
    g->has_first = false;
    for (size_t i = 0; i < g->a->n_configs; i++)
        if (config_covers(&g->a->configs[i], m)) {
            g->a->configs[i].is_used = true;
            int rc = add_config(g, &g->a->configs[i]);
            if (rc != PF_OK)
                return rc;
        }
    int rc = add_tensors(g);
    if (rc != PF_OK)
        return rc;
    m->denominator = (double)scale_rank(m);
    m->scale = 1;
    m->is_silent = !g->has_first && m->denominator > 0;
    if (g->has_first) {
        m->has_alpha = true;
        m->alpha = g->first.alpha;
        m->scale = g->first.scale;
        m->denominator = g->first.denominator;
    }
    return PF_OK;
}

int scales_build(struct pf_adapter *a, pf_error *err)
{
    struct gather g = {.a = a, .err = err};
    strbuf_init(&g.wrong_ranks);
    int rc = PF_OK;
    for (size_t i = 0; rc == PF_OK && i < a->n_modules; i++) {
        g.m = &a->modules[i];
        if (module_has_scale(g.m))
            rc = scale_one(&g);
    }
    if (rc == PF_OK && g.n_wrong > 0)
        rc = err_set(err, PF_E_MISMATCH,
                     "adapter '%s': the factors of %zu module%s disagree with %s, so no scale is "
                     "right: %s%s",
                     a->path, g.n_wrong, g.n_wrong == 1 ? "" : "s", g.wrong_what,
                     strbuf_z(&g.wrong_ranks), g.n_wrong > AD_LIST_MAX ? ", and more" : "");
    strbuf_release(&g.wrong_ranks);
    return rc;
}

/* ------------------------------------------------------------------------------------------------- remarks */

static int cmp_scale(const void *pa, const void *pb)
{
    const double *a = pa, *b = pb;
    return *a < *b ? -1 : *a > *b;
}

/* The most common magnitude; of several equally common ones, the nearest to the median. 0: there is none. */
static double common_scale(double *scales, size_t n)
{
    if (n == 0)
        return 0;
    qsort(scales, n, sizeof *scales, cmp_scale);
    double median = scales[n / 2], best = 0;
    size_t n_best = 0;
    for (size_t lo = 0, hi = 0; lo < n; lo = hi) {
        while (hi < n && scales[hi] == scales[lo])
            hi++;
        bool is_nearer = fabs(log(scales[lo] / median)) < fabs(log(best / median));
        if (hi - lo > n_best || (hi - lo == n_best && is_nearer)) {
            n_best = hi - lo;
            best = scales[lo];
        }
    }
    return best;
}

struct listing {
    struct strbuf text;
    size_t n;
};

static void list_module(struct listing *l, const struct ad_module *m, double scale)
{
    if (l->n++ < AD_LIST_MAX)
        strbuf_addf(&l->text, "%s'%s' (%.6g)", l->n > 1 ? ", " : "", m->name.p, scale);
}

static void remark_far(const struct pf_adapter *a, bool has_alpha, double alpha,
                       struct ad_notes *notes)
{
    double *scales = mem_calloc(a->n_modules > 0 ? a->n_modules : 1, sizeof *scales);
    if (scales == NULL) {
        notes->is_failed = true;
        return;
    }
    size_t n = 0;
    for (size_t i = 0; i < a->n_modules; i++) {
        double s = fabs(module_scale(&a->modules[i], has_alpha, alpha));
        if (module_has_scale(&a->modules[i]) && s > 0)
            scales[n++] = s;
    }
    double common = common_scale(scales, n);
    mem_free(scales);
    struct listing far = {.n = 0};
    strbuf_init(&far.text);
    for (size_t i = 0; i < a->n_modules; i++) {
        const struct ad_module *m = &a->modules[i];
        double s = module_scale(m, has_alpha, alpha);
        if (module_has_scale(m) && s != 0 && (fabs(s) > 4 * common || fabs(s) < common / 4))
            list_module(&far, m, s);
    }
    if (far.n > 0)
        notes_addf(
            notes,
            "warning: the scale of %zu module%s is more than 4 times off the most common one "
            "(%.6g): %s%s",
            far.n, far.n == 1 ? "" : "s", common, strbuf_z(&far.text),
            far.n > AD_LIST_MAX ? ", and more" : "");
    strbuf_release(&far.text);
}

static void remark_silent(const struct pf_adapter *a, struct ad_notes *notes)
{
    size_t n = 0, n_scaled = 0;
    for (size_t i = 0; i < a->n_modules; i++) {
        n += a->modules[i].is_silent;
        n_scaled += module_has_scale(&a->modules[i]);
    }
    if (n == 0)
        return;
    const char *hint = NULL;
    for (size_t i = 0; i < a->n_meta; i++)
        if (str_eqz(a->meta[i].key, "ss_network_alpha"))
            hint = a->meta[i].value.p;
    if (n == n_scaled)
        notes_addf(notes, "no alpha and no config: scale 1 is assumed%s%.40s%s",
                   hint != NULL ? " (its training metadata says ss_network_alpha " : "",
                   hint != NULL ? hint : "", hint != NULL ? ")" : "");
    else
        notes_addf(notes,
                   "%zu of %zu modules have neither alpha nor config: scale 1 is assumed for them",
                   n, n_scaled);
}

void scales_remark(const struct pf_adapter *a, bool has_alpha, double alpha, struct ad_notes *notes)
{
    if (!has_alpha)
        remark_silent(a, notes);
    struct listing zero = {.n = 0};
    strbuf_init(&zero.text);
    for (size_t i = 0; i < a->n_modules; i++)
        if (module_has_scale(&a->modules[i]) && module_scale(&a->modules[i], has_alpha, alpha) == 0)
            list_module(&zero, &a->modules[i], 0);
    if (zero.n > 0)
        notes_addf(notes, "alpha 0 adds nothing: %zu module%s: %s%s", zero.n,
                   zero.n == 1 ? "" : "s", strbuf_z(&zero.text),
                   zero.n > AD_LIST_MAX ? ", and more" : "");
    strbuf_release(&zero.text);
    remark_far(a, has_alpha, alpha, notes);
}
