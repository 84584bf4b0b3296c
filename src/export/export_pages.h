/*
 * The page cache around a merge: what will be read soon is asked for, what only we read is dropped behind us when the files are
 * larger than memory, and page tables of the mappings do not pile up. Advice only: nothing here can fail the merge.
 */
#ifndef PF_EXPORT_EXPORT_PAGES_H
#define PF_EXPORT_EXPORT_PAGES_H

#include "export/export_int.h"

struct pages {
    bool is_in_large, is_out_large; /* compared with the memory that is available */
    /* Per item: little of it was cached before we read it; NULL unless is_in_large */
    _Atomic uint8_t *is_ours;
};

int pages_init(struct pages *p, const struct export_plan *plan, pf_error *err);
void pages_release(struct pages *p);
void pages_ahead(struct pages *p, const struct export_plan *plan, size_t i_item);
/* Before merging it */
void pages_populate(const struct export_plan *plan, const struct item *item);
void pages_behind(struct pages *p, const struct export_plan *plan, size_t i_item);

#endif
