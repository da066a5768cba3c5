/* Reads byte ranges of files without the interpreter lock, and makes Python objects of them.

   Offsets, sizes and bytes are not trusted. Other threads may change arrays that were passed while
   they are used, so each number is copied before it is checked. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

/* Memory to read into in one call, at most. */
#define VECTORS 1024
/* Unneeded bytes between two ranges that are read together: copying them takes half as long as the
   call that is saved. */
#define GAP 8192
/* The largest read, in bytes, that keeps the interpreter lock. */
#define SHORT (1 << 17)

/* Results of reading, besides the number of a range that cannot be read. LATE is DONE after having
   waited for the disk. */
enum { NO_MEMORY = -4, NO_ROOM = -3, LATE = -2, DONE = -1 };

typedef struct {
    int64_t offset, size;
    uint8_t *to;
    Py_ssize_t number;
    int32_t handle;
} Range;

static int by_position(const void *left, const void *right)
{
    const Range *a = left, *b = right;
    if (a->handle != b->handle) {
        return a->handle < b->handle ? -1 : 1;
    }
    return (a->offset > b->offset) - (a->offset < b->offset);
}

/* Reads into several pieces of memory. Returns the number of bytes, or -1: also if `wait` is 0, and
   the first byte is not in the system's page cache. */
static ssize_t read_some(int handle, const struct iovec *vectors, int count, off_t offset, int wait)
{
    ssize_t found = -1;
    do {
#ifdef RWF_NOWAIT
        found = wait ? preadv(handle, vectors, count, offset)
                     : preadv2(handle, vectors, count, offset, RWF_NOWAIT);
#else
        (void)count; /* the caller continues */
        found = wait ? pread(handle, vectors->iov_base, vectors->iov_len, offset) : -1;
#endif
    } while (found < 0 && errno == EINTR);
    return found;
}

/* Fills `vectors` with the memory for the first ranges and for the gaps between them, as far as one
   call can read them; sets the number of vectors. Returns the number of ranges. */
static Py_ssize_t gather(const Range *ranges, Py_ssize_t count, uint8_t *gap, struct iovec *vectors,
                         int *used)
{
    int64_t end = ranges->offset;
    Py_ssize_t n = 0;
    *used = 0;
    for (; n < count && *used + 2 <= VECTORS; n++) {
        int64_t between = ranges[n].offset - end;
        if (ranges[n].handle != ranges->handle || between < 0 || between > GAP) {
            break;
        }
        if (between > 0) {
            vectors[(*used)++] = (struct iovec){gap, (size_t)between};
        }
        if (ranges[n].size > 0) {
            vectors[(*used)++] = (struct iovec){ranges[n].to, (size_t)ranges[n].size};
        }
        end = ranges[n].offset + ranges[n].size;
    }
    return n;
}

/* Requests all ranges from the disk at once, which serves them 2 to 5 times as fast as one by one. */
static void announce(const Range *ranges, Py_ssize_t count)
{
#ifdef POSIX_FADV_WILLNEED
    for (Py_ssize_t n = 0; n < count; n++) {
        posix_fadvise(ranges[n].handle, ranges[n].offset, ranges[n].size, POSIX_FADV_WILLNEED);
    }
#else
    (void)ranges, (void)count;
#endif
}

/* Reads all ranges; those that are in order and near to each other together. Returns DONE, LATE, or
   the number of a range that the file does not have or that cannot be read; also of one that is not in
   the page cache, unless it `may_wait` for the disk. */
