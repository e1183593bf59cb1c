//! Owns `pd-harness check`: explains a plugin configuration, and warns about an Envoy bootstrap.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use routing::config::{Config, ConfigError};

mod bootstrap;
mod explain;
mod node;
mod output;
pub mod schema;
pub mod shape;
mod summary;
mod traps;

use self::bootstrap::{Bootstrap, BootstrapReadError};
use self::explain::Explanation;
use self::traps::Warning;
use crate::files::{self, FileError};

/// Arguments of `pd-harness check`.
#[derive(clap::Args)]
#[command(
    after_help = "Exit status: 0 where nothing is wrong, 1 where the configuration or a file is, 2 where --strict was given and there are warnings."
)]
pub struct Args {
    /// The plugin's configuration, JSON. With --bootstrap it replaces the one in the bootstrap, and may be left out.
    #[arg(value_name = "FILE", required_unless_present_any = ["bootstrap", "schema"])]
    file: Option<PathBuf>,
    /// Envoy's bootstrap, YAML or JSON: warns of what in it breaks the filter, or weakens it.
    #[arg(long, value_name = "ENVOY.yaml")]
    bootstrap: Option<PathBuf>,
    /// Print one line of JSON.
    #[arg(long)]
    json: bool,
    /// With warnings, and nothing worse, the exit status is 2 instead of 0.
    #[arg(long, requires = "bootstrap")]
    strict: bool,
    /// Print the configuration's JSON Schema, and do nothing else.
    #[arg(long, exclusive = true)]
    schema: bool,
}

/// Why there is nothing to explain.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// A file cannot be read.
    #[error(transparent)]
    Read(#[from] FileError),
    /// The plugin's configuration is wrong.
    #[error("{place}: {source}")]
    Config {
        /// The file, and the path in it if that is a bootstrap.
        place: String,
        /// The path in the configuration, and what would be right.
        source: ConfigError,
    },
    /// The bootstrap cannot be read, or has no filter.
    #[error("{}: {source}", path.display())]
    Bootstrap {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: BootstrapReadError,
    },
}

impl CheckError {
    /// Path in the plugin's configuration, if the error is there.
    fn path(&self) -> Option<&str> {
        match self {
            Self::Config {
                source: ConfigError::Document { path, .. } | ConfigError::Value { path, .. },
                ..
            } => Some(path),
            _ => None,
        }
    }
}

/// All findings.
#[derive(Debug, Default)]
struct Findings {
    explanations: Vec<Explanation>,
    warnings: Vec<Warning>,
}

/// Checks, and prints the findings.
///
/// # Errors
/// When the checked files are wrong. With `--json` that is printed, and no error.
pub fn run(args: &Args) -> Result<ExitCode, CheckError> {
    if args.schema {
        print!("{}", schema::text());
        return Ok(ExitCode::SUCCESS);
    }
    let findings = match find(args.file.as_deref(), args.bootstrap.as_deref()) {
        Err(error) if args.json => {
            print!("{}", output::failure_for_machines(&error));
            return Ok(ExitCode::FAILURE);
        }
        found => found?,
    };
    let text = match args.json {
        true => output::for_machines(&findings),
        false => output::for_people(&findings, args.bootstrap.as_deref()),
    };
    print!("{text}");
    Ok(match args.strict && !findings.warnings.is_empty() {
        true => ExitCode::from(2),
        false => ExitCode::SUCCESS,
    })
}

fn find(file: Option<&Path>, bootstrap: Option<&Path>) -> Result<Findings, CheckError> {
    let own = match file {
        Some(path) => Some(Source::new(path.display().to_string(), files::read(path)?)?),
        None => None,
    };
    let Some(path) = bootstrap else {
        let explanations = own.iter().map(Source::explain).collect();
        return Ok(Findings {
            explanations,
            ..Findings::default()
        });
    };
    let in_bootstrap = |source| CheckError::Bootstrap {
        path: path.to_owned(),
        source,
    };
    let bootstrap = Bootstrap::parse(&files::read(path)?).map_err(in_bootstrap)?;
    let mut findings = Findings::default();
    findings
        .explanations
        .extend(own.as_ref().map(Source::explain));
    for gateway in bootstrap.gateways().map_err(in_bootstrap)? {
        let inside;
        let source = match &own {
            Some(own) => own,
            None => {
                let document = gateway.configuration().map_err(in_bootstrap)?;
                let place = format!("{}: {}", path.display(), gateway.place());
                inside = Source::new(place, document)?;
                findings.explanations.push(inside.explain());
                &inside
            }
        };
        let warnings = traps::warnings(&bootstrap.root(), &gateway, &source.config);
        // A warning shared by two listeners is printed once.
        for warning in warnings {
            if !findings.warnings.contains(&warning) {
                findings.warnings.push(warning);
            }
        }
    }
    Ok(findings)
}

/// A valid configuration and its path.
struct Source {
    place: String,
    document: serde_json::Value,
    config: Config,
}

impl Source {
    fn new(place: String, document: Vec<u8>) -> Result<Self, CheckError> {
        let config = Config::parse(&document).map_err(|source| CheckError::Config {
            place: place.clone(),
            source,
        })?;
        Ok(Self {
            place,
            // A document that has just been parsed as a configuration is valid JSON.
            document: serde_json::from_slice(&document).unwrap_or_default(),
            config,
        })
    }

    fn explain(&self) -> Explanation {
        Explanation::of(&self.place, &self.document, &self.config)
    }
}

#[cfg(test)]
mod tests;
