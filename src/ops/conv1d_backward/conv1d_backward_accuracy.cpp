// SPDX-License-Identifier: Apache-2.0
#include "ops/conv1d_backward/conv1d_backward_accuracy.hpp"

#include <algorithm>
#include <span>

#include "base/rank_liveness.hpp"
#include "kernels/ssm/ssm_oracle.hpp"
#include "ops/ssm/ssm_token_block.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kElementsAtOnce = std::int64_t{1} << 22;  // of a sequence's channels in fp64
constexpr std::int64_t kTokensPerRead = 512;
constexpr double kRowTerm = 2e-6;
constexpr double kWeightTerm = 3e-6;
constexpr double kSmallest = 0x1p-126;

double element_at(const void* rows, std::int64_t index, Dtype dtype) {
  const auto offset = index * static_cast<std::int64_t>(size_of(dtype));
  return static_cast<double>(load_element(static_cast<const std::byte*>(rows) + offset, dtype));
}

class ChannelsCheck {
 public:
  ChannelsCheck(const Conv1dBackwardInput& input, const Conv1dBackwardRankResult& result, int threads)
      : input_(input), result_(result), threads_(threads) {
    const std::int64_t tokens = std::max<std::int64_t>(1, input.forward().job().tokens());
    const std::int64_t all = spec().channels;
    const std::int64_t count = std::clamp<std::int64_t>(kElementsAtOnce / tokens, 1, all);
    for (std::int64_t i = 0; i < count; ++i) channels_.push_back(static_cast<int>(i * all / count));
    for (const std::string_view name : {"dx", "dweight", "dbias", "dconv_state"}) found_.emplace_back(name);
  }

  void check() {
    const auto taps = static_cast<std::size_t>(spec().width) + 1;
    std::vector<double> sums(channels_.size() * taps);
    std::vector<double> sizes = sums;
    for (std::size_t s = 0; s < input_.job().lengths.size(); ++s) {
      std::vector<Conv1dChannel> all = read(s);
      for (std::size_t i = 0; i < all.size(); ++i) {
        heartbeat();
        const Conv1dChannelGradients exact = oracle_conv1d_gradients(spec(), all[i]);
        compare_rows(s, channels_[i], exact);
        for (std::size_t k = 0; k < taps; ++k) {
          sums[i * taps + k] += exact.dtaps[k];
          sizes[i * taps + k] += exact.dtaps_size[k];
        }
      }
    }
    for (std::size_t i = 0; i < channels_.size(); ++i) {
      const auto channel = static_cast<std::size_t>(channels_[i]);
      for (std::size_t k = 0; k < taps; ++k) {
        const bool of_bias = k + 1 == taps;
        if (of_bias && !spec().bias) continue;
        const float value = of_bias ? result_.dbias[channel] : result_.dweight[channel * (taps - 1) + k];
        const double exact = sums[i * taps + k];
        found_[of_bias ? 2 : 1].compare(
            static_cast<double>(value), exact,
            rounding_error(Dtype::kF32, exact) + kWeightTerm * sizes[i * taps + k] + kSmallest,
            static_cast<std::int64_t>(k), channels_[i]);
      }
    }
  }

