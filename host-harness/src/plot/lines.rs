//! Owns line plots, as SVG.

use plotters::prelude::*;

use super::{Axis, DrawError, FONT, GRID, INK, tick};

/// Points of a line.
pub type Points = Vec<(f64, f64)>;

/// A line and its style.
pub struct Line {
    /// Its colour, by which the page's style selects it.
    pub color: RGBColor,
    /// Width in pixels.
    pub stroke: u32,
    /// Its points.
    pub points: Points,
}

/// Size of a plot; a page scales the plot, letters included, to the room available.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Canvas {
    /// For lines of many points.
    Wide,
    /// For lines of a few points, each marked with a dot: readable on a phone.
    Dotted,
}

impl Canvas {
    /// Width and height in pixels.
    const fn size(self) -> (u32, u32) {
        match self {
            Self::Wide => (760, 340),
            Self::Dotted => (520, 330),
        }
    }

    /// Space for the text of each axis, in pixels: below and on the left.
    const fn margins(self) -> (u32, u32) {
        match self {
            Self::Wide => (46, 64),
            Self::Dotted => (54, 76),
        }
    }

    /// Maximum number of labels on each axis.
    const fn labels(self) -> (usize, usize) {
        match self {
            Self::Wide => (13, 10),
            Self::Dotted => (9, 8),
        }
    }

    /// Height of numbers and of text, in the drawing library's measure (1.24 pixels of a letter's size).
    const fn letters(self) -> (i32, i32) {
        match self {
            Self::Wide => (14, 15),
            Self::Dotted => (19, 19),
        }
    }
}

/// Lines in one plot.
///
/// # Errors
/// When the plot cannot be drawn.
pub fn lines(canvas: Canvas, x: Axis, y: Axis, lines: &[Line]) -> Result<String, DrawError> {
    let points = || lines.iter().flat_map(|line| &line.points);
    let (across, up) = (
        x.ruler(points().map(|point| point.0)),
        y.ruler(points().map(|point| point.1)),
    );
    let ((numbers, words), (x_labels, y_labels)) = (canvas.letters(), canvas.labels());
    let (below, left) = canvas.margins();
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, canvas.size()).into_drawing_area();
        let mut chart = ChartBuilder::on(&area)
            .margin(6)
            .margin_right(18)
            .x_label_area_size(below)
            .y_label_area_size(left)
            .build_cartesian_2d(across, up)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(INK)
            .label_style((FONT, numbers).into_font().color(&INK))
            .axis_desc_style((FONT, words).into_font().color(&INK))
            .x_desc(x.label)
            .y_desc(y.label)
            .x_labels(x_labels)
            .y_labels(y_labels)
            .x_label_formatter(&tick)
            .y_label_formatter(&tick)
            .draw()?;
        for line in lines {
            let style = line.color.stroke_width(line.stroke);
            chart.draw_series(LineSeries::new(line.points.iter().copied(), style))?;
            if canvas == Canvas::Dotted {
                let dots = line.points.iter();
                chart.draw_series(dots.map(|at| Circle::new(*at, 4, line.color.filled())))?;
            }
        }
        area.present()?;
    }
    Ok(svg)
}
