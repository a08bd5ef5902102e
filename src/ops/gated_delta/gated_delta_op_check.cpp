// SPDX-License-Identifier: Apache-2.0
// The checks of the gated delta rule.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "base/json_writer.hpp"
#include "base/philox.hpp"
#include "base/rank_liveness.hpp"
#include "base/size.hpp"
#include "kernels/gated_delta/gated_delta_oracle.hpp"
#include "ops/common/difference.hpp"
#include "ops/common/output_tensor.hpp"
#include "ops/gated_delta/gated_delta_op_job.hpp"
#include "ops/ssm/ssm_op_job.hpp"
#include "ops/ssm/ssm_token_block.hpp"

namespace ringattn {

namespace {

constexpr std::uint64_t kDeltaSampleSeed = 21;  // any; the same rows each time
constexpr std::int64_t kMaxSampledHeads = 4;
constexpr std::int64_t kTokensAtOnce = 512;  // tokens read at a time for the oracle
constexpr double kElementsPerSecond = 2e8;   // state elements that the oracle updates

// Values beyond the dtype's range become infinite.
bool finite_in(Dtype dtype, double value) {
  std::byte bytes[sizeof(float)];
  store_element(bytes, dtype, static_cast<float>(value));
  return std::isfinite(load_element(bytes, dtype));
}

// Trivially copyable, because ranks exchange it.
struct DeltaAccuracy {
  std::int64_t rows = 0;
  std::int64_t compared = 0;  // values that are finite here and in fp64
  double part = 0.0;          // the greatest error, as a fraction of the allowed error
  double error = 0.0;         // that error
  double allowed = 0.0;
  std::int64_t token = 0;  // packed token; for final states: the sequence
  std::int64_t head = 0;
  std::int64_t misplaced = 0;  // values that are NaN or infinite where fp64 has others, or the other way round

  // `limit`: allowed error of the kernel's arithmetic, in addition to the rounding of the result. If `chunk_finite` is
  // false, the value may be NaN, because later tokens of a chunk may affect earlier ones.
  void compare(double value, double expected, Dtype dtype, double limit, std::int64_t at, int of_head,
               bool chunk_finite) {
    const bool finite = finite_in(dtype, expected);
    if (finite != std::isfinite(value)) {
      misplaced += finite && !chunk_finite ? 0 : 1;
      return;
    }
    if (!finite || !std::isfinite(limit)) return;
    ++compared;
    const double difference = std::abs(value - expected);
    const double limits = rounding_error(dtype, expected) + limit;
    const double part_here = difference == 0.0 ? 0.0 : difference / limits;
    if (compared > 1 && part_here <= part) return;
    part = part_here;
    error = difference;
    allowed = limits;
    token = at;
    head = of_head;
  }
  void join(const DeltaAccuracy& more) {
    DeltaAccuracy all = more.compared > 0 && (compared == 0 || more.part > part) ? more : *this;
    all.rows = rows + more.rows;
    all.compared = compared + more.compared;
    all.misplaced = misplaced + more.misplaced;
    *this = all;
  }
  bool passes() const { return misplaced == 0 && part <= 1.0; }
};

struct DeltaCheck {
  DeltaAccuracy out;
  DeltaAccuracy states;
};

// Packed tokens of a few heads, about `count` rows, including the first and the last token.
std::map<int, std::set<std::int64_t>> sampled_rows(const GatedDeltaJob& job, std::int64_t count) {
  std::map<int, std::set<std::int64_t>> samples;
  const std::int64_t tokens = job.tokens();
  if (tokens == 0) return samples;
  const std::int64_t heads = std::min({std::int64_t{job.spec.value_heads}, kMaxSampledHeads, count});
  const std::int64_t each = std::min(tokens, (count + heads - 1) / heads);
  for (std::int64_t i = 0; i < heads; ++i) {
    const int head = heads == 1 ? 0 : static_cast<int>(i * (job.spec.value_heads - 1) / (heads - 1));
    std::set<std::int64_t>& chosen = samples[head];
    chosen = {0, tokens - 1};
    for (std::uint32_t k = 0; std::ssize(chosen) < each; ++k) {
      const PhiloxWords words = philox4x32_10({{k, static_cast<std::uint32_t>(i), 0, 0}}, kDeltaSampleSeed);
      const std::uint64_t random = std::uint64_t{words.word[0]} << 32 | words.word[1];
      chosen.insert(static_cast<std::int64_t>(random % static_cast<std::uint64_t>(tokens)));
    }
  }
  return samples;
}

// This rank's row of a packed token, or of a sequence; −1 if it has none.
std::int64_t row_in(std::span<const PackedRun> runs, std::int64_t token) {
  std::int64_t row = 0;
  for (const PackedRun& run : runs) {
    if (token >= run.begin && token < run.end) return row + token - run.begin;
    row += run.tokens();
  }
  return -1;
}

double value_at(const TensorView& view, std::int64_t row, int head, std::size_t dim) {
  return static_cast<double>(load_element(view.at(row, head) + dim * size_of(view.dtype), view.dtype));
}

// Some tokens of the input in host memory.
class DeltaRows {
 public:
  DeltaRows(const GatedDeltaInput& input, const PackedRun& tokens, int threads) {
    const PackedRun runs[] = {tokens};
    TensorView* const views[] = {&task_.q, &task_.k, &task_.v, &task_.log_decay, &task_.beta};
    for (const DeltaTensor tensor : kDeltaTensors) {
      const GatedDeltaInput::RowShape shape = input.row_shape(tensor);
      buffers_.push_back(
          allocate_host(static_cast<std::size_t>(tokens.tokens() * shape.heads * shape.dim) * size_of(shape.dtype)));
      const MutableTensorView rows =
          dense_view(static_cast<void*>(buffers_.back().data()), shape.dtype, tokens.tokens(), shape.heads, shape.dim);
      input.read(tensor, runs, rows, threads);
      *views[static_cast<std::size_t>(tensor)] = rows;
    }
  }
  const GatedDeltaTask& task() const { return task_; }

