// SPDX-License-Identifier: Apache-2.0
#include "ops/ssm/ssm_accuracy.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "base/memory.hpp"
#include "base/philox.hpp"
#include "base/rank_liveness.hpp"
#include "ops/ssm/segment_terms.hpp"
#include "ops/ssm/ssm_token_block.hpp"

namespace ringattn {

namespace {

constexpr std::uint64_t kSampleSeed = 20;   // any; the same rows each time
constexpr std::int64_t kMaxHeads = 4;       // maximum number of sampled heads
constexpr std::int64_t kBlockTokens = 512;  // tokens read at a time: whole chunks
constexpr double kStepsPerSecond = 5e8;     // state elements updated per second
// Bounds for a kernel that rounds factors (ssm_accuracy.hpp).
constexpr double kRoundings = 3.0;
constexpr double kDeviations = 6.0;
// Elements of a state below this may be zero in a kernel, because its decays are exponentials with a smaller range than
// fp64's.
constexpr double kMinStates = 0x1p-100;

std::vector<RowSample> sample_ssm(const SsmJob& job, std::int64_t count) {
  const std::int64_t tokens = job.tokens();
  if (tokens == 0) return {};
  const std::int64_t heads = std::min({std::int64_t{job.spec.heads}, kMaxHeads, count});
  const std::int64_t each = std::min(tokens, (count + heads - 1) / heads);
  std::vector<RowSample> samples;
  for (std::int64_t i = 0; i < heads; ++i) {
    const int head = heads == 1 ? 0 : static_cast<int>(i * (job.spec.heads - 1) / (heads - 1));
    std::set<std::int64_t> chosen{0, tokens - 1};
    for (std::uint32_t k = 0; static_cast<std::int64_t>(chosen.size()) < each; ++k) {
      const PhiloxWords words = philox4x32_10({{k, static_cast<std::uint32_t>(i), 0, 0}}, kSampleSeed);
      const std::uint64_t random = std::uint64_t{words.word[0]} << 32 | words.word[1];
      chosen.insert(static_cast<std::int64_t>(random % static_cast<std::uint64_t>(tokens)));
    }
    for (const std::int64_t token : chosen) samples.push_back({token, head});
  }
  return samples;
}

struct SampleLocation {
  RowSample sample;
  std::int64_t row = 0;  // index in this rank's y
};

// Checks one head of one sequence, token by token.
class HeadCheck {
 public:
  HeadCheck(const SsmInput& input, int head, std::vector<SampleLocation> samples, const TensorView& y, bool rounded)
      : input_(input), spec_(input.job().spec), head_(head), samples_(std::move(samples)), y_(y) {
    if (input.job().conv1d_only) return;
    if (rounded) terms_.emplace(spec_.head_dim, spec_.state_dim, log_count());
    const auto elements = static_cast<std::size_t>(spec_.head_dim * spec_.state_dim);
    state_.resize(elements);
    magnitude_.resize(elements);
    slack_.resize(elements);
    dt_x_.resize(static_cast<std::size_t>(spec_.head_dim));
    b_.resize(static_cast<std::size_t>(spec_.state_dim));
    decay_.resize(b_.size());
  }

  // `states`: of all heads of the sequence.
  void start_from(std::span<const float> states) {
    const std::size_t first = static_cast<std::size_t>(head_) * state_.size();
    for (std::size_t i = 0; i < state_.size(); ++i) {
      state_[i] = static_cast<double>(states[first + i]);
      magnitude_[i] = std::abs(state_[i]);
    }
  }

  // Processes tokens [begin, end) of the block, the next ones of the sequence: a chunk, or the rest of the sequence.
  void go_on(const SsmTokenBlock& block, std::int64_t begin, std::int64_t end) {
    bool finite = true;
    const std::size_t first = next_;
    if (terms_) terms_->begin_chunk(state_);
    for (std::int64_t token = begin; token < end; ++token) {
      if (!input_.job().conv1d_only) finite = step(block, token) && finite;
      while (next_ < samples_.size() && samples_[next_].sample.token == token) keep(block, samples_[next_++]);
    }
    for (std::size_t i = first; i < next_; ++i) compare(i, finite);
  }

