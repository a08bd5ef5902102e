// SPDX-License-Identifier: Apache-2.0
#include "launch/execution.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "attention/check/digest.hpp"
#include "attention/files/safetensors_writer.hpp"
#include "base/build.hpp"
#include "base/environment.hpp"
#include "base/error.hpp"
#include "launch/staging.hpp"

namespace ringattn {

namespace {

std::int64_t count_non_finite(const TensorView& view) {
  std::int64_t count = 0;
  const auto values = view.tokens * view.heads * view.dim;
  const auto* bytes = static_cast<const std::byte*>(view.data);
  if (view.dtype == Dtype::kF32) {
    const auto* floats = static_cast<const float*>(view.data);
    for (std::int64_t i = 0; i < values; ++i) count += std::isfinite(floats[i]) ? 0 : 1;
    return count;
  }
  const unsigned exponent = view.dtype == Dtype::kBf16 ? 0x7f80U : 0x7c00U;
  const auto* words = reinterpret_cast<const std::uint16_t*>(bytes);
  for (std::int64_t i = 0; i < values; ++i) count += (words[i] & exponent) == exponent ? 1 : 0;
  return count;
}

std::size_t bytes_of(std::int64_t tokens, std::int64_t heads, std::int64_t dim, std::size_t element) {
  return static_cast<std::size_t>(tokens * heads * dim) * element;
}

}  // namespace

MachineModel chosen_machine(const JobOptions& options) {
  return options.machine.empty() ? MachineModel{} : read_machine_model(options.machine);
}

Options library_options(const Config& config, const Job& job) {
  const JobOptions& from = config.options;
  const bool sliding = !job.spec.mask.is_full() && !job.spec.mask.is_causal();
  Options options;
  options.kernel = {from.backend, from.kernel};
  // A stripe was asked for: that is what tells the layouts apart.
  const LayoutKind unasked = sliding && from.stripe == 0 ? LayoutKind::kContiguous : LayoutKind::kStriped;
  options.layout = {from.layout.value_or(unasked), from.stripe};
  if (from.stripe != 0 && options.layout.kind != LayoutKind::kStriped) {
    fail(ErrorCode::kUsage, fmt::format("{} contradicts {}", config.origin("stripe"), config.origin("layout")),
         fmt::format("{} sets the stripe", layout_name(options.layout.kind)), "Leave one of them out.");
  }
  options.block_tokens = from.block;
  options.memory_budget = static_cast<std::size_t>(from.memory);
  options.overlap = from.overlap;
  options.checksum = from.checksum;
  options.threads = from.threads;
  options.timeout_seconds = from.timeout;
  options.machine = chosen_machine(from);
  const double pace = environment().pace;
  if (pace > 0.0) options.machine.link_bytes_per_second = std::min(options.machine.link_bytes_per_second, pace);
  return options;
}

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
      const auto fill = [&](std::span<const PackedRun> piece, const MutableTensorView& host) {
        input.read(tensor, piece, host, attention.options().threads);
        non_finite += count_non_finite(host);
      };
      if (input.seed()) {
        backend.fill_synthetic(*input.seed(), tensor, runs, rows, backend.stream());
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

Digests digest_result(const JobInput& input, const RankResult& result, const Meeting& meeting) {
  const FoldSpec& spec = input.job().spec;
  const std::int64_t tokens = input.job().batch.q_tokens();
  return {digest(meeting, result.out_view(spec), result.runs, tokens),
          digest(meeting, result.lse_view(spec), spec.heads, result.runs, tokens)};
}

void write_output(const JobInput& input, const RankResult& result, const std::string& path, bool force,
                  const std::vector<std::pair<std::string, std::string>>& metadata, const Meeting& meeting) {
  const FoldSpec& spec = input.job().spec;
  const RowGrid& grid = input.out_grid();
  SafetensorsPlan plan;
  std::unique_ptr<SafetensorsWriter> writer;
  meeting.together([&] {
    plan = plan_safetensors({{"out", file_dtype(spec.dtype), grid.shape()}, {"lse", FileDtype::kF32, lse_shape(grid)}},
                            metadata);
    if (meeting.rank() == 0) writer = SafetensorsWriter::create(plan, path, force);
  });
  const std::string mine = writer ? writer->temporary_path() : std::string();
  const std::string temporary = meeting.gather(mine).front();
  meeting.together([&] {
    if (!writer) writer = SafetensorsWriter::open_existing(plan, temporary);
  });
  meeting.together([&] {
    writer->write_rows("out", grid, result.runs, result.out_view(spec));
    writer->write_lse("lse", grid, result.runs, result.lse_view(spec));
    writer->sync();
  });
  meeting.together([&] {
    if (meeting.rank() == 0) writer->commit();
  });
}

std::vector<std::pair<std::string, std::string>> output_metadata(const Config& config, const Attention& attention,
                                                                 const std::string& target, const Digests& digests) {
  std::vector<std::pair<std::string, std::string>> metadata{
      {"tool", fmt::format("ringattn {}", version())},
      {"git", fmt::format("{}{}", git_revision(), git_dirty() ? "-dirty" : "")},
      {"kernel", std::string(attention.kernel().row->name)},
      {"target", target},
      {"digest.out", digests.out},
      {"digest.lse", digests.lse}};
  for (const ConfigValue& value : config.values) {
    const FlagGroup group = value.row->group;
    const bool decides = group == FlagGroup::kInput || group == FlagGroup::kNumerics ||
                         (group == FlagGroup::kShape && !config.given("input"));
    if (decides && !value.text.empty()) metadata.emplace_back(fmt::format("config.{}", value.row->name), value.text);
  }
  return metadata;
}

}  // namespace ringattn
