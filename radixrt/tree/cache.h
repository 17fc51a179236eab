// The tree of a cache: one value per page, leases, eviction in the order of a policy, events.
//
// Order. A lease or an insertion stamps only the deepest node of its path with the clock. The last use of an ancestor is
// the latest of its descendants'; it gets that when they are evicted. So the cost of a lease does not depend on depth,
// and LRU is still exact.
// Only leaves are evicted, so one pin on the last node of a path protects all of it. With a policy, each node counts the
// leases that held it, and has the highest priority of these and of insertions; then a lease costs the nodes of its path,
// and the pages of a node are all alike.
//
// With rates of return (see returns.h) leaves go in the order of these, smallest first. The rate of a leaf changes with its
// age, so leaves are also sorted by when it does; `advance` puts those in order again whose time has come.
//
// Twins. What one tree evicts can go on in another one, `there`, which has no values for what was not evicted yet:
//
//     here    [ a b c d e f ]             there   [ a b c d e f | g h ]          f here and f there are twins: the next
//                        |  x y                     0 0 0 0 0 0   5 6            eviction of a leaf below it begins at
//                        |  g h   evicted                                        f there, without a walk from the root
//
// A node has at most one twin, whose path is the same. It keeps it until the end of one of them moves or is removed.
// A node that could be merged with its only child is kept apart for its twin's sake if it is long: so the next twin is
// never far above, and the number of nodes of a path does not grow with the number of leaves that were below it.
#pragma once

#include <functional>
#include <limits>
#include <set>

#include "returns.h"
#include "structure.h"

namespace radix {

constexpr uint32_t kNowhere = std::numeric_limits<uint32_t>::max();
constexpr size_t kLong = 4096;  // tokens of a node that is not merged while it has a twin
constexpr int32_t kLowest = std::numeric_limits<int32_t>::min();

// What a lease, or an insertion, adds to the nodes that it reaches.
struct Use {
  uint32_t hits = 0;
  int32_t priority = kLowest;
  Awaited awaited;  // for what is touched; by default kind 0 from now on
  bool operator==(const Use& other) const { return hits == other.hits && priority == other.priority; }
};

struct CacheExtra {
  uint64_t last_use = 0;
  double key = 0;             // order of eviction, smallest first; set while in the heap
  Use used;                   // with a policy: leases that held it, and the highest priority
  Awaited awaited;            // that of the last use
  double due = 0;             // when the key changes by itself; set while in the heap
  uint32_t pins = 0;
  uint32_t heap_at = kNowhere;
  uint32_t pinned_at = kNowhere;
  mutable uint64_t seen = 0;  // stamp of the last walk that visited it (see pinned_tokens)
  Node<CacheExtra>* twin = nullptr;

  void inherit(const CacheExtra& lower) {
    last_use = lower.last_use;
    used = lower.used;
    awaited = lower.awaited;
  }
  size_t bytes() const { return 0; }
};

// A change of the tree, as in messages/worker.py: kRemoved keeps the first `at` tokens of `run`.
struct Event {
  enum Kind { kStored, kRemoved, kCleared } kind;
  std::string name;
  int64_t run = 0, parent = 0;
  size_t at = 0, parent_at = 0;
  std::vector<Token> tokens;
};

class Cache {
 public:
  using S = Structure<CacheExtra>;
  using N = S::N;
  using Place = S::Place;
  using Values = std::vector<int32_t>;
  // (last use, length of the leaf, tokens from the root to its end, what used it) -> key; smallest goes first
  using Policy = std::function<double(uint64_t, size_t, size_t, Use)>;

  Cache(size_t page_size, bool events, bool values) : tree(page_size), with_values(values), with_events_(events) {}
  ~Cache() { part_all(); }

  S tree;
  const bool with_values;
  Policy policy;  // none: least recently used
  uint64_t version = 0;  // changes whenever existing matches may be out of date
  size_t live_leases = 0;
  std::vector<Event> events;

  // ------------------------------------------------------------ leases

