/*
 * Temporary directories, adapters, cold files, bounds. Bounds are medians of three: they are yardsticks, not results.
 */
#include "bench/ground.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/pool.h"
#include "base/proc.h"
#include "bench/make.h"
#include "bench/stats.h"
#include "checkpoint/checkpoint.h"
#include "merge/kernel.h"
#include "merge/merge.h"

enum { BLOCK_BYTES = 4 << 20, N_READERS = 4, N_REPS = 3, COPY_BYTES = 64 << 20 };
#define DISK_BYTES_MAX ((uint64_t)1 << 30)

int ground_mkdir(const char *dir, char **out_path, pf_error *err)
{
    const char *env = getenv("TMPDIR"), *tmp = dir ? dir : env && *env ? env : "/var/tmp";
    struct strbuf b;
    strbuf_init(&b);
    strbuf_addf(&b, "%s/pageflip-bench-XXXXXX", tmp);
    char *path = strbuf_take(&b);
    if (!path)
        return err_nomem(err, 0, "a path");
    if (!mkdtemp(path)) {
        const int rc = err_sys(err, errno, "cannot make directory '%s'", path);
        mem_free(path);
        return rc;
    }
    *out_path = path;
    return PF_OK;
}

void ground_rmdir(char *path)
{
    if (path)
        (void)file_remove_tree(path, NULL); /* the measurement is over, whatever became of it */
    mem_free(path);
}

int ground_make_adapters(double scale, uint32_t rank, unsigned n_threads, char *const paths[2],
                         pf_error *err)
{
    int rc = PF_OK;
    for (unsigned i = 0; rc == PF_OK && i < 2; i++) {
        const struct bench_make_opts o = {.size = sizeof o,
                                          .shape = "h3",
                                          .scale = scale,
                                          .rank = rank,
                                          .dialect = "native",
                                          .dtype = "BF16",
                                          .seed = i + 1,
                                          .out = paths[i],
                                          .n_threads = n_threads};
        rc = bench_make(&o, err);
    }
    return rc;
}

int ground_files(const char *model, struct ground_files *out, pf_error *err)
{
    struct pf_checkpoint *ckpt = NULL;
    int rc = pf_checkpoint_open(model, NULL, &ckpt, err);
    if (rc)
        return rc;
    *out = (struct ground_files){.n_bytes = ckpt->n_bytes};
    out->paths = mem_calloc(ckpt->n_files, sizeof *out->paths);
    if (!out->paths)
        rc = err_nomem(err, 0, "a list of files");
    for (uint32_t i = 0, i_file = UINT32_MAX; rc == PF_OK && i < ckpt->n_tensors; i++) {
        struct pf_tensor_info info;
        if (ckpt->tensors[i].i_file == i_file || out->n == ckpt->n_files)
            continue;
        i_file = ckpt->tensors[i].i_file;
        pf_checkpoint_tensor(ckpt, i, &info);
        bool is_known = false;
        for (size_t k = 0; k < out->n; k++)
            is_known = is_known || strcmp(out->paths[k], info.file) == 0;
        if (is_known)
            continue;
        out->paths[out->n] = mem_strdup(info.file);
        if (!out->paths[out->n++])
            rc = err_nomem(err, 0, "a path");
    }
    pf_checkpoint_close(ckpt);
    if (rc)
        ground_files_free(out);
    return rc;
}

void ground_files_free(struct ground_files *f)
{
    for (size_t i = 0; i < f->n; i++)
        mem_free(f->paths[i]);
    mem_free(f->paths);
    *f = (struct ground_files){.n = 0};
}

/* ------------------------------------------------------------------------------------- cold files */

/* Bytes of an open file that are in the page cache. */
static int cached_bytes(int fd, uint64_t n_bytes, const char *path, uint64_t *out, pf_error *err)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t n_pages = ((size_t)n_bytes + page - 1) / page;
    *out = 0;
    if (n_pages == 0)
        return PF_OK;
    unsigned char *in_core = mem_alloc(n_pages);
    void *p = mmap(NULL, (size_t)n_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    int rc = PF_OK;
    if (!in_core)
        rc = err_nomem(err, n_pages, "a map of pages");
    else if (p == MAP_FAILED || mincore(p, (size_t)n_bytes, in_core))
        rc = err_sys(err, errno, "'%s': cannot see what the page cache holds", path);
    for (size_t i = 0; rc == PF_OK && i < n_pages; i++)
        *out += (in_core[i] & 1) * page;
    if (p != MAP_FAILED)
        (void)munmap(p, (size_t)n_bytes);
    mem_free(in_core);
    return rc;
}

