/*
 * Becoming an ordinary user when the server was started as root: after sockets, model and key file are open and the cache directory
 * exists, before the engine starts and the first request is read.
 */
#ifndef PF_SERVER_PRIVILEGE_H
#define PF_SERVER_PRIVILEGE_H

#include "base/err.h"

/* Not root, or user "root": nothing happens, *out_is_dropped false. NULL: "nobody". */
int privilege_drop(const char *user, bool *out_is_dropped, pf_error *err);
/* As root, before dropping: makes `dir` if it is missing and gives it to the user. Nothing otherwise. */
int privilege_give_dir(const char *user, const char *dir, pf_error *err);
bool privilege_will_drop(const char *user);
/* The same for a socket file. */
int privilege_give_file(const char *user, const char *path, pf_error *err);

#endif
