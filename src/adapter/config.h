/*
 * Configs that come with factors: adapter_config.json of a PEFT directory, and `lora_adapter_metadata` inside a diffusers
 * file. Only what changes arithmetic is kept; what changes it in a way that factors alone cannot express is refused by name.
 */
#ifndef PF_ADAPTER_CONFIG_H
#define PF_ADAPTER_CONFIG_H

#include "base/hash.h"
#include "base/json.h"
#include "base/mem.h"

enum ad_peft { AD_PEFT_LORA, AD_PEFT_LOHA, AD_PEFT_LOKR };

/* A key of rank_pattern or alpha_pattern: PEFT matches `(.*\.)?(key)$` against the module path, first match wins. */
struct ad_pattern {
    struct str text;
    double value;
    bool is_anchored;   /* began with ^ */
    void *regex;        /* regex_t, or NULL: letters and dots alone, compared by hand */
    struct str letters; /* text without the ^ when regex is NULL */
};

struct ad_patterns {
    struct ad_pattern *items;
    size_t n;
};

struct ad_config {
    const char *what;     /* "adapter_config.json", "lora_adapter_metadata" */
    struct str component; /* of a prefixed lora_adapter_metadata; empty: all */
    enum ad_peft type;
    double r, alpha; /* defaults 8 and 8 */
    bool use_rslora, fan_in_fan_out;
    bool is_used; /* speaks of a module of the file: set by scale.c */
    struct ad_patterns ranks, alphas;
    struct str *targets; /* target_modules when it is a list */
    size_t n_targets;
};

/* What to parse: a root whose fields are spelled `<component>.<field>` when component is not empty. */
int config_parse(struct arena *arena, const struct json *root, struct str component,
                 const char *what, struct ad_config *out, pf_error *err);
void config_release(struct ad_config *c);
/* The distinct components of a lora_adapter_metadata: "" for plain fields. Arena-owned. PF_E_FORMAT: no object, or too many. */
int config_components(struct arena *arena, const struct json *root, const char *what,
                      struct str **out, size_t *out_n, pf_error *err);
/* What changes arithmetic goes into the digest. */
void config_hash(const struct ad_config *c, struct hasher *h);
const char *config_type_name(enum ad_peft type);

/* pattern.c. PF_E_UNSUPPORTED names the pattern. */
int pattern_compile(struct arena *arena, struct str text, double value, struct ad_pattern *out,
                    pf_error *err);
void pattern_release(struct ad_pattern *p);
bool pattern_matches(const struct ad_pattern *p, struct str path);

#endif