int ground_drop(const char *path, pf_error *err)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_sys(err, errno, "cannot open '%s'", path);
    const off_t n = lseek(fd, 0, SEEK_END);
    uint64_t n_cached = 0;
    (void)fdatasync(fd); /* dirty pages are not dropped; read-only media have none */
    const int sys_errno = posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    int rc = n < 0 || sys_errno
                 ? err_sys(err, sys_errno, "cannot drop '%s' from the page cache", path)
                 : cached_bytes(fd, (uint64_t)n, path, &n_cached, err);
    if (rc == PF_OK && n_cached > (uint64_t)n / 100 + BLOCK_BYTES)
        rc = err_set(
            err, PF_E_BUSY,
            "'%s': %llu of %llu bytes stay in the page cache: some process has them mapped, or "
            "the file lies in memory",
            path, (unsigned long long)n_cached, (unsigned long long)n);
    (void)close(fd);
    return rc;
}

int ground_drop_files(const struct ground_files *f, pf_error *err)
{
    int rc = PF_OK;
    for (size_t i = 0; rc == PF_OK && i < f->n; i++)
        rc = ground_drop(f->paths[i], err);
    return rc;
}

int ground_drop_tree(const char *dir, pf_error *err)
{
    char **names = NULL;
    size_t n = 0;
    int rc = file_list(dir, &names, &n, err);
    for (size_t i = 0; rc == PF_OK && i < n; i++) {
        char *path = path_join(dir, names[i]);
        const enum file_kind kind = path ? file_kind(path) : FILE_ABSENT;
        if (kind == FILE_DIRECTORY)
            rc = ground_drop_tree(path, err);
        else if (kind == FILE_REGULAR)
            rc = ground_drop(path, err);
        mem_free(path);
    }
    file_list_free(names, n);
    return rc;
}

/* ------------------------------------------------------------------------------------------ bounds */

struct yard {
    uint8_t *from, *to;
    int fd;
    uint64_t n_bytes;
    int64_t n_rounds;
    const char *path;
    _Atomic int n_failed;
    _Atomic float sink; /* keeps the arithmetic alive */
};

static void copy_task(void *ctx, size_t i_task, unsigned i_worker)
{
    struct yard *y = ctx;
    (void)i_worker;
    memcpy(y->to + i_task * BLOCK_BYTES, y->from + i_task * BLOCK_BYTES, BLOCK_BYTES);
}

static void peak_task(void *ctx, size_t i_task, unsigned i_worker)
{
    struct yard *y = ctx;
    (void)i_task;
    (void)i_worker;
    y->sink = kernel_selected()->peak(y->n_rounds);
}

static void read_task(void *ctx, size_t i_task, unsigned i_worker)
{
    struct yard *y = ctx;
    const uint64_t at = (uint64_t)i_task * BLOCK_BYTES;
    const uint64_t n = y->n_bytes - at < BLOCK_BYTES ? y->n_bytes - at : BLOCK_BYTES;
    if (file_pread(y->fd, y->to + (size_t)i_worker * BLOCK_BYTES, (size_t)n, at, y->path, NULL))
        y->n_failed++;
}

static double timed_run(struct pool *pool, size_t n_tasks, pool_fn fn, struct yard *y)
{
    const uint64_t t0 = clock_ns();
    pool_run(pool, n_tasks, fn, y);
    return (double)(clock_ns() - t0) * 1e-9;
}

static void measure_cpu(struct pool *pool, struct yard *y, struct ground_bounds *out)
{
    double copy[N_REPS], peak[N_REPS];
    const struct kernel *k = kernel_selected();
    const unsigned n_workers = pool_n_workers(pool);
    y->n_rounds = 1000;
    while (timed_run(pool, n_workers, peak_task, y) < 5e-3)
        y->n_rounds *= 2;
    for (int i = 0; i < N_REPS; i++) {
        copy[i] = timed_run(pool, COPY_BYTES / BLOCK_BYTES, copy_task, y);
        peak[i] = timed_run(pool, n_workers, peak_task, y);
    }
    out->memcpy_gb_s = 2e-9 * COPY_BYTES / bench_median(copy, N_REPS);
    out->peak_gflop_s = 2e-9 * (double)y->n_rounds * (double)(k->mr * k->nr) * n_workers /
                        bench_median(peak, N_REPS);
}

