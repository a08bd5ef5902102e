// SPDX-License-Identifier: Apache-2.0
// Inside transport `tcp`: the handshake by which two ranks prove on each connection that they know the job's secret.
//
//   caller   -> listener   kIntroduction: who calls whom, the world's size, the caller's nonce
//   listener -> caller     kProof: the listener's nonce, and its proof
//   caller   -> listener   the first frame with a MAC (comm/tcp/wire.hpp), which is the caller's proof
//
// Proofs and keys are HMACs, keyed by the secret, over everything that identifies the connection: purpose, ranks, size,
// the world's number, and both nonces. So a proof can't be replayed, used for another rank, in the other direction or
// elsewhere. Keys differ by direction, and each frame's MAC covers the frame's number.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "comm/tcp/mac.hpp"
#include "comm/tcp/secret.hpp"

namespace ringattn {

// The two kinds of connections.
enum class Purpose : std::uint32_t { kStore = 1, kLink = 2 };

// The caller's first frame. Nothing is proved yet, so it has only numbers, which don't reveal the job.
struct Introduction {
  Purpose purpose;
  std::int32_t caller;
  std::int32_t listener;
  std::int32_t size;
  Nonce nonce;
};

struct Proof {
  Nonce nonce;
  Mac mac;
};

struct ConnectionKeys {
  Mac proof;  // the listener's proof
  Mac to_listener, to_caller;
};

Introduction introduce(Purpose purpose, int caller, int listener, int size);

// `world`: the world's number, equal on both sides. Zeros before the world has one.
using WorldNumber = std::array<std::uint64_t, 2>;
ConnectionKeys derive_keys(const Secret& secret, const Introduction& introduction, const Nonce& listener,
                           const WorldNumber& world);

// The listener's side.
struct Answer {
  Proof proof;
  ConnectionKeys keys;
};
Answer answer_introduction(const Secret& secret, const Introduction& introduction, const WorldNumber& world);

// The caller's side: returns the keys, or nothing if the proof is wrong.
std::optional<ConnectionKeys> check_proof(const Secret& secret, const Introduction& introduction, const Proof& proof,
                                          const WorldNumber& world);

}  // namespace ringattn
