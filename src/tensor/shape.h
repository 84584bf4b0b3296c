/*
 * Shapes: element counts with overflow checks, the rows x cols folding that panels use, and text for messages.
 */
#ifndef PF_TENSOR_SHAPE_H
#define PF_TENSOR_SHAPE_H

#include "base/err.h"

struct shape {
    int32_t rank;
    int64_t dim[PF_MAX_RANK];
};

bool shape_n_elements(const struct shape *s, uint64_t *out_n); /* false on overflow */
/* False: overflow, or bits no multiple of 8 */
bool shape_n_bytes(const struct shape *s, int32_t dtype, uint64_t *out_n_bytes);
bool shape_eq(const struct shape *a, const struct shape *b);
int64_t shape_rows(const struct shape *s); /* dim[0]; 1 for rank 0 */
int64_t shape_cols(const struct shape *s); /* product of the rest; 1 for rank <= 1 */
/* "[128, 3, 4, 4]"; truncated with ".." when the buffer is short. Returns buf. */
const char *shape_text(const struct shape *s, char *buf, size_t n_buf);

#endif
