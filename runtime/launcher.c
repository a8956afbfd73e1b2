/* Runs the parallel loops and workspaces of tilewright's own modules on the OpenMP pool that torch already has.
 *
 * A TVM module calls through pointers of its own: __TVMBackendParallelLaunch, __TVMBackendParallelBarrier,
 * __TVMBackendAllocWorkspace, __TVMBackendFreeWorkspace. launcher.py writes the functions below into those pointers of each
 * of our modules after it is loaded; nothing is registered for the process, so foreign modules keep what they have.
 *
 * Not linked to an OpenMP library: a second libgomp in the process would be a second pool of spinning threads. The entry
 * points arrive through tilewright_bind(), as do the error functions of libtvm_ffi. Build: cc -O2 -shared -fPIC.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

/* ---- what tilewright_bind() fills in ---- */

typedef struct {
  void (*gomp_parallel)(void (*body)(void *), void *data, unsigned num_threads, unsigned flags);
  int (*get_num_threads)(void); /* at::get_num_threads */
  int (*omp_in_parallel)(void);
  void (*error_move)(void **error);                           /* TVMFFIErrorMoveFromRaised */
  void (*error_set)(void *error);                             /* TVMFFIErrorSetRaised */
  void (*error_text)(const char *kind, const char *message);  /* TVMFFIErrorSetRaisedFromCStr */
  int (*object_release)(void *object);                        /* TVMFFIObjectDecRef */
} Bindings;

static Bindings host;
static pthread_key_t cache_key;

static void cache_destroy(void *cache);

/* Give the launcher its functions, in the order of Bindings. Once per process, before any module is patched. 0 or errno. */
EXPORT int tilewright_bind(const Bindings *bindings) {
  host = *bindings;
  return pthread_key_create(&cache_key, cache_destroy);
}

/* ---- parallel loops ---- */

/* TVM's layout of the environment of one task. */
typedef struct {
  void *sync_handle;
  int32_t num_task;
} TaskEnv;
typedef int (*Task)(int task_id, TaskEnv *env, void *data);

/* Iterations may differ in length by orders of magnitude, so a loop is cut into more tasks than threads and whoever is free
 * takes the next. Eight keep the longest wait near an eighth of the even share where neighbours are alike; who knows more
 * of the iterations than that says how many tasks are best. Which thread runs a task never changes what it computes. */
enum { TASKS_PER_THREAD = 8 };

static __thread int wanted_tasks;

/* Cut the next parallel loop that this thread starts into so many tasks (runs of neighbouring iterations); 0: no wish. Any
 * number is right, for any loop. */
EXPORT void tilewright_cut_next_loop(int tasks) { wanted_tasks = tasks; }

#define BOUND_CUT(tasks) tilewright_cut_next_loop(tasks)
#include "bound_call.h"

typedef struct {
  Task task;
  void *data;
  int num_task;
  int next;     /* atomic: the next task to take */
  void *error;  /* atomic: the first error raised, owned until it is handed to the caller */
  int failed;   /* atomic: a task failed; the others stop taking tasks */
} Loop;

static void run_tasks(void *argument) {
  Loop *loop = argument;
  TaskEnv env = {NULL, loop->num_task};
  while (!__atomic_load_n(&loop->failed, __ATOMIC_RELAXED)) {
    int task_id = __atomic_fetch_add(&loop->next, 1, __ATOMIC_RELAXED);
    if (task_id >= loop->num_task) return;
    if (loop->task(task_id, &env, loop->data) == 0) continue;
    __atomic_store_n(&loop->failed, 1, __ATOMIC_RELAXED);
    /* Raised errors are thread-local: carry this one to the thread that called the kernel. */
    void *error = NULL, *none = NULL;
    host.error_move(&error);
    if (error && !__atomic_compare_exchange_n(&loop->error, &none, error, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
      host.object_release(error);
    return;
  }
}

/* Threads for the calling thread: as many as torch would take, but not more than the CPUs that it may run on.
 * omp_get_max_threads() would not do: each thread has its own value, and torch.set_num_threads reaches those of other
 * threads only at their first use of torch. */
static int usable_threads(void) {
  int threads = host.get_num_threads();
  if (threads > 1) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
      int cpus = CPU_COUNT(&set);
      if (cpus < threads) threads = cpus;
    }
  }
  return threads;
}

