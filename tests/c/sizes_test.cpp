// SPDX-License-Identifier: Apache-2.0
// Every struct of the C interface says its size: the sizes that it had in an interface are served, and others refused.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "tests/c/every_op.hpp"
#include "tests/support/layer_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

// A struct, and a call that reads or writes it.
struct Struct {
  std::string name;
  std::size_t first, now;  // bytes in the interface that it came with, and in this one
  // Calls with a struct that states this size. The struct is cleared up to that size. What follows in memory is no
  // member that the caller knows: it is neither read nor written.
  std::function<ringattn_status(std::uint64_t size)> call;
};

template <class Given>
Struct grown(const char* name, std::size_t first, std::function<ringattn_status(Given* given)> call) {
  const auto with_size = [name, call = std::move(call)](std::uint64_t size) {
    std::vector<std::byte> room(sizeof(Given) + 8, std::byte{0xAB});
    const std::size_t known = std::min<std::size_t>(size, room.size());
    std::memset(room.data(), 0, std::max(known, sizeof size));
    std::memcpy(room.data(), &size, sizeof size);
    const std::vector<std::byte> before = room;
    const ringattn_status status = call(reinterpret_cast<Given*>(room.data()));
    const auto behind = static_cast<std::ptrdiff_t>(known);
    EXPECT_TRUE(std::equal(room.begin() + behind, room.end(), before.begin() + behind)) << name << ", " << size;
    return status;
  };
  return {name, first, sizeof(Given), with_size};
}

template <class Given>
Struct as_ever(const char* name, std::function<ringattn_status(Given* given)> call) {
  return grown<Given>(name, sizeof(Given), std::move(call));
}

// What create(object) says; destroys what it made.
template <class Object, class Create>
ringattn_status made(void (*destroy)(Object*), const Create& create) {
  Object* object = nullptr;
  const ringattn_status status = create(&object);
  destroy(object);
  return status;
}

// One of each op.
struct Objects {
  Objects() {
    EXPECT_OK(ringattn_attention_create(ops.world.get(), &ops.spec, &ops.batch, nullptr, &attention));
    EXPECT_OK(ringattn_attention_backward_create_from(attention, RINGATTN_GRADIENTS_AS_INPUTS, &backward));
    EXPECT_OK(ringattn_decode_create(ops.world.get(), &ops.spec, &ops.limits, nullptr, &decode));
    EXPECT_OK(ringattn_mla_create(ops.world.get(), &ops.latent, &ops.batch, RINGATTN_ANY_FORM, nullptr, &latent));
    EXPECT_OK(ringattn_mla_backward_create(ops.world.get(), &ops.latent, &ops.batch, nullptr, &latent_backward));
    EXPECT_OK(ringattn_mla_decode_create(ops.world.get(), &ops.latent, &ops.limits, nullptr, &latent_decode));
    EXPECT_OK(ringattn_batched_gemm_create(ops.world.get(), &ops.batched_gemm, nullptr, &batched_gemm));
    EXPECT_OK(ringattn_linear_create(ops.world.get(), &ops.linear, nullptr, &linear));
    EXPECT_OK(ringattn_rope_create(ops.world.get(), &ops.rope, nullptr, &rope));
    EXPECT_OK(ringattn_linear_backward_create(ops.world.get(), &ops.linear, nullptr, &linear_backward));
    EXPECT_OK(ringattn_gradient_reduction_create(ops.world.get(), 8, nullptr, nullptr, &gradient_reduction));
    EXPECT_OK(ringattn_ssm_create(ops.world.get(), &ops.scan, &ops.runs, nullptr, &scan));
    EXPECT_OK(ringattn_linear_attention_create(ops.world.get(), &ops.linear_attention, &ops.runs, nullptr,
                                               &linear_attention));
    EXPECT_OK(ringattn_gated_delta_create(ops.world.get(), &ops.gated_delta, &ops.runs, nullptr, &gated_delta));
    EXPECT_OK(ringattn_reshard_create(ops.world.get(), &ops.reshard, nullptr, &reshard));
    EXPECT_OK(ringattn_ssd_backward_create(ops.world.get(), &ops.scan, &ops.runs, RINGATTN_GRADIENTS_AS_INPUTS, nullptr,
                                           &scan_backward));
    EXPECT_OK(ringattn_causal_conv1d_create(ops.world.get(), &ops.convolution, &ops.runs, nullptr, &convolution));
    EXPECT_OK(ringattn_causal_conv1d_backward_create(ops.world.get(), &ops.convolution, &ops.runs, nullptr,
                                                     &conv1d_backward));
    EXPECT_OK(ringattn_compression_create(ops.world.get(), &ops.compression, nullptr, &compression));
    LayerFile file;
    file.set_zeros("weight", FileDtype::kF32, {2, 2});
    file.write(folder.file("layer.safetensors"));
    EXPECT_OK(ringattn_layer_open(folder.file("layer.safetensors").c_str(), "", nullptr, &layer));
  }
  ~Objects() {
    ringattn_attention_destroy(attention);
    ringattn_attention_backward_destroy(backward);
    ringattn_decode_destroy(decode);
    ringattn_mla_destroy(latent);
    ringattn_mla_backward_destroy(latent_backward);
    ringattn_mla_decode_destroy(latent_decode);
    ringattn_batched_gemm_destroy(batched_gemm);
    ringattn_linear_destroy(linear);
    ringattn_rope_destroy(rope);
    ringattn_linear_backward_destroy(linear_backward);
    ringattn_gradient_reduction_destroy(gradient_reduction);
    ringattn_ssm_destroy(scan);
    ringattn_linear_attention_destroy(linear_attention);
    ringattn_gated_delta_destroy(gated_delta);
    ringattn_reshard_destroy(reshard);
    ringattn_ssd_backward_destroy(scan_backward);
    ringattn_causal_conv1d_destroy(convolution);
    ringattn_causal_conv1d_backward_destroy(conv1d_backward);
    ringattn_compression_destroy(compression);
    ringattn_layer_destroy(layer);
  }
  Objects(const Objects&) = delete;
  Objects& operator=(const Objects&) = delete;

