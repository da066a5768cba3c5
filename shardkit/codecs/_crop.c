/* The functions of crop.py, run without the interpreter lock: decode the part of a JPEG that a crop
   needs, resize, and look up pixels in tables.

   Resampling is Pillow's antialiased BILINEAR of 8-bit pixels, bit for bit: a triangle filter as
   wide as the scale, with 22-bit fixed-point weights, rows first, each pass rounded to 8 bits.
   Decoding uses libjpeg-turbo's jpeg_crop_scanline and jpeg_skip_scanlines.

   Jobs and images are not trusted. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <jpeglib.h>

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2001000
#error "libjpeg-turbo 2.1 or newer is needed: older ones have bugs in cropping"
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
static int use_avx2;
#endif

#define CHANNELS 3
/* Bits of a weight: 32 less 8 bits of a pixel, a sign bit, and a bit by which sums may grow. */
#define WEIGHT_BITS 22
#define HALF (1 << (WEIGHT_BITS - 1))
/* A weight is split into HIGH * 2^11 + LOW, as processors multiply pairs of 16-bit numbers. */
#define LOW_BITS 11
/* Bytes that may be read and written past a row, so that loops need no special case at the end. */
#define SLACK 64
/* Rows are deliberately not aligned to this: libjpeg-turbo writes aligned rows past the caches,
   which takes 1.4 times as long. */
#define ALIGNED 64
/* As in jpeg.py. */
#define LEFT 3
#define SHORTEST 8
/* The longest side in pixels, so that positions and bytes of a row fit into an int. */
#define LONGEST (1 << 28)

/* The columns of JOB in crop.py. */
typedef struct {
    int32_t x, y, width, height, full_width, full_height, left, top, flip;
} Job;

typedef struct {
    uint8_t *pixels;
    int height, width;
} Image;

typedef struct {
    int16_t high[2], low[2];
} Pair;

/* The weights for resizing one side of a crop to one side of a window. */
typedef struct {
    int count;        /* positions in the window; tables are padded to a multiple of four */
    int first, stop;  /* the positions of the crop that the window needs */
    int pairs;        /* pairs of weights per position; unused ones are zero */
    int *start;       /* the position of each first weight, relative to `first` */
    Pair *weights;
    size_t start_size, weights_size;
} Axis;

/* The memory of one call, which grows to what its largest image needs. */
typedef struct {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    jmp_buf failed;
    Axis x, y;
    uint8_t *rows, *middle, *one, *other; /* `one` and `other` point into `rows` */
    size_t rows_size, middle_size;
} Work;

/* Returns `memory` if it has `wanted` bytes, otherwise new memory; NULL if out of memory. */
static void *reserved(void *memory, size_t *size, unsigned long long wanted)
{
    if (wanted <= *size) {
        return memory;
    }
    free(memory);
    memory = wanted < PTRDIFF_MAX ? malloc((size_t)wanted) : NULL;
    *size = memory ? (size_t)wanted : 0;
    return memory;
}

static void release(Work *work)
{
    free(work->x.start);
    free(work->x.weights);
    free(work->y.start);
    free(work->y.weights);
    free(work->rows);
    free(work->middle);
}

/* --- weights ---------------------------------------------------------------------------------- */

/* Finds the pixels that contribute to position `at`: [*start, return value). */
static int reach(double scale, double from, int at, int length, int *start)
{
    double support = scale < 1 ? 1 : scale, center = from + (at + 0.5) * scale;
    int stop = (int)(center + support + 0.5);
    *start = (int)(center - support + 0.5);
    if (*start < 0) {
        *start = 0;
    }
    return stop < length ? stop : length;
}

static double triangle(double distance)
{
    distance = distance < 0 ? -distance : distance;
    return distance < 1 ? 1 - distance : 0;
}

/* Computes the weights of pixels [start, stop), where the first weight belongs to pixel `zero`. */
static void weigh(double scale, double from, int at, int start, int stop, int zero, Pair *weights)
{
    double step = 1 / (scale < 1 ? 1 : scale), center = from + (at + 0.5) * scale, sum = 0;
    for (int n = start; n < stop; n++) {
        sum += triangle((n - center + 0.5) * step);
    }
    for (int n = start; n < stop; n++) {
        double part = triangle((n - center + 0.5) * step);
        int weight = (int)(0.5 + (sum != 0 ? part / sum : part) * (1 << WEIGHT_BITS));
        Pair *pair = &weights[(n - zero) / 2];
        pair->high[(n - zero) % 2] = (int16_t)(weight >> LOW_BITS);
        pair->low[(n - zero) % 2] = (int16_t)(weight & ((1 << LOW_BITS) - 1));
    }
}

