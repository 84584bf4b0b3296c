/*
 * Pictures to PNG files: the only file that includes png.h. The bytes depend on the pixels (and the versions of libpng and zlib)
 * alone: no time, no text. Files appear whole or not at all. libpng's simplified interface reports errors without long jumps.
 */
#include "base/file.h"
#include "base/mem.h"

#include <png.h>
#include <string.h>

#define SIDE_MAX 65535u

static int check_size(uint32_t width, uint32_t height, const char *path, pf_error *err)
{
    if (width == 0 || height == 0 || width > SIDE_MAX || height > SIDE_MAX)
        return err_set(err, PF_E_RANGE, "'%s': a picture of %u x %u cannot be written", path, width,
                       height);
    return PF_OK;
}

int pf_png_write(const char *path, const uint8_t *rgb, uint32_t width, uint32_t height,
                 pf_error *err)
{
    if (path == NULL || rgb == NULL)
        return err_set(err, PF_E_INVALID, "a picture needs a path and pixels");
    int rc = check_size(width, height, path, err);
    if (rc != PF_OK)
        return rc;
    size_t n_bytes = 0;
    rc = pf_png_encode(rgb, width, height, NULL, &n_bytes, err);
    uint8_t *png = rc == PF_OK ? mem_alloc(n_bytes) : NULL;
    if (rc == PF_OK && png == NULL)
        rc = err_nomem(err, n_bytes, "picture");
    if (rc == PF_OK)
        rc = pf_png_encode(rgb, width, height, png, &n_bytes, err);
    if (rc == PF_OK)
        rc = file_write_atomic(path, png, n_bytes, err);
    mem_free(png);
    return rc;
}

int pf_png_encode(const uint8_t *rgb, uint32_t width, uint32_t height, uint8_t *out,
                  size_t *io_n_bytes, pf_error *err)
{
    if (rgb == NULL || io_n_bytes == NULL)
        return err_set(err, PF_E_INVALID, "a picture needs pixels and room");
    int rc = check_size(width, height, "picture", err);
    if (rc != PF_OK)
        return rc;
    png_image image;
    memset(&image, 0, sizeof image);
    image.version = PNG_IMAGE_VERSION;
    image.width = width;
    image.height = height;
    image.format = PNG_FORMAT_RGB;
    if (out == NULL) {
        *io_n_bytes = PNG_IMAGE_PNG_SIZE_MAX(image);
        return PF_OK;
    }
    png_alloc_size_t n_bytes = *io_n_bytes;
    if (png_image_write_to_memory(&image, out, &n_bytes, 0, rgb, 0, NULL) == 0)
        rc = n_bytes > *io_n_bytes
                 ? err_set(err, PF_E_INVALID,
                           "picture of %u x %u takes %zu bytes, there is room for %zu", width,
                           height, (size_t)n_bytes, *io_n_bytes)
                 : err_set(err, PF_E_IO, "picture: libpng: %s", image.message);
    else
        *io_n_bytes = n_bytes;
    png_image_free(&image);
    return rc;
}

/* Copies one row of one picture into a row of the sheet, each pixel `zoom` times. */
static void enlarge_row(uint8_t *to, const uint8_t *from, uint32_t width, uint32_t zoom)
{
    for (uint32_t x = 0; x < width; x++, from += 3)
        for (uint32_t z = 0; z < zoom; z++, to += 3)
            memcpy(to, from, 3);
}

int pf_sheet_write(const char *path, const uint8_t *rgb, uint32_t n, uint32_t width,
                   uint32_t height, uint32_t n_cols, uint32_t zoom, pf_error *err)
{
    if (path == NULL || rgb == NULL || n == 0 || n_cols == 0 || zoom == 0)
        return err_set(err, PF_E_INVALID,
                       "a sheet needs a path, at least one picture, one column and a zoom of 1");
    if (n_cols > n)
        n_cols = n;
    int rc = check_size(width, height, path, err);
    if (rc != PF_OK)
        return rc;
    uint64_t n_rows = ((uint64_t)n + n_cols - 1) / n_cols;
    uint64_t wide = (uint64_t)width * n_cols, high = (uint64_t)height * n_rows;
    if (zoom > SIDE_MAX || wide * zoom > SIDE_MAX || high * zoom > SIDE_MAX)
        return err_set(err, PF_E_RANGE,
                       "'%s': a sheet of %u pictures of %u x %u in %u columns, enlarged %u times, "
                       "is larger than %u on a side",
                       path, n, width, height, n_cols, zoom, SIDE_MAX);
    size_t row_bytes = (size_t)(wide * zoom) * 3;
    size_t n_bytes = row_bytes * (size_t)(high * zoom); /* < 2^34: no overflow */
    uint8_t *sheet = mem_calloc(n_bytes, 1);            /* cells past the last picture stay black */
    if (sheet == NULL)
        return err_nomem(err, n_bytes, "sheet");
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t y = 0; y < height; y++) {
            const uint8_t *from = rgb + ((size_t)i * height + y) * width * 3;
            size_t top = ((size_t)(i / n_cols) * height + y) * zoom;
            uint8_t *to = sheet + top * row_bytes + (size_t)(i % n_cols) * width * zoom * 3;
            enlarge_row(to, from, width, zoom);
            for (uint32_t z = 1; z < zoom; z++)
                memcpy(to + z * row_bytes, to, (size_t)width * zoom * 3);
        }
    rc = pf_png_write(path, sheet, (uint32_t)(wide * zoom), (uint32_t)(high * zoom), err);
    mem_free(sheet);
    return rc;
}
