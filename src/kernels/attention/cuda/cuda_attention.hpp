// SPDX-License-Identifier: Apache-2.0
// An AttentionKernel on a GPU: everything except the device code. A kernel of this backend states its work tile shape,
// the size of a row's state and its launcher.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/cuda/work_tiles.hpp"
#include "kernels/common/cuda/multiprocessors.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn::cuda {

// Both enqueue, and throw if the launch fails.
using Merge = void (*)(const MergeParams& params, Stream stream);
using Export = void (*)(const ExportParams& params, Stream stream);

// A compiled kernel for one element type and head_dim.
template <class AnyLauncher>
struct Compiled {
  Dtype dtype;
  int head_dim;
  const AnyLauncher* launcher;
};
using CompiledAttention = Compiled<Launcher>;

// Returns the launcher for a spec. Throws kInternal if none is compiled or the kernel has no configuration for it
// (`configured` is false). The registry has asked the kernel before whether it supports the spec.
template <class AnyLauncher, std::size_t kCount>
const AnyLauncher& launcher_of(std::string_view kernel, const Compiled<AnyLauncher> (&compiled)[kCount],
                               const AttentionSpec& spec, bool configured) {
  for (const Compiled<AnyLauncher>& entry : compiled) {
    if (configured && entry.dtype == spec.dtype && entry.head_dim == spec.head_dim) return *entry.launcher;
  }
  fail(ErrorCode::kInternal, std::string(kernel) + " was made for " + describe(spec), "it can't do that");
}

// Softmax parameters that all kernels share.
AttentionParams::Softmax softmax_of(const AttentionSpec& spec);

struct DeviceKernel {
  WorkTileShape shape{};           // without cache_bytes and ctas, which depend on the device
  std::size_t state_floats = 0;    // per row and head
  std::size_t scratch_floats = 0;  // per multiprocessor; zero-filled before the first task
  OffsetScale offset_scale{};      // unit of the state's softmax_offset
  const Launcher* launcher = nullptr;
  Merge merge_state = nullptr;
  Export export_state = nullptr;
};

// `backend` is a CudaBackend and outlives the kernel. attend() doesn't allocate. Tasks of one kernel run in one stream,
// or wait for each other, because they share the kernel's scratch memory. A prepared task has tables of its own, and
// attend() only launches. The tables of other tasks are staged through a StagingRing, where the host may have to wait.
// The inputs of the last kStagingSlots tables are remembered, so that a repeated task reuses its tables on the device.
std::unique_ptr<AttentionKernel> make_cuda_attention(const AttentionSpec& spec, const DeviceKernel& kernel,
                                                     Backend& backend);

}  // namespace ringattn::cuda
