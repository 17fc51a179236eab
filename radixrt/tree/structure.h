// The structure of the radix tree, without Python: runs and nodes; walk, split, add, extend, trim, remove.
//
//   run 7  [ t0 t1 t2 | t3 t4 t5 t6 ]     A run is an array of the tokens of one insertion, and of later extensions.
//            node A      node B           A node is a slice of a run: a split makes two slices and copies no tokens.
//               \                         Nodes are removed from the leaves upwards, so a run is only cut at its end:
//                run 9 [ t9 t8 ]          it has no holes, and returns its memory.
//
// `Extra` is the additional data of a node: pins and the order of eviction in a cache, owners in an index.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace radix {

using Token = int32_t;

// Index of the first difference of two arrays, `n` if there is none. First memcmp compares 1 KiB at a time, by the widest
// vector instructions of the processor; then the compiler vectorizes the comparison of 64 bytes per iteration.
inline size_t first_difference(const Token* a, const Token* b, size_t n) {
  size_t i = 0;
  while (i + 256 <= n && !std::memcmp(a + i, b + i, 256 * sizeof(Token))) i += 256;
  for (; i + 16 <= n; i += 16) {
    uint32_t differ = 0;
    for (size_t j = 0; j < 16; ++j) differ |= static_cast<uint32_t>(a[i + j] ^ b[i + j]);
    if (differ) break;
  }
  while (i < n && a[i] == b[i]) ++i;
  return i;
}

inline uint64_t hash_page(const Token* page, size_t n) {
  uint64_t h = 0x9e3779b97f4a7c15ull;
  for (size_t i = 0; i < n; ++i) {
    h = (h ^ static_cast<uint32_t>(page[i])) * 0xff51afd7ed558ccdull;
    h ^= h >> 32;
  }
  return h;
}

// An array of ints that grows by a quarter, and returns memory when less than half of it is used.
class Ints {
 public:
  Ints() = default;
  Ints(const Ints&) = delete;
  Ints& operator=(const Ints&) = delete;
  ~Ints() { std::free(data_); }

  const int32_t* data() const { return data_; }
  int32_t* data() { return data_; }
  size_t size() const { return size_; }
  size_t bytes() const { return capacity_ * sizeof(int32_t); }

  void append(const int32_t* data, size_t n) {
    if (size_ + n > capacity_) reallocate(size_ ? std::max(size_ + n, size_ + size_ / 4) : n);
    if (n) std::memcpy(data_ + size_, data, n * sizeof(int32_t));
    size_ += n;
  }
  void truncate(size_t n) {
    size_ = n;
    if (n < capacity_ / 2) reallocate(n);
  }

 private:
  void reallocate(size_t n) {
    if (n == 0) {
      std::free(data_);
      data_ = nullptr;
    } else {
      void* moved = std::realloc(data_, n * sizeof(int32_t));
      if (!moved) throw std::bad_alloc();
      data_ = static_cast<int32_t*>(moved);
    }
    capacity_ = n;
  }
  int32_t* data_ = nullptr;
  size_t size_ = 0, capacity_ = 0;
};

struct Run {
  int64_t id;
  const std::string* name;  // its namespace
  uint32_t slices = 0;  // nodes that refer to it
  Ints tokens;
  Ints values;  // one a page; empty in an index
};

template <class Extra>
struct Node;

// The children of a node, by the first page of their tokens: a single one is stored inline, several in a hash table with
// open addressing.
template <class Extra>
class Children {
  using N = Node<Extra>;

 public:
  Children() = default;
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;
  ~Children() { std::free(table_); }

