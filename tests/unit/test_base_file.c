/*
 * base/file*.c: mapping and its checks, exact transfers, fault points, atomic publishing (killed at every point), locks, trees.
 */
#include "testing.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"

static void put(const char *path, const void *p, size_t n)
{
    pf_error err = {0};
    assert_int_equal(file_write_atomic(path, p, n, &err), PF_OK);
}

static void assert_content(const char *path, const void *p, size_t n)
{
    char *got = NULL;
    size_t n_got = 0;
    pf_error err = {0};
    assert_int_equal(file_read_all(path, 1u << 24, &got, &n_got, &err), PF_OK);
    assert_int_equal(n_got, n);
    assert_memory_equal(got, p, n);
    mem_free(got);
}

/* ------------------------------------------------------------------------------------------------ mapping */

static void maps_a_file_and_reads_its_bytes(void **state)
{
    const char *path = test_path(state, "a");
    put(path, "hello", 5);
    struct file_map m;
    pf_error err = {0};
    assert_int_equal(file_map_open(&m, path, &err), PF_OK);
    assert_int_equal(m.n_bytes, 5);
    assert_memory_equal(m.p, "hello", 5);
    assert_true(m.i_guard >= 0);
    assert_true(fcntl(m.fd, F_GETFD) & FD_CLOEXEC);
    assert_int_equal(file_map_check(&m, path, &err), PF_OK);
    file_map_close(&m);
    assert_int_equal(m.fd, -1);
    file_map_close(&m); /* twice is fine */
}

static void maps_an_empty_file_without_a_mapping(void **state)
{
    const char *path = test_path(state, "empty");
    put(path, "", 0);
    struct file_map m;
    assert_int_equal(file_map_open(&m, path, NULL), PF_OK);
    assert_null(m.p);
    assert_int_equal(m.n_bytes, 0);
    assert_int_equal(m.i_guard, -1);
    assert_int_equal(file_map_check(&m, path, NULL), PF_OK);
    file_map_close(&m);
}

static void refuses_to_map_what_is_no_regular_file(void **state)
{
    struct file_map m;
    pf_error err = {0};
    assert_int_equal(file_map_open(&m, *state, &err), PF_E_IO);
    assert_non_null(strstr(err.msg, "is a directory, not a regular file"));
    const char *path = test_path(state, "fifo");
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(file_map_open(&m, path, &err), PF_E_IO); /* and does not wait for a writer */
    assert_non_null(strstr(err.msg, "special file"));
    path = test_path(state, "absent");
    assert_int_equal(file_map_open(&m, path, &err), PF_E_NOTFOUND);
    assert_non_null(strstr(err.msg, path));
}

static void sees_that_a_mapped_file_changed_or_shrank(void **state)
{
    const char *path = test_path(state, "a");
    put(path, "0123456789", 10);
    struct file_map m;
    pf_error err = {0};
    assert_int_equal(file_map_open(&m, path, &err), PF_OK);
    const struct timespec times[2] = {{.tv_sec = 1}, {.tv_sec = 1}};
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
    assert_int_equal(file_map_check(&m, path, &err), PF_E_CHANGED);
    assert_non_null(strstr(err.msg, "changed while in use"));
    assert_int_equal(truncate(path, 3), 0);
    assert_int_equal(file_map_check(&m, path, &err), PF_E_TRUNCATED);
    assert_non_null(strstr(err.msg, "shrank from 10 to 3 bytes"));
    file_map_close(&m);
}

/* C109: a new file under the old name neither disturbs the mapping nor is disturbed by it. */
static void replacing_the_name_leaves_the_mapping_alone(void **state)
{
    const char *path = test_path(state, "a");
    put(path, "old", 3);
    struct file_map m;
    assert_int_equal(file_map_open(&m, path, NULL), PF_OK);
    put(path, "new!", 4);
    assert_memory_equal(m.p, "old", 3);
    file_map_close(&m);
    assert_content(path, "new!", 4);
}

/* ----------------------------------------------------------------------------------------------- transfers */

