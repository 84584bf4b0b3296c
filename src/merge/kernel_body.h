/*
 * The one source of the kernels. A kernel_<isa>.c defines the vector words (vf, VL, v_load, v_fma, ...), the tile (MR rows x NV
 * vectors), MR_SMALL and KERNEL, then includes this. A tile's chains live in registers for up to KERNEL_K links. B is
 * broadcast element by element, A streams by vectors; nothing is summed across lanes. Never include it twice in one file.
 */
#include "merge/kernel.h"
#include "tensor/dtype.h"
#include <string.h>

#define NR     (NV * VL)
#define INLINE static inline __attribute__((always_inline))

static_assert((int)MR <= (int)KERNEL_MR_MAX && (int)NR <= (int)KERNEL_NR_MAX, "tile padding");

INLINE vf load_any(int32_t dtype, const uint8_t *p)
{
    return dtype == PF_BF16 ? v_load_bf16(p) : dtype == PF_F16 ? v_load_f16(p) : v_load(p);
}

/* W' of VL elements. A NaN of the base is put back before rounding: bf16 keeps it exactly (its low half is zero), for f16, whose
 * conversion would quiet it, the element's bytes are copied. */
INLINE void finish_one(int32_t dtype, enum kernel_finish finish, vf total, const uint8_t *base,
                       uint8_t *out)
{
    const vf w = load_any(dtype, base);
    const vm nan = v_is_nan(w);
    vf sum = v_select(nan, w, v_add(w, total));
    if (finish == FINISH_F32 || dtype == PF_F32) {
        v_store(out, sum);
    } else if (dtype == PF_BF16 && finish == FINISH_ROUND) {
        v_store_bf16(out, sum);
    } else if (dtype == PF_BF16) {
        v_store(out, v_round_bf16(sum));
    } else {
        uint8_t half[VL * 2];
        v_store_f16(half, sum);
        for (int i = 0; v_any(nan) && i < VL; i++) {
            uint16_t h;
            memcpy(&h, base + i * 2, 2);
            if ((h & 0x7fff) > 0x7c00)
                memcpy(half + i * 2, &h, 2);
        }
        if (finish == FINISH_ROUND)
            memcpy(out, half, sizeof(half));
        else
            v_store(out, v_load_f16(half));
    }
}

/* Everything after the chain, from a tile in memory: every case but the hot one. */
static void tile_tail(const struct strip *p, const float *acc, int64_t off, const uint8_t *base,
                      size_t base_stride, uint8_t *out, size_t out_stride, int n_valid)
{
    const size_t n_base = p->dtype == PF_F32 ? 4 : 2;
    const size_t n_out = p->finish == FINISH_ROUND ? n_base : 4;
    const vf s = v_set1(p->s);
    for (int i = 0; i < n_valid; i++) {
        for (int v = 0; v < NV; v++) {
            const int64_t at = off + i * p->ld + v * VL;
            vf x = v_load(acc + i * NR + v * VL);
            if (p->chain_out != NULL) {
                v_store(p->chain_out + at, x);
                continue;
            }
            if (p->mul != NULL)
                x = v_mul(x, v_load(p->mul + at));
            x = v_fma(s, x, p->total_in != NULL ? v_load(p->total_in + at) : v_zero());
            if (p->total_out != NULL)
                v_store(p->total_out + at, x);
            else
                finish_one(p->dtype, p->finish, x,
                           base + (size_t)i * base_stride + (size_t)(v * VL) * n_base,
                           out + (size_t)i * out_stride + (size_t)(v * VL) * n_out);
        }
    }
}

/* One link of every chain of a tile. */
INLINE void links(vf acc[MR][NV], const float *a, const float *b, const int rows)
{
    vf x[NV];
    UNROLL
    for (int v = 0; v < NV; v++)
        x[v] = v_load(a + v * VL);
    UNROLL
    for (int i = 0; i < rows; i++) {
        const vf y = v_set1(b[i * KERNEL_K]);
        UNROLL
        for (int v = 0; v < NV; v++)
            acc[i][v] = v_fma(y, x[v], acc[i][v]);
    }
}

