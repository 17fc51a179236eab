// The tree of an index: which owners have each path. Each node counts an owner's claims, so that overlapping claims of
// one owner can be withdrawn one by one.
//
// A claim is a path from the root, or a run of an owner's own tree, as its events describe it:
//
//     run 1  [ a b c d e f ]            below the root
//     run 2        [ x y ]              below the first 3 tokens of run 1: its path is a b c x y
//
// For a run, the node at which it ends is stored. When a node is split, the existing object keeps the lower part, so the
// stored node stays valid, and its path never has to be walked from the root.
#pragma once

#include <optional>
#include <unordered_set>

#include "structure.h"

namespace radix {

struct OwnersExtra {
  std::vector<std::pair<int32_t, int32_t>> counts;  // (owner, count), by owner
  uint32_t ends = 0;                                // runs that end here

  void inherit(const OwnersExtra& lower) { counts = lower.counts; }
  size_t bytes() const { return counts.capacity() * sizeof(counts[0]); }

  bool has(int32_t owner) const {
    auto found = std::lower_bound(counts.begin(), counts.end(), std::make_pair(owner, INT32_MIN));
    return found != counts.end() && found->first == owner;
  }
  void add(int32_t owner, int32_t by) {  // a count that falls to 0 is erased
    auto found = std::lower_bound(counts.begin(), counts.end(), std::make_pair(owner, INT32_MIN));
    if (found == counts.end() || found->first != owner) {
      if (by > 0) counts.insert(found, {owner, by});
    } else if ((found->second += by) <= 0) {
      counts.erase(found);
    }
  }
  void drop(int32_t owner) { add(owner, INT32_MIN / 2); }
  bool only(int32_t owner) const { return counts.size() == 1 && counts[0] == std::make_pair(owner, 1); }
};

class Owners {
 public:
  using S = Structure<OwnersExtra>;
  using N = S::N;
  using Held = std::vector<std::pair<int32_t, size_t>>;

  Owners() : tree(1) {}
  S tree;

  // ------------------------------------------------------------ paths

  // Add one claim of `owner` to all of the path.
  void add(const std::string& name, const Token* tokens, size_t n, int32_t owner) {
    if (n) claim(tree.make_root(name), tokens, n, owner);
  }
  // Remove one claim of `owner` from the path, or from the part of it that is in the tree.
  void remove(const std::string& name, const Token* tokens, size_t n, int32_t owner) {
    N* root = tree.find_root(name);
    if (!root || !n) return;
    N* bottom = tree.split(tree.walk(root, tokens, n));
    give_up(bottom, root, owner);
    prune(bottom);
  }

  // ------------------------------------------------------------ runs

  // Append `tokens` to run `id`, which has `at` tokens. If `at` is 0, the run is new, and begins after the first
  // `parent_at` tokens of run `parent`, or at the root if `parent_at` is 0. Throws std::out_of_range if `at`, `parent` or
  // `name` do not agree with the owner's runs.
  void store(int32_t owner, const std::string& name, int64_t id, size_t at, int64_t parent, size_t parent_at,
             const Token* tokens, size_t n) {
    auto& runs = runs_[owner];
    auto found = runs.find(id);
    if (at ? found == runs.end() || found->second.length() != at : found != runs.end()) throw std::out_of_range("at");
    if (!n) throw std::out_of_range("ids");
    if (at) {
      End& run = found->second;
      --run.node->extra.ends;
      run.node = claim(run.node, tokens, n, owner);
      ++run.node->extra.ends;
      return;
    }
    N* top;
    if (parent_at) {
      auto above = runs.find(parent);
      if (above == runs.end() || above->second.length() < parent_at) throw std::out_of_range("parent_at");
      if (S::name_of(above->second.node) != name) throw std::out_of_range("namespace");
      top = tree.split(above->second.place(parent_at));
    } else {
      top = tree.make_root(name);
    }
    const size_t begin = top->depth + top->length();
    N* node = claim(top, tokens, n, owner);
    ++node->extra.ends;
    runs[id] = {node, begin};
  }
  // Shorten a run to its first `keep` tokens; with 0, remove it. Throws std::out_of_range if it has fewer.
  // `removed` receives what was cut off, if it is given.
  struct Removed {
    std::string name;
    size_t depth = 0, length = 0;  // tokens above it, and its own
    std::vector<Token> first;      // the first kShown of them, or fewer if the end of a node comes before
  };
  static constexpr size_t kShown = 8;
  void cut(int32_t owner, int64_t id, size_t keep, Removed* removed = nullptr) {
    auto& runs = runs_[owner];
    auto found = runs.find(id);
    if (found == runs.end() || found->second.length() < keep) throw std::out_of_range("run");
    N* bottom = found->second.node;
    N* top = tree.split(found->second.place(keep));
    if (removed) describe(found->second, top, removed);
    give_up(bottom, top, owner);
    --bottom->extra.ends;
    if (keep) {
      ++top->extra.ends;
      found->second.node = top;
    } else {
      runs.erase(found);
    }
    prune(bottom);
  }

  // ------------------------------------------------------------ both

