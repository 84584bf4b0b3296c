/*
 * Option structs of the public header, `struct pf_*_opts { uint32_t size; ... }`: how a function reads what its caller gave, whose header
 * may be older than the library, and its struct shorter. Called once at the top of each function that takes options.
 */
#ifndef PF_BASE_OPTS_H
#define PF_BASE_OPTS_H

#include <stddef.h>

/*
 * Fills out, a struct of n_bytes as the library knows it. What the caller's has not, by its `size`, is zero: the default. opts NULL: all
 * defaults; size 0: of the library's own size.
 */
void opts_read(void *out, size_t n_bytes, const void *opts);

#endif
