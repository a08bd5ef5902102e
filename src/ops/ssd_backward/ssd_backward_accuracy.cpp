// SPDX-License-Identifier: Apache-2.0
#include "ops/ssd_backward/ssd_backward_accuracy.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "base/rank_liveness.hpp"
#include "kernels/ssd_backward/ssd_backward_oracle.hpp"
#include "ops/ssm/ssm_token_block.hpp"

namespace ringattn {

namespace {

constexpr double kAllHeadsWork = 1e9;       // tokens · heads · state elements, below which all heads are checked
constexpr std::int64_t kBlockTokens = 512;  // that are read at a time
constexpr double kMinGradient = 0x1p-100;   // decays below are zero in a kernel

// Some heads of one sequence as a problem of its own, in host memory. They are heads of one group, or all heads.
class SubProblem {
 public:
  SubProblem(const SsdBackwardInput& input, std::size_t sequence, HeadRange heads, int threads)
      : input_(input), heads_(heads), spec_(input.job().forward.spec) {
    const SsmSpec& whole = input.job().forward.spec;
    const int group_heads = whole.heads / whole.groups;
    if (heads.count < whole.heads) spec_.groups = 1;
    groups_ = {heads.first / group_heads, spec_.groups};
    spec_.heads = heads.count;
    const std::int64_t begin = input.forward().origins()[sequence];
    const std::int64_t tokens = input.job().forward.lengths[sequence];
    const SsmInput& forward = input.forward();
    const auto read = [&](SsmTensorKind which, const HeadRange& range) {
      const SsmInput::RowShape shape = forward.row_shape(which);
      return rows(begin, tokens, shape.heads, shape.dim, range,
                  [&](std::span<const PackedRun> runs, const MutableTensorView& to) {
                    forward.read(which, runs, to, threads);
                  });
    };
    task_.x = read(SsmTensorKind::kX, heads);
    task_.dt = read(SsmTensorKind::kDt, heads);
    task_.b = read(SsmTensorKind::kB, groups_);
    task_.c = read(SsmTensorKind::kC, groups_);
    if (whole.gate) task_.z = read(SsmTensorKind::kZ, heads);
    task_.dy =
        rows(begin, tokens, whole.heads, whole.head_dim, heads,
             [&](std::span<const PackedRun> runs, const MutableTensorView& to) { input.read_dy(runs, to, threads); });
    task_.a = forward.a().data() + heads.first;
    if (whole.skip) task_.d = forward.d().data() + heads.first;
    if (whole.dt_bias) task_.dt_bias = forward.dt_bias().data() + heads.first;
    const std::int32_t one[] = {static_cast<std::int32_t>(sequence)};
    if (input.job().forward.initial_states) {
      initial_ = states([&](std::span<float> to) { forward.read_initial(one, to); });
    }
    if (input.job().final_gradients) {
      final_gradient_ = states([&](std::span<float> to) { input.read_final_gradients(one, to); });
    }
    tokens_ = tokens;
  }

  SsdGradients gradients(OracleTerms terms) const {
    return oracle_ssd_backward(spec_, task_, 0, tokens_, initial_, final_gradient_, terms);
  }
  const HeadRange& groups() const { return groups_; }

 private:
  template <class Read>
  TensorView rows(std::int64_t begin, std::int64_t tokens, std::int64_t all, std::int64_t dim, const HeadRange& range,
                  const Read& read) {
    const Dtype dtype = spec_.dtype;
    const auto bytes = static_cast<std::size_t>(dim) * size_of(dtype);
    const Buffer& own = buffers_.emplace_back(
        allocate_host(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(range.count) * bytes));
    std::byte* to = own.data();
    const Buffer block = allocate_host(static_cast<std::size_t>(kBlockTokens * all) * bytes);
    for (std::int64_t token = 0; token < tokens; token += kBlockTokens) {
      heartbeat();
      const std::int64_t count = std::min(kBlockTokens, tokens - token);
      const PackedRun run[] = {{begin + token, begin + token + count}};
      const MutableTensorView view = dense_view(static_cast<void*>(block.data()), dtype, count, all, dim);
      read(run, view);
      for (std::int64_t i = 0; i < count; ++i) {
        const std::size_t size = static_cast<std::size_t>(range.count) * bytes;
        std::memcpy(to, view.at(i, range.first), size);
        to += size;
      }
    }
    return dense_view(static_cast<const void*>(own.data()), dtype, tokens, range.count, dim);
  }
  template <class Read>
  std::vector<float> states(const Read& read) const {
    const SsmSpec& whole = input_.job().forward.spec;
    const auto state = static_cast<std::size_t>(whole.head_dim) * static_cast<std::size_t>(whole.state_dim);
    std::vector<float> all(static_cast<std::size_t>(whole.heads) * state);
    read(std::span<float>(all));
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(heads_.first) * state);
    return {first, first + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(heads_.count) * state)};
  }

