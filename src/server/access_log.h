/*
 * One line per request on stderr, as text or as JSON: when, what, how it ended, how long, how many bytes. Thread-safe: each line is
 * one write.
 */
#ifndef PF_SERVER_ACCESS_LOG_H
#define PF_SERVER_ACCESS_LOG_H

#include "server/http.h"

enum access_format { ACCESS_TEXT, ACCESS_JSON, ACCESS_NONE };

struct access_log {
    enum access_format format;
    int fd;
};

/* status 0: the client left before its answer. */
void access_log_request(const struct access_log *log, const struct http_request *req, int status,
                        uint64_t n_bytes, double ms);

#endif
