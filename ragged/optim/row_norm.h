// NorMuon's second half (arXiv 2510.05491): the rows of an orthogonalised matrix, its neurons, get equal say over time.
#pragma once

#include <ATen/core/Tensor.h>

namespace ragged::optim {

/// Moves `row_exp_avg_sq` [rows], in place, by `beta2` towards the mean square of each row of `update` [rows, columns],
/// and returns the update with each row divided by the root of that, scaled back to its Frobenius norm. Both in fp32.
/// A matrix of zeros gives zeros.
at::Tensor row_normalised(const at::Tensor& update, const at::Tensor& row_exp_avg_sq, double beta2);

}  // namespace ragged::optim
