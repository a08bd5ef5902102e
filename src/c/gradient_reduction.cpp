// SPDX-License-Identifier: Apache-2.0
#include "ops/linear/gradient_reduction.hpp"

#include <array>
#include <cstddef>
#include <tuple>

#include "c/jobs.hpp"
#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/tensors.hpp"

struct ringattn_gradient_reduction : ringattn::c::Object<ringattn::GradientReduction> {
  static constexpr const char* kName = "gradient_reduction";
  std::tuple<float*, ringattn::Stream> read(const ringattn_gradient_reduction_tensors* given) const;
};

using namespace ringattn;
using namespace ringattn::c;

std::tuple<float*, Stream> ringattn_gradient_reduction::read(const ringattn_gradient_reduction_tensors* given) const {
  constexpr std::size_t kFirstTensors = 24;
  const auto tensors = read_struct("ringattn_gradient_reduction_tensors", given, kFirstTensors);
  need(tensors.sum, "sum");
  const TensorReader reader(*transport);
  return {reader.numbers("sum", tensors.sum, std::array{instance.elements()}), Stream{tensors.stream}};
}

extern "C" {

ringattn_status ringattn_gradient_reduction_create(ringattn_world* world, int64_t elements, const char* parameters,
                                                   const ringattn_options* options,
                                                   ringattn_gradient_reduction** reduction) {
  return create(world, reduction, [&](Transport& transport) {
    return new ringattn_gradient_reduction{
        {world->transport, GradientReduction(elements, transport, read_linear_options(options, transport),
                                             parameters == nullptr ? "" : parameters)}};
  });
}

ringattn_status ringattn_gradient_reduction_get_facts(const ringattn_gradient_reduction* reduction,
                                                      ringattn_gradient_reduction_facts* facts) {
  return with(reduction, [&](const ringattn_gradient_reduction& handle) {
    constexpr std::size_t kFirstFacts = 40;
    const GradientReduction& instance = handle.instance;
    const LeafRange leaves = instance.leaves();
    write_struct("ringattn_gradient_reduction_facts",
                 {0, leaves.begin, leaves.end, instance.memory_bytes(), instance.kernel().row->name.data()}, facts,
                 kFirstFacts);
  });
}

ringattn_status ringattn_gradient_reduction_reset(ringattn_gradient_reduction* reduction) {
  return with(reduction, [](ringattn_gradient_reduction& handle) { handle.instance.reset(); });
}

ringattn_status ringattn_gradient_reduction_add(ringattn_gradient_reduction* reduction, const DLTensor* gradient,
                                                void* stream) {
  return with(reduction, [&](ringattn_gradient_reduction& handle) {
    const TensorReader reader(*handle.transport);
    handle.instance.add(reader.numbers("gradient", gradient, std::array{handle.instance.elements()}), Stream{stream});
  });
}

RINGATTN_CALLS(gradient_reduction);

}  // extern "C"