/* `rows` x NR elements at offset `off` of the f32 tiles, of which n_valid rows are wanted. */
INLINE void tile(const struct strip *p, const float *b, const float *a, int64_t off,
                 const uint8_t *base, size_t base_stride, uint8_t *out, size_t out_stride,
                 const int rows, int n_valid, bool is_hot)
{
    vf acc[MR][NV];
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int v = 0; v < NV; v++)
            acc[i][v] = v_zero();
    }
    if (p->chain_in != NULL) {
        UNROLL
        for (int i = 0; i < rows; i++) {
            UNROLL
            for (int v = 0; v < NV; v++)
                acc[i][v] = v_load(p->chain_in + off + i * p->ld + v * VL);
        }
    }
    for (int64_t k = 0; k < p->n_k; k++)
        links(acc, a + k * NR, b + k, rows);
    if (HAS_SPLIT && is_hot) {
        const vf s = v_set1(p->s);
        const float *total = p->total_in == NULL ? NULL : p->total_in + off;
        UNROLL
        for (int i = 0; i < rows; i++) {
            const vf t0 = total == NULL ? v_zero() : v_load(total + i * p->ld);
            const vf t1 = total == NULL ? v_zero() : v_load(total + i * p->ld + VL);
            if (i < n_valid)
                v_finish_split(v_fma(s, acc[i][0], t0), v_fma(s, acc[i][1], t1),
                               base + (size_t)i * base_stride, out + (size_t)i * out_stride);
        }
        return;
    }
    float spill[MR * NR];
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int v = 0; v < NV; v++)
            v_store(spill + i * NR + v * VL, acc[i][v]);
    }
    tile_tail(p, spill, off, base, base_stride, out, out_stride, n_valid);
}

/* The last, narrower group of columns: base and out go through padded copies, so that a tile is always whole. */
static void tile_narrow(const struct strip *p, const float *b, const float *a, int64_t off,
                        const uint8_t *base, uint8_t *out, int rows, int n_cols)
{
    uint8_t pad_base[MR_SMALL * NR * 4] = {0};
    uint8_t pad_out[MR_SMALL * NR * 4];
    const bool is_last = p->chain_out == NULL && p->total_out == NULL;
    const size_t n_base = p->dtype == PF_F32 ? 4 : 2;
    const size_t n_out = p->finish == FINISH_ROUND ? n_base : 4;
    for (int i = 0; is_last && i < rows; i++)
        memcpy(pad_base + (size_t)i * NR * n_base, base + (size_t)i * p->base_stride,
               (size_t)n_cols * n_base);
    tile(p, b, a, off, pad_base, NR * n_base, pad_out, NR * n_out, MR_SMALL, rows,
         is_last && p->is_split);
    for (int i = 0; is_last && i < rows; i++)
        memcpy(out + (size_t)i * p->out_stride, pad_out + (size_t)i * NR * n_out,
               (size_t)n_cols * n_out);
}

/* One block of at most MR (is_big: exactly MR) or MR_SMALL rows, along all columns. */
INLINE void strip_rows(const struct strip *p, int64_t i, const int rows, int n_valid, bool is_hot)
{
    const size_t n_base = p->dtype == PF_F32 ? 4 : 2;
    const size_t n_out = p->finish == FINISH_ROUND ? n_base : 4;
    const uint8_t *base = p->base == NULL ? NULL : p->base + (size_t)i * p->base_stride;
    uint8_t *out = p->out == NULL ? NULL : p->out + (size_t)i * p->out_stride;
    const float *a = p->a;
    const float *b = p->b == NULL ? NULL : p->b + i * KERNEL_K;
    for (int64_t j = 0; j + NR <= p->n_cols; j += NR) {
        tile(p, b, a, i * p->ld + j, base, p->base_stride, out, p->out_stride, rows, n_valid,
             is_hot);
        a += p->n_k * NR;
        base = base == NULL ? NULL : base + NR * n_base;
        out = out == NULL ? NULL : out + NR * n_out;
    }
}

