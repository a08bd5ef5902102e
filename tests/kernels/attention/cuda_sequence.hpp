// SPDX-License-Identifier: Apache-2.0
// One sequence in device memory, placed as a test likes, and attention over it as any list of key runs: what
// AttentionRunner, which every backend shares, does not do.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/common/registry.hpp"
#include "tests/support/attention_inputs.hpp"
#include "tests/support/checks.hpp"
#include "tests/support/device_array.hpp"

namespace ringattn::testing {

struct CudaPlacement {
  std::int64_t shift = 0;       // elements that each tensor lies after an aligned address
  std::int64_t extra = 0;       // elements after each head and each token
  std::int64_t first_tile = 0;  // tiles that the keys lie after position 0; queries move with them
  std::int64_t sources = 1;     // that the tiles are mapped to in turn
  bool heads_outside = false;   // [heads, tokens, dim]
};

class CudaSequence {
 public:
  // `inputs` has one sequence. The backend is the sequence's own where none is given.
  CudaSequence(const AttentionRow& row, const AttentionInputs& inputs, const CudaPlacement& placement = {},
               Backend* backend = nullptr);

  Backend& backend() { return *backend_; }
  AttentionKernel& kernel() { return *kernel_; }
  std::int64_t tiles() const { return tiles_; }
  std::int64_t rows() const { return shape_.q_len; }

  // Enqueues one task over tiles [first, first + count) for each pair, from 0 as if nothing followed; rows are finished
  // into result `result` where it is not negative.
  struct Tiles {
    std::int64_t first;
    std::int64_t count;
  };
  void enqueue(const std::vector<Tiles>& runs, bool resume, int result);
  // All tiles at once.
  void enqueue_all(int result) { enqueue({{0, tiles_}}, false, result); }
  // Allocates results 0 … count − 1.
  void make_results(int count);
  // Fills them with NaN again.
  void clear_results();
  void wait();

  struct Result {
    std::vector<std::byte> out;  // [rows, heads, head_dim_v]
    std::vector<std::byte> lse;
    // Counts as a check.
    bool operator==(const Result& other) const {
      count_check();
      return out == other.out && lse == other.lse;
    }
  };
  Result result(int index) const;
  const void* state() const { return state_->data(); }

 private:
  struct Placed {
    std::unique_ptr<DeviceArray> memory;
    TensorView view;
  };
  Placed place(const TensorView& dense) const;

  AttentionSpec spec_;
  SequenceShape shape_;
  CudaPlacement placement_;
  std::unique_ptr<Backend> own_backend_;
  Backend* backend_;
  std::unique_ptr<AttentionKernel> kernel_;
  std::int64_t tiles_ = 0;
  std::int64_t key_length_ = 0;
  Placed q_, k_, v_;
  std::unique_ptr<DeviceArray> sinks_;
  std::unique_ptr<DeviceArray> state_;
  struct Output {
    Placed out;
    std::unique_ptr<DeviceArray> lse;
  };
  std::vector<Output> outputs_;
};

}  // namespace ringattn::testing
