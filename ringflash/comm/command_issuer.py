"""The function in C that issues a list of driver commands."""

from __future__ import annotations

from collections.abc import Callable

_SOURCE = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef uint32_t u32;
typedef uint64_t u64; /* also handles, and addresses of hosts and devices */

struct driver {
    int (*record)(u64 event, u64 stream);
    int (*wait)(u64 stream, u64 event, u32 flags);
    int (*write)(u64 stream, u64 address, u64 value, u32 flags);
    int (*copy)(u64 target, u64 source, u64 bytes, u64 stream);
    int (*launch)(u64 function, u32, u32, u32, u32, u32, u32, u32 shared, u64 stream, u64 params, u64 extra);
    int (*replace)(u64 map, u64 address);
};

struct patch { u64 at, offset; u32 slot, is_map; };
struct kernel { u64 function, params, patches; u32 num_patches, grid[3], block[3], shared; };
struct copies {
    int (*start)(u64 targets, u64 sources, u64 bytes, u64 count, u64 attributes, u64 firsts, u64 one, u64 stream);
    u64 targets, sources, bytes, count, attributes, firsts;
};
enum { RECORD, WAIT, WRITE, COPY, COPIES, LAUNCH };
struct command { u32 kind; int32_t value; u64 stream, a, b, c; };

static int launch(const struct driver *driver, const struct kernel *kernel, u64 stream, const u64 *slots)
{
    const struct patch *patches = (const struct patch *)kernel->patches;
    for (u32 i = 0; i < kernel->num_patches; i++) {
        u64 address = slots[patches[i].slot] + patches[i].offset;
        int error = 0;
        if (patches[i].is_map)
            error = driver->replace(patches[i].at, address);
        else
            *(u64 *)patches[i].at = address;
        if (error)
            return error;
    }
    const u32 *grid = kernel->grid, *block = kernel->block;
    return driver->launch(kernel->function, grid[0], grid[1], grid[2], block[0], block[1], block[2], kernel->shared,
                          stream, kernel->params, 0);
}

static int start(const struct copies *c, u64 stream)
{
    return c->start(c->targets, c->sources, c->bytes, c->count, c->attributes, c->firsts, 1, stream);
}

/* Issue commands until one fails. Return 0 or the driver's error. */
static int issue(const struct driver *driver, const struct command *commands, u64 count, const u64 *slots,
                 const u64 *values, u64 word)
{
    for (u64 i = 0; i < count; i++) {
        const struct command *c = &commands[i];
        u64 a = c->value < 0 ? c->a : values[c->value];
        int error = 1;
        switch (c->kind) {
        case RECORD: error = driver->record(a, c->stream); break;
        case WAIT: error = driver->wait(c->stream, a, 0); break;
        case WRITE: error = driver->write(c->stream, a, word, 0); break;
        case COPY: error = driver->copy(a, c->b, c->c, c->stream); break;
        case COPIES: error = start((const struct copies *)a, c->stream); break;
        case LAUNCH: error = launch(driver, (const struct kernel *)a, c->stream, slots); break;
        }
        if (error)
            return error;
    }
    return 0;
}

static void read_list(PyObject *list, u64 *numbers)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++)
        numbers[i] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(list, i));
}

static PyObject *issue_lists(PyObject *self, PyObject *args)
{
    unsigned long long driver, commands, count, word;
    PyObject *of_slots, *of_values;
    if (!PyArg_ParseTuple(args, "KKKO!O!K", &driver, &commands, &count, &PyList_Type, &of_slots, &PyList_Type,
                          &of_values, &word))
        return NULL;
    u64 slots[PyList_GET_SIZE(of_slots) + 1], values[PyList_GET_SIZE(of_values) + 1];
    int error;
    read_list(of_slots, slots);
    read_list(of_values, values);
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    error = issue((const struct driver *)driver, (const struct command *)commands, count, slots, values, word);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(error);
}

static PyMethodDef methods[] = {{"issue", issue_lists, METH_VARARGS, NULL}, {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "ringflash_commands", NULL, -1, methods};
PyMODINIT_FUNC PyInit_ringflash_commands(void) { return PyModule_Create(&module); }
"""


def compiled() -> Callable[..., int]:
    """Return the function in C, which triton compiles and caches."""
    from triton.runtime.build import compile_module_from_src

    return compile_module_from_src(_SOURCE, "ringflash_commands").issue