  const SsdBackwardInput& input_;
  HeadRange heads_;
  HeadRange groups_;
  SsmSpec spec_;
  std::int64_t tokens_ = 0;
  std::vector<Buffer> buffers_;
  std::vector<float> initial_;
  std::vector<float> final_gradient_;
  SsdBackwardTask task_;
};

class HeadsCheck {
 public:
  HeadsCheck(const SsdBackwardInput& input, const SsdBackwardRankResult& result, bool rounds_factors)
      : input_(input), job_(input.job()), result_(result), rounds_factors_(rounds_factors) {
    for (const SsdGradientRows& tensor : gradient_rows(spec())) add(tensor.name);
    for (const SsdGradientParameter& parameter : gradient_parameters(spec())) add(parameter.name);
    if (job_.forward.initial_states) add("dinitial_states");
  }

  // Checks these heads in all sequences. `all`: they are all heads of every group.
  void check(const HeadRange& heads, bool all, int threads) {
    const auto count = static_cast<std::size_t>(heads.count);
    std::vector<std::vector<double>> sums(3, std::vector<double>(count));
    std::vector<std::vector<double>> magnitude_sums = sums;
    for (std::size_t s = 0; s < job_.forward.lengths.size(); ++s) {
      if (job_.forward.lengths[s] == 0) continue;
      const SubProblem problem(input_, s, heads, threads);
      heartbeat();
      const SsdGradients exact = problem.gradients(OracleTerms::kSigned);
      heartbeat();
      const SsdGradients magnitudes = problem.gradients(OracleTerms::kMagnitudes);
      compare_rows(s, exact, magnitudes, heads, problem.groups(), all);
      std::size_t which = 0;
      for (const Gradient parameter : kParameters) {
        for (std::size_t h = 0; h < (exact.*parameter).size(); ++h) {
          sums[which][h] += (exact.*parameter)[h];
          magnitude_sums[which][h] += (magnitudes.*parameter)[h];
        }
        ++which;
      }
    }
    // Errors of different chunks have different signs, so their sum grows with the square root of the number of chunks.
    std::int64_t chunks = 0;
    for (const std::int64_t tokens : job_.forward.lengths) chunks += (tokens + kChunkTokens - 1) / kChunkTokens;
    const double smaller = 1.0 / std::sqrt(static_cast<double>(std::max<std::int64_t>(chunks, 1)));
    std::size_t at = gradient_rows(spec()).size();
    for (const SsdGradientParameter& parameter : gradient_parameters(spec())) {
      const std::size_t which = parameter.name == "dA" ? 0 : parameter.name == "dD" ? 1 : 2;
      const double term = smaller * term_of(kParameters[which]);
      for (std::size_t h = 0; h < count; ++h) {
        const std::size_t head = static_cast<std::size_t>(heads.first) + h;
        compare(found_[at], static_cast<double>((result_.parameters.*parameter.values)[head]), sums[which][h],
                term * magnitude_sums[which][h], Dtype::kF32, 0, static_cast<int>(head));
      }
      ++at;
    }
  }

  const std::vector<GradientAccuracy>& found() const { return found_; }
  std::int64_t rows() const { return rows_; }

 private:
  using Gradient = std::vector<double> SsdGradients::*;
  static constexpr Gradient kParameters[] = {&SsdGradients::da, &SsdGradients::dd, &SsdGradients::ddt_bias};

  const SsmSpec& spec() const { return job_.forward.spec; }
  double term_of(Gradient gradient) const {
    return ssd_gradient_term(ssd_roundings(gradient, spec(), rounds_factors_), spec().dtype);
  }

  void add(std::string_view name) { found_.emplace_back(name); }

  void compare(GradientAccuracy& all, double value, double exact, double lost, Dtype dtype, std::int64_t place,
               int head) const {
    all.compare(value, exact, rounding_error(dtype, exact) + lost + kMinGradient, place, head);
  }

