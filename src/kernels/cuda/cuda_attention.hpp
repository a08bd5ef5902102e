// SPDX-License-Identifier: Apache-2.0
// A AttentionKernel on a GPU: everything but the arithmetic. A fold kernel of this backend says how it cuts its work,
// how large a row's state is, and how it is launched.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "kernels/attention.hpp"
#include "kernels/cuda/attention_params.hpp"
#include "kernels/cuda/launcher.hpp"
#include "kernels/cuda/multiprocessors.hpp"
#include "kernels/cuda/work_tiles.hpp"
#include "kernels/registry.hpp"

namespace ringattn::cuda {

// They enqueue, and throw what the launch fails with.
using Merge = void (*)(const MergeParams& params, Stream stream);
using Export = void (*)(const ExportParams& params, Stream stream);

// A kernel for each element type and head_dim that is compiled.
template <class AnyLauncher>
struct Compiled {
  Dtype dtype;
  int head_dim;
  const AnyLauncher* launcher;
};
using CompiledAttention = Compiled<Launcher>;

// The one for a spec, which the kernel has a configuration for or not. Throws kInternal where there is none: the
// registry asks the kernel first what it can do.
template <class AnyLauncher, std::size_t kCount>
const AnyLauncher& launcher_of(std::string_view kernel, const Compiled<AnyLauncher> (&compiled)[kCount],
                               const AttentionSpec& spec, bool configured) {
  for (const Compiled<AnyLauncher>& entry : compiled) {
    if (configured && entry.dtype == spec.dtype && entry.head_dim == spec.head_dim) return *entry.launcher;
  }
  fail(ErrorCode::kInternal, std::string(kernel) + " was made for " + describe(spec), "it can't do that");
}

// What every kernel is told about turning scores into probabilities.
AttentionParams::Softmax softmax_of(const AttentionSpec& spec);

struct DeviceKernel {
  WorkTileShape shape{};           // without the cache, which is the device's
  std::size_t state_floats = 0;    // of a row and head
  std::size_t scratch_floats = 0;  // of a multiprocessor; zeros before the first task
  OffsetScale offset_scale{};      // of the state
  const Launcher* launcher = nullptr;
  Merge merge_state = nullptr;
  Export export_state = nullptr;
};

// `backend` is a CudaBackend and outlives the kernel. fold() doesn't allocate. Tasks of one kernel follow each other in
// one stream, or wait for each other: they share the kernel's scratch memory. A prepared task has tables of its own,
// and fold() only launches. The tables of others pass through a StagingRing, where the host may have to wait; what the
// last kStagingSlots of them were built from is remembered, so that the same tasks again find theirs on the device.
std::unique_ptr<AttentionKernel> make_cuda_attention(const AttentionSpec& spec, const DeviceKernel& kernel,
                                                     Backend& backend);

std::unique_ptr<Backend> make_cuda_backend(const BackendOptions& options);

// Why no kernel of this backend can run here: no driver, no GPU, or one that is older than sm_80. Empty: they can.
std::string cuda_unavailable();

}  // namespace ringattn::cuda
