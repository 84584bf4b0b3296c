/*
 * `pageflip generate --script`: runs the lines of a script in this process, generations in the background among them, so that
 * switching under load can be driven and tested from the command line.
 */
#ifndef PF_CLI_SCRIPT_RUN_H
#define PF_CLI_SCRIPT_RUN_H

#include "cli/generate_opts.h"
#include "cli/out.h"

/* The exit status: failed when any line failed. A failed line ends the script unless --keep-going. */
int script_run(const struct out *o, const struct generate_args *args);

#endif
