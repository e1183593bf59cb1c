//! Owns what `/proc` says of processes and their descendants: which there are, and their CPU time and memory.

use std::collections::HashMap;
use std::fs;
use std::time::Duration;

/// Resources used so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// User and system time of the living threads.
    pub cpu: Duration,
    /// Resident set, in bytes.
    pub resident: u64,
}

/// Page size of Linux on the machines in use.
const PAGE: u64 = 4096;

/// Resources of these processes and all their descendants.
pub fn of(roots: &[u32]) -> Usage {
    let mut usage = Usage::default();
    for process in family(roots) {
        usage.cpu += cpu(process);
        usage.resident += resident(process);
    }
    usage
}

/// These processes and all their descendants.
pub fn family(roots: &[u32]) -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for process in processes() {
        if let Some(parent) = parent(process) {
            children.entry(parent).or_default().push(process);
        }
    }
    let mut all = roots.to_vec();
    let mut next = 0;
    while let Some(process) = all.get(next) {
        all.extend(children.remove(process).unwrap_or_default());
        next += 1;
    }
    all
}

fn processes() -> impl Iterator<Item = u32> {
    numbers_in("/proc")
}

fn numbers_in(folder: &str) -> impl Iterator<Item = u32> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The second field behind the name, which ends with the last parenthesis.
fn parent(process: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let (_, behind) = stat.rsplit_once(')')?;
    behind.split_whitespace().nth(1)?.parse().ok()
}

/// The scheduler's own count in nanoseconds; `stat` has only hundredths of a second.
fn cpu(process: u32) -> Duration {
    let tasks = format!("/proc/{process}/task");
    let of_task = |task: u32| -> Option<u64> {
        let counts = fs::read_to_string(format!("{tasks}/{task}/schedstat")).ok()?;
        counts.split_whitespace().next()?.parse().ok()
    };
    let nanoseconds = numbers_in(&tasks).filter_map(of_task).sum();
    Duration::from_nanos(nanoseconds)
}

fn resident(process: u32) -> u64 {
    let pages = || -> Option<u64> {
        let counts = fs::read_to_string(format!("/proc/{process}/statm")).ok()?;
        counts.split_whitespace().nth(1)?.parse().ok()
    };
    pages().unwrap_or_default() * PAGE
}

/// High-water mark of a process's memory, in bytes; `None` if the process does not exist.
pub fn peak(process: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_peak_stays_when_what_was_held_is_given_back() {
        const HELD: usize = 64 << 20;
        let held = vec![1_u8; HELD];
        assert!(held.iter().all(|byte| *byte == 1));
        drop(held);
        let peak_here = peak(std::process::id()).expect("this process");
        assert!(peak_here >= HELD as u64, "{peak_here}");
        assert_eq!(peak(u32::MAX), None);
    }

    #[test]
    fn time_and_memory_of_children_count() {
        let own = of(&[std::process::id()]);
        assert!(own.resident > 1 << 20, "{own:?}");
        let mut child = Command::new("sh")
            .args([
                "-c",
                "i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done; exec sleep 10",
            ])
            .spawn()
            .expect("a shell");
        let process = child.id();
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while of(&[process]).cpu < Duration::from_millis(1) {
            assert!(std::time::Instant::now() < deadline, "it has used nothing");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(of(&[std::process::id()]).cpu > of(&[process]).cpu);
        child.kill().expect("a child");
        child.wait().expect("a child");
        assert_eq!(of(&[process]), Usage::default());
    }
}
