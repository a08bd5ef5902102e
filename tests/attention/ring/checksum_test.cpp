// SPDX-License-Identifier: Apache-2.0
// Checksums: a byte that changes on its way between ranks ends the job, and the message names who sent what to whom.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "comm/threads.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/forwarding_transport.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {
namespace {

constexpr int kWorld = 3;
constexpr int kDamagedRank = 1;

// What a message's spans hold, in turn: keys, values, their checksum.
enum Span : std::size_t { kKeys = 0, kValues = 1, kChecksum = 2 };

// Another transport, but for one bit of the first message that this rank receives in exchange `exchange`.
class DamagingTransport final : public ForwardingTransport {
 public:
  DamagingTransport(Transport& inner, Ticket exchange, Span span)
      : ForwardingTransport(inner), exchange_(exchange), span_(span) {}

  // Whether there was something to damage.
  bool damaged() const { return damaged_; }

  Ticket post(Exchange exchange, Stream stream) override {
    std::vector<ReceiveMessage> receives = exchange.receives;
    const Ticket ticket = ForwardingTransport::post(std::move(exchange), stream);
    receives_[ticket] = std::move(receives);
    return ticket;
  }
  void wait(Ticket ticket, Stream stream, const Deadline& deadline) override {
    ForwardingTransport::wait(ticket, stream, deadline);
    const std::vector<ReceiveMessage>& receives = receives_.at(ticket);
    if (ticket != exchange_ || receives.empty() || receives[0].spans.size() <= span_) return;
    const ReceiveSpan& span = receives[0].spans[span_];
    span.data[span.bytes / 2] ^= std::byte{0x10};
    damaged_ = true;
  }

 private:
  Ticket exchange_;
  Span span_;
  bool damaged_ = false;
  std::map<Ticket, std::vector<ReceiveMessage>> receives_;
};

class Checksums : public ::testing::Test {
 protected:
  // The job of a world in which one rank's second block arrives damaged.
  JobResult run_damaged(bool checksum, Span span) {
    options_.threads = 1;
    options_.block_tokens = 256;
    options_.checksum = checksum;
    JobResult result = poisoned_result(job_, kWorld);
    run_threads_world(kWorld, {}, [&](Transport& transport) {
      if (transport.rank() != kDamagedRank) return run_rank(job_, options_, tensors_, transport, result);
      DamagingTransport damaging(transport, /*exchange=*/1, span);
      try {
        run_rank(job_, options_, tensors_, damaging, result);
      } catch (...) {
        was_damaged_ = damaging.damaged();
        throw;
      }
      was_damaged_ = damaging.damaged();
    });
    return result;
  }

  const Job job_{make_spec(Dtype::kBf16, 2, 1, 32, {-1, -1}), uniform_batch(1, 900, 900)};
  const JobTensors tensors_ = random_tensors(job_, 5);
  Options options_;
  bool was_damaged_ = false;
};

TEST_F(Checksums, FindDamagedKeysValuesAndChecksums) {
  for (const Span span : {kKeys, kValues, kChecksum}) {
    const Error error = error_of([&] { run_damaged(true, span); });
    EXPECT_TRUE(was_damaged_);
    EXPECT_EQ(error.code(), ErrorCode::kPeer);
    const std::string message = error.what();
    EXPECT_NE(message.find("rank 1 received"), std::string::npos) << message;
    EXPECT_NE(message.find("damaged in block 2 of"), std::string::npos) << message;
  }
}

// The damage is real: without checksums the result is another.
TEST_F(Checksums, AreNeededToFindIt) {
  const JobResult right = run_job(job_, options_, tensors_, kWorld);
  for (const Span span : {kKeys, kValues}) {
    EXPECT_FALSE(run_damaged(false, span).same_bits(right));
    EXPECT_TRUE(was_damaged_);
  }
}

}  // namespace
}  // namespace ringattn::testing
