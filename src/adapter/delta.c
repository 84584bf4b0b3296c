/*
 * What a kind needs to compute some of its rows: asked by merge/ before it cuts panels.
 */
#include "adapter/delta.h"

enum delta_need delta_need(const struct delta *d, int64_t *out_row_group)
{
    *out_row_group = 1;
    if (d->kind != DELTA_LOKR)
        return DELTA_NEEDS_ROWS;
    *out_row_group = d->f[2].n_rows;
    return DELTA_NEEDS_ROW_GROUP;
}
