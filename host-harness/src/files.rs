//! Owns the files that commands read and write; an error names the file.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A file cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}", path.display())]
pub struct FileError {
    path: PathBuf,
    source: io::Error,
}

fn of(path: &Path) -> impl FnOnce(io::Error) -> FileError {
    let path = path.to_owned();
    move |source| FileError { path, source }
}

/// The content of a file.
///
/// # Errors
/// When the file cannot be read.
pub fn read(path: &Path) -> Result<Vec<u8>, FileError> {
    fs::read(path).map_err(of(path))
}

/// Replaces the content of a file, whose folder is created if missing.
///
/// # Errors
/// When the folder cannot be created, or the file cannot be written.
pub fn write(path: &Path, text: &str) -> Result<(), FileError> {
    let folder = path.parent().unwrap_or(Path::new(""));
    fs::create_dir_all(folder).map_err(of(folder))?;
    fs::write(path, text).map_err(of(path))
}
