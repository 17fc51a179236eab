// Products with weights in integers of 4 or 8 bits, which stay so in memory: a CPU that generates is bound by reading
// them. torch has such products only in bfloat16, which leaves logits 8 significant bits.
//
// A product is cut into chunks of rows of the weight, which a pool of threads takes one after the other. A thread spins
// for a moment before it sleeps, since the products of a step follow each other closely.

#include <Python.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wpsabi"                 // vectors are passed within this file only
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in the headers of GCC 12
#endif

namespace {

constexpr int kChunks = 4;             // chunks for each thread, so that a slow one does not keep the others waiting
constexpr int64_t kBytes = 64 << 10;   // of weights that are worth a thread
constexpr int kAhead = 4096;            // bytes ahead of those in use that are fetched from memory
constexpr uint32_t kClosed = ~0u;        // in place of the next chunk
constexpr auto kSpin = std::chrono::microseconds(100);

struct Matrix {
  PyObject_HEAD
  Py_buffer buffers[3];                // of values, scales and mins
  const uint8_t* values;               // [rows, columns]; in 4 bits byte i of a group has columns i (low) and 16 + i
  const float* scales;                 // [rows, columns / group]
  const float* mins;                   // the same, or null: all are 0
  int64_t rows, columns;
  int bits, group;
};

// What is to be done with a matrix: out[count, rows] (+)= x[count, columns] times it, or, without x, write its rows to
// out: those of `ids`, or those from `first` on.
struct Job {
  const float* x;
  float* out;
  int64_t count;
  bool add;
  const int64_t* ids;
  int64_t first;
};

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define RADIXRT_MANY
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
#define RADIXRT_V4
namespace v4 {
constexpr int kLanes = 16;  // elements of a vector
#include "int_kernels.h"
}  // namespace v4
#undef RADIXRT_V4
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define RADIXRT_V3
namespace v3 {
constexpr int kLanes = 8;
#include "int_kernels.h"
}  // namespace v3
#undef RADIXRT_V3
#pragma GCC pop_options
#endif
namespace plain {
constexpr int kLanes = 4;
#include "int_kernels.h"
}  // namespace plain

using Compute = void (*)(const Matrix&, const Job&, int64_t, int64_t);

Compute best() {
#ifdef RADIXRT_MANY
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd"))
    return v4::compute;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    return v3::compute;
#endif
  return plain::compute;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Threads that take chunks of one task at a time. `state` has the number of the task and that of the next chunk, so that
// a thread that comes late cannot take a chunk of a task that it does not know.
class Pool {
 public:
  // Compute rows [0, rows) by `threads`, of which this is one. One caller at a time.
  void run(const Matrix& matrix, const Job& job, int64_t rows, int threads) {
    std::lock_guard<std::mutex> one(callers_);
    const int64_t each = threads < 2 ? rows : std::max<int64_t>(8, (rows / (threads * kChunks) + 7) / 8 * 8);
    const uint32_t chunks = static_cast<uint32_t>((rows + each - 1) / each);
    if (chunks < 2) return compute_(matrix, job, 0, rows);
    const uint64_t task = ++number_ << 32;
    state_.store(task | kClosed, std::memory_order_seq_cst);  // late threads find nothing to take while this is written
    matrix_ = &matrix, job_ = job, rows_ = rows, each_ = each, chunks_ = chunks;
    done_.store(0, std::memory_order_relaxed);
    helpers_.store(threads - 1, std::memory_order_relaxed);
    state_.store(task, std::memory_order_seq_cst);
    for (; made_ < threads - 1; ++made_) std::thread(&Pool::serve, this, made_).detach();
    if (sleepers_.load(std::memory_order_seq_cst)) {
      std::lock_guard<std::mutex> lock(mutex_);
      awake_.notify_all();
    }
    work(task);
    while (done_.load(std::memory_order_acquire) < chunks) pause();
  }

 private:
  void work(uint64_t task) {
    const Matrix* matrix = matrix_;
    const Job job = job_;
    const int64_t rows = rows_, each = each_;
    const uint32_t chunks = chunks_;
    for (;;) {
      uint64_t state = state_.load(std::memory_order_acquire);
      do {
        if (state >> 32 != task >> 32 || static_cast<uint32_t>(state) >= chunks) return;
      } while (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel));
      const int64_t begin = static_cast<int64_t>(static_cast<uint32_t>(state)) * each;
      compute_(*matrix, job, begin, std::min(begin + each, rows));
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  void serve(int number) {
    uint64_t seen = 0;
    for (;;) {
      const uint64_t state = next(seen);
      seen = state >> 32;
      if (number < helpers_.load(std::memory_order_relaxed)) work(state);
    }
  }

  static bool is_new(uint64_t state, uint64_t seen) {
    return state >> 32 != seen && static_cast<uint32_t>(state) != kClosed;
  }

  // Wait for a task after the one with number `seen`.
  uint64_t next(uint64_t seen) {
    const auto until = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < 64; ++i) {
        const uint64_t state = state_.load(std::memory_order_acquire);
        if (is_new(state, seen)) return state;
        pause();
      }
    } while (std::chrono::steady_clock::now() < until);
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    awake_.wait(lock, [&] { return is_new(state_.load(std::memory_order_seq_cst), seen); });
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return state_.load(std::memory_order_acquire);
  }

  const Compute compute_ = best();
  std::mutex callers_, mutex_;
  std::condition_variable awake_;
  std::atomic<uint64_t> state_{0};
  std::atomic<uint32_t> done_{0};
  std::atomic<int> helpers_{0}, sleepers_{0};
  uint64_t number_ = 0;
  int made_ = 0;
  const Matrix* matrix_ = nullptr;
  Job job_{};
  int64_t rows_ = 0, each_ = 0;
  uint32_t chunks_ = 0;
};

Pool& pool() {
  static Pool* made = new Pool;  // never deleted: its threads run until the process ends
  return *made;
}

PyTypeObject* matrix_type;

Matrix& matrix_of(PyObject* object) { return *reinterpret_cast<Matrix*>(object); }

void drop(PyObject* self) {
  for (Py_buffer& view : matrix_of(self).buffers) PyBuffer_Release(&view);
  PyObject_Free(self);
  Py_DECREF(matrix_type);
}

PyObject* make(PyTypeObject*, PyObject* args, PyObject*) {
  PyObject* parts[3];
  long long rows, columns;
  int bits, group;
  if (!PyArg_ParseTuple(args, "OOOLLii", &parts[0], &parts[1], &parts[2], &rows, &columns, &bits, &group)) return nullptr;
  const bool served = (bits == 4 && group == 32) || (bits == 8 && (group == 16 || group == 32));
  if (!served || rows < 0 || columns < 0 || columns % group) {
    PyErr_SetString(PyExc_ValueError, "4 bits with groups of 32 columns, or 8 with 16 or 32, in whole groups");
    return nullptr;
  }
  Matrix* made = PyObject_New(Matrix, matrix_type);
  if (!made) return nullptr;
  std::memset(made->buffers, 0, sizeof made->buffers);
  PyObject* self = reinterpret_cast<PyObject*>(made);
  const long long facts = rows * (columns / group) * 4, sizes[3] = {rows * columns * bits / 8, facts, facts};
  for (int i = 0; i < 3; ++i) {
    if (i == 2 && parts[i] == Py_None) continue;
    if (PyObject_GetBuffer(parts[i], &made->buffers[i], PyBUF_SIMPLE) == 0 && made->buffers[i].len == sizes[i]) continue;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a buffer has another size than the matrix");
    Py_DECREF(self);
    return nullptr;
  }
  made->values = static_cast<const uint8_t*>(made->buffers[0].buf);
  made->scales = static_cast<const float*>(made->buffers[1].buf);
  made->mins = static_cast<const float*>(made->buffers[2].buf);
  made->rows = rows, made->columns = columns, made->bits = bits, made->group = group;
  return self;
}

// Compute `rows` of a job by at most `most` threads, each with kBytes of the weights to read at least.
void run(const Matrix& matrix, const Job& job, int64_t rows, int most) {
  const int64_t bytes = rows * (matrix.columns * matrix.bits / 8) * std::max<int64_t>(1, job.count / 4);
  const int threads = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(most, bytes / kBytes)));
  Py_BEGIN_ALLOW_THREADS
  pool().run(matrix, job, rows, threads);
  Py_END_ALLOW_THREADS
}

