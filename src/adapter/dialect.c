/*
 * The one table of spellings. Suffixes are compared at the end of the key, longest meaning first, never searched for in the
 * middle: a module named `lora_A` or `alpha` somewhere in a path means nothing. To add a spelling, add a line; to stop
 * refusing one, give its line a leaf.
 */
#include "adapter/dialect.h"

#include <string.h>

#define TUCKER "Tucker (CP) factors are not supported yet"
#define DORA   "DoRA is not supported yet, and its factors alone would be another adapter"
#define OFT    "OFT is not supported"
#define GLORA  "GLoRA is not supported"
#define WHOLE  "a tensor that replaces one of the base (modules_to_save) is not supported yet"

struct spelling {
    const char *suffix;
    enum ad_leaf leaf;
    /* PEFT may leave the adapter's name behind the first word: `.lora_A.default.weight` */
    bool is_named;
    const char *refused;
};

static const struct spelling spellings[] = {
    {".lora_up.weight", LEAF_UP, false, NULL},
    {".lora_down.weight", LEAF_DOWN, false, NULL},
    {"_lora.up.weight", LEAF_UP, false, NULL},
    {"_lora.down.weight", LEAF_DOWN, false, NULL},
    {".lora_B.weight", LEAF_UP, true, NULL},
    {".lora_A.weight", LEAF_DOWN, true, NULL},
    {".lora.up.weight", LEAF_UP, false, NULL},
    {".lora.down.weight", LEAF_DOWN, false, NULL},
    {".lora_linear_layer.up.weight", LEAF_UP, false, NULL},
    {".lora_linear_layer.down.weight", LEAF_DOWN, false, NULL},
    {".lora_B.bias", LEAF_UP_BIAS, true, NULL},
    {".lora_A.bias", LEAF_REFUSED, true,
     "a bias between A and B (HunyuanVideo) is no change of a weight and is not supported"},
    {".lora_down.bias", LEAF_REFUSED, false,
     "a bias between down and up is no change of a weight and is not supported"},
    {".lora_B", LEAF_UP, true, NULL},
    {".lora_A", LEAF_DOWN, true, NULL},
    {".lora_embedding_B", LEAF_EMB_UP, true, NULL},
    {".lora_embedding_A", LEAF_EMB_DOWN, true, NULL},
    {".alpha", LEAF_ALPHA, false, NULL},
    {".scale", LEAF_SCALE, false, NULL},
    {".hada_w1_a", LEAF_HADA_W1A, true, NULL},
    {".hada_w1_b", LEAF_HADA_W1B, true, NULL},
    {".hada_w2_a", LEAF_HADA_W2A, true, NULL},
    {".hada_w2_b", LEAF_HADA_W2B, true, NULL},
    {".lokr_w1", LEAF_LOKR_W1, true, NULL},
    {".lokr_w1_a", LEAF_LOKR_W1A, true, NULL},
    {".lokr_w1_b", LEAF_LOKR_W1B, true, NULL},
    {".lokr_w2", LEAF_LOKR_W2, true, NULL},
    {".lokr_w2_a", LEAF_LOKR_W2A, true, NULL},
    {".lokr_w2_b", LEAF_LOKR_W2B, true, NULL},
    {".diff", LEAF_DIFF, false, NULL},
    {".diff_b", LEAF_DIFF_B, false, NULL},
    {".w_norm", LEAF_W_NORM, false, NULL},
    {".b_norm", LEAF_B_NORM, false, NULL},
    /* understood, and refused */
    {".lora_mid.weight", LEAF_REFUSED, false, TUCKER},
    {".hada_t1", LEAF_REFUSED, true, TUCKER},
    {".hada_t2", LEAF_REFUSED, true, TUCKER},
    {".lokr_t2", LEAF_REFUSED, true, TUCKER},
    {".dora_scale", LEAF_REFUSED, false, DORA},
    {".magnitude", LEAF_REFUSED, false, DORA},
    {".lora_magnitude_vector", LEAF_REFUSED, true, DORA},
    {".lora_magnitude_vector.weight", LEAF_REFUSED, true, DORA},
    {".set_weight", LEAF_REFUSED, false,
     "set_weight replaces a tensor of the base, which is not supported yet"},
    {".reshape_weight", LEAF_REFUSED, false,
     "reshape_weight changes the shape of a base tensor, which is not supported yet"},
    {".a1.weight", LEAF_REFUSED, false, GLORA},
    {".a2.weight", LEAF_REFUSED, false, GLORA},
    {".b1.weight", LEAF_REFUSED, false, GLORA},
    {".b2.weight", LEAF_REFUSED, false, GLORA},
    {".bm.weight", LEAF_REFUSED, false, GLORA},
    {".rescale", LEAF_REFUSED, false, OFT},
    {".on_input", LEAF_REFUSED, false, "IA3 is not supported"},
    {"_lora1.down.weight", LEAF_REFUSED, false, "XLabs keys need a table for their model"},
    {"_lora1.up.weight", LEAF_REFUSED, false, "XLabs keys need a table for their model"},
    {"_lora2.down.weight", LEAF_REFUSED, false, "XLabs keys need a table for their model"},
    {"_lora2.up.weight", LEAF_REFUSED, false, "XLabs keys need a table for their model"},
};

