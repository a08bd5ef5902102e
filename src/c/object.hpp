// SPDX-License-Identifier: Apache-2.0
// Handles of all ops, and their common functions. An op's file defines its handle
//
//   struct ringattn_ssm : ringattn::c::Object<ringattn::Ssm> {
//     static constexpr const char* kName = "ssm";
//     // The arguments of the op's run() and enqueue().
//     std::tuple<ringattn::SsmInputs, ringattn::SsmOutputs, ringattn::Stream> read(const ringattn_ssm_tensors*)
//     const;
//   };
//
// and defines the functions that are the same for every op by RINGATTN_CALLS(ssm).
#pragma once

#include <atomic>
#include <memory>
#include <tuple>

#include "base/named_range.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/world.hpp"
#include "comm/transport.hpp"

namespace ringattn::c {

// An op, and the transport that it uses.
template <class Op>
struct Object {
  std::shared_ptr<Transport> transport;
  Op instance;
  std::shared_ptr<std::atomic<bool>> busy = {};  // of the world
};

// The op's name in NamedRange. Handles of several ops have one kName, and kOp beside it.
template <class Handle>
constexpr const char* op_name() {
  if constexpr (requires { Handle::kOp; }) {
    return Handle::kOp;
  } else {
    return Handle::kName;
  }
}

// Runs body(*object) exclusively. Converts exceptions to a status.
template <class Handle, class Body>
ringattn_status with(Handle* object, const Body& body) noexcept {
  return guarded([&] {
    need(object, Handle::kName);
    const ExclusiveUse use(object->busy);
    interruptible(*object->transport, [&] { body(*object); });
  });
}

// Sets *object to a new Handle, made by make(transport).
template <class Handle, class Make>
ringattn_status create(ringattn_world* world, Handle** object, const Make& make) noexcept {
  return guarded([&] {
    need(world, "world");
    need(object, Handle::kName);
    const NamedRange range(op_name<Handle>(), "plan");
    const ExclusiveUse use(world->busy);
    interruptible(*world->transport, [&] {
      Handle* const made = make(*world->transport);
      made->busy = world->busy;
      *object = made;
    });
  });
}

template <class Handle, class Tensors>
ringattn_status run(Handle* object, const Tensors* tensors) noexcept {
  return with(object, [&](Handle& handle) {
    const NamedRange range(op_name<Handle>(), "run");
    std::apply([&](const auto&... call) { handle.instance.run(call...); }, handle.read(tensors));
  });
}

template <class Handle, class Tensors>
ringattn_status enqueue(Handle* object, const Tensors* tensors) noexcept {
  return with(object, [&](Handle& handle) {
    const NamedRange range(op_name<Handle>(), "enqueue");
    std::apply([&](const auto&... call) { handle.instance.enqueue(call...); }, handle.read(tensors));
  });
}

}  // namespace ringattn::c

// Defines ringattn_OP_run(), _enqueue(), _wait() and _destroy(). Use it inside `extern "C"`.
#define RINGATTN_CALLS(op)                                                                                 \
  ringattn_status ringattn_##op##_run(ringattn_##op* object, const ringattn_##op##_tensors* tensors) {     \
    return ringattn::c::run(object, tensors);                                                              \
  }                                                                                                        \
  ringattn_status ringattn_##op##_enqueue(ringattn_##op* object, const ringattn_##op##_tensors* tensors) { \
    return ringattn::c::enqueue(object, tensors);                                                          \
  }                                                                                                        \
  ringattn_status ringattn_##op##_wait(ringattn_##op* object) {                                            \
    return ringattn::c::with(object, [](ringattn_##op& handle) { handle.instance.wait(); });               \
  }                                                                                                        \
  void ringattn_##op##_destroy(ringattn_##op* object) { ringattn::c::destroy(object); }                    \
  static_assert(true)
