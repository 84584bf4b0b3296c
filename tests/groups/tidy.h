/*
 * For clang-tidy alone, which includes it in front of every file: the helpers of base/err.h return the code that they were given. The
 * analyser sees one file at a time and would otherwise follow every error path as if it went on. err.c, which defines them, goes
 * without it.
 */
#ifndef PF_TESTS_TIDY_H
#define PF_TESTS_TIDY_H

#include "base/err.h"

#define err_set(err, code, ...) (err_set(err, code, __VA_ARGS__), (code))
#define err_at(err, code, ...)  (err_at(err, code, __VA_ARGS__), (code))
#define err_sys(err, ...)       (err_sys(err, __VA_ARGS__), PF_E_IO)
#define err_nomem(...)          (err_nomem(__VA_ARGS__), PF_E_NOMEM)

#endif