/* Beginnings of one of the last segments of a key that give a family away. Looked at only when no suffix is known. */
static const struct {
    const char *begin, *refused;
} families[] = {
    {"oft_", OFT},
    {"boft_", "BOFT is not supported"},
    {"vera_", "VeRA is not supported: its projections may not be in the file"},
    {"ia3_", "IA3 is not supported"},
    {"lora_E", "AdaLoRA is not supported"},
    {"ranknum", "AdaLoRA is not supported"},
    {"fourierft_", "FourierFT is not supported"},
    {"waveft_", "WaveFT is not supported"},
    {"hira_", "HiRA is not supported"},
    {"hra_", "HRA is not supported"},
    {"miss_", "MiSS is not supported"},
    {"bone_", "Bone is not supported"},
    {"road_", "RoAd is not supported"},
    {"c3a_", "C3A is not supported"},
    {"delora_", "DeLoRA is not supported"},
    {"randlora_", "RandLoRA is not supported"},
    {"gralora_", "GraLoRA is not supported"},
    {"shira_", "SHiRA is not supported"},
    {"xlora_", "X-LoRA is not supported"},
    {"ln_tuning_", "LN tuning is not supported"},
    {"trainable_tokens_",
     "trained token rows replace rows of an embedding, which is not supported yet"},
    {"token_adapter",
     "trained token rows replace rows of an embedding, which is not supported yet"},
    {"modules_to_save", WHOLE},
    {"original_module", WHOLE},
    {"lora_magnitude_vector", DORA},
    {"lora_controlnet", "a control LoRA is a model of its own, not a change of this one"},
    {"prompt_embeddings", "prompt tuning changes no weight"},
};

/* ------------------------------------------------------------------------------------------------- leaves */

static const struct spelling *find_spelling(struct str key)
{
    for (size_t i = 0; i < PF_COUNTOF(spellings); i++)
        if (key.n > strlen(spellings[i].suffix) && str_ends(key, spellings[i].suffix))
            return &spellings[i];
    return NULL;
}

/* Does head + tail end with suffix, where the suffix spans both? */
static bool ends_with_two(struct str head, const char *tail, const char *suffix)
{
    size_t n_suffix = strlen(suffix), n_tail = strlen(tail);
    return n_suffix > n_tail && strcmp(suffix + n_suffix - n_tail, tail) == 0 &&
           head.n > n_suffix - n_tail &&
           memcmp(head.p + head.n - (n_suffix - n_tail), suffix, n_suffix - n_tail) == 0;
}

static struct str before_last_dot(struct str s)
{
    const char *dot = s.n > 0 ? memrchr(s.p, '.', s.n) : NULL;
    return (struct str){s.p, dot != NULL ? (size_t)(dot - s.p) : 0};
}

