// Python bindings of the tree: argument checks, buffers, lifetimes. The logic is in cache.h and owners.h.
#include <Python.h>

#include <cmath>

#include "align.h"
#include "cache.h"
#include "icicle.h"
#include "owners.h"

namespace {

using radix::Awaited;
using radix::Cache;
using radix::Event;
using radix::Owners;
using radix::Token;
using radix::Use;

// ---------------------------------------------------------------- arguments

// The buffer of a C-contiguous array of 4-byte ints, or of bytes with little-endian int32.
class IntBuffer {
 public:
  ~IntBuffer() {
    if (held_) PyBuffer_Release(&view_);
  }
  bool load(PyObject* object, const char* what) {
    if (PyObject_GetBuffer(object, &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) return false;
    held_ = true;
    const char* format = view_.format ? view_.format : "B";
    if (*format == '<' || *format == '=' || *format == '@') ++format;
    const bool ints = view_.itemsize == 4 && (*format == 'i' || *format == 'l') && !format[1];
    const bool raw = view_.itemsize == 1 && view_.len % 4 == 0;
    const bool aligned = !view_.len || reinterpret_cast<uintptr_t>(view_.buf) % alignof(int32_t) == 0;
    if (view_.ndim > 1 || !(ints || raw) || !aligned) {
      PyErr_Format(PyExc_ValueError, "%s: expected a flat array of int32 or bytes of int32", what);
      return false;
    }
    return true;
  }
  const int32_t* data() const { return static_cast<const int32_t*>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.len) / 4; }

 private:
  Py_buffer view_;
  bool held_ = false;
};

// What is beyond int32 counts as its end.
bool load_priority(PyObject* object, int32_t* out) {
  int beyond;
  const long n = PyLong_AsLongAndOverflow(object, &beyond);
  if (n == -1 && PyErr_Occurred()) return false;
  const long long value = beyond ? beyond * (1ll << 62) : n;
  *out = static_cast<int32_t>(std::clamp<long long>(value, radix::kLowest, std::numeric_limits<int32_t>::max()));
  return true;
}

bool load_doubles(PyObject* object, const char* what, std::vector<double>* out) {
  const Py_ssize_t n = PySequence_Size(object);
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* item = PySequence_GetItem(object, i);
    out->push_back(item ? PyFloat_AsDouble(item) : 0);
    Py_XDECREF(item);
    if (PyErr_Occurred()) return false;
    if (out->back() != out->back()) {
      PyErr_Format(PyExc_ValueError, "%s: expected numbers", what);
      return false;
    }
  }
  return n >= 0;
}

bool load_time(PyObject* object, const char* what, double* out) {
  *out = PyFloat_AsDouble(object);
  if (PyErr_Occurred()) return false;
  if (std::isfinite(*out)) return true;
  PyErr_Format(PyExc_ValueError, "%s: expected a finite number", what);
  return false;
}

bool load_name(PyObject* object, std::string* name) {
  Py_ssize_t n;
  const char* text = PyUnicode_AsUTF8AndSize(object, &n);
  if (!text) return false;
  name->assign(text, static_cast<size_t>(n));
  return true;
}

bool load_count(PyObject* object, const char* what, size_t* out) {
  Py_ssize_t n = PyNumber_AsSsize_t(object, PyExc_OverflowError);
  if (n == -1 && PyErr_Occurred()) return false;
  if (n < 0) {
    PyErr_Format(PyExc_ValueError, "%s: must not be negative", what);
    return false;
  }
  *out = static_cast<size_t>(n);
  return true;
}

// Parse `low` to `high` arguments, the last of which may be given by the keyword `last`.
bool arguments(PyObject* const* given, Py_ssize_t n, PyObject* keywords, Py_ssize_t low, Py_ssize_t high,
               const char* last, PyObject** out) {
  const Py_ssize_t named = keywords ? PyTuple_Size(keywords) : 0;
  const bool by_name = named == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GetItem(keywords, 0), last) == 0;
  if (named > by_name || n > high - by_name || n < std::min<Py_ssize_t>(low, high - by_name)) {
    PyErr_Format(PyExc_TypeError, "expected %zd to %zd arguments%s%s", low, high, last ? ", the last one's name is " : "",
                 last ? last : "");
    return false;
  }
  for (Py_ssize_t i = 0; i < high; ++i) out[i] = i < n ? given[i] : nullptr;
  if (by_name) out[high - 1] = given[n];
  return true;
}

template <class F>
PyObject* guarded(F f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  } catch (const std::out_of_range& error) {
    PyErr_Format(PyExc_ValueError, "%s: the path is not held that far", error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_AssertionError, error.what());
  }
  return nullptr;
}

PyObject* bytes_of(const std::vector<int32_t>& ints) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(ints.data()), static_cast<Py_ssize_t>(ints.size() * 4));
}

PyObject* text_of(const std::string& text) {
  return PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
}

void free_object(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

// ---------------------------------------------------------------- objects

struct TreeObject {
  PyObject_HEAD
  Cache* cache;
  PyObject* policy;
  bool in_policy;
};
struct MatchObject {
  PyObject_HEAD
  TreeObject* tree;
  PyObject* name;
  Cache::N* node;  // null: the tree does not have the namespace
  size_t offset, length;
  uint64_t version;
};
struct LeaseObject {
  PyObject_HEAD
  TreeObject* tree;
  PyObject* name;
  Cache::N* node;  // null once released
  size_t length;
  Use use;
};
struct OwnersObject {
  PyObject_HEAD
  Owners* owners;
};

PyTypeObject *match_type, *lease_type, *tree_type;

bool idle(TreeObject* tree) {
  if (tree->in_policy) PyErr_SetString(PyExc_RuntimeError, "a policy must not change its tree");
  return !tree->in_policy;
}

// ---------------------------------------------------------------- Match

bool fresh(MatchObject* match) {
  if (match->version == match->tree->cache->version) return true;
  PyErr_SetString(PyExc_ValueError, "stale match: the tree has changed since");
  return false;
}

PyObject* match_length(PyObject* self, void*) {
  return PyLong_FromSize_t(reinterpret_cast<MatchObject*>(self)->length);
}
PyObject* match_namespace(PyObject* self, void*) {
  PyObject* name = reinterpret_cast<MatchObject*>(self)->name;
  Py_INCREF(name);
  return name;
}

PyObject* read_values(Cache* cache, Cache::N* node, size_t offset, size_t start, size_t stop) {
  if (!cache->with_values) {
    PyErr_SetString(PyExc_ValueError, "values: this tree holds none");
    return nullptr;
  }
  const size_t pages = (stop - start) / cache->tree.page_size;
  PyObject* out = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(pages * 4));
  if (out && pages) cache->read_values(node, offset, start, stop, reinterpret_cast<int32_t*>(PyBytes_AsString(out)));
  return out;
}

PyObject* match_values(PyObject* self, PyObject* const* given, Py_ssize_t n) {
  auto* match = reinterpret_cast<MatchObject*>(self);
  PyObject* args[1];
  size_t start = 0;
  if (!fresh(match) || !arguments(given, n, nullptr, 0, 1, nullptr, args) ||
      (args[0] && !load_count(args[0], "start", &start)))
    return nullptr;
  if (start > match->length || start % match->tree->cache->tree.page_size) {
    PyErr_SetString(PyExc_ValueError, "values: expected whole pages within the match");
    return nullptr;
  }
  return read_values(match->tree->cache, match->node, match->offset, start, match->length);
}

