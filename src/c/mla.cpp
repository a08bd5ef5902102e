// SPDX-License-Identifier: Apache-2.0
#include "ops/mla/mla.hpp"

#include <fmt/format.h>

#include <array>
#include <optional>
#include <span>
#include <tuple>
#include <utility>

#include "c/compressed.hpp"
#include "c/jobs.hpp"
#include "c/layouts.hpp"
#include "c/mla_handle.hpp"
#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/tensors.hpp"
#include "c/workspace.hpp"
#include "kernels/quant/latent_rows.hpp"

using namespace ringattn;
using namespace ringattn::c;

namespace {

std::optional<MlaForm> read_form(std::int32_t form) {
  if (form == RINGATTN_ANY_FORM) return std::nullopt;
  if (form == RINGATTN_EXPANDED) return MlaForm::kExpanded;
  if (form == RINGATTN_ABSORBED) return MlaForm::kAbsorbed;
  fail(ErrorCode::kUsage, fmt::format("form {} is not known", form),
       "RINGATTN_ANY_FORM is 0, RINGATTN_EXPANDED 1, RINGATTN_ABSORBED 2", "Choose one of these.");
}

}  // namespace

std::tuple<MlaInputs, MlaOutputs, std::span<std::byte>, Stream> ringattn_mla::read(const ringattn_mla_tensors* given) {
  constexpr std::size_t kFirstTensors = 88;
  const auto tensors = read_struct("ringattn_mla_tensors", given, kFirstTensors);
  need(tensors.q, "q");
  need(tensors.latent, "latent");
  need(tensors.out, "out");
  const TensorReader reader(*transport);
  const std::int64_t heads = instance.job().spec.heads;
  MlaInputs inputs;
  MlaOutputs outputs;
  inputs.q = reader.rows("q", tensors.q);
  if (instance.job().format.is_plain()) {
    need(tensors.k_rope, "k_rope");
    inputs.latent = reader.rows("latent", tensors.latent);
  } else {
    const auto rows =
        reader.part("latent", tensors.latent, part_types(StoredType::kU8, Dtype::kBf16),
                    std::array{instance.k_rows(), std::int64_t{1}, latent_row_bytes(instance.job().spec)}, false);
    inputs.fp8_rows = {rows.data, rows.strides[0], rows.strides[1]};
  }
  inputs.k_rope = reader.rows("k_rope", tensors.k_rope);
  inputs.w_uk = reader.matrices("w_uk", tensors.w_uk);
  inputs.w_uv = reader.matrices("w_uv", tensors.w_uv);
  inputs.sinks = reader.numbers("sinks", tensors.sinks, std::array{heads});
  outputs.out = reader.rows("out", tensors.out);
  outputs.lse = reader.row_values("lse", tensors.lse, inputs.q.tokens, heads);
  const std::span<std::byte> bytes =
      workspace.choose(reader, tensors.workspace, instance.workspace_bytes(false), instance.backend());
  reader.check_written("out");
  reader.check_written("lse");
  return {inputs, outputs, bytes, Stream{tensors.stream}};
}

extern "C" {

ringattn_status ringattn_mla_create(ringattn_world* world, const ringattn_mla_spec* spec, const ringattn_batch* batch,
                                    int32_t form, const ringattn_options* options, ringattn_mla** mla) {
  return create(world, mla, [&](Transport& transport) {
    MlaJob job;
    job.spec = read_mla_spec(spec, job.format);
    job.batch = read_batch(batch);
    job.form = read_form(form);
    MlaOptions read;
    read.ring = read_options(options, job.batch, transport);
    return new ringattn_mla{{world->transport, Mla(std::move(job), transport, std::move(read))}, {}};
  });
}

ringattn_status ringattn_mla_get_facts(const ringattn_mla* mla, ringattn_mla_facts* facts) {
  return with(mla, [&](const ringattn_mla& handle) {
    const Mla& instance = handle.instance;
    const std::int64_t form = instance.form().form == MlaForm::kExpanded ? RINGATTN_EXPANDED : RINGATTN_ABSORBED;
    write_facts(instance, instance.workspace_bytes(false), form, facts);
  });
}

ringattn_status ringattn_mla_rows(const ringattn_mla* mla, int32_t side, int64_t count, int64_t* packed_tokens,
                                  int64_t* sequence_tokens) {
  return with(mla, [&](const ringattn_mla& handle) {
    write_rows(side_of(handle.instance.layout(), side), handle.transport->rank(), count, packed_tokens,
               sequence_tokens);
  });
}

RINGATTN_CALLS(mla);

}  // extern "C"