  // `above`: the node that the lease ended with before, if it is extended.
  N* lease(Place place, Use use, const N* above = nullptr) {
    if (!place.at_end()) ++version;
    N* node = split(place);
    pin(node);
    add_use(node, above, use);
    touch(node, use.awaited);
    return node;
  }
  // The lease that ends with `node` does not count as a use.
  void take_back(N* node, Use use) { add_use(node, nullptr, Use{0u - use.hits}); }
  void pin(N* node) {
    if (node->extra.pins++ == 0) {
      node->extra.pinned_at = static_cast<uint32_t>(pinned_.size());
      pinned_.push_back(node);
      leave_heap(node);
      sums_known_ = false;
    }
  }
  // `node` must not be used afterwards: it may be merged, or its namespace dropped.
  void unpin(N* node) {
    if (--node->extra.pins) return;
    N* last = pinned_.back();
    pinned_[node->extra.pinned_at] = last;
    last->extra.pinned_at = node->extra.pinned_at;
    pinned_.pop_back();
    node->extra.pinned_at = kNowhere;
    sums_known_ = false;
    settle(node);
  }
  // Move a pin on `from` to `to`, which lies at or below it.
  void move_pin(N* from, N* to) {
    if (from == to) return;
    pin(to);
    unpin(from);
  }

  // ------------------------------------------------------------ insertion

  // Insert a path below the end of `from`, which is pinned by the caller or a root. `where` receives the node at which
  // the path ends. Returns how many of its leading tokens were in the tree already.
  size_t insert(N* from, bool pinned, const Token* data, size_t n, const int32_t* values, N** where, Use use = {}) {
    Place place = tree.walk(from, data, n);
    const size_t present = place.length;
    if (present < n || !place.at_end()) {
      ++version;
      sums_known_ = false;
    }
    N* node = split(place);
    if (present < n) node = grow(node, pinned && node == from, data + present, n - present, page(values, present), use);
    add_use(node, from, use);
    *where = node;
    touch(node, use.awaited);
    return present;
  }

  // ------------------------------------------------------------ eviction

  // Evict at least `wanted` tokens, or as many as are evictable. Appends their values to `freed`.
  void evict(size_t wanted, Values* freed) {
    for (size_t done = 0; done < wanted && !heap_.empty();) {
      N* leaf = heap_[0];
      const size_t keep = kept_of(leaf, wanted - done);
      done += leaf->length() - keep;
      cut(leaf, keep, freed);
    }
  }
  // Evict until at least `wanted` pages whose value is not 0 are freed, or nothing is evictable.
  void evict_used(size_t wanted, Values* freed) {
    const size_t p = tree.page_size;
    for (size_t done = 0; done < wanted && !heap_.empty();) {
      N* leaf = heap_[0];
      const int32_t* values = leaf->run->values.data() + leaf->begin / p;
      size_t keep = leaf->length() / p;
      while (keep && done < wanted) done += values[--keep] != 0;
      cut(leaf, keep * p, freed);
    }
  }
  // Evict the leaf that comes first, or the last tokens of it if it has more than `wanted`, and append its tokens and
  // values. Returns the node, in another tree, with which the path above them ends; there it is inserted as far as it is
  // missing, with values of 0, and pinned for the caller; `used` receives what used the leaf. Null if nothing is evictable.
  // Costs the length of what is evicted, and of what is inserted there.
  N* evict_into(Cache& there, size_t wanted, std::vector<Token>* tokens, Values* freed, Use* used) {
    if (heap_.empty()) return nullptr;
    N* leaf = heap_[0];
    *used = leaf->extra.used;
    used->awaited = leaf->extra.awaited;
    const size_t keep = kept_of(leaf, wanted);
    N* rest = keep ? leaf : leaf->parent;
    N* place = there.counterpart(rest, keep ? keep : rest->length());
    there.pin(place);
    tokens->assign(leaf->tokens() + keep, leaf->tokens() + leaf->length());
    if (!keep) pair(rest, place);  // before the leaf is cut: its parent may then be merged
    cut(leaf, keep, freed);
    if (keep) pair(rest, place);
    return place;
  }
  // Remove the tokens of a path after the first `keep`, except those that are leased or have other continuations.
  void forget(N* root, const Token* data, size_t n, size_t keep, Values* freed) {
    Place place = tree.walk(root, data, n);
    if (!place.at_end()) return;
    keep = (keep + tree.page_size - 1) / tree.page_size * tree.page_size;
    for (N *node = place.node, *parent; evictable(node) && node->depth + node->length() > keep; node = parent) {
      parent = node->parent;
      const bool only_child = parent->children.size() == 1;
      const size_t depth = node->depth;
      cut(node, depth < keep ? keep - depth : 0, freed);
      if (depth <= keep || !only_child) return;  // a root has depth 0: it ends the loop above
    }
  }
  // Remove everything in the namespaces whose names begin with `prefix`, except what is leased.
  void remove_namespaces(const std::string& prefix, Values* freed) {
    std::vector<std::string> names;
    for (auto& [name, root] : tree.roots())
      if (!name.compare(0, prefix.size(), prefix)) names.push_back(name);
    for (const std::string& name : names)
      while (N* root = tree.find_root(name)) {
        const std::vector<N*> leaves = evictable_below(root);
        if (leaves.empty()) break;
        for (N* leaf : leaves) cut(leaf, 0, freed);  // others stay leaves: of two nodes that merge, the lower one is kept
      }
  }
  void clear(Values* freed) {
    all_values(freed);
    part_all();
    tree.clear();
    heap_.clear();
    due_.clear();
    ++version;
    sums_known_ = false;
    if (with_events_) {
      events.clear();
      events.push_back(Event{Event::kCleared});
    }
  }

