// An outline of an index' tree, to be drawn: its largest subtrees, each node with all that is below it.
//
//     [ a b c            12 tokens at and below ]
//         [ d e f         7 ]  [ g h           2 ]        left out here: a child of less than total / most tokens
#pragma once

#include "cache.h"
#include "owners.h"

namespace radix {

struct Outlined {
  const Owners::N* node;
  int64_t parent;        // its row, -1 for one at the top
  size_t below;          // tokens of its subtree, its own included
  uint64_t last_use;     // of a path through it, by the clock of `seen`; 0 if that is not known
  size_t left_out;       // children
  bool on_device;        // whether a worker has it in the memory of its device
};

// Finds where paths of one tree are in another.
class Counterpart {
 public:
  using N = Cache::N;
  explicit Counterpart(const N* root = nullptr) : node_(root) {}

  // The position after `tokens`; none if they are not there.
  Counterpart after(const Cache& seen, const Token* tokens, size_t n) const {
    Counterpart to = *this;
    if (!node_) return to;
    const size_t rest = node_->is_root() ? 0 : node_->length() - offset_, within = std::min(rest, n);
    if (within && first_difference(node_->tokens() + offset_, tokens, within) < within) return Counterpart();
    to.offset_ += within;
    if (within == n) return to;
    auto place = seen.tree.walk(const_cast<N*>(node_), tokens + within, n - within);
    if (place.length < n - within) return Counterpart();
    to.node_ = place.node;
    to.offset_ = place.offset;
    return to;
  }
  // The latest use of a path through it. Only the deepest node of a path that is used is stamped: so the nodes below are
  // looked at as well, if `deep`, but not more than a few.
  uint64_t last_use(bool deep) const {
    if (!node_ || node_->is_root()) return 0;
    uint64_t latest = node_->extra.last_use;
    std::vector<const N*> stack{node_};
    for (size_t looked = 0; deep && !stack.empty() && looked < kLooked; ++looked) {
      const N* node = stack.back();
      stack.pop_back();
      latest = std::max(latest, node->extra.last_use);
      node->children.each([&](const N* child) { stack.push_back(child); });
    }
    return latest;
  }

 private:
  static constexpr size_t kLooked = 64;
  const N* node_;
  size_t offset_ = 0;
};

// The rows of at most `most` nodes, parents before children, of namespaces that begin with `prefix`, or of the subtree of
// `top`. `total`: tokens of all their nodes.
inline std::vector<Outlined> icicle(const Owners& owners, const std::string& prefix, Owners::N* top, size_t most,
                                    const Cache& seen, size_t* total) {
  std::vector<Outlined> rows;
  std::vector<Counterpart> there;
  std::vector<std::pair<Owners::N*, int64_t>> stack;
  const auto add_tree = [&](Counterpart above) {
    while (!stack.empty()) {
      auto [node, parent] = stack.back();
      stack.pop_back();
      const Counterpart& from = parent < 0 ? above : there[static_cast<size_t>(parent)];
      there.push_back(from.after(seen, node->tokens(), node->length()));
      rows.push_back({node, parent, node->length(), there.back().last_use(node->children.empty()), 0, true});
      const auto row = static_cast<int64_t>(rows.size()) - 1;
      node->children.each([&](Owners::N* child) { stack.emplace_back(child, row); });
    }
  };
  if (top) {
    std::vector<const Owners::N*> above;
    for (const Owners::N* node = top->parent; !node->is_root(); node = node->parent) above.push_back(node);
    Counterpart place(seen.tree.find_root(Owners::S::name_of(top)));
    for (auto node = above.rbegin(); node != above.rend(); ++node)
      place = place.after(seen, (*node)->tokens(), (*node)->length());
    stack.emplace_back(top, -1);
    add_tree(place);
  } else {
    for (auto& [name, root] : owners.tree.roots()) {
      if (name.compare(0, prefix.size(), prefix)) continue;
      root->children.each([&](Owners::N* child) { stack.emplace_back(child, -1); });
      add_tree(Counterpart(seen.tree.find_root(name)));
    }
  }
  *total = 0;
  for (size_t i = rows.size(); i--;) {  // children before parents
    if (rows[i].parent < 0) {
      *total += rows[i].below;
      continue;
    }
    Outlined& parent = rows[static_cast<size_t>(rows[i].parent)];
    parent.below += rows[i].below;
    parent.last_use = std::max(parent.last_use, rows[i].last_use);
  }
  // The largest; of equal ones those that come first, so that no child is without its parent.
  std::vector<size_t> kept;
  for (size_t i = 0; i < rows.size(); ++i)
    if (rows[i].below >= (*total + most - 1) / most) kept.push_back(i);
  if (kept.size() > most) {
    std::nth_element(kept.begin(), kept.begin() + static_cast<std::ptrdiff_t>(most), kept.end(), [&](size_t a, size_t b) {
      return rows[a].below != rows[b].below ? rows[a].below > rows[b].below : a < b;
    });
    kept.resize(most);
    std::sort(kept.begin(), kept.end());
  }
  const auto on_device = owners.on_device();
  std::vector<int64_t> place(rows.size(), -1);
  std::vector<Outlined> found;
  for (size_t i : kept) {
    place[i] = static_cast<int64_t>(found.size());
    Outlined row = rows[i];
    row.left_out = row.node->children.size();
    row.on_device = !on_device || on_device->count(row.node);
    if (row.parent >= 0) {
      row.parent = place[static_cast<size_t>(row.parent)];
      --found[static_cast<size_t>(row.parent)].left_out;
    }
    found.push_back(row);
  }
  return found;
}

}  // namespace radix
