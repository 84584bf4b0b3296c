/*
 * --part auto: the environments of the launchers as they really are, alone and inside each other, and those that do not fit.
 */
#include "testing.h"

#include <stdlib.h>
#include <string.h>

#include "cli/launcher.h"

/* "A=1 B=2": looked up like an environment. */
static const char *look_up(void *ctx, const char *name)
{
    static char values[8][64]; /* as many as are looked at together */
    static unsigned i_value;
    char *value = values[i_value++ % PF_COUNTOF(values)];
    size_t n = strlen(name);

    for (const char *p = ctx; p; p = strchr(p, ' ') ? strchr(p, ' ') + 1 : NULL)
        if (!strncmp(p, name, n) && p[n] == '=') {
            size_t n_value = strcspn(p + n + 1, " ");

            memcpy(value, p + n + 1, n_value);
            value[n_value] = 0;
            return value;
        }
    return NULL;
}

static const struct {
    const char *env;
    uint32_t i, n;
} good[] = {
    {"OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4", 3, 4},
    /* mpirun sets PMIx variables of its own, which tell no count */
    {"OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 PMIX_RANK=2 PMIX_SIZE=", 3, 4},
    {"PMI_RANK=0 PMI_SIZE=2", 1, 2},
    {"SLURM_PROCID=7 SLURM_NTASKS=8 SLURM_JOB_ID=1", 8, 8},
    {"SLURM_PROCID=7 SLURM_NPROCS=8", 8, 8},
    /* srun --mpi=pmi2 tells the same twice */
    {"SLURM_PROCID=1 SLURM_NTASKS=3 PMI_RANK=1 PMI_SIZE=3", 2, 3},
    /* mpirun inside an allocation: Slurm counts the daemons of mpirun */
    {"OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 SLURM_PROCID=1 SLURM_NTASKS=2", 6, 8},
    {"PMI_RANK=5 PMI_SIZE=8 SLURM_PROCID=0 SLURM_NTASKS=8", 6, 8},
    {"JOB_COMPLETION_INDEX=0 PAGEFLIP_PARTS=5", 1, 5},
    {"PMIX_RANK=1 PAGEFLIP_PARTS=2", 2, 2},
    {"OMPI_COMM_WORLD_RANK=2 PAGEFLIP_PARTS=4", 3, 4},
    {"SLURM_PROCID=0 SLURM_NTASKS=1 PAGEFLIP_PARTS=1", 1, 1},
    {"JOB_COMPLETION_INDEX=1 PAGEFLIP_PARTS=2 SLURM_NTASKS=9", 2, 2},
};

static void takes_the_share_that_the_launcher_gives(void **state)
{
    (void)state;
    for (size_t i = 0; i < PF_COUNTOF(good); i++) {
        struct arg_part part = {0};
        pf_error err = {0};
        char env[256];

        (void)snprintf(env, sizeof(env), "%s", good[i].env);
        if (launcher_part(look_up, env, &part, &err))
            fail_msg("'%s': %s", env, err.msg);
        assert_int_equal(part.i, good[i].i);
        assert_int_equal(part.n, good[i].n);
    }
}