static Py_ssize_t read_all(const Range *ranges, Py_ssize_t count, int may_wait)
{
    struct iovec vectors[VECTORS], *next;
    uint8_t gap[GAP];
    int used, wait = 0;
    while (count > 0) {
        Py_ssize_t gathered = gather(ranges, count, gap, vectors, &used);
        int64_t offset = ranges->offset;
        for (next = vectors; used > 0;) {
            ssize_t found = read_some(ranges->handle, next, used, (off_t)offset, wait);
            if (found < 0 && !wait && may_wait) {
                announce(ranges, count);
                wait = 1;
                continue;
            }
            if (found <= 0) {
                while (ranges->offset + ranges->size <= offset) {
                    ranges++;
                }
                return ranges->number;
            }
            offset += found;
            for (; used > 0 && (size_t)found >= next->iov_len; next++, used--) {
                found -= (ssize_t)next->iov_len;
            }
            if (used > 0) {
                next->iov_base = (uint8_t *)next->iov_base + found;
                next->iov_len -= (size_t)found;
            }
        }
        ranges += gathered;
        count -= gathered;
    }
    return wait ? LATE : DONE;
}

/* --- arrays of numbers ------------------------------------------------------------------------ */

#define INVALID "invalid starts or sizes: they do not fit into the memory"

/* Holds the memory of an array of numbers of `size` bytes, whose type is one of `types`. */
static int hold(PyObject *object, Py_buffer *view, const char *types, Py_ssize_t size, int writable)
{
    if (PyObject_GetBuffer(object, view, PyBUF_ND | PyBUF_FORMAT | writable) < 0) {
        return 0;
    }
    const char *format = view->format;
    if (view->ndim == 1 && view->itemsize == size && format != NULL && format[0] != 0 &&
        format[1] == 0 && strchr(types, format[0]) != NULL) {
        return 1;
    }
    PyErr_SetString(PyExc_ValueError, "an array has the wrong type or shape");
    return 0;
}

static int hold_int64(PyObject *object, Py_buffer *view, int writable)
{
    return hold(object, view, "lq", 8, writable);
}

static int have_length(const Py_buffer *views, int count, Py_ssize_t length)
{
    for (int n = 0; n < count; n++) {
        if (views[n].shape[0] != length) {
            PyErr_SetString(PyExc_ValueError, "the arrays have different lengths");
            return 0;
        }
    }
    return 1;
}

static void release(Py_buffer *views, int count)
{
    for (int n = 0; n < count; n++) {
        PyBuffer_Release(&views[n]);
    }
}

/* Whether `size` bytes from `start` on are within `length` bytes. */
static int is_inside(int64_t start, int64_t size, int64_t length)
{
    return size >= 0 && size <= length && start >= 0 && start <= length - size;
}

/* --- the functions ---------------------------------------------------------------------------- */

/* Returns DONE, LATE, NO_MEMORY, NO_ROOM, or the number of a range that cannot be read. */
static Py_ssize_t read_unsorted(const Py_buffer *numbers, const Py_buffer *out)
{
    const int32_t *handles = numbers[0].buf;
    const int64_t *offsets = numbers[1].buf, *sizes = numbers[2].buf, *starts = numbers[3].buf;
    Py_ssize_t count = 0, all = numbers[0].shape[0], wrong = DONE;
    Range *ranges = malloc(sizeof(Range) * (size_t)(all + 1));
    int sorted = 1;
    if (ranges == NULL) {
        return NO_MEMORY;
    }
    for (Py_ssize_t n = 0; n < all; n++) {
        int64_t offset = offsets[n], size = sizes[n], start = starts[n];
        if (size <= 0) {
            continue;
        }
        if (!is_inside(start, size, out->len)) {
            free(ranges);
            return NO_ROOM;
        }
        if (!is_inside(offset, size, INT64_MAX) && wrong == DONE) {
            wrong = n;
        }
        ranges[count] = (Range){offset, size, (uint8_t *)out->buf + start, n, handles[n]};
        sorted = sorted && (count == 0 || by_position(&ranges[count - 1], &ranges[count]) <= 0);
        count++;
    }
    if (wrong == DONE) {
        if (!sorted) {
            qsort(ranges, (size_t)count, sizeof(Range), by_position);
        }
        wrong = read_all(ranges, count, 1);
    }
    free(ranges);
    return wrong;
}

