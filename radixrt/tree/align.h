// Where two arrays of tokens go on alike behind a short stretch in which they differ.
#pragma once

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "structure.h"

namespace radix {

constexpr size_t kSkipped[] = {1, 16, 48};  // tokens of `other`, behind which it is tried to align them; then `span`

// (token of `one`, token of `other`) from where on both are the same for at least `anchor + least` tokens, given that
// token `at` of one and `to` of the other differ: the first that an anchor, so many tokens of `other`, leads to. Nothing
// where `one` has more than `span` tokens between.
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
