// SPDX-License-Identifier: Apache-2.0
// What the handles of all ops are, and what all ops do with them. An op's file defines its handle
//
//   struct ringattn_ssm : ringattn::c::Object<ringattn::Ssm> {
//     static constexpr const char* kName = "ssm";
//     // The arguments of the door's run() and enqueue().
//     std::tuple<ringattn::SsmInputs, ringattn::SsmOutputs, ringattn::Stream> read(const ringattn_ssm_tensors*)
//     const;
//   };
//
// and has the functions that are alike for every op by RINGATTN_CALLS(ssm).
#pragma once

#include <atomic>
#include <memory>
#include <tuple>

#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/world.hpp"
#include "comm/transport.hpp"

namespace ringattn::c {

// A front door, and the transport that it works over.
template <class Door>
struct Object {
  std::shared_ptr<Transport> transport;
  Door door;
  std::shared_ptr<std::atomic<bool>> busy = {};  // the world's
};

// Runs body(*object), and returns what became of it.
template <class Handle, class Body>
ringattn_status with(Handle* object, const Body& body) noexcept {
  return guarded([&] {
    need(object, Handle::kName);
    const Turn turn(object->busy);
    interruptible(*object->transport, [&] { body(*object); });
  });
}

// *object becomes what make(transport) gives, a new Handle.
template <class Handle, class Make>
ringattn_status create(ringattn_world* world, Handle** object, const Make& make) noexcept {
  return guarded([&] {
    need(world, "world");
    need(object, Handle::kName);
    const Turn turn(world->busy);
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
    std::apply([&](const auto&... call) { handle.door.run(call...); }, handle.read(tensors));
  });
}

template <class Handle, class Tensors>
ringattn_status enqueue(Handle* object, const Tensors* tensors) noexcept {
  return with(object, [&](Handle& handle) {
    std::apply([&](const auto&... call) { handle.door.enqueue(call...); }, handle.read(tensors));
  });
}

}  // namespace ringattn::c

// ringattn_OP_run(), _enqueue(), _wait() and _destroy(). Stands in `extern "C"`.
#define RINGATTN_CALLS(op)                                                                                 \
  ringattn_status ringattn_##op##_run(ringattn_##op* object, const ringattn_##op##_tensors* tensors) {     \
    return ringattn::c::run(object, tensors);                                                              \
  }                                                                                                        \
  ringattn_status ringattn_##op##_enqueue(ringattn_##op* object, const ringattn_##op##_tensors* tensors) { \
    return ringattn::c::enqueue(object, tensors);                                                          \
  }                                                                                                        \
  ringattn_status ringattn_##op##_wait(ringattn_##op* object) {                                            \
    return ringattn::c::with(object, [](ringattn_##op& handle) { handle.door.wait(); });                   \
  }                                                                                                        \
  void ringattn_##op##_destroy(ringattn_##op* object) { ringattn::c::destroy(object); }                    \
  static_assert(true)