void match_dealloc(PyObject* self) {
  auto* match = reinterpret_cast<MatchObject*>(self);
  Py_XDECREF(reinterpret_cast<PyObject*>(match->tree));
  Py_XDECREF(match->name);
  free_object(self);
}

// ---------------------------------------------------------------- Lease

bool live(LeaseObject* lease) {
  if (lease->node) return true;
  PyErr_SetString(PyExc_ValueError, "the lease was released");
  return false;
}

PyObject* lease_length(PyObject* self, void*) {
  return PyLong_FromSize_t(reinterpret_cast<LeaseObject*>(self)->length);
}
PyObject* lease_namespace(PyObject* self, void*) {
  PyObject* name = reinterpret_cast<LeaseObject*>(self)->name;
  Py_INCREF(name);
  return name;
}

void give_up(LeaseObject* lease) {
  Cache::N* node = lease->node;
  lease->node = nullptr;
  --lease->tree->cache->live_leases;
  lease->tree->cache->unpin(node);
}

PyObject* lease_release(PyObject* self, PyObject*) {
  auto* lease = reinterpret_cast<LeaseObject*>(self);
  if (!live(lease) || !idle(lease->tree)) return nullptr;
  give_up(lease);
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

PyObject* lease_withdraw(PyObject* self, PyObject*) {
  auto* lease = reinterpret_cast<LeaseObject*>(self);
  if (!live(lease)) return nullptr;
  lease->tree->cache->take_back(lease->node, lease->use);
  return lease_release(self, nullptr);
}

PyObject* lease_enter(PyObject* self, PyObject*) {
  Py_INCREF(self);
  return self;
}
PyObject* lease_exit(PyObject* self, PyObject*) {
  if (reinterpret_cast<LeaseObject*>(self)->node) return lease_release(self, nullptr);
  Py_RETURN_NONE;
}

PyObject* lease_values(PyObject* self, PyObject* const* given, Py_ssize_t n) {
  auto* lease = reinterpret_cast<LeaseObject*>(self);
  PyObject* args[2];
  if (!live(lease) || !arguments(given, n, nullptr, 0, 2, nullptr, args)) return nullptr;
  size_t start = 0, stop = lease->length;
  if (args[0] && !load_count(args[0], "start", &start)) return nullptr;
  if (args[1] && args[1] != Py_None && !load_count(args[1], "stop", &stop)) return nullptr;
  const size_t p = lease->tree->cache->tree.page_size;
  if (start > stop || stop > lease->length || start % p || stop % p) {
    PyErr_SetString(PyExc_ValueError, "values: expected whole pages within the lease");
    return nullptr;
  }
  return read_values(lease->tree->cache, lease->node, lease->node->length(), start, stop);
}

PyObject* lease_assign(PyObject* self, PyObject* const* given, Py_ssize_t n) {
  auto* lease = reinterpret_cast<LeaseObject*>(self);
  PyObject* args[2];
  IntBuffer values;
  size_t start;
  if (!live(lease) || !arguments(given, n, nullptr, 2, 2, nullptr, args) || !load_count(args[0], "start", &start) ||
      !values.load(args[1], "values"))
    return nullptr;
  Cache* cache = lease->tree->cache;
  const size_t p = cache->tree.page_size, stop = start + values.size() * p;
  if (!cache->with_values || stop > lease->length || start % p) {
    PyErr_SetString(PyExc_ValueError, "assign: expected values for whole pages within the lease");
    return nullptr;
  }
  cache->write_values(lease->node, start, stop, values.data());
  Py_RETURN_NONE;
}

PyObject* lease_path(PyObject* self, PyObject*) {
  auto* lease = reinterpret_cast<LeaseObject*>(self);
  if (!live(lease)) return nullptr;
  Py_ssize_t n = 0;
  for (Cache::N* node = lease->node; !node->is_root(); node = node->parent) ++n;
  PyObject* out = PyTuple_New(n);
  if (!out) return nullptr;
  for (Cache::N* node = lease->node; !node->is_root(); node = node->parent) {
    PyObject* pair = Py_BuildValue("(Kn)", static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(node)),
                                   static_cast<Py_ssize_t>(node->depth + node->length()));
    if (!pair || PyTuple_SetItem(out, --n, pair) < 0) {
      Py_DECREF(out);
      return nullptr;
    }
  }
  return out;
}

PyObject* lease_extend_match(PyObject* self, PyObject* object) {
  auto* lease = reinterpret_cast<LeaseObject*>(self);
  IntBuffer tokens;
  if (!live(lease) || !idle(lease->tree) || !tokens.load(object, "tokens")) return nullptr;
  return guarded([&]() -> PyObject* {
    Cache* cache = lease->tree->cache;
    auto place = cache->tree.walk(lease->node, tokens.data(), tokens.size());
    if (place.length) {
      Cache::N* node = cache->lease(place, lease->use, lease->node);
      cache->unpin(lease->node);
      lease->node = node;
      lease->length += place.length;
      if (PyErr_Occurred()) return nullptr;
    }
    return PyLong_FromSize_t(place.length);
  });
}

void lease_dealloc(PyObject* self) {
  auto* lease = reinterpret_cast<LeaseObject*>(self);
  if (lease->node) give_up(lease);
  Py_XDECREF(reinterpret_cast<PyObject*>(lease->tree));
  Py_XDECREF(lease->name);
  free_object(self);
}

// ---------------------------------------------------------------- RadixTree

Cache* cache_of(PyObject* self) { return reinterpret_cast<TreeObject*>(self)->cache; }

void install_policy(TreeObject* tree) {
  tree->cache->policy = [tree](uint64_t last_use, size_t length, size_t tokens, Use used) {
    if (PyErr_Occurred()) return 0.0;
    const bool nested = tree->in_policy;
    tree->in_policy = true;
    PyObject* key = PyObject_CallFunction(tree->policy, "KnnIi", static_cast<unsigned long long>(last_use),
                                          static_cast<Py_ssize_t>(length), static_cast<Py_ssize_t>(tokens), used.hits,
                                          used.priority);
    tree->in_policy = nested;
    double value = key ? PyFloat_AsDouble(key) : 0.0;
    Py_XDECREF(key);
    return value;
  };
}

PyObject* tree_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"page_size", "policy", "events", "values", nullptr};
  Py_ssize_t page_size = 1;
  PyObject* policy = Py_None;
  int events = 0, values = 1;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|n$Opp:RadixTree", const_cast<char**>(names), &page_size, &policy,
                                   &events, &values))
    return nullptr;
  if (page_size < 1) {
    PyErr_SetString(PyExc_ValueError, "page_size: must be at least 1");
    return nullptr;
  }
  if (policy != Py_None && !PyCallable_Check(policy)) {
    PyErr_SetString(PyExc_TypeError, "policy: expected a function or None");
    return nullptr;
  }
  auto* self = reinterpret_cast<TreeObject*>(reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0));
  if (!self) return nullptr;
  self->cache = new Cache(static_cast<size_t>(page_size), events, values);
  if (policy != Py_None) {
    Py_INCREF(policy);
    self->policy = policy;
    install_policy(self);
  }
  return reinterpret_cast<PyObject*>(self);
}

