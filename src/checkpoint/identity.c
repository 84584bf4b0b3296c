/*
 * Is it still the checkpoint that was opened, and which one is it? The content id names bytes, wherever they lie; stamps and
 * guards tell when a file changed or shrank under us. The blocks are read with pread, not through the mapping: a single page
 * each instead of the read-around of a fault, and a short file is an error instead of a signal.
 */
#include "checkpoint/checkpoint_int.h"

#include <string.h>

#include "base/guard.h"

/* Enters every composition digest: change it when what is hashed changes. */
#define CONTENT_ID_VERSION "pageflip content id 1"
#define REFINED_ID_VERSION "pageflip content id 1 refined"
#define BLOCK_BYTES        4096u
/* A small checkpoint is hashed whole: it costs milliseconds, and then no change can escape. */
#define WHOLE_BYTES_MAX  ((uint64_t)64 << 20)
#define READ_CHUNK_BYTES ((size_t)64 << 10)

static int hash_range(struct hasher *h, const struct st_file *f, uint64_t off, uint64_t n,
                      uint8_t *chunk, pf_error *err)
{
    while (n > 0) {
        size_t n_now = n < READ_CHUNK_BYTES ? (size_t)n : READ_CHUNK_BYTES;
        int rc = file_pread(st_map(f)->fd, chunk, n_now, off, st_path(f), err);
        if (rc != PF_OK)
            return rc;
        hasher_add(h, chunk, n_now);
        off += n_now;
        n -= n_now;
    }
    return PF_OK;
}

/* The middle block, on a page of the file where the tensor is long enough to have one to itself. */
static int hash_tensor(const struct pf_checkpoint *ckpt, struct hasher *h,
                       const struct ckpt_tensor *t, uint8_t *chunk, pf_error *err)
{
    uint64_t off = t->off_bytes, n = t->n_bytes;
    if (n > BLOCK_BYTES && ckpt->n_bytes > WHOLE_BYTES_MAX) {
        uint64_t page = (t->off_bytes + n / 2) / BLOCK_BYTES * BLOCK_BYTES;
        bool fits = page >= t->off_bytes && page + BLOCK_BYTES <= t->off_bytes + n;
        off = fits ? page : t->off_bytes;
        n = BLOCK_BYTES;
    }
    hasher_add_u64(h, off);
    hasher_add_u64(h, t->n_bytes);
    return hash_range(h, ckpt->files[t->i_file], off, n, chunk, err);
}

/* Components are in the order of their names, files and tensors too: no path enters, nor what layers are taken to be. */
static int hash_all(const struct pf_checkpoint *ckpt, struct hasher *h, uint8_t *chunk,
                    pf_error *err)
{
    hasher_add_str(h, CONTENT_ID_VERSION, strlen(CONTENT_ID_VERSION));
    hasher_add_u64(h, ckpt->n_components);
    for (uint32_t i = 0; i < ckpt->n_components; i++) {
        const struct ckpt_component *c = &ckpt->components[i];
        hasher_add_str(h, c->name, strlen(c->name));
        hasher_add_u64(h, c->n_files);
        for (uint32_t k = 0; k < c->n_files; k++) {
            const struct st_file *f = ckpt->files[c->i_file0 + k];
            hasher_add_u64(h, st_map(f)->n_bytes);
            hasher_add_u64(h, st_header_bytes(f));
            int rc = hash_range(h, f, 0, st_header_bytes(f), chunk, err);
            if (rc != PF_OK)
                return rc;
        }
        hasher_add_u64(h, c->n_tensors);
        for (uint32_t k = 0; k < c->n_tensors; k++) {
            const struct ckpt_tensor *t = &ckpt->tensors[ckpt->priv->by_name[c->i_tensor0 + k]];
            hasher_add_u64(h, t->i_file - c->i_file0);
            int rc = hash_tensor(ckpt, h, t, chunk, err);
            if (rc != PF_OK)
                return rc;
        }
    }
    return PF_OK;
}

/* Whoever calls it verifies afterwards, so that no mixture of old and new bytes gets a name. */
static int compute(const struct pf_checkpoint *ckpt, struct digest *out, pf_error *err)
{
    struct hasher *h = hasher_new();
    uint8_t *chunk = mem_alloc(READ_CHUNK_BYTES);
    int rc = h != NULL && chunk != NULL ? hash_all(ckpt, h, chunk, err)
                                        : err_nomem(err, READ_CHUNK_BYTES, "content id");
    if (rc == PF_OK)
        *out = hasher_digest(h);
    mem_free(chunk);
    hasher_free(h);
    return rc;
}

