/*
 * `--part auto`: which share of the work is this process's, by the environment of whatever started it. Known are Open MPI, PMI
 * (MPICH, Slurm's mpi plugins), Slurm and Kubernetes indexed jobs. Only variables are read; nothing is started or asked.
 */
#ifndef PF_CLI_LAUNCHER_H
#define PF_CLI_LAUNCHER_H

#include "cli/option.h"

/* The value of a variable, or NULL. */
typedef const char *(*launcher_env_fn)(void *ctx, const char *name);

/*
 * Fills out->i (from 1) and out->n. An MPI launcher inside a Slurm allocation wins over Slurm's own numbers, which then speak of
 * its daemons; any other two that disagree are an error. PAGEFLIP_PARTS gives the count where the launcher does not, and must
 * agree where it does. env NULL: getenv. PF_E_NOTFOUND: no launcher; PF_E_CONFLICT; PF_E_INVALID: no numbers, or half of them.
 */
int launcher_part(launcher_env_fn env, void *ctx, struct arg_part *out, pf_error *err);

#endif
