// SPDX-License-Identifier: Apache-2.0
// Work captured in a CUDA graph. For tests that link ringattn_cuda.
#pragma once

#include <functional>

#include "base/cuda.hpp"

namespace ringattn::testing {

// A graph of the work that `enqueue` puts on the stream.
class Graph {
 public:
  Graph(Stream stream, const std::function<void()>& enqueue) : stream_(cuda_stream(stream)) {
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    enqueue();
    check_cuda(cudaStreamEndCapture(stream_, &graph_), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiateWithFlags(&executable_, graph_, 0), "cudaGraphInstantiate");
  }
  ~Graph() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch() const { check_cuda(cudaGraphLaunch(executable_, stream_), "cudaGraphLaunch"); }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace ringattn::testing
