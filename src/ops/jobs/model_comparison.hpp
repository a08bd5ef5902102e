// SPDX-License-Identifier: Apache-2.0
// Compares the tensors of a file with the model layer that they belong to according to the user.
#pragma once

#include <string>
#include <string_view>

#include "base/error.hpp"
#include "io/model_config.hpp"
#include "kernels/attention/attention_spec.hpp"

namespace ringattn {

class ModelComparison {
 public:
  ModelComparison(ModelLayer layer, std::string model, std::string file)
      : layer_(layer), model_(std::move(model)), file_(std::move(file)) {}

  const ModelLayer& layer() const { return layer_; }

  // All functions throw kUsage if file and model differ.
  void same(std::string_view name, int of_file, int of_model) const;
  // The number of parts into which heads or channels are divided by tensor parallelism.
  int parts(std::string_view name, int of_file, int of_model) const;
  // Compares something that heads share. It is divided into as many parts or, if there are fewer of it than parts, each
  // part has a copy of one.
  void shared(std::string_view name, int of_file, int of_model, int parts) const;
  // Compares keys and values. For an MLA layer they are either expanded for each head, or they are latents: one K/V
  // head, with queries in the latent space.
  void same_attention(const AttentionSpec& spec) const;
  [[noreturn]] void refuse_kind(std::string_view file, std::string_view model) const;

 private:
  [[noreturn]] void refuse_without_sinks() const;
  MessageTemplate contradiction() const;
  [[noreturn]] void refuse(std::string_view name, int of_file, int of_model, std::string_view why) const;

  ModelLayer layer_;
  std::string model_;  // the config's path
  std::string file_;
};

}  // namespace ringattn
