/* Launches the kernels of tilewright's CUDA modules through the driver: no compiler, no CUDA runtime library, any torch.
 *
 * A built module is host code (argument checks, grid sizes) and a cubin. The host code looks kernels up and calls them
 * through pointers of its own, __TVMFFIHandleInitOnce, __TVMFFIEnvModLookupFromImports and __TVMFFIFunctionCall.
 * cuda_launcher.py writes the functions below into those pointers after it has loaded one of our modules; nothing is
 * registered for the process, so foreign modules, and a TVM with a CUDA runtime of its own, keep what they have.
 *
 * Work goes to the stream that tvm-ffi says is current (torch's), on the device of the tensors, whatever device is
 * current in the calling thread; the thread's current context is left as it was. A kernel's code is loaded on a device at
 * the first launch there, also while a graph is being captured. Build: cc -O2 -shared -fPIC.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define BOUND_CUT(tasks) ((void)(tasks)) /* loops are the CPU's */
#include "bound_call.h"

enum { MAX_DEVICES = 64, MAX_ARGUMENTS = 64, DEVICE_CUDA = 2 };

/* ---- the driver's types, as far as they are used ---- */

typedef int CUresult;
typedef int CUdevice;
typedef void *CUcontext, *CUmodule, *CUfunction, *CUstream;
typedef struct {
  unsigned int id;
  char pad[4];
  union {
    char pad[64];
    struct { unsigned int x, y, z; } cluster;
    int flag;
  } value;
} CUlaunchAttribute;
typedef struct {
  unsigned int grid[3], block[3], shared_bytes;
  CUstream stream;
  CUlaunchAttribute *attributes;
  unsigned int num_attributes;
} CUlaunchConfig;
enum { ATTRIBUTE_COOPERATIVE = 2, ATTRIBUTE_CLUSTER = 4, ATTRIBUTE_PROGRAMMATIC = 6 };
enum { MAX_DYNAMIC_SHARED = 8, CAPTURE_RELAXED = 2 };

/* ---- what tilewright_cuda_bind() fills in ---- */

typedef struct {
  void (*error_text)(const char *kind, const char *message); /* TVMFFIErrorSetRaisedFromCStr */
  void *(*get_stream)(int32_t device_type, int32_t device);  /* TVMFFIEnvGetStream */
  CUresult (*init)(unsigned int flags);
  CUresult (*error_string)(CUresult error, const char **text);
  CUresult (*device_get)(CUdevice *device, int ordinal);
  CUresult (*context_retain)(CUcontext *context, CUdevice device);
  CUresult (*context_current)(CUcontext *context);
  CUresult (*context_push)(CUcontext context);
  CUresult (*context_pop)(CUcontext *context);
  CUresult (*module_load)(CUmodule *module, const void *image);
  CUresult (*module_function)(CUfunction *function, CUmodule module, const char *name);
  CUresult (*function_set)(CUfunction function, int attribute, int value);
  CUresult (*launch)(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra);
  CUresult (*capture_mode)(int *mode);
  CUresult (*copy)(uint64_t to, const void *from, size_t bytes, CUstream stream); /* cuMemcpyHtoDAsync */
  CUresult (*record)(void *event, CUstream stream);
} Bindings;

static Bindings host;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUcontext contexts[MAX_DEVICES];

EXPORT void tilewright_cuda_bind(const Bindings *bindings) { host = *bindings; }

/* ---- modules ---- */

typedef struct {
  int32_t type_index;
  uint32_t small;
  union {
    int64_t i;
    double f;
    void *p;
  } value;
} Any; /* TVMFFIAny */

typedef struct Module Module;
typedef struct {
  Module *module;
  char *name;
  char *arguments; /* one letter each: p pointer, l int64, i int32, b bool, f float32, d float64 */
  char *launch;    /* one letter each: 0-2 grid, 3-5 block, 6-8 cluster; then s dynamic shared bytes; P, C: flags */
  int num_arguments, num_axes, shared, programmatic, cooperative, clustered;
  CUfunction functions[MAX_DEVICES]; /* atomic: null until loaded */
  int shared_limit[MAX_DEVICES];     /* under `lock`: dynamic shared memory that the function may have */
} Kernel;
struct Module {
  void *context; /* of the host code: __tvm_ffi__library_ctx */
  const void *cubin;
  CUmodule loaded[MAX_DEVICES];
  int num_kernels;
  Module *next;
  Kernel kernels[];
};
static Module *modules; /* atomic; grows only */

/* A module's host code calls this before its kernels: the device of its tensors. Not a kernel, only an address. */
static Kernel set_device;
static __thread int current_device;

