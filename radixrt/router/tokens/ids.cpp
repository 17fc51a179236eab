// A JSON list of token ids as int32: what a client that sends ids pays for most, if it goes through Python's integers.

#include <Python.h>

#include <cstdint>
#include <cstdlib>

namespace {

bool is_space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Reads `[1, 2, 3]` into `out`, which has room for every second character. The number of ids, or -1 for anything else.
Py_ssize_t parse(const char* at, const char* end, int32_t* out) {
  auto skip = [&] { while (at < end && is_space(*at)) ++at; };
  const int32_t* const first = out;
  skip();
  if (at == end || *at++ != '[') return -1;
  for (char after = ','; after == ',';) {
    skip();
    if (at == end || !is_digit(*at) || (*at == '0' && at + 1 < end && is_digit(at[1]))) return -1;
    int64_t value = 0;
    for (; at < end && is_digit(*at); ++at) {
      value = value * 10 + (*at - '0');
      if (value > INT32_MAX) return -1;
    }
    *out++ = static_cast<int32_t>(value);
    skip();
    if (at == end) return -1;
    after = *at++;
    if (after != ',' && after != ']') return -1;
  }
  skip();
  return at == end ? out - first : -1;
}

PyObject* parse_ids(PyObject*, PyObject* object) {
  Py_buffer json;
  if (PyObject_GetBuffer(object, &json, PyBUF_SIMPLE) < 0) return nullptr;
  const char* text = static_cast<const char*>(json.buf);
  auto* ids = static_cast<int32_t*>(std::malloc((static_cast<size_t>(json.len) / 2 + 1) * sizeof(int32_t)));
  const Py_ssize_t count = ids ? parse(text, text + json.len, ids) : -1;
  PyBuffer_Release(&json);
  PyObject* result = nullptr;
  if (!ids) PyErr_NoMemory();
  else if (count < 0) result = (Py_INCREF(Py_None), Py_None);
  else result = PyBytes_FromStringAndSize(reinterpret_cast<const char*>(ids), count * 4);
  std::free(ids);
  return result;
}

PyMethodDef methods[] = {
    {"parse_ids", parse_ids, METH_O,
     "parse_ids(json) -> bytes | None: a JSON list of integers in [0, 2**31), at least one, as int32; None for any other."},
    {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_ids", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__ids() { return PyModule_Create(&module); }
