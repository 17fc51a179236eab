// Converts JSON lists of token ids to int32. By way of Python's integers this would be the largest cost of a request
// that sends ids.

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && !defined(RADIXRT_NO_AVX2)
#define RADIXRT_AVX2 __attribute__((target("avx2,bmi,popcnt")))
#include <immintrin.h>
#endif

namespace {

bool is_space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }
bool is_digit(char c) { return static_cast<unsigned char>(c - '0') < 10; }

const char* skip_space(const char* at, const char* end) {
  while (at < end && is_space(*at)) ++at;
  return at;
}

// Parses the number at `at` and returns the number of its digits: one to seven, or 0 if it must be left to `parse_number`.
// Always reads eight bytes, so that there is no branch on the number of digits; they must lie before the end.
int parse_short(const char* at, int32_t* out) {
  uint64_t bytes;
  std::memcpy(&bytes, at, 8);  // the first one lowest: ids are little-endian everywhere here
  uint64_t digits = bytes ^ 0x3030303030303030ull;
  const uint64_t others = ((digits + 0x7676767676767676ull) | digits) & 0x8080808080808080ull;  // right up to the first
  if (!others) return 0;
  const int bits = __builtin_ctzll(others) & ~7;
  if (!bits || (bits > 8 && !(digits & 0xFF))) return 0;  // zeros in front
  digits <<= 64 - bits;
  digits = digits * 10 + (digits >> 8);  // pairs of digits, in every second byte
  const uint64_t pairs = 0x000000FF000000FFull;
  *out = static_cast<int32_t>(((digits & pairs) * ((1'000'000ull << 32) + 100) +
                               ((digits >> 16) & pairs) * ((10'000ull << 32) + 1)) >> 32);
  return bits / 8;
}

// Parses the number at `at` and returns what follows it, or null if there is no valid id.
const char* parse_number(const char* at, const char* end, int32_t* out) {
  if (at == end || !is_digit(*at) || (*at == '0' && at + 1 < end && is_digit(at[1]))) return nullptr;
  int64_t value = *at++ - '0';
  for (; at < end && is_digit(*at); ++at) {
    value = value * 10 + (*at - '0');
    if (value > INT32_MAX) return nullptr;
  }
  *out = static_cast<int32_t>(value);
  return at;
}

// Parses the number at `at` and returns the comma or bracket after it and after white space, or null if there is no id.
const char* take_id(const char* at, const char* end, int32_t* out) {
  at = skip_space(at, end);
  const int digits = end - at >= 8 ? parse_short(at, out) : 0;
  const char* behind = digits ? at + digits : parse_number(at, end, out);
  return behind ? skip_space(behind, end) : nullptr;
}

// A list is read in several parts in parallel. Where a number begins is known only after the one before it was read;
// while the processor waits for that in one part, it can go on in another.
constexpr int kParts = 4;
struct Part {
  const char *at, *stop;  // the next number, null when all are read; the comma or bracket that ends the part
  int32_t* out;
};

// Reads `count` numbers from each part, fewer if one is not written as in most lists: at most seven digits, a comma,
// and a space or none. Each part must have at least eight commas left, because eight bytes are read at once.
void parse_together(Part* parts, Py_ssize_t count) {
  Part now[kParts];  // a local copy, which the compiler can keep in registers
  std::copy_n(parts, kParts, now);
  for (bool plain = true; plain && count > 0; --count)
    for (Part& part : now) {
      const int digits = parse_short(part.at, part.out);
      const char* behind = part.at + digits;
      plain = plain && digits && *behind == ',';
      if (!plain) break;
      part.at = behind + 1 + (behind[1] == ' ');
      ++part.out;
    }
  std::copy_n(now, kParts, parts);
}

#ifdef RADIXRT_AVX2

// Bit masks of 64 bytes by kind; the first byte is the lowest bit.
struct Block {
  uint64_t digits = 0, zeros = 0, commas = 0, spaces = 0;

  RADIXRT_AVX2 explicit Block(const char* at) {
    for (int i = 0; i < 64; i += 32) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + i));
      const __m256i values = _mm256_sub_epi8(bytes, _mm256_set1_epi8('0'));
      digits |= mask(_mm256_cmpeq_epi8(_mm256_min_epu8(values, _mm256_set1_epi8(9)), values)) << i;
      zeros |= mask(_mm256_cmpeq_epi8(bytes, _mm256_set1_epi8('0'))) << i;
      commas |= mask(_mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(','))) << i;
      spaces |= mask(_mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(' '))) << i;
    }
  }
  RADIXRT_AVX2 static uint64_t mask(__m256i equal) { return static_cast<uint32_t>(_mm256_movemask_epi8(equal)); }
};

uint64_t eight_bytes(const char* at) {
  uint64_t bytes;
  std::memcpy(&bytes, at, 8);
  return bytes;
}

