// SPDX-License-Identifier: Apache-2.0
#include "ops/batched_gemm/batched_gemm.hpp"

#include <cstddef>
#include <tuple>

#include "c/jobs.hpp"
#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/tensors.hpp"

struct ringattn_batched_gemm : ringattn::c::Object<ringattn::BatchedGemm> {
  static constexpr const char* kName = "batched_gemm";
  std::tuple<ringattn::BatchedGemmTask, ringattn::Stream> read(const ringattn_batched_gemm_tensors* given) const;
};

using namespace ringattn;
using namespace ringattn::c;

namespace {

// Sizes of the structs in their first interface version.
constexpr std::size_t kFirstSpec = 24, kFirstFacts = 24, kFirstTensors = 40;

}  // namespace

std::tuple<BatchedGemmTask, Stream> ringattn_batched_gemm::read(const ringattn_batched_gemm_tensors* given) const {
  const auto tensors = read_struct("ringattn_batched_gemm_tensors", given, kFirstTensors);
  need(tensors.rows, "rows");
  need(tensors.weights, "weights");
  need(tensors.out, "out");
  const TensorReader reader(*transport);
  const BatchedGemmTask task{reader.rows("rows", tensors.rows), reader.matrices("weights", tensors.weights),
                             reader.rows("out", tensors.out)};
  reader.check_written("out");
  return {task, Stream{tensors.stream}};
}

extern "C" {

ringattn_status ringattn_batched_gemm_create(ringattn_world* world, const ringattn_batched_gemm_spec* spec,
                                             const ringattn_options* options, ringattn_batched_gemm** batched_gemm) {
  return create(world, batched_gemm, [&](Transport& transport) {
    const auto read = read_struct("ringattn_batched_gemm_spec", spec, kFirstSpec);
    const BatchedGemmJob job{{read_dtype(read.dtype), read.dim_k, read.dim_n}, read.heads};
    return new ringattn_batched_gemm{
        {world->transport, BatchedGemm(job, read_batched_gemm_options(options, transport))}};
  });
}

ringattn_status ringattn_batched_gemm_get_facts(const ringattn_batched_gemm* batched_gemm,
                                                ringattn_batched_gemm_facts* facts) {
  return with(batched_gemm, [&](const ringattn_batched_gemm& handle) {
    const BatchedGemm& instance = handle.instance;
    write_struct("ringattn_batched_gemm_facts", {0, instance.memory_bytes(), instance.kernel().row->name.data()}, facts,
                 kFirstFacts);
  });
}

RINGATTN_CALLS(batched_gemm);

}  // extern "C"