  // Called after the sequence's last token. `states`: of all heads.
  void compare_final(std::int32_t sequence, const float* states) {
    const float* const own = states + static_cast<std::size_t>(head_) * state_.size();
    StateAccuracy& all = accuracy_.states;
    for (std::size_t i = 0; i < state_.size(); ++i) {
      const auto value = static_cast<double>(own[i]);
      const bool finite = std::isfinite(static_cast<float>(state_[i]));
      if (finite != std::isfinite(value)) ++all.misplaced;
      if (!finite || !std::isfinite(value)) continue;
      const double error = std::abs(value - state_[i]);
      const double allowed =
          rounding_of(Dtype::kF32) * std::abs(state_[i]) + kSsmTermTolerance * magnitude_[i] + slack_[i] + kMinStates;
      if (all.compared++ > 0 && error / allowed <= all.part) continue;
      all.part = error / allowed;
      all.error = error;
      all.allowed = allowed;
      all.sequence = sequence;
      all.head = head_;
    }
  }

  const SsmAccuracy& accuracy() const { return accuracy_; }

 private:
  struct Expected {
    std::vector<double> y;
    std::vector<double> tolerance;  // in addition to y's own rounding
  };

  // Number of different log-decays of a token and head.
  int log_count() const { return spec_.decay == SsmDecay::kDim ? spec_.state_dim : 1; }
  int group() const { return head_ / (spec_.heads / spec_.groups); }

  double dt_of(const SsmTokenBlock& block, std::int64_t token) const {
    if (spec_.decay != SsmDecay::kDt) return 1.0;
    double dt = block.at(SsmTensorKind::kDt, token, head_, 0);
    if (spec_.dt_bias) dt += static_cast<double>(input_.dt_bias()[static_cast<std::size_t>(head_)]);
    if (spec_.dt_softplus && dt <= 40.0) dt = std::log1p(std::exp(dt));
    if (std::isnan(dt)) return dt;
    return std::clamp(dt, static_cast<double>(spec_.dt_min), static_cast<double>(spec_.dt_max));
  }

  // Returns whether all values of the token that a kernel uses for other rows are finite.
  bool step(const SsmTokenBlock& block, std::int64_t token) {
    const double dt = dt_of(block, token);
    bool finite = std::isfinite(dt);
    std::vector<double> log_decays;
    for (std::size_t n = 0; n < b_.size(); ++n) {
      const std::size_t at =
          spec_.state_decays ? static_cast<std::size_t>(head_) * b_.size() + n : static_cast<std::size_t>(head_);
      if (n == 0 || spec_.state_decays || spec_.decay == SsmDecay::kDim) {
        const double log_decay = spec_.decay >= SsmDecay::kToken
                                     ? block.at(SsmTensorKind::kDt, token, head_,
                                                spec_.decay == SsmDecay::kDim ? static_cast<std::int64_t>(n) : 0)
                                     : dt * static_cast<double>(input_.a()[at]);
        log_decays.push_back(log_decay);
        finite = finite && !std::isnan(log_decay) && log_decay < std::numeric_limits<double>::infinity();
        decay_[n] = std::exp(log_decay);
      } else {
        decay_[n] = decay_[0];
      }
      b_[n] = block.taken(SsmTensorKind::kB, token, group(), static_cast<std::int64_t>(n));
      finite = finite && std::isfinite(b_[n].value) &&
               std::isfinite(block.taken(SsmTensorKind::kC, token, group(), static_cast<std::int64_t>(n)).value);
    }
    for (int p = 0; p < spec_.head_dim; ++p) {
      const Rounded x = block.taken(SsmTensorKind::kX, token, head_, p);
      const double scaled = dt * x.value;
      const double scaled_error = std::abs(dt) * x.error;
      dt_x_[static_cast<std::size_t>(p)] = scaled;
      finite = finite && std::isfinite(scaled);
      double* const state = state_.data() + static_cast<std::size_t>(p) * b_.size();
      double* const magnitude = magnitude_.data() + static_cast<std::size_t>(p) * b_.size();
      double* const slack = slack_.data() + static_cast<std::size_t>(p) * b_.size();
      for (std::size_t n = 0; n < b_.size(); ++n) {
        const auto& [b, b_error] = b_[n];
        state[n] = decay_[n] * state[n] + scaled * b;
        magnitude[n] = decay_[n] * magnitude[n] + std::abs(scaled * b);
        slack[n] = decay_[n] * slack[n] + scaled_error * (std::abs(b) + b_error) + std::abs(scaled) * b_error;
      }
    }
    if (terms_) {
      std::vector<double> b(b_.size());
      std::ranges::transform(b_, b.begin(), &Rounded::value);
      terms_->add(log_decays, dt_x_, b);
    }
    return finite;
  }