// Converts four numbers of one to eight digits; `lengths` has the number of digits of each.
RADIXRT_AVX2 __m128i convert_four(const char* const* at, __m128i lengths) {
  __m256i digits = _mm256_set_epi64x(eight_bytes(at[3]), eight_bytes(at[2]), eight_bytes(at[1]), eight_bytes(at[0]));
  digits = _mm256_xor_si256(digits, _mm256_set1_epi8('0'));
  const __m128i shifts = _mm_sub_epi32(_mm_set1_epi32(64), _mm_slli_epi32(lengths, 3));
  digits = _mm256_sllv_epi64(digits, _mm256_cvtepi32_epi64(shifts));  // zeros in front, what follows is gone
  const __m256i pairs = _mm256_maddubs_epi16(digits, _mm256_set1_epi16(10 + (1 << 8)));
  const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(100 + (1 << 16)));
  const __m256i eights = _mm256_madd_epi16(_mm256_packus_epi32(fours, fours), _mm256_set1_epi32(10'000 + (1 << 16)));
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(eights, 0b1000));
}

// Converts numbers written as in most lists: at most eight digits each, all followed by a comma and a space, or all by
// a comma alone. Writes them to `out` and returns what follows the last one's comma. The commas of 64 bytes are found
// at once and the numbers between them converted four at a time, so that no step waits for the one before.
RADIXRT_AVX2 const char* parse_blocks(const char* const begin, const char* const end, int32_t** out) {
  const char* comma = static_cast<const char*>(std::memchr(begin, ',', end - begin));
  if (!comma || end - begin > INT32_MAX) return begin;
  const int32_t* const first = *out;
  const uint32_t gap = comma[1] == ' ' ? 2 : 1;
  // Offsets of commas from `begin`: the one before the first number to convert, then those after it; a block has at
  // most 32.
  uint32_t places[1 + 3 + 32];
  places[0] = -gap;
  int found = 0;
  uint64_t after_digit = 0, after_comma = 0, after_zero = 0;  // in bit 0: whether the next block's first byte is
  for (const char* at = begin; end - at >= 64 + 8; at += 64) {
    const Block block(at);
    after_digit |= block.digits << 1;
    after_comma |= block.commas << 1;
    const uint64_t first_zeros = block.zeros & ~after_digit;  // leading zeros: no digit may follow
    after_zero |= first_zeros << 1;
    const uint64_t others = ~(block.digits | block.commas | block.spaces);
    const uint64_t odd_spaces = block.spaces ^ (gap == 2 ? after_comma : 0);
    if (others | odd_spaces | (block.commas & ~after_digit) | (block.digits & after_zero)) break;
    uint64_t commas = block.commas;
    const int count = __builtin_popcountll(commas);
    for (int i = 0; i < count; i += 16)  // a fixed number, more than there are: a loop of `count` would be mispredicted
      for (int j = 0; j < 16; ++j, commas = _blsr_u64(commas))
        places[1 + found + i + j] = static_cast<uint32_t>(at - begin + _tzcnt_u64(commas));
    found += count;
    int done = 0;
    __m128i longest = _mm_setzero_si128();
    for (; done + 4 <= found; done += 4) {
      const uint32_t* before = places + done;
      const char* numbers[4];
      for (int j = 0; j < 4; ++j) numbers[j] = begin + (before[j] + gap);
      const __m128i stops = _mm_loadu_si128(reinterpret_cast<const __m128i*>(before + 1));
      const __m128i starts = _mm_add_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(before)), _mm_set1_epi32(gap));
      const __m128i lengths = _mm_sub_epi32(stops, starts);
      longest = _mm_max_epi32(longest, lengths);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(*out + done), convert_four(numbers, lengths));
    }
    if (_mm_movemask_epi8(_mm_cmpgt_epi32(longest, _mm_set1_epi32(8)))) break;
    *out += done;
    found -= done;
    std::copy_n(places + done, 1 + 3, places);
    after_digit = block.digits >> 63;
    after_comma = block.commas >> 63;
    after_zero = first_zeros >> 63;
  }
  return *out == first ? begin : begin + places[0] + 1;
}

bool has_avx2() {
  static const bool has =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt");
  return has;
}

#endif

// The number of commas in [at, end). Counts in one byte per block, which the compiler vectorizes.
Py_ssize_t count_commas(const char* at, const char* end) {
  Py_ssize_t count = 0;
  for (; end - at >= 128; at += 128) {
    unsigned char found = 0;
    for (int i = 0; i < 128; ++i) found += at[i] == ',';
    count += found;
  }
  return count + std::count(at, end, ',');
}

