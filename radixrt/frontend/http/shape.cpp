// Bounds the structure of JSON before it is parsed: what a parser would make of it, and where it exceeds a limit.

#include <Python.h>

#include <cstring>
#include <string>

namespace {

constexpr int MAX_LEVELS = 1024;

struct Limits {
  Py_ssize_t depth, values, numbers, entries;
};

// One object or array that is open.
struct Level {
  bool array;
  Py_ssize_t entries;  // objects and arrays directly in an array
  const char *key, *key_end;  // the last key of an object; null before the first
};

bool in_number(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || c == '-' || c == '+' || c == '.' || c == 'E'; }

// Reads JSON once, without checking that it is valid. `exceeded` is then the name of the first limit that it exceeds, or
// null, and `field` says where.
class Scan {
 public:
  const char* exceeded = nullptr;
  std::string field;

  explicit Scan(const Limits& limits) : limits_(limits) {}

  void run(const char* at, const char* end) {
    while (at < end && !exceeded) {
      switch (*at) {
        case '"':
          at = string(at, end);
          break;
        case '{':
        case '[':
          open(*at++ == '[');
          break;
        case '}':
        case ']':
          if (open_) --open_;
          ++at;
          break;
        case ',':
          in_key_ = true;
          ++at;
          break;
        case ':':
          in_key_ = false;
          ++at;
          break;
        default:
          at = in_number(*at) ? number(at, end) : at + 1;
      }
    }
  }

 private:
  void open(bool array) {
    if (open_ && levels_[open_ - 1].array && ++levels_[open_ - 1].entries > limits_.entries) return exceed("entries");
    if (open_ == limits_.depth) return exceed("depth");
    levels_[open_++] = {array, 0, nullptr, nullptr};
    in_key_ = true;
    if (++values_ > limits_.values) exceed("values");
  }

  const char* string(const char* at, const char* end) {
    const char* const from = ++at;
    while ((at = static_cast<const char*>(std::memchr(at, '"', end - at))) && escaped(from, at)) ++at;
    if (!at) at = end;
    if (open_ && !levels_[open_ - 1].array && in_key_) {
      levels_[open_ - 1].key = from;
      levels_[open_ - 1].key_end = at;
    }
    if (++values_ > limits_.values) exceed("values");
    return at < end ? at + 1 : end;
  }

  // Whether an odd number of backslashes is before a quote.
  static bool escaped(const char* from, const char* at) {
    const char* back = at;
    while (back > from && back[-1] == '\\') --back;
    return (at - back) % 2;
  }

  const char* number(const char* at, const char* end) {
    if (++numbers_ > limits_.numbers) exceed("numbers");
    while (at < end && in_number(*at)) ++at;
    return at;
  }

  void exceed(const char* limit) {
    exceeded = limit;
    for (int i = 0; i < open_ && i < 4; ++i) {
      if (levels_[i].array || !levels_[i].key) continue;
      if (!field.empty()) field += '.';
      field.append(levels_[i].key, levels_[i].key_end - levels_[i].key > 64 ? 64 : levels_[i].key_end - levels_[i].key);
    }
  }

  const Limits limits_;
  Level levels_[MAX_LEVELS];
  int open_ = 0;
  bool in_key_ = true;
  Py_ssize_t values_ = 0, numbers_ = 0;
};

PyObject* exceeded(PyObject*, PyObject* args) {
  Py_buffer json;
  Limits limits;
  if (!PyArg_ParseTuple(args, "y*nnnn", &json, &limits.depth, &limits.values, &limits.numbers, &limits.entries))
    return nullptr;
  if (limits.depth > MAX_LEVELS) limits.depth = MAX_LEVELS;
  Scan scan(limits);
  Py_BEGIN_ALLOW_THREADS
  scan.run(static_cast<const char*>(json.buf), static_cast<const char*>(json.buf) + json.len);
  Py_END_ALLOW_THREADS
  PyBuffer_Release(&json);
  if (!scan.exceeded) Py_RETURN_NONE;
  PyObject* field = PyUnicode_DecodeUTF8(scan.field.data(), scan.field.size(), "replace");
  return field ? Py_BuildValue("(sN)", scan.exceeded, field) : nullptr;
}

PyMethodDef methods[] = {
    {"exceeded", exceeded, METH_VARARGS,
     "exceeded(json, depth, values, numbers, entries) -> (str, str) | None: the first of these limits that JSON exceeds, by "
     "its name, and the field where it does; None if it keeps all. `depth`: objects and arrays within each other; "
     "`values`: objects, arrays and strings (also keys); `numbers`: numbers and literals; `entries`: objects and arrays "
     "in one array. Reads without Python's lock."},
    {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_shape", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__shape() { return PyModule_Create(&module); }