int tree_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(reinterpret_cast<TreeObject*>(self)->policy);
  return 0;
}
int tree_clear_references(PyObject* self) {
  auto* tree = reinterpret_cast<TreeObject*>(self);
  if (tree->cache) tree->cache->policy = nullptr;
  Py_CLEAR(tree->policy);
  return 0;
}
void tree_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  tree_clear_references(self);
  delete cache_of(self);
  free_object(self);
}

PyObject* tree_match(PyObject* self, PyObject* const* given, Py_ssize_t n, PyObject* keywords) {
  PyObject* args[3];
  std::string name;
  IntBuffer tokens;
  if (!arguments(given, n, keywords, 2, 3, "limit", args) || !load_name(args[0], &name) || !tokens.load(args[1], "tokens"))
    return nullptr;
  size_t limit = tokens.size();
  if (args[2] && args[2] != Py_None) {
    if (!load_count(args[2], "limit", &limit)) return nullptr;
    limit = std::min(limit, tokens.size());
  }
  Cache* cache = cache_of(self);
  auto* match = PyObject_New(MatchObject, match_type);
  if (!match) return nullptr;
  Cache::Place place{nullptr, 0, 0};
  if (Cache::N* root = cache->tree.find_root(name)) place = cache->tree.walk(root, tokens.data(), limit);
  Py_INCREF(self);
  Py_INCREF(args[0]);
  match->tree = reinterpret_cast<TreeObject*>(self);
  match->name = args[0];
  match->node = place.node;
  match->offset = place.offset;
  match->length = place.length;
  match->version = cache->version;
  return reinterpret_cast<PyObject*>(match);
}

PyObject* tree_lease(PyObject* self, PyObject* const* given, Py_ssize_t n, PyObject* keywords) {
  PyObject* args[2];
  Use use{1};
  if (!arguments(given, n, keywords, 1, 2, "priority", args) ||
      (args[1] && args[1] != Py_None && !load_priority(args[1], &use.priority)))
    return nullptr;
  if (Py_TYPE(args[0]) != match_type) {
    PyErr_SetString(PyExc_TypeError, "lease: expected a Match");
    return nullptr;
  }
  auto* match = reinterpret_cast<MatchObject*>(args[0]);
  auto* tree = reinterpret_cast<TreeObject*>(self);
  if (match->tree != tree) {
    PyErr_SetString(PyExc_ValueError, "lease: the match is of another tree");
    return nullptr;
  }
  if (!fresh(match) || !idle(tree)) return nullptr;
  return guarded([&]() -> PyObject* {
    Cache* cache = tree->cache;
    auto* lease = PyObject_New(LeaseObject, lease_type);
    if (!lease) return nullptr;
    std::string name;
    load_name(match->name, &name);
    Cache::Place place{match->node, match->offset, match->length};
    if (!place.node) place.node = cache->tree.make_root(name);
    lease->node = cache->lease(place, use);
    lease->use = use;
    ++cache->live_leases;
    Py_INCREF(self);
    Py_INCREF(match->name);
    lease->tree = tree;
    lease->name = match->name;
    lease->length = match->length;
    if (PyErr_Occurred()) {
      Py_DECREF(lease);
      return nullptr;
    }
    return reinterpret_cast<PyObject*>(lease);
  });
}

// A lease of the path that ends with `node`, which was pinned for it; null, and not pinned any more, if there is no memory.
PyObject* lease_of(TreeObject* tree, Cache::N* node, Use use) {
  const std::string& text = Cache::S::name_of(node);
  PyObject* name = text_of(text);
  auto* lease = name ? PyObject_New(LeaseObject, lease_type) : nullptr;
  if (!lease) {
    Py_XDECREF(name);
    tree->cache->unpin(node);
    return nullptr;
  }
  ++tree->cache->live_leases;
  Py_INCREF(reinterpret_cast<PyObject*>(tree));
  lease->tree = tree;
  lease->name = name;
  lease->node = node;
  lease->length = node->depth + node->length();
  lease->use = use;
  return reinterpret_cast<PyObject*>(lease);
}

PyObject* held_only_by(TreeObject* tree, PyObject* leases) {
  PyObject* each = PyObject_GetIter(leases);
  if (!each) return nullptr;
  std::vector<Cache::N*> ends;
  while (PyObject* object = PyIter_Next(each)) {
    auto* lease = Py_TYPE(object) == lease_type ? reinterpret_cast<LeaseObject*>(object) : nullptr;
    if (!lease) {
      PyErr_SetString(PyExc_TypeError, "held_only_by: expected leases");
    } else if (live(lease) && lease->tree != tree) {
      PyErr_SetString(PyExc_ValueError, "held_only_by: a lease is of another tree");
    }
    Py_DECREF(object);
    if (PyErr_Occurred()) break;
    ends.push_back(lease->node);
  }
  Py_DECREF(each);
  return PyErr_Occurred() ? nullptr : PyLong_FromSize_t(tree->cache->held_only_by(ends));
}

PyObject* tree_held_only_by(PyObject* self, PyObject* leases) {
  PyObject* each_once = PyFrozenSet_New(leases);  // drops duplicates, and keeps references to the leases
  if (!each_once) return nullptr;
  PyObject* tokens = guarded([&] { return held_only_by(reinterpret_cast<TreeObject*>(self), each_once); });
  Py_DECREF(each_once);
  return tokens;
}

PyObject* tree_insert(PyObject* self, PyObject* const* given, Py_ssize_t n, PyObject* keywords) {
  PyObject* args[3];
  IntBuffer tokens, values;
  auto* tree = reinterpret_cast<TreeObject*>(self);
  if (!arguments(given, n, keywords, 2, 3, "values", args) || !idle(tree)) return nullptr;
  auto* lease = Py_TYPE(args[0]) == lease_type ? reinterpret_cast<LeaseObject*>(args[0]) : nullptr;
  std::string name;
  if (lease ? !live(lease) : !load_name(args[0], &name)) return nullptr;
  Cache* cache = tree->cache;
  const size_t p = cache->tree.page_size;
  const bool given_values = args[2] && args[2] != Py_None;
  if (!tokens.load(args[1], "tokens") || (given_values && !values.load(args[2], "values"))) return nullptr;
  if (given_values != cache->with_values) {
    PyErr_SetString(PyExc_ValueError, given_values ? "insert: this tree holds no values" : "insert: values are missing");
    return nullptr;
  }
  if (lease && lease->tree != tree) {
    PyErr_SetString(PyExc_ValueError, "insert: the lease is of another tree");
    return nullptr;
  }
  if (tokens.size() % p || (given_values && values.size() * p != tokens.size())) {
    PyErr_SetString(PyExc_ValueError, "insert: expected whole pages of tokens and one value for each");
    return nullptr;
  }
  if (tokens.size() == 0) return PyLong_FromLong(0);
  return guarded([&]() -> PyObject* {
    Cache::N* from = lease ? lease->node : cache->tree.make_root(name);
    Cache::N* end = nullptr;
    size_t present = cache->insert(from, lease != nullptr, tokens.data(), tokens.size(),
                                  given_values ? values.data() : nullptr, &end, lease ? lease->use : Use{});
    if (lease) {
      lease->node = end;
      lease->length += tokens.size();
      cache->move_pin(from, end);
    }
    return PyErr_Occurred() ? nullptr : PyLong_FromSize_t(present);
  });
}

