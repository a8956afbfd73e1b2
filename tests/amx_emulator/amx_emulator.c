/* Intel AMX in user space, for machines that have none.
 *
 * A tile instruction on such a machine raises SIGILL. The handler here decodes it, executes it on tile registers kept per
 * thread, steps over it and over every tile instruction that follows directly (a trap costs microseconds, an instruction
 * a fraction of one), and returns. Everything else goes to the handler that was there before, so a real illegal
 * instruction still ends in that handler or in death by SIGILL.
 *
 * Executed: ldtilecfg, sttilecfg, tilerelease, tilezero, tileloadd, tileloaddt1, tilestored, tdpbf16ps, tdpfp16ps,
 * tdpbssd, tdpbsud, tdpbusd, tdpbuud, with every 64-bit addressing form. Refused, as hardware refuses them (it raises
 * #UD, thus SIGILL): tile work without a configuration, unconfigured tiles, shapes that do not fit each other, one
 * register used twice in a dot product, reserved encodings. A configuration that hardware refuses with #GP (SIGSEGV) ends in
 * SIGILL here.
 *
 * Not modelled: the operating system's permission (a process that forgot to ask for it works here and dies on hardware),
 * restart in the middle of a load (start_row), segment and address-size prefixes, timing.
 *
 * Reference: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1 chapter 18 (tiles), volume 2 (each
 * instruction).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <xmmintrin.h>

#if !defined(__x86_64__) || !defined(__linux__)
#error "the emulator reads x86-64 Linux signal frames"
#endif

enum { TILES = 8, ROWS = 16, ROW_BYTES = 64, ROW_WORDS = ROW_BYTES / 4 };

/* The memory operand of ldtilecfg and sttilecfg. */
typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} tile_config;
_Static_assert(sizeof(tile_config) == 64, "the layout is the instruction's");

/* One tile register. Bytes outside its configured rows and columns are always zero. */
typedef union {
  uint8_t bytes[ROWS][ROW_BYTES];
  uint16_t halves[ROWS][ROW_BYTES / 2];
  uint32_t words[ROWS][ROW_WORDS];
  float floats[ROWS][ROW_WORDS];
} tile;

typedef struct {
  tile tiles[TILES];
  tile_config config;
  bool configured;
} thread_state;

/* What a signal handler may touch: a pointer in the static TLS block (no lazy allocation, which could call malloc, hence
 * initial-exec) to pages straight from the kernel. They live until the process ends; a test run makes few threads. */
static __thread thread_state *own_state __attribute__((tls_model("initial-exec")));

static struct sigaction previous;
static uint64_t trap_count, instruction_count;

static thread_state *state_of_this_thread(void) {
  if (!own_state) {
    void *pages = mmap(NULL, sizeof(thread_state), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) {
      static const char message[] = "amx_emulator: no memory for the tile registers of a thread\n";
      (void)!write(STDERR_FILENO, message, sizeof message - 1);
      _exit(70);
    }
    own_state = pages;
  }
  return own_state;
}

/* ---- configuration ---- */

static bool legal_config(const tile_config *config) {
  for (int i = 0; i < 14; i++)
    if (config->reserved[i]) return false;
  for (int t = 0; t < 16; t++) {
    bool used = config->rows[t] || config->row_bytes[t];
    if (t >= TILES && used) return false;
    if (config->rows[t] > ROWS || config->row_bytes[t] > ROW_BYTES) return false;
    if (!config->rows[t] != !config->row_bytes[t]) return false;
  }
  return config->palette == 1 && config->start_row == 0;
}

static void release(thread_state *state) { memset(state, 0, sizeof *state); }

static bool load_config(thread_state *state, const void *address) {
  tile_config config;
  memcpy(&config, address, sizeof config);
  if (config.palette != 0 && !legal_config(&config)) return false;
  release(state);
  if (config.palette != 0) {
    state->config = config;
    state->configured = true;
  }
  return true;
}

static bool usable(const thread_state *state, int t) {
  return state->configured && t < TILES && state->config.rows[t] != 0;
}

/* ---- dot products: tile d += tile a x tile b, b holding groups of consecutive rows in one word ---- */

