// Finds earlier occurrences of the last tokens of a sequence and proposes what followed them there. Called for each
// token that is generated, hence in C++.
//
// Uses hash chains like LZ77 compressors (RFC 1951, section 4). A run is three consecutive tokens, and its place is the
// index of its last token: `heads` maps a run's hash to its latest place, `before` maps a place to the previous place
// with the same hash.
//
//     tokens   ... a b c d e f ... a b c        the run (a b c) occurred before: d e f may come next
//                      ^---------------' before

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

namespace {

constexpr int kRun = 3;         // tokens that are hashed together
constexpr int kPlaces = 32;     // places of one hash that are compared, at most
constexpr int kLongest = 64;    // tokens that are compared at one place, at most

struct Repeats {
  PyObject_HEAD
  std::vector<int32_t> tokens;
  std::vector<int32_t> before;  // by place; -1: there is none
  std::vector<int32_t> heads;   // by hash; the size is a power of two
};

PyTypeObject* repeats_type;

Repeats& repeats_of(PyObject* object) { return *reinterpret_cast<Repeats*>(object); }

// Index into `heads` of the run whose last token is `*t`; multipliers as in Knuth's multiplicative hashing.
uint32_t hash_of(const Repeats& repeats, const int32_t* t) {
  const uint64_t mixed = static_cast<uint32_t>(t[0]) * 0x9E3779B97F4A7C15u + static_cast<uint32_t>(t[-1]) * 0xC2B2AE3D27D4EB4Fu +
                         static_cast<uint32_t>(t[-2]) * 0x165667B19E3779F9u;
  return static_cast<uint32_t>((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9u >> 33) & (repeats.heads.size() - 1);
}

void note(Repeats& repeats, int64_t place) {
  int32_t& head = repeats.heads[hash_of(repeats, repeats.tokens.data() + place)];
  repeats.before[place] = head;
  head = static_cast<int32_t>(place);
}

// Grows `heads` to at least twice the number of tokens, which keeps the chains short.
void make_room(Repeats& repeats) {
  if (repeats.heads.size() >= 2 * repeats.tokens.size()) return;
  size_t size = 1024;
  while (size < 4 * repeats.tokens.size()) size *= 2;
  repeats.heads.assign(size, -1);
  for (int64_t place = kRun - 1; place < static_cast<int64_t>(repeats.before.size()); ++place) note(repeats, place);
}

PyObject* extend(PyObject* self, PyObject* data) {
  Repeats& repeats = repeats_of(self);
  Py_buffer view;
  if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) return nullptr;
  const int32_t* ids = static_cast<const int32_t*>(view.buf);
  const int64_t first = repeats.before.size();
  try {
    repeats.tokens.insert(repeats.tokens.end(), ids, ids + view.len / 4);
    make_room(repeats);
    repeats.before.resize(repeats.tokens.size(), -1);
  } catch (const std::bad_alloc&) {
    PyBuffer_Release(&view);
    return PyErr_NoMemory();
  }
  PyBuffer_Release(&view);
  for (int64_t place = std::max<int64_t>(first, kRun - 1); place < static_cast<int64_t>(repeats.tokens.size()); ++place)
    note(repeats, place);
  Py_RETURN_NONE;
}

// The tokens to find, which end at `end`. `own`: they are the end of the indexed sequence itself, so its last place is
// not a match; otherwise they belong to another sequence.
struct Tail {
  const int32_t* end;
  int64_t size;
  bool own;
};

// The number of tokens, counted back from `place`, that equal the last ones of the tail.
int compare(const Repeats& repeats, int64_t place, const Tail& tail) {
  const int32_t* t = repeats.tokens.data() + place;
  const int most = static_cast<int>(std::min({static_cast<int64_t>(kLongest), place + 1, tail.size}));
  int count = 0;
  while (count < most && t[-count] == tail.end[-1 - count]) ++count;
  return count;
}

struct Match {
  int count;      // equal tokens; 0 if they are fewer than a run
  int64_t after;  // the place of the token that follows them
};

// The longest match; of several the latest.
Match find(const Repeats& repeats, const Tail& tail) {
  Match best{0, 0};
  if (tail.size < kRun || repeats.heads.empty()) return best;
  int64_t place = tail.own ? repeats.before.back() : repeats.heads[hash_of(repeats, tail.end - 1)];
  for (int looked = 0; place >= 0 && looked < kPlaces; ++looked, place = repeats.before[place]) {
    const int count = compare(repeats, place, tail);
    if (count > best.count) best = {count, place + 1};
    if (count == kLongest) break;
  }
  return best.count < kRun ? Match{0, 0} : best;
}

// Reads the tail from the argument `data`; without one it is the sequence's own. The caller releases `view`. Returns
// false with an exception set if it fails.
bool read_tail(const Repeats& repeats, PyObject* data, Py_buffer* view, Tail* tail) {
  view->obj = nullptr;
  if (!data || data == Py_None) {
    *tail = {repeats.tokens.data() + repeats.tokens.size(), static_cast<int64_t>(repeats.tokens.size()), true};
    return true;
  }
  if (PyObject_GetBuffer(data, view, PyBUF_SIMPLE) < 0) return false;
  *tail = {static_cast<const int32_t*>(view->buf) + view->len / 4, static_cast<int64_t>(view->len / 4), false};
  return true;
}

PyObject* matched(PyObject* self, PyObject* args) {
  const Repeats& repeats = repeats_of(self);
  PyObject* data = nullptr;
  Py_buffer view;
  Tail tail;
  if (!PyArg_ParseTuple(args, "|O", &data) || !read_tail(repeats, data, &view, &tail)) return nullptr;
  const int count = find(repeats, tail).count;
  PyBuffer_Release(&view);
  return PyLong_FromLong(count);
}

PyObject* propose(PyObject* self, PyObject* args) {
  const Repeats& repeats = repeats_of(self);
  PyObject* data = nullptr;
  long most;
  Py_buffer view;
  Tail tail;
  if (!PyArg_ParseTuple(args, "l|O", &most, &data) || !read_tail(repeats, data, &view, &tail)) return nullptr;
  const Match match = find(repeats, tail);
  PyBuffer_Release(&view);
  PyObject* ids = PyList_New(0);
  const int64_t size = repeats.tokens.size();
  for (long i = 0; ids && match.count && i < most; ++i) {
    int64_t at = match.after + i;
    if (at >= size) {
      if (!tail.own) break;
      // Past the sequence's end the proposal continues with its own tokens: a text that repeats itself does so.
      at = match.after + (at - match.after) % (size - match.after);
    }
    if (repeats.tokens[at] < 0) break;
    PyObject* id = PyLong_FromLong(repeats.tokens[at]);
    if (!id || PyList_Append(ids, id) < 0) Py_CLEAR(ids);
    Py_XDECREF(id);
  }
  return ids;
}

PyObject* make(PyTypeObject*, PyObject*, PyObject*) {
  Repeats* made = PyObject_New(Repeats, repeats_type);
  if (!made) return nullptr;
  new (&made->tokens) std::vector<int32_t>;
  new (&made->before) std::vector<int32_t>;
  new (&made->heads) std::vector<int32_t>;
  return reinterpret_cast<PyObject*>(made);
}

void drop(PyObject* self) {
  Repeats& repeats = repeats_of(self);
  repeats.tokens.~vector();
  repeats.before.~vector();
  repeats.heads.~vector();
  PyObject_Free(self);
  Py_DECREF(repeats_type);
}

Py_ssize_t length(PyObject* self) { return repeats_of(self).tokens.size(); }

PyMethodDef methods[] = {
    {"extend", extend, METH_O, "extend(ids): appends token ids, given as int32 bytes."},
    {"matched", matched, METH_VARARGS,
     "matched(tail=None) -> int: how many of the last tokens occur earlier in the sequence, 64 at most, 0 if fewer "
     "than 3. `tail`, int32 bytes: looks for the end of these ids instead."},
    {"propose", propose, METH_VARARGS,
     "propose(most, tail=None) -> list[int]: at most `most` ids that followed the match, up to a negative id."},
    {}};
PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("Repeats(): a sequence of token ids with an index of the runs in it.")},
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(drop)},
    {Py_tp_methods, methods},
    {Py_sq_length, reinterpret_cast<void*>(length)},
    {}};
PyType_Spec spec = {"radixrt.worker.speculative._repeats.Repeats", sizeof(Repeats), 0, Py_TPFLAGS_DEFAULT, slots};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_repeats", nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__repeats() {
  PyObject* made = PyModule_Create(&module);
  repeats_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (!made || !repeats_type || PyModule_AddType(made, repeats_type) < 0) {
    Py_XDECREF(made);
    return nullptr;
  }
  return made;
}
