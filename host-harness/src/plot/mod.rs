//! Owns the parts of reports: the style of a page, plots as SVG, and the text around them.

mod axis;
mod legend;
mod lines;
mod table;

pub use axis::{Axis, Scale};
pub use legend::Legend;
pub use lines::{Canvas, Line, Points, lines};
pub use table::{Cell, table};

use plotters::drawing::DrawingAreaErrorKind;
use plotters::style::RGBColor;

/// The style of every report, for light and dark screens.
pub const STYLE: &str = include_str!("style.css");

/// Colour of text and axes in a plot; the style selects it by value, and makes it light on a dark screen.
pub const INK: RGBColor = RGBColor(31, 41, 55);

/// Colour of the grid; also selected by the style.
pub const GRID: RGBColor = RGBColor(226, 230, 236);

/// Font of a plot.
pub const FONT: &str = "system-ui, sans-serif";

/// Why a plot cannot be drawn.
#[derive(Debug, thiserror::Error)]
#[error("a plot: {0}")]
pub struct DrawError(String);

impl<E: std::error::Error + Send + Sync> From<DrawingAreaErrorKind<E>> for DrawError {
    fn from(error: DrawingAreaErrorKind<E>) -> Self {
        Self(error.to_string())
    }
}

/// The start of a page, up to its heading.
pub fn head(title: &str, style: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>{}</title>\n\
         <style>\n{STYLE}{style}</style></head>\n<body>\n",
        escaped(title)
    )
}

/// A plot with its title.
pub fn figure(title: &str, svg: &str) -> String {
    format!(
        "<figure><figcaption>{}</figcaption>\n{svg}</figure>\n",
        escaped(title)
    )
}

/// A text escaped for HTML.
pub fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;")
}

/// A colour `paler` steps nearer to white.
pub fn tint(RGBColor(red, green, blue): RGBColor, paler: usize) -> RGBColor {
    let part = |channel: u8| {
        let missing = f64::from(u8::MAX - channel) * 2.5 / (paler as f64 + 2.5);
        u8::MAX - missing.round() as u8
    };
    RGBColor(part(red), part(green), part(blue))
}

/// A colour in hexadecimal, as in plots.
pub fn hex(RGBColor(red, green, blue): RGBColor) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
}

/// A number with at most three decimals, without trailing zeros.
pub fn tick(value: &f64) -> String {
    let rounded = (value * 1000.0).round() / 1000.0;
    format!("{rounded}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_style_knows_the_colours_that_a_dark_screen_changes() {
        for color in [INK, GRID] {
            let rule = format!("svg [stroke=\"{}\"]", hex(color));
            assert!(STYLE.contains(&rule), "{rule}");
        }
    }
}