/* `module.lora_A.<adapter name>.weight` and the like: the name is one segment. */
static const struct spelling *find_named(struct str key, size_t *out_n_module, struct str *out_name)
{
    static const char *const tails[] = {".weight", ".bias", ""};
    for (size_t t = 0; t < PF_COUNTOF(tails); t++) {
        size_t n_tail = strlen(tails[t]);
        if (!str_ends(key, tails[t]))
            continue;
        struct str named = str_cut_back(key, n_tail), head = before_last_dot(named);
        if (head.n == 0 || head.n + 1 == named.n)
            continue;
        for (size_t i = 0; i < PF_COUNTOF(spellings); i++) {
            const struct spelling *s = &spellings[i];
            if (!s->is_named || !ends_with_two(head, tails[t], s->suffix))
                continue;
            *out_n_module = head.n - (strlen(s->suffix) - n_tail);
            *out_name = str_cut_front(named, head.n + 1);
            return s;
        }
    }
    return NULL;
}

static const char *find_family(struct str key)
{
    struct str rest = key;
    for (unsigned i = 0; i < 4 && rest.n > 0; i++) {
        struct str head = before_last_dot(rest);
        bool has_dot = head.n < rest.n && rest.p[head.n] == '.';
        struct str segment = has_dot ? str_cut_front(rest, head.n + 1) : rest;
        for (size_t k = 0; k < PF_COUNTOF(families); k++)
            if (str_starts(segment, families[k].begin))
                return families[k].refused;
        rest = has_dot ? head : (struct str){key.p, 0};
    }
    return NULL;
}

/* `single_blocks.3.processor.qkv` before `_lora.down.weight`: rows of a fused tensor that only a table knows. */
static bool is_xlabs(struct str module)
{
    struct str head = before_last_dot(module);
    return str_ends(head, ".processor") && (str_ends(module, ".qkv") || str_ends(module, ".proj"));
}

struct ad_split dialect_split(struct str key)
{
    struct ad_split out = {.module = key, .adapter = {key.p, 0}, .leaf = LEAF_UNKNOWN};
    size_t n_module = 0;
    const struct spelling *s = find_spelling(key);
    if (s != NULL)
        n_module = key.n - strlen(s->suffix);
    else
        s = find_named(key, &n_module, &out.adapter);
    if (s != NULL) {
        out.module.n = n_module;
        out.leaf = s->leaf;
        out.refused = s->refused;
        if (is_xlabs(out.module) && str_starts(str_cut_front(key, n_module), "_lora.")) {
            out.leaf = LEAF_REFUSED;
            out.refused = "XLabs keys need a table for their model";
        }
    } else if (key.n > 7 && str_ends(key, ".diff_m")) {
        out.module.n -= 7;
        out.leaf = LEAF_DIFF;
        out.append = ".modulation";
    } else if ((out.refused = find_family(key)) != NULL) {
        out.leaf = LEAF_REFUSED;
    }
    return out;
}

/* ----------------------------------------------------------------------------------------------- prefixes */

struct prefix {
    const char *text;
    enum ad_role role;
    const char *dialect;
};

static const struct prefix flat_prefixes[] = {
    {"lora_prior_unet_", AD_DENOISER, "kohya"},
    {"lora_prior_te_", AD_TE, "kohya"},
    {"lora_unet_", AD_DENOISER, "kohya"},
    {"lora_transformer_", AD_DENOISER, "kohya"},
    {"lycoris_", AD_DENOISER, "kohya"},
    {"lora_te1_", AD_TE, "kohya"},
    {"lora_te2_", AD_TE_2, "kohya"},
    {"lora_te3_", AD_TE_3, "kohya"},
    {"lora_te_", AD_TE, "kohya"},
};

static const struct prefix dotted_prefixes[] = {
    {"base_model.model.", AD_ANY, "peft"},
    {"model.diffusion_model.", AD_DENOISER, "native"},
    {"diffusion_model.", AD_DENOISER, "native"},
    {"transformer.", AD_COMPONENT, "diffusers"},
    {"transformer_2.", AD_COMPONENT, "diffusers"},
    {"unet.", AD_COMPONENT, "diffusers"},
    {"prior.", AD_COMPONENT, "diffusers"},
    {"text_encoder.", AD_TE, "diffusers"},
    {"text_encoder_2.", AD_TE_2, "diffusers"},
    {"text_encoder_3.", AD_TE_3, "diffusers"},
    {"text_encoders.clip_l.transformer.", AD_TE, "native"},
    {"text_encoders.clip_g.transformer.", AD_TE_2, "native"},
};