/* Makes the axis for positions [left, left + count) of `size`, to which [from, to) of `length`
   pixels is resized; in reverse if `flip`. */
static int make_axis(Axis *axis, double from, double to, int length, int size, int left, int count,
                     int flip)
{
    double scale = (to - from) / size;
    int padded = (count + 3) / 4 * 4, start, longest = 0;
    axis->count = count;
    axis->first = length;
    axis->stop = 0;
    for (int n = 0; n < count; n++) {
        int stop = reach(scale, from, left + n, length, &start);
        axis->first = start < axis->first ? start : axis->first;
        axis->stop = stop > axis->stop ? stop : axis->stop;
        longest = stop - start > longest ? stop - start : longest;
    }
    axis->pairs = (longest + 1) / 2;
    unsigned long long pairs = (unsigned long long)axis->pairs * padded;
    axis->start = reserved(axis->start, &axis->start_size, sizeof(int) * (size_t)padded);
    axis->weights = reserved(axis->weights, &axis->weights_size, sizeof(Pair) * pairs);
    if (!axis->start || !axis->weights) {
        return 0;
    }
    memset(axis->start, 0, sizeof(int) * (size_t)padded);
    memset(axis->weights, 0, sizeof(Pair) * (size_t)pairs);
    for (int n = 0; n < count; n++) {
        int at = left + (flip ? count - 1 - n : n), stop = reach(scale, from, at, length, &start);
        /* Near the end there are fewer pixels than weights: weights then begin before `start`. */
        int most = axis->stop - 2 * axis->pairs, zero = start < most ? start : most;
        zero = zero > axis->first ? zero : axis->first;
        axis->start[n] = zero - axis->first;
        weigh(scale, from, at, start, stop, zero, axis->weights + (size_t)n * axis->pairs);
    }
    return 1;
}

/* --- the passes: plain, and with AVX2 --------------------------------------------------------- */

static int weight_of(const Pair *weights, int n)
{
    return weights[n / 2].high[n % 2] * (1 << LOW_BITS) + weights[n / 2].low[n % 2];
}

static uint8_t rounded(int sum)
{
    sum >>= WEIGHT_BITS;
    return (uint8_t)(sum > 255 ? 255 : sum);
}

static void across_plain(const Axis *axis, const uint8_t *one, const uint8_t *other, uint8_t *out,
                         uint8_t *other_out)
{
    for (int n = 0; n < axis->count; n++) {
        const Pair *weights = axis->weights + (size_t)n * axis->pairs;
        size_t at = (size_t)axis->start[n] * CHANNELS;
        int sums[2 * CHANNELS] = {HALF, HALF, HALF, HALF, HALF, HALF};
        for (int k = 0; k < 2 * axis->pairs; k++, at += CHANNELS) {
            int weight = weight_of(weights, k);
            for (int c = 0; c < CHANNELS; c++) {
                sums[c] += weight * one[at + c];
                sums[CHANNELS + c] += weight * other[at + c];
            }
        }
        for (int c = 0; c < CHANNELS; c++) {
            *out++ = rounded(sums[c]);
            *other_out++ = rounded(sums[CHANNELS + c]);
        }
    }
}

#define BLOCK 256

static void down_plain(const Pair *weights, int pairs, const uint8_t *rows, size_t stride,
                       uint8_t *out, size_t bytes)
{
    int sums[BLOCK];
    for (size_t at = 0; at < bytes; at += BLOCK) {
        size_t size = bytes - at < BLOCK ? bytes - at : BLOCK;
        for (size_t n = 0; n < size; n++) {
            sums[n] = HALF;
        }
        for (int k = 0; k < 2 * pairs; k++) {
            const uint8_t *row = rows + (size_t)k * stride + at;
            int weight = weight_of(weights, k);
            for (size_t n = 0; n < size; n++) {
                sums[n] += weight * row[n];
            }
        }
        for (size_t n = 0; n < size; n++) {
            out[at + n] = rounded(sums[n]);
        }
    }
}

#ifdef AVX2

AVX2 static inline __m256i narrowed(__m256i high, __m256i low)
{
    __m256i sum = _mm256_add_epi32(_mm256_slli_epi32(high, LOW_BITS), low);
    return _mm256_srai_epi32(_mm256_add_epi32(sum, _mm256_set1_epi32(HALF)), WEIGHT_BITS);
}

