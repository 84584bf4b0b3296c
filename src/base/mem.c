/*
 * Memory: the only caller of malloc in the project. Sizes are checked, zero bytes are a valid request (a unique pointer
 * comes back), and out of memory is NULL, never an exit. Arenas hand out pieces of growing blocks and free all at once.
 */
#include "base/mem.h"

#include <assert.h>
#include <stdalign.h>
#include <stdlib.h>
#include <string.h>

bool mul_size(size_t a, size_t b, size_t *out)
{
    if (b != 0 && a > SIZE_MAX / b)
        return false;
    *out = a * b;
    return true;
}

bool add_size(size_t a, size_t b, size_t *out)
{
    if (a > SIZE_MAX - b)
        return false;
    *out = a + b;
    return true;
}

bool mul_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    if (b != 0 && a > UINT64_MAX / b)
        return false;
    *out = a * b;
    return true;
}

bool add_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    if (a > UINT64_MAX - b)
        return false;
    *out = a + b;
    return true;
}

/* Beyond this, pointer differences overflow; no caller has a use for it. */
static bool is_sane(size_t n_bytes)
{
    return n_bytes <= PTRDIFF_MAX;
}

void *mem_alloc(size_t n_bytes)
{
    return is_sane(n_bytes) ? malloc(n_bytes > 0 ? n_bytes : 1) : NULL;
}

void *mem_calloc(size_t n, size_t size)
{
    size_t n_bytes;
    if (!mul_size(n, size, &n_bytes) || !is_sane(n_bytes))
        return NULL;
    return calloc(n_bytes > 0 ? n_bytes : 1, 1);
}

void *mem_realloc_array(void *p, size_t n, size_t size)
{
    size_t n_bytes;
    if (!mul_size(n, size, &n_bytes) || !is_sane(n_bytes))
        return NULL;
    return realloc(p, n_bytes > 0 ? n_bytes : 1);
}

void *mem_aligned(size_t align, size_t n_bytes)
{
    void *p = NULL;
    if (align < sizeof(void *))
        align = sizeof(void *);
    if (!is_sane(n_bytes) || posix_memalign(&p, align, n_bytes > 0 ? n_bytes : 1) != 0)
        return NULL;
    return p;
}

char *mem_strdup(const char *s)
{
    return mem_strndup(s, strlen(s));
}

char *mem_strndup(const char *s, size_t n)
{
    size_t n_bytes;
    if (!add_size(n, 1, &n_bytes))
        return NULL;
    char *copy = mem_alloc(n_bytes);
    if (copy == NULL)
        return NULL;
    if (n > 0)
        memcpy(copy, s, n);
    copy[n] = '\0';
    return copy;
}

void mem_free(void *p)
{
    free(p);
}

bool mem_grow(void **items, size_t *capacity, size_t n, size_t size)
{
    if (n < *capacity)
        return true;
    size_t wanted;
    if (!add_size(n, 1, &wanted))
        return false;
    size_t doubled = *capacity > SIZE_MAX / 2 ? SIZE_MAX : *capacity * 2;
    if (wanted < doubled)
        wanted = doubled;
    if (wanted < 8)
        wanted = 8;
    void *p = mem_realloc_array(*items, wanted, size);
    if (p == NULL)
        return false;
    *items = p;
    *capacity = wanted;
    return true;
}

/* ----------------------------------------------------------------------------------------------- arenas */

#define ARENA_BLOCK_MIN ((size_t)4 << 10)
#define ARENA_BLOCK_MAX ((size_t)256 << 10)

struct arena_block {
    struct arena_block *next;
    size_t n_bytes, n_used; /* of data */
    alignas(16) unsigned char data[];
};
static_assert(offsetof(struct arena_block, data) % 16 == 0, "pieces are 16-byte aligned");

void arena_init(struct arena *a)
{
    *a = (struct arena){0};
}

static struct arena_block *block_new(size_t n_bytes)
{
    size_t n_total;
    if (!add_size(sizeof(struct arena_block), n_bytes, &n_total))
        return NULL;
    struct arena_block *b = mem_calloc(1, n_total);
    if (b != NULL)
        b->n_bytes = n_bytes;
    return b;
}

void *arena_alloc(struct arena *a, size_t n_bytes)
{
    if (!add_size(n_bytes > 0 ? n_bytes : 1, 15, &n_bytes))
        return NULL;
    n_bytes &= ~(size_t)15;
    struct arena_block *b = a->head;
    if (b == NULL || n_bytes > b->n_bytes - b->n_used) {
        size_t n_block = b != NULL ? b->n_bytes * 2 : ARENA_BLOCK_MIN;
        if (n_block > ARENA_BLOCK_MAX)
            n_block = ARENA_BLOCK_MAX;
        bool is_big = n_bytes > n_block / 4;
        struct arena_block *fresh = block_new(is_big ? n_bytes : n_block);
        if (fresh == NULL)
            return NULL;
        if (is_big && b != NULL) { /* gets a block of its own; the open one stays open */
            fresh->next = b->next;
            b->next = fresh;
        } else {
            fresh->next = b;
            a->head = fresh;
        }
        b = fresh;
    }
    void *p = b->data + b->n_used;
    b->n_used += n_bytes;
    a->n_bytes += n_bytes;
    return p;
}

char *arena_strndup(struct arena *a, const char *s, size_t n)
{
    size_t n_bytes;
    if (!add_size(n, 1, &n_bytes))
        return NULL;
    char *copy = arena_alloc(a, n_bytes);
    if (copy != NULL && n > 0)
        memcpy(copy, s, n);
    return copy;
}

void arena_release(struct arena *a)
{
    struct arena_block *b = a->head;
    while (b != NULL) {
        struct arena_block *next = b->next;
        mem_free(b);
        b = next;
    }
    arena_init(a);
}
