// The CUDA kernels against the CPU's, bit for bit. They need a device; what can be told without one is that the plug-in
// loads and has its table.
#include "ragged/optim/cuda_kernels.h"

#include <cstdlib>
#include <filesystem>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "ragged/optim/muon_passes.h"

namespace ragged::test {
namespace {

using namespace optim;

at::Tensor to_cuda(const at::Tensor& tensor) {
  return tensor.to(c10::Device(c10::kCUDA));
}

#define RAGGED_NEEDS_CUDA()                                                                            \
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device, or a program that loads no CUDA part of torch"; \
  if (!cuda_kernels()) GTEST_SKIP() << "libragged_optim_cuda.so wasn't built"

TEST(CudaKernels, plug_in_loads_where_it_was_built) {
  if (!std::filesystem::exists(RAGGED_OPTIM_CUDA_PLUGIN)) GTEST_SKIP() << "no nvcc when this was built";
  const CudaKernels* kernels = cuda_kernels();
  ASSERT_NE(kernels, nullptr);
  EXPECT_TRUE(kernels->adamw && kernels->adamw8bit && kernels->muon_pack && kernels->muon_apply);
  EXPECT_STREQ(kernels->error_text(0), "no error");
}

TEST(CudaKernels, adamw_gives_the_bits_of_the_cpu) {
  RAGGED_NEEDS_CUDA();
  const at::Tensor param = at::randn({70001}), grad = at::randn({70001}), first = at::randn({70001}),
                   second = at::rand({70001});
  AdamWPiece cpu{.param = param.clone(), .grad = grad, .exp_avg = first.clone(), .exp_avg_sq = second.clone()};
  cpu.image = at::empty({70001}, at::kBFloat16);
  cpu.step = adamw_constants({}, 3);
  AdamWPiece cuda{
      .param = to_cuda(param), .grad = to_cuda(grad), .exp_avg = to_cuda(first), .exp_avg_sq = to_cuda(second)};
  cuda.image = to_cuda(cpu.image);
  cuda.step = cpu.step;
  adamw_step(std::array{cpu}, {.grad = 0.3});
  adamw_step(std::array{cuda}, {.grad = 0.3});
  EXPECT_TRUE(at::equal(cuda.param.cpu(), cpu.param));
  EXPECT_TRUE(at::equal(cuda.exp_avg.cpu(), cpu.exp_avg));
  EXPECT_TRUE(at::equal(cuda.exp_avg_sq.cpu(), cpu.exp_avg_sq));
  EXPECT_TRUE(at::equal(cuda.image.cpu(), cpu.image));
}

TEST(CudaKernels, tiles_give_the_bits_of_the_cpu) {
  RAGGED_NEEDS_CUDA();
  for (const TileFormat format : {TileFormat::kPower, TileFormat::kDynamic}) {
    const std::vector<Index> shape{3, 40, 70};
    const TileGeometry geometry = tile_geometry(shape, {2800, 8400}, "w");
    const at::Tensor param = at::randn({geometry.numel});
    const auto piece = [&](bool on_cuda) {
      const auto place = [&](const at::Tensor& t) { return on_cuda ? to_cuda(t) : t.clone(); };
      const auto codes = [&](bool is_signed) {
        return place(at::full({geometry.numel}, zero_code(format, is_signed), at::kByte));
      };
      const auto scales = [&] { return place(at::zeros({geometry.num_tiles()})); };
      return AdamW8bitPiece{
          .param = place(param),
          .grad = {},
          .exp_avg_codes = codes(true),
          .exp_avg_scales = scales(),
          .exp_avg_sq_codes = codes(false),
          .exp_avg_sq_scales = scales(),
          .geometry = geometry,
          .step = {}};
    };
    AdamW8bitPiece cpu = piece(false), cuda = piece(true);
    for (int step = 1; step <= 5; ++step) {
      cpu.grad = at::randn({geometry.numel});
      cuda.grad = to_cuda(cpu.grad);
      cpu.step = cuda.step = adamw_constants({}, step);
      adamw8bit_step(std::array{cpu}, {}, {.format = format});
      adamw8bit_step(std::array{cuda}, {}, {.format = format});
    }
    EXPECT_TRUE(at::equal(cuda.param.cpu(), cpu.param));
    EXPECT_TRUE(at::equal(cuda.exp_avg_codes.cpu(), cpu.exp_avg_codes));
    EXPECT_TRUE(at::equal(cuda.exp_avg_sq_codes.cpu(), cpu.exp_avg_sq_codes));
    EXPECT_TRUE(at::equal(cuda.exp_avg_scales.cpu(), cpu.exp_avg_scales));
    EXPECT_TRUE(at::equal(cuda.exp_avg_sq_scales.cpu(), cpu.exp_avg_sq_scales));
  }
}

TEST(CudaKernels, passes_of_muon_give_the_bits_of_the_cpu) {
  RAGGED_NEEDS_CUDA();
  const at::Tensor grad = at::randn({5003}), momentum = at::randn({5003}), param = at::randn({5003});
  const at::Tensor out = at::empty({5003}, at::kBFloat16);
  const at::Tensor cuda_momentum = to_cuda(momentum), cuda_param = to_cuda(param), cuda_out = to_cuda(out);
  muon_pack_pass({}, 0.5, grad, momentum, out);
  muon_pack_pass({}, 0.5, to_cuda(grad), cuda_momentum, cuda_out);
  muon_apply_pass(param, out, 0.99, 0.02);
  muon_apply_pass(cuda_param, cuda_out, 0.99, 0.02);
  EXPECT_TRUE(at::equal(cuda_momentum.cpu(), momentum));
  EXPECT_TRUE(at::equal(cuda_out.cpu(), out));
  EXPECT_TRUE(at::equal(cuda_param.cpu(), param));
}

}  // namespace
}  // namespace ragged::test
