// SPDX-License-Identifier: Apache-2.0
// What the front doors of ops that go around the ring have in common, for those who load, show and measure jobs.
#pragma once

#include <cstddef>

#include "attention/attention.hpp"
#include "attention/latent.hpp"

namespace ringattn {

// Refers to the front door, which outlives it.
struct RingDoor {
  Backend& backend;
  const FoldChoice& kernel;  // what folds
  const Options& options;
  const JobLayout& layout;
  const Plan& plan;
  const Prediction& prediction;
  std::size_t workspace_bytes;
};

inline RingDoor ring_door(Attention& door) {
  return {door.backend(), door.kernel(),     door.options(),        door.layout(),
          door.plan(),    door.prediction(), door.workspace_bytes()};
}
inline RingDoor ring_door(Latent& door) {
  return {door.backend(), door.kernel(),     door.options().ring,   door.layout(),
          door.plan(),    door.prediction(), door.workspace_bytes()};
}

}  // namespace ringattn
