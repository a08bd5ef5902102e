// SPDX-License-Identifier: Apache-2.0
#include "attention/scan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>
#include <tuple>
#include <utility>

#include "c/jobs.hpp"
#include "c/layouts.hpp"
#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/tensors.hpp"

struct ringattn_scan : ringattn::c::Object<ringattn::Scan> {
  static constexpr const char* kName = "scan";

  std::tuple<ringattn::ScanInputs, ringattn::ScanOutputs, ringattn::Stream> read(
      const ringattn_scan_tensors* given) const;
};

using namespace ringattn;
using namespace ringattn::c;

namespace {

// Sizes of structs in the interface version that they came with.
constexpr DLDataType kFp32[] = {{kDLFloat, 32, 1}};
constexpr std::size_t kFirstSpec = 64, kFirstFacts = 48, kFirstTensors = 104;

// A bound without dt_limits says that there is none, or is left 0.
void refuse_bound(const char* name, float bound, float none) {
  if (bound == 0.0F || bound == none) return;
  fail(ErrorCode::kUsage, fmt::format("{} is {}", name, bound),
       "ringattn_scan_spec::dt_limits is 0, so dt has no bounds",
       fmt::format("Set dt_limits to 1, or leave {} 0.", name));
}

ScanSpec read_scan_spec(const ringattn_scan_spec* given) {
  const auto spec = read_struct("ringattn_scan_spec", given, kFirstSpec);
  ScanSpec scan;
  scan.dtype = read_dtype(spec.dtype);
  scan.heads = spec.heads;
  scan.head_dim = spec.head_dim;
  scan.state_dim = spec.state_dim;
  if (spec.groups < 0 || spec.groups > spec.heads) {
    fail(ErrorCode::kUsage, fmt::format("there are {} groups of B and C", spec.groups),
         fmt::format("they divide the {} heads", spec.heads), "Check ringattn_scan_spec::groups.");
  }
  scan.groups = spec.groups == 0 ? 1 : static_cast<int>(spec.groups);
  scan.state_decays = spec.state_decays != 0;
  scan.skip = spec.skip != 0;
  scan.gate = spec.gate != 0;
  scan.dt_bias = spec.dt_bias != 0;
  scan.dt_softplus = spec.dt_softplus != 0;
  if (spec.dt_limits != 0) {
    scan.dt_least = spec.dt_least;
    scan.dt_most = spec.dt_most;
  } else {
    refuse_bound("dt_least", spec.dt_least, scan.dt_least);
    refuse_bound("dt_most", spec.dt_most, scan.dt_most);
  }
  return scan;
}

}  // namespace

std::tuple<ScanInputs, ScanOutputs, Stream> ringattn_scan::read(const ringattn_scan_tensors* given) const {
  const auto tensors = read_struct("ringattn_scan_tensors", given, kFirstTensors);
  need(tensors.x, "x");
  need(tensors.dt, "dt");
  need(tensors.b, "b");
  need(tensors.c, "c");
  need(tensors.a, "a");
  need(tensors.y, "y");
  const TensorReader reader(*transport);
  const ScanSpec& spec = door.job().spec;
  const std::array<std::int64_t, 2> decays{spec.heads, spec.state_dim};
  const std::span<const std::int64_t> heads(decays.data(), 1);
  const auto states = [&](std::size_t sequences) {
    return std::array<std::int64_t, 4>{static_cast<std::int64_t>(sequences), spec.heads, spec.head_dim, spec.state_dim};
  };
  ScanInputs inputs;
  ScanOutputs outputs;
  inputs.x = reader.rows("x", tensors.x);
  inputs.dt = reader.rows("dt", tensors.dt);
  inputs.b = reader.rows("b", tensors.b);
  inputs.c = reader.rows("c", tensors.c);
  inputs.z = reader.rows("z", tensors.z);
  inputs.a = reader.numbers("a", tensors.a, spec.state_decays ? std::span(decays) : heads);
  inputs.d = reader.numbers("d", tensors.d, heads);
  inputs.dt_bias = reader.numbers("dt_bias", tensors.dt_bias, heads);
  inputs.initial_states = reader.numbers("initial_states", tensors.initial_states, states(door.beginning().size()));
  outputs.y = reader.rows("y", tensors.y);
  if (tensors.slots != nullptr) {
    const Part slots = reader.part("final_states", tensors.final_states, kFp32,
                                   std::array<std::int64_t, 4>{-1, spec.heads, spec.head_dim, spec.state_dim}, true);
    inputs.slots = reader.slots("slots", tensors.slots, inputs.x.tokens, slots.lengths[0]);
    if (inputs.x.tokens > 0) outputs.final_states = reinterpret_cast<float*>(slots.data);
  } else {
    outputs.final_states = reader.numbers("final_states", tensors.final_states, states(door.ending().size()));
  }
  reader.check_written("y");
  reader.check_written("final_states", "initial_states");
  if (door.job().update && tensors.initial_states == nullptr) inputs.initial_states = outputs.final_states;
  return {inputs, outputs, Stream{tensors.stream}};
}

extern "C" {

ringattn_status ringattn_scan_create(ringattn_world* world, const ringattn_scan_spec* spec,
                                     const ringattn_scan_batch* batch, const ringattn_options* options,
                                     ringattn_scan** scan) {
  return create(world, scan, [&](Transport& transport) {
    ScanJob job;
    job.spec = read_scan_spec(spec);
    ScanBatch read = read_scan_batch(batch);
    job.lengths = std::move(read.lengths);
    job.initial_states = read.initial;
    job.final_states = read.final;
    job.update = read.update;
    return new ringattn_scan{
        {world->transport, Scan(std::move(job), transport, read_scan_options(options, transport))}};
  });
}

ringattn_status ringattn_scan_get_facts(const ringattn_scan* scan, ringattn_scan_facts* facts) {
  return with(scan, [&](const ringattn_scan& handle) {
    const Scan& door = handle.door;
    write_struct(
        "ringattn_scan_facts",
        {0, door.layout().tokens(handle.transport->rank()), static_cast<std::int64_t>(door.beginning().size()),
         static_cast<std::int64_t>(door.ending().size()), door.memory().total(), door.kernel().row->name.data()},
        facts, kFirstFacts);
  });
}

ringattn_status ringattn_scan_rows(const ringattn_scan* scan, int64_t count, int64_t* packed_tokens,
                                   int64_t* sequence_tokens) {
  return with(scan, [&](const ringattn_scan& handle) {
    write_rows(handle.door.layout(), handle.transport->rank(), count, packed_tokens, sequence_tokens);
  });
}

ringattn_status ringattn_scan_sequences(const ringattn_scan* scan, int32_t* beginning, int32_t* ending) {
  return with(scan, [&](const ringattn_scan& handle) {
    if (beginning != nullptr) std::ranges::copy(handle.door.beginning(), beginning);
    if (ending != nullptr) std::ranges::copy(handle.door.ending(), ending);
  });
}

RINGATTN_CALLS(scan);

}  // extern "C"
