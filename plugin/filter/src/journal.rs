//! Owns the log: every line of it is one line, and not longer than a line may be, whatever a client, a worker or a source wrote.

use std::panic;

use log::{LevelFilter, Log, Metadata, Record};
use proxy_wasm::hostcalls;
use proxy_wasm::types::LogLevel;
use routing::excerpt::{self, excerpt};

use crate::host;

struct Journal;

static JOURNAL: Journal = Journal;

/// Takes the log into its hands. To be called once, when the module starts, and in place of the SDK's own logger, whose
/// `set_log_level` panics from then on.
pub fn open() {
    // Only a second logger is refused, and there is none.
    let _ = log::set_logger(&JOURNAL);
    log::set_max_level(LevelFilter::Info);
    panic::set_hook(Box::new(|panic| write(LogLevel::Critical, panic)));
}

/// Writes what the host wants to be told from now on, and nothing else.
pub fn follow_host() {
    log::set_max_level(match host::log_level() {
        LogLevel::Trace => LevelFilter::Trace,
        LogLevel::Debug => LevelFilter::Debug,
        LogLevel::Info => LevelFilter::Info,
        LogLevel::Warn => LevelFilter::Warn,
        LogLevel::Error => LevelFilter::Error,
        LogLevel::Critical => LevelFilter::Off,
    });
}

fn write(level: LogLevel, what: impl std::fmt::Display) {
    // There is nobody to tell that the log cannot be written.
    let _ = hostcalls::log(level, &excerpt(what, excerpt::LINE));
}

impl Log for Journal {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let level = match record.level() {
            log::Level::Trace => LogLevel::Trace,
            log::Level::Debug => LogLevel::Debug,
            log::Level::Info => LogLevel::Info,
            log::Level::Warn => LogLevel::Warn,
            log::Level::Error => LogLevel::Error,
        };
        write(level, record.args());
    }

    fn flush(&self) {}
}
