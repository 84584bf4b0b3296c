/*
 * base/guard.c: a truncated mapping reads as zeros and says so; every other SIGBUS does what it did before.
 */
#include "testing.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "base/guard.h"
#include "base/mem.h"

enum { N_PAGES = 8 };

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static volatile uint8_t sink;

static const char *make_file(void **state, const char *name)
{
    const char *path = test_path(state, name);
    const size_t n = N_PAGES * page_bytes();
    uint8_t *p = mem_alloc(n);
    memset(p, 7, n);
    assert_int_equal(file_write_atomic(path, p, n, NULL), PF_OK);
    mem_free(p);
    return path;
}

static void a_truncated_mapping_reads_as_zeros_and_is_flagged(void **state)
{
    const char *path = make_file(state, "a"), *other = make_file(state, "b");
    struct file_map m, o;
    pf_error err = {0};
    const size_t n = page_bytes();
    assert_int_equal(file_map_open(&m, path, &err), PF_OK);
    assert_int_equal(file_map_open(&o, other, &err), PF_OK);
    assert_false(guard_tripped(m.i_guard));
    assert_int_equal(truncate(path, (off_t)(2 * n)), 0);
    assert_int_equal(m.p[2 * n - 1], 7);
    assert_false(guard_tripped(m.i_guard)); /* only a fault trips it */
    for (size_t i = 2; i < N_PAGES; i++)
        assert_int_equal(m.p[i * n + 5], 0);
    assert_true(guard_tripped(m.i_guard));
    assert_false(guard_tripped(o.i_guard));
    assert_int_equal(o.p[3 * n], 7);
    assert_int_equal(m.p[n], 7); /* pages that are there stay what they are */
    assert_int_equal(file_map_check(&m, path, &err), PF_E_TRUNCATED);
    /* Grown again, and still tripped: what was computed in between is wrong. */
    assert_int_equal(truncate(path, (off_t)(N_PAGES * n)), 0);
    assert_true(guard_tripped(m.i_guard));
    const int i_guard = m.i_guard;
    file_map_close(&m);
    assert_int_equal(file_map_open(&m, other, &err), PF_OK);
    assert_int_equal(m.i_guard, i_guard); /* the slot is used again, without its past */
    assert_false(guard_tripped(m.i_guard));
    file_map_close(&m);
    file_map_close(&o);
}

static void nothing_and_minus_one_are_fine(void **state)
{
    (void)state;
    assert_int_equal(guard_register(NULL, 0), -1);
    guard_unregister(-1);
    assert_false(guard_tripped(-1));
}

/* Reads past the end of a mapping that nobody registered. */
static void fault_outside(const char *path)
{
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    const uint8_t *p = mmap(NULL, page_bytes(), PROT_READ, MAP_SHARED, fd, 0);
    if (fd < 0 || p == MAP_FAILED || ftruncate(fd, 0))
        _exit(9);
    sink = p[0];
    _exit(8);
}

static int status_of(pid_t pid)
{
    int status = -1;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

/* In a child: as if no handler had been there (cmocka's would report, a sanitizer's too). */
static void nobody_before_us(void)
{
    (void)signal(SIGBUS, SIG_DFL);
}

static void a_foreign_fault_still_kills(void **state)
{
    const char *path = make_file(state, "foreign"), *ours = make_file(state, "ours");
    const pid_t pid = fork();
    if (!pid) {
        struct file_map m;
        nobody_before_us();
        if (file_map_open(&m, ours, NULL))
            _exit(7);
        fault_outside(path);
    }
    const int status = status_of(pid);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGBUS);
}

static void a_sent_signal_still_kills(void **state)
{
    const char *ours = make_file(state, "ours");
    const pid_t pid = fork();
    if (!pid) {
        struct file_map m;
        nobody_before_us();
        if (file_map_open(&m, ours, NULL))
            _exit(7);
        (void)raise(SIGBUS);
        _exit(8);
    }
    const int status = status_of(pid);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGBUS);
}

static void after_unregister_a_fault_is_foreign(void **state)
{
    const char *path = make_file(state, "a");
    const pid_t pid = fork();
    if (!pid) {
        struct file_map m;
        nobody_before_us();
        if (file_map_open(&m, path, NULL))
            _exit(7);
        guard_unregister(m.i_guard);
        if (truncate(path, 0))
            _exit(9);
        sink = m.p[0];
        _exit(8);
    }
    const int status = status_of(pid);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGBUS);
}

/* Registration and faults in several threads at once: every fault finds its own mapping. */
struct churn {
    const char *path_prefix;
    unsigned i;
    _Atomic bool *is_wrong;
};

