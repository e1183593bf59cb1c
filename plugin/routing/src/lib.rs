//! The routing of pd-router: which workers a request goes to, and what each leg is sent.
#![forbid(unsafe_code)]
