// Alignment of two arrays of tokens after a short section in which they differ.
#pragma once

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "structure.h"

namespace radix {

constexpr size_t kSkipped[] = {1, 16, 48};  // anchors are taken this many tokens after the difference; last, `span`

// Given that token `at` of `one` and token `to` of `other` differ, finds the position in each from which on they are
// equal for at least `anchor + least` tokens. Some tokens after `to` (see kSkipped), an anchor of `anchor` tokens of
// `other` is searched for in `one`, and the equal section around it is extended to the left. The first anchor that is
// found in such a section decides. Returns nothing if there is none, or if the differing section of `one` has more than
// `span` tokens.
inline std::optional<std::pair<size_t, size_t>> realigned(const Token* one, size_t n, const Token* other, size_t m,
                                                          size_t at, size_t to, size_t span, size_t anchor, size_t least) {
  if (at > n || to > m || !anchor || anchor > m || least > m) return std::nullopt;
  span = std::min(span, n + m);
  const size_t size = anchor + least;
  const size_t stop = std::min(n, at + 2 * span + anchor);  // an anchor ends here at the latest
  for (size_t i = 0; i <= std::size(kSkipped); ++i) {
    const size_t begin = to + (i < std::size(kSkipped) ? kSkipped[i] : span);
    if (begin + size > m) return std::nullopt;
    size_t found = at;
    for (; found + anchor <= stop; ++found) {
      found = std::find(one + found, one + stop, other[begin]) - one;
      if (found + anchor <= stop && first_difference(one + found, other + begin, anchor) == anchor) break;
    }
    if (found + anchor > stop || found + size > n) continue;
    if (first_difference(one + found, other + begin, size) < size) continue;
    size_t end = found, other_end = begin;
    for (; end > at && other_end > to && one[end - 1] == other[other_end - 1]; --end) --other_end;
    if (end - at > span) return std::nullopt;
    return std::make_pair(end, other_end);
  }
  return std::nullopt;
}

}  // namespace radix
