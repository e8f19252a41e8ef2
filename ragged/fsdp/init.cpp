#include "ragged/fsdp/init.h"

#include <array>
#include <cmath>
#include <numbers>

namespace ragged::fsdp {
namespace {

using Counter = std::array<std::uint32_t, 4>;

// Philox4x32-10: ten rounds of multiply, swap and key bumps (constants from the paper).
Counter philox(Counter counter, std::array<std::uint32_t, 2> key) {
  constexpr std::uint64_t kMultiplier0 = 0xD2511F53;
  constexpr std::uint64_t kMultiplier1 = 0xCD9E8D57;
  constexpr std::uint32_t kWeyl0 = 0x9E3779B9;
  constexpr std::uint32_t kWeyl1 = 0xBB67AE85;
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = kMultiplier0 * counter[0];
    const std::uint64_t product1 = kMultiplier1 * counter[2];
    counter = {
        static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(product1),
        static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(product0)};
    key[0] += kWeyl0;
    key[1] += kWeyl1;
  }
  return counter;
}

// FNV-1a: the name picks the stream, whatever the layout.
std::uint64_t hash_name(const std::string& name) {
  std::uint64_t hash = 14695981039346656037ULL;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  return hash;
}

// (0, 1): 32 bits and a half, so that the logarithm is finite.
double unit(std::uint32_t bits) {
  return (static_cast<double>(bits) + 0.5) / 4294967296.0;
}

}  // namespace

InitRule constant(double value) {
  return {InitRule::Kind::kConstant, value, 0.0};
}
InitRule normal(double mean, double stddev) {
  return {InitRule::Kind::kNormal, mean, stddev};
}
InitRule uniform(double low, double high) {
  return {InitRule::Kind::kUniform, low, high};
}

void fill_initial_values(
    const InitRule& rule, std::uint64_t seed, const std::string& name, layout::Interval interval, float* out) {
  const std::uint64_t stream = hash_name(name);
  const std::array<std::uint32_t, 2> key{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
  for (Index i = interval.begin; i < interval.end; ++i) {
    float& value = out[i - interval.begin];
    if (rule.kind == InitRule::Kind::kConstant) {
      value = static_cast<float>(rule.a);
      continue;
    }
    const auto index = static_cast<std::uint64_t>(i);
    const Counter random = philox(
        {static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32), static_cast<std::uint32_t>(stream),
         static_cast<std::uint32_t>(stream >> 32)},
        key);
    if (rule.kind == InitRule::Kind::kUniform) {
      value = static_cast<float>(rule.a + (rule.b - rule.a) * unit(random[0]));
    } else {
      const double radius = std::sqrt(-2.0 * std::log(unit(random[0])));
      value = static_cast<float>(rule.a + rule.b * radius * std::cos(2.0 * std::numbers::pi * unit(random[1])));
    }
  }
}

}  // namespace ragged::fsdp
