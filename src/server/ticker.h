/*
 * What happens by the clock: progress of builds and adoptions as events, heartbeats, kept pictures that expire.
 */
#ifndef PF_SERVER_TICKER_H
#define PF_SERVER_TICKER_H

#include "base/err.h"

struct service;
struct ticker;

int ticker_start(struct service *s, struct ticker **out_ticker, pf_error *err);
void ticker_stop(struct ticker *t);

#endif