// Reads the ids between `at` and the bracket `close`; false if anything else is there. `out` has room for one id more
// than there are commas.
bool parse(const char* at, const char* close, int32_t* out) {
#ifdef RADIXRT_AVX2
  at = skip_space(at, close);
  if (has_avx2()) at = parse_blocks(at, close + 1, &out);
#endif
  Part parts[kParts];
  const Py_ssize_t share = (close - at) / kParts;
  Py_ssize_t least = PY_SSIZE_T_MAX;
  for (Part& part : parts) {
    part = {at, close, out};
    if (!at) {  // the list was too short for all parts
      least = 0;
      continue;
    }
    const bool last = &part == &parts[kParts - 1] || close - at <= share;
    if (const void* comma = last ? nullptr : std::memchr(at + share, ',', close - at - share))
      part.stop = static_cast<const char*>(comma);
    const Py_ssize_t count = count_commas(at, part.stop) + 1;
    least = std::min(least, count);
    part.at = skip_space(at, part.stop);
    out += count;
    at = part.stop < close ? part.stop + 1 : nullptr;
  }
  parse_together(parts, least - 1 - 8);
  for (bool more = true; more;) {
    more = false;
    for (Part& part : parts) {
      if (!part.at) continue;
      const char* behind = take_id(part.at, close + 1, part.out++);
      if (!behind || (behind != part.stop && *behind != ',')) return false;
      part.at = behind == part.stop ? nullptr : behind + 1;
      more |= part.at != nullptr;
    }
  }
  return true;
}

// Returns new bytes with the ids of the list at `at`, and sets where it ends. Null without an error if there is no list
// of ids.
PyObject* take_list(const char* at, const char* end, const char** behind) {
  if (at == end || *at != '[') return nullptr;
  const char* close = static_cast<const char*>(std::memchr(at, ']', end - at));
  if (!close) return nullptr;
  // The ids are counted first, to allocate no more than they need: large allocations are mapped anew each time, which
  // costs more than counting.
  const Py_ssize_t count = count_commas(at, close) + 1;
  PyObject* ids = PyBytes_FromStringAndSize(nullptr, count * 4);
  if (!ids) return nullptr;
  if (!parse(at + 1, close, reinterpret_cast<int32_t*>(PyBytes_AsString(ids)))) Py_CLEAR(ids);
  *behind = close + 1;
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

// Returns what follows the string whose opening quote is at `at`, null if it does not end. `plain`: it has no escapes.
const char* skip_string(const char* at, const char* end, bool* plain) {
  *plain = true;
  for (++at; at < end && *at != '"'; ++at)
    if (*at == '\\') {
      *plain = false;
      if (++at == end) return nullptr;
    }
  return at < end ? at + 1 : nullptr;
}

// The comma or bracket that ends the value; the value itself is not checked.
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

// Returns new bytes with the ids that the object `text` has under `key`, and sets the list's ends. Null without an
// error if the key is not there exactly once, or if in doubt.
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
  Py_buffer json, key;
  if (!PyArg_ParseTuple(args, "y*s*", &json, &key)) return nullptr;
  const char* text = static_cast<const char*>(json.buf);
  const char* const end = text + json.len;
  const char *from = nullptr, *to = nullptr;
  PyObject* rest = nullptr;
  PyObject* ids = find_list(text, end, static_cast<const char*>(key.buf), static_cast<size_t>(key.len), &from, &to);
  if (ids && (rest = PyBytes_FromStringAndSize(nullptr, (from - text) + 4 + (end - to)))) {
    char* out = std::copy(text, from, PyBytes_AsString(rest));
    out = std::copy_n("null", 4, out);
    std::copy(to, end, out);
  }
  PyBuffer_Release(&key);
  PyBuffer_Release(&json);
  if (rest) return Py_BuildValue("(NN)", rest, ids);
  Py_XDECREF(ids);
  return none_or_error();
}

PyObject* ids_below(PyObject*, PyObject* args) {
  Py_buffer ids;
  Py_ssize_t limit;
  if (!PyArg_ParseTuple(args, "y*n", &ids, &limit)) return nullptr;
  // The top bit is set in an id below 0, and in limit - 1 - id if the id is too large. Without comparisons the compiler
  // can vectorize this on any processor.
  const uint32_t highest = static_cast<uint32_t>(std::min<Py_ssize_t>(limit, 1ll << 31) - 1);
  const char* bytes = static_cast<const char*>(ids.buf);
  uint32_t wrong = 0;
  for (Py_ssize_t i = 0; i < ids.len / 4; ++i) {
    uint32_t id;
    std::memcpy(&id, bytes + i * 4, 4);
    wrong |= id | (highest - id);
  }
  PyBuffer_Release(&ids);
  return PyBool_FromLong(!(wrong >> 31));
}

PyMethodDef methods[] = {
    {"parse_ids", parse_ids, METH_O,
     "parse_ids(json) -> bytes | None: a JSON list of integers in [0, 2**31), at least one, as int32; None for any other."},
    {"cut_ids", cut_ids, METH_VARARGS,
     "cut_ids(json, key) -> (bytes, bytes) | None: an object in JSON with null in place of the list of ids that it has as "
     "`key`, and that list as `parse_ids` gives it; None where the value is anything else, or the key is not there "
     "exactly once and without escapes. What is returned is valid JSON only if `json` is."},
    {"ids_below", ids_below, METH_VARARGS,
     "ids_below(ids, limit) -> bool: whether all ids, which are int32 bytes, are in [0, limit); limit is at least 1."},
    {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_ids", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__ids() { return PyModule_Create(&module); }