  const std::vector<GradientAccuracy>& found() const { return found_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t channels() const { return std::ssize(channels_); }

 private:
  const CausalConv1dSpec& spec() const { return input_.spec(); }

  // The checked channels of a sequence.
  std::vector<Conv1dChannel> read(std::size_t sequence) const {
    const SsmInput& forward = input_.forward();
    const auto width = static_cast<std::size_t>(spec().width);
    const std::int64_t halo = spec().halo_tokens();
    const std::int64_t length = input_.job().lengths[sequence];
    const std::int64_t origin = forward.origins()[sequence];
    std::vector<std::byte> initial(static_cast<std::size_t>(spec().halo_bytes()));
    const std::int32_t one[] = {static_cast<std::int32_t>(sequence)};
    if (input_.job().initial_halos) forward.read_halos(one, initial);
    std::vector<Conv1dChannel> all;
    for (const int channel : channels_) {
      Conv1dChannel& made = all.emplace_back();
      for (std::int64_t i = 0; i < halo; ++i) {
        made.tokens.push_back(element_at(initial.data(), i * spec().channels + channel, spec().dtype));
      }
      for (std::size_t k = 0; k < width; ++k) {
        made.taps.push_back(static_cast<double>(forward.conv_weight()[static_cast<std::size_t>(channel) * width + k]));
      }
      if (spec().bias) made.bias = static_cast<double>(forward.conv_bias()[static_cast<std::size_t>(channel)]);
    }
    Buffer block = allocate_host(static_cast<std::size_t>(kTokensPerRead * spec().channels) * size_of(spec().dtype));
    for (std::int64_t token = 0; token < length; token += kTokensPerRead) {
      heartbeat();
      const PackedRun run[] = {{origin + token, origin + std::min(length, token + kTokensPerRead)}};
      const MutableTensorView rows =
          dense_view(static_cast<void*>(block.data()), spec().dtype, run[0].tokens(), spec().channels, 1);
      const auto append = [&](std::vector<double> Conv1dChannel::*to) {
        for (std::size_t i = 0; i < all.size(); ++i) {
          for (std::int64_t row = 0; row < rows.tokens; ++row) {
            (all[i].*to).push_back(element_at(rows.data, row * spec().channels + channels_[i], spec().dtype));
          }
        }
      };
      forward.read(SsmTensorKind::kX, run, rows, threads_);
      append(&Conv1dChannel::tokens);
      input_.read_dy(run, rows, threads_);
      append(&Conv1dChannel::dy);
    }
    return all;
  }

  void compare(GradientAccuracy& all, double value, double exact, double size, std::int64_t place, int channel) const {
    all.compare(value, exact, rounding_error(spec().dtype, exact) + kRowTerm * size + kSmallest, place, channel);
  }

  // This rank's rows of a channel of a sequence.
  void compare_rows(std::size_t sequence, int channel, const Conv1dChannelGradients& exact) {
    const std::int64_t origin = input_.forward().origins()[sequence];
    const std::int64_t halo = spec().halo_tokens();
    std::int64_t row = 0;
    for (const PackedRun& run : result_.runs) {
      for (std::int64_t token = run.begin; token < run.end; ++token, ++row) {
        if (token < origin || token >= origin + input_.job().lengths[sequence]) continue;
        const auto at = static_cast<std::size_t>(token - origin + halo);
        compare(found_[0], element_at(result_.dx.data(), row * spec().channels + channel, spec().dtype),
                exact.dtokens[at], exact.dtokens_size[at], token, channel);
        ++rows_;
      }
    }
    for (std::size_t i = 0; i < result_.sequences.size(); ++i) {
      if (static_cast<std::size_t>(result_.sequences[i].begin) != sequence) continue;
      for (std::int64_t token = 0; token < halo; ++token) {
        const std::int64_t at = (static_cast<std::int64_t>(i) * spec().channels + channel) * halo + token;
        const auto of = static_cast<std::size_t>(token);
        compare(found_[3], element_at(result_.dinitial.data(), at, spec().dtype), exact.dtokens[of],
                exact.dtokens_size[of], result_.sequences[i].begin, channel);
      }
    }
  }

  const Conv1dBackwardInput& input_;
  const Conv1dBackwardRankResult& result_;
  int threads_;
  std::vector<int> channels_;
  std::vector<GradientAccuracy> found_;
  std::int64_t rows_ = 0;
};

}  // namespace

Conv1dBackwardAccuracy check_conv1d_gradients(const Collective& collective, const Conv1dBackwardInput& input,
                                              const Conv1dBackwardRankResult& result, int threads) {
  ChannelsCheck own(input, result, threads);
  collective.run_collectively([&] { own.check(); }, 60.0);
  Conv1dBackwardAccuracy all{0, own.channels(), merge_ranks(collective, own.found())};
  for (const std::int64_t rows : collective.gather_values(own.rows())) all.rows += rows;
  return all;
}

}  // namespace ringattn
