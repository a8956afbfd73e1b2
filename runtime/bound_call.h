/* Calls that have been checked once, made again: a Python callable that looks at its tensors and starts the kernels.
 *
 * bound_call.py describes a call whose checks have passed. The callable made from that takes the arguments of a later call
 * and runs it only where nothing differs that those checks looked at: types, shapes, strides, dtypes, devices, gradients,
 * alignment, overlaps, options. It returns False otherwise, having done nothing: then the caller checks in full, and says
 * what is wrong. Memory is read from the tensors at every call, through the table of functions that torch offers for it
 * (DLPack's exchange interface); nothing is allocated, nothing is waited for, work goes to torch's current stream.
 *
 * Included by both launchers. Python is used through its stable ABI, so no header of one version is; its symbols are those
 * of the process.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct _object PyObject;
typedef struct {
  const char *name;
  PyObject *(*call)(PyObject *self, PyObject *const *arguments, ptrdiff_t count);
  int flags;
  const char *text;
} PyMethodDef;
enum { METH_FASTCALL = 0x80, PY_EQ = 2 };
extern PyObject *PyObject_Type(PyObject *object);
extern PyObject *PyObject_GetAttr(PyObject *object, PyObject *name);
extern PyObject *PyObject_CallNoArgs(PyObject *function);
extern PyObject *PyObject_CallMethodObjArgs(PyObject *object, PyObject *name, ...);
extern int PyObject_RichCompareBool(PyObject *left, PyObject *right, int operation);
extern PyObject *PyTuple_GetItem(PyObject *tuple, ptrdiff_t index);
extern ptrdiff_t PyTuple_Size(PyObject *tuple);
extern long long PyLong_AsLongLong(PyObject *number);
extern PyObject *PyLong_FromLong(long number);
extern double PyFloat_AsDouble(PyObject *number);
extern PyObject *PyErr_Occurred(void);
extern void PyErr_Clear(void);
extern PyObject *PyErr_NoMemory(void);
extern PyObject *PyCFunction_NewEx(PyMethodDef *method, PyObject *self, PyObject *module);
extern PyObject *PyCapsule_New(void *pointer, const char *name, void (*destroy)(PyObject *));
extern void *PyCapsule_GetPointer(PyObject *capsule, const char *name);
extern PyObject *PyUnicode_InternFromString(const char *text);
extern void *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *state);
extern void Py_IncRef(PyObject *object);
extern void Py_DecRef(PyObject *object);

/* ---- DLPack 1.x and tvm-ffi, as far as they are used ---- */

typedef struct {
  void *data;
  int32_t device_type, device;
  int32_t rank;
  struct { uint8_t code, bits; uint16_t lanes; } dtype;
  int64_t *shape, *strides;
  uint64_t offset;
} DLTensor;
typedef struct {
  int32_t type_index;
  uint32_t small;
  union { int64_t i; double f; void *p; } value;
} BoundAny; /* TVMFFIAny */
enum { ANY_INT = 1, ANY_FLOAT = 3, ANY_TENSOR = 7, DLPACK_CPU = 1, DLPACK_INT = 0, DLPACK_UINT = 1, DLPACK_FLOAT = 2 };

/* What tilewright_bound_connect() fills in. */
typedef struct {
  int (*tensor)(PyObject *object, DLTensor *out);                        /* dltensor_from_py_object_no_sync */
  int (*stream)(int32_t device_type, int32_t device, void **out);        /* current_work_stream */
  int (*call)(void *function, BoundAny *arguments, int32_t count, BoundAny *result);     /* TVMFFIFunctionCall */
  int (*set_stream)(int32_t device_type, int32_t device, void *stream, void **before);   /* TVMFFIEnvSetStream */
  void (*error_move)(void **error);                                      /* TVMFFIErrorMoveFromRaised */
  int (*object_release)(void *object);                                   /* TVMFFIObjectDecRef */
  PyObject *tensor_type, *parameter_type, *none, *yes, *no, *is_grad_enabled;
} BoundBindings;

static BoundBindings python;
static PyObject *requires_grad, *is_neg;

/* ---- what a call is held to ---- */

enum { MAX_RANK = 4, MAX_SLOTS = 24, MAX_OPTIONS = 16, MAX_LAUNCHES = 4, MAX_OPERANDS = 32, MAX_PAIRS = 16 };
/* Marks of a slot: its int64 values are passed as int32; gradients matter; it is passed as uint8. */
enum { NARROW = 1, FLOATING = 2, RAW = 4 };
enum { APART, TOGETHER };

