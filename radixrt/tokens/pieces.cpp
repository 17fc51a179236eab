// Converts token ids of a byte-level vocabulary to text, piece by piece. Called for each token that is streamed, hence
// in C++.

#include <Python.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <vector>

namespace {

// The bytes of each token: those of `bytes` from its own entry of `begins` up to the next one.
struct Table {
  PyObject_HEAD
  std::string bytes;
  std::vector<size_t> begins;  // one more than there are tokens
};

struct Stream {
  PyObject_HEAD
  PyObject* table;
  std::string held;  // the first bytes of a character whose other bytes have not arrived yet
};

PyTypeObject *table_type, *stream_type;

Table& table_of(PyObject* object) { return *reinterpret_cast<Table*>(object); }
Stream& stream_of(PyObject* object) { return *reinterpret_cast<Stream*>(object); }

// Appends the bytes of token `id`; none for an unknown id.
void add(const Table& table, long long id, std::string* bytes) {
  if (id < 0 || static_cast<size_t>(id) + 1 >= table.begins.size()) return;
  bytes->append(table.bytes, table.begins[id], table.begins[id + 1] - table.begins[id]);
}

// Takes the text out of `bytes`. An incomplete character at the end stays there, or becomes U+FFFD if `last`.
PyObject* take_text(std::string* bytes, bool last) {
  Py_ssize_t taken = bytes->size();
  PyObject* text = PyUnicode_DecodeUTF8Stateful(bytes->data(), bytes->size(), "replace", last ? nullptr : &taken);
  bytes->erase(0, taken);
  return text;
}

bool add_sequence(const Table& table, PyObject* ids, std::string* bytes) {
  const Py_ssize_t count = PySequence_Size(ids);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_GetItem(ids, i);
    if (!item) return false;
    const long long id = PyLong_AsLongLong(item);
    Py_DECREF(item);
    if (id == -1 && PyErr_Occurred()) return false;
    add(table, id, bytes);
  }
  return count >= 0;
}

PyObject* push(PyObject* self, PyObject* ids) {
  Stream& stream = stream_of(self);
  if (!PyBytes_Check(ids)) {
    if (!add_sequence(table_of(stream.table), ids, &stream.held)) return nullptr;
  } else {
    char* data;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(ids, &data, &size) < 0) return nullptr;
    for (Py_ssize_t at = 0; at + 4 <= size; at += 4) {
      int32_t id;
      std::memcpy(&id, data + at, 4);
      add(table_of(stream.table), id, &stream.held);
    }
  }
  return take_text(&stream.held, false);
}

PyObject* flush(PyObject* self, PyObject*) { return take_text(&stream_of(self).held, true); }

void drop_stream(PyObject* self) {
  Stream& stream = stream_of(self);
  Py_DECREF(stream.table);
  stream.held.~basic_string();
  PyObject_Free(self);
  Py_DECREF(stream_type);
}

PyObject* stream(PyObject* self, PyObject*) {
  Stream* made = PyObject_New(Stream, stream_type);
  if (!made) return nullptr;
  made->table = Py_NewRef(self);
  new (&made->held) std::string;
  return reinterpret_cast<PyObject*>(made);
}

PyObject* make_table(PyTypeObject*, PyObject* args, PyObject*) {
  PyObject* data;
  if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &data)) return nullptr;
  Table* made = PyObject_New(Table, table_type);
  if (!made) return nullptr;
  new (&made->bytes) std::string;
  new (&made->begins) std::vector<size_t>{0};
  for (Py_ssize_t i = 0; i < PyList_Size(data); ++i) {
    char* bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(PyList_GetItem(data, i), &bytes, &size) < 0) {
      Py_DECREF(made);
      return nullptr;
    }
    made->bytes.append(bytes, size);
    made->begins.push_back(made->bytes.size());
  }
  return reinterpret_cast<PyObject*>(made);
}

void drop_table(PyObject* self) {
  Table& table = table_of(self);
  table.bytes.~basic_string();
  table.begins.~vector();
  PyObject_Free(self);
  Py_DECREF(table_type);
}

PyMethodDef table_methods[] = {
    {"stream", stream, METH_NOARGS, "stream() -> ByteStream: a decode of ids that come piece by piece."},
    {}};
PyType_Slot table_slots[] = {
    {Py_tp_doc, const_cast<char*>("ByteTable(data): `data` has the bytes that each token adds, by its id.")},
    {Py_tp_new, reinterpret_cast<void*>(make_table)},
    {Py_tp_dealloc, reinterpret_cast<void*>(drop_table)},
    {Py_tp_methods, table_methods},
    {}};
PyType_Spec table_spec = {"radixrt.tokens._pieces.ByteTable", sizeof(Table), 0, Py_TPFLAGS_DEFAULT, table_slots};

PyMethodDef stream_methods[] = {
    {"push", push, METH_O,
     "push(ids) -> str: the text that these ids, integers or int32 bytes, settle: never half a character."},
    {"flush", flush, METH_NOARGS, "flush() -> str: U+FFFD for a character that stayed incomplete."},
    {}};
PyType_Slot stream_slots[] = {
    {Py_tp_doc, const_cast<char*>("See `pieces.Stream`; a ByteTable makes it.")},
    {Py_tp_dealloc, reinterpret_cast<void*>(drop_stream)},
    {Py_tp_methods, stream_methods},
    {}};
PyType_Spec stream_spec = {"radixrt.tokens._pieces.ByteStream", sizeof(Stream), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, stream_slots};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_pieces", nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__pieces() {
  PyObject* made = PyModule_Create(&module);
  table_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&table_spec));
  stream_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&stream_spec));
  if (!made || !table_type || !stream_type || PyModule_AddType(made, table_type) < 0) {
    Py_XDECREF(made);
    return nullptr;
  }
  return made;
}
