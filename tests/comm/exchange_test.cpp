// SPDX-License-Identifier: Apache-2.0
#include "comm/exchange.hpp"

#include <gtest/gtest.h>

#include <array>
#include <utility>

namespace ringattn {
namespace {

TEST(RoundGate, OpensRoundByRound) {
  RoundGate gate({{0, 0, {}}, {1, 0, {}}, {0, 2, {}}, {0, 5, {}}});
  EXPECT_TRUE(gate.may_send(0));
  EXPECT_FALSE(gate.may_send(1));
  gate.receive_done(0);
  EXPECT_FALSE(gate.may_send(1));
  gate.receive_done(0);
  EXPECT_TRUE(gate.may_send(2));  // nothing is received in round 1
  EXPECT_FALSE(gate.may_send(3));
  gate.receive_done(5);  // ahead of its turn
  EXPECT_FALSE(gate.may_send(3));
  gate.receive_done(2);
  EXPECT_TRUE(gate.may_send(1000));
}

TEST(RoundGate, IsOpenWithoutReceives) {
  const RoundGate gate({});
  EXPECT_TRUE(gate.may_send(0));
  EXPECT_TRUE(gate.may_send(7));
}

TEST(Exchange, CountsBytesAndNames) {
  std::byte byte{};
  EXPECT_EQ(message_bytes(SendMessage{0, 0, {{&byte, 3}, {nullptr, 0}, {&byte, 4}}}), 7U);
  EXPECT_EQ(message_bytes(ReceiveMessage{}), 0U);
  EXPECT_EQ(exchange_name({"block 1 of 2", {}, {}}, 9), "block 1 of 2");
  EXPECT_EQ(exchange_name({}, 9), "exchange 9");
}

TEST(Exchange, OfOneRoundHasAMessageForEachPeer) {
  std::array<std::byte, 8> bytes{};
  OneRound spans;
  spans.send(7, {&bytes[0], 1});
  spans.send(2, {&bytes[1], 2});
  spans.send(7, {&bytes[3], 3});
  spans.receive(2, {&bytes[6], 1});
  const Exchange exchange = std::move(spans).exchange("rows");
  EXPECT_NO_THROW(check_exchange(exchange, 0, 8));
  EXPECT_EQ(exchange.label, "rows");
  EXPECT_EQ(exchange.announced, kNotAnnounced);
  ASSERT_EQ(exchange.sends.size(), 2U);
  EXPECT_EQ(exchange.sends[0].peer, 2);
  EXPECT_EQ(exchange.sends[1].peer, 7);
  ASSERT_EQ(exchange.sends[1].spans.size(), 2U);  // in the order in which they were added
  EXPECT_EQ(exchange.sends[1].spans[0].data, &bytes[0]);
  EXPECT_EQ(exchange.sends[1].spans[1].data, &bytes[3]);
  EXPECT_EQ(exchange.sends[1].spans[1].bytes, 3U);
  ASSERT_EQ(exchange.receives.size(), 1U);
  EXPECT_EQ(exchange.receives[0].peer, 2);
  EXPECT_EQ(exchange.receives[0].spans[0].data, &bytes[6]);
}

TEST(Exchange, AcceptsWhatTheContractAllows) {
  std::byte byte{};
  const Exchange exchange{"", {{1, 0, {}}, {2, 0, {{nullptr, 0}}}, {1, 3, {{&byte, 1}}}}, {{1, 0, {}}}};
  EXPECT_NO_THROW(check_exchange(exchange, 0, 3));
  EXPECT_THROW(check_exchange(exchange, 2, 3), Error);  // rank 2 would send to itself
  EXPECT_THROW(check_exchange(exchange, 0, 2), Error);  // there is no rank 2
}

}  // namespace
}  // namespace ringattn
