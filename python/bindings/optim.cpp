// The steps of optimizers for Python: lists of pieces in, the arithmetic of ragged/optim. Groups, options and states
// are Python's (ragged_fsdp/optim).
#include "python/bindings/bindings.h"
#include "ragged/base/error.h"
#include "ragged/optim/adamw8bit_step.h"
#include "ragged/optim/adamw_step.h"

namespace ragged::python {
namespace {

using MaybeTensor = std::optional<at::Tensor>;
using Tensors = std::vector<at::Tensor>;
using Rates = std::tuple<double, double, double, double, double, std::int64_t>;  // lr, betas, eps, decay, step

// What a kernel wrote through a pointer: autograd and the units' images must hear of it.
void mark_written(const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) tensor.unsafeGetTensorImpl()->bump_version();
}

void mark_written(const std::vector<MaybeTensor>& tensors) {
  for (const MaybeTensor& tensor : tensors) {
    if (tensor) tensor->unsafeGetTensorImpl()->bump_version();
  }
}

optim::AdamWStep constants(const Rates& rates) {
  const auto& [lr, beta1, beta2, eps, weight_decay, step] = rates;
  return optim::adamw_constants(
      {.lr = lr, .beta1 = beta1, .beta2 = beta2, .eps = eps, .weight_decay = weight_decay}, step);
}

void adamw_step(
    const Tensors& params, const Tensors& grads, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
    const std::vector<MaybeTensor>& images, const std::vector<Rates>& rates, double grad_scale) {
  std::vector<optim::AdamWPiece> pieces;
  for (std::size_t i = 0; i < params.size(); ++i) {
    pieces.push_back(
        {.param = params[i],
         .grad = grads[i],
         .exp_avg = exp_avgs[i],
         .exp_avg_sq = exp_avg_sqs[i],
         .image = images[i].value_or(at::Tensor()),
         .step = constants(rates[i])});
  }
  optim::adamw_step(pieces, {.grad = grad_scale});
  for (const Tensors* written : {&params, &exp_avgs, &exp_avg_sqs}) mark_written(*written);
  mark_written(images);
}

optim::TileFormat parse_format(const std::string& name) {
  if (name == "power") return optim::TileFormat::kPower;
  RAGGED_CHECK(
      name == "dynamic", "[adamw8bit] Expected the format power or dynamic, but got '{}'. Leave it out for power.",
      name);
  return optim::TileFormat::kDynamic;
}

struct Place {
  std::vector<Index> shape;
  layout::Interval owned;
};

std::int64_t adamw8bit_step(
    const Tensors& params, const Tensors& grads, const std::vector<Tensors>& states,
    const std::vector<MaybeTensor>& images, const std::vector<Rates>& rates, const std::vector<Place>& places,
    const std::string& format, double grad_scale) {
  std::vector<optim::AdamW8bitPiece> pieces;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const auto& [shape, owned] = places[i];
    pieces.push_back(
        {.param = params[i],
         .grad = grads[i],
         .image = images[i].value_or(at::Tensor()),
         .exp_avg_codes = states[i].at(0),
         .exp_avg_scales = states[i].at(1),
         .exp_avg_sq_codes = states[i].at(2),
         .exp_avg_sq_scales = states[i].at(3),
         .geometry = optim::tile_geometry(shape, owned, ""),
         .step = constants(rates[i])});
  }
  const std::int64_t nonfinite = optim::adamw8bit_step(pieces, {.grad = grad_scale}, {.format = parse_format(format)});
  mark_written(params);
  for (const Tensors& state : states) mark_written(state);
  mark_written(images);
  return nonfinite;
}

}  // namespace

void bind_optim(py::module_& module) {
  module.def(
      "adamw_step", &adamw_step, py::call_guard<py::gil_scoped_release>(),
      "One AdamW step of each piece, in place. rates: (lr, beta1, beta2, eps, weight decay, number of the step).",
      py::arg("params"), py::arg("grads"), py::arg("exp_avgs"), py::arg("exp_avg_sqs"), py::arg("images"),
      py::arg("rates"), py::arg("grad_scale"));
  module.def(
      "adamw8bit_step",
      [](const Tensors& params, const Tensors& grads, const std::vector<Tensors>& states,
         const std::vector<MaybeTensor>& images, const std::vector<Rates>& rates,
         const std::vector<std::tuple<std::vector<Index>, Index, Index>>& places, const std::string& format,
         double grad_scale) {
        std::vector<Place> parsed;
        for (const auto& [shape, begin, end] : places) parsed.push_back({shape, {begin, end}});
        py::gil_scoped_release no_gil;
        return adamw8bit_step(params, grads, states, images, rates, parsed, format, grad_scale);
      },
      "The same with moments in tiles. states: codes and scales of the first moment, then of the second; places: "
      "(shape, "
      "begin, end) of the piece. Returns how many gradient elements weren't finite.",
      py::arg("params"), py::arg("grads"), py::arg("states"), py::arg("images"), py::arg("rates"), py::arg("places"),
      py::arg("format"), py::arg("grad_scale"));
  module.def(
      "zero_code",
      [](const std::string& format, bool is_signed) { return optim::zero_code(parse_format(format), is_signed); },
      "What a moment of zero is stored as.", py::arg("format"), py::arg("is_signed"));
  module.def(
      "decode_tiles",
      [](const at::Tensor& codes, const at::Tensor& scales, const std::vector<Index>& shape, Index begin, Index end,
         const std::string& format, bool is_signed) {
        const auto geometry = optim::tile_geometry(shape, {begin, end}, "");
        return optim::decode_tiles(codes, scales, geometry, parse_format(format), is_signed);
      },
      "Moments as fp32, in the codes' shape, of elements [begin, end) of a parameter of this shape.", py::arg("codes"),
      py::arg("scales"), py::arg("shape"), py::arg("begin"), py::arg("end"), py::arg("format"), py::arg("is_signed"));
}

}  // namespace ragged::python