  // Keeps the row of a sampled token, at which the states are.
  void keep(const SsmTokenBlock& block, const SampleLocation& sample) {
    const std::int64_t token = sample.sample.token;
    Expected row;
    if (input_.job().conv1d_only) {
      const Rounded y = block.taken(SsmTensorKind::kX, token, head_, 0);
      expected_.push_back({{y.value}, {y.error}});
      return;
    }
    std::vector<double> spread;
    if (terms_) {
      std::vector<double> c(b_.size());
      for (std::size_t n = 0; n < c.size(); ++n) {
        c[n] = block.taken(SsmTensorKind::kC, token, group(), static_cast<std::int64_t>(n)).value;
      }
      std::vector<double> x(static_cast<std::size_t>(spec_.head_dim));
      for (int p = 0; p < spec_.head_dim; ++p) {
        x[static_cast<std::size_t>(p)] = block.taken(SsmTensorKind::kX, token, head_, p).value;
      }
      const double skip = spec_.skip ? static_cast<double>(input_.d()[static_cast<std::size_t>(head_)]) : 0.0;
      spread = terms_->spread(c, skip, x);
    }
    const double rounding = rounding_of(spec_.dtype);
    for (int p = 0; p < spec_.head_dim; ++p) {
      double sum = 0.0;
      double magnitude = 0.0;
      double slack = 0.0;
      for (std::size_t n = 0; n < b_.size(); ++n) {
        const std::size_t at = static_cast<std::size_t>(p) * b_.size() + n;
        const auto [c, c_error] = block.taken(SsmTensorKind::kC, token, group(), static_cast<std::int64_t>(n));
        sum += state_[at] * c;
        magnitude += magnitude_[at] * std::abs(c);
        slack += slack_[at] * (std::abs(c) + c_error) + std::abs(state_[at]) * c_error;
      }
      if (spec_.skip) {
        const Rounded x = block.taken(SsmTensorKind::kX, token, head_, p);
        const auto d = static_cast<double>(input_.d()[static_cast<std::size_t>(head_)]);
        sum += d * x.value;
        magnitude += std::abs(d * x.value);
        slack += std::abs(d) * x.error;
      }
      if (terms_) {
        slack += rounding *
                 (kRoundings * std::abs(sum) + kDeviations / std::sqrt(3.0) * spread[static_cast<std::size_t>(p)]);
      }
      const auto scale = static_cast<double>(spec_.scale);
      sum *= scale;
      magnitude *= std::abs(scale);
      slack *= std::abs(scale);
      if (spec_.gate) {
        const double z = block.at(SsmTensorKind::kZ, token, head_, p);
        const double gate = z / (1.0 + std::exp(-z));
        sum *= gate;
        magnitude *= std::abs(gate);
        slack *= std::abs(gate);
      }
      row.y.push_back(sum);
      row.tolerance.push_back(kSsmTermTolerance * magnitude + slack);
    }
    expected_.push_back(std::move(row));
  }

