/*
 * Pictures and sheets: read back with libpng they are the pixels that were written, and the same pixels give the same bytes.
 */
#include "testing.h"

#include "base/file.h"
#include "base/mem.h"

#include <png.h>

static uint8_t *read_png(const char *path, uint32_t *out_width, uint32_t *out_height)
{
    png_image image;
    memset(&image, 0, sizeof image);
    image.version = PNG_IMAGE_VERSION;
    assert_int_not_equal(png_image_begin_read_from_file(&image, path), 0);
    image.format = PNG_FORMAT_RGB;
    uint8_t *rgb = malloc(PNG_IMAGE_SIZE(image));
    assert_non_null(rgb);
    assert_int_not_equal(png_image_finish_read(&image, NULL, rgb, 0, NULL), 0);
    *out_width = image.width;
    *out_height = image.height;
    return rgb;
}

static void fill(uint8_t *rgb, size_t n)
{
    struct rng r = {6};
    for (size_t i = 0; i < n; i++)
        rgb[i] = (uint8_t)rng_next(&r);
}

static void picture_comes_back(void **state)
{
    uint8_t rgb[7 * 5 * 3];
    uint32_t width = 0, height = 0;
    pf_error err = {0};
    const char *path = test_path(state, "x.png");
    fill(rgb, sizeof rgb);
    assert_ok(pf_png_write(path, rgb, 7, 5, &err), &err);
    uint8_t *back = read_png(path, &width, &height);
    assert_int_equal(width, 7);
    assert_int_equal(height, 5);
    assert_memory_equal(back, rgb, sizeof rgb);
    free(back);
}

static void same_pixels_give_the_same_bytes(void **state)
{
    uint8_t rgb[16 * 16 * 3];
    char *a = NULL, *b = NULL;
    size_t n_a = 0, n_b = 0;
    pf_error err = {0};
    fill(rgb, sizeof rgb);
    assert_ok(pf_png_write(test_path(state, "a.png"), rgb, 16, 16, &err), &err);
    assert_ok(pf_png_write(test_path(state, "b.png"), rgb, 16, 16, &err), &err);
    assert_ok(file_read_all(test_path(state, "a.png"), 1 << 20, &a, &n_a, &err), &err);
    assert_ok(file_read_all(test_path(state, "b.png"), 1 << 20, &b, &n_b, &err), &err);
    assert_int_equal(n_a, n_b);
    assert_memory_equal(a, b, n_a);
    static const char *const dated[] = {"tIME", "tEXt", "zTXt", "iTXt"};
    for (size_t i = 0; i < PF_COUNTOF(dated); i++)
        assert_null(memmem(a, n_a, dated[i], 4));
    mem_free(a);
    mem_free(b);
}

/* 5 pictures of 3 x 2 in 2 columns, enlarged 2 times: the last cell is black. */
static void sheet_lays_pictures_out(void **state)
{
    enum { n = 5, w = 3, h = 2, cols = 2, zoom = 2, sw = w * cols * zoom, sh = h * 3 * zoom };
    uint8_t rgb[n * w * h * 3];
    uint32_t width = 0, height = 0;
    pf_error err = {0};
    const char *path = test_path(state, "sheet.png");
    fill(rgb, sizeof rgb);
    assert_ok(pf_sheet_write(path, rgb, n, w, h, cols, zoom, &err), &err);
    uint8_t *back = read_png(path, &width, &height);
    assert_int_equal(width, sw);
    assert_int_equal(height, sh);
    for (int y = 0; y < sh; y++)
        for (int x = 0; x < sw; x++) {
            int i = y / (h * zoom) * cols + x / (w * zoom);
            int py = y % (h * zoom) / zoom, px = x % (w * zoom) / zoom;
            static const uint8_t black[3] = {0, 0, 0};
            const uint8_t *want = i < n ? rgb + ((i * h + py) * w + px) * 3 : black;
            assert_memory_equal(back + (y * sw + x) * 3, want, 3);
        }
    free(back);
    assert_ok(pf_sheet_write(path, rgb, 1, w, h, 8, 1, &err), &err); /* no empty columns */
    free(read_png(path, &width, &height));
    assert_int_equal(width, w);
}

static void refuses_what_cannot_be_written(void **state)
{
    uint8_t rgb[12] = {0};
    pf_error err = {0};
    const char *path = test_path(state, "no/such/dir/x.png");
    assert_int_equal(pf_png_write(path, rgb, 2, 2, &err), PF_E_NOTFOUND);
    assert_err(&err, PF_E_NOTFOUND, "x.png");
    path = test_path(state, "x.png");
    assert_int_equal(pf_png_write(path, rgb, 0, 2, &err), PF_E_RANGE);
    assert_err(&err, PF_E_RANGE, "0 x 2");
    assert_int_equal(pf_sheet_write(path, rgb, 1, 2, 2, 1, 70000, &err), PF_E_RANGE);
    assert_err(&err, PF_E_RANGE, "enlarged 70000 times");
    assert_int_equal(pf_sheet_write(path, rgb, 0, 2, 2, 1, 1, &err), PF_E_INVALID);
    assert_int_equal(pf_sheet_write(path, rgb, 1, 2, 2, 1, 0, &err), PF_E_INVALID);
    assert_int_equal(pf_png_write(NULL, rgb, 2, 2, &err), PF_E_INVALID);
    assert_int_equal(file_kind(path), FILE_ABSENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_dir(picture_comes_back),
        in_dir(same_pixels_give_the_same_bytes),
        in_dir(sheet_lays_pictures_out),
        in_dir(refuses_what_cannot_be_written),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