AVX2 static inline __m256i twice(const int16_t pair[2])
{
    int both;
    memcpy(&both, pair, sizeof both);
    return _mm256_set1_epi32(both);
}

/* 16 bytes of each of two rows. */
AVX2 static inline __m256i of_both(const uint8_t *one, const uint8_t *other)
{
    __m128i a = _mm_loadu_si128((const __m128i *)one);
    __m128i b = _mm_loadu_si128((const __m128i *)other);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
}

/* Red, green and blue of one position of two rows. */
AVX2 static inline __m256i pixel_avx2(const Pair *weights, int pairs, const uint8_t *one,
                                      const uint8_t *other)
{
    /* Two pixels of each row: r r g g b b, 16 bits each; and the two pixels after them. */
    const __m256i first =
        _mm256_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1, 0, -1, 3, -1, 1,
                         -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1);
    const __m256i second =
        _mm256_setr_epi8(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1, 6, -1, 9, -1,
                         7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1);
    __m256i high = _mm256_setzero_si256(), low = high;
    for (int n = 0; n < pairs; n++) {
        __m256i bytes = of_both(one + (size_t)(n / 2) * 4 * CHANNELS,
                                other + (size_t)(n / 2) * 4 * CHANNELS);
        __m256i both = _mm256_shuffle_epi8(bytes, n % 2 ? second : first);
        high = _mm256_add_epi32(high, _mm256_madd_epi16(both, twice(weights[n].high)));
        low = _mm256_add_epi32(low, _mm256_madd_epi16(both, twice(weights[n].low)));
    }
    return narrowed(high, low);
}

AVX2 static inline void across_of_pairs(const Axis *axis, int pairs, const uint8_t *one,
                                        const uint8_t *other, uint8_t *out, uint8_t *other_out)
{
    const __m256i tight = _mm256_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1,
                                           0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    const Pair *weights = axis->weights;
    for (int n = 0; n < axis->count; n += 4) {
        __m256i pixels[4];
        for (int k = 0; k < 4; k++, weights += pairs) {
            size_t at = (size_t)axis->start[n + k] * CHANNELS;
            pixels[k] = pixel_avx2(weights, pairs, one + at, other + at);
        }
        __m256i four = _mm256_packus_epi16(_mm256_packs_epi32(pixels[0], pixels[1]),
                                           _mm256_packs_epi32(pixels[2], pixels[3]));
        four = _mm256_shuffle_epi8(four, tight);
        _mm_storeu_si128((__m128i *)(out + (size_t)n * CHANNELS), _mm256_castsi256_si128(four));
        _mm_storeu_si128((__m128i *)(other_out + (size_t)n * CHANNELS),
                         _mm256_extracti128_si256(four, 1));
    }
}

AVX2 static void across_avx2(const Axis *axis, const uint8_t *one, const uint8_t *other,
                             uint8_t *out, uint8_t *other_out)
{
    if (axis->pairs == 1) { /* enlarging; a constant lets the compiler unroll the loop */
        across_of_pairs(axis, 1, one, other, out, other_out);
    } else if (axis->pairs == 2) { /* down to half of the size */
        across_of_pairs(axis, 2, one, other, out, other_out);
    } else {
        across_of_pairs(axis, axis->pairs, one, other, out, other_out);
    }
}

/* Computes 32 bytes of a row from those of other rows. */
AVX2 static inline __m256i bytes_avx2(const Pair *weights, int pairs, const uint8_t *rows,
                                      size_t stride)
{
    const __m256i zero = _mm256_setzero_si256();
    __m256i high[4] = {zero, zero, zero, zero}, low[4] = {zero, zero, zero, zero};
    for (int n = 0; n < pairs; n++, rows += 2 * stride) {
        __m256i one = _mm256_loadu_si256((const __m256i *)rows);
        __m256i other = _mm256_loadu_si256((const __m256i *)(rows + stride));
        __m256i left = _mm256_unpacklo_epi8(one, other), right = _mm256_unpackhi_epi8(one, other);
        __m256i parts[4] = {_mm256_unpacklo_epi8(left, zero), _mm256_unpackhi_epi8(left, zero),
                            _mm256_unpacklo_epi8(right, zero), _mm256_unpackhi_epi8(right, zero)};
        for (int k = 0; k < 4; k++) {
            __m256i by_high = _mm256_madd_epi16(parts[k], twice(weights[n].high));
            __m256i by_low = _mm256_madd_epi16(parts[k], twice(weights[n].low));
            high[k] = _mm256_add_epi32(high[k], by_high);
            low[k] = _mm256_add_epi32(low[k], by_low);
        }
    }
    __m256i left = _mm256_packs_epi32(narrowed(high[0], low[0]), narrowed(high[1], low[1]));
    __m256i right = _mm256_packs_epi32(narrowed(high[2], low[2]), narrowed(high[3], low[3]));
    return _mm256_packus_epi16(left, right);
}

