/* The functions of crop.py, run without the interpreter lock: read the headers of JPEGs, draw their
   windows, decode the part of each that its window needs, resize, and look up pixels in tables.

   Resampling is Pillow's antialiased BILINEAR of 8-bit pixels, bit for bit: a triangle filter as
   wide as the scale, with 22-bit fixed-point weights, rows first, each pass rounded to 8 bits.
   Decoding uses libjpeg-turbo's jpeg_crop_scanline and jpeg_skip_scanlines.

   Jobs and images are not trusted. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <setjmp.h>
#include <stdatomic.h>
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
static atomic_int use_avx2;
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
    int32_t x, y, width, height, full_width, full_height, left, top, flip, orientation;
} Job;

typedef struct {
    uint8_t *pixels;
    int height, width;
    size_t stride; /* bytes from one row to the next */
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
    uint8_t *turned, *made;               /* upright pixels; a result before its table */
    size_t rows_size, middle_size, turned_size, made_size;
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
    free(work->turned);
    free(work->made);
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
           job->top >= 0 && job->orientation >= 1 && job->orientation <= 8 &&
           out->width > 0 && out->height > 0 &&
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
    size_t stride = middle_stride(work);
    for (int n = 0; n < work->y.count; n++) {
        down(work->y.weights + (size_t)n * work->y.pairs, work->y.pairs,
             work->middle + (size_t)work->y.start[n] * stride, stride,
             out->pixels + (size_t)n * out->stride, (size_t)out->width * CHANNELS);
    }
}

