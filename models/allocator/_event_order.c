/* Sorts the requests and frees of a step by instant: a counting sort over columns.

   events.py defines the order. Where there is no compiler, it does the same itself, several times slower; tests
   compare the two. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000 /* one build serves CPython 3.11 and all after it */
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct {
    const int64_t *num_bytes, *born, *dies, *reusable, *holders;
    const char *handed_over;
    Py_ssize_t count;
    int64_t end, num_holders;
} Columns;

enum { FREE, LET_GO, BEGINS, KINDS }; /* what happens at an instant, in this order */

/* Whether the entry lives at all; if so, when it begins, when it ends, and from when its block is free. */
static int lives(const Columns *of, Py_ssize_t entry, int64_t *born, int64_t *dies, int64_t *reusable)
{
    *born = of->born[entry] < 0 ? 0 : of->born[entry];
    *dies = of->dies[entry];
    *reusable = of->reusable[entry] < of->end ? of->reusable[entry] : of->end;
    return of->num_bytes[entry] > 0 && *born < of->end && *born < *dies;
}

static PyObject *in_order(const Columns *of)
{
    int64_t born, dies, reusable, total = 0;
    Py_ssize_t num_keys = KINDS * (Py_ssize_t)of->end + 1;
    Py_ssize_t *places = calloc(num_keys, sizeof(Py_ssize_t));
    PyObject *events;
    int64_t *to;
    if (!places)
        return PyErr_NoMemory();
    for (Py_ssize_t entry = 0; entry < of->count; entry++)
        if (lives(of, entry, &born, &dies, &reusable)) {
            places[KINDS * born + BEGINS] += !of->handed_over[entry];
            if (dies < of->end) {
                places[KINDS * reusable + FREE]++;
                places[KINDS * dies + LET_GO] += reusable > dies;
            }
        }
    for (Py_ssize_t key = 0; key < num_keys; key++) {
        Py_ssize_t here = places[key];
        places[key] = total;
        total += here;
    }
    if ((events = PyByteArray_FromStringAndSize(NULL, total * (Py_ssize_t)sizeof(int64_t)))) {
        to = (int64_t *)PyByteArray_AsString(events);
        for (Py_ssize_t entry = 0; entry < of->count; entry++)
            if (lives(of, entry, &born, &dies, &reusable)) {
                if (!of->handed_over[entry])
                    to[places[KINDS * born + BEGINS]++] = of->holders[entry];
                if (dies < of->end) {
                    to[places[KINDS * reusable + FREE]++] = ~of->holders[entry];
                    if (reusable > dies)
                        to[places[KINDS * dies + LET_GO]++] = of->holders[entry] + of->num_holders;
                }
            }
    }
    free(places);
    return events;
}

PyDoc_STRVAR(order_doc,
"order(num_bytes, born, dies, reusable, holders, handed_over, end, num_holders)\n\n"
"The events of a step of `end` instants as a bytearray of int64: the holder of an entry where it is requested (unless it is\n"
"handed over, bool), the complement where its block is free, holder + num_holders where it is let go before that. All\n"
"columns are int64 by entry. At each instant come first those that are free, then those let go, then the requests, all in\n"
"the order of entries.");

static PyObject *order(PyObject *module, PyObject *args)
{
    Py_buffer columns[6];
    long long end, num_holders;
    Py_ssize_t count;
    int fits;
    PyObject *events = NULL;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*LL", &columns[0], &columns[1], &columns[2], &columns[3], &columns[4],
                          &columns[5], &end, &num_holders))
        return NULL;
    count = columns[5].len;
    fits = end >= 0;
    for (int at = 0; at < 5; at++)
        fits &= columns[at].len == 8 * count;
    if (fits) {
        Columns of = {columns[0].buf, columns[1].buf, columns[2].buf, columns[3].buf,
                      columns[4].buf, columns[5].buf, count, end, num_holders};
        events = in_order(&of);
    } else {
        PyErr_SetString(PyExc_ValueError, "columns of one length, and no negative number of instants");
    }
    for (int at = 0; at < 6; at++)
        PyBuffer_Release(&columns[at]);
    return events;
}

static PyMethodDef methods[] = {{"order", order, METH_VARARGS, order_doc}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_event_order", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__event_order(void)
{
    return PyModule_Create(&definition);
}
