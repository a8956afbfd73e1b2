/* Plans of decode batches on a GPU in C: decode_planner.py's rules, which stay the definition, in a few microseconds.
 *
 * A decode step is planned before every forward pass, and numpy's dozens of calls for it take longer than a layer. The
 * tests hold `cut` and `move` to DecodeWork over random batches. Included by cuda_launcher.c, after bound_call.h.
 */

/* Python's Py_buffer, the same since 3.0. */
typedef struct {
  void *data;
  PyObject *object;
  ptrdiff_t bytes, item;
  int readonly, rank;
  char *format;
  ptrdiff_t *shape, *strides, *suboffsets;
  void *internal;
} PyBuffer;
extern int PyObject_GetBuffer(PyObject *object, PyBuffer *view, int flags);
extern void PyBuffer_Release(PyBuffer *view);
enum { PY_SIMPLE = 0, PY_WRITABLE = 1 };

/* planner.py */
enum { REQUEST, Q_ROW, Q_LEN, KV_BEGIN, KV_LEN, POS, PREFIX, NEW_ROW, PART, FIRST_NEW, ITEM_COLUMNS, MERGE_COLUMNS = 4 };
enum { FIRST_PIECE = PREFIX, PIECES = NEW_ROW, COUNTER = FIRST_NEW };
enum { OFF = 1 << 30 };

extern PyObject *PyExc_TypeError;
extern void PyErr_SetString(PyObject *kind, const char *text);
extern PyObject *Py_BuildValue(const char *format, ...);

static PyObject *wrong_count(void) {
  PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
  return NULL;
}

typedef struct {
  int count;
  PyBuffer views[8];
} Buffers;

static void release(Buffers *held) {
  while (held->count--)
    if (held->views[held->count].object) PyBuffer_Release(&held->views[held->count]);
}

/* The memory of dense arrays; None, where it may stand, has none. 0, or -1 with an exception and nothing held. */
static int hold(Buffers *held, PyObject *const *arrays, int count, unsigned optional) {
  memset(held, 0, sizeof *held);
  for (; held->count < count; held->count++) {
    PyBuffer *view = &held->views[held->count];
    if (arrays[held->count] == python.none && (optional >> held->count & 1)) continue;
    if (PyObject_GetBuffer(arrays[held->count], view, PY_SIMPLE)) {
      release(held);
      return -1;
    }
  }
  return 0;
}

/* ---- arithmetic of planner.py ---- */

static int64_t at_least(int64_t value, int64_t bound) { return value > bound ? value : bound; }
static int64_t at_most(int64_t value, int64_t bound) { return value < bound ? value : bound; }
static int64_t pieces_of(int64_t value, int64_t size) { return (value + size - 1) / size; } /* value >= 0 */
static int64_t round_up(int64_t value, int64_t multiple) { return pieces_of(value, multiple) * multiple; }

/* A stable order of `count` values in 0..2^30, greatest first; `spare` has room for as many. */
static void order_descending(const int64_t *values, int64_t count, int32_t *order, int32_t *spare) {
  enum { BITS = 10, BINS = 1 << BITS };
  int64_t largest = 0;
  for (int64_t n = 0; n < count; n++) largest = at_least(largest, values[n]), order[n] = (int32_t)n;
  for (int shift = 0; largest >> shift; shift += BITS) {
    int32_t starts[BINS] = {0}, next = 0;
    for (int64_t n = 0; n < count; n++) starts[values[n] >> shift & (BINS - 1)]++;
    for (int bin = BINS - 1; bin >= 0; bin--) {
      int32_t size = starts[bin];
      starts[bin] = next, next += size;
    }
    for (int64_t n = 0; n < count; n++) spare[starts[values[order[n]] >> shift & (BINS - 1)]++] = order[n];
    memcpy(order, spare, count * sizeof *order);
  }
}

typedef struct {
  int64_t window, chunk, min_split, max_split, units, workers, fixed, joins;
  double balanced, fine;
  int64_t batch;
  const int64_t *kv_lens;
  int64_t *lengths, *low, *size, *counts, *trial_size, *trial_counts; /* of each request */
  int64_t room;             /* pieces that fit the memory below */
  int64_t *costs;           /* of each piece */
  int32_t *order, *spare;   /* of each piece */
} Cut;

