// SPDX-License-Identifier: Apache-2.0
#include "ops/conv1d/causal_conv1d_backward.hpp"

#include <algorithm>
#include <utility>

#include "attention/ring/enqueued_runs.hpp"
#include "attention/ring/handshake.hpp"
#include "attention/ring/warm_up.hpp"
#include "attention/tokens/cost.hpp"
#include "attention/tokens/ssm_layout.hpp"
#include "base/error.hpp"
#include "comm/collective.hpp"
#include "comm/exchange.hpp"
#include "kernels/common/token_units.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/common/owned_states.hpp"
#include "ops/common/shard_checks.hpp"
#include "ops/rank_config.hpp"

namespace ringattn {

namespace {

// The parts that a rank receives for each of its runs, [width − 1, channels] each.
enum HaloPart : std::int64_t { kBefore, kNextX, kNextDy, kDfinal, kHaloParts };

// The exchanges of a run, in the order in which they are announced.
enum Round : std::int64_t { kHalos, kUnits, kSums, kRounds };

std::int64_t units_of(std::int64_t tokens) { return (tokens + kTokenUnit - 1) / kTokenUnit; }

}  // namespace

struct CausalConv1dBackward::Impl {
  Impl(CausalConv1dJob the_job, Transport& the_transport, CausalConv1dOptions the_options)
      : job(std::move(the_job)),
        options(std::move(the_options)),
        transport(the_transport),
        collective(transport, Timeouts(options.timeout_seconds)) {}

  const CausalConv1dSpec& spec() const { return job.spec; }
  int self() const { return transport.rank(); }
  std::int64_t rows() const { return spec().width + 1; }  // rows of a unit: the taps, and the bias
  std::int64_t row_bytes() const { return spec().halo_bytes() / spec().halo_tokens(); }
  std::int64_t first_channel(int rank) const { return std::int64_t{spec().channels} * rank / transport.size(); }
  std::int64_t channels(int rank) const { return first_channel(rank + 1) - first_channel(rank); }
  std::int64_t tokens_of(int rank, std::int64_t run) const {
    return layout->runs(rank)[static_cast<std::size_t>(run)].tokens();
  }
  std::byte* received(std::int64_t run, HaloPart part) const {
    return halos.data() + (run * kHaloParts + part) * spec().halo_bytes();
  }
  // Tokens of run `to_run` that the run before it on another rank reads.
  std::int64_t next_tokens(const StateHop& hop) const {
    return std::min<std::int64_t>(spec().halo_tokens(), tokens_of(hop.to, hop.to_run));
  }
  // Whether the final halo after the hop's later run reaches into the earlier one.
  bool shares_final_halo(const StateHop& hop) const {
    return job.final_halos && next_tokens(hop) < spec().halo_tokens();
  }

  void choose();
  void allocate();
  Exchange exchange_of(OneRound&& round, Round number, const char* label) const;
  Exchange exchange_halos(const CausalConv1dBackwardInputs& inputs) const;
  Exchange exchange_units() const;
  Exchange exchange_sums() const;
  void check(const CausalConv1dBackwardInputs& inputs, const CausalConv1dBackwardOutputs& outputs) const;
  std::vector<CausalConv1dGradientRun> runs_of(const CausalConv1dBackwardInputs& inputs,
                                               const CausalConv1dBackwardOutputs& outputs) const;
  void differentiate_empty(const CausalConv1dBackwardInputs& inputs, const CausalConv1dBackwardOutputs& outputs,
                           Stream stream);
  void sum(const CausalConv1dBackwardOutputs& outputs, Stream stream);
  void move(Exchange exchange, Stream stream) {
    transport.wait(transport.post(std::move(exchange), stream), stream, collective.timeouts().for_work(seconds));
  }
  void enqueue(const CausalConv1dBackwardInputs& inputs, const CausalConv1dBackwardOutputs& outputs, Stream stream);

