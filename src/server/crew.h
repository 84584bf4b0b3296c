/*
 * Threads for requests that may wait: changes, plans, whatever reads files. The polling thread never does. A change with way
 * overlay waits for minutes and is ended by another change, so no fixed number of threads is enough: one per request, up to a limit.
 */
#ifndef PF_SERVER_CREW_H
#define PF_SERVER_CREW_H

#include "base/err.h"

struct crew;
typedef void (*crew_fn)(void *ctx);

int crew_new(uint32_t n_max, struct crew **out_crew, pf_error *err);
void crew_free(struct crew *c); /* waits until the last one is done */
/* PF_E_BUSY: n_max are at work. */
int crew_run(struct crew *c, crew_fn fn, void *ctx, pf_error *err);
uint32_t crew_count(struct crew *c);

#endif
