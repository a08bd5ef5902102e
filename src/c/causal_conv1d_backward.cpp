// SPDX-License-Identifier: Apache-2.0
#include "ops/conv1d/causal_conv1d_backward.hpp"

#include <array>
#include <cstdint>
#include <tuple>
#include <utility>

#include "c/compressed.hpp"
#include "c/conv1d_spec.hpp"
#include "c/jobs.hpp"
#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/tensors.hpp"

struct ringattn_causal_conv1d_backward : ringattn::c::Object<ringattn::CausalConv1dBackward> {
  static constexpr const char* kName = "backward";
  static constexpr const char* kOp = "causal_conv1d_backward";

  std::tuple<ringattn::CausalConv1dBackwardInputs, ringattn::CausalConv1dBackwardOutputs, ringattn::Stream> read(
      const ringattn_causal_conv1d_backward_tensors* given) const;
};

using namespace ringattn;
using namespace ringattn::c;

std::tuple<CausalConv1dBackwardInputs, CausalConv1dBackwardOutputs, Stream> ringattn_causal_conv1d_backward::read(
    const ringattn_causal_conv1d_backward_tensors* given) const {
  const auto tensors = read_struct("ringattn_causal_conv1d_backward_tensors", given, sizeof *given);
  const std::pair<const char*, const DLTensor*> needed[] = {{"x", tensors.x},
                                                            {"weight", tensors.weight},
                                                            {"dy", tensors.dy},
                                                            {"dx", tensors.dx},
                                                            {"dweight", tensors.dweight}};
  for (const auto& [name, tensor] : needed) need(tensor, name);
  const TensorReader reader(*transport);
  const CausalConv1dSpec& spec = instance.job().spec;
  const std::array<std::int64_t, 2> weights{spec.channels, spec.width};
  const std::array<std::int64_t, 1> biases{spec.channels};
  const auto types = part_types(StoredType::kDtype, spec.dtype);
  const auto halos = [&](const char* name, const DLTensor* tensor, const std::vector<std::int32_t>& sequences) {
    const std::array<std::int64_t, 3> shape{static_cast<std::int64_t>(sequences.size()), spec.halo_tokens(),
                                            spec.channels};
    return tensor == nullptr ? Part{} : reader.part(name, tensor, types, shape, true);
  };
  CausalConv1dBackwardInputs inputs;
  CausalConv1dBackwardOutputs outputs;
  inputs.x = reader.rows("x", tensors.x);
  inputs.weight = reader.numbers("weight", tensors.weight, weights);
  inputs.bias = reader.numbers("bias", tensors.bias, biases);
  inputs.initial_halos = halos("initial_halos", tensors.initial_halos, instance.beginning()).data;
  inputs.dy = reader.rows("dy", tensors.dy);
  inputs.dfinal_halos = halos("dfinal_halos", tensors.dfinal_halos, instance.ending()).data;
  outputs.dx = reader.rows("dx", tensors.dx);
  outputs.dweight = reader.numbers("dweight", tensors.dweight, weights);
  outputs.dbias = reader.numbers("dbias", tensors.dbias, biases);
  outputs.dinitial_halos = halos("dinitial_halos", tensors.dinitial_halos, instance.beginning()).data;
  for (const char* written : {"dx", "dweight", "dbias", "dinitial_halos"}) reader.check_written(written);
  return {inputs, outputs, Stream{tensors.stream}};
}

extern "C" {

ringattn_status ringattn_causal_conv1d_backward_create(ringattn_world* world, const ringattn_causal_conv1d_spec* spec,
                                                       const ringattn_ssm_batch* batch, const ringattn_options* options,
                                                       ringattn_causal_conv1d_backward** backward) {
  return create(world, backward, [&](Transport& transport) {
    CausalConv1dJob job = read_conv1d_job(spec, batch);
    return new ringattn_causal_conv1d_backward{
        {world->transport, CausalConv1dBackward(std::move(job), transport, read_conv1d_options(options, transport))}};
  });
}

ringattn_status ringattn_causal_conv1d_backward_get_facts(const ringattn_causal_conv1d_backward* backward,
                                                          ringattn_ssm_facts* facts) {
  return with(backward, [&](const ringattn_causal_conv1d_backward& handle) {
    write_conv1d_facts(handle.instance, handle.transport->rank(), 3, facts);
  });
}

RINGATTN_CALLS(causal_conv1d_backward);

}  // extern "C"