  // ------------------------------------------------------------ returns

  const Returns& returns() const { return returns_; }
  // From now on leaves go by these rates. Sorts all leaves.
  void set_returns(std::vector<double> edges, std::vector<double> rates) {
    returns_.set(std::move(edges), std::move(rates));
    std::vector<N*> leaves;
    leaves.swap(heap_);
    due_.clear();
    for (N* leaf : leaves) enter_heap(leaf);
  }
  // It is `now`, in seconds of any clock that does not run backwards. Costs O(log n) for each rate that changes.
  void advance(double now) {
    returns_.now = std::max(now, returns_.now);
    while (!due_.empty() && due_.begin()->first <= returns_.now) {
      N* leaf = due_.begin()->second;
      leave_heap(leaf);
      enter_heap(leaf);
    }
  }
  // What was last used at the end of a path is of that kind, since then. False if no node ends there.
  bool mark(N* root, const Token* data, size_t n, Awaited awaited) {
    const Place place = tree.walk(root, data, n);
    if (!place.at_end() || place.node->is_root()) return false;
    place.node->extra.awaited = awaited;
    if (place.node->extra.heap_at != kNowhere) {
      leave_heap(place.node);
      enter_heap(place.node);
    }
    return true;
  }

  // ------------------------------------------------------------ history

  // Counts leases and insertions: the last uses of nodes are its values.
  uint64_t clock() const { return clock_; }
  // What followed the first `at` of the `n` tokens of a path that goes on otherwise, when that was inserted: up to `most`
  // tokens of the latest such path; none if there was none, or it was evicted.
  std::vector<Token> continuation(const std::string& name, const Token* data, size_t n, size_t at, size_t most) const {
    const N* root = tree.find_root(name);
    if (!root || at >= n) return {};
    const Place place = tree.walk(const_cast<N*>(root), data, at);
    if (place.length < at) return {};
    std::vector<Token> found;
    const N* node = place.node;
    size_t from = place.offset;
    if (place.at_end()) {
      const N* own = node->children.find(data + at, tree.page_size);
      node = own ? newest(node, own->run->id) : newest(node);
      from = 0;
    } else if (node->tokens()[from] == data[at]) {
      return {};
    }
    for (; node && found.size() < most; node = newest(node), from = 0) append(&found, node, from, most);
    return found;
  }

  // ------------------------------------------------------------ sums

  size_t leased_tokens() const {
    if (!sums_known_) {
      leased_ = pinned_tokens();
      sums_known_ = true;
    }
    return leased_;
  }
  // Tokens that would not be leased any more if one pin were removed from each of `ends`.
  size_t held_only_by(const std::vector<N*>& ends) {
    const size_t leased = leased_tokens();
    for (N* node : ends) --node->extra.pins;
    const size_t others = pinned_tokens();
    for (N* node : ends) ++node->extra.pins;
    return leased - others;
  }
  size_t leaves() const {
    size_t found = 0;
    tree.each([&](const std::string&, N* node) { found += node->children.empty(); });
    return found;
  }
  // Values of the tokens [start, stop) of the path that ends `offset` tokens into `node`.
  void read_values(N* node, size_t offset, size_t start, size_t stop, int32_t* out) const {
    const size_t p = tree.page_size;
    for (size_t end = node->depth + offset; !node->is_root() && end > start; node = node->parent) {
      size_t from = std::max<size_t>(start, node->depth), to = std::min(stop, end);
      if (from < to)
        std::memcpy(out + (from - start) / p, node->run->values.data() + (node->begin + from - node->depth) / p,
                    (to - from) / p * sizeof(int32_t));
      end = node->depth;
    }
  }