int ckpt_content_id(struct pf_checkpoint *ckpt, struct digest *out, pf_error *err)
{
    struct ckpt_priv *priv = ckpt->priv;
    int rc = PF_OK;
    (void)pthread_mutex_lock(&priv->mu); /* cannot fail: a plain mutex, never held twice */
    if (!priv->has_content_id) {
        rc = compute(ckpt, &priv->content_id, err);
        if (rc == PF_OK)
            rc = pf_checkpoint_verify(ckpt, err);
        priv->has_content_id = rc == PF_OK;
    }
    if (rc == PF_OK)
        *out = priv->content_id;
    (void)pthread_mutex_unlock(&priv->mu);
    return rc;
}

void ckpt_content_id_recall(struct pf_checkpoint *ckpt, struct digest id, bool is_refined)
{
    struct ckpt_priv *priv = ckpt->priv;
    (void)pthread_mutex_lock(&priv->mu);
    if (!priv->has_content_id) {
        priv->content_id = id;
        priv->is_refined = is_refined;
        priv->has_content_id = true;
    }
    (void)pthread_mutex_unlock(&priv->mu);
}

/* Every byte of every tensor, in the order that hash_all has. */
static int hash_whole(const struct pf_checkpoint *ckpt, struct hasher *h, uint8_t *block,
                      pf_progress_fn progress, void *ctx, pf_error *err)
{
    uint64_t n_done = 0;
    for (uint32_t i = 0; i < ckpt->n_tensors; i++) {
        const struct ckpt_tensor *t = &ckpt->tensors[ckpt->priv->by_name[i]];
        const struct st_file *f = ckpt->files[t->i_file];
        for (uint64_t off = 0; off < t->n_bytes; off += HASH_BLOCK_BYTES) {
            uint64_t left = t->n_bytes - off;
            size_t n = left < HASH_BLOCK_BYTES ? (size_t)left : HASH_BLOCK_BYTES;
            if (progress && !progress(ctx, "base", n_done, ckpt->n_bytes))
                return err_set(err, PF_E_CANCELLED, "reading base '%s' was cancelled", ckpt->path);
            int rc = file_pread(st_map(f)->fd, block, n, t->off_bytes + off, st_path(f), err);
            if (rc != PF_OK)
                return rc;
            struct digest d = hash_bytes(block, n);
            hasher_add_u64(h, d.hi);
            hasher_add_u64(h, d.lo);
            n_done += n;
        }
    }
    return pf_checkpoint_verify(ckpt, err);
}

static int refine(struct pf_checkpoint *ckpt, struct digest sampled, struct digest *out,
                  pf_progress_fn progress, void *ctx, pf_error *err)
{
    struct hasher *h = hasher_new();
    uint8_t *block = mem_alloc(HASH_BLOCK_BYTES);
    int rc = h && block ? PF_OK : err_nomem(err, HASH_BLOCK_BYTES, "content id");
    if (rc == PF_OK) {
        hasher_add_str(h, REFINED_ID_VERSION, strlen(REFINED_ID_VERSION));
        hasher_add_u64(h, sampled.hi);
        hasher_add_u64(h, sampled.lo);
        rc = hash_whole(ckpt, h, block, progress, ctx, err);
    }
    if (rc == PF_OK)
        *out = hasher_digest(h);
    mem_free(block);
    hasher_free(h);
    return rc;
}

int ckpt_content_id_refine(struct pf_checkpoint *ckpt, pf_progress_fn progress, void *ctx,
                           pf_error *err)
{
    struct ckpt_priv *priv = ckpt->priv;
    struct digest sampled, refined;
    int rc = ckpt_content_id(ckpt, &sampled, err);
    if (rc != PF_OK)
        return rc;
    (void)pthread_mutex_lock(&priv->mu);
    bool is_done = priv->is_refined;
    priv->is_suspect = !is_done;
    (void)pthread_mutex_unlock(&priv->mu);
    if (is_done)
        return PF_OK;
    rc = refine(ckpt, sampled, &refined, progress, ctx, err);
    if (rc != PF_OK)
        return rc;
    (void)pthread_mutex_lock(&priv->mu);
    priv->content_id = refined; /* two who refine at once find the same */
    priv->is_refined = true;
    priv->is_suspect = false;
    (void)pthread_mutex_unlock(&priv->mu);
    return PF_OK;
}

