// SPDX-License-Identifier: Apache-2.0
// Times work enqueued on a GPU: many consecutive launches in a CUDA graph, which is replayed warm.
#pragma once

#include <cstdint>
#include <vector>

#include "base/cuda.hpp"
#include "base/deadline.hpp"
#include "kernels/common/backend.hpp"

namespace ringattn {

inline constexpr int kReplays = 11;
inline constexpr double kWarmSeconds = 0.1;  // of replays before the first that counts

// Microseconds of a launch in each replay of a graph of that many launches; enqueue(i) puts the i-th on the backend's
// stream.
template <class Enqueue>
std::vector<double> time_graph(Backend& backend, std::int64_t launches, Enqueue enqueue) {
  const cudaStream_t stream = cuda_stream(backend.stream());
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  try {
    for (std::int64_t i = 0; i < launches; ++i) enqueue(i);
  } catch (...) {  // the stream is used again: it must not stay in its capture
    cudaStreamEndCapture(stream, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    throw;
  }
  check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  check_cuda(cudaGraphInstantiateWithFlags(&executable, graph, 0), "cudaGraphInstantiate");
  const auto marks = backend.make_events(2, true);
  const auto replay = [&] {
    marks->record(0, backend.stream());
    check_cuda(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
    marks->record(1, backend.stream());
    marks->synchronize(1, Deadline::after(600.0), {});
    return marks->elapsed(0, 1);
  };
  double warm = 0.0;
  while (warm < kWarmSeconds) warm += replay();
  std::vector<double> times;
  for (int i = 0; i < kReplays; ++i) times.push_back(replay() * 1e6 / static_cast<double>(launches));
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  return times;
}

}  // namespace ringattn
