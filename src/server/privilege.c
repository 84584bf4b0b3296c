/*
 * Users and groups. glibc makes the change in every thread of the process.
 */
#include "server/privilege.h"

#include <errno.h>
#include <grp.h>
#include <pwd.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/file.h"

struct ids {
    uid_t uid;
    gid_t gid;
};

static const char *name_of(const char *user)
{
    return user ? user : "nobody";
}

bool privilege_will_drop(const char *user)
{
    return geteuid() == 0 && strcmp(name_of(user), "root") != 0;
}

static int find_user(const char *user, struct ids *out, pf_error *err)
{
    struct passwd pw, *found = NULL;
    char text[4096];
    int rc = getpwnam_r(name_of(user), &pw, text, sizeof(text), &found);

    if (rc)
        return err_sys(err, rc, "user '%s'", name_of(user));
    if (!found)
        return err_set(err, PF_E_NOTFOUND, "there is no user '%s' to become; name one with --user",
                       name_of(user));
    *out = (struct ids){found->pw_uid, found->pw_gid};
    return PF_OK;
}

int privilege_give_file(const char *user, const char *path, pf_error *err)
{
    struct ids ids;
    int rc;

    if (!privilege_will_drop(user))
        return PF_OK;
    rc = find_user(user, &ids, err);
    if (!rc && lchown(path, ids.uid, ids.gid))
        rc = err_sys(err, errno, "cannot give '%s' to user '%s'", path, name_of(user));
    return rc;
}

int privilege_give_dir(const char *user, const char *dir, pf_error *err)
{
    int rc;

    if (!privilege_will_drop(user))
        return PF_OK;
    if (file_kind(dir) == FILE_DIRECTORY)
        return PF_OK; /* it was there before us: its owner decided */
    rc = file_mkdirs(dir, err);
    return rc ? rc : privilege_give_file(user, dir, err);
}

int privilege_drop(const char *user, bool *out_is_dropped, pf_error *err)
{
    struct ids ids;
    int rc;

    *out_is_dropped = false;
    if (!privilege_will_drop(user))
        return PF_OK;
    rc = find_user(user, &ids, err);
    if (rc)
        return rc;
    if (setgroups(0, NULL) || setresgid(ids.gid, ids.gid, ids.gid) ||
        setresuid(ids.uid, ids.uid, ids.uid))
        return err_sys(err, errno, "cannot become user '%s'", name_of(user));
    if (setuid(0) == 0)
        return err_set(err, PF_E_STATE, "root's rights could be taken back after dropping them");
    (void)prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); /* one lock more; old kernels do without */
    *out_is_dropped = true;
    return PF_OK;
}
