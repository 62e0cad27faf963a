/* Attention on one CPU thread: short tiles, and the anchor's correction; forward and gradients.
 *
 * Short tiles. A unit is one tile and one key head. Units are computed in their order; the caller
 * gives those that share rows of a result to one thread. Keys and values of a unit are widened to
 * fp32 and laid out once (keys transposed), then the query heads of the key head take its query
 * rows ROWS at a time: scores, softmax and products stay in the first-level cache. A block computes
 * only the columns that its last row sees, rounded up to a vector.
 *
 * The anchor is merged row by row, in one pass.
 *
 * The bits of a row depend on its own tiles and anchor alone, while keys and values are finite:
 * hidden ones of a block of ROWS rows meet probabilities that are 0.
 *
 * Legend: D head dimension, DP and MP the head dimension and the tile's keys rounded up to WIDTH.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define WIDTH 16 /* fp32 numbers of a vector */
#define ROWS 8   /* query rows of a register block */
#define WIDE 2   /* vectors of a register block: ROWS * WIDE accumulators */
#else
#define WIDTH 8
#define ROWS 4
#define WIDE 2
#endif
#define BACKWARD_ROWS 32 /* query rows whose probabilities backward holds; a multiple of ROWS */

typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH)));
#define INLINE static inline __attribute__((always_inline))

/* Rows of (N, H, D), the last dimension contiguous; strides in elements. */
typedef struct {
    void *data;
    int64_t row_stride, head_stride, is_bf16;
} Matrix;

typedef struct {
    Matrix q, k, v, out, dout, dq, dk, dv; /* out and the gradients are fp32, but out in backward */
    float *lse;                            /* (N, Hq) */
    int64_t lse_row_stride, lse_head_stride;
    const int64_t *tiles; /* (T, 5): q_start, q_stop, k_start, k_stop, causal */
    const int64_t *units; /* (U, 2): tile, key head */
    int64_t num_heads, num_key_heads, head_dim;
    float scale;
} Job;

typedef struct {
    int64_t q_start, num_queries, k_start, num_keys, causal, key_head;
} Unit;

INLINE Unit unit_of(const Job *job, int64_t number)
{
    const int64_t *unit = job->units + 2 * number, *tile = job->tiles + 5 * unit[0];
    return (Unit){tile[0], tile[1] - tile[0], tile[2], tile[3] - tile[2], tile[4], unit[1]};
}

/* Keys that query row `row` of the tile sees: the mask is aligned bottom-right. */
INLINE int64_t seen(const Unit *u, int64_t row)
{
    return u->causal ? u->num_keys - u->num_queries + row + 1 : u->num_keys;
}

INLINE int64_t padded(int64_t n) { return (n + WIDTH - 1) / WIDTH * WIDTH; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* n numbers of a row, widened and multiplied; zero up to DP. */
INLINE void load_row(float *to, const Matrix *x, int64_t row, int64_t head, int64_t n, float factor)
{
    int64_t at = row * x->row_stride + head * x->head_stride;
    if (x->is_bf16) {
        const uint16_t *from = (const uint16_t *)x->data + at;
        for (int64_t d = 0; d < n; d++) {
            uint32_t bits = (uint32_t)from[d] << 16;
            float wide;
            memcpy(&wide, &bits, 4);
            to[d] = wide * factor;
        }
    } else {
        const float *from = (const float *)x->data + at;
        for (int64_t d = 0; d < n; d++)
            to[d] = from[d] * factor;
    }
    for (int64_t d = n; d < padded(n); d++)
        to[d] = 0.0f;
}

INLINE float *row_of(const Matrix *x, int64_t row, int64_t head)
{
    return (float *)x->data + row * x->row_stride + head * x->head_stride;
}

/* Rows of one head lie far apart: the processor does not foresee the next one. */
#define PREFETCH(row, n, write)                                                                    \
    for (int64_t d = 0; d < (n); d += 16)                                                          \
    __builtin_prefetch((row) + d, write)

/* (rows, DP) to (DP, MP); columns past the rows are zero. */
static void transpose(float *to, const float *from, int64_t rows, int64_t dp, int64_t mp)
{
    for (int64_t d0 = 0; d0 < dp; d0 += WIDTH) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t d = d0; d < d0 + WIDTH; d++)
                to[d * mp + r] = from[r * dp + d];
        for (int64_t d = d0; d < d0 + WIDTH; d++)
            for (int64_t r = rows; r < mp; r++)
                to[d * mp + r] = 0.0f;
    }
}

