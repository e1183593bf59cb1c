//! Owns plots of horizontal bars: one contender per line, name and figures above the bar, so that a narrow screen has room for
//! both.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::plot::{DrawError, FONT, INK};

/// One contender.
pub struct Strip {
    /// Its name.
    pub name: String,
    /// Its formatted figures.
    pub figures: String,
    /// Its colour.
    pub color: RGBColor,
    /// Lengths of its bars, drawn over each other from 0; the shortest is the darkest.
    pub bars: Vec<f64>,
    /// Minimum and maximum of the last bar's figure.
    pub range: Option<(f64, f64)>,
}

const WIDTH: i32 = 520;
const STEP: i32 = 36;
const THICK: i32 = 11;
/// Font size for letters of 14 pixels, in the drawing library's measure.
const LETTERS: i32 = 18;

/// Bars; the longest takes the whole width.
///
/// # Errors
/// When they cannot be drawn.
pub fn strips(strips: &[Strip]) -> Result<String, DrawError> {
    let ends = strips.iter().flat_map(|strip| {
        let range = strip.range.map(|(_, most)| most);
        strip.bars.iter().copied().chain(range)
    });
    let most = ends.filter(|end| end.is_finite()).fold(0.0, f64::max);
    let scale = f64::from(WIDTH - 8) / if most > 0.0 { most } else { 1.0 };
    let height = STEP * strips.len() as i32 + 4;
    let mut svg = String::new();
    {
        let area =
            SVGBackend::with_string(&mut svg, (WIDTH as u32, height as u32)).into_drawing_area();
        for (at, strip) in strips.iter().enumerate() {
            draw(&area, strip, at as i32 * STEP, scale)?;
        }
        area.present()?;
    }
    Ok(svg)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn draw(area: &Area<'_>, strip: &Strip, top: i32, scale: f64) -> Result<(), DrawError> {
    let long = |value: f64| (value.max(0.0) * scale).round() as i32;
    let written = |side| {
        let letters = (FONT, LETTERS).into_font().color(&INK);
        letters.pos(Pos::new(side, VPos::Top))
    };
    let (upper, lower) = (top + 19, top + 19 + THICK);
    area.draw(&Text::new(
        strip.name.clone(),
        (0, top + 2),
        written(HPos::Left),
    ))?;
    area.draw(&Text::new(
        strip.figures.clone(),
        (WIDTH - 2, top + 2),
        written(HPos::Right),
    ))?;
    let mut bars = strip.bars.clone();
    bars.sort_by(|one, other| other.total_cmp(one));
    for (at, bar) in bars.iter().enumerate() {
        let strength = (at + 1) as f64 / bars.len() as f64;
        let corners = [(0, upper), (long(*bar), lower)];
        area.draw(&Rectangle::new(corners, strip.color.mix(strength).filled()))?;
    }
    let Some((least, most)) = strip.range else {
        return Ok(());
    };
    let middle = (upper + lower) / 2;
    let (left, right) = (long(least), long(most));
    for ends in [
        [(left, middle), (right, middle)],
        [(left, upper + 1), (left, lower - 1)],
        [(right, upper + 1), (right, lower - 1)],
    ] {
        area.draw(&PathElement::new(ends, INK.stroke_width(2)))?;
    }
    Ok(())
}