AVX2 static inline void down_of_pairs(const Pair *weights, int pairs, const uint8_t *rows,
                                      size_t stride, uint8_t *out, size_t bytes)
{
    size_t at = 0;
    for (; at + 32 <= bytes; at += 32) {
        __m256i made = bytes_avx2(weights, pairs, rows + at, stride);
        _mm256_storeu_si256((__m256i *)(out + at), made);
    }
    if (at < bytes) { /* the bytes after the row may belong to another thread */
        uint8_t last[32];
        __m256i made = bytes_avx2(weights, pairs, rows + at, stride);
        _mm256_storeu_si256((__m256i *)last, made);
        memcpy(out + at, last, bytes - at);
    }
}

AVX2 static void down_avx2(const Pair *weights, int pairs, const uint8_t *rows, size_t stride,
                           uint8_t *out, size_t bytes)
{
    if (pairs == 1) {
        down_of_pairs(weights, 1, rows, stride, out, bytes);
    } else if (pairs == 2) {
        down_of_pairs(weights, 2, rows, stride, out, bytes);
    } else {
        down_of_pairs(weights, pairs, rows, stride, out, bytes);
    }
}

#endif

/* Resizes two rows, which may be the same one. */
static void across(const Axis *axis, const uint8_t *one, const uint8_t *other, uint8_t *out,
                   uint8_t *other_out)
{
#ifdef AVX2
    if (use_avx2) {
        across_avx2(axis, one, other, out, other_out);
        return;
    }
#endif
    across_plain(axis, one, other, out, other_out);
}

static void down(const Pair *weights, int pairs, const uint8_t *rows, size_t stride, uint8_t *out,
                 size_t bytes)
{
#ifdef AVX2
    if (use_avx2) {
        down_avx2(weights, pairs, rows, stride, out, bytes);
        return;
    }
#endif
    down_plain(weights, pairs, rows, stride, out, bytes);
}

/* --- one image ------------------------------------------------------------------------------ */

/* Whether a job is valid for some image. */
static int is_possible(const Job *job, const Image *out)
{
    return job->x >= 0 && job->y >= 0 && job->width > 0 && job->height > 0 && job->left >= 0 &&
           job->top >= 0 && out->width > 0 && out->height > 0 &&
           (long long)job->left + out->width <= job->full_width &&
           (long long)job->top + out->height <= job->full_height;
}

static int is_inside(const Job *job, long long width, long long height)
{
    return (long long)job->x + job->width <= width && (long long)job->y + job->height <= height;
}

/* The factor by which a JPEG is reduced while decoding, as in jpeg.py. */
static int reduction(const Job *job)
{
    int longest = job->width > job->height ? job->width : job->height, reduced = 1;
    for (int part = 2; part <= 8 && longest >= SHORTEST; part *= 2) {
        if (job->width >= (long long)part * LEFT * job->full_width &&
            job->height >= (long long)part * LEFT * job->full_height) {
            reduced = part;
        }
    }
    return reduced;
}

/* Makes the axes of a job. `*x` and `*y` get the first pixel of the crop in the image reduced by
   `reduced`, to which positions of the axes are relative. */
static int make_axes(Work *work, const Job *job, int reduced, const Image *out, int *x, int *y)
{
    int stop_x = (int)(((long long)job->x + job->width + reduced - 1) / reduced);
    int stop_y = (int)(((long long)job->y + job->height + reduced - 1) / reduced);
    *x = job->x / reduced;
    *y = job->y / reduced;
    double left = (double)job->x / reduced - *x, top = (double)job->y / reduced - *y;
    return make_axis(&work->x, left, left + (double)job->width / reduced, stop_x - *x,
                     job->full_width, job->left, out->width, job->flip) &&
           make_axis(&work->y, top, top + (double)job->height / reduced, stop_y - *y,
                     job->full_height, job->top, out->height, 0);
}

