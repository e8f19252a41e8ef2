#include "ragged/optim/cuda_kernels.h"

#include <cstdlib>
#include <string_view>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include "ragged/base/error.h"
#include "ragged/optim/kernel_dtypes.h"

namespace ragged::optim {
namespace {

const CudaKernels* load_kernels() {
  const char* wish = std::getenv("RAGGED_CUDA_KERNELS");
  if (wish && std::string_view(wish) == "0") return nullptr;
  void* library = dlopen("libragged_optim_cuda.so", RTLD_NOW | RTLD_LOCAL);  // never closed: its kernels stay in use
  if (!library) return nullptr;
  return static_cast<const CudaKernels*>(dlsym(library, kCudaKernelsSymbol));
}

std::uint16_t* image_of(const at::Tensor& image) {
  return image.defined() ? static_cast<std::uint16_t*>(image.mutable_data_ptr()) : nullptr;
}

void check_launch(int error, std::string_view operation) {
  if (error == 0) return;
  throw Error(fmt::format(
      "[{}] Expected the kernel to start, but got from CUDA: {}. RAGGED_CUDA_KERNELS=0 takes ATen's operations "
      "instead.",
      operation, cuda_kernels()->error_text(error)));
}

void* current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

// The maps on a device. Uploaded anew each step: 7 KB beside megabytes, and nothing outlives the call.
at::Tensor tables_on(c10::Device device) {
  const DynamicTables& tables = dynamic_tables();
  auto* bytes = const_cast<DynamicTables*>(&tables);  // from_blob takes no const; it is only read
  return at::from_blob(bytes, {static_cast<std::int64_t>(sizeof(tables))}, at::kByte).to(device);
}

}  // namespace

const CudaKernels* cuda_kernels() {
  static const CudaKernels* const kernels = load_kernels();
  return kernels;
}

bool has_cuda_kernel(const AdamWPiece& piece) {
  return piece.param.is_cuda() && piece.param.scalar_type() == at::kFloat && is_float_or_bf16(piece.grad) &&
      is_float_or_bf16(piece.exp_avg) && cuda_kernels();
}

bool has_cuda_kernel(const AdamW8bitPiece& piece) {
  return piece.param.is_cuda() && piece.param.scalar_type() == at::kFloat && is_float_or_bf16(piece.grad) &&
      cuda_kernels();
}

void adamw_step_on_cuda(std::span<const AdamWPiece> pieces, const StepScale& scale) {
  if (pieces.empty()) return;
  const c10::Device device = pieces.front().param.device();
  const c10::DeviceGuard guard(device);
  std::vector<CudaAdamWRun> runs;
  for (const AdamWPiece& piece : pieces) {
    runs.push_back(
        {.params = piece.param.mutable_data_ptr<float>(),
         .grads = piece.grad.const_data_ptr(),
         .exp_avg = piece.exp_avg.mutable_data_ptr(),
         .exp_avg_sq = piece.exp_avg_sq.mutable_data_ptr(),
         .image = image_of(piece.image),
         .numel = piece.param.numel(),
         .step = piece.step,
         .grads_are_bf16 = piece.grad.scalar_type() == at::kBFloat16,
         .moments_are_bf16 = piece.exp_avg.scalar_type() == at::kBFloat16});
  }
  const int count = static_cast<int>(runs.size());
  check_launch(
      cuda_kernels()->adamw(runs.data(), count, static_cast<float>(scale.grad), current_stream(device)), "adamw");
}

void adamw8bit_step_on_cuda(
    std::span<const AdamW8bitPiece> pieces, const StepScale& scale, const TileOptions& options,
    const at::Tensor& not_finite) {
  if (pieces.empty()) return;
  const c10::Device device = pieces.front().param.device();
  const c10::DeviceGuard guard(device);
  std::vector<CudaTilePiece> flat;
  for (const AdamW8bitPiece& piece : pieces) {
    flat.push_back(
        {.params = piece.param.mutable_data_ptr<float>(),
         .grads = piece.grad.const_data_ptr(),
         .image = image_of(piece.image),
         .first_codes = piece.exp_avg_codes.mutable_data_ptr<std::uint8_t>(),
         .second_codes = piece.exp_avg_sq_codes.mutable_data_ptr<std::uint8_t>(),
         .first_scales = piece.exp_avg_scales.mutable_data_ptr<float>(),
         .second_scales = piece.exp_avg_sq_scales.mutable_data_ptr<float>(),
         .matrix_rows = piece.geometry.matrix_rows,
         .columns = piece.geometry.columns,
         .first_strip = piece.geometry.first_strip,
         .num_strips = piece.geometry.num_strips,
         .step = piece.step,
         .grads_are_bf16 = piece.grad.scalar_type() == at::kBFloat16});
  }
  const at::Tensor tables = options.format == TileFormat::kDynamic ? tables_on(device) : at::Tensor();
  const CudaTileArgs args{
      .pieces = flat.data(),
      .count = static_cast<int>(flat.size()),
      .grad_scale = static_cast<float>(scale.grad),
      .format = options.format,
      .guards = options.guards,
      .tables = tables.defined() ? static_cast<const DynamicTables*>(tables.const_data_ptr()) : nullptr,
      .not_finite = not_finite.mutable_data_ptr<std::int64_t>()};
  check_launch(cuda_kernels()->adamw8bit(args, current_stream(device)), "adamw8bit");
}

bool has_cuda_muon(const at::Tensor& tensor) {
  return tensor.is_cuda() && is_float_or_bf16(tensor) && cuda_kernels();
}

void muon_pack_by_kernel(
    double momentum_decay, bool nesterov, double grad_scale, const at::Tensor& grad, const at::Tensor& momentum,
    const at::Tensor& out) {
  const c10::DeviceGuard guard(grad.device());
  const CudaMuonPack args{
      .grads = grad.const_data_ptr(),
      .momentum = momentum.mutable_data_ptr(),
      .out = out.mutable_data_ptr(),
      .numel = grad.numel(),
      .grad_scale = static_cast<float>(grad_scale),
      .beta = static_cast<float>(momentum_decay),
      .nesterov = nesterov,
      .grads_are_bf16 = grad.scalar_type() == at::kBFloat16,
      .momentum_is_bf16 = momentum.scalar_type() == at::kBFloat16,
      .out_is_bf16 = out.scalar_type() == at::kBFloat16};
  check_launch(cuda_kernels()->muon_pack(args, current_stream(grad.device())), "muon");
}

void muon_apply_by_kernel(const at::Tensor& param, const at::Tensor& update, double decay, double step_size) {
  const c10::DeviceGuard guard(param.device());
  const CudaMuonApply args{
      .params = param.mutable_data_ptr<float>(),
      .update = update.const_data_ptr(),
      .numel = param.numel(),
      .decay = static_cast<float>(decay),
      .step_size = static_cast<float>(step_size),
      .update_is_bf16 = update.scalar_type() == at::kBFloat16};
  check_launch(cuda_kernels()->muon_apply(args, current_stream(param.device())), "muon");
}

}  // namespace ragged::optim