  CausalConv1dJob job;
  CausalConv1dOptions options;
  Transport& transport;
  Collective collective;
  std::uint64_t config_hash = 0;  // of handshake()
  CausalConv1dChoice choice;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<CausalConv1dKernel> kernel;
  std::optional<Layout> layout;
  StateHops hops;
  OwnedStates owned;
  double seconds = 0.0;          // estimated duration of a run
  std::int64_t own_units = 0;    // of this rank's runs
  std::int64_t total_units = 0;  // of all ranks
  Buffer halos;                  // [runs, kHaloParts, width − 1, channels]
  Buffer units;                  // fp32 [own units, width + 1, channels]
  Buffer gathered;               // fp32 [all units, width + 1, channels of this rank], several ranks
  Buffer sums;                   // fp32 [channels, width], then [channels]
  std::int64_t announced = kNotAnnounced;
  std::optional<EnqueuedRuns> enqueued;
};

void CausalConv1dBackward::Impl::choose() {
  check_causal_conv1d(spec());
  if (job.update) {
    fail(ErrorCode::kUnsupported, "no gradients for an update", "updates are decode steps",
         "Differentiate a run over the sequence.");
  }
  layout = conv1d_layout(job.lengths, options.runs, transport.size());
  hops = state_hops(*layout);
  owned = OwnedStates(*layout, transport.rank());
  choice = choose_kernel(spec(), compatible_request(options.kernel, transport));
  backend = choice.row->make_backend({options.threads, transport.device()});
  check_compatible(*choice.row, *backend, transport);
  kernel = choice.row->make_kernel(spec(), *backend);
  std::int64_t max_tokens = 0;
  for (int rank = 0; rank < transport.size(); ++rank) max_tokens = std::max(max_tokens, layout->tokens(rank));
  seconds = 3.0 * conv1d_token_flops(spec()) * static_cast<double>(max_tokens) / choice.row->flops_per_second(*backend);
  for (const OwnedRun& run : layout->owners()) {
    total_units += units_of(run.tokens);
    if (run.owner == self()) own_units += units_of(run.tokens);
  }
}

void CausalConv1dBackward::Impl::allocate() {
  const auto floats = [&](std::int64_t count) {
    return backend->allocate(static_cast<std::size_t>(count) * sizeof(float));
  };
  halos = backend->allocate(layout->runs(self()).size() * kHaloParts * static_cast<std::size_t>(spec().halo_bytes()));
  units = floats(own_units * rows() * spec().channels);
  if (transport.size() > 1) gathered = floats(total_units * rows() * channels(self()));
  sums = floats(rows() * spec().channels);
  enqueued.emplace(*backend, transport, collective.timeouts());
}

Exchange CausalConv1dBackward::Impl::exchange_of(OneRound&& round, Round number, const char* label) const {
  Exchange exchange = std::move(round).exchange(label);
  if (announced != kNotAnnounced) exchange.announced = announced + number;
  return exchange;
}

// Exchange of the tokens around the border of two runs of a sequence on different ranks. Runs that are continued are
// whole segments, so only the last run of a sequence may have fewer tokens than a halo. Views without data: only
// sizes, for announce().
Exchange CausalConv1dBackward::Impl::exchange_halos(const CausalConv1dBackwardInputs& inputs) const {
  const auto bytes = static_cast<std::size_t>(row_bytes());
  OneRound round;
  for (const std::vector<StateHop>& step : hops.hops) {
    for (const StateHop& hop : step) {
      // Rows [first, first + count) of a view at the sender, part `part` of `run` at the receiver.
      const auto move_rows = [&](int from, const TensorView& view, std::int64_t first, std::int64_t count, int to,
                                 std::int64_t run, HaloPart part) {
        for (std::int64_t i = 0; i < count; ++i) {
          if (from == self()) {
            round.send(to, {view.data == nullptr ? nullptr : view.at(first + i, 0), bytes});
          } else if (to == self()) {
            round.receive(from, {received(run, part) + i * row_bytes(), bytes});
          }
        }
      };
      const std::int64_t halo = spec().halo_tokens();
      const std::int64_t end = layout->run_rows(hop.from)[static_cast<std::size_t>(hop.from_run) + 1];
      const std::int64_t begin = layout->run_rows(hop.to)[static_cast<std::size_t>(hop.to_run)];
      move_rows(hop.from, inputs.x, end - halo, halo, hop.to, hop.to_run, kBefore);
      move_rows(hop.to, inputs.x, begin, next_tokens(hop), hop.from, hop.from_run, kNextX);
      move_rows(hop.to, inputs.dy, begin, next_tokens(hop), hop.from, hop.from_run, kNextDy);
      if (!shares_final_halo(hop)) continue;
      const std::int32_t sequence = layout->runs(hop.to)[static_cast<std::size_t>(hop.to_run)].sequence;
      const std::int64_t at = hop.to == self() ? owned.final_index(sequence) : 0;
      const TensorView dfinal = dense_view(inputs.dfinal_halos, spec().dtype, (at + 1) * halo, 1, spec().channels);
      move_rows(hop.to, dfinal, at * halo, halo, hop.from, hop.from_run, kDfinal);
    }
  }
  return exchange_of(std::move(round), kHalos, "tokens around runs");
}

// Exchange of units: each rank gets those of all runs for its channels, in the order of the batch.
Exchange CausalConv1dBackward::Impl::exchange_units() const {
  OneRound round;
  std::vector<std::int64_t> next(static_cast<std::size_t>(transport.size()));  // unit of each rank
  std::int64_t unit = 0;
  const auto* const own = reinterpret_cast<const float*>(units.data());
  auto* const all = reinterpret_cast<float*>(gathered.data());
  for (const OwnedRun& run : layout->owners()) {
    std::int64_t& of_owner = next[static_cast<std::size_t>(run.owner)];
    for (std::int64_t row = 0; row < units_of(run.tokens) * rows(); ++row) {
      if (run.owner != self()) {
        const std::int64_t width = channels(self());
        if (width == 0) continue;
        round.receive(run.owner, {reinterpret_cast<std::byte*>(all + (unit * rows() + row) * width),
                                  static_cast<std::size_t>(width) * sizeof(float)});
        continue;
      }
      for (int peer = 0; peer < transport.size(); ++peer) {
        if (peer == self() || channels(peer) == 0) continue;
        const float* const from = own + (of_owner * rows() + row) * spec().channels + first_channel(peer);
        round.send(
            peer, {reinterpret_cast<const std::byte*>(from), static_cast<std::size_t>(channels(peer)) * sizeof(float)});
      }
    }
    of_owner += units_of(run.tokens);
    unit += units_of(run.tokens);
  }
  return exchange_of(std::move(round), kUnits, "units of gradients");
}

// Every rank sends the sums of its channels to all others.
Exchange CausalConv1dBackward::Impl::exchange_sums() const {
  OneRound round;
  const auto spans = [&](int rank, const auto& add) {
    auto* const all = reinterpret_cast<float*>(sums.data());
    const std::int64_t first = first_channel(rank);
    const auto count = static_cast<std::size_t>(channels(rank)) * sizeof(float);
    if (count == 0) return;
    add(reinterpret_cast<std::byte*>(all + first * spec().width), count * static_cast<std::size_t>(spec().width));
    add(reinterpret_cast<std::byte*>(all + spec().channels * spec().width + first), count);
  };
  for (int peer = 0; peer < transport.size(); ++peer) {
    if (peer == self()) continue;
    spans(self(), [&](const std::byte* data, std::size_t bytes) { round.send(peer, {data, bytes}); });
    spans(peer, [&](std::byte* data, std::size_t bytes) { round.receive(peer, {data, bytes}); });
  }
  return exchange_of(std::move(round), kSums, "gradients of weights");
}

void CausalConv1dBackward::Impl::check(const CausalConv1dBackwardInputs& inputs,
                                       const CausalConv1dBackwardOutputs& outputs) const {
  const ShardShape rows_of_channels{spec().dtype, layout->tokens(self()), 1, spec().channels};
  check_shard("CausalConv1d", "x", inputs.x, rows_of_channels);
  check_shard("CausalConv1d", "dy", inputs.dy, rows_of_channels);
  check_shard("CausalConv1d", "dx", outputs.dx, rows_of_channels);
  check_apart("dx", outputs.dx, "x", inputs.x);
  check_apart("dx", outputs.dx, "dy", inputs.dy);
  check_given("CausalConv1d", "weight", inputs.weight, true);
  check_given("CausalConv1d", "bias", inputs.bias, spec().bias);
  check_given("CausalConv1d", "initial_halos", inputs.initial_halos, job.initial_halos && !owned.beginning.empty());
  check_given("CausalConv1d", "dfinal_halos", inputs.dfinal_halos, job.final_halos && !owned.ending.empty());
  check_given("CausalConv1d", "dweight", outputs.dweight, true);
  check_given("CausalConv1d", "dbias", outputs.dbias, spec().bias);
  check_given("CausalConv1d", "dinitial_halos", outputs.dinitial_halos, job.initial_halos && !owned.beginning.empty());
}

std::vector<CausalConv1dGradientRun> CausalConv1dBackward::Impl::runs_of(
    const CausalConv1dBackwardInputs& inputs, const CausalConv1dBackwardOutputs& outputs) const {
  const std::int64_t halo_bytes = spec().halo_bytes();
  const auto* const initial = static_cast<const std::byte*>(inputs.initial_halos);
  const auto* const dfinal = static_cast<const std::byte*>(inputs.dfinal_halos);
  auto* const dinitial = static_cast<std::byte*>(outputs.dinitial_halos);
  std::vector<CausalConv1dGradientRun> runs;
  const std::span<const TokenRun> tokens = layout->runs(self());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const TokenRun& own = tokens[i];
    CausalConv1dGradientRun run;
    run.row = layout->run_rows(self())[i];
    run.tokens = own.tokens();
    if (own.begin > 0) {
      run.initial_halo = received(static_cast<std::int64_t>(i), kBefore);
    } else if (initial != nullptr) {
      run.initial_halo = initial + owned.initial_index(own.sequence) * halo_bytes;
      run.dinitial_halo = dinitial + owned.initial_index(own.sequence) * halo_bytes;
    }
    if (own.end == job.lengths[static_cast<std::size_t>(own.sequence)] && dfinal != nullptr) {
      run.dfinal_halo = dfinal + owned.final_index(own.sequence) * halo_bytes;
    }
    runs.push_back(run);
  }
  for (const std::vector<StateHop>& step : hops.hops) {
    for (const StateHop& hop : step) {
      if (hop.from != self()) continue;
      CausalConv1dGradientRun& run = runs[static_cast<std::size_t>(hop.from_run)];
      run.next_tokens = next_tokens(hop);
      run.next_x = received(hop.from_run, kNextX);
      run.next_dy = received(hop.from_run, kNextDy);
      if (shares_final_halo(hop)) run.dfinal_halo = received(hop.from_run, kDfinal);
    }
  }
  return runs;
}

