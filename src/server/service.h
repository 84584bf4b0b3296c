/*
 * What every route works on: one model, one engine, one queue. Set up by server.c before the first request and torn down after the
 * last; in between the pointers do not change, and each part has its own locks.
 */
#ifndef PF_SERVER_SERVICE_H
#define PF_SERVER_SERVICE_H

#include "server/access_log.h"
#include "server/auth.h"
#include "server/crew.h"
#include "server/event.h"
#include "server/http.h"
#include "server/job.h"
#include "server/listen.h"
#include "server/lora_book.h"
#include "server/metrics.h"
#include "server/picture.h"
#include "server/server.h"

struct layer_map;

struct service {
    const struct server_opts *opts;
    struct pf_checkpoint *ckpt;
    struct pf_checkpoint_info ckpt_info;
    struct pf_engine *engine;
    struct pf_model **models; /* one per worker */
    unsigned n_workers;
    struct pf_model_info model;
    char model_id[256];
    int64_t t_created_s; /* wall clock */
    uint64_t t_start_ns;

    struct http *http;
    struct listener listener;
    struct auth *auth;
    struct queue *queue;
    struct events *events;
    struct crew *crew;
    struct lora_book *book;
    struct pictures *pictures;
    struct layer_map *layers;
    struct metrics metrics;
    struct access_log log;

    _Atomic bool is_ready, is_draining;
    _Atomic uint32_t n_changing; /* changes under way, for health */
};

#endif