  // Replace the values of the tokens [start, stop) of the path that ends with `node`.
  void write_values(N* node, size_t start, size_t stop, const int32_t* values) {
    const size_t p = tree.page_size;
    for (; !node->is_root() && node->depth + node->length() > start; node = node->parent) {
      size_t from = std::max<size_t>(start, node->depth), to = std::min<size_t>(stop, node->depth + node->length());
      if (from < to)
        std::memcpy(node->run->values.data() + (node->begin + from - node->depth) / p, values + (from - start) / p,
                    (to - from) / p * sizeof(int32_t));
    }
  }

  void all_values(Values* out) const {
    tree.each([&](const std::string&, N* node) { append_values(node, 0, out); });
  }
  void snapshot(std::vector<Event>* out) const {
    out->push_back(Event{Event::kCleared});
    tree.each([&](const std::string& name, N* node) {
      Event event = stored(name, node, node->begin);
      event.tokens.assign(node->tokens(), node->tokens() + node->length());
      out->push_back(std::move(event));
    });
  }

  void check() const {
    auto require = [](bool holds, const char* rule) {
      if (!holds) throw std::logic_error(rule);
    };
    tree.check();
    size_t evictable_leaves = 0, pinned = 0, changing = 0;
    tree.each([&](const std::string&, N* node) {
      const CacheExtra& x = node->extra;
      const size_t values = with_values ? node->run->tokens.size() / tree.page_size : 0;
      require(node->run->values.size() == values, "there is a value for each page");
      require((x.heap_at != kNowhere) == evictable(node), "the heap holds exactly the unpinned leaves");
      require(x.heap_at == kNowhere || heap_[x.heap_at] == node, "a leaf knows its place in the heap");
      require(x.heap_at == kNowhere || x.key == order_of(node), "and its order is that of what it is now");
      const bool changes = returns_.known() && x.heap_at != kNowhere && x.due < std::numeric_limits<double>::infinity();
      require(due_.count({x.due, node}) == changes, "the leaves whose order changes are sorted by when");
      changing += changes;
      require((x.pins > 0) == (x.pinned_at != kNowhere), "pinned nodes are listed");
      require(!x.twin || is_twin(node, x.twin), "twins know each other, and have the same path");
      evictable_leaves += x.heap_at != kNowhere;
      pinned += x.pins > 0;
    });
    for (auto& [name, root] : tree.roots()) {
      require(!root->children.empty() || root->extra.pins > 0, "an empty namespace is dropped");
      pinned += root->extra.pins > 0;
    }
    require(heap_.size() == evictable_leaves, "the heap holds nothing else");
    require(due_.size() == changing, "and nothing else");
    require(pinned_.size() == pinned, "nothing else is listed as pinned");
    for (size_t i = 1; i < heap_.size(); ++i) require(!before(heap_[i], heap_[(i - 1) / 2]), "the heap is ordered");
    sums_known_ = false;
    require(leased_tokens() <= tree.tokens, "leased tokens are cached tokens");
  }

 private:
  static bool evictable(const N* node) { return !node->is_root() && node->children.empty() && node->extra.pins == 0; }
  // The evictable leaves below a node.
  static std::vector<N*> evictable_below(N* node) {
    std::vector<N*> open{node}, found;
    while (!open.empty()) {
      N* one = open.back();
      open.pop_back();
      if (evictable(one)) found.push_back(one);
      one->children.each([&](N* child) { open.push_back(child); });
    }
    return found;
  }
  const int32_t* page(const int32_t* values, size_t token) const {
    return values ? values + token / tree.page_size : nullptr;
  }

  // How many tokens of a leaf are left if `wanted` are evicted.
  size_t kept_of(const N* leaf, size_t wanted) const {
    const size_t need = (wanted + tree.page_size - 1) / tree.page_size * tree.page_size;
    return leaf->length() > need ? leaf->length() - need : 0;
  }

  // ------------------------------------------------------------ twins