typedef struct {
  int present, narrow, floating, raw;
  DLTensor like;
  int64_t shape[MAX_RANK], strides[MAX_RANK]; /* narrow: the kernel's strides are `kernel_strides` */
  int64_t kernel_strides[MAX_RANK];
  uintptr_t misaligned; /* bits of the address that must be 0 */
  int64_t bytes;        /* from the first to behind the last element */
} Slot;
typedef struct {
  int first, second, relation;
  uintptr_t distance; /* from the first to the second when bound */
} Pair;
typedef struct {
  void *function;
  int count, tasks;
  int slots[MAX_OPERANDS]; /* -1: a constant */
  BoundAny constants[MAX_OPERANDS];
} BoundLaunch;
typedef struct {
  DLTensor tensor;
  int64_t shape[MAX_RANK], strides[MAX_RANK];
} OwnTensor;
typedef struct {
  int num_slots, num_options, num_pairs, num_launches, num_own;
  int32_t device_type, device;
  Slot slots[MAX_SLOTS];
  PyObject *options; /* a tuple */
  PyObject *launches_object; /* keeps what the constants point to */
  Pair pairs[MAX_PAIRS];
  BoundLaunch launches[MAX_LAUNCHES];
  OwnTensor own[2 * MAX_OPERANDS];
} Bound;

static const char BOUND_NAME[] = "tilewright.bound_call";

static void bound_destroy(PyObject *capsule) {
  Bound *bound = PyCapsule_GetPointer(capsule, BOUND_NAME);
  if (!bound) return;
  Py_DecRef(bound->options);
  Py_DecRef(bound->launches_object);
  free(bound);
}

static int is_tensor(PyObject *object) {
  PyObject *type = PyObject_Type(object);
  int is = type == python.tensor_type || type == python.parameter_type; /* subclasses may mean anything */
  Py_DecRef(type);
  return is;
}

static int is_no(PyObject *answer) {
  if (!answer) return PyErr_Clear(), 0;
  Py_DecRef(answer); /* True and False outlive it */
  return answer == python.no;
}

/* Whether the numbers are those in memory, and no gradient is lost. Only parts of complex tensors are ever negated. */
static int plain(const Slot *slot, PyObject *tensor, int grad_enabled) {
  return (!grad_enabled || is_no(PyObject_GetAttr(tensor, requires_grad))) &&
         (slot->like.dtype.code != DLPACK_FLOAT || is_no(PyObject_CallMethodObjArgs(tensor, is_neg, NULL)));
}

/* Whether the tensor is one that the slot was bound for; `tensor` is then as the kernel takes it. */
static int fits(const Slot *slot, PyObject *object, int grad_enabled, DLTensor *tensor) {
  if (!slot->present) return object == python.none;
  if (!is_tensor(object) || (slot->floating && !plain(slot, object, grad_enabled))) return 0;
  if (python.tensor(object, tensor)) return PyErr_Clear(), 0;
  const DLTensor *like = &slot->like;
  if (tensor->device_type != like->device_type || tensor->device != like->device || tensor->rank != like->rank ||
      memcmp(&tensor->dtype, &like->dtype, sizeof like->dtype))
    return 0;
  for (int d = 0; d < like->rank; d++)
    if (tensor->shape[d] != slot->shape[d] || tensor->strides[d] != slot->strides[d]) return 0;
  if (((uintptr_t)tensor->data + tensor->offset) & slot->misaligned) return 0;
  if (slot->narrow) {
    tensor->dtype.bits = 32; /* the low words, little-endian */
    tensor->strides = (int64_t *)slot->kernel_strides;
  }
  if (slot->raw) tensor->dtype.code = DLPACK_UINT;
  return 1;
}

static int related(const Bound *bound, const Pair *pair, const DLTensor *tensors) {
  uintptr_t first = (uintptr_t)tensors[pair->first].data, second = (uintptr_t)tensors[pair->second].data;
  if (second - first == pair->distance) return 1; /* what is laid out alike overlaps alike */
  return pair->relation == APART &&
         ( first + bound->slots[pair->first].bytes <= second || second + bound->slots[pair->second].bytes <= first);
}

static int same_option(PyObject *known, PyObject *given) {
  if (known == given) return 1;
  PyObject *left = PyObject_Type(known), *right = PyObject_Type(given);
  int same = left == right ? PyObject_RichCompareBool(known, given, PY_EQ) : 0;
  Py_DecRef(left);
  Py_DecRef(right);
  if (same < 0) PyErr_Clear();
  return same == 1;
}

