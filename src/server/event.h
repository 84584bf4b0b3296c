/*
 * Server-sent events: what happens is told to every client that listens at /v1/events. Each client has a bounded buffer; one that
 * reads too slowly loses events and is told how many. Any thread may publish; nobody waits for a client.
 */
#ifndef PF_SERVER_EVENT_H
#define PF_SERVER_EVENT_H

#include "base/json.h"
#include "server/http.h"

struct events;

struct events_opts {
    uint32_t n_clients_max;
    size_t n_buffer_max; /* bytes per client */
};

int events_new(const struct events_opts *opts, struct events **out_events, pf_error *err);
void events_free(struct events *e); /* after the last client has left */

/* data is freed. name: "build", "view", "job", "step". */
void events_publish(struct events *e, const char *name, struct json *data);
/* A stream for one more client, which starts with `hello` (freed). PF_E_BUSY: too many clients. */
int events_listen(struct events *e, struct http_request *req, struct json *hello,
                  struct http_stream *out_stream, pf_error *err);
/* A comment to every client: a dead connection is noticed by writing to it. */
void events_heartbeat(struct events *e);
void events_close(struct events *e); /* every stream ends, new ones are refused */

struct events_status {
    uint32_t n_clients;
    uint64_t n_published, n_lost;
};
void events_status(struct events *e, struct events_status *out);

#endif
