// [Note: blocks of a mixed product]
// brgemm multiplies a block of a, rows contiguous, with a block of b whose rows come in pairs (b[k][n], b[k + 1][n]
// side by side: what the dot-product instruction eats). b is packed so once, by columns of kBlockN; a, which comes
// transposed, block by block, with a few columns between rows so that these don't fall on the same lines of the cache.
// kBlockM rows of out stay in the cache while all of k goes by. An odd k is filled up with zeros.
#include "ragged/fsdp/mixed_gemm.h"

#include <algorithm>
#include <memory>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include "ragged/base/math.h"

namespace ragged::fsdp {
namespace {

bool on_cuda(const at::Tensor& a, const at::Tensor& b, at::Tensor out, bool accumulate) {
  if (!at::isReducedFloatingType(a.scalar_type())) return false;
  if (accumulate) {
    at::addmm_out(out, out, a, b, at::kFloat);
  } else {
    at::mm_out(out, a, b, at::kFloat);
  }
  return true;
}

#ifdef CPUBLAS_BRGEMM_BF16BF16F32

constexpr Index kBlockM = 64;
constexpr Index kBlockN = 256;
constexpr Index kBlockK = 256;  // even
constexpr Index kRowStride = kBlockK + 32;

// It throws where this machine can't.
bool machine_has_it() {
  static const bool has = [] {
    const at::BFloat16 factors[4] = {1, 1, 1, 1};
    float product = 0;
    try {
      at::native::cpublas::brgemm(1, 1, 2, 2, 1, 1, /*add_C=*/false, factors, factors, &product, /*is_vnni=*/true);
      at::native::cpublas::brgemm_release(/*is_vnni=*/true);
    } catch (const std::exception&) {
      return false;
    }
    return product == 2;
  }();
  return has;
}

// b's rows [0, k) and columns [first, first + width) in pairs of rows; `even_k` of them.
void pack_b(const at::BFloat16* b, Index k, Index n, Index first, Index width, Index even_k, at::BFloat16* packed) {
  for (Index row = 0; row < even_k; row += 2) {
    const at::BFloat16* upper = b + row * n + first;
    const at::BFloat16* lower = row + 1 < k ? upper + n : nullptr;
    at::BFloat16* pairs = packed + row * width;
    for (Index i = 0; i < width; ++i) {
      pairs[2 * i] = upper[i];
      pairs[2 * i + 1] = lower ? lower[i] : at::BFloat16(0.0F);
    }
  }
}

// A block of a, whose columns are contiguous: `height` rows, `depth` columns of which `known` are there.
void pack_a(const at::BFloat16* a, Index stride, Index height, Index depth, Index known, at::BFloat16* packed) {
  for (Index row = 0; row < height; ++row) {
    for (Index column = 0; column < depth; ++column) {
      packed[row * kRowStride + column] = column < known ? a[column * stride + row] : at::BFloat16(0.0F);
    }
  }
}

bool on_cpu(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out, bool accumulate) {
  const Index m = a.size(0);
  const Index k = a.size(1);
  const Index n = b.size(1);
  const bool fits = a.scalar_type() == at::kBFloat16 && a.t().is_contiguous() && b.is_contiguous() &&
      out.is_contiguous() && out.numel() > 0 && k > 0;
  if (!fits || !machine_has_it()) return false;
  const Index even_k = round_up(k, 2);
  const at::Tensor packed_b = at::empty({even_k * n}, b.options());
  auto* all_of_b = packed_b.mutable_data_ptr<at::BFloat16>();
  const auto* from_a = a.const_data_ptr<at::BFloat16>();
  const auto* from_b = b.const_data_ptr<at::BFloat16>();
  auto* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, ceil_div(n, kBlockN), 1, [&](Index begin, Index end) {
    for (Index block = begin; block < end; ++block) {
      const Index first = block * kBlockN;
      pack_b(from_b, k, n, first, std::min(kBlockN, n - first), even_k, all_of_b + first * even_k);
    }
  });
  at::parallel_for(0, ceil_div(m, kBlockM), 1, [&](Index begin, Index end) {
    const auto rows = std::make_unique_for_overwrite<at::BFloat16[]>(static_cast<std::size_t>(kBlockM * kRowStride));
    for (Index block = begin; block < end; ++block) {
      const Index row = block * kBlockM;
      const Index height = std::min(kBlockM, m - row);
      for (Index step = 0; step < even_k; step += kBlockK) {
        const Index depth = std::min(kBlockK, even_k - step);
        pack_a(from_a + step * m + row, m, height, depth, std::min(depth, k - step), rows.get());
        for (Index column = 0; column < n; column += kBlockN) {
          const Index width = std::min(kBlockN, n - column);
          at::native::cpublas::brgemm(
              height, width, depth, kRowStride, width, n, accumulate || step > 0, rows.get(),
              all_of_b + column * even_k + step * width, to + row * n + column, /*is_vnni=*/true);
        }
      }
    }
    at::native::cpublas::brgemm_release(/*is_vnni=*/true);
  });
  return true;
}

#else

bool on_cpu(const at::Tensor&, const at::Tensor&, const at::Tensor&, bool) {
  return false;
}

#endif

}  // namespace

bool mixed_gemm(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out, bool accumulate) {
  if (out.scalar_type() != at::kFloat || a.scalar_type() != b.scalar_type()) return false;
  if (out.is_cuda()) return on_cuda(a, b, out, accumulate);
  return out.device().is_cpu() && on_cpu(a, b, out, accumulate);
}

}  // namespace ragged::fsdp
