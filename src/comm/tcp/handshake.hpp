// SPDX-License-Identifier: Apache-2.0
// Inside transport `tcp`: how two ranks prove to each other that they know the job's secret, on each connection anew.
//
//   caller   -> listener   kIntroduction: who calls whom, the world's size, the caller's nonce
//   listener -> caller     kProof: the listener's nonce, and its proof
//   caller   -> listener   the first frame with a MAC (comm/tcp/wire.hpp), which is the caller's proof
//
// Proofs and keys are HMACs, keyed by the secret, of all that distinguishes this connection from any other: purpose,
// ranks, size, the world's own number, and both nonces. So no proof counts a second time, for another rank, in the
// other direction or at another place. Keys differ by direction, and each frame's MAC has its number.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "comm/tcp/mac.hpp"
#include "comm/tcp/secret.hpp"

namespace ringattn {

// What a connection is for.
enum class Purpose : std::uint32_t { kStore = 1, kLink = 2 };

// The caller's first frame. Nobody has proved anything yet: only numbers, which don't tell one job from another.
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
  Mac proof;  // of the listener
  Mac to_listener, to_caller;
};

Introduction introduce(Purpose purpose, int caller, int listener, int size);

// `world`: a number of the world, the same for both sides; zeros where it has none yet.
using WorldNumber = std::array<std::uint64_t, 2>;
ConnectionKeys derive_keys(const Secret& secret, const Introduction& introduction, const Nonce& listener,
                           const WorldNumber& world);

// The listener's side.
struct Answer {
  Proof proof;
  ConnectionKeys keys;
};
Answer answer_introduction(const Secret& secret, const Introduction& introduction, const WorldNumber& world);

// The caller's side: the keys, or nothing where the proof is wrong.
std::optional<ConnectionKeys> check_proof(const Secret& secret, const Introduction& introduction, const Proof& proof,
                                          const WorldNumber& world);

}  // namespace ringattn