  void compare(std::size_t at, bool chunk_finite) {
    const SampleLocation& sample = samples_[at];
    const Expected& row = expected_[at];
    ++accuracy_.rows;
    for (int p = 0; p < spec_.head_dim; ++p) {
      const auto value = static_cast<double>(
          load_element(y_.at(sample.row, head_) + p * static_cast<std::int64_t>(size_of(y_.dtype)), y_.dtype));
      const double expected = row.y[static_cast<std::size_t>(p)];
      // Values beyond the dtype's range become infinite.
      const bool finite = std::isfinite(static_cast<double>(round_to(expected)));
      if (finite != std::isfinite(value)) {
        if (finite && !chunk_finite) continue;
        if (accuracy_.misplaced++ == 0) accuracy_.first_misplaced = sample.sample;
        continue;
      }
      if (!finite) continue;
      ++accuracy_.compared;
      const double error = std::abs(value - expected);
      const double allowed = rounding_error(spec_.dtype, expected) + row.tolerance[static_cast<std::size_t>(p)];
      const double part = error == 0.0 ? 0.0 : error / allowed;
      if (accuracy_.compared > 1 && part <= accuracy_.part) continue;
      accuracy_.part = part;
      accuracy_.error = error;
      accuracy_.allowed = allowed;
      accuracy_.worst = sample.sample;
    }
  }

  float round_to(double value) const {
    std::byte bytes[sizeof(float)];
    store_element(bytes, spec_.dtype, static_cast<float>(value));
    return load_element(bytes, spec_.dtype);
  }