  void compare_rows(std::size_t sequence, const SsdGradients& exact, const SsdGradients& magnitudes,
                    const HeadRange& heads, const HeadRange& groups, bool all) {
    const std::int64_t origin = input_.forward().origins()[sequence];
    const std::int64_t length = job_.forward.lengths[sequence];
    const std::pair<std::string_view, Gradient> members[] = {{"dx", &SsdGradients::dx},
                                                             {"ddt", &SsdGradients::ddt},
                                                             {"dB", &SsdGradients::db},
                                                             {"dC", &SsdGradients::dc},
                                                             {"dz", &SsdGradients::dz}};
    const std::vector<SsdGradientRows> tensors = gradient_rows(spec());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const bool of_groups = tensors[i].name == "dB" || tensors[i].name == "dC";
      if (of_groups && !all) continue;
      const HeadRange& range = of_groups ? groups : heads;
      const TensorView rows = result_.rows_view(job_, i);
      const double term = term_of(members[i].second);
      std::int64_t row = 0;
      for (const PackedRun& run : result_.runs) {
        for (std::int64_t token = run.begin; token < run.end; ++token, ++row) {
          if (token < origin || token >= origin + length) continue;
          for (int h = 0; h < range.count; ++h) {
            if (i == 0) ++rows_;
            for (std::int64_t d = 0; d < tensors[i].dim; ++d) {
              const auto value = static_cast<double>(load_element(
                  rows.at(row, range.first + h) + d * static_cast<std::int64_t>(size_of(rows.dtype)), rows.dtype));
              const auto at = static_cast<std::size_t>(((token - origin) * range.count + h) * tensors[i].dim + d);
              compare(found_[i], value, (exact.*members[i].second)[at], term * (magnitudes.*members[i].second)[at],
                      job_.gradients, token, range.first + h);
            }
          }
        }
      }
    }
    compare_initial(sequence, exact, magnitudes, heads);
  }

  void compare_initial(std::size_t sequence, const SsdGradients& exact, const SsdGradients& magnitudes,
                       const HeadRange& heads) {
    const std::int64_t dim = std::int64_t{spec().head_dim} * spec().state_dim;
    const TensorView view = result_.initial_view(job_);
    const double term = term_of(&SsdGradients::initial_gradient);
    for (std::size_t i = 0; i < result_.sequences.size(); ++i) {
      if (static_cast<std::size_t>(result_.sequences[i].begin) != sequence) continue;
      for (int h = 0; h < heads.count; ++h) {
        const auto* const values =
            reinterpret_cast<const float*>(view.at(static_cast<std::int64_t>(i), heads.first + h));
        for (std::int64_t d = 0; d < dim; ++d) {
          const auto at = static_cast<std::size_t>(h * dim + d);
          compare(found_.back(), static_cast<double>(values[d]), exact.initial_gradient[at],
                  term * magnitudes.initial_gradient[at], Dtype::kF32, static_cast<std::int64_t>(sequence),
                  heads.first + h);
        }
      }
    }
  }

  const SsdBackwardInput& input_;
  const SsdBackwardJob& job_;
  const SsdBackwardRankResult& result_;
  bool rounds_factors_;
  std::vector<GradientAccuracy> found_;
  std::int64_t rows_ = 0;
};

}  // namespace

SsdBackwardAccuracy check_ssd_gradients(const Collective& collective, const SsdBackwardInput& input,
                                        const SsdBackwardRankResult& result, bool rounds_factors, int threads) {
  const SsmJob& forward = input.job().forward;
  const SsmSpec& spec = forward.spec;
  const double work = static_cast<double>(forward.tokens()) * spec.heads * spec.head_dim * spec.state_dim;
  SsdBackwardAccuracy all;
  all.all_heads = work <= kAllHeadsWork || spec.heads == 1;
  HeadsCheck own(input, result, rounds_factors);
  collective.run_collectively(
      [&] {
        if (all.all_heads) {
          own.check({0, spec.heads}, true, threads);
        } else {
          own.check({0, 1}, false, threads);
          own.check({spec.heads - 1, 1}, false, threads);
        }
      },
      60.0);
  all.gradients = merge_ranks(collective, own.found());
  for (const std::int64_t rows : collective.gather_values(own.rows())) all.rows += rows;
  return all;
}

}  // namespace ringattn