bool ckpt_content_id_is_refined(struct pf_checkpoint *ckpt)
{
    (void)pthread_mutex_lock(&ckpt->priv->mu);
    bool is_refined = ckpt->priv->is_refined;
    (void)pthread_mutex_unlock(&ckpt->priv->mu);
    return is_refined;
}

bool ckpt_content_id_holds(struct pf_checkpoint *ckpt, struct digest id)
{
    struct ckpt_priv *priv = ckpt->priv;
    (void)pthread_mutex_lock(&priv->mu);
    bool holds = priv->has_content_id && !priv->is_suspect && digest_eq(priv->content_id, id);
    (void)pthread_mutex_unlock(&priv->mu);
    return holds;
}

int pf_checkpoint_content_id(struct pf_checkpoint *ckpt, char out_hex[33], pf_error *err)
{
    struct digest id;
    int rc = ckpt_content_id(ckpt, &id, err);
    if (rc == PF_OK)
        digest_hex(id, out_hex);
    return rc;
}

int pf_checkpoint_verify(const struct pf_checkpoint *ckpt, pf_error *err)
{
    for (uint32_t i = 0; i < ckpt->n_files; i++) {
        struct file_stamp want = ckpt_stamp(ckpt, i);
        int rc = file_map_check_stamp(st_map(ckpt->files[i]), &want, st_path(ckpt->files[i]), err);
        if (rc != PF_OK)
            return rc;
    }
    return PF_OK;
}

struct file_stamp ckpt_stamp(const struct pf_checkpoint *ckpt, uint32_t i_file)
{
    (void)pthread_mutex_lock(&ckpt->priv->stamp_mu);
    struct file_stamp s = ckpt->priv->stamps[i_file];
    (void)pthread_mutex_unlock(&ckpt->priv->stamp_mu);
    return s;
}

/* Of files that still have their names, inodes and sizes; false: one has not. */
static bool stamps_now(const struct pf_checkpoint *ckpt, struct file_stamp *out)
{
    for (uint32_t i = 0; i < ckpt->n_files; i++) {
        const struct file_stamp *was = &st_map(ckpt->files[i])->stamp;
        if (!file_stamp_now(st_path(ckpt->files[i]), &out[i]) || out[i].dev != was->dev ||
            out[i].ino != was->ino || out[i].n_bytes != was->n_bytes)
            return false;
    }
    return true;
}

/* Is the content what it was, by files that did not change while they were read? */
static bool has_its_content(struct pf_checkpoint *ckpt, struct file_stamp *stamps)
{
    struct ckpt_priv *priv = ckpt->priv;
    struct digest now;
    if (!stamps_now(ckpt, stamps) || compute(ckpt, &now, NULL) != PF_OK)
        return false;
    for (uint32_t i = 0; i < ckpt->n_files; i++)
        if (file_map_check_stamp(st_map(ckpt->files[i]), &stamps[i], st_path(ckpt->files[i]), NULL))
            return false;
    (void)pthread_mutex_lock(&priv->mu);
    /* A refined id holds more than what was read now. */
    bool is_same = priv->has_content_id && !priv->is_refined && !priv->is_suspect &&
                   digest_eq(priv->content_id, now);
    (void)pthread_mutex_unlock(&priv->mu);
    return is_same;
}

int ckpt_verify_again(struct pf_checkpoint *ckpt, pf_error *err)
{
    struct ckpt_priv *priv = ckpt->priv;
    int rc = pf_checkpoint_verify(ckpt, err);
    if (rc != PF_E_CHANGED)
        return rc;
    struct file_stamp *stamps = mem_calloc(ckpt->n_files + 1, sizeof *stamps);
    if (stamps != NULL && has_its_content(ckpt, stamps)) {
        (void)pthread_mutex_lock(&priv->stamp_mu);
        memcpy(priv->stamps, stamps, ckpt->n_files * sizeof *stamps);
        (void)pthread_mutex_unlock(&priv->stamp_mu);
        rc = PF_OK;
    }
    mem_free(stamps);
    return rc;
}

int ckpt_tensor_guard(const struct pf_checkpoint *ckpt, uint32_t i_tensor, pf_error *err)
{
    const struct ckpt_tensor *t = &ckpt->tensors[i_tensor];
    const struct st_file *f = ckpt->files[t->i_file];
    if (!guard_tripped(st_map(f)->i_guard))
        return PF_OK;
    return err_set(err, PF_E_TRUNCATED, "'%s' shrank while tensor '%.300s' was read", st_path(f),
                   t->name.p);
}
