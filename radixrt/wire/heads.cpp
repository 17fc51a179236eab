// Reads what is to be known of a MessagePack map before it is decoded: who sends it, and how much decoding it would cost.

#include <Python.h>

#include <cstdint>
#include <cstring>
#include <string_view>

namespace {

struct Limits {
  Py_ssize_t values, numbers, entries, depth;
};

enum Verdict { kFine, kMalformed, kValues, kNumbers, kEntries, kDepth };

// What the head of a value says: so many bytes of payload follow it, or so many values, which it contains.
struct Value {
  enum Kind { kNumber, kBytes, kString, kArray, kMap } kind;
  uint64_t size, count;
};

class Scan {
 public:
  Scan(const char* at, const char* end, const Limits& limits) : at_(at), end_(end), limits_(limits) {}

  // Reads the whole message. The fields `id`, `type` and `api_key` of the map are kept.
  Verdict run() {
    Value map;
    if (!take(&map) || map.kind != Value::kMap) return kMalformed;
    for (uint64_t i = 0; i < map.count; ++i) {
      std::string_view name;
      const char* const key = at_;
      if (!skip(1)) return verdict_;
      read_string(key, &name);
      fields_[0] = name;
      const char* const value = at_;
      if (!skip(1)) return verdict_;
      if (name == "api_key") read_string(value, &api_key);
      if (name == "type") read_string(value, &type);
      if (name == "id") read_integer(value);
      fields_[0] = {};
    }
    return at_ == end_ ? kFine : kMalformed;
  }

  std::string_view api_key, type;
  bool has_id = false, negative = false;
  uint64_t id = 0;

  // The field in which the scan ended, and its own field: "prompt" and "messages", both empty outside of any.
  std::string_view field(int level) const { return fields_[level]; }

 private:
  uint64_t big_endian(int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; ++i) value = value << 8 | static_cast<unsigned char>(*at_++);
    return value;
  }

  // Reads a head of one byte and `bytes` more, which say a length.
  bool take_length(int bytes, uint64_t* length) {
    if (end_ - at_ < bytes) return false;
    *length = big_endian(bytes);
    return true;
  }

  // Reads the head of a value, and skips the payload of one that is no container. False if that is not all there.
  bool take(Value* value) {
    *value = {Value::kNumber, 0, 0};
    if (at_ == end_) return false;
    const unsigned char head = *at_++;
    bool whole = true;
    if (head <= 0x7F || head >= 0xE0) {  // an integer
    } else if (head <= 0x8F) {
      value->kind = Value::kMap, value->count = head & 15;
    } else if (head <= 0x9F) {
      value->kind = Value::kArray, value->count = head & 15;
    } else if (head <= 0xBF) {
      value->kind = Value::kString, value->size = head & 31;
    } else {
      static const unsigned char kSizes[] = {4, 8, 1, 2, 4, 8, 1, 2, 4, 8};  // of numbers, from 0xCA on
      switch (head) {
        case 0xC1: return false;
        case 0xC0: case 0xC2: case 0xC3: break;
        case 0xC4: case 0xC5: case 0xC6:
          value->kind = Value::kBytes, whole = take_length(1 << (head - 0xC4), &value->size);
          break;
        case 0xC7: case 0xC8: case 0xC9:  // extensions have a type of one byte
          value->kind = Value::kBytes, whole = take_length(1 << (head - 0xC7), &value->size), ++value->size;
          break;
        case 0xD4: case 0xD5: case 0xD6: case 0xD7: case 0xD8:
          value->kind = Value::kBytes, value->size = 1 + (1 << (head - 0xD4));
          break;
        case 0xD9: case 0xDA: case 0xDB:
          value->kind = Value::kString, whole = take_length(1 << (head - 0xD9), &value->size);
          break;
        case 0xDC: case 0xDD: value->kind = Value::kArray, whole = take_length(2 << (head - 0xDC), &value->count); break;
        case 0xDE: case 0xDF: value->kind = Value::kMap, whole = take_length(2 << (head - 0xDE), &value->count); break;
        default: value->size = kSizes[head - 0xCA];
      }
    }
    if (!whole || value->size > static_cast<uint64_t>(end_ - at_)) return false;
    at_ += value->size;
    return true;
  }

  bool fail(Verdict verdict) {
    verdict_ = verdict;
    return false;
  }

