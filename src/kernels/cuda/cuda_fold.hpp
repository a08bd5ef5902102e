// SPDX-License-Identifier: Apache-2.0
// A FoldKernel on a GPU: everything but the arithmetic. A fold kernel of this backend says how it cuts its work, how
// large a row's state is, and how it is launched.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "kernels/cuda/fold_params.hpp"
#include "kernels/cuda/launcher.hpp"
#include "kernels/cuda/work_items.hpp"
#include "kernels/fold.hpp"

namespace ringattn::cuda {

// They enqueue, and throw what the launch fails with.
using Merge = void (*)(const MergeParams& params, Stream stream);
using Export = void (*)(const ExportParams& params, Stream stream);

// A kernel for each element type and head_dim that is compiled.
struct CompiledFold {
  Dtype dtype;
  int head_dim;
  const Launcher* launcher;
};

// The one for a spec, which the kernel has a configuration for or not. Throws kInternal where there is none: the
// registry asks the kernel first what it can do.
const Launcher& launcher_of(std::string_view kernel, std::span<const CompiledFold> compiled, const FoldSpec& spec,
                            bool configured);

// What every kernel is told about turning scores into probabilities.
FoldParams::Softmax softmax_of(const FoldSpec& spec);

struct DeviceKernel {
  WorkShape shape{};               // without the cache, which is the device's
  std::size_t state_floats = 0;    // of a row and head
  std::size_t scratch_floats = 0;  // of a multiprocessor; zeros before the first task
  ReferenceUnit reference_unit{};  // of the state
  const Launcher* launcher = nullptr;
  Merge merge_state = nullptr;
  Export export_state = nullptr;
};

// `backend` is a CudaBackend and outlives the kernel. fold() doesn't allocate. Tasks of one kernel follow each other in
// one stream, or wait for each other: they share the kernel's scratch memory. A prepared task has tables of its own,
// and fold() only launches. The tables of others pass through a StagingRing, where the host may have to wait; what the
// last kStagingSlots of them were built from is remembered, so that the same tasks again find theirs on the device.
std::unique_ptr<FoldKernel> make_cuda_fold(const FoldSpec& spec, const DeviceKernel& kernel, Backend& backend);

std::unique_ptr<Backend> make_cuda_backend(const BackendOptions& options);

// Why no kernel of this backend can run here: no driver, no GPU, or one that is older than sm_80. Empty: they can.
std::string cuda_unavailable();

}  // namespace ringattn::cuda
