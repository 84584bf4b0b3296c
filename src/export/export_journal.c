/*
 * The journal of one part: a head that says which output it belongs to, then records "items i .. i+n are durable", each with
 * a check, appended only after the data was synced. A torn or foreign record ends the reading: what comes after it is done again, which
 * is always safe. Written by one process, read by whoever finishes last.
 */
#include "export/export_int.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"

#define JOURNAL_MAGIC     0x314a4d4650ull /* "PFMJ1" */
#define JOURNAL_BYTES_MAX ((size_t)256 << 20)
#define N_BATCH           128 /* records per write */

struct head {
    uint64_t magic, hi, lo, i_part;
};

struct record {
    uint64_t i_item, n_items, check;
};

static uint64_t check_of(struct digest identity, uint32_t i_part, uint64_t i, uint64_t n)
{
    const uint64_t words[] = {identity.hi, identity.lo, i_part, i, n};
    return hash_bytes(words, sizeof words).lo;
}

/* Marks durable items; returns the length of what was good, 0 when not even the head was. */
static uint64_t read_records(const char *p, size_t n_bytes, const struct export_plan *plan,
                             uint32_t i_part, _Atomic uint8_t *states)
{
    struct head head;
    size_t off = sizeof head, i0 = 0, i1 = 0;
    if (n_bytes < sizeof head)
        return 0;
    memcpy(&head, p, sizeof head);
    if (head.magic != JOURNAL_MAGIC || head.hi != plan->identity.hi ||
        head.lo != plan->identity.lo || head.i_part != i_part)
        return 0;
    plan_part(plan, i_part, &i0, &i1);
    for (struct record r; n_bytes - off >= sizeof r; off += sizeof r) {
        memcpy(&r, p + off, sizeof r);
        if (r.check != check_of(plan->identity, i_part, r.i_item, r.n_items) || r.i_item < i0 ||
            r.i_item > i1 || r.n_items > i1 - r.i_item)
            break;
        for (uint64_t i = 0; i < r.n_items; i++)
            atomic_store_explicit(&states[r.i_item + i], ITEM_DURABLE, memory_order_relaxed);
    }
    return off;
}

int journal_open(struct journal *j, const char *path, const struct export_plan *plan,
                 uint32_t i_part, _Atomic uint8_t *states, pf_error *err)
{
    const struct head head = {JOURNAL_MAGIC, plan->identity.hi, plan->identity.lo, i_part};
    char *text = NULL;
    size_t n = 0;
    struct journal new = {.fd = -1, .identity = plan->identity, .i_part = i_part};
    int rc = file_read_all(path, JOURNAL_BYTES_MAX, &text, &n, err);
    if (!rc)
        new.off_bytes = read_records(text, n, plan, i_part, states);
    else if (rc == PF_E_NOTFOUND)
        rc = PF_OK;
    mem_free(text);
    if (rc)
        return rc;
    new.path = mem_strdup(path);
    if (!new.path)
        return err_nomem(err, 0, "a path");
    new.fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (new.fd < 0)
        rc = err_sys(err, errno, "cannot open '%s'", path);
    if (!rc && !new.off_bytes) {
        if (ftruncate(new.fd, 0)) /* another output's, or torn in the head */
            rc = err_sys(err, errno, "cannot truncate '%s'", path);
        if (!rc)
            rc = file_pwrite(new.fd, &head, sizeof head, 0, path, err);
        new.off_bytes = sizeof head;
    }
    if (rc)
        journal_close(&new);
    else
        *j = new;
    return rc;
}

int journal_append(struct journal *j, const _Atomic uint8_t *states, size_t i0, size_t i1,
                   pf_error *err)
{
    struct record batch[N_BATCH];
    size_t n = 0;
    for (size_t i = i0; i < i1;) {
        size_t end = i;
        while (end < i1 && atomic_load_explicit(&states[end], memory_order_relaxed) == ITEM_SYNCING)
            end++;
        if (end > i)
            batch[n++] = (struct record){i, end - i, check_of(j->identity, j->i_part, i, end - i)};
        i = end > i ? end : i + 1;
        if (n == N_BATCH || (i >= i1 && n)) {
            const int rc = file_pwrite(j->fd, batch, n * sizeof *batch, j->off_bytes, j->path, err);
            if (rc)
                return rc;
            j->off_bytes += n * sizeof *batch;
            n = 0;
        }
    }
    return file_sync(j->fd, j->path, err);
}

void journal_close(struct journal *j)
{
    if (!j)
        return;
    if (j->fd >= 0)
        (void)close(j->fd); /* what counts was synced */
    mem_free(j->path);
    *j = (struct journal){.fd = -1};
}

bool journal_is_complete(const char *path, const struct export_plan *plan, uint32_t i_part)
{
    char *text = NULL;
    size_t n = 0, i0 = 0, i1 = 0;
    _Atomic uint8_t *states = mem_calloc(plan->n_items + 1, 1);
    bool is_complete = states && !file_read_all(path, JOURNAL_BYTES_MAX, &text, &n, NULL) &&
                       read_records(text, n, plan, i_part, states);
    plan_part(plan, i_part, &i0, &i1);
    for (size_t i = i0; is_complete && i < i1; i++)
        is_complete = atomic_load_explicit(&states[i], memory_order_relaxed) == ITEM_DURABLE;
    mem_free(text);
    mem_free((void *)(uintptr_t)states);
    return is_complete;
}