PyObject* tree_evict(PyObject* self, PyObject* object) {
  size_t wanted;
  if (!idle(reinterpret_cast<TreeObject*>(self)) || !load_count(object, "tokens", &wanted)) return nullptr;
  return guarded([&]() -> PyObject* {
    std::vector<int32_t> freed;
    cache_of(self)->evict(wanted, &freed);
    return PyErr_Occurred() ? nullptr : bytes_of(freed);
  });
}

PyObject* tree_evict_used(PyObject* self, PyObject* object) {
  size_t wanted;
  if (!idle(reinterpret_cast<TreeObject*>(self)) || !load_count(object, "pages", &wanted)) return nullptr;
  if (!cache_of(self)->with_values) {
    PyErr_SetString(PyExc_ValueError, "evict_used: this tree holds no values");
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    std::vector<int32_t> freed;
    cache_of(self)->evict_used(wanted, &freed);
    return PyErr_Occurred() ? nullptr : bytes_of(freed);
  });
}

PyObject* tree_evict_into(PyObject* self, PyObject* const* given, Py_ssize_t n) {
  PyObject* args[2];
  size_t wanted;
  if (!arguments(given, n, nullptr, 2, 2, nullptr, args) || !load_count(args[1], "tokens", &wanted)) return nullptr;
  if (Py_TYPE(args[0]) != Py_TYPE(self)) {
    PyErr_SetString(PyExc_TypeError, "evict_into: expected a RadixTree");
    return nullptr;
  }
  auto *tree = reinterpret_cast<TreeObject*>(self), *there = reinterpret_cast<TreeObject*>(args[0]);
  if (!idle(tree) || !idle(there)) return nullptr;
  if (there == tree || there->cache->tree.page_size != tree->cache->tree.page_size || !there->cache->with_values || !wanted) {
    PyErr_SetString(PyExc_ValueError, "evict_into: expected another tree with values and the same page size, and tokens");
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    std::vector<Token> tokens;
    std::vector<int32_t> values;
    Use used;
    Cache::N* place = tree->cache->evict_into(*there->cache, wanted, &tokens, &values, &used);
    if (!place) Py_RETURN_NONE;
    PyObject* lease = lease_of(there, place, used);
    if (!lease || PyErr_Occurred()) {
      Py_XDECREF(lease);
      return nullptr;
    }
    return Py_BuildValue("(NNN)", lease, bytes_of(tokens), bytes_of(values));
  });
}

PyObject* tree_forget(PyObject* self, PyObject* const* given, Py_ssize_t n, PyObject* keywords) {
  PyObject* args[3];
  std::string name;
  IntBuffer tokens;
  size_t keep;
  if (!idle(reinterpret_cast<TreeObject*>(self)) || !arguments(given, n, keywords, 3, 3, "keep", args) ||
      !load_name(args[0], &name) || !tokens.load(args[1], "tokens") || !load_count(args[2], "keep", &keep))
    return nullptr;
  return guarded([&]() -> PyObject* {
    Cache* cache = cache_of(self);
    std::vector<int32_t> freed;
    const size_t whole = tokens.size() - tokens.size() % cache->tree.page_size;
    if (Cache::N* root = cache->tree.find_root(name)) cache->forget(root, tokens.data(), whole, keep, &freed);
    return PyErr_Occurred() ? nullptr : bytes_of(freed);
  });
}

PyObject* tree_set_returns(PyObject* self, PyObject* const* given, Py_ssize_t n) {
  PyObject* args[2];
  auto* tree = reinterpret_cast<TreeObject*>(self);
  std::vector<double> edges, rates;
  if (!idle(tree) || !arguments(given, n, nullptr, 2, 2, nullptr, args) || !load_doubles(args[0], "edges", &edges) ||
      !load_doubles(args[1], "rates", &rates))
    return nullptr;
  if (tree->policy) {
    PyErr_SetString(PyExc_ValueError, "set_returns: this tree has a policy");
    return nullptr;
  }
  const bool rising = std::adjacent_find(edges.begin(), edges.end(), std::greater_equal<double>()) == edges.end();
  if (edges.empty() || edges[0] != 0 || !rising || rates.empty() || rates.size() % edges.size()) {
    PyErr_SetString(PyExc_ValueError, "set_returns: expected rising edges from 0, and a rate for each edge in each row");
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    tree->cache->set_returns(std::move(edges), std::move(rates));
    Py_RETURN_NONE;
  });
}

PyObject* tree_advance(PyObject* self, PyObject* object) {
  double now;
  if (!load_time(object, "now", &now) || !idle(reinterpret_cast<TreeObject*>(self))) return nullptr;
  return guarded([&]() -> PyObject* {
    cache_of(self)->advance(now);
    Py_RETURN_NONE;
  });
}

PyObject* tree_mark(PyObject* self, PyObject* const* given, Py_ssize_t n) {
  PyObject* args[4];
  std::string name;
  IntBuffer tokens;
  size_t kind;
  if (!idle(reinterpret_cast<TreeObject*>(self)) || !arguments(given, n, nullptr, 4, 4, nullptr, args) ||
      !load_name(args[0], &name) || !tokens.load(args[1], "tokens") || !load_count(args[2], "kind", &kind))
    return nullptr;
  double since;
  if (!load_time(args[3], "since", &since)) return nullptr;
  return guarded([&]() -> PyObject* {
    Cache* cache = cache_of(self);
    const Awaited awaited{static_cast<uint32_t>(std::min<size_t>(kind, std::numeric_limits<uint32_t>::max())), since};
    Cache::N* root = cache->tree.find_root(name);
    return PyBool_FromLong(root && cache->mark(root, tokens.data(), tokens.size(), awaited));
  });
}

PyObject* tree_remove_namespaces(PyObject* self, PyObject* prefix) {
  std::string name;
  if (!idle(reinterpret_cast<TreeObject*>(self)) || !load_name(prefix, &name)) return nullptr;
  return guarded([&]() -> PyObject* {
    std::vector<int32_t> freed;
    cache_of(self)->remove_namespaces(name, &freed);
    return PyErr_Occurred() ? nullptr : bytes_of(freed);
  });
}

PyObject* tree_continuation(PyObject* self, PyObject* const* given, Py_ssize_t n) {
  PyObject* args[4];
  std::string name;
  IntBuffer tokens;
  size_t at, most;
  if (!arguments(given, n, nullptr, 4, 4, nullptr, args) || !load_name(args[0], &name) ||
      !tokens.load(args[1], "tokens") || !load_count(args[2], "at", &at) || !load_count(args[3], "most", &most))
    return nullptr;
  return guarded([&]() -> PyObject* {
    return bytes_of(cache_of(self)->continuation(name, tokens.data(), tokens.size(), at, most));
  });
}

