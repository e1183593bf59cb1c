//! Owns plots of lines, as SVG.

use plotters::prelude::*;

use super::{Axis, DrawError, FONT, GRID, INK, tick};

/// What a line connects.
pub type Points = Vec<(f64, f64)>;

/// A line and how it is drawn.
pub struct Line {
    /// Its colour, by which the page finds it.
    pub color: RGBColor,
    /// In pixels.
    pub stroke: u32,
    /// What it connects.
    pub points: Points,
}

const SIZE: (u32, u32) = (760, 340);

/// Lines in one plot.
///
/// # Errors
/// When it cannot be drawn.
pub fn lines(x: Axis, y: Axis, lines: &[Line]) -> Result<String, DrawError> {
    let points = || lines.iter().flat_map(|line| &line.points);
    let (across, up) = (
        x.ruler(points().map(|point| point.0)),
        y.ruler(points().map(|point| point.1)),
    );
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let mut chart = ChartBuilder::on(&area)
            .margin(6)
            .margin_right(18)
            .x_label_area_size(46)
            .y_label_area_size(64)
            .build_cartesian_2d(across, up)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(INK)
            .label_style((FONT, 14).into_font().color(&INK))
            .axis_desc_style((FONT, 15).into_font().color(&INK))
            .x_desc(x.label)
            .y_desc(y.label)
            .x_labels(13)
            .y_labels(10)
            .x_label_formatter(&tick)
            .y_label_formatter(&tick)
            .draw()?;
        for line in lines {
            let style = line.color.stroke_width(line.stroke);
            chart.draw_series(LineSeries::new(line.points.iter().copied(), style))?;
        }
        area.present()?;
    }
    Ok(svg)
}