/* The bytes from one row of `middle` to the next; these rows are as wide as the window. */
static size_t middle_stride(const Work *work)
{
    return (size_t)work->x.count * CHANNELS + SLACK;
}

/* Allocates two rows of `bytes`, and the rows of the window's width with one to spare: if the
   number of weights is odd, one more row is read and multiplied by zero. */
static int make_room(Work *work, size_t bytes)
{
    unsigned long long height = (unsigned long long)(work->y.stop - work->y.first) + 1;
    size_t stride = bytes + SLACK + ALIGNED - (bytes + SLACK) % ALIGNED;
    work->rows = reserved(work->rows, &work->rows_size, 2ULL * stride + 2 * ALIGNED);
    work->middle = reserved(work->middle, &work->middle_size, height * middle_stride(work));
    if (!work->rows || !work->middle) {
        return 0;
    }
    work->one = work->rows + (ALIGNED - (uintptr_t)work->rows % ALIGNED) + ALIGNED / 8;
    work->other = work->one + stride;
    return 1;
}

static void finish(const Work *work, const Image *out)
{
    size_t stride = middle_stride(work), bytes = (size_t)out->width * CHANNELS;
    for (int n = 0; n < work->y.count; n++) {
        down(work->y.weights + (size_t)n * work->y.pairs, work->y.pairs,
             work->middle + (size_t)work->y.start[n] * stride, stride,
             out->pixels + (size_t)n * bytes, bytes);
    }
}

static int crop_pixels(Work *work, const Image *image, const Job *job, int reduced,
                       const Image *out)
{
    int x, y;
    if (!make_axes(work, job, reduced, out, &x, &y)) {
        return 0;
    }
    size_t bytes = (size_t)(work->x.stop - work->x.first) * CHANNELS;
    if (!make_room(work, bytes)) {
        return 0;
    }
    size_t stride = (size_t)image->width * CHANNELS, out_stride = middle_stride(work);
    const uint8_t *from = image->pixels + (size_t)(y + work->y.first) * stride +
                          (size_t)(x + work->x.first) * CHANNELS;
    uint8_t *one = work->one, *other = work->other, *to = work->middle;
    for (int n = work->y.first; n < work->y.stop; n += 2, to += 2 * out_stride) {
        int last = n + 1 == work->y.stop; /* copy the rows, as loops read past their end */
        memcpy(one, from, bytes);
        memcpy(other, last ? from : from + stride, bytes);
        across(&work->x, one, last ? one : other, to, last ? to : to + out_stride);
        from += last ? 0 : 2 * stride;
    }
    finish(work, out);
    return 1;
}

static void on_failure(j_common_ptr jpeg)
{
    longjmp(((Work *)jpeg->client_data)->failed, 1);
}

/* A warning means that pixels were invented: leave the image to the strict decoder. */
static void on_message(j_common_ptr jpeg, int level)
{
    if (level < 0) {
        on_failure(jpeg);
    }
}

static void start_work(Work *work)
{
    memset(work, 0, sizeof *work);
    work->jpeg.err = jpeg_std_error(&work->errors);
    work->errors.error_exit = on_failure;
    work->errors.emit_message = on_message;
    work->jpeg.client_data = work;
}

/* Whether a progressive image lacks some of its bits: libjpeg then smooths it, which needs pixels
   outside the crop. */
static int is_unfinished(j_decompress_ptr jpeg)
{
    if (!jpeg->progressive_mode || jpeg->coef_bits == NULL) {
        return 0;
    }
    for (int n = 0; n < jpeg->num_components; n++) {
        for (int k = 0; k < DCTSIZE2; k++) {
            if (jpeg->coef_bits[n][k] != 0) {
                return 1;
            }
        }
    }
    return 0;
}

/* Starts to decode the lines and columns that the axes need; `*before` gets the number of columns
   in a row before the first needed one. */
static void start_crop(Work *work, int x, int y, int *before)
{
    j_decompress_ptr jpeg = &work->jpeg;
    /* The colour of a pixel is interpolated from its neighbours, and the first and last decoded
       columns lack one. Two samples also keep the library from switching its method. */
    int margin = 2 * jpeg->max_h_samp_factor;
    int needed = x + work->x.first, stop = x + work->x.stop + margin;
    JDIMENSION left = (JDIMENSION)(needed > margin ? needed - margin : 0);
    int most = (int)jpeg->output_width;
    JDIMENSION width = (JDIMENSION)(stop < most ? stop : most) - left;
    jpeg_crop_scanline(jpeg, &left, &width);
    *before = needed - (int)left;
    if (y + work->y.first > 0) {
        jpeg_skip_scanlines(jpeg, (JDIMENSION)(y + work->y.first));
    }
}