 private:
  std::vector<Buffer> buffers_;
  GatedDeltaTask task_;
};

// Whether these rows of a value head and its key head are finite. A log-decay of −∞ is a decay of 0.
bool inputs_finite(const GatedDeltaSpec& spec, const GatedDeltaTask& task, std::int64_t first, std::int64_t end,
                   int head) {
  const auto finite = [&](const TensorView& view, int of_head, bool decays) {
    for (std::int64_t row = first; row < end; ++row) {
      for (std::size_t i = 0; i < static_cast<std::size_t>(view.dim); ++i) {
        const double value = value_at(view, row, of_head, i);
        if (!std::isfinite(value) && !(decays && value < 0.0)) return false;
      }
    }
    return true;
  };
  const int key_head = head / spec.heads_per_key();
  return finite(task.q, key_head, false) && finite(task.k, key_head, false) && finite(task.v, head, false) &&
         finite(task.log_decay, head, true) && finite(task.beta, head, false);
}

// Checks one head of a sequence, up to the last sampled token that this rank has, or to its end if the rank has the
// final state.
void check_head(const GatedDeltaInput& input, std::int32_t sequence, int head, const std::set<std::int64_t>& samples,
                const GatedDeltaResult& result, bool rounded, int threads, DeltaCheck& check) {
  const GatedDeltaSpec& spec = input.job().spec;
  const std::int64_t begin = input.origins()[static_cast<std::size_t>(sequence)];
  const std::int64_t sequence_end = input.origins()[static_cast<std::size_t>(sequence) + 1];
  const std::int64_t state_row = row_in(result.sequences, sequence);
  std::int64_t end = state_row >= 0 ? sequence_end : begin;
  for (auto at = samples.lower_bound(begin); at != samples.end() && *at < sequence_end; ++at) {
    if (row_in(result.runs, *at) >= 0) end = std::max(end, *at + 1);
  }
  if (end == begin && state_row < 0) return;
  std::vector<float> states;
  if (input.job().initial_states) {
    states.resize(static_cast<std::size_t>(state_floats(spec)));
    const std::int32_t one[] = {sequence};
    input.read_initial(one, states);
  }
  const std::int64_t head_floats = std::int64_t{spec.key_dim} * spec.value_dim;
  GatedDeltaOracle oracle(spec, rounded, states.empty() ? nullptr : states.data() + head * head_floats);
  const TensorView o = result.o_view(spec);
  for (std::int64_t first = begin; first < end; first += kTokensAtOnce) {
    heartbeat();
    const PackedRun tokens{first, std::min(sequence_end, first + kTokensAtOnce)};  // whole chunks
    const DeltaRows rows(input, tokens, threads);
    for (std::int64_t token = tokens.begin; token < std::min(end, tokens.end); ++token) {
      oracle.add(rows.task(), token - first, head);
      const std::int64_t row = samples.contains(token) ? row_in(result.runs, token) : -1;
      if (row < 0) continue;
      ++check.out.rows;
      const std::int64_t chunk = (token - first) / kChunkTokens * kChunkTokens;
      const bool chunk_finite =
          inputs_finite(spec, rows.task(), chunk, std::min(tokens.tokens(), chunk + kChunkTokens), head);
      for (std::size_t c = 0; c < oracle.o().size(); ++c) {
        check.out.compare(value_at(o, row, head, c), oracle.o()[c], spec.dtype, oracle.o_error()[c], token, head,
                          chunk_finite);
      }
    }
  }
  if (state_row < 0) return;
  const std::vector<double> errors = oracle.state_error();
  for (std::size_t i = 0; i < oracle.state().size(); ++i) {
    check.states.compare(value_at(result.states_view(spec), state_row, head, i), oracle.state()[i], Dtype::kF32,
                         errors[i % errors.size()], sequence, head, true);
  }
}

void write_accuracy(JsonWriter& json, std::string_view key, const DeltaAccuracy& accuracy, std::string_view place) {
  json.key(key);
  if (accuracy.compared == 0) {
    json.null();
    return;
  }
  json.begin_object().member("greatest_error", accuracy.error).member("allowed", accuracy.allowed);
  json.member(place, accuracy.token).member("head", accuracy.head).end_object();
}

}  // namespace

Check GatedDeltaOpJob::check_oracle(const Collective& collective, std::int64_t count) {
  const GatedDeltaJob& job = input_.job();
  const std::map<int, std::set<std::int64_t>> samples = sampled_rows(job, count);
  const bool rounded = rounds_delta_factors(kernel());
  const double elements = static_cast<double>(job.tokens()) * static_cast<double>(samples.size()) *
                          static_cast<double>(job.spec.key_dim) * job.spec.value_dim;
  DeltaCheck mine;
  collective.run_collectively(
      [&] {
        for (std::int32_t s = 0; s < std::ssize(job.lengths); ++s) {
          for (const auto& [head, tokens] : samples) {
            check_head(input_, s, head, tokens, *result_, rounded, threads(), mine);
          }
        }
      },
      elements / kElementsPerSecond);
  DeltaCheck all;
  for (const DeltaCheck& theirs : collective.gather_values(mine)) {
    all.out.join(theirs.out);
    all.states.join(theirs.states);
  }
  Check check;
  check.passes = all.out.passes() && all.states.passes();
  check.rows = all.out.rows;
  check.write = [all](JsonWriter& json) {
    json.begin_object().member("rows", all.out.rows);
    write_accuracy(json, "out", all.out, "token");
    json.key("lse").null();
    write_accuracy(json, "final_states", all.states, "sequence");
    json.member("misplaced", all.out.misplaced + all.states.misplaced).end_object();
  };
  check.context.push_back(
      fmt::format("{} against the fp64 oracle", counted(static_cast<std::uint64_t>(all.out.rows), "row")));
  const auto line = [&](std::string_view what, const DeltaAccuracy& accuracy, std::string_view place) {
    if (accuracy.compared > 0) {
      check.lines.push_back(
          fmt::format("{}: greatest error {:.3g} of what is allowed, {:.3g} of {:.3g} at {} {}, head {}", what,
                      accuracy.part, accuracy.error, accuracy.allowed, place, accuracy.token, accuracy.head));
    }
    if (accuracy.misplaced > 0) {
      check.lines.push_back(
          fmt::format("{}: {} values are NaN or infinite where fp64 has another value", what, accuracy.misplaced));
    }
  };
  line("out", all.out, "token");
  line("final states", all.states, "sequence");
  if (all.out.compared == 0) check.lines.emplace_back("out: no value is finite both here and in fp64");
  return check;
}

void GatedDeltaOpJob::open_earlier(const std::string& path) {
  Earlier earlier;
  earlier.file = std::make_unique<const SafetensorsFile>(path);
  earlier.out = output_tensor(*earlier.file, path, "out");
  check_output_tensor(path, earlier.out, input_.out_grid().shape(), file_dtype(input_.job().spec.dtype));
  if (earlier.file->contains("final_states")) {
    earlier.states = earlier.file->tensor("final_states");
    check_output_tensor(path, *earlier.states, input_.states_shape(), FileDtype::kF32);
  }
  earlier_.emplace(std::move(earlier));
}

std::vector<FileFingerprint> GatedDeltaOpJob::earlier_fingerprints() const {
  std::vector<TensorSource> used{earlier_->out};
  if (earlier_->states) used.push_back(*earlier_->states);
  return ringattn::fingerprints(used);
}

Check GatedDeltaOpJob::check_earlier(const Collective& collective) {
  const GatedDeltaSpec& spec = input_.job().spec;
  std::optional<Difference> mine;
  collective.run_collectively([&] {
    mine = difference_from_file(earlier_->out, input_.out_grid(), false, result_->o_view(spec), result_->runs);
    if (mine || !earlier_->states || !input_.job().final_states) return;
    mine = difference_from_file(*earlier_->states, states_grid(), true, result_->states_view(spec), result_->sequences);
  });
  const auto difference = earliest(collective, mine);
  Check check;
  check.passes = !difference;
  if (!earlier_->states) check.context.emplace_back("it holds no final_states");
  if (difference) {
    std::vector<std::int64_t> states(input_.job().lengths.size() + 1);
    for (std::size_t s = 0; s < states.size(); ++s) states[s] = static_cast<std::int64_t>(s);
    check.lines.push_back(fmt::format("first difference: {}",
                                      difference->in_lse ? ringattn::describe(*difference, states, "final_states")
                                                         : ringattn::describe(*difference, input_.origins(), "out")));
  }
  return check;
}

}  // namespace ringattn