static int start(const Bound *bound, DLTensor *tensors) {
  BoundAny operands[MAX_OPERANDS], result;
  void *stream = NULL, *before = NULL;
  int failure = 0;
  if (bound->device_type != DLPACK_CPU) {
    if (python.stream(bound->device_type, bound->device, &stream)) return PyErr_Clear(), -1;
    if (python.set_stream(bound->device_type, bound->device, stream, &before)) return -1;
  }
  void *thread = PyEval_SaveThread();
  for (int n = 0; n < bound->num_launches && !failure; n++) {
    const BoundLaunch *launch = &bound->launches[n];
    memcpy(operands, launch->constants, launch->count * sizeof *operands);
    for (int o = 0; o < launch->count; o++)
      if (launch->slots[o] >= 0) operands[o].value.p = &tensors[launch->slots[o]];
    result.type_index = 0, result.small = 0, result.value.i = 0;
    BOUND_CUT(launch->tasks);
    failure = python.call(launch->function, operands, launch->count, &result);
  }
  PyEval_RestoreThread(thread);
  if (bound->device_type != DLPACK_CPU && before != stream)
    python.set_stream(bound->device_type, bound->device, before, NULL);
  if (failure) { /* the full call meets it again, and raises it */
    void *error = NULL;
    python.error_move(&error);
    if (error) python.object_release(error);
  }
  return failure;
}

/* env.py's TILEWRIGHT_CHECK, or whatever else it is set to: the full call reads it. */
static int checked_mode(void) {
  const char *text = getenv("TILEWRIGHT_CHECK");
  return text && *text && strcmp(text, "0");
}

static PyObject *bound_run(PyObject *self, PyObject *const *arguments, ptrdiff_t count) {
  const Bound *bound = PyCapsule_GetPointer(self, BOUND_NAME);
  DLTensor tensors[MAX_SLOTS];
  int ran = bound && count == bound->num_slots + bound->num_options;
  int grad_enabled = ran && !is_no(PyObject_CallNoArgs(python.is_grad_enabled));
  for (int n = 0; ran && n < bound->num_slots; n++)
    ran = fits(&bound->slots[n], arguments[n], grad_enabled, &tensors[n]);
  for (int n = 0; ran && n < bound->num_options; n++)
    ran = same_option(PyTuple_GetItem(bound->options, n), arguments[bound->num_slots + n]);
  for (int n = 0; ran && n < bound->num_pairs; n++) ran = related(bound, &bound->pairs[n], tensors);
  ran = ran && !checked_mode() && !start(bound, tensors);
  PyObject *answer = ran ? python.yes : python.no;
  Py_IncRef(answer);
  return answer;
}

/* ---- making one ---- */

static int64_t number(PyObject *tuple, ptrdiff_t index) {
  PyObject *item = PyTuple_GetItem(tuple, index);
  return item ? PyLong_AsLongLong(item) : -1;
}

static int keep_shape(const DLTensor *tensor, int64_t *shape, int64_t *strides) {
  if (tensor->rank > MAX_RANK || !tensor->strides) return -1;
  memcpy(shape, tensor->shape, tensor->rank * sizeof *shape);
  memcpy(strides, tensor->strides, tensor->rank * sizeof *strides);
  return 0;
}

static int bind_slot(Bound *bound, Slot *slot, PyObject *object, int64_t marks, int64_t alignment) {
  slot->present = object != python.none;
  if (!slot->present) return 0;
  if (!is_tensor(object) || python.tensor(object, &slot->like)) return -1;
  if (keep_shape(&slot->like, slot->shape, slot->strides)) return -1;
  slot->floating = (marks & FLOATING) != 0;
  slot->narrow = (marks & NARROW) && slot->like.dtype.code == DLPACK_INT && slot->like.dtype.bits == 64;
  slot->raw = (marks & RAW) != 0;
  slot->misaligned = (uintptr_t)alignment - 1;
  slot->bytes = slot->like.dtype.bits / 8;
  for (int d = 0; d < slot->like.rank; d++) {
    slot->kernel_strides[d] = 2 * slot->strides[d];
    slot->bytes = slot->shape[d] ? slot->bytes + (slot->shape[d] - 1) * slot->strides[d] * (slot->like.dtype.bits / 8)
                                 : slot->bytes;
  }
  bound->device_type = slot->like.device_type, bound->device = slot->like.device;
  return 0;
}

