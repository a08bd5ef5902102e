// SPDX-License-Identifier: Apache-2.0
// The streams that the ranges of heads of a scan are folded and finished in: the first range in the caller's, each
// other one on a device in a stream of its own. A launch ends in a wave of CTAs that doesn't fill the device; another
// range's CTAs fill it. Where work is done when its call returns, all ranges are the caller's stream.
//
// It knows nothing of what is enqueued. The streams take their turn in the order of arrival, so that ranges that are
// enqueued one behind the other have the device one behind the other, but for those waves.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/backend.hpp"

namespace ringattn {

class RangeStreams {
 public:
  // The backend outlives the object.
  RangeStreams(Backend& backend, std::size_t ranges);

  // Calls work(), between which and the caller's stream the ranges' streams fork and join: what they do is behind what
  // `stream` has so far, and what `stream` does from then on is behind them. They join after a failure, too.
  void run(Stream stream, const std::function<void()>& work);
  // Inside of run().
  Stream of(std::size_t range) const;

 private:
  void fork();
  void join();

  Stream callers_;
  std::vector<std::unique_ptr<StreamBeside>> beside_;  // of the ranges behind the first, or null
};

}  // namespace ringattn