static bool product_fits(const thread_state *state, int d, int a, int b) {
  if (!usable(state, d) || !usable(state, a) || !usable(state, b) || d == a || d == b || a == b) return false;
  const tile_config *config = &state->config;
  return config->row_bytes[d] % 4 == 0 && config->row_bytes[a] % 4 == 0 && config->row_bytes[b] % 4 == 0 &&
         config->rows[d] == config->rows[a] && config->row_bytes[d] == config->row_bytes[b] &&
         config->row_bytes[a] / 4 == config->rows[b];
}

static float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static float float_of_bf16(uint16_t half) { return float_of_bits((uint32_t)half << 16); }

static float float_of_fp16(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = (half >> 10) & 31u, fraction = half & 0x3ffu;
  if (exponent == 31) return float_of_bits(sign | 0x7f800000u | fraction << 13);
  if (exponent != 0) return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
  float magnitude = (float)fraction * 0x1p-24f; /* subnormal halves are normal floats: exact */
  return half & 0x8000u ? -magnitude : magnitude;
}

/* tdpbf16ps, tdpfp16ps. Even and odd elements are summed apart with fused multiply-adds, then together, then into d:
 * the order of the manual. Rounding is to nearest even, subnormal results (and bf16 inputs) are zero, whatever MXCSR says. */
static inline __attribute__((always_inline)) void dot_pairs(thread_state *state, int d, int a, int b,
                                                            float (*float_of)(uint16_t)) {
  const int rows = state->config.rows[d], columns = state->config.row_bytes[d] / 4, depth = state->config.rows[b];
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(0x1f80u | 0x8040u); /* all exceptions masked, nearest even; flush to zero, denormals are zero */
  float b_even[ROWS][ROW_WORDS], b_odd[ROWS][ROW_WORDS];
  for (int k = 0; k < depth; k++)
    for (int n = 0; n < ROW_WORDS; n++) {
      b_even[k][n] = float_of(state->tiles[b].halves[k][2 * n]);
      b_odd[k][n] = float_of(state->tiles[b].halves[k][2 * n + 1]);
    }
  for (int m = 0; m < rows; m++) {
    float even[ROW_WORDS] = {0}, odd[ROW_WORDS] = {0};
    for (int k = 0; k < depth; k++) {
      const float a_even = float_of(state->tiles[a].halves[m][2 * k]);
      const float a_odd = float_of(state->tiles[a].halves[m][2 * k + 1]);
      for (int n = 0; n < ROW_WORDS; n++) {
        even[n] = __builtin_fmaf(a_even, b_even[k][n], even[n]);
        odd[n] = __builtin_fmaf(a_odd, b_odd[k][n], odd[n]);
      }
    }
    for (int n = 0; n < columns; n++) state->tiles[d].floats[m][n] += even[n] + odd[n];
  }
  _mm_setcsr(saved);
}

static void dot_bf16(thread_state *state, int d, int a, int b) { dot_pairs(state, d, a, b, float_of_bf16); }
static void dot_fp16(thread_state *state, int d, int a, int b) { dot_pairs(state, d, a, b, float_of_fp16); }

/* tdpbssd and its kin: groups of four bytes, sums modulo 2^32. */
static void dot_bytes(thread_state *state, int d, int a, int b, bool a_signed, bool b_signed) {
  const int rows = state->config.rows[d], columns = state->config.row_bytes[d] / 4, depth = state->config.rows[b];
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < columns; n++) {
      uint32_t sum = state->tiles[d].words[m][n];
      for (int k = 0; k < depth; k++)
        for (int i = 0; i < 4; i++) {
          const uint8_t x = state->tiles[a].bytes[m][4 * k + i], y = state->tiles[b].bytes[k][4 * n + i];
          sum += (uint32_t)((a_signed ? (int8_t)x : x) * (b_signed ? (int8_t)y : y));
        }
      state->tiles[d].words[m][n] = sum;
    }
}

/* ---- tiles and memory ---- */

static void load_tile(thread_state *state, int t, uint64_t base, uint64_t stride) {
  memset(&state->tiles[t], 0, sizeof(tile));
  for (int row = 0; row < state->config.rows[t]; row++)
    memcpy(state->tiles[t].bytes[row], (const void *)(base + (uint64_t)row * stride), state->config.row_bytes[t]);
}