/* ROWS rows of C = A B, or C += A B, where C meets the finished sums:
 * A(i, l) = a[i * a_row + l * a_inner], B and C row-major. */
INLINE void block(int vectors, int add, const float *a, int64_t a_row, int64_t a_inner,
                  const float *b, int64_t b_row, float *c, int64_t c_row, int64_t inner)
{
    vec sum[ROWS][WIDE];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
        for (int x = 0; x < vectors; x++)
            sum[i][x] = (vec){0};
    for (int64_t l = 0; l < inner; l++) {
        vec right[WIDE];
#pragma GCC unroll 4
        for (int x = 0; x < vectors; x++)
            right[x] = *(const vec *)(b + l * b_row + x * WIDTH);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
            float left = a[i * a_row + l * a_inner];
#pragma GCC unroll 4
            for (int x = 0; x < vectors; x++)
                sum[i][x] += left * right[x];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
        for (int x = 0; x < vectors; x++) {
            vec *to = (vec *)(c + i * c_row + x * WIDTH);
            if (add)
                sum[i][x] += *to;
            *to = sum[i][x];
        }
}

#define COLUMNS(vectors, add, a_row, a_inner)                                                      \
    for (; x + (vectors) * WIDTH <= columns; x += (vectors) * WIDTH)                               \
        block(vectors, add, a, a_row, a_inner, b + x, b_row, c + x, c_row, inner);

/* C = A B for ROWS rows and `columns` columns, a multiple of WIDTH. */
static void multiply(const float *a, int64_t a_row, const float *b, int64_t b_row, float *c,
                     int64_t c_row, int64_t inner, int64_t columns)
{
    int64_t x = 0;
    COLUMNS(WIDE, 0, a_row, 1)
    COLUMNS(1, 0, a_row, 1)
}

/* C += A' B for ROWS columns of A, which has `inner` rows. */
static void multiply_transposed(const float *a, int64_t a_row, const float *b, int64_t b_row,
                                float *c, int64_t c_row, int64_t inner, int64_t columns)
{
    int64_t x = 0;
    COLUMNS(WIDE, 1, 1, a_row)
    COLUMNS(1, 1, 1, a_row)
}

/* exp of every element: 2^n p(r), x = n log 2 + r, |r| <= log(2) / 2, p the minimax polynomial of
 * degree 6; within 2 ulp. Below the least normal number 0; NaN stays NaN. */
INLINE vec exponential(vec x)
{
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    ivec tiny = x < -87.33654f;
    vec bounded = (vec)(((ivec)x & ~tiny) | ((ivec)((vec){0} - 87.0f) & tiny));
    vec shifted = bounded * 1.44269504f + round;
    vec n = shifted - round;
    vec r = bounded - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    ivec power = (((ivec)shifted - (ivec)((vec){0} + round)) + 127) << 23;
    return (vec)((ivec)(p * (vec)power) & ~tiny);
}

/* Sums and the maximum of a vector's numbers, halved again and again: adding them up one by one
 * would wait for every addition. */
INLINE float sum_of(vec x)
{
    float part[WIDTH];
    memcpy(part, &x, sizeof part);
#pragma GCC unroll 4
    for (int half = WIDTH / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int c = 0; c < half; c++)
            part[c] += part[c + half];
    return part[0];
}

INLINE float dot(const float *a, const float *b, int64_t dp)
{
    vec sum = {0};
    for (int64_t d = 0; d < dp; d += WIDTH)
        sum += *(const vec *)(a + d) * *(const vec *)(b + d);
    return sum_of(sum);
}

INLINE float maximum_of(vec x)
{
    float part[WIDTH];
    memcpy(part, &x, sizeof part);
#pragma GCC unroll 4
    for (int half = WIDTH / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int c = 0; c < half; c++)
            part[c] = part[c] > part[c + half] ? part[c] : part[c + half];
    return part[0];
}

/* A score row to exp(s - maximum); columns from `visible` to `columns` become 0. Gives the sum. */
INLINE float softmax_row(float *s, int64_t visible, int64_t columns, float *maximum)
{
    for (int64_t c = visible; c < columns; c++)
        s[c] = -INFINITY;
    vec top = *(vec *)s;
    for (int64_t c = WIDTH; c < columns; c += WIDTH) {
        vec x = *(vec *)(s + c);
        ivec above = x > top;
        top = (vec)(((ivec)x & above) | ((ivec)top & ~above));
    }
    float highest = maximum_of(top);
    vec total = {0};
    for (int64_t c = 0; c < columns; c += WIDTH) {
        vec p = exponential(*(vec *)(s + c) - highest);
        *(vec *)(s + c) = p;
        total += p;
    }
    *maximum = highest;
    return sum_of(total);
}

/* The LSE merge of merge.py for one row: `o` is not yet divided by `sum`. */
INLINE void merge_row(float *out, float *lse, const float *o, float sum, float maximum, int64_t n)
{
    float own = maximum + logf(sum), mine = 1.0f / sum;
    if (*lse == -INFINITY) {
        for (int64_t d = 0; d < n; d++)
            out[d] = o[d] * mine;
        *lse = own;
        return;
    }
    float top = *lse > own ? *lse : own;
    float before = expf(*lse - top), now = expf(own - top), both = before + now;
    mine *= now / both;
    before /= both;
    for (int64_t d = 0; d < n; d++)
        out[d] = out[d] * before + o[d] * mine;
    *lse = top + logf(both);
}

INLINE float *take(float **scratch, int64_t count)
{
    float *taken = *scratch;
    *scratch += (count + 15) / 16 * 16;
    return taken;
}

/* fp32 numbers of scratch that a call over short tiles needs. */
int64_t short_scratch_elements(int64_t head_dim, int64_t max_keys)
{
    int64_t dp = padded(head_dim), mp = padded(max_keys + ROWS);
    return 6 * (mp * dp + 16) + 2 * BACKWARD_ROWS * (mp + 2 * dp + 16) + 4096;
}

/* Merge the attention of units first .. last - 1 into out and lse. */
void short_forward(const Job *job, int64_t first, int64_t last, float *scratch)
{
    const int64_t n = job->head_dim, dp = padded(n);
    const int64_t group = job->num_heads / job->num_key_heads;
    for (int64_t number = first; number < last; number++) {
        Unit u = unit_of(job, number);
        int64_t mp = padded(u.num_keys);
        float *free_scratch = scratch;
        float *keys = take(&free_scratch, mp * dp), *keys_t = take(&free_scratch, dp * mp);
        float *values = take(&free_scratch, mp * dp);
        float *queries = take(&free_scratch, ROWS * dp), *s = take(&free_scratch, ROWS * mp);
        float *o = take(&free_scratch, ROWS * dp);
        for (int64_t j = 0; j < u.num_keys; j++) {
            load_row(keys + j * dp, &job->k, u.k_start + j, u.key_head, n, 1.0f);
            load_row(values + j * dp, &job->v, u.k_start + j, u.key_head, n, 1.0f);
        }
        transpose(keys_t, keys, u.num_keys, dp, mp);
        for (int64_t row = 0; row < u.num_queries; row += ROWS) {
            for (int64_t head = u.key_head * group; head < (u.key_head + 1) * group; head++) {
                int64_t rows = least(ROWS, u.num_queries - row);
                int64_t visible = seen(&u, row + rows - 1), columns = padded(visible);
                for (int64_t i = 0; i < rows; i++) {
                    int64_t at = u.q_start + row + i;
                    load_row(queries + i * dp, &job->q, at, head, n, job->scale);
                    PREFETCH(row_of(&job->out, at, head), n, 1);
                    if (row + ROWS + i < u.num_queries && !job->q.is_bf16)
                        PREFETCH(row_of(&job->q, at + ROWS, head), n, 0);
                }
                if (rows < ROWS)
                    memset(queries + rows * dp, 0, (ROWS - rows) * dp * sizeof(float));
                multiply(queries, dp, keys_t, mp, s, mp, dp, columns);
                float sum[ROWS], maximum[ROWS];
                for (int64_t i = 0; i < rows; i++)
                    sum[i] = softmax_row(s + i * mp, seen(&u, row + i), columns, maximum + i);
                multiply(s, mp, values, dp, o, dp, visible, dp);
                for (int64_t i = 0; i < rows; i++) {
                    int64_t at = u.q_start + row + i;
                    float *lse = job->lse + at * job->lse_row_stride + head * job->lse_head_stride;
                    merge_row(row_of(&job->out, at, head), lse, o + i * dp, sum[i], maximum[i], n);
                }
            }
        }
    }
}

/* Add the gradients of units first .. last - 1 into dq, dk and dv; out and lse are final. */
void short_backward(const Job *job, int64_t first, int64_t last, float *scratch)
{
    const int64_t n = job->head_dim, dp = padded(n);
    const int64_t group = job->num_heads / job->num_key_heads;
    for (int64_t number = first; number < last; number++) {
        Unit u = unit_of(job, number);
        /* Products with P' write ROWS key rows at a time. */
        int64_t mp = padded(u.num_keys), key_rows = (u.num_keys + ROWS - 1) / ROWS * ROWS;
        float *free_scratch = scratch;
        float *keys = take(&free_scratch, mp * dp), *keys_t = take(&free_scratch, dp * mp);
        float *values_t = take(&free_scratch, dp * mp);
        float *d_keys = take(&free_scratch, key_rows * dp);
        float *d_values = take(&free_scratch, key_rows * dp);
        float *queries = take(&free_scratch, BACKWARD_ROWS * dp);
        float *d_out = take(&free_scratch, BACKWARD_ROWS * dp);
        float *p = take(&free_scratch, BACKWARD_ROWS * mp);
        float *ds = take(&free_scratch, BACKWARD_ROWS * mp);
        float *row_out = take(&free_scratch, ROWS * dp);
        for (int64_t j = 0; j < u.num_keys; j++)
            load_row(keys + j * dp, &job->v, u.k_start + j, u.key_head, n, 1.0f);
        transpose(values_t, keys, u.num_keys, dp, mp);
        for (int64_t j = 0; j < u.num_keys; j++)
            load_row(keys + j * dp, &job->k, u.k_start + j, u.key_head, n, 1.0f);
        transpose(keys_t, keys, u.num_keys, dp, mp);
        memset(d_keys, 0, key_rows * dp * sizeof(float));
        memset(d_values, 0, key_rows * dp * sizeof(float));
        for (int64_t row = 0; row < u.num_queries; row += BACKWARD_ROWS) {
            for (int64_t head = u.key_head * group; head < (u.key_head + 1) * group; head++) {
                int64_t rows = least(BACKWARD_ROWS, u.num_queries - row);
                int64_t columns = padded(seen(&u, row + rows - 1));
                int64_t blocked = (rows + ROWS - 1) / ROWS * ROWS;
                float lse[BACKWARD_ROWS], delta[BACKWARD_ROWS];
                for (int64_t i = 0; i < blocked; i++) {
                    int64_t at = u.q_start + row + i;
                    if (i >= rows) { /* a row that sees nothing */
                        memset(queries + i * dp, 0, dp * sizeof(float));
                        memset(d_out + i * dp, 0, dp * sizeof(float));
                        lse[i] = INFINITY;
                        delta[i] = 0.0f;
                        continue;
                    }
                    load_row(queries + i * dp, &job->q, at, head, n, job->scale);
                    load_row(d_out + i * dp, &job->dout, at, head, n, 1.0f);
                    load_row(row_out, &job->out, at, head, n, 1.0f);
                    delta[i] = dot(row_out, d_out + i * dp, dp);
                    lse[i] = job->lse[at * job->lse_row_stride + head * job->lse_head_stride];
                    if (lse[i] == -INFINITY)
                        lse[i] = INFINITY;
                }
                for (int64_t i0 = 0; i0 < blocked; i0 += ROWS) {
                    int64_t visible = seen(&u, row + least(i0 + ROWS, rows) - 1);
                    int64_t used = padded(visible);
                    float *p0 = p + i0 * mp, *ds0 = ds + i0 * mp;
                    multiply(queries + i0 * dp, dp, keys_t, mp, p0, mp, dp, used);
                    multiply(d_out + i0 * dp, dp, values_t, mp, ds0, mp, dp, used);
                    for (int64_t i = 0; i < ROWS; i++) {
                        float *pi = p0 + i * mp, *dsi = ds0 + i * mp;
                        int64_t own = i0 + i < rows ? seen(&u, row + i0 + i) : 0;
                        for (int64_t c = 0; c < used; c += WIDTH) {
                            vec x = exponential(*(vec *)(pi + c) - lse[i0 + i]);
                            *(vec *)(pi + c) = x;
                            *(vec *)(dsi + c) = x * (*(vec *)(dsi + c) - delta[i0 + i]);
                        }
                        if (own < columns) {
                            memset(pi + own, 0, (columns - own) * sizeof(float));
                            memset(dsi + own, 0, (columns - own) * sizeof(float));
                        }
                    }
                    multiply(ds0, mp, keys, dp, row_out, dp, visible, dp);
                    for (int64_t i = 0; i < least(ROWS, rows - i0); i++) {
                        float *dq = row_of(&job->dq, u.q_start + row + i0 + i, head);
                        for (int64_t d = 0; d < n; d++)
                            dq[d] += row_out[i * dp + d] * job->scale;
                    }
                }
                int64_t visible = seen(&u, row + rows - 1);
                for (int64_t j = 0; j < visible; j += ROWS) {
                    /* The first row that sees key j, down to a row of the block. */
                    int64_t i = u.causal ? j - (u.num_keys - u.num_queries + row) : 0;
                    i = most(i, 0);
                    multiply_transposed(p + i * mp + j, mp, d_out + i * dp, dp, d_values + j * dp,
                                        dp, rows - i, dp);
                    multiply_transposed(ds + i * mp + j, mp, queries + i * dp, dp, d_keys + j * dp,
                                        dp, rows - i, dp);
                }
            }
        }
        for (int64_t j = 0; j < u.num_keys; j++) {
            float *dk = row_of(&job->dk, u.k_start + j, u.key_head);
            float *dv = row_of(&job->dv, u.k_start + j, u.key_head);
            for (int64_t d = 0; d < n; d++) {
                dk[d] += d_keys[j * dp + d];
                dv[d] += d_values[j * dp + d];
            }
        }
    }
}

/* Rows that see one anchor; (N, H, D) as above, k0 and v0 (Hkv, D) fp32 and contiguous. */
typedef struct {
    Matrix q, out, dout, dq;
    float *lse;
    int64_t lse_row_stride, lse_head_stride;
    const float *k0, *v0;
    int64_t num_heads, num_key_heads, head_dim;
    float scale;
} AnchorJob;

/* k0 or v0 with rows of DP numbers. */
static void load_anchor(float *to, const float *from, const AnchorJob *job)
{
    Matrix rows = {(void *)(uintptr_t)from, 0, job->head_dim, 0};
    for (int64_t head = 0; head < job->num_key_heads; head++)
        load_row(to + head * padded(job->head_dim), &rows, 0, head, job->head_dim, 1.0f);
}

/* fp32 numbers of scratch that a call over rows with an anchor needs. */
int64_t anchor_scratch_elements(int64_t head_dim, int64_t num_key_heads)
{
    return (4 * num_key_heads + 3) * padded(head_dim) + 4096;
}

/* Merge the anchor into out and lse of rows first .. last - 1. */
void anchor_forward(const AnchorJob *job, int64_t first, int64_t last, float *scratch)
{
    const int64_t n = job->head_dim, dp = padded(n);
    const int64_t group = job->num_heads / job->num_key_heads;
    float *k0 = take(&scratch, job->num_key_heads * dp);
    float *v0 = take(&scratch, job->num_key_heads * dp), *q = take(&scratch, dp);
    load_anchor(k0, job->k0, job);
    load_anchor(v0, job->v0, job);
    for (int64_t row = first; row < last; row++) {
        float *lse = job->lse + row * job->lse_row_stride;
        for (int64_t head = 0; head < job->num_heads; head++) {
            int64_t own = head / group * dp;
            load_row(q, &job->q, row, head, n, 1.0f);
            float score = dot(q, k0 + own, dp) * job->scale;
            merge_row(row_of(&job->out, row, head), lse + head * job->lse_head_stride, v0 + own,
                      1.0f, score, n);
        }
    }
}

/* Add the anchor's part of rows first .. last - 1 into dq, and write dk0 and dv0 of these rows,
 * (Hkv, D) each; out and lse are final. */
void anchor_backward(const AnchorJob *job, int64_t first, int64_t last, float *scratch, float *dk0,
                     float *dv0)
{
    const int64_t n = job->head_dim, dp = padded(n), all = job->num_key_heads * dp;
    const int64_t group = job->num_heads / job->num_key_heads;
    float *k0 = take(&scratch, all), *v0 = take(&scratch, all);
    float *sum_k = take(&scratch, all), *sum_v = take(&scratch, all);
    float *q = take(&scratch, dp), *dout = take(&scratch, dp), *out = take(&scratch, dp);
    load_anchor(k0, job->k0, job);
    load_anchor(v0, job->v0, job);
    memset(sum_k, 0, all * sizeof(float));
    memset(sum_v, 0, all * sizeof(float));
    for (int64_t row = first; row < last; row++) {
        for (int64_t head = 0; head < job->num_heads; head++) {
            int64_t own = head / group * dp;
            float lse = job->lse[row * job->lse_row_stride + head * job->lse_head_stride];
            if (lse == -INFINITY)
                continue;
            load_row(q, &job->q, row, head, n, 1.0f);
            load_row(dout, &job->dout, row, head, n, 1.0f);
            load_row(out, &job->out, row, head, n, 1.0f);
            for (int64_t d = 0; d < dp; d++)
                out[d] = v0[own + d] - out[d];
            float p0 = expf(dot(q, k0 + own, dp) * job->scale - lse);
            float ds = p0 * dot(dout, out, dp) * job->scale;
            float *dq = row_of(&job->dq, row, head);
            for (int64_t d = 0; d < n; d++)
                dq[d] += ds * k0[own + d];
            for (int64_t d = 0; d < dp; d++) {
                sum_k[own + d] += ds * q[d];
                sum_v[own + d] += p0 * dout[d];
            }
        }
    }
    for (int64_t head = 0; head < job->num_key_heads; head++) {
        memcpy(dk0 + head * n, sum_k + head * dp, n * sizeof(float));
        memcpy(dv0 + head * n, sum_v + head * dp, n * sizeof(float));
    }
}
