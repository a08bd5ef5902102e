// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/attention/cuda_sequence.hpp"

#include <algorithm>
#include <cstring>

namespace ringattn::testing {

namespace {

std::vector<std::byte> bytes_of_floats(const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(float));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

}  // namespace

CudaSequence::CudaSequence(const AttentionRow& row, const AttentionInputs& inputs, const CudaPlacement& placement,
                           Backend* backend)
    : spec_(inputs.spec), shape_(inputs.sequences.at(0)), placement_(placement), backend_(backend) {
  if (backend_ == nullptr) {
    own_backend_ = row.make_backend({1, 0});
    backend_ = own_backend_.get();
  }
  kernel_ = row.make_kernel(spec_, *backend_);
  const int key_tile = kernel_->key_tile();
  tiles_ = (shape_.k_len + key_tile - 1) / key_tile;
  key_length_ = shape_.k_len + placement_.first_tile * key_tile;
  q_ = place(inputs.q_view(0));
  k_ = place(inputs.k_view(0));
  v_ = place(inputs.v_view(0));
  if (!inputs.sinks.empty()) {
    sinks_ = std::make_unique<DeviceArray>(*backend_, inputs.sinks.size() * sizeof(float));
    sinks_->write(bytes_of_floats(inputs.sinks));
  }
  state_ = std::make_unique<DeviceArray>(*backend_, kernel_->state_bytes(shape_.q_len));
  kernel_->reserve({shape_.q_len, 1, tiles_, tiles_, placement_.sources, 1});
  make_results(1);
}

CudaSequence::Placed CudaSequence::place(const TensorView& dense) const {
  Placed placed;
  placed.view = dense;
  const std::int64_t row = dense.dim + placement_.extra;
  const std::int64_t rows = (placement_.heads_outside ? dense.tokens : dense.heads) * row + placement_.extra;
  placed.view.head_stride = placement_.heads_outside ? rows : row;
  placed.view.token_stride = placement_.heads_outside ? row : rows;
  const std::size_t element = size_of(dense.dtype);
  const std::int64_t outside = placement_.heads_outside ? dense.heads : dense.tokens;
  const auto elements = static_cast<std::size_t>(outside * rows + placement_.shift);
  std::vector<std::byte> host(elements * element, std::byte{0xff});
  for (std::int64_t token = 0; dense.data != nullptr && token < dense.tokens; ++token) {
    for (std::int64_t head = 0; head < dense.heads; ++head) {
      const std::int64_t at = placement_.shift + token * placed.view.token_stride + head * placed.view.head_stride;
      std::memcpy(host.data() + static_cast<std::size_t>(at) * element, dense.at(token, head),
                  static_cast<std::size_t>(dense.dim) * element);
    }
  }
  placed.memory = std::make_unique<DeviceArray>(*backend_, host.size());
  placed.memory->write(host);
  placed.view.data = placed.memory->data() + static_cast<std::size_t>(placement_.shift) * element;
  return placed;
}

void CudaSequence::make_results(int count) {
  while (outputs_.size() < static_cast<std::size_t>(count)) {
    outputs_.push_back(
        {place(dense_view(static_cast<const void*>(nullptr), spec_.dtype, shape_.q_len, spec_.heads, spec_.head_dim_v)),
         std::make_unique<DeviceArray>(*backend_,
                                       static_cast<std::size_t>(shape_.q_len * spec_.heads) * sizeof(float))});
  }
}

void CudaSequence::enqueue(const std::vector<Tiles>& runs, bool resume, int result) {
  const std::int64_t first_key = placement_.first_tile * kernel_->key_tile();
  const QueryRun queries{0, shape_.q_offset + first_key, 0, shape_.q_len};
  std::vector<KeyRun> key_runs;
  std::vector<PageRun> map;
  for (const Tiles& run : runs) {
    key_runs.push_back({0, placement_.first_tile + run.first, run.count, static_cast<std::int64_t>(map.size())});
    for (std::int64_t tile = run.first; tile < run.first + run.count; ++tile) {
      const std::int64_t source = tile % placement_.sources;
      map.push_back({static_cast<std::int32_t>(source), (tile - source) * kernel_->key_tile()});
    }
  }
  // Source i begins at tile i.
  std::vector<KeySource> sources;
  for (std::int64_t i = 0; i < std::min(placement_.sources, tiles_); ++i) {
    const auto from = [&](const TensorView& view) {
      TensorView moved = view;
      moved.data = view.at(i * kernel_->key_tile(), 0);
      moved.tokens -= i * kernel_->key_tile();
      return moved;
    };
    sources.push_back({from(k_.view), from(v_.view)});
  }
  AttentionTask task;
  task.q = q_.view;
  task.queries = {&queries, 1};
  task.key_lengths = {&key_length_, 1};
  task.key_runs = key_runs;
  task.tiles = map;
  task.sources = sources;
  task.state = state_->data();
  task.resume = resume;
  task.save = result < 0;
  AttentionOutput output;
  if (result >= 0) {
    const Output& to = outputs_.at(static_cast<std::size_t>(result));
    const TensorView& out = to.out.view;
    output = {{to.out.memory->data() + static_cast<std::size_t>(placement_.shift) * size_of(spec_.dtype), out.dtype,
               out.tokens, out.heads, out.dim, out.token_stride, out.head_stride},
              {to.lse->floats(), spec_.heads, 1},
              sinks_ ? sinks_->floats() : nullptr};
    task.finish = &output;
  }
  kernel_->attend(task, backend_->stream(), {});
}

void CudaSequence::clear_results() {
  for (Output& output : outputs_) {
    output.out.memory->clear();
    output.lse->clear();
  }
}

void CudaSequence::wait() { backend_->synchronize(backend_->stream(), Deadline::after(120.0), {}); }

CudaSequence::Result CudaSequence::result(int index) const {
  const Output& output = outputs_.at(static_cast<std::size_t>(index));
  const TensorView& view = output.out.view;
  const std::vector<std::byte> host = output.out.memory->read();
  const std::size_t element = size_of(spec_.dtype);
  const std::size_t row_bytes = static_cast<std::size_t>(view.dim) * element;
  Result result;
  result.lse = output.lse->read();
  result.out.reserve(static_cast<std::size_t>(view.tokens * view.heads) * row_bytes);
  for (std::int64_t token = 0; token < view.tokens; ++token) {
    for (std::int64_t head = 0; head < view.heads; ++head) {
      const std::int64_t at = placement_.shift + token * view.token_stride + head * view.head_stride;
      const auto* from = host.data() + static_cast<std::size_t>(at) * element;
      result.out.insert(result.out.end(), from, from + row_bytes);
    }
  }
  return result;
}

}  // namespace ringattn::testing
