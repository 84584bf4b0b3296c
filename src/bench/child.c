/*
 * Forking a measurement. The child writes one JSON document, its result or {"child_code", "child_error"}, into a pipe and ends without
 * running anything of its parent's; it dies with its parent.
 */
#include "bench/child.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PIPE_STEP = 4096 };

static void write_all(int fd, const char *p, size_t n)
{
    while (n > 0) {
        const ssize_t did = write(fd, p, n);
        if (did < 0 && errno == EINTR)
            continue;
        if (did <= 0)
            return; /* the parent is gone: there is nobody to tell */
        p += did;
        n -= (size_t)did;
    }
}

static void answer(int fd, child_fn fn, void *ctx, const struct cgroup *g)
{
    struct json *doc = NULL;
    pf_error err = {0};
    struct strbuf text;
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)signal(SIGINT, SIG_DFL); /* its parent tidies up */
    (void)signal(SIGTERM, SIG_DFL);
    int rc = g ? cgroup_enter(g, &err) : PF_OK;
    if (rc == PF_OK)
        rc = fn(ctx, &doc, &err);
    if (rc) {
        doc = json_new_object();
        json_set_int(doc, "child_code", rc);
        json_set_z(doc, "child_error", err.msg);
    }
    strbuf_init(&text);
    if (json_write(doc, 0, &text, NULL) == PF_OK)
        write_all(fd, text.p, text.n);
    strbuf_release(&text);
    json_free(doc);
}

static void read_answer(int fd, struct strbuf *text)
{
    char piece[PIPE_STEP];
    for (;;) {
        const ssize_t n = read(fd, piece, sizeof piece);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return;
        strbuf_add(text, piece, (size_t)n);
    }
}

static int parse_answer(const struct strbuf *text, int status, const struct cgroup *g,
                        struct json **out, pf_error *err)
{
    struct json *doc = NULL;
    if (WIFSIGNALED(status))
        return err_set(err, g ? PF_E_NOMEM : PF_E_IO,
                       "the measured process was killed by signal %d%s", WTERMSIG(status),
                       g ? ": it needed more memory than its control group has" : "");
    int rc = json_parse(strbuf_z(text), text->n, "the answer of the measured process", &doc, err);
    if (rc)
        return rc;
    const struct json *code = json_get(doc, "child_code");
    if (!code) {
        *out = doc;
        return PF_OK;
    }
    rc = err_set(err, (int)json_int(code), "%s", json_z(json_get(doc, "child_error")));
    json_free(doc);
    return rc;
}

int child_run(child_fn fn, void *ctx, const struct cgroup *g, struct json **out, pf_error *err)
{
    int fds[2], status = 0;
    struct strbuf text;
    if (pipe2(fds, O_CLOEXEC))
        return err_sys(err, errno, "cannot make a pipe");
    const pid_t pid = fork();
    if (pid < 0) {
        const int sys_errno = errno;
        (void)close(fds[0]);
        (void)close(fds[1]);
        return err_sys(err, sys_errno, "cannot start a process");
    }
    if (pid == 0) {
        (void)close(fds[0]);
        answer(fds[1], fn, ctx, g);
        _exit(0);
    }
    (void)close(fds[1]);
    strbuf_init(&text);
    read_answer(fds[0], &text);
    (void)close(fds[0]);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    const int rc = strbuf_ok(&text) ? parse_answer(&text, status, g, out, err)
                                    : err_nomem(err, text.n, "an answer");
    strbuf_release(&text);
    return rc;
}
