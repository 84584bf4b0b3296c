/*
 * What the files of this module share. A file becomes a list of keys (source.c); a key is spelled prefix + module path + leaf
 * (dialect.c); the leaves of one module make one family, complete or refused (module.c); a module gets one scale (config.c,
 * scale.c); and a module path becomes base tensors (place.c, resolve.c, emit.c). Nobody outside src/adapter/ includes this,
 * the fuzz target and the tests of the parsers excepted.
 */
#ifndef PF_ADAPTER_ADAPTER_INT_H
#define PF_ADAPTER_ADAPTER_INT_H

#include "adapter/adapter.h"
#include "adapter/config.h"
#include "adapter/dialect.h"
#include "base/mem.h"

#define AD_CONFIG_BYTES_MAX ((size_t)16 << 20)
#define AD_LIST_MAX         20u /* names in one message */

/* One tensor of the file. */
struct ad_tensor {
    struct str name; /* NUL-terminated too */
    int32_t dtype;
    struct shape shape;
    const uint8_t *p; /* mapped, unaligned */
    uint64_t n_bytes;
    double max_abs;   /* of a factor, as f32; 0 of what is none */
    int32_t i_module; /* that it is a leaf of, or -1 */
};

enum ad_family {
    AD_BIAS_ONLY, /* diff_b or b_norm alone */
    AD_LORA,
    AD_EMBEDDING, /* lora_embedding_A/B: the product is stored transposed */
    AD_LOHA,
    AD_LOKR,
    AD_DIFF, /* diff or w_norm */
};

struct ad_module {
    struct str name;      /* as spelled in the file, prefix included; NUL-terminated too */
    int32_t leaf[LEAF_N]; /* index of its tensor, or -1 */
    enum ad_family family;
    int64_t rank[2]; /* of its factored sides: LoKr may have two that differ; 0: none */
    int64_t rows;    /* of the change: B's, or those of the bias where there is nothing else */
    bool has_alpha;  /* a tensor or a config gives one */
    double alpha, scale;
    /* Scale = alpha / denominator; 0: an alpha has no meaning here, the scale stays 1 */
    double denominator;
    bool is_transposed;   /* fan_in_fan_out */
    bool is_silent;       /* neither alpha nor config: scale 1 is an assumption */
    const char *conflict; /* two sources disagree: what each says; NULL: they agree */
};

/* Growing list of sentences. */
struct ad_notes {
    char **items;
    size_t n, cap;
    bool is_failed;
};
void notes_addf(struct ad_notes *notes, const char *fmt, ...) PF_PRINTF(2, 3);
void notes_release(struct ad_notes *notes);

struct ad_row { /* what pf_adapter_module shows: a module may change a weight and a bias */
    uint32_t i_module;
    const char *kind;
};

struct pf_adapter {
    _Atomic uint32_t n_refs;
    struct arena arena;
    struct st_file *file; /* NULL when parsed from bytes */
    const char *path;
    struct ad_tensor *tensors; /* file order */
    size_t n_tensors;
    struct ad_module *modules; /* natural order of names */
    size_t n_modules;
    uint32_t *unknown; /* tensors that are no leaf of a module: judged when the base is known */
    size_t n_unknown;
    struct ad_config *configs;
    size_t n_configs;
    struct ad_row *rows;
    size_t n_rows;
    struct st_meta *meta; /* NUL-terminated copies */
    size_t n_meta;
    /* About the file, whatever the scale: part of every resolution's notes */
    struct ad_notes notes;
    struct ad_notes scale_notes; /* as the file says, without an explicit alpha */
    struct digest digest;
    struct pf_adapter_info info;
    char digest_hex[DIGEST_HEX_LEN + 1];
};

/* What a parse starts from: the keys of one file, its metadata, and the text of the config beside it. */
struct ad_input {
    const char *path;
    const struct st_tensor *const *keys; /* file order */
    size_t n_keys;
    const uint8_t *base; /* the file's first byte */
    const struct st_meta *const *meta;
    size_t n_meta;
    const char *config; /* text of adapter_config.json, or NULL */
    size_t n_config;
};

/*
 * Everything but the file itself: names, families, shapes among factors, scales, the scan for NaN and infinity. `a` is zeroed
 * with an arena; what was built so far is released by adapter_release, also after an error.
 */
int adapter_parse(struct pf_adapter *a, const struct ad_input *in, pf_error *err);
void adapter_release(struct pf_adapter *a);

/* source.c: reads every byte once, front to back: digest, max_abs, and PF_E_NONFINITE naming tensor and element. */
int source_open(struct pf_adapter *a, const char *path, pf_error *err);

/* module.c */
int modules_build(struct pf_adapter *a, pf_error *err);
const struct ad_tensor *module_leaf(const struct pf_adapter *a, const struct ad_module *m,
                                    enum ad_leaf leaf); /* NULL: absent */
/* family.c: the leaves that a family needs, and their shapes among themselves. */
int family_check(const struct pf_adapter *a, struct ad_module *m, pf_error *err);
/* Is this rectangle of a factor, seen as a matrix, zeros alone? */
bool tensor_is_zero(const struct ad_tensor *t, int64_t row0, int64_t n_rows, int64_t col0,
                    int64_t n_cols);
/* Is B of a fused q/k/v (or gate/up) module zero outside its diagonal blocks? */
bool family_is_block_diagonal(const struct pf_adapter *a, const struct ad_module *m);

/* scale.c: one scale per module from every source, or what contradicts what. */
int scales_build(struct pf_adapter *a, pf_error *err);
/* As the file says, or with an explicit alpha. */
double module_scale(const struct ad_module *m, bool has_alpha, double alpha);
/* Sentences that depend on the scale: assumed, adds nothing, far from the others. */
void scales_remark(const struct pf_adapter *a, bool has_alpha, double alpha,
                   struct ad_notes *notes);
static inline bool module_has_scale(const struct ad_module *m)
{
    return m->family == AD_LORA || m->family == AD_EMBEDDING || m->family == AD_LOHA ||
           m->family == AD_LOKR;
}

#endif