  size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }
  size_t bytes() const { return slots() * sizeof(N*); }

  N* find(const Token* page, size_t page_size) const {
    if (!table_) return count_ && same(one_, page, page_size) ? one_ : nullptr;
    for (size_t i = hash_page(page, page_size) & mask_;; i = (i + 1) & mask_) {
      if (!table_[i]) return nullptr;
      if (same(table_[i], page, page_size)) return table_[i];
    }
  }
  void add(N* node, size_t page_size) {
    if (!table_ && count_ == 0) {
      one_ = node;
    } else {
      if (!table_ || (count_ + 1) * 4 > slots() * 3) rehash(table_ ? slots() * 2 : 4, page_size);
      place(node, page_size);
    }
    ++count_;
  }
  void replace(N* old, N* node, size_t page_size) {
    if (!table_) one_ = node;
    else table_[index_of(old, page_size)] = node;
  }
  void remove(N* node, size_t page_size) {
    --count_;
    if (!table_) {
      one_ = nullptr;
      return;
    }
    size_t hole = index_of(node, page_size);
    for (size_t i = (hole + 1) & mask_; table_[i]; i = (i + 1) & mask_) {
      size_t home = hash_page(table_[i]->tokens(), page_size) & mask_;
      if (((i - home) & mask_) >= ((i - hole) & mask_)) {
        table_[hole] = table_[i];
        hole = i;
      }
    }
    table_[hole] = nullptr;
    if (slots() > 8 && count_ * 4 < slots()) rehash(slots() / 2, page_size);
  }
  template <class F>
  void each(F f) const {
    if (!table_) {
      if (count_) f(one_);
      return;
    }
    for (size_t i = 0; i <= mask_; ++i)
      if (table_[i]) f(table_[i]);
  }
  N* any() const {
    N* found = nullptr;
    each([&](N* node) { found = node; });
    return found;
  }

 private:
  static bool same(const N* node, const Token* page, size_t page_size) {
    const Token* own = node->tokens();
    if (own[0] != page[0]) return false;
    for (size_t i = 1; i < page_size; ++i)
      if (own[i] != page[i]) return false;
    return true;
  }
  size_t slots() const { return table_ ? static_cast<size_t>(mask_) + 1 : 0; }
  size_t index_of(const N* node, size_t page_size) const {
    size_t i = hash_page(node->tokens(), page_size) & mask_;
    while (table_[i] != node) i = (i + 1) & mask_;
    return i;
  }
  void place(N* node, size_t page_size) {
    size_t i = hash_page(node->tokens(), page_size) & mask_;
    while (table_[i]) i = (i + 1) & mask_;
    table_[i] = node;
  }
  void rehash(size_t slots, size_t page_size) {
    std::vector<N*> nodes;
    nodes.reserve(count_);
    each([&](N* node) { nodes.push_back(node); });
    N** table = static_cast<N**>(std::calloc(slots, sizeof(N*)));
    if (!table) throw std::bad_alloc();
    std::free(table_);
    table_ = table;
    one_ = nullptr;
    mask_ = static_cast<uint32_t>(slots - 1);
    for (N* node : nodes) place(node, page_size);
  }
  N* one_ = nullptr;
  N** table_ = nullptr;
  uint32_t mask_ = 0, count_ = 0;
};

template <class Extra>
struct Node {
  Node* parent = nullptr;
  Run* run = nullptr;             // null in a root
  uint32_t begin = 0, end = 0;    // slice of the run
  uint32_t depth = 0;             // tokens above this node
  const std::string* name = nullptr;  // a root's namespace
  Children<Extra> children;
  Extra extra;

  size_t length() const { return end - begin; }
  const Token* tokens() const { return run->tokens.data() + begin; }
  bool is_root() const { return run == nullptr; }
  bool ends_its_run() const { return run && end == run->tokens.size(); }
};

template <class Extra>
class Structure {
 public:
  using N = Node<Extra>;
  // A position in the tree: after the first `offset` tokens of `node` (1 to its length; 0 in a root). `length` is the
  // number of tokens that were matched to get there.
  struct Place {
    N* node;
    size_t offset, length;
    bool at_end() const { return offset == node->length(); }
  };

  explicit Structure(size_t page_size) : page_size(page_size) {}
  Structure(const Structure&) = delete;
  ~Structure() {
    for (auto& [name, root] : roots_) destroy(root);
  }

  const size_t page_size;
  size_t tokens = 0, nodes = 0;

  N* find_root(const std::string& name) const {
    auto found = roots_.find(name);
    return found == roots_.end() ? nullptr : found->second;
  }
  N* make_root(const std::string& name) {
    auto [entry, fresh] = roots_.try_emplace(name, nullptr);
    if (fresh) {
      entry->second = new N();
      entry->second->name = &entry->first;
    }
    return entry->second;
  }
  void drop_root(N* root) {
    roots_.erase(*root->name);
    delete root;
  }
  const std::unordered_map<std::string, N*>& roots() const { return roots_; }

  // Match whole pages of `tokens` from the end of `from` on, as far as they are in the tree.
  Place walk(N* from, const Token* tokens, size_t n) const {
    Place place{from, from->length(), 0};
    while (n - place.length >= page_size) {
      N* child = place.node->children.find(tokens + place.length, page_size);
      if (!child) break;
      size_t compared = std::min(child->length(), n - place.length);
      size_t same = first_difference(child->tokens(), tokens + place.length, compared);
      same -= same % page_size;
      place = {child, same, place.length + same};
      if (same < child->length()) break;
    }
    return place;
  }

  // Split a node so that `place` is the end of a node, which is returned. The existing object becomes the lower part, as
  // pins refer to the end of a node.
  N* split(Place place) {
    N* lower = place.node;
    if (place.at_end()) return lower;
    N* upper = new N();
    upper->parent = lower->parent;
    upper->run = lower->run;
    upper->begin = lower->begin;
    upper->end = lower->begin + static_cast<uint32_t>(place.offset);
    upper->depth = lower->depth;
    upper->extra.inherit(lower->extra);
    ++upper->run->slices;
    ++nodes;
    lower->parent->children.replace(lower, upper, page_size);
    lower->begin = upper->end;
    lower->depth += static_cast<uint32_t>(place.offset);
    lower->parent = upper;
    upper->children.add(lower, page_size);
    return upper;
  }