PyObject* tree_clear(PyObject* self, PyObject*) {
  auto* tree = reinterpret_cast<TreeObject*>(self);
  if (!idle(tree)) return nullptr;
  if (tree->cache->live_leases) {
    PyErr_Format(PyExc_ValueError, "clear: %zu leases are live", tree->cache->live_leases);
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    std::vector<int32_t> freed;
    tree->cache->clear(&freed);
    return bytes_of(freed);
  });
}

PyObject* event_tuple(const Event& e) {
  switch (e.kind) {
    case Event::kCleared:
      return Py_BuildValue("(s)", "cleared");
    case Event::kRemoved:
      return Py_BuildValue("(sLn)", "removed", static_cast<long long>(e.run), static_cast<Py_ssize_t>(e.at));
    default:
      return Py_BuildValue("(sNLnLnN)", "stored", text_of(e.name), static_cast<long long>(e.run),
                           static_cast<Py_ssize_t>(e.at), static_cast<long long>(e.parent),
                           static_cast<Py_ssize_t>(e.parent_at), bytes_of(e.tokens));
  }
}

PyObject* event_list(const std::vector<Event>& events) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(events.size()));
  for (size_t i = 0; list && i < events.size(); ++i) {
    PyObject* item = event_tuple(events[i]);
    if (!item) {
      Py_DECREF(list);
      return nullptr;
    }
    PyList_SetItem(list, static_cast<Py_ssize_t>(i), item);
  }
  return list;
}

PyObject* tree_drain_events(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject* list = event_list(cache_of(self)->events);
    if (list) cache_of(self)->events.clear();
    return list;
  });
}
PyObject* tree_snapshot(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    std::vector<Event> events;
    cache_of(self)->snapshot(&events);
    return event_list(events);
  });
}
PyObject* tree_values(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    std::vector<int32_t> values;
    cache_of(self)->all_values(&values);
    return bytes_of(values);
  });
}
PyObject* tree_check(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    if (!idle(reinterpret_cast<TreeObject*>(self))) return nullptr;
    cache_of(self)->check();
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
  });
}

enum Figure : intptr_t { kPageSize, kTokens, kLeased, kEvictable, kNodes, kLeaves, kVersion, kClock, kMemory };

PyObject* tree_figure(PyObject* self, void* which) {
  return guarded([&]() -> PyObject* {
    Cache* cache = cache_of(self);
    switch (reinterpret_cast<intptr_t>(which)) {
      case kPageSize: return PyLong_FromSize_t(cache->tree.page_size);
      case kTokens: return PyLong_FromSize_t(cache->tree.tokens);
      case kLeased: return PyLong_FromSize_t(cache->leased_tokens());
      case kEvictable: return PyLong_FromSize_t(cache->tree.tokens - cache->leased_tokens());
      case kNodes: return PyLong_FromSize_t(cache->tree.nodes);
      case kLeaves: return PyLong_FromSize_t(cache->leaves());
      case kVersion: return PyLong_FromUnsignedLongLong(cache->version);
      case kClock: return PyLong_FromUnsignedLongLong(cache->clock());
      default: return PyLong_FromSize_t(cache->tree.memory_bytes());
    }
  });
}

// ---------------------------------------------------------------- OwnerTree

Owners* owners_of(PyObject* self) { return reinterpret_cast<OwnersObject*>(self)->owners; }

PyObject* owners_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {nullptr};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":OwnerTree", const_cast<char**>(names))) return nullptr;
  auto* self = reinterpret_cast<OwnersObject*>(reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0));
  if (self) self->owners = new Owners();
  return reinterpret_cast<PyObject*>(self);
}
void owners_dealloc(PyObject* self) {
  delete owners_of(self);
  free_object(self);
}

bool load_owner(PyObject* object, int32_t* owner) {
  size_t value;
  if (!load_count(object, "owner", &value)) return false;
  if (value > INT32_MAX) {
    PyErr_SetString(PyExc_ValueError, "owner: must fit 31 bits");
    return false;
  }
  *owner = static_cast<int32_t>(value);
  return true;
}

bool load_run(PyObject* object, int64_t* run) {
  *run = PyLong_AsLongLong(object);
  return *run != -1 || !PyErr_Occurred();
}

// Parse the arguments (namespace, tokens, owner) of add and remove, and call f.
template <class F>
PyObject* with_path(PyObject* const* given, Py_ssize_t n, F f) {
  PyObject* args[3];
  std::string name;
  IntBuffer tokens;
  int32_t owner;
  if (!arguments(given, n, nullptr, 3, 3, nullptr, args) || !load_name(args[0], &name) ||
      !tokens.load(args[1], "tokens") || !load_owner(args[2], &owner))
    return nullptr;
  return guarded([&]() -> PyObject* {
    f(name, tokens.data(), tokens.size(), owner);
    Py_RETURN_NONE;
  });
}

PyObject* owners_add(PyObject* self, PyObject* const* given, Py_ssize_t n) {
  return with_path(given, n, [&](const auto&... path) { owners_of(self)->add(path...); });
}
PyObject* owners_remove(PyObject* self, PyObject* const* given, Py_ssize_t n) {
  return with_path(given, n, [&](const auto&... path) { owners_of(self)->remove(path...); });
}
PyObject* owners_store(PyObject* self, PyObject* const* given, Py_ssize_t n) {
  PyObject* args[7];
  int32_t owner;
  std::string name;
  int64_t run, parent;
  size_t at, parent_at;
  IntBuffer ids;
  if (!arguments(given, n, nullptr, 7, 7, nullptr, args) || !load_owner(args[0], &owner) || !load_name(args[1], &name) ||
      !load_run(args[2], &run) || !load_count(args[3], "at", &at) || !load_run(args[4], &parent) ||
      !load_count(args[5], "parent_at", &parent_at) || !ids.load(args[6], "ids"))
    return nullptr;
  return guarded([&]() -> PyObject* {
    owners_of(self)->store(owner, name, run, at, parent, parent_at, ids.data(), ids.size());
    Py_RETURN_NONE;
  });
}
PyObject* owners_cut(PyObject* self, PyObject* const* given, Py_ssize_t n) {
  PyObject* args[3];
  int32_t owner;
  int64_t run;
  size_t keep;
  if (!arguments(given, n, nullptr, 3, 3, nullptr, args) || !load_owner(args[0], &owner) || !load_run(args[1], &run) ||
      !load_count(args[2], "keep", &keep))
    return nullptr;
  return guarded([&]() -> PyObject* {
    Owners::Removed removed;
    owners_of(self)->cut(owner, run, keep, &removed);
    return Py_BuildValue("(NnnN)", text_of(removed.name), static_cast<Py_ssize_t>(removed.depth),
                         static_cast<Py_ssize_t>(removed.length), bytes_of(removed.first));
  });
}

