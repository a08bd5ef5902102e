// SPDX-License-Identifier: Apache-2.0
// Copies rows between host code (files, digests) and the memory of a backend, and allocates them there. Host memory is
// used in place. A device's rows go through two pinned buffers: one is filled or emptied by the host while the other is
// copied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <vector>

#include "attention/tokens/packed_run.hpp"
#include "base/tensor.hpp"
#include "comm/timeouts.hpp"
#include "kernels/attention/attention.hpp"

namespace ringattn {

// The tokens [skip, skip + rows) of the runs, counted over all of them.
std::vector<PackedRun> part_of(std::span<const PackedRun> runs, std::int64_t skip, std::int64_t rows);

class Staging {
 public:
  // Writes the tokens of `runs` to `rows`, [total_tokens(runs), heads, dim] in host memory.
  using Fill = std::function<void(std::span<const PackedRun> runs, const MutableTensorView& rows)>;
  // Called with the number of rows that are done so far.
  using Moved = std::function<void(std::int64_t rows)>;

  // `timeouts`: for the copy of one buffer.
  Staging(Backend& backend, const Timeouts& timeouts);

  // Fills `target` (dense, [total_tokens(runs), heads, dim], in the backend's memory) piece by piece, in order.
  void load(std::span<const PackedRun> runs, const MutableTensorView& target, const Fill& fill, const Moved& moved);
  // Copies dense rows of the backend's memory to the host.
  void store(const std::byte* source, std::byte* target, std::size_t bytes);

 private:
  struct Half {
    Buffer bytes;
    bool in_flight = false;
  };

  // Returns the next of the two buffers, once its last copy is done.
  Half& take();
  void await_copy(Half& half);
  std::size_t number_of(const Half& half) const { return static_cast<std::size_t>(&half - halves_); }
  void send(Half& half, void* target, const void* source, std::size_t bytes);
  void finish();

  Backend& backend_;
  Timeouts timeouts_;
  Half halves_[2];
  std::unique_ptr<Events> copied_;  // of each buffer
  int next_ = 0;
};

// Copies `values` to the backend's memory. `values` must not change until the backend's stream has passed the copy.
template <class Value>
Buffer upload(Backend& backend, std::span<const Value> values) {
  const auto bytes = static_cast<std::int64_t>(values.size_bytes());
  Buffer buffer = backend.allocate(values.size_bytes());
  backend.copy_rows(buffer.data(), bytes, values.data(), bytes, bytes, 1, backend.stream());
  return buffer;
}

// Allocates dense rows, [tokens, heads, dim], in the backend's memory. `memory` owns them.
MutableTensorView make_rows(Backend& backend, Dtype dtype, std::int64_t tokens, std::int64_t heads, std::int64_t dim,
                            Buffer& memory);

// Fills outputs with NaN, in every dtype, so that elements that a run does not write are visible.
void mark_unwritten(Backend& backend, std::initializer_list<const Buffer*> buffers);

// Replaces device buffers by copies in host memory. Host buffers are kept.
void bring_to_host(Backend& backend, const Timeouts& timeouts, std::initializer_list<Buffer*> buffers);

// Returns when the backend's stream has passed all work that was enqueued on it.
void await(Backend& backend, const Timeouts& timeouts);

}  // namespace ringattn