/* planner.makespan of the first `count` costs. */
static double makespan(Cut *cut, int64_t count, double mean) {
  order_descending(cut->costs, count, cut->order, cut->spare);
  int64_t rounds = 0, sum = 0;
  for (int64_t unit = 0; unit < count * cut->units; unit += cut->workers) rounds += cut->costs[cut->order[unit / cut->units]];
  if ((double)rounds <= cut->balanced * mean) return (double)rounds > mean ? (double)rounds : mean;
  double most = 0;
  for (int64_t n = 0; n < count; n++) {
    int64_t cost = cut->costs[cut->order[n]];
    sum += cost;
    double end = (double)(sum * cut->units - cost) / (double)cut->workers + (double)cost;
    if (end > most) most = end;
  }
  double load = (double)rounds < most ? (double)rounds : most;
  if (load < (double)cut->costs[cut->order[0]]) load = (double)cut->costs[cut->order[0]];
  return load < mean ? mean : load;
}

/* planner.even_pieces of every request, and the pieces' costs; their number, -1 where they do not fit. */
static int64_t even_pieces(Cut *cut, int64_t limit, int64_t smallest) {
  int64_t total = 0;
  for (int64_t b = 0; b < cut->batch; b++) {
    int64_t length = cut->lengths[b];
    int64_t even = pieces_of(length, at_least(pieces_of(length, limit), 1));
    int64_t size = at_least(round_up(even, cut->chunk), smallest);
    int64_t count = at_least(pieces_of(length, size), 1);
    count -= count > 1 && length - (count - 1) * size < cut->min_split;
    cut->trial_size[b] = size, cut->trial_counts[b] = count;
    if (total + count > cut->room) return -1;
    for (int64_t n = 0; n < count - 1; n++) cut->costs[total++] = size;
    cut->costs[total++] = length - (count - 1) * size;
  }
  return total;
}

/* decode_planner._pieces: sizes and counts; whether any is split, -1 where the memory is too small. */
static int choose_pieces(Cut *cut) {
  int64_t total = 0, longest = 0;
  for (int64_t b = 0; b < cut->batch; b++) {
    total += cut->lengths[b], longest = at_least(longest, cut->lengths[b]);
    cut->size[b] = cut->lengths[b], cut->counts[b] = 1;
  }
  double mean = (double)(total * cut->units) / (double)cut->workers, best = -1; /* -1: none yet */
  int64_t smallest = round_up(at_least(cut->min_split, 1), cut->chunk);
  int64_t bound = cut->max_split ? at_least(round_up(cut->max_split, cut->chunk), smallest) : OFF;
  int split = 0;
  if (longest <= bound) {
    best = mean;
    if ((double)longest > mean / cut->fine) {
      memcpy(cut->costs, cut->lengths, cut->batch * sizeof *cut->costs);
      best = makespan(cut, cut->batch, mean);
    }
  }
  for (int64_t share = 1; (best < 0 || best > cut->balanced * mean) && (double)share <= cut->fine; share *= 2) {
    int64_t limit = at_most(at_least(round_up((int64_t)(mean / (double)share), cut->chunk), smallest), bound);
    if (limit >= longest && best >= 0) continue;
    int64_t pieces = even_pieces(cut, limit, smallest);
    if (pieces < 0) return -1;
    double load = makespan(cut, pieces, mean);
    if (best < 0 || load < best) {
      memcpy(cut->size, cut->trial_size, cut->batch * sizeof *cut->size);
      memcpy(cut->counts, cut->trial_counts, cut->batch * sizeof *cut->counts);
      best = load, split = 1;
    }
    if (limit == smallest) break;
  }
  return split;
}

typedef struct {
  int32_t *items, *rows;
  int64_t *request, *begin, *last;
  uint64_t *room;
} Lists;

