//! Owns the legend of a page: a box for each name, which hides that name's lines and dots.

use std::fmt::Write;

use plotters::style::RGBColor;

use super::{escaped, hex};

/// Names, each with the colour of its lines; no two colours are the same, since lines are hidden by their colour.
pub struct Legend(Vec<(String, RGBColor)>);

impl Legend {
    /// A legend of these names.
    pub fn new(names: impl IntoIterator<Item = (String, RGBColor)>) -> Self {
        Self(names.into_iter().collect())
    }

    /// Id of a name's box, by position: the name may hold any characters.
    fn id(at: usize) -> String {
        format!("show-{at}")
    }

    /// CSS rules by which a box hides what is inside of elements of the class `lines`.
    pub fn rules(&self) -> String {
        let rules = self.0.iter().enumerate().map(|(at, (_, color))| {
            let (id, hex) = (Self::id(at), hex(*color));
            format!(
                "body:has(#{id}:not(:checked)) .lines :is([stroke=\"{hex}\"], [fill=\"{hex}\"]) {{ display: none; }}\n"
            )
        });
        rules.collect()
    }

    /// The boxes.
    pub fn html(&self) -> String {
        let mut legend = "<div class=\"legend\">\n".to_owned();
        for (at, (name, color)) in self.0.iter().enumerate() {
            let (id, hex, name) = (Self::id(at), hex(*color), escaped(name));
            let _ = writeln!(
                legend,
                "<label><input type=\"checkbox\" id=\"{id}\" checked><i style=\"background:{hex}\"></i>{name}</label>"
            );
        }
        legend + "</div>\n"
    }
}
