/* A CUDA driver without a GPU: remembers what it is asked for. What the launcher is tested with where there is none. */
#include <stdint.h>
#include <string.h>

enum { MAX_LAUNCHES = 64, MAX_BYTES = 4096 };
typedef struct {
  unsigned int grid[3], block[3], shared_bytes;
  void *stream;
  void *attributes;
  unsigned int num_attributes;
} Config;
typedef struct {
  int64_t device; /* of the context that was current */
  int64_t stream;
  int64_t function;
  int64_t num_attributes;
  unsigned int grid[3], block[3], shared_bytes;
  uint64_t values[8]; /* the first eight arguments, as 8 bytes each */
} Launch;

Launch fake_launches[MAX_LAUNCHES];
int fake_num_launches, fake_loads, fake_fail; /* fake_fail: what the next launch returns */
int fake_arguments[8];                        /* bytes of each argument of the kernels to come */
int fake_shared, fake_modes[2], fake_num_modes;
const void *fake_image;
char fake_name[64];
static intptr_t stack[16] = {0}; /* contexts: device + 1 */
static int top;

int cuInit(unsigned int flags) { return 0; }
int cuGetErrorString(int error, const char **text) { *text = "the fake driver says no"; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(device + 1); return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)stack[top]; return 0; }
int cuCtxPushCurrent_v2(void *context) { stack[++top] = (intptr_t)context; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = (void *)stack[top--]; return 0; }
int cuModuleLoadData(void **module, const void *image) {
  fake_loads++, fake_image = image;
  *module = (void *)(intptr_t)(100 + stack[top]);
  return 0;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
  strncpy(fake_name, name, sizeof fake_name - 1);
  *function = (void *)((intptr_t)module + 1000);
  return 0;
}
int cuFuncSetAttribute(void *function, int attribute, int value) {
  if (attribute == 8) fake_shared = value;
  return 0;
}
int cuEventRecord(void *event, void *stream) { return 0; }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
  memcpy((void *)to, from, bytes);
  return 0;
}
int cuThreadExchangeStreamCaptureMode(int *mode) {
  int before = fake_num_modes ? fake_modes[0] : 0;
  fake_modes[0] = *mode, fake_num_modes++;
  *mode = before;
  return 0;
}
int cuLaunchKernelEx(const Config *config, void *function, void **arguments, void **extra) {
  Launch *launch = &fake_launches[fake_num_launches++ % MAX_LAUNCHES];
  memset(launch, 0, sizeof *launch);
  launch->device = stack[top] - 1;
  launch->stream = (int64_t)(intptr_t)config->stream;
  launch->function = (int64_t)(intptr_t)function;
  launch->num_attributes = config->num_attributes;
  memcpy(launch->grid, config->grid, sizeof launch->grid);
  memcpy(launch->block, config->block, sizeof launch->block);
  launch->shared_bytes = config->shared_bytes;
  for (int a = 0; a < 8 && fake_arguments[a]; a++) memcpy(&launch->values[a], arguments[a], fake_arguments[a]);
  int failure = fake_fail;
  fake_fail = 0;
  return failure;
}
