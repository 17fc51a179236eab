// What a CPU spends the steps of generation on, in float32: products with weights in integers of 4 or 8 bits, which stay
// so in memory, since reading them takes longest, and attention of single queries to pages. torch has such products only
// in bfloat16, which leaves logits 8 significant bits, and copies K and V before it reads them.
//
// A task is cut into chunks, which a pool of threads takes one after the other. A thread spins for a moment before it
// sleeps, since the tasks of a step follow each other closely.

#include <Python.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wpsabi"                 // vectors are passed within this file only
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in the headers of GCC 12
#endif

namespace {

constexpr int kChunks = 4;             // chunks for each thread, so that a slow one does not keep the others waiting
constexpr int64_t kBytes = 64 << 10;   // of weights that are worth a thread
constexpr int kAhead = 4096;            // bytes ahead of those in use that are fetched from memory
constexpr int kKeysAhead = 8;           // the same in keys
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
struct Product {
  const Matrix* matrix;
  const float* x;
  float* out;
  int64_t count;
  bool add;
  const int64_t* ids;
  int64_t first;
};

// out[requests, heads, dim]: the attention of a query of each request, q[requests, heads, dim], to the keys and values
// at its `slots`, from bounds[request] to bounds[request + 1]; k and v are [slots, kv_heads, dim].
struct Attention {
  const float *q, *k, *v;
  float* out;
  const int64_t *slots, *bounds;
  int64_t heads, kv_heads, dim;
  float scale;
};

// out[rows, width]: RMSNorm of x[rows, width].
struct Norm {
  const float *x, *weight;
  float* out;
  int64_t width;
  float eps;
};

// out[tokens, heads, 2 half]: x[tokens, heads, 2 half], whose tokens are `stride` apart, rotated by the angles of
// cos and sin[tokens, half]: element i with i + half.
struct Rotation {
  const float *x, *cos, *sin;
  float* out;
  int64_t stride, heads, half;
};

// out[rows, width]: SiLU, or GELU by `tanh`, of the first half of x[rows, 2 width], times the second.
struct Gate {
  const float* x;
  float* out;
  int64_t width;
  bool tanh;
};

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define RADIXRT_MANY
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
#define RADIXRT_V4
namespace v4 {
constexpr int kLanes = 16;  // elements of a vector
#include "cpu_kernels.h"
}  // namespace v4
#undef RADIXRT_V4
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define RADIXRT_V3
namespace v3 {
constexpr int kLanes = 8;
#include "cpu_kernels.h"
}  // namespace v3
#undef RADIXRT_V3
#pragma GCC pop_options
#endif
namespace plain {
constexpr int kLanes = 4;
#include "cpu_kernels.h"
}  // namespace plain

using Compute = void (*)(const void* task, int64_t begin, int64_t end);

struct Kernels {
  Compute product, attention, norm, rotation, gate;
};

Kernels best() {
#ifdef RADIXRT_MANY
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd"))
    return {v4::product, v4::attention, v4::norm, v4::rotation, v4::gate};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    return {v3::product, v3::attention, v3::norm, v3::rotation, v3::gate};
#endif
  return {plain::product, plain::attention, plain::norm, plain::rotation, plain::gate};
}

const Kernels kernels = best();

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
  // Compute [0, count) of a task by `threads`, of which this is one, at least `least` at once. One caller at a time.
  void run(Compute compute, const void* what, int64_t count, int64_t least, int threads) {
    std::lock_guard<std::mutex> one(callers_);
    const int64_t each = threads < 2 ? count : std::max(least, (count / (threads * kChunks) + least - 1) / least * least);
    const uint32_t chunks = count ? static_cast<uint32_t>((count + each - 1) / each) : 0;
    if (chunks < 2) return compute(what, 0, count);
    const uint64_t task = ++number_ << 32;
    state_.store(task | kClosed, std::memory_order_seq_cst);  // late threads find nothing to take while this is written
    compute_ = compute, what_ = what, count_ = count, each_ = each, chunks_ = chunks;
    done_.store(0, std::memory_order_relaxed);
    helpers_.store(threads - 1, std::memory_order_relaxed);
    state_.store(task, std::memory_order_seq_cst);
    for (; made_ < threads - 1; ++made_) std::thread(&Pool::serve, this, made_).detach();
    if (sleepers_.load(std::memory_order_seq_cst)) {
      std::lock_guard<std::mutex> lock(mutex_);
      awake_.notify_all();
    }
    work(task);
    for (int spins = 0; done_.load(std::memory_order_acquire) < chunks; ++spins) {
      if (spins < 1024) pause();
      else std::this_thread::yield();
    }
  }