PyObject* owners_of_node(const Owners::N* node) {
  PyObject* found = PyTuple_New(static_cast<Py_ssize_t>(node->extra.counts.size()));
  for (size_t i = 0; found && i < node->extra.counts.size(); ++i)
    PyTuple_SetItem(found, static_cast<Py_ssize_t>(i), PyLong_FromLong(node->extra.counts[i].first));
  return found;
}
// The node that a run and its end name, if it is in a namespace that begins with `prefix`.
bool load_node(PyObject* self, PyObject* run, PyObject* end, const std::string& prefix, Owners::N** node) {
  int64_t id;
  size_t last;
  if (!load_run(run, &id) || !load_count(end, "end", &last)) return false;
  *node = owners_of(self)->find(id, last);
  if (*node && Owners::S::name_of(*node).compare(0, prefix.size(), prefix)) *node = nullptr;
  return true;
}
PyObject* owners_icicle(PyObject* self, PyObject* const* given, Py_ssize_t n) {
  PyObject* args[5];
  std::string prefix;
  Owners::N* top = nullptr;
  size_t most;
  if (!arguments(given, n, nullptr, 5, 5, nullptr, args) || !load_name(args[0], &prefix) ||
      !load_count(args[1], "most", &most))
    return nullptr;
  if (Py_TYPE(args[2]) != tree_type || cache_of(args[2])->tree.page_size != 1) {
    PyErr_SetString(PyExc_TypeError, "icicle: expected a RadixTree with pages of one token");
    return nullptr;
  }
  if (args[3] != Py_None) {
    if (!load_node(self, args[3], args[4], prefix, &top)) return nullptr;
    if (!top) Py_RETURN_NONE;
  }
  return guarded([&]() -> PyObject* {
    size_t total;
    const auto rows = radix::icicle(*owners_of(self), prefix, top, std::max<size_t>(most, 1), *cache_of(args[2]), &total);
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(rows.size()));
    for (size_t i = 0; list && i < rows.size(); ++i) {
      const auto& row = rows[i];
      const std::string& name = Owners::S::name_of(row.node);
      PyList_SetItem(list, static_cast<Py_ssize_t>(i),
                     Py_BuildValue("(LnnnnnKnNNN)", static_cast<long long>(row.node->run->id),
                                   static_cast<Py_ssize_t>(row.node->end), static_cast<Py_ssize_t>(row.parent),
                                   static_cast<Py_ssize_t>(row.node->depth), static_cast<Py_ssize_t>(row.node->length()),
                                   static_cast<Py_ssize_t>(row.below), static_cast<unsigned long long>(row.last_use),
                                   static_cast<Py_ssize_t>(row.left_out), PyBool_FromLong(row.on_device),
                                   owners_of_node(row.node), text_of(name)));
    }
    return Py_BuildValue("(nN)", static_cast<Py_ssize_t>(total), list);
  });
}
PyObject* owners_edge(PyObject* self, PyObject* const* given, Py_ssize_t n) {
  PyObject* args[4];
  std::string prefix;
  Owners::N* node;
  size_t most;
  if (!arguments(given, n, nullptr, 4, 4, nullptr, args) || !load_name(args[0], &prefix) ||
      !load_count(args[1], "most", &most) || !load_node(self, args[2], args[3], prefix, &node))
    return nullptr;
  if (!node) Py_RETURN_NONE;
  return guarded([&]() -> PyObject* {
    const size_t shown = std::min(most, node->length());
    const Token *first = node->tokens(), *last = first + node->length();
    return Py_BuildValue("(NnnNNN)", text_of(Owners::S::name_of(node)), static_cast<Py_ssize_t>(node->depth),
                         static_cast<Py_ssize_t>(node->length()), bytes_of(std::vector<Token>(first, first + shown)),
                         bytes_of(std::vector<Token>(last - shown, last)), owners_of_node(node));
  });
}
PyObject* owners_namespaces(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    std::unordered_map<const std::string*, size_t> sums;
    owners_of(self)->tree.each([&](const std::string& name, Owners::N* node) { sums[&name] += node->length(); });
    PyObject* found = PyDict_New();
    for (auto& [name, tokens] : sums) {
      PyObject *key = text_of(*name), *value = PyLong_FromSize_t(tokens);
      if (found && (!key || !value || PyDict_SetItem(found, key, value) < 0)) Py_CLEAR(found);
      Py_XDECREF(key);
      Py_XDECREF(value);
    }
    return found;
  });
}
PyObject* owners_remove_owner(PyObject* self, PyObject* object) {
  int32_t owner;
  if (!load_owner(object, &owner)) return nullptr;
  return guarded([&]() -> PyObject* {
    owners_of(self)->remove_owner(owner);
    Py_RETURN_NONE;
  });
}
PyObject* owners_match(PyObject* self, PyObject* const* given, Py_ssize_t n) {
  PyObject* args[2];
  std::string name;
  IntBuffer tokens;
  if (!arguments(given, n, nullptr, 2, 2, nullptr, args) || !load_name(args[0], &name) || !tokens.load(args[1], "tokens"))
    return nullptr;
  return guarded([&]() -> PyObject* {
    auto held = owners_of(self)->match(name, tokens.data(), tokens.size());
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(held.size()));
    for (size_t i = 0; list && i < held.size(); ++i)
      PyList_SetItem(list, static_cast<Py_ssize_t>(i),
                     Py_BuildValue("(in)", held[i].first, static_cast<Py_ssize_t>(held[i].second)));
    return list;
  });
}
PyObject* owners_check(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    owners_of(self)->check();
    Py_RETURN_NONE;
  });
}
PyObject* owners_figure(PyObject* self, void* which) {
  auto& tree = owners_of(self)->tree;
  switch (reinterpret_cast<intptr_t>(which)) {
    case kTokens: return PyLong_FromSize_t(tree.tokens);
    case kNodes: return PyLong_FromSize_t(tree.nodes);
    default: return PyLong_FromSize_t(tree.memory_bytes());
  }
}

// ---------------------------------------------------------------- types

template <class F>
PyCFunction method(F f) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f));
}
void* figure(Figure which) { return reinterpret_cast<void*>(which); }
constexpr int kFast = METH_FASTCALL, kNamed = METH_FASTCALL | METH_KEYWORDS;

PyGetSetDef match_getset[] = {{"length", match_length, nullptr, "Tokens matched, a multiple of the page size.", nullptr},
                              {"namespace", match_namespace, nullptr, nullptr, nullptr},
                              {}};
PyMethodDef match_methods[] = {
    {"values", method(match_values), kFast,
     "values(start=0) -> bytes: int32, one per page of tokens from `start` on. ValueError if the match is out of date."},
    {}};
PyType_Slot match_slots[] = {{Py_tp_doc, const_cast<char*>("The longest prefix of a path in a tree; made by RadixTree.match.")},
                             {Py_tp_dealloc, reinterpret_cast<void*>(match_dealloc)},
                             {Py_tp_methods, match_methods},
                             {Py_tp_getset, match_getset},
                             {}};