static void read_row(j_decompress_ptr jpeg, uint8_t *row)
{
    JSAMPROW rows[1] = {row};
    if (jpeg_read_scanlines(jpeg, rows, 1) != 1) {
        on_failure((j_common_ptr)jpeg);
    }
}

/* Returns whether the crop was written; `on_failure` jumps out of it. */
static int decode_crop(Work *work, const Py_buffer *data, const Job *job, const Image *out,
                       unsigned long long most)
{
    j_decompress_ptr jpeg = &work->jpeg;
    int x, y, before, reduced = reduction(job);
    jpeg_mem_src(jpeg, data->buf, (unsigned long)data->len);
    jpeg_read_header(jpeg, TRUE);
    if (jpeg->arith_code || (jpeg->num_components != 1 && jpeg->num_components != 3) ||
        (unsigned long long)jpeg->image_width * jpeg->image_height > most ||
        !is_inside(job, jpeg->image_width, jpeg->image_height) ||
        !make_axes(work, job, reduced, out, &x, &y)) {
        return 0;
    }
    jpeg->out_color_space = JCS_RGB;
    jpeg->scale_num = 1;
    jpeg->scale_denom = (unsigned)reduced;
    jpeg_start_decompress(jpeg);
    if (is_unfinished(jpeg)) {
        return 0;
    }
    start_crop(work, x, y, &before);
    size_t bytes = (size_t)jpeg->output_width * CHANNELS;
    if (!make_room(work, bytes)) {
        return 0;
    }
    size_t stride = middle_stride(work);
    uint8_t *one = work->one, *other = work->other, *to = work->middle;
    for (int n = work->y.first; n < work->y.stop; n += 2, to += 2 * stride) {
        int last = n + 1 == work->y.stop;
        const uint8_t *left = one + before * CHANNELS, *below = other + before * CHANNELS;
        read_row(jpeg, one);
        if (!last) {
            read_row(jpeg, other);
        }
        across(&work->x, left, last ? left : below, to, last ? to : to + stride);
    }
    finish(work, out);
    return 1;
}

/* Each image gets a new decoder: its tables must not be used for the next image, which may lack
   them. The library uses the standard Huffman tables for an image without any. */
static int crop_jpeg(Work *work, const Py_buffer *data, const Job *job, const Image *out,
                     unsigned long long most)
{
    if (setjmp(work->failed)) {
        jpeg_destroy_decompress(&work->jpeg);
        return 0;
    }
    jpeg_create_decompress(&work->jpeg);
    int done = decode_crop(work, data, job, out, most);
    jpeg_destroy_decompress(&work->jpeg);
    return done;
}

/* --- for Python ------------------------------------------------------------------------------- */

/* The same messages as in crop.py. */
#define IMPOSSIBLE "a crop without pixels, or a window that is not inside of its size"
#define OUTSIDE "a crop that is not inside of its image"

/* The arguments of a call. Held buffers keep their objects alive and at the same address. */
typedef struct {
    Py_ssize_t count;
    PyObject *inputs, *outputs;
    Py_buffer *held;
    Py_ssize_t held_count;
    Image *images, *rows;
} Call;

static Py_buffer *hold(Call *call, PyObject *object, int flags)
{
    Py_buffer *buffer = &call->held[call->held_count];
    if (PyObject_GetBuffer(object, buffer, flags) < 0) {
        return NULL;
    }
    call->held_count++;
    return buffer;
}

/* Returns the data of an array that must have `bytes` bytes; NULL if an error is set. */
static void *array_of(Call *call, PyObject *object, int flags, size_t bytes)
{
    const Py_buffer *buffer = hold(call, object, PyBUF_C_CONTIGUOUS | flags);
    if (buffer == NULL) {
        return NULL;
    }
    if ((size_t)buffer->len != bytes) {
        PyErr_Format(PyExc_ValueError, "an array of %zd bytes, expected %zu", buffer->len, bytes);
        return NULL;
    }
    return buffer->buf;
}

