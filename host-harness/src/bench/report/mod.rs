//! Owns the report of a benchmark: the results for machines, and one page of HTML with plots, derived from the results alone.

mod charts;
mod contenders;
mod memory;
mod numbers;
mod page;
mod select;
mod strips;
mod tables;

use std::path::Path;

use super::results::Results;
use crate::files::{self, FileError};
use crate::plot::DrawError;

/// Why a report cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// A plot of the page cannot be drawn.
    #[error(transparent)]
    Draw(#[from] DrawError),
    /// The results cannot be written as JSON.
    #[error("results as JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// A file cannot be written.
    #[error(transparent)]
    Write(#[from] FileError),
}

/// Writes `report.json` and `report.html` into a folder, which is created if missing.
///
/// # Errors
/// When a plot cannot be drawn, or a file cannot be written. Files written before remain.
pub fn write(results: &Results, folder: &Path) -> Result<(), ReportError> {
    let json = serde_json::to_string_pretty(results)? + "\n";
    // The figures first: the page can be derived from them after a failure.
    files::write(&folder.join("report.json"), &json)?;
    Ok(files::write(
        &folder.join("report.html"),
        &page::page(results)?,
    )?)
}

#[cfg(test)]
mod sample;
#[cfg(test)]
mod tests;
