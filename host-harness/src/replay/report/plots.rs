//! Owns the plots: lines over time, and bars by worker, as SVG.

use plotters::coord::Shift;
use plotters::prelude::*;

use super::axis::Axis;
use super::series::Points;

/// Why a plot cannot be drawn.
#[derive(Debug, thiserror::Error)]
#[error("a plot: {0}")]
pub struct DrawError(String);

impl<E: std::error::Error + Send + Sync> From<DrawingAreaErrorKind<E>> for DrawError {
    fn from(error: DrawingAreaErrorKind<E>) -> Self {
        Self(error.to_string())
    }
}

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
const SMALL: (u32, u32) = (460, 150);
const INK: RGBColor = RGBColor(31, 41, 55);
const GRID: RGBColor = RGBColor(226, 230, 236);
const FONT: &str = "system-ui, sans-serif";

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

/// A number as short as it is exact.
fn tick(value: &f64) -> String {
    let rounded = (value * 1000.0).round() / 1000.0;
    format!("{rounded}")
}

/// Bars, one for each worker from 0, in a small plot that ends at `most`, with a line at their mean.
///
/// # Errors
/// When it cannot be drawn.
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