static int image_of(Call *call, PyObject *object, int flags, Image *image)
{
    const Py_buffer *buffer = hold(call, object, PyBUF_C_CONTIGUOUS | flags);
    if (buffer == NULL) {
        return 0;
    }
    if (buffer->ndim != 3 || buffer->itemsize != 1 || buffer->shape[2] != CHANNELS ||
        buffer->shape[0] > LONGEST || buffer->shape[1] > LONGEST) {
        PyErr_SetString(PyExc_ValueError, "expected arrays (height, width, 3) of uint8");
        return 0;
    }
    *image = (Image){buffer->buf, (int)buffer->shape[0], (int)buffer->shape[1]};
    return 1;
}

static void end_call(Call *call)
{
    while (call->held_count > 0) {
        PyBuffer_Release(&call->held[--call->held_count]);
    }
    PyMem_Free(call->held);
    PyMem_Free(call->images);
    PyMem_Free(call->rows);
    Py_XDECREF(call->inputs);
    Py_XDECREF(call->outputs);
}

/* Starts a call on `inputs` that writes to the rows in `outputs`, and uses `others` more arrays. */
static int begin_call(Call *call, PyObject *inputs, PyObject *outputs, Py_ssize_t others)
{
    memset(call, 0, sizeof *call);
    call->inputs = PySequence_Fast(inputs, "images are a sequence");
    call->outputs = PySequence_Fast(outputs, "rows are a sequence");
    if (call->inputs == NULL || call->outputs == NULL) {
        return 0;
    }
    call->count = PySequence_Fast_GET_SIZE(call->inputs);
    if (PySequence_Fast_GET_SIZE(call->outputs) != call->count) {
        PyErr_SetString(PyExc_ValueError, "as many rows as images are needed");
        return 0;
    }
    call->held = PyMem_New(Py_buffer, 2 * call->count + others);
    call->images = PyMem_New(Image, call->count);
    call->rows = PyMem_New(Image, call->count);
    if (call->held == NULL || call->images == NULL || call->rows == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    for (Py_ssize_t n = 0; n < call->count; n++) {
        PyObject *row = PySequence_Fast_GET_ITEM(call->outputs, n);
        if (!image_of(call, row, PyBUF_WRITABLE, &call->rows[n])) {
            return 0;
        }
    }
    return 1;
}

/* Returns the jobs of the call; NULL if one of them is invalid. */
static const Job *jobs_of(Call *call, PyObject *object)
{
    const Job *jobs = array_of(call, object, 0, (size_t)call->count * sizeof(Job));
    for (Py_ssize_t n = 0; n < call->count && jobs; n++) {
        if (!is_possible(&jobs[n], &call->rows[n])) {
            PyErr_SetString(PyExc_ValueError, IMPOSSIBLE);
            return NULL;
        }
    }
    return jobs;
}

/* Ends a call; returns None, or NULL if an error is set. */
static PyObject *ended(Call *call)
{
    end_call(call);
    if (PyErr_Occurred()) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static void crop_all_jpegs(const Call *call, const Py_buffer *data, const Job *jobs, uint8_t *done,
                           unsigned long long most)
{
    Work work;
    start_work(&work);
    for (Py_ssize_t n = 0; n < call->count; n++) {
        done[n] = (uint8_t)crop_jpeg(&work, &data[n], &jobs[n], &call->rows[n], most);
    }
    release(&work);
}

static PyObject *py_crop_jpegs(PyObject *module, PyObject *args)
{
    PyObject *images, *jobs_array, *rows, *done_array;
    unsigned long long most;
    Call call;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOK", &images, &jobs_array, &rows, &done_array, &most)) {
        return NULL;
    }
    if (!begin_call(&call, images, rows, 2)) {
        return ended(&call);
    }
    const Job *jobs = jobs_of(&call, jobs_array);
    uint8_t *done =
        jobs ? array_of(&call, done_array, PyBUF_WRITABLE, (size_t)call.count) : NULL;
    if (done == NULL) {
        return ended(&call);
    }
    const Py_buffer *data = &call.held[call.held_count];
    for (Py_ssize_t n = 0; n < call.count; n++) {
        if (!hold(&call, PySequence_Fast_GET_ITEM(call.inputs, n), PyBUF_SIMPLE)) {
            return ended(&call);
        }
    }
    Py_BEGIN_ALLOW_THREADS
    crop_all_jpegs(&call, data, jobs, done, most);
    Py_END_ALLOW_THREADS
    return ended(&call);
}

/* Returns whether there was enough memory for all images. */
static int crop_all_pixels(const Call *call, const Job *jobs, int reduced)
{
    Work work;
    int done = 1;
    start_work(&work);
    for (Py_ssize_t n = 0; n < call->count && done; n++) {
        done = crop_pixels(&work, &call->images[n], &jobs[n], reduced, &call->rows[n]);
    }
    release(&work);
    return done;
}

static PyObject *py_crop_pixels(PyObject *module, PyObject *args)
{
    PyObject *images, *jobs_array, *rows;
    Call call;
    int reduced, done = 1;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOi", &images, &jobs_array, &rows, &reduced)) {
        return NULL;
    }
    if (reduced < 1 || reduced > 8) {
        PyErr_SetString(PyExc_ValueError, "images are reduced by 1 to 8");
        return NULL;
    }
    if (!begin_call(&call, images, rows, 1)) {
        return ended(&call);
    }
    const Job *jobs = jobs_of(&call, jobs_array);
    for (Py_ssize_t n = 0; n < call.count && jobs; n++) {
        const Image *image = &call.images[n];
        if (!image_of(&call, PySequence_Fast_GET_ITEM(call.inputs, n), 0, &call.images[n])) {
            jobs = NULL;
        } else if (!is_inside(&jobs[n], (long long)image->width * reduced,
                              (long long)image->height * reduced)) {
            PyErr_SetString(PyExc_ValueError, OUTSIDE);
            jobs = NULL;
        }
    }
    if (jobs != NULL) {
        Py_BEGIN_ALLOW_THREADS
        done = crop_all_pixels(&call, jobs, reduced);
        Py_END_ALLOW_THREADS
    }
    if (!done) {
        PyErr_NoMemory();
    }
    return ended(&call);
}

