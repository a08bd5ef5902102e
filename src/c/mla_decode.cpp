// SPDX-License-Identifier: Apache-2.0
#include "ops/mla/mla_decode.hpp"

#include <cstdint>
#include <tuple>
#include <utility>

#include "c/compressed.hpp"
#include "c/jobs.hpp"
#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/steps.hpp"
#include "c/tensors.hpp"
#include "kernels/quant/latent_rows.hpp"

struct ringattn_mla_decode : ringattn::c::Object<ringattn::MlaDecode> {
  static constexpr const char* kName = "decode";
  static constexpr const char* kOp = "mla_decode";

  const ringattn::Decode& steps() const { return instance.in_latent(); }
  std::uint64_t memory_bytes() const { return instance.memory().total(); }
  std::tuple<ringattn::MlaDecodeInputs, ringattn::MlaOutputs, ringattn::Stream> read(
      const ringattn_mla_decode_tensors* given) const;
};

using namespace ringattn;
using namespace ringattn::c;

std::tuple<MlaDecodeInputs, MlaOutputs, Stream> ringattn_mla_decode::read(
    const ringattn_mla_decode_tensors* given) const {
  constexpr std::size_t kFirstTensors = 128;
  const auto tensors = read_tensors("ringattn_mla_decode_tensors", given, kFirstTensors);
  need(tensors.cache, "cache");
  const TensorReader reader(*transport);
  MlaDecodeInputs inputs;
  MlaOutputs outputs;
  read_step(reader, tensors, instance.job().spec.heads, inputs, outputs);
  const MlaDecodeJob& job = instance.job();
  if (job.format.is_plain()) {
    inputs.cache = reader.cache("cache", tensors.cache);
  } else {
    const MlaSpec& spec = job.spec;
    const auto rows =
        reader.part("cache", tensors.cache, part_types(StoredType::kU8, Dtype::kBf16),
                    std::array{std::int64_t{-1}, std::int64_t{-1}, std::int64_t{1}, latent_row_bytes(spec)}, false);
    inputs.fp8_rows = latent_cache(rows.data, spec.latent_dim, spec.rope_dim, rows.lengths[0], rows.lengths[1],
                                   rows.strides[0], rows.strides[1]);
  }
  inputs.latent = reader.rows("latent", tensors.latent);
  inputs.k_rope = reader.rows("k_rope", tensors.k_rope);
  inputs.w_uk = reader.matrices("w_uk", tensors.w_uk);
  inputs.w_uv = reader.matrices("w_uv", tensors.w_uv);
  reader.check_written("out");
  reader.check_written("lse");
  return {inputs, outputs, Stream{tensors.stream}};
}

extern "C" {

ringattn_status ringattn_mla_decode_create(ringattn_world* world, const ringattn_mla_spec* spec,
                                           const ringattn_decode_limits* limits, const ringattn_options* options,
                                           ringattn_mla_decode** decode) {
  return create(world, decode, [&](Transport& transport) {
    MlaDecodeJob job;
    job.spec = read_mla_spec(spec, job.format);
    job.limits = read_limits(limits, job.page_size, job.pages);
    DecodeOptions read = read_decode_options(options, transport);
    return new ringattn_mla_decode{{world->transport, MlaDecode(std::move(job), transport, std::move(read))}};
  });
}

RINGATTN_STEPS(mla_decode);
RINGATTN_CALLS(mla_decode);

}  // extern "C"