PyObject* multiply(PyObject* self, PyObject* args) {
  unsigned long long x, out;
  long long count;
  int threads, add;
  if (!PyArg_ParseTuple(args, "KKLip", &x, &out, &count, &threads, &add)) return nullptr;
  const Job job{reinterpret_cast<const float*>(x), reinterpret_cast<float*>(out), count, add != 0, nullptr, 0};
  if (count > 0) run(matrix_of(self), job, matrix_of(self).rows, threads);
  Py_RETURN_NONE;
}

PyObject* dequantize(PyObject* self, PyObject* args) {
  unsigned long long out;
  long long first, count;
  int threads;
  if (!PyArg_ParseTuple(args, "KLLi", &out, &first, &count, &threads)) return nullptr;
  if (first < 0 || count < 0 || first + count > matrix_of(self).rows) {
    PyErr_SetString(PyExc_IndexError, "there are fewer rows");
    return nullptr;
  }
  run(matrix_of(self), Job{nullptr, reinterpret_cast<float*>(out), 0, false, nullptr, first}, count, threads);
  Py_RETURN_NONE;
}

PyObject* take(PyObject* self, PyObject* args) {
  unsigned long long ids, out;
  long long count;
  if (!PyArg_ParseTuple(args, "KKL", &out, &ids, &count)) return nullptr;
  const int64_t* rows = reinterpret_cast<const int64_t*>(ids);
  for (int64_t i = 0; i < count; ++i)
    if (rows[i] < 0 || rows[i] >= matrix_of(self).rows) {
      PyErr_SetString(PyExc_IndexError, "there are fewer rows");
      return nullptr;
    }
  run(matrix_of(self), Job{nullptr, reinterpret_cast<float*>(out), 0, false, rows, 0}, count, 1);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"multiply", multiply, METH_VARARGS,
     "multiply(x, out, count, threads, add): writes the product of float32 x[count, columns] and the transposed matrix "
     "to float32 out[count, rows], or adds it. Both are addresses of contiguous memory."},
    {"dequantize", dequantize, METH_VARARGS,
     "dequantize(out, first, count, threads): writes `count` rows, from `first` on, to float32 out[count, columns], an "
     "address."},
    {"take", take, METH_VARARGS,
     "take(out, ids, count): writes the rows of int64 ids[count] to float32 out[count, columns]; both are addresses."},
    {}};
PyType_Slot slots[] = {
    {Py_tp_doc,
     const_cast<char*>("IntMatrix(values, scales, mins, rows, columns, bits, group): a matrix q * scale + min, of integers "
                       "q of 4 or 8 bits, whose buffers it keeps. `mins` None: all are 0.")},
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(drop)},
    {Py_tp_methods, methods},
    {}};
PyType_Spec spec = {"radixrt.worker.model.layers._int_products.IntMatrix", sizeof(Matrix), 0, Py_TPFLAGS_DEFAULT, slots};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_int_products", nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__int_products() {
  PyObject* made = PyModule_Create(&module);
  matrix_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (!made || !matrix_type || PyModule_AddType(made, matrix_type) < 0) {
    Py_XDECREF(made);
    return nullptr;
  }
  return made;
}