 private:
  void work(uint64_t task) {
    const Compute compute = compute_;
    const void* what = what_;
    const int64_t count = count_, each = each_;
    const uint32_t chunks = chunks_;
    for (;;) {
      uint64_t state = state_.load(std::memory_order_acquire);
      do {
        if (state >> 32 != task >> 32 || static_cast<uint32_t>(state) >= chunks) return;
      } while (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel));
      const int64_t begin = static_cast<int64_t>(static_cast<uint32_t>(state)) * each;
      compute(what, begin, std::min(begin + each, count));
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

  std::mutex callers_, mutex_;
  std::condition_variable awake_;
  std::atomic<uint64_t> state_{0};
  std::atomic<uint32_t> done_{0};
  std::atomic<int> helpers_{0}, sleepers_{0};
  uint64_t number_ = 0;
  int made_ = 0;
  Compute compute_ = nullptr;
  const void* what_ = nullptr;
  int64_t count_ = 0, each_ = 0;
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

// Compute a task by at most `most` threads, each with kBytes to read at least.
void run(Compute compute, const void* what, int64_t count, int64_t least, int64_t bytes, int most) {
  const int threads = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(most, bytes / kBytes)));
  Py_BEGIN_ALLOW_THREADS
  pool().run(compute, what, count, least, threads);
  Py_END_ALLOW_THREADS
}

void run(const Product& job, int64_t rows, int most) {
  const int64_t bytes = rows * (job.matrix->columns * job.matrix->bits / 8) * std::max<int64_t>(1, job.count / 4);
  run(kernels.product, &job, rows, 8, bytes, most);
}

const float* floats(unsigned long long address) { return reinterpret_cast<const float*>(address); }

PyObject* multiply(PyObject* self, PyObject* args) {
  unsigned long long x, out;
  long long count;
  int threads, add;
  if (!PyArg_ParseTuple(args, "KKLip", &x, &out, &count, &threads, &add)) return nullptr;
  const Matrix& matrix = matrix_of(self);
  if (count > 0) run({&matrix, floats(x), reinterpret_cast<float*>(out), count, add != 0, nullptr, 0}, matrix.rows, threads);
  Py_RETURN_NONE;
}

PyObject* dequantize(PyObject* self, PyObject* args) {
  unsigned long long out;
  long long first, count;
  int threads;
  if (!PyArg_ParseTuple(args, "KLLi", &out, &first, &count, &threads)) return nullptr;
  const Matrix& matrix = matrix_of(self);
  if (first < 0 || count < 0 || first + count > matrix.rows) {
    PyErr_SetString(PyExc_IndexError, "there are fewer rows");
    return nullptr;
  }
  run({&matrix, nullptr, reinterpret_cast<float*>(out), 0, false, nullptr, first}, count, threads);
  Py_RETURN_NONE;
}

PyObject* take(PyObject* self, PyObject* args) {
  unsigned long long ids, out;
  long long count;
  if (!PyArg_ParseTuple(args, "KKL", &out, &ids, &count)) return nullptr;
  const Matrix& matrix = matrix_of(self);
  const int64_t* rows = reinterpret_cast<const int64_t*>(ids);
  for (int64_t i = 0; i < count; ++i)
    if (rows[i] < 0 || rows[i] >= matrix.rows) {
      PyErr_SetString(PyExc_IndexError, "there are fewer rows");
      return nullptr;
    }
  run({&matrix, nullptr, reinterpret_cast<float*>(out), 0, false, rows, 0}, count, 1);
  Py_RETURN_NONE;
}

PyObject* attend(PyObject*, PyObject* args) {
  unsigned long long q, k, v, out, slots, bounds;
  long long requests, heads, kv_heads, dim;
  float scale;
  int threads;
  if (!PyArg_ParseTuple(args, "KKKKKKLLLLfi", &q, &k, &v, &out, &slots, &bounds, &requests, &heads, &kv_heads, &dim, &scale,
                        &threads))
    return nullptr;
  if (dim % 16 || kv_heads < 1 || heads % kv_heads) {
    PyErr_SetString(PyExc_ValueError, "dim has to be a multiple of 16, heads one of kv_heads");
    return nullptr;
  }
  const int64_t* ends = reinterpret_cast<const int64_t*>(bounds);
  const Attention job{floats(q), floats(k), floats(v), reinterpret_cast<float*>(out),
                      reinterpret_cast<const int64_t*>(slots), ends, heads, kv_heads, dim, scale};
  run(kernels.attention, &job, requests * kv_heads, 1, (ends[requests] - ends[0]) * kv_heads * dim * 8, threads);
  Py_RETURN_NONE;
}

