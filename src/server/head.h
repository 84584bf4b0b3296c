/*
 * Can the head of a request be read in one way only? Judges raw bytes before the HTTP library sees them (door.c), and headers one by
 * one as the library found them on a connection that is used again (http.c). Bounds everything; keeps nothing, allocates nothing.
 */
#ifndef PF_SERVER_HEAD_H
#define PF_SERVER_HEAD_H

#include "base/str.h"

#define HEAD_LINE_MAX    4096 /* bytes of a request line */
#define HEAD_HEADERS_MAX 64

/* What the headers of one request add up to. Zero it first. */
struct head {
    bool is_http10;
    const char *wrong; /* NULL: fine so far */
    size_t n, n_bytes;
    struct str length, coding; /* values of Content-Length and Transfer-Encoding */
    unsigned n_length, n_coding, n_host, n_origin, n_key, n_type, n_id;
};
/* name and value point into the caller's buffer, which outlives the head. */
void head_add(struct head *h, struct str name, struct str value);

struct head_refusal {
    int status;
    const char *code;
    char text[160];
};
/* After the last header. True: refused. */
bool head_is_refused(const struct head *h, size_t n_bytes_max, struct head_refusal *out);
void head_refuse(struct head_refusal *out, int status, const char *code, const char *fmt, ...)
    PF_PRINTF(4, 5);

/* Of the bytes that have come, those of a chunked body too: n_bytes_max is that of the headers. */
enum head_state { HEAD_PARTIAL, HEAD_WHOLE, HEAD_REFUSED };
enum head_state head_scan(const char *p, size_t n, size_t n_bytes_max, struct head_refusal *out);
/* More bytes than this are never needed for an answer other than HEAD_PARTIAL. */
size_t head_scan_max(size_t n_bytes_max);

#endif
