#include "ragged/optim/newton_schulz.h"

#include <algorithm>
#include <cfloat>
#include <charconv>
#include <cmath>
#include <optional>

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include "ragged/base/error.h"
#include "ragged/optim/isa.h"

namespace ragged::optim {
namespace {

using Steps = std::vector<std::array<double, 3>>;

constexpr std::array<double, 3> kKeller = {3.4445, -4.7750, 2.0315};

const Steps& you_steps() {
  static const Steps steps = {
      {4.0848, -6.8946, 2.9270},
      {3.9505, -6.3029, 2.6377},
      {3.7418, -5.5913, 2.3037},
      {2.8769, -3.1427, 1.2046},
      {2.8366, -3.0525, 1.2012}};
  return steps;
}

const Steps& polar_steps() {
  static const Steps steps = {
      {8.28721201814563, -23.595886519098837, 17.300387312530933},
      {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
      {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
      {3.3184196573706015, -2.488488024314874, 0.51004894012372},
      {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
      {1.891301407787398, -1.2679958271945868, 0.37680408948524835},
      {1.8750014808534479, -1.2500016453999487, 0.3750001645474248}};
  return steps;
}

const Steps& cushioned_steps() {
  static const Steps steps = {
      {8.156554524902461, -22.48329292557795, 15.878769915207462},
      {4.042929935166739, -2.808917465908714, 0.5000178451051316},
      {3.8916678022926607, -2.772484153217685, 0.5060648178503393},
      {3.285753657755655, -2.3681294933425376, 0.46449024233003106},
      {2.3465413258596377, -1.7097828382687081, 0.42323551169305323}};
  return steps;
}

NewtonSchulzSet polar_express(int num_steps) {
  constexpr double kSafety = 1.01;
  NewtonSchulzSet set;
  for (int i = 0; i < num_steps; ++i) {
    const auto& known = polar_steps();
    const auto at = static_cast<std::size_t>(i);
    const auto [a, b, c] = at < known.size() ? known[at] : std::array<double, 3>{1.875, -1.25, 0.375};
    set.steps.push_back({a / kSafety, b / std::pow(kSafety, 3), c / std::pow(kSafety, 5)});
  }
  return set;
}

NewtonSchulzSet first_of(const Steps& steps, int num_steps, double norm_factor) {
  NewtonSchulzSet set;
  set.steps.assign(steps.begin(), steps.begin() + num_steps);
  set.norm_factor = norm_factor;
  return set;
}

// "a, b, c" as numbers; nothing else.
std::optional<std::array<double, 3>> own_coefficients(std::string_view text) {
  std::array<double, 3> abc{};
  for (std::size_t i = 0; i < abc.size(); ++i) {
    text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), abc[i]);
    if (error != std::errc() || !std::isfinite(abc[i])) return std::nullopt;
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    const bool is_last = i + 1 == abc.size();
    if (is_last ? !text.empty() : !text.starts_with(',')) return std::nullopt;
    if (!is_last) text.remove_prefix(1);
  }
  return abc;
}

// Operands as the dtype has them, in a dtype that the device multiplies well: bf16 on most CPUs is fp32 that is rounded
// after each operation.
struct Arithmetic {
  at::ScalarType dtype;
  bool emulates;

  at::Tensor round(const at::Tensor& x) const { return emulates ? x.to(dtype).to(at::kFloat) : x; }
  at::Tensor multiply(const at::Tensor& x, const at::Tensor& y) const { return round(at::matmul(x, y)); }
  /// x * a + (y z) * b, rounded once.
  at::Tensor multiply_add(double a, const at::Tensor& x, double b, const at::Tensor& y, const at::Tensor& z) const {
    if (dtype != at::kBFloat16 || emulates) return round(x * a + at::matmul(y, z) * b);
    return x.dim() == 3 ? at::baddbmm(x, y, z, a, b) : at::addmm(x, y, z, a, b);
  }
};

// x: [rows, cols] or [n, rows, cols], rows <= cols.
at::Tensor iterate(at::Tensor x, const NewtonSchulzSet& set, const Arithmetic& arithmetic) {
  for (const auto& [a, b, c] : set.steps) {
    const at::Tensor gram = arithmetic.multiply(x, x.transpose(-2, -1));
    const at::Tensor polynomial = arithmetic.multiply_add(b, gram, c, gram, gram);
    x = arithmetic.multiply_add(a, x, 1.0, polynomial, x);
  }
  return x;
}

// Every matrix scaled to norm 1 / norm_factor in fp32 (fp64 for fp64). The largest magnitude's power of two goes first,
// exactly, so that no square is lost or overflows.
at::Tensor normalised(const at::Tensor& x, double norm_factor) {
  const at::Tensor largest = x.abs().amax({-2, -1}, true);
  const auto exponent = std::get<1>(at::frexp(largest));
  const at::Tensor is_zero = largest < FLT_MIN;
  const at::Tensor scaled = at::ldexp(at::ldexp(x, -exponent.div(2, "floor")), -(exponent - exponent.div(2, "floor")));
  const at::Tensor norm = scaled.square().sum({-2, -1}, true).sqrt() * norm_factor;
  return at::where(is_zero, at::zeros({}, x.options()), scaled / norm);
}

}  // namespace

std::vector<std::string> newton_schulz_names() {
  return {"keller", "you", "polar_express", "cushioned", "deepseek_v4"};
}

NewtonSchulzSet newton_schulz_set(std::string_view name, int num_steps) {
  const int most = name == "you" || name == "cushioned" ? 5 : name == "deepseek_v4" ? 10 : 99;
  const int least = name == "deepseek_v4" ? 10 : 1;
  const int count = num_steps == 0 ? (name == "deepseek_v4" ? 10 : 5) : num_steps;
  RAGGED_CHECK(
      count >= least && count <= most,
      "[newton_schulz] Expected {} to {} steps of '{}', but got {}. 0 takes the set's own number.", least, most, name,
      num_steps);
  if (name == "keller") return {.steps = Steps(static_cast<std::size_t>(count), kKeller)};
  if (name == "you") return first_of(you_steps(), count, 1.0);
  if (name == "polar_express") return polar_express(count);
  if (name == "cushioned") return first_of(cushioned_steps(), count, 1.02);
  if (const auto own = own_coefficients(name)) return {.steps = Steps(static_cast<std::size_t>(count), *own)};
  RAGGED_CHECK(
      name == "deepseek_v4",
      "[newton_schulz] Expected the coefficients to be one of {}, or three numbers 'a, b, c', but got '{}'.",
      fmt::join(newton_schulz_names(), ", "), name);
  NewtonSchulzSet set{.steps = Steps(8, kKeller)};
  set.steps.insert(set.steps.end(), 2, {2.0, -1.5, 0.5});
  return set;
}

void check(const NewtonSchulzOptions& options) {
  newton_schulz_set(options.coefficients, options.num_steps);
  RAGGED_CHECK(
      options.dtype == at::kBFloat16 || options.dtype == at::kFloat || options.dtype == at::kDouble,
      "[newton_schulz] Expected bf16, fp32 or fp64, but got {}.", c10::toString(options.dtype));
}

at::Tensor newton_schulz(const at::Tensor& matrices, const NewtonSchulzSet& set, const NewtonSchulzOptions& options) {
  if (matrices.numel() == 0) return matrices.to(options.dtype);
  // One after another on a CPU, where a batched product may add up in another order than a single one.
  if (matrices.dim() == 3 && (matrices.device().is_cpu() || !options.batched)) {
    std::vector<at::Tensor> results;
    for (const at::Tensor& matrix : matrices.unbind(0)) results.push_back(newton_schulz(matrix, set, options));
    return at::stack(results);
  }
  const bool emulates =
      options.dtype == at::kBFloat16 && matrices.device().is_cpu() && !(options.native_bf16 && has_bf16_products());
  const Arithmetic arithmetic{.dtype = options.dtype, .emulates = emulates};
  at::Tensor x = matrices.to(options.dtype == at::kDouble ? at::kDouble : at::kFloat);
  const bool is_tall = x.size(-2) > x.size(-1);
  if (is_tall) x = x.transpose(-2, -1).contiguous();
  x = normalised(x, set.norm_factor);
  x = iterate(emulates ? arithmetic.round(x) : x.to(options.dtype), set, arithmetic).to(options.dtype);
  return is_tall ? x.transpose(-2, -1).contiguous() : x;
}

}  // namespace ragged::optim
