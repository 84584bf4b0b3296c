/*
 * Tables of out.h: cells are collected, widths follow from them, then all is printed at once. Widths count code points, which is
 * right for the names that occur; nothing here knows what the cells mean.
 */
#include "cli/out.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"

#define N_GAP       2
#define N_FIRST_MIN 12

void table_init(struct table *t, size_t n_cols, unsigned right)
{
    *t = (struct table){.n_cols = n_cols, .right = right};
}

void table_cell(struct table *t, const char *fmt, ...)
{
    char text[1024];
    struct strbuf clean;
    va_list args;

    if (t->is_failed)
        return;
    va_start(args, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    strbuf_init(&clean);
    out_clean(&clean, str_of(text));
    if (!mem_grow((void **)&t->cells, &t->cap, t->n_cells, sizeof(*t->cells)) ||
        !(t->cells[t->n_cells] = mem_strdup(strbuf_z(&clean))))
        t->is_failed = true;
    else
        t->n_cells++;
    strbuf_release(&clean);
}

static size_t n_points(const char *z)
{
    size_t n = 0;

    for (; *z; z++)
        n += ((unsigned char)*z & 0xc0) != 0x80;
    return n;
}

/* Prints z in `width` columns, with "..." in its middle when it is longer: both ends of a tensor name matter. */
static void print_cell(const char *z, size_t width, bool is_right, bool is_last)
{
    size_t n = n_points(z), n_bytes = strlen(z);

    if (n > width && n == n_bytes && width > 8) {
        size_t n_front = (width - 3) / 2, n_back = width - 3 - n_front;

        (void)printf("%.*s...%s", (int)n_front, z, z + n_bytes - n_back);
        n = width;
    } else if (is_right) {
        (void)printf("%*s%s", (int)(width > n ? width - n : 0), "", z);
        n = width;
    } else {
        (void)fputs(z, stdout);
    }
    if (!is_last)
        (void)printf("%*s", (int)(width > n ? width - n : 0) + N_GAP, "");
}

void table_print(const struct table *t, const char *indent)
{
    size_t widths[TABLE_COLS_MAX] = {0}, total = strlen(indent), n_rows = t->n_cells / t->n_cols;

    for (size_t i = 0; i < n_rows * t->n_cols; i++) {
        size_t n = n_points(t->cells[i]), i_col = i % t->n_cols;

        widths[i_col] = n > widths[i_col] ? n : widths[i_col];
    }
    for (size_t i = 0; i < t->n_cols; i++)
        total += widths[i] + (i ? N_GAP : 0);
    if (isatty(STDOUT_FILENO) && total > out_width(STDOUT_FILENO)) {
        size_t over = total - out_width(STDOUT_FILENO);

        widths[0] = widths[0] > over + N_FIRST_MIN ? widths[0] - over : N_FIRST_MIN;
    }
    for (size_t i = 0; i < n_rows * t->n_cols; i++) {
        size_t i_col = i % t->n_cols;
        bool is_last = i_col + 1 == t->n_cols;

        if (!i_col)
            (void)fputs(indent, stdout);
        print_cell(t->cells[i], widths[i_col], (t->right >> i_col) & 1, is_last);
        if (is_last)
            (void)putchar('\n');
    }
}

void table_release(struct table *t)
{
    for (size_t i = 0; i < t->n_cells; i++)
        mem_free(t->cells[i]);
    mem_free(t->cells);
    *t = (struct table){0};
}
