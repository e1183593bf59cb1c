//! Owns the checks that a well-formed configuration must pass.

use std::fmt;

use hashbrown::HashSet;

use crate::fleet::Role;
use crate::handoff::binding::{Binder, Learned};
use crate::handoff::{LegOrder, Protocol, ProtocolRules};
use crate::headers;

use super::{
    BootstrapSource, ConditionalPolicy, Config, ConfigError, OnPrefillAbsent, OnPrefillFailure,
    OnStalePin, Pool, picker,
};

/// Maximum number of pools: each pool has a router, and with it memory, on every thread.
pub(super) const MAX_POOLS: usize = 64;

impl Config {
    /// Checks the values of a well-formed configuration.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if !(1..=MAX_POOLS).contains(&self.pools.len()) {
            return Err(value("pools", "must list from 1 to 64 pools"));
        }
        require(
            self.limits.body_bytes != 0,
            "limits.body_bytes",
            "must be at least 1: with 0 every body would be too long",
        )?;
        require(
            (1..=3_600_000).contains(&self.limits.body_timeout_ms),
            "limits.body_timeout_ms",
            "must be from 1 to 3600000: an hour at most",
        )?;
        require(
            self.limits.bodies_in_flight_bytes != 0,
            "limits.bodies_in_flight_bytes",
            "must be at least 1: with 0 every request would be refused",
        )?;
        self.sharing.check("sharing")?;
        let mut names = HashSet::new();
        for (index, pool) in self.pools.iter().enumerate() {
            let at = format!("pools[{index}]");
            pool.check(&at)?;
            require(
                names.insert(&pool.name),
                format_args!("{at}.name"),
                "another pool has this name already: a route could not say which is meant",
            )?;
        }
        Ok(())
    }
}

impl Pool {
    fn check(&self, at: &str) -> Result<(), ConfigError> {
        if self.name.is_empty() {
            return Err(value(&format!("{at}.name"), "must not be empty"));
        }
        for (field, number) in [
            ("block_tokens", self.block_tokens),
            ("prefill.attempts", self.prefill.attempts),
            ("prefill.timeout_ms", self.prefill.timeout_ms),
            ("prefill.base_timeout_ms", self.prefill.base_timeout_ms),
            ("decode.attempts", self.decode.attempts),
        ] {
            if number == 0 {
                return Err(value(&format!("{at}.{field}"), "must be at least 1"));
            }
        }
        require(
            self.prefill.hedge_after_ms != Some(0),
            format_args!("{at}.prefill.hedge_after_ms"),
            "must be at least 1; leave it out for no second call",
        )?;
        require(
            self.bootstrap != BootstrapSource::Port(0),
            format_args!("{at}.bootstrap.port"),
            super::listed::NO_PORT,
        )?;
        require(
            (1..=120_000).contains(&self.cleanup.timeout_ms),
            format_args!("{at}.cleanup.timeout_ms"),
            "must be from 1 to 120000",
        )?;
        self.check_call_headers(at)?;
        super::listed::check_length(self.max_model_len, at)?;
        self.health.check(&format!("{at}.health"))?;
        self.check_selection(at)?;
        self.check_admission(at)?;
        self.check_conditional(at)?;
        let learned = self.engine().binder().map(Binder::learned);
        require(
            self.bootstrap != BootstrapSource::Ask || learned == Some(Learned::Port),
            format_args!("{at}.bootstrap"),
            "only SGLang's workers can be asked for the port of their bootstrap server: name it, as {\"port\": 8998}",
        )?;
        self.check_frontends(at)?;
        picker::check(self, at)?;
        self.check_paths(at)?;
        self.responses.check(self.rules(), at)?;
        self.check_policies(at)?;
        self.destinations
            .check(self.protocol, &format!("{at}.destinations"))?;
        if let Some(metrics) = &self.engine_metrics {
            metrics.check(self.protocol, &format!("{at}.engine_metrics"))?;
        }
        self.discovery.check(self, &format!("{at}.discovery"))
    }

    fn check_call_headers(&self, at: &str) -> Result<(), ConfigError> {
        for (index, name) in self.call_headers.iter().enumerate() {
            if let Some(problem) = headers::stays_behind(name) {
                return Err(value(&format!("{at}.call_headers[{index}]"), problem));
            }
        }
        Ok(())
    }

    fn check_selection(&self, at: &str) -> Result<(), ConfigError> {
        let kv = &self.selection.kv;
        for (name, number) in [
            ("overlap_score_credit", kv.overlap_score_credit),
            ("overlap_score_credit_decay", kv.overlap_score_credit_decay),
            ("prefill_load_scale", kv.prefill_load_scale),
            (
                "decode_active_request_weight",
                kv.decode_active_request_weight,
            ),
            ("router_temperature", kv.router_temperature),
        ] {
            not_negative(Some(number), &format!("{at}.selection.kv.{name}"))?;
        }
        require(
            !self.selection.session.headers.is_empty(),
            format_args!("{at}.selection.session.headers"),
            "must name at least one header, as [\"x-session-id\"]",
        )?;
        require(
            self.prefixes.max_blocks <= MAX_REMEMBERED,
            format_args!("{at}.prefixes.max_blocks"),
            "must be at most 16777216, half of what a VM may hold",
        )?;
        require(
            self.booking_expiry_ms != 0,
            format_args!("{at}.booking_expiry_ms"),
            "must be at least 1",
        )
    }