  const SsmInput& input_;
  const SsmSpec& spec_;
  int head_;
  std::vector<SampleLocation> samples_;  // ascending
  const TensorView& y_;
  std::vector<double> state_, magnitude_, slack_;  // [head_dim, state_dim]
  std::vector<Rounded> b_;                         // [state_dim] of a token
  std::vector<double> dt_x_;                       // [head_dim] of a token
  std::vector<double> decay_;                      // [head_dim] of a token
  std::vector<Expected> expected_;                 // of the samples so far
  std::size_t next_ = 0;
  std::optional<SegmentTerms> terms_;  // for a kernel that rounds factors
  SsmAccuracy accuracy_;
};

template <class Accuracy>
bool is_worse(const Accuracy& more, const Accuracy& all) {
  return more.compared > 0 && (all.compared == 0 || more.part > all.part);
}

// Keeps the worse of both.
void join(StateAccuracy& all, const StateAccuracy& more) {
  StateAccuracy joined = is_worse(more, all) ? more : all;
  joined.compared = all.compared + more.compared;
  joined.misplaced = all.misplaced + more.misplaced;
  all = joined;
}

void join(SsmAccuracy& all, const SsmAccuracy& more) {
  join(all.states, more.states);
  if (is_worse(more, all)) {
    all.part = more.part;
    all.error = more.error;
    all.allowed = more.allowed;
    all.worst = more.worst;
  }
  if (all.misplaced == 0) all.first_misplaced = more.first_misplaced;
  all.rows += more.rows;
  all.compared += more.compared;
  all.misplaced += more.misplaced;
}

// The final states of all heads of a sequence; null if this rank has none of them.
const float* final_of(const SsmResultView& result, std::int32_t sequence) {
  std::int64_t row = 0;
  for (const PackedRun& run : result.sequences) {
    if (sequence >= run.begin && sequence < run.end) {
      return reinterpret_cast<const float*>(result.states.at(row + sequence - run.begin, 0));
    }
    row += run.tokens();
  }
  return nullptr;
}

// Checks this rank's samples of one sequence, by head, and its final state. A head without samples belongs to a
// sequence whose final state the rank has.
SsmAccuracy check_sequence(const SsmInput& input, std::int32_t sequence,
                           const std::map<int, std::vector<SampleLocation>>& samples, const SsmResultView& result,
                           bool rounded, int threads) {
  const auto s = static_cast<std::size_t>(sequence);
  std::vector<HeadCheck> heads;
  std::vector<int> groups;
  std::int64_t last = 0;  // packed token of a sample
  for (const auto& [head, placed] : samples) {
    heads.emplace_back(input, head, placed, result.y, rounded);
    groups.push_back(head / (input.job().spec.heads / input.job().spec.groups));
    if (!placed.empty()) last = std::max(last, placed.back().sample.token);
  }
  if (input.job().initial_states) {
    std::vector<float> states(static_cast<std::size_t>(state_bytes(input.job().spec)) / sizeof(float));
    const std::int32_t one[] = {sequence};
    input.read_initial(one, states);
    for (HeadCheck& head : heads) head.start_from(states);
  }
  const std::int64_t begin = input.origins()[s];
  const std::int64_t sequence_end = begin + input.job().lengths[s];
  const float* const final = input.job().conv1d_only ? nullptr : final_of(result, sequence);
  const std::int64_t chunks = (last - begin) / kChunkTokens + 1;
  const std::int64_t end = final != nullptr ? sequence_end : std::min(sequence_end, begin + chunks * kChunkTokens);
  for (std::int64_t first = begin; first < end; first += kBlockTokens) {
    heartbeat();
    const std::int64_t block_end = std::min(end, first + kBlockTokens);
    const SsmTokenBlock block(input, sequence, {first, block_end}, groups, threads);
    const auto count = static_cast<std::int64_t>(heads.size());
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (std::int64_t i = 0; i < count; ++i) {
      for (std::int64_t chunk = first; chunk < block_end; chunk += kChunkTokens) {
        heads[static_cast<std::size_t>(i)].go_on(block, chunk, std::min(block_end, chunk + kChunkTokens));
      }
    }
  }
  SsmAccuracy all;
  for (HeadCheck& head : heads) {
    if (final != nullptr) head.compare_final(sequence, final);
    join(all, head.accuracy());
  }
  return all;
}

}  // namespace

SsmAccuracy check_ssm_result(const Collective& collective, const SsmInput& input, std::int64_t count,
                             const SsmResultView& result, bool rounded, int threads) {
  const SsmJob& job = input.job();
  std::map<std::int32_t, std::map<int, std::vector<SampleLocation>>> mine;
  const std::vector<std::int64_t>& origins = input.origins();
  for (const RowSample& sample : sample_ssm(job, count)) {
    std::int64_t row = 0;
    for (const PackedRun& run : result.runs) {
      if (sample.token >= run.begin && sample.token < run.end) {
        const auto after = std::ranges::upper_bound(origins, sample.token);
        const auto sequence = static_cast<std::int32_t>(after - origins.begin() - 1);
        mine[sequence][sample.head].push_back({sample, row + sample.token - run.begin});
      }
      row += run.tokens();
    }
  }
  // The final states of empty sequences, which have no rows: they are the initial ones.
  for (const PackedRun& run : result.sequences) {
    for (std::int64_t s = run.begin; s < run.end && !job.conv1d_only; ++s) {
      if (job.lengths[static_cast<std::size_t>(s)] == 0) mine[static_cast<std::int32_t>(s)][0];
    }
  }
  const double steps =
      static_cast<double>(job.tokens()) * static_cast<double>(kMaxHeads) * job.spec.head_dim * job.spec.state_dim;
  SsmAccuracy found;
  collective.run_collectively(
      [&] {
        for (const auto& [sequence, samples] : mine) {
          join(found, check_sequence(input, sequence, samples, result, rounded, threads));
        }
      },
      steps / kStepsPerSecond);
  SsmAccuracy all;
  for (const SsmAccuracy& theirs : collective.gather_values(found)) join(all, theirs);
  return all;
}

}  // namespace ringattn