static void strip_narrow(const struct strip *p, int64_t j)
{
    const size_t n_base = p->dtype == PF_F32 ? 4 : 2;
    const size_t n_out = p->finish == FINISH_ROUND ? n_base : 4;
    const float *a = p->a == NULL ? NULL : p->a + j * p->n_k;
    for (int64_t i = 0; i < p->n_rows; i += MR_SMALL) {
        const int rows = p->n_rows - i < MR_SMALL ? (int)(p->n_rows - i) : MR_SMALL;
        const uint8_t *base =
            p->base == NULL ? NULL : p->base + (size_t)i * p->base_stride + (size_t)j * n_base;
        uint8_t *out =
            p->out == NULL ? NULL : p->out + (size_t)i * p->out_stride + (size_t)j * n_out;
        tile_narrow(p, p->b == NULL ? NULL : p->b + i * KERNEL_K, a, i * p->ld + j, base, out, rows,
                    (int)(p->n_cols - j));
    }
}

static void strip(const struct strip *p)
{
    const bool is_hot = p->is_split && p->chain_out == NULL && p->total_out == NULL;
    int64_t i = 0;
    for (; is_hot && i + MR <= p->n_rows; i += MR)
        strip_rows(p, i, MR, MR, true);
    for (; i + MR <= p->n_rows; i += MR)
        strip_rows(p, i, MR, MR, false);
    for (; i < p->n_rows; i += MR_SMALL)
        strip_rows(p, i, MR_SMALL, p->n_rows - i < MR_SMALL ? (int)(p->n_rows - i) : MR_SMALL,
                   is_hot);
    const int64_t n_whole = p->n_cols / NR * NR;
    if (n_whole < p->n_cols)
        strip_narrow(p, n_whole);
}

static void to_f32(int32_t dtype, const void *src, size_t n, float *dst)
{
    const uint8_t *p = src;
    const size_t size = dtype == PF_F32 ? 4 : 2;
    size_t i = 0;
    if (dtype == PF_F32) {
        memcpy(dst, src, n * 4);
        return;
    }
    if (dtype == PF_BF16) {
        for (; i + VL <= n; i += VL)
            v_store(dst + i, v_load_bf16(p + i * 2));
    } else {
        for (; i + VL <= n; i += VL)
            v_store(dst + i, v_load_f16(p + i * 2));
    }
    if (i < n)
        dtype_to_f32(dtype, p + i * size, n - i, dst + i);
}

/* One whole group. */
INLINE void pack_group(int32_t dtype, const uint8_t *src, float *dst, bool is_split)
{
    const size_t size = dtype == PF_F32 ? 4 : 2;
    if (!HAS_SPLIT || !is_split) {
        for (int v = 0; v < NV; v++)
            v_store(dst + v * VL, load_any(dtype, src + (size_t)(v * VL) * size));
        return;
    }
    vf even, odd;
    if (dtype == PF_BF16)
        v_load_split_bf16(src, &even, &odd);
    else
        v_split(load_any(dtype, src), load_any(dtype, src + VL * size), &even, &odd);
    v_store(dst, even);
    v_store(dst + VL, odd);
}

static void pack(int32_t dtype, const uint8_t *src, int64_t n, float *dst, int64_t group_stride,
                 bool is_split)
{
    const size_t size = dtype == PF_F32 ? 4 : 2;
    for (; n >= NR; n -= NR, src += NR * size, dst += group_stride)
        pack_group(dtype, src, dst, is_split);
    if (n == 0)
        return;
    uint8_t last[NR * 4] = {0};
    memcpy(last, src, (size_t)n * size);
    pack_group(dtype, last, dst, is_split);
}

static float peak(int64_t n)
{
    vf acc[MR][NV];
    float spill[VL];
    float sum = 0;
    const vf x = v_set1(0.5F);
    for (int i = 0; i < MR; i++)
        for (int v = 0; v < NV; v++)
            acc[i][v] = v_set1((float)i);
    for (int64_t k = 0; k < n; k++) {
        UNROLL
        for (int i = 0; i < MR; i++) {
            UNROLL
            for (int v = 0; v < NV; v++)
                acc[i][v] = v_fma(acc[i][v], x, x);
        }
    }
    for (int i = 0; i < MR * NV; i++) {
        v_store(spill, acc[i / NV][i % NV]);
        sum += spill[0];
    }
    return sum;
}

const struct kernel KERNEL = {.isa = KERNEL_ISA,
                              .mr = MR,
                              .nr = NR,
                              .has_split = HAS_SPLIT,
                              .strip = strip,
                              .pack = pack,
                              .to_f32 = to_f32,
                              .peak = peak};