// The final halo of a sequence without tokens is its initial halo.
void CausalConv1dBackward::Impl::differentiate_empty(const CausalConv1dBackwardInputs& inputs,
                                                     const CausalConv1dBackwardOutputs& outputs, Stream stream) {
  if (outputs.dinitial_halos == nullptr) return;
  const std::int64_t bytes = spec().halo_bytes();
  for (const PassThroughStates& passed : owned.empty) {
    std::byte* const to = static_cast<std::byte*>(outputs.dinitial_halos) + passed.initial * bytes;
    if (inputs.dfinal_halos == nullptr) {
      backend->fill_bytes(to, std::byte{0}, static_cast<std::size_t>(passed.count * bytes), stream);
    } else {
      const auto* const from = static_cast<const std::byte*>(inputs.dfinal_halos) + passed.final * bytes;
      backend->copy_rows(to, bytes, from, bytes, bytes, passed.count, stream);
    }
  }
}

void CausalConv1dBackward::Impl::sum(const CausalConv1dBackwardOutputs& outputs, Stream stream) {
  auto* const dweight = reinterpret_cast<float*>(sums.data());
  float* const dbias = dweight + std::int64_t{spec().channels} * spec().width;
  CausalConv1dUnitSum sum{reinterpret_cast<const float*>(units.data()), total_units, spec().channels, dweight, dbias};
  if (transport.size() > 1) {
    const std::int64_t width = channels(self()) * static_cast<std::int64_t>(sizeof(float));
    const std::int64_t stride = spec().channels * static_cast<std::int64_t>(sizeof(float));
    const std::byte* from = units.data() + first_channel(self()) * static_cast<std::int64_t>(sizeof(float));
    std::byte* to = gathered.data();
    for (const OwnedRun& run : layout->owners()) {
      const std::int64_t count = units_of(run.tokens) * rows();
      if (run.owner == self() && width > 0) {
        backend->copy_rows(to, width, from, stride, width, count, stream);
        from += count * stride;
      }
      to += count * width;
    }
    move(exchange_units(), stream);
    sum = {reinterpret_cast<const float*>(gathered.data()), total_units, channels(self()),
           dweight + first_channel(self()) * spec().width, dbias + first_channel(self())};
  }
  kernel->sum_units(sum, stream);
  if (transport.size() > 1) move(exchange_sums(), stream);
  const auto copy = [&](float* to, const float* from, std::int64_t count) {
    const std::int64_t bytes = count * static_cast<std::int64_t>(sizeof(float));
    backend->copy_rows(to, bytes, from, bytes, bytes, 1, stream);
  };
  copy(outputs.dweight, dweight, std::int64_t{spec().channels} * spec().width);
  if (outputs.dbias != nullptr) copy(outputs.dbias, dbias, spec().channels);
}

