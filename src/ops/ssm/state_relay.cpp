// SPDX-License-Identifier: Apache-2.0
#include "ops/ssm/state_relay.hpp"

#include <algorithm>
#include <utility>

#include "base/failpoint.hpp"

namespace ringattn {

namespace {

constexpr std::size_t kMarksOfRange = 2;

std::size_t accumulated(std::size_t range) { return kMarksOfRange * range; }
std::size_t carried(std::size_t range) { return kMarksOfRange * range + 1; }

}  // namespace

StateRelay::StateRelay(std::span<const HeadRange> ranges, StateExchange& exchange, Transport& transport,
                       Backend& backend, const Timeouts& timeouts)
    : ranges_(ranges), exchange_(exchange), transport_(transport), timeouts_(timeouts) {
  if (exchange_.steps() > 0) ahead_ = backend.make_priority_stream(kMarksOfRange * ranges.size() + 1);
}

std::size_t StateRelay::max_waits(std::size_t ranges, int steps) {
  return ranges * (static_cast<std::size_t>(steps) + 1) + 1;
}

void StateRelay::run_ranges(StateCarry carry, Stream stream, double seconds, SsmTimeline* clock,
                            const RangeWork& accumulate, const RangeWork& finish) {
  const auto timed = [&](SsmPhase::Kind kind, std::size_t range, const RangeWork& work) {
    if (clock != nullptr) clock->begin_phase(kind, ranges_[range], stream);
    work(range);
    if (clock != nullptr) clock->end_phase(kind, stream);
  };
  const auto join_and_finish = [&](std::size_t range) {
    join(range);
    timed(SsmPhase::Kind::kOutput, range, finish);
  };
  enter(std::move(carry), stream, seconds, clock);
  timed(SsmPhase::Kind::kSegmentState, 0, accumulate);
  begin(0);
  if (exchange_.steps() > 0) failpoint("states");
  for (std::size_t range = 1; range < ranges_.size(); ++range) {
    timed(SsmPhase::Kind::kSegmentState, range, accumulate);
    end();
    begin(range);
    join_and_finish(range - 1);
  }
  end();
  join_and_finish(ranges_.size() - 1);
}

void StateRelay::enter(StateCarry carry, Stream stream, double seconds, SsmTimeline* clock) {
  carry_ = std::move(carry);
  stream_ = stream;
  own_ = has_own_stream() ? ahead_->stream() : stream;
  seconds_ = seconds;
  clock_ = clock;
  in_flight_ = false;
  tickets_.clear();
  last_carried_ = carry_.steps.empty() ? 0 : std::ranges::max(carry_.steps);
}

bool StateRelay::arrived() const {
  return std::ranges::all_of(tickets_, [this](Ticket ticket) { return transport_.finished(ticket); });
}

void StateRelay::wait_for_tickets() {
  for (const Ticket ticket : tickets_) transport_.wait(ticket, own_, timeouts_.for_work(seconds_));
  tickets_.clear();
}

void StateRelay::carry_and_post() {
  const HeadRange& heads = ranges_[range_];
  if (std::ranges::find(carry_.steps, step_) != carry_.steps.end()) carry_.carry(heads, step_, own_);
  if (step_ == last_carried_ && has_own_stream()) ahead_->record(carried(range_), own_);
  if (step_ < exchange_.steps()) tickets_.push_back(exchange_.post(range_, step_, own_));
  ++step_;
}

// Carries and posts up to the next exchange in which this rank receives states.
void StateRelay::carry_to_next_receive() {
  while (step_ <= exchange_.steps()) {
    carry_and_post();
    if (exchange_.receives(step_ - 1)) return;
  }
}

void StateRelay::begin(std::size_t range) {
  range_ = range;
  step_ = 0;
  in_flight_ = true;
  if (has_own_stream()) {
    ahead_->record(accumulated(range), stream_);
    ahead_->follow(accumulated(range), own_);
  }
  if (exchange_.steps() > 0 && clock_ != nullptr) {
    clock_->begin_phase(SsmPhase::Kind::kTransfer, ranges_[range], own_);
  }
  carry_to_next_receive();
}

void StateRelay::advance() {
  if (has_own_stream() || !in_flight_) return;
  while (step_ <= exchange_.steps() && arrived()) {
    wait_for_tickets();  // returns at once, because they have arrived
    carry_to_next_receive();
  }
}

void StateRelay::end() {
  const bool timed = clock_ != nullptr && !has_own_stream();
  const auto wait = [&] {
    if (tickets_.empty()) return;
    if (timed) clock_->begin_phase(SsmPhase::Kind::kWait, ranges_[range_], own_);
    wait_for_tickets();
    if (timed) clock_->end_phase(SsmPhase::Kind::kWait, own_);
  };
  while (step_ <= exchange_.steps()) {
    wait();
    carry_to_next_receive();
  }
  wait();
  if (clock_ != nullptr) clock_->end_phase(SsmPhase::Kind::kTransfer, own_);
  in_flight_ = false;
}

void StateRelay::join(std::size_t range) {
  if (!has_own_stream()) return;
  const bool last = range + 1 == ranges_.size();
  const std::size_t everything = kMarksOfRange * ranges_.size();
  if (last) ahead_->record(everything, own_);
  if (clock_ != nullptr) clock_->begin_phase(SsmPhase::Kind::kWait, ranges_[range], stream_);
  ahead_->follow(carried(range), stream_);
  if (last) ahead_->follow(everything, stream_);
  if (clock_ != nullptr) clock_->end_phase(SsmPhase::Kind::kWait, stream_);
}

}  // namespace ringattn