static int bind_launch(Bound *bound, BoundLaunch *launch, PyObject *given) {
  PyObject *operands = PyTuple_GetItem(given, 2);
  if (!operands) return -1;
  launch->function = (void *)(intptr_t)number(given, 0);
  launch->tasks = (int)number(given, 1);
  launch->count = (int)PyTuple_Size(operands);
  if (launch->count < 0 || launch->count > MAX_OPERANDS) return -1;
  for (int o = 0; o < launch->count; o++) {
    PyObject *pair = PyTuple_GetItem(operands, o);
    PyObject *value = pair ? PyTuple_GetItem(pair, 1) : NULL;
    if (!value) return -1;
    int64_t kind = number(pair, 0);
    BoundAny *constant = &launch->constants[o];
    launch->slots[o] = -1;
    if (kind == 0) {
      launch->slots[o] = (int)PyLong_AsLongLong(value);
      if (launch->slots[o] < 0 || launch->slots[o] >= bound->num_slots || !bound->slots[launch->slots[o]].present)
        return -1;
      constant->type_index = ANY_TENSOR;
    } else if (kind == 1) {
      constant->type_index = ANY_INT, constant->value.i = PyLong_AsLongLong(value);
    } else if (kind == 2) {
      constant->type_index = ANY_FLOAT, constant->value.f = PyFloat_AsDouble(value);
    } else {
      if (bound->num_own == 2 * MAX_OPERANDS || !is_tensor(value)) return -1;
      OwnTensor *own = &bound->own[bound->num_own++];
      if (python.tensor(value, &own->tensor) || keep_shape(&own->tensor, own->shape, own->strides)) return -1;
      own->tensor.shape = own->shape, own->tensor.strides = own->strides;
      constant->type_index = ANY_TENSOR, constant->value.p = &own->tensor;
    }
  }
  return 0;
}

static PyMethodDef bound_method = {"run", bound_run, METH_FASTCALL, "Run the call if it is as it was when bound."};

/* arguments: a tuple of the tensors (or None); marks: for each (marks, alignment), a tuple of pairs; options: a tuple;
 * pairs: tuples of (argument, argument, relation); launches: tuples of (function, tasks, operands), operands tuples of
 * (0, argument), (1, int), (2, float), (3, tensor of the caller's own, which lives as long as the callable does and is
 * never resized). The callable; None: such a call cannot be bound. */
EXPORT PyObject *tilewright_bound_make(PyObject *arguments, PyObject *marks, PyObject *options, PyObject *pairs,
                                       PyObject *launches) {
  Bound *bound = calloc(1, sizeof *bound);
  if (!bound) return PyErr_NoMemory();
  ptrdiff_t slots = PyTuple_Size(arguments), num_pairs = PyTuple_Size(pairs), num_launches = PyTuple_Size(launches);
  int failure = slots < 0 || slots > MAX_SLOTS || num_pairs < 0 || num_pairs > MAX_PAIRS || num_launches < 1 ||
                num_launches > MAX_LAUNCHES;
  bound->num_slots = (int)slots, bound->num_pairs = (int)num_pairs, bound->num_launches = (int)num_launches;
  bound->num_options = (int)PyTuple_Size(options);
  bound->device_type = DLPACK_CPU;
  for (int n = 0; !failure && n < slots; n++) {
    PyObject *pair = PyTuple_GetItem(marks, n);
    failure = !pair || bind_slot(bound, &bound->slots[n], PyTuple_GetItem(arguments, n), number(pair, 0), number(pair, 1));
  }
  for (int n = 0; !failure && n < num_pairs; n++) {
    PyObject *pair = PyTuple_GetItem(pairs, n);
    int64_t first = number(pair, 0), second = number(pair, 1);
    failure = first < 0 || first >= slots || second < 0 || second >= slots || !bound->slots[first].present ||
              !bound->slots[second].present;
    if (!failure)
      bound->pairs[n] = (Pair){(int)first, (int)second, (int)number(pair, 2),
                               (uintptr_t)bound->slots[second].like.data - (uintptr_t)bound->slots[first].like.data};
  }
  for (int n = 0; !failure && n < num_launches; n++)
    failure = bind_launch(bound, &bound->launches[n], PyTuple_GetItem(launches, n));
  if (failure || PyErr_Occurred()) {
    PyErr_Clear();
    free(bound);
    Py_IncRef(python.none);
    return python.none;
  }
  bound->options = options, bound->launches_object = launches;
  Py_IncRef(options);
  Py_IncRef(launches);
  PyObject *capsule = PyCapsule_New(bound, BOUND_NAME, bound_destroy);
  if (!capsule) return NULL;
  PyObject *callable = PyCFunction_NewEx(&bound_method, capsule, NULL);
  Py_DecRef(capsule);
  return callable;
}

/* Once per process, with the interpreter's lock held. */
EXPORT void tilewright_bound_connect(const BoundBindings *bindings) {
  python = *bindings;
  requires_grad = PyUnicode_InternFromString("requires_grad");
  is_neg = PyUnicode_InternFromString("is_neg");
}