/* Write the lists, costliest item first; the numbers of items, rows and partial rows. */
static void write_lists(Cut *cut, int split, const Lists *lists, int64_t *num_items, int64_t *num_rows, int64_t *partials) {
  int64_t pieces = 0, rows = 0, partial = 0;
  /* Piece n of `owner`: where it begins is kept in lists->begin until the order is known. */
  int64_t *begins = lists->begin;
  for (int64_t b = 0; b < cut->batch; b++) {
    int64_t base = cut->fixed ? cut->low[b] / cut->fixed * cut->fixed : cut->low[b];
    int64_t end = cut->kv_lens[b], count = split ? cut->counts[b] : 1;
    for (int64_t n = 0; n < count; n++) {
      begins[pieces + n] = n || split ? at_least(base + n * cut->size[b], cut->low[b]) : cut->low[b];
      lists->request[pieces + n] = b;
    }
    for (int64_t n = 0; n < count; n++)
      cut->costs[pieces + n] = (n + 1 < count ? begins[pieces + n + 1] : end) - begins[pieces + n];
    pieces += count;
  }
  order_descending(cut->costs, pieces, cut->order, cut->spare);
  int32_t *place = cut->spare;
  for (int64_t n = 0; n < pieces; n++) place[cut->order[n]] = (int32_t)n;
  for (int64_t b = 0, piece = 0; b < cut->batch; b++) {
    int64_t count = split ? cut->counts[b] : 1;
    if (count > 1) {
      int32_t *row = lists->rows + rows++ * MERGE_COLUMNS;
      row[0] = (int32_t)b, row[1] = (int32_t)partial, row[2] = (int32_t)count, row[3] = 1;
    }
    for (int64_t n = 0; n < count; n++, piece++) {
      int32_t *item = lists->items + (int64_t)place[piece] * ITEM_COLUMNS;
      memset(item, 0, ITEM_COLUMNS * sizeof *item);
      item[REQUEST] = item[Q_ROW] = (int32_t)b;
      item[Q_LEN] = 1;
      item[KV_BEGIN] = (int32_t)begins[piece];
      item[KV_LEN] = (int32_t)cut->costs[piece];
      item[POS] = (int32_t)(cut->kv_lens[b] - 1);
      item[PREFIX] = OFF;
      if (split && cut->joins) {
        item[FIRST_PIECE] = (int32_t)(count > 1 ? partial : partial - 1); /* not looked at where there is one */
        item[PIECES] = (int32_t)count;
        item[COUNTER] = count > 1 ? (int32_t)rows : 0;
      }
      item[PART] = count > 1 ? (int32_t)(partial + n) : -1;
    }
    if (count > 1) partial += count;
  }
  *num_items = pieces, *num_rows = rows, *partials = partial;
}

/* What DecodeWork keeps to move on: the request of each item in the list's order; where the last piece of each request
 * stands and begins (split) or where each item begins; how far each request may grow. */
static void write_state(Cut *cut, int split, const Lists *lists, int64_t pieces) {
  const int32_t *place = cut->spare;
  for (int64_t b = 0, piece = 0; b < cut->batch; b++) {
    int64_t count = split ? cut->counts[b] : 1, kv_len = cut->kv_lens[b], room = cut->chunk;
    piece += count;
    if (cut->fixed) room = cut->window >= OFF ? cut->low[b] / cut->fixed * cut->fixed + cut->counts[b] * cut->fixed - kv_len : 0;
    else if (cut->max_split) room = at_most(at_least(cut->max_split - (kv_len - lists->begin[piece - 1]), 0), room);
    lists->room[b] = (uint64_t)room;
    lists->last[b] = place[piece - 1];
  }
  /* `begin`: by request where split, else by item. */
  if (split) {
    for (int64_t b = 0, piece = 0; b < cut->batch; b++) piece += cut->counts[b], cut->costs[b] = lists->begin[piece - 1];
    memcpy(lists->begin, cut->costs, cut->batch * sizeof *cut->costs);
    int64_t piece = 0;
    for (int64_t b = 0; b < cut->batch; b++)
      for (int64_t n = 0; n < cut->counts[b]; n++) lists->request[place[piece++]] = b;
  } else {
    for (int64_t n = 0; n < pieces; n++) {
      lists->request[n] = cut->order[n];
      cut->costs[n] = lists->begin[cut->order[n]];
    }
    memcpy(lists->begin, cut->costs, pieces * sizeof *cut->costs);
  }
}

/* decode_planner.DecodeWork in C: (kv_lens, items, rows, request, last_begin, last, room, window, chunk, min_split,
 * max_split, units, workers, fixed, joins, balanced, fine). Fills the arrays behind kv_lens; (items, rows, partials, split), or None
 * where `items`, `request` and `last_begin` are too short. fixed: keys between the split points of the batch-invariant mode,
 * 0 = off. */
