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
  // Imports torch. `on_gpu`: it measures on the first GPU that this process sees. `threads`: on a CPU.
  TorchPeer(bool on_gpu, int threads, const Deadline& deadline);

  // Empty: it can't be measured, and why_not() says why.
  const std::string& version() const { return version_; }
  const std::string& why_not() const { return why_not_; }

  // The point of the same job on the same device, with `samples` samples (0: enough for a figure). Its error says why
  // there is no figure.
  BenchPoint measure(const BenchPoint& ours, std::int64_t samples, const Deadline& deadline);

 private:
  PythonProcess python_;
  std::string version_;
  std::string why_not_;
};

}  // namespace ringattn