static void read_all_keeps_to_its_bound(void **state)
{
    const char *path = test_path(state, "a");
    char *p = NULL;
    size_t n = 0;
    pf_error err = {0};
    put(path, "0123456789", 10);
    assert_int_equal(file_read_all(path, 9, &p, &n, &err), PF_E_RANGE);
    assert_non_null(strstr(err.msg, "10 bytes, 9 is the most"));
    assert_null(p);
    assert_int_equal(file_read_all(path, 10, &p, &n, &err), PF_OK);
    assert_string_equal(p, "0123456789");
    mem_free(p);
    /* says 0 bytes and has more */
    assert_int_equal(file_read_all("/proc/self/status", 1u << 20, &p, &n, &err), PF_OK);
    assert_true(n > 100);
    mem_free(p);
    p = NULL;
    assert_int_equal(file_read_all("/proc/self/status", 50, &p, &n, &err), PF_E_RANGE);
}

static void pread_says_where_a_file_ends(void **state)
{
    const char *path = test_path(state, "a");
    char p[8];
    pf_error err = {0};
    put(path, "0123456789", 10);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    assert_int_equal(file_pread(fd, p, 8, 2, path, &err), PF_OK);
    assert_memory_equal(p, "23456789", 8);
    assert_int_equal(file_pread(fd, p, 8, 3, path, &err), PF_E_TRUNCATED);
    assert_non_null(strstr(err.msg, "ends at 10"));
    assert_int_equal(file_pwrite(fd, p, 8, 0, path, &err), PF_E_IO);
    assert_int_equal(err.sys_errno, EBADF);
    (void)close(fd);
}