/* read_ranges(handles, offsets, sizes, starts, out): reads sizes[n] bytes from offsets[n] on into
   out[starts[n]:]; none where a size is not positive. Returns -1, or -2 after having waited for
   the disk, or the number of a range that the file does not have or that cannot be read. */
static PyObject *py_read_ranges(PyObject *module, PyObject *args)
{
    PyObject *handles, *offsets, *sizes, *starts, *out, *result = NULL;
    Py_buffer views[5] = {{0}};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOO", &handles, &offsets, &sizes, &starts, &out)) {
        return NULL;
    }
    if (hold(handles, &views[0], "i", 4, 0) && hold_int64(offsets, &views[1], 0) &&
        hold_int64(sizes, &views[2], 0) && hold_int64(starts, &views[3], 0) &&
        have_length(views, 4, views[0].shape[0]) &&
        PyObject_GetBuffer(out, &views[4], PyBUF_WRITABLE) == 0) {
        Py_ssize_t found;
        Py_BEGIN_ALLOW_THREADS
        found = read_unsorted(views, &views[4]);
        Py_END_ALLOW_THREADS
        if (found == NO_MEMORY) {
            PyErr_NoMemory();
        } else if (found == NO_ROOM) {
            PyErr_SetString(PyExc_ValueError, INVALID);
        } else {
            result = PyLong_FromSsize_t(found);
        }
    }
    release(views, 5);
    return result;
}

/* read(handle, length, offset, size): returns the bytes of a range of a file of `length` bytes, or
   None if it is not in the file or cannot be read.

   A short read first keeps the interpreter lock: reacquiring it can take 5 ms, as another thread
   may hold it for so long, while copying from the page cache takes 5 us. If that would have to wait
   for the disk, the lock is released. */
static PyObject *py_read(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "read takes a handle, a length, an offset and a size");
        return NULL;
    }
    Range range = {.handle = (int32_t)PyLong_AsLong(args[0])};
    int64_t length = PyLong_AsLongLong(args[1]);
    int beyond = 0, larger = 0;
    range.offset = PyLong_AsLongLongAndOverflow(args[2], &beyond);
    range.size = PyLong_AsLongLongAndOverflow(args[3], &larger);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (beyond || larger || !is_inside(range.offset, range.size, length)) {
        Py_RETURN_NONE;
    }
    PyObject *data = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)range.size);
    if (data == NULL) {
        return NULL;
    }
    range.to = (uint8_t *)PyBytes_AS_STRING(data);
    Py_ssize_t wrong = range.size <= SHORT ? read_all(&range, 1, 0) : 0;
    if (wrong != DONE) {
        Py_BEGIN_ALLOW_THREADS
        wrong = read_all(&range, 1, 1);
        Py_END_ALLOW_THREADS
    }
    if (wrong >= 0) {
        Py_SETREF(data, Py_NewRef(Py_None));
    }
    return data;
}

/* Copies the values of `found`, which are new bytes objects or None, out of `data`. The lock is
   released, as memory that is touched for the first time takes as long as reading a file. Another
   thread may change `starts` meanwhile. */
static void copy_values(PyObject *found, const Py_buffer *data, const int64_t *starts)
{
    PyObject **values = ((PyListObject *)found)->ob_item;
    Py_ssize_t count = PyList_GET_SIZE(found);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t n = 0; n < count; n++) {
        int64_t start = starts[n];
        if (PyBytes_Check(values[n]) && is_inside(start, PyBytes_GET_SIZE(values[n]), data->len)) {
            memcpy(PyBytes_AS_STRING(values[n]), (const char *)data->buf + start,
                   (size_t)PyBytes_GET_SIZE(values[n]));
        }
    }
    Py_END_ALLOW_THREADS
}

/* slices(data, starts, sizes, text): returns a list of bytes objects, or of texts in UTF-8; None
   where a size is -1. */
