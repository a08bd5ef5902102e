// SPDX-License-Identifier: Apache-2.0
#include "ops/mla/mla_backward.hpp"

#include <array>
#include <span>
#include <tuple>
#include <utility>

#include "c/jobs.hpp"
#include "c/layouts.hpp"
#include "c/mla_handle.hpp"
#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/tensors.hpp"
#include "c/workspace.hpp"

struct ringattn_mla_backward : ringattn::c::Object<ringattn::MlaBackward> {
  static constexpr const char* kName = "backward";
  static constexpr const char* kOp = "mla_backward";
  ringattn::c::Workspace workspace;

  std::tuple<ringattn::MlaBackwardInputs, ringattn::MlaBackwardOutputs, std::span<std::byte>, ringattn::Stream> read(
      const ringattn_mla_backward_tensors* given);
};

using namespace ringattn;
using namespace ringattn::c;

std::tuple<MlaBackwardInputs, MlaBackwardOutputs, std::span<std::byte>, Stream> ringattn_mla_backward::read(
    const ringattn_mla_backward_tensors* given) {
  const auto tensors = read_struct("ringattn_mla_backward_tensors", given, sizeof *given);
  const std::pair<const char*, const DLTensor*> needed[] = {
      {"q", tensors.q},        {"latent", tensors.latent},   {"k_rope", tensors.k_rope},   {"w_uk", tensors.w_uk},
      {"w_uv", tensors.w_uv},  {"out", tensors.out},         {"lse", tensors.lse},         {"dout", tensors.dout},
      {"dq", tensors.dq},      {"dlatent", tensors.dlatent}, {"dk_rope", tensors.dk_rope}, {"dw_uk", tensors.dw_uk},
      {"dw_uv", tensors.dw_uv}};
  for (const auto& [name, tensor] : needed) need(tensor, name);
  const TensorReader reader(*transport);
  const MlaSpec& spec = instance.job().spec;
  const std::int64_t heads = spec.heads;
  MlaBackwardInputs inputs;
  inputs.q = reader.rows("q", tensors.q);
  inputs.latent = reader.rows("latent", tensors.latent);
  inputs.k_rope = reader.rows("k_rope", tensors.k_rope);
  inputs.w_uk = reader.matrices("w_uk", tensors.w_uk);
  inputs.w_uv = reader.matrices("w_uv", tensors.w_uv);
  inputs.sinks = reader.numbers("sinks", tensors.sinks, std::array{heads});
  inputs.out = reader.rows("out", tensors.out);
  inputs.lse = reader.row_values("lse", tensors.lse, inputs.q.tokens, heads);
  inputs.dout = reader.rows("dout", tensors.dout);
  inputs.dlse = reader.row_values("dlse", tensors.dlse, inputs.q.tokens, heads);
  MlaBackwardOutputs outputs;
  outputs.dq = reader.rows("dq", tensors.dq);
  outputs.dlatent = reader.rows("dlatent", tensors.dlatent);
  outputs.dk_rope = reader.rows("dk_rope", tensors.dk_rope);
  const std::int64_t latent_dim = spec.latent_dim;
  outputs.dw_uk = reader.numbers("dw_uk", tensors.dw_uk, std::array{heads, std::int64_t{spec.head_dim}, latent_dim});
  outputs.dw_uv = reader.numbers("dw_uv", tensors.dw_uv, std::array{heads, std::int64_t{spec.head_dim_v}, latent_dim});
  outputs.dsinks = reader.numbers("dsinks", tensors.dsinks, std::array{heads});
  const std::span<std::byte> bytes =
      workspace.choose(reader, tensors.workspace, instance.workspace_bytes(), instance.backend());
  for (const char* written : {"dq", "dlatent", "dk_rope", "dw_uk", "dw_uv", "dsinks"}) reader.check_written(written);
  return {inputs, outputs, bytes, Stream{tensors.stream}};
}

extern "C" {

ringattn_status ringattn_mla_backward_create(ringattn_world* world, const ringattn_mla_spec* spec,
                                             const ringattn_batch* batch, const ringattn_options* options,
                                             ringattn_mla_backward** backward) {
  return create(world, backward, [&](Transport& transport) {
    MlaJob job;
    job.spec = read_mla_spec(spec, job.format);
    job.batch = read_batch(batch);
    job.form = MlaForm::kExpanded;
    MlaOptions read;
    read.ring = read_mla_backward_options(options, job.batch, transport);
    return new ringattn_mla_backward{{world->transport, MlaBackward(std::move(job), transport, std::move(read))}, {}};
  });
}

ringattn_status ringattn_mla_backward_create_from(ringattn_mla* mla, ringattn_mla_backward** backward) {
  return with(mla, [&](const ringattn_mla& handle) {
    need(backward, ringattn_mla_backward::kName);
    auto* const made = new ringattn_mla_backward{
        {handle.transport,
         MlaBackward(handle.instance.job(), *handle.transport, mla_backward_options(handle.instance))},
        {}};
    made->busy = handle.busy;
    *backward = made;
  });
}

ringattn_status ringattn_mla_backward_get_facts(const ringattn_mla_backward* backward, ringattn_mla_facts* facts) {
  return with(backward, [&](const ringattn_mla_backward& handle) {
    const MlaBackward& instance = handle.instance;
    write_facts(instance, instance.workspace_bytes(), RINGATTN_EXPANDED, facts);
  });
}

ringattn_status ringattn_mla_backward_rows(const ringattn_mla_backward* backward, int32_t side, int64_t count,
                                           int64_t* packed_tokens, int64_t* sequence_tokens) {
  return with(backward, [&](const ringattn_mla_backward& handle) {
    write_rows(side_of(handle.instance.layout(), side), handle.transport->rank(), count, packed_tokens,
               sequence_tokens);
  });
}

RINGATTN_CALLS(mla_backward);

}  // extern "C"
