/*
 * A safetensors file: the mapping, and the header that was read from it. Called by checkpoint, adapter and whoever looks at
 * factors or overlays. Copies no data; a mapping that shrinks while the header is read is an error here, and the business of
 * base/guard.h afterwards.
 */
#include "base/guard.h"
#include "safetensors/st_int.h"

struct st_file {
    struct file_map map;
    struct st_header *header;
    char *path;
    uint64_t header_bytes;
};

int st_open_mapped(const struct file_map *map, const char *path, struct st_file **out_file,
                   pf_error *err)
{
    struct st_file *f = mem_calloc(1, sizeof(*f));
    struct file_map owned = *map;
    int rc, i;

    if (f == NULL) {
        file_map_close(&owned);
        return err_nomem(err, sizeof(*f), path);
    }
    f->map = owned;
    f->path = mem_strdup(path);
    if (f->path == NULL) {
        rc = err_nomem(err, sizeof(*f), path);
        goto fail;
    }
    rc =
        st_header_parse(f->map.p, (size_t)f->map.n_bytes, f->map.n_bytes, f->path, &f->header, err);
    /* Whatever was found in a page that is no longer there was found in zeros. */
    if (guard_tripped(f->map.i_guard)) {
        rc = err_set(err, PF_E_TRUNCATED, "'%s': the file shrank while its header was read", path);
        goto fail;
    }
    if (rc != PF_OK) {
        /* A better reason than the parser's, if there is one. */
        int rc_map = file_map_check(&f->map, path, NULL);
        if (rc_map != PF_OK)
            rc = file_map_check(&f->map, path, err);
        goto fail;
    }
    for (i = (int)ST_PREFIX_BYTES - 1; i >= 0; i--)
        f->header_bytes = f->header_bytes << 8 | f->map.p[i];
    f->header_bytes += ST_PREFIX_BYTES;
    *out_file = f;
    return PF_OK;
fail:
    st_close(f);
    return rc;
}

int st_open(const char *path, struct st_file **out_file, pf_error *err)
{
    struct file_map map;
    int rc = file_map_open(&map, path, err);

    return rc == PF_OK ? st_open_mapped(&map, path, out_file, err) : rc;
}

void st_close(struct st_file *f)
{
    if (f == NULL)
        return;
    st_header_free(f->header);
    file_map_close(&f->map);
    mem_free(f->path);
    mem_free(f);
}

const char *st_path(const struct st_file *f)
{
    return f->path;
}

const struct file_map *st_map(const struct st_file *f)
{
    return &f->map;
}

uint64_t st_header_bytes(const struct st_file *f)
{
    return f->header_bytes;
}

size_t st_n_tensors(const struct st_file *f)
{
    return st_header_n_tensors(f->header);
}

const struct st_tensor *st_tensor(const struct st_file *f, size_t i)
{
    return st_header_tensor(f->header, i);
}

const struct st_tensor *st_find(const struct st_file *f, struct str name)
{
    return st_header_find(f->header, name);
}

const void *st_data(const struct st_file *f, const struct st_tensor *t)
{
    return f->map.p + t->off_bytes;
}

size_t st_n_meta(const struct st_file *f)
{
    return st_header_n_meta(f->header);
}

const struct st_meta *st_meta(const struct st_file *f, size_t i)
{
    return st_header_meta(f->header, i);
}

bool st_meta_find(const struct st_file *f, const char *key, struct str *out_value)
{
    size_t i;

    for (i = 0; i < st_n_meta(f); i++) {
        const struct st_meta *m = st_meta(f, i);
        if (str_eqz(m->key, key)) {
            *out_value = m->value;
            return true;
        }
    }
    return false;
}