static const struct {
    const char *env;
    int code;
    const char *said;
} bad[] = {
    {"HOME=x", PF_E_NOTFOUND, "no launcher has started this process"},
    {"PAGEFLIP_PARTS=4", PF_E_NOTFOUND, "no launcher has started this process"},
    {"SLURM_NTASKS=4", PF_E_NOTFOUND, "no launcher has started this process"},
    {"JOB_COMPLETION_INDEX=1", PF_E_NOTFOUND, "set PAGEFLIP_PARTS to their number"},
    {"PMIX_RANK=1", PF_E_NOTFOUND, "set PAGEFLIP_PARTS to their number"},
    {"OMPI_COMM_WORLD_RANK=1", PF_E_INVALID,
     "OMPI_COMM_WORLD_RANK is set and OMPI_COMM_WORLD_SIZE is not"},
    {"OMPI_COMM_WORLD_SIZE=2", PF_E_INVALID,
     "OMPI_COMM_WORLD_SIZE is set and OMPI_COMM_WORLD_RANK is not"},
    {"PMI_RANK=1", PF_E_INVALID, "PMI_RANK is set and PMI_SIZE is not"},
    {"SLURM_PROCID=1", PF_E_INVALID, "SLURM_PROCID is set and SLURM_NTASKS is not"},
    {"SLURM_PROCID=-1 SLURM_NTASKS=2", PF_E_INVALID, "SLURM_PROCID is '-1'"},
    {"SLURM_PROCID=0 SLURM_NTASKS=x", PF_E_INVALID, "SLURM_NTASKS is 'x'"},
    {"SLURM_PROCID=0 SLURM_NTASKS=0", PF_E_INVALID, "SLURM_NTASKS is '0', no number from 1"},
    {"SLURM_PROCID=0 SLURM_NTASKS=65537", PF_E_INVALID, "no number from 1 to 65536"},
    {"JOB_COMPLETION_INDEX=0 PAGEFLIP_PARTS=many", PF_E_INVALID, "PAGEFLIP_PARTS is 'many'"},
    {"OMPI_COMM_WORLD_RANK=4 OMPI_COMM_WORLD_SIZE=4", PF_E_CONFLICT,
     "OMPI_COMM_WORLD_RANK of Open MPI is 4, and there are 4 parts, counted from 0"},
    {"JOB_COMPLETION_INDEX=3 PAGEFLIP_PARTS=3", PF_E_CONFLICT, "is 3, and there are 3 parts"},
    {"SLURM_PROCID=0 SLURM_NTASKS=4 PAGEFLIP_PARTS=2", PF_E_CONFLICT,
     "PAGEFLIP_PARTS says 2 parts and SLURM_NTASKS of Slurm says 4"},
    {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 PMI_RANK=2 PMI_SIZE=4", PF_E_CONFLICT,
     "Open MPI says OMPI_COMM_WORLD_RANK 1 of 4 and PMI says PMI_RANK 2 of 4: give --part I/N"},
    {"SLURM_PROCID=0 SLURM_NTASKS=2 JOB_COMPLETION_INDEX=0 PAGEFLIP_PARTS=3", PF_E_CONFLICT,
     "PAGEFLIP_PARTS says 3 parts"},
    {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 JOB_COMPLETION_INDEX=0", PF_E_NOTFOUND,
     "set PAGEFLIP_PARTS"},
    {"SLURM_PROCID=1 SLURM_NTASKS=2 JOB_COMPLETION_INDEX=0 PAGEFLIP_PARTS=2", PF_E_CONFLICT,
     "Slurm says SLURM_PROCID 1 of 2 and Kubernetes says JOB_COMPLETION_INDEX 0 of 2"},
};

static void refuses_what_does_not_fit_together(void **state)
{
    (void)state;
    for (size_t i = 0; i < PF_COUNTOF(bad); i++) {
        struct arg_part part = {.i = 77};
        pf_error err = {0};
        char env[256];

        (void)snprintf(env, sizeof(env), "%s", bad[i].env);
        assert_int_equal(launcher_part(look_up, env, &part, &err), bad[i].code);
        if (!strstr(err.msg, bad[i].said))
            fail_msg("'%s': '%s' does not say '%s'", env, err.msg, bad[i].said);
        assert_int_equal(part.i, 77);
    }
}

static void reads_the_environment_of_the_process(void **state)
{
    struct arg_part part = {0};
    pf_error err = {0};

    (void)state;
    assert_int_equal(setenv("JOB_COMPLETION_INDEX", "1", 1), 0);
    assert_int_equal(setenv("PAGEFLIP_PARTS", "3", 1), 0);
    assert_int_equal(launcher_part(NULL, NULL, &part, &err), PF_OK);
    assert_int_equal(part.i, 2);
    assert_int_equal(part.n, 3);
}

int main(void)
{
    static const char *const all[] = {"OMPI_COMM_WORLD_RANK",
                                      "OMPI_COMM_WORLD_SIZE",
                                      "PMI_RANK",
                                      "PMI_SIZE",
                                      "PMIX_RANK",
                                      "SLURM_PROCID",
                                      "SLURM_NTASKS",
                                      "SLURM_NPROCS",
                                      "JOB_COMPLETION_INDEX",
                                      "PAGEFLIP_PARTS"};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(takes_the_share_that_the_launcher_gives),
        cmocka_unit_test(refuses_what_does_not_fit_together),
        cmocka_unit_test(reads_the_environment_of_the_process),
    };

    for (size_t i = 0; i < PF_COUNTOF(all); i++) /* the tests themselves may run under one */
        (void)unsetenv(all[i]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
