// SPDX-License-Identifier: Apache-2.0
#include "attention/job/loaded_job.hpp"

#include <algorithm>
#include <span>

#include "attention/job/staging.hpp"
#include "base/moment.hpp"

namespace ringattn {

namespace {

std::size_t bytes_of(std::int64_t tokens, std::int64_t heads, std::int64_t dim, std::size_t element) {
  return static_cast<std::size_t>(tokens * heads * dim) * element;
}

}  // namespace

TensorView RankResult::out_view(const FoldSpec& spec) const {
  return dense_view(static_cast<const void*>(out.data()), spec.dtype, rows, spec.heads, spec.head_dim_v);
}

RowView RankResult::lse_view(const FoldSpec& spec) const {
  return {reinterpret_cast<float*>(lse.data()), spec.heads, 1};
}

LoadedJob::LoadedJob(const JobInput& input, Attention& attention, const Meeting& meeting, const StepDone& step_done)
    : attention_(attention), meeting_(meeting) {
  const Job& job = input.job();
  const FoldSpec& spec = job.spec;
  const std::size_t element = size_of(spec.dtype);
  const std::int64_t q_rows = attention.q_rows();
  const std::int64_t k_rows = attention.k_rows();
  const JobLayout& layout = attention.layout();
  result_.rows = q_rows;
  result_.runs = packed_runs(layout.queries.runs(meeting.rank()), job.batch.cu_q());
  meeting.together([&] {
    Backend& backend = attention.backend();
    q_ = backend.allocate(bytes_of(q_rows, spec.heads, spec.head_dim, element));
    k_ = backend.allocate(bytes_of(k_rows, spec.kv_heads, spec.head_dim, element));
    v_ = backend.allocate(bytes_of(k_rows, spec.kv_heads, spec.head_dim_v, element));
    result_.out = backend.allocate(bytes_of(q_rows, spec.heads, spec.head_dim_v, element));
    result_.lse = backend.allocate(bytes_of(q_rows, spec.heads, 1, sizeof(float)));
    workspace_ = backend.allocate(attention.workspace_bytes());
    // A row that is handed out without having been written shows: it is NaN, not what an earlier job left there.
    constexpr std::byte kUnwritten{0xff};
    for (const Buffer* buffer : {&result_.out, &result_.lse}) {
      backend.fill_bytes(buffer->data(), kUnwritten, buffer->bytes(), backend.stream());
    }

    Staging staging(backend, meeting.patience());
    std::int64_t before = 0;
    const auto load = [&](SyntheticTensor tensor, const std::vector<PackedRun>& runs, const MutableTensorView& rows,
                          std::int64_t& non_finite) {
      moment("staging");
      const auto fill = [&](std::span<const PackedRun> piece, const MutableTensorView& host) {
        input.read(tensor, piece, host, attention.options().threads);
        non_finite += count_non_finite(host);
      };
      if (input.seed()) {
        backend.fill_synthetic(*input.seed(), tensor, input.made_tokens(tensor, runs), rows, backend.stream());
      } else {
        staging.load(runs, rows, fill, [&](std::int64_t done) {
          if (step_done) step_done("row of input", before + done, q_rows + 2 * k_rows);
        });
      }
      before += rows.tokens;
      return rows;
    };
    const std::vector<PackedRun> key_runs = packed_runs(layout.keys.runs(meeting.rank()), job.batch.cu_k());
    const auto view = [&](const Buffer& buffer, std::int64_t rows, int heads, int dim) {
      return dense_view(static_cast<void*>(buffer.data()), spec.dtype, rows, heads, dim);
    };
    NonFinite& found = result_.non_finite;
    inputs_.q = load(SyntheticTensor::kQ, result_.runs, view(q_, q_rows, spec.heads, spec.head_dim), found.q);
    inputs_.k = load(SyntheticTensor::kK, key_runs, view(k_, k_rows, spec.kv_heads, spec.head_dim), found.k);
    inputs_.v = load(SyntheticTensor::kV, key_runs, view(v_, k_rows, spec.kv_heads, spec.head_dim_v), found.v);
    backend.synchronize(backend.mark(backend.stream()), meeting.patience().for_peer(), {});
    if (spec.sinks) {
      const auto bytes = static_cast<std::int64_t>(input.sinks().size() * sizeof(float));
      sinks_ = backend.allocate(static_cast<std::size_t>(bytes));
      backend.copy_rows(sinks_.data(), bytes, input.sinks().data(), bytes, bytes, 1, backend.stream());
      backend.synchronize(backend.mark(backend.stream()), meeting.patience().for_peer(), {});
      inputs_.sinks = reinterpret_cast<const float*>(sinks_.data());
    }
    outputs_ = {view(result_.out, q_rows, spec.heads, spec.head_dim_v), result_.lse_view(spec), std::nullopt};
  });
}

RunStats LoadedJob::run(RunMode mode, const StepDone& step_done) {
  BlockDone block_done;
  if (step_done) {
    block_done = [&step_done](std::int64_t done, std::int64_t all) { step_done("block", done, all); };
  }
  meeting_.barrier();
  const RunStats stats = attention_.run(inputs_, outputs_, std::span<std::byte>(workspace_.data(), workspace_.bytes()),
                                        attention_.backend().stream(), block_done, mode);
  // Ranks may end far apart, where their sequences have nothing to do with each other.
  meeting_.barrier(attention_.prediction().seconds);
  return stats;
}

RankResult LoadedJob::fetch(const RunStats& stats) {
  result_.stats = stats;
  if (attention_.backend().memory() == MemoryKind::kHost) return std::move(result_);
  meeting_.together([&] {
    Staging staging(attention_.backend(), meeting_.patience());
    for (Buffer* buffer : {&result_.out, &result_.lse}) {
      Buffer host = allocate_host(buffer->bytes());
      staging.store(buffer->data(), host.data(), buffer->bytes());
      *buffer = std::move(host);
    }
  });
  return std::move(result_);
}

RankResult execute_job(const JobInput& input, Attention& attention, const Meeting& meeting, const StepDone& step_done) {
  LoadedJob loaded(input, attention, meeting, step_done);
  return loaded.fetch(loaded.run(RunMode::kWhole, step_done));
}

}  // namespace ringattn