  static void part(N* node) {
    if (!node->extra.twin) return;
    node->extra.twin->extra.twin = nullptr;
    node->extra.twin = nullptr;
  }
  static void pair(N* one, N* other) {
    if (one->is_root() || one->extra.twin == other) return;
    part(one);
    part(other);
    one->extra.twin = other;
    other->extra.twin = one;
  }
  void part_all() {
    tree.each([](const std::string&, N* node) { part(node); });
  }
  static bool is_twin(const N* one, const N* other) {
    const size_t n = std::min(one->length(), other->length());
    return other->extra.twin == one && S::name_of(one) == S::name_of(other) &&
           one->depth + one->length() == other->depth + other->length() &&
           !std::memcmp(one->run->tokens.data() + one->end - n, other->run->tokens.data() + other->end - n,
                        n * sizeof(Token));
  }
  // The node here with which the path ends that ends after `offset` tokens of `node`, which is of another tree. As far as
  // it is missing, it is inserted. From there up to the first that has a twin, the nodes above `node` get theirs.
  N* counterpart(N* node, size_t offset) {
    const size_t depth = node->depth + offset;
    if (N* twin = node->extra.twin) {
      while (twin->depth >= depth) twin = twin->parent;
      return end_of(Place{twin, depth - twin->depth, depth});
    }
    std::vector<N*> above;
    for (N* one = node; !one->is_root() && !one->extra.twin; one = one->parent) above.push_back(one);
    const N* known = above.empty() ? node : above.back()->parent;
    N* at = known->is_root() ? tree.make_root(*known->name) : known->extra.twin;
    for (; !above.empty(); above.pop_back()) {
      N* one = above.back();
      const size_t n = one == node ? offset : one->length();
      const Place place = tree.walk(at, one->tokens(), n);
      if (place.length == n) at = end_of(place);
      else insert(at, false, one->tokens(), n, Values(n / tree.page_size).data(), &at);
      if (one != node) pair(one, at);
    }
    return at;
  }
  N* end_of(Place place) {
    if (!place.at_end()) ++version;
    N* node = split(place);
    touch(node);
    return node;
  }

  N* grow(N* node, bool pinned_by_caller, const Token* data, size_t n, const int32_t* values, Use use) {
    const bool extend = node->children.empty() && node->ends_its_run() && !node->extra.twin &&
                        node->extra.pins == (pinned_by_caller ? 1u : 0u) && (!policy || node->extra.used == use);
    if (extend) {
      if (with_events_) emit_stored(node, node->end, data, n);
      tree.extend_leaf(node, data, n, values);
      return node;
    }
    leave_heap(node);
    N* leaf = tree.add_leaf(node, data, n, values);
    if (with_events_) emit_stored(leaf, 0, data, n);
    return leaf;
  }
  size_t pinned_tokens() const {
    size_t found = 0;
    ++stamp_;
    for (N* node : pinned_) {
      if (!node->extra.pins) continue;
      for (; !node->is_root() && node->extra.seen != stamp_; node = node->parent) {
        node->extra.seen = stamp_;
        found += node->length();
      }
    }
    return found;
  }
  N* split(Place place) {
    N* upper = tree.split(place);
    if (upper != place.node) reorder(place.node);
    return upper;
  }
  void add_use(N* node, const N* above, Use use) {
    if (!policy) return;
    for (; node != above && !node->is_root(); node = node->parent) {
      Use& used = node->extra.used;
      used.hits += use.hits;
      used.priority = std::max(used.priority, use.priority);
    }
  }
  void touch(N* node, Awaited awaited = {}) {
    node->extra.last_use = ++clock_;
    if (awaited.since == kNoTime) awaited.since = returns_.now;
    node->extra.awaited = awaited;
    if (node->extra.heap_at != kNowhere) leave_heap(node);
    if (evictable(node)) enter_heap(node);
  }
  void append_values(N* node, size_t keep, Values* freed) const {
    if (!with_values) return;
    const size_t p = tree.page_size;
    const int32_t* values = node->run->values.data();
    freed->insert(freed->end(), values + (node->begin + keep) / p, values + node->end / p);
  }
  // Shorten an evictable leaf to `keep` tokens; with 0, remove it.
  void cut(N* leaf, size_t keep, Values* freed) {
    ++version;
    sums_known_ = false;
    append_values(leaf, keep, freed);
    part(leaf);
    if (with_events_) {
      Event event{Event::kRemoved};
      event.run = leaf->run->id;
      event.at = leaf->begin + keep;
      events.push_back(std::move(event));
    }
    if (keep) {
      tree.trim_leaf(leaf, keep);
      reorder(leaf);
      return;
    }
    leave_heap(leaf);
    const uint64_t last_use = leaf->extra.last_use;
    const Awaited awaited = leaf->extra.awaited;
    N* parent = tree.remove_leaf(leaf);
    if (parent->extra.last_use < last_use) {
      parent->extra.last_use = last_use;
      parent->extra.awaited = awaited;
    }
    settle(parent);
  }
  // After a node has lost a child or its last pin: drop an empty root, undo a split, or make the node evictable.
  void settle(N* node) {
    if (node->extra.pins) return;
    if (node->is_root()) {
      if (!node->children.empty()) return;
      tree.drop_root(node);
      ++version;  // empty matches refer to the root
    } else if (!(node->extra.twin && node->length() >= kLong) && tree.can_merge(node) &&
               node->children.any()->extra.last_use >= node->extra.last_use &&
               node->children.any()->extra.used == node->extra.used) {
      part(node);
      reorder(tree.merge(node));
      ++version;
    } else if (evictable(node) && node->extra.heap_at == kNowhere) {
      enter_heap(node);
    }
  }