PyObject* norm(PyObject*, PyObject* args) {
  unsigned long long x, weight, out;
  long long rows, width;
  float eps;
  int threads;
  if (!PyArg_ParseTuple(args, "KKKLLfi", &x, &weight, &out, &rows, &width, &eps, &threads)) return nullptr;
  const Norm job{floats(x), floats(weight), reinterpret_cast<float*>(out), width, eps};
  run(kernels.norm, &job, rows, 1, rows * width * 4, threads);
  Py_RETURN_NONE;
}

PyObject* rotate(PyObject*, PyObject* args) {
  unsigned long long x, cos, sin, out;
  long long tokens, stride, heads, half;
  int threads;
  if (!PyArg_ParseTuple(args, "KKKKLLLLi", &x, &cos, &sin, &out, &tokens, &stride, &heads, &half, &threads)) return nullptr;
  if (half % 16) {
    PyErr_SetString(PyExc_ValueError, "half has to be a multiple of 16");
    return nullptr;
  }
  const Rotation job{floats(x), floats(cos), floats(sin), reinterpret_cast<float*>(out), stride, heads, half};
  run(kernels.rotation, &job, tokens, 1, tokens * heads * half * 8, threads);
  Py_RETURN_NONE;
}

PyObject* gate(PyObject*, PyObject* args) {
  unsigned long long x, out;
  long long rows, width;
  int tanh, threads;
  if (!PyArg_ParseTuple(args, "KKLLpi", &x, &out, &rows, &width, &tanh, &threads)) return nullptr;
  if (width % 16) {
    PyErr_SetString(PyExc_ValueError, "width has to be a multiple of 16");
    return nullptr;
  }
  const Gate job{floats(x), reinterpret_cast<float*>(out), width, tanh != 0};
  run(kernels.gate, &job, rows, 1, rows * width * 8, threads);
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
PyMethodDef functions[] = {
    {"attend", attend, METH_VARARGS,
     "attend(q, k, v, out, slots, bounds, requests, heads, kv_heads, dim, scale, threads): writes the attention of float32 "
     "q[requests, heads, dim] to out, of the same shape. The keys and values of a request are those at int64 slots[i] of "
     "float32 k and v, [.., kv_heads, dim], for i from int64 bounds[request] to bounds[request + 1]. All but the last six "
     "are addresses."},
    {"norm", norm, METH_VARARGS,
     "norm(x, weight, out, rows, width, eps, threads): writes the RMSNorm of float32 x[rows, width] to out. The first "
     "three are addresses, as below."},
    {"rotate", rotate, METH_VARARGS,
     "rotate(x, cos, sin, out, tokens, stride, heads, half, threads): writes x[tokens, heads, 2 half], whose tokens are "
     "`stride` elements apart, to out with elements i and i + half of each head rotated by cos and sin[tokens, half]."},
    {"gate", gate, METH_VARARGS,
     "gate(x, out, rows, width, tanh, threads): writes SiLU, or GELU by `tanh`, of the first half of x[rows, 2 width] "
     "times the second to out."},
    {}};
PyType_Slot slots[] = {
    {Py_tp_doc,
     const_cast<char*>("IntMatrix(values, scales, mins, rows, columns, bits, group): a matrix q * scale + min, of integers "
                       "q of 4 or 8 bits, whose buffers it keeps. `mins` None: all are 0.")},
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(drop)},
    {Py_tp_methods, methods},
    {}};
PyType_Spec spec = {"radixrt.worker.model.layers._cpu_kernels.IntMatrix", sizeof(Matrix), 0, Py_TPFLAGS_DEFAULT, slots};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cpu_kernels", nullptr, 0, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__cpu_kernels() {
  PyObject* made = PyModule_Create(&module);
  matrix_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (!made || !matrix_type || PyModule_AddType(made, matrix_type) < 0) {
    Py_XDECREF(made);
    return nullptr;
  }
  return made;
}