static PyObject *plan_cut(PyObject *self, PyObject *const *arguments, ptrdiff_t count) {
  enum { ARRAYS = 7, NUMBERS = 8 };
  Buffers held;
  Cut cut = {0};
  if (count != ARRAYS + NUMBERS + 2) return wrong_count();
  int64_t *numbers[NUMBERS] = {&cut.window, &cut.chunk, &cut.min_split, &cut.max_split, &cut.units, &cut.workers, &cut.fixed,
                              &cut.joins};
  for (int n = 0; n < NUMBERS; n++) *numbers[n] = PyLong_AsLongLong(arguments[ARRAYS + n]);
  cut.balanced = PyFloat_AsDouble(arguments[ARRAYS + NUMBERS]), cut.fine = PyFloat_AsDouble(arguments[ARRAYS + NUMBERS + 1]);
  if (PyErr_Occurred() || hold(&held, arguments, ARRAYS, 0)) return NULL;
  cut.kv_lens = held.views[0].data;
  cut.batch = held.views[0].bytes / 8;
  cut.room = at_most(held.views[1].bytes / (4 * ITEM_COLUMNS), at_most(held.views[3].bytes, held.views[4].bytes) / 8);
  Lists lists = {held.views[1].data, held.views[2].data, held.views[3].data,
                 held.views[4].data, held.views[5].data, held.views[6].data};
  int64_t items = 0, rows = 0, partials = 0;
  int64_t *memory = malloc((6 * cut.batch + 2 * cut.room) * sizeof *memory);
  int split = memory && cut.room >= cut.batch ? 0 : -1;
  if (!split) {
    cut.lengths = memory, cut.low = memory + cut.batch, cut.size = memory + 2 * cut.batch, cut.counts = memory + 3 * cut.batch;
    cut.trial_size = memory + 4 * cut.batch, cut.trial_counts = memory + 5 * cut.batch, cut.costs = memory + 6 * cut.batch;
    cut.order = (int32_t *)(cut.costs + cut.room), cut.spare = cut.order + cut.room;
    for (int64_t b = 0; b < cut.batch; b++) {
      cut.lengths[b] = at_most(cut.kv_lens[b], cut.window);
      cut.low[b] = cut.kv_lens[b] - cut.lengths[b];
    }
    if (cut.fixed) {
      int64_t pieces = 0;
      for (int64_t b = 0; b < cut.batch; b++) {
        cut.size[b] = cut.fixed;
        cut.counts[b] = at_least(pieces_of(cut.kv_lens[b] - cut.low[b] / cut.fixed * cut.fixed, cut.fixed), 1);
        pieces += cut.counts[b], split |= cut.counts[b] > 1;
      }
      if (pieces > cut.room) split = -1;
    } else {
      split = choose_pieces(&cut);
    }
    if (split >= 0) {
      write_lists(&cut, split, &lists, &items, &rows, &partials);
      write_state(&cut, split, &lists, items);
    }
  }
  free(memory);
  release(&held);
  if (!memory) return PyErr_NoMemory();
  if (split < 0) {
    Py_IncRef(python.none);
    return python.none;
  }
  return Py_BuildValue("LLLi", (long long)items, (long long)rows, (long long)partials, split);
}

/* ---- on their way to the device ---- */

/* Enter a device and find torch's current stream there. 0 or the driver's error; then leave(). */
static CUresult enter_stream(int64_t device, CUstream *stream, int *pushed) {
  if (device < 0 || device >= MAX_DEVICES) return 101; /* CUDA_ERROR_INVALID_DEVICE */
  if (python.stream(DEVICE_CUDA, (int)device, stream)) return PyErr_Clear(), 999; /* CUDA_ERROR_UNKNOWN */
  return enter((int)device, pushed);
}

static CUresult send(int64_t device, uint64_t to, const void *from, size_t bytes) {
  CUstream stream = NULL;
  int pushed;
  CUresult error = enter_stream(device, &stream, &pushed);
  if (error) return error;
  error = host.copy(to, from, bytes, stream);
  leave(pushed);
  return error;
}

