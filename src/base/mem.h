/*
 * Memory: the only callers of malloc in the project. Sizes are multiplied with overflow checks; every allocation may
 * fail and says so by NULL. Arenas serve objects with one lifetime (a parsed file): one free for all of it.
 */
#ifndef PF_BASE_MEM_H
#define PF_BASE_MEM_H

#include "base/compiler.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* false on overflow; *out is written only on success */
bool mul_size(size_t a, size_t b, size_t *out) PF_WARN_UNUSED;
bool add_size(size_t a, size_t b, size_t *out) PF_WARN_UNUSED;
bool mul_u64(uint64_t a, uint64_t b, uint64_t *out) PF_WARN_UNUSED;
bool add_u64(uint64_t a, uint64_t b, uint64_t *out) PF_WARN_UNUSED;

void *mem_alloc(size_t n_bytes) PF_WARN_UNUSED;         /* not cleared */
void *mem_calloc(size_t n, size_t size) PF_WARN_UNUSED; /* cleared, overflow-checked */
void *mem_realloc_array(void *p, size_t n, size_t size) PF_WARN_UNUSED; /* NULL keeps p valid */
/* Align: power of two; free with mem_free */
void *mem_aligned(size_t align, size_t n_bytes) PF_WARN_UNUSED;
char *mem_strdup(const char *s) PF_WARN_UNUSED;
char *mem_strndup(const char *s, size_t n) PF_WARN_UNUSED;
void mem_free(void *p);

/* Grows *items (element size `size`) so that one more fits beyond n; doubles. false: out of memory, *items unchanged. */
bool mem_grow(void **items, size_t *capacity, size_t n, size_t size) PF_WARN_UNUSED;

struct arena_block;
struct arena {
    struct arena_block *head;
    size_t n_bytes; /* handed out */
};
void arena_init(struct arena *a);
/* 16-byte aligned, cleared; NULL: out of memory */
void *arena_alloc(struct arena *a, size_t n_bytes) PF_WARN_UNUSED;
char *arena_strndup(struct arena *a, const char *s, size_t n) PF_WARN_UNUSED;
void arena_release(struct arena *a);

#endif
