// When paths come back: what the order of eviction knows of it, without Python.
//
// A path was last used for something of a `kind`, at a time `since`. For each kind there is a row of rates: the most hits
// that a cached token of such an age is worth per second. Ages are in steps, so that a rate changes a few times only.
//
//     age in seconds    edges[0] = 0    edges[1]    edges[2]    ...
//     rate of kind 3       .01    |        .05     |    .02     |  ...  the last one holds for ever
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace radix {

constexpr double kNoTime = -std::numeric_limits<double>::infinity();

struct Awaited {
  uint32_t kind = 0;
  double since = kNoTime;
};

class Returns {
 public:
  double now = 0;

  bool known() const { return !edges_.empty(); }
  size_t steps() const { return edges_.size(); }
  size_t kinds() const { return edges_.empty() ? 0 : rates_.size() / edges_.size(); }
  // `rates`: one row of edges.size() for each kind.
  void set(std::vector<double> edges, std::vector<double> rates) {
    edges_ = std::move(edges);
    rates_ = std::move(rates);
  }
  // A kind without a row counts as kind 0.
  double rate(const Awaited& awaited) const {
    const size_t kind = awaited.kind < kinds() ? awaited.kind : 0;
    return rates_[kind * edges_.size() + step(awaited)];
  }
  // When the rate may be another one.
  double until(const Awaited& awaited) const {
    const size_t next = step(awaited) + 1;
    return next < edges_.size() ? awaited.since + edges_[next] : std::numeric_limits<double>::infinity();
  }

 private:
  size_t step(const Awaited& awaited) const {
    // As `until` rounds, so that a rate has changed once its time has come.
    size_t low = 0, high = edges_.size();
    while (high - low > 1) {
      const size_t middle = (low + high) / 2;
      (awaited.since + edges_[middle] <= now ? low : high) = middle;
    }
    return low;
  }
  std::vector<double> edges_, rates_;
};

}  // namespace radix
