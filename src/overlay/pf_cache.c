/*
 * The cache from outside: pf_cache_* of the public header, over the store. Called by `pageflip cache` and by programs that tidy up; engines
 * need none of it. Opens a store for each call and never makes a cache directory that is not there.
 */
#include <stdio.h>
#include <string.h>

#include "overlay/overlay_int.h"

#define PREFIX_MIN 4
#define N_FACE     16 /* adapters of one entry that are told without an allocation */

/* NULL in *out_store: there is no directory yet, so there is nothing in it. */
static int open_store(const char *cache_dir, struct overlay_store **out_store, pf_error *err)
{
    char *dir = NULL;
    int rc = overlay_cache_dir(cache_dir, &dir, err);
    if (rc)
        return rc;
    *out_store = NULL;
    if (file_kind(dir) != FILE_ABSENT)
        rc = overlay_store_open(dir, 0, out_store, err);
    mem_free(dir);
    return rc;
}

int pf_cache_path(const char *cache_dir, char *out_path, size_t n_path_bytes, pf_error *err)
{
    char *dir = NULL;
    int rc = overlay_cache_dir(cache_dir, &dir, err);
    if (rc)
        return rc;
    size_t n = strlen(dir);
    if (n < n_path_bytes)
        memcpy(out_path, dir, n + 1);
    else
        rc = err_set(err, PF_E_RANGE, "the cache's path takes %zu bytes, there is room for %zu",
                     n + 1, n_path_bytes);
    mem_free(dir);
    return rc;
}

/* -------------------------------------------------------------------------------------------- listing */

static bool tell(const struct overlay_entry *e, pf_cache_fn fn, void *ctx, bool *out_goes_on)
{
    struct pf_cache_adapter face[N_FACE], *adapters = face;
    if (e->n_adapters > N_FACE && !(adapters = mem_calloc(e->n_adapters, sizeof *adapters)))
        return false;
    for (size_t i = 0; i < e->n_adapters; i++) {
        const struct overlay_adapter *a = &e->adapters[i];
        adapters[i] = (struct pf_cache_adapter){.path = a->path ? a->path : "?",
                                                .strength = a->strength,
                                                .has_alpha = a->has_alpha,
                                                .alpha = a->alpha,
                                                .target = a->target ? a->target : "?"};
    }
    struct pf_cache_entry entry = {
        .digest = e->digest_hex,
        .state = e->is_building  ? "building"
                 : e->is_partial ? "partial"
                                 : "complete",
        .is_in_use = e->is_in_use,
        .n_bytes = e->n_bytes,
        .used_at_s = e->used_at_ns / 1000000000,
        .base = e->base,
        .merge_dtype = e->merge_dtype,
        .adapters = adapters,
        .n_adapters = (uint32_t)e->n_adapters,
    };
    *out_goes_on = fn(ctx, &entry);
    if (adapters != face)
        mem_free(adapters);
    return true;
}

int pf_cache_list(const char *cache_dir, pf_cache_fn fn, void *ctx, pf_error *err)
{
    struct overlay_store *s = NULL;
    struct overlay_entry *entries = NULL;
    size_t n = 0;
    bool goes_on = true;
    int rc = open_store(cache_dir, &s, err);
    if (rc == PF_OK && s)
        rc = overlay_list(s, &entries, &n, err);
    for (size_t i = 0; rc == PF_OK && goes_on && i < n; i++)
        if (!tell(&entries[i], fn, ctx, &goes_on))
            rc = err_nomem(err, entries[i].n_adapters * sizeof(struct pf_cache_adapter),
                           "the cache list");
    overlay_list_free(entries, n);
    overlay_store_close(s);
    return rc;
}

/* ------------------------------------------------------------------------------------------ one entry */

static int check_text(const char *text, pf_error *err)
{
    size_t n = text ? strnlen(text, DIGEST_HEX_LEN + 1) : 0;
    if (n >= PREFIX_MIN && n <= DIGEST_HEX_LEN && strspn(text, "0123456789abcdef") == n)
        return PF_OK;
    return err_set(err, PF_E_INVALID,
                   "'%.40s' is no digest: give its first %d to %d hexadecimal digits",
                   text ? text : "", PREFIX_MIN, DIGEST_HEX_LEN);
}

