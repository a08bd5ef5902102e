// SPDX-License-Identifier: Apache-2.0
// Exchanges whose every byte is known, for tests of transports.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/philox.hpp"
#include "comm/transport.hpp"
#include "tests/comm/memory.hpp"

namespace ringattn::testing {

// A deadline that only a failing test reaches.
inline Deadline test_deadline() { return Deadline::after(20.0); }

// Bytes that only their owner's seed makes: SplitMix64, begun by Philox, which alone took a third of the time of 64
// ranks.
inline Bytes payload_of(std::uint32_t seed, int owner, std::size_t bytes) {
  Bytes all(bytes);
  const PhiloxWords words = philox4x32_10({{seed, static_cast<std::uint32_t>(owner), 0, 0}}, 1);
  std::uint64_t state = std::uint64_t{words.word[0]} << 32 | words.word[1];
  for (std::size_t at = 0; at < bytes; at += sizeof state) {
    state += 0x9e3779b97f4a7c15U;
    std::uint64_t word = (state ^ state >> 30) * 0xbf58476d1ce4e5b9U;
    word = (word ^ word >> 27) * 0x94d049bb133111ebU;
    word ^= word >> 31;
    std::memcpy(all.data() + at, &word, std::min(sizeof word, bytes - at));
  }
  return all;
}

inline constexpr std::byte kUntouched{0xEE};

// A ring all-gather as one exchange: in round r every rank hands on what it received in round r − 1. Slots lie at odd
// addresses, with a guard byte around each.
class RingAllGather {
 public:
  RingAllGather(const Transport& world, std::uint32_t seed, std::size_t bytes)
      : rank_(world.rank()),
        size_(world.size()),
        seed_(seed),
        bytes_(bytes),
        initial_(initial(world, seed, bytes)),
        memory_(world, initial_) {}

  Exchange exchange() {
    Exchange all;
    all.label = fmt::format("ring of {} bytes", bytes_);
    for (int round = 0; round + 1 < size_; ++round) {
      const int sent = (rank_ - round + size_) % size_;
      const int received = (sent - 1 + size_) % size_;
      all.sends.push_back({(rank_ + 1) % size_, round, {{slot(sent), bytes_}}});
      all.receives.push_back({(rank_ - 1 + size_) % size_, round, {{slot(received), bytes_}}});
    }
    return all;
  }

  // As before the exchange.
  void clear() const { memory_.write(initial_); }

  void expect_complete() {
    const Bytes all = memory_.read();
    for (int owner = 0; owner < size_; ++owner) {
      const Bytes expected = payload_of(seed_, owner, bytes_);
      const std::byte* found = all.data() + offset_of(owner, bytes_);
      EXPECT_TRUE(bytes_ == 0 || std::memcmp(expected.data(), found, bytes_) == 0)
          << "rank " << rank_ << " has a wrong copy of rank " << owner << "'s " << bytes_ << " bytes";
      EXPECT_EQ(found[-1], kUntouched);
      EXPECT_EQ(found[bytes_], kUntouched);
    }
  }

 private:
  static std::size_t offset_of(int owner, std::size_t bytes) {
    return 1 + static_cast<std::size_t>(owner) * (bytes + 1);
  }
  static Bytes initial(const Transport& world, std::uint32_t seed, std::size_t bytes) {
    Bytes all(offset_of(world.size(), bytes), kUntouched);
    const Bytes own = payload_of(seed, world.rank(), bytes);
    std::copy(own.begin(), own.end(), all.begin() + static_cast<std::ptrdiff_t>(offset_of(world.rank(), bytes)));
    return all;
  }
  std::byte* slot(int owner) { return memory_.data() + offset_of(owner, bytes_); }

  int rank_;
  int size_;
  std::uint32_t seed_;
  std::size_t bytes_;
  Bytes initial_;
  Memory memory_;
};

// Posts, waits and checks one ring.
inline void expect_ring(Transport& world, std::uint32_t seed, std::size_t bytes) {
  RingAllGather ring(world, seed, bytes);
  world.wait(world.post(ring.exchange(), rank_stream()), rank_stream(), test_deadline());
  ring.expect_complete();
}

// A random set of messages that all ranks derive from the seed; each has its own payload and odd spans, some empty.
struct RandomExchange {
  RandomExchange(const Transport& world, std::uint32_t seed, double density) {
    exchange.label = fmt::format("random {}", seed);
    const int rounds = static_cast<int>(draw(seed, 0, 0, 0, 0) % 4);
    for (int round = 0; round <= rounds; ++round) {
      for (int from = 0; from < world.size(); ++from) {
        for (int to = 0; to < world.size(); ++to) {
          if (from == to || draw(seed, round, from, to, 1) >= density * 0x1p32) continue;
          if (from == world.rank()) add_send(world, seed, round, from, to);
          if (to == world.rank()) add_receive(world, seed, round, from, to);
        }
      }
    }
  }

  void expect_complete(int rank) const {
    for (const Memory& bytes : sent) bytes.read();  // the stream has passed its sends too
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(received[i].read() == expected[i]) << "rank " << rank << ", " << exchange.label << ", receive " << i;
    }
  }

  // As before the exchange.
  void clear() const {
    for (std::size_t i = 0; i < received.size(); ++i) received[i].write(Bytes(expected[i].size(), kUntouched));
  }

  Exchange exchange;
  std::vector<Memory> sent;
  std::vector<Memory> received;
  std::vector<Bytes> expected;

 private:
  static std::uint32_t draw(std::uint32_t seed, int round, int from, int to, std::uint32_t what) {
    return philox4x32_10({{what, static_cast<std::uint32_t>(round), static_cast<std::uint32_t>(from),
                           static_cast<std::uint32_t>(to)}},
                         seed)
        .word[0];
  }
  static std::vector<std::size_t> span_sizes(std::uint32_t seed, int round, int from, int to) {
    std::vector<std::size_t> sizes(draw(seed, round, from, to, 2) % 6);  // none, too
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      sizes[i] = draw(seed, round, from, to, 3 + static_cast<std::uint32_t>(i)) % 3000;
      if (sizes[i] % 4 == 0) sizes[i] = 0;
    }
    return sizes;
  }
  static Bytes content(std::uint32_t seed, int round, int from, int to) {
    std::size_t total = 0;
    for (const std::size_t bytes : span_sizes(seed, round, from, to)) total += bytes;
    return payload_of(draw(seed, round, from, to, 99), from, total);
  }

  void add_send(const Transport& world, std::uint32_t seed, int round, int from, int to) {
    const Memory& bytes = sent.emplace_back(world, content(seed, round, from, to));
    SendMessage& message = exchange.sends.emplace_back(SendMessage{to, round, {}});
    std::size_t at = 0;
    for (const std::size_t length : span_sizes(seed, round, from, to)) {
      message.spans.push_back({bytes.data() + at, length});
      at += length;
    }
  }
  void add_receive(const Transport& world, std::uint32_t seed, int round, int from, int to) {
    expected.push_back(content(seed, round, from, to));
    const Memory& bytes = received.emplace_back(world, Bytes(expected.back().size(), kUntouched));
    ReceiveMessage& message = exchange.receives.emplace_back(ReceiveMessage{from, round, {}});
    std::size_t at = 0;
    for (const std::size_t length : span_sizes(seed, round, from, to)) {
      message.spans.push_back({bytes.data() + at, length});
      at += length;
    }
  }
};

}  // namespace ringattn::testing