  // ------------------------------------------------------------ events

  Event stored(const std::string& name, const N* node, size_t at) const {
    Event event{Event::kStored};
    event.name = name;
    event.run = node->run->id;
    event.at = at;
    if (at == 0 && !node->parent->is_root()) {
      event.parent = node->parent->run->id;
      event.parent_at = node->parent->end;
    }
    return event;
  }
  void emit_stored(const N* node, size_t at, const Token* data, size_t n) {
    Event event = stored(S::name_of(node), node, at);
    event.tokens.assign(data, data + n);
    events.push_back(std::move(event));
  }

  // ------------------------------------------------------------ heap of unpinned leaves

  static bool before(const N* a, const N* b) {
    return a->extra.key != b->extra.key ? a->extra.key < b->extra.key : a->extra.last_use < b->extra.last_use;
  }
  void put(size_t i, N* node) {
    heap_[i] = node;
    node->extra.heap_at = static_cast<uint32_t>(i);
  }
  void sift_up(size_t i, N* node) {
    for (; i && before(node, heap_[(i - 1) / 2]); i = (i - 1) / 2) put(i, heap_[(i - 1) / 2]);
    put(i, node);
  }
  void sift_down(size_t i, N* node) {
    for (size_t child; (child = 2 * i + 1) < heap_.size(); i = child) {
      if (child + 1 < heap_.size() && before(heap_[child + 1], heap_[child])) ++child;
      if (!before(heap_[child], node)) break;
      put(i, heap_[child]);
    }
    put(i, node);
  }
  static void append(std::vector<Token>* to, const N* node, size_t from, size_t most) {
    const size_t count = std::min(node->length() - from, most - to->size());
    to->insert(to->end(), node->tokens() + from, node->tokens() + from + count);
  }
  // The child of the latest run before `before`.
  static const N* newest(const N* parent, int64_t before = std::numeric_limits<int64_t>::max()) {
    const N* found = nullptr;
    parent->children.each([&](const N* child) {
      if (child->run->id < before && (!found || child->run->id > found->run->id)) found = child;
    });
    return found;
  }
  double order_of(const N* node) const {
    const CacheExtra& x = node->extra;
    if (returns_.known()) return returns_.rate(x.awaited);
    return policy ? policy(x.last_use, node->length(), node->depth + node->length(), x.used)
                  : static_cast<double>(x.last_use);
  }
  // Update the order of a leaf whose length has changed. Without a policy only its last use counts, which has not.
  void reorder(N* node) {
    if (!policy || node->extra.heap_at == kNowhere) return;
    leave_heap(node);
    enter_heap(node);
  }
  void enter_heap(N* node) {
    CacheExtra& x = node->extra;
    x.key = order_of(node);
    if (returns_.known() && (x.due = returns_.until(x.awaited)) < std::numeric_limits<double>::infinity())
      due_.emplace(x.due, node);
    heap_.push_back(node);
    sift_up(heap_.size() - 1, node);
  }
  void leave_heap(N* node) {
    const uint32_t at = node->extra.heap_at;
    if (at == kNowhere) return;
    if (!due_.empty()) due_.erase({node->extra.due, node});
    node->extra.heap_at = kNowhere;
    N* last = heap_.back();
    heap_.pop_back();
    if (last == node) return;
    if (at && before(last, heap_[(at - 1) / 2])) sift_up(at, last);
    else sift_down(at, last);
  }

  const bool with_events_;
  uint64_t clock_ = 0;
  std::vector<N*> heap_, pinned_;
  Returns returns_;
  std::set<std::pair<double, N*>> due_;
  mutable bool sums_known_ = false;
  mutable size_t leased_ = 0;
  mutable uint64_t stamp_ = 0;
};

}  // namespace radix