PyType_Spec match_spec = {"radixrt.tree.Match", sizeof(MatchObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, match_slots};

PyGetSetDef lease_getset[] = {{"length", lease_length, nullptr, "Tokens pinned, from the root.", nullptr},
                              {"namespace", lease_namespace, nullptr, nullptr, nullptr},
                              {}};
PyMethodDef lease_methods[] = {
    {"values", method(lease_values), kFast, "values(start=0, stop=None) -> bytes: int32, one per page of tokens [start, stop)."},
    {"assign", method(lease_assign), kFast,
     "assign(start, values): replace the values of the pages from token `start` on. Matches stay valid."},
    {"extend_match", lease_extend_match, METH_O,
     "extend_match(tokens) -> int: extend the lease by those of `tokens`, which follow it, that are in the tree; how many."},
    {"path", lease_path, METH_NOARGS,
     "path() -> tuple of (node, end): the nodes from the root to the lease's end. `node` is a number that is unique while "
     "the node is pinned (if the node is split, its upper part gets a new one), `end` the number of tokens from the root."},
    {"release", lease_release, METH_NOARGS, "release(): unpin the path. ValueError if it was released already."},
    {"withdraw", lease_withdraw, METH_NOARGS, "withdraw(): as release, and the lease does not count as a use."},
    {"__enter__", lease_enter, METH_NOARGS, nullptr},
    {"__exit__", lease_exit, METH_VARARGS, nullptr},
    {}};
PyType_Slot lease_slots[] = {{Py_tp_doc, const_cast<char*>("A pin on a path; made by RadixTree.lease. Released when deallocated.")},
                             {Py_tp_dealloc, reinterpret_cast<void*>(lease_dealloc)},
                             {Py_tp_methods, lease_methods},
                             {Py_tp_getset, lease_getset},
                             {}};
PyType_Spec lease_spec = {"radixrt.tree.Lease", sizeof(LeaseObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, lease_slots};

PyGetSetDef tree_getset[] = {
    {"page_size", tree_figure, nullptr, "Tokens per page.", figure(kPageSize)},
    {"tokens", tree_figure, nullptr, "Tokens cached: leased_tokens + evictable_tokens.", figure(kTokens)},
    {"leased_tokens", tree_figure, nullptr, "Tokens on paths that leases pin.", figure(kLeased)},
    {"evictable_tokens", tree_figure, nullptr, "Tokens that evict could free.", figure(kEvictable)},
    {"nodes", tree_figure, nullptr, "Nodes, roots not counted.", figure(kNodes)},
    {"leaves", tree_figure, nullptr, "Nodes without children; walks the tree.", figure(kLeaves)},
    {"version", tree_figure, nullptr, "Changes whenever a match may have a different result.", figure(kVersion)},
    {"clock", tree_figure, nullptr, "Leases and insertions so far: the last uses of nodes are its values.", figure(kClock)},
    {"memory_bytes", tree_figure, nullptr, "Bytes of nodes, tokens and values; walks the tree.", figure(kMemory)},
    {}};
PyMethodDef tree_methods[] = {
    {"match", method(tree_match), kNamed,
     "match(namespace, tokens, limit=None) -> Match: the longest prefix in the tree; changes nothing."},
    {"lease", method(tree_lease), kNamed,
     "lease(match, priority=None) -> Lease: pin and touch its path. ValueError if the match is out of date. `priority`, an "
     "int, is for the policy, and counts for what the lease is extended by as well; None is below all."},
    {"held_only_by", tree_held_only_by, METH_O,
     "held_only_by(leases) -> int: tokens that only these leases keep from being evictable."},
    {"insert", method(tree_insert), kNamed,
     "insert(namespace or lease, tokens, values=None) -> int: how many leading tokens were in the tree already; the "
     "caller must free the values given for them."},
    {"evict", tree_evict, METH_O, "evict(tokens) -> bytes: free at least so many tokens, or all evictable ones; their values."},
    {"evict_used", tree_evict_used, METH_O,
     "evict_used(pages) -> bytes: as evict, until at least so many pages whose value is not 0 are freed; all freed values."},
    {"evict_into", method(tree_evict_into), kFast,
     "evict_into(there, tokens) -> (lease, ids, values) | None: evict one leaf, or at most `tokens` tokens, in whole pages,\n"
     "from the end of it: `ids`, bytes of int32, which had these values. `lease` is of the path above them in `there`,\n"
     "another tree, which is inserted there as far as it is missing, with values of 0. None if nothing is evictable.\n"
     "Costs time and memory in proportion to `ids` and what is inserted, not to the length of the path. What is inserted\n"
     "under the lease counts as used as often as here, and with the same priority."},
    {"forget", method(tree_forget), kNamed,
     "forget(namespace, tokens, keep) -> bytes: free the tokens of a path after the first `keep`, except those that are "
     "leased or have other continuations; their values."},
    {"set_returns", method(tree_set_returns), kFast,
     "set_returns(edges, rates): from now on leaves go in the order of a rate, smallest first; of equal ones, the least\n"
     "recently used. `rates` has a row for each kind, one after the other: the rate of leaves whose last use was of that\n"
     "kind and is edges[i] to edges[i + 1] seconds old. Sorts all leaves. ValueError for a tree with a policy."},
    {"advance", tree_advance, METH_O,
     "advance(now): the time, in seconds of any clock, by which the ages of leaves count, and of what is used from here on."},
    {"mark", method(tree_mark), kFast,
     "mark(namespace, tokens, kind, since) -> bool: the last use of a path was of that kind, and ended then; until marked it\n"
     "is of kind 0. It holds for the last node of the path, and for those above as their ends are evicted. False if no\n"
     "node ends where the path does, or where the tree ceases to know it."},
    {"remove_namespaces", tree_remove_namespaces, METH_O,
     "remove_namespaces(prefix) -> bytes: free everything in the namespaces whose names begin with `prefix`, except what "
     "is leased; their values."},
    {"continuation", method(tree_continuation), kFast,
     "continuation(namespace, tokens, at, most) -> bytes: of a path that was inserted, up to `most` tokens that followed its "
     "first `at` until then, on the latest other path; none if there was none, or it was evicted."},
    {"clear", tree_clear, METH_NOARGS, "clear() -> bytes: free everything; all values. ValueError while there are leases."},
    {"drain_events", tree_drain_events, METH_NOARGS, "drain_events() -> list: changes since the last call, oldest first."},
    {"snapshot", tree_snapshot, METH_NOARGS, "snapshot() -> list: events that build this tree from an empty one."},
    {"values", tree_values, METH_NOARGS, "values() -> bytes: all values, int32, in no particular order."},
    {"check", tree_check, METH_NOARGS, "check(): assert all invariants; AssertionError names one that does not hold."},
    {}};
constexpr char kTreeDoc[] =
    "RadixTree(page_size=1, *, policy=None, events=False, values=True)\n\n"
    "policy(last_use, length, tokens, uses, priority) is the key of a leaf: the smallest is evicted first and, of equal\n"
    "ones, the least recently used. `uses`: the leases that held it; `priority`: the highest of theirs.";
PyType_Slot tree_slots[] = {{Py_tp_doc, const_cast<char*>(kTreeDoc)},
                            {Py_tp_new, reinterpret_cast<void*>(tree_new)},
                            {Py_tp_dealloc, reinterpret_cast<void*>(tree_dealloc)},
                            {Py_tp_traverse, reinterpret_cast<void*>(tree_traverse)},
                            {Py_tp_clear, reinterpret_cast<void*>(tree_clear_references)},
                            {Py_tp_methods, tree_methods},
                            {Py_tp_getset, tree_getset},
                            {}};
PyType_Spec tree_spec = {"radixrt.tree.RadixTree", sizeof(TreeObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, tree_slots};

PyGetSetDef owners_getset[] = {{"tokens", owners_figure, nullptr, "Tokens in the tree.", figure(kTokens)},
                               {"nodes", owners_figure, nullptr, "Nodes, roots not counted.", figure(kNodes)},
                               {"memory_bytes", owners_figure, nullptr, "Bytes; walks the tree.", figure(kMemory)},
                               {}};
PyMethodDef owners_methods[] = {
    {"add", method(owners_add), kFast, "add(namespace, tokens, owner): add one claim of `owner` to the path."},
    {"remove", method(owners_remove), kFast, "remove(namespace, tokens, owner): remove one claim from the path."},
    {"store", method(owners_store), kFast,
     "store(owner, namespace, run, at, parent, parent_at, ids): append `ids` to a run of the owner's tree that has `at` "
     "tokens. If `at` is 0 it is new, after the first `parent_at` tokens of run `parent` (0: at the root). ValueError if "
     "the owner's runs differ."},
    {"cut", method(owners_cut), kFast,
     "cut(owner, run, keep) -> (namespace, depth, length, first): shorten a run to its first `keep` tokens; with 0, remove "
     "it. ValueError if it has fewer. Returns what is cut off: its namespace, the tokens above it, its tokens, and up to 8 of "
     "them as bytes."},
    {"icicle", method(owners_icicle), kFast,
     "icicle(prefix, most, seen, run, end) -> (tokens, rows) | None: the `most` largest subtrees of namespaces that begin "
     "with `prefix`, or of those below a node, parents first. A row is (run, end, row of the parent or -1, depth, tokens, "
     "tokens of the subtree, last use of a path through it, children left out, whether on a device, owners, namespace): run "
     "and end name the node, None and 0 here all. The last use is by the clock of `seen`, a tree into which the same paths "
     "are inserted; 0 if they are not there. None if there is no such node. Walks the tree."},
    {"edge", method(owners_edge), kFast,
     "edge(prefix, most, run, end) -> (namespace, depth, length, first, last, owners) | None: a node, with up to `most` of "
     "its first and last tokens as bytes. None if there is none of these names in namespaces that begin with `prefix`. Walks "
     "the tree."},
    {"namespaces", owners_namespaces, METH_NOARGS, "namespaces() -> dict: tokens by namespace; walks the tree."},
    {"remove_owner", owners_remove_owner, METH_O, "remove_owner(owner): remove all claims of an owner; walks the tree."},
    {"match", method(owners_match), kFast, "match(namespace, tokens) -> [(owner, length)]: each owner's longest prefix."},
    {"check", owners_check, METH_NOARGS, "check(): assert all invariants."},
    {}};
PyType_Slot owners_slots[] = {{Py_tp_doc, const_cast<char*>("OwnerTree()")},
                              {Py_tp_new, reinterpret_cast<void*>(owners_new)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(owners_dealloc)},
                              {Py_tp_methods, owners_methods},
                              {Py_tp_getset, owners_getset},
                              {}};
PyType_Spec owners_spec = {"radixrt.tree.OwnerTree", sizeof(OwnersObject), 0, Py_TPFLAGS_DEFAULT, owners_slots};

PyObject* common_length(PyObject*, PyObject* const* given, Py_ssize_t n) {
  PyObject* args[2];
  IntBuffer one, other;
  if (!arguments(given, n, nullptr, 2, 2, nullptr, args) || !one.load(args[0], "one") || !other.load(args[1], "other"))
    return nullptr;
  return PyLong_FromSize_t(radix::first_difference(one.data(), other.data(), std::min(one.size(), other.size())));
}

PyObject* realigned(PyObject*, PyObject* const* given, Py_ssize_t n) {
  PyObject* args[7];
  IntBuffer one, other;
  size_t at, to, span, anchor, least;
  if (!arguments(given, n, nullptr, 7, 7, nullptr, args) || !one.load(args[0], "one") || !other.load(args[1], "other") ||
      !load_count(args[2], "at", &at) || !load_count(args[3], "to", &to) || !load_count(args[4], "span", &span) ||
      !load_count(args[5], "anchor", &anchor) || !load_count(args[6], "least", &least))
    return nullptr;
  auto found = radix::realigned(one.data(), one.size(), other.data(), other.size(), at, to, span, anchor, least);
  if (!found) Py_RETURN_NONE;
  return Py_BuildValue("(nn)", static_cast<Py_ssize_t>(found->first), static_cast<Py_ssize_t>(found->second));
}

// Load each object of a sequence as an array of tokens.
bool load_all(PyObject* objects, const char* what, std::vector<IntBuffer>* out) {
  const Py_ssize_t count = PySequence_Size(objects);
  if (count < 0) return false;
  *out = std::vector<IntBuffer>(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* object = PySequence_GetItem(objects, i);
    const bool loaded = object && (*out)[i].load(object, what);
    Py_XDECREF(object);  // the loaded buffer keeps a reference
    if (!loaded) return false;
  }
  return true;
}

PyObject* resembling(PyObject*, PyObject* const* given, Py_ssize_t n) {
  PyObject* args[6];
  std::vector<IntBuffer> ones;
  IntBuffer other;
  size_t enough, span, anchor, least;
  if (!arguments(given, n, nullptr, 6, 6, nullptr, args) || !load_all(args[0], "ones", &ones) ||
      !other.load(args[1], "other") || !load_count(args[2], "enough", &enough) || !load_count(args[3], "span", &span) ||
      !load_count(args[4], "anchor", &anchor) || !load_count(args[5], "least", &least))
    return nullptr;
  PyObject* list = PyList_New(0);
  for (size_t i = 0; list && i < ones.size(); ++i) {
    const IntBuffer& one = ones[i];
    const size_t same = radix::first_difference(one.data(), other.data(), std::min(one.size(), other.size()));
    if (same < one.size() && (same < enough || !radix::realigned(one.data(), one.size(), other.data(), other.size(), same,
                                                                 same, span, anchor, least)))
      continue;
    PyObject* pair = Py_BuildValue("(nn)", static_cast<Py_ssize_t>(i), static_cast<Py_ssize_t>(same));
    if (!pair || PyList_Append(list, pair) < 0) Py_CLEAR(list);
    Py_XDECREF(pair);
  }
  return list;
}

PyMethodDef functions[] = {
    {"common_length", method(common_length), kFast,
     "common_length(one, other) -> int: length of the longest common prefix, in tokens."},
    {"realigned", method(realigned), kFast,
     "realigned(one, other, at, to, span, anchor, least) -> (int, int) | None: positions in `one` and `other` from which "
     "on they are equal for at least `anchor` + `least` tokens, given that token `at` of `one` and `to` of `other` differ. "
     "`anchor` tokens of `other`, 1, 16, 48 or `span` after `to`, are searched for in `one`. None if that finds no such "
     "positions, or if `one` has more than `span` tokens in between."},
    {"resembling", method(resembling), kFast,
     "resembling(ones, other, enough, span, anchor, least) -> [(index, length)]: which of `ones` are a prefix of `other`, "
     "or share a prefix of at least `enough` tokens with it and can be `realigned` after it; with the length of the shared "
     "prefix."},
    {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_radix", "The radix tree.", -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit__radix() {
  PyObject* self = PyModule_Create(&module);
  if (!self) return nullptr;
  match_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&match_spec));
  lease_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&lease_spec));
  tree_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&tree_spec));
  auto* owners_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&owners_spec));
  for (PyTypeObject* type : {match_type, lease_type, tree_type, owners_type})
    if (!type || PyModule_AddType(self, type) < 0) return nullptr;
  return self;
}
