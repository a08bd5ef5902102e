// SPDX-License-Identifier: Apache-2.0
// PyTorch as a peer of `bench --quick`: a python3 that runs torch_peer.py, which is compiled into the program.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "launch/bench_points.hpp"
#include "launch/python_process.hpp"

namespace ringattn {

class TorchPeer {
 public:
  // Imports torch. `on_gpu`: PyTorch measures on the first GPU that this process sees. `threads`: the number of CPU
  // threads otherwise.
  TorchPeer(bool on_gpu, int threads, const Deadline& deadline);

  // Empty if PyTorch can't be measured; why_not() has the reason.
  const std::string& version() const { return version_; }
  const std::string& why_not() const { return why_not_; }

  // Measures the same job on the same device with `samples` samples (0: enough for a stable figure). If that fails,
  // `error` of the point has the reason.
  BenchPoint measure(const BenchPoint& ours, std::int64_t samples, const Deadline& deadline);

 private:
  PythonProcess python_;
  std::string version_;
  std::string why_not_;
};

}  // namespace ringattn