  // Skips a value that is in `depth` containers. `entries` counts the containers that are next to each other.
  bool skip(Py_ssize_t depth, Py_ssize_t* entries = nullptr) {
    Value value;
    if (!take(&value)) return fail(kMalformed);
    if (value.kind == Value::kNumber) return ++numbers_ <= limits_.numbers || fail(kNumbers);
    if (++values_ > limits_.values) return fail(kValues);
    if (value.kind < Value::kArray) return true;
    if (value.count > static_cast<uint64_t>(end_ - at_)) return fail(kMalformed);  // each takes a byte
    if (depth >= limits_.depth) return fail(kDepth);
    if (entries && ++*entries > limits_.entries) return fail(kEntries);
    Py_ssize_t inner = 0;
    for (uint64_t i = 0; i < value.count; ++i) {
      if (value.kind == Value::kArray) {
        if (!skip(depth + 1, &inner)) return false;
        continue;
      }
      const char* const key = at_;
      if (!skip(depth + 1)) return false;
      if (depth == 1) fields_[1] = {}, read_string(key, &fields_[1]);
      if (!skip(depth + 1)) return false;
    }
    if (depth == 1) fields_[1] = {};
    return true;
  }

  // The string at `at`, which was skipped before; other values leave `text` as it is.
  void read_string(const char* at, std::string_view* text) {
    const char* const before = at_;
    Value value;
    at_ = at;
    if (take(&value) && value.kind == Value::kString) *text = {at_ - value.size, static_cast<size_t>(value.size)};
    at_ = before;
  }

  // Sets `id` if the value at `at`, which was skipped before, is an integer.
  void read_integer(const char* at) {
    const char* const before = at_;
    at_ = at + 1;
    const unsigned char head = *at;
    has_id = true, negative = false;
    if (head <= 0x7F) {
      id = head;
    } else if (head >= 0xE0) {
      id = ~uint64_t{0} << 8 | head, negative = true;
    } else if (head >= 0xCC && head <= 0xCF) {
      id = big_endian(1 << (head - 0xCC));
    } else if (head >= 0xD0 && head <= 0xD3) {
      const int bits = 64 - (8 << (head - 0xD0));
      id = static_cast<uint64_t>(static_cast<int64_t>(big_endian(1 << (head - 0xD0)) << bits) >> bits);
      negative = static_cast<int64_t>(id) < 0;
    } else {
      has_id = false;
    }
    at_ = before;
  }

  const char *at_, *const end_;
  const Limits limits_;
  Verdict verdict_ = kFine;
  Py_ssize_t values_ = 0, numbers_ = 0;
  std::string_view fields_[2];
};

PyObject* bytes_of(std::string_view text) { return PyBytes_FromStringAndSize(text.data(), text.size()); }

PyObject* scan(PyObject*, PyObject* args) {
  Py_buffer message;
  Limits limits;
  if (!PyArg_ParseTuple(args, "y*nnnn", &message, &limits.values, &limits.numbers, &limits.entries, &limits.depth)) return nullptr;
  const char* const text = static_cast<const char*>(message.buf);
  Scan scan(text, text + message.len, limits);
  const Verdict verdict = scan.run();
  PyObject* id = !scan.has_id    ? Py_NewRef(Py_None)
                 : scan.negative ? PyLong_FromLongLong(static_cast<long long>(scan.id))
                                 : PyLong_FromUnsignedLongLong(scan.id);
  PyObject* found = Py_BuildValue("(iNNNNN)", static_cast<int>(verdict), id, bytes_of(scan.type), bytes_of(scan.api_key),
                                  bytes_of(scan.field(0)), bytes_of(scan.field(1)));
  PyBuffer_Release(&message);
  return found;
}

PyMethodDef methods[] = {
    {"scan", scan, METH_VARARGS,
     "scan(message, values, numbers, entries, depth) -> (verdict, id, type, api_key, field, its field): reads a map in "
     "MessagePack without decoding it. The verdict is 0 if it is well-formed, and holds at most so many maps, arrays, "
     "strings and bytes, so many numbers and literals, so many maps and arrays in one array, and so many of them within "
     "each other; 1 if it is malformed; 2 to 5 for the limit that it exceeds, in the named field. `id` is None, and "
     "others are empty, where they are not what they should be, or come after where the scan ended; of a field that "
     "comes twice, the later one counts."},
    {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_heads", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__heads() { return PyModule_Create(&module); }
