// The slow, obvious Muon: whole parameters, momentum an element at a time, 8-bit codes a tile at a time, Newton-Schulz
// and NorMuon's rows in double precision. Written from the formulas in the documentation, sharing nothing with
// ragged/optim.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ragged/base/math.h"

namespace ragged::test {

struct MuonTwinOptions {
  double lr = 0.02;
  double decay = 0.1;
  float beta = 0.95F;
  bool nesterov = true;
  std::string format = "fp32";  // of the momentum: or "power", "dynamic"
  bool normuon = false;
  double row_beta2 = 0.95;
};

struct MuonTwin {
  Index matrices = 1, rows = 0, columns = 0;
  MuonTwinOptions options;
  std::vector<double> value;
  std::vector<float> momentum;      // as the next step sees it
  std::vector<std::uint8_t> codes;  // of 8-bit formats
  std::vector<float> scales;
  std::vector<double> row_exp_avg_sq;  // [matrices, rows]

  /// Two and three dims: a stack of their last two; more: [first, all others].
  MuonTwin(const std::vector<Index>& shape, const std::vector<float>& initial, const MuonTwinOptions& given);
  void update(const std::vector<float>& grad);
  /// Moves the momentum; returns what is orthogonalised. NaN where a gradient isn't finite and the format is of 8 bits.
  std::vector<float> pack(const std::vector<float>& grad);

 private:
  void encode();
};

}  // namespace ragged::test