static const struct prefix *find_prefix(const struct prefix *table, size_t n, struct str module)
{
    for (size_t i = 0; i < n; i++)
        if (module.n > strlen(table[i].text) && str_starts(module, table[i].text))
            return &table[i];
    return NULL;
}

/* Length of `text_encoders.<any>.transformer.`, or of `text_encoders.<any>.`; 0 when it is neither. */
static size_t text_encoders_prefix(struct str module)
{
    static const char begin[] = "text_encoders.", middle[] = "transformer.";
    if (!str_starts(module, begin))
        return 0;
    struct str rest = str_cut_front(module, sizeof begin - 1);
    const char *dot = memchr(rest.p, '.', rest.n);
    if (dot == NULL)
        return 0;
    size_t n = sizeof begin - 1 + (size_t)(dot - rest.p) + 1;
    return n + (str_starts(str_cut_front(module, n), middle) ? sizeof middle - 1 : 0);
}

/* The prefix at the front of a dotted path: its length, 0 when there is none. */
static size_t dotted_prefix(struct str path, enum ad_role *out_role, struct str *out_component)
{
    const struct prefix *p = find_prefix(dotted_prefixes, PF_COUNTOF(dotted_prefixes), path);
    if (p != NULL) {
        size_t n = strlen(p->text);
        *out_role = p->role;
        *out_component = (struct str){path.p, n - 1};
        return n;
    }
    *out_role = AD_TE_ANY;
    *out_component = (struct str){path.p, 0};
    return text_encoders_prefix(path);
}

static size_t flat_candidates(struct str module, const struct prefix *p,
                              struct ad_candidate out[AD_CANDIDATES_MAX])
{
    struct str rest = str_cut_front(module, strlen(p->text));
    size_t n = 0;
    out[n++] = (struct ad_candidate){.path = rest, .role = p->role, .is_flat = true};
    if (rest.n > 1 && rest.p[0] == '_') /* Wan-Fun: the path itself began with a dot */
        out[n++] =
            (struct ad_candidate){.path = str_cut_front(rest, 1), .role = p->role, .is_flat = true};
    return n;
}

size_t dialect_candidates(struct str module, struct ad_candidate out[AD_CANDIDATES_MAX])
{
    const struct prefix *flat = find_prefix(flat_prefixes, PF_COUNTOF(flat_prefixes), module);
    if (flat != NULL)
        return flat_candidates(module, flat, out);
    size_t n = 0;
    enum ad_role role = AD_ANY;
    struct str component = {module.p, 0}, path = module;
    /* Behind PEFT's prefix comes a model's own path: it addresses nobody */
    bool is_wrapped = false;
    out[n++] = (struct ad_candidate){.path = module, .is_whole = true};
    while (n < 4) {
        enum ad_role r;
        struct str c;
        size_t n_prefix = dotted_prefix(path, &r, &c);
        if (n_prefix == 0 || n_prefix >= path.n)
            break;
        if (r == AD_ANY)
            is_wrapped = true;
        else if (!is_wrapped && role == AD_ANY) {
            role = r;
            component = c;
        }
        path = str_cut_front(path, n_prefix);
        out[n++] = (struct ad_candidate){.path = path};
    }
    for (size_t i = 0; i < n; i++) {
        out[i].role = role;
        out[i].component = component;
    }
    return n;
}

const char *dialect_name(struct str module)
{
    const struct prefix *p = find_prefix(flat_prefixes, PF_COUNTOF(flat_prefixes), module);
    if (p == NULL)
        p = find_prefix(dotted_prefixes, PF_COUNTOF(dotted_prefixes), module);
    if (p != NULL)
        return p->dialect;
    return text_encoders_prefix(module) > 0 ? "native" : "raw";
}
