//! Owns the axes of plots: their range, and the labelled values.

use std::ops::Range;

use plotters::coord::ranged1d::{AsRangedCoord, DefaultFormatting, KeyPointHint, Ranged};
use plotters::coord::types::RangedCoordf64;

/// Division of an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// Equal steps, from 0.
    Linear,
    /// Equal factors.
    Log,
}

/// An axis: quantity, unit and division.
#[derive(Clone, Copy)]
pub struct Axis {
    /// Quantity and unit.
    pub label: &'static str,
    /// Division.
    pub scale: Scale,
    /// Maximum; `None`: that of the data.
    pub end: Option<f64>,
}

/// Smallest start of a logarithmic axis.
const LEAST: f64 = 0.01;

/// Smallest factor that a logarithmic axis spans.
const FACTOR: f64 = 4.0;

impl Axis {
    /// An axis that ends with the data.
    pub const fn new(label: &'static str, scale: Scale) -> Self {
        Self {
            label,
            scale,
            end: None,
        }
    }

    /// The ruler for these values.
    pub fn ruler(self, values: impl Iterator<Item = f64> + Clone) -> Ruler {
        let most = self
            .end
            .unwrap_or_else(|| values.clone().fold(0.0, f64::max) * 1.05);
        let range = match self.scale {
            // If all values are 0, any height will do.
            Scale::Linear if most <= 0.0 => 0.0..1.0,
            Scale::Linear => 0.0..most,
            Scale::Log => {
                let least = values.fold(most, f64::min).max(LEAST) * 0.9;
                least..most.max(least * FACTOR)
            }
        };
        Ruler {
            range,
            scale: self.scale,
        }
    }
}

/// Mapping of values to positions on an axis.
#[derive(Debug, Clone)]
pub struct Ruler {
    range: Range<f64>,
    scale: Scale,
}

impl AsRangedCoord for Ruler {
    type CoordDescType = Coord;
    type Value = f64;
}

/// A ruler in the form that the plotting library needs.
pub struct Coord {
    ruler: Ruler,
    even: RangedCoordf64,
}

impl From<Ruler> for Coord {
    fn from(ruler: Ruler) -> Self {
        let Range { start, end } = ruler.range;
        let even = match ruler.scale {
            Scale::Linear => (start..end).into(),
            Scale::Log => (start.ln()..end.ln()).into(),
        };
        Self { ruler, even }
    }
}

impl Ranged for Coord {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        match self.ruler.scale {
            Scale::Linear => self.even.map(value, limit),
            // Values below the axis lie on its edge.
            Scale::Log => self
                .even
                .map(&value.max(self.ruler.range.start).ln(), limit),
        }
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        match self.ruler.scale {
            Scale::Linear => self.even.key_points(hint),
            Scale::Log => steps(&self.ruler.range, hint.max_num_points()),
        }
    }

    fn range(&self) -> Range<f64> {
        self.ruler.range.clone()
    }
}

/// 1, 2, 5, 10, and so on; only powers of ten if that would be too many.
fn steps(range: &Range<f64>, most: usize) -> Vec<f64> {
    let decades = (range.start.log10().floor() as i32)..=(range.end.log10().ceil() as i32);
    let within = |digits: &[f64]| -> Vec<f64> {
        let all = decades
            .clone()
            .flat_map(|decade| digits.iter().map(move |digit| digit * 10f64.powi(decade)));
        all.filter(|step| range.contains(step)).collect()
    };
    let fine = within(&[1.0, 2.0, 5.0]);
    if fine.len() <= most {
        fine
    } else {
        within(&[1.0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithmic_steps_are_as_fine_as_there_is_room() {
        let near = |got: Vec<f64>, expected: &[f64]| {
            assert_eq!(got.len(), expected.len(), "{got:?}");
            assert!(
                got.iter()
                    .zip(expected)
                    .all(|(a, b)| (a / b - 1.0).abs() < 1e-9),
                "{got:?}"
            );
        };
        near(steps(&(0.3..6.0), 8), &[0.5, 1.0, 2.0, 5.0]);
        near(steps(&(0.01..90.0), 5), &[0.01, 0.1, 1.0, 10.0]);
    }

    #[test]
    fn a_ruler_spans_its_values() {
        let spans = |scale, values: &[f64], start: f64, end: f64| {
            let range = Axis::new("", scale).ruler(values.iter().copied()).range;
            assert!(
                (range.start - start).abs() < 1e-9 && (range.end - end).abs() < 1e-9,
                "{range:?}"
            );
        };
        spans(Scale::Linear, &[1.0, 2.0], 0.0, 2.1);
        spans(Scale::Linear, &[0.0], 0.0, 1.0);
        spans(Scale::Linear, &[], 0.0, 1.0);
        spans(Scale::Log, &[2.0, 2.1], 1.8, 7.2);
        spans(Scale::Log, &[0.0], 0.009, 0.036);
    }

    #[test]
    fn positions_follow_the_scale() {
        let at = |scale, value: f64| {
            Coord::from(Axis::new("", scale).ruler([1.0, 100.0].into_iter())).map(&value, (0, 1000))
        };
        assert_eq!(at(Scale::Linear, 0.0), 0);
        assert_eq!(at(Scale::Log, 0.0), 0);
        assert!((500..515).contains(&at(Scale::Log, 10.0)));
        assert!((90..100).contains(&at(Scale::Linear, 10.0)));
    }
}
