// SPDX-License-Identifier: Apache-2.0
// What a link brings is checked before anything is done with it: whatever a peer sends, this rank names it and ends in
// order. The peer's end is a socket in the test's hands.
#include "comm/tcp/transport_context.hpp"

#include <gtest/gtest.h>

#include <random>

#include "comm/tcp/wire.hpp"
#include "tests/comm/tcp/raw_connection.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn {
namespace {

using testing::error_of;
using testing::RawConnection;

constexpr double kLong = 20.0;

struct Pair {
  std::shared_ptr<TcpTransportContext> context;  // rank 0 of two
  std::unique_ptr<RawConnection> peer;
};

Pair make_pair_of_ranks() {
  int ends[2] = {-1, -1};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
  Connections connections;
  connections.links.emplace_back();
  connections.links.emplace_back(ends[0]);
  connections.hosts = {"here", "there"};
  return {std::make_shared<TcpTransportContext>(0, std::move(connections)),
          std::make_unique<RawConnection>(FileDescriptor(ends[1]))};
}

std::string frame(FrameHead head, std::string_view body = {}) {
  head.bytes = static_cast<std::uint32_t>(body.size());
  return std::string(bytes_of(head)) + std::string(body);
}

// What a rank's waits throw once `bytes` have come.
Error error_after(std::string_view bytes) {
  const Pair pair = make_pair_of_ranks();
  pair.peer->send(bytes);
  std::unique_lock lock(pair.context->mutex);
  return error_of([&] { pair.context->wait(lock, Deadline::after(kLong), [] { return false; }); });
}

void expect_named(const Error& error, std::string_view why) {
  EXPECT_EQ(error.code(), ErrorCode::kPeer) << error.what();
  EXPECT_EQ(std::string(error.what()).find("rank 1 on there is gone"), 0U) << error.what();
  EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
}

TEST(TcpTransportContext, NamesAPeerThatSendsNoFrames) {
  const auto sized = [](FrameKind kind, std::uint32_t bytes) {
    FrameHead head;
    head.kind = kind;
    head.bytes = bytes;
    return std::string(bytes_of(head));
  };
  const std::string bad[] = {
      std::string(4096, '\xff'),
      std::string(4096, '\0'),
      sized(static_cast<FrameKind>(7), 0),
      sized(FrameKind::kGather, kMaxGathered + 1),
      sized(FrameKind::kData, kMaxFragment + 1),
      sized(FrameKind::kNotice, kMaxNotice + 1),
      sized(FrameKind::kReady, 1),
      sized(FrameKind::kHeartbeat, 1),
      sized(FrameKind::kLeave, ~0U),
  };
  for (const std::string& bytes : bad) expect_named(error_after(bytes), "it has sent an invalid frame");
}

TEST(TcpTransportContext, NamesAPeerThatSendsWhatNobodyWaitsFor) {
  FrameHead data;
  data.kind = FrameKind::kData;
  for (const std::int64_t ticket : {std::int64_t{-1}, std::int64_t{0}, std::int64_t{1} << 60}) {
    data.number = ticket;
    expect_named(error_after(frame(data, "abc")), "it has sent data that this rank does not wait for");
  }
  data.world = 77;
  expect_named(error_after(frame(data, "abc")), "it has sent data that this rank does not wait for");

  FrameHead gather;
  gather.kind = FrameKind::kGather;
  expect_named(error_after(frame(gather, "a") + frame(gather, "b")), "it has sent a frame out of order");
  FrameHead ready;
  ready.kind = FrameKind::kReady;
  expect_named(error_after(frame(ready) + frame(ready)), "it has sent a frame out of order");
  FrameHead notice;
  notice.kind = FrameKind::kNotice;
  const std::string error = pack_error(Error(ErrorCode::kFile, "x."));
  for (const int rank : {-1, 2}) {
    notice.round = rank;
    expect_named(error_after(frame(notice, error)), "it has sent a frame out of order");
  }
  notice.round = 1;  // an error with a code that the program doesn't have, or none
  for (const std::string_view code : {std::string_view("\0\0", 2), std::string_view("\xff\xff"), std::string_view()}) {
    expect_named(error_after(frame(notice, code)), "it has sent a frame out of order");
  }
  FrameHead heartbeat;
  heartbeat.kind = FrameKind::kHeartbeat;
  heartbeat.shape = 'x';
  expect_named(error_after(frame(heartbeat)), "it has sent a frame out of order");
  std::string readies;
  ready.kind = FrameKind::kReady;
  ready.world = 0;
  for (int ticket = 0; ticket < 70'000; ++ticket) {
    ready.number = ticket;
    readies += frame(ready);
  }
  expect_named(error_after(readies), "it has sent a frame out of order");
  std::string worlds;
  for (std::uint64_t world = 0; world < 5000; ++world) {
    ready.world = world;
    worlds += frame(ready);
  }
  expect_named(error_after(worlds), "it has sent a frame out of order");
}

// Memory is taken only for what this rank takes part in: no rank can be two collectives ahead of it, or send more than
// a little for a world after the next ones.
TEST(TcpTransportContext, RefusesABodyThatNobodyWaitsForByItsHead) {
  const auto head_of = [](std::uint64_t world, std::int64_t number, std::uint32_t bytes) {
    FrameHead head;
    head.kind = FrameKind::kGather;
    head.world = world;
    head.number = number;
    head.bytes = bytes;
    return std::string(bytes_of(head));
  };
  for (const std::string& head : {head_of(0, 1000, 60U << 20), head_of(0, 1, 4), head_of(0, -1, 4),
                                  head_of(5, 0, (1U << 20) + 1), head_of(5, 1, 4)}) {
    expect_named(error_after(head), "it has sent a frame out of order");  // no body has come
  }
  const Pair pair = make_pair_of_ranks();
  pair.peer->send(head_of(5, 0, 1U << 20) + std::string(1U << 20, 'x'));
  std::unique_lock lock(pair.context->mutex);
  EXPECT_FALSE(pair.context->wait(lock, Deadline::after(0.2), [] { return false; }));
}

TEST(TcpTransportContext, NamesAPeerWhoseConnectionEnds) {
  Pair pair = make_pair_of_ranks();
  pair.peer.reset();
  std::unique_lock lock(pair.context->mutex);
  const Error error = error_of([&] { pair.context->wait(lock, Deadline::after(kLong), [] { return false; }); });
  expect_named(error, "its connection has closed");
}

// Who has said that nothing follows is not gone: what waits for it waits for its deadline.
TEST(TcpTransportContext, LetsAPeerLeave) {
  const Pair pair = make_pair_of_ranks();
  pair.peer->send(frame({}));
  EXPECT_FALSE(pair.peer->is_closed_within(0.1));
  std::unique_lock lock(pair.context->mutex);
  EXPECT_FALSE(pair.context->wait(lock, Deadline::after(0.2), [] { return false; }));
}

TEST(TcpTransportContext, HearsOfFailures) {
  FrameHead notice;
  notice.kind = FrameKind::kNotice;
  notice.round = 1;
  const Error heard = error_after(frame(notice, pack_error(Error(ErrorCode::kFile, "the disk is on fire."))));
  EXPECT_EQ(heard.code(), ErrorCode::kFile);
  EXPECT_NE(std::string(heard.what()).find("rank 1 on there failed: the disk is on fire."), std::string::npos)
      << heard.what();
}

// Random bytes after headers of every kind: nothing crashes, nothing hangs.
TEST(TcpTransportContext, OutlivesRandomFrames) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const Pair pair = make_pair_of_ranks();
    std::string bytes;
    for (int i = 0; i < 20; ++i) {
      FrameHead head;
      head.kind = static_cast<FrameKind>(random() % 8);
      head.world = random() % 3;
      head.number = static_cast<std::int64_t>(random() % 4) - 1;
      head.total = random() % 5;
      head.shape = static_cast<std::uint32_t>(random());
      head.round = static_cast<std::int32_t>(random() % 4) - 1;
      std::string body(random() % 50, '\0');
      for (char& c : body) c = static_cast<char>(random());
      bytes += frame(head, body);
    }
    pair.peer->send(bytes);
    std::unique_lock lock(pair.context->mutex);
    try {
      EXPECT_FALSE(pair.context->wait(lock, Deadline::after(0.001), [] { return false; }));
    } catch (const Error&) {
      // It has noticed.
    }
  }
}

}  // namespace
}  // namespace ringattn
