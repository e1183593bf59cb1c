//! Owns the log: each entry is one line of limited length, whatever a client, a worker or a source wrote.

use std::panic;

use log::{LevelFilter, Log, Metadata, Record};
use proxy_wasm::hostcalls;
use proxy_wasm::types::LogLevel;
use routing::excerpt::{self, excerpt};

use crate::host;

struct Journal;

static JOURNAL: Journal = Journal;

/// Installs the log. Called once, when the module starts, in place of the SDK's own logger, whose `set_log_level` panics from
/// then on.
pub fn open() {
    // Only a second logger is refused, and there is none.
    let _ = log::set_logger(&JOURNAL);
    log::set_max_level(LevelFilter::Info);
    panic::set_hook(Box::new(|panic| write(LogLevel::Critical, panic)));
}

/// Adopts the host's log level.
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
    // A failure to write the log cannot be reported.
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
