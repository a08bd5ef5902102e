// SPDX-License-Identifier: Apache-2.0
// Values that each flag takes: different ones, so that a test can tell which layer a value came from. A new flag
// without samples fails the tests that iterate the flag table.
#pragma once

#include <span>
#include <string_view>

namespace ringattn::testing {

struct FlagSamples {
  std::string_view flag;
  std::string_view values[3];
  bool of_bench = false;  // where `bench` has a flag of that name that takes other values
};

inline constexpr FlagSamples kFlagSamples[] = {
    {"input", {"a.safetensors", "b.safetensors", "c.safetensors"}},
    {"tensors", {"q=a", "q=b,k=c", "v=d,sinks=e"}},
    {"synthetic", {"1", "2", "18446744073709551615"}},
    {"order", {"thd", "htd", "bhtd"}},
    {"page-order", {"thd", "htd", "thd"}},
    {"op", {"attention", "decode", "selective_scan"}},
    {"backward", {"true", "false", "true"}},
    {"seq", {"100", "2k", "3m"}},
    {"q-len", {"1", "2", "3"}},
    {"page-size", {"16", "64", "256"}},
    {"prefix", {"16", "64", "4k"}},
    {"batch", {"2", "3", "4"}},
    {"total-tokens", {"2k", "16k", "4096"}},
    {"heads", {"2", "4", "6"}},
    {"kv-heads", {"1", "3", "4"}},
    {"head-dim", {"16", "64", "96"}},
    {"head-dim-v", {"16", "64", "96"}},
    {"rope-dim", {"8", "32", "128"}},
    {"latent-dim", {"64", "256", "1024"}},
    {"state-dim", {"16", "64", "256"}},
    {"groups", {"2", "4", "8"}},
    {"conv-width", {"2", "3", "4"}},
    {"model-config", {"a.json", "b.json", "c.json"}},
    {"layer", {"0", "1", "60"}},
    {"dtype", {"bf16", "fp16", "fp32"}},
    {"cache-format", {"fp8", "int8", "int4"}},
    {"sinks", {"true", "false", "true"}},
    {"dlse", {"true", "false", "true"}},
    {"mask", {"full", "causal", "full"}},
    {"query-offset", {"-5", "0", "7"}},
    {"window", {"5,-1", "-1,3", "1k,0"}},
    {"block-mask", {"window:64", "vertical:0,900+slash:0", "a.safetensors"}},
    {"form", {"expanded", "absorbed", "auto"}},
    {"dt-softplus", {"on", "off", "auto"}},
    {"dt-limit", {"0,inf", "-inf,1", "0.5,2"}},
    {"softmax-scale", {"0.5", "1", "2e-3"}},
    {"softcap", {"30", "50", "0.5"}},
    {"method", {"fp8", "int4", "hybrid"}},
    {"ratio", {"0.5", "0.7", "0.75"}},
    {"report", {"true", "false", "true"}},
    {"format", {"int8", "int4", "int8"}},
    {"search", {"none", "mse", "none"}},
    {"ignore", {"lm_head", "down_proj", "lm_head,model.layers.0.mlp.up_proj"}},
    {"world", {"2", "2,4", "2-1k*2"}},
    {"machine", {"a.json", "b.toml", "c.json"}},
    {"backend", {"cpu", "auto", "cuda"}},
    {"kernel", {"cpu_attention", "auto", "other"}},
    {"transport", {"self", "threads", "mpi"}},
    {"ranks", {"1", "2", "64"}},
    {"layout", {"striped", "zigzag", "contiguous"}},
    {"stripe", {"128", "1k", "2k"}},
    {"block", {"256", "4k", "8k"}},
    {"memory", {"1g", "512m", "123456789"}},
    {"overlap", {"on", "off", "on"}},
    {"simd-target", {"avx2", "neon", "auto"}},
    {"threads", {"1", "2", "all"}},
    {"numa-binding", {"node", "none", "node"}},
    {"output", {"a.safetensors", "b.safetensors", "c.safetensors"}},
    {"output", {"table", "md", "csv"}, true},
    {"final-states", {"true", "false", "true"}},
    {"force", {"true", "false", "true"}},
    {"json", {"a.json", "-", "c.json"}},
    {"jsonl", {"a.jsonl", "-", "c.jsonl"}},
    {"trace", {"a.json", "b.json", "c.json"}},
    {"progress", {"auto", "on", "off"}},
    {"color", {"auto", "always", "never"}},
    {"quiet", {"true", "false", "true"}},
    {"verbose", {"true", "false", "true"}},
    {"print-config", {"true", "false", "true"}},
    {"dry-run", {"true", "false", "true"}},
    {"timeout", {"1.5", "60", "600"}},
    {"checksum", {"true", "false", "true"}},
    {"against", {"oracle", "a.safetensors", "b.safetensors"}},
    {"decode", {"true", "false", "true"}},
    {"rows", {"1", "64", "100"}},
    {"record", {"a.json", "b.json", "c.json"}},
    {"golden", {"a.json", "b.json", "c.json"}},
    {"peer", {"a.safetensors", "b.safetensors", "c.safetensors"}},
    {"measure", {"true", "false", "true"}},
    {"quick", {"true", "false", "true"}},
    {"samples", {"1", "10", "100"}},
    {"compute-only", {"true", "false", "true"}},
    {"with-forward", {"true", "false", "true"}},
    {"baseline", {"a.jsonl", "b.jsonl", "c.jsonl"}},
    {"fail-above", {"5%", "10", "0.5%"}},
};

inline const FlagSamples* samples_of(std::string_view flag, bool of_bench = false) {
  const FlagSamples* found = nullptr;
  for (const FlagSamples& samples : kFlagSamples) {
    if (samples.flag == flag && (found == nullptr || samples.of_bench == of_bench)) found = &samples;
  }
  return found;
}

}  // namespace ringattn::testing