    fn check_admission(&self, at: &str) -> Result<(), ConfigError> {
        let admission = &self.admission;
        not_negative(
            admission.prefill.fraction,
            &format!("{at}.admission.prefill.fraction"),
        )?;
        is_share(
            admission.decode.fraction,
            &format!("{at}.admission.decode.fraction"),
        )?;
        let has_threshold = admission.has_threshold(Role::Aggregated);
        match &admission.queue {
            Some(_) if !has_threshold => Err(value(
                &format!("{at}.admission.queue"),
                "without a threshold in admission.prefill or admission.decode nobody is ever too busy, and nothing waits",
            )),
            Some(queue) if queue.max_requests == 0 => Err(value(
                &format!("{at}.admission.queue.max_requests"),
                "must be at least 1; leave the queue out to refuse at once",
            )),
            Some(queue) if queue.deadline_ms == 0 => Err(value(
                &format!("{at}.admission.queue.deadline_ms"),
                "must be at least 1",
            )),
            _ => Ok(()),
        }
    }

    fn check_conditional(&self, at: &str) -> Result<(), ConfigError> {
        let Some(conditional) = &self.conditional else {
            return Ok(());
        };
        let at = format!("{at}.conditional");
        require(
            self.decode.runs_whole_requests,
            &at,
            "needs decode.runs_whole_requests: a decode-only worker cannot read a prompt",
        )?;
        require(
            !self.enforce_disagg,
            &at,
            "contradicts enforce_disagg; leave one of them out",
        )?;
        is_share(
            Some(conditional.uncached_share),
            &format!("{at}.uncached_share"),
        )?;
        is_share(
            conditional.decode_busy_fraction,
            &format!("{at}.decode_busy_fraction"),
        )?;
        not_negative(
            conditional.prefill_busy_fraction,
            &format!("{at}.prefill_busy_fraction"),
        )?;
        let has_load = conditional.prefill_busy_tokens.is_some()
            || conditional.prefill_busy_fraction.is_some();
        match conditional.policy {
            ConditionalPolicy::IslBounding => Ok(()),
            _ if has_load => Ok(()),
            _ => Err(value(
                &at,
                "policies by prefill load need prefill_busy_tokens or prefill_busy_fraction",
            )),
        }
    }

    fn check_policies(&self, at: &str) -> Result<(), ConfigError> {
        let path = format!("{at}.on_prefill_failure");
        let decode_only = self
            .on_prefill_failure
            .contains(&OnPrefillFailure::DecodeOnly);
        match decode_only {
            true if self.rules().order != LegOrder::Sequential => Err(value(
                &path,
                "decode_only works only with a protocol whose decode waits for prefill, such as nixl: elsewhere decode runs already, or out of the filter's sight, when prefill fails",
            )),
            true if self.enforce_disagg => Err(value(
                &path,
                "decode_only contradicts enforce_disagg; leave one of them out",
            )),
            true if !self.decode.runs_whole_requests => Err(value(
                &path,
                "decode_only needs decode.runs_whole_requests: a decode-only worker cannot run a request without its hand-off",
            )),
            _ => Ok(()),
        }
    }

    /// Protocol of the pool's engines.
    pub fn engine(&self) -> &'static dyn Protocol {
        self.protocol.engine()
    }

    /// Rules of the pool's protocol.
    pub fn rules(&self) -> &'static ProtocolRules {
        self.protocol.rules()
    }

    /// Handling of requests while there is no prefill worker, with the shorthand `enforce_disagg` applied.
    pub fn prefill_absent(&self) -> OnPrefillAbsent {
        match self.enforce_disagg {
            true => OnPrefillAbsent::Fail,
            false => self.on_prefill_absent,
        }
    }

    /// Handling of requests that name an absent worker, with the default applied.
    pub fn stale_pin(&self) -> OnStalePin {
        let default = match self.prefill_absent() {
            OnPrefillAbsent::Aggregate => OnStalePin::Ignore,
            OnPrefillAbsent::Fail => OnStalePin::Reject,
        };
        self.on_stale_pin.unwrap_or(default)
    }

    fn check_frontends(&self, at: &str) -> Result<(), ConfigError> {
        let path = format!("{at}.frontends");
        match (self.rules().reaches_workers, self.frontends.is_empty()) {
            (false, true) => Err(value(
                &path,
                "direct mode needs the Dynamo frontends' addresses, as [\"10.0.0.1:8000\"]",
            )),
            (true, false) => Err(value(
                &path,
                "only direct mode has frontends; with other protocols a request goes to the decode worker itself",
            )),
            _ => Ok(()),
        }
    }
}

/// Maximum number of remembered blocks, at 32 bytes each: half of the 1 GiB that a VM may hold.
pub(super) const MAX_REMEMBERED: usize = 16 * 1024 * 1024;

fn not_negative(number: Option<f64>, path: &str) -> Result<(), ConfigError> {
    match number.is_none_or(|number| number.is_finite() && number >= 0.0) {
        true => Ok(()),
        false => Err(value(path, "must be 0 or more")),
    }
}

fn is_share(number: Option<f64>, path: &str) -> Result<(), ConfigError> {
    match number.is_none_or(|number| (0.0..=1.0).contains(&number)) {
        true => Ok(()),
        false => Err(value(path, "must be from 0 to 1")),
    }
}

/// Checks that a value is right; `path`: its path in the document.
pub(super) fn require(
    is_right: bool,
    path: impl fmt::Display,
    problem: &'static str,
) -> Result<(), ConfigError> {
    match is_right {
        true => Ok(()),
        false => Err(value(&path.to_string(), problem)),
    }
}

pub(super) fn value(path: &str, problem: &'static str) -> ConfigError {
    ConfigError::Value {
        path: path.to_owned(),
        problem,
    }
}
