/* The requests and frees of a step in the order of its instants: a counting sort over columns.

   allocator_events.py says what the order is; it does the same without this where there was no compiler, several times
   slower, and the tests hold the two against each other. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct {
    const int64_t *num_bytes, *born, *dies, *holders;
    const char *handed_over;
    Py_ssize_t count;
    int64_t end;
} Columns;

/* Whether the entry lives at all: then where it begins, and where it ends. */
static int lives(const Columns *of, Py_ssize_t entry, int64_t *born, int64_t *dies)
{
    *born = of->born[entry] < 0 ? 0 : of->born[entry];
    *dies = of->dies[entry];
    return of->num_bytes[entry] > 0 && *born < of->end && *born < *dies;
}

static PyObject *in_order(const Columns *of)
{
    int64_t born, dies, total = 0;
    Py_ssize_t num_keys = 2 * (Py_ssize_t)of->end;
    Py_ssize_t *places = calloc(num_keys + 1, sizeof(Py_ssize_t));
    PyObject *events;
    int64_t *to;
    if (!places)
        return PyErr_NoMemory();
    for (Py_ssize_t entry = 0; entry < of->count; entry++)
        if (lives(of, entry, &born, &dies)) {
            places[2 * born + 1] += !of->handed_over[entry];
            if (dies < of->end)
                places[2 * dies]++;
        }
    for (Py_ssize_t key = 0; key < num_keys; key++) {
        Py_ssize_t here = places[key];
        places[key] = total;
        total += here;
    }
    if ((events = PyByteArray_FromStringAndSize(NULL, total * (Py_ssize_t)sizeof(int64_t)))) {
        to = (int64_t *)PyByteArray_AS_STRING(events);
        for (Py_ssize_t entry = 0; entry < of->count; entry++)
            if (lives(of, entry, &born, &dies)) {
                if (!of->handed_over[entry])
                    to[places[2 * born + 1]++] = of->holders[entry];
                if (dies < of->end)
                    to[places[2 * dies]++] = ~of->holders[entry];
            }
    }
    free(places);
    return events;
}

PyDoc_STRVAR(order_doc,
"order(num_bytes, born, dies, holders, handed_over, end)\n\n"
"The events of a step of `end` instants as a bytearray of int64: the holder of an entry where it is requested (unless it is\n"
"handed over, bool), the complement where it is freed. All columns are int64 by entry. At each instant frees come first,\n"
"each in the order of entries.");

static PyObject *order(PyObject *module, PyObject *args)
{
    Py_buffer columns[5];
    long long end;
    Py_ssize_t count;
    PyObject *events = NULL;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*L", &columns[0], &columns[1], &columns[2], &columns[3], &columns[4], &end))
        return NULL;
    count = columns[4].len;
    if (end < 0 || columns[0].len != 8 * count || columns[1].len != 8 * count || columns[2].len != 8 * count ||
        columns[3].len != 8 * count) {
        PyErr_SetString(PyExc_ValueError, "columns of one length, and no negative number of instants");
    } else {
        Columns of = {columns[0].buf, columns[1].buf, columns[2].buf, columns[3].buf, columns[4].buf, count, end};
        events = in_order(&of);
    }
    for (int at = 0; at < 5; at++)
        PyBuffer_Release(&columns[at]);
    return events;
}

static PyMethodDef methods[] = {{"order", order, METH_VARARGS, order_doc}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_event_order", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__event_order(void)
{
    return PyModule_Create(&definition);
}