  Ops ops;
  TemporaryFolder folder;
  ringattn_layer* layer = nullptr;
  ringattn_attention* attention = nullptr;
  ringattn_attention_backward* backward = nullptr;
  ringattn_decode* decode = nullptr;
  ringattn_mla* latent = nullptr;
  ringattn_mla_backward* latent_backward = nullptr;
  ringattn_mla_decode* latent_decode = nullptr;
  ringattn_batched_gemm* batched_gemm = nullptr;
  ringattn_linear* linear = nullptr;
  ringattn_rope* rope = nullptr;
  ringattn_linear_backward* linear_backward = nullptr;
  ringattn_gradient_reduction* gradient_reduction = nullptr;
  ringattn_ssm* scan = nullptr;
  ringattn_linear_attention* linear_attention = nullptr;
  ringattn_gated_delta* gated_delta = nullptr;
  ringattn_reshard* reshard = nullptr;
  ringattn_ssd_backward* scan_backward = nullptr;
  ringattn_causal_conv1d* convolution = nullptr;
  ringattn_causal_conv1d_backward* conv1d_backward = nullptr;
  ringattn_compression* compression = nullptr;
};

std::vector<Struct> structs_of_worlds() {
  return {
      as_ever<ringattn_world_options>("ringattn_world_options",
                                      [](auto* given) {
                                        return made(ringattn_world_destroy, [&](ringattn_world** world) {
                                          return ringattn_world_self(given, world);
                                        });
                                      }),
      as_ever<ringattn_callbacks>("ringattn_callbacks",
                                  [](auto* given) {
                                    auto where = sized<ringattn_world_options>();
                                    where.abi = RINGATTN_ABI;
                                    return made(ringattn_world_destroy, [&](ringattn_world** world) {
                                      return ringattn_world_callbacks(&where, 0, 1, given, 0.0, world);
                                    });
                                  }),
  };
}

