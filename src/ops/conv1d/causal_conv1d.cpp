// SPDX-License-Identifier: Apache-2.0
#include "ops/conv1d/causal_conv1d.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "attention/ring/enqueued_runs.hpp"
#include "attention/ring/handshake.hpp"
#include "attention/ring/warm_up.hpp"
#include "attention/tokens/cost.hpp"
#include "attention/tokens/ssm_layout.hpp"
#include "base/error.hpp"
#include "comm/collective.hpp"
#include "comm/exchange.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/common/owned_states.hpp"
#include "ops/common/shard_checks.hpp"
#include "ops/rank_config.hpp"

namespace ringattn {

namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& why, const std::string& suggestion) {
  fail(ErrorCode::kUsage, what, why, suggestion);
}

void check_update(const CausalConv1dJob& job) {
  if (!job.update) return;
  if (std::ranges::any_of(job.lengths, [](std::int64_t length) { return length != 1; })) {
    refuse("an update of sequences with several tokens", "it takes one token of each", "Check the job.");
  }
  if (!(job.initial_halos && job.final_halos)) {
    refuse("an update without halos", "it reads and writes the halo of each sequence", "Check the job.");
  }
}

}  // namespace

struct CausalConv1d::Impl {
  Impl(CausalConv1dJob the_job, Transport& the_transport, CausalConv1dOptions the_options)
      : job(std::move(the_job)),
        options(std::move(the_options)),
        transport(the_transport),
        collective(transport, Timeouts(options.timeout_seconds)) {}

  std::size_t halo_bytes() const { return static_cast<std::size_t>(job.spec.halo_bytes()); }
  bool ends(const TokenRun& run) const { return run.end == job.lengths[static_cast<std::size_t>(run.sequence)]; }

  void choose();
  void allocate();
  void check(const CausalConv1dInputs& inputs, const CausalConv1dOutputs& outputs) const;
  Exchange halos(const TensorView& x) const;
  std::vector<CausalConv1dRun> runs_of(const CausalConv1dInputs& inputs, const CausalConv1dOutputs& outputs) const;
  void update(const CausalConv1dInputs& inputs, const CausalConv1dOutputs& outputs, Stream stream);
  void enqueue(const CausalConv1dInputs& inputs, const CausalConv1dOutputs& outputs, Stream stream);

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
  double seconds = 0.0;  // estimated duration of a convolution
  Buffer received;       // [runs] halos before the runs
  std::int64_t announced = kNotAnnounced;
  std::optional<EnqueuedRuns> enqueued;
};

void CausalConv1d::Impl::choose() {
  check_causal_conv1d(job.spec);
  check_update(job);
  layout = conv1d_layout(job.lengths, options.runs, transport.size());
  hops = state_hops(*layout);
  owned = OwnedStates(*layout, transport.rank());
  choice = choose_kernel(job.spec, compatible_request(options.kernel, transport));
  backend = choice.row->make_backend({options.threads, transport.device()});
  check_compatible(*choice.row, *backend, transport);
  kernel = choice.row->make_kernel(job.spec, *backend);
  std::int64_t max_tokens = 0;
  for (int rank = 0; rank < transport.size(); ++rank) max_tokens = std::max(max_tokens, layout->tokens(rank));
  seconds = conv1d_token_flops(job.spec) * static_cast<double>(max_tokens) / choice.row->flops_per_second(*backend);
}

void CausalConv1d::Impl::allocate() {
  received = backend->allocate(layout->runs(transport.rank()).size() * halo_bytes());
  enqueued.emplace(*backend, transport, collective.timeouts());
}

void CausalConv1d::Impl::check(const CausalConv1dInputs& inputs, const CausalConv1dOutputs& outputs) const {
  const ShardShape rows_of_channels{job.spec.dtype, layout->tokens(transport.rank()), 1, job.spec.channels};
  check_shard("CausalConv1d", "x", inputs.x, rows_of_channels);
  check_shard("CausalConv1d", "y", outputs.y, rows_of_channels);
  check_apart("y", outputs.y, "x", inputs.x);
  check_given("CausalConv1d", "weight", inputs.weight, true);
  check_given("CausalConv1d", "bias", inputs.bias, job.spec.bias);
  check_given("CausalConv1d", "initial_halos", inputs.initial_halos, job.initial_halos && !owned.beginning.empty());
  check_given("CausalConv1d", "final_halos", outputs.final_halos, job.final_halos && !owned.ending.empty());
  if (inputs.slots == nullptr || (job.update && inputs.initial_halos == outputs.final_halos)) return;
  refuse("slots are given", job.update ? "initial_halos and final_halos differ" : "the job is not an update",
         "Slots are those of an update in place.");
}

void CausalConv1d::Impl::update(const CausalConv1dInputs& inputs, const CausalConv1dOutputs& outputs, Stream stream) {
  if (inputs.x.tokens == 0) return;
  if (inputs.initial_halos != outputs.final_halos) {
    const std::int64_t bytes = inputs.x.tokens * job.spec.halo_bytes();
    backend->copy_rows(outputs.final_halos, bytes, inputs.initial_halos, bytes, bytes, 1, stream);
  }
  kernel->update({inputs.x, inputs.weight, inputs.bias, outputs.final_halos, outputs.y, inputs.slots}, stream);
}

