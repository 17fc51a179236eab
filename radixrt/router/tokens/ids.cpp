// JSON lists of token ids as int32: what a client that sends ids pays for most, if it goes through Python's integers.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

bool is_space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }
bool is_digit(char c) { return static_cast<unsigned char>(c - '0') < 10; }

const char* skip_space(const char* at, const char* end) {
  while (at < end && is_space(*at)) ++at;
  return at;
}

// Behind the list `[1, 2, 3]` at `at`, or null for anything else. `out` has room for one id more than it has commas.
const char* parse(const char* at, const char* end, int32_t* out) {
  if (at == end || *at++ != '[') return nullptr;
  for (char after = ','; after == ',';) {
    at = skip_space(at, end);
    if (at == end || !is_digit(*at) || (*at == '0' && at + 1 < end && is_digit(at[1]))) return nullptr;
    int64_t value = *at++ - '0';
    for (; at < end && is_digit(*at); ++at) {
      value = value * 10 + (*at - '0');
      if (value > INT32_MAX) return nullptr;
    }
    *out++ = static_cast<int32_t>(value);
    at = skip_space(at, end);
    if (at == end) return nullptr;
    after = *at++;
    if (after != ',' && after != ']') return nullptr;
  }
  return at;
}

// New bytes of the ids in the list at `at`, and where it ends; null, without an error, where none is there.
PyObject* take_list(const char* at, const char* end, const char** behind) {
  const char* close = static_cast<const char*>(std::memchr(at, ']', end - at));
  if (!close) return nullptr;
  // Counted first: memory that is too large for the allocator's own is fresh each time, which costs more.
  const Py_ssize_t count = std::count(at, close, ',') + 1;
  PyObject* ids = PyBytes_FromStringAndSize(nullptr, count * 4);
  if (!ids) return nullptr;
  *behind = parse(at, close + 1, reinterpret_cast<int32_t*>(PyBytes_AsString(ids)));
  if (!*behind) Py_CLEAR(ids);
  return ids;
}

PyObject* none_or_error() { return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None); }

PyObject* parse_ids(PyObject*, PyObject* object) {
  Py_buffer json;
  if (PyObject_GetBuffer(object, &json, PyBUF_SIMPLE) < 0) return nullptr;
  const char* text = static_cast<const char*>(json.buf);
  const char* const end = text + json.len;
  const char* behind = nullptr;
  PyObject* ids = take_list(skip_space(text, end), end, &behind);
  if (ids && skip_space(behind, end) != end) Py_CLEAR(ids);
  PyBuffer_Release(&json);
  return ids ? ids : none_or_error();
}

// Behind the string whose opening quote is at `at`; null if it does not end. `plain`: it has no escapes.
const char* skip_string(const char* at, const char* end, bool* plain) {
  *plain = true;
  for (++at; at < end && *at != '"'; ++at)
    if (*at == '\\') {
      *plain = false;
      if (++at == end) return nullptr;
    }
  return at < end ? at + 1 : nullptr;
}

// The comma or bracket that ends a value; what is between is not checked.
const char* skip_value(const char* at, const char* end) {
  bool plain;
  for (int depth = 0; at < end;) {
    const char c = *at;
    if (c == '"') {
      if (!(at = skip_string(at, end, &plain))) return nullptr;
      continue;
    }
    if (!depth && (c == ',' || c == '}' || c == ']')) return at;
    depth += (c == '{' || c == '[') - (c == '}' || c == ']');
    ++at;
  }
  return nullptr;
}

// New bytes of the ids that the object `text` has as `key`, and the list's ends; null, without an error, if the key is
// not there exactly once, or in doubt.
PyObject* find_list(const char* text, const char* end, const char* key, size_t size, const char** from, const char** to) {
  PyObject* ids = nullptr;
  const char* at = skip_space(text, end);
  bool fine = at < end && *at == '{', plain;
  while (fine && *at != '}') {
    fine = false;
    at = skip_space(at + 1, end);
    if (at == end || *at != '"') break;
    const char* const name = at + 1;
    if (!(at = skip_string(at, end, &plain)) || !plain) break;
    const bool wanted = static_cast<size_t>(at - 1 - name) == size && !std::memcmp(name, key, size);
    at = skip_space(at, end);
    if (at == end || *at != ':') break;
    at = skip_space(at + 1, end);
    if (wanted) {
      if (ids || !(ids = take_list(at, end, to))) break;
      *from = at;
      at = *to;
    }
    if (!(at = skip_value(at, end))) break;
    fine = *at == ',' || *at == '}';
  }
  if (!fine) Py_CLEAR(ids);
  return ids;
}

PyObject* cut_ids(PyObject*, PyObject* args) {
  Py_buffer json;
  const char* key;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(args, "y*s#", &json, &key, &size)) return nullptr;
  const char* text = static_cast<const char*>(json.buf);
  const char* const end = text + json.len;
  const char *from = nullptr, *to = nullptr;
  PyObject* rest = nullptr;
  PyObject* ids = find_list(text, end, key, size, &from, &to);
  if (ids && (rest = PyBytes_FromStringAndSize(nullptr, (from - text) + 4 + (end - to)))) {
    char* out = std::copy(text, from, PyBytes_AsString(rest));
    out = std::copy_n("null", 4, out);
    std::copy(to, end, out);
  }
  PyBuffer_Release(&json);
  if (rest) return Py_BuildValue("(NN)", rest, ids);
  Py_XDECREF(ids);
  return none_or_error();
}

PyMethodDef methods[] = {
    {"parse_ids", parse_ids, METH_O,
     "parse_ids(json) -> bytes | None: a JSON list of integers in [0, 2**31), at least one, as int32; None for any other."},
    {"cut_ids", cut_ids, METH_VARARGS,
     "cut_ids(json, key) -> (bytes, bytes) | None: an object in JSON with null in place of the list of ids that it has as "
     "`key`, and that list as `parse_ids` gives it; None where the value is anything else, or the key is not there "
     "exactly once and without escapes. What is returned is valid JSON only if `json` is."},
    {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_ids", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__ids() { return PyModule_Create(&module); }
