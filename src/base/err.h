/*
 * Errors: filling the caller's pf_error. Every function of the project that can fail returns PF_OK or a negative
 * PF_E_* and takes `pf_error *err` last (may be NULL). These helpers return the code, so that `return err_set(...)` reads well.
 * They never allocate and never print.
 */
#ifndef PF_BASE_ERR_H
#define PF_BASE_ERR_H

#include "base/compiler.h"
#include "pageflip.h"

/* Text: lower case, no full stop, what failed first, subject quoted, numbers included. */
int err_set(pf_error *err, int code, const char *fmt, ...) PF_PRINTF(3, 4);

/* As err_set, with a byte offset in the file that the text names. */
int err_at(pf_error *err, int code, uint64_t off, const char *fmt, ...) PF_PRINTF(4, 5);

/* A failed system call: appends ": <strerror>", sets sys_errno; ENOSPC/EDQUOT become PF_E_NOSPACE, ENOMEM PF_E_NOMEM,
 * ENOENT/ENOTDIR PF_E_NOTFOUND, everything else PF_E_IO. */
int err_sys(pf_error *err, int sys_errno, const char *fmt, ...) PF_PRINTF(3, 4);

/* "out of memory for 123 bytes of <what>" */
int err_nomem(pf_error *err, size_t n_bytes, const char *what);

/* Puts text in front of a message that a lower module wrote; returns rc. */
int err_prefix(pf_error *err, int rc, const char *fmt, ...) PF_PRINTF(3, 4);

/* Appends text to the message ("; did you mean ..."), truncating at the end of msg. */
void err_append(pf_error *err, const char *fmt, ...) PF_PRINTF(2, 3);

#endif