  // Remove all claims of an owner.
  void remove_owner(int32_t owner) {
    for (auto& [id, run] : runs_[owner]) --run.node->extra.ends;
    runs_.erase(owner);
    std::vector<N*> nodes;  // parents first
    tree.each([&](const std::string&, N* node) {
      node->extra.drop(owner);
      nodes.push_back(node);
    });
    for (auto node = nodes.rbegin(); node != nodes.rend(); ++node)
      if (idle(*node)) drop_if_empty(tree.remove_leaf(*node));
  }
  // For each owner, the length of the longest prefix of `tokens` that it has.
  Held match(const std::string& name, const Token* tokens, size_t n) const {
    Held held;                                 // owners whose prefix has ended
    std::vector<int32_t> active;               // owners that have all of tokens[:at]
    N* node = tree.find_root(name);
    size_t at = 0;
    while (node && at < n && (node = node->children.find(tokens + at, 1))) {
      if (at == 0)
        for (auto& [owner, count] : node->extra.counts) active.push_back(owner);
      auto gone = std::stable_partition(active.begin(), active.end(), [&](int32_t o) { return node->extra.has(o); });
      for (auto owner = gone; owner != active.end(); ++owner) held.emplace_back(*owner, at);
      active.erase(gone, active.end());
      if (active.empty()) return held;
      const size_t same = first_difference(node->tokens(), tokens + at, std::min(node->length(), n - at));
      at += same;
      if (same < node->length()) break;
    }
    for (int32_t owner : active) held.emplace_back(owner, at);
    return held;
  }
  // The nodes that are in the memory of devices: those of runs with ids above 0, as what workers have in their hosts'
  // memory has others (see worker/cache/host_tier.py). None if there are no others.
  std::optional<std::unordered_set<const N*>> on_device() const {
    std::unordered_set<const N*> found;
    bool all = true;
    for (auto& [owner, runs] : runs_)
      for (auto& [id, run] : runs) all = all && id > 0;
    if (all) return std::nullopt;
    for (auto& [owner, runs] : runs_)
      for (auto& [id, run] : runs)
        for (const N* node = run.node; id > 0 && !node->is_root(); node = node->parent)
          if (!found.insert(node).second) break;  // all above it are there as well
    return found;
  }
  // The node that ends with the token `end` of the tree's run `id`; null if there is none. Walks the tree.
  N* find(int64_t id, size_t end) const {
    N* found = nullptr;
    tree.each([&](const std::string&, N* node) {
      if (node->run->id == id && node->end == end) found = node;
    });
    return found;
  }
  void check() const {
    auto require = [](bool holds, const char* rule) {
      if (!holds) throw std::logic_error(rule);
    };
    tree.check();
    std::unordered_map<const N*, uint32_t> ends;
    for (auto& [owner, runs] : runs_)
      for (auto& [id, run] : runs) {
        require(run.length() > 0, "a run has tokens");
        ++ends[run.node];
      }
    size_t ended = 0;
    tree.each([&](const std::string&, N* node) {
      require(!idle(node), "a leaf has an owner");
      auto found = ends.find(node);
      require(node->extra.ends == (found == ends.end() ? 0 : found->second), "a node counts the runs that end with it");
      ended += found != ends.end();
      for (auto& [owner, count] : node->extra.counts) require(count > 0, "an owner is counted at least once");
    });
    require(ended == ends.size(), "a run ends with a node of the tree");
    for (auto& [name, root] : tree.roots()) require(!root->children.empty(), "an empty namespace is dropped");
  }

 private:
  struct End {
    N* node;
    size_t begin;  // tokens above the run

    size_t length() const { return node->depth + node->length() - begin; }
    // The position after its first `tokens` tokens.
    S::Place place(size_t tokens) const {
      const size_t depth = begin + tokens;
      N* at = node;
      while (at->depth >= depth && !at->is_root()) at = at->parent;
      return {at, depth - at->depth, depth};
    }
  };

  // Add one claim of `owner` to `tokens` below the end of `top`. Returns the node at which they end.
  N* claim(N* top, const Token* tokens, size_t n, int32_t owner) {
    auto place = tree.walk(top, tokens, n);
    N* last = tree.split(place);
    for (N* node = last; node != top; node = node->parent) node->extra.add(owner, 1);
    if (place.length == n) return last;
    // The leaf may be extended only if no other claim ends at its end.
    if (!place.length && last->children.empty() && last->ends_its_run() && last->extra.only(owner) && !last->extra.ends) {
      tree.extend_leaf(last, tokens, n, nullptr);
      return last;
    }
    N* leaf = tree.add_leaf(last, tokens + place.length, n - place.length, nullptr);
    leaf->extra.add(owner, 1);
    return leaf;
  }
  static void describe(const End& run, const N* top, Removed* removed) {
    removed->name = S::name_of(run.node);
    removed->depth = top->depth + top->length();
    removed->length = run.node->depth + run.node->length() - removed->depth;
    if (!removed->length) return;
    const N* first = run.node;
    while (first->parent != top) first = first->parent;
    removed->first.assign(first->tokens(), first->tokens() + std::min(kShown, first->length()));
  }
  // Remove one claim of `owner` from the nodes from `bottom` up to `top`, exclusive.
  void give_up(N* bottom, N* top, int32_t owner) {
    for (N* node = bottom; node != top; node = node->parent) node->extra.add(owner, -1);
  }
  static bool idle(const N* node) {
    return node->children.empty() && node->extra.counts.empty() && !node->extra.ends;
  }
  void drop_if_empty(N* node) {
    if (node->is_root() && node->children.empty()) tree.drop_root(node);
  }
  void prune(N* node) {
    while (!node->is_root() && idle(node)) node = tree.remove_leaf(node);
    drop_if_empty(node);
  }
  std::unordered_map<int32_t, std::unordered_map<int64_t, End>> runs_;  // by owner and run id
};

}  // namespace radix
