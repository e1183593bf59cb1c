//! Owns the bar plots by worker, as SVG.

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::plot::{DrawError, FONT, GRID, INK, tick};

const SMALL: (u32, u32) = (460, 150);

/// One bar per worker, from 0, in a small plot that ends at `most`, with a line at their mean.
///
/// # Errors
/// When the plot cannot be drawn.
pub fn bars(values: &[f64], most: f64, color: RGBColor) -> Result<String, DrawError> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SMALL).into_drawing_area();
        draw_bars(&area, values, most, color)?;
        area.present()?;
    }
    Ok(svg)
}

fn draw_bars(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    values: &[f64],
    most: f64,
    color: RGBColor,
) -> Result<(), DrawError> {
    let count = values.len() as f64;
    let mut chart = ChartBuilder::on(area)
        .margin(4)
        .margin_right(8)
        .x_label_area_size(22)
        .y_label_area_size(38)
        .build_cartesian_2d(-0.5..count - 0.5, 0.0..most)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(INK)
        .label_style((FONT, 12).into_font().color(&INK))
        .x_labels(values.len().min(10))
        .y_labels(5)
        .x_label_formatter(&tick)
        .y_label_formatter(&tick)
        .draw()?;
    let bars = values.iter().enumerate().map(|(at, value)| {
        let at = at as f64;
        Rectangle::new([(at - 0.38, 0.0), (at + 0.38, *value)], color.filled())
    });
    chart.draw_series(bars)?;
    let mean = values.iter().sum::<f64>() / count;
    chart.draw_series(LineSeries::new(
        [(-0.5, mean), (count - 0.5, mean)],
        INK.stroke_width(1),
    ))?;
    Ok(())
}