/* Add a module; all of it must stay in memory for good. 0 or -1 (memory). */
EXPORT int tilewright_cuda_add(void *context, const void *cubin, int num_kernels, const char *const *names,
                               const char *const *arguments, const char *const *launch) {
  Module *module = calloc(1, sizeof *module + (size_t)num_kernels * sizeof(Kernel));
  if (!module) return -1;
  module->context = context;
  module->cubin = cubin;
  module->num_kernels = num_kernels;
  for (int k = 0; k < num_kernels; k++) {
    Kernel *kernel = &module->kernels[k];
    kernel->module = module;
    kernel->name = strdup(names[k]);
    kernel->arguments = strdup(arguments[k]);
    kernel->launch = strdup(launch[k]);
    if (!kernel->name || !kernel->arguments || !kernel->launch) return -1;
    kernel->num_arguments = (int)strlen(arguments[k]);
    for (const char *axis = launch[k]; *axis; axis++) {
      if (*axis >= '0' && *axis <= '8') kernel->num_axes++, kernel->clustered |= *axis >= '6';
      kernel->shared |= *axis == 's';
      kernel->programmatic |= *axis == 'P';
      kernel->cooperative |= *axis == 'C';
    }
  }
  pthread_mutex_lock(&lock);
  module->next = modules;
  __atomic_store_n(&modules, module, __ATOMIC_RELEASE);
  pthread_mutex_unlock(&lock);
  return 0;
}

/* ---- launches ---- */

static int raise_error(const char *kind, const char *what, const char *detail) {
  char text[512];
  snprintf(text, sizeof text, "%s: %s", what, detail);
  host.error_text(kind, text);
  return -1;
}

static int driver_error(const Kernel *kernel, const char *call, CUresult error) {
  const char *text = NULL;
  char detail[256];
  if (host.error_string(error, &text) || !text) text = "unknown error";
  snprintf(detail, sizeof detail, "%s on device %d failed with %d: %s", call, current_device, error, text);
  return raise_error("RuntimeError", kernel->name, detail);
}

/* In place of TVMFFIEnvModLookupFromImports: the kernel of that name of the module whose host code asks. */
EXPORT int tilewright_cuda_lookup(void *context, const char *name, void **out) {
  if (strcmp(name, "__tvm_set_device") == 0) {
    *out = &set_device;
    return 0;
  }
  for (Module *module = __atomic_load_n(&modules, __ATOMIC_ACQUIRE); module; module = module->next) {
    if (module->context != context) continue;
    for (int k = 0; k < module->num_kernels; k++) {
      if (strcmp(module->kernels[k].name, name) == 0) {
        *out = &module->kernels[k];
        return 0;
      }
    }
  }
  return raise_error("RuntimeError", name, "a CUDA module calls a function that is no kernel of it");
}

/* In place of TVMFFIHandleInitOnce, which not every tvm-ffi gives to a module: look up what a call site calls, once. */
EXPORT int tilewright_cuda_once(void **slot, int (*look_up)(void **)) {
  void *found = __atomic_load_n(slot, __ATOMIC_ACQUIRE);
  if (found) return 0;
  int failure = look_up(&found);
  if (!failure) __atomic_store_n(slot, found, __ATOMIC_RELEASE); /* a race stores the same */
  return failure;
}

/* With the device's context current: its handle of the kernel, loaded where it was not. */
static CUresult load(Kernel *kernel, CUfunction *function) {
  Module *module = kernel->module;
  CUresult error = 0;
  /* Loading allocates, which a capture in its default mode forbids to this thread; what is loaded is not captured. */
  int mode = CAPTURE_RELAXED;
  host.capture_mode(&mode);
  if (!module->loaded[current_device]) error = host.module_load(&module->loaded[current_device], module->cubin);
  if (!error) error = host.module_function(function, module->loaded[current_device], kernel->name);
  host.capture_mode(&mode);
  if (!error) __atomic_store_n(&kernel->functions[current_device], *function, __ATOMIC_RELEASE);
  return error;
}

static CUresult allow_shared(Kernel *kernel, CUfunction function, int bytes) {
  if (bytes <= kernel->shared_limit[current_device]) return 0;
  CUresult error = host.function_set(function, MAX_DYNAMIC_SHARED, bytes);
  if (!error) __atomic_store_n(&kernel->shared_limit[current_device], bytes, __ATOMIC_RELAXED);
  return error;
}

/* Make the device's context the current one, until leave(). */
static CUresult enter(int ordinal, int *pushed) {
  CUcontext context = __atomic_load_n(&contexts[ordinal], __ATOMIC_ACQUIRE), before = NULL;
  CUresult error = 0;
  *pushed = 0;
  if (!context) {
    CUdevice device;
    error = host.init(0);
    if (!error) error = host.device_get(&device, ordinal);
    if (!error) error = host.context_retain(&context, device);
    if (error) return error;
    __atomic_store_n(&contexts[ordinal], context, __ATOMIC_RELEASE); /* of a device there is one: a race is no harm */
  }
  error = host.context_current(&before);
  if (error || before == context) return error;
  error = host.context_push(context);
  *pushed = !error;
  return error;
}