/* "a1b2" to the one entry that begins so. */
static int find(struct overlay_store *s, const char *text, struct digest *out, pf_error *err)
{
    struct overlay_entry *entries = NULL;
    size_t n = 0, n_found = 0, n_text = strlen(text);
    int rc = overlay_list(s, &entries, &n, err);
    for (size_t i = 0; rc == PF_OK && i < n; i++)
        if (strncmp(entries[i].digest_hex, text, n_text) == 0) {
            *out = entries[i].digest;
            n_found++;
        }
    overlay_list_free(entries, n);
    if (rc == PF_OK && n_found == 0)
        rc = err_set(err, PF_E_NOTFOUND, "no overlay '%s' in cache '%s'", text,
                     overlay_store_dir(s));
    if (rc == PF_OK && n_found > 1)
        rc = err_set(err, PF_E_AMBIGUOUS, "%zu overlays in cache '%s' begin with '%s'", n_found,
                     overlay_store_dir(s), text);
    return rc;
}

static int open_and_find(const char *cache_dir, const char *text, struct overlay_store **out_store,
                         struct digest *out, pf_error *err)
{
    char *dir = NULL;
    int rc = check_text(text, err);
    if (rc == PF_OK)
        rc = open_store(cache_dir, out_store, err);
    if (rc)
        return rc;
    if (*out_store)
        return find(*out_store, text, out, err);
    rc = overlay_cache_dir(cache_dir, &dir, err);
    if (rc == PF_OK)
        rc = err_set(err, PF_E_NOTFOUND, "no overlay '%.40s': there is no cache '%s'", text, dir);
    mem_free(dir);
    return rc;
}

int pf_cache_verify(const char *cache_dir, const char *digest, const char **out_base, pf_error *err)
{
    static const char *const names[] = {"proved", "absent", "replaced"};
    struct overlay_store *s = NULL;
    struct digest d = {0};
    enum overlay_base_state base;
    int rc = open_and_find(cache_dir, digest, &s, &d, err);
    if (rc == PF_OK)
        rc = overlay_verify_entry(s, d, &base, err);
    if (rc == PF_OK && out_base)
        *out_base = names[base];
    overlay_store_close(s);
    return rc;
}

int pf_cache_evict(const char *cache_dir, const char *digest, pf_error *err)
{
    struct overlay_store *s = NULL;
    struct digest d = {0};
    int rc = open_and_find(cache_dir, digest, &s, &d, err);
    if (rc == PF_OK)
        rc = overlay_evict(s, d, err);
    overlay_store_close(s);
    return rc;
}

int pf_cache_clear(const char *cache_dir, struct pf_cache_clear_report *out_report, pf_error *err)
{
    struct pf_cache_clear_report r = {0};
    struct overlay_store *s = NULL;
    struct overlay_entry *entries = NULL;
    size_t n = 0;
    int rc = open_store(cache_dir, &s, err);
    if (rc == PF_OK && s)
        rc = overlay_list(s, &entries, &n, err);
    for (size_t i = 0; rc == PF_OK && i < n; i++) {
        rc = overlay_evict(s, entries[i].digest, err);
        if (rc == PF_OK) {
            r.n_evicted++;
            r.n_bytes += entries[i].n_bytes;
        } else if (rc == PF_E_BUSY) {
            r.n_left++;
            rc = PF_OK;
        } else if (rc == PF_E_NOTFOUND) {
            rc = PF_OK; /* somebody else was faster */
        }
    }
    /* What is remembered of bases goes too: it only saves reading them once. */
    if (rc == PF_OK && s)
        base_ids_forget(s);
    overlay_list_free(entries, n);
    overlay_store_close(s);
    if (rc == PF_OK && out_report)
        *out_report = r;
    return rc;
}
