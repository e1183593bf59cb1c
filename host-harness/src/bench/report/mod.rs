//! Owns the report of a benchmark: the results for machines, and one page of HTML with plots, derived from the results alone.

mod charts;
mod contenders;
mod memory;
mod numbers;
mod page;
mod select;
mod strips;
mod tables;

use std::path::{Path, PathBuf};

use super::results::Results;
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
    #[error("{}: {source}", path.display())]
    Write {
        /// The file or its folder.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
}

/// Writes `report.json` and `report.html` into a folder, which is created if missing.
///
/// # Errors
/// When a plot cannot be drawn, or a file cannot be written. Files written before remain.
pub fn write(results: &Results, folder: &Path) -> Result<(), ReportError> {
    let in_folder = |source| ReportError::Write {
        path: folder.to_owned(),
        source,
    };
    std::fs::create_dir_all(folder).map_err(in_folder)?;
    let json = serde_json::to_string_pretty(results)? + "\n";
    // The figures first: the page can be derived from them after a failure.
    put(folder.join("report.json"), &json)?;
    put(folder.join("report.html"), &page::page(results)?)
}

fn put(path: PathBuf, text: &str) -> Result<(), ReportError> {
    std::fs::write(&path, text).map_err(|source| ReportError::Write { path, source })
}

#[cfg(test)]
mod sample;
#[cfg(test)]
mod tests;