/* Resamples the pixels that the axes need, of rows that are `stride` bytes apart. */
static int resample(Work *work, const uint8_t *from, size_t stride, const Image *out)
{
    size_t bytes = (size_t)(work->x.stop - work->x.first) * CHANNELS;
    if (!make_room(work, bytes)) {
        return 0;
    }
    size_t out_stride = middle_stride(work);
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

/* Copies the window of an image that is not resized: the same result, two to four times as fast. */
static void copy_pixels(const Image *image, const Job *job, const Image *out)
{
    size_t bytes = (size_t)out->width * CHANNELS;
    for (int n = 0; n < out->height; n++) {
        const uint8_t *from = image->pixels + (size_t)(job->y + job->top + n) * image->stride +
                              (size_t)(job->x + job->left) * CHANNELS;
        uint8_t *to = out->pixels + (size_t)n * out->stride;
        if (!job->flip) {
            memcpy(to, from, bytes);
        }
        for (size_t at = 0; at < bytes && job->flip; at += CHANNELS) {
            memcpy(to + bytes - CHANNELS - at, from + at, CHANNELS);
        }
    }
}

static int crop_pixels(Work *work, const Image *image, const Job *job, int reduced,
                       const Image *out)
{
    int x, y;
    if (reduced == 1 && job->width == job->full_width && job->height == job->full_height) {
        copy_pixels(image, job, out);
        return 1;
    }
    return make_axes(work, job, reduced, out, &x, &y) &&
           resample(work,
                    image->pixels + (size_t)(y + work->y.first) * image->stride +
                        (size_t)(x + work->x.first) * CHANNELS,
                    image->stride, out);
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

/* Starts to decode columns [needed, stop) of the lines from `top` on; returns the number of columns
   in a row before the first needed one. */
static int start_crop(j_decompress_ptr jpeg, int needed, int stop, int top)
{
    /* The colour of a pixel is interpolated from its neighbours, and the first and last decoded
       columns lack one. Two samples also keep the library from switching its method. */
    int margin = 2 * jpeg->max_h_samp_factor, most = (int)jpeg->output_width;
    JDIMENSION left = (JDIMENSION)(needed > margin ? needed - margin : 0);
    JDIMENSION width = (JDIMENSION)(stop + margin < most ? stop + margin : most) - left;
    jpeg_crop_scanline(jpeg, &left, &width);
    if (top > 0) {
        jpeg_skip_scanlines(jpeg, (JDIMENSION)top);
    }
    return needed - (int)left;
}

static void read_row(j_decompress_ptr jpeg, uint8_t *row)
{
    JSAMPROW rows[1] = {row};
    if (jpeg_read_scanlines(jpeg, rows, 1) != 1) {
        on_failure((j_common_ptr)jpeg);
    }
}

/* Resamples lines while they are decoded. `x` and `y` are those of `make_axes`. */
static int resample_lines(Work *work, int x, int y, const Image *out)
{
    j_decompress_ptr jpeg = &work->jpeg;
    int before = start_crop(jpeg, x + work->x.first, x + work->x.stop, y + work->y.first);
    if (!make_room(work, (size_t)jpeg->output_width * CHANNELS)) {
        return 0;
    }
    size_t stride = middle_stride(work);
    uint8_t *one = work->one, *other = work->other, *to = work->middle;
    const uint8_t *left = one + before * CHANNELS, *below = other + before * CHANNELS;
    for (int n = work->y.first; n < work->y.stop; n += 2, to += 2 * stride) {
        int last = n + 1 == work->y.stop;
        read_row(jpeg, one);
        if (!last) {
            read_row(jpeg, other);
        }
        across(&work->x, left, last ? left : below, to, last ? to : to + stride);
    }
    finish(work, out);
    return 1;
}

/* Whether EXIF's orientation, 1 to 8, swaps rows and columns. */
static int is_transposed(int orientation)
{
    return orientation >= 5;
}

/* Decodes what the axes need of an image that is not upright, turns it, and resamples it. */
static int resample_turned(Work *work, int orientation, int x, int y, const Image *out)
{
    j_decompress_ptr jpeg = &work->jpeg;
    int transposed = is_transposed(orientation);
    int back = orientation / 2 % 2;     /* columns are reversed: 2, 3, 6, 7 */
    int up = (orientation - 1) / 2 % 2; /* rows are reversed: 3, 4, 7, 8 */
    int columns = work->x.stop - work->x.first, rows = work->y.stop - work->y.first;
    int width = (int)(transposed ? jpeg->output_height : jpeg->output_width);
    int height = (int)(transposed ? jpeg->output_width : jpeg->output_height);
    int left = back ? width - (x + work->x.stop) : x + work->x.first;
    int top = up ? height - (y + work->y.stop) : y + work->y.first;
    size_t stride = (size_t)columns * CHANNELS;
    work->turned = reserved(work->turned, &work->turned_size, (unsigned long long)stride * rows);
    int needed = transposed ? top : left, count = transposed ? rows : columns;
    int before = start_crop(jpeg, needed, needed + count, transposed ? left : top);
    if (!work->turned || !make_room(work, (size_t)jpeg->output_width * CHANNELS)) {
        return 0;
    }
    uint8_t *to = work->turned + (back ? stride - CHANNELS : 0) + (up ? (rows - 1) * stride : 0);
    ptrdiff_t by_column = back ? -CHANNELS : CHANNELS;
    ptrdiff_t by_row = up ? -(ptrdiff_t)stride : (ptrdiff_t)stride;
    ptrdiff_t by_pixel = transposed ? by_row : by_column, by_line = transposed ? by_column : by_row;
    for (int line = 0; line < (transposed ? columns : rows); line++) {
        read_row(jpeg, work->one);
        const uint8_t *from = work->one + (size_t)before * CHANNELS;
        for (int n = 0; n < count; n++) {
            memcpy(to + line * by_line + n * by_pixel, from + (size_t)n * CHANNELS, CHANNELS);
        }
    }
    return resample(work, work->turned, stride, out);
}

typedef struct {
    const uint8_t *data;
    size_t size;
} Bytes;

/* Returns whether the crop was written; `on_failure` jumps out of it. */
static int decode_crop(Work *work, Bytes bytes, const Job *job, const Image *out,
                       unsigned long long most)
{
    j_decompress_ptr jpeg = &work->jpeg;
    int x, y, transposed = is_transposed(job->orientation);
    int reduced = job->orientation == 1 ? reduction(job) : 1;
    jpeg_mem_src(jpeg, bytes.data, (unsigned long)bytes.size);
    jpeg_read_header(jpeg, TRUE);
    unsigned width = jpeg->image_width, height = jpeg->image_height;
    if (jpeg->arith_code || (jpeg->num_components != 1 && jpeg->num_components != 3) ||
        (unsigned long long)width * height > most ||
        !is_inside(job, transposed ? height : width, transposed ? width : height) ||
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
    return job->orientation == 1 ? resample_lines(work, x, y, out)
                                 : resample_turned(work, job->orientation, x, y, out);
}

/* Each image gets a new decoder: its tables must not be used for the next image, which may lack
   them. The library uses the standard Huffman tables for an image without any. */
static int crop_jpeg(Work *work, Bytes bytes, const Job *job, const Image *out,
                     unsigned long long most)
{
    if (setjmp(work->failed)) {
        jpeg_destroy_decompress(&work->jpeg);
        return 0;
    }
    jpeg_create_decompress(&work->jpeg);
    int done = decode_crop(work, bytes, job, out, most);
    jpeg_destroy_decompress(&work->jpeg);
    return done;
}

/* --- headers of JPEGs ------------------------------------------------------------------------- */

/* What header.py reads from a JPEG, as far as crop.py needs it. */
typedef struct {
    int width, height; /* as stored */
    int components, orientation;
    int may_be_rgb; /* whether its components may be red, green and blue, which decoders guess */
    int is_progressive, has_tables; /* Huffman's, for which libjpeg has a default */
    Bytes profile, scans;
} Header;

static size_t number_of(const uint8_t *at, int count, int big_endian)
{
    size_t number = 0;
    for (int n = 0; n < count; n++) {
        number = number << 8 | at[big_endian ? n : count - 1 - n];
    }
    return number;
}

/* Returns the orientation in EXIF data; 1 if there is none, or an invalid one. */
static int read_orientation(Bytes tiff)
{
    static const uint8_t entry[2][8] = {{0x12, 1, 3, 0, 1, 0, 0, 0}, {1, 0x12, 0, 3, 0, 0, 0, 1}};
    int big = tiff.size >= 8 && memcmp(tiff.data, "MM", 2) == 0;
    if (!big && (tiff.size < 8 || memcmp(tiff.data, "II", 2) != 0)) {
        return 1;
    }
    size_t at = number_of(tiff.data + 4, 4, big);
    if (at > tiff.size - 2) {
        return 1;
    }
    size_t count = number_of(tiff.data + at, 2, big);
    for (at += 2; count > 0 && at <= tiff.size && tiff.size - at >= 10; count--, at += 12) {
        if (memcmp(tiff.data + at, entry[big], 8) == 0) {
            size_t found = number_of(tiff.data + at + 8, 2, big);
            return found >= 1 && found <= 8 ? (int)found : 1;
        }
    }
    return 1;
}

static int read_frame(Header *header, Bytes bytes)
{
    if (header->width || bytes.size < 6 || bytes.data[0] != 8) { /* bits */
        return 0;
    }
    header->height = (int)number_of(bytes.data + 1, 2, 1);
    header->width = (int)number_of(bytes.data + 3, 2, 1);
    header->components = bytes.data[5];
    if (!header->width || !header->height || bytes.size < 6 + 3 * (size_t)header->components) {
        return 0;
    }
    if (header->components != 3) {
        return header->components == 1;
    }
    const uint8_t *sampling = bytes.data + 7; /* of each component, three bytes apart */
    int is_chroma = sampling[0] == 0x11 || sampling[0] == 0x21 || sampling[0] == 0x22 ||
                    sampling[0] == 0x12 || sampling[0] == 0x41;
    header->may_be_rgb |= sampling[-1] == 'R' && sampling[2] == 'G' && sampling[5] == 'B';
    return is_chroma && sampling[3] == 0x11 && sampling[6] == 0x11;
}

/* Reads a segment; returns 0 if the image must be left to others. */
static int read_segment(Header *header, int marker, Bytes bytes)
{
    if (marker == 0xC4) {
        header->has_tables = 1;
    } else if (marker <= 0xCF) {
        header->is_progressive = marker == 0xC2;
        return marker <= 0xC2 && read_frame(header, bytes);
    }
    if (marker == 0xE1 && bytes.size >= 6 && memcmp(bytes.data, "Exif\0", 6) == 0) { /* two 0s */
        header->orientation = read_orientation((Bytes){bytes.data + 6, bytes.size - 6});
    }
    if (marker == 0xE2 && bytes.size >= 12 && memcmp(bytes.data, "ICC_PROFILE", 12) == 0) {
        /* A profile of several parts, or smaller than the header of one. */
        if (header->profile.data != NULL || bytes.size < 14 + 128) {
            return 0;
        }
        header->profile = (Bytes){bytes.data + 14, bytes.size - 14};
    }
    if (marker == 0xEE && bytes.size >= 12 && memcmp(bytes.data, "Adobe", 5) == 0) {
        header->may_be_rgb |= bytes.data[11] == 0;
    }
    return 1;
}

/* Reads the header of a JPEG as header.py does; returns 0 if `can_crop` refuses the image for
   another reason than its profile, or if the header is an unusual one. */
static int read_header(Header *header, Bytes bytes)
{
    static const uint8_t start[3] = {0xFF, 0xD8, 0xFF}, end[2] = {0xFF, 0xD9};
    *header = (Header){.orientation = 1};
    if (bytes.size < 4 || memcmp(bytes.data, start, sizeof start) != 0 ||
        memcmp(bytes.data + bytes.size - 2, end, sizeof end) != 0) {
        return 0;
    }
    for (size_t at = 2; bytes.size - at >= 4 && bytes.data[at] == 0xFF;) {
        int marker = bytes.data[at + 1];
        size_t length = number_of(bytes.data + at + 2, 2, 1);
        if (marker == 0xDA) {
            header->scans = (Bytes){bytes.data + at, bytes.size - at};
            return header->width != 0;
        }
        if (marker == 0xFF) { /* fill bytes are allowed before a marker */
            at++;
        } else if (marker < 0xC0 || (marker >= 0xD0 && marker <= 0xD9) || length < 2 ||
                   length > bytes.size - at - 2 ||
                   !read_segment(header, marker, (Bytes){bytes.data + at + 4, length - 2})) {
            return 0;
        } else {
            at += 2 + length;
        }
    }
    return 0;
}

/* Whether other decoders make the same of an image. Of its damage, only wrong markers are seen: in
   the one scan of a baseline image, there are only those of restarts. */
static int is_common(const Header *header)
{
    const uint8_t *at = header->scans.data + 2, *end = header->scans.data + header->scans.size - 2;
    int is_plain = header->has_tables && !header->may_be_rgb;
    while (is_plain && !header->is_progressive && (at = memchr(at, 0xFF, (size_t)(end - at)))) {
        is_plain = at[1] == 0 || (at[1] >= 0xD0 && at[1] <= 0xD7) || at[1] == 0xFF;
        at += 1;
    }
    return is_plain;
}

/* --- windows ---------------------------------------------------------------------------------- */

/* Transforms of steps.py, as `crop_many` gets them: a kind, and its numbers. */
enum { RANDOM_RESIZED_CROP, RESIZE, RESIZE_SHORTER, CENTER_CROP, HORIZONTAL_FLIP, KINDS };

typedef struct {
    double kind, width, height, range[4];
} Step;

#define TRIES 10
#define MAX_SIDE (1 << 15)

static const int drawn_by[KINDS] = {[RANDOM_RESIZED_CROP] = 2 + 2 * TRIES, [HORIZONTAL_FLIP] = 1};

/* As in window.py. */
typedef struct {
    int64_t x, y, width, height, full_width, full_height, left, top, flip, columns, rows;
} Window;

static double between(double low, double high, double drawn)
{
    return low + (high - low) * drawn;
}

/* Crops the largest part with an allowed aspect ratio, in the center. */
static void take_largest(Window *window, double least, double most)
{
    double width = (double)window->columns, height = (double)window->rows;
    window->width = window->columns;
    window->height = window->rows;
    if (width / height < least) {
        window->height = (int64_t)fmin(fmax(rint(width / least), 1), height);
    } else if (width / height > most) {
        window->width = (int64_t)fmin(fmax(rint(height * most), 1), width);
    }
    window->x = (window->columns - window->width) / 2;
    window->y = (window->rows - window->height) / 2;
}

/* Crops a part as RandomResizedCrop does; returns 0 if a number is infinite, or not a number. */
static int take_random(Window *window, const Step *step, const double *drawn)
{
    double width = (double)window->columns, height = (double)window->rows;
    double least = log(step->range[2]), most = log(step->range[3]);
    for (int n = 2; n < 2 + 2 * TRIES; n += 2) {
        double area = width * height * between(step->range[0], step->range[1], drawn[n]);
        double aspect = exp(between(least, most, drawn[n + 1]));
        double w = rint(sqrt(area * aspect)), h = rint(sqrt(area / aspect));
        if (!isfinite(aspect) || !isfinite(w) || !isfinite(h)) {
            return 0;
        }
        if (w > 0 && w <= width && h > 0 && h <= height) {
            double x = drawn[0] * (width - w + 1), y = drawn[1] * (height - h + 1);
            if (!(x >= 0 && x < width && y >= 0 && y < height)) {
                return 0;
            }
            window->x = (int64_t)x;
            window->y = (int64_t)y;
            window->width = (int64_t)w;
            window->height = (int64_t)h;
            return 1;
        }
    }
    take_largest(window, step->range[2], step->range[3]);
    return 1;
}

/* Sets a part of the resized image; it extends beyond the edges where that is smaller. */
static void cut_center(Window *window, int64_t width, int64_t height)
{
    int64_t spare[2] = {window->columns - width, window->rows - height}, start[2];
    for (int n = 0; n < 2; n++) {
        start[n] = spare[n] > 0 ? (int64_t)rint((double)spare[n] / 2) : -(-spare[n] / 2);
    }
    window->left = window->flip ? spare[0] - start[0] : start[0];
    window->top = start[1];
    window->columns = width;
    window->rows = height;
}

/* Returns 0 if steps.py must look at it. */
static int apply_step(Window *window, const Step *step, const double *drawn)
{
    int64_t width = (int64_t)step->width, height = (int64_t)step->height;
    int64_t one = window->columns, other = window->rows;
    switch ((int)step->kind) {
    case RESIZE_SHORTER:
        if (one <= other) {
            height = (int64_t)((double)(width * other) / (double)one);
        } else {
            width = (int64_t)((double)(height * one) / (double)other);
        }
        break;
    case CENTER_CROP:
        cut_center(window, width, height);
        return 1;
    case HORIZONTAL_FLIP:
        window->flip ^= drawn[0] < step->range[0];
        return 1;
    case RANDOM_RESIZED_CROP:
        if (!take_random(window, step, drawn)) {
            return 0;
        }
    }
    window->full_width = window->columns = width;
    window->full_height = window->rows = height;
    return 1;
}

/* Whether no stage has more than `most` pixels; as `Window.pixels`, which is compared with it. */
static int is_small(const Window *window, int64_t most)
{
    int64_t wide = window->full_width, high = window->full_height;
    high = high > window->height ? high : window->height;
    return wide <= most && high <= most && wide * high <= most &&
           window->columns * window->rows <= most;
}

/* Returns the job of the part of a window that is inside the edges, and where it goes: `inner`, in
   the pixels of the full window. */
static Job job_of(const Window *window, int orientation, const Image *full, Image *inner)
{
    int64_t left = window->left > 0 ? window->left : 0, top = window->top > 0 ? window->top : 0;
    int64_t right = window->left + window->columns, bottom = window->top + window->rows;
    right = right < window->full_width ? right : window->full_width;
    bottom = bottom < window->full_height ? bottom : window->full_height;
    int64_t before = left - window->left;
    if (window->flip) {
        before = window->columns - before - (right - left);
    }
    *inner = *full;
    inner->width = (int)(right - left);
    inner->height = (int)(bottom - top);
    inner->pixels += (size_t)(top - window->top) * full->stride + (size_t)before * CHANNELS;
    return (Job){(int32_t)window->x, (int32_t)window->y, (int32_t)window->width,
                 (int32_t)window->height, (int32_t)window->full_width,
                 (int32_t)window->full_height, (int32_t)left, (int32_t)top,
                 (int32_t)window->flip, orientation};
}

/* --- tables ----------------------------------------------------------------------------------- */

#define LEVELS (256 * CHANNELS)

#define LOOK_UP(name, type)                                                                        \
    static void name(const uint8_t *pixels, size_t count, const type *table, type *out)            \
    {                                                                                              \
        for (size_t n = 0; n < count; n += CHANNELS) {                                             \
            for (int c = 0; c < CHANNELS; c++) {                                                   \
                out[n + c] = table[pixels[n + c] * CHANNELS + c];                                  \
            }                                                                                      \
        }                                                                                          \
    }

LOOK_UP(look_up_2, uint16_t)
LOOK_UP(look_up_4, uint32_t)

/* --- many images ------------------------------------------------------------------------------ */

/* The columns of a result in `windows`: those of a Window, then of the image. */
#define RESULT 14
/* As in crop.py. */
#define MOST_PROFILES 64

/* The arguments of `crop_many`. */
typedef struct {
    Bytes data;
    const int64_t *starts, *sizes;
    const double *drawn; /* `numbers` for each row */
    const Step *steps;
    Py_ssize_t count, numbers, step_count;
    int height, width; /* of raw pixels; 0 for encoded images */
    Bytes profiles[MOST_PROFILES]; /* those that are sRGB */
    Py_ssize_t profile_count;
    uint8_t *out, *done; /* `out` is NULL if windows are computed, and no image is decoded */
    int rows, columns;
    size_t item_size;
    const void *table;
    int32_t *windows;
    long long most; /* pixels */
} Many;

static int is_srgb(const Many *many, Bytes profile)
{
    for (Py_ssize_t n = 0; n < many->profile_count; n++) {
        if (many->profiles[n].size == profile.size &&
            memcmp(many->profiles[n].data, profile.data, profile.size) == 0) {
            return 1;
        }
    }
    return 0;
}

/* Reads the header of an image, and returns whether `crop_many` supports it. */
static int accepts(const Many *many, Bytes bytes, Header *header)
{
    if (many->width) {
        *header = (Header){.width = many->width, .height = many->height, .orientation = 1};
        return bytes.size == (uint64_t)many->width * (uint64_t)many->height * CHANNELS;
    }
    if (!read_header(header, bytes) || (int64_t)header->width * header->height > many->most) {
        return 0;
    }
    const char *colour = header->components == 1 ? "GRAY" : "RGB ";
    return header->profile.data == NULL ||
           (is_srgb(many, header->profile) && !memcmp(header->profile.data + 16, colour, 4));
}

/* Computes the window of an image of this size; returns 0 if steps.py must look at it. */
static int make_window(const Many *many, const double *drawn, int width, int height, Window *window)
{
    *window = (Window){0, 0, width, height, width, height, 0, 0, 0, width, height};
    for (Py_ssize_t n = 0; n < many->step_count; n++) {
        const Step *step = &many->steps[n];
        if (!apply_step(window, step, drawn)) {
            return 0;
        }
        drawn += drawn_by[(int)step->kind];
    }
    return window->columns == many->columns && window->rows == many->rows &&
           is_small(window, many->most);
}

/* Crops an image to the window's pixels. */
static int fill(Work *work, const Many *many, Bytes bytes, const Header *header,
                const Window *window, uint8_t *pixels)
{
    size_t stride = (size_t)many->columns * CHANNELS;
    Image inner, full = {pixels, many->rows, many->columns, stride};
    Job job = job_of(window, header->orientation, &full, &inner);
    if (!is_possible(&job, &inner)) {
        return 0;
    }
    if (inner.width < full.width || inner.height < full.height) {
        memset(pixels, 0, stride * (size_t)many->rows);
    }
    if (!many->width) {
        return crop_jpeg(work, bytes, &job, &inner, (unsigned long long)many->most);
    }
    Image image = {(uint8_t *)bytes.data, many->height, many->width,
                   (size_t)many->width * CHANNELS};
    return is_inside(&job, image.width, image.height) &&
           crop_pixels(work, &image, &job, 1, &inner);
}

/* Crops an image to its row of the output. */
static int write_row(Work *work, const Many *many, Py_ssize_t row, Bytes bytes,
                     const Header *header, const Window *window)
{
    size_t count = (size_t)many->rows * many->columns * CHANNELS;
    uint8_t *out = many->out + (size_t)row * count * many->item_size;
    if (many->table) {
        work->made = reserved(work->made, &work->made_size, count);
    }
    uint8_t *pixels = many->table ? work->made : out;
    if (!pixels || !fill(work, many, bytes, header, window, pixels)) {
        return 0;
    }
    if (many->item_size == 2) {
        look_up_2(pixels, count, many->table, (uint16_t *)out);
    } else if (many->item_size == 4) {
        look_up_4(pixels, count, many->table, (uint32_t *)out);
    }
    return 1;
}

static int crop_row(Work *work, const Many *many, Py_ssize_t row)
{
    int64_t start = many->starts[row], size = many->sizes[row], length = (int64_t)many->data.size;
    if (start < 0 || size <= 0 || size > length || start > length - size) {
        return 0;
    }
    Bytes bytes = {many->data.data + start, (size_t)size};
    Header header;
    Window window;
    if (!accepts(many, bytes, &header)) {
        return 0;
    }
    int transposed = is_transposed(header.orientation);
    int width = transposed ? header.height : header.width;
    int height = transposed ? header.width : header.height;
    if (!make_window(many, many->drawn + row * many->numbers, width, height, &window)) {
        return 0;
    }
    if (many->out ? !write_row(work, many, row, bytes, &header, &window) : !is_common(&header)) {
        return 0;
    }
    int64_t result[RESULT] = {window.x, window.y, window.width, window.height, window.full_width,
                              window.full_height, window.left, window.top, window.flip,
                              window.columns, window.rows, header.width, header.height,
                              header.orientation};
    for (int n = 0; n < RESULT; n++) {
        many->windows[row * RESULT + n] = (int32_t)result[n];
    }
    return 1;
}

static void crop_rows(const Many *many)
{
    Work work;
    start_work(&work);
    for (Py_ssize_t n = 0; n < many->count; n++) {
        many->done[n] = (uint8_t)crop_row(&work, many, n);
    }
    release(&work);
}

/* --- for Python ------------------------------------------------------------------------------- */

/* The same messages as in crop.py. */
#define IMPOSSIBLE "a crop without pixels, or a window that is not inside of its size"
#define OUTSIDE "a crop that is not inside of its image"

/* The arguments of a call. Held buffers keep their objects alive and at the same address. */
typedef struct {
    Py_ssize_t count;
    PyObject *inputs, *outputs; /* tuples, which no other thread changes */
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
    int height = (int)buffer->shape[0], width = (int)buffer->shape[1];
    *image = (Image){buffer->buf, height, width, (size_t)width * CHANNELS};
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
    call->inputs = PySequence_Tuple(inputs);
    call->outputs = PySequence_Tuple(outputs);
    if (call->inputs == NULL || call->outputs == NULL) {
        return 0;
    }
    call->count = PyTuple_GET_SIZE(call->inputs);
    if (PyTuple_GET_SIZE(call->outputs) != call->count) {
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
        PyObject *row = PyTuple_GET_ITEM(call->outputs, n);
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
        Bytes bytes = {data[n].buf, (size_t)data[n].len};
        done[n] = (uint8_t)crop_jpeg(&work, bytes, &jobs[n], &call->rows[n], most);
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
        if (!hold(&call, PyTuple_GET_ITEM(call.inputs, n), PyBUF_SIMPLE)) {
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
        if (!image_of(&call, PyTuple_GET_ITEM(call.inputs, n), 0, &call.images[n])) {
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

/* The arrays of `crop_many`, in the order of its arguments. */
enum { DATA, STARTS, SIZES, DRAWN, PROGRAM, TABLE, OUT, DONE, WINDOWS, ARRAYS };

/* Whether steps are those of transforms, for which there are enough random numbers. */
static int are_steps(const Step *steps, Py_ssize_t count, Py_ssize_t numbers)
{
    for (Py_ssize_t n = 0; n < count; n++) {
        const Step *step = &steps[n];
        if (!(step->kind >= 0 && step->kind < KINDS && step->width >= 1 && step->height >= 1 &&
              step->width <= MAX_SIDE && step->height <= MAX_SIDE)) {
            return 0;
        }
        numbers -= drawn_by[(int)step->kind];
    }
    return numbers >= 0;
}

/* Whether sizes are those of images; 0 x 0 if `is_optional`. */
static int are_sides(int height, int width, int is_optional)
{
    int least = is_optional && !height && !width ? 0 : 1;
    return height >= least && width >= least && height <= LONGEST && width <= LONGEST;
}

/* Sets the arrays, and returns whether they fit together. */
static int set_arrays(Many *many, const Py_buffer *arrays)
{
    Py_ssize_t count = arrays[DONE].len, row = many->rows * (Py_ssize_t)many->columns * CHANNELS;
    many->count = count;
    many->data = (Bytes){arrays[DATA].buf, (size_t)arrays[DATA].len};
    many->starts = arrays[STARTS].buf;
    many->sizes = arrays[SIZES].buf;
    many->drawn = arrays[DRAWN].buf;
    many->numbers = count ? arrays[DRAWN].len / (Py_ssize_t)sizeof(double) / count : 0;
    many->steps = arrays[PROGRAM].buf;
    many->step_count = arrays[PROGRAM].len / (Py_ssize_t)sizeof(Step);
    many->table = arrays[TABLE].buf;
    many->item_size = many->table ? (size_t)arrays[TABLE].len / LEVELS : 1;
    many->out = arrays[OUT].len ? arrays[OUT].buf : NULL;
    many->done = arrays[DONE].buf;
    many->windows = arrays[WINDOWS].buf;
    row *= (Py_ssize_t)many->item_size;
    return (!many->table || many->item_size == 2 || many->item_size == 4) &&
           arrays[STARTS].len / (Py_ssize_t)sizeof(int64_t) == count &&
           arrays[SIZES].len / (Py_ssize_t)sizeof(int64_t) == count &&
           arrays[WINDOWS].len / (Py_ssize_t)sizeof(int32_t) / RESULT == count &&
           (!many->out || (arrays[OUT].len / row == count && arrays[OUT].len % row == 0)) &&
           (!count || are_steps(many->steps, many->step_count, many->numbers));
}

static int set_profiles(Many *many, PyObject *profiles)
{
    many->profile_count = PyTuple_GET_SIZE(profiles);
    for (Py_ssize_t n = 0; n < many->profile_count; n++) {
        PyObject *profile = PyTuple_GET_ITEM(profiles, n);
        if (n >= MOST_PROFILES || !PyBytes_Check(profile)) {
            return 0;
        }
        const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(profile);
        many->profiles[n] = (Bytes){data, (size_t)PyBytes_GET_SIZE(profile)};
    }
    return 1;
}

/* Crops the images in a buffer; crop.py describes the arguments. */
static PyObject *py_crop_many(PyObject *module, PyObject *args)
{
    Py_buffer all[ARRAYS];
    PyObject *profiles;
    Many many = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*z*w*w*w*(ii)(ii)O!L", &all[DATA], &all[STARTS],
                          &all[SIZES], &all[DRAWN], &all[PROGRAM], &all[TABLE], &all[OUT],
                          &all[DONE], &all[WINDOWS], &many.rows, &many.columns, &many.height,
                          &many.width, &PyTuple_Type, &profiles, &many.most)) {
        return NULL;
    }
    int fits = are_sides(many.rows, many.columns, 0) && are_sides(many.height, many.width, 1) &&
               many.most >= 0 && many.most <= LONGEST && set_profiles(&many, profiles) &&
               set_arrays(&many, all);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        crop_rows(&many);
        Py_END_ALLOW_THREADS
    } else {
        PyErr_SetString(PyExc_ValueError, "arrays that do not fit together, or invalid steps");
    }
    for (int n = 0; n < ARRAYS; n++) {
        PyBuffer_Release(&all[n]);
    }
    return fits ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef methods[] = {
    {"crop_many", py_crop_many, METH_VARARGS, NULL},
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
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
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
