/*
 * An engine as `pageflip generate` uses it: opened from options, with adapters under nicknames that follow from their file
 * names, and the memory plan as text and JSON. Owned by the command; its main thread alone calls these functions.
 */
#ifndef PF_CLI_SESSION_H
#define PF_CLI_SESSION_H

#include "cli/generate_opts.h"
#include "cli/lora_spec.h"
#include "cli/out.h"

struct nickname {
    char *name, *path;
};

struct session {
    struct pf_checkpoint *ckpt;
    struct pf_engine *engine;
    struct nickname *names;
    size_t n_names, cap_names;
};

struct session_opts {
    const char *model; /* NULL: bundled */
    const struct serving_args *serving;
    uint32_t n_threads; /* 0: one per usable CPU */
    /* Over sooner than a build: adopts what the cache has, and builds only for way overlay */
    bool is_one_shot;
    bool wants_adapters; /* one shot: without any the cache is of no use */
};

/* Half-built on failure: session_close. */
int session_open(struct session *s, const struct session_opts *opts, pf_error *err);
void session_close(struct session *s);

/* Loads what `word` names, a path or a bundled adapter, under `nickname` (NULL: derived). *out_nickname is borrowed. */
int session_load(struct session *s, const char *word, const char *nickname,
                 const char **out_nickname, pf_error *err);
int session_unload(struct session *s, const char *nickname, pf_error *err);

/* The --lora texts of a command line or a script line, parsed. PF_E_INVALID: usage. Owned by caller. */
int specs_parse(const struct arg_list *texts, struct lora_spec **out_specs, pf_error *err);
void specs_free(struct lora_spec *specs, size_t n);
/* Loads the adapters of specs. by_nickname: a path that is a known nickname means that adapter. The array is the caller's
 * (mem_free); what it points to belongs to the session and to specs. */
int session_loras(struct session *s, const struct lora_spec *specs, size_t n, bool by_nickname,
                  struct pf_engine_lora **out_loras, pf_error *err);

/* Waits for background work until there is none, or Ctrl-C: PF_E_CANCELLED. */
int session_settle(struct session *s, pf_error *err);

struct json *session_plan_json(const struct session *s);
/* What a change reports beside composition and way: counts, milliseconds, memory, survival. */
void change_json(struct json *doc, const struct pf_change_report *r);
/* Says that much of a change is rounded away, where it is, and why a change did not go the way that was asked. */
void change_warn(const struct out *o, const struct pf_change_report *r);

#endif