/* (device, event): record it on torch's current stream. The driver's error, 0 = none. */
static PyObject *plan_record(PyObject *self, PyObject *const *arguments, ptrdiff_t count) {
  if (count != 2) return wrong_count();
  int64_t device = PyLong_AsLongLong(arguments[0]), event = PyLong_AsLongLong(arguments[1]);
  CUstream stream = NULL;
  int pushed;
  if (PyErr_Occurred()) return NULL;
  CUresult error = enter_stream(device, &stream, &pushed);
  if (!error) error = host.record((void *)(intptr_t)event, stream), leave(pushed);
  return PyLong_FromLong(error);
}

/* (device, address there, address in pinned memory, bytes): the driver's error, 0 = none. */
static PyObject *plan_send(PyObject *self, PyObject *const *arguments, ptrdiff_t count) {
  int64_t values[4];
  if (count != 4) return wrong_count();
  for (int n = 0; n < 4; n++) values[n] = PyLong_AsLongLong(arguments[n]);
  if (PyErr_Occurred()) return NULL;
  return PyLong_FromLong(send(values[0], (uint64_t)values[1], (const void *)(intptr_t)values[2], (size_t)values[3]));
}

/* DecodeWork.reaches and .move, and the copy of the items to the device: (kv_lens, lens, room, request, last_begin, last,
 * items, device, address there, address in pinned memory). None = the lengths are not reached and nothing was done, else the
 * driver's error. last_begin None: all 0; last None: each request has one item, and last_begin is by item. */
static PyObject *plan_move(PyObject *self, PyObject *const *arguments, ptrdiff_t count) {
  enum { ARRAYS = 7, NUMBERS = 3, OPTIONAL = 1 << 4 | 1 << 5 };
  Buffers held;
  int64_t numbers[NUMBERS];
  if (count != ARRAYS + NUMBERS) return wrong_count();
  for (int n = 0; n < NUMBERS; n++) numbers[n] = PyLong_AsLongLong(arguments[ARRAYS + n]);
  if (PyErr_Occurred() || hold(&held, arguments, ARRAYS, OPTIONAL)) return NULL;
  const int64_t *kv_lens = held.views[0].data, *lens = held.views[1].data, *request = held.views[3].data;
  const int64_t *begin = held.views[4].data, *last = held.views[5].data;
  const uint64_t *room = held.views[2].data;
  int32_t *items = held.views[6].data;
  ptrdiff_t batch = held.views[1].bytes / 8, rows = held.views[6].bytes / (4 * ITEM_COLUMNS);
  int reached = held.views[0].bytes == held.views[1].bytes;
  CUresult error = 0;
  for (ptrdiff_t b = 0; reached && b < batch; b++) reached = (uint64_t)kv_lens[b] - (uint64_t)lens[b] <= room[b];
  if (reached) {
    for (ptrdiff_t w = 0; w < rows; w++) {
      int64_t end = kv_lens[request[w]];
      items[w * ITEM_COLUMNS + POS] = (int32_t)(end - 1);
      if (!last) items[w * ITEM_COLUMNS + KV_LEN] = (int32_t)(end - (begin ? begin[w] : 0));
    }
    for (ptrdiff_t b = 0; last && b < batch; b++)
      items[last[b] * ITEM_COLUMNS + KV_LEN] = (int32_t)(kv_lens[b] - begin[b]);
    void *pinned = (void *)(intptr_t)numbers[2];
    memcpy(pinned, items, held.views[6].bytes);
    error = send(numbers[0], (uint64_t)numbers[1], pinned, held.views[6].bytes);
  }
  release(&held);
  if (reached) return PyLong_FromLong(error);
  Py_IncRef(python.none);
  return python.none;
}

static PyMethodDef plan_methods[] = {
    {"send", plan_send, METH_FASTCALL, "Copy from pinned memory to a device on torch's stream there."},
    {"move", plan_move, METH_FASTCALL, "Move a decode batch's items on and copy them to the device."},
    {"cut", plan_cut, METH_FASTCALL, "Cut a decode batch into items."},
    {"record", plan_record, METH_FASTCALL, "Record an event on torch's stream."},
};

/* The function of that number. */
EXPORT PyObject *tilewright_cuda_plan_function(int number) {
  return PyCFunction_NewEx(&plan_methods[number], NULL, NULL);
}