static void copies_a_range_exactly_and_counts_it(void **state)
{
    enum { N = 20 << 20 };
    const char *from = test_path(state, "from"), *to = test_path(state, "to");
    uint8_t *p = mem_alloc(N);
    for (size_t i = 0; i < N; i++)
        p[i] = (uint8_t)(i * 2654435761u >> 13);
    put(from, p, N);
    const int in = open(from, O_RDONLY | O_CLOEXEC);
    const int out = open(to, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    const uint64_t before = file_bytes_written();
    pf_error err = {0};
    assert_int_equal(file_copy_range(in, 12345, out, 7, N - 20000, to, &err), PF_OK);
    assert_int_equal(file_bytes_written() - before, N - 20000);
    char *got = NULL;
    size_t n_got = 0;
    assert_int_equal(file_read_all(to, N, &got, &n_got, &err), PF_OK);
    assert_int_equal(n_got, N - 20000 + 7);
    assert_memory_equal(got + 7, p + 12345, N - 20000);
    assert_int_equal(file_copy_range(in, N - 5, out, 0, 6, to, &err), PF_E_TRUNCATED);
    /* copy_file_range refuses an O_APPEND target; pwrite then appends: the buffer path was taken */
    const int app = open(to, O_WRONLY | O_APPEND | O_CLOEXEC);
    assert_int_equal(file_copy_range(in, 0, app, 0, 1000, to, &err), PF_E_IO);
    (void)close(app);
    (void)close(in);
    (void)close(out);
    mem_free(got);
    mem_free(p);
}

/* From a file system that copy_file_range does not serve. */
static void copies_through_a_buffer_where_the_kernel_will_not(void **state)
{
    const char *to = test_path(state, "to");
    const int in = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    const int out = open(to, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    const uint64_t before = file_bytes_written();
    pf_error err = {0};
    char first[16];
    const int rc = file_copy_range(in, 0, out, 0, 16, to, &err);
    assert_int_equal(file_pread(in, first, 16, 0, "maps", NULL), PF_OK);
    if (rc == PF_OK) {
        assert_int_equal(file_bytes_written() - before, 16);
        assert_content(to, first, 16);
    } else { /* some kernels report such a file as empty */
        assert_int_equal(rc, PF_E_TRUNCATED);
    }
    (void)close(in);
    (void)close(out);
}

static void reserves_space_or_says_that_there_is_none(void **state)
{
    const char *path = test_path(state, "a");
    pf_error err = {0};
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    assert_int_equal(file_reserve(fd, 1u << 20, path, &err), PF_OK);
    assert_int_equal(file_reserve(fd, 0, path, &err), PF_OK);
    assert_true(file_fault_set("enospc@1"));
    assert_int_equal(file_reserve(fd, 1u << 20, path, &err), PF_E_NOSPACE);
    assert_non_null(strstr(err.msg, "reserve 1048576 bytes"));
    assert_true(file_fault_set(NULL));
    assert_true(file_free_bytes(*state) > 0);
    assert_int_equal(file_free_bytes("/nonexistent/x"), 0);
    (void)close(fd);
}

/* ------------------------------------------------------------------------------------------------- faults */

static void understands_fault_specs(void **state)
{
    (void)state;
    assert_true(file_fault_set("kill@1000000"));
    assert_true(file_fault_set("short@2"));
    static const char *const bad[] = {"kill",    "kill@",  "kill@0", "kill@-1",
                                      "kill@1x", "burn@1", ""};
    for (size_t i = 0; i < PF_COUNTOF(bad); i++)
        assert_false(file_fault_set(bad[i]));
    assert_true(file_fault_set(NULL));
}

static void a_short_write_is_continued(void **state)
{
    const char *path = test_path(state, "a");
    assert_true(file_fault_set("short@1"));
    put(path, "0123456789", 10);
    assert_int_equal(file_n_points(), 4); /* write, sync, rename, directory */
    assert_true(file_fault_set(NULL));
    assert_content(path, "0123456789", 10);
}

static size_t n_entries(const char *dir)
{
    char **names = NULL;
    size_t n = 0;
    assert_int_equal(file_list(dir, &names, &n, NULL), PF_OK);
    file_list_free(names, n);
    return n;
}

static void failed_writes_leave_the_old_file_and_no_litter(void **state)
{
    const char *path = test_path(state, "a");
    put(path, "old", 3);
    pf_error err = {0};
    for (unsigned i = 1; i <= 3;
         i++) { /* write, sync, rename; a failed directory sync comes after the name */
        char spec[32];
        (void)snprintf(spec, sizeof spec, "eio@%u", i);
        assert_true(file_fault_set(spec));
        assert_int_equal(file_write_atomic(path, "newer", 5, &err), PF_E_IO);
        assert_int_equal(err.sys_errno, EIO);
        assert_content(path, "old", 3);
        assert_int_equal(n_entries(*state), 1);
    }
    assert_true(file_fault_set("eio@4"));
    assert_int_equal(file_write_atomic(path, "newer", 5, &err), PF_E_IO);
    assert_content(path, "newer", 5);
    assert_true(file_fault_set("enospc@1"));
    assert_int_equal(file_write_atomic(path, "x", 1, &err), PF_E_NOSPACE);
    assert_true(file_fault_set(NULL));
}

/* The environment is read at the first write of a process, so this is the program run again. */
static int status_with_environment(const char *spec, const char *path)
{
    const pid_t pid = fork();
    if (!pid) {
        (void)setenv("PF_FAULT", spec, 1);
        (void)execl("/proc/self/exe", "test_base_file", "write", path, (char *)NULL);
        _exit(99);
    }
    int status = -1;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

static void the_environment_sets_a_fault(void **state)
{
    const char *path = test_path(state, "a");
    assert_int_equal(status_with_environment("kill@3", path), SIGKILL);
    assert_int_equal(file_kind(path), FILE_ABSENT);
    assert_int_equal(status_with_environment("enospc@1", path), -PF_E_NOSPACE << 8);
    assert_int_equal(file_kind(path), FILE_ABSENT);
    assert_int_equal(status_with_environment("nonsense", path), 0); /* said in the log */
    assert_int_equal(file_kind(path), FILE_REGULAR);
}

/* Runs fn in a child with a fault; returns the wait status. */
static int in_child(const char *spec, const char *path, const char *p, size_t n)
{
    const pid_t pid = fork();
    if (!pid) {
        if (!file_fault_set(spec))
            _exit(3);
        _exit(file_write_atomic(path, p, n, NULL) ? 2 : 0);
    }
    int status = -1;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

static void a_kill_at_any_point_leaves_old_or_new_whole(void **state)
{
    static char old[5000], new_[7001];
    const char *path = test_path(state, "a");
    memset(old, 'o', sizeof old);
    memset(new_, 'n', sizeof new_);
    static const char *const kinds[] = {"kill", "tear"};
    for (size_t k = 0; k < PF_COUNTOF(kinds); k++) {
        unsigned n_killed = 0;
        for (unsigned i = 1; i < 20; i++) {
            char spec[32];
            (void)snprintf(spec, sizeof spec, "%s@%u", kinds[k], i);
            put(path, old, sizeof old);
            const int status = in_child(spec, path, new_, sizeof new_);
            char *got = NULL;
            size_t n = 0;
            assert_int_equal(file_read_all(path, 1u << 20, &got, &n, NULL), PF_OK);
            const bool is_old = n == sizeof old && !memcmp(got, old, n);
            const bool is_new = n == sizeof new_ && !memcmp(got, new_, n);
            mem_free(got);
            assert_true(is_old || is_new);
            if (WIFEXITED(status)) {
                assert_int_equal(WEXITSTATUS(status), 0);
                assert_true(is_new);
                break;
            }
            assert_int_equal(WTERMSIG(status), SIGKILL);
            n_killed++;
        }
        assert_true(n_killed >= 3);
    }
}

/* -------------------------------------------------------------------------------------- new files and locks */

static void an_aborted_new_file_disappears(void **state)
{
    const char *path = test_path(state, "a");
    struct file_new f;
    assert_int_equal(file_new_open(&f, path, NULL), PF_OK);
    assert_int_equal(file_kind(path), FILE_ABSENT);
    assert_int_equal(n_entries(*state), 1);
    file_new_abort(&f);
    file_new_abort(&f);
    assert_int_equal(n_entries(*state), 0);
    path = test_path(state, "no/such/dir");
    pf_error err = {0};
    assert_int_equal(file_new_open(&f, path, &err), PF_E_NOTFOUND);
    assert_non_null(strstr(err.msg, "cannot create '"));
    assert_non_null(strstr(err.msg, "no/such/dir': No such file or directory"));
    assert_null(strstr(err.msg, ".tmp"));
}

static void a_new_file_never_takes_the_place_of_a_pipe_or_a_device(void **state)
{
    const char *pipe_path = test_path(state, "pipe"), *link = test_path(state, "null");
    struct file_new f;
    pf_error err = {0};
    assert_int_equal(mkfifo(pipe_path, 0600), 0);
    assert_int_equal(symlink("/dev/null", link), 0);
    assert_int_equal(file_new_open(&f, pipe_path, &err), PF_E_INVALID);
    assert_non_null(strstr(err.msg, "pipe' is neither a file nor a directory"));
    assert_int_equal(file_write_atomic(link, "x", 1, &err), PF_E_INVALID);
    assert_int_equal(file_kind(pipe_path), FILE_OTHER);
    assert_int_equal(file_kind(link), FILE_OTHER);
    assert_int_equal(n_entries(*state), 2);
}

static void locks_exclude_and_share(void **state)
{
    const char *path = test_path(state, "lock");
    struct file_lock a, b;
    pf_error err = {0};
    assert_int_equal(file_lock_try(&a, path, &err), PF_OK);
    assert_int_equal(file_lock_try(&b, path, &err), PF_E_BUSY);
    assert_non_null(strstr(err.msg, "locked by another process"));
    assert_int_equal(file_lock_shared_try(&b, path, &err), PF_E_BUSY);
    file_lock_release(&a);
    file_lock_release(&a);
    assert_int_equal(file_lock_shared_try(&a, path, &err), PF_OK);
    assert_int_equal(file_lock_shared_try(&b, path, &err), PF_OK);
    file_lock_release(&a);
    file_lock_release(&b);
    assert_int_equal(file_lock_try(&a, *state, &err), PF_OK); /* a directory can be locked too */
    file_lock_release(&a);
}

/* -------------------------------------------------------------------------------------------------- trees */

static void assert_path(char *got, const char *want)
{
    assert_non_null(got);
    assert_string_equal(got, want);
    mem_free(got);
}

static void joins_and_splits_paths(void **state)
{
    (void)state;
    assert_path(path_join("a", "b"), "a/b");
    assert_path(path_join("a/", "b"), "a/b");
    assert_path(path_join("", "b"), "b");
    assert_path(path_dir("a/b"), "a");
    assert_path(path_dir("a/b/"), "a");
    assert_path(path_dir("b"), ".");
    assert_path(path_dir("/b"), "/");
    assert_path(path_dir("/"), "/");
    assert_path(path_dir("a//b"), "a");
    assert_true(str_eqz(path_base("a/b"), "b"));
    assert_true(str_eqz(path_base("a/b//"), "b"));
    assert_true(str_eqz(path_base("/"), "/"));
    assert_true(str_eqz(path_base("b"), "b"));
}

static void makes_lists_and_removes_trees_without_following_links(void **state)
{
    const char *deep = test_path(state, "t/x/y"), *top = test_path(state, "t");
    const char *kept = test_path(state, "kept"), *link = test_path(state, "t/x/link");
    pf_error err = {0};
    assert_int_equal(file_mkdirs(deep, &err), PF_OK);
    assert_int_equal(file_mkdirs(deep, &err), PF_OK);
    assert_int_equal(file_kind(deep), FILE_DIRECTORY);
    assert_int_equal(file_mkdirs(kept, &err), PF_OK);
    char *inside = path_join(kept, "f");
    put(inside, "f", 1);
    assert_int_equal(symlink(kept, link), 0);
    assert_true(file_same(link, kept));
    assert_false(file_same(top, kept));
    char **names = NULL;
    size_t n = 0;
    const char *dir = test_path(state, "t/x");
    assert_int_equal(file_list(dir, &names, &n, &err), PF_OK);
    assert_int_equal(n, 2);
    assert_string_equal(names[0], "link");
    assert_string_equal(names[1], "y");
    file_list_free(names, n);
    assert_int_equal(file_remove_tree(top, &err), PF_OK);
    assert_int_equal(file_kind(top), FILE_ABSENT);
    assert_content(inside, "f", 1);
    assert_int_equal(file_remove_tree(top, &err), PF_OK);
    assert_int_equal(file_mkdirs(inside, &err), PF_E_EXISTS);
    assert_int_equal(file_list(top, &names, &n, &err), PF_E_NOTFOUND);
    const char *dots = test_path(state, "kept/../kept/f");
    char *real = NULL;
    assert_int_equal(file_realpath(dots, &real, &err), PF_OK);
    assert_true(str_ends(str_of(real), "/kept/f"));
    assert_null(strstr(real, ".."));
    mem_free(real);
    mem_free(inside);
}

int main(int argc, char **argv)
{
    if (argc == 3) /* see status_with_environment */
        return -file_write_atomic(argv[2], "x", 1, NULL);
    const struct CMUnitTest tests[] = {
        in_dir(maps_a_file_and_reads_its_bytes),
        in_dir(maps_an_empty_file_without_a_mapping),
        in_dir(refuses_to_map_what_is_no_regular_file),
        in_dir(sees_that_a_mapped_file_changed_or_shrank),
        in_dir(replacing_the_name_leaves_the_mapping_alone),
        in_dir(read_all_keeps_to_its_bound),
        in_dir(pread_says_where_a_file_ends),
        in_dir(copies_a_range_exactly_and_counts_it),
        in_dir(copies_through_a_buffer_where_the_kernel_will_not),
        in_dir(reserves_space_or_says_that_there_is_none),
        in_dir(understands_fault_specs),
        in_dir(the_environment_sets_a_fault),
        in_dir(a_short_write_is_continued),
        in_dir(failed_writes_leave_the_old_file_and_no_litter),
        in_dir(a_kill_at_any_point_leaves_old_or_new_whole),
        in_dir(an_aborted_new_file_disappears),
        in_dir(a_new_file_never_takes_the_place_of_a_pipe_or_a_device),
        in_dir(locks_exclude_and_share),
        in_dir(joins_and_splits_paths),
        in_dir(makes_lists_and_removes_trees_without_following_links),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
