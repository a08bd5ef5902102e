// SPDX-License-Identifier: Apache-2.0
// The RoPE kernel of all GPUs, `cuda_rope`: its registry entry, launch parameters and launches. It reads and writes
// each row once, 16 bytes at a time if the rows are aligned, and has the bits of `cpu_rope`.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>

#include "kernels/common/cuda/divider.hpp"
#include "kernels/rope/rope.hpp"

namespace ringattn::cuda {

// `backend` is a CudaBackend and outlives the kernel.
std::unique_ptr<RopeKernel> make_cuda_rope(const RopeSpec& spec, Backend& backend);

// Strides in elements. [tokens, heads, head_dim]
struct RopeRows {
  const void* x;
  void* y;
  std::int64_t x_token_stride, x_head_stride;
  std::int64_t y_token_stride, y_head_stride;
};

// Lanes of a warp read frequencies of different pairs. As kernel arguments these would be one constant-bank access for
// each lane.
struct RopeParams {
  RowRotation by;
  const std::uint8_t* axes;  // [pairs]; null: one axis
  RopeRows rows[kMaxRopeTensors];
  std::int64_t tokens;
  const void* positions;  // as RopePositions
  std::int64_t axis_stride;
  std::int64_t first;
  std::int32_t heads;        // of both tensors
  std::int32_t first_heads;  // of the first one
  std::int32_t tile_tokens;  // tokens per CTA
  std::int32_t units;        // per row, as rope.cu divides it
  std::int32_t turned;       // units that rotate; the others copy
  Divider by_pairs, by_units, by_heads;
  bool is_int64, inverse;
};

inline constexpr int kRopeThreads = 256;
// A unit is what a thread loads at once (RowUnit in rotation.cuh).
struct RopeUnit {
  int pairs;     // that a rotating unit has
  int elements;  // that a copying unit has
};
// Vectors of a rotating unit of interleaved pairs. Half-split pairs have a vector of first and one of second elements.
enum class RopeVectors : std::uint8_t {
  kElements,  // rows are not aligned: of one pair, element by element
  kOne,       // of 16 bytes
  kTwo,       // of 16 bytes
};
inline RopeUnit rope_unit(Dtype dtype, RopePairs pairs, RopeVectors vectors) {
  const bool interleaved = pairs == RopePairs::kInterleaved;
  const bool aligned = vectors != RopeVectors::kElements;
  const int elements = aligned ? 16 / static_cast<int>(size_of(dtype)) : interleaved ? 2 : 1;
  if (!interleaved) return {elements, elements};
  return {vectors == RopeVectors::kTwo ? elements : elements / 2, elements};
}

// Loads the kernels of this dtype onto the current device (load_kernel.hpp).
void load_rope(Dtype dtype, RopePairs pairs);
void launch_rope(const RopeParams& params, Dtype dtype, RopePairs pairs, RopeVectors vectors, cudaStream_t stream);

}  // namespace ringattn::cuda
