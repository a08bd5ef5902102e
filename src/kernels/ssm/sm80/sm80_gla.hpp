// SPDX-License-Identifier: Apache-2.0
// The SSM kernel `sm80_gla`, linear attention with a decay per key dim: registry entry, shared-memory layout and
// compiled kernels. gla.cuh says what is rounded.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/common/backend.hpp"
#include "kernels/ssm/cuda/ssm_params.hpp"
#include "kernels/ssm/sm80/sm80_ssd.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn::sm80 {

// Requirements of `spec` that the kernel does not support. See KernelRow::missing. Includes too little shared memory on
// a visible GPU.
std::vector<std::string> gla_missing(const SsmSpec& spec);

// `backend` must be a CudaBackend and must outlive the kernel.
std::unique_ptr<SsmKernel> make_gla(const SsmSpec& spec, Backend& backend);

inline constexpr int kGlaProducers = 256;  // threads
inline constexpr int kSubChunk = 16;       // tokens
inline constexpr int kSubChunks = kChunk / kSubChunk;

// A CTA's threads, and offsets in bytes in its shared memory. The first warps are consumers, each with kWarpDims dims
// of v.
template <int kDim, int kDimV, bool kOutputs, int kStages>
struct GlaLayout {
  static constexpr int kConsumers = kDimV / kWarpDims * 32;
  static constexpr int kThreads = kConsumers + kGlaProducers;

  static constexpr int kKeyPitch = pitch_of(kDim);
  static constexpr int kValuePitch = pitch_of(kDimV);
  static constexpr int kKeyTile = kChunk * kKeyPitch;
  static constexpr int kValueTile = kChunk * kValuePitch;

  // Layout of a stage: k, log-decays and q as they are loaded.
  static constexpr int kKeys = 0;
  static constexpr int kLogs = kKeys + kKeyTile;  // fp32 [64, kDim]
  static constexpr int kQueries = kLogs + kChunk * kDim * 4;
  static constexpr int kStageBytes = kQueries + (kOutputs ? kKeyTile : 0);

  // Memory that consumers read. With two stages, local states have two sets of tiles, and producers are a chunk further
  // ahead. For y there is only memory for one set. v has one tile more than there are sets.
  static constexpr int kSets = !kOutputs && kStages == 2 ? 2 : 1;
  static constexpr int kValueTiles = kSets + 1;
  static constexpr int kValues = kStages * kStageBytes;
  static constexpr int kStateKeys = kValues + kValueTiles * kValueTile;
  static constexpr int kSecond = kStateKeys + kKeyTile;  // kOutputs: q for the state, else the lo part of kStateKeys
  static constexpr int kScores = kSecond + kKeyTile;
  static constexpr int kChunkDecay = kScores + (kOutputs ? kChunk * kIntraChunkPitch : 0);  // fp32 [kDim]
  static constexpr int kSetBytes = kChunkDecay + kDim * 4 - kStateKeys;
  // For the producers.
  static constexpr int kSubDecays = kStateKeys + kSets * kSetBytes;       // fp32 [kSubChunks, kDim]
  static constexpr int kFarQueries = kSubDecays + kSubChunks * kDim * 4;  // three tiles of a sub-chunk
  static constexpr int kBytes = kFarQueries + (kOutputs ? 3 * kSubChunk * kKeyPitch : 0);
  static_assert(kBytes <= 227 * 1024);
};

// The kernels for one element type, dim and dim_v.
struct GlaLauncher {
  void (*load)(int stages);  // loads both kernels onto the current device
  void (*accumulate_states)(const SsmParams& params, int stages, cudaStream_t stream);
  void (*finish)(const SsmParams& params, int stages, cudaStream_t stream);
  // Shared memory of a CTA with one or two stages, in bytes.
  int (*shared)(int stages);
};

extern const GlaLauncher gla_bf16_64_64;
extern const GlaLauncher gla_bf16_64_128;
extern const GlaLauncher gla_bf16_128_64;
extern const GlaLauncher gla_bf16_128_128;

}  // namespace ringattn::sm80