#define LEVELS (256 * CHANNELS)

#define LOOK_UP(name, type)                                                                        \
    static void name(const uint8_t *pixels, Py_ssize_t count, const type *table, type *out)        \
    {                                                                                              \
        for (Py_ssize_t n = 0; n < count; n += CHANNELS) {                                         \
            for (int c = 0; c < CHANNELS; c++) {                                                   \
                out[n + c] = table[pixels[n + c] * CHANNELS + c];                                  \
            }                                                                                      \
        }                                                                                          \
    }

LOOK_UP(look_up_2, uint16_t)
LOOK_UP(look_up_4, uint32_t)

/* Maps `pixels` through `table`: 256 rows with a value of 2 or 4 bytes for each channel. */
static PyObject *py_look_up(PyObject *module, PyObject *args)
{
    Py_buffer pixels, table, out;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*w*", &pixels, &table, &out)) {
        return NULL;
    }
    Py_ssize_t size = table.len / LEVELS, count = pixels.len;
    int fits = (size == 2 || size == 4) && table.len == size * LEVELS && out.len == size * count &&
               count % CHANNELS == 0;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        if (size == 2) {
            look_up_2(pixels.buf, count, table.buf, out.buf);
        } else {
            look_up_4(pixels.buf, count, table.buf, out.buf);
        }
        Py_END_ALLOW_THREADS
    } else {
        PyErr_SetString(PyExc_ValueError, "the sizes of pixels, table and output do not fit");
    }
    PyBuffer_Release(&pixels);
    PyBuffer_Release(&table);
    PyBuffer_Release(&out);
    return fits ? Py_NewRef(Py_None) : NULL;
}

/* For tests: switches AVX2 on or off; returns whether it is used. */
static PyObject *py_use_avx2(PyObject *module, PyObject *wanted)
{
    (void)module;
#ifdef AVX2
    use_avx2 = PyObject_IsTrue(wanted) == 1 && __builtin_cpu_supports("avx2");
    return PyBool_FromLong(use_avx2);
#else
    (void)wanted;
    Py_RETURN_FALSE;
#endif
}

static PyMethodDef methods[] = {
    {"crop_jpegs", py_crop_jpegs, METH_VARARGS, NULL},
    {"crop_pixels", py_crop_pixels, METH_VARARGS, NULL},
    {"look_up", py_look_up, METH_VARARGS, NULL},
    {"use_avx2", py_use_avx2, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

#define TEXT(macro) TEXT_OF(macro)
#define TEXT_OF(text) #text

static int prepare(PyObject *module)
{
#ifdef AVX2
    use_avx2 = __builtin_cpu_supports("avx2") != 0;
#endif
    return PyModule_AddStringConstant(module, "LIBJPEG_TURBO", TEXT(LIBJPEG_TURBO_VERSION));
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, prepare},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_crop",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__crop(void)
{
    return PyModuleDef_Init(&definition);
}
