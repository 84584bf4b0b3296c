/*
 * Ctrl-C. Outside a section the process ends at once with status 130: nothing is half done there. Inside a section (a merge,
 * a generation: whatever polls) the first signal only raises a flag, so that the work can stop cleanly; the second one
 * ends the process, which a merge survives by design.
 */
#ifndef PF_CLI_INTERRUPT_H
#define PF_CLI_INTERRUPT_H

#include <stdbool.h>

#define EXIT_INTERRUPTED 130

void interrupt_install(void); /* SIGINT and SIGTERM */
void interrupt_begin(void);
void interrupt_end(void);
bool interrupt_seen(void);

#endif
