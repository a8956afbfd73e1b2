/* What this CPU can do at most, for roofline.py: fused multiply-adds from registers, products of tiles, reads from memory.
   Compiled with the target's own flags; one call per thread. */
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#if defined(__AMX_BF16__)
#include <immintrin.h>
#include <stdlib.h>
#endif

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

#if defined(__AMX_BF16__)
#ifndef REPEATS
#define REPEATS 1024 /* products of four tiles between two looks at the clock */
#endif
enum { TILE = 1024, PRODUCT = 2 * 16 * 16 * 32 }; /* bytes of a full tile; flops of one tdpbf16ps on full tiles */

typedef struct {
  uint8_t palette, start, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} TileConfig;

/* The compiler's names for tile instructions are statements. */
#define LOAD(base)                     \
  _tile_loadd(4, (base), 64);          \
  _tile_loadd(5, (base) + TILE, 64);   \
  _tile_loadd(6, (base) + 2 * TILE, 64); \
  _tile_loadd(7, (base) + 3 * TILE, 64);

/* Products of bf16 tiles into f32 for `seconds`, two by two tiles at a time; flops per second. Operands stay in registers
   (`bytes` 0), or are loaded before every use from `bytes` (a multiple of 4 KiB) gone through in order: as a kernel does
   whose operands fit a cache of that size. Negative where memory is out. The process must have the permission for tiles. */
double tilewright_tiles(double seconds, size_t bytes) {
  size_t size = bytes ? bytes : 4 * TILE;
  char *operands = aligned_alloc(4096, size);
  if (!operands) return -1.0;
  for (size_t i = 0; i < size / 2; i++) ((uint16_t *)operands)[i] = 0x3f80; /* 1.0 */
  TileConfig config = {.palette = 1};
  for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = 64, config.rows[tile] = 16;
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  LOAD(operands)
  double start = now(), end = start;
  uint64_t products = 0;
  size_t at = 0;
  do {
    for (int repeat = 0; repeat < REPEATS; repeat++) {
      if (bytes) {
        LOAD(operands + at)
        at = at + 4 * TILE < size ? at + 4 * TILE : 0;
      }
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    products += 4 * REPEATS;
    end = now();
  } while (end - start < seconds);
  _tile_stored(0, operands, 64); /* a result that is used */
  _tile_release();
  free(operands);
  return (double)PRODUCT * (double)products / (end - start);
}
#endif