static PyObject *py_slices(PyObject *module, PyObject *args)
{
    PyObject *starts_array, *sizes_array, *found = NULL;
    Py_buffer views[3] = {{0}};
    int text;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*OOp", &views[2], &starts_array, &sizes_array, &text)) {
        return NULL;
    }
    if (hold_int64(starts_array, &views[0], 0) && hold_int64(sizes_array, &views[1], 0) &&
        have_length(views, 2, views[0].shape[0])) {
        found = PyList_New(views[0].shape[0]);
    }
    const int64_t *starts = views[0].buf, *sizes = views[1].buf;
    for (Py_ssize_t n = 0; found != NULL && n < views[0].shape[0]; n++) {
        int64_t start = starts[n], size = sizes[n];
        PyObject *value = NULL;
        if (size == -1) {
            value = Py_NewRef(Py_None);
        } else if (!is_inside(start, size, views[2].len)) {
            PyErr_SetString(PyExc_ValueError, INVALID);
        } else {
            const char *bytes = (const char *)views[2].buf + start;
            value = text ? PyUnicode_DecodeUTF8(bytes, (Py_ssize_t)size, NULL)
                         : PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
        }
        if (value == NULL) {
            Py_CLEAR(found);
        } else {
            PyList_SET_ITEM(found, n, value);
        }
    }
    if (found != NULL && !text) {
        copy_values(found, &views[2], starts);
    }
    release(views, 3);
    return found;
}

/* Sets `*number` to the decimal number in `text`: digits, and perhaps a minus before them. Returns
   whether it is one, and within int64. */
static int parse(const uint8_t *text, int64_t size, int64_t *number)
{
    int negative = size > 0 && text[0] == '-';
    int64_t value = 0; /* less its sign: there is one more negative number */
    for (int64_t n = negative; n < size; n++) {
        int digit = text[n] - '0';
        if (digit < 0 || digit > 9 || value < (INT64_MIN + digit) / 10) {
            return 0;
        }
        value = value * 10 - digit;
    }
    if (size <= negative || (!negative && value == INT64_MIN)) {
        return 0;
    }
    *number = negative ? value : -value;
    return 1;
}

/* integers(data, starts, sizes, out): parses decimal numbers into `out`. Returns whether all are
   such numbers, and within int64. */
static PyObject *py_integers(PyObject *module, PyObject *args)
{
    PyObject *starts_array, *sizes_array, *out_array, *result = NULL;
    Py_buffer views[4] = {{0}};
    (void)module;
    if (!PyArg_ParseTuple(args, "y*OOO", &views[3], &starts_array, &sizes_array, &out_array)) {
        return NULL;
    }
    if (hold_int64(starts_array, &views[0], 0) && hold_int64(sizes_array, &views[1], 0) &&
        hold_int64(out_array, &views[2], PyBUF_WRITABLE) &&
        have_length(views, 3, views[0].shape[0])) {
        const int64_t *starts = views[0].buf, *sizes = views[1].buf;
        int64_t *out = views[2].buf;
        int valid = 1, inside = 1;
        for (Py_ssize_t n = 0; valid && n < views[0].shape[0]; n++) {
            int64_t start = starts[n], size = sizes[n];
            inside = size == -1 || is_inside(start, size, views[3].len);
            valid = inside && size > 0 && parse((uint8_t *)views[3].buf + start, size, &out[n]);
        }
        if (inside) {
            result = PyBool_FromLong(valid);
        } else {
            PyErr_SetString(PyExc_ValueError, INVALID);
        }
    }
    release(views, 4);
    return result;
}

static PyMethodDef methods[] = {
    {"read_ranges", py_read_ranges, METH_VARARGS, NULL},
    {"read", (PyCFunction)(void (*)(void))py_read, METH_FASTCALL, NULL},
    {"slices", py_slices, METH_VARARGS, NULL},
    {"integers", py_integers, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_reads",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__reads(void)
{
    return PyModuleDef_Init(&definition);
}