std::vector<Struct> structs_of_jobs(Ops& ops) {
  const auto attention = [&ops](const ringattn_spec* spec, const ringattn_batch* batch,
                                const ringattn_options* options) {
    return made(ringattn_attention_destroy, [&](ringattn_attention** object) {
      return ringattn_attention_create(ops.world.get(), spec, batch, options, object);
    });
  };
  const auto scan = [&ops](const ringattn_ssm_spec* spec, const ringattn_ssm_batch* batch) {
    return made(ringattn_ssm_destroy, [&](ringattn_ssm** object) {
      return ringattn_ssm_create(ops.world.get(), spec, batch, nullptr, object);
    });
  };
  return {
      grown<ringattn_spec>("ringattn_spec", offsetof(ringattn_spec, k_format),
                           [=, &ops](auto* given) { return attention(given, &ops.batch, nullptr); }),
      grown<ringattn_batch>("ringattn_batch", offsetof(ringattn_batch, k_positions),
                            [=, &ops](auto* given) { return attention(&ops.spec, given, nullptr); }),
      grown<ringattn_options>("ringattn_options", offsetof(ringattn_options, checksum),
                              [=, &ops](auto* given) { return attention(&ops.spec, &ops.batch, given); }),
      as_ever<ringattn_decode_limits>("ringattn_decode_limits",
                                      [&ops](auto* given) {
                                        return made(ringattn_decode_destroy, [&](ringattn_decode** object) {
                                          return ringattn_decode_create(ops.world.get(), &ops.spec, given, nullptr,
                                                                        object);
                                        });
                                      }),
      grown<ringattn_mla_spec>("ringattn_mla_spec", offsetof(ringattn_mla_spec, format),
                               [&ops](auto* given) {
                                 return made(ringattn_mla_destroy, [&](ringattn_mla** object) {
                                   return ringattn_mla_create(ops.world.get(), given, &ops.batch, RINGATTN_ANY_FORM,
                                                              nullptr, object);
                                 });
                               }),
      as_ever<ringattn_batched_gemm_spec>(
          "ringattn_batched_gemm_spec",
          [&ops](auto* given) {
            return made(ringattn_batched_gemm_destroy, [&](ringattn_batched_gemm** object) {
              return ringattn_batched_gemm_create(ops.world.get(), given, nullptr, object);
            });
          }),
      as_ever<ringattn_linear_spec>("ringattn_linear_spec",
                                    [&ops](auto* given) {
                                      return made(ringattn_linear_destroy, [&](ringattn_linear** object) {
                                        return ringattn_linear_create(ops.world.get(), given, nullptr, object);
                                      });
                                    }),
      as_ever<ringattn_rope_spec>("ringattn_rope_spec",
                                  [&ops](auto* given) {
                                    return made(ringattn_rope_destroy, [&](ringattn_rope** object) {
                                      return ringattn_rope_create(ops.world.get(), given, nullptr, object);
                                    });
                                  }),
      as_ever<ringattn_linear_attention_spec>(
          "ringattn_linear_attention_spec",
          [&ops](auto* given) {
            return made(ringattn_linear_attention_destroy, [&](ringattn_linear_attention** object) {
              return ringattn_linear_attention_create(ops.world.get(), given, &ops.runs, nullptr, object);
            });
          }),
      as_ever<ringattn_reshard_spec>("ringattn_reshard_spec",
                                     [&](auto* given) {
                                       return made(ringattn_reshard_destroy, [&](ringattn_reshard** object) {
                                         return ringattn_reshard_create(ops.world.get(), given, nullptr, object);
                                       });
                                     }),
      as_ever<ringattn_gated_delta_spec>(
          "ringattn_gated_delta_spec",
          [&ops](auto* given) {
            return made(ringattn_gated_delta_destroy, [&](ringattn_gated_delta** object) {
              return ringattn_gated_delta_create(ops.world.get(), given, &ops.runs, nullptr, object);
            });
          }),
      as_ever<ringattn_ssm_spec>("ringattn_ssm_spec", [=, &ops](auto* given) { return scan(given, &ops.runs); }),
      grown<ringattn_ssm_batch>("ringattn_ssm_batch", offsetof(ringattn_ssm_batch, update),
                                [=, &ops](auto* given) { return scan(&ops.scan, given); }),
      as_ever<ringattn_causal_conv1d_spec>(
          "ringattn_causal_conv1d_spec",
          [&ops](auto* given) {
            return made(ringattn_causal_conv1d_destroy, [&](ringattn_causal_conv1d** object) {
              return ringattn_causal_conv1d_create(ops.world.get(), given, &ops.runs, nullptr, object);
            });
          }),
      as_ever<ringattn_compression_spec>(
          "ringattn_compression_spec",
          [&ops](auto* given) {
            return made(ringattn_compression_destroy, [&](ringattn_compression** object) {
              return ringattn_compression_create(ops.world.get(), given, nullptr, object);
            });
          }),
      as_ever<ringattn_eviction>("ringattn_eviction",
                                 [&ops](auto* given) {
                                   std::int64_t kept = 0, heads = 0;
                                   return ringattn_eviction_kept(given, &ops.spec, &ops.batch, &kept, &heads);
                                 }),
  };
}

