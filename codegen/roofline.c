/* What this CPU can do at most, for roofline.py: fused multiply-adds from registers, reads from memory.
   Compiled with the target's own flags; one call per thread. */
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define CHAINS 12 /* independent accumulators: more than FMA latency x throughput, few enough for the registers */
#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef uint64_t words __attribute__((vector_size(32)));

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Named accumulators, not an array: an array is kept in memory. */
#define EACH(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define DECLARE(i) lanes sum##i = shift + (float)i;
#define STEP(i) sum##i = sum##i * scale + shift;
#define KEEP(i) __asm__ volatile("" : "+v"(sum##i));

/* Multiply-adds for `seconds`; flops per second. */
double tilewright_flops(double seconds) {
  lanes scale, shift;
  for (int lane = 0; lane < LANES; lane++)
    scale[lane] = 0.999f, shift[lane] = 1e-3f * (float)(lane + 1); /* no lane decays to denormals */
  EACH(DECLARE)
  double start = now(), end = start;
  uint64_t rounds = 0;
  do {
    for (int repeat = 0; repeat < 4096; repeat++) { EACH(STEP) EACH(KEEP) }
    rounds += 4096;
    end = now();
  } while (end - start < seconds);
  return 2.0 * LANES * CHAINS * (double)rounds / (end - start);
}

/* Read `bytes` (a multiple of 256) at `data` over and over for `seconds`; bytes per second. */
double tilewright_reads(const void *data, size_t bytes, double seconds) {
  words a = {0}, b = {0}, c = {0}, d = {0};
  double start = now(), end = start;
  uint64_t passes = 0;
  do {
    const words *line = (const words *)data, *last = (const words *)((const char *)data + bytes);
    for (; line < last; line += 8) {
      a += line[0] + line[4];
      b += line[1] + line[5];
      c += line[2] + line[6];
      d += line[3] + line[7];
    }
    __asm__ volatile("" : "+v"(a), "+v"(b), "+v"(c), "+v"(d)::"memory");
    passes++;
    end = now();
  } while (end - start < seconds);
  return (double)bytes * (double)passes / (end - start);
}