static void store_tile(const thread_state *state, int t, uint64_t base, uint64_t stride) {
  for (int row = 0; row < state->config.rows[t]; row++)
    memcpy((void *)(base + (uint64_t)row * stride), state->tiles[t].bytes[row], state->config.row_bytes[t]);
}

/* ---- decoding ---- */

enum { NO_PREFIX = 0, PREFIX_66 = 1, PREFIX_F3 = 2, PREFIX_F2 = 3 }; /* VEX.pp */

/* VEX3 byte 1 holds the inverted register extensions and the opcode map, byte 2 W, inverted vvvv, L and pp. */
typedef struct {
  uint8_t opcode, prefix, modrm_mod, modrm_reg, modrm_rm;
  uint8_t vvvv;               /* 0 = unused (encoded 1111b) for instructions of fewer than three registers */
  bool extend_reg, extend_index, extend_base;
  const uint8_t *after_modrm;
} vex_instruction;

static uint64_t general_register(const ucontext_t *context, int number) {
  static const int place[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return (uint64_t)context->uc_mcontext.gregs[place[number]];
}

static uint64_t take_displacement(const uint8_t **bytes) {
  int32_t displacement;
  memcpy(&displacement, *bytes, sizeof displacement);
  *bytes += sizeof displacement;
  return (uint64_t)(int64_t)displacement;
}

/* The memory operand: `base` with the displacement, and the scaled index apart (the row stride of tile loads and stores).
 * Returns the address of the next instruction. */
static const uint8_t *decode_memory(const ucontext_t *context, const vex_instruction *i, uint64_t *base, uint64_t *index) {
  const uint8_t *bytes = i->after_modrm;
  bool has_base = true, rip_relative = false;
  int base_number = i->modrm_rm | i->extend_base << 3;
  *index = 0;
  if (i->modrm_rm == 4) {
    const uint8_t sib = *bytes++;
    const int index_number = (sib >> 3 & 7) | i->extend_index << 3;
    if (index_number != 4) *index = general_register(context, index_number) << (sib >> 6);
    base_number = (sib & 7) | i->extend_base << 3;
    has_base = !((sib & 7) == 5 && i->modrm_mod == 0);
  } else if (i->modrm_rm == 5 && i->modrm_mod == 0) {
    has_base = false;
    rip_relative = true;
  }
  *base = has_base ? general_register(context, base_number) : 0;
  if (i->modrm_mod == 1) *base += (uint64_t)(int64_t)(int8_t)*bytes++;
  if (i->modrm_mod == 2 || !has_base) *base += take_displacement(&bytes);
  if (rip_relative) *base += (uint64_t)bytes;
  return bytes;
}

/* Bytes are looked at one after the other: each is only there if the ones before it are what they are. */
static bool decode_vex(const uint8_t *bytes, vex_instruction *i) {
  if (bytes[0] != 0xc4) return false;
  if ((bytes[1] & 0x1f) != 2) return false; /* map 0F 38 */
  if (bytes[2] & 0x84) return false;        /* W0, L0 (128 bits) */
  i->opcode = bytes[3];
  if (i->opcode != 0x49 && i->opcode != 0x4b && i->opcode != 0x5c && i->opcode != 0x5e) return false;
  i->prefix = bytes[2] & 3;
  i->vvvv = ~bytes[2] >> 3 & 15;
  i->extend_reg = !(bytes[1] & 0x80);
  i->extend_index = !(bytes[1] & 0x40);
  i->extend_base = !(bytes[1] & 0x20);
  i->modrm_mod = bytes[4] >> 6;
  i->modrm_reg = bytes[4] >> 3 & 7;
  i->modrm_rm = bytes[4] & 7;
  i->after_modrm = bytes + 5;
  return true;
}

static const uint8_t *execute_register_form(thread_state *state, const vex_instruction *i) {
  const int d = i->modrm_reg | i->extend_reg << 3, a = i->modrm_rm | i->extend_base << 3, b = i->vvvv;
  if (i->opcode == 0x49 && i->vvvv == 0 && i->prefix == NO_PREFIX && d == 0 && a == 0) {
    release(state);
    return i->after_modrm;
  }
  if (i->opcode == 0x49 && i->vvvv == 0 && i->prefix == PREFIX_F2 && a == 0 && usable(state, d)) {
    memset(&state->tiles[d], 0, sizeof(tile));
    return i->after_modrm;
  }
  if (i->opcode == 0x5c && i->prefix >= PREFIX_F3 && product_fits(state, d, a, b)) {
    (i->prefix == PREFIX_F3 ? dot_bf16 : dot_fp16)(state, d, a, b);
    return i->after_modrm;
  }
  if (i->opcode == 0x5e && product_fits(state, d, a, b)) {
    dot_bytes(state, d, a, b, i->prefix >= PREFIX_F3, i->prefix == PREFIX_F2 || i->prefix == PREFIX_66);
    return i->after_modrm;
  }
  return NULL;
}

static const uint8_t *execute_memory_form(thread_state *state, const vex_instruction *i, const ucontext_t *context) {
  const int t = i->modrm_reg | i->extend_reg << 3;
  if (i->vvvv != 0) return NULL;
  uint64_t base, index;
  if (i->opcode == 0x49 && t == 0 && (i->prefix == NO_PREFIX || i->prefix == PREFIX_66)) {
    const uint8_t *next = decode_memory(context, i, &base, &index);
    if (i->prefix == NO_PREFIX) return load_config(state, (const void *)(base + index)) ? next : NULL;
    memcpy((void *)(base + index), &state->config, sizeof state->config); /* zeros while unconfigured */
    return next;
  }
  if (i->opcode == 0x4b && i->modrm_rm == 4 && i->prefix != NO_PREFIX && usable(state, t)) { /* only with a SIB byte */
    const uint8_t *next = decode_memory(context, i, &base, &index);
    (i->prefix == PREFIX_F3) ? store_tile(state, t, base, index) : load_tile(state, t, base, index);
    return next;
  }
  return NULL;
}

/* Execute the tile instruction at `bytes`; the address of the next instruction, or NULL: not one that hardware executes. */
static const uint8_t *execute(const ucontext_t *context, const uint8_t *bytes) {
  vex_instruction instruction;
  if (!decode_vex(bytes, &instruction)) return NULL;
  thread_state *state = state_of_this_thread();
  return instruction.modrm_mod == 3 ? execute_register_form(state, &instruction)
                                    : execute_memory_form(state, &instruction, context);
}

/* ---- the signal ---- */

static void pass_on(int number, siginfo_t *info, void *context) {
  if (previous.sa_flags & SA_SIGINFO) {
    previous.sa_sigaction(number, info, context);
  } else if (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN) {
    /* The kernel ignores SIG_IGN for a fault too. Returning repeats it: now it kills. A raised signal is raised again. */
    signal(number, SIG_DFL);
    if (info->si_code <= 0) raise(number);
  } else {
    previous.sa_handler(number);
  }
}

static void on_illegal_instruction(int number, siginfo_t *info, void *frame) {
  const int saved_errno = errno;
  ucontext_t *context = frame;
  uint64_t executed = 0;
  if (info->si_code > 0) { /* a fault; otherwise kill() or raise(), and the program counter means nothing */
    const uint8_t *at = (const uint8_t *)context->uc_mcontext.gregs[REG_RIP];
    for (const uint8_t *next; (next = execute(context, at)) != NULL; at = next) executed++;
    context->uc_mcontext.gregs[REG_RIP] = (greg_t)at;
  }
  if (executed) {
    __atomic_fetch_add(&trap_count, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&instruction_count, executed, __ATOMIC_RELAXED);
  } else {
    pass_on(number, info, frame);
  }
  errno = saved_errno;
}

/* Take SIGILL over. Call it after whatever else installs a handler for it (Python's faulthandler does not pass on).
 * Returns 0, or an errno. Twice is harmless. */
int amx_emulator_install(void) {
  struct sigaction action, current;
  if (sigaction(SIGILL, NULL, &current)) return errno;
  if ((current.sa_flags & SA_SIGINFO) && current.sa_sigaction == on_illegal_instruction) return 0;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  previous = current;
  return sigaction(SIGILL, &action, NULL) ? errno : 0;
}

/* Traps taken and tile instructions executed since the start, by all threads. */
void amx_emulator_counts(uint64_t *traps, uint64_t *instructions) {
  *traps = __atomic_load_n(&trap_count, __ATOMIC_RELAXED);
  *instructions = __atomic_load_n(&instruction_count, __ATOMIC_RELAXED);
}
