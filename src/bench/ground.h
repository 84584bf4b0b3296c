/*
 * The ground that measurements stand on: a place for their files, adapters to switch between, weights that are out of the page cache when a
 * run starts, and the bounds that results are compared with. Used by bench/ and its tests.
 */
#ifndef PF_BENCH_GROUND_H
#define PF_BENCH_GROUND_H

#include "pageflip.h"

/* A new directory in `dir` (NULL: TMPDIR, else /var/tmp, which is a disk where /tmp is memory). Owned by caller; ground_rmdir removes it
 * with what is in it and frees the path. */
int ground_mkdir(const char *dir, char **out_path, pf_error *err);
void ground_rmdir(char *path);

/* Two adapters of noise for synthetic weights of h3's shape and that scale, written to paths[0] and [1]: what a run switches between. */
int ground_make_adapters(double scale, uint32_t rank, unsigned n_threads, char *const paths[2],
                         pf_error *err);

/* The files behind a checkpoint, without opening it again. Owned by caller: ground_files_free. */
struct ground_files {
    char **paths;
    size_t n;
    uint64_t n_bytes; /* of tensor data */
};
int ground_files(const char *model, struct ground_files *out, pf_error *err);
void ground_files_free(struct ground_files *f);

/* Writes back and drops a file that nobody has mapped from the page cache, and looks whether it went: PF_E_BUSY when more than a
 * hundredth of it stayed. */
int ground_drop(const char *path, pf_error *err);
int ground_drop_files(const struct ground_files *f, pf_error *err);
/* Every regular file below a directory. */
int ground_drop_tree(const char *dir, pf_error *err);

/* Bounds. Decimal GB. */
struct ground_bounds {
    double memcpy_gb_s;     /* read plus written, all threads */
    double peak_gflop_s;    /* fused multiply-adds of the merge kernel's width, all threads */
    double disk_read_gb_s;  /* the model's first file, cold, four threads */
    double disk_write_gb_s; /* a new file, to fdatasync */
};
/* path: a file to read, which nobody has mapped; dir: where a file of at most 1 GiB can be written. NULL, or a
 * file that cannot be dropped: that bound stays 0. */
int ground_measure(const char *path, const char *dir, unsigned n_threads, struct ground_bounds *out,
                   pf_error *err);

#endif
