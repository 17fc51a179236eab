// The tree of an index: who holds which path, counted, so that overlapping claims of one owner can be withdrawn singly.
#pragma once

#include "structure.h"

namespace radix {

struct OwnersExtra {
  std::vector<std::pair<int32_t, int32_t>> counts;  // (owner, count), by owner

  void inherit(const OwnersExtra& lower) { counts = lower.counts; }
  size_t bytes() const { return counts.capacity() * sizeof(counts[0]); }

  bool has(int32_t owner) const {
    auto found = std::lower_bound(counts.begin(), counts.end(), std::make_pair(owner, INT32_MIN));
    return found != counts.end() && found->first == owner;
  }
  void add(int32_t owner, int32_t by) {  // a count that falls to 0 goes
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

  // Count `owner` on the tokens [start, n) of the path. std::out_of_range when the path is not held up to `start`.
  void add(const std::string& name, const Token* tokens, size_t n, int32_t owner, size_t start) {
    N* node = tree.find_root(name);
    if (start) {
      if (!node) throw std::out_of_range("start");
      auto known = tree.walk(node, tokens, start);
      if (known.length < start) throw std::out_of_range("start");
      if (n == start) return;
      node = tree.split(known);
    } else if (n) {
      node = tree.make_root(name);
    } else {
      return;
    }
    auto place = tree.walk(node, tokens + start, n - start);
    N* last = tree.split(place);
    for (N* held = last; held != node; held = held->parent) held->extra.add(owner, 1);
    const size_t there = start + place.length;
    if (there == n) return;
    if (last->children.empty() && last->ends_its_run() && last->extra.only(owner) && place.length == 0) {
      tree.extend_leaf(last, tokens + there, n - there, nullptr);
    } else {
      tree.add_leaf(last, tokens + there, n - there, nullptr)->extra.add(owner, 1);
    }
  }
  // Take one count of `owner` from the tokens [keep, n) of the path, as far as it is held.
  void remove(const std::string& name, const Token* tokens, size_t n, int32_t owner, size_t keep) {
    N* root = tree.find_root(name);
    if (!root || keep >= n) return;
    auto kept = tree.walk(root, tokens, keep);
    if (kept.length < keep) return;
    N* top = tree.split(kept);
    N* bottom = tree.split(tree.walk(top, tokens + keep, n - keep));
    for (N* node = bottom; node != top; node = node->parent) node->extra.add(owner, -1);
    prune(bottom);
  }
  void remove_owner(int32_t owner) {
    std::vector<N*> nodes;  // parents first
    tree.each([&](const std::string&, N* node) {
      node->extra.drop(owner);
      nodes.push_back(node);
    });
    for (auto node = nodes.rbegin(); node != nodes.rend(); ++node)
      if (idle(*node)) drop_if_empty(tree.remove_leaf(*node));
  }
  // For each owner the length of the longest prefix of `tokens` that it holds from the root on.
  Held match(const std::string& name, const Token* tokens, size_t n) const {
    Held held;                                 // those that fell away
    std::vector<int32_t> active;               // those that hold all of tokens[:at]
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
  void check() const {
    tree.check();
    tree.each([&](const std::string&, N* node) {
      if (idle(node)) throw std::logic_error("a leaf has an owner");
      for (auto& [owner, count] : node->extra.counts)
        if (count <= 0) throw std::logic_error("an owner is counted at least once");
    });
    for (auto& [name, root] : tree.roots())
      if (root->children.empty()) throw std::logic_error("an empty namespace is dropped");
  }

 private:
  static bool idle(const N* node) { return node->children.empty() && node->extra.counts.empty(); }
  void drop_if_empty(N* node) {
    if (node->is_root() && node->children.empty()) tree.drop_root(node);
  }
  void prune(N* node) {
    while (!node->is_root() && idle(node)) node = tree.remove_leaf(node);
    drop_if_empty(node);
  }
};

}  // namespace radix
