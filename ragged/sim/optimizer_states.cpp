#include <algorithm>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ragged/base/error.h"
#include "ragged/plan/matrix_roots.h"
#include "ragged/plan/soap_cost.h"
#include "ragged/sim/model_plan.h"
#include "ragged/sim/text.h"

namespace ragged::sim {
namespace {

using plan::InventoryTensor;

constexpr double kFp32 = 4;

std::size_t at(int i) {
  return static_cast<std::size_t>(i);
}

double matrix_bytes(const plan::SoapMatrix& m) {
  const plan::SoapSides sides = plan::soap_sides(m.rows, m.cols, plan::kSoapMaxPreconditionDim);
  return kFp32 * static_cast<double>(plan::soap_state_numel(m.rows, m.cols, sides));
}

// The matrices of a unit, with who holds what of them.
struct UnitMatrices {
  std::vector<plan::SoapMatrix> shapes{};
  std::vector<plan::RootMatrix> roots{};
};

UnitMatrices matrices_of(const UnitKind& kind, int ranks) {
  UnitMatrices found;
  for (std::size_t i = 0; i < kind.tensors.size(); ++i) {
    const InventoryTensor& tensor = kind.tensors[i];
    if (!is_hidden_matrix(tensor) || tensor.numel() == 0) continue;
    std::vector<plan::HeldPiece> held;
    for (int rank = 0; rank < ranks; ++rank) {
      const layout::Interval owned = kind.plan.owned(static_cast<int>(i), rank);
      if (!owned.empty()) held.push_back({rank, owned});
    }
    const plan::SoapMatrix shape{tensor.shape[tensor.shape.size() - 2], tensor.shape.back()};
    const Index numel = shape.rows * shape.cols;
    std::size_t first = 0;  // that may hold some of the matrix: both ascend
    for (Index begin = 0; begin < tensor.numel(); begin += numel) {
      const layout::Interval range{begin, begin + numel};
      plan::RootMatrix root{.numel = numel};
      while (held[first].interval.end <= begin) ++first;
      for (std::size_t p = first; p < held.size() && held[p].interval.begin < range.end; ++p)
        root.pieces.push_back({held[p].rank, layout::intersect(held[p].interval, range).shifted(-begin)});
      found.shapes.push_back(shape);
      found.roots.push_back(std::move(root));
    }
  }
  return found;
}

}  // namespace

std::string_view name(Optimizer optimizer) {
  switch (optimizer) {
    case Optimizer::kAdamW:
      return "adamw";
    case Optimizer::kAdamWBf16:
      return "adamw-bf16";
    case Optimizer::kAdamW8bit:
      return "adamw8bit";
    case Optimizer::kMuon:
      return "muon";
    case Optimizer::kSoap:
      return "soap";
    case Optimizer::kSgd:
      return "sgd";
  }
  return "?";
}

Optimizer parse_optimizer(std::string_view text) {
  std::vector<std::string> names;
  for (const Optimizer optimizer : kAllOptimizers) {
    if (name(optimizer) == text) return optimizer;
    names.emplace_back(name(optimizer));
  }
  RAGGED_CHECK(
      false, "[optimizer] Expected one of adamw, adamw-bf16, adamw8bit, muon, soap and sgd, but got '{}'.{}", text,
      nearest(text, names).empty() ? "" : fmt::format(" Did you mean '{}'?", nearest(text, names)));
  return Optimizer::kAdamW;
}

bool is_hidden_matrix(const InventoryTensor& tensor) {
  return tensor.shape.size() >= 2 && tensor.kind != "embedding" && tensor.role != "head" && tensor.role != "embed" &&
      tensor.role != "router" && tensor.role != "expert_bias";
}

double state_bytes(Optimizer optimizer, bool is_matrix) {
  switch (optimizer) {
    case Optimizer::kAdamW:
      return 8;  // two moments in fp32
    case Optimizer::kAdamWBf16:
      return 4;
    case Optimizer::kAdamW8bit:
      return 2 + 8.0 / 1024;  // two codes, and two fp32 scales a tile of 32 x 32
    case Optimizer::kMuon:
      return is_matrix ? 4 : 8;  // momentum; AdamW for the rest
    case Optimizer::kSoap:
      return is_matrix ? 24 : 8;  // two factors, two bases, two moments
    case Optimizer::kSgd:
      return 0;
  }
  return 0;
}

std::vector<double> soap_bytes(const ModelPlan& plan) {
  const int ranks = plan.request.ranks;
  std::vector<double> bytes(at(ranks), 0.0);
  std::vector<UnitMatrices> of_kind;
  for (const UnitKind& kind : plan.kinds) {
    of_kind.push_back(matrices_of(kind, ranks));
    for (std::size_t i = 0; i < kind.tensors.size(); ++i) {
      if (is_hidden_matrix(kind.tensors[i])) continue;
      for (int rank = 0; rank < ranks; ++rank) {
        const auto owned = static_cast<double>(kind.plan.owned(static_cast<int>(i), rank).size());
        bytes[at(rank)] += kind.count * state_bytes(Optimizer::kSoap, false) * owned;
      }
    }
  }
  std::vector<plan::SoapMatrix> shapes;
  std::vector<plan::RootMatrix> matrices;
  for (std::size_t unit = 0; unit < plan.unit_kinds.size(); ++unit) {
    const UnitMatrices& found = of_kind[at(plan.unit_kinds[unit])];
    shapes.insert(shapes.end(), found.shapes.begin(), found.shapes.end());
    for (plan::RootMatrix matrix : found.roots) {
      matrix.bucket = static_cast<int>(unit);
      matrices.push_back(std::move(matrix));
    }
  }
  if (matrices.empty()) return bytes;
  const std::vector<double> weights =
      plan::soap_weights(shapes, plan::kSoapPreconditionFrequency, plan::kSoapMaxPreconditionDim);
  for (std::size_t i = 0; i < matrices.size(); ++i) matrices[i].cost = weights[i];
  const plan::RootPlan roots = plan::assign_roots(matrices, {.world_size = ranks});
  for (std::size_t i = 0; i < matrices.size(); ++i) bytes[at(roots.roots[i])] += matrix_bytes(shapes[i]);
  return bytes;
}

double optimizer_bytes(const ModelPlan& plan, Optimizer optimizer) {
  if (optimizer == Optimizer::kSoap) {
    return plan.soap_bytes ? *plan.soap_bytes : std::ranges::max(soap_bytes(plan));
  }
  double bytes = 0;
  for (const UnitKind& kind : plan.kinds) {
    for (const InventoryTensor& tensor : kind.tensors) {
      bytes += kind.count * state_bytes(optimizer, is_hidden_matrix(tensor)) * static_cast<double>(tensor.numel());
    }
  }
  return bytes / plan.request.ranks * plan.largest_over_mean();
}

}  // namespace ragged::sim
