/*
 * Kernel selection: PF_ISA forces one, and one that cannot be had is an error that names it. The choice is made once per process, so
 * each case has a child of its own.
 */
#include "testing.h"

#include <sys/wait.h>
#include <unistd.h>

#include "merge/merge_int.h"

/* merge_kernel_init in a child with PF_ISA set; returns its code. out: the kernel's name, or the message. */
static int init_in_child(const char *isa, char *out, size_t n_out)
{
    int fds[2];
    assert_int_equal(pipe(fds), 0);
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        pf_error err = {0};
        const char *name = "";
        if (isa != NULL ? setenv("PF_ISA", isa, 1) != 0 : unsetenv("PF_ISA") != 0)
            _exit(99);
        const int rc = merge_kernel_init(&name, &err);
        const char *text = rc == PF_OK ? name : err.msg;
        const bool is_written = write(fds[1], text, strlen(text)) == (ssize_t)strlen(text);
        _exit(is_written ? -rc : 99);
    }
    close(fds[1]);
    const ssize_t n = read(fds[0], out, n_out - 1);
    assert_true(n >= 0);
    out[n] = '\0';
    close(fds[0]);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    return -WEXITSTATUS(status);
}

static void pf_isa_forces_what_the_cpu_has(void **state)
{
    (void)state;
    for (int isa = CPU_SCALAR; isa <= CPU_AVX512; isa++) {
        const char *name = cpu_isa_name((enum cpu_isa)isa);
        const bool is_there = kernel_built((enum cpu_isa)isa) != NULL &&
                              (isa == CPU_SCALAR || cpu_has((enum cpu_isa)isa));
        char text[512];
        const int rc = init_in_child(name, text, sizeof(text));
        if (is_there) {
            assert_int_equal(rc, PF_OK);
            assert_string_equal(text, name);
        } else {
            assert_int_equal(rc, PF_E_UNSUPPORTED);
            assert_non_null(strstr(text, name));
            assert_non_null(strstr(text, "lacks"));
        }
    }
}

static void pf_isa_of_no_name_is_an_error(void **state)
{
    (void)state;
    char text[512];
    assert_int_equal(init_in_child("sse9", text, sizeof(text)), PF_E_UNSUPPORTED);
    assert_string_equal(text, "PF_ISA names 'sse9', which is none of scalar, avx2, avx512");
}

static void the_widest_is_chosen_by_itself(void **state)
{
    (void)state;
    const char *want = cpu_has(CPU_AVX512) ? "avx512" : cpu_has(CPU_AVX2) ? "avx2" : "scalar";
    char text[512];
    assert_int_equal(init_in_child(NULL, text, sizeof(text)), PF_OK);
    assert_string_equal(text, want);
    assert_int_equal(init_in_child("", text, sizeof(text)), PF_OK);
    assert_string_equal(text, want);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pf_isa_forces_what_the_cpu_has),
        cmocka_unit_test(pf_isa_of_no_name_is_an_error),
        cmocka_unit_test(the_widest_is_chosen_by_itself),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