// Exchange of the last tokens of each run whose sequence continues on another rank. Such runs are whole segments, so
// each has enough tokens. `x` without data: only sizes, for announce().
Exchange CausalConv1d::Impl::halos(const TensorView& x) const {
  const int self = transport.rank();
  const int tokens = job.spec.halo_tokens();
  const std::size_t row_bytes = halo_bytes() / static_cast<std::size_t>(tokens);
  OneRound rows;
  for (const std::vector<StateHop>& step : hops.hops) {
    for (const StateHop& hop : step) {
      for (int i = 0; i < tokens; ++i) {
        if (hop.from == self) {
          const std::int64_t run_end = layout->run_rows(self)[static_cast<std::size_t>(hop.from_run) + 1];
          rows.send(hop.to, {x.data == nullptr ? nullptr : x.at(run_end - tokens + i, 0), row_bytes});
        } else if (hop.to == self) {
          std::byte* const halo = received.data() + static_cast<std::size_t>(hop.to_run) * halo_bytes();
          rows.receive(hop.from, {halo + static_cast<std::size_t>(i) * row_bytes, row_bytes});
        }
      }
    }
  }
  Exchange exchange = std::move(rows).exchange("halos of runs");
  exchange.announced = announced;
  return exchange;
}

std::vector<CausalConv1dRun> CausalConv1d::Impl::runs_of(const CausalConv1dInputs& inputs,
                                                         const CausalConv1dOutputs& outputs) const {
  const auto* const initial = static_cast<const std::byte*>(inputs.initial_halos);
  auto* const final = static_cast<std::byte*>(outputs.final_halos);
  std::vector<CausalConv1dRun> runs;
  const std::span<const TokenRun> tokens = layout->runs(transport.rank());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    CausalConv1dRun run;
    run.row = layout->run_rows(transport.rank())[i];
    run.tokens = tokens[i].tokens();
    if (tokens[i].begin > 0) {
      run.initial_halo = received.data() + i * halo_bytes();
    } else if (initial != nullptr) {
      run.initial_halo = initial + owned.initial_index(tokens[i].sequence) * job.spec.halo_bytes();
    }
    if (ends(tokens[i]) && final != nullptr) {
      run.final_halo = final + owned.final_index(tokens[i].sequence) * job.spec.halo_bytes();
    }
    runs.push_back(run);
  }
  return runs;
}

void CausalConv1d::Impl::enqueue(const CausalConv1dInputs& inputs, const CausalConv1dOutputs& outputs, Stream stream) {
  check_capture(*backend, stream, "this convolution", transport, "receives halos from other ranks");
  enqueued->enqueue(stream, seconds, [&] {
    const std::vector<CausalConv1dRun> runs = runs_of(inputs, outputs);
    if (!hops.hops.empty()) {
      transport.wait(transport.post(halos(inputs.x), stream), stream, collective.timeouts().for_work(seconds));
    }
    if (job.update) {
      update(inputs, outputs, stream);
    } else {
      pass_states_through(owned.empty, inputs.initial_halos, outputs.final_halos, job.spec.halo_bytes(), *backend,
                          stream);
      kernel->convolve({inputs.x, inputs.weight, inputs.bias, runs, outputs.y}, stream,
                       [this] { transport.progress(); });
    }
  });
}

CausalConv1d::CausalConv1d(CausalConv1dJob job, Transport& transport, CausalConv1dOptions options)
    : impl_(std::make_unique<Impl>(std::move(job), transport, std::move(options))) {
  Impl& impl = *impl_;
  if (impl.options.threads == 0) impl.options.threads = default_host_threads(impl.collective);
  impl.collective.run_collectively([&impl] { impl.choose(); });
  impl.config_hash = handshake(impl.collective, rank_config(impl.job, impl.options, impl.choice, *impl.backend));
  impl.collective.run_collectively([&impl] { impl.allocate(); });
  if (impl.hops.hops.empty()) return;
  const Exchange exchanges[] = {impl.halos({})};
  impl.announced = transport.announce(exchanges, impl.collective.timeouts().for_peer());
}

CausalConv1d::~CausalConv1d() = default;
CausalConv1d::CausalConv1d(CausalConv1d&&) noexcept = default;

const CausalConv1dJob& CausalConv1d::job() const { return impl_->job; }
const CausalConv1dChoice& CausalConv1d::kernel() const { return impl_->choice; }
Backend& CausalConv1d::backend() { return *impl_->backend; }
const Layout& CausalConv1d::layout() const { return *impl_->layout; }
const std::vector<std::int32_t>& CausalConv1d::beginning() const { return impl_->owned.beginning; }
const std::vector<std::int32_t>& CausalConv1d::ending() const { return impl_->owned.ending; }

void CausalConv1d::run(const CausalConv1dInputs& inputs, const CausalConv1dOutputs& outputs, Stream stream) {
  Impl& impl = *impl_;
  begin_run(impl.collective, impl.config_hash, describe(impl.job.spec), [&] {
    check_not_captured(*impl.backend, stream);
    impl.check(inputs, outputs);
  });
  impl.enqueue(inputs, outputs, stream);
  impl.enqueued->wait_all();
  impl.collective.barrier(impl.seconds);
}

void CausalConv1d::enqueue(const CausalConv1dInputs& inputs, const CausalConv1dOutputs& outputs, Stream stream) {
  impl_->check(inputs, outputs);
  impl_->enqueue(inputs, outputs, stream);
}

void CausalConv1d::wait() {
  if (impl_->enqueued->any()) impl_->enqueued->wait_all();
}

}  // namespace ringattn
