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

/// How large a plot is drawn; a page scales it to the room there is, its letters too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Canvas {
    /// For lines of many points.
    Wide,
    /// For lines of a few points, each marked with a dot: it can be read on a telephone.
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

    /// The room for the words of each axis, in pixels: below and at the left.
    const fn margins(self) -> (u32, u32) {
        match self {
            Self::Wide => (46, 64),
            Self::Dotted => (54, 76),
        }
    }

    /// The most numbers beside each axis.
    const fn labels(self) -> (usize, usize) {
        match self {
            Self::Wide => (13, 10),
            Self::Dotted => (9, 8),
        }
    }

    /// The height of numbers and of words, as the drawing library counts it (1.24 pixels of a letter's size).
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
/// When it cannot be drawn.
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