/* __TVMBackendParallelLaunch. num_task 0: as many as is best. */
EXPORT int tilewright_launch(Task task, void *data, int num_task) {
  int threads = host.omp_in_parallel() ? 1 : usable_threads();
  if (num_task <= 0) num_task = wanted_tasks > 0 ? wanted_tasks : threads * TASKS_PER_THREAD;
  wanted_tasks = 0;
  /* Never a team of fewer: libgomp ends the threads that a smaller team has no use for, and makes them again for torch. */
  if (threads <= 1 || num_task == 1) {
    /* The tasks of a loop are independent, so one task may run them all: no pool, no region, the error stays in place. */
    TaskEnv env = {NULL, 1};
    return task(0, &env, data);
  }
  Loop loop = {task, data, num_task, 0, NULL, 0};
  host.gomp_parallel(run_tasks, &loop, (unsigned)threads, 0);
  if (!loop.failed) return 0;
  if (loop.error) {
    host.error_set(loop.error);
    host.object_release(loop.error);
  } else {
    host.error_text("RuntimeError", "tilewright: a task of a parallel loop failed without saying why");
  }
  return -1;
}

/* __TVMBackendParallelBarrier: cannot work where tasks outnumber threads. No schedule of ours asks for one. */
EXPORT int tilewright_barrier(int task_id, TaskEnv *env) {
  (void)task_id, (void)env;
  host.error_text("RuntimeError", "tilewright: kernels must not use a barrier inside a parallel loop");
  return -1;
}

/* ---- workspaces: a small cache per thread ---- */

/* malloc would map and unmap large blocks once per work item, which costs page faults each time. */
enum { ALIGNMENT = 64 };
static const uint64_t CACHE_LIMIT = 32u << 20; /* bytes that a thread keeps when nothing is in use */

typedef struct Block {
  struct Block *next;
  uint64_t size; /* of the memory behind the header */
} Block;
_Static_assert(sizeof(Block) <= ALIGNMENT, "the header fits in front of an aligned block");

typedef struct {
  Block *free;    /* most recently used first */
  uint64_t bytes; /* of all free blocks */
} Cache;

static __thread Cache *thread_cache;
static int64_t live_bytes; /* atomic: all blocks of all threads, cached or in use */

static void block_release(Block *block) {
  __atomic_sub_fetch(&live_bytes, (int64_t)block->size, __ATOMIC_RELAXED);
  free(block);
}

static void cache_destroy(void *argument) {
  Cache *cache = argument;
  for (Block *block = cache->free, *next; block; block = next) {
    next = block->next;
    block_release(block);
  }
  free(cache);
  thread_cache = NULL;
}

static Cache *cache_get(void) {
  if (!thread_cache) {
    Cache *cache = calloc(1, sizeof *cache);
    if (!cache) return NULL;
    if (pthread_setspecific(cache_key, cache)) {
      free(cache);
      return NULL;
    }
    thread_cache = cache;
  }
  return thread_cache;
}

/* __TVMBackendAllocWorkspace: 64-byte aligned, contents undefined. NULL with an error raised where memory is out. */
EXPORT void *tilewright_alloc_workspace(int device_type, int device_id, uint64_t size, int type_code, int type_bits) {
  (void)device_type, (void)device_id, (void)type_code, (void)type_bits;
  Cache *cache = cache_get();
  if (cache) {
    for (Block **link = &cache->free; *link; link = &(*link)->next) {
      Block *block = *link;
      if (block->size < size) continue;
      *link = block->next;
      cache->bytes -= block->size;
      return (char *)block + ALIGNMENT;
    }
    /* Too small blocks would otherwise fill the cache for good: give one back for each that is made. */
    if (cache->free) {
      Block *block = cache->free;
      cache->free = block->next;
      cache->bytes -= block->size;
      block_release(block);
    }
  }
  if (size <= UINT64_MAX - 2 * ALIGNMENT) {
    size = (size + ALIGNMENT - 1) & ~(uint64_t)(ALIGNMENT - 1);
    Block *block = aligned_alloc(ALIGNMENT, size + ALIGNMENT);
    if (block) {
      block->size = size;
      __atomic_add_fetch(&live_bytes, (int64_t)size, __ATOMIC_RELAXED);
      return (char *)block + ALIGNMENT;
    }
  }
  host.error_text("MemoryError", "tilewright: no memory for a kernel's workspace");
  return NULL;
}

/* __TVMBackendFreeWorkspace: any thread may free; the block joins that thread's cache. */
EXPORT int tilewright_free_workspace(int device_type, int device_id, void *memory) {
  (void)device_type, (void)device_id;
  if (!memory) return 0;
  Block *block = (Block *)((char *)memory - ALIGNMENT);
  Cache *cache = cache_get();
  if (!cache || cache->bytes + block->size > CACHE_LIMIT) {
    block_release(block);
    return 0;
  }
  block->next = cache->free;
  cache->free = block;
  cache->bytes += block->size;
  return 0;
}

/* Bytes of workspace held now by all threads, in use or cached. */
EXPORT int64_t tilewright_workspace_bytes(void) { return __atomic_load_n(&live_bytes, __ATOMIC_RELAXED); }
