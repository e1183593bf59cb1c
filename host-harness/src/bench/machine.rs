//! Owns the description of a benchmark's machine, date and versions.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use super::peers::Peer;
use super::results::Machine;
use super::running_contender::ContenderFiles;

/// This machine, from `/proc`.
pub fn this() -> Machine {
    let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let unknown = || "unknown".to_owned();
    let kernel = text("/proc/sys/kernel/osrelease");
    Machine {
        cpu: field(&text("/proc/cpuinfo"), "model name").unwrap_or_else(unknown),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        memory_mb: field(&text("/proc/meminfo"), "MemTotal")
            .and_then(|total| total.split(' ').next()?.parse().ok())
            .map_or(0, |kb: u64| kb / 1024),
        kernel: match kernel.trim() {
            "" => unknown(),
            release => release.to_owned(),
        },
    }
}

/// The value of the first line with this name.
fn field(text: &str, name: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_owned())
    })
}

/// The current time in UTC, in RFC 3339 format.
pub fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    written(since.unwrap_or_default().as_secs())
}

/// A time in seconds since 1970, in RFC 3339 format. Years begin in March, so that the leap day is the last of its year; eras
/// have 400 years, after which the calendar repeats.
fn written(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Days since 0000-03-01.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let year = era * 400 + year + month / 10;
    let month = (month + 2) % 12 + 1;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Names and versions of all available programs.
pub fn versions(parts: &ContenderFiles) -> BTreeMap<String, String> {
    let own = || env!("CARGO_PKG_VERSION").to_owned();
    let mut versions = BTreeMap::from([
        ("pd-router".to_owned(), own()),
        ("wasmtime host".to_owned(), own()),
    ]);
    if let Some(version) = envoys(parts.files.envoy()) {
        versions.insert("Envoy".to_owned(), version);
    }
    for peer in Peer::ALL {
        if let Some(version) = peer.version(&parts.peers) {
            versions.insert(peer.package().to_owned(), version);
        }
    }
    versions
}

fn envoys(binary: &Path) -> Option<String> {
    let output = Command::new(binary).arg("--version").output().ok()?;
    version_in(&String::from_utf8_lossy(&output.stdout))
}

/// `… version: COMMIT/1.40.0/Clean/RELEASE/BoringSSL`.
fn version_in(output: &str) -> Option<String> {
    let (_, version) = output.split_once("version: ")?;
    version.split('/').nth(1).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, date) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_709_210_096, "2024-02-29T12:34:56Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(written(seconds), date);
        }
    }

    #[test]
    fn what_is_known_of_this_machine() {
        let machine = this();
        assert!(machine.cores > 0 && machine.memory_mb > 0, "{machine:?}");
        let info = "processor : 0\nmodel name\t: A CPU @ 2 GHz\nmodel name : B\n";
        assert_eq!(field(info, "model name").as_deref(), Some("A CPU @ 2 GHz"));
        assert_eq!(field(info, "model"), None);
    }

    #[test]
    fn envoy_names_its_version_behind_a_commit() {
        let output = "\n/x/envoy  version: ba0cf7f/1.40.1/Clean/RELEASE/BoringSSL\n\n";
        assert_eq!(version_in(output).as_deref(), Some("1.40.1"));
        assert_eq!(version_in("no"), None);
    }
}