void CausalConv1dBackward::Impl::enqueue(const CausalConv1dBackwardInputs& inputs,
                                         const CausalConv1dBackwardOutputs& outputs, Stream stream) {
  check_capture(*backend, stream, "these gradients", transport, "receives halos from other ranks");
  enqueued->enqueue(stream, seconds, [&] {
    const std::vector<CausalConv1dGradientRun> runs = runs_of(inputs, outputs);
    if (!hops.hops.empty()) move(exchange_halos(inputs), stream);
    differentiate_empty(inputs, outputs, stream);
    kernel->differentiate(
        {inputs.x, inputs.dy, inputs.weight, inputs.bias, runs, outputs.dx, reinterpret_cast<float*>(units.data())},
        stream, [this] { transport.progress(); });
    sum(outputs, stream);
  });
}

CausalConv1dBackward::CausalConv1dBackward(CausalConv1dJob job, Transport& transport, CausalConv1dOptions options)
    : impl_(std::make_unique<Impl>(std::move(job), transport, std::move(options))) {
  Impl& impl = *impl_;
  if (impl.options.threads == 0) impl.options.threads = default_host_threads(impl.collective);
  impl.collective.run_collectively([&impl] { impl.choose(); });
  impl.config_hash = handshake(impl.collective, rank_config(impl.job, impl.options, impl.choice, *impl.backend));
  impl.collective.run_collectively([&impl] { impl.allocate(); });
  if (transport.size() == 1) return;
  const Exchange exchanges[kRounds] = {impl.exchange_halos({}), impl.exchange_units(), impl.exchange_sums()};
  impl.announced = transport.announce(exchanges, impl.collective.timeouts().for_peer());
}

