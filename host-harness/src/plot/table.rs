//! Owns the tables of a page.

use std::fmt::Write;

use super::escaped;

/// A cell.
#[derive(Default)]
pub struct Cell {
    /// The figure.
    pub text: String,
    /// Minimum and maximum of the rounds, if shown.
    pub range: Option<(String, String)>,
    /// Whether no other row has a better figure.
    pub best: bool,
}

impl Cell {
    /// A cell with this text.
    pub fn of(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            ..Self::default()
        }
    }
}

/// A table with these columns, each of a name and a unit.
pub fn table<'a>(
    head: impl IntoIterator<Item = (&'a str, &'a str)>,
    rows: impl IntoIterator<Item = impl AsRef<[Cell]>>,
) -> String {
    let mut text = "<div class=\"scroll\"><table>\n<thead><tr>".to_owned();
    for (heading, unit) in head {
        let (heading, unit) = (escaped(heading), escaped(unit));
        let _ = write!(text, "<th>{heading}<br><small>{unit}</small></th>");
    }
    text += "</tr></thead>\n<tbody>\n";
    for row in rows {
        text += "<tr>";
        for cell in row.as_ref() {
            let best = if cell.best { " class=\"best\"" } else { "" };
            let _ = write!(text, "<td{best}>{}", escaped(&cell.text));
            if let Some((min, max)) = &cell.range {
                let _ = write!(text, "<br><small>{}–{}</small>", escaped(min), escaped(max));
            }
            text += "</td>";
        }
        text += "</tr>\n";
    }
    text + "</tbody></table></div>\n"
}
