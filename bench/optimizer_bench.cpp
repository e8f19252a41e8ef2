// Bytes per second of the optimizers' steps on the CPU, against a copy that moves as many bytes in the same round, and
// against torch's AdamW. Usage: optimizer_bench [rows of a 4096-column matrix, default 8192] [rounds, default 15].
// A step's bytes: what it must read and write once. A copy of n bytes moves 2n. Rounds are interleaved, and the best of
// each is printed: whatever else runs on the machine only ever adds time.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include "ragged/optim/adamw8bit_step.h"
#include "ragged/optim/adamw_step.h"

namespace ragged::bench {
namespace {

constexpr Index kColumns = 4096;
const optim::AdamWRates kRates{.lr = 1e-4, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};

double seconds(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

struct Case {
  std::string name;
  Index bytes_per_element;
  std::function<void()> step;
};

// Everything a step touches; gradients and moments as after some steps of training.
struct Arrays {
  Index numel;
  at::Tensor param, grad, exp_avg, exp_avg_sq, image, grad_bf16, exp_avg_bf16, exp_avg_sq_bf16;
  at::Tensor first_codes, second_codes, first_scales, second_scales;
  optim::TileGeometry geometry;
  optim::AdamWStep constants = optim::adamw_constants(kRates, 100);

  explicit Arrays(Index rows) : numel(rows * kColumns) {
    param = at::randn({numel}) * 0.02;
    grad = at::randn({numel}) * 1e-3;
    exp_avg = at::zeros({numel});
    exp_avg_sq = at::zeros({numel});
    image = at::empty({numel}, at::kBFloat16);
    grad_bf16 = grad.to(at::kBFloat16);
    exp_avg_bf16 = at::zeros({numel}, at::kBFloat16);
    exp_avg_sq_bf16 = at::zeros({numel}, at::kBFloat16);
    const std::vector<Index> shape{rows, kColumns};
    geometry = optim::tile_geometry(shape, {0, numel}, "w");
    first_codes = at::zeros({numel}, at::kByte);
    second_codes = at::zeros({numel}, at::kByte);
    first_scales = at::zeros({geometry.num_tiles()});
    second_scales = at::zeros({geometry.num_tiles()});
  }

  void adamw(bool bf16_moments, bool bf16_grads, bool with_image) const {
    const optim::AdamWPiece piece{
        .param = param,
        .grad = bf16_grads ? grad_bf16 : grad,
        .exp_avg = bf16_moments ? exp_avg_bf16 : exp_avg,
        .exp_avg_sq = bf16_moments ? exp_avg_sq_bf16 : exp_avg_sq,
        .image = with_image ? image : at::Tensor(),
        .step = constants};
    optim::adamw_step({&piece, 1});
  }

  void adamw8bit(optim::TileFormat format, bool bf16_grads, bool with_image) const {
    const optim::AdamW8bitPiece piece{
        .param = param,
        .grad = bf16_grads ? grad_bf16 : grad,
        .image = with_image ? image : at::Tensor(),
        .exp_avg_codes = first_codes,
        .exp_avg_scales = first_scales,
        .exp_avg_sq_codes = second_codes,
        .exp_avg_sq_scales = second_scales,
        .geometry = geometry,
        .step = constants};
    optim::adamw8bit_step({&piece, 1}, {}, {.format = format});
  }

  // torch.optim.AdamW(fused=True) and (foreach=True), operator by operator.
  void fused() const {
    const std::vector<at::Tensor> steps{at::full({}, 100.0)};
    std::vector<at::Tensor> p{param}, g{grad}, m{exp_avg}, v{exp_avg_sq};
    at::_fused_adamw_(
        p, g, m, v, {}, steps, kRates.lr, kRates.beta1, kRates.beta2, kRates.weight_decay, kRates.eps, false, false);
  }
  void foreach () const {
    std::vector<at::Tensor> p{param}, g{grad}, m{exp_avg}, v{exp_avg_sq};
    at::_foreach_mul_(p, 1.0 - kRates.lr * kRates.weight_decay);
    at::_foreach_lerp_(m, g, 1.0 - kRates.beta1);
    at::_foreach_mul_(v, kRates.beta2);
    at::_foreach_addcmul_(v, g, g, 1.0 - kRates.beta2);
    std::vector<at::Tensor> denominator = at::_foreach_sqrt(v);
    at::_foreach_div_(denominator, 0.99);
    at::_foreach_add_(denominator, kRates.eps);
    at::_foreach_addcdiv_(p, m, denominator, -kRates.lr);
  }
};

std::vector<Case> cases(const Arrays& a) {
  using optim::TileFormat;
  return {
      {"adamw, fp32 moments", 28, [&a] { a.adamw(false, false, false); }},
      {"adamw, fp32 moments, bf16 image", 30, [&a] { a.adamw(false, false, true); }},
      {"adamw, bf16 moments", 20, [&a] { a.adamw(true, false, false); }},
      {"adamw, bf16 moments, grads and image", 20, [&a] { a.adamw(true, true, true); }},
      {"adamw8bit, power", 16, [&a] { a.adamw8bit(TileFormat::kPower, false, false); }},
      {"adamw8bit, power, bf16 image", 18, [&a] { a.adamw8bit(TileFormat::kPower, false, true); }},
      {"adamw8bit, dynamic", 16, [&a] { a.adamw8bit(TileFormat::kDynamic, false, false); }},
      {"torch fused", 28, [&a] { a.fused(); }},
      {"torch foreach", 28, [&a] { a.foreach (); }},
  };
}

void run(Index rows, int rounds, int threads) {
  at::set_num_threads(threads);
  const Arrays arrays(rows);
  const at::Tensor from = at::ones({arrays.numel * 15}, at::kByte);
  at::Tensor to = at::zeros({arrays.numel * 15}, at::kByte);
  fmt::print("{} elements, {} threads, {}\n", arrays.numel, threads, optim::to_string(optim::best_isa()));
  // Copies are slower in some rounds than in others, for reasons of the allocator's and the kernel's: the best of all
  // cases is what every step is held against.
  const std::vector<Case> all = cases(arrays);
  std::vector<double> step_rates(all.size(), 0.0);
  double copy_rate = 0.0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto bytes = static_cast<double>(arrays.numel * all[i].bytes_per_element);
    const Index half = arrays.numel * all[i].bytes_per_element / 2;
    const auto copy = [&] { to.narrow(0, 0, half).copy_(from.narrow(0, 0, half)); };
    all[i].step();
    copy();
    for (int round = 0; round < rounds; ++round) {
      copy_rate = std::max(copy_rate, bytes / seconds(copy));
      step_rates[i] = std::max(step_rates[i], bytes / seconds(all[i].step));
    }
  }
  fmt::print("  {:<40} {:>8} {:>12} {:>10}\n", "step", "GB/s", "of the copy", "ns/element");
  for (std::size_t i = 0; i < all.size(); ++i) {
    fmt::print(
        "  {:<40} {:>8.2f} {:>12.2f} {:>10.3f}\n", all[i].name, step_rates[i] / 1e9, step_rates[i] / copy_rate,
        static_cast<double>(all[i].bytes_per_element) / step_rates[i] * 1e9);
  }
  fmt::print("  {:<40} {:>8.2f}\n", "copy", copy_rate / 1e9);
  std::fflush(stdout);
}

}  // namespace
}  // namespace ragged::bench

int main(int argc, char** argv) {
  const ragged::Index rows = argc > 1 ? std::atol(argv[1]) : 8192;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 15;
  const int all = at::get_num_threads();
  ragged::bench::run(rows, rounds, 1);
  if (all > 1) ragged::bench::run(rows, rounds, all);
}
