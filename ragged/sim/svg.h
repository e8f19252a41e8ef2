// Just enough SVG: elements appended to a text, colours that work on light and dark pages.
#pragma once

#include <string>
#include <string_view>

namespace ragged::sim {

/// Text with the five special characters escaped.
std::string xml(std::string_view text);

class Svg {
 public:
  Svg(double width, double height);

  void rect(double x, double y, double width, double height, std::string_view fill, std::string_view title = {});
  void text(double x, double y, std::string_view text, std::string_view style_class = {});
  void line(double x1, double y1, double x2, double y2, std::string_view stroke, double width = 1);
  /// `path`: the d attribute.
  void path(std::string_view path, std::string_view fill, std::string_view stroke, double width = 1);

  std::string finish() &&;

 private:
  std::string body_;
};

}  // namespace ragged::sim
