// SPDX-License-Identifier: Apache-2.0
#include "ops/ssm/ssm.hpp"

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

struct ringattn_ssm : ringattn::c::Object<ringattn::Ssm> {
  static constexpr const char* kName = "ssm";

  std::tuple<ringattn::SsmInputs, ringattn::SsmOutputs, ringattn::Stream> read(const ringattn_ssm_tensors* given) const;
};

using namespace ringattn;
using namespace ringattn::c;

namespace {

// Sizes of structs in the interface version that they came with.
constexpr DLDataType kFp32[] = {{kDLFloat, 32, 1}};
constexpr std::size_t kFirstFacts = 48, kFirstTensors = 104;

}  // namespace

std::tuple<SsmInputs, SsmOutputs, Stream> ringattn_ssm::read(const ringattn_ssm_tensors* given) const {
  const auto tensors = read_struct("ringattn_ssm_tensors", given, kFirstTensors);
  need(tensors.x, "x");
  need(tensors.dt, "dt");
  need(tensors.b, "b");
  need(tensors.c, "c");
  need(tensors.a, "a");
  need(tensors.y, "y");
  const TensorReader reader(*transport);
  const SsmSpec& spec = instance.job().spec;
  const std::array<std::int64_t, 2> decays{spec.heads, spec.state_dim};
  const std::span<const std::int64_t> heads(decays.data(), 1);
  const auto states = [&](std::size_t sequences) {
    return std::array<std::int64_t, 4>{static_cast<std::int64_t>(sequences), spec.heads, spec.head_dim, spec.state_dim};
  };
  SsmInputs inputs;
  SsmOutputs outputs;
  inputs.x = reader.rows("x", tensors.x);
  inputs.dt = reader.rows("dt", tensors.dt);
  inputs.b = reader.rows("b", tensors.b);
  inputs.c = reader.rows("c", tensors.c);
  inputs.z = reader.rows("z", tensors.z);
  inputs.a = reader.numbers("a", tensors.a, spec.state_decays ? std::span(decays) : heads);
  inputs.d = reader.numbers("d", tensors.d, heads);
  inputs.dt_bias = reader.numbers("dt_bias", tensors.dt_bias, heads);
  inputs.initial_states = reader.numbers("initial_states", tensors.initial_states, states(instance.beginning().size()));
  outputs.y = reader.rows("y", tensors.y);
  if (tensors.slots != nullptr) {
    const Part slots = reader.part("final_states", tensors.final_states, kFp32,
                                   std::array<std::int64_t, 4>{-1, spec.heads, spec.head_dim, spec.state_dim}, true);
    inputs.slots = reader.slots("slots", tensors.slots, inputs.x.tokens, slots.lengths[0]);
    if (inputs.x.tokens > 0) outputs.final_states = reinterpret_cast<float*>(slots.data);
  } else {
    outputs.final_states = reader.numbers("final_states", tensors.final_states, states(instance.ending().size()));
  }
  reader.check_written("y");
  reader.check_written("final_states", "initial_states");
  if (instance.job().update && tensors.initial_states == nullptr) inputs.initial_states = outputs.final_states;
  return {inputs, outputs, Stream{tensors.stream}};
}

extern "C" {

ringattn_status ringattn_ssm_create(ringattn_world* world, const ringattn_ssm_spec* spec,
                                    const ringattn_ssm_batch* batch, const ringattn_options* options,
                                    ringattn_ssm** ssm) {
  return create(world, ssm, [&](Transport& transport) {
    SsmJob job;
    job.spec = read_ssm_spec(spec);
    SsmBatch read = read_ssm_batch(batch);
    job.lengths = std::move(read.lengths);
    job.initial_states = read.initial;
    job.final_states = read.final;
    job.update = read.update;
    return new ringattn_ssm{{world->transport, Ssm(std::move(job), transport, read_ssm_options(options, transport))}};
  });
}

ringattn_status ringattn_ssm_get_facts(const ringattn_ssm* ssm, ringattn_ssm_facts* facts) {
  return with(ssm, [&](const ringattn_ssm& handle) {
    const Ssm& instance = handle.instance;
    write_struct(
        "ringattn_ssm_facts",
        {0, instance.layout().tokens(handle.transport->rank()), static_cast<std::int64_t>(instance.beginning().size()),
         static_cast<std::int64_t>(instance.ending().size()), instance.memory().total(),
         instance.kernel().row->name.data()},
        facts, kFirstFacts);
  });
}

ringattn_status ringattn_ssm_rows(const ringattn_ssm* ssm, int64_t count, int64_t* packed_tokens,
                                  int64_t* sequence_tokens) {
  return with(ssm, [&](const ringattn_ssm& handle) {
    write_rows(handle.instance.layout(), handle.transport->rank(), count, packed_tokens, sequence_tokens);
  });
}

ringattn_status ringattn_ssm_sequences(const ringattn_ssm* ssm, int32_t* beginning, int32_t* ending) {
  return with(ssm, [&](const ringattn_ssm& handle) {
    if (beginning != nullptr) std::ranges::copy(handle.instance.beginning(), beginning);
    if (ending != nullptr) std::ranges::copy(handle.instance.ending(), ending);
  });
}

RINGATTN_CALLS(ssm);

}  // extern "C"
