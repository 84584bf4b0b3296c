/*
 * Which kernel this process uses: the widest that this build has, the CPU can run, and that agreed with the scalar oracle on a
 * few tiles; or the one that PF_ISA names, on the same conditions. Decided once, by whoever asks first; constant afterwards.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/cpu.h"
#include "base/mem.h"
#include "merge/merge_int.h"
#include "tensor/dtype.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const struct kernel *selected = &kernel_scalar; /* written under `once` alone */
static int selected_rc;
static pf_error selected_err;

/* Small, odd, and through every path: whole and narrow groups, whole and partial row blocks, one pass and two, all dtypes. */
enum { CHECK_ROWS = 19, CHECK_COLS = 39, CHECK_RANK = KERNEL_K + 3 };

struct check {
    uint8_t base[CHECK_ROWS * CHECK_COLS * 4];
    float b[CHECK_ROWS * CHECK_RANK];
    uint16_t a[CHECK_RANK * CHECK_COLS];
    uint8_t out[2][CHECK_ROWS * CHECK_COLS * 4];
};

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void check_fill(struct check *c)
{
    uint32_t state = 1;
    for (size_t i = 0; i < sizeof(c->base); i++)
        c->base[i] = (uint8_t)next_random(&state);
    for (size_t i = 0; i < CHECK_ROWS * CHECK_RANK; i++)
        c->b[i] = ((float)next_random(&state) - 8388608.0F) * 0x1p-23F;
    for (size_t i = 0; i < CHECK_RANK * CHECK_COLS; i++)
        c->a[i] = bf16_from_f32(((float)next_random(&state) - 8388608.0F) * 0x1p-30F);
}

static bool check_agrees(struct check *c, struct merge_scratch *s[2], int32_t dtype, int64_t rank,
                         bool as_f32)
{
    const struct delta d = {
        .kind = DELTA_LORA,
        .n_rows = CHECK_ROWS,
        .n_cols = CHECK_COLS,
        .rank = rank,
        .f = {{(const uint8_t *)c->b, PF_F32, CHECK_ROWS, rank, CHECK_RANK, 1},
              {(const uint8_t *)c->a, PF_BF16, rank, CHECK_COLS, CHECK_COLS, 1}},
    };
    const struct merge_term term = {&d, 0.75F};
    const struct merge_target t = {c->base, dtype, dtype, CHECK_ROWS, CHECK_COLS, &term, 1};
    const struct merge_panel panel = {0, CHECK_ROWS, 0, CHECK_COLS};
    memset(c->out, 0, sizeof(c->out));
    merge_read(&t, &panel, as_f32, c->out[0], s[0]);
    merge_read(&t, &panel, as_f32, c->out[1], s[1]);
    return memcmp(c->out[0], c->out[1], sizeof(c->out[0])) == 0;
}

/* PF_OK, PF_E_NOMEM, or PF_E_STATE: the bytes differ. */
static int self_check(const struct kernel *kernel, pf_error *err)
{
    static const int32_t dtypes[] = {PF_BF16, PF_F16, PF_F32};
    struct merge_scratch *s[2] = {NULL, NULL};
    struct check *c = mem_alloc(sizeof(*c));
    int rc = c == NULL ? err_nomem(err, sizeof(*c), "kernel self-check") : PF_OK;
    if (rc == PF_OK)
        rc = scratch_new(&kernel_scalar, &s[0], err);
    if (rc == PF_OK)
        rc = scratch_new(kernel, &s[1], err);
    if (rc != PF_OK)
        goto out;
    check_fill(c);
    for (size_t i = 0; i < PF_COUNTOF(dtypes) && rc == PF_OK; i++) {
        const bool agrees = check_agrees(c, s, dtypes[i], 5, false) &&
                            check_agrees(c, s, dtypes[i], 5, true) &&
                            (i > 0 || check_agrees(c, s, dtypes[i], CHECK_RANK, false));
        if (!agrees)
            rc = err_set(err, PF_E_STATE, "kernel '%s' disagrees with the scalar one on %s tiles",
                         cpu_isa_name(kernel->isa), pf_dtype_name(dtypes[i]));
    }
out:
    merge_scratch_free(s[0]);
    merge_scratch_free(s[1]);
    mem_free(c);
    return rc;
}

static int select_named(const char *name, pf_error *err)
{
    for (int isa = CPU_SCALAR; isa <= CPU_AVX512; isa++) {
        if (strcmp(name, cpu_isa_name((enum cpu_isa)isa)) != 0)
            continue;
        const struct kernel *kernel = kernel_built((enum cpu_isa)isa);
        if (kernel == NULL)
            return err_set(err, PF_E_UNSUPPORTED, "PF_ISA names '%s', which this build lacks",
                           name);
        if (isa != CPU_SCALAR && !cpu_has((enum cpu_isa)isa))
            return err_set(err, PF_E_UNSUPPORTED, "PF_ISA names '%s', which this CPU lacks", name);
        if (isa != CPU_SCALAR) {
            const int rc = self_check(kernel, err);
            if (rc != PF_OK)
                return rc;
        }
        selected = kernel;
        return PF_OK;
    }
    return err_set(err, PF_E_UNSUPPORTED,
                   "PF_ISA names '%.40s', which is none of scalar, avx2, avx512", name);
}

static void select_once(void)
{
    const char *name = getenv("PF_ISA");
    if (name != NULL && name[0] != '\0') {
        selected_rc = select_named(name, &selected_err);
        return;
    }
    for (int isa = CPU_AVX512; isa > CPU_SCALAR; isa--) {
        const struct kernel *kernel = kernel_built((enum cpu_isa)isa);
        if (kernel != NULL && cpu_has((enum cpu_isa)isa) && self_check(kernel, NULL) == PF_OK) {
            selected = kernel;
            return;
        }
    }
}

const struct kernel *kernel_selected(void)
{
    (void)pthread_once(&once, select_once); /* fails only for a bad control block */
    return selected;
}

int merge_kernel_init(const char **out_name, pf_error *err)
{
    const struct kernel *kernel = kernel_selected();
    if (selected_rc != PF_OK) {
        if (err != NULL)
            *err = selected_err;
        return selected_rc;
    }
    if (out_name != NULL)
        *out_name = cpu_isa_name(kernel->isa);
    return PF_OK;
}
