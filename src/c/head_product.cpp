// SPDX-License-Identifier: Apache-2.0
#include "attention/head_product.hpp"

#include <cstddef>
#include <tuple>

#include "c/jobs.hpp"
#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/tensors.hpp"

struct ringattn_head_product : ringattn::c::Object<ringattn::HeadProduct> {
  static constexpr const char* kName = "head_product";
  std::tuple<ringattn::HeadProductTask, ringattn::Stream> read(const ringattn_head_product_tensors* given) const;
};

using namespace ringattn;
using namespace ringattn::c;

namespace {

// Sizes of structs in the interface version that they came with.
constexpr std::size_t kFirstSpec = 24, kFirstFacts = 24, kFirstTensors = 40;

}  // namespace

std::tuple<HeadProductTask, Stream> ringattn_head_product::read(const ringattn_head_product_tensors* given) const {
  const auto tensors = read_struct("ringattn_head_product_tensors", given, kFirstTensors);
  need(tensors.rows, "rows");
  need(tensors.weights, "weights");
  need(tensors.out, "out");
  const TensorReader reader(*transport);
  const HeadProductTask task{reader.rows("rows", tensors.rows), reader.matrices("weights", tensors.weights),
                             reader.rows("out", tensors.out)};
  reader.check_written("out");
  return {task, Stream{tensors.stream}};
}

extern "C" {

ringattn_status ringattn_head_product_create(ringattn_world* world, const ringattn_head_product_spec* spec,
                                             const ringattn_options* options, ringattn_head_product** head_product) {
  return create(world, head_product, [&](Transport& transport) {
    const auto read = read_struct("ringattn_head_product_spec", spec, kFirstSpec);
    const HeadProductJob job{{read_dtype(read.dtype), read.inner, read.outer}, read.heads};
    return new ringattn_head_product{
        {world->transport, HeadProduct(job, read_head_product_options(options, transport))}};
  });
}

ringattn_status ringattn_head_product_get_facts(const ringattn_head_product* head_product,
                                                ringattn_head_product_facts* facts) {
  return with(head_product, [&](const ringattn_head_product& handle) {
    const HeadProduct& door = handle.door;
    write_struct("ringattn_head_product_facts", {0, door.memory_bytes(), door.kernel().row->name.data()}, facts,
                 kFirstFacts);
  });
}

RINGATTN_CALLS(head_product);

}  // extern "C"