  N* add_leaf(N* parent, const Token* data, size_t n, const int32_t* values) {
    auto* run = new Run();
    run->id = ++last_run_;
    run->name = &name_of(parent);
    run->slices = 1;
    run->tokens.append(data, n);
    if (values) run->values.append(values, n / page_size);
    auto* node = new N();
    node->parent = parent;
    node->run = run;
    node->end = static_cast<uint32_t>(n);
    node->depth = parent->depth + static_cast<uint32_t>(parent->length());
    parent->children.add(node, page_size);
    tokens += n;
    ++nodes;
    return node;
  }
  void extend_leaf(N* leaf, const Token* data, size_t n, const int32_t* values) {
    leaf->run->tokens.append(data, n);
    if (values) leaf->run->values.append(values, n / page_size);
    leaf->end += static_cast<uint32_t>(n);
    tokens += n;
  }
  void trim_leaf(N* leaf, size_t keep) {
    tokens -= leaf->length() - keep;
    leaf->end = leaf->begin + static_cast<uint32_t>(keep);
    shrink(leaf->run, leaf->end);
  }
  // Remove a leaf; returns its parent.
  N* remove_leaf(N* leaf) {
    N* parent = leaf->parent;
    parent->children.remove(leaf, page_size);
    tokens -= leaf->length();
    --nodes;
    shrink(leaf->run, leaf->begin);
    release(leaf->run);
    delete leaf;
    return parent;
  }
  // Whether a split can be undone: `upper` has one child, which continues its run. `merge` replaces it by that child.
  bool can_merge(const N* upper) const {
    if (upper->is_root() || upper->children.size() != 1) return false;
    const N* lower = upper->children.any();
    return lower->run == upper->run;
  }
  N* merge(N* upper) {
    N* lower = upper->children.any();
    upper->parent->children.replace(upper, lower, page_size);
    lower->parent = upper->parent;
    lower->begin = upper->begin;
    lower->depth = upper->depth;
    --upper->run->slices;
    --nodes;
    delete upper;
    return lower;
  }
  void clear() {
    for (auto& [name, root] : roots_) destroy(root);
    roots_.clear();
    tokens = nodes = 0;
  }

  // Call f(namespace, node) for all nodes but roots, parents before children.
  template <class F>
  void each(F f) const {
    std::vector<N*> stack;
    for (auto& [name, root] : roots_) {
      root->children.each([&](N* node) { stack.push_back(node); });
      while (!stack.empty()) {
        N* node = stack.back();
        stack.pop_back();
        f(name, node);
        node->children.each([&](N* child) { stack.push_back(child); });
      }
    }
  }
  size_t memory_bytes() const {
    size_t total = 0;
    each([&](const std::string&, N* node) {
      total += sizeof(N) + node->children.bytes() + node->extra.bytes();
      if (node->begin == 0) total += sizeof(Run) + node->run->tokens.bytes() + node->run->values.bytes();
    });
    return total;
  }
  static const std::string& name_of(const N* node) { return node->is_root() ? *node->name : *node->run->name; }

  // Throws std::logic_error with the first invariant that does not hold.
  void check() const {
    size_t seen_tokens = 0, seen_nodes = 0;
    std::unordered_map<Run*, std::pair<size_t, uint32_t>> runs;
    each([&](const std::string&, N* node) {
      auto require = [](bool holds, const char* rule) {
        if (!holds) throw std::logic_error(rule);
      };
      require(node->length() > 0, "a node holds at least a page");
      require(node->length() % page_size == 0, "a node holds whole pages");
      require(node->end <= node->run->tokens.size(), "a node is a slice of its run");
      require(node->depth == node->parent->depth + node->parent->length(), "depth is the sum of the lengths above");
      require(node->parent->children.find(node->tokens(), page_size) == node, "a parent finds its child by its first page");
      require(node->begin == 0 || (node->parent->run == node->run && node->parent->end == node->begin),
              "a slice that is not its run's first continues its parent");
      auto& [longest, slices] = runs[node->run];
      longest = std::max<size_t>(longest, node->end);
      ++slices;
      seen_tokens += node->length();
      ++seen_nodes;
    });
    for (auto& [run, found] : runs)
      if (run->tokens.size() != found.first || run->slices != found.second)
        throw std::logic_error("a run is exactly as long as its slices");
    if (seen_tokens != tokens || seen_nodes != nodes) throw std::logic_error("tokens and nodes are counted");
  }

 private:
  void shrink(Run* run, size_t keep) {
    run->tokens.truncate(keep);
    if (run->values.size()) run->values.truncate(keep / page_size);
  }
  static void release(Run* run) {
    if (--run->slices == 0) delete run;
  }
  static void destroy(N* root) {  // not recursive, as a path may be deeper than the call stack
    std::vector<N*> stack{root};
    while (!stack.empty()) {
      N* node = stack.back();
      stack.pop_back();
      node->children.each([&](N* child) { stack.push_back(child); });
      if (node->run) release(node->run);
      delete node;
    }
  }
  std::unordered_map<std::string, N*> roots_;
  int64_t last_run_ = 0;
};

}  // namespace radix
