// SPDX-License-Identifier: Apache-2.0
// Which keys a query sees. One definition for the plan and every kernel; the oracle has its own, on purpose.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"

namespace ringattn {

// A query at position p of its sequence sees keys p − left … p + right inclusive; −1 is unlimited.
// Full attention is {−1, −1}, causal attention {−1, 0}; anything else is a sliding window.
struct Mask {
  std::int64_t left = -1;
  std::int64_t right = -1;

  bool is_full() const { return left < 0 && right < 0; }
  bool is_causal() const { return left < 0 && right == 0; }
  bool operator==(const Mask&) const = default;
};

// Keys [begin, end) of a sequence.
struct KeyRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  RINGATTN_HOST_DEVICE bool empty() const { return begin >= end; }
};

// The keys that the query at `position` sees of a sequence of `key_length` keys. `position` may lie outside [0,
// key_length).
RINGATTN_HOST_DEVICE inline KeyRange visible_keys(const Mask& mask, std::int64_t position, std::int64_t key_length) {
  const std::int64_t first = position - mask.left;
  const std::int64_t last = position + mask.right;
  return {mask.left < 0 || first < 0 ? 0 : first, mask.right < 0 || last >= key_length ? key_length : last + 1};
}

}  // namespace ringattn
