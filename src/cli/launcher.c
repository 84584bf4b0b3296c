/*
 * Reading the launchers' variables, innermost launcher first. A wrong guess here would leave a part unwritten or write one twice
 * as slowly, so what does not fit together is refused with both sides named.
 */
#include "cli/launcher.h"

#include <stdlib.h>
#include <string.h>

#include "base/str.h"

#define PARTS_VARIABLE "PAGEFLIP_PARTS"
#define N_PARTS_MAX    65536

static const struct launcher {
    const char *name;
    const char *rank;      /* counts from 0 */
    const char *counts[2]; /* the first that is set; NULL: the launcher tells none */
    bool is_mpi, is_slurm;
} launchers[] = {
    {"Open MPI", "OMPI_COMM_WORLD_RANK", {"OMPI_COMM_WORLD_SIZE", NULL}, true, false},
    {"PMI", "PMI_RANK", {"PMI_SIZE", NULL}, true, false},
    {"PMIx", "PMIX_RANK", {NULL, NULL}, true, false},
    {"Slurm", "SLURM_PROCID", {"SLURM_NTASKS", "SLURM_NPROCS"}, false, true},
    {"Kubernetes", "JOB_COMPLETION_INDEX", {NULL, NULL}, false, false},
};

struct lookup {
    launcher_env_fn env;
    void *ctx;
};

/* A share that one launcher tells. */
struct share {
    const struct launcher *by;
    const char *count_variable;
    uint64_t i, n; /* i from 0; n 0: not told */
};

static const char *get(const struct lookup *l, const char *name)
{
    const char *v = l->env ? l->env(l->ctx, name) : getenv(name);

    return v && *v ? v : NULL;
}

static int number(const char *name, const char *text, uint64_t min, uint64_t *out, pf_error *err)
{
    if (!str_to_u64(str_of(text), out) || *out < min || *out > N_PARTS_MAX)
        return err_set(err, PF_E_INVALID, "--part auto: %s is '%s', no number from %u to %d", name,
                       text, (unsigned)min, N_PARTS_MAX);
    return PF_OK;
}

/* *out_is false: this launcher is not there. */
static int read_share(const struct lookup *l, const struct launcher *by, struct share *out,
                      bool *out_is, pf_error *err)
{
    const char *rank = get(l, by->rank), *count = NULL;
    int rc;

    *out = (struct share){.by = by};
    for (size_t i = 0; i < PF_COUNTOF(by->counts) && by->counts[i] && !count; i++) {
        out->count_variable = by->counts[i];
        count = get(l, by->counts[i]);
    }
    *out_is = rank != NULL;
    if (!rank && count && !by->is_slurm) /* Slurm tells the count outside of steps, too */
        return err_set(err, PF_E_INVALID, "--part auto: %s is set and %s is not",
                       out->count_variable, by->rank);
    if (!rank)
        return PF_OK;
    if (!count && by->counts[0] && !get(l, PARTS_VARIABLE))
        return err_set(err, PF_E_INVALID, "--part auto: %s is set and %s is not", by->rank,
                       by->counts[0]);
    rc = number(by->rank, rank, 0, &out->i, err);
    return !rc && count ? number(out->count_variable, count, 1, &out->n, err) : rc;
}

/* PAGEFLIP_PARTS where the launcher tells no count, and as a check where it does. */
static int complete(const struct lookup *l, struct share *share, pf_error *err)
{
    const char *text = get(l, PARTS_VARIABLE);
    uint64_t n = 0;
    int rc = text ? number(PARTS_VARIABLE, text, 1, &n, err) : PF_OK;

    if (rc)
        return rc;
    if (share->n && n && n != share->n)
        return err_set(err, PF_E_CONFLICT,
                       "--part auto: " PARTS_VARIABLE " says %u parts and %s of %s says %u",
                       (unsigned)n, share->count_variable, share->by->name, (unsigned)share->n);
    share->n = share->n ? share->n : n;
    if (!share->n)
        return err_set(err, PF_E_NOTFOUND,
                       "--part auto: %s of %s says which part this is, and nothing says how many "
                       "there are: set " PARTS_VARIABLE " to their number%s",
                       share->by->rank, share->by->name,
                       share->by->is_mpi ? "" : " (the job's completions)");
    if (share->i >= share->n)
        return err_set(err, PF_E_CONFLICT,
                       "--part auto: %s of %s is %u, and there are %u parts, counted from 0",
                       share->by->rank, share->by->name, (unsigned)share->i, (unsigned)share->n);
    return PF_OK;
}

static int compare(const struct share *a, const struct share *b, pf_error *err)
{
    if (a->i == b->i && a->n == b->n)
        return PF_OK;
    return err_set(err, PF_E_CONFLICT,
                   "--part auto: %s says %s %u of %u and %s says %s %u of %u: give --part I/N",
                   a->by->name, a->by->rank, (unsigned)a->i, (unsigned)a->n, b->by->name,
                   b->by->rank, (unsigned)b->i, (unsigned)b->n);
}

int launcher_part(launcher_env_fn env, void *ctx, struct arg_part *out, pf_error *err)
{
    const struct lookup l = {env, ctx};
    struct share first = {0}, share;
    bool is_there;
    int rc = PF_OK;

    for (size_t i = 0; !rc && i < PF_COUNTOF(launchers); i++) {
        /* Open MPI sets PMIX_RANK too, and its count is elsewhere. */
        if (first.by && first.by->is_mpi && !launchers[i].counts[0] && launchers[i].is_mpi)
            continue;
        rc = read_share(&l, &launchers[i], &share, &is_there, err);
        if (rc || !is_there)
            continue;
        if (first.by && first.by->is_mpi && launchers[i].is_slurm)
            continue; /* numbers of the allocation, or of the launcher's daemons */
        rc = complete(&l, &share, err);
        if (!rc && first.by)
            rc = compare(&first, &share, err);
        if (!rc && !first.by)
            first = share;
    }
    if (!rc && !first.by)
        rc = err_set(err, PF_E_NOTFOUND,
                     "--part auto: no launcher has started this process (neither %s, %s, %s nor "
                     "%s is set): give --part I/N",
                     launchers[0].rank, launchers[1].rank, launchers[3].rank, launchers[4].rank);
    if (!rc)
        *out = (struct arg_part){.i = (uint32_t)first.i + 1, .n = (uint32_t)first.n};
    return rc;
}
