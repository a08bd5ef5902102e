// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/top_k_blocks.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/device_timeouts.hpp"
#include "base/error.hpp"
#include "base/gpu.hpp"
#include "base/memory.hpp"
#include "kernels/attention/top_k_selection.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/common/compatibility.hpp"

namespace ringattn {

namespace {

// Pieces of rows, a few megabytes each, in a backend's memory.
class InputRows {
 public:
  InputRows(const JobInput& input, Backend& backend)
      : input_(input), backend_(backend), cu_q_(input.job().batch.cu_q()), cu_k_(input.job().batch.cu_k()) {
    const AttentionSpec& spec = input.job().spec;
    token_bytes_ = static_cast<std::size_t>(std::max(spec.heads, spec.kv_heads)) *
                   static_cast<std::size_t>(spec.head_dim) * size_of(spec.dtype);
    most_ = static_cast<std::int64_t>(std::max<std::size_t>(1, kPieceBytes / token_bytes_));
    rows_ = backend.allocate(static_cast<std::size_t>(most_) * token_bytes_);
    const bool made = input.is_made(SyntheticTensor::kQ) && input.is_made(SyntheticTensor::kK);
    if (backend.memory() == MemoryKind::kHost || made) return;
    for (Buffer& half : halves_) half = allocate_pinned(static_cast<std::size_t>(most_) * token_bytes_);
    copied_ = backend.make_events(std::size(halves_), false);
  }

  TensorView read(SyntheticTensor tensor, std::size_t sequence, std::int64_t first, std::int64_t most) {
    const AttentionSpec& spec = input_.job().spec;
    const bool queries = tensor == SyntheticTensor::kQ;
    const int heads = queries ? spec.heads : spec.kv_heads;
    const std::int64_t begin = (queries ? cu_q_ : cu_k_)[sequence] + first;
    const PackedRun run{begin, begin + std::min(most, most_)};
    const MutableTensorView rows =
        dense_view(static_cast<void*>(rows_.data()), spec.dtype, run.tokens(), heads, spec.head_dim);
    if (backend_.memory() == MemoryKind::kHost) {
      input_.read(tensor, {&run, 1}, rows, 1);
    } else if (input_.is_made(tensor)) {
      backend_.fill_synthetic(*input_.seed(), tensor, input_.made_tokens(tensor, {&run, 1}), rows, backend_.stream());
    } else {
      copy(tensor, run, rows);
    }
    return rows;
  }

 private:
  static constexpr std::size_t kPieceBytes = std::size_t{1} << 25;

  // Copies through two buffers in turn.
  void copy(SyntheticTensor tensor, const PackedRun& run, const MutableTensorView& rows) {
    const auto half = static_cast<std::size_t>(next_);
    next_ = 1 - next_;
    const Deadline deadline = DeviceTimeouts::for_short_work();
    copied_->synchronize(half, deadline,
                         [&deadline] { DeviceTimeouts::check(deadline, "a piece of rows is copied to it"); });
    MutableTensorView host = rows;
    host.data = halves_[half].data();
    input_.read(tensor, {&run, 1}, host, 1);
    const std::int64_t bytes = run.tokens() * rows.token_stride * static_cast<std::int64_t>(size_of(rows.dtype));
    backend_.copy_rows(rows.data, bytes, host.data, bytes, bytes, 1, backend_.stream());
    copied_->record(half, backend_.stream());
  }

  const JobInput& input_;
  Backend& backend_;
  std::vector<std::int64_t> cu_q_, cu_k_;
  std::size_t token_bytes_ = 0;
  std::int64_t most_ = 0;  // maximum number of rows of a piece
  Buffer rows_;
  Buffer halves_[2];
  std::unique_ptr<Events> copied_;
  int next_ = 0;
};

std::unique_ptr<Backend> top_k_backend(const AttentionSpec& spec, const TopKDevice& target) {
  if (target.device != kNoDevice) return choose_kernel(spec, target.request).row->make_backend({1, target.device});
  return choose_kernel(AttentionSpec{}, {"cpu", "auto"}).row->make_backend({1});
}

}  // namespace

TopKDevice top_k_device(const KernelRequest& request, const Transport& transport) {
  return {compatible_request(request, transport), transport.device()};
}

BlockMask top_k_blocks(const JobInput& input, const AttentionSpec& spec, int count, const TopKDevice& target) {
  const std::unique_ptr<Backend> backend = top_k_backend(spec, target);
  InputRows pieces(input, *backend);
  const RowSource rows = [&pieces](SyntheticTensor tensor, std::size_t sequence, std::int64_t first,
                                   std::int64_t most) { return pieces.read(tensor, sequence, first, most); };
  return top_k_selection(spec, masked_sequences(input.job().batch), count, rows, *backend, backend->stream());
}

}  // namespace ringattn
