#include "ragged/sim/svg.h"

#include <utility>

#include <fmt/format.h>

namespace ragged::sim {

std::string xml(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\'':
        escaped += "&#39;";
        break;
      default:
        escaped += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return escaped;
}

Svg::Svg(double width, double height) {
  body_ = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} "
      "{1:.0f}\">\n"
      "<style>text{{font:12px sans-serif;fill:#222}}.t{{font-size:15px;font-weight:bold}}.s{{font-size:10px;fill:#555}}"
      "</style>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
      width, height);
}

void Svg::rect(double x, double y, double width, double height, std::string_view fill, std::string_view title) {
  body_ += fmt::format(
      "<rect x=\"{:.5g}\" y=\"{:.5g}\" width=\"{:.5g}\" height=\"{:.5g}\" fill=\"{}\"", x, y, width, height, fill);
  body_ += title.empty() ? "/>\n" : fmt::format("><title>{}</title></rect>\n", xml(title));
}

void Svg::text(double x, double y, std::string_view text, std::string_view style_class) {
  const std::string style = style_class.empty() ? "" : fmt::format(" class=\"{}\"", style_class);
  body_ += fmt::format("<text x=\"{:.5g}\" y=\"{:.5g}\"{}>{}</text>\n", x, y, style, xml(text));
}

void Svg::line(double x1, double y1, double x2, double y2, std::string_view stroke, double width) {
  path(fmt::format("M{:.5g} {:.5g}L{:.5g} {:.5g}", x1, y1, x2, y2), "none", stroke, width);
}

void Svg::path(std::string_view path, std::string_view fill, std::string_view stroke, double width) {
  body_ +=
      fmt::format("<path d=\"{}\" fill=\"{}\" stroke=\"{}\" stroke-width=\"{:.3g}\"/>\n", path, fill, stroke, width);
}

std::string Svg::finish() && {
  return std::move(body_) + "</svg>\n";
}

}  // namespace ragged::sim