static void *churn_main(void *arg)
{
    struct churn *c = arg;
    char path[256];
    const size_t n = page_bytes();
    for (unsigned i = 0; i < 50; i++) {
        struct file_map m;
        (void)snprintf(path, sizeof path, "%s/churn-%u", c->path_prefix, c->i);
        static const uint8_t bytes[4 * 4096] = {1};
        if (file_write_atomic(path, bytes, sizeof bytes, NULL) || file_map_open(&m, path, NULL)) {
            *c->is_wrong = true;
            break;
        }
        const bool cut = i % 2;
        if (cut && truncate(path, 0))
            *c->is_wrong = true;
        volatile uint8_t local = m.p[sizeof bytes - n / 2];
        (void)local;
        if (guard_tripped(m.i_guard) != cut)
            *c->is_wrong = true;
        file_map_close(&m);
    }
    return NULL;
}

static void threads_register_and_fault_at_once(void **state)
{
    enum { N = 4 };
    pthread_t threads[N];
    struct churn c[N];
    _Atomic bool is_wrong = false;
    for (unsigned i = 0; i < N; i++) {
        c[i] = (struct churn){*state, i, &is_wrong};
        assert_int_equal(pthread_create(&threads[i], NULL, churn_main, &c[i]), 0);
    }
    for (unsigned i = 0; i < N; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    assert_false(is_wrong);
}

/* ------------------------------------------------------- chained to the handler that was there (own process) */

static void old_handler(int sig, siginfo_t *info, void *context)
{
    (void)context;
    _exit(sig == SIGBUS && info->si_code == BUS_ADRERR ? 42 : 43);
}

static void plain_handler(int sig)
{
    _exit(sig == SIGBUS ? 44 : 45);
}

/* The guard installs itself once per process, so each case is this program run again. */
static int run_self(const char *what, const char *path)
{
    const pid_t pid = fork();
    if (!pid) {
        (void)execl("/proc/self/exe", "test_base_guard", what, path, (char *)NULL);
        _exit(99);
    }
    return status_of(pid);
}

static void chains_to_the_handler_that_was_there(void **state)
{
    const char *path = make_file(state, "a");
    int status = run_self("siginfo", path);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 42);
    path = make_file(state, "a");
    status = run_self("plain", path);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 44);
    /* A fault cannot be ignored; a sent signal can. */
    path = make_file(state, "a");
    status = run_self("ignored", path);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGBUS);
}

/* Somebody puts another handler in our place, or back what was there before us: the next registration guards again. */
static void a_registration_brings_a_displaced_handler_back(void **state)
{
    const char *path = make_file(state, "a");
    for (unsigned i = 0; i < 3; i++) {
        struct file_map m;
        (void)signal(SIGBUS, i ? plain_handler : SIG_DFL);
        assert_int_equal(file_write_atomic(path, &i, sizeof i, NULL), PF_OK);
        assert_int_equal(file_map_open(&m, path, NULL), PF_OK);
        assert_int_equal(truncate(path, 0), 0);
        assert_int_equal(m.p[0], 0);
        assert_true(guard_tripped(m.i_guard));
        file_map_close(&m);
    }
}

/* What the guard installed, called from a handler that chains to it */
static struct sigaction ours;

static void chaining_handler(int sig, siginfo_t *info, void *context)
{
    ours.sa_sigaction(sig, info, context);
}

static void two_handlers_that_chain_to_each_other_end(void **state)
{
    const char *path = make_file(state, "a");
    const pid_t pid = fork();
    if (!pid) {
        struct file_map a, b;
        const struct sigaction theirs = {.sa_sigaction = chaining_handler, .sa_flags = SA_SIGINFO};
        nobody_before_us();
        if (file_map_open(&a, path, NULL) || sigaction(SIGBUS, &theirs, &ours) ||
            file_map_open(&b, path, NULL))
            _exit(7);
        fault_outside(make_file(state, "foreign"));
    }
    const int status = status_of(pid);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGBUS); /* and not SIGSEGV, from an endless recursion */
}

static int child(const char *what, const char *path)
{
    struct sigaction sa = {.sa_flags = 0};
    if (!strcmp(what, "siginfo")) {
        sa.sa_flags = SA_SIGINFO;
        sa.sa_sigaction = old_handler;
    } else {
        sa.sa_handler = strcmp(what, "plain") ? SIG_IGN : plain_handler;
    }
    (void)sigaction(SIGBUS, &sa, NULL);
    static const uint8_t byte;
    if (guard_register(&byte, 1) < 0)
        return 7;
    if (!strcmp(what, "ignored"))
        (void)raise(SIGBUS);
    fault_outside(path);
    return 8;
}

int main(int argc, char **argv)
{
    if (argc == 3)
        return child(argv[1], argv[2]);
    const struct CMUnitTest tests[] = {
        in_dir(nothing_and_minus_one_are_fine),
        in_dir(a_truncated_mapping_reads_as_zeros_and_is_flagged),
        in_dir(a_foreign_fault_still_kills),
        in_dir(a_sent_signal_still_kills),
        in_dir(after_unregister_a_fault_is_foreign),
        in_dir(threads_register_and_fault_at_once),
        in_dir(a_registration_brings_a_displaced_handler_back),
        in_dir(two_handlers_that_chain_to_each_other_end),
        in_dir(chains_to_the_handler_that_was_there),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
