// SPDX-License-Identifier: Apache-2.0
// Public API of RoPE (kernels/rope/rope.hpp): rotates rows of q and k by their tokens' positions.
//
//   Rope rope(make_rope_spec(parameters, Dtype::kBf16, 128, RopePairs::kHalfSplit, false), options);
//   rope.enqueue({positions, tensors}, stream);   // q and k in one launch; no wait, no allocation
//
// Not collective: each rank rotates its own rows, whose positions Layout::positions() returns. Padding and order don't
// matter: the bits of a row depend only on the row, its positions and the spec, and are the same for all kernels.
#pragma once

#include <cstddef>
#include <memory>

#include "kernels/common/backend.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/rope/rope.hpp"
#include "kernels/rope/rope_frequencies.hpp"

namespace ringattn {

using RopeChoice = KernelChoice<RopeSpec>;

// No option changes bits of the result.
struct RopeOptions {
  KernelRequest kernel;
  int threads = 0;  // of a host kernel; 0: all processors of this process
  int device = 0;   // of a device kernel
};

class Rope {
 public:
  // Chooses the kernel. Not collective. Throws Error: kUsage (the spec contradicts itself), kUnsupported (no kernel).
  Rope(RopeSpec spec, RopeOptions options);
  ~Rope();
  Rope(Rope&&) noexcept;
  Rope& operator=(Rope&&) = delete;

  const RopeSpec& spec() const;
  const RopeChoice& kernel() const;
  Backend& backend();
  std::size_t memory_bytes() const;  // allocated by the object

  // Enqueues the rotation on a device; a host kernel runs it. Views and positions lie in the kernel's kind of memory
  // and live until the stream has passed the rotation. If the stream is being captured, it becomes part of the graph.
  // Throws kUsage, before anything is done, for shapes, types or strides that don't fit, and for a y that overlaps
  // itself or anything but its own x.
  void enqueue(const RopeTask& task, Stream stream = {});
  // Returns when the device has passed the last enqueued rotation. Throws the failures so far.
  void wait();
  // enqueue() and wait().
  void run(const RopeTask& task, Stream stream = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
