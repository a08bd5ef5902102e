// SPDX-License-Identifier: Apache-2.0
#include "ops/linear_attention/linear_attention.hpp"

#include <fmt/format.h>

#include <array>
#include <tuple>
#include <utility>

#include "c/jobs.hpp"
#include "c/layouts.hpp"
#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/state_op.hpp"
#include "c/status.hpp"
#include "c/tensors.hpp"

struct ringattn_linear_attention : ringattn::c::Object<ringattn::LinearAttention> {
  static constexpr const char* kName = "linear_attention";

  std::tuple<ringattn::LinearAttentionInputs, ringattn::LinearAttentionOutputs, ringattn::Stream> read(
      const ringattn_linear_attention_tensors* given) const;
};

using namespace ringattn;
using namespace ringattn::c;

namespace {

// Sizes of the structs in their first interface version.
constexpr std::size_t kFirstLinearSpec = 48, kFirstLinearTensors = 88;

LinearAttentionSpec read_linear_attention_spec(const ringattn_linear_attention_spec* given) {
  const auto read = read_struct("ringattn_linear_attention_spec", given, kFirstLinearSpec);
  if (read.decay < RINGATTN_DECAY_HEAD || read.decay > RINGATTN_DECAY_DIM) {
    fail(ErrorCode::kUsage, fmt::format("decay is {}", read.decay), "it is 0, 1 or 2",
         "Use RINGATTN_DECAY_HEAD, RINGATTN_DECAY_TOKEN or RINGATTN_DECAY_DIM.");
  }
  LinearAttentionSpec spec;
  spec.dtype = read_dtype(read.dtype);
  spec.heads = read.heads;
  spec.dim = read.dim;
  spec.dim_v = read.dim_v;
  constexpr SsmDecay kDecays[] = {SsmDecay::kHead, SsmDecay::kToken, SsmDecay::kDim};
  spec.decay = kDecays[read.decay];
  if (read.has_scale != 0) spec.scale = read.scale;
  if (read.rope != nullptr) spec.rope = read_rope_spec(read.rope);
  return spec;
}

}  // namespace

std::tuple<LinearAttentionInputs, LinearAttentionOutputs, Stream> ringattn_linear_attention::read(
    const ringattn_linear_attention_tensors* given) const {
  const auto tensors = read_struct("ringattn_linear_attention_tensors", given, kFirstLinearTensors);
  need(tensors.q, "q");
  need(tensors.k, "k");
  need(tensors.v, "v");
  need(tensors.log_decay, "log_decay");
  need(tensors.out, "out");
  const TensorReader reader(*transport);
  const Ssm& ssm = instance.ssm();
  const SsmSpec& spec = ssm.job().spec;
  const StateShape state{spec.heads, spec.head_dim, spec.state_dim};
  LinearAttentionInputs inputs;
  LinearAttentionOutputs outputs;
  inputs.q = reader.rows("q", tensors.q);
  inputs.k = reader.rows("k", tensors.k);
  inputs.v = reader.rows("v", tensors.v);
  if (spec.decay == SsmDecay::kHead) {
    inputs.head_log_decay = reader.numbers("log_decay", tensors.log_decay, std::array<std::int64_t, 1>{spec.heads});
  } else {
    inputs.log_decay = reader.rows("log_decay", tensors.log_decay);
  }
  inputs.initial_state = read_initial_states(reader, "initial_state", tensors.initial_state, ssm, state);
  if (tensors.positions != nullptr)
    inputs.positions = reader.positions("positions", tensors.positions, inputs.q.tokens, 1);
  outputs.out = reader.rows("out", tensors.out);
  const FinalStates finals =
      read_final_states(reader, tensors.final_states, tensors.slots, ssm, inputs.q.tokens, state);
  outputs.final_states = finals.data;
  inputs.slots = finals.slots;
  reader.check_written("out");
  reader.check_written("final_states", "initial_state");
  if (ssm.job().update && tensors.initial_state == nullptr) inputs.initial_state = outputs.final_states;
  return {inputs, outputs, Stream{tensors.stream}};
}

extern "C" {

ringattn_status ringattn_linear_attention_create(ringattn_world* world, const ringattn_linear_attention_spec* spec,
                                                 const ringattn_ssm_batch* batch, const ringattn_options* options,
                                                 ringattn_linear_attention** linear_attention) {
  return create(world, linear_attention, [&](Transport& transport) {
    LinearAttentionJob job;
    job.spec = read_linear_attention_spec(spec);
    SsmBatch read = read_ssm_batch(batch);
    job.lengths = std::move(read.lengths);
    job.initial_state = read.initial;
    job.final_states = read.final;
    job.update = read.update;
    return new ringattn_linear_attention{
        {world->transport, LinearAttention(job, transport, read_ssm_options(options, transport, "linear attention"))}};
  });
}

ringattn_status ringattn_linear_attention_get_facts(const ringattn_linear_attention* linear_attention,
                                                    ringattn_ssm_facts* facts) {
  return with(linear_attention, [&](const ringattn_linear_attention& handle) {
    write_ssm_facts(handle.instance.ssm(), handle.transport->rank(), facts);
  });
}

ringattn_status ringattn_linear_attention_rows(const ringattn_linear_attention* linear_attention, int64_t count,
                                               int64_t* packed_tokens, int64_t* sequence_tokens) {
  return with(linear_attention, [&](const ringattn_linear_attention& handle) {
    write_rows(handle.instance.ssm().layout(), handle.transport->rank(), count, packed_tokens, sequence_tokens);
  });
}

ringattn_status ringattn_linear_attention_sequences(const ringattn_linear_attention* linear_attention,
                                                    int32_t* beginning, int32_t* ending) {
  return with(linear_attention, [&](const ringattn_linear_attention& handle) {
    write_sequences(handle.instance.ssm(), beginning, ending);
  });
}

RINGATTN_CALLS(linear_attention);

}  // extern "C"