std::vector<Struct> structs_of_facts(const Objects& of) {
  return {
      grown<ringattn_attention_facts>("ringattn_attention_facts", offsetof(ringattn_attention_facts, estimated_seconds),
                                      [&](auto* facts) { return ringattn_attention_get_facts(of.attention, facts); }),
      grown<ringattn_attention_facts>(
          "ringattn_attention_facts", offsetof(ringattn_attention_facts, estimated_seconds),
          [&](auto* facts) { return ringattn_attention_backward_get_facts(of.backward, facts); }),
      as_ever<ringattn_decode_facts>("ringattn_decode_facts",
                                     [&](auto* facts) { return ringattn_decode_get_facts(of.decode, facts); }),
      as_ever<ringattn_decode_facts>(
          "ringattn_decode_facts", [&](auto* facts) { return ringattn_mla_decode_get_facts(of.latent_decode, facts); }),
      as_ever<ringattn_mla_facts>("ringattn_mla_facts",
                                  [&](auto* facts) { return ringattn_mla_get_facts(of.latent, facts); }),
      as_ever<ringattn_mla_facts>(
          "ringattn_mla_facts",
          [&](auto* facts) { return ringattn_mla_backward_get_facts(of.latent_backward, facts); }),
      as_ever<ringattn_batched_gemm_facts>(
          "ringattn_batched_gemm_facts",
          [&](auto* facts) { return ringattn_batched_gemm_get_facts(of.batched_gemm, facts); }),
      as_ever<ringattn_linear_facts>("ringattn_linear_facts",
                                     [&](auto* facts) { return ringattn_linear_get_facts(of.linear, facts); }),
      as_ever<ringattn_linear_facts>(
          "ringattn_linear_facts",
          [&](auto* facts) { return ringattn_linear_backward_get_facts(of.linear_backward, facts); }),
      as_ever<ringattn_gradient_reduction_facts>(
          "ringattn_gradient_reduction_facts",
          [&](auto* facts) { return ringattn_gradient_reduction_get_facts(of.gradient_reduction, facts); }),
      as_ever<ringattn_reshard_facts>("ringattn_reshard_facts",
                                      [&](auto* facts) { return ringattn_reshard_get_facts(of.reshard, facts); }),
      as_ever<ringattn_rope_facts>("ringattn_rope_facts",
                                   [&](auto* facts) { return ringattn_rope_get_facts(of.rope, facts); }),
      as_ever<ringattn_ssm_facts>("ringattn_ssm_facts",
                                  [&](auto* facts) { return ringattn_ssm_get_facts(of.scan, facts); }),
      as_ever<ringattn_ssm_facts>("ringattn_ssm_facts",
                                  [&](auto* facts) { return ringattn_causal_conv1d_get_facts(of.convolution, facts); }),
      as_ever<ringattn_ssm_facts>(
          "ringattn_ssm_facts",
          [&](auto* facts) { return ringattn_causal_conv1d_backward_get_facts(of.conv1d_backward, facts); }),
      as_ever<ringattn_compression_facts>(
          "ringattn_compression_facts",
          [&](auto* facts) { return ringattn_compression_get_facts(of.compression, facts); }),
      as_ever<ringattn_layer_facts>("ringattn_layer_facts",
                                    [&](auto* facts) { return ringattn_layer_get_facts(of.layer, facts); }),
      as_ever<ringattn_part>(
          "ringattn_part",
          [&](auto* part) { return ringattn_compression_get_part(of.compression, RINGATTN_STREAM, 0, part); }),
      as_ever<ringattn_formats>("ringattn_formats",
                                [&](auto* formats) {
                                  ringattn_spec spec = attention_spec();
                                  spec.dtype = kFp16;
                                  return ringattn_choose_formats("int8", 0.0, &spec, formats);
                                }),
  };
}

