/*
 * Logging: one process-wide sink that a program installs with pf_log_set. The library never prints by itself.
 * Lines have no newline at the end. Thread-safe once the sink is installed.
 */
#ifndef PF_BASE_LOG_H
#define PF_BASE_LOG_H

#include "base/compiler.h"
#include "pageflip.h"

void log_at(int level, const char *fmt, ...) PF_PRINTF(2, 3);

#endif