static int measure_read(struct yard *y, const char *path, struct ground_bounds *out, pf_error *err)
{
    double seconds[N_REPS];
    struct pool *pool = NULL;
    int rc = pool_new(N_READERS, &pool, err);
    if (rc)
        return rc;
    y->path = path;
    y->fd = open(path, O_RDONLY | O_CLOEXEC);
    const off_t n = y->fd < 0 ? -1 : lseek(y->fd, 0, SEEK_END);
    if (n < 0)
        rc = err_sys(err, errno, "cannot open '%s'", path);
    y->n_bytes = (uint64_t)n < DISK_BYTES_MAX ? (uint64_t)n : DISK_BYTES_MAX;
    for (int i = 0; rc == PF_OK && i < N_REPS; i++) {
        rc = ground_drop(path, err);
        seconds[i] =
            timed_run(pool, (size_t)((y->n_bytes + BLOCK_BYTES - 1) / BLOCK_BYTES), read_task, y);
    }
    if (rc == PF_OK && y->n_failed > 0)
        rc = err_set(err, PF_E_IO, "'%s' cannot be read", path);
    if (rc == PF_OK)
        out->disk_read_gb_s = 1e-9 * (double)y->n_bytes / bench_median(seconds, N_REPS);
    if (y->fd >= 0)
        (void)close(y->fd);
    pool_free(pool);
    return rc;
}

static int measure_write(struct yard *y, const char *dir, struct ground_bounds *out, pf_error *err)
{
    char *path = path_join(dir, "bound.bin");
    const uint64_t n_free = file_free_bytes(dir);
    const uint64_t n = n_free / 4 < DISK_BYTES_MAX ? n_free / 4 : DISK_BYTES_MAX;
    struct file_new f = {.fd = -1};
    int rc = path ? file_new_open(&f, path, err) : err_nomem(err, 0, "a path");
    const uint64_t t0 = clock_ns();
    uint64_t at = 0;
    for (; rc == PF_OK && at + BLOCK_BYTES <= n; at += BLOCK_BYTES) {
        rc = file_pwrite(f.fd, y->from + at % COPY_BYTES, BLOCK_BYTES, at, path, err);
        /* Written back as it goes, as a careful writer does: not a burst into the cache and then a wait. */
        (void)sync_file_range(f.fd, (off_t)at, BLOCK_BYTES, SYNC_FILE_RANGE_WRITE);
    }
    if (rc == PF_OK)
        rc = file_sync(f.fd, path, err);
    if (rc == PF_OK && at > 0)
        out->disk_write_gb_s = 1e-9 * (double)at / ((double)(clock_ns() - t0) * 1e-9);
    file_new_abort(&f);
    mem_free(path);
    return rc;
}

int ground_measure(const char *path, const char *dir, unsigned n_threads, struct ground_bounds *out,
                   pf_error *err)
{
    struct yard y = {.fd = -1};
    struct pool *pool = NULL;
    const char *kernel;
    *out = (struct ground_bounds){.memcpy_gb_s = 0};
    y.from = mem_aligned(4096, COPY_BYTES);
    y.to = mem_aligned(4096, COPY_BYTES);
    int rc = y.from && y.to ? merge_kernel_init(&kernel, err)
                            : err_nomem(err, COPY_BYTES, "benchmark operands");
    if (rc == PF_OK)
        rc = pool_new(n_threads, &pool, err);
    if (rc == PF_OK) {
        memset(y.from, 1, COPY_BYTES);
        memset(y.to, 1, COPY_BYTES);
        measure_cpu(pool, &y, out);
    }
    if (rc == PF_OK && path)
        rc = measure_read(&y, path, out, err);
    if (rc == PF_E_BUSY)
        rc = PF_OK; /* it cannot be read cold: no bound */
    if (rc == PF_OK && dir)
        rc = measure_write(&y, dir, out, err);
    pool_free(pool);
    mem_free(y.from);
    mem_free(y.to);
    return rc;
}
