// SPDX-License-Identifier: Apache-2.0
// The library's front door for the products around a latent (kernels/batched_gemm.hpp): rows of heads times a matrix
// for each head. A layer that keeps its queries and outputs in the latent absorbs w_uk into the one and takes the other
// back by w_uv; both matrices are views of kv_b_proj as it lies.
//
//   BatchedGemm absorb({query_absorption(spec), spec.heads}, options);
//   absorb.enqueue({q_nope, w_uk.transposed(), q_in_latent}, stream);   // kernels, once; no wait, no allocation
//
// Ranks have no part in it: each multiplies the rows that it has, and the bits of a row depend on it, its head's
// matrix, the kernel, the device model and the build alone. They are those that Mla and MlaDecode make of the
// same matrices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/backend.hpp"
#include "kernels/batched_gemm.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

using BatchedGemmChoice = KernelChoice<BatchedGemmSpec>;

// Plain data.
struct BatchedGemmJob {
  BatchedGemmSpec spec;
  std::int64_t heads = 128;  // the most that a call multiplies; of rows it may have any number
};

// Nothing here changes a bit of the result, but for another kernel.
struct BatchedGemmOptions {
  KernelRequest kernel;
  int threads = 0;  // of a host kernel; 0: all processors of this process
  int device = 0;   // of a device kernel
};

class BatchedGemm {
 public:
  // Prepares: kernel, memory. Not collective. Throws Error: kUsage (the job contradicts itself), kUnsupported (no
  // kernel), kMemory.
  BatchedGemm(BatchedGemmJob job, BatchedGemmOptions options);
  ~BatchedGemm();
  BatchedGemm(BatchedGemm&&) noexcept;
  BatchedGemm& operator=(BatchedGemm&&) = delete;

  const BatchedGemmJob& job() const;
  const BatchedGemmChoice& kernel() const;
  Backend& backend();
  std::size_t memory_bytes() const;  // that the object has allocated

  // Puts the product on the stream of a device, or does it. Views lie in the kernel's kind of memory; what they point
  // to lives until the stream has passed the product. A stream that is being captured gets it as a part of its graph.
  // Throws kUsage, before anything is done, for shapes, types or strides that don't fit, and for an `out` that overlaps
  // what it is made of, or itself.
  void enqueue(const BatchedGemmTask& task, Stream stream = {});
  // Returns when the device has passed the last product that was enqueued, and throws what failed up to there.
  void wait();
  // Both.
  void run(const BatchedGemmTask& task, Stream stream = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
