//! Owns `pd-harness bench`: contenders side by side under the same loads, and a report of it.
// Until what measures is joined to what reports.
#![allow(dead_code)]

mod peers;
mod report;
mod results;
mod trace;