CausalConv1dBackward::~CausalConv1dBackward() = default;
CausalConv1dBackward::CausalConv1dBackward(CausalConv1dBackward&&) noexcept = default;

const CausalConv1dJob& CausalConv1dBackward::job() const { return impl_->job; }
const CausalConv1dOptions& CausalConv1dBackward::options() const { return impl_->options; }
const CausalConv1dChoice& CausalConv1dBackward::kernel() const { return impl_->choice; }
Backend& CausalConv1dBackward::backend() { return *impl_->backend; }
const Layout& CausalConv1dBackward::layout() const { return *impl_->layout; }
const std::vector<std::int32_t>& CausalConv1dBackward::beginning() const { return impl_->owned.beginning; }
const std::vector<std::int32_t>& CausalConv1dBackward::ending() const { return impl_->owned.ending; }

void CausalConv1dBackward::run(const CausalConv1dBackwardInputs& inputs, const CausalConv1dBackwardOutputs& outputs,
                               Stream stream) {
  Impl& impl = *impl_;
  begin_run(impl.collective, impl.config_hash, "backward of " + describe(impl.job.spec), [&] {
    check_not_captured(*impl.backend, stream);
    impl.check(inputs, outputs);
  });
  impl.enqueue(inputs, outputs, stream);
  impl.enqueued->wait_all();
  impl.collective.barrier(impl.seconds);
}

void CausalConv1dBackward::enqueue(const CausalConv1dBackwardInputs& inputs, const CausalConv1dBackwardOutputs& outputs,
                                   Stream stream) {
  impl_->check(inputs, outputs);
  impl_->enqueue(inputs, outputs, stream);
}

void CausalConv1dBackward::wait() {
  if (impl_->enqueued->any()) impl_->enqueued->wait_all();
}

}  // namespace ringattn