static void leave(int pushed) {
  CUcontext before;
  if (pushed) host.context_pop(&before);
}

static int launch(Kernel *kernel, const Any *arguments, int count) {
  union { int64_t l; int32_t i; uint8_t b; float f; double d; void *p; } values[MAX_ARGUMENTS];
  void *addresses[MAX_ARGUMENTS];
  int expected = kernel->num_arguments + kernel->num_axes + kernel->shared;
  if (count != expected || kernel->num_arguments > MAX_ARGUMENTS)
    return raise_error("RuntimeError", kernel->name, "its host code passes another number of arguments than it has");
  for (int a = 0; a < kernel->num_arguments; a++) {
    addresses[a] = &values[a];
    switch (kernel->arguments[a]) {
      case 'p': values[a].p = arguments[a].type_index ? arguments[a].value.p : NULL; break;
      case 'l': values[a].l = arguments[a].value.i; break;
      case 'i': values[a].i = (int32_t)arguments[a].value.i; break;
      case 'b': values[a].b = arguments[a].value.i != 0; break;
      case 'f': values[a].f = (float)arguments[a].value.f; break;
      case 'd': values[a].d = arguments[a].value.f; break;
      default: return raise_error("RuntimeError", kernel->name, "unknown kind of argument in its manifest");
    }
  }
  unsigned int sizes[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
  const Any *next = arguments + kernel->num_arguments;
  for (const char *axis = kernel->launch; *axis; axis++) {
    if (*axis < '0' || *axis > '8') continue;
    if (next->value.i == 0 && *axis <= '2') return 0; /* an empty grid: nothing to do, and an error to the driver */
    sizes[*axis - '0'] = (unsigned int)(next++)->value.i;
  }
  CUlaunchAttribute attributes[3];
  CUlaunchConfig config = {{sizes[0], sizes[1], sizes[2]}, {sizes[3], sizes[4], sizes[5]}, 0, NULL, attributes, 0};
  if (kernel->shared) config.shared_bytes = (unsigned int)next->value.i;
  config.stream = host.get_stream(DEVICE_CUDA, current_device);
  if (kernel->clustered) {
    CUlaunchAttribute *attribute = &attributes[config.num_attributes++];
    attribute->id = ATTRIBUTE_CLUSTER;
    attribute->value.cluster.x = sizes[6];
    attribute->value.cluster.y = sizes[7];
    attribute->value.cluster.z = sizes[8];
  }
  if (kernel->programmatic) {
    attributes[config.num_attributes].id = ATTRIBUTE_PROGRAMMATIC;
    attributes[config.num_attributes++].value.flag = 1;
  }
  if (kernel->cooperative) {
    attributes[config.num_attributes].id = ATTRIBUTE_COOPERATIVE;
    attributes[config.num_attributes++].value.flag = 1;
  }

  CUfunction function = __atomic_load_n(&kernel->functions[current_device], __ATOMIC_ACQUIRE);
  const char *call = "entering the device's context";
  int pushed = 0;
  CUresult error = enter(current_device, &pushed);
  if (error) return driver_error(kernel, call, error);
  if (!function ||
      (int)config.shared_bytes > __atomic_load_n(&kernel->shared_limit[current_device], __ATOMIC_RELAXED)) {
    pthread_mutex_lock(&lock);
    call = "cuModuleLoadData";
    if (!function) error = load(kernel, &function);
    if (!error) call = "cuFuncSetAttribute", error = allow_shared(kernel, function, (int)config.shared_bytes);
    pthread_mutex_unlock(&lock);
  }
  if (!error) call = "cuLaunchKernelEx", error = host.launch(&config, function, addresses, NULL);
  leave(pushed);
  return error ? driver_error(kernel, call, error) : 0;
}

/* In place of TVMFFIFunctionCall: `kernel` is what the look-up gave. */
EXPORT int tilewright_cuda_call(Kernel *kernel, const Any *arguments, int32_t count, Any *result) {
  result->type_index = 0;
  result->small = 0;
  result->value.i = 0;
  if (kernel != &set_device) return launch(kernel, arguments, count);
  int64_t device = count == 2 ? arguments[1].value.i : -1;
  if (device < 0 || device >= MAX_DEVICES)
    return raise_error("RuntimeError", "cuda", "a module names a device outside 0..63");
  current_device = (int)device;
  return 0;
}

#include "gpu_plan.h"
