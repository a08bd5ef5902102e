// SPDX-License-Identifier: Apache-2.0
// Public API of the batched GEMM around a latent (kernels/gemm/batched_gemm.hpp): rows of each head times that head's
// matrix. A layer that keeps queries and outputs in the latent space absorbs w_uk into its queries and multiplies
// outputs by w_uv. Both matrices are views of kv_b_proj.
//
//   BatchedGemm absorb({query_absorption(spec), spec.heads}, options);
//   absorb.enqueue({q_nope, w_uk.transposed(), q_in_latent}, stream);   // kernels, once; no wait, no allocation
//
// Not collective: each rank multiplies its own rows. The bits of a row depend only on the row, its head's matrix, the
// kernel, the device model and the build. They equal those that Mla and MlaDecode compute from the same matrices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/common/backend.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/gemm/batched_gemm.hpp"

namespace ringattn {

using BatchedGemmChoice = KernelChoice<BatchedGemmSpec>;

struct BatchedGemmJob {
  BatchedGemmSpec spec;
  std::int64_t heads = 128;  // maximum number of heads of a call; the number of rows is not limited
};

// Only the kernel may change bits of the result.
struct BatchedGemmOptions {
  KernelRequest kernel;
  int threads = 0;  // of a host kernel; 0: all processors of this process
  int device = 0;   // of a device kernel
};

class BatchedGemm {
 public:
  // Chooses the kernel and allocates memory. Not collective. Throws Error: kUsage (the job contradicts itself),
  // kUnsupported (no kernel), kMemory.
  BatchedGemm(BatchedGemmJob job, BatchedGemmOptions options);
  ~BatchedGemm();
  BatchedGemm(BatchedGemm&&) noexcept;
  BatchedGemm& operator=(BatchedGemm&&) = delete;

  const BatchedGemmJob& job() const;
  const BatchedGemmChoice& kernel() const;
  Backend& backend();
  std::size_t memory_bytes() const;  // allocated by the object

  // Enqueues the GEMM on a device; a host kernel runs it. Views lie in the kernel's kind of memory, and their data must
  // live until the stream has passed the GEMM. If the stream is being captured, the GEMM becomes part of the graph.
  // Throws kUsage, before anything is done, for shapes, types or strides that don't fit, and for an `out` that overlaps
  // itself or an input.
  void enqueue(const BatchedGemmTask& task, Stream stream = {});
  // Returns when the device has passed the last enqueued GEMM. Throws the failures so far.
  void wait();
  // enqueue() and wait().
  void run(const BatchedGemmTask& task, Stream stream = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
