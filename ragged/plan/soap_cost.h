// What SOAP's states of one matrix take, in memory and in operations, and how much it weighs where matrices are dealt
// out to ranks. Numbers from shapes alone; the arithmetic is ragged/optim/soap_math.h.
#pragma once

#include <span>
#include <vector>

#include "ragged/base/math.h"

namespace ragged::plan {

/// Defaults of optim::SoapMath.
inline constexpr Index kSoapPreconditionFrequency = 10;
inline constexpr Index kSoapMaxPreconditionDim = 10000;

/// Which sides of a matrix have a factor and a basis.
struct SoapSides {
  bool left = true;   // rows: L, Q_L
  bool right = true;  // columns: R, Q_R
  friend bool operator==(const SoapSides&, const SoapSides&) = default;
};
SoapSides soap_sides(Index rows, Index cols, Index max_precondition_dim);

/// Elements of the state of one matrix, fp32: 2 rows^2 + 2 cols^2 + 2 rows cols, sides without a factor left out.
Index soap_state_numel(Index rows, Index cols, SoapSides sides);
/// Floating-point operations of a step, those of a new basis shared out over the steps that it serves.
double soap_cost(Index rows, Index cols, SoapSides sides, Index precondition_frequency);

struct SoapMatrix {
  Index rows = 0;
  Index cols = 0;
};
/// RootMatrix::cost of each: its share of all operations plus its share of all state, 2 in all.
std::vector<double> soap_weights(
    std::span<const SoapMatrix> matrices, Index precondition_frequency, Index max_precondition_dim);

}  // namespace ragged::plan