std::vector<Struct> structs_of_tensors(const Objects& of) {
  return {
      grown<ringattn_attention_tensors>("ringattn_attention_tensors",
                                        offsetof(ringattn_attention_tensors, compressed_k),
                                        [&](auto* given) { return ringattn_attention_run(of.attention, given); }),
      as_ever<ringattn_attention_backward_tensors>(
          "ringattn_attention_backward_tensors",
          [&](auto* given) { return ringattn_attention_backward_run(of.backward, given); }),
      grown<ringattn_decode_tensors>("ringattn_decode_tensors", offsetof(ringattn_decode_tensors, compressed_k),
                                     [&](auto* given) { return ringattn_decode_run(of.decode, given); }),
      as_ever<ringattn_mla_tensors>("ringattn_mla_tensors",
                                    [&](auto* given) { return ringattn_mla_run(of.latent, given); }),
      as_ever<ringattn_mla_backward_tensors>(
          "ringattn_mla_backward_tensors",
          [&](auto* given) { return ringattn_mla_backward_run(of.latent_backward, given); }),
      grown<ringattn_mla_decode_tensors>("ringattn_mla_decode_tensors",
                                         offsetof(ringattn_mla_decode_tensors, lengths_before),
                                         [&](auto* given) { return ringattn_mla_decode_run(of.latent_decode, given); }),
      as_ever<ringattn_batched_gemm_tensors>(
          "ringattn_batched_gemm_tensors",
          [&](auto* given) { return ringattn_batched_gemm_run(of.batched_gemm, given); }),
      as_ever<ringattn_linear_weights>("ringattn_linear_weights",
                                       [&](auto* given) { return ringattn_linear_load(of.linear, given); }),
      as_ever<ringattn_linear_tensors>("ringattn_linear_tensors",
                                       [&](auto* given) { return ringattn_linear_run(of.linear, given); }),
      as_ever<ringattn_linear_backward_tensors>(
          "ringattn_linear_backward_tensors",
          [&](auto* given) { return ringattn_linear_backward_run(of.linear_backward, given); }),
      as_ever<ringattn_gradient_reduction_tensors>(
          "ringattn_gradient_reduction_tensors",
          [&](auto* given) { return ringattn_gradient_reduction_run(of.gradient_reduction, given); }),
      as_ever<ringattn_rope_tensors>("ringattn_rope_tensors",
                                     [&](auto* given) { return ringattn_rope_run(of.rope, given); }),
      grown<ringattn_ssm_tensors>("ringattn_ssm_tensors", offsetof(ringattn_ssm_tensors, slots),
                                  [&](auto* given) { return ringattn_ssm_run(of.scan, given); }),
      as_ever<ringattn_linear_attention_tensors>(
          "ringattn_linear_attention_tensors",
          [&](auto* given) { return ringattn_linear_attention_run(of.linear_attention, given); }),
      as_ever<ringattn_reshard_tensors>("ringattn_reshard_tensors",
                                        [&](auto* given) { return ringattn_reshard_run(of.reshard, given); }),
      as_ever<ringattn_gated_delta_tensors>(
          "ringattn_gated_delta_tensors", [&](auto* given) { return ringattn_gated_delta_run(of.gated_delta, given); }),
      as_ever<ringattn_ssd_backward_tensors>(
          "ringattn_ssd_backward_tensors",
          [&](auto* given) { return ringattn_ssd_backward_run(of.scan_backward, given); }),
      as_ever<ringattn_causal_conv1d_tensors>(
          "ringattn_causal_conv1d_tensors",
          [&](auto* given) { return ringattn_causal_conv1d_run(of.convolution, given); }),
      as_ever<ringattn_causal_conv1d_backward_tensors>(
          "ringattn_causal_conv1d_backward_tensors",
          [&](auto* given) { return ringattn_causal_conv1d_backward_run(of.conv1d_backward, given); }),
      as_ever<ringattn_compression_tensors>(
          "ringattn_compression_tensors",
          [&](auto* given) { return ringattn_compression_decompress(of.compression, given); }),
      as_ever<ringattn_compressed>("ringattn_compressed",
                                   [&](auto* given) {
                                     std::vector<std::uint16_t> rows(kTokens * kHeads * kDim);
                                     CTensor plain(rows.data(), kFp16, {kTokens, kHeads, kDim});
                                     auto tensors = sized<ringattn_compression_tensors>();
                                     tensors.lengths = &kTokens;
                                     tensors.plain = plain.get();
                                     tensors.compressed = given;
                                     return ringattn_compression_decompress(of.compression, &tensors);
                                   }),
      as_ever<ringattn_eviction_tensors>("ringattn_eviction_tensors",
                                         [&](auto* given) {
                                           auto eviction = sized<ringattn_eviction>();
                                           eviction.method = "streaming";
                                           return ringattn_evict(&eviction, &of.ops.spec, &of.ops.batch, given);
                                         }),
  };
}

TEST(CSizes, ThoseOfEarlierInterfacesAreServedAndOthersRefused) {
  Objects objects;
  std::vector<Struct> all = structs_of_worlds();
  for (const auto& more : {structs_of_jobs(objects.ops), structs_of_facts(objects), structs_of_tensors(objects)}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  for (const Struct& tried : all) {
    // With a supported size a call may fail for all that is missing, but not for the size.
    for (const std::size_t size : {tried.first, tried.now}) {
      const bool fails = tried.call(size) != RINGATTN_OK;
      const std::string problem = fails ? ringattn_error_problem() : "";
      EXPECT_FALSE(problem.starts_with(tried.name + " ") && problem.ends_with(" bytes")) << problem;
    }
    for (const std::size_t size : {std::size_t{0}, tried.first - 8, tried.now + 8}) {
      EXPECT_EQ(tried.call(size), RINGATTN_USAGE) << tried.name << ", " << size;
      EXPECT_EQ(ringattn_error_problem(),
                tried.name + (size > tried.now ? " has " : " says that it has ") + std::to_string(size) + " bytes");
    }
  }
}

}  // namespace
}  // namespace ringattn::testing
